"""Parallel compilation of the kernels of a model's first step, or of an op's first call.

Without it, a first step compiles one kernel after another, each at its first launch: seconds with empty caches. With
it, each new call of an op in the first training forward of a patched model is first run on fake tensors, forward and
backward, which gives its launches with all their flags. Other threads compile these kernels while the step goes on. A
launch waits for its kernel.

Fake tensors have the shapes, strides and dtypes of the call's tensors, and no memory. The model's thread makes them.
The other threads get a kernel, dtypes, alignments and numbers, and never touch the model. LIGER_HW_COMPILE_AHEAD=0
switches it off.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import logging
import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Iterator

import torch

from .. import env, registry
from ..runtime import launch as _launch
from ..runtime import operator as _operator
from ..runtime.launch import LaunchTracer, observing
from .compile import arguments, stand_ins
from .fake import FakeTensors
from .record import tensors_in

log = logging.getLogger("liger_hw")
begun: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By id: configurations of models whose first forward has begun, and Functions whose first call has begun."""


def is_wanted(device: torch.device) -> bool:
    """Whether to compile ahead: if the device has a fast launcher, unless switched off or a graph is being captured."""
    if not _launch.CAN_BE_FAST or device.type in ("cpu", "meta") or registry.is_capturing_or_tracing():
        return False
    return bool(env.LIGER_HW_COMPILE_AHEAD and registry.backend_of(device).fast_launch)


@contextlib.contextmanager
def during_first_forward(config: Any, device: torch.device) -> Iterator["FirstForward | None"]:
    """A block in which ops' kernels are compiled ahead, the first time for each model configuration in a process."""
    is_first = id(config) not in begun
    if is_first:
        try:
            begun[id(config)] = config
        except TypeError:  # `config` has no weak references: do not compile ahead
            is_first = False
    if not is_first or _operator.before_apply is not None or not is_wanted(device):
        yield None
        return
    first = FirstForward(device)
    _operator.before_apply = first.note_call
    try:
        yield first
    finally:
        _operator.before_apply = None
        first.pool.shutdown(wait=False)


def before_first_call(function: Any, args: tuple) -> None:
    """Compile ahead the kernels of the first call of a Function whose first argument is a tensor."""
    if id(function) not in begun and is_wanted(args[0].device):
        with during_first_forward(function, args[0].device) as first:
            if first is not None:
                first.note_call(function, args)


