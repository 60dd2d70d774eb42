"""Hugging Face models trained from random weights, arm by arm: tokens/s, peak memory and loss curves of each.

    python benchmarks/end_to_end.py --model llama3        what makes a row of README's table
    python benchmarks/end_to_end.py --model llama3 --arms liger_hw,float8,torchao,torchao-compile,te
    python benchmarks/end_to_end.py --hidden 64 --layers 1 --batch 1 --seq 64 --steps 2      on a CPU

Every arm trains the same weights on the same text (`training.py`); with --rounds they take turns.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from training import ARMS, MODELS, Run, Schedule, patched, read_text, release, to_tokens, train

from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.bench.peers import Absent
from liger_hw.bench.timing import Budget, OutOfBudget, Stats
from liger_hw.cli import UsageError, arguments
from liger_hw.text import StatusLine, first_line, fold, json_text, table

FEWEST_STEPS = 3
"""Steps that a run makes whatever the budget says: with fewer there is nothing to take a median of."""


def measure(
    schedule: Schedule,
    device: torch.device,
    budget: Budget | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
    say: Callable[[str], None] = lambda text: None,
    on_run: Callable[[str, Run], None] = lambda arm, run: None,
) -> dict[str, Any]:
    """Train every arm `rounds` times. `keep` gets all that is known after each arm, `on_run` what was seen of one that
    trained; an arm that fails says why.

    Raises `ValueError` for a text that cannot be read or is too short.
    """
    device, budget = with_index(device), budget or Budget()
    tokens = to_tokens(read_text(schedule.text), schedule.shape.vocab).to(device)
    if tokens.numel() <= schedule.seq:
        raise ValueError(f"the text has {tokens.numel()} tokens, a sequence {schedule.seq}; give a longer one or --seq")
    runs: list[dict[str, Any]] = []
    results: dict[str, Any] = {"plan": asdict(schedule), "shape": asdict(schedule.shape), "runs": runs, "ended": ""}
    results["device"] = device.type

    def spent(screen: StatusLine, arm: str, step: int, loss: Callable[[], float]) -> bool:
        screen.progress(step, schedule.steps, f"steps of {arm}")
        try:
            budget.check()
        except OutOfBudget:
            return step + 1 >= FEWEST_STEPS
        return False

    for turn in range(schedule.rounds):
        for arm in schedule.arms:
            screen = StatusLine()
            row: dict[str, Any] = {"arm": arm, "round": turn, "status": "ok", "note": ""}
            try:
                budget.check()
                with patched(arm, schedule.shape.family, device):
                    run = train(arm, schedule, tokens, device, partial(spent, screen, arm))
                row |= _row(run, schedule.steps)
                on_run(arm, run)
            except OutOfBudget as stop:
                results["ended"] = str(stop)
                row |= {"status": "skipped", "note": str(stop)}
            except (Absent, ImportError) as error:
                row |= {"status": "absent", "note": str(error)}
            except Exception as error:
                row |= {"status": "error", "note": first_line(error)}
            screen.end()
            runs.append(row)
            release(device)
            say(f"round {turn + 1} {arm}: {_line(row)}")
            keep(results)
    results["summary"] = summary(results)
    keep(results)
    return results


def _row(run: Run, steps: int) -> dict[str, Any]:
    done = len(run.losses)
    return {
        "steps": done,
        "losses": run.losses,
        "step_seconds": run.step_seconds,
        "tokens_per_second": run.tokens_per_second,
        "first_step_seconds": run.first_step_seconds,
        "peak_gib": None if run.peak_memory is None else run.peak_memory / 2**30,
        "note": "" if done == steps else f"stopped after {done} steps: the budget is spent",
    }


def _line(row: dict[str, Any]) -> str:
    if not row.get("step_seconds"):
        return f"{row['status']} {row['note']}"
    losses = f"loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}"
    return f"{row['tokens_per_second']:.0f} tokens/s, {_gib(row['peak_gib'])}, {losses}"


# -- results ---------------------------------------------------------------------------------------------------------


def summary(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row an arm over its rounds; loss differences are against `hf` (or the first arm that trained)."""
    good = [run for run in results["runs"] if run["status"] == "ok" and run.get("step_seconds")]
    names = list(dict.fromkeys(run["arm"] for run in good))
    base = "hf" if "hf" in names else names[0] if names else None
    rows = []
    for name in names:
        runs = [run for run in good if run["arm"] == name]
        seconds = Stats.of([run["step_seconds"] for run in runs])
        tokens = results["plan"]["batch"] * results["plan"]["seq"]
        against = next(run for run in good if run["arm"] == base)
        differences = [abs(a - b) for a, b in zip(runs[0]["losses"], against["losses"])]
        rows.append(
            {
                "arm": name,
                "tokens_per_second": tokens / seconds.median,
                "p20": tokens / seconds.p80,
                "p80": tokens / seconds.p20,
                "rounds": [run["tokens_per_second"] for run in runs],
                "peak_gib": max((run["peak_gib"] for run in runs if run["peak_gib"] is not None), default=None),
                "first_step_seconds": runs[0]["first_step_seconds"],
                "last_loss": runs[0]["losses"][-1],
                "largest_loss_difference": max(differences),
                "against": base,
            }
        )
    return rows


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} GiB"


