"""Every operator refuses a tensor of another shape, dtype or device, in eager and under torch.compile, before a launch.

The calls are those that the ops' samples make, each with one tensor changed; so are those of the public functions.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator

import pytest
import torch
from harness import checked_inputs, few_sizes, make, output_grads, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from liger_hw import registry
from liger_hw.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearJSDLoss
from liger_hw.kernels.heads.fused_linear_cross_entropy_tp import liger_fused_linear_cross_entropy_tp
from liger_hw.kernels.losses.log_prob_rows import LogProbOptions
from liger_hw.runtime.operator import declared

OF_ANY_SHAPE = {
    ("embedding_fwd", "indices"): "one row each",
    ("group_norm_bwd", "stats"): "made by the forward, two numbers a group",
    ("modulated_rms_norm_fwd", "scale"): "one row for several rows of X; tests/kernels/test_misuse.py has its shapes",
    ("modulated_rms_norm_bwd", "scale"): "the same",
    ("fused_linear_log_probs_keep", "tail"): "memory that torch's views divide, which raise where it is too short",
    ("fused_linear_log_probs_keep", "rest"): "the same",
}
"""Tensors whose shapes decide how much is computed, or are the package's own."""


class _Calls(TorchDispatchMode):
    """Notes each operator's calls that returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "liger_hw":
            self.calls.setdefault(func._schema.name.removeprefix("liger_hw::"), []).append(args)
        return result


@functools.cache
def _calls() -> _Calls:
    with _Calls() as seen, torch.enable_grad():
        for op in registry.ops().values():
            for options in op.options or ({},):
                sample = make(op, few_sizes(op), torch.float32, "cpu", 0, options)
                _differentiate(op.function(*sample.args, **sample.kwargs), checked_inputs(sample))
        rows, weight = (torch.randn(n, 6, requires_grad=True) for n in (4, 7))
        for reduction in ("sum", "none"):
            loss = liger_fused_linear_cross_entropy_tp(rows, weight, torch.arange(4), None, reduction=reduction)
            _differentiate(loss, [rows, weight])
        states, labels = torch.randn(4, 3, 6, requires_grad=True), torch.arange(12).view(4, 3) % 7
        _differentiate(LigerFusedLinearDPOLoss()(weight, states, labels, None, states, weight)[0], [states, weight])
        soft = LigerFusedLinearJSDLoss()(rows, weight, rows.detach(), weight.detach(), torch.arange(4))
        _differentiate(soft, [rows, weight])
    for name in declared:  # in place and not: a sample's backward calls one of them
        if name.endswith("_bwd"):
            both = [*seen.calls.get(name, []), *seen.calls.get(f"{name}_", [])]
            seen.calls[name] = both
            if f"{name}_" in declared:
                seen.calls[f"{name}_"] = both
    seen.calls["jsd_bwd"] = seen.calls["kl_div_bwd"]  # its loss is always reduced
    x, w, target = rows.detach(), weight.detach(), torch.arange(4)
    numbers = *LogProbOptions(-100), False, False, False, False, True, True, True
    kept = w.new_empty(0), w.new_empty(0), w.new_empty(4, 64), 0, 0  # logits are kept where no mode watches
    seen.calls["fused_linear_log_probs_keep"] = [(x, w, target, None, *kept, *numbers)]
    return seen


def _differentiate(outputs: Any, inputs: list[torch.Tensor]) -> None:
    outputs = [t for t in tensors(outputs) if t.requires_grad]
    torch.autograd.grad(outputs, inputs, output_grads(outputs, 0), allow_unused=True)


def _names(rule, shape: torch.Size) -> list[str]:
    """The name of each dimension of a tensor, "" for a number; `.` for all where no form has as many dimensions.

    Of several forms it is the one that says the most about the tensor's shape by numbers.
    """
    fitting = []
    for form in rule.forms:
        sizes = list(form)
        if (1, "*") in sizes:
            place = sizes.index((1, "*"))
            sizes[place : place + 1] = [(1, "*")] * (len(shape) - len(sizes) + 1)
        if len(sizes) == len(shape) and all(name or factor == n for (factor, name), n in zip(sizes, shape)):
            fitting.append([name for _, name in sizes])
    if fitting:
        return max(fitting, key=lambda names: names.count(""))
    return [rule.count[1]] if rule.count is not None else ["."] * len(shape)


def _is_free(name: str, args: tuple, label: str, axis: int) -> bool:
    """Whether a dimension may have any size: the declaration has its name in no other place."""
    rules = [rule for rule in declared[name].rules if isinstance(args[rule.place], torch.Tensor)]
    rule = next(rule for rule in rules if rule.name == label)
    names = _names(rule, args[rule.place].shape)
    by_name = dict(zip(_arguments(name), args))
    axis_of_heads = by_name.get("head_axis", by_name.get("unsqueeze_dim"))
    if label in ("q", "k") and "dout_q" not in by_name and axis == axis_of_heads:
        return True
    size = names[axis]
    if size in ("", ".") or names.count(size) > 1 and size != "*":
        return False
    same = {"*", "rows"} if size == "*" else {size}
    return not any(same & {*_names(o, args[o.place].shape)} for o in rules if o is not rule)


def _may_grow(name: str, args: tuple, label: str) -> bool:
    """Whether a tensor may have a dimension more: it has leading dimensions that no other tensor shares."""
    rules = [rule for rule in declared[name].rules if isinstance(args[rule.place], torch.Tensor)]
    rule = next(rule for rule in rules if rule.name == label)
    others = {n for o in rules if o is not rule for n in _names(o, args[o.place].shape)}
    return any(n == "*" for form in rule.forms for _, n in form) and not others & {"*", "rows"}


def _arguments(name: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.liger_hw, name).default._schema.arguments]


def _retyped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64 if tensor.is_floating_point() or tensor.is_complex() else torch.float32)


def _changes(name: str, args: tuple) -> Iterator[tuple[str, tuple]]:
    """(what is changed, the arguments) of one tensor that does not fit each."""
    kinds = {rule.name: rule.kind for rule in declared[name].rules}
    of_numbers = {
        rule.name: [tuple(n for n, _ in form) for form in rule.forms if not any(size for _, size in form)]
        for rule in declared[name].rules
    }
    names = _arguments(name)
    present = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
    for place in present:
        tensor, label = args[place], names[place]

        def changed(value, place=place):
            return args[:place] + (value,) + args[place + 1 :]

        if kinds[label] != "any":
            yield f"{label} of another dtype", changed(_retyped(tensor))
        if len(present) > 1:
            yield f"{label} on meta", changed(tensor.to("meta"))
        if len(present) == 1 or (name, label) in OF_ANY_SHAPE:
            continue
        for axis, size in enumerate(tensor.shape):
            if not _is_free(name, args, label, axis):
                for smaller in sorted({size - 1, 1} & set(range(1, size))):
                    short = tensor.narrow(axis, 0, smaller).contiguous()
                    if tuple(short.shape) not in of_numbers[label]:
                        yield f"{label} {tuple(tensor.shape)} with {smaller} in dimension {axis}", changed(short)
        if tensor.numel() and not _may_grow(name, args, label):
            yield f"{label} with one dimension more", changed(tensor[None].expand(2, *tensor.shape))


registry.ops()  # loads them
OPERATORS = sorted(declared)


def test_every_operator_is_called():
    assert {name for name, calls in _calls().calls.items() if calls} == set(declared)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_refuses_what_does_not_fit(name):
    overload, n_changes = getattr(torch.ops.liger_hw, name).default, 0
    with torch.no_grad():
        for call in _calls().calls[name]:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            for what, args in _changes(name, call):
                n_changes += 1
                with pytest.raises((TypeError, ValueError), match="^liger_"):
                    overload(*args)
                    pytest.fail(f"{name}: {what} is not refused")
                fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
                with mode, pytest.raises((TypeError, ValueError, RuntimeError), match="liger_"):
                    overload(*fakes)
                    pytest.fail(f"{name}: {what} is not refused of fake tensors")
    assert n_changes


def _refused(function: Callable, args: tuple, place: int, value: torch.Tensor) -> bool:
    """Whether the call is an error that says whose argument it is, before any operator returned a result.

    An FP8 layer rounds its rows first: its linear checks the weight.
    """
    with _Calls() as seen:
        try:
            function(*args[:place], value, *args[place + 1 :])
        except (TypeError, ValueError) as error:
            return "liger_" in str(error) and all("float8" in name for name in seen.calls)
        except IndexError:  # a table is now too short for one of the indices
            return True
    return False


@pytest.mark.parametrize("op", registry.ops().values(), ids=lambda op: op.name)
def test_a_public_function_refuses_another_dtype_and_device(op):
    """A shape that does not fit is refused too, or it broadcasts, and the reference gives the same result."""
    for options in op.options or ({},):
        sample = make(op, few_sizes(op), torch.float32, "cpu", 0, options)
        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in sample.args)
        function = functools.partial(op.function, **sample.kwargs)
        places = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
        for place in places:
            assert _refused(function, args, place, _retyped(args[place])), (op.name, place, "dtype")
            if len(places) > 1:
                assert _refused(function, args, place, args[place].to("meta")), (op.name, place, "device")
            sizes = [(axis, size - 1) for axis, size in enumerate(args[place].shape) if size > 1]
            shorter = [args[place].narrow(axis, 0, size).contiguous() for axis, size in sizes]
            for other in (*shorter, args[place][None]):
                changed = *args[:place], other, *args[place + 1 :]
                if not _refused(function, args, place, other):
                    results, expected = tensors(function(*changed)), tensors(op.reference(*changed, **sample.kwargs))
                    assert [t.shape for t in results] == [t.shape for t in expected]
                    torch.testing.assert_close(results, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
