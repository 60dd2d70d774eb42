"""Choosing without the device: every candidate is compiled for it, and the model ranks what the compiler made.

Where the stock Triton has no compiler for the target, candidates go as far as TTIR and are ranked by what can be counted
there; entries then say `modelled` instead of `static`.

For each job (one tunable at one key): a shortlist of the space, the heuristic first, is traced and compiled in worker
processes; candidates that do not compile, may not be launched or spill more than the heuristic go; the rest are ranked by
`model.time_of`; the neighbours of the two best are compiled and ranked too. The winner is kept when it is predicted to
beat the heuristic by the margin, below which the model is not to be trusted (benchmarks/results/static-regret-h200.json).
Recompiling what was compiled before comes from Triton's own cache on disk.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Callable, Iterable, Mapping, Sequence

from .. import registry
from ..backends import LaunchConfig, Target
from ..registry import Entry
from . import compile as aot
from . import model, plan, space, store
from .compile import Certificate, Launch, Workers
from .jobs import Job, Result

MARGINS = {"binary": 0.08, "ttir": 0.25}
"""Predicted gain over the heuristic that keeps a choice, by how far its kernels were compiled."""


class StaticTuner:
    """Runs jobs for a target that is not here.

    workers: compile processes; candidates: most of a job; save: called with (name, entry) for a winner
    """

    def __init__(
        self,
        target: Target,
        workers: Workers,
        *,
        candidates: int = 24,
        save: Callable[[tuple, Entry], Any] | None = None,
    ) -> None:
        self.target, self.workers, self.most, self.save = target, workers, candidates, save
        self._certified: dict[tuple, Certificate] = {}

    def run(
        self, jobs: Iterable[Job], done: Callable[[Result], None] = lambda result: None, budget: float = math.inf
    ) -> list[Result]:
        """Results in the order of `jobs`; `done` is called with each. After `budget` seconds no further job is begun."""
        results = []
        deadline = time.monotonic() + budget
        for job in jobs:
            began = time.monotonic()
            late = began >= deadline
            result = Result(job, note="skipped: the budget is spent") if late else self.choose(job)
            result.seconds = round(time.monotonic() - began, 3)
            results.append(result)
            done(result)
        return results

    def choose(self, job: Job, among: Sequence[LaunchConfig] | None = None) -> Result:
        """The configuration that the model prefers, with the certificates of the kernels it decides.

        among: only these and the heuristic are compiled, as when an entry's kernel has changed since
        """
        tunable = registry.get_tunable(job.name)
        result = Result(job, note="the heuristic stays")
        legal, refused = space.legal(tunable, self.target, job.key)
        heuristic = tunable.heuristic(self.target, job.key)
        if heuristic not in legal:
            result.error = f"the heuristic is illegal: {tunable.illegal(self.target, job.key, heuristic)}"
            return result
        alike = list(
            dict.fromkeys(replace(config, hint=heuristic.hint) for config in legal)
        )  # no binary tells hints apart
        search = _Candidates(self, job, heuristic)
        if among is None:
            search.add(space.shortlist(alike, heuristic, max(2, self.most * 2 // 3), {}, f"{job.name}{job.key}"))
        else:
            search.add([heuristic, *(config for config in among if config in alike)])
        if heuristic not in search.times:
            result.error = f"the heuristic cannot be judged: {search.dropped.get(heuristic, 'unknown')}"
            return result
        for best in sorted(search.times, key=search.times.__getitem__)[:2] if among is None else ():
            near = [c for c in space.neighbours(alike, best) if c not in search.traced]
            search.add(near[: max(0, self.most - len(search.traced) + 1) // 2])
        times = search.times
        winner = min(times, key=lambda config: (times[config], config != heuristic))
        gain = 1 - times[winner] / times[heuristic]
        if gain <= min(MARGINS[c.level] for c in search.certificates(winner)):
            winner = heuristic
        elif self._loses_elsewhere(job, tunable, heuristic, winner):
            winner, result.note = heuristic, "the heuristic stays: it is faster at other sizes of the key"
        result.tried, result.failed = len(search.traced), len(search.dropped)
        result.heuristic_us, result.winner_us = round(times[heuristic], 2), round(times[winner], 2)
        result.gain, result.config = round(gain if winner != heuristic else 0.0, 4), winner.to_json()
        result.evidence = {
            "kernels": {
                "heuristic": [c.to_json() for c in search.certificates(heuristic)],
                "winner": [c.to_json() for c in search.certificates(winner)],
            },
            "dropped": Counter(reason.split(":")[0][:80] for reason in search.dropped.values()) | refused,
        }
        if winner != heuristic:
            self._keep(job, tunable, winner, search.certificates(winner), result)
        return result

    def _loses_elsewhere(self, job: Job, tunable: Any, heuristic: LaunchConfig, winner: LaunchConfig) -> bool:
        """Whether the heuristic is as fast at other sizes that have the same key: an entry answers for all of them."""
        sizes = space.elsewhere(tunable, job.sizes, job.key, job.dtype)
        if sizes is None:
            return False
        search = _Candidates(self, replace(job, sizes=tuple(sizes)), heuristic)
        try:
            search.add([heuristic, winner])
        except ValueError:  # sizes that the op does not take, as channels that no longer divide
            return False
        return search.times.get(winner, math.inf) >= search.times.get(heuristic, math.inf)

    def _keep(
        self, job: Job, tunable: Any, winner: LaunchConfig, certificates: list[Certificate], result: Result
    ) -> None:
        own = next(c.resources for c in certificates if c.launch.tunable == job.name)
        result.note = "chosen by the model"
        result.provenance = {
            "kind": "static" if all(c.level == "binary" for c in certificates) else "modelled",
            "predicted_us": result.winner_us,
            "heuristic_us": result.heuristic_us,
            "gain": result.gain,
            "sizes": list(job.sizes),
            "dtype": job.dtype,
            "device": self.target.name,
            "registers": own.registers,
            "spills": own.spills,
            "shared": own.shared,
            "occupancy": round(own.occupancy, 3),
            "triton": store.triton_version(),
            "date": store.today(),
        }
        if self.save is not None:
            entry = Entry(winner, result.provenance, tunable.kernel_hash())
            result.stored = bool(self.save((job.op, job.variant, job.key), entry))
            result.note = result.note if result.stored else "not stored"

    def certify(self, launches: Iterable[Launch]) -> None:
        """Compile what was not compiled before."""
        missing = {launch.same(): launch for launch in launches if launch.same() not in self._certified}
        for certificate in aot.certify(missing.values(), self.workers):
            self._certified[certificate.launch.same()] = certificate

    def certificate(self, launch: Launch) -> Certificate:
        return replace(self._certified[launch.same()], launch=launch)


class _Candidates:
    """The candidates of one job: what each launches, its time, or why it was dropped."""

    def __init__(self, tuner: StaticTuner, job: Job, heuristic: LaunchConfig) -> None:
        self.tuner, self.job, self.heuristic = tuner, job, heuristic
        self.traced: dict[LaunchConfig, list[Launch]] = {}
        self.times: dict[LaunchConfig, float] = {}
        self.dropped: dict[LaunchConfig, str] = {}

    def add(self, configs: Iterable[LaunchConfig]) -> None:
        for config in configs:
            if config not in self.traced:
                self.traced[config] = launches_of(self.job, self.tuner.target, config)
        decided = self._decided()
        self.tuner.certify(launch for launches in decided.values() for launch in launches)
        self.times, self.dropped = {}, {}
        for config in decided:
            certificates = [self.tuner.certificate(launch) for launch in decided[config]]
            try:
                if reason := self._unfit(certificates, config):
                    self.dropped[config] = reason
                else:
                    self.times[config] = model.time_of(certificates)
            except ValueError as error:
                self.dropped[config] = f"cannot be modelled: {error}"

    def _decided(self) -> dict[LaunchConfig, list[Launch]]:
        return dict(zip(self.traced, decided_by(self.job.name, list(self.traced.values()))))

    def certificates(self, config: LaunchConfig) -> list[Certificate]:
        return [self.tuner.certificate(launch) for launch in self._decided()[config]]

    def _unfit(self, certificates: list[Certificate], config: LaunchConfig) -> str:
        for certificate in certificates:
            if certificate.error:
                return f"does not compile: {certificate.error}"
            if certificate.illegal:
                return f"illegal: {certificate.illegal}"
        if config == self.heuristic:
            return ""
        accepted = sum(c.resources.spills for c in self.certificates(self.heuristic) if c.resources)
        spills = sum(c.resources.spills for c in certificates)
        return f"spills: {spills} registers" if spills > accepted else ""


def launches_of(job: Job, target: Target, config: LaunchConfig) -> list[Launch]:
    """What the job's op launches under a configuration; of a chunked loop, each kernel and key once."""
    found = plan.trace(job.op, tuple(job.sizes), job.dtype, target, {job.name: config})
    return list({(l.tunable, l.kernel, l.key): l for l in reversed(found)}.values())[::-1]