def _title(results: dict[str, Any]) -> str:
    schedule = results["plan"]
    width = f", {schedule['hidden']} wide" if schedule["hidden"] else ""
    title = f"{schedule['model']}, {schedule['layers']} of {results['shape']['layers']} layers{width}, batch "
    title += f"{schedule['batch']} x {schedule['seq']}, {schedule['dtype']}"
    title += ", LoRA" if schedule["lora"] else ""
    return title + (", checkpointing" if schedule["checkpointing"] else "")


def as_text(results: dict[str, Any]) -> str:
    rows = results["summary"]
    lines = [("arm", "tokens/s", "p20..p80", "gain", "peak", "first step s", "last loss", "loss diff")]
    base = next((row for row in rows if row["arm"] == row["against"]), None)
    on_cpu = results["device"] == "cpu"  # its speed says nothing of a kernel: torch's reference path runs there
    for row in rows:
        gain = row["tokens_per_second"] / base["tokens_per_second"] - 1
        lines.append(
            (
                row["arm"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['p20']:.0f}..{row['p80']:.0f}",
                "" if on_cpu or row is base else f"{100 * gain:+.1f}%",
                _gib(row["peak_gib"]),
                f"{row['first_step_seconds']:.1f}",
                f"{row['last_loss']:.4f}",
                f"{row['largest_loss_difference']:.1e}" if row is not base else "",
            )
        )
    failed = [f"{run['status']}  {run['arm']}: {run['note']}" for run in results["runs"] if run["status"] != "ok"]
    return "\n".join([_title(results), table(lines) if rows else "nothing was trained", *dict.fromkeys(failed)])


# -- the command -----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="mistral", help=f"of {', '.join(MODELS)} (default mistral)")
    add("--layers", type=arguments.positive, help="of the model's layers (default: as README's table has it)")
    add("--batch", type=arguments.positive, default=2, help="sequences of a step (default 2)")
    add("--seq", type=arguments.tokens, default=4096, help="tokens of a sequence, as 4096 or 4k (default 4096)")
    add("--steps", type=arguments.positive, default=20, help="steps of each arm (default 20)")
    add("--rounds", type=arguments.positive, default=1, help="times every arm is trained, in turn (default 1)")
    arms = f"of {', '.join(ARMS)} (default hf,liger,liger_hw)"
    add("--arms", type=arguments.listed(str, "names"), default=["hf", "liger", "liger_hw"], help=arms)
    add("--checkpointing", action="store_true", help="recompute activations in the backward")
    add("--lora", action="store_true", help="train adapters of rank 16 on all linears (peft), and nothing else")
    width = "smaller width, every size in proportion, for a quick try (default: the model's)"
    add("--hidden", type=arguments.positive, help=width)
    add("--text", metavar="FILE", help="training text (default: Python's own documentation)")
    add("--device", help="torch device (default: the accelerator, else cpu)")
    add("--dtype", type=arguments.dtype_name, default="bfloat16", help="bf16 (default), fp16 or fp32")
    add(
        "--json", nargs="?", const="-", metavar="FILE", help="write every figure after each arm; without FILE, print it"
    )
    spent = "start no new work after this long (default: no limit)"
    add("--budget", type=arguments.seconds, metavar="SECONDS", help=spent)
    options = parser.parse_args(words)
    sizes = ("model", "batch", "seq", "steps", "rounds", "checkpointing", "dtype", "hidden", "text", "lora")
    chosen = {name: getattr(options, name) for name in sizes} | {"arms": tuple(options.arms)}
    shape = MODELS.get(options.model)  # Schedule refuses a model that is not there
    try:
        device = arguments.usable_device(options.device)
        schedule = Schedule(**chosen, layers=options.layers or (shape.trained if shape else 1))
        if device.type == "cpu" and not options.hidden:
            small = "--hidden 64 --layers 1 --batch 1 --seq 64 --steps 2"
            raise ValueError(f"a model of this size is hopeless on a CPU; a small one: {small}")
        facts = report.machine(device)

        def keep(results: dict[str, Any]) -> None:
            if options.json and options.json != "-":
                report.save(options.json, {"machine": facts, **results})

        results = measure(schedule, device, Budget(options.budget), keep, progress)
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    print(json_text({"machine": facts, **results}, indent=1) if options.json == "-" else as_text(results))
    return 0


def progress(text: str) -> None:
    """A line to standard error."""
    print(fold(text, " " * 8), file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
