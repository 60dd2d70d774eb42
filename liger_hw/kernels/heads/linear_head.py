"""The head under a loss: logits = x @ weight^T in chunks of rows, and what comes back from their gradient.

    x [n_rows, hidden], weight [vocab, hidden], dlogits [chunk, vocab]: dx = dlogits @ weight, dweight += dlogits^T @ x

The logits of one chunk at a time exist, in a buffer that every chunk uses again. Each chunk costs three GEMMs, each
into its final place: no temporary, no concatenation. A loss says what happens between them:

    chunks = plan_chunks(n_rows, hidden, vocab, x.itemsize, gradients=any(wanted), apart=True)
    grads = HeadGradients(x, weight, wanted, chunks, targets=target) if any(wanted) else None
    for start, logits, _ in sweep(chunks, x, weight, grads):
        launch_my_rows(plan, logits, bias, target, loss_rows, row_start=start)  # makes logits their own gradient
    dx, dweight, dbias = head_gradients(grads, x, bias)

What the body leaves in `logits` is the gradient that goes into `grads`; with grads=None nothing comes back and only the
first GEMM runs. Per-row tensors (target, loss_rows) are whole: a row kernel adds `start` to its row. The bias is added
by the row kernel, in fp32; its gradient is the column sum of dlogits. Losses with a teacher or a reference model give
`second=(x2, weight2)` and get its logits too, in a buffer of their own. Boundaries may be the caller's own
(`Chunks.of`); `order` sweeps rows in another order, or some of them only: row i of the sweep is then row order[i] of x.

How many rows a chunk has. LIGER_HW_LOSS_MEMORY_MIB set: as many as fit beside the gradients. Unset: as many as fit 1 GiB
beside the weight's gradient, or 2/5 of that gradient's memory where this is more, half as much again as SMALLEST at least
(one head), at most LARGEST or rows whose logits take as much as the gradient of x (H200, 32768 x 4096 x 1000: one chunk
1.16 ms, eight 2.67). Never below SMALLEST, twice that where every chunk reads and writes an fp32 weight gradient.
Divergences (`generous`), whose peers keep more: GENEROUS at most, and as much as the weight's gradient takes instead of
those 2/5 where there is one head. A distillation's first chunk has its teacher's logits in the memory of the weight's gradient
(`lending`: H200, linear JSD 4096 x 4096 x 131072, 29.2 -> 28.4 ms in the same memory). Heights are multiples of STEP that
the products like (`divide`).

Precision. A weight gradient in 16 bits is rounded once a chunk; the promise is an error within 1.5 times that of one
GEMM over all rows. Simulated (benchmarks/rounding.py; ratios at 4, 6 and 8 chunks), a running sum alone breaks it for
losses with targets: 1.6, 1.8, 2.1 for a flat head, 1.4, 1.7, 2.1 for a trained one. A loss that passes `targets` has their
entries kept out of the running sum (_head_targets.py) of more than PLAIN_ROUNDINGS chunks, two of which are 1.2 to 1.4 as
they are (H200: 1.0 to 1.5, and three up to 1.7; heads-rounding-h200.json): at most 1.2, 1.2, 1.3 for all of these, at most MOST_APART chunks.
(The limit: 1.5, 1.6, 1.9 where the part that all hidden states share is as long as the rest of them.) Losses without
have at most MOST_ROUNDINGS: divergences from a near teacher 1.2, 1.2, 1.2, from an unrelated one 1.3, 2.2, 2.7. Where
memory means more chunks they grow instead, or, where that is cheaper, the gradient is summed in an fp32 buffer.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Iterator, NamedTuple, Sequence

import torch

from ... import env
from ...runtime.operator import cdiv
from .head_targets import TargetEntries, most_frequent

SMALLEST = 1024
LARGEST = 4096
GENEROUS = 8192
DEFAULT_MIB = 1024
STEP = 256
PLAIN_ROUNDINGS = 2
MOST_ROUNDINGS = 4
MOST_APART = 8
_SLICE = 4096


class Chunks(NamedTuple):
    """bounds: (start, stop) of each chunk; wide: whether the weight gradient is summed in an fp32 buffer; lent: whether the
    second head's logits of the first chunk are in the memory of the weight's gradient."""

    bounds: tuple[tuple[int, int], ...]
    wide: bool
    lent: bool = False

    @property
    def rows(self) -> int:
        """Rows of the largest chunk."""
        return max((stop - start for start, stop in self.bounds), default=0)

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]], wide: bool = False) -> "Chunks":
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
    apart: bool = False,
    scale: int = 1,
    buffers: int = 1,
    generous: bool = False,
) -> Chunks:
    """Chunks for a head; see the top of this file.

    apart: whether targets are given to HeadGradients; scale: multiplies the memory budget; buffers: logits of so many
    heads exist at a time; generous: as divergences have them, larger ones where no budget is set
    """
    row = vocab * itemsize * buffers
    weight = vocab * hidden * (4 if wide else itemsize) if gradients else 0
    sums = 0
    if apart and gradients and itemsize == 2 and not wide:  # what _head_targets.py takes for the frequent ones
        row += most_frequent(n_rows, vocab) * itemsize
        sums = most_frequent(n_rows, vocab) * hidden * 4
    smallest = 2 * SMALLEST if wide else SMALLEST
    budget = env.get("LIGER_HW_LOSS_MEMORY_MIB")
    if budget is None:
        beside = weight if generous and buffers == 1 else 2 * weight // 5
        room = max((scale * DEFAULT_MIB << 20) - weight - sums, 0 if wide else beside)
        alike = (
            n_rows * hidden // (vocab * scale * buffers) if gradients else 0
        )  # logits no larger than the states' gradient
        most = scale * max(smallest, GENEROUS if generous else LARGEST, alike)
        rows = min(max(room // row, 3 * SMALLEST // (2 * buffers)), most)
    else:
        rows = ((scale * budget << 20) - weight - sums - (n_rows * hidden * itemsize if gradients else 0)) // row
    most = MOST_APART if apart else MOST_ROUNDINGS
    if not gradients or itemsize != 2 or wide:
        most = n_rows
    return at_most(most, n_rows, max(smallest, rows), row, vocab * hidden, wide)


def lending(chunks: Chunks, hidden: int, vocab: int) -> Chunks:
    """Chunks of two heads in the same memory, or less: the first is twice as tall, its second logits lie where the weight's
    gradient, of the logits' dtype, will be written after it."""
    n_rows = chunks.bounds[-1][1] if chunks.bounds else 0
    first = min(n_rows, 2 * chunks.rows, vocab * hidden // _stride(vocab))
    first = first if first == n_rows else first // STEP * STEP
    if not n_rows or chunks.wide or first < chunks.rows:
        return chunks
    rest = divide(n_rows - first, chunks.rows) if first < n_rows else ()
    return Chunks(((0, first), *((first + start, first + stop) for start, stop in rest)), False, True)


def at_most(most: int, n_rows: int, rows: int, row: int, weight: int, wide: bool = False) -> Chunks:
    """Chunks of `rows` rows, each of `row` bytes; where they are more than `most`, larger ones, or a wide gradient of
    `weight` elements, whichever takes less memory."""
    if len(divide(n_rows, rows)) > most:
        fewer = cdiv(cdiv(n_rows, STEP), most)
        fewer = STEP * (fewer + (fewer > 6 and fewer % 2))
        rows, wide = larger_or_wide(rows, fewer, row, weight)
        rows = max(rows, 2 * SMALLEST) if wide else rows
    return Chunks(divide(n_rows, rows), wide)


def larger_or_wide(rows: int, larger: int, row: int, weight: int) -> tuple[int, bool]:
    """(height, wide) where chunks of `rows` rows would be too many: `larger` ones, or these with a wide gradient of `weight`
    elements, whichever takes less memory; `row`: bytes a row takes."""
    wide = (larger - rows) * row > 4 * weight
    return (rows if wide else larger), wide


def divide(n_rows: int, rows: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of chunks of at most `rows` rows, heights multiples of STEP but for the last.

    cuBLAS multiplies some heights badly: H200, three products of 8192 x 4096 x 131072 bf16 in chunks of 1408 rows take 42.0
    ms, 1664 43.4, 1792 42.1, 2816 40.9; of 1280 40.9, 1536 40.7, 2048 40.0, 2560 40.0, 3072 39.6, 4096 39.4; one chunk
    38.6. So seven and more steps are an even number of them, fewer are shared out as evenly as they go.
    """
    step = min(STEP, rows)
    units, tall = cdiv(n_rows, step), rows // step
    tall -= tall > 6 and tall % 2
    count = cdiv(units, tall)
    if tall <= 6 or count < 2:
        heights = [units // count + (i < units % count) for i in range(count)]
    else:  # whole ones, then two that share what is left
        left = units - (count - 2) * tall
        half = cdiv(left, 2)
        half += half > 6 and half % 2
        heights = [tall] * (count - 2) + [half, left - half]
    stops = [step * tall for tall in accumulate(heights)]
    return tuple((start, min(stop, n_rows)) for start, stop in zip((0, *stops), stops))


def _stride(vocab: int) -> int:
    """Of a row of logits: each starts at a multiple of 16 elements, so that an odd vocabulary loads as wide as an even one."""
    return cdiv(vocab, 16) * 16


def logits_buffer(rows: int, vocab: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, vocab], `_stride(vocab)` apart."""
    return logits_in(torch.empty(rows * _stride(vocab), dtype=like.dtype, device=like.device), rows, vocab)


def logits_in(memory: torch.Tensor, rows: int, vocab: int) -> torch.Tensor:
    """The same at the beginning of memory that is there already."""
    stride = _stride(vocab)
    buffer = memory.view(-1)[: rows * stride].view(rows, stride)
    if vocab % 16:
        buffer[:, vocab:] = 0.0  # read, never used
    return buffer[:, :vocab]


class HeadGradients:
    """The gradients of one head, filled chunk by chunk; an unwanted one is None.

    dx [n_rows, hidden]; dweight [vocab, hidden], in fp32 where the chunks are `wide`; dbias [vocab], always summed in fp32
    (fp64). Rows of x that no chunk has (`order`) have a gradient of zero.
    targets: [rows of the sweep], in its order: the columns whose entries are kept apart; see _head_targets.py. Any column
    gives the right sum; outside the vocabulary there is none. plain: in torch, without kernels.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        wanted: Sequence[bool],
        chunks: Chunks,
        targets: torch.Tensor | None = None,
        plain: bool = False,
    ) -> None:
        self.dtype, device = weight.dtype, x.device
        vocab, hidden = weight.shape
        summed = torch.float32 if chunks.wide else weight.dtype
        coming = chunks.bounds[-1][1] if chunks.bounds else 0
        rows = torch.empty if coming == x.shape[0] else torch.zeros
        self.dx = rows(x.shape, dtype=x.dtype, device=device) if wanted[0] else None
        self.dweight = (
            (torch.empty if coming else torch.zeros)(weight.shape, dtype=summed, device=device) if wanted[1] else None
        )
        wide_bias = torch.promote_types(weight.dtype, torch.float32)
        self.dbias = torch.zeros(vocab, dtype=wide_bias, device=device) if wanted[2] else None
        rounds = wanted[1] and summed.itemsize == 2 and len(chunks.bounds) > PLAIN_ROUNDINGS
        self._entries = TargetEntries(targets, vocab, hidden, plain) if rounds and targets is not None else None

    def add(
        self, dlogits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: slice | torch.Tensor, start: int
    ) -> None:
        """Take in the gradient of the logits of x, the rows `start`.. of the sweep and `rows` (slice, indices) of all."""
        if self.dx is not None:
            if isinstance(rows, slice):
                dx_of(dlogits, weight, self.dx[rows], True)
            else:
                part = x.new_empty(x.shape)
                dx_of(dlogits, weight, part, True)
                self.dx.index_copy_(0, rows, part)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)
        if self.dweight is not None:
            if self._entries is not None:
                self._entries.take(dlogits, x, start, _add_product)
            dweight_of(dlogits, x, self.dweight, start == 0)

    def finish(self, x: torch.Tensor, order: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """After the last chunk; the logits' buffer may be overwritten."""
        if self._entries is not None:
            scratch = buffer.view(-1).view(torch.float32) if buffer.shape[1] % 16 == 0 else None
            self._entries.restore(self.dweight, x, order, scratch)


def head_gradients(
    grads: HeadGradients | None, x: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) in the dtypes of x, weight and bias, as an operator returns them: empty where unwanted."""
    if grads is None:
        return x.new_empty(0), x.new_empty(0), x.new_empty(0)
    dweight = x.new_empty(0) if grads.dweight is None else grads.dweight.to(grads.dtype)
    dbias = x.new_empty(0) if grads.dbias is None else grads.dbias.to(grads.dtype if bias is None else bias.dtype)
    return x.new_empty(0) if grads.dx is None else grads.dx, dweight, dbias


def sweep(
    chunks: Chunks,
    x: torch.Tensor,
    weight: torch.Tensor,
    grads: HeadGradients | None = None,
    *,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    order: torch.Tensor | None = None,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """(start, logits, second logits or None) of one chunk after the other; see the top of this file.

    logits [stop - start, vocab] are x[start:stop] @ weight^T, rounded to x's dtype, in a buffer whose rows may be padded
    (the padding is ours: `owned`). When the body is done with a chunk, what it left there goes into `grads`.
    """
    x, weight = x.detach(), weight.detach()
    later = max((stop - start for start, stop in chunks.bounds[1:]), default=0) if chunks.lent else 0
    buffer, other = logits_buffer(max(chunks.rows, 2 * later), weight.shape[0], x), None
    if second is not None:
        x2, weight2 = second[0].detach(), second[1].detach()
        if chunks.lent:
            other = logits_in(grads.dweight, chunks.bounds[0][1], weight2.shape[0])
        else:
            other = logits_buffer(chunks.rows, weight2.shape[0], x2)
    for start, stop in chunks.bounds:
        rows = slice(start, stop) if order is None else order[start:stop]
        part, logits, logits2 = x[rows], buffer[: stop - start], None
        logits_of(part, weight, logits)
        if other is not None:
            if chunks.lent and start:
                other = buffer[later:]
            logits2 = other[: stop - start]
            logits_of(x2[rows], weight2, logits2)
        yield start, logits, logits2
        if grads is not None:
            grads.add(logits, part, weight, rows, start)
    if grads is not None:
        grads.finish(x, order, buffer)


FEW_APART = 1024
"""Words."""


def whole_words(vocab: int, itemsize: int) -> list[slice]:
    """What of a vocabulary is multiplied at a time: all of it, or the few words after a multiple of 16 bytes and then the
    rest. cuBLAS' fast kernels take whole 16 bytes only, however the rows are aligned: H200, 8192 x 4096 x 50257 bf16,
    forward and backward took 67.2 ms at once and take 13.7 so (the three products of 50257 words 77.9, of 50256 12.7);
    a multiple of 128 words is no better: 15.7 (heads-odd-h200.json). Of a vocabulary below FEW_APART, at once: too many
    rows would have their target among the few words (`dx_of`)."""
    whole = vocab - vocab % (16 // itemsize)
    return [slice(0, vocab)] if whole == vocab or vocab < FEW_APART else [slice(whole, vocab), slice(0, whole)]


def logits_of(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    """logits [n, vocab] = x @ weight^T"""
    for words in whole_words(logits.shape[1], logits.itemsize):
        torch.mm(x, weight[words].t(), out=logits[:, words])


def dx_of(dlogits: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor, first: bool) -> None:
    """dx = dlogits @ weight, or dx += it where not first. The few words come first: what they sum to is rounded once more,
    and is small but for rows whose target is one of them; the sum of the others never is."""
    for words in whole_words(dlogits.shape[1], dlogits.itemsize):
        _add_product(dx, dlogits[:, words], weight[words], first)
        first = False


def dweight_of(dlogits: torch.Tensor, x: torch.Tensor, dweight: torch.Tensor, first: bool) -> None:
    """dweight = dlogits^T @ x, or dweight += it where not first."""
    for words in whole_words(dlogits.shape[1], dlogits.itemsize):
        _add_product(dweight[words], dlogits[:, words].t(), x, first)


_wide_output: dict[str, bool] = {}
"""Device type -> whether torch multiplies 16-bit matrices into an fp32 one there (torch.mm's out_dtype)."""


def _refused(error: Exception) -> bool:
    """Whether torch said no before anything ran: an older torch, or a device without such a GEMM."""
    return isinstance(error, (TypeError, NotImplementedError)) or "out_dtype" in str(error)


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """out = a @ b, or out += a @ b, in out's dtype: the operands' own, or fp32."""
    if type(out) is not torch.Tensor:
        return  # a rehearsal's fake tensors (autotune/compile_ahead.py), for which torch has no out_dtype
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
        return
    kind = out.device.type
    if _wide_output.get(kind, True):
        try:
            if first:
                torch.mm(a, b, out_dtype=out.dtype, out=out)
            else:
                torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
            return
        except (TypeError, NotImplementedError, RuntimeError) as error:
            if not _refused(error):
                raise
            _wide_output[kind] = False
    b = b.to(out.dtype)
    for start in range(0, out.shape[0], _SLICE):  # by slices: the whole of `a` in fp32 would be twice the logits
        part = a[start : start + _SLICE].to(out.dtype)
        into = out[start : start + _SLICE]
        torch.mm(part, b, out=into) if first else into.addmm_(part, b)
