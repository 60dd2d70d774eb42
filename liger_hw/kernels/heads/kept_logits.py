"""Logits of a linear head that are kept from a forward to its backward, most of them in the weight gradient's memory.

For losses whose gradient of a row is known only in backward (fused_linear_log_probs). A row's logits are either kept
or computed again, which is a fourth GEMM beside the head's three. They are kept in two places:

- The slab, the first `hidden` rows. Their logits are as large as the weight's gradient [vocab, hidden], which does not
  exist before backward, and wait in its memory, cut into contiguous slices [slab, width] of the vocabulary. Slice i
  lies where the gradient of slice i + 1 will be, the last slice in another buffer, the tail. Backward turns every slice
  into its gradient and sums dx. Then it writes dweight of slice 0 into memory that is free, dweight of slice 1 over the
  logits of slice 0, and so on.
- The rest, the rows after the slab: as many of them as memory allows are kept in another buffer. If all are, the rest
  is one chunk. Else backward goes through slices of the vocabulary, and computes the missing logits of each again in
  the tail's memory. So the weight's gradient is always rounded twice.

With at most half as many rows as the hidden size there is no slab: a buffer for all logits is smaller.

dx is summed over slices in fp32; the slab's sum lies where the gradient of slice 0 will be, if it fits there.

Memory. With LIGER_HW_LOSS_MEMORY_MIB set, as many rows of the rest are kept as fit beside everything else. Unset, kept
rows, tail and fp32 sums take at most SPARE of the weight gradient's memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ... import env
from ...runtime.operator import cdiv, with_fallback
from ..losses.log_prob_rows import LogProbOptions, LogProbs, row_log_prob_gradients, row_log_probs
from .linear_head import (
    STEP,
    TILE,
    Needs,
    dweight_of,
    dx_of,
    logits_buffer,
    logits_in,
    logits_memory,
    logits_of,
    padded,
    tile_logits,
)

MAX_SLICES = 12
"""Of a slab of `hidden` rows; a shorter slab has fewer."""
SLICE_STEP = 128
"""Columns. The width of a slice is a multiple of it."""
MIN_SLICE_WIDTH = 2048
SPARE = 9 / 8
MAX_SLABS = 5
"""With more rows than this many slabs too few logits would be kept, and chunks are faster."""
_FORWARD_ROWS = 4096
"""Rows whose logits are computed at a time and not kept."""
_IGNORED, _OUTSIDE = -1, -2


class KeepPlan(NamedTuple):
    """Which logits of a head are kept. Without a slab all rows are in the rest, and all are kept.

    slab: rows of the slab; width: columns of a slice (the last may have more)
    tail: elements of the tail; rest: rows after the slab whose logits are kept
    """

    slab: int
    width: int
    tail: int
    rest: int

    def allocate(self, x: torch.Tensor, weight: torch.Tensor, tile: int = 0) -> KeptLogits:
        """The memory for this plan; with `tile` the rest has a multiple of it rows."""
        shape = weight.shape if self.slab else (0,)
        waiting = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        rest = logits_memory(x, cdiv(self.rest, tile) * tile if tile else self.rest, padded(weight.shape[0]))
        return KeptLogits(waiting, x.new_empty(self.tail), rest, self.slab, self.width)


class KeptLogits(NamedTuple):
    """waiting: [vocab, hidden], the slab's slices but the last, empty without a slab; tail: [elements], the last slice;
    rest: [kept rows, padded vocab]; slab, width: as in `KeepPlan`."""

    waiting: torch.Tensor
    tail: torch.Tensor
    rest: torch.Tensor
    slab: int
    width: int


def plan_kept(n_rows: int, hidden: int, vocab: int, itemsize: int) -> KeepPlan | None:
    """Which logits of a head are kept; None where chunks (`plan_chunks`) are faster or take less memory."""
    row, weight = padded(vocab) * itemsize, vocab * hidden * itemsize
    budget = env.LIGER_HW_LOSS_MEMORY_MIB
    room = int(SPARE * weight) if budget is None else (budget << 20) - weight - n_rows * hidden * itemsize
    if not n_rows or budget is not None and room < 0:
        return None
    if 2 * n_rows <= hidden or vocab <= hidden:
        return KeepPlan(0, 0, 0, n_rows) if budget is None or n_rows * row <= room else None
    slab = min(n_rows, hidden)
    count = min(cdiv(MAX_SLICES * slab, hidden), vocab // MIN_SLICE_WIDTH)
    width = vocab // max(2, count) // SLICE_STEP * SLICE_STEP
    if not width or n_rows > MAX_SLABS * slab:
        return None
    rest = n_rows - slab
    first, last = _slab_slices(vocab, width)[-1]
    tail = max(slab * padded(last - first), rest * SLICE_STEP)  # at least a narrow slice of the rest
    room -= tail * itemsize
    slab_sums = slab * hidden * 4 if itemsize == 2 and width < 2 * slab else 0
    if rest * row <= room - slab_sums:
        return KeepPlan(slab, width, tail, rest)
    room -= max(slab_sums, rest * hidden * 4 if itemsize == 2 else 0)
    if room < 0 and budget is not None:
        return None
    return KeepPlan(slab, width, tail, max(0, room // row) // STEP * STEP)


Slices = list[tuple[int, int]]
"""(first column, last column + 1); all but the last are equally wide."""


def _slab_slices(vocab: int, width: int) -> Slices:
    """Slices of `width` columns; the last may be up to twice as wide."""
    starts = range(0, vocab // width * width, width)
    return [(start, start + width) for start in starts[:-1]] + [(starts[-1], vocab)]


def _rest_slices(vocab: int, most: int) -> Slices:
    """Slices of at most `most` columns, of about equal width."""
    width = min(most, cdiv(cdiv(vocab, cdiv(vocab, most)), SLICE_STEP) * SLICE_STEP)
    return [(start, min(start + width, vocab)) for start in range(0, vocab, width)]


def _slab_logits(kept: KeptLogits) -> tuple[Slices, list[torch.Tensor]]:
    """The slab's slices and the logits [slab, width] of each."""
    vocab, hidden = kept.waiting.shape
    *whole, last = slices = _slab_slices(vocab, kept.width)
    memory = kept.waiting.view(-1)
    logits = [logits_in(memory[stop * hidden :], kept.slab, stop - start) for start, stop in whole]
    return slices, [*logits, logits_in(kept.tail, kept.slab, last[1] - last[0])]


