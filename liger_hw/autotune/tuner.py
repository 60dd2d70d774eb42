"""The tuner: from the legal configurations of a tunable to one that beats the heuristic by more than noise.

For each job (one tunable at one key):
    1 a shortlist of candidates is compiled ahead by worker processes, the heuristic first
    2 each is checked and timed briefly (coarse); then the unmeasured neighbours of the best ones
    3 the best few and the heuristic are timed interleaved (final)
    4 the winner and the heuristic, the heuristic twice, are timed once more (confirm): what the two heuristic arms
      differ by, and the spread of each arm, is the noise that the gain must exceed
    5 the whole op with the winner is compared with the reference
    6 the winner and the heuristic are timed at other sizes of the same key: an entry answers for all of them, so it is
      stored only when it beats the heuristic there too
Every measurement goes to the journal as it is taken. A candidate that kills or hangs its worker is noted and the search
goes on without it.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple

from .. import registry
from ..backends import LaunchConfig, Target, backend
from ..registry import Entry, Key, Tunable
from . import space, store
from .jobs import Job, Result, each
from .journal import Journal, Past
from .record import Rejected
from .workers import WorkerDied, WorkerError

MIN_GAIN = 0.01
"""A smaller gain is not worth an entry, however quiet the machine."""
REFUSED = (WorkerError, Rejected)
"""What a measurer raises that lives on: from its own process, from this one."""
SUBMITTED_AHEAD = 8
"""Jobs whose candidates are with the compile workers while one is measured."""


@dataclass(frozen=True)
class Effort:
    """How hard to look.

    first: candidates of a tunable's first key; later: of further keys, which start from what was best nearby
    refine: neighbours of each of the two best; finalists: candidates of the final round
    coarse_rounds, final_rounds, confirm_rounds: samples an arm; a sample is one graph replay of many launches
    job_seconds: after which a job tries no further candidate
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
    """Runs jobs on one device: compiles ahead, searches each, learns from neighbours, stays within the budget.

    measurer: `measure.LocalMeasurer`, `workers.RemoteMeasurer` or a fake; pool: `workers.CompilePool`, None without one
    save, discard: called with (name, entry) for a winner, and with what a heuristic that won makes obsolete
    progress: called with a job and what is being done
    """

    def __init__(
        self,
        target: Target,
        measurer: Any,
        *,
        facts: dict[str, Any],
        pool: Any = None,
        journal: Journal | None = None,
        past: Past | None = None,
        save: Callable[[tuple, Entry], Any] | None = None,
        discard: Callable[[tuple, Entry], Any] | None = None,
        effort: Effort | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[Job, str], None] = lambda job, text: None,
    ) -> None:
        self.target, self.measurer, self.facts, self.pool = target, measurer, facts, pool
        self.journal, self.past = journal, past or Past(None, "")
        self.save, self.discard, self.effort = save, discard, effort or Effort()
        self.clock, self.progress = clock, progress
        self.winners: dict[tuple[str, str, Key], LaunchConfig] = {}
        self._relative: dict[str, dict[Key, dict[LaunchConfig, float]]] = {}

    def run(
        self, jobs: list[Job], done: Callable[[Result], None] = lambda result: None, budget: float | None = None
    ) -> list[Result]:
        """Results in the order of `jobs`; `done` is called with each. Where time is short, less is tried."""
        for job in jobs[:SUBMITTED_AHEAD]:
            self._submit_all(job)

        def choose(number: int, left: float) -> Result:
            if number + SUBMITTED_AHEAD < len(jobs):
                self._submit_all(jobs[number + SUBMITTED_AHEAD])
            limit = min(self.effort.job_seconds, max(0.3, 1.5 * left / (len(jobs) - number)))
            return self._tune(jobs[number], self.clock() + limit)

        return each(jobs, choose, done, budget, self.clock)

    def _tune(self, job: Job, until: float) -> Result:
        tunable = registry.get_tunable(job.name)
        finished = self.past.finished.get((*job.entry_name, tunable.version))
        if finished is not None:
            return self._resumed(job, tunable, finished)
        try:
            result = Search(self, job, tunable, until).run()
        except (WorkerDied, *REFUSED) as error:
            result = Result(job, error=str(error))
        if not result.error:
            self.write(job, tunable, {"stage": "done", "result": result.to_json()})
        if self.journal:
            self.journal.flush()
        return result

    def _resumed(self, job: Job, tunable: Tunable, line: dict[str, Any]) -> Result:
        result = Result.from_json(job, line["result"])
        result.note = "measured by an earlier run"
        if result.config:
            config = LaunchConfig.from_json(result.config)
            self.winners[job.entry_name] = config
            if result.provenance and self.save is not None:  # the journal may have outlived the cache
                entry = Entry(config, result.provenance, tunable.version)
                result.stored = bool(self.save(job.entry_name, entry))
        return result

    # -- what searches share -----------------------------------------------------------------------------------------

    def shortlist(self, job: Job, tunable: Tunable) -> tuple[list[LaunchConfig], list[LaunchConfig]]:
        """(every legal configuration, those to measure first)"""
        everything, _ = space.legal(tunable, self.target, job.key)
        if not everything:
            return [], []
        scores = self._scores_near(job)
        most = self.effort.later if scores else self.effort.first
        return everything, space.shortlist(everything, everything[0], most, scores, f"{job.name}{job.key}")

    def _scores_near(self, job: Job) -> dict[LaunchConfig, float]:
        """Relative times at the nearest key of this tunable that was measured."""

        def distance(key: Key) -> int:
            return sum(abs(a.bit_length() - b.bit_length()) + (a != b) for a, b in zip(key, job.key))

        known = self._relative.get(job.name, {})
        same = [key for key in known if len(key) == len(job.key)]
        return known[min(same, key=distance)] if same else {}

    def learn(self, job: Job, times: dict[LaunchConfig, float]) -> None:
        """Let later keys of the job's tunable start from these times."""
        if times:
            best = min(times.values())
            self._relative.setdefault(job.name, {})[job.key] = {config: us / best for config, us in times.items()}

    def _submit_all(self, job: Job) -> None:
        if self.pool is None:
            return
        tunable = registry.get_tunable(job.name)
        if (*job.entry_name, tunable.version) in self.past.finished:
            return
        for config in self.shortlist(job, tunable)[1]:
            self.submit(job, config)

    def submit(self, job: Job, config: LaunchConfig, urgent: bool = False) -> str:
        """Have a candidate compiled; returns the name to wait for. The grid makes no difference to the compiler."""
        name = json.dumps([job.name, job.sizes, job.dtype, replace(config, ctas_per_mp=0).to_text()])
        request = self.target, job.op, job.sizes, job.dtype, job.name, config
        self.pool.submit(name, "candidate", *request, urgent=urgent)
        return name

    def context(self, job: Job) -> list[tuple[str, Key, LaunchConfig]]:
        """(variant, key, configuration): winners of the op's other tunables at these sizes."""
        won = [(variant, key, self.winners.get((job.op, variant, key))) for variant, key in job.beside]
        return [one for one in won if one[2] is not None and one[0] != job.variant]

    def write(self, job: Job, tunable: Tunable, line: dict[str, Any]) -> None:
        """Add a line about a job to the journal."""
        if self.journal is not None:
            stamp = {
                "version": tunable.version,
                "triton": self.facts.get("triton", ""),
                "date": store.today(),
            }
            self.journal.write({**job.to_json(), **stamp, **line})


