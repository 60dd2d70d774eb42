"""What is kept of a benchmark: the machine it ran on, a JSON file, a short table, plots."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

import torch

from .. import __version__
from ..backends import target_of
from ..cli._values import table
from .peers import OURS

SCHEMA = 1


def machine(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Device, driver, versions, commit and date of a run."""
    target = target_of(device)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": target.name if device.type != "cpu" else platform.processor() or platform.machine(),
        "device_type": device.type,
        "vendor": target.vendor,
        "arch": target.arch,
        "multiprocessors": target.multiprocessors,
        "l2": target.l2,
        "driver": driver(device),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "liger_hw": __version__,
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def driver(device: torch.device) -> str | None:
    """The kernel driver's version, where there is a way to read it."""
    if device.type == "cpu":
        return None
    found = getattr(torch.get_device_module(device).get_device_properties(device), "driver_version", None)
    if found:
        return str(found)
    if torch.version.hip:
        path = Path("/sys/module/amdgpu/version")
        return path.read_text().strip() if path.exists() else None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return answer.stdout.strip().splitlines()[0] if answer.returncode == 0 and answer.stdout.strip() else None
    return None


def git_commit() -> str | None:
    """Commit of the source tree liger_hw runs from, with `+` for uncommitted changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        ).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    return commit + ("+" if git("status", "--porcelain", "--", "liger_hw") else "") if commit else None


def save(path: str | os.PathLike, document: dict[str, Any]) -> None:
    """Write JSON so that a killed run leaves the last whole file; `-` is standard output."""
    text = json.dumps({"schema": SCHEMA, **document}, indent=1, default=str)
    if str(path) == "-":
        print(text)
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


# -- text ------------------------------------------------------------------------------------------------------------


def as_text(rows: Sequence[dict[str, Any]], brief: bool = False) -> str:
    """Two tables: one row an arm with everything, then the times side by side. `brief` leaves the first out."""
    if not rows:
        return "nothing was measured"
    parts = [] if brief else [_details(rows), ""]
    return "\n".join([*parts, _side_by_side(rows), *_remarks(rows)])


def _details(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        (
            "op",
            "sizes",
            "mode",
            "arm",
            "ms",
            "p20..p80",
            "share",
            "eager ms",
            "host us",
            "MiB",
            "err",
            "err grad",
            "note",
        )
    ]
    for row in rows:
        if row["status"] != "ok":  # said once, below the tables
            continue
        ms, eager, note = row["ms"], row["eager_ms"], row["note"]
        if ms and row["method"] != "graph" and row["method"] not in note:
            note = f"{row['method']} {note}".strip()
        lines.append(
            (
                row["op"],
                "x".join(map(str, row["sizes"])),
                row["mode"],
                row["arm"],
                _ms(ms and ms["median"]),
                f"{_ms(ms['p20'])}..{_ms(ms['p80'])}" if ms else "-",
                _percent(row["share"]),
                _ms(eager and eager["median"]),
                _number(row["host_us"], ".0f"),
                _number(row["peak_mib"], ".0f"),
                _number(row["error_out"], ".1e"),
                _number(row["error_grad"], ".1e"),
                note[:60],
            )
        )
    return table(lines)


def _side_by_side(rows: Sequence[dict[str, Any]]) -> str:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    lines = [("op", "sizes", "mode", "floor", *arms, "best peer")]
    places = dict.fromkeys((row["op"], tuple(row["sizes"]), row["mode"]) for row in rows)
    index = {(row["op"], tuple(row["sizes"]), row["mode"], row["arm"]): row for row in rows}
    for place in places:
        found = {arm: index.get((*place, arm)) for arm in arms}
        floor = next((row["floor_ms"] for row in found.values() if row and row["floor_ms"]), None)
        cells = [_cell(row) for row in found.values()]
        lines.append((place[0], "x".join(map(str, place[1])), place[2], _ms(floor), *cells, _best_peer(found)))
    return table(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if not row["ms"]:
        return "-" if row["status"] in ("absent", "unsupported") else row["status"]
    mark = "" if row["method"] == "graph" else "*"
    return f"{_ms(row['ms']['median'])}{mark} {_percent(row['share'])}"


def _best_peer(found: dict[str, dict[str, Any] | None]) -> str:
    timed = {arm: row["ms"]["median"] for arm, row in found.items() if row and row["ms"] and row["ms"]["median"] > 0}
    ours = timed.pop(OURS, None)
    if ours is None or not timed:
        return "-"
    best = min(timed, key=timed.__getitem__)
    return f"{timed[best] / ours:.2f}x {best}"


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    methods = {row["method"] for row in rows if row["ms"]}
    if "wall" in methods:
        lines.append("* wall clock on a CPU: torch's reference path, not a measurement of any kernel")
    elif "events" in methods:
        waits = sorted(
            {f"{row['arm']} {row['op']} ({row['note']})" for row in rows if row["ms"] and row["method"] == "events"}
        )
        lines.append(
            "* timed between events, host time included, because no graph could hold it: " + "; ".join(waits)[:300]
        )
    warm = sorted(
        {f"{row['op']} {'x'.join(map(str, row['sizes']))}" for row in rows if not row["l2_cold"] and row["ms"]}
    )
    if warm and "wall" not in methods:
        lines.append("inputs small enough to stay in L2: " + ", ".join(warm)[:300])
    absent = sorted({f"{row['arm']}: {row['note']}" for row in rows if row["status"] == "absent"})
    lines += [f"absent  {text}" for text in absent]
    failed = sorted(
        {
            f"{row['arm']} {row['op']}: {row['note']}"
            for row in rows
            if row["status"] in ("error", "unsupported", "skipped")
        }
    )
    lines += [f"failed  {text}" for text in failed]
    return lines


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# -- plots -----------------------------------------------------------------------------------------------------------


def plots(rows: Sequence[dict[str, Any]], folder: str | os.PathLike) -> list[Path]:
    """A roofline plot per op (share against size) and a bar chart over the ops; returns the files written.

    Needs matplotlib; without it, says so and returns nothing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("liger-hw bench: --plot needs matplotlib (pip install 'liger_hw[bench]')", file=sys.stderr)
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
            figure.savefig(written[-1], dpi=120)
            plt.close(figure)
    for mode in dict.fromkeys(row["mode"] for row in timed):
        written.append(_bars(plt, [row for row in timed if row["mode"] == mode], folder / f"ops-{mode}.png", mode))
    return written


def _bars(plt: Any, rows: list[dict[str, Any]], path: Path, mode: str) -> Path:
    """Each op's geometric mean over its sizes of the share of the floor, a bar an arm."""
    ops, arms = list(dict.fromkeys(row["op"] for row in rows)), list(dict.fromkeys(row["arm"] for row in rows))
    figure, axes = plt.subplots(figsize=(max(6, 1.6 * len(ops) + 2), 4.2), layout="constrained")
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        for place, op in enumerate(ops):
            shares = [row["share"] for row in rows if row["op"] == op and row["arm"] == arm]
            if shares:
                mean = math.exp(sum(map(math.log, shares)) / len(shares))
                axes.bar(place + (number + 0.5) * width - 0.4, 100 * mean, width, color=f"C{number}")
        axes.bar(0, 0, color=f"C{number}", label=arm)
    axes.set_xticks(range(len(ops)), ops, rotation=15, ha="right")
    axes.axhline(100, color="0.6", linestyle=":")
    axes.set_ylabel("% of the measured floor (geometric mean over sizes)")
    axes.set_title(f"{mode}: {rows[0].get('device', '')}")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
