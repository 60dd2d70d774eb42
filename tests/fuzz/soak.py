"""Memory over time, for `python -m tests.fuzz.device soak`: in one process, or in pieces that are one record.

    python -m tests.fuzz.device soak OUT.json --seconds 480 --state soak.json      three times: a soak of 24 minutes

A piece is a process of its own, since a command may not run for as long as a soak should. It adds itself to the record
in `--state`, which holds where every piece held and the last one ends with no more memory than the first. A piece that
was cut is done again. Only this process's memory is counted, so that other work may share device and machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from pathlib import Path
from typing import Any, Callable

import torch
from harness import make, run

from liger_hw import registry
from tests.fuzz.__main__ import versions

HOST_MIB, LATE_MIB, DEVICE_MIB = 64, 16, 1
"""The most that a piece may grow: its host memory, that of its second half, its device memory. Nor may the last piece
end with so much more host or device memory than the first."""
SOAKED = {
    "rms_norm": (0, 1024),
    "swiglu": (0, 2816),
    "cross_entropy": (0, 4000),
    "fused_linear_cross_entropy": (0, 256, 4000),
    "rope": (1, 0, 8, 2, 64),
}
"""Op -> sizes, with 0 in place of the rows, which change."""
WARM = (*range(513, 560, 15), *range(1000, 1100, 25), *range(2040, 2060, 4), 2999, 3000)
"""Rows of every key and every class of number that Triton compiles apart."""


def soak(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Adds a piece to the record of `--state`, where one is given, and returns the record."""
    state = Path(arguments.state) if arguments.state else None
    earlier = json.loads(state.read_text())["pieces"] if state and state.exists() else []
    earlier = [piece for piece in earlier if piece["finished"]]

    def keep(piece: dict[str, Any]) -> dict[str, Any]:
        found = record([*earlier, piece])
        if state:
            fresh = state.with_suffix(".new")
            fresh.write_text(json.dumps(found, indent=1) + "\n")
            fresh.replace(state)
        save(found)
        return found

    seconds = min(arguments.seconds, 5.0) if arguments.dry else arguments.seconds
    return keep(run_piece(len(earlier), seconds, arguments.dry, keep))


def record(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """What the pieces are together."""
    rows: dict[str, int] = {}
    for piece in pieces:
        for name, seen in piece["rows"].items():
            rows[name] = rows.get(name, 0) | int(seen, 16)

    def growth(what: str) -> float:
        first, last = (piece["points"][-1].get(what, 0) for piece in (pieces[0], pieces[-1]))
        return round(last - first, 2)

    found = {
        "seconds": sum(piece["seconds"] for piece in pieces),
        "calls": sum(piece["calls"] for piece in pieces),
        "shapes": sum(seen.bit_count() for seen in rows.values()),
        "host_growth_of_pieces_mib": [piece["host_growth_mib"] for piece in pieces],
        "host_growth_of_second_halves_mib": [piece["host_growth_of_second_half_mib"] for piece in pieces],
        "device_growth_of_pieces_mib": [piece["device_growth_mib"] for piece in pieces],
        "host_growth_across_pieces_mib": growth("host_mib"),
        "device_growth_across_pieces_mib": growth("allocated_mib"),
    }
    across = found["host_growth_across_pieces_mib"] < HOST_MIB and found["device_growth_across_pieces_mib"] < DEVICE_MIB
    return {"held": across and all(piece["held"] for piece in pieces), **found, "pieces": pieces}


def run_piece(number: int, seconds: float, dry: bool, keep: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Ops at ever new numbers of rows until the time is up: the memory of host and device when the kernels are compiled
    (at the latest after 60% of the time), and at the end. The piece is kept at every point, held only once it ended."""
    device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    least, most = (1, 64) if dry else (513, 3000)
    chance, calls, rows_seen = random.Random(number), 0, dict.fromkeys(SOAKED, 0)
    points: list[dict[str, Any]] = []
    piece = {**versions(), "piece": number, "finished": False, "held": False, "points": points}

    def call(name: str, rows: int) -> None:
        op = registry.get_op(name)
        sizes = tuple(rows if size == 0 else size for size in SOAKED[name])
        run(op.function, make(op, sizes, dtype, device, number << 32 | calls))
        rows_seen[name] |= 1 << rows

    def elapsed() -> float:
        return time.monotonic() - began

    def point() -> None:
        shapes = sum(seen.bit_count() for seen in rows_seen.values())
        now = {"second": round(elapsed(), 1), "calls": calls, "shapes": shapes, "kernels": _compiled()}
        points.append({**now, **_memory(device)})
        first, middle, last = points[0], points[len(points) // 2], points[-1]
        piece.update(
            seconds=round(elapsed() - warm),
            calls=calls - warm_calls,
            shapes=shapes,
            host_growth_mib=round(last["host_mib"] - first["host_mib"], 1),
            host_growth_of_second_half_mib=round(last["host_mib"] - middle["host_mib"], 1),
            device_growth_mib=round(last.get("allocated_mib", 0) - first.get("allocated_mib", 0), 2),
            rows={name: hex(seen) for name, seen in rows_seen.items()},
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
    piece["warm_up"] = {"seconds": round(warm, 1), "calls": calls}
    point()
    next_point = elapsed()
    while elapsed() < seconds:
        call(chance.choice(list(SOAKED)), chance.randint(least, most))
        calls += 1
        if elapsed() > next_point:
            point()
            keep(piece)
            next_point += 0.1 * (seconds - warm)
    point()
    piece["finished"], piece["replays"] = True, len(registry.replay_cache)
    grown = piece["host_growth_mib"], piece["host_growth_of_second_half_mib"], piece["device_growth_mib"]
    piece["held"] = all(size < most for size, most in zip(grown, (HOST_MIB, LATE_MIB, DEVICE_MIB)))
    return piece


def _compiled() -> int:
    """Kernels that were compiled for the plans in force."""
    kept = [plan.compiled for plan in registry.plans() if plan.compiled]
    return sum(key[0] == "alike" for compiled in kept for key in list(compiled))


def _memory(device: str) -> dict[str, float]:
    """This process's own."""
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
