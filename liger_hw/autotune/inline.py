"""Tuning on a miss, inside a running program (`LIGER_HW_AUTOTUNE=1`): a few seconds for each new tunable and key.

The registry imports this module at the first such miss. The measuring happens in a worker process on the same device: a
candidate that crashes the device does not end the training. It needs some device memory of its own; where that is not
free the heuristic stays.
"""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import replace
from typing import Any, Callable

from .. import env, registry
from ..backends import Target
from ..ops import Entry, Key, Tunable
from . import store
from .jobs import at_key
from .tuner import Effort, Tuner
from .workers import CompilePool, RemoteMeasurer

log = logging.getLogger("liger_hw")
EFFORT = Effort(first=32, later=16, refine=4, finalists=3, confirm_rounds=20, job_seconds=5.0)

new_measurer: Callable[[str], Any] = RemoteMeasurer
_tuners: dict[Target, Tuner] = {}
_off = False
"""After a failure, and under several ranks."""


def tune_on_miss(tunable: Tunable, target: Target, device: Any, key: Key) -> bool:
    """Tune one tunable at one key within a few seconds; whether an entry was stored.

    Not under several ranks, which would wait for each other and disagree: `liger-hw autotune --from-misses` tunes what
    a run found no entry for.
    """
    if _off:
        return False
    if _is_one_of_several():
        return _switch_off(
            "LIGER_HW_AUTOTUNE=1 is ignored among several ranks (WORLD_SIZE, torch.distributed); run `liger-hw "
            "autotune` first, or `liger-hw autotune --from-misses` after a run"
        )
    try:
        return _tune(tunable, target, device, key)
    except Exception as error:
        return _switch_off(f"tuning on a miss failed and is off in this process: {type(error).__name__}: {error}")


def _switch_off(reason: str) -> bool:
    global _off
    _off = True
    store.warn_once("inline", reason)
    return False


def _is_one_of_several() -> bool:
    """Whether other ranks train beside this process: what a launcher says, or a process group that exists."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return env.launcher_number("WORLD_SIZE", 1) > 1


def _tune(tunable: Tunable, target: Target, device: Any, key: Key) -> bool:
    job = at_key(tunable.op, tunable.variant, key)
    if job is None:
        return False
    (result,) = _tuner(target, device).run([job])
    if result.error:
        store.warn_once(f"inline {tunable.name}", f"{tunable.name} {key} was not tuned: {result.error}")
        return False
    log.info("liger_hw: tuned %s %s: %.2f -> %.2f us", tunable.name, key, result.heuristic_us, result.winner_us)
    return result.stored


def _tuner(target: Target, device: Any) -> Tuner:
    def save(name: tuple[str, str, Key], entry: Entry) -> bool:
        """Into the cache and into the table in use, as it serves this process where the cache cannot be written."""
        if entry.kind in store.CANDIDATES:  # a search of seconds is not resumed
            return True
        store.add(target, [(name, entry)])
        entries = registry.table(target).setdefault(name, [])
        entries.insert(sum(one.layer == "lock" for one in entries), replace(entry, layer="user"))
        return True

    if target not in _tuners:
        measurer = new_measurer(str(device))
        pool = None
        if target.vendor != "cpu":
            pool = CompilePool(max(1, min(4, (os.cpu_count() or 2) - 1)), seconds=60.0)
            atexit.register(pool.close)
        atexit.register(measurer.close)
        _tuners[target] = Tuner(target, measurer, facts=measurer.facts(), pool=pool, effort=EFFORT, save=save)
    return _tuners[target]
