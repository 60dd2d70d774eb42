"""Writes the tables of README and docs/ from the JSON in results/.

    python benchmarks/readme.py            rewrites the pages between their `<!-- benchmarks/readme.py ... -->` marks
    python benchmarks/readme.py --check    only says whether they are current; exit code 1 when one is not
    python benchmarks/readme.py --plots    draws the plots of docs/ as well (needs matplotlib)

The tables of docs/losses.md are in losses_page.py, what both read in published.py. A cell is the median from the newest
file that has the row (`published.measured`); what no file has is a dash.
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
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import experts_page
import losses_page
import published
import size_plots

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


def ops_table() -> str:
    rows, whole = published.measured(published.TABLE, published.SINCE), (published.RESULTS / published.TABLE).exists()
    lines = [
        "| op | sizes | floor | " + " | ".join(ARMS.values()) + " | error | memory |",
        "|---" * (5 + len(ARMS)) + "|",
    ]
    for op, sizes in SHOWN.items():
        for size in sizes:
            ours = rows[op, size, "liger_hw"]
            found = [rows.get((op, size, arm)) for arm in ARMS]
            cells = [published.cell(row) + (row["mark"] if whole and row else "") for row in found]
            cells[0] = f"**{cells[0]}** ({ours['floor_ms'] / ours['ms']['median']:.0%})"
            for figure in (published.worse_error, published.memory):
                cells.append(" / ".join(figure(rows.get((op, size, arm))) for arm in ("liger_hw", "liger")))
            lines.append(f"| {op} | {size} | {ours['floor_ms']:.3g} | " + " | ".join(cells) + " |")
    lines += published.drawn("share of the floor, op by op", "ops.png", seen_from="docs/benchmarks")
    said = {
        "†": f"of another run than the rest (`{published.ALL_LOSSES}`)",
        "‡": f"of a later one (`{published.SINCE}`)",
    }
    legend = [f"{mark} {words}" for mark, words in said.items() if whole and any(mark in line for line in lines)]
    if legend:
        lines += ["", ", ".join(legend) + "."]
    return "\n".join(lines)


def shapes_table() -> str:
    """A row an op over the shapes of `sweep.py many`."""
    if not (published.RESULTS / published.MANY).exists():
        return published.not_yet("tables.sh")
    best = published.against_best(published.load(published.MANY)["rows"])
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
    lines += published.drawn("speed against size", "shapes-speed.png")
    lines += published.drawn("share of the floor against size", "shapes-share.png")
    return "\n".join(lines)


def widths_table() -> str:
    """A row an op over the widths of `sweep.py widths`."""
    if not (published.RESULTS / published.WIDTHS).exists():
        return published.not_yet("sweep.py widths")
    rows = [row for row in published.load(published.WIDTHS)["rows"] if row["share"]]
    best = published.against_best(rows)
    lines = ["| op | widths | share: worst | p10 | median | under 88% | behind a peer by more than 1% | 3% |"]
    lines.append("|---" * 8 + "|")
    for op in dict.fromkeys(row["op"] for row in rows):
        shares = sorted(row["share"] for row in rows if row["op"] == op and row["arm"] == "liger_hw")
        speeds = [one["speed"] for one in best if one["op"] == op]
        cells = [op, f"{len(shares)}"]
        cells += [f"{x:.0%}" for x in (shares[0], shares[len(shares) // 10], statistics.median(shares))]
        cells += [f"{sum(share < 0.88 for share in shares)}"]
        cells += [f"{sum(speed < most for speed in speeds)}" for most in (0.99, 0.97)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += published.drawn("share of the floor against the columns of a row", "widths.png")
    return "\n".join(lines)


def behind_table() -> str:
    if not (published.RESULTS / published.MANY).exists():
        return published.not_yet("tables.sh")
    best = published.against_best(published.load(published.MANY)["rows"])
    lines = ["| op | sizes | liger_hw, us | best peer, us | | speed | timed at |", "|---" * 7 + "|"]
    for one in sorted((one for one in best if one["speed"] < 0.99), key=lambda one: one["speed"]):
        times = f"{1e3 * one['ours']:.1f} | {1e3 * one['best']:.1f} | {one['peer']} | {one['speed']:.2f}"
        times += f" | {one['commit'] or '-'}"
        lines.append(f"| {one['op']} | {published.size(one)} | {times} |")
    return "\n".join(lines)


def limits_table() -> str:
    """A row a kernel of every op that has an aim, as limits.py measured it, beside what the whole op reaches."""
    rows, found = published.measured(published.TABLE, published.SINCE), published.found("limits")
    if found is None:
        return published.not_yet("limits.py")
    heads = (
        "op",
        "sizes",
        "aim",
        "reached",
        "kernel",
        "us",
        "share of copy",
        "registers",
        "spills",
        "warps held",
        "launch",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found["rows"]:
        size, aim = "x".join(map(str, one["sizes"])), one["aim"]
        first = [one["op"], size, "-" if aim is None else f"{aim:.0%}", "-"]
        if ours := rows.get((one["op"], size, "liger_hw")):
            reached = ours["floor_ms"] / ours["ms"]["median"]
            first[3] = f"**{reached:.0%}**" if aim and reached < aim else f"{reached:.0%}"
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
            lines.append("| " + " | ".join([*first, f"not measured: {one['error'][:60]}", *["-"] * 6]) + " |")
    return "\n".join(lines)


def host_table() -> str:
    """Microseconds an op, forward / forward and backward / one of 8 forwards that share a backward."""
    rows: dict[str, dict[str, Any]] = {}
    for row in published.read("host")["calls"]:
        rows.setdefault(row["op"], {})[row["arm"]] = row
    ways = ("fwd_us", "full_us", "batch_us")
    least = {one["op"]: one.get("least_full_us") for one in published.read("host")["parts"]}
    heads = (
        "op",
        "liger_hw",
        "Liger 0.8.5",
        "torch alone",
        "share of Liger",
        "torch alone / Liger",
        "least",
        "net share",
    )
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


def host_limits() -> str:
    """Ops whose forward and backward take over half of Liger's host time, and how far they are from what cannot be "
    "left out."""
    found = published.read("host")
    arms = {(row["op"], row["arm"]): row.get("full_us") for row in found["calls"]}
    lines = [
        "| over half of Liger's | liger_hw | torch alone | + launches | + allocations = least | Liger 0.8.5 | why |"
    ]
    lines.append("|---" * 7 + "|")
    for part in found["parts"]:
        ours, theirs, floor = (arms.get((part["op"], arm)) for arm in ("liger_hw", "liger", "floor"))
        least = part.get("least_full_us")
        if None in (ours, theirs, floor, least) or ours <= theirs / 2:
            continue
        allocations = part["allocs_full"] * part["alloc"]
        why = (
            "torch, driver and allocator alone are over half"
            if least > theirs / 2
            else f"{ours - least:.0f} us are ours"
        )
        cells = [part["op"], *(f"{us:.0f}" for us in (ours, floor, least - allocations, least, theirs)), why]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else "No op takes over half of Liger's host time, forward and backward."


