"""A model's kernels compiled before it asks for them, several at once.

Left alone, the first step of a patched model compiles one kernel after the other, when each is first launched. `start`
takes jobs, which say what to run on fake tensors (no memory, no arithmetic) for the launches of a step: a thread runs
them and notes the launches, and other threads compile them in the order of need.
A launch that comes to a kernel being compiled waits for it; one whose kernel nobody foresaw compiles it, as ever.
Nothing changes but when a kernel is compiled. Off with LIGER_HW_COMPILE_AHEAD=0.

Triton's front end is Python: one thread at a time makes progress in it. Side by side the front ends of all kernels
would end at about the same time, so they run one after the other (`_in_turn`), and the kernel that is needed first is
ready first. The rest of a compilation (LLVM, ptxas, the C compiler) runs in parallel.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Callable

from .. import env, registry
from ..locks import fork_safe, import_module
from ..runtime import launch as _launch
from ..runtime.observe import Foreseen, observing

if TYPE_CHECKING:
    import torch

log = logging.getLogger("liger_hw")

Note = Callable[[registry.Plan, Any, tuple, tuple, tuple], None]
Job = Callable[[], Callable[[], None]]
"""Makes fake tensors and computes with them: forward when it is called, backward when what it returns is called."""

_front_end = fork_safe(threading.RLock())


def is_wanted(device: "torch.device") -> bool:
    """Whether to compile ahead for a device: it has the fast launcher, it is not switched off, no graph is captured."""
    if not _launch.CAN_BE_FAST or device.type in ("cpu", "meta") or registry.is_quiet():
        return False
    return bool(env.get("LIGER_HW_COMPILE_AHEAD") and registry.backend_of(device).fast_launch)


def start(jobs: list[Job], device: "torch.device") -> Future:
    """Compile in the background what `jobs` launch on `device`. The Future is done when every kernel is.

    Returns when the launches are noted, so that the caller's own find the kernels in the making; where Triton can
    compile at once there is less to wait for, and the caller goes on.
    """
    name_launchers_apart()
    pool = ThreadPoolExecutor(2 + _threads(), thread_name_prefix="liger_hw-compile")
    ready = [pool.submit(_load_driver, device), pool.submit(_hash_triton)]
    prepared, noted = pool.submit(concurrent.futures.wait, ready), Future()
    done = pool.submit(_compile_all, pool, jobs, device, ready, noted)  # the last: it closes the pool
    concurrent.futures.wait([noted, prepared], return_when=concurrent.futures.FIRST_COMPLETED)
    return done


def _load_driver(device: "torch.device") -> None:
    """What Triton needs to know of a device: with an empty cache it builds a C extension for that."""
    import torch
    from triton.compiler.compiler import make_backend

    with torch.get_device_module(device).device(device):
        make_backend(_launch.triton.runtime.driver.active.get_current_target()).hash()


def _hash_triton() -> None:
    """The hash of Triton's own files, which is part of every kernel's name in its cache. Triton keeps it once it has
    it; threads that ask for it before would each read and hash hundreds of megabytes."""
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):  # the latter up to Triton 3.4
        hashed = getattr(import_module(module), "triton_key", None)
        if hashed is not None:
            hashed()
            return


def name_launchers_apart() -> None:
    """Let several threads load Triton's launchers at once.

    Up to Triton 3.6 every signature of a kernel has a launcher of its own, a C extension that is always called
    `__triton_launcher`. Python keeps one module object for extensions of one name: a thread that loads a launcher again
    could be given the function of the launcher that another thread loads meanwhile, and a kernel would get the
    arguments of another. So each is loaded under the name of its folder in Triton's cache, the hash of its source.
    """
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None or load.__module__ == __name__:
        return

    def load_apart(name: str, path: str) -> Any:
        return load(f"{os.path.basename(os.path.dirname(path))}.{name}", path)

    build._load_module_from_path = load_apart


def _threads() -> int:
    """Compiling threads: of the cores that fall to this process three quarters, 12 at most. Most of them wait, for the
    front end or for a compiler that is a process of its own."""
    ranks = env.launcher_number("LOCAL_WORLD_SIZE", 1)
    return max(2, min(12, (os.cpu_count() or 2) * 3 // 4 // max(1, ranks)))


def _compile_all(
    pool: ThreadPoolExecutor, jobs: list[Job], device: "torch.device", ready: list[Future], noted: Future
) -> None:
    compiling: dict[tuple, Future] = {}

    def note(plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        if plan.compiled is None:
            return
        likeness = _launch.likeness(kernel, args, flags)
        same = likeness, _launch.tuned_values(plan, kernel, args, flags), tuple(plan.options.items())
        future = compiling.get(same, Future())
        if plan.compiled.setdefault(likeness, future) is future and same not in compiling:
            compiling[same] = future
            pool.submit(_compile, future, ready, likeness, plan, kernel, args, flags, device)

    try:
        note_launches(jobs, note)
    finally:
        noted.set_result(None)
        pool.shutdown(wait=False)
    for future in compiling.values():
        future.exception()


def note_launches(jobs: list[Job], note: Note) -> None:
    """Call `note` for each launch of the jobs, about in the order of a step: every forward, then the last job's
    backward, which is the loss's, and those of the others. Nothing is launched. A job that fails is left out."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..runtime.operator import LauncherMode

    def tried(run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:  # a step that compiles its kernels itself is no failure
            log.debug("liger_hw: not foreseen: %s: %s", type(error).__name__, error)
            return None

    single = torch.autograd.set_multithreading_enabled(False)
    with FakeTensorMode(), LauncherMode(), observing(Foreseen(note)), single:
        backwards = [backward for job in jobs if (backward := tried(job)) is not None]
        for backward in backwards[-1:] + backwards[:-1]:
            tried(backward)


def _compile(
    future: Future, ready: list[Future], likeness: tuple, plan: Any, kernel: Any, args: tuple, flags: tuple, device: Any
) -> None:
    """ready: the Futures of what every compilation needs first."""
    concurrent.futures.wait(ready)
    try:
        import torch

        with torch.get_device_module(device).device(device):
            _in_turn(kernel)
            _launch.compile_only(plan, kernel, args, flags)
        future.set_result(None)
    except BaseException as error:  # whoever launches it meets the error again, and knows what to do with it
        plan.compiled.pop(likeness, None)
        future.set_exception(error)


def _in_turn(kernel: Any) -> None:
    """Let Triton run the front end of a kernel of ours when no other thread compiles one of ours."""
    with _front_end:  # else two threads might make the kernel's binder, which sets `compile`
        kernel.device_caches[_launch.triton.runtime.driver.active.get_current_device()]
    compiler = kernel.compile
    if getattr(compiler, "__module__", "") == __name__:
        return

    def compile_in_turn(source: Any, *args: Any, **options: Any) -> Any:
        front = source.make_ir

        def in_turn(*given: Any, **more: Any) -> Any:
            with _front_end:
                return front(*given, **more)

        source.make_ir = in_turn
        try:
            return compiler(source, *args, **options)
        finally:
            del source.make_ir

    kernel.compile = compile_in_turn
