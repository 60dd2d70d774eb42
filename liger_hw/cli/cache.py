"""`liger-hw cache list|verify|export|import|clear`: what is stored, and how it is shared.

liger-hw cache list                            every stored configuration
liger-hw cache verify                          what cannot be read or is out of date; exit code 1 if anything
liger-hw cache export -o sm90.json             a table in the shipped format (docs/registry.md: how to share it)
liger-hw cache import sm90.json [--yes]        take over somebody's table, after showing what changes
liger-hw cache clear [--misses|--quarantine|--entries|--journal] [--yes]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from .. import files
from ..text import fold, json_text, printable
from ..text import table as text_table
from . import UsageError, told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    stored = "cuda:0, h200, sm90, or part of a folder's name"

    def action(name: str, text: str, device: str = f"{stored} (default: every device)") -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text)
        sub.add_argument("--device", help=device)
        return sub

    one = action("list", "every stored configuration, and what failed or was missed")
    one.add_argument("--json", action="store_true", help="print JSON")
    action("verify", "what cannot be read or is out of date")
    only = f"{stored} (default: the only one stored)"
    one = action("export", "write a table in the format that ships with the package", only)
    one.add_argument("-o", "--output", help="file to write (default: print it)")
    one.add_argument("--merge", action="store_true", help="keep what the output file has for other keys")
    one = action(
        "import", "copy a table's entries into the user cache of a device", "cuda:0, h200, sm90 (default: the one here)"
    )
    one.add_argument("file", help="a table written by export, or a shipped one")
    one.add_argument("--digest", metavar="HEX", help="refuse a table with another digest (default: any)")
    _takes_yes(one, "import")
    one = action("clear", "remove stored files")
    for what in ("entries", "misses", "quarantine", "journal"):
        one.add_argument(f"--{what}", action="store_true", help=f"the {what} (default: all four)")
    _takes_yes(one, "remove")


def _takes_yes(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--yes", action="store_true", help=f"{what} without asking (default: ask, or refuse in a script)"
    )


def _agreed(arguments: argparse.Namespace, action: str, done: str) -> bool:
    """Whether the user wants `action`, such as "remove 3 files". Raises `UsageError` where nobody can be asked."""
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        print(f"would {action}")
        raise UsageError(f"cache {arguments.action}: nothing was {done}; add --yes for that")
    if input(f"{action}? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print(f"nothing was {done}")
    return False


def run(arguments: argparse.Namespace) -> int:
    return _ACTIONS[arguments.action](arguments)


def _folders(arguments: argparse.Namespace) -> list[Path]:
    """The device folders that --device names; a device or architecture, or part of a folder's name."""
    from .. import registry
    from ..autotune import store

    try:
        folders = store.device_folders()
    except NotADirectoryError:
        above = (store.root(), *store.root().parents)
        file = next((path for path in above if path.exists()), store.root())
        raise UsageError(
            f"cache: there is no cache in {store.root()}, since {file} is a file; LIGER_HW_CACHE_DIR names a folder"
        ) from None
    if arguments.device is None:
        return folders
    if not arguments.device.strip():
        raise UsageError("cache: --device is empty; leave it out to mean every device")
    wanted = {arguments.device.lower()}
    try:
        target = registry.target_named(arguments.device)
        exact = [f for f in folders if f.name == store.fingerprint(target)]
        if exact:
            return exact
        wanted.add(f"-{store.slug(target.name)}-")
    except (ValueError, RuntimeError):
        pass
    found = [f for f in folders if any(name in f.name for name in wanted)]
    if not found:
        here = ", ".join(f.name for f in folders) or "nothing"
        raise UsageError(f"cache: nothing is stored for {arguments.device!r}; stored: {here} (in {store.root()})")
    return found


def _state(name: tuple, entry: Any) -> str:
    """`current`, or why the entry answers late or never."""
    from .. import registry
    from ..autotune import store

    try:
        tunable = registry.get_tunable(f"{name[0]}.{name[1]}")
    except ValueError:
        return "unknown kernel"
    if entry.version != tunable.version:
        return f"stale: for version {entry.version} of the kernel, this is {tunable.version}"
    made, here = store.minor(str(entry.provenance.get("triton", ""))), store.minor(store.triton_version())
    return f"demoted: Triton {made}" if made and here and made != here else "current"


def _answers(name: tuple, entry: Any) -> bool:
    """Whether the entry may answer, though late."""
    return not _state(name, entry).startswith(("stale", "unknown"))


