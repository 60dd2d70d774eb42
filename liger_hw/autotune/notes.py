"""What a process notes for later ones in the user cache: configurations that failed, and keys without an entry.

The registry calls `note_miss` and `note_failure`. Notes made while a graph is captured or torch.compile traces, and all
misses, are written at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import TYPE_CHECKING, Hashable

from ..backends import Target
from ..ops import Entry
from . import store
from .tables import Line

if TYPE_CHECKING:
    from ..ops import Plan

_pending: dict[Target, dict[Hashable, Line]] = {}
_muted = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # the parent writes its own


def mute() -> None:
    """Write nothing from this process: the tuner's workers provoke failures on purpose."""
    global _muted
    _muted = True


def forget() -> None:
    """Drop notes that are not written yet."""
    _pending.clear()


def note_miss(plan: "Plan") -> None:
    """Called for each miss on a real device; misses are written together, at exit."""
    _note(plan, {"kind": "missed"})


def note_failure(plan: "Plan", reason: str, error: BaseException, at_once: bool) -> None:
    """Quarantine a configuration for later processes too; at_once: a file may be written now.

    Not for failures of the machine: a full disk, memory, or a cooperative launch refused because of other processes on
    the device, which a later process may not have.
    """
    if not (isinstance(error, (OSError, MemoryError)) or "cooperative launch" in reason):
        _note(plan, {"kind": "failed", "reason": reason, "date": store.today()})
        if at_once:
            flush()


def _note(plan: "Plan", provenance: dict[str, str]) -> None:
    if _muted:
        return
    entry = Entry(plan.config, {**provenance, "triton": store.triton_version()}, plan.tunable.version)
    _pending.setdefault(plan.target, {})[plan.name, entry.kind, plan.config] = plan.name, entry


def flush() -> None:
    """Write what was noted so far. Runs at exit too."""
    while _pending and not _muted:
        target, lines = _pending.popitem()
        store.add(target, lines.values())


@atexit.register
def _exit() -> None:
    with contextlib.suppress(Exception):  # an error at exit must not fail a finished run
        flush()