def _targets_by_slice(target: torch.Tensor, ignore_index: int, slices: Slices) -> tuple[torch.Tensor, torch.Tensor]:
    """([slices, n_rows] the targets as columns of each slice, [slices, n_rows] whether they are in it).

    A target in another slice is column 0, which callers give the coefficient 0. An ignored target is _IGNORED, one
    outside the vocabulary _OUTSIDE.
    """
    y, width, vocab = target.long(), slices[0][1], slices[-1][1]
    number = torch.arange(len(slices), device=y.device)[:, None]
    ignored = y == ignore_index
    valid = (y >= 0) & (y < vocab) & ~ignored
    here = ((y // width).clamp_(max=len(slices) - 1) == number) & valid
    elsewhere = torch.where(ignored, _IGNORED, torch.where(valid, 0, _OUTSIDE))
    return torch.where(here, y - number * width, elsewhere), here


# -- forward ---------------------------------------------------------------------------------------------------------


def keeping_forward(
    x, weight, target, out: LogProbs, kept: KeptLogits, options: LogProbOptions, tile=0, bias=None, plain=False
) -> None:
    """Fills `kept`, and `out` with the results of all rows.

    The logits of the slab, and those that are not kept, are computed first, in the rest's memory, or in a buffer where
    it is too small. The slab's logits are then copied into their slices. tile: rows of every product (`tile_logits`);
    0: as many as fit. The other arguments are as in `row_log_probs`.
    """
    n_rows, vocab = x.shape[0], weight.shape[0]
    x, weight, slab = x.detach(), weight.detach(), kept.slab
    whole = min(slab + kept.rest.shape[0], n_rows)  # the rows of the slab and those kept after it

    def fill(logits: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if tile:
            tile_logits(x[start:stop], weight, logits[:tile])
        else:
            logits_of(x[start:stop], weight, logits[: stop - start])
        row_log_probs(logits[: stop - start], target, out, options, bias=bias, row_start=start, plain=plain)
        return logits[: stop - start]

    passing = [(first, last) for first, last in ((0, slab), (whole, n_rows)) if first < last]
    if passing:
        rows = tile or min(max(kept.rest.shape[0], TILE), _FORWARD_ROWS, max(last - first for first, last in passing))
        fits = kept.rest.shape[0] >= rows
        memory = kept.rest[:rows, :vocab] if fits else logits_buffer(rows, vocab, x)
        slices = list(zip(*_slab_logits(kept))) if slab else []
        for first, last in passing:
            for start in range(first, last, rows):
                stop = min(start + rows, last)
                logits = fill(memory, start, stop)
                if start < slab:
                    for columns, waiting in slices:
                        waiting[start:stop] = logits[:, slice(*columns)]
    step = tile or max(whole - slab, 1)
    for start in range(slab, whole, step):
        fill(kept.rest[start - slab :, :vocab], start, min(start + step, whole))


# -- backward --------------------------------------------------------------------------------------------------------


def keeping_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    saved: LogProbs,
    dlogp: torch.Tensor,
    dentropy: torch.Tensor | None,
    kept: KeptLogits,
    needs: Needs,
    options: LogProbOptions,
    softmax_coef: torch.Tensor | None = None,
    plain: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """(dx or None, dweight, fp32 dbias or None) from the incoming gradients of log-probabilities and entropies.

    Overwrites `kept`, which the forward filled; with a slab dweight is `kept.waiting`. softmax_coef: [n_rows], the
    factor of the softmax if not dlogp; options, plain: as in `row_log_prob_gradients`.
    """
    (n_rows, hidden), vocab, slab = x.shape, weight.shape[0], kept.slab
    x, weight = x.detach(), weight.detach()
    dx = torch.empty((n_rows, hidden), dtype=x.dtype, device=x.device) if needs.dinput else None
    dweight = kept.waiting if slab else torch.empty((vocab, hidden), dtype=weight.dtype, device=x.device)
    sums = torch.zeros(vocab, dtype=saved.lse.dtype, device=x.device) if needs.dbias else None

    def add_dweight(dlogits: torch.Tensor, rows: slice, columns: slice, first: bool) -> None:
        dweight_of(dlogits, x[rows], dweight[columns], first)
        if sums is not None:
            sums[columns] += dlogits.sum(0, dtype=sums.dtype)

    def bias_of(columns: slice) -> torch.Tensor | None:
        return None if bias is None else bias[columns]

    ignore_index = options.ignore_index
    outside = (target != ignore_index) & ((target < 0) | (target >= vocab))
    sliced_coef = dlogp if softmax_coef is None else softmax_coef  # of every slice; dlogp is only in the target's
    sliced_coef = sliced_coef.masked_fill(outside, float("nan"))
    sliced = options._replace(ignore_index=_IGNORED)
    rows = slice(0, slab)
    if slab:
        slices, slab_logits = _slab_logits(kept)
        targets, here = _targets_by_slice(target[rows], ignore_index, slices)
        dlogp_here = torch.where(here, dlogp[rows], 0.0)
        coefs = {"entropy_coef": dentropy, "softmax_coef": sliced_coef}
        total = _dx_sum(dx, rows, kept.waiting.view(-1)[: slices[0][1] * hidden])  # where slice 0's gradient will be
        for i, (columns, logits) in enumerate(zip(slices, slab_logits)):
            part = slice(*columns)
            row = logits, targets[i], saved, dlogp_here[i], sliced
            _gradients(*row, bias=bias_of(part), plain=plain, **coefs)
            if total is not None:
                dx_of(logits, weight[part], total, i == 0)
        _round_into(dx, rows, total)
        del total
        for columns, dlogits in zip(slices, slab_logits):
            add_dweight(dlogits, rows, slice(*columns), True)
    rows, n_kept = slice(slab, n_rows), min(kept.rest.shape[0], n_rows - slab)
    logits = kept.rest[:n_kept, :vocab]
    if n_kept == n_rows - slab:
        if n_kept:
            coefs = {"entropy_coef": dentropy, "softmax_coef": softmax_coef}
            _gradients(logits, target, saved, dlogp, options, bias=bias, row_start=slab, plain=plain, **coefs)
            if dx is not None:
                dx_of(logits, weight, dx[rows], True)
            add_dweight(logits, rows, slice(None), not slab)
        return dx, dweight, sums
    slices = _rest_slices(vocab, kept.tail.numel() // (n_rows - slab) // 16 * 16)
    targets, here = _targets_by_slice(target[rows], ignore_index, slices)
    dlogp_here = torch.where(here, dlogp[rows], 0.0)
    results = LogProbs(*(None if t is None else t[rows] for t in saved))
    coefs = {"entropy_coef": None if dentropy is None else dentropy[rows], "softmax_coef": sliced_coef[rows]}
    total = _dx_sum(dx, rows)
    for i, (first, last) in enumerate(slices):
        part = slice(first, last)
        how = {"bias": bias_of(part), "plain": plain, **coefs}
        dlogits = logits_in(kept.tail, n_rows - slab, last - first)
        new = dlogits[n_kept:]
        logits_of(x[slab + n_kept :], weight[part], new)
        row = targets[i], results, dlogp_here[i], sliced
        _gradients(new, *row, row_start=n_kept, **how)
        _gradients(logits[:, part], *row, dlogits=dlogits[:n_kept], **how)
        if total is not None:
            dx_of(dlogits, weight[part], total, i == 0)
        add_dweight(dlogits, rows, part, False)
    _round_into(dx, rows, total)
    return dx, dweight, sums


def _dx_sum(dx: torch.Tensor | None, rows: slice, free: torch.Tensor | None = None) -> torch.Tensor | None:
    """Where dx of `rows` is summed over slices: in place, or in fp32 for a 16-bit dx, in `free` memory if it fits."""
    into = dx if dx is None else dx[rows]
    if into is None or into.dtype.itemsize > 2:
        return into
    if free is None or free.numel() < 2 * into.numel():
        return torch.empty(into.shape, dtype=torch.float32, device=into.device)
    return free.view(torch.float32)[: into.numel()].view(into.shape)


def _round_into(dx: torch.Tensor | None, rows: slice, total: torch.Tensor | None) -> None:
    """Copy the sum of `_dx_sum` into dx unless it was computed in place."""
    if total is not None and total.dtype != dx.dtype:
        dx[rows] = total


def _gradients(*args: Any, **options: Any) -> None:
    """`row_log_prob_gradients`, repeated alone where a configuration fails: it overwrites logits, and a repeated
    backward would read gradients as logits."""
    with_fallback(partial(row_log_prob_gradients, *args, **options))()
