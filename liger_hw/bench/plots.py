"""What is drawn of a benchmark's rows. Needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any, Sequence

from .. import files
from .peers import OURS


def pyplot() -> Any:
    """matplotlib's pyplot, or None after saying what to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("liger-hw: a plot needs matplotlib (pip install 'liger_hw[bench]')", file=sys.stderr)
        return None
    return plt


def plots(rows: Sequence[dict[str, Any]], folder: str | os.PathLike) -> list[Path]:
    """A roofline plot per op and mode, share against size; returns the files written.

    Needs matplotlib; without it, says so and returns nothing.
    """
    plt = pyplot()
    if plt is None:
        return []
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    timed = [row for row in rows if row["share"]]
    written = []
    for op in dict.fromkeys(row["op"] for row in timed):
        for mode in dict.fromkeys(row["mode"] for row in timed if row["op"] == op):
            figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
            mine = sorted(
                (row for row in timed if row["op"] == op and row["mode"] == mode), key=lambda r: math.prod(r["sizes"])
            )
            ticks = list(dict.fromkeys("x".join(map(str, row["sizes"])) for row in mine))
            for arm in dict.fromkeys(row["arm"] for row in mine):
                points = {"x".join(map(str, row["sizes"])): 100 * row["share"] for row in mine if row["arm"] == arm}
                style = {"linewidth": 2.5, "zorder": 5} if arm == OURS else {"alpha": 0.8}
                axes.plot([ticks.index(t) for t in points], list(points.values()), marker="o", label=arm, **style)
            axes.set_xticks(range(len(ticks)), ticks, rotation=25, ha="right")
            axes.axhline(100, color="0.6", linestyle=":")
            axes.set_ylim(0, None)
            axes.set_ylabel(f"% of the measured {mine[0]['floor']} floor")
            axes.set_title(f"{op}, {mode}, {mine[0]['dtype']}: {mine[0].get('device', '')}")
            axes.grid(alpha=0.3)
            axes.legend()
            written.append(folder / f"{op}-{mode}.png")
            files.write_figure(written[-1], figure, 120)
            plt.close(figure)
    return written
