"""The search: from the legal configurations of a tunable to one that beats the heuristic by more than noise.

For each job (one tunable at one key):
    1 a shortlist of candidates is compiled ahead by worker processes, the heuristic first
    2 each is checked and timed briefly (coarse); then the unmeasured neighbours of the best ones
    3 the best few and the heuristic are timed interleaved (final)
    4 the winner and the heuristic, the heuristic twice, are timed once more (confirm): what the two heuristic arms
      differ by, and the spread of each arm, is the noise that the gain must exceed
    5 the whole op with the winner is compared with the reference
    6 the winner and the heuristic are timed at other sizes of the same key: an entry answers for all of them, so it is
      stored only when it beats the heuristic there too (on the H200, 6 entries in 28 did not, one was 20% slower)
Every measurement goes to the journal as it is taken. A candidate that kills or hangs its worker is noted and the search
goes on without it.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..backends import LaunchConfig, backend
from ..registry import Entry, Tunable
from . import space, store
from .jobs import Job, Result
from .remote import WorkerDied, WorkerError

if TYPE_CHECKING:
    from .tuner import Tuner

MIN_GAIN = 0.01
"""A smaller gain is not worth an entry, however quiet the machine."""


class _Seen(NamedTuple):
    """Medians of the heuristic and a candidate in us, what the candidate gains, the noise, and its samples."""

    heuristic: float
    winner: float
    gain: float
    noise: float
    samples: list[float]


class Search:
    """The search for one job. Keeps which candidates are prepared in the worker, and survives the worker's death."""

    MAX_DEATHS = 6

    def __init__(self, tuner: "Tuner", job: Job, tunable: Tunable, until: float) -> None:
        self.tuner, self.job, self.tunable, self.until = tuner, job, tunable, until
        self.effort, self.measurer = tuner.effort, tuner.measurer
        self.coarse: dict[LaunchConfig, float] = {}
        self.failed: dict[LaunchConfig, str] = {}
        self.ids: dict[LaunchConfig, int] = {}
        self.sizes = job.sizes
        self.deaths = 0
        place = (job.op, job.variant, job.key, tunable.kernel_hash())
        self._past_failed = tuner.past.failed.get(place, {})
        self._past_coarse = tuner.past.coarse.get(place, {})

    def run(self) -> Result:
        everything, first = self.tuner.shortlist(self.job, self.tunable)
        result = Result(self.job)
        if not first:
            return replace(result, error="no legal configuration")
        asked = self.tuner.clock()
        opened = self._open()
        self.until += self.tuner.clock() - asked  # the first look at a shape compiles, and is not the candidates' time
        if "error" in opened:
            return replace(result, error=opened["error"])
        start = LaunchConfig.from_json(opened["baseline"])
        first = [start, *(c for c in first if c != start)]
        self._coarse_all(first)
        if start not in self.coarse:
            return replace(result, error=f"the baseline cannot be timed: {self.failed.get(start, 'unknown')}")
        for best in sorted(self.coarse, key=self.coarse.__getitem__)[:2]:
            near = [c for c in space.neighbours(everything, best) if c not in self.coarse and c not in self.failed]
            self._coarse_all(near[: self.effort.refine])
        self.tuner.learn(self.job, self.coarse)
        gbs = float(self.tuner.facts.get("copy_gbs") or 0.0)
        result.floor_us = round(opened.get("bytes", 0) / gbs / 1000.0, 3) if gbs else 0.0
        self._decide(start, result)
        result.tried, result.failed = len(self.coarse) + len(self.failed), len(self.failed)
        return result

    def _decide(self, start: LaunchConfig, result: Result) -> None:
        """Final and confirming rounds; stores a winner that passes both and the reference."""
        ranked = sorted((c for c in self.coarse if c != start), key=self.coarse.__getitem__)
        finalists = [start, *ranked[: self.effort.finalists]]
        times = self._time_all(finalists, self.effort.final_rounds, "final")
        if start not in times:
            result.error = f"the baseline cannot be timed: {self.failed.get(start, 'unknown')}"
            return
        result.heuristic_us = result.winner_us = round(statistics.median(times[start]), 3)
        result.config = start.to_json()
        self.tuner.winners[self.job.op, self.job.variant, self.job.key] = start
        medians = sorted((statistics.median(t), c.to_text(), c) for c, t in times.items())
        for _, _, winner in medians:
            if winner == start:
                break
            seen = self._compare(start, winner, "confirm")
            if start in self.failed:  # nothing to compare with: no entry, and the run goes on
                result.error = f"the baseline cannot be timed: {self.failed[start]}"
                del self.tuner.winners[self.job.op, self.job.variant, self.job.key]
                return
            if seen is None:
                continue
            result.heuristic_us, result.winner_us = round(seen.heuristic, 3), round(seen.winner, 3)
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
            self.tuner.winners[self.job.op, self.job.variant, self.job.key] = winner
            self._store(winner, seen.samples, result, also)
            return
        result.winner_us, result.gain = result.heuristic_us, 0.0
        result.note = result.note or "the heuristic stays"
        if self.tuner.discard is not None:
            self.tuner.discard((self.job.op, self.job.variant, self.job.key), self._entry(start, {"kind": "measured"}))

    def _compare(self, start: LaunchConfig, winner: LaunchConfig, stage: str) -> "_Seen | None":
        """The two interleaved, the heuristic twice; None when one of them cannot be timed."""
        again = self._time_all([start, winner], self.effort.confirm_rounds, stage, twice=start)
        if start not in again or winner not in again:
            return None
        one, two, mine = again[start], again["twice"], again[winner]
        heuristic, best = statistics.median(one + two), statistics.median(mine)
        apart = abs(statistics.median(one) - statistics.median(two)) / heuristic
        noise = max(apart, _half_spread(mine) / best, _half_spread(one) / heuristic)
        return _Seen(heuristic, best, (heuristic - best) / heuristic, noise, mine)

    def _elsewhere(self, start: LaunchConfig, winner: LaunchConfig) -> dict[str, Any] | None:
        """Sizes, gain and noise at other sizes of the key; None where the key has no others, or they cannot be measured."""
        job = self.job
        sizes = space.elsewhere(self.tunable, job.sizes, job.key, job.dtype)
        if sizes is None:
            return None
        self.sizes, before = sizes, set(self.failed)
        try:
            seen = None if "error" in self._open() else self._compare(start, winner, "elsewhere")
        except (WorkerError, ValueError):  # sizes that the op does not take, as channels that no longer divide
            seen = None
        finally:
            self.sizes = job.sizes
        for config in set(self.failed) - before:  # what fails there is no finding about these sizes
            if config != winner:
                del self.failed[config]
        if winner in self.failed:
            found: dict[str, Any] | None = {"sizes": list(sizes), "gain": -1.0, "noise": 0.0}
        else:
            found = seen and {"sizes": list(sizes), "gain": round(seen.gain, 4), "noise": round(seen.noise, 4)}
        if found is not None and found["gain"] <= found["noise"]:
            self._open()  # the search goes on where it was
        return found

    def _store(self, winner: LaunchConfig, samples: list[float], result: Result, also: dict[str, Any] | None) -> None:
        low, high = _quantile(samples, 0.2), _quantile(samples, 0.8)
        facts = {k: self.tuner.facts[k] for k in ("device", "driver", "torch") if k in self.tuner.facts}
        provenance = {
            "kind": "measured",
            "median_us": result.winner_us,
            "p20": round(low, 3),
            "p80": round(high, 3),
            "heuristic_us": result.heuristic_us,
            "gain": round(result.gain, 4),
            "noise": round(result.noise, 4),
            "sizes": list(self.job.sizes),
            "dtype": self.job.dtype,
            **({"also": also} if also else {}),
            **facts,
        }
        entry = self._entry(winner, provenance)
        result.provenance = dict(entry.provenance)
        if self.tuner.save is not None:
            result.stored = bool(self.tuner.save((self.job.op, self.job.variant, self.job.key), entry))
            result.note = "" if result.stored else "not stored: the cache cannot be written"

    def _entry(self, config: LaunchConfig, provenance: dict[str, Any]) -> Entry:
        stamped = {**provenance, "triton": self.tuner.facts.get("triton", ""), "date": store.today()}
        return Entry(config, stamped, self.tunable.kernel_hash())

    # -- measuring, with a worker that may die -----------------------------------------------------------------------

    def _open(self) -> dict[str, Any]:
        self.ids.clear()
        job = self.job
        arguments = (job.op, list(self.sizes), job.dtype, job.variant, list(job.key), self.tuner.context(job))
        try:
            return self.measurer.open(*arguments)
        except WorkerDied as death:
            self._count_death(death)
            return self.measurer.open(*arguments)

    def _count_death(self, death: WorkerDied) -> None:
        self.deaths += 1
        if self.deaths > self.MAX_DEATHS:
            raise WorkerDied(f"gave up after {self.deaths} dead workers; the last {death}")

    def _coarse_all(self, configs: list[LaunchConfig]) -> None:
        recipes = {c: self.tuner.submit(self.job, c, urgent=True) for c in configs} if self.tuner.pool else {}
        for number, config in enumerate(configs):
            if number and self.tuner.clock() > self.until:
                return
            text = json.dumps(config.to_json(), sort_keys=True)
            self.tuner.progress(self.job, f"{number + 1}/{len(configs)} candidates, {len(self.failed)} failed")
            if text in self._past_failed:
                self.failed[config] = self._past_failed[text]
            elif text in self._past_coarse:
                self.coarse[config] = self._past_coarse[text]
            elif config in recipes and (reason := self._uncompilable(config, recipes[config])):
                self._fail(config, reason)
            else:
                self._coarse_one(config)

    def _uncompilable(self, config: LaunchConfig, recipe: str) -> str:
        """Why a candidate cannot be compiled or exceeds the device, or `""`. Waiting for a compiler is not its fault."""
        asked = self.tuner.clock()
        compiled = self.tuner.pool.wait(recipe)
        self.until += self.tuner.clock() - asked
        if "error" in compiled:
            return str(compiled["error"])
        shared = compiled.get("resources", {}).get("shared")
        if shared is None:
            return ""
        return backend(self.tuner.target.vendor).illegal(self.tuner.target, config, shared) or ""

    def _coarse_one(self, config: LaunchConfig) -> None:
        samples = self._time_all([config], self.effort.coarse_rounds, "coarse").get(config)
        if samples:
            self.coarse[config] = min(samples)
            self._keep_best()

    def _keep_best(self) -> None:
        """Hold only the leading candidates in the worker: each one keeps a graph and some tensors alive."""
        if len(self.ids) > 2 * self.effort.finalists:
            ranked = sorted(self.ids, key=lambda c: self.coarse.get(c, 0.0))
            dropped = ranked[self.effort.finalists :]
            self._call("drop", [self.ids.pop(c) for c in dropped])

    def _prepare(self, config: LaunchConfig) -> bool:
        if config in self.ids:
            return True
        try:
            answer = self.measurer.prepare(config.to_json())
        except WorkerDied as death:
            self._fail(config, f"the worker {death}")
            self._count_death(death)
            self._open()
            return False
        except WorkerError as error:
            self._fail(config, str(error))
            return False
        if "rejected" in answer:
            self._fail(config, answer["rejected"])
            return False
        self.ids[config] = answer["id"]
        return True

    def _time_all(
        self, configs: list[LaunchConfig], rounds: int, stage: str, twice: LaunchConfig | None = None
    ) -> dict:
        """Samples of each configuration that can be timed, interleaved; `twice` is timed as one more arm."""
        while True:
            if twice in self.failed:
                return {}
            ready = [c for c in configs if c not in self.failed and self._prepare(c)]
            ready = [c for c in ready if c in self.ids]  # a worker that died lost the others
            if len(ready) < len([c for c in configs if c not in self.failed]):
                continue
            if not ready:
                return {}
            arms: list[Any] = [*ready, *(["twice"] if twice is not None else [])]
            try:
                raw = self.measurer.time([self.ids[twice if arm == "twice" else arm] for arm in arms], rounds)
            except WorkerDied as death:
                self._count_death(death)
                self._open()
                self._find_culprit(ready, death)
                continue
            except WorkerError as error:
                for config in ready:
                    self._fail(config, str(error))
                return {}
            for arm, samples in zip(arms, raw):
                config = twice if arm == "twice" else arm
                line = {
                    "config": config.to_json(),
                    "us": round(min(samples), 4),
                    "samples": [round(s, 4) for s in samples],
                }
                self.tuner._write(self.job, self.tunable, {"stage": stage, **line})
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
                self._count_death(again)
                self._open()

    def _verify(self, config: LaunchConfig) -> str:
        try:
            return self.measurer.verify(config.to_json())
        except WorkerDied as death:
            self._count_death(death)
            self._open()
            return f"the worker {death}"
        except WorkerError as error:
            return str(error)

    def _call(self, name: str, *args: Any) -> None:
        try:
            getattr(self.measurer, name)(*args)
        except WorkerDied as death:
            self._count_death(death)
            self._open()

    def _fail(self, config: LaunchConfig, reason: str) -> None:
        self.failed[config] = reason
        self.coarse.pop(config, None)
        self.ids.pop(config, None)
        line = {"stage": "failed", "config": config.to_json(), "reason": reason}
        self.tuner._write(self.job, self.tunable, line)


def _quantile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _half_spread(samples: list[float]) -> float:
    return (_quantile(samples, 0.8) - _quantile(samples, 0.2)) / 2
