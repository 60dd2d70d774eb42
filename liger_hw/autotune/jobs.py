"""Makes the tuner's jobs from ops, models and shapes. A job is a tunable at one key, with problem sizes of that key."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Iterable, Iterator

from .. import registry
from ..backends import Target
from ..registry import Key, Plan
from . import models, space
from .models import Sizes


@dataclass(frozen=True)
class Job:
    """One tunable at one key, measured at `sizes`."""

    op: str
    variant: str
    key: Key
    sizes: Sizes
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.op}.{self.variant}"

    @property
    def entry_name(self) -> tuple[str, str, Key]:
        return self.op, self.variant, self.key

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


OUT_OF_BUDGET = "skipped: the budget is spent"
"""`Result.note` of a job that was not begun."""


@dataclass
class Result:
    """The result of a job. Times are microseconds.

    config: the winner, or the heuristic if nothing beats it; floor_us: time of copying as many bytes as it moves
    evidence: of `StaticTuner`: certificates, and why candidates were dropped
    """

    job: Job
    heuristic_us: float = 0.0
    winner_us: float = 0.0
    gain: float = 0.0
    noise: float = 0.0
    floor_us: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    stored: bool = False
    tried: int = 0
    failed: int = 0
    seconds: float = 0.0
    note: str = ""
    error: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def floor_share(self) -> float:
        """`floor_us` over the winner's time; above 1 if bytes come from cache."""
        return self.floor_us / self.winner_us if self.winner_us else 0.0

    def to_json(self) -> dict[str, Any]:
        data = {k: v for k, v in vars(self).items() if k != "job"}
        return {**self.job.to_json(), **data, "floor_share": round(self.floor_share, 4)}


def run_each(jobs: list[Job], choose: Callable[[int, float], Result], budget: float | None) -> Iterator[Result]:
    """`choose(number of a job, seconds left)` for each job, in order; after `budget` seconds no job is begun."""
    deadline = time.monotonic() + (math.inf if budget is None else budget)
    for number, job in enumerate(jobs):
        began = time.monotonic()
        if began >= deadline:
            yield Result(job, note=OUT_OF_BUDGET)
            continue
        result = choose(number, deadline - began)
        result.seconds = round(time.monotonic() - began, 3)
        yield result


def launched(op: str, sizes: Sizes, dtype: str, target: Target) -> list[tuple[str, Key]]:
    """(`op.variant`, key) of every launch of an op on `target`, including launches of other ops' kernels."""
    import torch

    from .record import trace_launches

    plans: list[Plan] = []
    trace_launches(op, sizes, getattr(torch, dtype), target, lambda plan, *_: plans.append(plan))
    return list(dict.fromkeys((plan.tunable.name, plan.key) for plan in plans))


def shapes(
    ops: Iterable[str], chosen: list[models.Model], batches: list[int], seqs: list[int], more: list[Sizes]
) -> list[tuple[str, Sizes]]:
    """(op, sizes) of the models at every batch and sequence length, and `more` sizes for each op that takes as many
    numbers. Without models and `more`: each op's workloads."""
    pairs: dict[tuple[str, Sizes], None] = {}
    for name in ops:
        op = registry.get_op(name)
        sizes_of_op = [sizes for sizes in more if len(sizes) == len(op.tunables[0].dims)]
        for model in chosen:
            for batch in batches:
                for seq in seqs:
                    sizes_of_op += models.sizes_of(name, model, batch, seq)
        if not chosen and not more:
            sizes_of_op = [tuple(sizes) for sizes in op.workloads.values()]
        pairs.update({(name, sizes): None for sizes in sizes_of_op})
    return list(pairs)


def from_shapes(pairs: list[tuple[str, Sizes]], dtype: str, target: Target) -> tuple[list[Job], list[str]]:
    """(jobs, errors) for (op, sizes) pairs.

    Within an op, sizes near 8192 rows come first, since the searches at other sizes start from their winners. A kernel
    of another op is tuned in that op, at sizes with the same key.
    """
    best: dict[tuple[str, str, Key], Sizes] = {}
    of_other_ops: dict[tuple[str, str, Key], None] = {}
    problems = []
    for op, sizes in pairs:
        try:
            names = launched(op, sizes, dtype, target)
        except Exception as error:
            problems.append(f"{op} at {'x'.join(map(str, sizes))}: {type(error).__name__}: {error}")
            continue
        for full_name, key in names:
            name = (*full_name.split("."), key)
            if name[0] != op:
                of_other_ops[name] = None
            elif name not in best or _preference(sizes) > _preference(best[name]):
                best[name] = sizes
    order = list(dict.fromkeys(op for op, _ in pairs))
    jobs = [Job(*name, sizes, dtype) for name, sizes in best.items()]
    jobs.sort(key=lambda job: (order.index(job.op), _position(job.sizes)))
    more, more_problems = at_keys(name for name in of_other_ops if name not in best)
    return jobs + more, problems + more_problems


def at_keys(names: Iterable[tuple[str, str, Key]]) -> tuple[list[Job], list[str]]:
    """(jobs, errors) for (op, variant, key) names, such as recorded misses, at sizes from `space.sizes_for`."""
    known = registry.tunables()
    jobs, problems = [], []
    for op, variant, key in names:
        if (tunable := known.get(f"{op}.{variant}")) is None:
            problems.append(f"{op}.{variant}: this version has no such tunable")
        elif guess := space.sizes_for(registry.get_op(op), tunable, key):
            jobs.append(Job(op, variant, key, *guess))
        else:
            problems.append(f"{op}.{variant} {key}: no sizes known for this key; tune it with --shapes")
    return jobs, problems


def _rows(sizes: Sizes) -> int:
    return sizes[0] if len(sizes) < 4 else sizes[0] * sizes[1]


def _position(sizes: Sizes) -> tuple:
    """Sort key of an op's sizes: by width, then by the distance from 8192 rows."""
    return sizes[2:] if len(sizes) >= 4 else sizes[1:], abs(_rows(sizes).bit_length() - 14), sizes


def _preference(sizes: Sizes) -> tuple:
    """Sort key, greatest for the sizes at which a key is measured: the largest up to 8192 rows, else the smallest."""
    fits = _rows(sizes) <= 8192
    return fits, math.prod(sizes) if fits else -_rows(sizes), math.prod(sizes)
