"""`liger-hw lock --model mistral-7b`: write liger-hw.lock, which pins every configuration the model launches.

Use it with `LIGER_HW_LOCK_FILE=liger-hw.lock` on every rank. `--check FILE` says whether a lock file is intact, and
where it differs from this machine's choices.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from ..text import StatusLine, first_line, fold, json_text
from . import UsageError, user_errors
from .arguments import SEQS, add_model_sizes, dtype_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_sizes(parser, "only these ops (default: all)")
    add = parser.add_argument
    add("--dtype", type=dtype_name, help="fp32, bf16 or fp16 (default bf16)")
    add("--device", help="cuda:0, xpu, h200, or an architecture such as sm90 (default: the device here)")
    add("-o", "--output", help="file to write (default liger-hw.lock)")
    add("--force", action="store_true", help="overwrite the file where it exists")
    add("--check", metavar="FILE", help="check a lock file instead of writing one")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from .. import registry

    with user_errors("lock", (ValueError, RuntimeError)):
        target = registry.target_named(arguments.device)
    if arguments.check is not None:
        takes = ("command", "device", "check", "json")
        if others := [f"--{name}" for name, value in vars(arguments).items() if value and name not in takes]:
            raise UsageError(f"lock: --check looks at a whole lock file, and takes no {', '.join(others)}")
        return _check(arguments, target)
    if arguments.output is None:
        arguments.output = "liger-hw.lock"
    if not arguments.output:
        raise UsageError("lock: --output is empty; leave it out to write liger-hw.lock")
    if not arguments.model:
        raise UsageError("lock: say what to pin: --model with one or more models")
    if target.vendor == "cpu" and not registry.interpreting():
        raise UsageError("lock: nothing is launched on a CPU; --device names what to pin for, as h200, mi300x or sm90")
    if Path(arguments.output).is_dir():
        raise UsageError(f"lock: {arguments.output} is a folder; -o names the file to write")
    if Path(arguments.output).exists() and not arguments.force:
        raise UsageError(f"lock: {arguments.output} exists; --force overwrites it, -o writes another")
    table, mark = pin("lock", arguments, target, arguments.output)
    kinds = Counter(str(entry.provenance["layer"]) for entry in table.values())
    if arguments.json:
        print(json_text({"file": arguments.output, "digest": mark, "entries": len(table), "layers": kinds}))
        return 0
    came = ", ".join(f"{count} {layer}" for layer, count in sorted(kinds.items()))
    print(fold(f"{arguments.output}: {len(table)} configurations pinned for {target.name} ({came}), digest {mark}"))
    print(fold(f"use it: LIGER_HW_LOCK_FILE={arguments.output}"))
    return 0


def pairs_of(command: str, arguments: argparse.Namespace) -> list[tuple[str, tuple[int, ...]]]:
    """(op, sizes) of all launches of --model at --batch and --seq, for --ops or every op."""
    from .. import registry
    from ..autotune import jobs, models

    with user_errors(command):
        ops = [registry.get_op(name).name for name in arguments.ops or registry.ops()]
        chosen = [models.find(name) for name in arguments.model]
    return jobs.shapes(ops, chosen, arguments.batch or [1], arguments.seq or SEQS, [])


def pin(command: str, arguments: argparse.Namespace, target: Any, output: str | Path) -> tuple[dict, str]:
    """Write a lock file for the launches of a command's models; returns its table and digest."""
    from .. import env, registry
    from ..autotune import jobs, lock

    env.ignore("LIGER_HW_LOCK_FILE")  # a new lock file has what is tuned now, not an older file's entries
    names: dict[tuple[str, tuple], None] = {}
    pairs, screen = pairs_of(command, arguments), StatusLine()
    for number, (op, sizes) in enumerate(pairs):
        screen.progress(number, len(pairs), f"{op}: what it launches")
        try:
            names.update(dict.fromkeys(jobs.launched(op, sizes, arguments.dtype or "bfloat16", target)))
        except Exception as error:
            raise UsageError(f"{command}: {op} at {sizes}: {first_line(error)}") from None
    screen.end()
    if not names:
        raise UsageError(f"{command}: nothing to pin for {target.name}")
    keys = [(registry.get_tunable(name), key) for name, key in names]
    table = {(t.op, t.variant, key): lock.pinned(registry.choose(t, target, key)) for t, key in keys}
    return table, lock.write(output, table, {"device": target.name, "arch": target.arch})


def _made_for(header: dict[str, Any]) -> Any:
    """The Target of the device that a lock file was made for; None if it is not known."""
    from ..backends import VENDORS, backend, known_target

    devices = [known_target(name) for vendor in VENDORS for name in backend(vendor).known_devices()]
    matches = [one for one in devices if one.name == header.get("device")]
    return next(iter(matches + [one for one in devices if one.arch == header.get("arch")]), None)


def _check(arguments: argparse.Namespace, target: Any) -> int:
    from .. import env, registry
    from ..autotune import lock

    env.ignore("LIGER_HW_LOCK_FILE")  # it is compared with this machine's own choices
    try:
        header, table = lock.read(Path(arguments.check))
    except ValueError as error:
        facts = {"file": arguments.check, "error": str(error)}
        print(json_text(facts) if arguments.json else fold(f"{arguments.check}: {error}"))
        return 1
    if target.vendor == "cpu" and arguments.device is None:  # launches nothing: check for the device it was made for
        target = _made_for(header) or target
    illegal, other, tunables = lock.unusable(target, table), 0, registry.tunables()
    for (op, variant, key), entry in table.items():
        tunable = tunables.get(f"{op}.{variant}")
        if tunable and not tunable.illegal(target, key, entry.config) and tunable.serves(target, key):
            other += registry.choose(tunable, target, key).config != entry.config
    facts = {"file": arguments.check, "digest": header["digest"], "entries": len(table)}
    if arguments.json:
        print(json_text({**facts, "illegal": illegal, "other": other}))
        return 1 if illegal else 0
    origin = f"digest {header['digest']}, made on {header.get('device', '?')}"
    lines = [f"{arguments.check}: {len(table)} configurations, {origin}"]
    lines += [f"{other} differ from what {target.name} would choose by itself"]
    lines += [f"not usable on {target.name}: {line}" for line in illegal]
    print(fold("\n".join(lines)))
    return 1 if illegal else 0
