"""Two checkouts timed against each other on one GPU, case by case, in turn.

    python benchmarks/launches.py write before.json            in the older checkout
    python benchmarks/launches.py write after.json
    python benchmarks/launches.py compare before.json after.json --json cases.json
    python benchmarks/compare_commits.py --old OLD --new NEW --cases cases.json --out FILE.json

For each case, a process of each checkout captures forward and backward as a graph; then the two take turns in replaying
it, so that clocks and neighbours are the same for both. `ratio` is the newer median over the older. With several GPUs
the cases are spread over them. A run that is cut short has what it measured.

With `--host` what is compared is the time until forward and backward are enqueued; the cases should then have few rows.
Whatever else a machine does can only add to such a time, and two processes of one checkout differ by where their memory
happens to lie. So each checkout has HOST_PROCESSES processes, all take turns in many short samples with Python's
garbage collector off, a process counts by the lowest tenth of its samples, and a checkout by the median of its
processes. `noise` is how far the processes of one checkout lie apart. The same folder as OLD and NEW shows what a ratio
is worth on a machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TURNS, CALLS = 4, 8
"""Turns of each arm, and replays a turn."""

HOST_PROCESSES, HOST_TURNS, HOST_SAMPLES, HOST_CALLS = 3, 20, 10, 4
"""Processes of a checkout, turns of each, samples a turn, and calls in a row that are one sample of host time."""


class Arm:
    """A process of one checkout on one GPU, spoken to in lines of JSON."""

    def __init__(self, checkout: str, gpu: int, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([checkout, os.environ.get("PYTHONPATH", "")])}
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--device", device]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, cwd=checkout
        )

    def ask(self, **request: Any) -> Any:
        self.send(**request)
        return self.answer()

    def send(self, **request: Any) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the process ended")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(told: argparse.Namespace, gpu: int, cases: list, until: float, keep: Any) -> None:
    """Time every case of a list on one GPU; `keep` gets each row."""
    processes, turns, calls = (HOST_PROCESSES, HOST_TURNS, HOST_SAMPLES) if told.host else (1, TURNS, CALLS)
    checkouts = [("old", told.old), ("new", told.new)] * processes
    arms = [(name, Arm(checkout, gpu, told.device)) for name, checkout in checkouts]
    for case in cases:
        if time.monotonic() > until:
            break
        row = {"op": case[0], "sizes": case[1], "dtype": case[2], "options": case[3]}
        try:
            for _, arm in arms:
                arm.send(do="prepare", case=case, host=told.host)
            ready = [(name, arm.answer()) for name, arm in arms]
            if failed := {name: answer["error"] for name, answer in ready if "error" in answer}:
                keep({**row, "error": failed})
                continue
            samples: list[list[float]] = [[] for _ in arms]
            for turn in range(turns):
                for place in range(len(arms)) if turn % 2 == 0 else reversed(range(len(arms))):
                    samples[place] += arms[place][1].ask(do="burst", calls=calls)["ms"]
            old, new = ([s for s, (name, _) in zip(samples, arms) if name == wanted] for wanted in ("old", "new"))
            keep({**row, **(compared_on_the_host(old, new) if told.host else compared(old[0], new[0]))})
        except (RuntimeError, BrokenPipeError, json.JSONDecodeError) as error:
            keep({**row, "error": str(error)})
            for _, arm in arms:
                arm.close()
            arms = [(name, Arm(checkout, gpu, told.device)) for name, checkout in checkouts]
    for _, arm in arms:
        arm.close()


def compared(old: list[float], new: list[float]) -> dict[str, float]:
    """The medians of two arms' replays, their ratio, and the larger interquartile range over its median."""
    medians = [statistics.median(samples) for samples in (old, new)]
    quartiles = [statistics.quantiles(samples, n=4) for samples in (old, new)]
    noise = max((high - low) / median for (low, _, high), median in zip(quartiles, medians))
    return {"old": medians[0], "new": medians[1], "ratio": medians[1] / medians[0], "noise": noise}


def compared_on_the_host(old: list[list[float]], new: list[list[float]]) -> dict[str, float]:
    """The same of host times, samples of each process apart; see the top of this file."""
    lowest = [[statistics.quantiles(samples, n=10)[0] for samples in arm] for arm in (old, new)]
    medians = [statistics.median(arm) for arm in lowest]
    noise = max((max(arm) - min(arm)) / median for arm, median in zip(lowest, medians))
    return {"old": medians[0], "new": medians[1], "ratio": medians[1] / medians[0], "noise": noise}


class HostTime:
    """Times the calls of a work until they are enqueued."""

    method = "host"

    def __init__(self, work: Any, meter: Any) -> None:
        self.work, self.meter = work, meter

    def burst(self, samples: int) -> list[float]:
        """Milliseconds a call."""
        found = []
        gc.disable()
        for _ in range(samples):
            self.meter.synchronize()
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                self.work.call()
            found.append((time.perf_counter() - began) * 1e3 / HOST_CALLS)
        gc.enable()
        return found


