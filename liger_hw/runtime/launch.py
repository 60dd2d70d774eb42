"""Launching a kernel with a resolved plan (`launch`), repeating recorded launches (`replay`), observing (`observing`).

A kernel's parameters are, in this order: tensors (or None), runtime numbers or tuples of them, flags (constexprs that
the call chooses), tunables (constexprs that the plan chooses).

Triton binds arguments, hashes options and reads the environment at every launch. Here, a launch that Triton would
specialise like an earlier one calls the compiled kernel directly. `Plan.compiled` has two keys for it: the exact
numbers, and `_compile_key`, which has only what Triton specialises on. Pointers are passed as integers.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from functools import partial
from threading import get_ident
from typing import Any, Callable, Iterator, NamedTuple, NoReturn, TypeVar

import torch

from .. import registry
from ..locks import fork_safe
from ..private import current_device, current_stream
from ..registry import Plan
from .checks import PLAIN_NUMBERS, TENSORS, are_plain
from .triton_import import AVAILABLE, INTERPRET, require, triton

_CONFIG_ERRORS = ("OutOfResources", "CompilationError", "PTXASError", "KeyError", "InterpreterError")
_CONFIG_WORDS = (
    "out of resource",
    "invalid argument",
    "too many resources",
    "PassManager::run failed",
    "invalid value",
    "ooperative launch",  # more programs than can be resident
    "operation not supported",  # a device without cooperative launches
)
_INT32 = 1 << 31
_MAX_EXACT_KEYS = 4096  # bounds `Plan.compiled` if row counts never repeat
_tensor_counts: dict[int, int] = {}
_unspecialised_of: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
_interpreter_lock = fork_safe(threading.RLock())  # Triton's interpreter has the current launch in globals
_VERSION = ".".join(triton.__version__.split(".")[:2]) if AVAILABLE else ""
_runtime = triton.knobs.runtime
CAN_BE_FAST = AVAILABLE and current_device is not None and current_stream is not None
"""Whether launches can bypass Triton's launcher: needs Triton, and a build of torch for CUDA or ROCm."""


class LaunchFailed(RuntimeError):
    """A kernel could not be compiled or launched with its plan's configuration."""

    def __init__(self, plan: Plan, cause: BaseException) -> None:
        super().__init__(f"{plan.tunable.name} with {plan.config.to_text()}: {cause}")
        self.plan, self.cause = plan, cause


class Routine(NamedTuple):
    """A library's function that a plan may choose in a kernel's place.

    run: the function, of tensors, numbers and tuples of them; it must not wait for the device
    empty_result: takes the same arguments and returns an uninitialised tensor like the result, for observers
    """

    run: Callable[..., torch.Tensor]
    empty_result: Callable[..., torch.Tensor]


def call_routine(plan: Plan, routine: Routine, args: tuple[Any, ...], was_observed: bool = False) -> torch.Tensor:
    """The routine's result. Raises `LaunchFailed` if the library fails, so that a kernel can replace it."""
    if observers and not was_observed:
        return observed("routine", partial(call_routine, was_observed=True), plan, routine, args)
    try:
        return routine.run(*args)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        _raise(plan, error)
    except RuntimeError as error:
        raise LaunchFailed(plan, error) from error


def launch(
    plan: Plan,
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    flags: tuple[Any, ...] = (),
    was_observed: bool = False,
) -> tuple | None:
    """Launch `kernel` over `grid` on the current stream of the first tensor's device.

    Returns `(run, head, constants)`: the function that launches, and its arguments before and after the kernel's. None
    if Triton or an observer made the launch.
    """
    if observers and not was_observed:
        return observed("launch", partial(launch, was_observed=True), plan, kernel, grid, args, flags)
    compiled = plan.compiled
    if compiled is None or not CAN_BE_FAST:
        launch_ordinary(plan, kernel, grid, args, flags)
        return None
    name, count = id(kernel), tensor_count(kernel, args)
    pointers, dtypes, combined, numbers = [], [], 0, args[count:]
    for tensor in args[:count]:  # one loop, since its time is part of every launch
        if tensor is None:
            pointers.append(None)
            dtypes.append(None)
        else:
            pointer = tensor.data_ptr()
            combined |= pointer
            pointers.append(pointer)
            dtypes.append(tensor.dtype)
    aligned = 0 if combined & 15 == 0 else tuple([None if p is None else p & 15 for p in pointers])
    key = (name, flags, numbers, aligned, *dtypes)
    entry = compiled.get(key)
    index = args[0].get_device()
    if entry is None:
        entry = _find_or_compile(plan, kernel, grid, args, flags, key)
        if entry is None:
            return None
    if current_device() != index or is_profiled():
        launch_ordinary(plan, kernel, grid, args, flags)
        return None
    run, head, constants = entry
    size = len(grid)
    y, z = (1, 1) if size == 1 else (grid[1], grid[2] if size > 2 else 1)
    try:
        run(grid[0], y, z, current_stream(index), *head, *pointers, *numbers, *constants)
    except Exception as error:
        _raise(plan, error)
    return entry


