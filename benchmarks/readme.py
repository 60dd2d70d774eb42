"""Writes the tables of README's performance section from the JSON in results/.

    python benchmarks/readme.py            rewrites README.md between its `<!-- benchmarks/readme.py ... -->` marks
    python benchmarks/readme.py --check    only says whether it is current; exit code 1 when it is not

A cell is the median from the newest file that has the row (`FILES`, oldest first); what no file has is a dash.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = ("ops-h200.json", "ops-losses-h200.json", "ops-memory-bound-h200.json")
ARMS = {"liger_hw": "liger_hw", "liger": "Liger 0.8.5", "compile": "torch.compile", "quack": "quack 0.6.5"}
SHOWN = {
    "rms_norm": ("16384x4096", "8192x8192", "65536x128", "16384x1024", "2048x65536"),
    "fused_add_rms_norm": ("16384x4096", "8192x8192"),
    "modulated_rms_norm": ("4x16384x3840", "32x8192x2048"),
    "layer_norm": ("16384x4096", "8192x8192", "36928x1024"),
    "group_norm": ("32x32x4096x512", "16x32x1024x1280"),
    "poly_norm": ("16384x4096", "16384x2048"),
    "dyt": ("16384x4096", "50432x1024"),
    "swiglu": ("8192x14336",),
    "fused_gate_up_swiglu": ("8192x8192",),
    "geglu": ("8192x14336",),
    "relu_squared": ("8192x24576",),
    "rope": ("4x4096x32x8x128", "4x4096x28x4x128", "4x4096x8x4x256"),
    "softmax": ("16384x4096", "8192x32768", "4096x128256"),
    "sparsemax": ("4096x32768",),
    "cross_entropy": ("8192x32768", "8192x128256"),
    "fused_linear_cross_entropy": ("8192x4096x32768", "8192x4096x128256"),
}
"""The sizes of an op that the table shows."""


def ops_table() -> str:
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in FILES:
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            if row["mode"] == "full" and row["dtype"] == "bfloat16" and row["ms"]:
                place = row["op"], "x".join(map(str, row["sizes"])), row["arm"]
                rows[place] = {**rows.get(place, {}), **row}
    lines = ["| op | sizes | floor | " + " | ".join(ARMS.values()) + " | memory |", "|---" * (4 + len(ARMS)) + "|"]
    for op, sizes in SHOWN.items():
        for size in sizes:
            ours = rows[op, size, "liger_hw"]
            cells = [_cell(rows.get((op, size, arm))) for arm in ARMS]
            cells[0] = f"**{cells[0]}** ({ours['floor_ms'] / ours['ms']['median']:.0%})"
            cells.append(" / ".join(_memory(rows.get((op, size, arm))) for arm in ("liger_hw", "liger")))
            lines.append(f"| {op} | {size} | {ours['floor_ms']:.3g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    return f"{row['ms']['median']:.3g}" if row else "-"


def _memory(row: dict[str, Any] | None) -> str:
    return f"{row['peak_mib']:.0f}" if row and row.get("peak_mib") is not None else "-"


def end_to_end_table() -> str:
    arms = json.loads((RESULTS / "demo-7b-16l-h200.json").read_text())["arms"]
    names = {"hf": "Hugging Face", "liger": "+ Liger 0.8.5", "liger_hw": "+ liger_hw"}
    base = arms["hf"]["tokens_per_second"]
    speed = [f"{arms[n]['tokens_per_second']:,.0f}" for n in names]
    speed[1:] = [f"{text} (+{arms[n]['tokens_per_second'] / base - 1:.1%})" for n, text in zip([*names][1:], speed[1:])]
    memory = [f"{arms[n]['peak_memory'] / 2**20:,.0f}" for n in names]
    apart = ["", *(f"{_apart(arms[n], arms['hf']):.4f}" for n in [*names][1:])]
    lines = [
        "| | " + " | ".join(names.values()) + " |",
        "|---" * (1 + len(names)) + "|",
        "| tokens/s | " + " | ".join(speed) + " |",
        "| peak memory, MiB | " + " | ".join(memory) + " |",
        f"| largest loss difference over {len(arms['hf']['runs'][0]['losses'])} steps | " + " | ".join(apart) + " |",
    ]
    return "\n".join(lines).replace("|  |", "| |")


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["runs"][0]["losses"], other["runs"][0]["losses"]))


TABLES = {"ops": ops_table, "end to end": end_to_end_table}


def filled(text: str) -> str:
    """`text` with every table between its marks made anew. Raises `ValueError` when a mark is missing."""
    for name, table in TABLES.items():
        begin, end = f"<!-- benchmarks/readme.py: {name} -->", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        place = pattern.search(text)
        if place is None:
            raise ValueError(f"README.md has no mark {begin!r} followed by {end!r}; put them where the table belongs")
        text = f"{text[: place.start()]}{begin}\n{table()}\n{end}{text[place.end() :]}"
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README.md is not current")
    check = parser.parse_args(arguments).check
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = filled(old)
    if check:
        if new != old:
            print("README.md is older than benchmarks/results/; run `python benchmarks/readme.py`", file=sys.stderr)
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
