"""The configurations to try for a tunable at a key, and problem sizes that have the key."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from ..backends import LaunchConfig, Target
from ..registry import Key, Op, Tunable

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
_ITEMSIZES = {**{dtype: itemsize for itemsize, dtype in DTYPES.items()}, "float16": 2}


def legal(tunable: Tunable, target: Target, key: Key) -> tuple[list[LaunchConfig], Counter]:
    """(every legal configuration of the space, the heuristic first if legal; counts of the reasons for refusals)"""
    refused: Counter = Counter()
    configs: dict[LaunchConfig, None] = {}
    for config in (tunable.heuristic(target, key), *tunable.space(target, key)):
        reason = tunable.illegal(target, key, config)
        if reason is None:
            configs[config] = None
        else:
            refused[reason] += 1
    return list(configs), refused


def options(config: LaunchConfig) -> dict[str, Any]:
    data = config.to_json()
    return {**data.pop("blocks"), **data.pop("vendor"), **data}


def distance(a: LaunchConfig, b: LaunchConfig) -> int:
    """Number of options that differ."""
    first, second = options(a), options(b)
    return sum(first.get(name) != second.get(name) for name in {*first, *second})


def neighbours(space: Iterable[LaunchConfig], config: LaunchConfig) -> list[LaunchConfig]:
    """Configurations that differ from `config` in one option."""
    return [other for other in space if distance(other, config) == 1]


def shortlist(
    space: Sequence[LaunchConfig], start: LaunchConfig, limit: int, scores: Mapping[LaunchConfig, float], seed: str
) -> list[LaunchConfig]:
    """At most `limit` configurations to measure first, beginning with `start`.

    scores: relative times (1.0 is the best) of configurations at a neighbouring key. With scores, up to two thirds of
    the list have the best scores, and neighbours of the best follow. Without, half are neighbours of `start`. The rest
    is random.
    """
    if len(space) <= limit:
        return [start, *(c for c in space if c != start)]
    shuffler = random.Random(seed)
    chosen: dict[LaunchConfig, None] = {start: None}
    known = sorted((c for c in space if c in scores), key=lambda c: scores[c])
    if known:
        chosen.update(dict.fromkeys(known[: limit * 2 // 3]))
        near = neighbours(space, known[0])
    else:
        near = neighbours(space, start)
        shuffler.shuffle(near)
        near = near[: limit // 2]
    for config in near:
        if len(chosen) < limit:
            chosen[config] = None
    rest = [c for c in space if c not in chosen]
    shuffler.shuffle(rest)
    chosen.update(dict.fromkeys(rest[: limit - len(chosen)]))
    return list(chosen)


def other_sizes(tunable: Tunable, sizes: Sequence[int], key: Key, dtype: str) -> tuple[int, ...] | None:
    """Other problem sizes that have `key`, or None.

    Each size from 1024 on is multiplied by the first of 5/8, 3/4 and 7/8 that keeps the key, and rounded down to a
    multiple of 64. Smaller sizes (batches, heads, head widths) are the same in most models and stay.
    """
    itemsize = _ITEMSIZES[dtype]
    other = tuple(sizes)
    for position, size in enumerate(sizes):
        for share in (0.625, 0.75, 0.875) if size >= 1024 else ():
            trial = (*other[:position], int(size * share) // 64 * 64, *other[position + 1 :])
            if _key(tunable, trial, itemsize) == key:
                other = trial
                break
    return None if other == tuple(sizes) else other


def sizes_for(op: Op, tunable: Tunable, key: Key) -> tuple[tuple[int, ...], str] | None:
    """(problem sizes, dtype) that have this key, found by trial, or None. For a recorded miss, which has only a key.

    The guesses are the op's workloads with other row counts, and products of the key's numbers, each as it is and as a
    power of two (keys have rows as log2 buckets). If none has the key, the same with other columns: one less (unaligned
    rows), a quarter more (no power of two), both, and half.
    """
    numbers = {1, *key, *(1 << n for n in key if 0 <= n <= 24)}
    usable = sorted((n for n in numbers if n > 0), reverse=True)[:12]
    guesses: list[tuple[int, ...]] = []
    for sizes in op.workloads.values():
        guesses += [(max(1, sizes[0] * factor // 64), *sizes[1:]) for factor in (64, 1, 2, 4, 8, 16, 32, 128, 256, 512)]
    batch = (1,) if tunable.dims[:1] == ("batch",) and len(tunable.dims) > 4 else ()
    if len(tunable.dims) - len(batch) <= 4:
        guesses += [batch + rest for rest in itertools.product(usable, repeat=len(tunable.dims) - len(batch))]
    widths = (lambda n: n, lambda n: n - 1, lambda n: n + n // 4, lambda n: n + n // 4 - 1, lambda n: n // 2)
    for itemsize, dtype in sorted(DTYPES.items(), key=lambda item: (item[0] not in key, item[0] != 2)):
        for width in widths:
            for *rest, columns in guesses:
                if _key(tunable, (*rest, width(columns)), itemsize) == key:
                    return (*rest, width(columns)), dtype
    return None


def _key(tunable: Tunable, sizes: tuple[int, ...], itemsize: int) -> Key | None:
    """The tunable's key at these sizes, or None for sizes that it does not take."""
    try:
        return tunable.key(*sizes, itemsize)
    except (ValueError, ArithmeticError):
        return None
