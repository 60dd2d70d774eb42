"""`liger-hw cache list|verify|export|import|clear`: the stored configurations.

    liger-hw cache list                        every stored configuration
    liger-hw cache verify                      lines that are unreadable or out of date; exit code 1 if there are any
    liger-hw cache export -o sm90.json         a table in the shipped format
    liger-hw cache import sm90.json [--yes]    show what a table changes, and copy its entries
    liger-hw cache clear [--misses|--quarantine|--entries|--journal] [--yes]

docs/registry.md describes how tables are shared.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Callable

from .. import files, registry
from ..autotune import store, tables
from ..backends import VENDORS, LaunchConfig
from ..text import fold, json_text
from ..text import table as text_table
from . import UsageError, user_errors

_CLEARABLE = {
    "entries": "configurations that launches use",
    "misses": "keys that had no configuration",
    "quarantine": "configurations that failed at launch",
    "journal": "times of searches that have not ended, and searches that the heuristic won",
}


def cache_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    stored = "cuda:0, h200, sm90, or part of a file's name"

    def action(run: Callable[..., int], name: str, text: str, device: str) -> Callable[..., Any]:
        sub = actions.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--device", help=device)
        return sub.add_argument

    every, only = f"{stored} (default: every device)", f"{stored} (default: the only one stored)"
    add = action(_list, "list", "every stored configuration, and the numbers of failures and misses", every)
    add("--json", action="store_true", help="print JSON")
    action(_verify, "verify", "lines that are unreadable or out of date", every)
    add = action(_export, "export", "write a table in the format that ships with the package", only)
    add("-o", "--output", help="file to write (default: print it)")
    add("--merge", action="store_true", help="keep what the output file has for other keys")
    here = "cuda:0, h200, sm90 (default: the one here)"
    add = action(_import, "import", "copy a table's entries into the user cache of a device", here)
    add("file", help="a table written by export, or a shipped one")
    add("--yes", action="store_true", help="import without asking (default: ask, or refuse in a script)")
    add = action(_clear, "clear", "remove stored lines", every)
    for what, text in _CLEARABLE.items():
        add(f"--{what}", action="store_true", help=f"{text} (default: all four)")
    add("--yes", action="store_true", help="remove without asking (default: ask, or refuse in a script)")


def _agreed(arguments: argparse.Namespace, action: str, done: str) -> bool:
    """Whether the user agrees to `action`, such as "remove 3 lines". Raises `UsageError` without a terminal."""
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        print(f"would {action}")
        raise UsageError(f"nothing was {done}; add --yes for that")
    if input(f"{action}? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print(f"nothing was {done}")
    return False


def run_cache(arguments: argparse.Namespace) -> int:
    return arguments.run(arguments)


def _files(arguments: argparse.Namespace) -> list[Path]:
    """The files of --device: a device, an architecture, or part of a file's name."""
    paths = store.device_files()
    if arguments.device is None:
        return paths
    if not arguments.device.strip():
        raise UsageError("--device is empty; leave it out to mean every device")
    names = {arguments.device.lower()}
    try:
        target = registry.target_named(arguments.device)
        if exact := [path for path in paths if path.stem == store.fingerprint(target)]:
            return exact
        names.add(f"-{store.slug(target.name)}-")
    except (ValueError, RuntimeError):
        pass
    chosen = [path for path in paths if any(name in path.stem for name in names)]
    if not chosen:
        here = ", ".join(path.stem for path in paths) or "nothing"
        raise UsageError(f"nothing is stored for {arguments.device!r}; stored: {here} (in {store.root()})")
    return chosen


def _stale(name: tuple, entry: Any) -> str:
    """Why an entry cannot be used by this version of liger_hw, or ""."""
    tunable = registry.tunables().get(f"{name[0]}.{name[1]}")
    if tunable is None:
        return "unknown kernel"
    if entry.version == tunable.version:
        return ""
    return f"stale: for version {entry.version} of the kernel, this is {tunable.version}"


def _state(name: tuple, entry: Any) -> str:
    """`current`, or why the entry is demoted or unused."""
    version, here = store.minor(entry.provenance.get("triton")), store.minor(store.triton_version())
    is_demoted = version and here and version != here
    return _stale(name, entry) or (f"demoted: Triton {version}" if is_demoted else "current")


