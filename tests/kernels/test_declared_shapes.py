"""Every operator refuses a tensor of another shape, dtype or device, in eager and under torch.compile, before a launch.

The calls are those that the ops' samples make, each with one tensor changed.
"""

from __future__ import annotations

import functools

import pytest
import torch
from harness import few_sizes, make, output_grads, tensors, wanted
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from liger_hw import registry
from liger_hw.runtime.operator import declared

pytestmark = pytest.mark.cpu

OF_SEVERAL_RANKS: set[str] = set()
"""Operators that no sample calls."""
OF_ANY_SHAPE = {
    ("embedding_fwd", "indices"): "one row each",
    ("group_norm_bwd", "stats"): "made by the forward, two numbers a group",
}
"""Tensors whose shapes decide how much is computed, or are the package's own."""


class _Calls(TorchDispatchMode):
    """Notes each operator's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_hw":
            self.calls.setdefault(func._schema.name.removeprefix("liger_hw::"), []).append(args)
        return func(*args, **(kwargs or {}))


@functools.cache
def _calls() -> dict[str, list[tuple]]:
    with _Calls() as seen:
        for op in registry.ops().values():
            for options in op.options or ({},):
                sample = make(op, few_sizes(op), torch.float32, "cpu", 0, options)
                outputs = [t for t in tensors(op.function(*sample.args, **sample.kwargs)) if t.requires_grad]
                torch.autograd.grad(outputs, wanted(sample), output_grads(outputs, 0), allow_unused=True)
    for name in declared:
        if name.endswith("_bwd_"):
            seen.calls.setdefault(name, seen.calls.get(name[:-1], []))
    return seen.calls


def _sizes(rule, n_dims: int) -> list[str]:
    """The name of each dimension of a tensor that is declared to have one shape, `*` for each of several."""
    (form,) = rule.forms
    names = [name if name else str(factor) for factor, name in form]
    if "*" in names:
        place = names.index("*")
        names[place : place + 1] = ["*"] * (n_dims - len(names) + 1)
    return names


def _is_free(name: str, args: tuple, tensor: str, axis: int) -> bool:
    """Whether a dimension may have any size: no other of the call's tensors has its name in the declaration."""
    rules = [rule for rule in declared[name].rules if args[rule.place] is not None]
    rule = next(rule for rule in rules if rule.name == tensor)
    if len(rule.forms) != 1:
        return False
    size = _sizes(rule, args[rule.place].dim())[axis]
    same = {"*", "rows"} if size == "*" else {size}
    others = [o for o in rules if o is not rule]
    return not size.isdigit() and not any(
        n in same for o in others for n in [*(n for form in o.forms for _, n in form), *(o.count or ())[1:]]
    )


def _cut(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    return tensor.narrow(axis, 0, size).contiguous()


def _changes(name: str, args: tuple):
    """(what is changed, the arguments) of one tensor that does not fit each."""
    names = [argument.name for argument in getattr(torch.ops.liger_hw, name).default._schema.arguments]
    present = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
    for place in present:
        tensor, label = args[place], names[place]

        def changed(value, place=place):
            return args[:place] + (value,) + args[place + 1 :]

        other = torch.int64 if tensor.is_floating_point() else torch.float32
        yield f"{label} in {other}", changed(tensor.to(other))
        if len(present) > 1:
            yield f"{label} on meta", changed(tensor.to("meta"))
        if len(present) == 1 or (name, label) in OF_ANY_SHAPE:
            continue
        for axis, size in enumerate(tensor.shape):
            if not _is_free(name, args, label, axis):
                for smaller in sorted({size - 1, 1} - {0, size}):
                    yield f"{label} with {smaller} of {size} in dimension {axis}", changed(_cut(tensor, axis, smaller))
        if any(rule.name != label and args[rule.place] is not None for rule in declared[name].rules):
            yield f"{label} with one dimension more", changed(tensor[None].expand(2, *tensor.shape))


registry.ops()  # loads them
OPERATORS = sorted(name for name, shapes in declared.items() if shapes.rules)


def test_every_operator_is_called_by_a_sample():
    assert set(declared) - set(_calls()) == OF_SEVERAL_RANKS


@pytest.mark.parametrize("name", OPERATORS)
def test_what_does_not_fit_is_refused(name):
    overload, tried = getattr(torch.ops.liger_hw, name).default, 0
    with torch.no_grad():
        for call in _calls()[name]:
            for what, args in _changes(name, call):
                tried += 1
                with pytest.raises((TypeError, ValueError), match="^liger_"):
                    overload(*args)
                    pytest.fail(f"{name}: {what} is not refused")
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
                with mode, pytest.raises((TypeError, ValueError, RuntimeError), match="liger_"):
                    overload(*fakes)
                    pytest.fail(f"{name}: {what} is not refused of fake tensors")
    assert tried
