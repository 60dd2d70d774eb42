"""The format of the lock file; what writes one is `lock.py`. A lock file is a table with a digest of its entries."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Mapping

from ..answers import Entry
from ..env import SettingError
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


def entries(path: Path) -> dict[Name, Entry]:
    """The entries of the lock file that LIGER_HW_LOCK_FILE names.

    Raises `SettingError` when it cannot be used: who asks for a pinned run must not get another one and a warning.
    """
    try:
        return read(path)[1]
    except ValueError as error:
        why = str(error) if path.exists() else f"no such file (looked in {Path.cwd()})"
        raise SettingError(
            f"LIGER_HW_LOCK_FILE={path}: {why}. Nothing would be pinned: write it with "
            f"`liger-hw lock -o {path} --model ...`, correct the path, or unset the variable"
        ) from None
