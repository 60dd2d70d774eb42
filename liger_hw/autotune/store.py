"""Where stored configurations live, and in which order they answer.

User cache, `$LIGER_HW_CACHE_DIR` or `$XDG_CACHE_HOME/liger_hw` or `~/.cache/liger_hw`:

    v1/<device fingerprint>/<op>/<hash>.json            one entry; the hash covers what the entry is valid for
    v1/<device fingerprint>/_quarantine/<hash>.json     a configuration that failed at launch
    v1/<device fingerprint>/_misses/<hash>.json         keys that a process found no entry for
    v1/<device fingerprint>/_journal.jsonl              every measurement the tuner took

Shipped tables: `liger_hw/backends/<vendor>/configs/<arch>.json`, or `<arch>-<device>.json` for one exact device.

A file is written whole under another name, flushed, and moved into place: a reader sees the old file, the new one or
none, on any file system and without locks. Whatever cannot be read is a miss, with one warning.

An entry measured with another Triton minor version is kept but demoted: it answers after every entry of the right
version, shipped ones included, and before the heuristic. A lock file is never demoted.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import logging
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Collection, Iterator

from .. import env, files
from ..answers import Entry
from ..backends import Target, known_target
from ..text import first_line, printable
from . import lock_file, tables
from .tables import SCHEMA, Name

log = logging.getLogger("liger_hw")
Table = dict[Name, Entry]

_warned: set[str] = set()

ENTRY_BYTES = 4 << 20
"""The most that one file of the user cache, or one line of the journal, may have to be read."""


# -- folders ---------------------------------------------------------------------------------------------------------


def root() -> Path | None:
    """The user cache's folder (it may not exist), or None where there is no home to put one in."""
    chosen = env.get("LIGER_HW_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # its specification has a relative path ignored
        return Path(base) / "liger_hw"
    try:
        return Path.home() / ".cache" / "liger_hw"
    except RuntimeError:
        return None


def unwritable() -> str:
    """Why nothing can be stored in the user cache, or "". It is tried, and nothing is left behind."""
    base = root()
    if base is None:
        return "the cache has no folder: there is no home; LIGER_HW_CACHE_DIR names another"
    try:
        there = next(folder for folder in (base, *base.absolute().parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".liger_hw_", dir=there):
            return ""
    except OSError as error:
        reason = error.strerror or first_line(error)
        return f"the cache {base} cannot be written ({reason}): what is tuned is lost; LIGER_HW_CACHE_DIR names another"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def fingerprint(target: Target) -> str:
    """Folder name of a device: two devices share it only when a measurement on one holds on the other."""
    return f"{target.vendor}-{target.arch}-{slug(target.name)}-{target.multiprocessors}mp"


def home(target: Target) -> Path | None:
    """The user cache's folder for one kind of device."""
    base = root()
    return None if base is None else base / f"v{SCHEMA}" / fingerprint(target)


def shipped_folder(vendor: str) -> Path:
    return Path(__file__).resolve().parent.parent / "backends" / vendor / "configs"


def triton_version() -> str:
    """Version of the Triton at hand, `""` without one."""
    try:
        import triton

        return str(getattr(triton, "__version__", ""))
    except Exception:  # a clobbered install fails in more ways than ImportError
        return ""


def minor(version: str) -> str:
    """`3.7.1+git123` -> `3.7`"""
    return ".".join(version.split("+")[0].split(".")[:2])


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]


# -- one file --------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, text: str) -> bool:
    """Write a file of the user cache so that no reader ever sees half of it; False (and one warning) where that is
    impossible, as where a link leads out of the cache."""
    try:
        refuse_links(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, text.encode(), 0o644)
        return True
    except OSError as error:
        warn_once(_warning_topic(path), f"cannot write {path}: {error}; nothing is stored there")
        return False


def refuse_links(path: Path) -> None:
    """Raises `OSError` where a folder of the user cache is a link that leads out of it. The cache itself may be one."""
    base = root()
    if base in path.parents and not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(base)):
        raise OSError(errno.ELOOP, "a symbolic link leads out of the cache", str(path.parent))


def _warning_topic(path: Path) -> str:
    """The topic of a warning about a file: the whole user cache, or else the file's folder."""
    base = root()
    return f"write {base if base in path.parents else path.parent}"


def warn_once(topic: str, message: str) -> None:
    """One warning a topic and process: a broken cache must not fill a log."""
    if topic not in _warned:
        _warned.add(topic)
        log.warning("liger_hw: %s", printable(message))


def forget_warnings() -> None:
    """Let every warning be given again; called by `registry.reload()`."""
    _warned.clear()


