"""What a process notes for later ones in the user cache: configurations that failed, and keys without an entry.

The registry calls `note_failure` and `note_miss`. Nothing here touches a file while a graph is captured or
torch.compile traces; what came up then, and every miss, is written at exit.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Callable

from ..answers import Key
from ..backends import LaunchConfig, Target
from ..text import printable
from . import store
from .tables import Name, to_key, to_name

if TYPE_CHECKING:
    from ..ops import Plan

_pending: list[Callable[[], None]] = []
_missed: dict[Name, Target] = {}
_muted = False
_exit_in: int | None = None
"""The process whose exit handler is registered; a forked child has its parent's misses, and is not to write them."""


def is_quiet() -> bool:
    """Whether this is no moment to touch a file or a clock: a graph is being captured or torch.compile is tracing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is not None and module.is_initialized() and capturing():
            return True
    return False


def mute() -> None:
    """Write nothing from this process: the tuner's workers provoke failures on purpose."""
    global _muted
    _muted = True


def forget() -> None:
    """Drop the misses that are not written yet."""
    _missed.clear()


def note_miss(name: Name, target: Target) -> None:
    """Called for each miss on a real device; they are written once, at exit."""
    _missed[name] = target
    _at_exit()


def note_failure(plan: "Plan", reason: str, error: BaseException) -> None:
    """Quarantine a configuration for later processes too.

    Not where the machine failed: a full disk, memory, or a cooperative launch refused for the share of the device that
    this process has, which the next one need not have.
    """
    if _muted or isinstance(error, (OSError, MemoryError)) or "cooperative launch" in reason:
        return

    def write() -> None:
        save_quarantined(plan.target, plan.tunable.name, plan.key, plan.config, reason, plan.tunable.version)

    if is_quiet():
        _pending.append(write)
        _at_exit()
    else:
        write()


def flush() -> None:
    """Write what is pending and the misses so far. Runs at exit; safe to call at any quiet time."""
    if _muted or is_quiet():
        return
    while _pending:
        _pending.pop()()
    by_target: dict[Target, list] = {}
    while _missed:
        name, target = _missed.popitem()
        by_target.setdefault(target, []).append(name)
    for target, names in by_target.items():
        save_misses(target, names)


def _at_exit() -> None:
    global _exit_in
    if _exit_in is None:
        _exit_in = os.getpid()
        atexit.register(_exit)


def _exit() -> None:
    if os.getpid() == _exit_in:
        try:
            flush()
        except Exception:  # an exit handler must not turn a finished run into a failed one
            pass


# -- files -----------------------------------------------------------------------------------------------------------


def save_quarantined(target: Target, tunable: str, key: Key, config: LaunchConfig, reason: str, version: int) -> None:
    """Remember on disk that a configuration failed at launch, for these versions of the kernel and of Triton."""
    triton = store.triton_version()
    record = {
        "schema": store.SCHEMA,
        "tunable": tunable,
        "key": list(key),
        "config": config.to_json(),
        "reason": reason,
        "version": version,
        "triton": triton,
        "date": store.today(),
    }
    if folder := store.home(target):
        valid_for = [tunable, list(key), config.to_text(), version, store.minor(triton)]
        path = folder / "_quarantine" / f"{store.digest(valid_for)}.json"
        store.write_atomic(path, json.dumps(record, sort_keys=True) + "\n")


def read_quarantined(target: Target) -> list[tuple[str, Key, LaunchConfig, str, int]]:
    """(tunable, key, config, reason, version of the kernel) of what failed before with this Triton."""
    here = store.minor(store.triton_version())

    def failed(data: Any) -> list[tuple[str, Key, LaunchConfig, str, int]]:
        if data.get("schema") != store.SCHEMA or store.minor(str(data.get("triton", ""))) != here:
            return []
        config, reason = LaunchConfig.from_json(data["config"]), printable(str(data["reason"]))
        return [(str(data["tunable"]), to_key(data["key"]), config, reason, int(data["version"]))]

    return _read(target, "_quarantine", failed)


def save_misses(target: Target, names: list[Name]) -> None:
    """Note what a process found no entry for; the same misses give the same file, so runs do not pile up."""
    folder = store.home(target)
    if folder is None or not names:
        return
    listed = sorted([op, variant, list(key)] for op, variant, key in names)
    path = folder / "_misses" / f"{store.digest(listed)}.json"
    if not path.exists():
        store.write_atomic(path, json.dumps({"schema": store.SCHEMA, "misses": listed}) + "\n")


def read_misses(target: Target) -> list[Name]:
    """Every miss recorded for a device, sorted, each once."""
    return sorted(set(_read(target, "_misses", lambda data: [to_name(*name) for name in data["misses"]])))


def _read(target: Target, kind: str, parse: Callable[[Any], list[Any]]) -> list[Any]:
    """What `parse` makes of each file of one kind, together; what cannot be read is left out with one warning."""
    folder = store.home(target)
    problems: list[str] = []
    found: list[Any] = []
    for path, data in store.json_files(folder / kind, problems) if folder else ():
        try:
            found += parse(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{path}: {error}")
    store.report(problems, target)
    return found
