"""The format of the lock file; what writes one is `lock.py`. A lock file is a table with a digest of its entries."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Mapping

from ..answers import Entry
from ..backends import Target
from ..env import SettingError
from ..ops import get_tunable
from . import tables
from .tables import Name


def digest(table: Mapping[Name, Entry]) -> str:
    """Hash of every (op, variant, key) and configuration; where they came from does not count."""
    lines = sorted(
        json.dumps([op, variant, list(key), e.config.to_json()], sort_keys=True)
        for (op, variant, key), e in table.items()
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read(path: Path) -> tuple[dict[str, Any], dict[Name, Entry]]:
    """(header, entries). Raises `ValueError` that says what is wrong."""
    header, table, problems = tables.load(path)
    if problems:
        raise ValueError(problems[0])
    if header.get("kind") != "lock":
        raise ValueError(f"this is a {header.get('kind')!r}, not a lock file; `liger-hw lock` writes one")
    if header.get("digest") != digest(table):
        raise ValueError("its digest does not match its entries: it was edited; write it again with `liger-hw lock`")
    return header, table


def unusable(target: Target, table: Mapping[Name, Entry]) -> list[str]:
    """The entries that cannot be launched on `target`, each with its reason."""
    found = []
    for (op, variant, key), entry in sorted(table.items()):
        try:
            reason = get_tunable(f"{op}.{variant}").illegal(target, key, entry.config)
        except ValueError:
            reason = "this version has no such kernel"
        if reason:
            found.append(f"{op}.{variant} {key}: {reason}")
    return found


def entries(path: Path, target: Target) -> dict[Name, Entry]:
    """The entries of the lock file that LIGER_HW_LOCK_FILE names.

    Raises `SettingError` when it cannot be used, or an entry of it cannot be launched on `target`: who asks for a
    pinned run must not get another one and a warning. A lock file that was written for other devices too (`lock
    --allow-other-device`) leaves such keys to the next layers. Nothing is launched on a CPU.
    """
    try:
        header, table = read(path)
    except ValueError as error:
        why = str(error) if os.path.exists(path) else f"no such file (looked in {Path.cwd()})"
        raise SettingError(
            f"LIGER_HW_LOCK_FILE={path}: {why}. Nothing would be pinned: write it with "
            f"`liger-hw lock -o {path} --model ...`, correct the path, or unset the variable"
        ) from None
    if target.vendor == "cpu" or header.get("allow_other_device") is True:
        return table
    if wrong := unusable(target, table):
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise SettingError(
            f"LIGER_HW_LOCK_FILE={path}: {len(wrong)} of its {len(table)} entries cannot be launched on {target.name}: "
            f"{'; '.join(wrong[:3])}{more}. Write a lock file for this device; or, for these keys to be chosen here as "
            "if nothing pinned them, write it with `liger-hw lock --allow-other-device`"
        )
    return table
