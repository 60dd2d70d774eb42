"""`define`: an operator whose numbers are a NamedTuple."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from liger_hw.runtime.operator import declared, define, launchers


class Inner(NamedTuple):
    scale: float
    twice: bool = False


class Call(NamedTuple):
    name: str
    inner: Inner
    powers: tuple[float, ...] = ()
    last: int = 0


@pytest.mark.cpu
def test_numbers_are_one_tuple_for_whoever_writes_or_calls_an_operator():
    seen = []

    def reference(x, y, call):
        seen.append(call)
        return x * call.inner.scale + call.last

    schema = "numbers_of_a_test(Tensor x, Tensor? y) -> Tensor"
    operator = define(schema, shapes="x; y", launcher=reference, reference=reference, numbers=Call)
    launchers.pop("numbers_of_a_test")
    declared.pop("numbers_of_a_test")
    arguments = "Tensor x, Tensor? y, str name, float scale, bool twice, float[] powers, int last"
    assert str(operator.overload._schema) == f"liger_hw::numbers_of_a_test({arguments}) -> Tensor"
    x = torch.arange(3.0)
    found = operator(x, None, Call("a", Inner(2, twice=1), (0.5, 1.5), 7))
    torch.testing.assert_close(found, 2 * x + 7)
    (call,) = seen
    assert call == ("a", (2.0, True), [0.5, 1.5], 7) and type(call.inner) is Inner and type(call.inner.scale) is float
    assert torch.compile(operator, backend="aot_eager", fullgraph=True)(x, None, seen[0]).shape == x.shape