def _list(arguments: argparse.Namespace) -> int:
    devices = []
    for path in _files(arguments):
        problems: list[str] = []
        lines = store.lines_in(path, problems)
        entries = [
            {**tables.to_record(name, entry), "state": _state(name, entry), "file": entry.source}
            for name, entry in lines
            if entry.kind in store.ANSWERS
        ]
        entries.sort(key=lambda r: (r["op"], r["variant"], r["key"]))
        kinds = Counter(entry.kind for _, entry in lines)
        counts = {what: sum(kinds[kind] for kind in store.KINDS[what]) for what in ("quarantine", "misses", "journal")}
        devices.append({"device": path.stem, "file": str(path), "entries": entries, **counts, "problems": problems})
    if arguments.json:
        print(json_text(devices, indent=2))
        return 0
    if not devices:
        print(f"nothing is stored in {store.root()}")
    for device in devices:
        counts = f"{device['quarantine']} quarantined, {device['misses']} misses, {device['journal']} lines of searches"
        print(fold(f"{device['device']}: {len(device['entries'])} entries, {counts}"))
        rows = [("kernel", "key", "kind", "us", "gain", "date", "state", "configuration")]
        for r in device["entries"]:
            p, config = r["provenance"], LaunchConfig.from_json(r["config"])
            numbers = (p.get("median_us"), ".2f"), (p.get("gain"), ".1%")
            us, gain = (format(n, form) if isinstance(n, (int, float)) else "" for n, form in numbers)
            head = f"{r['op']}.{r['variant']}", ",".join(map(str, r["key"])), str(p["kind"])
            rows.append((*head, us, gain, str(p.get("date", ""))[:10], r["state"], config.in_words()))
        if len(rows) > 1:
            print(text_table(rows, indent="  "))
        for problem in device["problems"]:
            print(fold(f"  cannot be read: {problem}"))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    stored, shipped, problems, outdated = health(_files(arguments))
    problems += outdated
    print(fold(f"{stored} lines of your own, {shipped} shipped entries, {len(problems)} problems ({store.root()})"))
    for problem in problems:
        print(fold(f"  {problem}", "    "))
    return 1 if problems else 0


def health(paths: list[Path]) -> tuple[int, int, list[str], list[str]]:
    """(number of lines in these files, number of shipped entries, problems of the files, of the shipped tables)"""
    problems: list[str] = []
    outdated: list[str] = []
    stored = shipped = 0
    for path in paths:
        for name, entry in store.lines_in(path, problems):
            stored += 1
            if entry.kind in store.ANSWERS and (state := _state(name, entry)) != "current":
                problems.append(f"{entry.source}: {name[0]}.{name[1]} {name[2]}: {state}")
    for vendor in VENDORS:
        for path in sorted(store.shipped_folder(vendor).glob("*.json")):
            for name, entry in store.lines_in(path, outdated, vendor=vendor):
                shipped += 1
                if state := _stale(name, entry):
                    outdated.append(f"{path}: {name[0]}.{name[1]} {name[2]}: {state}")
    return stored, shipped, problems, outdated


