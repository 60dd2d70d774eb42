"""How long a launch takes, from its certificate and the device's facts alone. A pure function; nothing here measures.

Four times that a kernel cannot beat, each of which hides part of the others:

    memory   bytes that must come from device memory over its bandwidth: each tensor once, and again for every further
             sweep over rows that the cache does not hold
    issue    instructions of all warps over what a multiprocessor issues
    access   memory instructions of all warps, each at most 128 bytes wide, over what a multiprocessor serves
    chain    the longest way through one program (start, wait for memory, dependent instructions, barriers; a loop that
             loads ahead waits less), times the rounds in which the programs fit on the device, the last one in full

    time = (memory^p + issue^p + access^p + chain^p)^(1/p)

p between 1 (nothing overlaps) and infinity (everything does). The constants in `Rates` were fitted to 1587 launches timed
on an H200; how good choices by this model are there, also on ops it was not fitted to, is in
benchmarks/results/static-regret-h200.json. On other devices it is what an H200 of their size, clock and cache would do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterable, Mapping

from ..backends import Target, backend
from ..backends.base import Pace
from .accesses import Access
from .compile import Certificate


@dataclass(frozen=True)
class Rates:
    """Fitted constants. Cycles are of the multiprocessor's clock."""

    start: float = 60.0
    """cycles before a program's first instruction"""
    chain: float = 3.6
    """cycles between two dependent instructions of a warp, of every instruction in the text"""
    barrier: float = 58.0
    barrier_per_warp: float = 2.4
    """cycles of a barrier, and more for each warp that meets there"""
    shuffle: float = 1.0
    issue: float = 1.66
    """how many instructions of the text pass per issued one: branches not taken, and what the assembler fuses"""
    access: float = 1.0
    """128-byte accesses a cycle and multiprocessor"""
    spill: float = 4.0
    """instructions a spill costs"""
    ahead: float = 1.3
    """tiles of a loop pipelined through shared memory that are not ahead: one is being read, one is being filled"""
    kept: float = 1.0
    """share of the cache that holds rows until their second sweep"""
    last: float = 1.0
    """how much of a last, partial round counts as a whole one"""
    overlap: float = 1.7
    """p"""
    launch: float = 0.2
    """microseconds"""


RATES = Rates()


@dataclass(frozen=True)
class Work:
    """What one launch does, from its certificate: per-program counts, and bytes of the whole launch."""

    programs: int
    warps: int
    resident: int
    trips: int
    moved: float
    again: float
    row: float
    bytes_ahead: int
    stages: int
    width: float
    once: Mapping[str, int]
    looped: Mapping[str, int]
    shared: int


def work_of(certificate: Certificate) -> Work:
    """The counts the model needs. Raises `ValueError` for a kernel whose accesses are unknown or that cannot run."""
    launch, r = certificate.launch, certificate.resources
    if r is None or certificate.unread:
        raise ValueError(f"{launch.tunable}: {certificate.error or certificate.unread}")
    target = launch.target
    resident = round(r.occupancy * target.max_threads_per_multiprocessor / r.threads)
    if resident < 1:
        raise ValueError(f"{launch.tunable}: not one block fits a multiprocessor of {target.arch}")
    programs = math.prod(launch.grid)
    moved, again, row, trips = _bytes(certificate.accesses, launch.sizes, programs)
    ahead = sum(a.tile for a in certificate.accesses if a.looped and a.kind == "load")
    return Work(
        programs=programs,
        warps=r.threads // target.warp_size,
        resident=resident,
        trips=trips,
        moved=moved,
        again=again,
        row=row,
        bytes_ahead=ahead,
        stages=launch.config.num_stages,
        width=(_width(r.loads) + _width(r.stores)) / 2,
        once={kind: count - r.looped.get(kind, 0) for kind, count in r.instructions.items()},
        looped=r.looped,
        shared=r.shared if certificate.level == "binary" else ahead,
    )


