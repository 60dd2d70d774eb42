"""`liger-hw autotune --device gfx942` on a machine that has none: candidates are compiled and modelled, not measured."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from ._values import table

if TYPE_CHECKING:
    from ..backends import Target
    from .autotune import _Progress


def absent(name: str | None) -> "Target | None":
    """The Target of a device or an architecture that is named, known and not in this machine."""
    import torch

    from ..backends import backends, known_target, target_of

    try:
        target = known_target(name or "")
    except ValueError:
        return None
    for one in backends():
        if one.device_type != "cpu" and getattr(torch, one.device_type).device_count():
            if one.is_called(target_of(torch.device(one.device_type, 0)), name or ""):
                return None
    return None if target.vendor == "cpu" else target


def run(
    arguments: argparse.Namespace, target: "Target", jobs: list[Any], problems: list[str], screen: "_Progress"
) -> int:
    """Choose for every job, store the choices, print them. `screen` shows what is done."""
    from ..autotune import store
    from ..autotune.static import MARGINS, StaticTuner
    from ..autotune.workers import CompilePool
    from ..backends import backend

    folder = store.home(target)
    compiles = backend(target.vendor).triton_target(target) is not None
    margin = MARGINS["binary" if compiles else "ttir"]
    how = f"compiled for {target.name}" if compiles else f"brought to TTIR (no compiler for {target.arch} here)"
    screen.line(f"{arguments.device} is not in this machine: candidates are {how} and ranked by a model, not measured.")
    screen.line(f"Kept is what should beat the heuristic by {margin:.0%}, as `{'static' if compiles else 'modelled'}`.")
    screen.line("What is measured already, here or for its family, is left as it is.")
    screen.line(f"{len(jobs)} kernels and keys; choices go to {folder or 'nowhere: set LIGER_HW_CACHE_DIR'}")
    for problem in problems:
        screen.line(f"not planned: {problem}")
    results: list[Any] = []

    def done(result: Any) -> None:
        results.append(result)
        screen.finished(result)

    measured = {
        name
        for _, table in store.layers(target)
        for name, entry in table.items()
        if entry.provenance["kind"] == "measured"
    }

    def save(name: tuple, entry: Any) -> Any:
        return (
            None if name in measured else store.save(target, name, entry)
        )  # a guess must not answer before a measurement

    interrupted = False
    count = arguments.workers or os.cpu_count() or 1
    with CompilePool(count, seconds=120.0) as pool:
        tuner = StaticTuner(target, pool, candidates=arguments.candidates, save=save)
        try:
            tuner.run(jobs, done, arguments.budget or math.inf)
        except KeyboardInterrupt:
            interrupted = True
    failed = [r for r in results if r.error]
    screen.line(
        f"{'interrupted' if interrupted else 'done'} after {screen.elapsed():.0f} s: {sum(r.stored for r in results)} stored, {len(failed)} failed"
    )
    if arguments.json:
        facts = {"target": target.to_json(), "triton": store.triton_version(), "date": store.today(), "margin": margin}
        rows = [r.to_json() for r in results]
        print(
            json.dumps(
                {"kind": "static", **facts, "results": rows, "problems": problems, "interrupted": interrupted}, indent=1
            )
        )
    else:
        print(_text(results))
        if any(r.stored for r in results):
            file = target.arch if arguments.device == target.arch else f"{target.arch}-{store.slug(target.name)}"
            print(f"to share them: liger-hw cache export --device {arguments.device} -o {file}.json", file=sys.stderr)
    if interrupted:
        screen.line("what was compiled is kept by Triton, the same command goes on from there")
        return 130
    return 1 if failed else 0


def _text(results: list[Any]) -> str:
    rows = [("kernel", "sizes", "key", "heuristic us", "choice us", "gain", "tried", "dropped", "")]
    for r in results:
        head = (r.job.name, "x".join(map(str, r.job.sizes)), str(r.job.key))
        if r.error:
            rows.append((*head, "", "", "", "", "", r.error.splitlines()[0][:80]))
            continue
        if not r.heuristic_us:
            rows.append((*head, "", "", "", "", "", r.note))
            continue
        times = (f"{r.heuristic_us:.1f}", f"{r.winner_us:.1f}", f"{r.gain:.1%}" if r.gain else "")
        rows.append((*head, *times, str(r.tried), str(r.failed), r.note))
    return table(rows) + "\nTimes are the model's, not measured."