def json_files(folder: Path, problems: list[str]) -> Iterator[tuple[Path, Any]]:
    """(path, data) of every readable `*.json` of a folder, by name; what cannot be read is noted in `problems`."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".json"))
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{folder}: {error}")
        return
    for name in names:
        path = folder / name
        try:
            yield path, json.loads(files.read_text(path, ENTRY_BYTES))
        except FileNotFoundError:  # removed since the folder was listed
            continue
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path}: {error}")


# -- the user cache --------------------------------------------------------------------------------------------------


def entry_path(target: Target, name: Name, entry: Entry) -> Path | None:
    """The file of an entry: one for each (op, variant, key, version of the kernel, Triton minor version)."""
    folder = home(target)
    if folder is None:
        return None
    valid_for = [*name[:2], list(name[2]), entry.version, minor(str(entry.provenance.get("triton", "")))]
    return folder / name[0] / f"{digest(valid_for)}.json"


def save(target: Target, name: Name, entry: Entry) -> Path | None:
    """Store one entry in the user cache; None (and one warning) where that is impossible."""
    path = entry_path(target, name, entry)
    if path is None:
        warn_once("no home", "no folder for the user cache: set LIGER_HW_CACHE_DIR")
        return None
    record = {
        "schema": SCHEMA,
        "device": fingerprint(target),
        "target": header(target),
        **tables.to_record(name, entry),
    }
    return path if write_atomic(path, json.dumps(record, sort_keys=True) + "\n") else None


def discard(target: Target, name: Name, entry: Entry) -> None:
    """Remove the stored entry that `entry` would replace: measured again, the heuristic is as good."""
    path = entry_path(target, name, entry)
    try:
        if path is not None:
            refuse_links(path)
            path.unlink(missing_ok=True)
    except OSError as error:
        warn_once(_warning_topic(path), f"cannot remove {path}: {error}")


def read_user(target: Target, problems: list[str]) -> list[tuple[Name, Entry]]:
    """Every entry of the user cache for a device, newest first."""
    folder = home(target)
    return [] if folder is None else [(name, entry) for name, entry, _ in read_folder(folder, problems)]


def read_folder(folder: Path, problems: list[str]) -> list[tuple[Name, Entry, dict[str, Any]]]:
    """(name, entry, header of its table) of every entry in one device's folder, newest first."""
    found: list[tuple[Name, Entry, dict[str, Any]]] = []
    try:
        ops = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("_"))
    except FileNotFoundError:
        return found
    except OSError as error:
        problems.append(f"{folder}: {error}")
        return found
    for op in ops:
        for path, data in json_files(folder / op, problems):
            try:
                found.append(_from_file(path, data, folder.name))
            except (ValueError, TypeError) as error:
                problems.append(f"{path}: {error}")
    found.sort(key=lambda item: (str(item[1].provenance.get("date", "")), item[1].source), reverse=True)
    return found


def _from_file(path: Path, data: Any, device: str) -> tuple[Name, Entry, dict[str, Any]]:
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise ValueError(f"schema {data.get('schema')!r}; this version of liger_hw reads schema {SCHEMA}")
    name, entry = tables.from_record(data, str(path))
    if data.get("device") != device:
        raise ValueError(f"made for {data.get('device')!r}, found in the folder of {device}")
    return name, entry, _header_from(data.get("target"))


def _header_from(about: Any) -> dict[str, Any]:
    """What an entry's file says of its target, as `header` says it; empty where it says anything else."""
    kinds = {"vendor": str, "arch": str, "family": str, "warp_size": int}
    if not isinstance(about, dict) or any(type(about.get(name)) is not kind for name, kind in kinds.items()):
        return {}
    return {"kind": "table", **{name: about[name] for name in kinds}}


def device_folders() -> list[Path]:
    """The folder of every kind of device that has something in the user cache. Raises `OSError` if it is unreadable."""
    base = root()
    try:
        return sorted(path for path in (base / f"v{SCHEMA}").iterdir() if path.is_dir()) if base else []
    except FileNotFoundError:
        return []


def sub_folders(folder: Path) -> list[Path]:
    """The folders of one device's folder, by name; never a symbolic link, and none where the folder itself is one."""
    if _is_behind_link(folder) or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _is_behind_link(folder: Path) -> bool:
    """Whether one device's folder, or the folder of all devices, is a symbolic link."""
    return folder.is_symlink() or folder.parent.is_symlink()


def written_files(folder: Path, kinds: Collection[str]) -> tuple[list[Path], list[Path]]:
    """(files that this module wrote, others beside them) of one device's folder; nothing is looked at through a link.

    kinds: which of "entries", "misses", "quarantine" and "journal"
    """
    mine: list[Path] = []
    foreign: list[Path] = []
    for sub in sub_folders(folder):
        kind = sub.name[1:] if sub.name.startswith("_") else "entries"
        if kind in kinds and kind in _FIELD_OF:
            for path in sorted(sub.iterdir()):
                (mine if _is_written(path, _FIELD_OF[kind]) else foreign).append(path)
    journal = folder / "_journal.jsonl"
    if "journal" in kinds and os.path.lexists(journal) and not _is_behind_link(folder):
        (mine if _is_journal(journal) else foreign).append(journal)
    return mine, foreign


