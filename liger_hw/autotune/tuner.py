"""The tuner: searches the legal configurations of a tunable for one that beats the heuristic by more than the noise.

For each job (one tunable at one key):
    1 worker processes compile a shortlist of candidates, the heuristic first
    2 each candidate is checked and timed briefly (coarse), then the neighbours of the two fastest
    3 the fastest few and the heuristic are timed, interleaved (final)
    4 the winner is timed once more against the heuristic, which is timed twice (confirm). The gain must exceed the
      noise: the difference between the heuristic's two medians, or half the spread of the samples, if that is larger
    5 the whole op is run with the winner and compared with its reference
    6 the winner must also beat the heuristic at other sizes of the same key, since its entry applies to all of them
Every measurement is written at once as a line of the device's table (`store.py`), so an interrupted run can resume. A
candidate that crashes or hangs its worker is recorded, and the search goes on without it.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Iterator, NamedTuple

from .. import registry
from ..backends import LaunchConfig, Target, backend
from ..registry import Entry, Key, Tunable
from . import space, store
from .jobs import Job, Result, run_each
from .record import Rejected
from .tables import Line, Name
from .workers import WorkerDied, WorkerError

MIN_GAIN = 0.01
"""The smallest relative gain that is stored, even without noise."""
CANDIDATE_ERRORS = (WorkerError, Rejected)
"""Errors after which the worker is still usable."""
SUBMITTED_AHEAD = 2
"""Number of jobs whose candidates are compiled while an earlier job is measured."""


@dataclass(frozen=True)
class Effort:
    """How much a search tries.

    first: candidates at a tunable's first key; later: at its other keys, which start from the nearest key's best
    refine: neighbours of each of the two fastest candidates; finalists: candidates that are timed in the final step
    coarse_rounds, final_rounds, confirm_rounds: samples of a candidate; a sample is one graph replay of many launches
    job_seconds: after this time a job tries no further candidate
    """

    first: int = 96
    later: int = 36
    refine: int = 16
    finalists: int = 6
    coarse_rounds: int = 3
    final_rounds: int = 12
    confirm_rounds: int = 30
    job_seconds: float = 30.0


class Tuner:
    """Runs jobs on one device.

    measurer: `measure.LocalMeasurer` or `workers.RemoteMeasurer`; facts: its `facts()`; pool: `CompilePool` or None
    save: stores a line (name, entry) in the device's table; returns whether that succeeded
    known: lines of earlier runs, which are not measured again
    progress: called with a job and a text about its state
    """

    def __init__(
        self,
        target: Target,
        measurer: Any,
        *,
        facts: dict[str, Any],
        pool: Any = None,
        save: Callable[[Name, Entry], bool] = lambda name, entry: False,
        known: Iterable[Line] = (),
        effort: Effort | None = None,
        progress: Callable[[Job, str], None] = lambda job, text: None,
    ) -> None:
        self.target, self.measurer, self.facts, self.pool = target, measurer, facts, pool
        self.save, self.effort = save, effort or Effort()
        self.known: dict[Name, list[Entry]] = {}
        for name, entry in known:
            if store.minor(entry.provenance.get("triton")) == store.minor(facts.get("triton")):
                self.known.setdefault(name, []).append(entry)
        self.progress = progress
        self._relative: dict[str, dict[Key, dict[LaunchConfig, float]]] = {}

    def run(self, jobs: list[Job], budget: float | None = None) -> Iterator[Result]:
        """The result of each job, in order. A job gets less time if little of the `budget` (seconds) is left."""
        for job in jobs[:SUBMITTED_AHEAD]:
            self._submit_all(job)

        def choose(number: int, left: float) -> Result:
            if number + SUBMITTED_AHEAD < len(jobs):
                self._submit_all(jobs[number + SUBMITTED_AHEAD])
            limit = min(self.effort.job_seconds, max(0.3, 1.5 * left / (len(jobs) - number)))
            return self._tune(jobs[number], time.monotonic() + limit)

        return run_each(jobs, choose, budget)

    def _tune(self, job: Job, deadline: float) -> Result:
        tunable = registry.get_tunable(job.name)
        if (end := self._final_line(job)) is not None:
            return self._resumed(job, end)
        try:
            return Search(self, job, tunable, deadline).run()
        except (WorkerDied, *CANDIDATE_ERRORS) as error:
            return Result(job, error=str(error))

    def lines(self, job: Job, *kinds: str) -> list[Entry]:
        """Lines of earlier runs about a job, for the present version of its kernel."""
        version = registry.get_tunable(job.name).version
        return [one for one in self.known.get(job.entry_name, ()) if one.kind in kinds and one.version == version]

    def _final_line(self, job: Job) -> Entry | None:
        """The line that an earlier run wrote at the end of the search for a job."""
        return next(iter(self.lines(job, *store.ENDS)), None)

    def _resumed(self, job: Job, end: Entry) -> Result:
        names = {"heuristic_us": "heuristic_us", "winner_us": "median_us", "gain": "gain", "noise": "noise"}
        return Result(
            job,
            **{name: float(end.provenance.get(stored, 0.0)) for name, stored in names.items()},
            config=end.config.to_json(),
            provenance=dict(end.provenance),
            stored=end.kind == "measured",
            note="measured by an earlier run",
        )

    # -- shared by searches ------------------------------------------------------------------------------------------

    def shortlist(self, job: Job, tunable: Tunable) -> tuple[list[LaunchConfig], list[LaunchConfig]]:
        """(every legal configuration, the ones to measure first)"""
        legal, _ = space.legal(tunable, self.target, job.key)
        if not legal:
            return [], []
        scores = self._scores_near(job)
        limit = self.effort.later if scores else self.effort.first
        return legal, space.shortlist(legal, legal[0], limit, scores, f"{job.name}{job.key}")

    def _scores_near(self, job: Job) -> dict[LaunchConfig, float]:
        """Relative times at the measured key of the job's tunable that is nearest to the job's key."""

        def distance(key: Key) -> int:
            return sum(abs(a.bit_length() - b.bit_length()) + (a != b) for a, b in zip(key, job.key))

        times = self._relative.get(job.name, {})
        comparable = [key for key in times if len(key) == len(job.key)]
        return times[min(comparable, key=distance)] if comparable else {}

    def learn(self, job: Job, times: dict[LaunchConfig, float]) -> None:
        """Keep these times for later keys of the job's tunable."""
        if times:
            best = min(times.values())
            self._relative.setdefault(job.name, {})[job.key] = {config: us / best for config, us in times.items()}

    def _submit_all(self, job: Job) -> None:
        if self.pool is not None and self._final_line(job) is None:
            for config in self.shortlist(job, registry.get_tunable(job.name))[1]:
                self.submit(job, config)

    def submit(self, job: Job, config: LaunchConfig) -> str:
        """Queue a candidate for compilation; returns its name for `pool.wait`, which is the same for every grid."""
        name = json.dumps([job.name, job.sizes, job.dtype, replace(config, ctas_per_mp=0).to_text()])
        request = self.target, job.op, job.sizes, job.dtype, job.name, config
        self.pool.submit(name, "candidate", *request)
        return name

    def write(self, job: Job, config: LaunchConfig, kind: str, **evidence: Any) -> dict[str, Any] | None:
        """Add a line about a job to the device's table. Returns its provenance, or None if it could not be stored."""
        about = {"kind": kind, "sizes": list(job.sizes), "dtype": job.dtype, **evidence}
        stamp = {"triton": self.facts.get("triton", ""), "date": store.today()}
        entry = Entry(config, {**about, **stamp}, registry.get_tunable(job.name).version)
        return dict(entry.provenance) if self.save(job.entry_name, entry) else None