def regret_table() -> str:
    lines = ["| run | shapes judged | median | p90 | worst | worst kernel |", "|---" * 6 + "|"]
    found = [json.loads(path.read_text()) for path in published.RESULTS.glob("bucketing-regret*-h200.json")]
    for one in sorted(found, key=lambda one: one["date"]):
        shape, kernel = one["per_shape"], one["per_kernel"]
        cells = [one["date"][:10], f"{shape['count']}", *(f"{shape[name]:.1%}" for name in ("median", "p90", "worst"))]
        lines.append("| " + " | ".join([*cells, f"{kernel['worst']:.1%}"]) + " |")
    return "\n".join(lines)


def first_step_table() -> str:
    arms = {"hf": "Hugging Face", "liger": "+ Liger 0.8.5", "liger_hw": "+ liger_hw"}
    lines = ["| first step, s | " + " | ".join(arms.values()) + " |", "|---" * (1 + len(arms)) + "|"]
    names = {"olmo2": "OLMo-2", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}
    runs = published.read("first-step")["runs"]
    for model in dict.fromkeys(one["model"] for one in runs):
        cells = []
        for arm in arms:
            mine = [one for one in runs if (one["model"], one["arm"]) == (model, arm)]
            reached = [f"{one['steps'][0]:.2f}" for one in mine if one["steps"]]
            cells.append(" / ".join(reached) or ("not reached" if mine else "-"))
        lines.append(f"| {names[model]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def end_to_end_table() -> str:
    """Of a run of the demo when it still had this size; a new one is of `end_to_end.py`, as `TRAINED`."""
    arms = published.read("demo-7b-16l")["arms"]
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
    "qwen2": "Qwen2-7B",
    "olmo2": "OLMo-2-7B",
    "granite": "Granite-3-8B",
    "gemma2": "Gemma-2-2B",
    "phi3": "Phi-3-mini",
}


