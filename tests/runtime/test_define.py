"""`define`: an operator whose numbers are a NamedTuple, and Functions that follow from the names of two operators."""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_hw.kernels.pointwise.elementwise import activation_operators, activation_tunables
from liger_hw.runtime.operator import OperatorFunction


class Inner(NamedTuple):
    scale: float
    twice: bool = False


class Call(NamedTuple):
    name: str
    inner: Inner
    powers: tuple[float, ...] = ()
    last: int = 0


@pytest.mark.cpu
def test_numbers_are_one_tuple_for_whoever_writes_or_calls_an_operator(define):
    seen = []

    def reference(x, y, call):
        seen.append(call)
        return x * call.inner.scale + call.last

    schema = "numbers_of_a_test(Tensor x, Tensor? y) -> Tensor"
    operator = define(schema, shapes="x; y", launcher=reference, reference=reference, numbers=Call)
    arguments = "Tensor x, Tensor? y, str name, float scale, bool twice, float[] powers, int last"
    assert str(operator.overload._schema) == f"liger_hw::numbers_of_a_test({arguments}) -> Tensor"
    x = torch.arange(3.0)
    found = operator(x, None, Call("a", Inner(2, twice=1), (0.5, 1.5), 7))
    torch.testing.assert_close(found, 2 * x + 7)
    (call,) = seen
    assert call == ("a", (2.0, True), [0.5, 1.5], 7) and type(call.inner) is Inner and type(call.inner.scale) is float
    assert torch.compile(operator, backend="aot_eager", fullgraph=True)(x, None, seen[0]).shape == x.shape


@pytest.fixture
def operator(define):
    def make(schema, reference, derivative_of=None):
        shapes = "; ".join(re.findall(r"Tensor (\w+)[,)]", schema.partition("->")[0]))
        run = {"reference": reference} if derivative_of is None else {"derivative_of": derivative_of}
        return define(schema, shapes=shapes, launcher=reference, **run)

    return make


@pytest.mark.cpu
def test_a_gate_needs_no_arguments_beside_its_tensors(define):
    tunables = activation_tunables("plain_gate")
    operators = activation_operators(
        tunables, ("a", "b"), "", lambda: ("silu", 1.0, 1.0), lambda a, b: torch.nn.functional.silu(a) * b
    )
    fwd, bwd, _ = operators
    a, b = torch.randn(3, 4).requires_grad_(), torch.randn(3, 4).requires_grad_()
    c = torch.nn.functional.silu(a) * b
    torch.testing.assert_close(fwd(a.detach(), b.detach()), c.detach())
    torch.testing.assert_close(bwd(c.detach(), a.detach(), b.detach()), torch.autograd.grad(c, (a, b), c.detach()))


BACKWARDS = {
    "right": ("Tensor dy, Tensor x, float scale", "Tensor dx", ""),
    "gradient": ("Tensor dy, Tensor x, float scale", "Tensor dX", "X"),
    "saved": ("Tensor dy, Tensor x, Tensor x2, float scale", "Tensor dx", "x2"),
    "number": ("Tensor dy, Tensor x, float sclae", "Tensor dx", "sclae"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("case", BACKWARDS)
def test_a_name_that_forward_does_not_have_is_an_error_where_the_function_is_defined(case, operator):
    arguments, result, wrong = BACKWARDS[case]
    forward = operator(f"named_{case}_fwd(Tensor x, float scale) -> Tensor y", lambda x, scale: x * scale)
    backward = operator(f"named_{case}_bwd({arguments}) -> {result}", lambda dy, *others: dy * others[-1])
    namespace = {"fwd": forward, "bwd": backward}
    if wrong:
        with pytest.raises(TypeError, match=f"backward names {wrong}, which"):
            type("NamedFunction", (OperatorFunction,), namespace)
        return
    x = torch.ones(3, requires_grad=True)
    type("NamedFunction", (OperatorFunction,), namespace).apply(x, 2.0).sum().backward()
    assert x.grad.tolist() == [2.0] * 3


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu
def test_a_derivative_sees_what_its_forward_writes_into_views(operator):
    """Under a torch mode, too, which calls an operator below the bookkeeping of views."""

    def halves_swapped(x):
        y = torch.empty_like(x)
        y[..., :2], y[..., 2:] = 3 * x[..., 2:], 5 * x[..., :2]
        return y

    forward = operator("into_views_fwd(Tensor x) -> Tensor y", halves_swapped)
    backward = operator("into_views_bwd(Tensor dy, Tensor x) -> Tensor dx", lambda dy, x: dy, derivative_of=forward)
    x = torch.arange(4.0)
    for mode in (contextlib.nullcontext(), _Passing()):
        with mode:
            assert backward.overload(torch.ones(4), x).tolist() == [5.0, 5.0, 3.0, 3.0]


@pytest.mark.cpu
def test_a_derivative_is_zero_where_its_forward_reads_nothing(operator):
    forward = operator("first_alone_fwd(Tensor x, Tensor z) -> Tensor y", lambda x, z: 2 * x)
    schema = "first_alone_bwd(Tensor dy, Tensor x, Tensor z) -> (Tensor dx, Tensor dz)"
    backward = operator(schema, None, derivative_of=forward)
    dx, dz = backward.overload(torch.ones(3), torch.ones(3), torch.ones(3))
    assert dx.tolist() == [2.0] * 3 and dz.tolist() == [0.0] * 3
