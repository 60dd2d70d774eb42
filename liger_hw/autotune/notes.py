"""What processes note for later ones in the user cache: configurations that failed, and keys without an entry."""

from __future__ import annotations

import json
from typing import Iterator

from ..backends import LaunchConfig, Target
from ..registry import Key
from . import store
from .tables import Name, to_key


def save_quarantined(
    target: Target, tunable: str, key: Key, config: LaunchConfig, reason: str, kernel_hash: str
) -> None:
    """Remember on disk that a configuration failed at launch, for this kernel source and Triton minor version."""
    folder = store.home(target)
    if folder is None:
        return
    record = {
        "schema": store.SCHEMA,
        "tunable": tunable,
        "key": list(key),
        "config": config.to_json(),
        "reason": reason,
        "kernel_hash": kernel_hash,
        "triton": store.triton_version(),
        "date": store.today(),
    }
    valid_for = [tunable, list(key), config.to_text(), kernel_hash, store.minor(record["triton"])]
    store.write_atomic(
        folder / "_quarantine" / f"{store.digest(valid_for)}.json", json.dumps(record, sort_keys=True) + "\n"
    )


def read_quarantined(target: Target) -> Iterator[tuple[str, Key, LaunchConfig, str, str]]:
    """(tunable, key, config, reason, kernel hash) of what failed before with this Triton; the caller checks the hash."""
    folder = store.home(target)
    if folder is None:
        return
    problems: list[str] = []
    here = store.minor(store.triton_version())
    for path, data in store.json_files(folder / "_quarantine", problems):
        try:
            if data.get("schema") == store.SCHEMA and store.minor(str(data.get("triton", ""))) == here:
                config = LaunchConfig.from_json(data["config"])
                yield str(data["tunable"]), to_key(data["key"]), config, str(data["reason"]), str(data["kernel_hash"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{path}: {error}")
    store.report(problems, target)


def save_misses(target: Target, names: list[Name]) -> None:
    """Note what a process found no entry for; the same misses give the same file, so runs do not pile up."""
    folder = store.home(target)
    if folder is None or not names:
        return
    listed = sorted([op, variant, list(key)] for op, variant, key in names)
    path = folder / "_misses" / f"{store.digest(listed)}.json"
    if not path.exists():
        store.write_atomic(path, json.dumps({"schema": store.SCHEMA, "misses": listed}) + "\n")


def read_misses(target: Target) -> list[Name]:
    """Every miss recorded for a device, sorted, each once."""
    folder = store.home(target)
    problems: list[str] = []
    found: set[Name] = set()
    for path, data in store.json_files(folder / "_misses", problems) if folder else ():
        try:
            found.update([(str(op), str(variant), to_key(key)) for op, variant, key in data["misses"]])
        except (ValueError, TypeError, KeyError) as error:
            problems.append(f"{path}: {error}")
    store.report(problems, target)
    return sorted(found)
