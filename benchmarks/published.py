"""What readme.py and losses_page.py write pages from: rows and files of results/, cells of tables, plots of docs/."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, Sequence

from liger_hw.bench.peers import OURS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE, MANY, ALL_LOSSES = "ops-table-h200.json", "ops-many-h200.json.gz", "losses-h200.json"
WIDTHS = "widths-h200.json.gz"
SINCE = "ops-since-h200.json"
"""Some ops again, after TABLE."""

DTYPES = {"bfloat16": "", "float32": " fp32"}


def load(name: str) -> dict[str, Any]:
    """What is in a file of results/."""
    data = (RESULTS / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def measured(last: str, since: str = "") -> dict[tuple[str, str, str], dict[str, Any]]:
    """(op, sizes, arm) -> the newest row of it, of the files `since` or `last` where they have one, else of the other
    of TABLE and ALL_LOSSES; `mark`: of that one, or of `since`."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in (ALL_LOSSES if last == TABLE else TABLE, last, *([since] if since else [])):
        if not (RESULTS / name).exists():
            continue
        for row in load(name)["rows"]:
            if row["mode"] == "full" and row["dtype"] in DTYPES and row["ms"]:
                place = row["op"], size(row), row["arm"]
                rows[place] = {
                    **rows.get(place, {}),
                    **row,
                    "mark": "" if name == last else "‡" if name == since else "†",
                }
    return rows


def against_best(rows: Sequence[dict[str, Any]], mode: str = "full") -> list[dict[str, Any]]:
    """A row for each op, size and dtype that we and a peer were timed at.

    best: the fastest peer's ms; speed: best / ours, below 1 where a peer wins; mib: what the op must move
    """
    places: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["mode"] == mode and row["ms"] and row["ms"]["median"] > 0:
            places.setdefault((row["op"], tuple(row["sizes"]), row["dtype"]), {})[row["arm"]] = row
    found = []
    for (op, sizes, dtype), arms in places.items():
        mine = arms.pop(OURS, None)
        if mine is None or not arms:
            continue
        peer = min(arms, key=lambda name: arms[name]["ms"]["median"])
        ours, best = mine["ms"]["median"], arms[peer]["ms"]["median"]
        moved = (mine["floor_ms"] or 0) * mine.get("copy_gb_s", 0) * 1e6 / 2**20
        one = {"op": op, "sizes": list(sizes), "dtype": dtype}
        one |= {"commit": mine.get("commit"), "floor_ms": mine["floor_ms"]}
        found.append({**one, "mib": moved, "ours": ours, "best": best, "peer": peer, "speed": best / ours})
    return found


def size(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["sizes"])) + DTYPES[row["dtype"]]


def cell(row: dict[str, Any] | None) -> str:
    if not row:
        return "-"
    return f"{row['ms']['median']:.3g}" + "*" * (row["method"] == "events")


def memory(row: dict[str, Any] | None) -> str:
    return f"{row['peak_mib']:.0f}" if row and row.get("peak_mib") is not None else "-"


def worse_error(row: dict[str, Any] | None) -> str:
    """Of the outputs and of the gradients, the larger."""
    found = [row[name] for name in ("error_out", "error_grad") if row.get(name) is not None] if row else []
    return f"{max(found):.0e}".replace("e-0", "e-") if found else "-"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}-h200.json").read_text())


def found(name: str) -> dict[str, Any] | None:
    return read(name) if (RESULTS / f"{name}-h200.json").exists() else None


def not_yet(script: str) -> str:
    return f"Not measured yet: `benchmarks/{script}`."


def drawn(words: str, plot: str, seen_from: str = "docs") -> list[str]:
    """Lines that show a plot of docs/ on a page in the folder `seen_from`; none where it has not been drawn."""
    place = ROOT / "docs" / plot
    return ["", f"![{words}]({os.path.relpath(place, ROOT / seen_from)})"] if place.exists() else []
