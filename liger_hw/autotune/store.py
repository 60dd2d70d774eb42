"""Where stored configurations live, and how all of them become one table per device.

User cache, `$LIGER_HW_CACHE_DIR` or `$XDG_CACHE_HOME/liger_hw` or `~/.cache/liger_hw`: one file per kind of
device, `v2/<fingerprint>.json`, in the format of the shipped tables (`tables.py`). Besides configurations it holds
notes that a process left for later ones. The kind in a line's provenance says which a line is:

    measured, static, modelled   a configuration that answers
    heuristic                    a search found nothing that beats the heuristic
    timed, refused               a candidate of a search that has not ended: its time, or why it cannot be used
    failed                       a configuration that failed at launch
    missed                       a key for which no line answered, with what the heuristic chose

Of two lines about the same thing the later one counts, and the end of a search takes the lines of its candidates away.
A writer holds a lock in the same folder, reads the file and puts a whole one in its place: a reader sees the old file
or the new one, and two writers lose nothing. What cannot be read is ignored with one warning.

Shipped tables: `liger_hw/backends/<vendor>/configs/<arch>.json`, or `<arch>-<device>.json` for one exact device.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Collection, Iterable

from .. import env, files
from ..backends import Target, known_target
from ..ops import Entry
from ..text import first_line, printable
from . import lock, tables
from .tables import SCHEMA, Line, Name

log = logging.getLogger("liger_hw")
Table = dict[Name, list[Entry]]
"""Everything that is stored for one device: the lines of each name, the best first."""

ANSWERS = ("measured", "static", "modelled")
"""Kinds of lines that answer."""
ENDS = ("measured", "heuristic")
"""Kinds of lines that end a search."""
CANDIDATES = ("timed", "refused")
"""Kinds of lines about a candidate of a search that has not ended."""
KINDS = {
    "entries": ANSWERS,
    "misses": ("missed",),
    "quarantine": ("failed",),
    "journal": ("heuristic", *CANDIDATES),
}
"""What `liger-hw cache clear` removes, by the name of its option."""

_warned: set[str] = set()


# -- folders and names -----------------------------------------------------------------------------------------------


def root() -> Path | None:
    """The user cache's folder (it may not exist), or None if there is no home to put one in."""
    chosen = env.get("LIGER_HW_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG spec says: ignore relative paths
        return Path(base) / "liger_hw"
    try:
        return Path.home() / ".cache" / "liger_hw"
    except RuntimeError:
        return None


def unwritable() -> str:
    """Why nothing can be stored in the user cache, or "". It is tried, and nothing is left behind."""
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
    """Name of a kind of device: two devices share it only when a measurement on one holds on the other."""
    return f"{target.vendor}-{target.arch}-{slug(target.name)}-{target.multiprocessors}mp"


def file_of(target: Target) -> Path | None:
    """The user cache's file for one kind of device."""
    base = root()
    return None if base is None else base / f"v{SCHEMA}" / f"{fingerprint(target)}.json"


def device_files() -> list[Path]:
    """The file of every kind of device that has something in the user cache. Raises `OSError` if unreadable."""
    base = root()
    try:
        return sorted(path for path in (base / f"v{SCHEMA}").iterdir() if path.suffix == ".json") if base else []
    except FileNotFoundError:
        return []


def shipped_folder(vendor: str) -> Path:
    return Path(__file__).resolve().parent.parent / "backends" / vendor / "configs"


def header(target: Target) -> dict[str, Any]:
    """What a table says about itself."""
    return {
        "kind": "table",
        "vendor": target.vendor,
        "arch": target.arch,
        "family": target.family,
        "warp_size": target.warp_size,
    }


def triton_version() -> str:
    """Version of the Triton at hand, `""` without one."""
    try:
        import triton

        return str(getattr(triton, "__version__", ""))
    except Exception:  # a clobbered install fails in more ways than ImportError
        return ""


def minor(version: Any) -> str:
    """`3.7.1+git123` -> `3.7`"""
    return ".".join(str(version or "").split("+")[0].split(".")[:2])


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def warn_once(topic: str, message: str) -> None:
    """One warning per topic and process: a broken cache must not fill a log."""
    if topic not in _warned:
        _warned.add(topic)
        log.warning("liger_hw: %s", printable(message))


def forget_warnings() -> None:
    """Let every warning be given again; called by `registry.reload()`."""
    _warned.clear()


# -- the user cache --------------------------------------------------------------------------------------------------


def add(target: Target, lines: Iterable[Line]) -> bool:
    """Add lines to the user cache's table of a device; False, and one warning, if that is impossible."""
    path = file_of(target)
    if path is None:
        warn_once("no home", unwritable())
        return False
    new = [tables.to_record(name, entry) for name, entry in lines]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.parent / ".lock"):
            records = _records(path)
            merged = _merged([*records, *new])
            if merged != records:
                about = {**header(target), "device": path.stem}
                files.replace_file(path, tables.render_records(about, merged).encode(), 0o644)
        return True
    except (OSError, RecursionError) as error:
        warn_once("write", f"cannot write {path}: {error}; nothing is stored there")
        return False


