"""How the rows of a linear head are divided into chunks, so that only one chunk's logits exist at a time.

Memory. With LIGER_HW_LOSS_MEMORY_MIB set, a chunk has as many rows as fit beside the gradients. Unset, it has as many
as fit 1 GiB together with the weight's gradient, or a third of that gradient's size where this is more. A chunk has at
least MIN_ROWS rows (twice that where every chunk reads and writes an fp32 weight gradient), and at most MAX_ROWS, or
rows whose logits take no more memory than the gradient of x. Divergences (`prefer_large`) may have MAX_ROWS_DIVERGENCE
rows, and with one head as much memory as the weight's gradient.

Precision. A 16-bit weight gradient is rounded once a chunk. The promise is an error within 1.5 times the error of one
GEMM over all rows, hence at most MAX_CHUNKS chunks for a loss without targets. A running sum alone breaks the promise
for losses with targets; those have the targets' entries accumulated separately (`head_targets.py`) when there are more
than MAX_PLAIN_CHUNKS chunks, and have at most MAX_CHUNKS_WITH_TARGETS (benchmarks/rounding.py). Where memory asks for
more chunks than that, they grow instead, or the gradient is accumulated in an fp32 buffer if that takes less memory.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Sequence

import torch

from ... import env
from ...registry import backend_of
from ...runtime.operator import cdiv
from .head_targets import most_frequent

MIN_ROWS = 1024
MAX_ROWS = 4096
MAX_ROWS_DIVERGENCE = 8192
DEFAULT_MIB = 1024
STEP = 256
"""Rows. Chunks are multiples of it."""
MAX_PLAIN_CHUNKS = 2
MAX_CHUNKS = 4
MAX_CHUNKS_WITH_TARGETS = 8


class Chunks(NamedTuple):
    """How a head's rows are divided.

    bounds: (start, stop) of each chunk
    wide: the weight gradient is accumulated in an fp32 buffer
    borrowed: both heads' fp32 logits of the first chunk lie in the memory of the weight's gradient
    """

    bounds: tuple[tuple[int, int], ...]
    wide: bool = False
    borrowed: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of all chunks."""
        return self.bounds[-1][1] if self.bounds else 0

    @property
    def rows(self) -> int:
        """Rows of the largest chunk."""
        return max((stop - start for start, stop in self.bounds), default=0)

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]], wide: bool = False) -> Chunks:
        """Chunks at the caller's own boundaries."""
        return cls(tuple(bounds), wide)