def trained() -> dict[str, dict[str, dict[str, Any]]]:
    """Model and layers -> arm -> its row of `speed_table.py`."""
    models = published.read("speed-table")["models"]
    return {
        f"{title}, {models[name]['layers']} of {models[name]['of']}": models[name]["arms"]
        for name, title in TRAINED.items()
    }


def _with_experts() -> dict[str, dict[str, dict[str, Any]]]:
    """Mixtral, of `experts.sh`: Liger's first step of it tunes for minutes, and was not run again."""
    record = published.read("e2e-experts-mixtral")
    rows = {row["arm"]: row for row in record["summary"]}
    return {f"Mixtral-8x7B, {record['plan']['layers']} of {record['shape']['layers']}": rows}


def _speeds(arms: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{arms[arm]['tokens_per_second']:,.0f}" if arm in arms else "-" for arm in ("hf", "liger", "liger_hw")]


def _over(arms: dict[str, dict[str, Any]], other: str, digits: int) -> str:
    if other not in arms:
        return "-"
    return f"{arms['liger_hw']['tokens_per_second'] / arms[other]['tokens_per_second'] - 1:+.{digits}%}"


def _gib(arms: dict[str, dict[str, Any]]) -> str:
    return " / ".join(f"{arms[arm]['peak_gib']:.1f}" if arm in arms else "-" for arm in ("hf", "liger", "liger_hw"))


def models_table() -> str:
    lines = [
        "| layers of | Hugging Face | + Liger 0.8.5 (Triton) | + liger_hw | over Hugging Face | over Liger | "
        "peak GiB | losses apart |",
        "|---" * 8 + "|",
    ]
    for title, arms in trained().items():
        apart = " / ".join(f"{arms[arm]['losses_apart']:.3f}" for arm in ("liger", "liger_hw"))
        cells = [title, *_speeds(arms), _over(arms, "hf", 1), _over(arms, "liger", 1), _gib(arms), apart]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed_table() -> str:
    """What README shows of `models_table`, and Mixtral: what a training step gains and what memory it takes."""
    lines = ["| layers of | Hugging Face | + Liger 0.8.5 (Triton) | + liger_hw | gain | peak GiB |", "|---" * 6 + "|"]
    for title, arms in (trained() | _with_experts()).items():
        lines.append("| " + " | ".join([title, *_speeds(arms), _over(arms, "hf", 0), _gib(arms)]) + " |")
    return "\n".join(lines)


def draw_end_to_end(path: Path) -> None:
    """README's picture: tokens/s against peak memory, each a share of Hugging Face's, an arrow a model from Liger."""
    plt = size_plots.pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 3.9))
    for title, arms in trained().items():
        hf = arms["hf"]
        points = {
            arm: (arms[arm]["peak_gib"] / hf["peak_gib"], arms[arm]["tokens_per_second"] / hf["tokens_per_second"])
            for arm in ("liger", "liger_hw")
        }
        axes.plot(*zip(*points.values()), color="0.75", linewidth=1, zorder=1)
        axes.scatter(*points["liger"], color=size_plots.COLOURS["liger"], s=34, zorder=2)
        axes.scatter(*points["liger_hw"], color=size_plots.COLOURS["liger_hw"], s=54, zorder=3)
        name, left = title.split(",")[0], points["liger_hw"][0] < 0.6  # so that neighbours' names do not meet
        place = {"xytext": (-7 if left else 7, 2), "ha": "right" if left else "left"}
        axes.annotate(name, points["liger_hw"], textcoords="offset points", fontsize=8, **place)
    axes.scatter(1, 1, color="0.3", marker="s", s=40, label="Hugging Face")
    axes.scatter([], [], color=size_plots.COLOURS["liger"], label="+ Liger 0.8.5")
    axes.scatter([], [], color=size_plots.COLOURS["liger_hw"], label="+ liger_hw")
    axes.set_xlabel("peak memory, share of Hugging Face's")
    axes.set_ylabel("tokens/s, share of Hugging Face's")
    axes.set_xlim(0.48, 1.06)
    axes.margins(y=0.08)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


PEAKS = {
    "llama3": "Llama-3-8B, {} of 32",
    "qwen3": "Qwen3-8B, {} of 36",
    "qwen2": "Qwen2-7B, {} of 28",
    "olmo2": "OLMo-2-7B, {} of 32",
}
PEAK_ARMS = {"liger": "Liger", "liger_hw+keep": "`keep`", "liger_hw+last": "the default"}