def tensor_count(kernel: Any, args: tuple) -> int:
    """How many of a kernel's leading arguments are tensors or stand for one as None."""
    count = _tensor_counts.get(id(kernel))
    if count is None:
        count = next((i for i, a in enumerate(args) if isinstance(a, (int, float, tuple))), len(args))
        _tensor_counts[id(kernel)] = count
    return count


def _compile_key(kernel: Any, flags: tuple, numbers: tuple, rest: tuple) -> tuple:
    """A key that is equal for launches of the same compiled kernel.

    Triton specialises an integer on being 1, on divisibility by 16 and on its width, and a pointer on divisibility by
    16, except where the kernel sets `do_not_specialize`. rest: the tensors' addresses modulo 16 (0 if all are 0), then
    their dtypes
    """
    values, alignments = _unspecialised(kernel)
    count = len(rest) - 1
    classes = tuple(_class_of(n, place in values) for place, n in enumerate(numbers, count))
    offsets, *dtypes = rest
    if offsets:
        offsets = tuple(bool(offset) and place not in alignments for place, offset in enumerate(offsets))
    return "alike", id(kernel), flags, classes, offsets if offsets and any(offsets) else 0, *dtypes


def _class_of(number: Any, is_unspecialised: bool) -> int | tuple | None:
    if isinstance(number, tuple):
        return tuple([_class_of(n, is_unspecialised) for n in number])
    if type(number) is not int:
        return None
    if number == 1 and not is_unspecialised:
        return 1
    return number & 15 == 0 and not is_unspecialised, -_INT32 <= number < _INT32


