"""Launching a kernel with a resolved plan.

A kernel's parameters stand in this order: runtime arguments, flags (constexpr, chosen by the call), tunables (constexpr,
chosen by the plan). `launch` passes the first two by position and takes the rest from the plan.

Triton's own launch path costs about 20 us (argument binding, option hashing, environment reads). After the ordinary
launch compiled a kernel, the next one with the same specialisation goes straight to the compiled kernel: same dtypes,
same pointer alignment, same specialised integers. Pointers are passed as integers, which spares the driver's
pointer-attribute query per tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from ..registry import Plan
from ._triton import INTERPRET, require, triton

_STICKY = ("device-side assert", "illegal memory access", "launch failure", "misaligned address", "context is destroyed")
_INT32 = 1 << 31


class LaunchFailed(RuntimeError):
    """A kernel could not be compiled or launched with its plan's configuration."""

    def __init__(self, plan: Plan, cause: BaseException) -> None:
        super().__init__(f"{plan.tunable.name} with {plan.config.to_text()}: {cause}")
        self.plan, self.cause = plan, cause


def launch(plan: Plan, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], flags: tuple[Any, ...] = ()) -> None:
    """Launch `kernel` over `grid` on the current stream of the first tensor's device."""
    device = args[0].device
    if plan.compiled is None:
        _launch_ordinary(plan, kernel, grid, args, flags, device)
        return
    values: list[Any] = []
    spec: list[Any] = [id(kernel), flags]
    for arg in args:
        kind = type(arg)
        if kind is int:
            values.append(arg)
            spec.append(arg if arg == 1 or arg == 0 else (arg & 15 == 0, -_INT32 <= arg < _INT32))
        elif kind is float:
            values.append(arg)
        elif arg is None:
            values.append(arg)
            spec.append(None)
        else:
            pointer = arg.data_ptr()
            values.append(pointer)
            spec.append((arg.dtype, pointer & 15))
    found = plan.compiled.get(tuple(spec))
    index = device.index
    if found is None or torch._C._cuda_getDevice() != index or _profiled():
        compiled = _launch_ordinary(plan, kernel, grid, args, flags, device)
        constants = flags + _tail(plan, kernel, len(args) + len(flags))
        plan.compiled[tuple(spec)] = compiled.run, compiled.function, compiled.packed_metadata, constants
        return
    run, function, metadata, constants = found
    size = len(grid)
    run(
        grid[0],
        grid[1] if size > 1 else 1,
        grid[2] if size > 2 else 1,
        torch._C._cuda_getCurrentRawStream(index),
        function,
        metadata,
        None,
        None,
        None,
        *values,
        *constants,
    )


def _tail(plan: Plan, kernel: Any, start: int) -> tuple[Any, ...]:
    return tuple(plan.constexprs[name] for name in kernel.arg_names[start:])


def _launch_ordinary(plan: Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple, device: torch.device) -> Any:
    require()
    values = (*args, *flags, *_tail(plan, kernel, len(args) + len(flags)))
    try:
        if INTERPRET or device.type == "cpu":
            return kernel[grid](*values, **plan.options)
        with torch.get_device_module(device).device(device):
            return kernel[grid](*values, **plan.options)
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        if any(word in str(error) for word in _STICKY):
            raise
        raise LaunchFailed(plan, error) from error


def _profiled() -> bool:
    """Whether a profiler hooked Triton's launches: then the ordinary path, which calls the hooks, is taken."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))