class _Comparison(NamedTuple):
    """Medians of the heuristic and of a candidate in microseconds, and the candidate's samples."""

    heuristic: float
    candidate: float
    gain: float
    noise: float
    samples: list[float]


class Search:
    """The search for one job. If a worker dies, it continues with a new one."""

    MAX_DEATHS = 6

    def __init__(self, tuner: Tuner, job: Job, tunable: Tunable, deadline: float) -> None:
        self.tuner, self.job, self.tunable, self.deadline = tuner, job, tunable, deadline
        self.effort, self.measurer = tuner.effort, tuner.measurer
        self.coarse: dict[LaunchConfig, float] = {}
        self.failed: dict[LaunchConfig, str] = {}
        self.sizes = job.sizes
        self.deaths = 0
        self._refused = {one.config: one.provenance["reason"] for one in tuner.lines(job, "refused")}
        self._timed = {one.config: one.provenance["us"] for one in tuner.lines(job, "timed")}

    def run(self) -> Result:
        legal, first = self.tuner.shortlist(self.job, self.tunable)
        result = Result(self.job)
        if not first:
            return replace(result, error="no legal configuration")
        began = time.monotonic()
        baseline, bytes_moved = self._open()
        self.deadline += time.monotonic() - began  # opening a shape compiles, which does not count
        self._coarse_all([baseline, *(c for c in first if c != baseline)])
        if baseline not in self.coarse:
            return replace(result, error=self._baseline_failed(baseline))
        for best in sorted(self.coarse, key=self.coarse.__getitem__)[:2]:
            near = [c for c in space.neighbours(legal, best) if c not in self.coarse and c not in self.failed]
            self._coarse_all(near[: self.effort.refine])
        self.tuner.learn(self.job, self.coarse)
        copy_gbs = float(self.tuner.facts.get("copy_gbs") or 0.0)
        result.floor_us = round(bytes_moved / copy_gbs / 1000.0, 3) if copy_gbs else 0.0
        self._decide(baseline, result)
        result.tried, result.failed = len(self.coarse) + len(self.failed), len(self.failed)
        return result

    def _baseline_failed(self, baseline: LaunchConfig) -> str:
        return f"the baseline cannot be timed: {self.failed.get(baseline, 'unknown')}"

    def _decide(self, baseline: LaunchConfig, result: Result) -> None:
        """Steps 3 to 6 of the search."""
        ranked = sorted((c for c in self.coarse if c != baseline), key=self.coarse.__getitem__)
        times = self._time_all([baseline, *ranked[: self.effort.finalists]], self.effort.final_rounds)
        if baseline not in times:
            result.error = self._baseline_failed(baseline)
            return
        result.heuristic_us = result.winner_us = round(statistics.median(times[baseline]), 3)
        result.config = baseline.to_json()
        for _, _, winner in sorted((statistics.median(t), c.to_text(), c) for c, t in times.items()):
            if winner == baseline:
                break
            comparison = self._compare(baseline, winner)
            if baseline in self.failed:
                result.error = self._baseline_failed(baseline)
                return
            if comparison is None:
                continue
            result.heuristic_us, result.winner_us = round(comparison.heuristic, 3), round(comparison.candidate, 3)
            result.gain, result.noise = round(comparison.gain, 5), round(comparison.noise, 5)
            if comparison.gain <= max(comparison.noise, MIN_GAIN):
                break
            if reason := self._verify(winner):
                self._fail(winner, f"wrong result: {reason}")
                continue
            others = self._at_other_sizes(baseline, winner)
            if others is not None and others["gain"] <= others["noise"]:
                result.note = f"the best loses at {'x'.join(map(str, others['sizes']))}, which has the same key"
                continue
            result.config, result.note = winner.to_json(), ""
            self._store(winner, comparison.samples, result, others)
            return
        result.winner_us, result.gain = result.heuristic_us, 0.0
        result.note = result.note or "the heuristic stays"
        times = {"heuristic_us": result.heuristic_us, "median_us": result.winner_us, "noise": result.noise}
        self.tuner.write(self.job, baseline, "heuristic", **times)

    def _compare(self, baseline: LaunchConfig, winner: LaunchConfig) -> _Comparison | None:
        """Both timed interleaved, the heuristic twice; None if one of them cannot be timed."""
        times = self._time_all([baseline, winner], self.effort.confirm_rounds, again=baseline)
        if baseline not in times or winner not in times:
            return None
        first, second, samples = times[baseline], times["again"], times[winner]
        heuristic, candidate = statistics.median(first + second), statistics.median(samples)
        drift = abs(statistics.median(first) - statistics.median(second)) / heuristic
        noise = max(drift, _half_spread(samples) / candidate, _half_spread(first) / heuristic)
        return _Comparison(heuristic, candidate, (heuristic - candidate) / heuristic, noise, samples)

    def _at_other_sizes(self, baseline: LaunchConfig, winner: LaunchConfig) -> dict[str, Any] | None:
        """Other sizes that have the job's key, with the gain and noise there; None if none can be measured."""
        sizes = space.other_sizes(self.tunable, self.job.sizes, self.job.key, self.job.dtype)
        if sizes is None:
            return None
        self.sizes, failed, comparison, others = sizes, dict(self.failed), None, None
        try:
            self._open()
            comparison = self._compare(baseline, winner)
        except (*CANDIDATE_ERRORS, ValueError):  # the op does not take these sizes
            pass
        finally:
            self.sizes = self.job.sizes
        if winner in self.failed:
            failed[winner] = self.failed[winner]
            others = {"sizes": list(sizes), "gain": -1.0, "noise": 0.0}
        elif comparison is not None:
            others = {"sizes": list(sizes), "gain": round(comparison.gain, 4), "noise": round(comparison.noise, 4)}
        self.failed = failed  # only the winner's failure at other sizes counts
        if others is not None and others["gain"] <= others["noise"]:
            self._open()  # the search goes on at the job's sizes
        return others

    def _store(self, winner: LaunchConfig, samples: list[float], result: Result, others: dict[str, Any] | None) -> None:
        evidence = {
            "median_us": result.winner_us,
            "p20": round(_quantile(samples, 0.2), 3),
            "p80": round(_quantile(samples, 0.8), 3),
            "heuristic_us": result.heuristic_us,
            "gain": round(result.gain, 4),
            "noise": round(result.noise, 4),
            **({"also": others} if others else {}),
            **{k: self.tuner.facts[k] for k in ("device", "driver", "torch") if k in self.tuner.facts},
        }
        provenance = self.tuner.write(self.job, winner, "measured", **evidence)
        result.stored, result.provenance = provenance is not None, provenance or {}
        result.note = "" if result.stored else "not stored: the cache cannot be written"

    # -- measuring, with a worker that may die -----------------------------------------------------------------------

    def _open(self) -> tuple[LaunchConfig, int]:
        """The baseline at `self.sizes`, and the bytes that it moves."""
        try:
            return self.measurer.open(self.job, self.sizes)
        except WorkerDied as death:
            self._count_death(death)
            return self.measurer.open(self.job, self.sizes)

    def _count_death(self, death: WorkerDied) -> None:
        self.deaths += 1
        if self.deaths > self.MAX_DEATHS:
            raise WorkerDied(f"gave up after {self.deaths} dead workers; the last {death}")

    def _reopen(self, death: WorkerDied) -> None:
        self._count_death(death)
        self._open()

    def _fail(self, config: LaunchConfig, reason: str) -> None:
        self.failed[config] = reason
        self.coarse.pop(config, None)
        if self.sizes == self.job.sizes:
            self.tuner.write(self.job, config, "refused", reason=reason)

    def _coarse_all(self, configs: list[LaunchConfig]) -> None:
        names = {c: self.tuner.submit(self.job, c) for c in configs} if self.tuner.pool else {}
        for number, config in enumerate(configs):
            if number and time.monotonic() > self.deadline:
                return
            self.tuner.progress(self.job, f"{number + 1}/{len(configs)} candidates, {len(self.failed)} failed")
            if config in self._refused:
                self.failed[config] = self._refused[config]
            elif config in self._timed:
                self.coarse[config] = self._timed[config]
            elif config in names and (reason := self._uncompilable(config, names[config])):
                self._fail(config, reason)
            elif samples := self._time_all([config], self.effort.coarse_rounds).get(config):
                self.coarse[config] = min(samples)

    def _uncompilable(self, config: LaunchConfig, name: str) -> str:
        """Why a candidate does not compile or does not fit the device, or `""`. The wait is not counted."""
        began = time.monotonic()
        compiled = self.tuner.pool.wait(name)
        self.deadline += time.monotonic() - began
        if "error" in compiled:
            return str(compiled["error"])
        if not compiled.get("resources"):
            return ""
        target = self.tuner.target
        return backend(target.vendor).illegal_resources(target, compiled["resources"]) or ""

    def _prepare(self, config: LaunchConfig) -> bool:
        try:
            self.measurer.prepare(config)
            return True
        except CANDIDATE_ERRORS as error:
            self._fail(config, str(error))
        except WorkerDied as death:
            self._fail(config, f"the worker {death}")
            self._reopen(death)
        return False

    def _time_all(self, configs: list[LaunchConfig], rounds: int, again: LaunchConfig | None = None) -> dict:
        """Interleaved samples of each configuration that can be timed; under "again", more samples of `again`."""
        while again not in self.failed:
            deaths = self.deaths
            ready = [c for c in configs if c not in self.failed and self._prepare(c)]
            if self.deaths > deaths:
                continue  # the new worker has prepared nothing yet
            if not ready:
                break
            arms = ready if again is None else [*ready, again]
            try:
                raw = self.measurer.time(arms, rounds)
            except WorkerDied as death:
                self._reopen(death)
                if len(ready) == 1:
                    self._fail(ready[0], f"the worker {death}")
                for config in ready if len(ready) > 1 else ():  # one at a time, to find which one kills the worker
                    self._time_all([config], 1)
                continue
            except CANDIDATE_ERRORS as error:
                for config in ready:
                    self._fail(config, str(error))
                break
            if self.sizes == self.job.sizes:
                for config, samples in zip(arms, raw):
                    self.tuner.write(self.job, config, "timed", us=round(min(samples), 4))
            return dict(zip([*ready, "again"], raw))
        return {}

    def _verify(self, config: LaunchConfig) -> str:
        try:
            return self.measurer.verify(config)
        except WorkerDied as death:
            self._reopen(death)
            return f"the worker {death}"
        except CANDIDATE_ERRORS as error:
            return str(error)


def _quantile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _half_spread(samples: list[float]) -> float:
    return (_quantile(samples, 0.8) - _quantile(samples, 0.2)) / 2
