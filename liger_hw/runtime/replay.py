"""Replay cache: the second call of a layout is recorded, later calls repeat its allocations and launches.

It is for training steps whose time is the host's; what it wins there is in docs/benchmarks/host.md.

A launcher works out sizes, plan, grid and flags from its arguments' layout (dtypes, shapes, strides, alignment, device)
and from numbers, allocates, and launches. All of that is the same at the next call of the same layout, and it is most
of the host's time. So the second such call is recorded: what it allocates, what it launches with which tensors, what it
returns. From the third call on those steps are repeated with that call's tensors.

Only a call that did nothing else is recorded. Any other operator of torch in it (a copy, a product, a value read back),
a tensor that is neither an argument nor allocated there, or a launch that went through Triton, and the layout is left
to the launcher for good. Of an operator that does more, parts that do no more can be recorded by themselves
(`repeated`). A recording holds for the plans that it was made with: the registry drops the cache whenever plans change
(`registry.replay_cache`).
"""

from __future__ import annotations

from functools import wraps
from operator import itemgetter
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import registry
from ..private import assert_async
from . import launch as _launch
from .checks import PLAIN_NUMBERS, TENSORS, NumberTypes, are_plain, coerced
from .launch import Observer, observers, observing

MISSED, UNSEEN = object(), object()
_SEEN, _REFUSED = "seen", "refused"
_MOST = 4096  # layouts that never repeat must not be kept without end
_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        *(_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default),
        *(_aten.new_empty.default, _aten.new_empty_strided.default),
    }
)
_SAME_MEMORY = frozenset({_aten.view.default, _aten.detach.default})
_REPEATED = {
    _aten._assert_async.msg: assert_async,
    _aten.fill_.Scalar: torch.Tensor.fill_,
    _aten.zero_.default: torch.Tensor.zero_,
}
"""Operators on an allocation that are done again, between the launches."""


