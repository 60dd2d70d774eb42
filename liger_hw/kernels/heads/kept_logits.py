"""Logits of a linear head that are kept from a forward to its backward, most of them in the weight gradient's memory.

For losses whose gradient of a row is known only in backward (fused_linear_log_probs). A row's logits are either kept
or computed again, which is a fourth GEMM beside the head's three. They are kept in two places:

- The slab: the first `hidden` rows. Their logits are as large as the weight's gradient [vocab, hidden], which does not
  exist before backward, and are kept in its memory, as contiguous slices [slab, width] of the vocabulary. Slice i lies
  where the gradient of slice i + 1 will be; the last slice lies in another buffer, the tail. Backward turns the logits
  of every slice into their gradient and sums dx. Then it writes dweight of slice 0 to its place, which is free, dweight
  of slice 1 over the logits of slice 0, and so on.
- The rest: the rows after the slab. As many of them as memory allows are kept in another buffer. If all are kept, they
  are one chunk. Else backward goes through slices of the vocabulary, and computes the missing logits of each slice
  again in the tail's memory. So the weight's gradient is rounded at most twice.

With at most hidden / 2 rows there is no slab: a buffer for all logits is smaller than the weight's gradient.
dx is summed over slices in fp32; the slab's sum lies where the gradient of slice 0 will be, if it fits there.

Memory. With LIGER_HW_LOSS_MEMORY_MIB set, as many rows of the rest are kept as fit beside slab, tail, fp32 sums and dx.
Unset, kept rows, tail and fp32 sums take at most EXTRA_MEMORY times the weight gradient's memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ... import env
from ...runtime.operator import cdiv, with_fallback
from ..losses.log_prob_rows import LogProbOptions, LogProbs, row_log_prob_gradients, row_log_probs
from .linear_head import (
    INVARIANT_ROWS,
    STEP,
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
"""Slices of a slab of `hidden` rows; a shorter slab has fewer."""
SLICE_STEP = 128
"""The width of a slice is a multiple of this number of columns."""
MIN_SLICE_WIDTH = 2048
EXTRA_MEMORY = 9 / 8
MAX_SLABS = 5
"""With more than MAX_SLABS * hidden rows too few logits would be kept, and chunks are faster."""
_FORWARD_ROWS = 4096
"""Most rows whose logits are computed at a time if they are not kept where they are computed."""
_IGNORED, _OUTSIDE = -1, -2


class KeepPlan(NamedTuple):
    """Which logits of a head are kept. Without a slab, all rows are in the rest and are kept.

    slab: rows of the slab; width: columns of a slice (the last may have more)
    tail: elements of the tail; rest: rows after the slab whose logits are kept
    """

    slab: int
    width: int
    tail: int
    rest: int

    def allocate(self, x: torch.Tensor, weight: torch.Tensor, tile: int = 0) -> KeptLogits:
        """The memory for this plan. tile: if not 0, the rest's rows are rounded up to a multiple of it."""
        shape = weight.shape if self.slab else (0,)
        dweight_memory = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        rest = logits_memory(x, cdiv(self.rest, tile) * tile if tile else self.rest, padded(weight.shape[0]))
        return KeptLogits(dweight_memory, x.new_empty(self.tail), rest, self.slab, self.width)


class KeptLogits(NamedTuple):
    """dweight_memory: [vocab, hidden], all slices of the slab but the last, empty without a slab; tail: [elements], the
    last slice; rest: [kept rows, padded vocab]; slab, width: as in `KeepPlan`."""

    dweight_memory: torch.Tensor
    tail: torch.Tensor
    rest: torch.Tensor
    slab: int
    width: int


