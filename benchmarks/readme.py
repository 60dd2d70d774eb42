"""Writes the tables of README's performance section, docs/ and examples/ from the JSON in results/.

    python benchmarks/readme.py            rewrites the pages between their `<!-- benchmarks/readme.py ... -->` marks
    python benchmarks/readme.py --check    only says whether they are current; exit code 1 when one is not

A cell is the median from the newest file that has the row (`FILES`, oldest first); what no file has is a dash.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from liger_hw.bench import plots, report  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TABLE, MANY, ALL_LOSSES = "ops-table-h200.json", "ops-many-h200.json.gz", "losses-h200.json"
RUNS = ("norms", "activations", "rotary", "heads", "divergences", "distillation")
FILES = (
    *("ops-h200.json", "ops-losses-h200.json", "ops-memory-bound-h200.json", "ops-others-h200.json"),
    *(f"ops-{run}-h200.json" for run in RUNS),
    ALL_LOSSES,
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


def _measured(last: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(op, sizes, arm) -> the newest row of it, of the file `last` where it has one; `older` says that it has not."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in (*(name for name in (*FILES, TABLE) if name != last), last):
        if not (RESULTS / name).exists():
            continue
        for row in report.load(RESULTS / name)["rows"]:
            if row["mode"] == "full" and row["dtype"] in DTYPES and row["ms"]:
                place = row["op"], _size(row), row["arm"]
                rows[place] = {**rows.get(place, {}), **row, "older": name != last}
    return rows


def ops_table() -> str:
    rows, whole = _measured(TABLE), (RESULTS / TABLE).exists()
    lines = [
        "| op | sizes | floor | " + " | ".join(ARMS.values()) + " | error | memory |",
        "|---" * (5 + len(ARMS)) + "|",
    ]
    for op, sizes in SHOWN.items():
        for size in sizes:
            ours = rows[op, size, "liger_hw"]
            found = [rows.get((op, size, arm)) for arm in ARMS]
            cells = [_cell(row) + "†" * bool(whole and row and row["older"]) for row in found]
            cells[0] = f"**{cells[0]}** ({ours['floor_ms'] / ours['ms']['median']:.0%})"
            for figure in (_worse_error, _memory):
                cells.append(" / ".join(figure(rows.get((op, size, arm))) for arm in ("liger_hw", "liger")))
            lines.append(f"| {op} | {size} | {ours['floor_ms']:.3g} | " + " | ".join(cells) + " |")
    if (ROOT / "docs" / "ops.png").exists():
        lines += ["", "![share of the floor, op by op](docs/ops.png)"]
    if whole and any("†" in line for line in lines):
        lines += ["", f"† from an earlier run than the rest (`{TABLE}`)."]
    return "\n".join(lines)


def _size(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["sizes"])) + DTYPES[row["dtype"]]


def _cell(row: dict[str, Any] | None) -> str:
    if not row:
        return "-"
    return f"{row['ms']['median']:.3g}" + "*" * (row["method"] == "events")


def _memory(row: dict[str, Any] | None) -> str:
    return f"{row['peak_mib']:.0f}" if row and row.get("peak_mib") is not None else "-"


def _worse_error(row: dict[str, Any] | None) -> str:
    """Of the outputs and of the gradients, the larger."""
    found = [row[name] for name in ("error_out", "error_grad") if row.get(name) is not None] if row else []
    return f"{max(found):.0e}".replace("e-0", "e-") if found else "-"


def shapes_table() -> str:
    """A row an op over the shapes of `--sizes many`."""
    if not (RESULTS / MANY).exists():
        return "Not run yet."
    best = report.against_best(report.load(RESULTS / MANY)["rows"])
    lines = ["| op | shapes | speed: worst | p10 | median | behind by more than 1% | 5% | share of floor over 64 MiB |"]
    lines.append("|---" * 8 + "|")
    for op in dict.fromkeys(one["op"] for one in best):
        mine = [one for one in best if one["op"] == op]
        speeds = sorted(one["speed"] for one in mine)
        shares = [one["floor_ms"] / one["ours"] for one in mine if one["mib"] >= 64]
        cells = [
            op,
            f"{len(mine)}",
            *(f"{x:.2f}" for x in (speeds[0], speeds[len(speeds) // 10], statistics.median(speeds))),
        ]
        cells += [f"{sum(speed < most for speed in speeds)}" for most in (0.99, 0.95)]
        lines.append("| " + " | ".join([*cells, f"{statistics.median(shares):.0%}" if shares else "-"]) + " |")
    behind = sum(one["speed"] < 0.99 for one in best)
    lines += ["", f"In all: {len(best)} shapes, {behind} behind a peer by more than 1%."]
    for plot, words in (
        ("shapes-speed.png", "speed against size"),
        ("shapes-share.png", "share of the floor against size"),
    ):
        if (ROOT / "docs" / plot).exists():
            lines += ["", f"![{words}]({plot})"]
    return "\n".join(lines)


def behind_table() -> str:
    if not (RESULTS / MANY).exists():
        return "Not run yet."
    best = report.against_best(report.load(RESULTS / MANY)["rows"])
    lines = ["| op | sizes | liger_hw, us | best peer, us | | speed |", "|---" * 6 + "|"]
    for one in sorted((one for one in best if one["speed"] < 0.99), key=lambda one: one["speed"]):
        times = f"{1e3 * one['ours']:.1f} | {1e3 * one['best']:.1f} | {one['peer']} | {one['speed']:.2f}"
        lines.append(f"| {one['op']} | {_size(one)} | {times} |")
    return "\n".join(lines)


def limits_table() -> str:
    """A row a kernel of every op that has an aim, as limits.py measured it, beside what the whole op reaches."""
    rows, found = _measured(TABLE), _found("limits")
    if found is None:
        return _not_yet("limits.py")
    heads = "op", "sizes", "aim", "reached", "kernel", "us", "share of copy", "registers", "spills", "warps held", "launch"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found["rows"]:
        size = "x".join(map(str, one["sizes"]))
        ours = rows.get((one["op"], size, "liger_hw"))
        aim = "-" if one["aim"] is None else f"{one['aim']:.0%}"
        reached = f"{ours['floor_ms'] / ours['ms']['median']:.0%}" if ours else "-"
        first = [one["op"], size, aim, f"**{reached}**" if ours and one["aim"] and ours["floor_ms"] / ours["ms"]["median"] < one["aim"] else reached]
        for kernel in one["kernels"]:
            launch = kernel["config"]
            blocks = ", ".join(f"{name} {value}" for name, value in launch["blocks"].items())
            persistent = f", {launch['ctas_per_mp']} a multiprocessor" if launch["ctas_per_mp"] else ""
            cells = [kernel["variant"], f"{kernel['us']:.1f}", f"{kernel['share']:.0%}"]
            cells += [str(kernel.get(name, "-")) for name in ("registers", "spills", "warps_held")]
            cells.append(f"{blocks}; {launch['num_warps']} warps{persistent}")
            lines.append("| " + " | ".join([*first, *cells]) + " |")
            first = [""] * 4
        if "error" in one:
            lines.append("| " + " | ".join([*first, one["error"][:80], *["-"] * 6]) + " |")
    return "\n".join(lines)


def host_table() -> str:
    """Microseconds an op, forward / forward and backward / one of 8 forwards that share a backward."""
    rows: dict[str, dict[str, Any]] = {}
    for row in _read("host")["calls"]:
        rows.setdefault(row["op"], {})[row["arm"]] = row
    ways = ("fwd_us", "full_us", "batch_us")
    least = {one["op"]: one.get("least_full_us") for one in _read("host")["parts"]}
    heads = "op", "liger_hw", "Liger 0.8.5", "torch alone", "share of Liger", "torch alone / Liger", "least", "net share"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for op, arms in rows.items():
        if not all("full_us" in arms.get(arm, ()) for arm in ("liger_hw", "liger", "floor")):
            continue
        ours, theirs, floor = ([arms[arm][way] for way in ways] for arm in ("liger_hw", "liger", "floor"))
        cells = [op, *(" / ".join(f"{us:.0f}" for us in one) for one in (ours, theirs, floor))]
        shares = [
            [a / b for a, b in zip(ours, theirs)],
            [a / b for a, b in zip(floor, theirs)],
            [(a - c) / (b - c) for a, b, c in zip(ours, theirs, floor)],
        ]
        cells += [" / ".join(f"{share:.2f}" for share in one) for one in shares]
        cells.insert(-1, f"{least[op] / theirs[1]:.2f}" if least.get(op) else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def regret_table() -> str:
    lines = ["| run | shapes judged | median | p90 | worst | worst kernel |", "|---" * 6 + "|"]
    found = [json.loads(path.read_text()) for path in RESULTS.glob("bucketing-regret*-h200.json")]
    for one in sorted(found, key=lambda one: one["date"]):
        shape, kernel = one["per_shape"], one["per_kernel"]
        cells = [one["date"][:10], f"{shape['count']}", *(f"{shape[name]:.1%}" for name in ("median", "p90", "worst"))]
        lines.append("| " + " | ".join([*cells, f"{kernel['worst']:.1%}"]) + " |")
    return "\n".join(lines)


def first_step_table() -> str:
    arms = {"hf": "Hugging Face", "liger": "+ Liger 0.8.5", "liger_hw": "+ liger_hw"}
    lines = ["| first step, s | " + " | ".join(arms.values()) + " |", "|---" * (1 + len(arms)) + "|"]
    runs = _read("first-step")["runs"]
    for model in dict.fromkeys(one["model"] for one in runs):
        cells = []
        for arm in arms:
            mine = [one for one in runs if (one["model"], one["arm"]) == (model, arm)]
            reached = [f"{one['steps'][0]:.2f}" for one in mine if one["steps"]]
            cells.append(" / ".join(reached) or ("not reached" if mine else "-"))
        lines.append(f"| {TRAINED[model].split('-')[0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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


# -- docs/losses.md ----------------------------------------------------------------------------------------------------

LOSSES = {
    "cross_entropy": ("8192x32768", "8192x131072"),
    **dict.fromkeys(("kl_div", "jsd", "tvd"), ("4096x131072 fp32",)),
    "fused_ce_tvd": ("4096x131072",),
    "vocab_parallel_cross_entropy": ("8192x32768",),
    "fused_linear_cross_entropy": ("8192x4096x32768", "8192x4096x131072", "1024x4096x131072"),
    "fused_linear_scaled_cross_entropy": ("8192x4096x131072",),
    **dict.fromkeys(("fused_linear_jsd", "fused_linear_kl_div"), ("4096x4096x128256",)),
    **dict.fromkeys(("orpo", "cpo", "simpo", "kto", "dpo", "grpo", "grpo_sequence"), ("8x1024x4096x131072",)),
    **dict.fromkeys(("jsd_distillation", "cosine_distillation"), ("4x1024x4096x131072",)),
}
"""`liger-hw bench --sizes losses`, in the order of the table."""

PEERS = {"liger": "Liger 0.8.5", "compile": "torch.compile", "torch": "torch", "quack": "quack 0.6.5"}
PEERS |= {"cce": "CCE 25.1.1", "cce_exact": "CCE, exact"}


def losses_table() -> str:
    rows, whole = _measured(ALL_LOSSES), (RESULTS / ALL_LOSSES).exists()
    lines = [
        f"| loss | sizes | floor | liger_hw | {' | '.join(PEERS.values())} | MiB | error, loss | error, gradient |",
        "|---" * (7 + len(PEERS)) + "|",
    ]
    for op, sizes in LOSSES.items():
        for size in sizes:
            if (op, size, "liger_hw") not in rows:
                continue
            ours, others = rows[op, size, "liger_hw"], [rows.get((op, size, arm)) for arm in PEERS]
            share = f"{ours['floor_ms'] / ours['ms']['median']:.0%}"
            old = ["†" * bool(whole and row and row["older"]) for row in (ours, *others)]
            cells = [op, size, f"{ours['floor_ms']:.3g}", f"**{_cell(ours)}{old[0]}** ({share})"]
            cells += [_cell(row) + mark for row, mark in zip(others, old[1:])]
            three = [ours, *others[:2]]
            cells.append(" / ".join(map(_memory, three)))
            cells += [" / ".join(_error(row, kind) for row in three) for kind in ("error_out", "error_grad")]
            lines.append("| " + " | ".join(cells) + " |")
    if any("†" in line for line in lines):
        lines += ["", f"† from an earlier run than the rest (`{ALL_LOSSES}`)."]
    return "\n".join(lines)


def _error(row: dict[str, Any] | None, kind: str) -> str:
    return "-" if row is None or row.get(kind) is None else f"{row[kind]:.0e}".replace("e-0", "e-")


def sweep_text() -> str:
    """The plot of head_sweep.py and what it says at the worst."""
    if (found := _found("head-sweep")) is None:
        return _not_yet("head_sweep.py")
    points = found["points"]
    rows = [
        sorted((p for p in points if p["vocab"] == v), key=lambda p: p["tokens"]) for v in {p["vocab"] for p in points}
    ]
    steps = [(b["share"] / a["share"], a, b) for row in rows for a, b in zip(row, row[1:])]
    least = min(points, key=lambda p: p["share"])
    many = [p["share"] for p in points if p["tokens"] >= 1024]
    text = (
        f"![share of the products by tokens and vocabulary](head-sweep.png)\n\n{len(points)} points; the least share "
    )
    text += f"{least['share']:.0%}, {least['tokens']} tokens x {least['vocab']} words ({least['ms']:.3g} ms)"
    text += f", from 1024 tokens {min(many):.0%}" if many else ""
    if steps:
        ratio, a, b = min(steps, key=lambda step: step[0])
        text += f"; the largest fall from one count of tokens to the next {a['share']:.0%} to {b['share']:.0%}, from "
        text += f"{a['tokens']} to {b['tokens']} x {b['vocab']}"
    left = ", ".join(f"{tokens} x {vocab}" for tokens, vocab in found["left_out"])
    return text + "." + (f" Not reached in the time: {left}." if left else "")


def largest_table() -> str:
    if (found := _found("largest-head")) is None:
        return _not_yet("largest_head.py")
    cases = {case: other for line in found["results"] if (case := line.get("case")) for other in [line["other"]]}
    titles = {"tokens": "most tokens at {} words", "vocab": "most words at {} tokens"}
    lines = [
        f"| | {' | '.join(titles[case].format(other) for case, other in cases.items())} |",
        "|---" * (1 + len(cases)) + "|",
    ]
    by = {(line["arm"], line["case"]): line for line in found["results"] if "case" in line}
    for arm in dict.fromkeys(line["arm"] for line in found["results"]):
        cells = [_largest(by.get((arm, case)), case) for case in cases]
        lines.append(f"| {PEERS.get(arm, arm)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _largest(line: dict[str, Any] | None, case: str) -> str:
    if line is None or line.get("found") is None:
        return "-"
    best = line["found"]
    what = f"{'' if line['exact'] else 'at least '}{best[case]:,}, {best['peak_gib']:.1f} GiB, {best['seconds']:.2f} s"
    return what + (f"; then {line['ended_by'].split(': ', 1)[1][:60]}" if "ended_by" in line else "")


def options_table() -> str:
    found = _found("head-options")
    if found is None:
        return _not_yet("head_options.py")
    lines = ["| | ms | of | share | MiB |", "|---" * 5 + "|"]
    for row in (*found["runs"], *found["few"]):
        of = (row["floor"], f"{row['share']:.0%}", f"{row['peak_mib']:.0f}") if "floor" in row else ("", "", "")
        lines.append(
            f"| {row['arm']} | {row['ms']:.2f} | {' | '.join(of)} |".replace("|  |", "| |").replace("|  |", "| |")
        )
    return "\n".join(lines)


def first_call_table() -> str:
    if (found := _found("first-call")) is None:
        return _not_yet("first_call.py")
    runs = {(run["op"], run["arm"]): run for run in found["runs"]}
    lines = ["| op | sizes | liger_hw: first, second call | Liger 0.8.5 |", "|---" * 4 + "|"]
    for op in dict.fromkeys(run["op"] for run in found["runs"]):
        cells = []
        for arm in ("liger_hw", "liger"):
            run = runs.get((op, arm), {})
            cells.append(f"{run['first_s']:.2f} s, {1e3 * run['second_s']:.1f} ms" if "first_s" in run else "-")
        lines.append(
            f"| {op} | {next(run['sizes'] for run in found['runs'] if run['op'] == op)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _found(name: str) -> dict[str, Any] | None:
    return _read(name) if (RESULTS / f"{name}-h200.json").exists() else None


def _not_yet(script: str) -> str:
    return f"Not measured yet: `benchmarks/{script}`."


EXAMPLES = {
    "trainer_sft": "transformers.Trainer",
    "trl_dpo": "TRL, DPO",
    "fsdp2": "FSDP2, 2 GPUs",
    "lightning_sft": "Lightning",
    "medusa": "Medusa, 3 heads more",
}


def examples_table() -> str:
    """Unpatched / liger_hw, of the examples that were run."""
    if not (RESULTS / "examples-h200.json").exists():
        return "Not measured on GPUs yet."
    lines = ["| | layers x hidden, vocabulary | tokens a step | tokens/s | peak GiB | losses apart |", "|---" * 6 + "|"]
    found = {one["example"]: one for one in _read("examples")["examples"]}
    for name, title in EXAMPLES.items():
        if name not in found:
            continue
        o, arms = found[name]["options"], [found[name]["arms"][arm] for arm in ("unpatched", "liger_hw")]
        speed = [arm["tokens_per_second"] for arm in arms]
        cells = [title, f"{o['layers']} x {o['hidden']}, {o['vocab']:,}", f"{found[name]['tokens']:,}"]
        cells.append(" / ".join(f"{n:,.0f}" for n in speed) + f" ({speed[1] / speed[0] - 1:+.1%})")
        cells.append(" / ".join(f"{arm['peak_mib'] / 1024:.2f}" for arm in arms))
        lines.append("| " + " | ".join([*cells, f"{found[name]['largest_loss_difference']:.3f}"]) + " |")
    return "\n".join(lines)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}-h200.json").read_text())


PAGES = {
    "README.md": {
        **{"ops": ops_table, "end to end": end_to_end_table, "models": models_table},
        **{"host": host_table, "first step": first_step_table, "regret": regret_table},
    },
    "docs/shapes.md": {"shapes": shapes_table, "behind": behind_table, "limits": limits_table},
    "docs/activations.md": {"activations": activations_table, "longest": longest_table},
    "docs/losses.md": {
        "losses": losses_table,
        "sweep": sweep_text,
        "largest": largest_table,
        "options": options_table,
        "first call": first_call_table,
    },
    "examples/README.md": {"examples": examples_table},
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


def draw() -> None:
    if (RESULTS / TABLE).exists():
        rows = [
            row
            for row in report.load(RESULTS / TABLE)["rows"]
            if row["share"] and row["arm"] in (*ARMS, "torch", "cce")
        ]
        plots.bars(rows, ROOT / "docs" / "ops.png")
    if (RESULTS / MANY).exists():
        rows = report.load(RESULTS / MANY)["rows"]
        plots.share_by_size(rows, ROOT / "docs" / "shapes-share.png")
        plots.speed_by_size(rows, ROOT / "docs" / "shapes-speed.png")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not current")
    parser.add_argument("--plots", action="store_true", help="draw the plots as well (needs matplotlib)")
    options = parser.parse_args(arguments)
    check, stale = options.check, 0
    if options.plots:
        draw()
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
