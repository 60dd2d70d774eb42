"""A model's kernels compiled before it asks for them, several at once.

Left alone, the first step of a patched model compiles one kernel after the other, when each is first launched. So a
patched forward calls `transformers/rehearse.py`, which says what to run on fake tensors (no memory, no arithmetic) for
the launches of the step: a thread runs it and notes the launches, and other threads compile them. A launch that comes
to a kernel being compiled waits for it; one whose kernel nobody foresaw compiles it, as ever. Nothing changes but when
a kernel is compiled. Off with LIGER_HW_COMPILE_AHEAD=0.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Callable

from .. import env, registry
from ..runtime import launch as _launch
from ..runtime.observe import Foreseen, observing

if TYPE_CHECKING:
    import torch

log = logging.getLogger("liger_hw")

Note = Callable[[registry.Plan, Any, tuple, tuple, tuple], None]
Job = Callable[[], None]
"""Makes fake tensors and computes with them, forward and backward."""


def is_wanted(device: "torch.device") -> bool:
    """Whether to compile ahead for a device: it has the fast launcher, it is not switched off, no graph is captured."""
    if not _launch.CAN_BE_FAST or device.type in ("cpu", "meta") or registry.is_quiet():
        return False
    return bool(env.get("LIGER_HW_COMPILE_AHEAD") and registry.backend_of(device).fast_launch)


def start(jobs: list[Job], device: "torch.device") -> Future:
    """Compile in the background what `jobs` launch on `device`. The Future is done when every kernel is."""
    name_launchers_apart()
    pool = ThreadPoolExecutor(
        1 + _threads(), thread_name_prefix="liger_hw-compile"
    )  # one notes, and waits for the others
    return pool.submit(_compile_all, pool, jobs, device)


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
    """Compiling threads: half the cores that fall to this process, 8 at most."""
    ranks = env.launcher_number("LOCAL_WORLD_SIZE", 1)
    return max(2, min(8, (os.cpu_count() or 2) // 2 // max(1, ranks)))


def _compile_all(pool: ThreadPoolExecutor, jobs: list[Job], device: "torch.device") -> None:
    waiting: list[Future] = []

    def note(plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        likeness = _launch.likeness(kernel, args, flags)
        if plan.compiled is not None and plan.compiled.setdefault(likeness, future := Future()) is future:
            waiting.append(future)
            pool.submit(_compile, future, waiting[0], likeness, plan, kernel, args, flags, device)

    note_launches(jobs, note)
    pool.shutdown(wait=False)
    for future in waiting:
        future.exception()


def note_launches(jobs: list[Job], note: Note) -> None:
    """Call `note` for each launch of the jobs; none is made. A job that fails is left out."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..runtime.operator import LauncherMode

    for job in jobs:
        single = torch.autograd.set_multithreading_enabled(False)
        try:
            with FakeTensorMode(), LauncherMode(), observing(Foreseen(note)), single:
                job()
        except Exception as error:  # a step that compiles its kernels itself is no failure
            log.debug("liger_hw: not foreseen: %s: %s", type(error).__name__, error)


def _compile(
    future: Future, first: Future, likeness: tuple, plan: Any, kernel: Any, args: tuple, flags: tuple, device: Any
) -> None:
    """first: the Future of the first kernel, which compiles alone. Triton hashes its own files and builds its driver
    when it first compiles, and would do so in every thread that begins before that is done."""
    if first is not future:
        first.exception()
    try:
        import torch

        with torch.get_device_module(device).device(device):
            _launch.compile_only(plan, kernel, args, flags)
        future.set_result(None)
    except BaseException as error:  # whoever launches it meets the error again, and knows what to do with it
        plan.compiled.pop(likeness, None)
        future.set_exception(error)
