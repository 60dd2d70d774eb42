"""Logits of a linear head that are kept from a forward to its backward, most of them where the weight's gradient will be.

For losses whose gradient of a row is known only in backward (fused_linear_scaled_cross_entropy): a row's logits are kept,
or computed again, a fourth product beside the head's three. What is kept, in two places:

- The slab. The weight's gradient [vocab, hidden] does not exist before backward, and logits of `hidden` rows are of its
  size. They wait in its memory, cut into slices of the vocabulary, each [slab, width] in one piece, slice i where the
  gradient of slice i + 1 will be, and the last one in a buffer of its own, the tail. Backward turns every slice into its
  gradient, adds up dx, and then writes dweight of slice 0 over nothing, of slice 1 over slice 0, which is done, and so on.
- The late rows, those after the slab: as many of the first as memory allows, whole rows, in a buffer of their own.

Late rows are one group or two (`late_groups`). A group that is kept whole is one chunk. Of another, backward goes
through the vocabulary by slices, too, in the tail's memory: logits that are not kept are computed again, of all the
group's rows. So the gradient of a weight is rounded twice, three times from more than 3 x hidden rows on, whatever the
memory, without anything apart: sqrt(1.5) of one GEMM's error with one group, and by the same reckoning sqrt(1.5 + 1.5 slab /
n_rows) with two, which no GPU has checked.

Up to half as many rows as the hidden size have no slab: their logits, in a buffer of their own, are less to hold.

dx over slices is summed in fp32: where the gradient of slice 0 will be while the slab is under way, if it fits there.

How many late rows are kept: as many as fit LIGER_HW_LOSS_MEMORY_MIB beside everything else; unset, SPARE of the weight's
gradient beside that gradient, tail and fp32 sum included: together 1.25 times what Liger 0.8.5 takes for 8192 rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ... import env
from ...runtime.operator import cdiv, with_fallback
from ..losses.log_prob_rows import LogProbs, log_prob_buffers, row_log_prob_gradients, row_log_probs
from .linear_head import STEP, divide, dweight_of, dx_of, logits_buffer, logits_of

SLICES = 8  # of a whole slab, fewer of less
GRAIN = 128  # words that a slice's width is a multiple of
NARROWEST = 2048  # words of a slab's slice at least
SPARE = 4 / 7
MOST_SLABS = 5  # with more rows than so many slabs, too few logits are kept: chunks instead
_CHUNK = 4096  # rows at a time, at most, in the forward of those that are not kept
_IGNORED, _OUTSIDE = -1, -2


class Kept(NamedTuple):
    """slab: rows that wait in the weight gradient's memory; width: words of a slice (the last may have more); tail: its
    elements; late: rows after the slab that are kept. Without a slab all rows are late, and kept."""

    slab: int
    width: int
    tail: int
    late: int

    def memory(self, x: torch.Tensor, weight: torch.Tensor) -> Memory:
        """What it is kept in, not yet written."""
        shape = weight.shape if self.slab else (0,)
        waiting = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        late = x.new_empty((self.late, cdiv(weight.shape[0], 16) * 16))
        return Memory(waiting, x.new_empty(self.tail), late, self.slab, self.width)


class Memory(NamedTuple):
    """waiting [vocab, hidden], or nothing without a slab; tail; late [late rows, vocab and up to 15 elements more]."""

    waiting: torch.Tensor
    tail: torch.Tensor
    late: torch.Tensor
    slab: int
    width: int


def plan_kept(n_rows: int, hidden: int, vocab: int, itemsize: int) -> Kept | None:
    """What is kept of a head's logits; None where chunks are better (`plan_chunks`)."""
    row, weight = cdiv(vocab, 16) * 16 * itemsize, vocab * hidden * itemsize
    budget = env.get("LIGER_HW_LOSS_MEMORY_MIB")
    room = int(SPARE * weight) if budget is None else (budget << 20) - weight - n_rows * hidden * itemsize
    if not n_rows or budget is not None and room < 0:
        return None
    if 2 * n_rows <= hidden or vocab <= hidden:
        return Kept(0, 0, 0, n_rows) if budget is None or n_rows * row <= room else None
    slab = min(n_rows, hidden)
    count = min(cdiv(SLICES * slab, hidden), vocab // NARROWEST)
    width = vocab // max(2, count) // GRAIN * GRAIN
    if not width or n_rows > MOST_SLABS * slab:
        return None
    most = max((b - a for a, b in late_groups(n_rows, slab)), default=0)
    tail = _tail_size(most, vocab, slab, width)
    room -= tail * itemsize
    sums = slab * hidden * 4 if itemsize == 2 and width < 2 * slab else 0
    if (n_rows - slab) * row <= room - sums:
        return Kept(slab, width, tail, n_rows - slab)
    room -= max(sums, most * hidden * 4 if itemsize == 2 else 0)
    if room < 0 and budget is not None:
        return None
    return Kept(slab, width, tail, max(0, room // row) // STEP * STEP)


def late_groups(n_rows: int, slab: int) -> list[tuple[int, int]]:
    """(start, stop) of the groups of rows after the slab."""
    rest = n_rows - slab
    if rest <= 2 * slab or not slab:
        return [(slab, n_rows)] if rest else []
    half = cdiv(cdiv(rest, 2), STEP) * STEP
    return [(slab, slab + half), (slab + half, n_rows)] if half < rest else [(slab, n_rows)]


Slices = list[tuple[int, int]]
"""(first word, last word + 1); all but the last are of one width."""


def _slab_slices(vocab: int, width: int) -> Slices:
    """Slices of `width` words, the last of up to twice as many: none is smaller than what is written over it."""
    starts = range(0, vocab // width * width, width)
    return [(start, start + width) for start in starts[:-1]] + [(starts[-1], vocab)]


def _late_slices(vocab: int, most: int) -> Slices:
    """Slices of at most `most` words, about equally many."""
    width = min(most, cdiv(cdiv(vocab, cdiv(vocab, most)), GRAIN) * GRAIN)
    return [(start, min(start + width, vocab)) for start in range(0, vocab, width)]


def _tail_size(most: int, vocab: int, slab: int, width: int) -> int:
    """Elements of the tail: the slab's last slice, and at least a narrow slice of the largest late group."""
    first, last = _slab_slices(vocab, width)[-1]
    return max(slab * cdiv(last - first, 16) * 16, most * GRAIN)


def _view(memory: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] at the beginning of memory, each row beginning at a multiple of 16 elements."""
    stride = cdiv(columns, 16) * 16
    return memory.view(-1)[: rows * stride].view(rows, stride)[:, :columns]


def _slab(memory: Memory) -> tuple[Slices, list[torch.Tensor]]:
    """The slab's slices, and where the logits [slab, words] of each are."""
    vocab, hidden = memory.waiting.shape
    *whole, last = slices = _slab_slices(vocab, memory.width)
    room = memory.waiting.view(-1)
    places = [_view(room[stop * hidden :], memory.slab, stop - start) for start, stop in whole]
    return slices, [*places, _view(memory.tail, memory.slab, last[1] - last[0])]


def _placed(target: torch.Tensor, ignore_index: int, slices: Slices) -> tuple[torch.Tensor, torch.Tensor]:
    """([slices, n_rows] the targets as words of each slice, whether they are in it); for rows whose target is in another
    slice a word that counts for nothing, for others _IGNORED or _OUTSIDE."""
    y, width, vocab = target.long(), slices[0][1], slices[-1][1]
    number = torch.arange(len(slices), device=y.device)[:, None]
    ignored = y == ignore_index
    valid = (y >= 0) & (y < vocab) & ~ignored
    here = ((y // width).clamp_(max=len(slices) - 1) == number) & valid
    elsewhere = torch.where(ignored, _IGNORED, torch.where(valid, 0, _OUTSIDE))
    return torch.where(here, y - number * width, elsewhere), here


# -- forward ---------------------------------------------------------------------------------------------------------


def keeping_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
    ignore_index: int,
    entropy: bool,
    memory: Memory,
) -> LogProbs:
    """The results of all rows; fills the memory."""
    n_rows, vocab = x.shape[0], weight.shape[0]
    x, weight = x.detach(), weight.detach()
    out = log_prob_buffers(n_rows, x.device, entropy=entropy)
    options = {"ignore_index": ignore_index, "temperature": temperature}
    waiting, _, late, slab, _ = memory

    def rows_of(logits: torch.Tensor, start: int) -> None:
        logits_of(x[start : start + logits.shape[0]], weight, logits)
        row_log_probs(logits, target, out, row_start=start, **options)

    if slab:
        first = slab + late.shape[0]
        fits = waiting.numel() // (cdiv(vocab, 16) * 16)
        bounds = divide(n_rows - first, min(fits, _CHUNK)) if fits else ()
        for start, stop in bounds:  # of rows that are not kept: through the slab's memory
            rows_of(_view(waiting, stop - start, vocab), first + start)
        if not fits and first < n_rows:
            rows_of(logits_buffer(n_rows - first, vocab, x), first)
    if late.shape[0]:
        rows_of(late[:, :vocab], slab)
    if slab:
        _slab_forward(x[:slab], weight, target[:slab], out, options, memory)
    return out


def _slab_forward(x, weight, target, out, options, memory):
    """The slab's logits into their places, and the results of its rows from those of every slice."""
    slices, places = _slab(memory)
    mine, here = _placed(target, options["ignore_index"], slices)
    shape = mine.shape
    parts = LogProbs(*(torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2)))
    if out.entropy is not None:
        parts = parts._replace(entropy=torch.empty_like(parts.lse))
    at_target = torch.empty_like(parts.lse)
    for i, (words, logits) in enumerate(zip(slices, places)):
        logits_of(x, weight[slice(*words)], logits)
        row_log_probs(logits, mine[i], _part(parts, i), ignore_index=_IGNORED, temperature=options["temperature"])
        at_target[i] = logits.gather(1, mine[i].clamp_min(0)[:, None])[:, 0]
    ignored = mine[0] == _IGNORED
    lse = torch.logsumexp(parts.lse, 0)
    s_y = torch.where(here, at_target * (1.0 / options["temperature"]), 0.0).sum(0)
    logp = torch.where(here.any(0), s_y - lse, float("nan"))
    rows = slice(0, shape[1])
    out.lse[rows] = lse.masked_fill(ignored, 0.0)
    out.logp[rows] = logp.masked_fill(ignored, 0.0)
    if out.entropy is not None:
        share = torch.exp(parts.lse - lse)  # a slice's, of all probability
        within = torch.where(share == 0.0, 0.0, share * (parts.entropy + (lse - parts.lse)))
        out.entropy[rows] = within.sum(0).masked_fill(ignored, 0.0)


# -- backward --------------------------------------------------------------------------------------------------------


def keeping_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    saved: LogProbs,
    push: torch.Tensor,
    bend: torch.Tensor | None,
    temperature: float,
    ignore_index: int,
    memory: Memory,
    dinput: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(dx or None, dweight) of slopes push and bend of every row's log-probability and entropy. memory is what the
    forward left, which this overwrites; dweight is its first where there is a slab."""
    (n_rows, hidden), vocab = x.shape, weight.shape[0]
    x, weight, (waiting, tail, late, slab, _) = x.detach(), weight.detach(), memory
    dx = torch.empty((n_rows, hidden), dtype=x.dtype, device=x.device) if dinput else None
    dweight = waiting if slab else torch.empty((vocab, hidden), dtype=weight.dtype, device=x.device)
    outside = (target != ignore_index) & ((target < 0) | (target >= vocab))
    pull = push.masked_fill(outside, float("nan"))  # beside the push, which only the target's own slice has
    rows = slice(0, slab)
    if slab:
        slices, places = _slab(memory)
        mine, here = _placed(target[rows], ignore_index, slices)
        pushed = torch.where(here, push[rows], 0.0)
        options = {"entropy_coef": bend, "pull": pull, "temperature": temperature, "ignore_index": _IGNORED}
        total = _summed(dx, rows, waiting.view(-1)[: slices[0][1] * hidden])  # where slice 0's gradient will be
        for i, (words, logits) in enumerate(zip(slices, places)):
            _gradients(logits, mine[i], saved, pushed[i], **options)
            if total is not None:
                dx_of(logits, weight[slice(*words)], total, i == 0)
        _round_into(dx, rows, total)
        del total
        for words, dlogits in zip(slices, places):
            dweight_of(dlogits, x[rows], dweight[slice(*words)], True)
    for start, stop in late_groups(n_rows, slab):
        rows, known = slice(start, stop), min(max(slab + late.shape[0] - start, 0), stop - start)
        logits = late[start - slab :][:known, :vocab]
        if known == stop - start:
            options = {"row_start": start, "temperature": temperature, "ignore_index": ignore_index}
            _gradients(logits, target, saved, push, entropy_coef=bend, **options)
            if dx is not None:
                dx_of(logits, weight, dx[rows], True)
            dweight_of(logits, x[rows], dweight, not slab)
            continue
        slices = _late_slices(vocab, tail.numel() // (stop - start) // 16 * 16)
        mine, here = _placed(target[rows], ignore_index, slices)
        pushed = torch.where(here, push[rows], 0.0)
        part = _part(saved, rows)
        options = {"entropy_coef": None if bend is None else bend[rows], "pull": pull[rows]}
        options |= {"temperature": temperature, "ignore_index": _IGNORED}
        total = _summed(dx, rows)
        for i, (first, last) in enumerate(slices):
            dlogits = _view(tail, stop - start, last - first)
            new = dlogits[known:]
            logits_of(x[start + known : stop], weight[first:last], new)
            _gradients(new, mine[i], part, pushed[i], row_start=known, **options)
            _gradients(logits[:, first:last], mine[i], part, pushed[i], dlogits=dlogits[:known], **options)
            if total is not None:
                dx_of(dlogits, weight[first:last], total, i == 0)
            dweight_of(dlogits, x[rows], dweight[first:last], False)
        _round_into(dx, rows, total)
        del total
    return dx, dweight


def _summed(dx: torch.Tensor | None, rows: slice, free: torch.Tensor | None = None) -> torch.Tensor | None:
    """Where dx of some rows is summed over slices: in place, or, of 16 bits, in fp32, in `free` memory if it fits."""
    into = dx if dx is None else dx[rows]
    if into is None or into.dtype.itemsize > 2:
        return into
    if free is None or free.numel() < 2 * into.numel():
        return torch.empty(into.shape, dtype=torch.float32, device=into.device)
    return free.view(torch.float32)[: into.numel()].view(into.shape)


def _round_into(dx: torch.Tensor | None, rows: slice, total: torch.Tensor | None) -> None:
    """The sum of `_summed` into dx, where it was not made in place."""
    if total is not None and total.dtype != dx.dtype:
        dx[rows] = total


def _part(results: LogProbs, which: int | slice) -> LogProbs:
    return LogProbs(*(None if t is None else t[which] for t in results))


def _gradients(*args: torch.Tensor, **options: Any) -> None:
    """`row_log_prob_gradients`, which writes over logits. A configuration that fails has written nothing: what is
    repeated with the next one is this launch, not the whole backward, to which those logits would be gradients."""
    with_fallback(partial(row_log_prob_gradients, *args, **options))()
