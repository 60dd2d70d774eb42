"""`liger-hw bench`: the ops against their peers, and two benchmarks with a name of their own.

    liger-hw bench [OP ...]          each op at its workloads: liger_hw, torch, torch.compile, Liger
    liger-hw bench e2e               a Hugging Face model trained: tokens/s, peak memory, loss curves
    liger-hw bench float8            the same in bf16, in FP8, and with FP8 of torchao and TransformerEngine

On a machine without a GPU the ops run at small sizes (--sizes has others), on torch's reference path by the wall clock,
and say so: good for trying the command, not for figures. e2e and float8 need --hidden there. Ctrl-C and --budget end a
run early; what was measured is printed and in --json FILE.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from ..text import fold, json_text, time_left
from . import UsageError, parser_of, user_errors
from .arguments import dtype_name, listed, positive, seconds, tokens, torch_dtype, usable_device

MODES = ("fwd", "bwd", "full")
OF_OPS = ("against", "mode", "sizes", "repeats")
OF_E2E = ("model", "layers", "batch", "seq", "steps", "rounds", "arms", "checkpointing", "hidden", "text", "lora")
OPTIONS = {"ops": OF_OPS, "e2e": OF_E2E, "float8": OF_E2E}
"""Benchmark -> its own options, beside what every benchmark takes."""
ARMS = {"e2e": ("hf", "liger", "liger_hw"), "float8": ("liger_hw", "float8", "torchao", "torchao-compile", "te")}
"""Benchmark -> the arms that it trains by default."""


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"unknown mode {text!r}; expected some of {','.join(MODES)}")
    return text


WORDS = listed(str, "names")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="*", metavar="OP", help="ops (default: all), or e2e, float8")
    add("--device", help="torch device (default: the accelerator, else cpu)")
    add("--dtype", type=dtype_name, default="bfloat16", help="bf16 (default), fp16 or fp32")
    add("--json", nargs="?", const="-", metavar="FILE", help="write every figure; without FILE, print it")
    add("--budget", type=seconds, metavar="SECONDS", help="start no new work after this long (default: no limit)")
    add("--repeats", type=positive, default=3, help="interleaved repeats (default 3)")

    add = parser.add_argument_group("ops").add_argument
    add("--against", type=WORDS, metavar="PEERS", help="peers (default torch,compile,liger)")
    modes = "fwd, bwd, full (default: full, forward and backward)"
    add("--mode", type=listed(_mode, "fwd, bwd or full"), default=["full"], help=modes)
    sizes = "comma-separated: workload names, sizes such as 16384x4096 or 4096x131072@fp32, `workloads` (default), "
    add("--sizes", type=WORDS, default=[], help=sizes + "`small` (default on a CPU)")

    add = parser.add_argument_group("e2e, float8").add_argument
    models = "mistral (default), llama3, qwen2, qwen3, olmo2, granite (7, 8B), gemma2 (2B), phi3 (mini), qwen3_5 (4B), "
    add("--model", default="mistral", help=models + "mixtral, qwen3_moe (30B-A3B), qwen3_next (80B-A3B), gpt_oss (20B)")
    add("--layers", type=positive, help="of the model's layers (default: as README's table has it)")
    add("--batch", type=positive, default=2, help="sequences of a step (default 2)")
    add("--seq", type=tokens, default=4096, help="tokens of a sequence, as 4096 or 4k (default 4096)")
    add("--steps", type=positive, default=20, help="steps of each arm (default 20)")
    add("--rounds", type=positive, default=1, help="times every arm is trained, in turn (default 1)")
    arms = "of hf, hf-eager, liger, liger_hw, compile, float8, float8-tensorwise, float8-kept, torchao, "
    arms += f"torchao-compile, te (default: {','.join(ARMS['e2e'])}; for float8 {','.join(ARMS['float8'])})"
    add("--arms", type=WORDS, help=arms)
    add("--checkpointing", action="store_true", help="recompute activations in the backward")
    add("--lora", action="store_true", help="train adapters of rank 16 on all linears (peft), and nothing else")
    width = "smaller width, every size in proportion, for a quick try (default: the model's)"
    add("--hidden", type=positive, help=width)
    add("--text", metavar="FILE", help="training text (default: Python's own documentation)")


def run(arguments: argparse.Namespace) -> int:
    first, *others = arguments.what or [""]
    what, names = (first, others) if first in OPTIONS and first != "ops" else ("ops", arguments.what)
    parser = parser_of("bench")
    for owner, options in OPTIONS.items():
        for name in options:
            if name not in OPTIONS[what] and getattr(arguments, name) != parser.get_default(name):
                command = "liger-hw bench" if owner == "ops" else f"liger-hw bench {owner}"
                raise UsageError(f"bench: --{name} is an option of `{command}`, and changes nothing for {what}")
    device = usable_device("bench", arguments.device)
    return _e2e(arguments, device, what, names) if what in ARMS else _ops(arguments, device, names)


def _ops(arguments: argparse.Namespace, device: Any, names: list[str]) -> int:
    from ..bench import ops, peers, report, timing

    sizes, dtype = arguments.sizes or (["small"] if device.type == "cpu" else []), torch_dtype(arguments.dtype)
    with user_errors("bench"):
        todo = ops.cases(names, sizes, dtype)
    against = arguments.against or list(peers.DEFAULT)
    if unknown := [name for name in against if name not in peers.PEERS]:
        raise UsageError(f"bench: unknown peer {unknown[0]!r}; known: {', '.join(peers.PEERS)}")
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
    if arguments.json != "-":  # before the files, which may fail
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


def _e2e(arguments: argparse.Namespace, device: Any, what: str, names: list[str]) -> int:
    from ..bench import e2e, report, timing, training

    if names:
        raise UsageError(f"bench: {what} takes no op, got {names[0]!r}; --model chooses what is trained")
    sizes = ("model", "batch", "seq", "steps", "rounds", "checkpointing", "dtype", "hidden", "text", "lora")
    options = {name: getattr(arguments, name) for name in sizes} | {"arms": tuple(arguments.arms or ARMS[what])}
    shape = training.MODELS.get(arguments.model)  # Schedule refuses a model that is not there
    options["layers"] = arguments.layers or (shape.trained if shape else 1)
    with user_errors("bench"):
        schedule = e2e.Schedule(**options)
    if device.type == "cpu" and not arguments.hidden:
        few = "--hidden 64 --layers 1 --batch 1 --seq 64 --steps 2"
        raise UsageError(f"bench: a model of this size is hopeless on a CPU; a small one: liger-hw bench {what} {few}")
    facts = report.machine(device)

    def keep(results: dict[str, Any]) -> None:
        if arguments.json and arguments.json != "-":
            report.save(arguments.json, {"machine": facts, **results})

    with user_errors("bench"):  # a text that cannot be read, or is too short
        results = e2e.measure(schedule, device, timing.Budget(arguments.budget), keep, _progress)
    if arguments.json == "-":
        print(json_text({"machine": facts, **results}, indent=1))
        return 0
    print(e2e.as_text(results))
    return 0


def _progress(text: str) -> None:
    print(fold(text, " " * 8), file=sys.stderr, flush=True)