def plan_kept(n_rows: int, hidden: int, vocab: int, itemsize: int) -> KeepPlan | None:
    """Which logits of a head are kept; None where chunks (`plan_chunks`) are faster or take less memory."""
    row_bytes, dx_bytes, dweight_bytes = (n * itemsize for n in (padded(vocab), n_rows * hidden, vocab * hidden))
    budget = env.LIGER_HW_LOSS_MEMORY_MIB
    room = int(EXTRA_MEMORY * dweight_bytes) if budget is None else (budget << 20) - dweight_bytes - dx_bytes
    if not n_rows or budget is not None and room < 0:
        return None
    if 2 * n_rows <= hidden or vocab <= hidden:
        return KeepPlan(0, 0, 0, n_rows) if budget is None or n_rows * row_bytes <= room else None
    slab = min(n_rows, hidden)
    count = min(cdiv(MAX_SLICES * slab, hidden), vocab // MIN_SLICE_WIDTH)
    width = vocab // max(2, count) // SLICE_STEP * SLICE_STEP
    if not width or n_rows > MAX_SLABS * slab:
        return None
    rest = n_rows - slab
    first, last = _slab_slices(vocab, width)[-1]
    tail = max(slab * padded(last - first), rest * SLICE_STEP)  # at least a narrow slice of the rest
    room -= tail * itemsize
    slab_sums_bytes = slab * hidden * 4 if itemsize == 2 and width < 2 * slab else 0
    if rest * row_bytes <= room - slab_sums_bytes:
        return KeepPlan(slab, width, tail, rest)
    room -= max(slab_sums_bytes, rest * hidden * 4 if itemsize == 2 else 0)
    if room < 0 and budget is not None:
        return None
    return KeepPlan(slab, width, tail, max(0, room // row_bytes) // STEP * STEP)


Slices = list[tuple[int, int]]
"""(first column, last column + 1); all but the last are equally wide."""


def _slab_slices(vocab: int, width: int) -> Slices:
    """Slices of `width` columns; the last may be up to twice as wide."""
    starts = range(0, vocab // width * width, width)
    return [(start, start + width) for start in starts[:-1]] + [(starts[-1], vocab)]


def _rest_slices(vocab: int, max_width: int) -> Slices:
    """Slices of about equal width."""
    width = min(max_width, cdiv(cdiv(vocab, cdiv(vocab, max_width)), SLICE_STEP) * SLICE_STEP)
    return [(start, min(start + width, vocab)) for start in range(0, vocab, width)]


def _slab_logits(kept: KeptLogits) -> tuple[Slices, list[torch.Tensor]]:
    """The slab's slices and the logits [slab, width] of each."""
    vocab, hidden = kept.dweight_memory.shape
    *before_last, last = slices = _slab_slices(vocab, kept.width)
    memory = kept.dweight_memory.view(-1)
    logits = [logits_in(memory[stop * hidden :], kept.slab, stop - start) for start, stop in before_last]
    return slices, [*logits, logits_in(kept.tail, kept.slab, last[1] - last[0])]


def _targets_by_slice(target: torch.Tensor, ignore_index: int, slices: Slices) -> tuple[torch.Tensor, torch.Tensor]:
    """([slices, n_rows] each target's column within each slice, [slices, n_rows] whether the slice has the target).

    The column is 0 for a target in another slice (callers set its coefficient to 0), _IGNORED for an ignored target,
    and _OUTSIDE for a target outside the vocabulary.
    """
    y, width, vocab = target.long(), slices[0][1], slices[-1][1]
    number = torch.arange(len(slices), device=y.device)[:, None]
    ignored = y == ignore_index
    valid = (y >= 0) & (y < vocab) & ~ignored
    here = ((y // width).clamp_(max=len(slices) - 1) == number) & valid
    not_here = torch.where(ignored, _IGNORED, torch.where(valid, 0, _OUTSIDE))
    return torch.where(here, y - number * width, not_here), here


# -- forward ---------------------------------------------------------------------------------------------------------


def keeping_forward(
    x, weight, target, out: LogProbs, kept: KeptLogits, options: LogProbOptions, tile=0, bias=None, plain=False
) -> None:
    """Fills `kept`, and `out` with the results of all rows.

    Logits of the slab, and those not kept, are computed first, in the rest's memory if it is large enough. The slab's
    are then copied into their slices. tile: rows of every product (`tile_logits`), 0: as many as fit. The other
    arguments are as in `row_log_probs`.
    """
    n_rows, vocab = x.shape[0], weight.shape[0]
    x, weight, slab = x.detach(), weight.detach(), kept.slab
    kept_stop = min(slab + kept.rest.shape[0], n_rows)

    def compute(logits: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if tile:
            tile_logits(x[start:stop], weight, logits[:tile])
        else:
            logits_of(x[start:stop], weight, logits[: stop - start])
        row_log_probs(logits[: stop - start], target, out, options, bias=bias, row_start=start, plain=plain)
        return logits[: stop - start]

    not_in_rest = [(first, last) for first, last in ((0, slab), (kept_stop, n_rows)) if first < last]
    if not_in_rest:
        most = max(last - first for first, last in not_in_rest)
        rows = tile or min(max(kept.rest.shape[0], INVARIANT_ROWS), _FORWARD_ROWS, most)
        fits = kept.rest.shape[0] >= rows
        memory = kept.rest[:rows, :vocab] if fits else logits_buffer(rows, vocab, x)
        slices = list(zip(*_slab_logits(kept))) if slab else []
        for first, last in not_in_rest:
            for start in range(first, last, rows):
                stop = min(start + rows, last)
                logits = compute(memory, start, stop)
                if start < slab:
                    for columns, slice_logits in slices:
                        slice_logits[start:stop] = logits[:, slice(*columns)]
    step = tile or max(kept_stop - slab, 1)
    for start in range(slab, kept_stop, step):
        compute(kept.rest[start - slab :, :vocab], start, min(start + step, kept_stop))


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

    Overwrites `kept`; with a slab dweight is `kept.dweight_memory`. softmax_coef: [n_rows], the factor of each row's
    softmax, None: dlogp; options, plain: as in `row_log_prob_gradients`.
    """
    (n_rows, hidden), vocab, slab = x.shape, weight.shape[0], kept.slab
    x, weight = x.detach(), weight.detach()
    dx = torch.empty((n_rows, hidden), dtype=x.dtype, device=x.device) if needs.dinput else None
    dweight = kept.dweight_memory if slab else torch.empty((vocab, hidden), dtype=weight.dtype, device=x.device)
    dbias = torch.zeros(vocab, dtype=saved.lse.dtype, device=x.device) if needs.dbias else None

    def add_dweight(dlogits: torch.Tensor, rows: slice, columns: slice, first: bool) -> None:
        dweight_of(dlogits, x[rows], dweight[columns], first)
        if dbias is not None:
            dbias[columns] += dlogits.sum(0, dtype=dbias.dtype)

    def bias_of(columns: slice) -> torch.Tensor | None:
        return None if bias is None else bias[columns]

    ignore_index = options.ignore_index
    outside = (target != ignore_index) & ((target < 0) | (target >= vocab))
    sliced_coef = dlogp if softmax_coef is None else softmax_coef  # for all slices; dlogp is for the target's slice
    sliced_coef = sliced_coef.masked_fill(outside, float("nan"))
    sliced = options._replace(ignore_index=_IGNORED)
    rows = slice(0, slab)
    if slab:
        slices, slab_logits = _slab_logits(kept)
        targets, here = _targets_by_slice(target[rows], ignore_index, slices)
        dlogp_here = torch.where(here, dlogp[rows], 0.0)
        coefs = {"entropy_coef": dentropy, "softmax_coef": sliced_coef}
        free = kept.dweight_memory.view(-1)[: slices[0][1] * hidden]  # where slice 0's gradient will be
        dx_sum = _dx_sum(dx, rows, free)
        for i, (columns, logits) in enumerate(zip(slices, slab_logits)):
            part = slice(*columns)
            row = logits, targets[i], saved, dlogp_here[i], sliced
            _gradients(*row, bias=bias_of(part), plain=plain, **coefs)
            if dx_sum is not None:
                dx_of(logits, weight[part], dx_sum, i == 0)
        _round_into(dx, rows, dx_sum)
        del dx_sum
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
        return dx, dweight, dbias
    slices = _rest_slices(vocab, kept.tail.numel() // (n_rows - slab) // 16 * 16)
    targets, here = _targets_by_slice(target[rows], ignore_index, slices)
    dlogp_here = torch.where(here, dlogp[rows], 0.0)
    results = LogProbs(*(None if t is None else t[rows] for t in saved))
    coefs = {"entropy_coef": None if dentropy is None else dentropy[rows], "softmax_coef": sliced_coef[rows]}
    dx_sum = _dx_sum(dx, rows)
    for i, (first, last) in enumerate(slices):
        part = slice(first, last)
        how = {"bias": bias_of(part), "plain": plain, **coefs}
        dlogits = logits_in(kept.tail, n_rows - slab, last - first)
        recomputed = dlogits[n_kept:]
        logits_of(x[slab + n_kept :], weight[part], recomputed)
        row = targets[i], results, dlogp_here[i], sliced
        _gradients(recomputed, *row, row_start=n_kept, **how)
        _gradients(logits[:, part], *row, dlogits=dlogits[:n_kept], **how)
        if dx_sum is not None:
            dx_of(dlogits, weight[part], dx_sum, i == 0)
        add_dweight(dlogits, rows, part, False)
    _round_into(dx, rows, dx_sum)
    return dx, dweight, dbias


def _dx_sum(dx: torch.Tensor | None, rows: slice, free: torch.Tensor | None = None) -> torch.Tensor | None:
    """Memory for summing dx of `rows` over slices: fp32 for a 16-bit dx, in `free` if it fits; else dx's memory."""
    dx = dx if dx is None else dx[rows]
    if dx is None or dx.dtype.itemsize > 2:
        return dx
    if free is None or free.numel() < 2 * dx.numel():
        return torch.empty(dx.shape, dtype=torch.float32, device=dx.device)
    return free.view(torch.float32)[: dx.numel()].view(dx.shape)


def _round_into(dx: torch.Tensor | None, rows: slice, dx_sum: torch.Tensor | None) -> None:
    """Copy dx_sum into dx unless it is dx's memory."""
    if dx_sum is not None and dx_sum.dtype != dx.dtype:
        dx[rows] = dx_sum


def _gradients(*args: Any, **options: Any) -> None:
    """`row_log_prob_gradients`. If its configuration fails, only it is repeated, since it overwrites logits."""
    with_fallback(partial(row_log_prob_gradients, *args, **options))()
