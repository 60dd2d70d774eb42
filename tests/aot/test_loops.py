"""Values that rotate through a kernel's loop are carried through it by Triton.

Triton carries a name whose value differs at the end of the loop's body, which it visits once with the values before the
loop. With `d1 = d2 = zeros` before it and `d2, d1 = d1, x` inside, d2 is taken for a constant. The interpreter is
right, so only a GPU or this test shows the fault.
"""

from __future__ import annotations

import ast
from collections import Counter

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.compiler import code_generator  # noqa: E402

from liger_hw.autotune import compile as aot  # noqa: E402
from liger_hw.backends import known_target  # noqa: E402

pytestmark = pytest.mark.aot


@pytest.fixture
def lost(monkeypatch):
    """`kernel: name` of each name that a loop sets and does not carry, and that equalled another such name before."""
    generator, names_lost = code_generator.CodeGenerator, Counter()
    if not hasattr(generator, "_find_carries"):
        pytest.skip("this Triton has no such function to watch")
    find_carries = generator._find_carries

    def watched(self, node, liveins, *args, **kwargs):
        names, *rest = find_carries(self, node, liveins, *args, **kwargs)
        stores = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        before = {
            name: code_generator.flatten_values_to_ir([value])
            for name, value in liveins.items()
            if name in stores and code_generator._is_triton_value(value)
        }
        for name, handles in before.items():
            twins = [other for other, theirs in before.items() if other != name and theirs == handles]
            if name not in names and handles and twins:
                names_lost[f"{self.jit_fn.__name__}: {name}"] += 1
        return names, *rest

    monkeypatch.setattr(generator, "_find_carries", watched)
    return names_lost


def test_no_kernel_loses_a_value(op, lost):
    for _, launch in aot.trace_cases(op, known_target("sm90"), "deep", shipped=False):
        aot.lower(launch.kernel, launch.args, dict(launch.options), capability=90)
    assert not lost, f"give these values of a loop different values before it: {lost}"


@triton.jit
def _for_kernel(X_ptr, n):
    a = tl.zeros([4], tl.float32)
    b = a
    for i in range(n):
        tl.store(X_ptr + i * 4 + tl.arange(0, 4), b)
        c = a
        b = c.to(tl.float32)
        a += 1.0


@triton.jit
def _while_kernel(X_ptr, n):
    a = tl.zeros([4], tl.float32)
    b, i = a, 0
    while i < n:
        tl.store(X_ptr + i * 4 + tl.arange(0, 4), b)
        a, b = b, a
        i += 1


@triton.jit
def _apart_kernel(X_ptr, n):
    a, b = tl.zeros([4], tl.float32), tl.full([4], 1.0, tl.float32)
    for i in range(n):
        tl.store(X_ptr + i * 4 + tl.arange(0, 4), b)
        a, b = b, a


@pytest.mark.parametrize(("kernel", "names"), [(_for_kernel, "b"), (_while_kernel, "ab"), (_apart_kernel, "")])
def test_the_watch_sees_it(kernel, names, lost):
    aot.lower(f"{__name__}:{kernel.__name__}", (("ptr", "float32", True, True), 16), {"num_warps": 1})
    assert {line[-1] for line in lost} == {*names}
