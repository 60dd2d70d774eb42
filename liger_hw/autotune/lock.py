"""The lock file: one text file that pins every configuration of a training job, on every rank and machine.

`liger-hw lock --model mistral-7b` writes it for one device. `LIGER_HW_LOCK_FILE=liger-hw.lock` makes it layer 1 of the
registry, before all tuned configurations. The heuristic's choices are pinned too. It can be used on another device, but
an entry that is illegal there is an error. It is a table (`tables.py`) with a digest of its entries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Mapping

from .. import files
from ..backends import Target
from ..env import SettingError
from ..ops import Entry, Plan, get_tunable, plans
from . import tables
from .tables import Name

log = logging.getLogger("liger_hw")


def digest(table: Mapping[Name, Entry]) -> str:
    """Hash of every (op, variant, key) and its configuration, without provenance."""
    lines = sorted(
        json.dumps([op, variant, list(key), entry.config.to_json()], sort_keys=True)
        for (op, variant, key), entry in table.items()
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read(path: Path) -> tuple[dict[str, Any], dict[Name, Entry]]:
    """(header, entries). Raises `ValueError`."""
    header, lines, problems = tables.load(path)
    if header.get("kind") != "lock":
        raise ValueError(f"this is a {header.get('kind')!r}, not a lock file; `liger-hw lock` writes one")
    table = dict(lines)
    if problems:
        raise ValueError(problems[0])
    if header.get("digest") != digest(table):
        raise ValueError("its digest does not match its entries: it was edited; write it again with `liger-hw lock`")
    return header, table


def unusable(target: Target, table: Mapping[Name, Entry]) -> list[str]:
    """The entries that cannot be launched on `target`, each with its reason."""
    refused = []
    for (op, variant, key), entry in sorted(table.items(), key=lambda item: item[0]):
        try:
            why_invalid = get_tunable(f"{op}.{variant}").illegal(target, key, entry.config)
        except ValueError:
            why_invalid = "this version has no such kernel"
        if why_invalid:
            refused.append(f"{op}.{variant} {key}: {why_invalid}")
    return refused


def entries(path: Path, target: Target) -> dict[Name, Entry]:
    """The entries of `path`, which LIGER_HW_LOCK_FILE names.

    Raises `SettingError` if the file cannot be used or, except on a CPU, an entry cannot be launched on `target`: a run
    that asks for pinned configurations must not continue without them.
    """
    try:
        _, table = read(path)
    except ValueError as error:
        why_invalid = str(error) if os.path.exists(path) else f"no such file (looked in {Path.cwd()})"
        raise SettingError(
            f"LIGER_HW_LOCK_FILE={path}: {why_invalid}. Nothing would be pinned: write it with "
            f"`liger-hw lock -o {path} --model ...`, correct the path, or unset the variable"
        ) from None
    if target.vendor != "cpu" and (wrong := unusable(target, table)):
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise SettingError(
            f"LIGER_HW_LOCK_FILE={path}: {len(wrong)} of its {len(table)} entries cannot be launched on {target.name}: "
            f"{'; '.join(wrong[:3])}{more}. Write a lock file for this device"
        )
    return table


def pinned(chosen: Entry | Plan) -> Entry:
    """The lock file's entry for a configuration that was chosen."""
    kept = {k: v for k, v in chosen.provenance.items() if k in ("median_us", "gain", "device", "triton", "date")}
    kind = str(chosen.provenance.get("kind", "heuristic"))
    return Entry(chosen.config, {"kind": kind, "layer": chosen.layer, **kept})


def write(path: str | Path, table: Mapping[Name, Entry], about: Mapping[str, Any]) -> str:
    """Write a lock file; returns its digest. Raises `OSError`."""
    checksum = digest(table)
    files.write_text(path, tables.render({"kind": "lock", "digest": checksum, **about}, table.items()))
    return checksum


def save(path: str | Path = "liger-hw.lock") -> str:
    """Pin everything that this process launched so far; returns the digest. Call it after the first training step."""
    launched = plans()
    if not launched:
        log.warning("liger_hw: nothing was launched so far, so %s pins nothing; save it after the first step", path)
    devices = sorted({plan.target.name for plan in launched})
    table = {(plan.tunable.op, plan.tunable.variant, plan.key): pinned(plan) for plan in launched}
    return write(path, table, {"device": ", ".join(devices)})
