"""Plots of the docs: a bar an op, and over many shapes a panel an op. `benchmarks/readme.py` draws them."""

from __future__ import annotations

import math
import os
from typing import Any, Callable, Sequence

from published import against_best

from liger_hw.bench.peers import OURS

ARMS = (OURS, "torch", "compile", "aten", "liger", "quack", "cce", "cce_exact", "eager", "grouped_mm", "batched_mm")
COLOURS = {name: f"C{place}" for place, name in enumerate(ARMS)}
"""An arm has the same colour in every plot."""


def pyplot() -> Any:
    """matplotlib's pyplot, which draws into files alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def share_by_size(rows: Sequence[dict[str, Any]], path: str | os.PathLike) -> None:
    """A panel an op: the share of the floor against the bytes the op must move, a mark for each shape and arm."""

    def panel(axes: Any, mine: list[dict[str, Any]]) -> None:
        for arm in dict.fromkeys(row["arm"] for row in mine):
            points = [
                (row["floor_ms"] * row["copy_gb_s"] * 1e6 / 2**20, 100 * row["share"])
                for row in mine
                if row["arm"] == arm
            ]
            style = {"s": 12, "zorder": 5} if arm == OURS else {"s": 9, "alpha": 0.7, "marker": "x", "linewidths": 0.8}
            axes.scatter(*zip(*points), color=COLOURS[arm], label=arm, **style)
        axes.axhline(100, color="0.6", linestyle=":", linewidth=0.8)
        axes.set_ylim(0, 130)

    _panels([row for row in rows if row["share"]], path, panel, "% of the measured copy floor against MiB moved")


def share_by_width(rows: Sequence[dict[str, Any]], path: str | os.PathLike) -> None:
    """A panel an op: the share of the floor over the columns of a row, a line an arm."""

    def panel(axes: Any, mine: list[dict[str, Any]]) -> None:
        for arm in dict.fromkeys(row["arm"] for row in mine):
            points = sorted((row["sizes"][-1], 100 * row["share"]) for row in mine if row["arm"] == arm)
            axes.plot(*zip(*points), color=COLOURS[arm], label=arm, linewidth=1.2 if arm == OURS else 0.8)
        axes.axhline(100, color="0.6", linestyle=":", linewidth=0.8)
        axes.set_ylim(0, 110)

    _panels([row for row in rows if row["share"]], path, panel, "% of the measured copy floor against columns of a row")


def speed_by_size(rows: Sequence[dict[str, Any]], path: str | os.PathLike) -> None:
    """A panel an op: our speed over the best peer's against the bytes the op must move; under 1 a peer wins."""

    def panel(axes: Any, mine: list[dict[str, Any]]) -> None:
        for peer in dict.fromkeys(one["peer"] for one in mine):
            points = [(one["mib"], one["speed"]) for one in mine if one["peer"] == peer]
            axes.scatter(*zip(*points), color=COLOURS[peer], s=10, label=f"over {peer}")
        axes.axhline(1, color="0.4", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 4, 8, 16, 32], ["0.5", "1", "2", "4", "8", "16", "32"])
        axes.minorticks_off()
        axes.set_ylim(0.5, max(4, 1.3 * max(one["speed"] for one in mine)))

    _panels(
        against_best(rows), path, panel, "best peer's time over ours against MiB moved (above the line we are faster)"
    )


def _panels(
    rows: Sequence[dict[str, Any]], path: str | os.PathLike, panel: Callable[[Any, list], None], title: str
) -> None:
    plt = pyplot()
    ops = list(dict.fromkeys(row["op"] for row in rows))
    if not ops:
        return
    columns = min(5, len(ops))
    shape = -(-len(ops) // columns), columns
    figure, grid = plt.subplots(*shape, figsize=(2.9 * columns, 2.1 * shape[0]), layout="constrained", squeeze=False)
    for axes, op in zip(grid.flat, ops):
        panel(axes, [row for row in rows if row["op"] == op])
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_title(op, fontsize=8)
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=5, loc="lower right")
    for axes in list(grid.flat)[len(ops) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def bars(rows: Sequence[dict[str, Any]], path: str | os.PathLike) -> None:
    """Each op's geometric mean over its sizes of the share of the floor, a bar an arm; the size an arm has are its
    own."""
    plt = pyplot()
    ops, arms = list(dict.fromkeys(row["op"] for row in rows)), list(dict.fromkeys(row["arm"] for row in rows))
    figure, axes = plt.subplots(figsize=(max(6, 0.55 * len(ops) + 2), 4.6), layout="constrained")
    width = 0.85 / len(arms)
    for number, arm in enumerate(arms):
        for place, op in enumerate(ops):
            shares = [row["share"] for row in rows if row["op"] == op and row["arm"] == arm]
            if shares:
                mean = math.exp(sum(map(math.log, shares)) / len(shares))
                axes.bar(place + (number + 0.5) * width - 0.425, 100 * mean, width, color=COLOURS[arm])
        axes.bar(0, 0, color=COLOURS[arm], label=arm)
    axes.set_xticks(range(len(ops)), ops, rotation=40, ha="right", fontsize=8)
    axes.set_xlim(-0.6, len(ops) - 0.4)
    axes.axhline(100, color="0.6", linestyle=":")
    axes.set_ylabel("% of the measured floor\n(geometric mean over sizes)")
    axes.set_title(f"{rows[0]['mode']}: {rows[0].get('device', '')}", fontsize=10)
    axes.legend(ncols=len(arms), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.32))
    figure.savefig(path, dpi=80)
    plt.close(figure)
