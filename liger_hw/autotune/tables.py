"""The text form of a table: what ships with the package, what `cache export` writes, what a lock file holds.

One JSON object with a header and a list of entries, one line an entry, sorted by (op, variant, key), so that a changed
configuration is a one-line diff:

    {"schema": 2, "kind": "table", "vendor": "cuda", "arch": "sm90", "family": "hopper", "warp_size": 32, "entries": [
    {"config": {...}, "key": [4096, 14, 2], "op": "rms_norm", "provenance": {...}, "variant": "bwd", "version": 1}
    ]}

The header of an exported table has a `digest` of the lines of its entries, which `cache import` checks. It shows that a
table is whole and is the one that was meant; it does not say who made it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

from .. import files
from ..answers import Entry, Key
from ..backends import LaunchConfig
from ..text import printable

SCHEMA = 2
"""What is written. Schema 1 is read too, as in lock files: it has no versions of kernels, so each counts as 1."""
TABLE_BYTES = 32 << 20
"""The most that a table or a lock file may have to be read."""
MOST_NESTED = 20
"""Lists and objects inside each other that an entry may have."""
Name = tuple[str, str, Key]
"""(op, variant, key)"""


def to_record(name: Name, entry: Entry) -> dict[str, Any]:
    """One entry as plain JSON data."""
    op, variant, key = name
    config, provenance = entry.config.to_json(), dict(entry.provenance)
    about = {"op": op, "variant": variant, "key": list(key), "version": entry.version}
    return {**about, "config": config, "provenance": provenance}


def from_record(record: Any, source: str) -> tuple[Name, Entry]:
    """One entry from untrusted JSON data. Raises `ValueError` that names what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"an entry is a JSON object, got {type(record).__name__}")
    if missing := sorted({"op", "variant", "key", "config", "provenance"} - set(record)):
        raise ValueError(f"the entry has no {missing[0]!r}")
    op, variant, key, provenance = record["op"], record["variant"], record["key"], record["provenance"]
    name = to_name(op, variant, key)
    if not isinstance(provenance, dict) or not isinstance(provenance.get("kind"), str):
        raise ValueError("provenance must be an object with a `kind`")
    version = record.get("version", 1)
    if type(version) is not int or not 0 < version < 2**31:
        raise ValueError("version must be a positive integer: that of the kernel")
    config = LaunchConfig.from_json(record["config"])
    if not all(map(_is_harmless, _leaves(record["config"]))):
        raise ValueError("config has text that cannot be printed or a number that is not finite or too large")
    if not all(_is_harmless(one) for one in _leaves(provenance) if not isinstance(one, str)):
        raise ValueError("provenance has a number that is not finite or too large")
    provenance = {printable(name): printable(v) if isinstance(v, str) else v for name, v in provenance.items()}
    return name, Entry(config, provenance, version, source)


def to_name(op: Any, variant: Any, key: Any) -> Name:
    """A name from untrusted JSON data. Raises `ValueError`."""
    if not (isinstance(op, str) and isinstance(variant, str)):
        raise ValueError("op and variant must be strings")
    if not (op.isidentifier() and variant.isidentifier()):  # an op names a folder of the user cache
        raise ValueError(f"op and variant are names, got {op!r} and {variant!r}")
    return op, variant, to_key(key)


def to_key(data: Any) -> Key:
    """A key from untrusted JSON data. Raises `ValueError`."""
    if not isinstance(data, list) or not all(type(part) is int and _is_harmless(part) for part in data):
        raise ValueError(f"key must be a list of integers of 64 bits, got {str(data)[:200]!r}")
    return tuple(data)


def _leaves(data: Any, depth: int = 0) -> Iterator[Any]:
    """Every name and value inside JSON data. Raises `ValueError` where it is nested deeper than anything we write."""
    if depth > MOST_NESTED:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep")
    if isinstance(data, dict):
        for name, value in data.items():
            yield name
            yield from _leaves(value, depth + 1)
    elif isinstance(data, list):
        for value in data:
            yield from _leaves(value, depth + 1)
    else:
        yield data


def _is_harmless(value: Any) -> bool:
    """Whether text prints as it is and a number is finite and of 64 bits."""
    if isinstance(value, str):
        return value.isprintable()
    return not isinstance(value, (int, float)) or abs(value) < 2**63


def render(header: Mapping[str, Any], table: Mapping[Name, Entry] | Iterable[tuple[Name, Entry]]) -> str:
    """Canonical text: equal tables give equal bytes."""
    items = table.items() if isinstance(table, Mapping) else table
    lines = _lines(items)
    if "digest" in header and header.get("kind") == "table":
        header = {**header, "digest": _digest(lines)}
    head = json.dumps({"schema": SCHEMA, **header})[:-1]
    text = ",\n".join(lines)
    return f'{head}, "entries": [\n{text}\n]}}\n' if lines else f'{head}, "entries": []}}\n'


def _lines(items: Iterable[tuple[Name, Entry]]) -> list[str]:
    records = sorted((to_record(name, entry) for name, entry in items), key=lambda r: (r["op"], r["variant"], r["key"]))
    return [json.dumps(record, sort_keys=True) for record in records]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest(table: Mapping[Name, Entry]) -> str:
    """SHA-256 of a table's entries as `render` writes them, evidence included."""
    return _digest(_lines(table.items()))


def load(path: Path) -> tuple[dict[str, Any], dict[Name, Entry], list[str]]:
    """`parse` of a file. Raises `ValueError` that says why it cannot be read or used."""
    try:
        text = files.read_text(path, TABLE_BYTES)
    except UnicodeDecodeError:
        raise ValueError("not a table of liger_hw: no text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> tuple[dict[str, Any], dict[Name, Entry], list[str]]:
    """(header, entries, what is wrong with single entries). Raises `ValueError` when the whole file cannot be used."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise ValueError("not a table of liger_hw: no list of entries")
    if data.get("schema") not in (1, SCHEMA):
        raise ValueError(f"schema {data.get('schema')!r}; this version of liger_hw reads schema {SCHEMA}")
    if data["schema"] == 1 and data.get("kind") == "table":
        data.pop("digest", None)  # of lines as schema 1 writes them
    entries: dict[Name, Entry] = {}
    problems = []
    for number, record in enumerate(data.pop("entries")):
        try:
            name, entry = from_record(record, source)
        except (ValueError, TypeError) as error:
            problems.append(f"entry {number}: {error}")
            continue
        entries[name] = entry
    return data, entries, problems
