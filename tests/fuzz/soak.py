"""Memory of this process over time, for `python -m tests.fuzz.device soak OUT.json --seconds 1440`."""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from typing import Any, Callable

import torch
from harness import make, run

from liger_hw import registry

HOST_MIB, LATE_MIB, DEVICE_MIB = 64, 16, 1
"""The most that memory may grow: host memory, host memory in the second half, device memory."""
SOAKED = {
    "rms_norm": (0, 1024),
    "swiglu": (0, 2816),
    "cross_entropy": (0, 4000),
    "fused_linear_cross_entropy": (0, 256, 4000),
    "rope": (1, 0, 8, 2, 64),
}
"""Op -> sizes, with 0 for the number of rows, which changes."""
WARM = (*range(513, 560, 15), *range(1000, 1100, 25), *range(2040, 2060, 4), 2999, 3000)
"""Numbers of rows of every key and every specialisation of Triton."""


def soak(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Ops at ever new numbers of rows until the time is up. Memory is compared from when the kernels are compiled, at
    the latest after 60% of the time, to the end."""
    seconds = min(arguments.seconds, 5.0) if arguments.dry else arguments.seconds
    device, dtype = ("cpu", torch.float32) if arguments.dry else ("cuda", torch.bfloat16)
    least, most = (1, 64) if arguments.dry else (513, 3000)
    chance, calls, rows_seen = random.Random(0), 0, dict.fromkeys(SOAKED, 0)
    points: list[dict[str, Any]] = []
    found = {"held": False, "points": points}

    def call(name: str, rows: int) -> None:
        op = registry.get_op(name)
        sizes = tuple(rows if size == 0 else size for size in SOAKED[name])
        run(op.function, make(op, sizes, dtype, device, calls))
        rows_seen[name] |= 1 << rows

    def elapsed() -> float:
        return time.monotonic() - began

    def point() -> None:
        shapes = sum(seen.bit_count() for seen in rows_seen.values())
        now = {"second": round(elapsed(), 1), "calls": calls, "shapes": shapes, "kernels": _compiled()}
        points.append({**now, **_memory(device)})
        first, middle, last = points[0], points[len(points) // 2], points[-1]
        found.update(
            seconds=round(elapsed() - warm),
            calls=calls - warm_calls,
            shapes=shapes,
            host_growth_mib=round(last["host_mib"] - first["host_mib"], 1),
            host_growth_of_second_half_mib=round(last["host_mib"] - middle["host_mib"], 1),
            device_growth_mib=round(last.get("allocated_mib", 0) - first.get("allocated_mib", 0), 2),
        )

    for name in SOAKED:
        call(name, most)  # the imports
    began = time.monotonic()
    for rows in WARM:
        for name in SOAKED:
            if elapsed() < 0.6 * seconds:
                call(name, min(rows, most))
                calls += 1
    warm, warm_calls = elapsed(), calls
    found["warm_up"] = {"seconds": round(warm, 1), "calls": calls}
    point()
    next_point = elapsed()
    while elapsed() < seconds:
        call(chance.choice(list(SOAKED)), chance.randint(least, most))
        calls += 1
        if elapsed() > next_point:
            point()
            save(found)
            next_point += 0.1 * (seconds - warm)
    point()
    grown = found["host_growth_mib"], found["host_growth_of_second_half_mib"], found["device_growth_mib"]
    held = all(size < most for size, most in zip(grown, (HOST_MIB, LATE_MIB, DEVICE_MIB)))
    return {**found, "held": held, "replays": len(registry.replay_cache)}


def _compiled() -> int:
    kept = [plan.compiled for plan in registry.plans() if plan.compiled]
    return sum(key[0] == "alike" for compiled in kept for key in list(compiled))


def _memory(device: str) -> dict[str, float]:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize() / 2**20
    if device == "cpu":
        return {"host_mib": round(resident, 1)}
    torch.cuda.synchronize()
    return {
        "host_mib": round(resident, 1),
        "allocated_mib": round(torch.cuda.memory_allocated() / 2**20, 3),
        "reserved_mib": round(torch.cuda.memory_reserved() / 2**20, 1),
    }
