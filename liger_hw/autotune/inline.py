"""Tuning on a miss, inside a running program (`LIGER_HW_AUTOTUNE=1`): a few seconds for each new tunable and key.

The measuring happens in a worker process on the same device: what it tries cannot hurt this one. It needs some device
memory of its own; where that is not free the heuristic stays.
"""

from __future__ import annotations

import atexit
import logging
import os
from typing import Any, Callable

from .. import registry
from ..backends import Target
from ..registry import Entry, Key, Tunable
from . import space, store
from .jobs import Job
from .tuner import Effort, Tuner
from .workers import CompilePool, RemoteMeasurer

log = logging.getLogger("liger_hw")
EFFORT = Effort(first=32, later=16, refine=4, finalists=3, confirm_rounds=20, job_seconds=5.0)

new_measurer: Callable[[str], Any] = RemoteMeasurer
_tuners: dict[Target, Tuner] = {}


def tune(tunable: Tunable, target: Target, device: Any, key: Key) -> bool:
    """Tune one tunable at one key; whether a configuration beat the heuristic and is now in the tables."""
    guess = space.sizes_for(registry.get_op(tunable.op), tunable, key)
    if guess is None:
        return False
    found: list[tuple[tuple, Entry]] = []
    tuner = _tuner(target, device)

    def save(name: tuple, entry: Entry) -> bool:
        store.save(target, name, entry)  # where it cannot be written it still serves this process
        found.append((name, entry))
        return True

    tuner.save = save
    result = tuner.run([Job(tunable.op, tunable.variant, key, *guess)])[0]
    if result.error:
        store.warn_once(f"inline {tunable.name}", f"{tunable.name} {key} was not tuned: {result.error}")
        return False
    log.info("liger_hw: tuned %s %s: %.2f -> %.2f us", tunable.name, key, result.heuristic_us, result.winner_us)
    layers = registry.tables(target)
    place = sum(layer == "lock" for layer, _ in layers)
    layers[place:place] = [("user", {name: entry}) for name, entry in found]
    return bool(found)


def _tuner(target: Target, device: Any) -> Tuner:
    if target not in _tuners:
        measurer = new_measurer(str(device))
        pool = None
        if target.vendor != "cpu":
            pool = CompilePool(max(1, min(4, (os.cpu_count() or 2) - 1)), seconds=60.0)
            atexit.register(pool.close)
        atexit.register(measurer.close)
        _tuners[target] = Tuner(target, measurer, facts=measurer.facts(), pool=pool, effort=EFFORT)
    return _tuners[target]