def _export(arguments: argparse.Namespace) -> int:
    paths = _files(arguments)
    if len(paths) != 1:
        names = ", ".join(path.stem for path in paths)
        why = f"choose one device with --device; stored: {names}" if paths else f"nothing is stored in {store.root()}"
        raise UsageError(why)
    with user_errors(about=f"{paths[0]}: "):
        header, lines, _ = store.load(paths[0])
    answers = [line for line in lines if line[1].kind in store.ANSWERS]
    current = [line for line in answers if not _stale(*line)]
    table, skipped = dict(reversed(current)), len(answers) - len(current)  # the newest line of a name comes first
    if not table:
        raise UsageError(f"no current entry in {paths[0]} ({skipped} out of date)")
    if arguments.merge and arguments.output and Path(arguments.output).exists():
        with user_errors(about=f"{arguments.output}: "):
            before, kept, _ = tables.load(Path(arguments.output))
        if (before.get("vendor"), before.get("arch")) != (header.get("vendor"), header.get("arch")):
            raise UsageError(f"{arguments.output} is for {before.get('vendor')} {before.get('arch')}")
        table = {**{name: entry for name, entry in kept if not _stale(name, entry)}, **table}
    text = tables.render(header, table.items())
    if not arguments.output:
        print(text, end="")
        return 0
    if not (folder := Path(arguments.output).parent).exists():
        raise UsageError(f"there is no folder {folder}; make it first, or name another with -o")
    files.write_text(arguments.output, text)
    left_out = f", {skipped} out of date left out" if skipped else ""
    print(f"{arguments.output}: {len(table)} entries{left_out}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    with user_errors((ValueError, RuntimeError)):
        target = registry.target_named(arguments.device)
    try:
        header, lines, wrong = tables.load(Path(arguments.file))
    except ValueError as error:
        raise UsageError(f"{arguments.file}: {error}; `liger-hw cache export` writes a table") from None
    of_table = header.get("vendor"), header.get("arch"), header.get("warp_size")
    of_device = target.vendor, target.arch, target.warp_size
    if of_table != of_device:
        raise UsageError(
            f"{arguments.file} is for (vendor, architecture, threads of a warp) {of_table}, "
            f"{target.name} is {of_device}. Name the device with --device, and a table that `liger-hw cache export` "
            "writes"
        )
    entries = {name: entry for name, entry in lines if entry.kind in store.ANSWERS}
    offered = len(entries) + len(wrong)
    importable, refused = _importable(target, entries)
    for problem in (*wrong, *refused):
        print(fold(f"left out: {problem}"))
    changes = _changes(target, importable)
    print("\n".join([*changes, f"{len(changes)} of {offered} entries change a configuration on {target.name}"]))
    where = store.file_of(target)
    if importable and not _agreed(arguments, f"import {len(importable)} entries into {where}", "imported"):
        return 1
    saved = len(importable) if store.add(target, importable.items()) else 0
    print(f"{saved} of {offered} entries now in {where}")
    return 0 if saved == offered else 1


def _importable(target: Any, entries: dict) -> tuple[dict, list[str]]:
    """(entries that can be used on `target`, the reason for each other entry)"""
    importable, refused = {}, []
    for name, entry in sorted(entries.items(), key=lambda item: item[0]):
        if not (why_invalid := _stale(name, entry)):
            tunable = registry.get_tunable(f"{name[0]}.{name[1]}")
            why_invalid = tunable.illegal(target, name[2], entry.config)
            if not why_invalid and not tunable.serves(target, name[2]):
                why_invalid = "no tensor has these sizes"
        if why_invalid:
            refused.append(f"{name[0]}.{name[1]} {name[2]}: {why_invalid}")
        else:
            importable[name] = entry
    return importable, refused


def _changes(target: Any, entries: dict) -> list[str]:
    """A line for each entry that changes a configuration, with the configurations before and after."""
    lines = []
    for name, entry in entries.items():
        now = registry.choose(registry.get_tunable(f"{name[0]}.{name[1]}"), target, name[2])
        if now.config != entry.config:
            key, new = ",".join(map(str, name[2])), entry.config.in_words()
            lines.append(f"  {name[0]}.{name[1]} {key}: {now.config.in_words()} ({now.layer}) -> {new}")
    return lines


def _clear(arguments: argparse.Namespace) -> int:
    chosen = [what for what in _CLEARABLE if getattr(arguments, what)] or list(_CLEARABLE)
    kinds = [kind for what in chosen for kind in store.KINDS[what]]
    where = f"({', '.join(chosen)}) from {store.root()}"
    counts: dict[Path, int] = {}
    for path in _files(arguments):
        problems: list[str] = []
        counts[path] = sum(entry.kind in kinds for _, entry in store.lines_in(path, problems))
        print(fold(f"{path.stem}: {counts[path]} lines to remove"))
        for problem in problems:
            print(fold(f"  unreadable: {problem}"))
    total = sum(counts.values())
    if total and not _agreed(arguments, f"remove {total} lines {where}", "removed"):
        return 1
    removed = sum(store.remove(path, kinds) for path, count in counts.items() if count)
    print(f"removed {removed} lines {where}")
    return 0