class FirstForward:
    """Notes the ops that the current thread calls, and compiles their kernels in other threads.

    compiling: the specialisation of a kernel -> its Future
    """

    def __init__(self, device: torch.device) -> None:
        give_launchers_unique_names()
        self.device = device
        self.compiling: dict[tuple, Future] = {}
        self.pool = ThreadPoolExecutor(_threads(), thread_name_prefix="liger_hw-compile")
        self._ready = [self.pool.submit(_load_driver, device), self.pool.submit(_hash_triton)]
        self._thread = threading.get_ident()
        self._calls: set[tuple] = set()

    def note_call(self, function: Any, args: tuple) -> None:
        """Start compiling for a call of an op's autograd Function; called before the Function runs."""
        if threading.get_ident() != self._thread:
            return
        call = function, *map(_layout, args)
        if call in self._calls:
            return
        self._calls.add(call)
        before, _operator.before_apply = _operator.before_apply, None  # the calls on fake tensors are not noted
        try:
            with observing(LaunchTracer(self._note_launch)):
                run_on_fakes(function, args)
        except Exception as error:  # the call then compiles its kernels itself
            log.debug("liger_hw: not foreseen: %s: %s", type(error).__name__, error)
        finally:
            _operator.before_apply = before

    def _note_launch(self, plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        if plan.compiled is None:
            return
        compile_key = _launch.compile_key(kernel, args, flags)
        variant = compile_key, _launch.tuned_values(plan, kernel, args, flags), tuple(plan.options.items())
        future = self.compiling.get(variant, Future())
        if plan.compiled.setdefault(compile_key, future) is future and variant not in self.compiling:
            self.compiling[variant] = future
            self.pool.submit(self._compile, future, compile_key, plan, kernel, stand_ins(kernel, args), flags)

    def _compile(self, future: Future, compile_key: tuple, plan: Any, kernel: Any, args: tuple, flags: tuple) -> None:
        concurrent.futures.wait(self._ready)
        try:
            with torch.get_device_module(self.device).device(self.device):
                _launch.compile_only(plan, kernel, arguments(args), flags)
            future.set_result(None)
        except BaseException as error:  # the launch will raise and handle the same error
            plan.compiled.pop(compile_key, None)
            future.set_exception(error)


def _layout(value: Any) -> Any:
    """A hashable value, equal for arguments that differ only in the contents of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset() % 16, value.requires_grad
    if isinstance(value, tuple):
        return tuple(map(_layout, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def run_on_fakes(function: Any, args: tuple) -> None:
    """Run an op's autograd Function and its backward, if any, on fake tensors with the layouts of the arguments.

    The caller's random state, grad mode and saved-tensor hooks stay as they are.
    """
    has_graph = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        for mode in (FakeTensors(), torch.autograd.set_multithreading_enabled(False)):
            stack.enter_context(mode)
        # hides the fake tensors from the saved-tensor hooks of checkpointing and of activation levels
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_identity, _identity))
        fakes = [_fake(value) for value in args]
        outputs = [t for t in tensors_in(function.apply(*fakes)) if t.requires_grad]
        inputs = [t for t in tensors_in(fakes) if t.requires_grad]
        if has_graph and outputs and inputs:
            torch.autograd.grad(_BeginsBackward.apply(*outputs), inputs, allow_unused=True)


class _BeginsBackward(torch.autograd.Function):
    """A scalar of the outputs. Its backward needs no gradient argument; with one, torch imports sympy (slow)."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = tuple([t.detach() for t in outputs])
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ctx.gradients


def _identity(value: Any) -> Any:
    return value


def _fake(value: Any) -> Any:
    """A fake tensor for each tensor in `value`, with its layout and its alignment to 16 bytes."""
    if isinstance(value, tuple):
        parts = tuple(map(_fake, value))
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    if not isinstance(value, torch.Tensor):
        return value
    offset = value.storage_offset() % 16
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) if value.numel() else 0
    storage = torch.empty(offset + extent, dtype=value.dtype, device=value.device)
    return torch.as_strided(storage, value.shape, value.stride(), offset).requires_grad_(value.requires_grad)


def _load_driver(device: torch.device) -> None:
    """Load Triton's driver of a device, which builds a C extension if Triton's cache is empty."""
    from triton.compiler.compiler import make_backend

    with torch.get_device_module(device).device(device):
        make_backend(_launch.triton.runtime.driver.active.get_current_target()).hash()


def _hash_triton() -> None:
    """Compute and cache Triton's hash of its files, part of each kernel's cache key. Otherwise each compiling thread
    would hash hundreds of megabytes."""
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):  # the latter up to Triton 3.4
        triton_key = getattr(importlib.import_module(module), "triton_key", None)
        if triton_key is not None:
            triton_key()
            return


def give_launchers_unique_names() -> None:
    """Let several threads load Triton's launchers at once.

    Up to Triton 3.6 every signature of a kernel has a launcher, a C extension that is always named `__triton_launcher`.
    Python keeps one module object for each name, so a thread could get the launcher that another thread loads at the
    same time. So each is loaded under the name of its folder in Triton's cache, which is the hash of its source.
    """
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None or load.__module__ == __name__:
        return

    def load_by_folder(name: str, path: str) -> Any:
        return load(f"{os.path.basename(os.path.dirname(path))}.{name}", path)

    build._load_module_from_path = load_by_folder


def _threads() -> int:
    """Number of compiling threads: this process's share of the cores, at most 24."""
    ranks = env.launcher_number("LOCAL_WORLD_SIZE", 1)
    return max(2, min(24, (os.cpu_count() or 2) // max(1, ranks)))
