"""The files of stored configurations, and how they become one table per device.

User cache, `$LIGER_HW_CACHE_DIR` or `$XDG_CACHE_HOME/liger_hw` or `~/.cache/liger_hw`: one file per kind of
device, `v2/<fingerprint>.json`, in the format of the shipped tables (`tables.py`). It also holds notes for later
processes. `kind` in a line's provenance is one of:

    measured, static, modelled   a configuration for launches
    heuristic                    a search found nothing that beats the heuristic
    timed, refused               a candidate of a search that has not ended: its time, or why it cannot be used
    failed                       a configuration that failed at launch
    missed                       a key without a configuration, and what the heuristic chose

A later line replaces an earlier one about the same thing, and the end of a search removes the lines of its candidates.
A writer takes a lock in the same folder, reads the file and replaces it as a whole. So a reader sees the old file or
the new one, and no writer loses another's lines. A line that cannot be read is ignored with one warning, and dropped by
the next write.

Shipped tables: `liger_hw/backends/<vendor>/configs/<arch>.json`, or `<arch>-<device>.json` for one exact device.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import os
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Collection, Hashable, Iterable

from .. import env, files
from ..backends import Target, known_target
from ..ops import Entry, Plan
from ..text import first_line, printable
from . import lock, tables
from .tables import SCHEMA, Line, Name

log = logging.getLogger("liger_hw")
Table = dict[Name, list[Entry]]
"""All lines stored for one device, by name; the lines of a name are in order of preference."""

# kinds of lines
ANSWERS = ("measured", "static", "modelled")
ENDS = ("measured", "heuristic")
CANDIDATES = ("timed", "refused")
NOTES = ("failed", "missed")
KINDS = {
    "entries": ANSWERS,
    "misses": ("missed",),
    "quarantine": ("failed",),
    "journal": ("heuristic", *CANDIDATES),
}
"""Option of `liger-hw cache clear` -> the kinds of lines that it removes."""


# -- folders and names -----------------------------------------------------------------------------------------------


def root() -> Path | None:
    """The user cache's folder, which may not exist; None without a home directory."""
    chosen, base = env.LIGER_HW_CACHE_DIR, os.environ.get("XDG_CACHE_HOME", "")
    if not chosen and os.path.isabs(base):  # the XDG spec says: ignore relative paths
        return Path(base) / "liger_hw"
    try:
        return Path(chosen or "~/.cache/liger_hw").expanduser()
    except RuntimeError:  # no such user, or one without a home
        return None


def unwritable() -> str:
    """Why nothing can be stored in the user cache, or "". Writes a temporary folder to find out."""
    base = root()
    if base is None:
        return "no home directory to keep the cache in; set LIGER_HW_CACHE_DIR to a folder"
    try:
        existing = next(folder for folder in (base, *base.absolute().parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".liger_hw_", dir=existing):
            return ""
    except OSError as error:
        reason = error.strerror or first_line(error)
        return f"the cache {base} cannot be written ({reason}), tuning is lost; set LIGER_HW_CACHE_DIR to another"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def fingerprint(target: Target) -> str:
    """Name of a kind of device. Measurements on one device of a kind are valid for all."""
    return f"{target.vendor}-{target.arch}-{slug(target.name)}-{target.multiprocessors}mp"


def file_of(target: Target) -> Path | None:
    """The user cache's file for one kind of device."""
    base = root()
    return None if base is None else base / f"v{SCHEMA}" / f"{fingerprint(target)}.json"


def device_files() -> list[Path]:
    """The files of all devices in the user cache. Raises `OSError` if the folder cannot be read."""
    base = root()
    try:
        return sorted(path for path in (base / f"v{SCHEMA}").iterdir() if path.suffix == ".json") if base else []
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        words = "the user cache is no folder; set LIGER_HW_CACHE_DIR to one"
        raise NotADirectoryError(error.errno, words, str(base)) from None


def shipped_folder(vendor: str) -> Path:
    return Path(__file__).resolve().parent.parent / "backends" / vendor / "configs"


def header(target: Target) -> dict[str, Any]:
    """The header of a table."""
    facts = {name: getattr(target, name) for name in ("vendor", "arch", "family", "warp_size")}
    return {"kind": "table", **facts}


def triton_version() -> str:
    """Version of the installed Triton, or ""."""
    try:
        import triton

        return triton.__version__
    except Exception:  # a broken install can raise more than ImportError
        return ""


def minor(version: Any) -> str:
    """`3.7.1+git123` -> `3.7`"""
    return ".".join(str(version or "").split("+")[0].split(".")[:2])


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def warn_once(message: str) -> None:
    """Log a warning, once until `registry.reload()`."""
    log.warning("liger_hw: %s", printable(message))


# -- the user cache --------------------------------------------------------------------------------------------------


def add(target: Target, lines: Iterable[Line]) -> bool:
    """Add lines to the user cache's table of a device. If that is impossible: False, and one warning."""
    path = file_of(target)
    if path is None:
        warn_once(unwritable())
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.parent / ".lock"):
            _write(path, header(target), _merged([*lines_of(target), *lines]))
        return True
    except OSError as error:
        warn_once(f"cannot write {path}: {error}; nothing is stored there")
        return False