_FIELD_OF = {"entries": "op", "misses": "misses", "quarantine": "tunable"}
"""A field that every file of a kind has, beside its schema."""


def _is_written(path: Path, field: str) -> bool:
    try:
        if path.is_symlink() or not path.is_file():
            return False
        if re.fullmatch(r"\.[a-z0-9_]{8}\.tmp", path.name):  # of a writer that was killed
            with open(path, "rb") as file:
                return file.read(2) in (b"", b'{"')
        if not re.fullmatch(r"[0-9a-f]{24}\.json", path.name):
            return False
        data = json.loads(files.read_text(path, ENTRY_BYTES))
        return isinstance(data, dict) and {"schema", field} <= set(data)
    except (OSError, ValueError, RecursionError):
        return False


def _is_journal(path: Path) -> bool:
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with open(path, "rb") as file:
            first = file.readline(ENTRY_BYTES)
        if not first:
            return True
        line = json.loads(first)
        return isinstance(line, dict) and "stage" in line
    except (OSError, ValueError, RecursionError):
        return False


# -- layers ----------------------------------------------------------------------------------------------------------


def layers(target: Target) -> list[tuple[str, Table]]:
    """(layer, entries) of everything stored for a target, best first. Reads files; never raises for what is in them,
    but for a lock file that was asked for and cannot be used (`SettingError`).
    """
    problems: list[str] = []
    pinned: list[tuple[str, Table]] = []
    path = env.get("LIGER_HW_LOCK_FILE")
    if path:
        pinned.append(("lock", lock_file.entries(Path(path), target)))
    offers: list[tuple[str, Name, Entry]] = [("user", *item) for item in read_user(target, problems)]
    if not env.get("LIGER_HW_DISABLE_SHIPPED"):
        for layer, file in _shipped_files(target):
            offers += [(layer, *item) for item in _read_shipped(file, target, problems).items()]
    report(problems, target)
    here = minor(triton_version())
    fitting: list[tuple[str, Table]] = []
    demoted: list[tuple[str, Table]] = []
    for layer, name, entry in offers:  # each table holds a name once: what is stored for it twice is asked in turn
        stack, made_with = fitting, minor(str(entry.provenance.get("triton") or ""))
        if made_with and here and made_with != here:
            note = f"{entry.source} (demoted: measured with Triton {made_with}, this is {here})"
            stack, entry = demoted, replace(entry, source=note)
        table = next((table for known, table in stack if known == layer and name not in table), None)
        if table is None:
            stack.append((layer, {name: entry}))
        else:
            table[name] = entry
    return pinned + fitting + demoted


_ORDER = ("user", "shipped-device", "shipped-arch", "shipped-family")


def _shipped_files(target: Target) -> list[tuple[str, Path]]:
    """The shipped tables a target may use: its own, its architecture's, then others of its family and warp size."""
    folder = shipped_folder(target.vendor)
    try:
        stems = sorted(path.stem for path in folder.glob("*.json"))
    except OSError:
        return []
    exact = f"{target.arch}-{slug(target.name)}"
    found = []
    for stem in stems:
        if stem == exact:
            found.append(("shipped-device", folder / f"{stem}.json"))
        elif stem == target.arch:
            found.append(("shipped-arch", folder / f"{stem}.json"))
        elif _same_family(stem.split("-", 1)[0], target):
            found.append(("shipped-family", folder / f"{stem}.json"))
    return sorted(found, key=lambda item: (_ORDER.index(item[0]), item[1].name))


def _same_family(arch: str, target: Target) -> bool:
    """Never across warp sizes: the same numbers mean another number of threads there."""
    try:
        other = known_target(arch)
    except ValueError:
        return arch == target.arch
    same = (other.vendor, other.family, other.warp_size) == (target.vendor, target.family, target.warp_size)
    return same and bool(target.family)


def _read_shipped(path: Path, target: Target, problems: list[str]) -> Table:
    try:
        header, entries, wrong = tables.load(path)
    except ValueError as error:
        problems.append(f"{path}: {error}")
        return {}
    if header.get("vendor") != target.vendor or header.get("warp_size") != target.warp_size:
        problems.append(f"{path}: made for {header.get('vendor')} with warps of {header.get('warp_size')}")
        return {}
    problems += [f"{path}: {text}" for text in wrong]
    return entries


def header(target: Target) -> dict[str, Any]:
    """What a shipped table says about itself."""
    return {
        "kind": "table",
        "vendor": target.vendor,
        "arch": target.arch,
        "family": target.family,
        "warp_size": target.warp_size,
    }


def report(problems: list[str], target: Target) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        warn_once(
            f"read {fingerprint(target)}",
            f"ignored what cannot be read in the stored configurations: {problems[0]}{more}; "
            "`liger-hw cache verify` lists all of it",
        )
