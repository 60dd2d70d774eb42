"""Running jobs: compile ahead, search each, learn from neighbours, keep the journal, stay within the budget."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any, Callable

from .. import registry
from ..backends import LaunchConfig, Target
from ..registry import Entry, Key, Tunable
from . import space, store
from .jobs import Effort, Job, Result
from .journal import Journal, Past
from .remote import WorkerDied, WorkerError
from .search import Search


class Tuner:
    """Runs jobs on one device.

    measurer: `LocalMeasurer`, `RemoteMeasurer` or a fake; pool: compiles ahead (None: nobody does)
    save, discard: called with (name, entry) for a winner, and with what a heuristic that won makes obsolete
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
        budget: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[Job, str], None] = lambda job, text: None,
    ) -> None:
        self.target, self.measurer, self.facts, self.pool = target, measurer, facts, pool
        self.journal, self.past = journal, past or Past(None, "")
        self.save, self.discard, self.effort = save, discard, effort or Effort()
        self.clock, self.progress = clock, progress
        self.deadline = None if budget is None else clock() + budget
        self.winners: dict[tuple[str, str, Key], LaunchConfig] = {}
        self._scores: dict[str, dict[Key, dict[LaunchConfig, float]]] = {}

    def run(self, jobs: list[Job], done: Callable[[Result], None] = lambda result: None) -> list[Result]:
        """Results in the order of `jobs`; `done` is called with each as it is known."""
        for job in jobs[:8]:
            self._submit_all(job)
        results = []
        for number, job in enumerate(jobs):
            if number + 8 < len(jobs):
                self._submit_all(jobs[number + 8])
            began = self.clock()
            limit = self.effort.job_seconds
            if self.deadline is not None:
                left = self.deadline - began
                if left <= 0:
                    results.append(Result(job, note="skipped: the budget is spent"))
                    done(results[-1])
                    continue
                limit = min(limit, max(0.3, 1.5 * left / (len(jobs) - number)))
            result = self._tune(job, began + limit)
            result.seconds = round(self.clock() - began, 3)
            results.append(result)
            done(result)
        return results

    def _tune(self, job: Job, until: float) -> Result:
        tunable = registry.get_tunable(job.name)
        finished = self.past.finished.get((job.op, job.variant, job.key, tunable.kernel_hash()))
        if finished is not None:
            return self._resumed(job, finished)
        try:
            result = Search(self, job, tunable, until).run()
        except (WorkerDied, WorkerError) as error:
            result = Result(job, error=str(error))
        if not result.error:
            self._write(job, tunable, {"stage": "done", "result": result.to_json()})
        if self.journal:
            self.journal.flush()
        return result

    def _resumed(self, job: Job, line: dict[str, Any]) -> Result:
        known = {k: v for k, v in line.get("result", {}).items() if k in Result.__dataclass_fields__ and k != "job"}
        result = Result(job, **known)
        result.note = "measured by an earlier run"
        if result.config:
            config = LaunchConfig.from_json(result.config)
            self.winners[job.op, job.variant, job.key] = config
            if result.provenance and self.save is not None:  # the journal may have outlived the cache
                entry = Entry(config, result.provenance, registry.get_tunable(job.name).kernel_hash())
                result.stored = bool(self.save((job.op, job.variant, job.key), entry))
        return result

    # -- what the search shares ------------------------------------------------------------------------------------

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
        known = self._scores.get(job.name, {})
        same = [key for key in known if len(key) == len(job.key)]
        if not same:
            return {}
        nearest = min(
            same, key=lambda key: sum(abs(a.bit_length() - b.bit_length()) + (a != b) for a, b in zip(key, job.key))
        )
        return known[nearest]

    def learn(self, job: Job, times: dict[LaunchConfig, float]) -> None:
        if times:
            best = min(times.values())
            self._scores.setdefault(job.name, {})[job.key] = {config: us / best for config, us in times.items()}

    def _submit_all(self, job: Job) -> None:
        if self.pool is None:
            return
        tunable = registry.get_tunable(job.name)
        if (job.op, job.variant, job.key, tunable.kernel_hash()) in self.past.finished:
            return
        for config in self.shortlist(job, tunable)[1]:
            self.submit(job, config)

    def submit(self, job: Job, config: LaunchConfig, urgent: bool = False) -> str:
        recipe = json.dumps([job.name, job.sizes, job.dtype, replace(config, ctas_per_mp=0).to_text()])
        self.pool.submit(recipe, [job.op, list(job.sizes), job.dtype, job.variant, config.to_json()], urgent)
        return recipe

    def context(self, job: Job) -> list[list[Any]]:
        """Winners of the op's other tunables at these sizes."""
        found = []
        for variant, key in job.beside:
            config = self.winners.get((job.op, variant, key))
            if config is not None and variant != job.variant:
                found.append([variant, list(key), config.to_json()])
        return found

    def _write(self, job: Job, tunable: Tunable, line: dict[str, Any]) -> None:
        if self.journal is not None:
            head = {
                "op": job.op,
                "variant": job.variant,
                "key": list(job.key),
                "sizes": list(job.sizes),
                "dtype": job.dtype,
                "kernel_hash": tunable.kernel_hash(),
                "triton": self.facts.get("triton", ""),
                "date": store.today(),
            }
            self.journal.write({**head, **line})