def remove(path: Path, kinds: Collection[str]) -> int:
    """Remove the lines of these kinds from one file of the user cache; returns their number. Raises `OSError`."""
    with files.locked(path.parent / ".lock"):
        about, lines, _ = load(path)
        kept = [line for line in lines if line[1].kind not in kinds]
        if kept:
            _write(path, about, kept)
        else:
            path.unlink(missing_ok=True)
    return len(lines) - len(kept)


def _write(path: Path, about: dict[str, Any], lines: list[Line]) -> None:
    files.replace_file(path, tables.render({**about, "device": path.stem}, lines).encode())


def _merged(lines: Iterable[Line]) -> list[Line]:
    """The lines that no later line replaces."""
    kept: dict[tuple, Line] = {}
    answered, ended = set(), set()
    for name, entry in lines:
        kernel = name, entry.version, minor(entry.provenance.get("triton"))
        part = "candidate" if entry.kind in CANDIDATES else entry.kind if entry.kind in NOTES else "answer"
        place = kernel, part, entry.config if part in ("candidate", "failed") else None
        kept.pop(place, None)  # the later line goes last
        kept[place] = name, entry
        if part == "answer":
            answered.add(kernel)
        if entry.kind in ENDS:
            ended.add(kernel)
    return [
        line
        for (kernel, part, _), line in kept.items()
        if not (part == "missed" and kernel in answered or part == "candidate" and kernel in ended)
    ]


def load(path: Path) -> tuple[dict[str, Any], list[Line], list[str]]:
    """`tables.load` for a file of the user cache, the newest line first."""
    about, lines, problems = tables.load(path, device=path.stem)
    del about["device"]
    lines.sort(key=lambda line: str(line[1].provenance.get("date", "")), reverse=True)
    return about, lines, problems


def lines_in(path: Path, problems: list[str], **expected: Any) -> list[Line]:
    """The lines of a shipped table, whose header must have the `expected` values, or (without `expected`) of a file of
    the user cache. Errors are added to `problems`."""
    try:
        _, lines, wrong = tables.load(path, **expected) if expected else load(path)
    except ValueError as error:
        problems.append(f"{path}: {error}")
        return []
    problems += [f"{path}, {text}" for text in wrong]
    return lines


def lines_of(target: Target, problems: list[str] | None = None) -> list[Line]:
    """Every line of the user cache for a device. Errors are added to `problems`."""
    path = file_of(target)
    problems = [] if problems is None else problems
    try:
        exists = path is not None and bool(os.stat(path))
    except OSError as error:  # without permission the file counts as existing: reading it gives the error
        exists = not isinstance(error, FileNotFoundError)
    return lines_in(path, problems) if exists else []


# -- one table per device --------------------------------------------------------------------------------------------