def _peaks() -> dict[str, dict[str, dict[str, float]]]:
    """Layers and tokens of a step -> arm -> tokens/s, and MiB at the highest of forward, of backward and of the step.

    Speed is the median of an arm's runs, memory the least of them: what runs first in a process also allocates the
    workspace of the GEMM library.
    """
    found = {}
    for model, title in PEAKS.items():
        record = published.read(f"step-peaks-{model}")
        options, arms = record["options"], {}
        for arm in PEAK_ARMS:
            mine = [one for one in record["runs"] if one["arm"] == arm]
            arms[arm] = {"speed": statistics.median(one["tokens_per_second"] for one in mine)}
            for part in ("forward", "backward"):
                arms[arm][part] = min(one["peaks_mib"][part] for one in mine)
            arms[arm]["step"] = min(max(one["peaks_mib"].values()) for one in mine)
        found[f"{title.format(options['layers'])}, {options['batch']} x {options['seq']}"] = arms
    return found


def peaks_table() -> str:
    lines = ["| layers of, tokens of a step | | tokens/s | peak of forward | of backward | of the step, GiB |"]
    lines.append("|---" * 6 + "|")
    for title, arms in _peaks().items():
        for arm, name in PEAK_ARMS.items():
            one = arms[arm]
            peaks = [f"{one[part] / 1024:.2f}" for part in ("forward", "backward", "step")]
            cells = [title if arm == "liger" else "", name, f"{one['speed']:,.0f}", *peaks]
            lines.append(("| " + " | ".join(cells) + " |").replace("|  |", "| |"))
    return "\n".join(lines)


def default_table() -> str:
    """The peak of a step by Liger, with everything kept and with the default, and what the default costs."""
    lines = ["| layers of, tokens of a step | Liger, GiB | `keep` | the default | its tokens/s against `keep` |"]
    lines.append("|---" * 5 + "|")
    for title, arms in _peaks().items():
        peaks = [f"{arms[arm]['step'] / 1024:.2f}" for arm in PEAK_ARMS]
        cost = arms["liger_hw+last"]["speed"] / arms["liger_hw+keep"]["speed"] - 1
        lines.append("| " + " | ".join([title, *peaks, f"{cost:+.1%}"]) + " |")
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
    files = [published.read(f"activations-{model}") for model in PLANNED]
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
    for row in published.read("longest-sequence")["levels"]:
        for one in row["tries"]:
            speed, peak = one.get("tokens_per_second"), one.get("peak_gib")
            outcome = one["outcome"] + (f" ({one['allocator']})" if "allocator" in one else "")
            cells = [f"`{row['level']}`", f"{one['seq']:,}", outcome, f"{speed:,.0f}" if speed else "-"]
            cells += [f"{peak:.1f}" if peak else "-", f"{one['predicted_gib']:.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


PAGES = {
    "README.md": {"speed": speed_table},
    "docs/benchmarks/ops.md": {"ops": ops_table},
    "docs/benchmarks/end-to-end.md": {
        "end to end": end_to_end_table,
        "models": models_table,
        "peaks": peaks_table,
        "first step": first_step_table,
    },
    "docs/benchmarks/host.md": {"host": host_table, "host limits": host_limits, "regret": regret_table},
    "docs/shapes.md": {"shapes": shapes_table, "behind": behind_table, "widths": widths_table, "limits": limits_table},
    "docs/activations.md": {"default": default_table, "activations": activations_table, "longest": longest_table},
    "docs/losses.md": losses_page.TABLES,
    "docs/moe.md": experts_page.TABLES,
}


def filled(text: str, page: str) -> str:
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
    draw_end_to_end(ROOT / "docs" / "assets" / "end-to-end.svg")
    if (published.RESULTS / published.TABLE).exists():
        rows = [
            row
            for row in published.load(published.TABLE)["rows"]
            if row["share"] and row["arm"] in (*ARMS, "torch", "cce")
        ]
        size_plots.bars(rows, ROOT / "docs" / "ops.png")
    if (published.RESULTS / published.MANY).exists():
        rows = published.load(published.MANY)["rows"]
        size_plots.share_by_size(rows, ROOT / "docs" / "shapes-share.png")
        size_plots.speed_by_size(rows, ROOT / "docs" / "shapes-speed.png")
    if (published.RESULTS / published.WIDTHS).exists():
        size_plots.share_by_width(published.load(published.WIDTHS)["rows"], ROOT / "docs" / "widths.png")


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