def remove(path: Path, kinds: Collection[str]) -> int:
    """Remove the lines of these kinds from one file of the user cache; how many there were. Raises `OSError`."""
    with files.locked(path.parent / ".lock"):
        about, records = _parsed(path)
        kept = [record for record in records if _kind(record) not in kinds]
        if kept:
            files.replace_file(path, tables.render_records(about, kept).encode(), 0o644)
        else:
            path.unlink()
    return len(records) - len(kept)


def _records(path: Path) -> list[Any]:
    """The lines of a file as plain JSON data; a file that cannot be read is set aside."""
    if not os.path.exists(path):
        return []
    try:
        return _parsed(path)[1]
    except ValueError as error:
        aside = path.with_suffix(".unreadable")
        os.replace(path, aside)
        warn_once("set aside", f"{path} could not be used and is now {aside.name}: {error}")
        return []


def _parsed(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """(header as of a shipped table and the device, lines as plain JSON data) of a file. Raises `ValueError`."""
    about, records = tables.parse_records(tables.read(path))
    if about.get("device") != path.stem:
        raise ValueError(f"made for {about.get('device')!r}, found as {path.name}")
    shown = {"kind": "table", **{name: about.get(name) for name in ("vendor", "arch", "family", "warp_size", "device")}}
    if [type(value) for value in shown.values()] != [str, str, str, str, int, str]:
        raise ValueError("its header does not say which device it is for")
    return shown, records


def _kind(record: Any) -> str:
    provenance = record.get("provenance") if isinstance(record, dict) else None
    return str(provenance.get("kind")) if isinstance(provenance, dict) else ""


def _merged(records: list[Any]) -> list[Any]:
    """Lines without those that later ones replace. A line that this version cannot read stays as it is."""
    kept: dict[tuple, Any] = {}
    answered, ended = set(), set()
    for record in records:
        kind, part, config = _kind(record), "answer", None
        about = json.dumps(record, sort_keys=True)
        if kind in ("failed", *CANDIDATES):
            part, config = (
                "failed" if kind == "failed" else "candidate",
                json.dumps(record.get("config"), sort_keys=True),
            )
        elif kind == "missed":
            part = kind
        if kind:
            triton = minor(record["provenance"].get("triton"))
            about = json.dumps([*map(record.get, ("op", "variant", "key")), record.get("version", 1), triton])
        kept.pop((about, part, config), None)
        kept[about, part, config] = record
        answered |= {about} if part == "answer" else set()
        ended |= {about} if kind in ENDS else set()
    gone = {(about, "missed", None) for about in answered}
    return [
        record
        for place, record in kept.items()
        if place not in gone and not (place[1] == "candidate" and place[0] in ended)
    ]


def load(path: Path) -> tuple[dict[str, Any], list[Line], list[str]]:
    """(header as of a shipped table, lines, problems) of one file of the user cache, the newest line first.

    Raises `ValueError` if the whole file cannot be used.
    """
    about, records = _parsed(path)
    del about["device"]
    lines, problems = tables.lines_of(records, str(path))
    lines.sort(key=lambda line: str(line[1].provenance.get("date", "")), reverse=True)
    return about, lines, problems


def lines_of(target: Target) -> list[Line]:
    """Every line that the user cache has for a device."""
    return _user_lines(target, [])


def _user_lines(target: Target, problems: list[str]) -> list[Line]:
    path = file_of(target)
    if path is None:
        return []
    try:
        if not path.exists():
            return []
        _, lines, wrong = load(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return []
    problems += [f"{path}, {text}" for text in wrong]
    return lines


# -- one table per device --------------------------------------------------------------------------------------------


def read(target: Target) -> Table:
    """Everything stored for a device as one table: lock file, user cache, shipped tables of the device, of its
    architecture and of its family, in this order.

    Entries made with another minor version of Triton come after those with this one, except a lock file's; notes
    made with another version are left out. Bad file contents never raise, except in a requested lock file that is
    unusable (`SettingError`).
    """
    problems: list[str] = []
    offers: list[tuple[str, Line]] = [("user", line) for line in _user_lines(target, problems)]
    if not env.get("LIGER_HW_DISABLE_SHIPPED"):
        for layer, path in _shipped_files(target):
            offers += [(layer, line) for line in _read_shipped(path, target, problems)]
    report(problems, target)
    here = minor(triton_version())
    table: Table = {}
    if pinned := env.get("LIGER_HW_LOCK_FILE"):
        for name, entry in lock.entries(Path(pinned), target).items():
            table[name] = [replace(entry, layer="lock")]
    late: list[Line] = []
    for layer, (name, entry) in offers:
        version = minor(entry.provenance.get("triton"))
        if not version or not here or version == here:
            table.setdefault(name, []).append(replace(entry, layer=layer))
        elif entry.kind in ANSWERS:
            note = f"{entry.source} (demoted: measured with Triton {version}, this is {here})"
            late.append((name, replace(entry, layer=layer, source=note)))
    for name, entry in late:
        table.setdefault(name, []).append(entry)
    return table


def answers(entries: Iterable[Entry]) -> list[Entry]:
    """The lines among these that answer, the best first."""
    return [entry for entry in entries if entry.layer == "lock" or entry.kind in ANSWERS]


def misses(target: Target) -> list[Name]:
    """Every key that was missed on a device and still has no answer for that version of its kernel, sorted."""

    def is_missed(entries: list[Entry]) -> bool:
        known = {entry.version for entry in answers(entries)}
        return any(entry.kind == "missed" and entry.version not in known for entry in entries)

    return sorted(name for name, entries in read(target).items() if is_missed(entries))


_ORDER = ("shipped-device", "shipped-arch", "shipped-family")


def _shipped_files(target: Target) -> list[tuple[str, Path]]:
    """The shipped tables a target may use: its own, its architecture's, then others of its family and warp size."""
    folder = shipped_folder(target.vendor)
    try:
        stems = sorted(path.stem for path in folder.glob("*.json"))
    except OSError:
        return []
    exact = f"{target.arch}-{slug(target.name)}"
    usable = []
    for stem in stems:
        if stem == exact:
            usable.append(("shipped-device", folder / f"{stem}.json"))
        elif stem == target.arch:
            usable.append(("shipped-arch", folder / f"{stem}.json"))
        elif _same_family(stem.split("-", 1)[0], target):
            usable.append(("shipped-family", folder / f"{stem}.json"))
    return sorted(usable, key=lambda item: (_ORDER.index(item[0]), item[1].name))


def _same_family(arch: str, target: Target) -> bool:
    """Never across warp sizes: the same numbers mean another number of threads there."""
    try:
        other = known_target(arch)
    except ValueError:
        return arch == target.arch
    same = (other.vendor, other.family, other.warp_size) == (target.vendor, target.family, target.warp_size)
    return same and bool(target.family)


def _read_shipped(path: Path, target: Target, problems: list[str]) -> list[Line]:
    try:
        about, lines, wrong = tables.load(path)
    except ValueError as error:
        problems.append(f"{path}: {error}")
        return []
    if about.get("vendor") != target.vendor or about.get("warp_size") != target.warp_size:
        problems.append(f"{path}: made for {about.get('vendor')} with warps of {about.get('warp_size')}")
        return []
    problems += [f"{path}, {text}" for text in wrong]
    return lines


def report(problems: list[str], target: Target) -> None:
    """One warning about what could not be read for a device."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        warn_once(
            f"read {fingerprint(target)}",
            f"ignored what cannot be read in the stored configurations: {problems[0]}{more}; "
            "`liger-hw cache verify` lists all of it",
        )
