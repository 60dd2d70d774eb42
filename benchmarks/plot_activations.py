"""docs/activations.png: speed against peak memory by activation level, a panel for each results file of activations.py.

    python benchmarks/plot_activations.py docs/activations.png \\
        benchmarks/results/activations-{mistral-7b,llama3,qwen3,gemma2}-h200.json
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"llama3": "Llama-3-8B", "qwen3": "Qwen3-8B", "gemma2": "Gemma-2-2B (eager attention)"}
PEERS = (("liger", "s", "tab:orange", "liger-kernel 0.8.5"), ("hf", "^", "tab:green", "Hugging Face"))


def rows_of(path: str) -> tuple[str, list[dict[str, Any]]]:
    """(title, rows of (library, arm)) of a file; where runs were joined in it, an arm's first."""
    found = json.load(open(path))
    if "model" in found:
        rows = [row for run in found["runs"] for row in run["measured"]]
        title = f"{found['model'].split(',')[0]}, 32 layers, {found['batch']} x {found['seq']}"
    else:
        rows, o = found["runs"], found["options"]
        title = f"{NAMES[o['model']]}, {o['layers']} layers, {o['batch']} x {o['seq']}"
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        first.setdefault((row["library"], row["arm"]), row)
    return title, [row for row in first.values() if "peak_gib" in row and "rival" not in row["arm"]]


def draw(axes: Any, title: str, rows: list[dict[str, Any]]) -> None:
    at = {(row["library"], row["arm"]): (row["peak_gib"], row["tokens_per_second"]) for row in rows}
    ours = {arm: place for (library, arm), place in at.items() if library == "liger_hw"}
    levels = {arm: place for arm, place in ours.items() if not arm.endswith("GiB")}
    planned = {arm: place for arm, place in ours.items() if arm.endswith("GiB")}
    axes.plot(*zip(*sorted(ours.values())), color="tab:blue", alpha=0.5, zorder=1)
    axes.scatter(*zip(*levels.values()), color="tab:blue", zorder=3, label="liger_hw, a level")
    axes.scatter(*zip(*planned.values()), color="white", edgecolor="tab:blue", zorder=2, label="the planner's mix")
    for name, place in levels.items():
        axes.annotate(name, place, textcoords="offset points", xytext=(-4, 7), ha="right", fontsize=8, color="tab:blue")
    for name, place in planned.items():
        axes.annotate(name, place, textcoords="offset points", xytext=(4, -12), fontsize=7, color="tab:gray")
    for library, marker, colour, label in PEERS:
        points = {arm: place for (of, arm), place in at.items() if of == library}
        axes.scatter(*zip(*points.values()), marker=marker, color=colour, zorder=2, label=label)
        for arm, place in points.items():
            words = "checkpointing" if arm == "full" else "without"
            beside = {"xytext": (6, -12)} if arm == "full" else {"xytext": (6, -14), "ha": "right"}
            axes.annotate(words, place, textcoords="offset points", fontsize=7, color=colour, **beside)
    axes.margins(x=0.12, y=0.12)
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the picture")
    parser.add_argument("sources", nargs="+", metavar="FILE", help="a results file of activations.py")
    told = parser.parse_args()
    rows = -(-len(told.sources) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(11, 3.8 * rows), layout="constrained", squeeze=False)
    for axes, source in zip(grid.flat, told.sources):
        draw(axes, *rows_of(source))
    for axes in grid[-1]:
        axes.set_xlabel("peak memory, GiB")
    for axes in grid[:, 0]:
        axes.set_ylabel("tokens/s")
    grid.flat[0].legend(loc="lower right", fontsize=8)
    figure.suptitle("Activation levels on one H200, bf16, fused AdamW", fontsize=10)
    figure.savefig(told.target, dpi=90)
    return 0


if __name__ == "__main__":
    sys.exit(main())