def _unspecialised(kernel: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Positions of arguments excluded from value specialisation and from alignment specialisation."""
    entry = _unspecialised_of.get(id(kernel))
    if entry is None:
        parameters = list(enumerate(getattr(kernel, "params", ())))
        values = frozenset(i for i, p in parameters if p.do_not_specialize)
        alignments = frozenset(i for i, p in parameters if p.do_not_specialize_on_alignment)
        entry = _unspecialised_of[id(kernel)] = values, values | alignments
    return entry


def compile_key(kernel: Any, args: tuple, flags: tuple) -> tuple:
    """`_compile_key` of a launch whose tensors may be fake: alignment is computed from their storage offsets."""
    count = tensor_count(kernel, args)
    offsets = [0 if t is None else t.storage_offset() * t.itemsize & 15 for t in args[:count]]
    dtypes = [None if t is None else t.dtype for t in args[:count]]
    return _compile_key(kernel, flags, args[count:], (tuple(offsets) if any(offsets) else 0, *dtypes))


def _find_or_compile(plan: Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple, key: tuple) -> tuple | None:
    """The entry of an earlier launch with the same `_compile_key`. Without one, launches by Triton and returns None."""
    _, _, numbers, *rest = key
    compiled = plan.compiled
    alike = _compile_key(kernel, flags, numbers, tuple(rest))
    entry = compiled.get(alike)
    if isinstance(entry, Future):  # another thread compiles it; wait, then Triton finds the compiled kernel
        entry.exception()
        entry = None
    if entry is None:
        run, head = _launcher_of(launch_ordinary(plan, kernel, grid, args, flags))
        compiled[alike] = compiled[key] = run, head, flags + tuned_values(plan, kernel, args, flags)
        return None
    if len(compiled) > _MAX_EXACT_KEYS:
        kept = {k: v for k, v in list(compiled.items()) if k[0] == "alike"}
        compiled.clear()
        compiled.update(kept)
    compiled[key] = entry
    return entry


def compile_only(plan: Plan, kernel: Any, args: tuple, flags: tuple) -> None:
    """Let Triton compile the kernel of a launch on the current device, and build its launcher.

    args: from `autotune.compile.arguments`. The kernel is not loaded: loading it would invalidate a graph that another
    thread is capturing.
    """
    constants = flags + tuned_values(plan, kernel, args, flags)
    compiled = kernel.warmup(*args, *constants, grid=(1,), **plan.options)
    with contextlib.suppress(AttributeError, TypeError):  # not public; if it changed, the launch builds the launcher
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def _launcher_of(compiled: Any) -> tuple[Callable[..., None], tuple]:
    """The function that launches a compiled kernel, and its arguments between the stream and the kernel's arguments.

    Triton 3.6's launcher is a Python function that calls a C function and adds scratch memory. For a kernel that needs
    none, this is the C function. Its arguments differ between versions.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    is_wrapper = _VERSION == "3.6" and hasattr(run, "launch_pdl")
    if is_wrapper and run.global_scratch_size == 0 and run.profile_scratch_size == 0:
        options = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (function, *options, None, None, metadata, None, None, None)
    return run, (function, metadata, None, None, None)


def tuned_values(plan: Plan, kernel: Any, args: tuple, flags: tuple) -> tuple[Any, ...]:
    """The plan's values for the kernel's tunables."""
    return tuple(plan.constexprs[name] for name in kernel.arg_names[len(args) + len(flags) :])


def launch_ordinary(plan: Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> Any:
    """Launch through Triton, which compiles if needed; returns the compiled kernel."""
    require()
    device = args[0].device
    values = (*args, *flags, *tuned_values(plan, kernel, args, flags))
    if INTERPRET and any(isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 for a in args):
        raise NotImplementedError(
            f"{plan.tunable.name}: Triton's interpreter computes bfloat16 wrong, so liger_hw refuses it there; use "
            "float32 or float16, or a process without LIGER_HW_INTERPRET=1 and TRITON_INTERPRET=1"
        )
    try:
        if INTERPRET or device.type == "cpu":
            with _interpreter_lock:
                return kernel[grid](*values, **plan.options)
        with torch.get_device_module(device).device(device):
            return kernel[grid](*values, **plan.options)
    except Exception as error:
        _raise(plan, error)


def _raise(plan: Plan, error: Exception) -> NoReturn:
    if blames_config(error):
        raise LaunchFailed(plan, error) from error
    if "]: out of memory" in str(error):  # Triton's message if a kernel's code cannot be loaded
        where = plan.device.type.upper()
        raise torch.OutOfMemoryError(f"{where} out of memory. No room for the code of {plan.tunable.name}") from error
    raise error


def blames_config(error: Exception) -> bool:
    """Whether another configuration may succeed: False for errors of memory, the device or our code."""
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & set(_CONFIG_ERRORS)) or any(word in str(error) for word in _CONFIG_WORDS)


def is_profiled() -> bool:
    """Whether a profiler has set launch hooks, which are called only if Triton makes the launch."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


# -- replaying -------------------------------------------------------------------------------------------------------
# For training steps that are bound by the host (docs/benchmarks/host.md).
#
# A launcher computes sizes, plan, grid and flags from numbers and from its tensors' layout (dtypes, shapes, strides,
# alignment, device), allocates, and launches. The second call with the same layout and numbers is recorded
# (recording.py). Later calls repeat the recorded allocations and launches with their tensors. The registry clears the
# cache whenever plans change (`registry.replay_cache`).

NOT_REPLAYED, NOT_CHECKED = object(), object()
_SEEN, UNRECORDABLE = "seen", "unrecordable"
"""Cache entries of a layout after its first call, and of a layout whose calls cannot be recorded."""
_MAX_LAYOUTS = 4096  # of the replay cache, for layouts that never repeat


def replay(
    name: str, check: Callable[[tuple], None], args: tuple, end: int, record: Callable[[dict, tuple, tuple], Any]
) -> Any:
    """The operator's result. NOT_REPLAYED if the caller has to run the launcher, NOT_CHECKED if it has to check the
    arguments before.

    check: raises for arguments whose dtypes, shapes or devices do not fit
    end: the number of arguments up to the last tensor; later arguments go into the key unchanged
    record: (cache, key, args) -> result; makes the call and records it (`recording.recorder`)
    """
    if observers or not CAN_BE_FAST:
        return NOT_CHECKED
    index = args[0].get_device() if type(args[0]) in TENSORS else -1
    if index < 0 or index != current_device():  # index < 0 is tested first: current_device raises without a driver
        return NOT_CHECKED
    key, pointers, combined = [name, args[end:]], [None], 0
    try:
        for arg in args[:end]:
            if type(arg) in TENSORS:
                if arg.get_device() != index:
                    return NOT_CHECKED
                pointer = arg.data_ptr()
                combined |= pointer
                pointers.append(pointer)
                key += arg.dtype, arg.shape, arg.stride()
            else:
                key.append(arg)
    except RuntimeError:  # a tensor without memory, such as a batched gradient
        return NOT_CHECKED
    key += index, 0 if combined & 15 == 0 else tuple([pointer and pointer & 15 for pointer in pointers])
    key = tuple(key)
    cache = registry.replay_cache
    try:
        entry = cache.get(key)
    except TypeError:  # a list among the arguments
        return NOT_CHECKED
    if type(entry) is not tuple:
        if entry is UNRECORDABLE:
            return NOT_REPLAYED
        if not are_plain(args) or not PLAIN_NUMBERS.issuperset(map(type, args[end:])):
            return NOT_CHECKED  # a tensor passed as a number is in the key by identity, not by value
        if entry is _SEEN and not is_profiled():
            return record(cache, key, args)
        if entry is None:
            check(args)
        if len(cache) >= _MAX_LAYOUTS:
            cache.clear()
        cache[key] = _SEEN
        return NOT_REPLAYED
    if is_profiled():
        return NOT_REPLAYED

    device, allocations, steps, results_of = entry
    allocated = []
    for like, shape, strides, dtype in allocations:
        if like is None:
            new = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        else:
            new = torch.empty_like(args[like])
        allocated.append(new)
        pointers.append(new.data_ptr())
    stream = current_stream(index)
    try:
        for run, grid, head, places, rest in steps:
            if grid is None:
                run(allocated[places], *rest)
            else:
                run(*grid, stream, *head, *places(pointers), *rest)
    except Exception as error:
        if not blames_config(error):
            raise
        cache.pop(key, None)  # the launcher will fail too, and its error has the plan
        return NOT_REPLAYED
    return results_of(allocated)


# -- observing launches ----------------------------------------------------------------------------------------------
#
# Observers are called in place of a launch, which they may make. Uses: recording a call, tracing an operator's launches
# for the tuner, compiling for an absent device. While there is an observer, no call is replayed.

observers: list[tuple[int | None, "Observer"]] = []
"""(thread or None for every thread, observer), the innermost last."""


class Observer:
    """Base class. Arguments and results are as in `launch`, `call_routine` and an eager operator call; `call` is the
    function that `define` returned.

    `proceed` calls the next outer observer, and for the outermost one, does the work. A method that does not call it
    replaces the work.
    """

    def launch(
        self, proceed: Callable[..., Any], plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple
    ) -> tuple | None:
        return proceed(plan, kernel, grid, args, flags)

    def routine(self, proceed: Callable[..., Any], plan: Any, routine: Any, args: tuple) -> Any:
        return proceed(plan, routine, args)

    def operator(self, proceed: Callable[..., Any], call: Any, args: tuple) -> Any:
        return proceed(call, args)


class LaunchTracer(Observer):
    """Calls `note(plan, kernel, grid, args, flags)` in place of each launch, and runs no routine."""

    def __init__(self, note: Callable[[Any, Any, tuple, tuple, tuple], None]) -> None:
        self.note = note

    def launch(self, proceed: Any, plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        self.note(plan, kernel, grid, args, flags)

    def routine(self, proceed: Any, plan: Any, routine: Routine, args: tuple) -> torch.Tensor:
        return routine.empty_result(*args)


ObserverType = TypeVar("ObserverType", bound=Observer)


@contextlib.contextmanager
def observing(observer: ObserverType, every_thread: bool = False) -> Iterator[ObserverType]:
    """Pass the launches of this thread, or of every thread, to `observer`. A GPU's backward runs in another thread."""
    entry = (None if every_thread else get_ident(), observer)
    observers.append(entry)
    try:
        yield observer
    finally:
        observers.remove(entry)


def observed(method: str, do: Callable[..., Any], *args: Any) -> Any:
    """Call `do(*args)` through this thread's observers, the innermost first."""
    thread = get_ident()
    for owner, observer in tuple(observers):
        if owner is None or owner == thread:
            do = partial(getattr(observer, method), do)
    return do(*args)