class _Comparison(NamedTuple):
    """Medians of the heuristic and a candidate in us, what the candidate gains, the noise, and its samples."""

    heuristic: float
    candidate: float
    gain: float
    noise: float
    samples: list[float]


class Search:
    """The search for one job. Keeps which candidates are prepared in the worker, and survives the worker's death."""

    MAX_DEATHS = 6

    def __init__(self, tuner: Tuner, job: Job, tunable: Tunable, until: float) -> None:
        self.tuner, self.job, self.tunable, self.until = tuner, job, tunable, until
        self.effort, self.measurer = tuner.effort, tuner.measurer
        self.coarse: dict[LaunchConfig, float] = {}
        self.failed: dict[LaunchConfig, str] = {}
        self.ids: dict[LaunchConfig, int] = {}
        self.sizes = job.sizes
        self.deaths = 0
        name = (*job.entry_name, tunable.version)
        self._past_failed = tuner.past.failed.get(name, {})
        self._past_coarse = tuner.past.coarse.get(name, {})

    def run(self) -> Result:
        everything, first = self.tuner.shortlist(self.job, self.tunable)
        result = Result(self.job)
        if not first:
            return replace(result, error="no legal configuration")
        asked = self.tuner.clock()
        start, moved = self._open()
        self.until += self.tuner.clock() - asked  # the first look at a shape compiles, and is not the candidates' time
        self._coarse_all([start, *(c for c in first if c != start)])
        if start not in self.coarse:
            return replace(result, error=self._baseline_failed(start))
        for best in sorted(self.coarse, key=self.coarse.__getitem__)[:2]:
            near = [c for c in space.neighbours(everything, best) if c not in self.coarse and c not in self.failed]
            self._coarse_all(near[: self.effort.refine])
        self.tuner.learn(self.job, self.coarse)
        copy_gbs = float(self.tuner.facts.get("copy_gbs") or 0.0)
        result.floor_us = round(moved / copy_gbs / 1000.0, 3) if copy_gbs else 0.0
        self._decide(start, result)
        result.tried, result.failed = len(self.coarse) + len(self.failed), len(self.failed)
        return result

    def _baseline_failed(self, start: LaunchConfig) -> str:
        return f"the baseline cannot be timed: {self.failed.get(start, 'unknown')}"

    def _decide(self, start: LaunchConfig, result: Result) -> None:
        """Final and confirming rounds; stores a winner that passes both, the reference, and other sizes of the key."""
        name, winners = self.job.entry_name, self.tuner.winners
        ranked = sorted((c for c in self.coarse if c != start), key=self.coarse.__getitem__)
        times = self._time_all([start, *ranked[: self.effort.finalists]], self.effort.final_rounds, "final")
        if start not in times:
            result.error = self._baseline_failed(start)
            return
        result.heuristic_us = result.winner_us = round(statistics.median(times[start]), 3)
        result.config = start.to_json()
        winners[name] = start
        for _, _, winner in sorted((statistics.median(t), c.to_text(), c) for c, t in times.items()):
            if winner == start:
                break
            seen = self._compare(start, winner, "confirm")
            if start in self.failed:  # nothing to compare with: no entry, and the run goes on
                result.error = self._baseline_failed(start)
                del winners[name]
                return
            if seen is None:
                continue
            result.heuristic_us, result.winner_us = round(seen.heuristic, 3), round(seen.candidate, 3)
            result.gain, result.noise = round(seen.gain, 5), round(seen.noise, 5)
            if seen.gain <= max(seen.noise, MIN_GAIN):
                break
            if reason := self._verify(winner):
                self._fail(winner, f"wrong result: {reason}")
                continue
            also = self._elsewhere(start, winner)
            if also is not None and also["gain"] <= also["noise"]:
                result.note = f"the best loses at {'x'.join(map(str, also['sizes']))}, which has the same key"
                continue
            result.config, result.note = winner.to_json(), ""
            winners[name] = winner
            self._store(winner, seen.samples, result, also)
            return
        result.winner_us, result.gain = result.heuristic_us, 0.0
        result.note = result.note or "the heuristic stays"
        if self.tuner.discard is not None:
            self.tuner.discard(name, self._entry(start, {"kind": "measured"}))

    def _compare(self, start: LaunchConfig, winner: LaunchConfig, stage: str) -> _Comparison | None:
        """The two interleaved, the heuristic twice; None when one of them cannot be timed."""
        again = self._time_all([start, winner], self.effort.confirm_rounds, stage, twice=start)
        if start not in again or winner not in again:
            return None
        one, two, mine = again[start], again["twice"], again[winner]
        heuristic, best = statistics.median(one + two), statistics.median(mine)
        drift = abs(statistics.median(one) - statistics.median(two)) / heuristic
        noise = max(drift, _half_spread(mine) / best, _half_spread(one) / heuristic)
        return _Comparison(heuristic, best, (heuristic - best) / heuristic, noise, mine)

    def _elsewhere(self, start: LaunchConfig, winner: LaunchConfig) -> dict[str, Any] | None:
        """Sizes, gain and noise at other sizes of the key; None where there are none, or they cannot be measured."""
        sizes = space.elsewhere(self.tunable, self.job.sizes, self.job.key, self.job.dtype)
        if sizes is None:
            return None
        self.sizes, before = sizes, set(self.failed)
        try:
            self._open()
            seen = self._compare(start, winner, "elsewhere")
        except (*REFUSED, ValueError):  # sizes that the op does not take, as channels that no longer divide
            seen = None
        finally:
            self.sizes = self.job.sizes
        for config in set(self.failed) - before:  # what fails there is no finding about these sizes
            if config != winner:
                del self.failed[config]
        found = None
        if winner in self.failed:
            found = {"sizes": list(sizes), "gain": -1.0, "noise": 0.0}
        elif seen is not None:
            found = {"sizes": list(sizes), "gain": round(seen.gain, 4), "noise": round(seen.noise, 4)}
        if found is not None and found["gain"] <= found["noise"]:
            self._open()  # the search goes on at the job's own sizes
        return found

    def _store(self, winner: LaunchConfig, samples: list[float], result: Result, also: dict[str, Any] | None) -> None:
        provenance = {
            "kind": "measured",
            "median_us": result.winner_us,
            "p20": round(_quantile(samples, 0.2), 3),
            "p80": round(_quantile(samples, 0.8), 3),
            "heuristic_us": result.heuristic_us,
            "gain": round(result.gain, 4),
            "noise": round(result.noise, 4),
            "sizes": list(self.job.sizes),
            "dtype": self.job.dtype,
            **({"also": also} if also else {}),
            **{k: self.tuner.facts[k] for k in ("device", "driver", "torch") if k in self.tuner.facts},
        }
        entry = self._entry(winner, provenance)
        result.provenance = dict(entry.provenance)
        if self.tuner.save is not None:
            result.stored = bool(self.tuner.save(self.job.entry_name, entry))
            result.note = "" if result.stored else "not stored: the cache cannot be written"

    def _entry(self, config: LaunchConfig, provenance: dict[str, Any]) -> Entry:
        stamped = {**provenance, "triton": self.tuner.facts.get("triton", ""), "date": store.today()}
        return Entry(config, stamped, self.tunable.version)

    # -- measuring, with a worker that may die -----------------------------------------------------------------------

    def _open(self) -> tuple[LaunchConfig, int]:
        """The baseline and the bytes it moves."""
        self.ids.clear()
        arguments = self.job, self.sizes, self.tuner.context(self.job)
        try:
            return self.measurer.open(*arguments)
        except WorkerDied as death:
            self._count_death(death)
            return self.measurer.open(*arguments)

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
        self.ids.pop(config, None)
        line = {"stage": "failed", "config": config.to_json(), "reason": reason}
        self.tuner.write(self.job, self.tunable, line)

    def _coarse_all(self, configs: list[LaunchConfig]) -> None:
        names = {c: self.tuner.submit(self.job, c, urgent=True) for c in configs} if self.tuner.pool else {}
        for number, config in enumerate(configs):
            if number and self.tuner.clock() > self.until:
                return
            text = json.dumps(config.to_json(), sort_keys=True)
            self.tuner.progress(self.job, f"{number + 1}/{len(configs)} candidates, {len(self.failed)} failed")
            if text in self._past_failed:
                self.failed[config] = self._past_failed[text]
            elif text in self._past_coarse:
                self.coarse[config] = self._past_coarse[text]
            elif config in names and (reason := self._uncompilable(config, names[config])):
                self._fail(config, reason)
            elif samples := self._time_all([config], self.effort.coarse_rounds, "coarse").get(config):
                self.coarse[config] = min(samples)
                self._keep_best()

    def _uncompilable(self, config: LaunchConfig, name: str) -> str:
        """Why a candidate cannot be compiled or exceeds the device, or `""`. Waiting for it takes no search time."""
        asked = self.tuner.clock()
        compiled = self.tuner.pool.wait(name)
        self.until += self.tuner.clock() - asked
        if "error" in compiled:
            return str(compiled["error"])
        if not compiled.get("resources"):
            return ""
        target, shared = self.tuner.target, compiled["resources"].shared
        return backend(target.vendor).illegal(target, config, shared) or ""

    def _keep_best(self) -> None:
        """Hold only the leading candidates in the worker: each one keeps a graph and some tensors alive."""
        if len(self.ids) > 2 * self.effort.finalists:
            ranked = sorted(self.ids, key=lambda c: self.coarse.get(c, 0.0))
            dropped = [self.ids.pop(c) for c in ranked[self.effort.finalists :]]
            try:
                self.measurer.drop(dropped)
            except WorkerDied as death:
                self._reopen(death)

    def _prepare(self, config: LaunchConfig) -> bool:
        if config in self.ids:
            return True
        try:
            self.ids[config] = self.measurer.prepare(config)
            return True
        except REFUSED as error:
            self._fail(config, str(error))
        except WorkerDied as death:
            self._fail(config, f"the worker {death}")
            self._reopen(death)
        return False

    def _time_all(
        self, configs: list[LaunchConfig], rounds: int, stage: str, twice: LaunchConfig | None = None
    ) -> dict:
        """Samples of each configuration that can be timed, interleaved; `twice` is timed as one more arm."""
        while True:
            if twice in self.failed:
                return {}
            prepared = [c for c in configs if c not in self.failed and self._prepare(c)]
            ready = [c for c in prepared if c in self.ids]
            if len(ready) < sum(c not in self.failed for c in configs):
                continue  # a worker that died while it prepared one lost the others
            if not ready:
                return {}
            arms: list[Any] = [*ready, *(["twice"] if twice is not None else [])]
            config_of = {"twice": twice, **{c: c for c in ready}}
            try:
                raw = self.measurer.time([self.ids[config_of[arm]] for arm in arms], rounds)
            except WorkerDied as death:
                self._reopen(death)
                self._find_culprit(ready, death)
                continue
            except REFUSED as error:
                for config in ready:
                    self._fail(config, str(error))
                return {}
            for arm, samples in zip(arms, raw):
                line = {"stage": stage, "config": config_of[arm].to_json(), "us": round(min(samples), 4)}
                line["samples"] = [round(sample, 4) for sample in samples]
                self.tuner.write(self.job, self.tunable, line)
            return dict(zip(arms, raw))

    def _find_culprit(self, configs: list[LaunchConfig], death: WorkerDied) -> None:
        """Time each alone after a group died; the one that dies again is set aside."""
        if len(configs) == 1:
            self._fail(configs[0], f"the worker {death}")
            return
        for config in configs:
            if not self._prepare(config):
                continue
            try:
                self.measurer.time([self.ids[config]], 1)
            except WorkerDied as again:
                self._fail(config, f"the worker {again}")
                self._reopen(again)

    def _verify(self, config: LaunchConfig) -> str:
        try:
            return self.measurer.verify(config)
        except WorkerDied as death:
            self._reopen(death)
            return f"the worker {death}"
        except REFUSED as error:
            return str(error)


def _quantile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _half_spread(samples: list[float]) -> float:
    return (_quantile(samples, 0.8) - _quantile(samples, 0.2)) / 2
