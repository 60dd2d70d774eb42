"""Tuning without the device: candidates are compiled for it, and a model predicts their times.

For each job (one tunable at one key) a shortlist of the space, the heuristic first, is traced and compiled in worker
processes. Candidates that do not compile, are illegal or spill more than the heuristic are dropped. The model ranks the
rest, then the neighbours of the two best. The winner is stored if its predicted gain over the heuristic exceeds the
model's error (`MARGINS`). Entries are `static`, or `modelled` if the stock Triton has no compiler for the target and
candidates are only lowered to TTIR. benchmarks/static_regret.py publishes the regret of these choices on the H200.

The model combines three lower bounds of a kernel's time:

    memory   bytes from device memory over its bandwidth. Each tensor is read once; rows that a program sweeps over
             several times are read again if the cache does not hold them
    issue    instructions of all warps over the rate at which a multiprocessor issues them
    chain    the longest path through one program (memory latency, dependent instructions, barriers; less latency in a
             pipelined loop), times the number of waves of programs on the device

    time = (memory^p + issue^p + chain^p)^(1/p), with p from 1 (nothing overlaps) to infinity (everything does)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch

from .. import registry
from ..backends import LaunchConfig, Target, backend
from ..backends.base import Pace
from ..registry import Entry, Tunable
from . import compile as aot
from . import space, store
from .compile import Certificate, Launch
from .jobs import Job, Result, run_each
from .ttir import Access
from .workers import CompilePool

MARGINS = {"binary": 0.08, "ttir": 0.25}
"""A choice is stored if its predicted gain over the heuristic exceeds this, by `Certificate.level` of its kernels."""


# -- the tuner -------------------------------------------------------------------------------------------------------


class StaticTuner:
    """Runs jobs for a target that is not here.

    candidates: how many a job compiles at most; save: stores a winner's (name, entry), returns whether that succeeded
    """

    def __init__(
        self,
        target: Target,
        pool: CompilePool,
        *,
        candidates: int = 24,
        save: Callable[[tuple, Entry], Any] | None = None,
    ) -> None:
        self.target, self.pool, self.limit, self.save = target, pool, candidates, save

    def run(self, jobs: list[Job], budget: float | None = None) -> Iterator[Result]:
        """The result of each job, in order. After `budget` seconds no job is begun."""
        return run_each(jobs, lambda number, left: self.choose(jobs[number]), budget)

    def choose(self, job: Job, among: Sequence[LaunchConfig] | None = None) -> Result:
        """The configuration with the least predicted time, with the certificates of its kernels.

        among: compile only these and the heuristic, for example a stored entry whose kernel has changed
        """
        tunable = registry.get_tunable(job.name)
        result = Result(job, note="the heuristic stays")
        legal, refused = space.legal(tunable, self.target, job.key)
        heuristic = tunable.heuristic(self.target, job.key)
        if heuristic not in legal:
            result.error = f"the heuristic is illegal: {tunable.illegal(self.target, job.key, heuristic)}"
            return result
        # cache hints do not change a certificate, so all candidates get the heuristic's
        distinct = list(dict.fromkeys(replace(config, hint=heuristic.hint) for config in legal))
        candidates = _Candidates(self, job, heuristic)
        if among is None:
            first = max(2, self.limit * 2 // 3)
            candidates.add(space.shortlist(distinct, heuristic, first, {}, f"{job.name}{job.key}"))
        else:
            candidates.add([heuristic, *(config for config in among if config in distinct)])
        if heuristic not in candidates.times:
            result.error = f"the heuristic cannot be evaluated: {candidates.dropped.get(heuristic, 'unknown')}"
            return result
        best_two = sorted(candidates.times, key=candidates.times.__getitem__)[:2]
        for best in best_two if among is None else ():
            near = [config for config in space.neighbours(distinct, best) if config not in candidates.traced]
            candidates.add(near[: max(0, self.limit - len(candidates.traced) + 1) // 2])
        times = candidates.times
        winner = min(times, key=lambda config: (times[config], config != heuristic))
        gain = 1 - times[winner] / times[heuristic] if times[heuristic] else 0.0  # a launch too small for the model
        if gain <= min(MARGINS[certificate.level] for certificate in candidates.certificates[winner]):
            winner = heuristic
        elif self._loses_at_other_sizes(job, tunable, heuristic, winner):
            winner, result.note = heuristic, "the heuristic stays: it is faster at other sizes of the key"
        result.tried, result.failed = len(candidates.traced), len(candidates.dropped)
        result.heuristic_us, result.winner_us = round(times[heuristic], 2), round(times[winner], 2)
        result.gain, result.config = round(gain if winner != heuristic else 0.0, 4), winner.to_json()
        result.evidence = {
            "kernels": {
                "heuristic": [certificate.to_json() for certificate in candidates.certificates[heuristic]],
                "winner": [certificate.to_json() for certificate in candidates.certificates[winner]],
            },
            "dropped": Counter(reason.split(":")[0][:80] for reason in candidates.dropped.values()) | refused,
        }
        if winner != heuristic:
            self._keep(tunable, winner, candidates.certificates[winner], result)
        return result

    def _loses_at_other_sizes(self, job: Job, tunable: Tunable, heuristic: LaunchConfig, winner: LaunchConfig) -> bool:
        """Whether the heuristic is at least as fast at other sizes of the key, to which the entry would apply too."""
        sizes = space.other_sizes(tunable, job.sizes, job.key, job.dtype)
        if sizes is None:
            return False
        candidates = _Candidates(self, replace(job, sizes=tuple(sizes)), heuristic)
        try:
            candidates.add([heuristic, winner])
        except ValueError:  # the op does not take these sizes
            return False
        return candidates.times.get(winner, math.inf) >= candidates.times.get(heuristic, math.inf)

    def _keep(self, tunable: Tunable, winner: LaunchConfig, certificates: list[Certificate], result: Result) -> None:
        job = result.job
        resources = next(c.resources for c in certificates if c.launch.tunable == job.name)
        result.note = "chosen by the model"
        result.provenance = {
            "kind": "static" if all(c.level == "binary" for c in certificates) else "modelled",
            "predicted_us": result.winner_us,
            "heuristic_us": result.heuristic_us,
            "gain": result.gain,
            "sizes": list(job.sizes),
            "dtype": job.dtype,
            "device": self.target.name,
            "registers": resources.registers,
            "spills": resources.spills,
            "shared": resources.shared,
            "occupancy": round(resources.occupancy, 3),
            "triton": store.triton_version(),
            "date": store.today(),
        }
        if self.save is not None:
            result.stored = bool(self.save(job.entry_name, Entry(winner, result.provenance, tunable.version)))
            result.note = result.note if result.stored else "not stored"


class _Candidates:
    """The candidates of one job: each one's launches, certificates, and time or the reason why it was dropped."""

    def __init__(self, tuner: StaticTuner, job: Job, heuristic: LaunchConfig) -> None:
        self.tuner, self.job, self.heuristic = tuner, job, heuristic
        self.traced: dict[LaunchConfig, list[Launch]] = {}
        self.certificates: dict[LaunchConfig, list[Certificate]] = {}
        self.times: dict[LaunchConfig, float] = {}
        self.dropped: dict[LaunchConfig, str] = {}

    def add(self, configs: Iterable[LaunchConfig]) -> None:
        """Compile more candidates and predict all times again: `launches_that_differ` depends on all candidates."""
        for config in configs:
            if config not in self.traced:
                self.traced[config] = launches_of(self.job, self.tuner.target, config)
        differing = launches_that_differ(self.job.name, list(self.traced.values()))
        certified = aot.certify([launch for launches in differing for launch in launches], self.tuner.pool)
        self.certificates = {c: [next(certified) for _ in launches] for c, launches in zip(self.traced, differing)}
        self.times, self.dropped = {}, {}
        for config, certificates in self.certificates.items():
            try:
                if why_invalid := self._unfit(config, certificates):
                    self.dropped[config] = why_invalid
                else:
                    self.times[config] = time_of(certificates)
            except ValueError as error:
                self.dropped[config] = f"cannot be modelled: {error}"

    def _unfit(self, config: LaunchConfig, certificates: list[Certificate]) -> str:
        for certificate in certificates:
            if certificate.error:
                return f"does not compile: {certificate.error}"
            if certificate.illegal:
                return f"illegal: {certificate.illegal}"
        if config == self.heuristic:
            return ""
        heuristic_spills = sum(c.resources.spills for c in self.certificates[self.heuristic] if c.resources)
        spills = sum(c.resources.spills for c in certificates)
        return f"spills: {spills} registers" if spills > heuristic_spills else ""


