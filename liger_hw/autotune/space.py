"""Which configurations to try, and at which problem sizes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from ..backends import LaunchConfig, Target
from ..registry import Key, Op, Tunable

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
_ITEMSIZES = (*DTYPES.items(), (2, "float16"))


def legal(tunable: Tunable, target: Target, key: Key) -> tuple[list[LaunchConfig], Counter]:
    """(the heuristic, then every other legal configuration of the space, each once; how often each reason refused one)."""
    refused: Counter = Counter()
    found: dict[LaunchConfig, None] = {}
    for config in (tunable.heuristic(target, key), *tunable.space(target, key)):
        reason = tunable.illegal(target, key, config)
        if reason is None:
            found[config] = None
        else:
            refused[reason] += 1
    return list(found), refused


def knobs(config: LaunchConfig) -> dict[str, Any]:
    data = config.to_json()
    return {**data.pop("blocks"), **data.pop("vendor"), **data}


def distance(a: LaunchConfig, b: LaunchConfig) -> int:
    """Number of knobs that differ."""
    one, other = knobs(a), knobs(b)
    return sum(one.get(name) != other.get(name) for name in {*one, *other})


def neighbours(space: Iterable[LaunchConfig], config: LaunchConfig) -> list[LaunchConfig]:
    """Configurations that differ from `config` in one knob."""
    return [other for other in space if distance(other, config) == 1]


def shortlist(
    space: Sequence[LaunchConfig], start: LaunchConfig, most: int, scores: Mapping[LaunchConfig, float], seed: str
) -> list[LaunchConfig]:
    """At most `most` configurations to measure first; `start` leads.

    scores: relative times (1.0 is the best) of configurations at neighbouring keys. With scores, two thirds of the list
    are the best known and the rest are new; without, half are `start`'s neighbours and the rest are spread over the space.
    """
    if len(space) <= most:
        return [start, *(c for c in space if c != start)]
    chances = random.Random(seed)
    chosen: dict[LaunchConfig, None] = {start: None}
    known = sorted((c for c in space if c in scores), key=lambda c: scores[c])
    if known:
        chosen.update(dict.fromkeys(known[: most * 2 // 3]))
        near = neighbours(space, known[0])
    else:
        near = neighbours(space, start)
        chances.shuffle(near)
        near = near[: most // 2]
    for config in near:
        if len(chosen) < most:
            chosen[config] = None
    rest = [c for c in space if c not in chosen]
    chances.shuffle(rest)
    chosen.update(dict.fromkeys(rest[: most - len(chosen)]))
    return list(chosen)


def elsewhere(tunable: Tunable, sizes: Sequence[int], key: Key, dtype: str) -> tuple[int, ...] | None:
    """Other problem sizes that have `key`; None without any.

    Sizes from 1024 on become about 5/8, 3/4 or 7/8 of what they are, whichever first keeps the key, in multiples of 64;
    smaller ones (batches, heads, head widths) stay, since models agree on them.
    """
    itemsize = next(size for size, name in _ITEMSIZES if name == dtype)
    found = tuple(sizes)
    for place, size in enumerate(sizes):
        for share in (0.625, 0.75, 0.875) if size >= 1024 else ():
            tried = (*found[:place], int(size * share) // 64 * 64, *found[place + 1 :])
            try:
                same = tunable.key(*tried, itemsize) == key
            except (ValueError, ArithmeticError):
                same = False
            if same:
                found = tried
                break
    return None if found == tuple(sizes) else found


def sizes_for(op: Op, tunable: Tunable, key: Key) -> tuple[tuple[int, ...], str] | None:
    """(problem sizes, dtype) that have this key, found by trying the numbers in it; None where none are found.

    A recorded miss holds a key only. Row counts are stored as log2 buckets and column counts as they are, so each number
    of the key stands for itself or for a power of two; the largest sizes of a bucket are taken. Then the same with rows
    that begin anywhere (one column less), that need a second piece (a quarter more), both, and two sums side by side.
    """
    numbers = {1, *key, *(1 << n for n in key if 0 <= n <= 24)}
    usable = sorted((n for n in numbers if n > 0), reverse=True)[:12]
    guesses: list[tuple[int, ...]] = []
    for sizes in op.workloads.values():
        guesses += [(max(1, sizes[0] * factor // 64), *sizes[1:]) for factor in (64, 1, 2, 4, 8, 16, 32, 128, 256, 512)]
    batch = (1,) if tunable.dims[:1] == ("batch",) and len(tunable.dims) > 4 else ()
    if len(tunable.dims) - len(batch) <= 4:
        guesses += [batch + rest for rest in itertools.product(usable, repeat=len(tunable.dims) - len(batch))]
    for itemsize, dtype in sorted(DTYPES.items(), key=lambda item: (item[0] not in key, item[0] != 2)):
        for widen in (lambda n: n, lambda n: n - 1, lambda n: n + n // 4, lambda n: n + n // 4 - 1, lambda n: n // 2):
            for *rest, columns in guesses:
                sizes = (*rest, widen(columns))
                try:
                    if tunable.key(*sizes, itemsize) == key:
                        return sizes, dtype
                except (ValueError, ArithmeticError):
                    continue
    return None
