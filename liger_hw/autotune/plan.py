"""From what the user asked for to jobs: every tunable and key once, measured at one of the sizes that have the key."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable, Mapping

from .. import registry
from ..backends import LaunchConfig, Target
from ..registry import Key
from . import models, space
from .jobs import Job

Sizes = tuple[int, ...]
Scan = Callable[[str, Sizes, str], list[tuple[str, Key]]]
"""(op, sizes, dtype) -> (`op.variant`, key) of every launch there, of the op's own kernels and of those it shares."""


def shapes(
    ops: Iterable[str], chosen: list[models.Model], batches: list[int], seqs: list[int], given: list[Sizes]
) -> list[tuple[str, Sizes]]:
    """(op, sizes) of the models at every batch and sequence length, and the given sizes for ops that take as many.

    Without models and sizes: each op's own workloads.
    """
    found: dict[tuple[str, Sizes], None] = {}
    for name in ops:
        op = registry.get_op(name)
        for sizes in given:
            if len(sizes) == len(op.tunables[0].dims):
                found[name, sizes] = None
        for model in chosen:
            for batch in batches:
                for seq in seqs:
                    found.update({(name, sizes): None for sizes in models.sizes_of(name, model, batch, seq)})
        if not chosen and not given:
            found.update({(name, tuple(sizes)): None for sizes in op.workloads.values()})
    return list(found)


def jobs(wanted: list[tuple[str, Sizes]], dtype: str, scan: Scan) -> tuple[list[Job], list[str]]:
    """(jobs, what could not be planned). Within an op, sizes near 8192 rows come first: the rest starts from their winners.

    A kernel that an op shares with another (a loss's sums, the scaling of its gradients) is tuned as that other op's, at
    sizes of it that have the key.
    """
    best: dict[tuple[str, str, Key], Sizes] = {}
    shared: dict[tuple[str, str, Key], None] = {}
    beside: dict[tuple[str, Sizes], tuple[tuple[str, Key], ...]] = {}
    problems = []
    for op, sizes in wanted:
        try:
            launched = scan(op, sizes, dtype)
        except Exception as error:
            problems.append(f"{op} at {'x'.join(map(str, sizes))}: {type(error).__name__}: {error}")
            continue
        parted = [(*name.split("."), key) for name, key in launched]
        shared.update({place: None for place in parted if place[0] != op})
        beside[op, sizes] = tuple((variant, key) for owner, variant, key in parted if owner == op)
        for variant, key in beside[op, sizes]:
            place = (op, variant, key)
            if place not in best or _weight(sizes) > _weight(best[place]):
                best[place] = sizes
    found = []
    for op, sizes in sorted(
        beside, key=lambda item: (list(dict.fromkeys(o for o, _ in wanted)).index(item[0]), _order(item[1]))
    ):
        for variant, key in beside[op, sizes]:
            if best[op, variant, key] == sizes:
                found.append(Job(op, variant, key, sizes, dtype, beside[op, sizes]))
    for op, variant, key in (place for place in shared if place not in best):
        guess = space.sizes_for(registry.get_op(op), registry.get_tunable(f"{op}.{variant}"), key)
        if guess is None:
            problems.append(f"{op}.{variant} {key}: no sizes of {op} have this key; tune it with --shapes")
        else:
            found.append(Job(op, variant, key, *guess))
    return found, problems


def _rows(sizes: Sizes) -> int:
    return sizes[0] if len(sizes) < 4 else sizes[0] * sizes[1]


def _order(sizes: Sizes) -> tuple:
    return sizes[2:] if len(sizes) >= 4 else sizes[1:], abs(_rows(sizes).bit_length() - 14), sizes


def _weight(sizes: Sizes) -> tuple:
    """Which of the sizes that share a key it is measured at: the largest up to 8192 rows, else the smallest above."""
    few = _rows(sizes) <= 8192
    return few, math.prod(sizes) if few else -_rows(sizes), math.prod(sizes)


def from_misses(misses: Iterable[tuple[str, str, Key]], ops: Iterable[str]) -> tuple[list[Job], list[str]]:
    """Jobs for recorded misses. A miss holds a key only; sizes that have it are found by trial (`space.sizes_for`)."""
    wanted, known = set(ops), registry.tunables()
    found, problems = [], []
    for op, variant, key in misses:
        if op not in wanted:
            continue
        tunable = known.get(f"{op}.{variant}")
        if tunable is None:
            problems.append(f"{op}.{variant}: this version has no such tunable")
            continue
        guess = space.sizes_for(registry.get_op(op), tunable, key)
        if guess is None:
            problems.append(f"{op}.{variant} {key}: no sizes found for this key; tune it with --shapes")
        else:
            found.append(Job(op, variant, key, *guess))
    return found, problems


def traced(target: Target) -> Scan:
    """Finds what an op launches without the device, by running its launchers on meta tensors."""

    def scan(op: str, sizes: Sizes, dtype: str) -> list[tuple[str, Key]]:
        return list(dict.fromkeys((launch.tunable, launch.key) for launch in trace(op, sizes, dtype, target)))

    return scan


def trace(
    op: str, sizes: Sizes, dtype: str, target: Target, configs: Mapping[str, LaunchConfig] | None = None
) -> list[Any]:
    """`compile.trace` without stored tables."""
    import torch

    from . import compile as aot

    return aot.trace(op, sizes, getattr(torch, dtype), target, configs=configs, shipped=False)


def measured(measurer: Any) -> Scan:
    """Finds what an op launches by running it in the measuring worker."""

    def scan(op: str, sizes: Sizes, dtype: str) -> list[tuple[str, Key]]:
        return [(f"{op}.{variant}", tuple(key)) for variant, key in measurer.scan(op, list(sizes), dtype)]

    return scan


def either(first: Scan, second: Scan) -> Scan:
    """`first`, or `second` for what `first` cannot do."""

    def scan(op: str, sizes: Sizes, dtype: str) -> list[tuple[str, Key]]:
        try:
            return first(op, sizes, dtype)
        except Exception:
            return second(op, sizes, dtype)

    return scan