def launches_of(job: Job, target: Target, config: LaunchConfig) -> list[Launch]:
    """The launches of the job's op under `config`. Of launches with one kernel and key, only the first."""
    dtype = getattr(torch, job.dtype)
    launches = aot.trace(job.op, job.sizes, dtype, target, configs={job.name: config}, shipped=False)
    return list({(one.tunable, one.kernel, one.key): one for one in reversed(launches)}.values())[::-1]


def launches_that_differ(name: str, traced: list[list[Launch]]) -> list[list[Launch]]:
    """Each candidate's launches of the tunable `name`, and its other launches that are not the same for all candidates.
    For example, the grid of a persistent backward decides how many partial sums another kernel adds."""

    def work(launch: Launch) -> tuple:
        return launch.kernel, launch.key, launch.grid, launch.sizes

    common = set.intersection(*({work(one) for one in launches} for launches in traced)) if traced else set()
    return [[one for one in launches if one.tunable == name or work(one) not in common] for launches in traced]


# -- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The model's constants, fitted by benchmarks/static_regret.py. Cycles are of the multiprocessor's clock.

    chain: cycles between dependent instructions of a warp; every instruction counts as dependent on the one before
    barrier, barrier_per_warp: cycles of a barrier, and further cycles for each warp that waits there
    issue: instructions of a virtual instruction set (PTX) per instruction that is issued
    overlap: the exponent p; launch: microseconds of a launch
    """

    chain: float = 3.6
    barrier: float = 58.0
    barrier_per_warp: float = 2.4
    issue: float = 1.66
    overlap: float = 1.7
    launch: float = 0.2


RATES = Rates()
_WEIGHTS = {"shuffle": 2.0, "shared": 2.0, "atomic": 4.0}
"""Kind of instruction -> the number of instructions that it counts as; others count as one."""


def bytes_moved(accesses: Iterable[Access], sizes: tuple[int, ...], programs: int) -> tuple[float, float, float, int]:
    """(bytes read or written once, bytes read again by later sweeps, bytes that one program reads again, trips of its
    loops)"""
    accesses = list(accesses)
    looped = [a for a in accesses if a.looped]
    largest = max((a.tile for a in looped), default=0)
    trips = max([1.0, *(sizes[a.argument] / (programs * a.tile) for a in looped if 2 * a.tile >= largest)])
    whole = math.ceil(trips - 1e-6)
    once = again = again_by_program = 0.0
    by_argument = defaultdict(list)
    for access in accesses:
        by_argument[access.argument, access.kind == "load"].append(access)
    for (argument, loads), group in by_argument.items():
        inside = [a.tile for a in group if a.looped]
        outside = [a.tile for a in group if not a.looped and a.tile < min(inside, default=a.tile + 1)]
        size = min(sizes[argument], programs * (whole * sum(inside) + sum(outside)))
        once += size
        if loads and len(inside) > 1 and sizes[argument] / (programs * inside[0]) >= trips / 2:
            again += (len(inside) - 1) * size
            again_by_program += size / programs
    return once, again, again_by_program, whole


def microseconds(certificate: Certificate, pace: Pace, rates: Rates = RATES) -> float:
    """Predicted time of one launch. Raises `ValueError` if the kernel cannot run or its accesses are unknown."""
    launch, r = certificate.launch, certificate.resources
    if r is None or certificate.unread:
        raise ValueError(f"{launch.tunable}: {certificate.error or certificate.unread}")
    target, programs, n_warps = launch.target, math.prod(launch.grid), r.threads // launch.target.warp_size
    resident = round(r.occupancy * target.max_threads_per_multiprocessor / r.threads)  # programs of a multiprocessor
    if resident < 1:
        raise ValueError(f"{launch.tunable}: not one block fits a multiprocessor of {target.arch}")
    slots = resident * target.multiprocessors
    moved, again, again_by_program, trips = bytes_moved(certificate.accesses, launch.sizes, programs)
    cached = target.l2 / max(1.0, again_by_program * min(programs, slots))
    memory = (moved + again * max(0.0, 1.0 - cached)) / (target.bandwidth * 1e3)

    cycle, latency = 1e-3 / pace.clock, pace.latency * 1e-3  # microseconds
    once = {kind: count - r.looped.get(kind, 0) for kind, count in r.instructions.items()}
    outside, inside = _issued(once), _issued(r.looped)
    warps = n_warps * programs / min(programs, target.multiprocessors)  # of one multiprocessor
    issue = (outside + inside * trips) * warps * cycle / (pace.issue * (rates.issue if pace.virtual else 1.0))

    barrier = rates.barrier + rates.barrier_per_warp * n_warps

    def chain(counts: Mapping[str, int], issued: float) -> float:
        return (issued * rates.chain + counts.get("barrier", 0) * barrier) * cycle

    trip = chain(r.looped, inside)
    if r.looped.get("load"):
        loop_bytes = sum(a.tile for a in certificate.accesses if a.looped and a.kind == "load")
        shared = r.shared if certificate.level == "binary" else loop_bytes
        ahead, stages = 0, launch.config.num_stages  # ahead: tiles in flight during the computation of one
        if stages > 1 and 2 * shared > loop_bytes:  # buffers in shared memory: one is read, one is filled
            ahead = stages - 2
        elif pace.into_registers and once.get("load", 0) >= r.looped["load"]:
            ahead = stages - 1  # buffers in registers: the first tiles are loaded before the loop
        trip = max(trip, (trip + latency) / (1 + ahead))
    program = (latency if once.get("load") else 0.0) + chain(once, outside) + trips * trip
    waves = max(1.0, programs / slots)

    p = rates.overlap
    return (memory**p + issue**p + (waves * program) ** p) ** (1 / p) + rates.launch


def _issued(counts: Mapping[str, int]) -> float:
    return sum(count * _WEIGHTS.get(kind, 1.0) for kind, count in counts.items())


def time_of(certificates: Iterable[Certificate]) -> float:
    """Predicted microseconds of consecutive launches. Raises `ValueError` if one cannot be modelled."""
    targets = [(one, one.launch.target) for one in certificates]
    return sum(microseconds(one, backend(target.vendor).pace(target)) for one, target in targets)
