"""`liger-hw lock --model mistral-7b`: write liger-hw.lock, which pins every configuration the model launches.

Use it with `LIGER_HW_LOCK_FILE=liger-hw.lock` on every rank. `--check FILE` says whether a lock file is whole, and
what it pins differently from what this machine would choose.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from ..text import StatusLine, json_text, printable
from . import UsageError, user_errors
from .arguments import SEQS, add_model_sizes, dtype_name

_PINS = ("model", "batch", "seq", "ops", "dtype", "output", "force", "allow-other-device")
"""What says what to pin and where: a check takes none of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_sizes(parser, "only these ops (default: all)")
    parser.add_argument("--dtype", type=dtype_name, help="fp32, bf16 or fp16 (default bf16)")
    parser.add_argument(
        "--device", help="cuda:0, xpu, h200, or an architecture such as sm90 (default: the device here)"
    )
    parser.add_argument("-o", "--output", help="file to write (default liger-hw.lock)")
    parser.add_argument("--force", action="store_true", help="overwrite the file where it exists")
    parser.add_argument("--check", metavar="FILE", help="check a lock file instead of writing one")
    parser.add_argument(
        "--allow-other-device",
        action="store_true",
        help="where an entry is illegal on the device it is used on, choose there as if nothing pinned it (default: an "
        "error that names the entries)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from .. import env, registry

    with user_errors("lock", (ValueError, RuntimeError)):
        target = registry.target_named(arguments.device)
    if arguments.check is not None:
        not_taken = [f"--{name}" for name in _PINS if getattr(arguments, name.replace("-", "_"))]
        if not_taken:
            raise UsageError(f"lock: --check looks at a whole lock file, and takes no {', '.join(not_taken)}")
        return _check(arguments, target)
    if arguments.output is None:
        arguments.output = "liger-hw.lock"
    if not arguments.output:
        raise UsageError("lock: --output is empty; leave it out to write liger-hw.lock")
    if not arguments.model:
        raise UsageError("lock: say what to pin: --model with one or more models")
    if target.vendor == "cpu" and not registry.interpreting():
        raise UsageError("lock: nothing is launched on a CPU; --device names what to pin for, as h200, mi300x or sm90")
    if Path(arguments.output).exists() and not arguments.force:
        raise UsageError(f"lock: {arguments.output} exists; --force overwrites it, -o writes another")
    from ..autotune import lock

    env.ignore("LIGER_HW_LOCK_FILE")  # a new lock file holds what is tuned now, not what an older one pinned
    keys = _of_models(arguments, target)
    if not keys:
        raise UsageError(f"lock: nothing to pin for {target.name}")
    table = {(t.op, t.variant, key): lock.pinned(registry.choose(t, target, key)) for t, key in keys}
    about = lock.about(target.name, arguments.allow_other_device, arch=target.arch)
    mark = lock.write(arguments.output, table, about)
    kinds = Counter(str(entry.provenance["layer"]) for entry in table.values())
    if arguments.json:
        print(json_text({"file": arguments.output, "digest": mark, "entries": len(table), "layers": kinds}))
        return 0
    came = ", ".join(f"{count} {layer}" for layer, count in sorted(kinds.items()))
    file = printable(arguments.output)
    print(f"{file}: {len(table)} configurations pinned for {target.name} ({came}), digest {mark}")
    print(f"use it: LIGER_HW_LOCK_FILE={file}")
    return 0


def _of_models(arguments: argparse.Namespace, target: Any) -> list[tuple[Any, tuple]]:
    from .. import registry
    from ..autotune import jobs, models

    with user_errors("lock"):
        ops = [registry.get_op(name).name for name in arguments.ops or registry.ops()]
        chosen = [models.find(name) for name in arguments.model]
    pairs = jobs.shapes(ops, chosen, arguments.batch or [1], arguments.seq or SEQS, [])
    names: dict[tuple[str, tuple], None] = {}
    scan = jobs.scan(target)
    screen = StatusLine()
    for number, (op, sizes) in enumerate(pairs):
        screen.progress(number, len(pairs), f"{op}: what it launches")
        try:
            names.update(dict.fromkeys(scan(op, sizes, arguments.dtype or "bfloat16")))
        except Exception as error:
            raise UsageError(f"lock: {op} at {sizes}: {type(error).__name__}: {error}") from None
    screen.end()
    return [(registry.get_tunable(name), key) for name, key in names]


def _made_for(header: dict[str, Any]) -> Any:
    """The Target of the device that a lock file was made for; None where it is not known."""
    from ..backends import VENDORS, backend, known_target

    devices = [known_target(name) for vendor in VENDORS for name in backend(vendor).known_devices()]
    try:
        return next((one for one in devices if one.name == header.get("device")), None) or known_target(
            str(header["arch"])
        )
    except (KeyError, ValueError):
        return None


def _check(arguments: argparse.Namespace, target: Any) -> int:
    from .. import env, registry
    from ..autotune import lock

    env.ignore("LIGER_HW_LOCK_FILE")  # it is compared with what this machine chooses by itself
    try:
        header, table = lock.read(Path(arguments.check))
    except ValueError as error:
        if arguments.json:
            print(json_text({"file": arguments.check, "error": str(error)}))
        else:
            print(printable(f"{arguments.check}: {error}"))
        return 1
    if target.vendor == "cpu" and arguments.device is None:  # nothing is launched here: where it was made is meant
        target = _made_for(header) or target
    illegal, tunables = lock.unusable(target, table), registry.tunables()
    usable = [(tunables.get(f"{op}.{variant}"), key, entry.config) for (op, variant, key), entry in table.items()]
    usable = [item for item in usable if item[0] is not None and not item[0].illegal(target, *item[1:])]
    usable = [item for item in usable if item[0].serves(target, item[1])]
    other = sum(registry.choose(tunable, target, key).config != config for tunable, key, config in usable)
    if arguments.json:
        print(
            json_text(
                {
                    "file": arguments.check,
                    "digest": header["digest"],
                    "entries": len(table),
                    "illegal": illegal,
                    "other": other,
                }
            )
        )
    else:
        print(
            f"{printable(arguments.check)}: {len(table)} configurations, digest {header['digest']}, made on "
            f"{printable(str(header.get('device', '?')))}"
        )
        print(f"{other} differ from what {target.name} would choose by itself")
        for line in illegal:
            print(f"not usable on {target.name}: {line}")
    return 1 if illegal else 0