def _list(arguments: argparse.Namespace) -> int:
    from ..autotune import store, tables
    from ..backends import LaunchConfig

    devices = []
    for folder in _folders(arguments):
        problems: list[str] = []
        entries = [
            {**tables.to_record(name, entry), "state": _state(name, entry), "file": entry.source}
            for name, entry, _ in store.read_folder(folder, problems)
        ]
        entries.sort(key=lambda r: (r["op"], r["variant"], r["key"]))
        counts = {what: len(list((folder / f"_{what}").glob("*.json"))) for what in ("quarantine", "misses")}
        devices.append(
            {"device": folder.name, "folder": str(folder), "entries": entries, **counts, "problems": problems}
        )
    if arguments.json:
        print(json_text(devices, indent=2))
        return 0
    if not devices:
        print(f"nothing is stored in {store.root()}")
    for device in devices:
        print(
            f"{printable(device['device'])}: {len(device['entries'])} entries, {device['quarantine']} set aside, "
            f"{device['misses']} lists of misses"
        )
        rows = [("kernel", "key", "kind", "us", "gain", "date", "state", "configuration")]
        for r in device["entries"]:
            p = r["provenance"]
            us, gain = p.get("median_us"), p.get("gain")
            rows.append(
                (
                    f"{r['op']}.{r['variant']}",
                    ",".join(map(str, r["key"])),
                    str(p["kind"]),
                    f"{us:.2f}" if isinstance(us, (int, float)) else "",
                    f"{gain:.1%}" if isinstance(gain, (int, float)) else "",
                    str(p.get("date", ""))[:10],
                    r["state"],
                    LaunchConfig.from_json(r["config"]).in_words(),
                )
            )
        if len(rows) > 1:
            print(text_table(rows, indent="  "))
        for problem in device["problems"]:
            print(f"  cannot be read: {printable(problem)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from ..autotune import store

    own, shipped, mine, theirs = health(_folders(arguments))
    problems = mine + theirs
    print(
        fold(f"{own} entries and notes of your own, {shipped} shipped ones, {len(problems)} problems ({store.root()})")
    )
    for problem in problems:
        print(fold(f"  {printable(problem)}", "    "))
    return 1 if problems else 0


def health(folders: list[Path]) -> tuple[int, int, list[str], list[str]]:
    """(entries and notes in these folders, shipped entries, and of each what cannot be read or is out of date)."""
    from ..autotune import store, tables
    from ..backends import VENDORS

    problems: list[str] = []
    theirs: list[str] = []
    own = shipped = 0
    for folder in folders:
        for name, entry, _ in store.read_folder(folder, problems):
            own += 1
            if (state := _state(name, entry)) != "current":
                problems.append(f"{entry.source}: {name[0]}.{name[1]} {name[2]}: {state}")
        for what in ("_quarantine", "_misses"):
            own += sum(1 for _ in store.json_files(folder / what, problems))
    for vendor in VENDORS:
        for path in sorted(store.shipped_folder(vendor).glob("*.json")):
            try:
                _, entries, wrong = tables.load(path)
            except ValueError as error:
                theirs.append(f"{path}: {error}")
                continue
            theirs += [f"{path}: {text}" for text in wrong]
            for name, entry in entries.items():
                shipped += 1
                if (state := _state(name, entry)).startswith(("stale", "unknown")):
                    theirs.append(f"{path}: {name[0]}.{name[1]} {name[2]}: {state}")
    return own, shipped, problems, theirs


def _export(arguments: argparse.Namespace) -> int:
    from ..autotune import store, tables

    folders = _folders(arguments)
    if len(folders) != 1:
        names = ", ".join(f.name for f in folders) or "nothing"
        raise UsageError(f"cache export: choose one device with --device; stored: {names}")
    problems: list[str] = []
    found: dict = {}
    header: dict[str, Any] = {}
    skipped = 0
    for name, entry, about in store.read_folder(folders[0], problems):
        if not _answers(name, entry):
            skipped += 1
        elif name not in found:
            found[name], header = entry, about or header
    if not found:
        raise UsageError(f"cache export: no current entry in {folders[0]} ({skipped} out of date)")
    if arguments.merge and arguments.output and Path(arguments.output).exists():
        with told(f"cache export: {arguments.output}"):
            before, entries, _ = tables.load(Path(arguments.output))
        if (before.get("vendor"), before.get("arch")) != (header.get("vendor"), header.get("arch")):
            made_for = printable(f"{before.get('vendor')} {before.get('arch')}")
            raise UsageError(f"cache export: {arguments.output} is for {made_for}")
        found = {**{n: e for n, e in entries.items() if _answers(n, e)}, **found}
    text = tables.render({**header, "digest": ""}, found)
    if not arguments.output:
        print(text, end="")
        return 0
    if not (folder := Path(arguments.output).parent).exists():
        raise UsageError(f"cache export: there is no folder {folder}; make it first, or name another with -o")
    files.write_text(arguments.output, text)
    left_out = f", {skipped} out of date left out" if skipped else ""
    print(f"{arguments.output}: {len(found)} entries{left_out}, digest {tables.digest(found)}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from .. import registry
    from ..autotune import store, tables

    with told("cache import", (ValueError, RuntimeError)):
        target = registry.target_named(arguments.device)
    try:
        header, entries, wrong = tables.load(Path(arguments.file))
    except ValueError as error:
        raise UsageError(f"cache import: {arguments.file}: {error}; `liger-hw cache export` writes a table") from None
    made_for = header.get("vendor"), header.get("arch"), header.get("warp_size")
    if made_for != (target.vendor, target.arch, target.warp_size):
        vendor, arch, warp_size = (printable(str(part)) for part in made_for)
        raise UsageError(
            f"cache import: {arguments.file} is for {vendor} {arch} with warps of {warp_size}; "
            f"{target.name} is {target.vendor} {target.arch} with warps of {target.warp_size}. Name the device with "
            "--device"
        )
    _check_digest(arguments, header, tables.digest(entries))
    offered = len(entries) + len(wrong)
    wanted, refused = _importable(target, entries)
    for problem in (*wrong, *refused):
        print(f"left out: {printable(problem)}")
    changes = _changes(target, wanted)
    for line in changes:
        print(line)
    print(f"digest {tables.digest(entries)}: {len(changes)} of {offered} entries change what answers on {target.name}")
    if wanted and not _agreed(arguments, f"import {len(wanted)} entries into {store.home(target)}", "imported"):
        return 1
    saved = sum(store.save(target, name, entry) is not None for name, entry in wanted.items())
    print(f"{saved} of {offered} entries now in {store.home(target)}")
    return 0 if saved == offered else 1


def _check_digest(arguments: argparse.Namespace, header: dict[str, Any], found: str) -> None:
    if header.get("digest") not in (None, found):
        raise UsageError(
            f"cache import: {arguments.file} is not as it was exported: its entries have the digest {found}, its "
            f"header says {printable(str(header['digest']))}"
        )
    if arguments.digest is not None and arguments.digest.strip().lower() != found:
        raise UsageError(f"cache import: {arguments.file} has the digest {found}, not the one that was asked for")


def _importable(target: Any, entries: dict) -> tuple[dict, list[str]]:
    """(the entries that can answer on `target`, why the others cannot)."""
    from .. import registry

    tunables = registry.tunables()
    wanted, refused = {}, []
    for name, entry in sorted(entries.items()):
        tunable, state = tunables.get(f"{name[0]}.{name[1]}"), _state(name, entry)
        if tunable is None or state.startswith("stale"):
            reason = state
        else:
            reason = tunable.illegal(target, name[2], entry.config)
            if not reason and not tunable.serves(target, name[2]):
                reason = "no tensor has these sizes"
        if reason:
            refused.append(f"{name[0]}.{name[1]} {name[2]}: {reason}")
        else:
            wanted[name] = entry
    return wanted, refused


def _changes(target: Any, entries: dict) -> list[str]:
    """What answers now and what will, a line each entry that changes it."""
    from .. import registry

    lines = []
    for name, entry in entries.items():
        now = registry.choose(registry.get_tunable(f"{name[0]}.{name[1]}"), target, name[2])
        if now.config != entry.config:
            key, new = ",".join(map(str, name[2])), entry.config.in_words()
            lines.append(f"  {name[0]}.{name[1]} {key}: {now.config.in_words()} ({now.layer}) -> {new}")
    return lines


def _clear(arguments: argparse.Namespace) -> int:
    from ..autotune import store

    chosen = [what for what in ("entries", "misses", "quarantine", "journal") if getattr(arguments, what)]
    chosen = chosen or ["entries", "misses", "quarantine", "journal"]
    what = f"({', '.join(chosen)}) from {printable(str(store.root()))}"
    found: list[Path] = []
    for folder in _folders(arguments):
        mine, foreign = store.written_files(folder, chosen)
        found += mine
        print(f"{printable(folder.name)}: {len(mine)} files to remove")
        for path in foreign:
            print(f"  left: {printable(str(path))}: not written by liger-hw")
    if found and not _agreed(arguments, f"remove {len(found)} files {what}", "removed"):
        return 1
    removed = 0
    for path in found:
        with contextlib.suppress(FileNotFoundError):  # another process cleared it
            os.unlink(path)
            removed += 1
    for folder in _folders(arguments) if found else ():
        for path in (*store.sub_folders(folder), folder):
            with contextlib.suppress(OSError):  # something is left, or was written meanwhile
                path.rmdir()
    print(f"removed {removed} files {what}")
    return 0


_ACTIONS = {"list": _list, "verify": _verify, "export": _export, "import": _import, "clear": _clear}
