"""Recording a call of an operator for `launch.replay`: its allocations, launches with their tensors, and results.

A call is not recorded if it runs another operator of torch (a copy, a product, a value read back), uses a tensor that
is neither an argument nor allocated in the call, or launches through Triton. Parts of such a launcher can be recorded
separately (`repeated`).
"""

from __future__ import annotations

from functools import wraps
from operator import itemgetter
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import registry
from ..private import assert_async
from .checks import TENSORS, NumberTypes, coerced
from .launch import NOT_CHECKED, NOT_REPLAYED, UNRECORDABLE, Observer, observing, replay, tensor_count

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default}
_ALLOCATIONS |= {_aten.new_empty.default, _aten.new_empty_strided.default}
_SAME_MEMORY = {_aten.view.default, _aten.detach.default}
_REPEATED = {
    _aten._assert_async.msg: assert_async,
    _aten.fill_.Scalar: torch.Tensor.fill_,
    _aten.zero_.default: torch.Tensor.zero_,
}
"""Operators that a replay repeats, if their first argument is a recorded allocation -> the function that it calls."""


def repeated(part: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a part of a launcher, so that its calls are recorded and replayed. The part takes a tensor, then
    tensors and numbers, which are not checked, and returns tensors that it allocates."""
    name, record = f"{part.__module__}.{part.__qualname__}", recorder(part, ((), ()))

    @wraps(part)
    def call(*args: Any) -> Any:
        result = replay(name, lambda args: None, args, len(args), record)
        return part(*args) if result is NOT_REPLAYED or result is NOT_CHECKED else result

    return call


def recorder(launcher: Callable[..., Any], numbers: NumberTypes) -> Callable[[dict, tuple, tuple], Any]:
    """A function that calls `launcher` and stores the recording of the call, or UNRECORDABLE, in the cache."""

    def record(cache: dict, key: tuple, args: tuple) -> Any:
        # a new tensor object for each argument, since one tensor may be passed twice
        arguments = tuple([arg.detach() if type(arg) in TENSORS else arg for arg in args])
        recorded = _Recorder(arguments)
        with observing(recorded), recorded:
            result = launcher(*coerced(arguments, numbers))  # coerced here, so that reading a tensor's value is noticed
        if all(plan.tunable.plans.get((plan.device, plan.key)) is plan for plan in recorded.plans):
            cache[key] = recorded.recording(arguments, result) or UNRECORDABLE
        return result

    return record


class _Recorder(Observer, TorchDispatchMode):
    """Records every operator of torch and every launch of this thread.

    places: id of a tensor -> its index in a replay's list of pointers: None, then arguments, then allocations
    """

    def __init__(self, arguments: tuple) -> None:
        super().__init__()
        self.tensors = [None, *(arg for arg in arguments if isinstance(arg, torch.Tensor))]
        self.places = {id(tensor): place for place, tensor in enumerate(self.tensors)}
        self.first = len(self.tensors)
        self.allocated: list[torch.Tensor] = []
        self.steps: list[tuple] = []
        self.plans: list[registry.Plan] = []
        self.refused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since to skip dynamo, torch would import it at the first operator, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = self.places.get(id(args[0])) if args else None
        if func in _ALLOCATIONS:
            self._place(result, self.first + len(self.allocated))
            self.allocated.append(result)
        elif func in _SAME_MEMORY and place is not None and result.data_ptr() == args[0].data_ptr():
            self._place(result, place)
        elif func in _REPEATED and place is not None and place >= self.first:
            self.steps.append((_REPEATED[func], None, None, place - self.first, args[1:]))
        elif func is not _aten.promote_types.default:
            self.refused = True
        return result

    def _place(self, tensor: torch.Tensor, place: int) -> None:
        self.tensors.append(tensor)  # keeps it alive, so that no other tensor gets its id
        self.places[id(tensor)] = place

    def launch(
        self, proceed: Callable, plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple
    ) -> tuple | None:
        entry = proceed(plan, kernel, grid, args, flags)
        self.plans.append(plan)
        count = tensor_count(kernel, args)
        places = [self.places.get(id(arg)) for arg in args[:count]]
        if entry is None or count < 2 or None in places or any(isinstance(arg, torch.Tensor) for arg in args[count:]):
            self.refused = True
            return entry
        run, head, constants = entry
        grid = (*grid, 1, 1)[:3]
        self.steps.append((run, grid, head, itemgetter(*places), (*args[count:], *constants)))
        return entry

    def recording(self, arguments: tuple, result: Any) -> tuple | None:
        """(device, allocations, steps, allocations -> result), or None if the call cannot be repeated."""
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        places = [self.places.get(id(tensor), 0) - self.first for tensor in results]
        if self.refused or len(set(places)) < len(places) or min(places, default=0) < 0:
            return None
        result_at = dict(zip(places, results))
        allocations = []
        for number, tensor in enumerate(self.allocated):
            if tensor.data_ptr() & 15 or tensor.device != arguments[0].device:
                return None
            shaped = result_at.get(number, tensor)
            if shaped.numel() != tensor.numel():
                return None  # the result is only a part of the allocation
            allocations.append(_allocation(shaped, arguments))
        if not results:
            results_of = lambda new: None  # noqa: E731
        elif isinstance(result, tuple) and len(places) == 1:
            results_of = lambda new: (new[places[0]],)  # noqa: E731
        else:
            results_of = itemgetter(*places)
        return arguments[0].device, tuple(allocations), tuple(self.steps), results_of


def _allocation(tensor: torch.Tensor, arguments: tuple) -> tuple:
    """(position of an argument with the same dtype and layout, None, None, None), or (None, shape, strides, dtype)"""
    for number, arg in enumerate(arguments):
        if isinstance(arg, torch.Tensor) and (arg.dtype, arg.shape) == (tensor.dtype, tensor.shape):
            if torch.empty_like(arg, device="meta").stride() == tensor.stride():
                return number, None, None, None
    return None, tensor.shape, tensor.stride(), tensor.dtype
