"""Writes the tables of README's performance section and of docs/activations.md from the JSON in results/.

    python benchmarks/readme.py            rewrites the pages between their `<!-- benchmarks/readme.py ... -->` marks
    python benchmarks/readme.py --check    only says whether they are current; exit code 1 when one is not

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
RUNS = ("norms", "activations", "rotary", "heads", "divergences", "distillation")
FILES = (
    *("ops-h200.json", "ops-losses-h200.json", "ops-memory-bound-h200.json", "ops-others-h200.json"),
    *(f"ops-{run}-h200.json" for run in RUNS),
)
ARMS = {"liger_hw": "liger_hw", "liger": "Liger 0.8.5", "compile": "torch.compile", "quack": "quack 0.6.5"}
SHOWN = {
    "rms_norm": ("16384x4096", "8192x8192", "65536x128", "16384x1024", "2048x65536"),
    "fused_add_rms_norm": ("16384x4096", "8192x8192"),
    "modulated_rms_norm": ("4x16384x3840", "32x8192x2048"),
    "layer_norm": ("16384x4096", "8192x8192", "8192x5120", "8192x2560", "36928x1024"),
    "group_norm": ("32x32x4096x512", "16x32x1024x1280"),
    "poly_norm": ("16384x4096", "16384x2048"),
    "dyt": ("16384x4096", "50432x1024"),
    "swiglu": ("8192x14336",),
    "fused_gate_up_swiglu": ("8192x8192",),
    "geglu": ("8192x14336",),
    "relu_squared": ("8192x24576",),
    "rope": ("4x4096x32x8x128", "4x4096x28x4x128", "4x4096x8x4x256"),
    "qk_norm_rope": ("4x4096x32x8x128", "4x4096x8x4x256"),
    "qwen2vl_mrope": ("4x4096x28x4x128",),
    "interleaved_rope": ("4x4096x32x2x128",),
    "llama4_rope": ("16x577x16x16x88",),
    "vision_rope": ("16x1024x16x16x80", "16x1024x16x16x72"),
    "embedding": ("16384x128256x4096",),
    "softmax": ("16384x4096", "8192x32768", "4096x128256"),
    "sparsemax": ("4096x32768",),
    "cross_entropy": ("8192x32768", "8192x131072"),
    "kl_div": ("4096x131072 fp32",),
    "jsd": ("4096x131072 fp32",),
    "tvd": ("4096x131072 fp32",),
    "fused_linear_cross_entropy": ("8192x4096x32768", "8192x4096x131072", "1024x4096x131072"),
    "fused_linear_jsd": ("4096x4096x128256", "8192x4096x32768"),
    "fused_linear_kl_div": ("4096x4096x128256",),
}
"""The sizes of an op that the table shows; bf16 where nothing else is said."""

DTYPES = {"bfloat16": "", "float32": " fp32"}


def ops_table() -> str:
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in FILES:
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            if row["mode"] == "full" and row["dtype"] in DTYPES and row["ms"]:
                place = row["op"], "x".join(map(str, row["sizes"])) + DTYPES[row["dtype"]], row["arm"]
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
    return f"{row['ms']['median']:.3g}" + "*" * (row["method"] == "events") if row else "-"


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


TRAINED = {
    "mistral": "Mistral-7B",
    "llama3": "Llama-3-8B",
    "qwen3": "Qwen3-8B",
    "gemma2": "Gemma-2-2B",
    "phi3": "Phi-3-mini",
    "mixtral": "Mixtral-8x7B",
}


def models_table() -> str:
    lines = [
        "| layers of | Hugging Face | + Liger 0.8.5 | + liger_hw | over Hugging Face | over Liger | peak GiB | losses apart |",
        "|---" * 8 + "|",
    ]
    for model, title in TRAINED.items():
        if not (RESULTS / f"e2e-{model}-h200.json").exists():
            continue
        found = _read(f"e2e-{model}")
        arms = {row["arm"]: row for row in found["summary"]}
        speed = [arms[arm]["tokens_per_second"] for arm in ("hf", "liger", "liger_hw")]
        cells = [f"{title}, {found['plan']['layers']} of {found['shape']['layers']}", *(f"{n:,.0f}" for n in speed)]
        cells += [f"{speed[2] / other - 1:+.1%}" for other in speed[:2]]
        cells.append(" / ".join(f"{arms[arm]['peak_gib']:.1f}" for arm in ("hf", "liger", "liger_hw")))
        losses = {(run["arm"], run["round"]): run["losses"] for run in found["runs"]}
        others = [losses.get(place) for place in (("hf", 1), ("liger", 0), ("liger_hw", 0))]
        apart = [max(abs(a - b) for a, b in zip(losses["hf", 0], one)) if one else None for one in others]
        cells.append(" / ".join("-" if one is None else f"{one:.3f}" for one in apart))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


PLANNED = ("llama3", "qwen3", "gemma2")
ACTIVATION_ARMS = {
    ("hf", "keep"): "Hugging Face",
    ("hf", "full"): "Hugging Face, checkpointing",
    ("liger", "keep"): "liger-kernel 0.8.5",
    ("liger", "full"): "liger-kernel 0.8.5, checkpointing",
    **{("liger_hw", arm): f"`{arm}`" for arm in ("keep", "cheap", "mlp", "full", "105GiB", "90GiB", "75GiB", "60GiB")},
}


def activations_table() -> str:
    """Tokens/s at GiB: a row an arm, a column a model."""
    files = [_read(f"activations-{model}") for model in PLANNED]
    heads = []
    for model, found in zip(PLANNED, files):
        o = found["options"]
        heads.append(f"{TRAINED[model]}, {o['layers']} layers, {o['batch']} x {o['seq']}")
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(files)) + "|"]
    for (library, arm), title in ACTIVATION_ARMS.items():
        cells = []
        for found in files:
            row = next(one for one in found["runs"] if (one["library"], one["arm"]) == (library, arm))
            failed = "out of memory" if "out of memory" in row.get("error", "") else "does not fit"
            ran = "tokens_per_second" in row
            cells.append(f"{row['tokens_per_second']:,.0f} at {row['peak_gib']:.1f}" if ran else failed)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def longest_table() -> str:
    lines = ["| level | tokens | outcome | tokens/s | peak GiB | planned GiB |", "|---" * 6 + "|"]
    for row in _read("longest-sequence")["levels"]:
        for one in row["tries"]:
            speed, peak = one.get("tokens_per_second"), one.get("peak_gib")
            outcome = one["outcome"] + (f" ({one['allocator']})" if "allocator" in one else "")
            cells = [f"`{row['level']}`", f"{one['seq']:,}", outcome, f"{speed:,.0f}" if speed else "-"]
            cells += [f"{peak:.1f}" if peak else "-", f"{one['predicted_gib']:.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}-h200.json").read_text())


PAGES = {
    "README.md": {"ops": ops_table, "end to end": end_to_end_table, "models": models_table},
    "docs/activations.md": {"activations": activations_table, "longest": longest_table},
}


def filled(text: str, page: str = "README.md") -> str:
    """`text` of a page with every table between its marks made anew. Raises `ValueError` when a mark is missing."""
    for name, table in PAGES[page].items():
        begin, end = f"<!-- benchmarks/readme.py: {name} -->", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        place = pattern.search(text)
        if place is None:
            raise ValueError(f"{page} has no mark {begin!r} followed by {end!r}; put them where the table belongs")
        text = f"{text[: place.start()]}{begin}\n{table()}\n{end}{text[place.end() :]}"
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not current")
    check = parser.parse_args(arguments).check
    stale = 0
    for page in PAGES:
        old = (ROOT / page).read_text()
        new = filled(old, page)
        if not check:
            (ROOT / page).write_text(new)
        elif new != old:
            print(f"{page} is older than benchmarks/results/; run `python benchmarks/readme.py`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
