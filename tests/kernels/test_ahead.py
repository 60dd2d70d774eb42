"""Kernels that are launched early wait for what ran before them."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
import torch

from liger_hw import registry
from liger_hw.backends import known_target
from liger_hw.kernels._ahead import begin

AHEAD = [tunable for op in registry.ops().values() for tunable in op.tunables if tunable.ahead]


def _statements(kernel) -> list[ast.stmt]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body[0].body
    return body[1:] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body


def _called(statement: ast.stmt) -> str:
    call = statement.value
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""


@pytest.mark.parametrize("tunable", AHEAD, ids=lambda tunable: tunable.name)
def test_begins_before_it_touches_memory(tunable):
    """Each kernel's first statement is `begin()`, or a helper's call whose own first statement is."""
    jits = {kernel.fn.__name__: kernel for kernel in tunable.kernels}
    assert jits["begin"] is begin
    kernels = [kernel for name, kernel in jits.items() if name.endswith("_kernel")]
    assert kernels
    for kernel in kernels:
        first = _called(_statements(kernel)[0])
        assert first == "begin" or _called(_statements(jits[first])[0]) == "begin", kernel.fn.__name__


@pytest.mark.parametrize("arch, early", [("sm90", True), ("sm80", False), ("gfx942", False), ("pvc", False)])
def test_launched_early_where_the_device_can(arch, early):
    tunable = registry.get_op("swiglu").tunables[0]
    with registry.pretend(known_target(arch)):
        plan = tunable.plan(torch.device("cpu"), tunable.key(16, 4096, 2))
        assert plan.options.get("launch_pdl", False) is early


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [4096, 1 << 26])
def test_reads_what_was_just_written(device, elements):
    """A chain of launches, each of which reads what the last one wrote, with and without a wait of the host between them."""
    relu_squared = registry.get_op("relu_squared").function
    x = torch.rand(elements // 4096, 4096, device=device) * 0.5 + 0.5

    def chain(wait):
        y, found = x, []
        for _ in range(20):
            y = relu_squared(relu_squared(y)) ** 0.25 * 0.9 + 0.05  # towards 0.5
            if wait:
                torch.get_device_module(x.device).synchronize()
            found.append(y)
        return torch.stack([y.double().sum() for y in found])

    apart = chain(True)
    for _ in range(5):
        assert torch.equal(chain(False), apart)
