"""The text format of shipped tables, the user cache, lock files and exports.

One JSON object with a header and a list of entries. Each entry is one line, and lines are sorted by (op, variant, key),
so that a changed configuration is a diff of one line:

    {"schema": 2, "kind": "table", "vendor": "cuda", "arch": "sm90", "family": "hopper", "warp_size": 32, "entries": [
    {"config": {...}, "key": [4096, 14, 2], "op": "rms_norm", "provenance": {...}, "variant": "bwd", "version": 1}
    ]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterable, Mapping

from .. import files
from ..backends import LaunchConfig
from ..ops import Entry, Key

SCHEMA = 2
"""The schema that is written. Schema 1, of older lock files, is read too, with version 1 for all kernels."""
Name = tuple[str, str, Key]
"""(op, variant, key)"""
Line = tuple[Name, Entry]


def to_record(name: Name, entry: Entry) -> dict[str, Any]:
    """A line as JSON data."""
    op, variant, key = name
    about = {"op": op, "variant": variant, "key": list(key), "version": entry.version}
    return {**about, "config": entry.config.to_json(), "provenance": dict(entry.provenance)}


def from_record(record: Any, source: str) -> Line:
    """A line from untrusted JSON data. Raises `ValueError`."""
    try:
        op, variant, key, provenance = (record[name] for name in ("op", "variant", "key", "provenance"))
        version, config = record.get("version", 1), LaunchConfig.from_json(record["config"])
        is_named = op.isidentifier() and variant.isidentifier() and isinstance(provenance["kind"], str)
        if not is_named or not all(type(n) is int and abs(n) < 2**63 for n in (*key, version)) or version < 1:
            raise TypeError("names, 64-bit integers and a version from 1 on are expected")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an entry: {type(error).__name__}: {error}") from None
    return (op, variant, tuple(key)), Entry(config, provenance, version, source)


def render(header: Mapping[str, Any], lines: Iterable[Line]) -> str:
    """The text of a table, the same for equal tables. Several lines may have one name."""
    texts = sorted((name, json.dumps(to_record(name, entry), sort_keys=True)) for name, entry in lines)
    head = json.dumps({"schema": SCHEMA, **header})[:-1]
    text = ",\n".join(text for _, text in texts)
    return f'{head}, "entries": [\n{text}\n]}}\n' if texts else f'{head}, "entries": []}}\n'


def load(path: Path, **expected: Any) -> tuple[dict[str, Any], list[Line], list[str]]:
    """(header, valid lines, one error for each invalid line) of a file. Raises `ValueError` if it is not a table.

    expected: values that its header must have. `Entry.source` is `<path>:<line number>`.
    """
    try:
        data = json.loads(files.read_text(path))
    except UnicodeDecodeError:
        raise ValueError("not a table of liger_hw: not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise ValueError("not a table of liger_hw: no list of entries")
    if data.get("schema") not in (1, SCHEMA):
        raise ValueError(f"schema {data.get('schema')!r}; this version of liger_hw reads schema {SCHEMA}")
    for name, value in expected.items():
        if data.get(name) != value:
            raise ValueError(f"its {name} is {data.get(name)!r}, not {value!r}")
    lines, problems = [], []
    for number, record in enumerate(data.pop("entries"), 2):
        try:
            lines.append(from_record(record, f"{path}:{number}"))
        except (ValueError, TypeError) as error:
            problems.append(f"line {number}: {error}")
    return data, lines, problems
