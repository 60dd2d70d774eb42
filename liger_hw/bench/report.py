"""Output of benchmarks: facts about the machine, a JSON file, a table."""

from __future__ import annotations

import gzip
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Sequence

import torch

from .. import __version__, files
from ..autotune.store import today, triton_version
from ..backends import backend, target_of
from ..text import json_text, table
from .peers import OURS, liger

SCHEMA = 1


def machine(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Device, driver, versions, commit and date of a run."""
    target = target_of(device)
    return {
        "device": target.name if device.type != "cpu" else platform.processor() or platform.machine(),
        "device_type": device.type,
        "vendor": target.vendor,
        "arch": target.arch,
        "multiprocessors": target.multiprocessors,
        "l2": target.l2,
        "driver": backend(target.vendor).driver(device.index or 0) or None,
        "torch": torch.__version__,
        "triton": triton_version() or None,
        "python": platform.python_version(),
        "transformers": next((package.version for package in metadata.distributions(name="transformers")), None),
        "liger_hw": __version__,
        "liger": liger.environment(),
        "commit": commit or git_commit(),
        "date": today(),
    }


def git_commit() -> str | None:
    """Commit of the checkout that liger_hw runs from, with `+` for uncommitted changes; None outside a checkout."""
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
    """Write JSON with a line for each of `rows`; numbers in rows have six digits. The file is replaced as a whole.

    path: `-` is standard output; a name that ends in `.gz` is compressed
    """
    document = {"schema": SCHEMA, **document}
    rows = document.pop("rows", None)
    text = json_text(document, indent=1)
    if rows is not None:
        lines = ",\n".join(f"  {json_text(row, digits=6)}" for row in rows)
        text = f'{text[:-2]},\n "rows": [\n{lines}\n ]\n}}'
    if str(path) == "-":
        print(text)
        return
    data = (text + "\n").encode()
    files.write_bytes(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


# -- text ------------------------------------------------------------------------------------------------------------


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each case and each of its arms, and notes."""
    if not rows:
        return "nothing was measured"
    lines: list[tuple[str, ...]] = [("arm", "ms", "p20..p80", "share", "MiB", "err", "err grad", "note")]
    cases: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["op"], "x".join(map(str, row["sizes"])), row["mode"]), []).append(row)
    for case, arms in cases.items():
        lines.append((" ".join(case) + _speed(arms),))
        lines += [_cells(row) for row in arms if row["status"] == "ok"]  # others are in the notes
    return "\n".join([table(lines), *_remarks(rows)])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ms, note = row["ms"], row["note"]
    if ms and row["method"] != "graph" and row["method"] not in note:
        note = f"{row['method']} {note}".strip()
    return (
        f"  {row['arm']}",
        _ms(ms and ms["median"]),
        f"{_ms(ms['p20'])}..{_ms(ms['p80'])}" if ms else "-",
        "-" if row["share"] is None else f"{row['share']:.0%}",
        _number(row["peak_mib"], ".0f"),
        _number(row["error_out"], ".1e"),
        _number(row["error_grad"], ".1e"),
        note[:60],
    )


def _speed(arms: Sequence[dict[str, Any]]) -> str:
    """Speed of ours relative to the best peer."""
    timed = {row["arm"]: row["ms"]["median"] for row in arms if row["ms"] and row["ms"]["median"] > 0}
    ours = timed.pop(OURS, None)
    if ours is None or not timed:
        return ""
    best = min(timed, key=timed.__getitem__)
    return f": {timed[best] / ours:.2f}x {best}"


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    def texts(of: Sequence[dict[str, Any]], *names: str) -> list[str]:
        return sorted({f"{' '.join(row[name] for name in names)}: {row['note']}" for row in of})

    lines = []
    timed = [row for row in rows if row["ms"]]
    methods = {row["method"] for row in timed}
    if "wall" in methods:
        lines.append("wall clock on a CPU: torch's reference path, not a measurement of any kernel")
    elif "events" in methods:
        lines.append("events: host time included, because no graph could hold the call")
    warm = sorted({f"{row['op']} {'x'.join(map(str, row['sizes']))}" for row in timed if not row["l2_cold"]})
    if warm and "wall" not in methods:
        lines.append("inputs small enough to stay in L2: " + ", ".join(warm)[:300])
    lines += _implementations(timed)
    lines += [f"absent  {text}" for text in texts([row for row in rows if row["status"] == "absent"], "arm")]
    failed = [row for row in rows if row["status"] in ("error", "unsupported", "skipped")]
    return lines + [f"failed  {text}" for text in texts(failed, "arm", "op")]


def _implementations(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The implementations that peers chose, each with its ops."""
    ops: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.get("implementation"):
            ops.setdefault((row["arm"], row["implementation"]), {})[row["op"]] = None
    lines = [f"{arm} ran {name}: {', '.join(of)}" for (arm, name), of in ops.items()]
    facts = liger.environment()
    if any(arm == "liger" for arm, _ in ops) and facts and not facts["cutlass.cute"]:
        lines.append("liger has CuTe DSL kernels too, which run where nvidia-cutlass-dsl is installed; here it is not")
    return lines


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
