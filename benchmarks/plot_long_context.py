"""docs/long-context.png: peak memory and speed against tokens by level, as planned, and the runs of a results file.

A cross above the memory of a device is a run that had none left. Of several GPUs each has the memory that is shown.

python benchmarks/plot_long_context.py docs/long-context.png benchmarks/results/long-context-h200.json
"""

from __future__ import annotations

import argparse
import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from liger_hw.autotune import models
from liger_hw.recompute.levels import LEVELS, level_of_each
from liger_hw.recompute.planner import Assumptions, Planner

GIB = 1 << 30
TOKENS = [1 << power for power in range(13, 21)]
LIMITS = {"H100": 78, "H200": 139}
ARMS = {"hf": "Hugging Face", "checkpointing": "+ checkpointing", "liger": "+ Liger, tiled MLP", "liger_hw": "liger_hw"}


def main(out: str, results: list[str]) -> None:
    model = models.find("llama-3-8b")
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for level in LEVELS:
        planners = [Planner(model, 1, seq, Assumptions(in_backward=True)) for seq in TOKENS]
        predictions = [planner.predict(level_of_each(level, model.layers)) for planner in planners]
        memory.plot(TOKENS, [one.peak / GIB for one in predictions], label=level)
        speed.plot(TOKENS, [100 * one.speed for one in predictions], label=level)
    for name, limit in LIMITS.items():
        memory.axhline(limit, color="gray", linewidth=0.8, linestyle=":")
        memory.annotate(name, (TOKENS[0], limit), fontsize=8, va="bottom")
    rows = [row for path in results for row in json.load(open(path))["runs"] if row["layers"] == model.layers]
    rows = [row for row in rows if "lora" not in row]
    for (arm, name), marker in zip(ARMS.items(), "ov^*"):
        ran = [row for row in rows if row["arm"] == arm and "peak_gib" in row]
        points = [row["tokens"] for row in ran], [row["peak_gib"] for row in ran]
        memory.plot(*points, marker, color="black", fillstyle="none", markersize=8, label=f"{name}, measured")
        failed = [row["tokens"] for row in rows if row["arm"] == arm and "memory" in row.get("failure", "")]
        for tokens in failed:
            memory.annotate(f"x {name}", (tokens, 160 + 90 * list(ARMS).index(arm)), fontsize=7, ha="left")
    memory.set(yscale="log", ylabel="peak GiB of a GPU, with AdamW's states in bf16", ylim=(30, 3000))
    speed.set(ylabel="speed, % of keep", ylim=(70, 102))
    for axes in (memory, speed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(TOKENS, [f"{seq >> 10}K" for seq in TOKENS])
        axes.set_xlabel("tokens of one sequence, Llama-3-8B")
    memory.legend(fontsize=7)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("results", nargs="*", help="files of benchmarks/long_context.py")
    options = parser.parse_args()
    main(options.out, options.results)