def _bytes(accesses: Iterable[Access], sizes: tuple[int, ...], programs: int) -> tuple[float, float, float, int]:
    """(bytes that must move, bytes swept again, bytes of one program that are swept again, trips of its loops)."""
    accesses = list(accesses)
    looped = [a for a in accesses if a.looped]
    largest = max((a.tile for a in looped), default=0)
    trips = max([1.0, *(sizes[a.argument] / (programs * a.tile) for a in looped if 2 * a.tile >= largest)])
    whole = math.ceil(trips - 1e-6)
    moved = again = row = 0.0
    by_argument = defaultdict(list)
    for access in accesses:
        by_argument[access.argument, access.kind == "load"].append(access)
    for (argument, loads), found in by_argument.items():
        size = sizes[argument]
        inside = [a.tile for a in found if a.looped]
        outside = [a.tile for a in found if not a.looped and a.tile < min(inside, default=a.tile + 1)]
        asked = programs * (whole * sum(inside) + sum(outside))
        moved += min(size, asked)
        if loads and len(inside) > 1 and size / (programs * inside[0]) >= trips / 2:
            again += (len(inside) - 1) * min(size, asked)
            row += min(size, asked) / programs
    return moved, again, row, whole


def _width(widths: Mapping[int, int]) -> float:
    """Mean bytes of an access of one thread."""
    return sum(bits * count for bits, count in widths.items()) / 8 / max(1, sum(widths.values()))


def microseconds(work: Work, target: Target, pace: Pace, rates: Rates = RATES) -> float:
    """The time of one launch."""
    busy = min(work.programs, target.multiprocessors)
    slots = work.resident * target.multiprocessors
    kept = rates.kept * target.l2 / max(1.0, work.row * min(work.programs, slots))
    memory = (work.moved + work.again * min(1.0, max(0.0, 1.0 - kept))) / (target.bandwidth * 1e3)

    cycle = 1e-3 / pace.clock  # microseconds
    outside, inside = _issued(work.once, rates), _issued(work.looped, rates)
    warps = work.warps * work.programs / busy  # of one multiprocessor
    issue = (outside + inside * work.trips) * warps * cycle / (pace.issue * (rates.issue if pace.virtual else 1.0))
    accesses = _accesses(work.once) + _accesses(work.looped) * work.trips
    access = accesses * warps * max(1.0, target.warp_size * work.width / 128) * cycle / rates.access

    wait = pace.latency * 1e-3
    meeting = rates.barrier + rates.barrier_per_warp * work.warps

    def chain(counts: Mapping[str, int], issued: float) -> float:
        met, shuffled = counts.get("barrier", 0), counts.get("shuffle", 0)
        return (issued * rates.chain + met * meeting + shuffled * rates.shuffle) * cycle

    trip = chain(work.looped, inside)
    if work.looped.get("load"):
        ahead = 0.0
        if work.stages > 1 and 2 * work.shared > work.bytes_ahead:  # through shared memory
            ahead = max(0.0, work.stages - 1 - rates.ahead)
        elif pace.into_registers and work.stages > 1 and work.once.get("load", 0) >= work.looped["load"]:
            ahead = work.stages - 1.0  # what stands before the loop loads its first tiles
        trip = max(trip, (trip + wait) / (1.0 + ahead))
    way = rates.start * cycle + (wait if work.once.get("load") else 0.0) + chain(work.once, outside) + work.trips * trip
    rounds = work.programs / slots
    rounds = 1.0 if rounds <= 1 else rounds + rates.last * (math.ceil(rounds) - rounds)

    p = rates.overlap
    return (memory**p + issue**p + access**p + (rounds * way) ** p) ** (1 / p) + rates.launch


def _issued(counts: Mapping[str, int], rates: Rates) -> float:
    weights = {"shuffle": 2.0, "shared": 2.0, "spill": rates.spill, "atomic": 4.0}
    return sum(count * weights.get(kind, 1.0) for kind, count in counts.items())


def _accesses(counts: Mapping[str, int]) -> int:
    return sum(counts.get(kind, 0) for kind in ("load", "store", "atomic", "spill"))


def time_of(certificates: Iterable[Certificate], rates: Rates = RATES) -> float:
    """Microseconds of several launches one after the other. Raises `ValueError` where one cannot be modelled."""
    total = 0.0
    for certificate in certificates:
        target = certificate.launch.target
        pace = backend(target.vendor).pace(target)
        total += microseconds(work_of(certificate), target, pace, rates)
    return total
