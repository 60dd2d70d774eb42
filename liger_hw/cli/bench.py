"""`liger-hw bench [OP ...]`: time each op at its workloads against torch, torch.compile and Liger.

Without a GPU the ops run their references at small sizes, timed by the wall clock, only to try the command. After
Ctrl-C, or when --budget ends, finished cases are printed, and written to --json FILE. In a checkout, `python
benchmarks/end_to_end.py` trains whole models.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from ..text import fold, time_left
from . import UsageError, user_errors
from .arguments import dtype_name, listed, positive, seconds, torch_dtype, usable_device

MODES = ("fwd", "bwd", "full")


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"unknown mode {text!r}; expected some of {','.join(MODES)}")
    return text


WORDS = listed(str, "names")


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="ops (default: all)")
    add("--device", help="torch device (default: the accelerator, else cpu)")
    add("--dtype", type=dtype_name, default="bfloat16", help="bf16 (default), fp16 or fp32")
    add("--json", nargs="?", const="-", metavar="FILE", help="write every figure; without FILE, print it")
    add("--budget", type=seconds, metavar="SECONDS", help="start no new work after this long (default: no limit)")
    add("--repeats", type=positive, default=3, help="interleaved repeats (default 3)")
    add("--against", type=WORDS, metavar="PEERS", help="peers (default torch,compile,liger)")
    modes = "fwd, bwd, full (default: full, forward and backward)"
    add("--mode", type=listed(_mode, "fwd, bwd or full"), default=["full"], help=modes)
    sizes = "comma-separated: workload names, sizes such as 16384x4096 or 4096x131072@fp32, `workloads` (default), "
    add("--sizes", type=WORDS, default=[], help=sizes + "`small` (default on a CPU)")


def run_bench(arguments: argparse.Namespace) -> int:
    from ..bench import ops, peers, report, timing

    device = usable_device(arguments.device)
    sizes, dtype = arguments.sizes or (["small"] if device.type == "cpu" else []), torch_dtype(arguments.dtype)
    with user_errors():
        todo = ops.cases(arguments.ops, sizes, dtype)
    against = arguments.against or list(peers.DEFAULT)
    if unknown := [name for name in against if name not in peers.PEERS]:
        raise UsageError(f"unknown peer {unknown[0]!r}; known: {', '.join(peers.PEERS)}")
    facts, rows, ended = report.machine(device), [], ""
    budget = timing.Budget(arguments.budget)
    if device.type == "cpu":
        _progress("no GPU: torch's reference path by the wall clock; real sizes take minutes each (--sizes workloads)")
    begun = itertools.count()

    def begin(case: ops.Case) -> None:
        done = next(begun)
        left = time_left(budget.spent, done, len(todo))
        arms = ", ".join((peers.OURS, *against))
        _progress(f"[{done + 1}/{len(todo)}] {case}: {arms}; {budget.spent:.0f} s so far{left}")

    def keep(new: list[dict[str, Any]]) -> None:
        names = "device", "driver", "torch", "triton", "liger_hw", "commit", "date", "copy_gb_s"
        rows.extend({**row, **{name: facts[name] for name in names}} for row in new)
        _progress(f"        {budget.spent:.0f} s  {_line(new)}")
        if arguments.json and arguments.json != "-":
            report.save(arguments.json, {"machine": facts, "rows": rows, "complete": False})

    with timing.Meter(device) as meter:
        facts["copy_gb_s"] = meter.copy_rate()
        options = {"against": against, "modes": arguments.mode, "repeats": arguments.repeats, "budget": budget}
        options |= {"meter": meter, "copy_rate": facts["copy_gb_s"], "on_case": begin, "on_rows": keep}
        try:
            ops.bench(todo, device, **options)
            facts["copy_gb_s_after"] = meter.copy_rate()
        except (timing.OutOfBudget, ops.DeviceLost) as stop:
            ended = f"stopped early: {stop}"
        except KeyboardInterrupt:
            ended = "stopped early: interrupted"
    if arguments.json != "-":  # printed before the file is written, since that may fail
        print(report.as_text(rows))
        print(fold(_where(facts)))
        if ended:
            print(fold(ended))
    if arguments.json:
        report.save(arguments.json, {"machine": facts, "rows": rows, "complete": not ended})
    failed = any(row["arm"] == peers.OURS and row["status"] == "error" for row in rows)
    return 130 if ended.endswith("interrupted") else 1 if failed or "answering" in ended else 0


def _line(rows: list[dict[str, Any]]) -> str:
    row = rows[0]
    times = ", ".join(f"{r['arm']} {r['ms']['median']:.4f}" for r in rows if r["ms"] and r["mode"] == row["mode"])
    return f"{row['op']} {'x'.join(map(str, row['sizes']))} {row['mode']}: {times or 'nothing timed'} ms"


def _where(facts: dict[str, Any]) -> str:
    copied = f"{facts['copy_gb_s']:.0f} GB/s copied"
    if "copy_gb_s_after" in facts:
        copied += f" ({facts['copy_gb_s_after']:.0f} after)"
    versions = f"torch {facts['torch']}, triton {facts['triton']}, driver {facts['driver']}"
    return f"{facts['device']} ({facts['vendor']} {facts['arch']}), {copied}; {versions}; commit {facts['commit']}"


def _progress(text: str) -> None:
    print(fold(text, " " * 8), file=sys.stderr, flush=True)
