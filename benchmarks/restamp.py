"""Keeps shipped entries valid where a rewritten kernel launches what it launched before.

    python benchmarks/restamp.py OLDER                 every shipped table; OLDER: a checkout in which they are current
    python benchmarks/restamp.py OLDER sm90.json ...   only these files
    python benchmarks/restamp.py OLDER --dry-run       say what would be written

An entry is valid for one hash of its kernels' source. For every entry with another hash, the op is traced in both
checkouts at the entry's sizes and dtype with the entry's configuration forced. Where the tunable's launches have the
same grids, compiler options and Triton IR (`launches.ir_hash`), they are the same binaries: the entry gets the new
hash. All others are listed and stay stale. Nothing is compiled and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def trace(checkout: str) -> None:
    """In a process of its own: one JSON line for each entry on stdin, its tunable's launches in `checkout`."""
    sys.path[:0] = [checkout, f"{checkout}/benchmarks"]
    import torch
    from launches import ir_hash

    from liger_hw import registry
    from liger_hw.autotune import compile as aot
    from liger_hw.backends import LaunchConfig, known_target

    registry.ops()
    known: dict = {}
    for entry in json.load(sys.stdin):
        config = {f"{entry['op']}.{entry['variant']}": LaunchConfig.from_json(entry["config"])}
        sizes, dtype = entry["provenance"]["sizes"], getattr(torch, entry["provenance"]["dtype"])
        try:
            found = aot.trace(entry["op"], sizes, dtype, known_target(entry["device"]), configs=config, shipped=False)
            own = [one for one in found if one.tunable in config and list(one.key) == entry["key"]]
            print(json.dumps([[one.layer, one.grid, one.options, ir_hash(one, known)] for one in own], default=str))
        except Exception as error:
            print(json.dumps(f"{type(error).__name__}: {error}".splitlines()[0][:160]))


def traced(checkout: Path, entries: list[dict[str, Any]]) -> subprocess.Popen:
    command = [sys.executable, __file__, "--trace", str(checkout)]
    process = subprocess.Popen(command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps(entries))
    process.stdin.close()
    return process


def verdict(before: Any, after: Any) -> str:
    """Why the entry stays stale, or `""`."""
    for name, found in (("older", before), ("this", after)):
        if isinstance(found, str):
            return f"cannot be traced in the {name} checkout: {found}"
        if not found:
            return f"not launched in the {name} checkout"
        if any(layer != "explicit" for layer, *_ in found):
            return f"refused in the {name} checkout"
    parts = ("layer", "grid", "options", "Triton IR")
    if len(before) != len(after):
        return f"{len(before)} launches, now {len(after)}"
    differ = {part for a, b in zip(before, after) for part, x, y in zip(parts, a, b) if x != y}
    return f"differs in {', '.join(sorted(differ))}" if differ else ""


def device_of(path: Path, arch: str) -> str:
    """The known device that a table is for: the one its file is named after, else its architecture's first."""
    from liger_hw.autotune import store
    from liger_hw.backends import backend

    devices = backend(path.parent.parent.name).devices
    own = (word for word, device in devices.items() if path.stem == f"{arch}-{store.slug(device.name)}")
    return next(own, arch)


def restamp(older: Path, names: list[str], dry_run: bool) -> int:
    sys.path.insert(0, str(ROOT))
    from liger_hw import registry
    from liger_hw.autotune import store, tables
    from liger_hw.backends import VENDORS
    from liger_hw.registry import Entry

    tunables, stale, loaded = registry.tunables(), [], {}
    for path in (path for vendor in VENDORS for path in sorted(store.shipped_folder(vendor).glob("*.json"))):
        if names and path.name not in names:
            continue
        header, entries, _ = loaded[path] = tables.load(path)
        for name, entry in entries.items():
            tunable = tunables.get(f"{name[0]}.{name[1]}")
            if tunable is None or tunable.kernel_hash() != entry.kernel_hash:
                stale.append((path, name, {**tables.to_record(name, entry), "device": device_of(path, header["arch"])}))
    requests = [request for _, _, request in stale]
    processes = [traced(checkout, requests) for checkout in (older.resolve(), ROOT)]
    kept, changed = 0, set()
    for path, name, request in stale:
        before, after = (json.loads(process.stdout.readline()) for process in processes)
        if reason := verdict(before, after):
            print(
                f"{path.name}: {name[0]}.{name[1]} {name[2]} at {request['provenance']['sizes']}: {reason}", flush=True
            )
            continue
        entry, made_for = loaded[path][1][name], tunables[f"{name[0]}.{name[1]}"].kernel_hash()
        loaded[path][1][name] = Entry(entry.config, {**entry.provenance, "kernel_hash": made_for}, made_for)
        kept, changed = kept + 1, changed | {path}
    for path in () if dry_run else changed:
        store.write_atomic(path, tables.render(*loaded[path][:2]))
    total = sum(len(entries) for _, entries, _ in loaded.values())
    print(
        f"{total} entries in {len(loaded)} tables, {len(stale)} stale: {kept} restamped, {len(stale) - kept} stay stale"
    )
    return 1 if kept < len(stale) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", help="a checkout of the commit that the tables are current in")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="names of files (default: every shipped table)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        trace(arguments.older)
        return 0
    return restamp(Path(arguments.older), arguments.tables, arguments.dry_run)


if __name__ == "__main__":
    sys.exit(main())
