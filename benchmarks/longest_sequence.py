"""The longest sequence that a training step takes at batch 1, by activation level: predicted, then tried.

    python benchmarks/longest_sequence.py --out FILE.json [--model mistral] [--levels keep cheap mlp full] [--tries 3]
    python benchmarks/longest_sequence.py --out FILE.json --levels full --tokens 192512

For each level the planner's longest sequence for the memory that the device has left is trained for one step, with the
optimizer's state in place: forward, backward and AdamW in bf16. If it runs, one that is predicted to fill the device to
the last is tried; if it does not, a shorter one. `longest` is the longest that ran. A try that would take more than
what is left of --seconds, by the rate of the tries before, is left out and said. With --tokens those lengths are tried,
and no others. A try that ran out of memory says what torch had allocated, and what it had reserved without using it.

torch's allocator is asked for expandable segments, unless PYTORCH_CUDA_ALLOC_CONF says otherwise; `allocator` in the
output is what it was. By default free pieces of different blocks cannot be joined, and blocks of 2 and 6 GiB then leave
gaps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import training
from activations import GIB, LEVELS, train_step

from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.recompute.levels import LEVELS as ALL_LEVELS
from liger_hw.recompute.levels import in_words, level_of_each
from liger_hw.recompute.planner import Planner, of_module
from liger_hw.text import table

STEP = 1024  # tokens between the lengths that are considered
FIRST, FULLER, LESS = 0.98, 0.995, 0.95
"""Shares of the memory that the first try is predicted to need, one after a success, and one after a failure."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mistral", choices=training.MODELS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=ALL_LEVELS)
    parser.add_argument("--tries", type=int, default=3, help="a level")
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="try these lengths, instead of a search")
    parser.add_argument("--seconds", type=float, default=150, help="for all tries")
    parser.add_argument("--memory", type=float, help="GiB to fill, instead of what the device has")
    parser.add_argument("--hidden", type=int, help="smaller width, for a quick try")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    device = with_index(options.device)
    schedule = training.Schedule(model=options.model, layers=options.layers, batch=1, hidden=options.hidden)
    found: dict[str, Any] = {"options": vars(options), "machine": report.machine(device), "levels": []}
    found["allocator"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    print("allocator:", found["allocator"], flush=True)
    with training.patched("liger_hw", schedule.shape.family, device):
        model = training.build(schedule, device)
        model.config.sliding_window = None  # flash attention, which needs no mask
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        attempt = Attempt(model, optimizer, schedule.shape.vocab, device)
        attempt("full", STEP)  # compiles, and makes the optimizer's state
        memory = int(options.memory * GIB) if options.memory else reachable(device)
        found["memory_gib"] = round(memory / GIB, 3)
        clock = Clock(options.seconds)
        for level in options.levels:
            row = search(
                level,
                lambda seq: of_module(model, model.config, 1, seq),
                attempt,
                memory,
                options.tries,
                clock,
                options.tokens,
            )
            found["levels"].append(row)
            print(json.dumps(row), flush=True)
            Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    print(as_text(found["levels"]))
    return 0


def reachable(device: torch.device) -> int:
    """Bytes of the device that torch has or could have."""
    module = torch.get_device_module(device)
    training.release(device)
    return module.mem_get_info(device)[0] + module.memory_reserved(device)


class Attempt:
    """One training step at a level and length: (seconds, peak GiB), or None where memory did not suffice.

    failure: what torch said of the last of those: bytes asked for, allocated, and reserved without use
    """

    failure = ""

    def __init__(self, model: Any, optimizer: Any, vocab: int, device: torch.device) -> None:
        self.model, self.optimizer, self.vocab, self.device = model, optimizer, vocab, device

    def __call__(self, level: str, seq: int) -> tuple[float, float | None] | None:
        import liger_hw

        ids = torch.randint(self.vocab, (1, seq), device=self.device)
        training.release(self.device)
        try:
            with liger_hw.activations(level, self.model):
                return train_step(self.model, self.optimizer, ids)
        except torch.OutOfMemoryError as error:
            self.failure = numbers(str(error))
        self.optimizer.zero_grad(set_to_none=True)
        training.release(self.device)
        return None


def numbers(message: str) -> str:
    """The sentences of an out-of-memory message that have sizes."""
    sentences = re.split(r"(?<=\.)\s+", message.splitlines()[0])
    return " ".join(one for one in sentences if re.search(r"\d [KMGT]?i?B\b", one)) or message.splitlines()[0][:200]


class Clock:
    """Foresees how long a step takes, from the steps so far and the planner's count of work."""

    def __init__(self, seconds: float) -> None:
        self.until, self.rate = time.perf_counter() + seconds, 600e12

    def left(self) -> float:
        return self.until - time.perf_counter()

    def expects(self, planner: Planner, levels: tuple[str, ...]) -> float:
        return planner.step_time(levels) / self.rate

    def saw(self, planner: Planner, levels: tuple[str, ...], seconds: float) -> None:
        self.rate = planner.step_time(levels) / seconds


def search(
    level: str,
    planner_at: Callable[[int], Planner],
    attempt: Callable[[str, int], tuple[float, float | None] | None],
    memory: int,
    tries: int,
    clock: Clock,
    lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """Tries at one level: what was predicted, what happened, and the longest that ran. `lengths`: those, no search."""
    levels = level_of_each(level, planner_at(STEP).model.layers)

    def longest(share: float) -> int:
        """The longest sequence predicted to need that share of the memory; 0 if there is none."""
        low, high = 0, STEP
        while high < 1 << 24 and planner_at(high).predict(levels).peak <= share * memory:
            low, high = high, 2 * high
        while high - low > STEP:
            middle = (low + high) // 2 // STEP * STEP
            fits = planner_at(middle).predict(levels).peak <= share * memory
            low, high = (middle, high) if fits else (low, middle)
        return low

    row: dict[str, Any] = {"level": level, "levels": in_words(levels), "tries": [], "longest": 0}
    share = FIRST
    while len(row["tries"]) < (len(lengths) or tries):
        seq = lengths[len(row["tries"])] if lengths else longest(share)
        if seq in (0, *(one["seq"] for one in row["tries"])):
            break
        planner = planner_at(seq)
        expected = clock.expects(planner, levels)
        one: dict[str, Any] = {"seq": seq, "predicted_gib": round(planner.predict(levels).peak / GIB, 3)}
        row["tries"].append(one)
        if expected > clock.left():
            one["outcome"] = f"not tried: about {expected:.0f} s, and {clock.left():.0f} s were left"
            break
        measured = attempt(level, seq)
        if measured is None:
            one["outcome"] = "out of memory"
            if failure := getattr(attempt, "failure", ""):
                one["failure"] = failure
            if lengths:
                continue
            if row["longest"]:
                break
            share = LESS if share == FIRST else share - 0.03
            continue
        seconds, peak = measured
        clock.saw(planner, levels, seconds)
        one |= {"outcome": "ran", "seconds": round(seconds, 3), "tokens_per_second": round(seq / seconds, 1)}
        one["peak_gib"] = None if peak is None else round(peak, 3)
        failed_before = row["longest"] == 0 and len(row["tries"]) > 1
        row["longest"] = max(row["longest"], seq)
        if lengths:
            continue
        if failed_before or share >= FULLER:
            break
        share = FULLER
    return row


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [("level", "tokens", "outcome", "peak GiB", "predicted", "tokens/s")]
    for row in rows:
        for one in row["tries"]:
            peak, speed = one.get("peak_gib"), one.get("tokens_per_second")
            cells = (f"{peak:.1f}" if peak else "-", f"{one['predicted_gib']:.1f}", f"{speed:.0f}" if speed else "-")
            lines.append((row["level"], str(one["seq"]), one["outcome"], *cells))
    return table(lines)


if __name__ == "__main__":
    sys.exit(main())
