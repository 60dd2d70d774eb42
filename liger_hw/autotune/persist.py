"""What the registry keeps from one process to the next: failures, misses, and tuning on a miss where that is asked for.

Nothing here touches a file while a graph is captured or torch.compile traces; what came up then is written at exit.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Callable

from .. import env, registry
from ..backends import Target
from ..registry import Key, Plan, Tunable
from . import notes, store

_pending: list[Callable[[], None]] = []
_missed: dict[tuple[str, str, Key], Target] = {}
_state: dict[str, Any] = {"registered": False, "pid": None, "muted": False, "inline": None}


def mute() -> None:
    """Write nothing from this process: the tuner's workers provoke failures on purpose."""
    _state["muted"] = True


def note_miss(name: tuple[str, str, Key], target: Target, device: Any) -> None:
    """Called for each miss; those of a real device are written once, at exit."""
    if device.type != "cpu" and not registry.pretended():
        _missed[name] = target
        _at_exit()


def note_failure(plan: Plan, reason: str, error: BaseException) -> None:
    """Set a configuration aside for later processes too.

    Not where the machine failed (a full disk, memory; a launch refused for the share of the device that this process has,
    which the next need not have), nor on CPU tensors or a pretended target: there the interpreter or a test failed.
    """
    machine = isinstance(error, (OSError, MemoryError)) or "cooperative launch" in reason
    pretended = plan.device.type == "cpu" or registry.pretended()
    if _state["muted"] or machine or pretended or plan.layer == "safe":
        return
    kernel_hash = plan.tunable.kernel_hash()

    def write() -> None:
        notes.save_quarantined(plan.target, plan.tunable.name, plan.key, plan.config, reason, kernel_hash)

    if registry.is_quiet():
        _pending.append(write)
        _at_exit()
    else:
        write()


def forget() -> None:
    """Drop the misses that are not written yet."""
    _missed.clear()


def flush() -> None:
    """Write what is pending and the misses so far. Runs at exit; safe to call at any quiet time."""
    if _state["muted"] or registry.is_quiet():
        return
    while _pending:
        _pending.pop()()
    by_target: dict[Target, list] = {}
    while _missed:
        name, target = _missed.popitem()
        by_target.setdefault(target, []).append(name)
    for target, names in by_target.items():
        notes.save_misses(target, names)


def _at_exit() -> None:
    if not _state["registered"]:
        _state["registered"], _state["pid"] = True, os.getpid()
        atexit.register(_exit)


def _exit() -> None:
    if os.getpid() == _state["pid"]:  # not in a forked child, which has its parent's misses
        try:
            flush()
        except Exception:  # an exit handler must not turn a finished run into a failed one
            pass


def tune_now(tunable: Tunable, target: Target, device: Any, key: Key) -> bool:
    """Tune one tunable on a miss (`LIGER_HW_AUTOTUNE=1`) within a few seconds; whether an entry was stored.

    Measured in a separate process, so that a candidate that crashes the device does not end the training. Not under
    several ranks: they would wait for each other and disagree; tune before, then `liger_hw.distributed.sync()`.
    """
    if (target.vendor == "cpu" and not registry.interpreting()) or registry.pretended():
        return False
    if _state["inline"] == "off":
        return False
    if env.launcher_number("WORLD_SIZE", 1) > 1:
        _state["inline"] = "off"
        store.warn_once(
            "inline ranks", "LIGER_HW_AUTOTUNE=1 is ignored with WORLD_SIZE > 1; run `liger-hw autotune` first"
        )
        return False
    from . import inline

    try:
        return inline.tune(tunable, target, device, key)
    except Exception as error:
        _state["inline"] = "off"
        store.warn_once(
            "inline", f"tuning on a miss failed and is off in this process: {type(error).__name__}: {error}"
        )
        return False
