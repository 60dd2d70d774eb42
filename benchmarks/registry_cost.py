"""What the registry costs on a hit: `Tunable.plan(device, key)`, the one lookup between a launcher and its kernel.

    python benchmarks/registry_cost.py [--json results/registry-<device>.json]

A loop of many hits is timed by `time.perf_counter`; the same loop without the lookup is its floor and is subtracted.
Both are reported, with the cost of reading the clock itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from liger_hw import registry
from liger_hw.bench import report
from liger_hw.cli.arguments import usable_device

BUDGET_US = 0.5


def measure(device: torch.device, loops: int = 5000, repeats: int = 9) -> dict[str, Any]:
    """Microseconds a hit, the median over every tunable of every op and the slowest of them.

    hit_us: the lookup alone, loop floor subtracted; lookup_us: what a launcher pays, the tensor's device, its sizes and
    the key included; loop_floor_us and perf_counter_us: what was subtracted, and one reading of the clock.
    """
    found, lookup = {}, {}
    floor = _per_call(_empty, (), loops, repeats)
    for op in registry.ops().values():
        sizes = next(iter(op.workloads.values()))
        for tunable in op.tunables:
            key = tunable.key(*sizes, 2)
            tunable.plan(device, key)
            found[tunable.name] = _per_call(_hits, (tunable.plan, device, key), loops, repeats) - floor
            x = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
            lookup[tunable.name] = _per_call(_lookups, (tunable, x, sizes), loops, repeats) - floor
    reading = _per_call(_readings, (time.perf_counter,), loops, repeats) - floor
    return {
        "hit_us": statistics.median(found.values()),
        "hit_us_worst": max(found.values()),
        "lookup_us": statistics.median(lookup.values()),
        "loop_floor_us": floor,
        "perf_counter_us": reading,
        "subtracted": "loop_floor_us, the same loop without the lookup, from every figure",
        "budget_us": BUDGET_US,
        "within_budget": statistics.median(found.values()) <= BUDGET_US,
        "loops": loops,
        "repeats": repeats,
        "tunables": {name: {"hit_us": found[name], "lookup_us": lookup[name]} for name in found},
    }


def _per_call(loop: Callable[..., None], arguments: tuple, loops: int, repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        loop(loops, *arguments)
        samples.append((time.perf_counter() - start) * 1e6 / loops)
    return statistics.median(samples)


def _empty(loops: int) -> None:
    for _ in range(loops):
        pass


def _hits(loops: int, plan: Callable, device: torch.device, key: registry.Key) -> None:
    for _ in range(loops):
        plan(device, key)


def _lookups(loops: int, tunable: registry.Tunable, x: torch.Tensor, sizes: tuple[int, ...]) -> None:
    for _ in range(loops):
        tunable.plan(x.device, tunable.key(*sizes, x.dtype.itemsize))


def _readings(loops: int, clock: Callable[[], float]) -> None:
    for _ in range(loops):
        clock()


def as_text(found: dict[str, Any]) -> str:
    verdict = "within" if found["within_budget"] else "OVER"
    hit, floor, clock = found["hit_us"], found["loop_floor_us"], found["perf_counter_us"]
    return "\n".join(
        (
            f"registry hit       {hit:.3f} us (slowest {found['hit_us_worst']:.3f}), {verdict} {found['budget_us']} us",
            f"with key building  {found['lookup_us']:.3f} us",
            f"subtracted         {floor:.4f} us of loop from each; reading the clock costs {clock:.3f} us",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="torch device (default: the accelerator, else cpu)")
    parser.add_argument("--json", metavar="FILE", help="write every figure; - prints them instead")
    arguments = parser.parse_args()
    device = usable_device(arguments.device)
    found = measure(device)
    if arguments.json:
        report.save(arguments.json, {"machine": report.machine(device), **found})
    if arguments.json != "-":
        print(as_text(found))


if __name__ == "__main__":
    main()
