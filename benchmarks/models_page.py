"""docs/models.md from what `families.py --json` printed, or docs/convergence.md from rows of `convergence.py`.

    python benchmarks/families.py --json > rows.jsonl
    python benchmarks/models_page.py rows.jsonl --output docs/models.md
    python benchmarks/models_page.py cpu.jsonl h200.jsonl --output docs/convergence.md     rows of several places

Prints how many families are verified; ends with 1 when one differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from families import summary

from liger_hw import __version__


def read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}; `benchmarks/families.py --json > FILE` writes one") from None


def page_of(rows: list[dict[str, Any]]) -> str:
    made = f"liger_hw {__version__}, transformers {version('transformers')}, torch {version('torch')}"
    if rows and rows[0].get("converge"):
        return _converge_page(rows, made)
    lines = [
        "# Models",
        "",
        "For users who want to know what a patch does to their model.",
        "",
        "What every causal LM family of transformers runs on liger_hw's kernels. Made by `benchmarks/models_page.py` "
        f"on {date.today()} with {made}, Python {platform.python_version()}, on the CPU; do not edit.",
        "",
        "For each family a tiny model is built from its configuration class, one training step is taken unpatched, "
        "patched and reverted, and loss and every gradient are compared in fp32 (loss to 1e-5, gradients to 2e-3 of "
        "their largest entry). *verified* means all agree and revert gave every forward back. What no kernel computes "
        "is left alone; the reason stands in the last column.",
        "",
        f"{summary(rows)}.",
        "",
    ]
    for title, named in (
        ("Functions of their own (class patch, their defaults)", True),
        ("`liger_hw.patch(model)`", False),
    ):
        chosen = [row for row in rows if row["named"] is named]
        if chosen:
            lines += [f"## {title}", "", "| family | class | outcome | patched | left alone |", "|---|---|---|---|---|"]
            lines += [_cells(row) for row in chosen] + [""]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    done = "; ".join(f"{kernel} x{n}" for kernel, n in (row.get("patched") or {}).items()) or "-"
    left = "; ".join(row.get("left") or {}) or "-"
    outcome = row["outcome"] if row["outcome"] == "verified" else f"{row['outcome']}: {row['reason']}"
    cells = (row["family"], row["model_class"], outcome, done, left)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _verified(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['outcome'] == 'verified' for row in rows)} of {len(rows)} verified"


def _converge_page(rows: list[dict[str, Any]], made: str) -> str:
    lines = [
        "# Convergence",
        "",
        "For users who ask whether a patched model trains as before.",
        "",
        f"Made by `benchmarks/models_page.py` on {date.today()} with {made}, from rows of "
        "`benchmarks/convergence.py --json` in several places (`--device cuda --dtype bfloat16`); do not edit.",
        "",
        "Tiny models trained 32 steps on Python's documentation, byte by byte, patched and unpatched from the same "
        "weights. Largest differences: losses (relative), parameters, log-probabilities of the 10 likeliest tokens. A "
        "control is an unpatched run whose weights differ from the start in their last bit; it is made where 32 steps "
        "carry rounding further than the tolerances, and the patched run may then be at most twice as far away as "
        "it. In bf16 that is every family, the differences are means, and the furthest of three controls counts. A "
        "vision encoder on its own sees the bytes' bits as pixels and names them.",
        "",
    ]
    places = dict.fromkeys((row.get("device", "cpu"), row.get("dtype", "float32")) for row in rows)
    for device, dtype in places:
        chosen = [row for row in rows if (row.get("device", "cpu"), row.get("dtype", "float32")) == (device, dtype)]
        first = next((row for row in chosen if "device_name" in row), {"device_name": device})
        versions = ", ".join(f"{name} {first[name]}" for name in ("transformers", "torch") if name in first)
        lines += [
            f"## {dtype} on {first['device_name']}",
            "",
            f"{_verified(chosen)}. {versions}".strip(),
            "",
            "| family | class | outcome | first loss | last loss | losses | parameters | log-probabilities | control |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in chosen:
            numbers = [row.get(name) for name in ("first", "last", "loss_error", "parameter_error", "logprob_error")]
            shown = [f"{n:.3g}" if isinstance(n, float) else "-" for n in numbers]
            outcome = row["outcome"] if row["outcome"] == "verified" else f"{row['outcome']}: {row['reason']}"
            control = ", ".join(f"{n:.3g}" for n in row.get("control") or ()) or "-"
            lines.append("| " + " | ".join((row["family"], row["model_class"], outcome, *shown, control)) + " |")
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    arguments = parser.parse_args(argv)
    rows = [row for path in arguments.rows for row in read(path)]
    arguments.output.write_text(page_of(rows))
    print(_verified(rows) if rows and rows[0].get("converge") else summary(rows))
    return 1 if any(row["outcome"] == "differs" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
