"""`liger-hw bench e2e` and `float8`: Hugging Face models trained from random weights, arm by arm, and compared.

Tokens/s, peak memory and loss curves of each arm (`training.py`); with `rounds` the arms take turns.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, Callable

import torch

from ..backends import with_index
from ..text import StatusLine, first_line, table
from .peers import Absent
from .timing import Budget, OutOfBudget, Stats
from .training import Run, Schedule, patched, read_text, release, to_tokens, train

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