def prepared(case: list, meter: Any, short: bool, host: bool) -> Any:
    """The captured forward and backward of a case, or what times its calls on the host; `short` makes no more of it
    than the kernels need to be compiled."""
    import torch

    from liger_hw import registry
    from liger_hw.bench.inputs import Inputs, Work, sample_sets

    name, sizes, dtype, options = case
    op = registry.get_op(name)
    named = {key: str(value).removeprefix("torch.") for key, value in options.items()}
    options = {
        key: getattr(torch, named[key], value) if named[key] != str(value) else value for key, value in options.items()
    }

    def make(seed: int) -> Inputs:
        generator = torch.Generator(meter.device).manual_seed(seed)
        sample = op.sample(tuple(sizes), getattr(torch, dtype), meter.device, generator, **options)
        return Inputs(sample.args, sample.kwargs, seed=1000 + seed, moved=sample.moved)

    work = Work(op.function, [make(0)] if short or host else sample_sets(make, meter.l2), backward=True)
    if short:
        work.call()
        return None
    if host:
        runner = HostTime(work, meter)
        runner.burst(2)
        return runner
    work.learn_overwrites()
    for _ in range(3):
        work.call()
    work.restore()
    runner = meter.runner(work, work.sets[0].moved / 4e9)
    runner.burst(3)
    return runner


def serve(device: str) -> None:
    """In a worker: prepare cases and replay them."""
    from liger_hw.bench.timing import Meter

    meter = Meter(device)
    runner = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                runner = None
                meter.forget()
                runner = prepared(request["case"], meter, request.get("short", False), request.get("host", False))
                answer: dict[str, Any] = {"method": getattr(runner, "method", "")}
            else:
                answer = {"ms": runner.burst(request["calls"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), flush=True)


def warm(told: argparse.Namespace, cases: list, until: float) -> None:
    """Call every case once in many processes, so that Triton's cache on disk has all kernels."""

    def some(number: int) -> None:
        checkout = (told.old, told.new)[number % 2]
        arm = Arm(checkout, number // 2 % told.gpus, told.device)
        for case in cases[number // 2 :: max(1, told.warm // 2)]:
            if time.monotonic() > until:
                break
            try:
                arm.ask(do="prepare", case=case, short=True)
            except (RuntimeError, BrokenPipeError):
                arm.close()
                arm = Arm(checkout, number // 2 % told.gpus, told.device)
        arm.close()

    if told.warm:
        with concurrent.futures.ThreadPoolExecutor(told.warm) as pool:
            list(pool.map(some, range(told.warm)))


def summary(rows: list[dict[str, Any]]) -> str:
    """Cases slower by more than 1% (below 10 us by more than 0.1 us), the geometric mean, failures."""
    timed = [row for row in rows if "ratio" in row]
    lines = []
    for row in sorted(timed, key=lambda row: -row["ratio"]):
        slower = row["new"] - row["old"]
        if row["ratio"] > 1.01 and slower > 1e-4:
            sizes = "x".join(map(str, row["sizes"]))
            lines.append(
                f"  {row['op']} {sizes} {row['dtype']} {row['options'] or ''}: {1e3 * row['old']:.2f} -> "
                f"{1e3 * row['new']:.2f} us ({row['ratio']:.3f}, noise {row['noise']:.3f})"
            )
    if timed:
        mean = math.exp(sum(math.log(row["ratio"]) for row in timed) / len(timed))
        best = sorted(timed, key=lambda row: row["ratio"])[:12]
        gains = ", ".join(f"{r['op']} {'x'.join(map(str, r['sizes']))} {r['ratio']:.3f}" for r in best)
        lines.append(f"{len(timed)} cases, geometric mean {mean:.4f}, {len(lines)} slower by over 1%; fastest: {gains}")
    for row in rows:
        if "error" in row:
            lines.append(f"  FAILED {row['op']} {row['sizes']} {row['options']}: {row['error']}"[:220])
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--old", help="the older checkout")
    parser.add_argument("--new", help="the newer checkout")
    parser.add_argument("--cases", help="a JSON list of [op, sizes, dtype, options]")
    parser.add_argument("--out", help="where the rows go")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--host", action="store_true", help="compare the time in which a call is enqueued")
    parser.add_argument(
        "--warm", type=int, default=12, metavar="N", help="processes that fill the compiler's cache first"
    )
    parser.add_argument("--budget", type=float, default=500.0, metavar="SECONDS")
    told = parser.parse_args()
    if told.worker:
        serve(told.device)
        return 0
    began = time.monotonic()
    cases = json.loads(Path(told.cases).read_text())
    told.old, told.new = (str(Path(path).resolve()) for path in (told.old, told.new))
    warm(told, cases, began + 0.55 * told.budget)
    print(f"warm after {time.monotonic() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if len(rows) % 10 == 0:
            Path(told.out).write_text(json.dumps(rows))

    with concurrent.futures.ThreadPoolExecutor(told.gpus) as pool:
        parts = [cases[gpu :: told.gpus] for gpu in range(told.gpus)]
        list(pool.map(lambda gpu: measure(told, gpu, parts[gpu], began + told.budget, keep), range(told.gpus)))
    Path(told.out).write_text(json.dumps(rows))
    print(f"{len(rows)} of {len(cases)} cases in {time.monotonic() - began:.0f} s")
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