def repeated(part: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a part of a launcher that takes a tensor, then tensors and numbers, and returns what it allocated."""
    name = f"{part.__module__}.{part.__qualname__}"

    @wraps(part)
    def call(*args: Any) -> Any:
        result = replay(name, part, _no_check, args, len(args), ((), ()))
        return part(*args) if result is MISSED or result is UNSEEN else result

    return call


def _no_check(args: tuple) -> None:
    """Parts of launchers get what fits."""


def replay(
    name: str, launcher: Callable[..., Any], check: Callable[[tuple], None], args: tuple, end: int, numbers: NumberTypes
) -> Any:
    """The operator's result. MISSED and UNSEEN: its launcher is to be called, where the arguments `are_plain`, and for
    UNSEEN `check` is to be asked before that. It was for MISSED, and for every layout that is replayed.

    check: raises for arguments that do not fit, by their dtypes, shapes and devices
    end: how many arguments there are up to the last tensor; what follows goes into the key as it stands
    """
    if observers or not _launch.CAN_BE_FAST:
        return UNSEEN
    index = args[0].get_device() if type(args[0]) in TENSORS else -1
    if index < 0 or index != _launch.current_device():  # that raises without a driver: CPU tensors do not ask
        return UNSEEN
    key, pointers, together = [name, args[end:]], [None], 0
    try:
        for arg in args[:end]:
            if type(arg) in TENSORS:
                if arg.get_device() != index:
                    return UNSEEN
                pointer = arg.data_ptr()
                together |= pointer
                pointers.append(pointer)
                key += arg.dtype, arg.shape, arg.stride()
            else:
                key.append(arg)
    except RuntimeError:  # a tensor without memory of its own, as batched gradients have
        return UNSEEN
    key += index, 0 if together & 15 == 0 else tuple([pointer and pointer & 15 for pointer in pointers])
    key = tuple(key)
    cache = registry.replay_cache
    try:
        entry = cache.get(key)
    except TypeError:  # a list among the arguments
        return UNSEEN
    if type(entry) is not tuple:
        if entry is _REFUSED:
            return MISSED
        if not are_plain(args) or not PLAIN_NUMBERS.issuperset(map(type, args[end:])):
            return UNSEEN  # of a tensor given as a number the key knows nothing but which tensor it is
        if entry is _SEEN and not _launch.is_profiled():
            return _record(cache, key, launcher, args, numbers)
        if entry is None:
            check(args)
        if len(cache) >= _MOST:
            cache.clear()
        cache[key] = _SEEN
        return MISSED
    if _launch.is_profiled():
        return MISSED

    device, allocations, steps, results_of = entry
    allocated = []
    for like, shape, strides, dtype in allocations:
        if like is None:
            new = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        else:
            new = torch.empty_like(args[like])
        allocated.append(new)
        pointers.append(new.data_ptr())
    stream = _launch.current_stream(index)
    try:
        for run, grid, head, places, rest in steps:
            if grid is None:
                run(allocated[places], *rest)
            else:
                run(*grid, stream, *head, *places(pointers), *rest)
    except Exception as error:
        if not _launch.blames_config(error):
            raise
        cache.pop(key, None)  # the launcher knows which plan failed
        return MISSED
    return results_of(allocated)


def _record(cache: dict, key: tuple, launcher: Callable[..., Any], args: tuple, numbers: NumberTypes) -> Any:
    """Call the launcher, and keep in `cache` what it did, or that it cannot be kept."""
    # one object for each argument, though the caller may have passed one tensor as two
    arguments = tuple([arg.detach() if type(arg) in TENSORS else arg for arg in args])
    recorder = _Recorder(arguments)
    with observing(recorder), recorder:
        result = launcher(*coerced(arguments, numbers))  # a tensor read here as a number is seen, and not kept
    if all(plan.tunable.plans.get((plan.device, plan.key)) is plan for plan in recorder.plans):
        cache[key] = recorder.recording(arguments, result) or _REFUSED
    return result


class _Recorder(Observer, TorchDispatchMode):
    """Sees every operator of torch and every launch of this thread.

    places: tensor -> where its pointer stands in a replay: first None's, then arguments', then allocations'
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
        """False: to skip dynamo, torch would import it at the first operator we see, which takes a second."""
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
        self.tensors.append(tensor)  # kept, so that no other tensor takes its id
        self.places[id(tensor)] = place

    def launch(
        self, proceed: Callable, plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple
    ) -> tuple | None:
        entry = proceed(plan, kernel, grid, args, flags)
        self.plans.append(plan)
        count = _launch.tensor_count(kernel, args)
        places = [self.places.get(id(arg)) for arg in args[:count]]
        if entry is None or count < 2 or None in places or any(isinstance(arg, torch.Tensor) for arg in args[count:]):
            self.refused = True
            return entry
        run, head, constants = entry
        grid = (*grid, 1, 1)[:3]
        self.steps.append((run, grid, head, itemgetter(*places), (*args[count:], *constants)))
        return entry

    def recording(self, arguments: tuple, result: Any) -> tuple | None:
        """(device, allocations, steps, what gives the result), or None where this is not all that the call did."""
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        places = [self.places.get(id(tensor), 0) - self.first for tensor in results]
        if self.refused or len(set(places)) < len(places) or min(places, default=0) < 0:
            return None
        shown = dict(zip(places, results))
        allocations = []
        for number, tensor in enumerate(self.allocated):
            if tensor.data_ptr() & 15 or tensor.device != arguments[0].device:
                return None  # an allocator that does not align, or memory of the host
            if shown.get(number, tensor).numel() != tensor.numel():
                return None  # a part of what was allocated
            tensor = shown.get(number, tensor)
            allocations.append(_allocation(tensor, arguments))
        if not results:
            results_of = lambda new: None  # noqa: E731
        elif isinstance(result, tuple) and len(places) == 1:
            results_of = lambda new: (new[places[0]],)  # noqa: E731
        else:
            results_of = itemgetter(*places)
        return arguments[0].device, tuple(allocations), tuple(self.steps), results_of


def _allocation(tensor: torch.Tensor, arguments: tuple) -> tuple:
    """(argument that it is like, shape, strides, dtype): the first alone where there is one, which is cheapest."""
    for number, arg in enumerate(arguments):
        if isinstance(arg, torch.Tensor) and (arg.dtype, arg.shape) == (tensor.dtype, tensor.shape):
            if torch.empty_like(arg, device="meta").stride() == tensor.stride():
                return number, None, None, None
    return None, tensor.shape, tensor.stride(), tensor.dtype