def decided_by(name: str, traced: list[list[Launch]]) -> list[list[Launch]]:
    """Of each candidate's launches, the tunable's own and those of other kernels that are not alike for all candidates.

    A persistent backward's grid decides how many partial sums another kernel adds up.
    """
    looks = [{(l.kernel, l.key, l.grid, l.sizes) for l in found} for found in traced]
    alike = set.intersection(*looks) if looks else set()
    return [
        [l for l in found if l.tunable == name or (l.kernel, l.key, l.grid, l.sizes) not in alike] for found in traced
    ]


# -- certificates outside the workers --------------------------------------------------------------------------------


def compile_here(launch: Launch) -> Certificate:
    """The certificate of a launch, compiled in this process."""
    began = time.monotonic()
    try:
        answer = aot._compile(json.loads(json.dumps(aot._job(launch))))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}".strip()[:500]}
    return aot.certificate_from(launch, {**answer, "seconds": time.monotonic() - began})


def from_record(record: Mapping[str, Any], target: Target) -> Certificate:
    """A certificate from what `Certificate.to_json` gave."""
    config = LaunchConfig.from_json(record["config"])
    head = target, record["tunable"], tuple(record["key"]), record["layer"], config
    launch = Launch(
        *head, f"{record['tunable']}:{record['kernel']}", (), (), tuple(record["grid"]), tuple(record["sizes"])
    )
    return aot.certificate_from(launch, record)