def plan_chunks(
    n_rows: int,
    hidden: int,
    vocab: int,
    itemsize: int,
    *,
    gradients: bool = True,
    wide: bool = False,
    with_targets: bool = False,
    scale: int = 1,
    heads: int = 1,
    prefer_large: bool = False,
    device: torch.device | None = None,
) -> Chunks:
    """Chunks of any rows; the rules are at the top of this file.

    itemsize: bytes of an element of x and weight
    with_targets: whether `HeadGradients` is given the rows' targets
    scale: multiplies the memory budget
    heads: how many heads' logits exist at a time
    prefer_large: larger chunks where no budget is set, for divergences
    device: whose GEMM library decides the chunks' row counts; None for no preference
    """
    row_bytes = vocab * itemsize * heads
    gradient = vocab * hidden * (4 if wide else itemsize) if gradients else 0
    sums = 0
    if with_targets and gradients and itemsize == 2 and not wide:  # what the rows of frequent targets take
        row_bytes += most_frequent(n_rows, vocab) * itemsize
        sums = most_frequent(n_rows, vocab) * hidden * 4
    smallest = 2 * MIN_ROWS if wide else MIN_ROWS
    budget = env.get("LIGER_HW_LOSS_MEMORY_MIB")
    if budget is None:
        share = gradient if prefer_large and heads == 1 else gradient // 3
        room = max((scale * DEFAULT_MIB << 20) - gradient - sums, 0 if wide else share)
        # their logits are no larger than the gradient of x
        free = n_rows * hidden // (vocab * scale * heads) if gradients else 0
        largest = scale * max(smallest, MAX_ROWS_DIVERGENCE if prefer_large else MAX_ROWS, free)
        rows = min(room // row_bytes, largest)
    else:
        dx = n_rows * hidden * itemsize if gradients else 0
        rows = ((scale * budget << 20) - gradient - sums - dx) // row_bytes
    rounds = gradients and itemsize == 2 and not wide
    most = (MAX_CHUNKS_WITH_TARGETS if with_targets else MAX_CHUNKS) if rounds else n_rows
    return _at_most(most, n_rows, max(smallest, rows), row_bytes, vocab * hidden, wide, device)


def plan_groups(
    n_rows: int, group: int, hidden: int, vocab: int, itemsize: int, gradients: bool, device: torch.device | None = None
) -> Chunks:
    """Chunks of whole groups of `group` rows each, or of any rows where one group is too large.

    A chunk's logits take DEFAULT_MIB at most, or what LIGER_HW_LOSS_MEMORY_MIB leaves beside the gradients. The rules
    for precision are the same as in `plan_chunks` with targets.
    """
    row_bytes = vocab * itemsize
    limit = max(MIN_ROWS, (DEFAULT_MIB << 20) // row_bytes)
    if env.get("LIGER_HW_LOSS_MEMORY_MIB") is not None:
        options = {"gradients": gradients, "with_targets": True, "device": device}
        limit = plan_chunks(n_rows, hidden, vocab, itemsize, **options).rows
    rounds = gradients and itemsize == 2
    if group > limit or group == 1:
        most = MAX_CHUNKS_WITH_TARGETS if rounds else n_rows
        return _at_most(most, n_rows, limit, row_bytes, vocab * hidden, False, device)
    n_groups, together, wide = n_rows // group if group else 0, max(1, limit // max(group, 1)), False
    if rounds and cdiv(n_groups, together) > MAX_CHUNKS_WITH_TARGETS:
        fewer = cdiv(n_groups, MAX_CHUNKS_WITH_TARGETS) * group
        rows, wide = _larger_or_wide(together * group, fewer, row_bytes, vocab * hidden)
        together = rows // group
    step = cdiv(n_groups, cdiv(n_groups, together)) * group if n_groups else 1
    return Chunks.of([(start, min(start + step, n_rows)) for start in range(0, n_rows, step)], wide)


def plan_shared(n_rows: int, hidden: int, itemsize: int, *, wide: bool, device: torch.device, world: int = 1) -> Chunks:
    """Chunks of any rows for a head whose vocabulary is shared out between ranks.

    All ranks must come to the same chunks, and none knows how many columns another has, so the budget is a share of the
    weight's gradient, in which the columns cancel: a chunk's logits take as much memory, or MIN_ROWS rows'.
    Smaller chunks are slower by 3% to 5%: smaller products, and more calls of the host.
    LIGER_HW_LOSS_MEMORY_MIB is not read. The rules for precision are the same as in `plan_chunks` with targets.

    world: a multiple of which every chunk has rows
    """
    most = MAX_CHUNKS_WITH_TARGETS if itemsize == 2 and not wide else n_rows
    rows = max(2 * MIN_ROWS if wide else MIN_ROWS, hidden // STEP * STEP)
    chunks = _at_most(most, n_rows, rows, itemsize, hidden, wide, device)
    bounds = divide(n_rows // world, max(1, chunks.rows // world), device)
    return Chunks(tuple((start * world, stop * world) for start, stop in bounds), chunks.wide)


def borrow_gradient_memory(chunks: Chunks, hidden: int, vocab: int, device: torch.device | None = None) -> Chunks:
    """Chunks for two heads that take no more memory than `chunks`, with a first chunk twice as tall.

    The logits of that chunk lie where the weight's gradient, of the same dtype, is written after it (`sweep_in_fp32`).
    """
    n_rows = chunks.n_rows
    first = min(n_rows, 2 * chunks.rows, vocab * hidden // padded(vocab))
    first = first if first == n_rows else first // STEP * STEP
    if not n_rows or chunks.wide or first < chunks.rows:
        return chunks
    rest = divide(n_rows - first, chunks.rows, device) if first < n_rows else ()
    bounds = ((0, first), *((first + start, first + stop) for start, stop in rest))
    return Chunks(bounds, wide=False, borrowed=True)


def padded(columns: int) -> int:
    """Elements from one row of a logits buffer to the next: a multiple of 16, so that odd vocabularies load as wide."""
    return cdiv(columns, 16) * 16


def divide(n_rows: int, rows: int, device: torch.device | None = None) -> tuple[tuple[int, int], ...]:
    """(start, stop) of chunks of at most `rows` rows, multiples of STEP but for the last.

    Tall chunks have an even number of steps where the device's GEMM library wants it; others are shared out evenly.
    """
    return _divided(n_rows, rows, min(STEP, rows), _even_above(device))


@lru_cache(maxsize=1024)  # every training step asks for the same
def _divided(n_rows: int, rows: int, step: int, even_above: int | None) -> tuple[tuple[int, int], ...]:
    n_steps, tall = cdiv(n_rows, step), _even_if_tall(rows // step, even_above, -1)
    count = cdiv(n_steps, tall)
    if not _is_tall(tall, even_above) or count < 2:
        steps = [n_steps // count + (i < n_steps % count) for i in range(count)]
    else:  # whole ones, then two that share what is left
        left = n_steps - (count - 2) * tall
        half = _even_if_tall(cdiv(left, 2), even_above, 1)
        steps = [tall] * (count - 2) + [half, left - half]
    stops = [step * n for n in accumulate(steps)]
    return tuple((start, min(stop, n_rows)) for start, stop in zip((0, *stops), stops))


def _even_above(device: torch.device | None) -> int | None:
    """Steps above which a device's GEMM library wants an even number of them; None where it does not mind."""
    return None if device is None else backend_of(device).gemm_even_steps_above


def _is_tall(steps: int, even_above: int | None) -> bool:
    """Whether the number of steps in a chunk should be even."""
    return even_above is not None and steps > even_above


def _even_if_tall(steps: int, even_above: int | None, change: int) -> int:
    return steps + change * (steps % 2) if _is_tall(steps, even_above) else steps


def _at_most(
    most: int, n_rows: int, rows: int, row_bytes: int, weight: int, wide: bool, device: torch.device | None
) -> Chunks:
    """Chunks of `rows` rows; where they are more than `most`, larger ones or a wide gradient of `weight` elements."""
    if len(divide(n_rows, rows, device)) > most:
        fewer = STEP * _even_if_tall(cdiv(cdiv(n_rows, STEP), most), _even_above(device), 1)
        rows, wide = _larger_or_wide(rows, fewer, row_bytes, weight)
        rows = max(rows, 2 * MIN_ROWS) if wide else rows
    return Chunks(divide(n_rows, rows, device), wide)


def _larger_or_wide(rows: int, larger: int, row_bytes: int, weight: int) -> tuple[int, bool]:
    """(rows, wide) where chunks of `rows` rows are too many: `larger` ones, or these with a wide gradient of `weight`
    elements, whichever takes less memory."""
    wide = (larger - rows) * row_bytes > 4 * weight
    return (rows if wide else larger), wide