def read(target: Target) -> Table:
    """Everything stored for a device as one table, in this order: lock file, user cache, shipped tables of the device,
    of its architecture and of its family.

    Configurations chosen with another minor version of Triton come last, except a lock file's; other lines of another
    version are left out. Raises `SettingError` for a lock file that cannot be used. Other bad files give a warning.
    """
    problems: list[str] = []
    offers: list[tuple[str, Line]] = [("user", line) for line in lines_of(target, problems)]
    if not env.LIGER_HW_DISABLE_SHIPPED:
        for layer, path in _shipped_files(target):
            lines = lines_in(path, problems, vendor=target.vendor, warp_size=target.warp_size)
            offers += [(layer, line) for line in lines]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        warn_once(f"ignored what cannot be read: {problems[0]}{more}; `liger-hw cache verify` lists all of it")
    installed = minor(triton_version())
    table: Table = {}
    if pinned := env.LIGER_HW_LOCK_FILE:
        for name, entry in lock.entries(Path(pinned), target).items():
            table[name] = [replace(entry, layer="lock")]
    demoted: list[Line] = []
    for layer, (name, entry) in offers:
        version = minor(entry.provenance.get("triton"))
        if not version or not installed or version == installed:
            table.setdefault(name, []).append(replace(entry, layer=layer))
        elif entry.kind in ANSWERS:
            note = f"{entry.source} (demoted: chosen with Triton {version}, this is {installed})"
            demoted.append((name, replace(entry, layer=layer, source=note)))
    for name, entry in demoted:
        table.setdefault(name, []).append(entry)
    return table


def answers(entries: Iterable[Entry]) -> list[Entry]:
    """The lines that have a configuration for launches, in the same order."""
    return [entry for entry in entries if entry.layer == "lock" or entry.kind in ANSWERS]


def misses(target: Target) -> list[Name]:
    """The missed keys of a device for which the kernel's version still has no configuration, sorted."""

    def is_missed(entries: list[Entry]) -> bool:
        known = {entry.version for entry in answers(entries)}
        return any(entry.kind == "missed" and entry.version not in known for entry in entries)

    return sorted(name for name, entries in read(target).items() if is_missed(entries))


def _shipped_files(target: Target) -> list[tuple[str, Path]]:
    """(layer, path) of the shipped tables for a target: of the device, its architecture, then its family."""
    folder = shipped_folder(target.vendor)
    stems = sorted(path.stem for path in folder.glob("*.json"))
    layers = {f"{target.arch}-{slug(target.name)}": "shipped-device", target.arch: "shipped-arch"}
    family = [stem for stem in stems if stem not in layers and _same_family(stem.split("-", 1)[0], target)]
    layers |= dict.fromkeys(family, "shipped-family")
    return [(layer, folder / f"{stem}.json") for stem, layer in layers.items() if stem in stems]


def _same_family(arch: str, target: Target) -> bool:
    """Whether the tables of `arch` suit `target`. With another warp size, the same num_warps means other threads."""
    try:
        other = known_target(arch)
    except ValueError:
        return arch == target.arch
    same = (other.vendor, other.family, other.warp_size) == (target.vendor, target.family, target.warp_size)
    return same and bool(target.family)


# -- notes for later processes ---------------------------------------------------------------------------------------

_pending: dict[Target, dict[Hashable, Line]] = {}
_muted = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # the parent writes them


def note(plan: Plan, kind: str, **why: str) -> None:
    """Keep a line of kind `failed` or `missed` about a plan until `flush` writes it."""
    if not _muted:
        entry = Entry(plan.config, {"kind": kind, **why, "triton": triton_version()}, plan.tunable.version)
        _pending.setdefault(plan.target, {})[plan.name, kind, plan.config] = plan.name, entry


@atexit.register
def flush() -> None:
    """Write the pending notes; called at exit too."""
    with contextlib.suppress(Exception):  # an error must not fail a finished run
        while _pending and not _muted:
            target, lines = _pending.popitem()
            add(target, lines.values())


def forget() -> None:
    """Drop the pending notes."""
    _pending.clear()


def mute() -> None:
    """Write no notes from this process: a tuner's worker, where failures of candidates are expected."""
    global _muted
    _muted = True
