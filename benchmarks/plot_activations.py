"""docs/activations.png: speed against peak memory by activation level, from a results file of activations.py.

python benchmarks/plot_activations.py benchmarks/results/activations-mistral-7b-h200.json docs/activations.png
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

source, target = sys.argv[1:]
found = json.load(open(source))
released, mixes = (run["measured"] for run in found["runs"])
ours = {row["arm"]: (row["peak_gib"], row["tokens_per_second"]) for row in released if row["library"] == "liger_hw"}
planned = {row["arm"]: (row["peak_gib"], row["tokens_per_second"]) for row in mixes if row["arm"].endswith("GiB")}
others = [(row["library"], row) for row in released + mixes if row["library"] != "liger_hw" and "peak_gib" in row]
peers = {(library, row["arm"]): (row["peak_gib"], row["tokens_per_second"]) for library, row in reversed(others)}

figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
line = sorted([*ours.values(), *planned.values()])
axes.plot(*zip(*line), color="tab:blue", alpha=0.5, zorder=1)
axes.scatter(*zip(*ours.values()), color="tab:blue", zorder=3, label="liger_hw, a level")
axes.scatter(
    *zip(*planned.values()), color="white", edgecolor="tab:blue", zorder=2, label="liger_hw, the planner's mix"
)
for name, (x, y) in ours.items():
    axes.annotate(name, (x, y), textcoords="offset points", xytext=(-4, 8), ha="right", color="tab:blue")
for name, (x, y) in planned.items():
    axes.annotate(name, (x, y), textcoords="offset points", xytext=(4, -13), fontsize=8, color="tab:gray")
for library, marker, colour, title in (
    ("liger", "s", "tab:orange", "liger-kernel 0.8.5"),
    ("hf", "^", "tab:green", "Hugging Face"),
):
    points = {arm: at for (lib, arm), at in peers.items() if lib == library}
    axes.scatter(*zip(*points.values()), marker=marker, color=colour, zorder=2, label=title)
    for arm, at in points.items():
        words = "checkpointing" if arm == "full" else "without"
        axes.annotate(words, at, textcoords="offset points", xytext=(6, -12), fontsize=8, color=colour)
axes.set_xlabel("peak memory, GiB")
axes.set_ylabel("tokens/s")
axes.set_xlim(50, 122)
axes.set_ylim(8000, 13200)
axes.grid(alpha=0.3)
axes.legend(loc="lower right", fontsize=8)
axes.set_title(
    f"{found['model'].split(',')[0]}, 32 layers, batch {found['batch']} x {found['seq']}, one H200", fontsize=10
)
figure.savefig(target, dpi=100)
