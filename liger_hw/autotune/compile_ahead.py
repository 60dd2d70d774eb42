"""A model's kernels compiled before it asks for them, several at once.

Left alone, the first step of a patched model compiles one kernel after the other, when each is first launched. So a
patched forward calls `at_first_forward`: a thread works out what the model launches at this batch's shape by running
each op forward and backward on fake tensors (no memory, no arithmetic) and noting its launches, and other threads
compile them. A launch that comes to a kernel being compiled waits for it; one whose kernel nobody foresaw compiles it,
as ever. Nothing changes but when a kernel is compiled. Off with LIGER_HW_COMPILE_AHEAD=0.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Callable, Mapping

from .. import env, registry
from ..runtime import launch as _launch
from ..runtime.observe import Observer, observing
from . import models

if TYPE_CHECKING:
    import torch

log = logging.getLogger("liger_hw")

Note = Callable[[registry.Plan, Any, tuple, tuple, tuple], None]
Job = tuple[str, tuple[int, ...], Mapping[str, Any]]
_started: dict[int, Any] = {}
"""Configs that were looked at, by id; held, so that no other takes the id."""


def at_first_forward(model: Any, args: tuple, kwargs: Mapping[str, Any]) -> "Future | None":
    """Called by a patched causal LM's forward with its arguments: `start`, once for each model config of a process.

    Not under autocast, where what dtype an op sees is not the model's to say.
    """
    import torch

    if id(model.config) in _started:
        return None
    _started[id(model.config)] = model.config
    given = [t for t in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if type(t) is torch.Tensor]
    if not given or given[0].dim() < 2 or torch.is_autocast_enabled(given[0].device.type):
        return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype is None:  # a replica of nn.DataParallel has no parameters
        return None
    batch, seq = given[0].shape[:2]
    return start(model.config, batch, seq, dtype, given[0].device)


def start(config: Any, batch: int, seq: int, dtype: "torch.dtype", device: "torch.device") -> "Future | None":
    """Compile in the background what a Hugging Face model of `config` launches for [batch, seq] tokens.

    The Future is done when every kernel is. None where there is nothing to do: no fast launcher for the device,
    switched off, a graph being captured, a config without the usual fields.
    """
    if not _launch.CAN_BE_FAST or device.type in ("cpu", "meta") or registry.is_quiet():
        return None
    if not (env.get("LIGER_HW_COMPILE_AHEAD") and registry.backend_of(device).fast_launch):
        return None
    try:
        jobs = foresee(config, batch, seq)
    except (AttributeError, ValueError):
        return None
    pool = ThreadPoolExecutor(_threads(), thread_name_prefix="liger_hw-compile")
    return pool.submit(_compile_all, pool, jobs, dtype, device)


def _threads() -> int:
    """Compiling threads: half the cores that fall to this process, 8 at most."""
    ranks = env.launcher_number("LOCAL_WORLD_SIZE", 1)
    return max(2, min(8, (os.cpu_count() or 2) // 2 // max(1, ranks)))


def _compile_all(pool: ThreadPoolExecutor, jobs: list[Job], dtype: "torch.dtype", device: "torch.device") -> None:
    waiting: list[Future] = []

    def note(plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        likeness = _launch.likeness(kernel, args, flags)
        if plan.compiled is not None and plan.compiled.setdefault(likeness, future := Future()) is future:
            waiting.append(future)
            pool.submit(_compile, future, likeness, plan, kernel, args, flags, device)

    try:
        note_launches(jobs, dtype, device, note)
    except Exception as error:  # a step that compiles its kernels itself is no failure
        log.debug("liger_hw: compiling ahead stopped: %s: %s", type(error).__name__, error)
    pool.shutdown(wait=False)
    for future in waiting:
        future.exception()


def foresee(config: Any, batch: int, seq: int) -> list[Job]:
    """(op, sizes, options of its sample) of what a patched causal LM of `config` runs, in the order of first launches.

    Raises `ValueError` for a config without the usual fields.
    """
    data = config.to_dict()
    model = models.from_config(data, type(config).__name__)
    gemma = model.activation.startswith("gelu")
    softcap = data.get("final_logit_softcapping")
    options: dict[str, Mapping[str, Any]] = {
        "rms_norm": {"casting_mode": "gemma", "offset": 1.0} if gemma else {},
        "rope": {},
        "swiglu": {},
        "geglu": {},
        "fused_linear_cross_entropy": {"softcap": softcap} if softcap else {},
    }
    return [(op, sizes, chosen) for op, chosen in options.items() for sizes in models.sizes_of(op, model, batch, seq)]


class Foreseen(Observer):
    """Calls `note(plan, kernel, grid, args, flags)` in place of each launch."""

    def __init__(self, note: Note) -> None:
        self.note = note

    def launch(self, proceed: Any, plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        self.note(plan, kernel, grid, args, flags)


def note_launches(jobs: list[Job], dtype: "torch.dtype", device: "torch.device", note: Note) -> None:
    """Call `note` for each launch of the jobs, forward and backward; none is made."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..runtime.operator import LauncherMode
    from .record import forward_and_backward

    for op, sizes, options in jobs:
        entry = registry.get_op(op)
        single = torch.autograd.set_multithreading_enabled(False)
        with FakeTensorMode(), LauncherMode(), observing(Foreseen(note)), single:
            forward_and_backward(entry, entry.sample(sizes, dtype, device, None, **options))


def _compile(future: Future, likeness: tuple, plan: Any, kernel: Any, args: tuple, flags: tuple, device: Any) -> None:
    try:
        import torch

        with torch.get_device_module(device).device(device):
            _launch.compile_only(plan, kernel, args, flags)
        future.set_result(None)
    except BaseException as error:  # whoever launches it meets the error again, and knows what to do with it
        plan.compiled.pop(likeness, None)
        future.set_exception(error)
