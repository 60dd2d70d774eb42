"""The linear head below a loss: logits = x @ weight^T in chunks of rows, and gradients of x and weight from dlogits.

    x [n_rows, hidden], weight [vocab, hidden], dlogits [chunk, vocab]: dx = dlogits @ weight, dweight += dlogits^T @ x

Every fused linear loss and every chunked loss loops over `sweep`. All chunks share one buffer of logits. A chunk costs
three GEMMs, each written to its final place. After the first, the loss runs its row kernel:

    chunks = plan_chunks(n_rows, hidden, vocab, x.itemsize, with_targets=True)
    grads = HeadGradients(x, weight, needs, chunks, target)
    for start, logits, _ in sweep(chunks, x, weight, grads):
        row_kernel(logits, target, losses, row_start=start)   # turns logits into their own gradient, in place
    dx, dweight, dbias = grads.results(bias)

The body overwrites `logits` with their gradient, which is added to `grads`. Without gradients only the first GEMM runs.
Tensors with one value a row (target, losses) are passed whole: a row kernel adds `row_start` to its row. The row kernel
adds the bias, in fp32; the bias's gradient is the column sum of dlogits.

A loss with a teacher passes `second=(x2, weight2)` and gets that head's logits in a second buffer. `order` sweeps some
of the rows, or all in another order: row i of the sweep is row order[i] of x. Logits are rounded to x's dtype, as a
linear layer's are; `sweep_in_fp32` computes fp32 logits of two heads.

Memory. With LIGER_HW_LOSS_MEMORY_MIB set, a chunk has as many rows as fit beside the gradients. Unset, it has as many
as fit 1 GiB together with the weight's gradient, or a third of that gradient's size where this is more. A chunk has at
least MIN_ROWS rows, or twice as many with an fp32 weight gradient, which every chunk reads and writes. It has at most
MAX_ROWS rows, or more where its logits are still no larger than the gradient of x. Divergences (`prefer_large`) may
have MAX_ROWS_DIVERGENCE rows, and with one head as much memory as the weight's gradient.

Ignored rows (prompts, padding) can be left out of the products, but the host must know how many remain. A
`CountedRows(labels)` made first in a step counts them on the device and copies the count before the loss needs it.
Patched models make one; your own training loop passes it as `compact`. Inside torch.compile and while a graph is
captured every row is computed.

Precision. A 16-bit weight gradient is rounded once a chunk. To keep its error within 1.5 times the error of a GEMM over
all rows, a loss without targets has at most MAX_CHUNKS chunks, a loss with targets MAX_CHUNKS_WITH_TARGETS. With more
than MAX_PLAIN_CHUNKS, targets' entries are accumulated separately (`head_targets.py`). If the memory limit gives more
chunks, they become larger, or the gradient is accumulated in an fp32 buffer if that takes less memory.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch

from ... import env, private
from ...registry import backend_of, is_capturing_or_tracing
from ...runtime.operator import autocast_dtype, cdiv, check, check_tensors, graph_is_kept, to_flatten
from ..losses.cross_entropy_rows import absent
from ..losses.loss_gradient import scale_gradient
from .head_targets import TargetEntries, max_frequent

MIN_ROWS = 1024
MAX_ROWS = 4096
MAX_ROWS_DIVERGENCE = 8192
DEFAULT_MIB = 1024
STEP = 256
"""Every chunk but the last has a multiple of this number of rows (except in `plan_groups`)."""
MAX_PLAIN_CHUNKS = 2
MAX_CHUNKS = 4
MAX_CHUNKS_WITH_TARGETS = 8
MIN_SPLIT_VOCAB = 1024
"""`gemm_columns` does not split smaller vocabularies: many targets would be unaligned columns (see `dx_of`)."""
MIN_PART = 256
"""Fewest rows of fp32 logits in one GEMM: with fewer, reading the weight takes most of the time."""
_FP32_SLICE = 4096
"""Rows converted to fp32 at a time where torch has no 16-bit GEMM with an fp32 result."""
MAX_COUNTED_SHARE = 31 / 32
"""Ignored rows are left out only if at most this share of the rows remains: gathering rows takes time."""

# -- inputs ------------------------------------------------------------------------------------------------------------


def checked_head(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    names: tuple[str, str, str] = ("input", "weight", "bias"),
    rows: str = "n_rows",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [rows, hidden], weight [vocab, hidden] and bias [vocab] or None, cast to autocast's dtype where it is on.

    Under torch.no_grad they are detached, so that a Function's forward computes no gradients. names: the public names
    of x, weight and bias; rows: names of the leading dimensions of x ("batch, length").
    Raises `TypeError` for an argument that is not a tensor, `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_tensors(op, optional=names[2:], **dict(zip(names, (x, weight, bias))))
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():
        x, weight, bias = x.detach(), weight.detach(), bias if bias is None else bias.detach()
    dims = 2 + rows.count(",")
    if x.dim() != dims or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not weight.numel():
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        expected = f"{names[0]} must be [{rows}, hidden] and {names[1]} [vocab, hidden]"
        check(False, op, f"{expected}, got {got}{_misfit(x, weight, dims, names)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        pairs = [(name, str(t.dtype)) for name, t in zip(names, (x, weight, bias)) if t is not None]
        present, dtypes = (", ".join(words) for words in zip(*pairs))
        check(False, op, f"{present} must share one dtype, got {dtypes}; cast them or use autocast")
    if bias is not None and bias.shape != weight.shape[:1]:
        check(False, op, f"{names[2]} must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    return x, weight, bias


def _misfit(x: torch.Tensor, weight: torch.Tensor, dims: int, names: tuple[str, ...]) -> str:
    """The likely mistake and its remedy; "" if no mistake is likely."""
    if x.dim() == 2 and weight.dim() == max(3, dims) and x.shape[1] == weight.shape[-1]:
        return f": {names[0]} and {names[1]} are swapped"
    if x.dim() == 3 and dims == 2 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]:
        return to_flatten(**{names[0]: x})
    if x.dim() == dims and weight.dim() == 2 and x.shape[-1] == weight.shape[0]:
        return f": {names[1]} is transposed, pass {names[1]}.T"
    return ""


def sums_in_fp32(op: str, accum_dtype: torch.dtype | None, weight: torch.Tensor) -> bool:
    """Whether the weight's gradient needs an fp32 buffer: accum_dtype is fp32, and the weight's dtype is narrower."""
    if accum_dtype not in (None, torch.float32, weight.dtype):
        check(False, op, f"accum_dtype must be None, torch.float32 or the weight's dtype, got {accum_dtype}")
    return accum_dtype is torch.float32 and weight.dtype.itemsize < 4


# -- rows that count -------------------------------------------------------------------------------------------------


class CountedRows:
    """The number of `labels` (any shape) that are not ignore_index, counted on the device and copied to the host.

    labels: a tensor, or a tuple of tensors if the loss will take one of them; the largest count is used. The loss may
    ignore more rows than these labels (shifted labels, for example). If it ignores fewer, the device asserts.
    """

    def __init__(self, labels: Any, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index
        self._count = self._arrived = None
        several = labels if isinstance(labels, tuple) else (labels,)
        if is_capturing_or_tracing() or not all(type(t) is torch.Tensor and not t.is_meta for t in several):
            return  # a fake tensor has no number to read
        count = reduce(torch.maximum, [(t.detach() != ignore_index).sum() for t in several])
        if count.is_cpu:
            self._count = count
            return
        self._count = torch.empty((), dtype=count.dtype, pin_memory=True).copy_(count, non_blocking=True)
        self._arrived = torch.get_device_module(count.device.type).Event()
        self._arrived.record()

    def most(self) -> int | None:
        """The count, after waiting for its copy and all work queued before the copy; None in torch.compile, in a graph
        capture, or for fake tensors."""
        if self._count is None or is_capturing_or_tracing():
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._count)


def scatter_rows(rows: torch.Tensor | None, order: torch.Tensor | None, n_rows: int, fill: int = 0) -> Any:
    """A tensor [n_rows, ...] with rows [k, ...] at the indices `order`, and `fill` elsewhere. Order None: rows."""
    if rows is None or order is None:
        return rows
    return rows.new_full((n_rows, *rows.shape[1:]), fill).index_copy_(0, order, rows)


def remaining_rows(
    op: str, target: torch.Tensor, ignore_index: int, compact: bool | CountedRows
) -> torch.Tensor | None:
    """Sorted indices of the rows that are not ignored, or None for all rows.

    compact: True counts now and waits for the device; a `CountedRows` from earlier in the step avoids the wait. None
    where too few rows are ignored, in a graph capture or torch.compile, and for a count of another ignore_index.
    """
    if not isinstance(compact, (bool, CountedRows)):
        check(False, op, f"compact must be a bool or a CountedRows, got {type(compact).__name__}")
    if compact is False or is_capturing_or_tracing():
        return None
    counted = CountedRows(target, ignore_index) if compact is True else compact
    most = counted.most() if counted.ignore_index == ignore_index else None
    if most is None or most > MAX_COUNTED_SHARE * target.shape[0]:
        return None
    ignored = target == ignore_index
    order = torch.argsort(ignored.to(torch.uint8), stable=True)  # rows that are not ignored come first, in order
    if compact is not True:
        fits = (target.shape[0] - ignored.sum()) <= most
        private.assert_async(fits, f"{op}: fewer rows are ignored than in the labels that compact has counted")
    return order[:most]


# -- chunks ----------------------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """The chunks of a head's rows. bounds: (start, stop) of each; wide: the weight gradient is accumulated in an fp32
    buffer; borrowed: both heads' fp32 logits of the first chunk lie in the memory of the weight's gradient."""

    bounds: Sequence[tuple[int, int]]
    wide: bool = False
    borrowed: bool = False

    @property
    def n_rows(self) -> int:
        return self.bounds[-1][1] if self.bounds else 0

    @property
    def rows(self) -> int:
        """Rows of the largest chunk."""
        return max((stop - start for start, stop in self.bounds), default=0)


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
) -> Chunks:
    """The chunks of n_rows rows; the rules are at the top of this file.

    itemsize: bytes of an element of x and weight; heads: how many heads' logits exist at a time
    with_targets: whether `HeadGradients` gets the rows' targets; scale: multiplies the memory budget
    prefer_large: larger chunks if no budget is set, for divergences
    """
    row_bytes = vocab * itemsize * heads
    gradient_bytes = vocab * hidden * (4 if wide else itemsize) if gradients else 0
    is_rounded = gradients and itemsize == 2 and not wide  # the weight gradient, once a chunk
    sums_bytes = 0
    if with_targets and is_rounded:  # memory for the frequent targets (`head_targets.py`)
        row_bytes += max_frequent(n_rows, vocab) * itemsize
        sums_bytes = max_frequent(n_rows, vocab) * hidden * 4
    smallest = 2 * MIN_ROWS if wide else MIN_ROWS
    budget = env.LIGER_HW_LOSS_MEMORY_MIB
    if budget is None:
        share = gradient_bytes if prefer_large and heads == 1 else gradient_bytes // 3
        room = max((scale * DEFAULT_MIB << 20) - gradient_bytes - sums_bytes, 0 if wide else share)
        # rows whose logits are no larger than the gradient of x
        free_rows = n_rows * hidden // (vocab * scale * heads) if gradients else 0
        largest = scale * max(smallest, MAX_ROWS_DIVERGENCE if prefer_large else MAX_ROWS, free_rows)
        rows = min(room // row_bytes, largest)
    else:
        dx_bytes = n_rows * hidden * itemsize if gradients else 0
        rows = ((scale * budget << 20) - gradient_bytes - sums_bytes - dx_bytes) // row_bytes
    max_chunks = (MAX_CHUNKS_WITH_TARGETS if with_targets else MAX_CHUNKS) if is_rounded else n_rows
    return _limit_chunks(max_chunks, n_rows, max(smallest, rows), row_bytes, vocab * hidden, wide, STEP)


def plan_groups(n_rows: int, group: int, hidden: int, vocab: int, itemsize: int, gradients: bool) -> Chunks:
    """Chunks of whole groups of `group` rows. Chunks may split groups only where one group is too large.

    A chunk's logits take at most DEFAULT_MIB, or what LIGER_HW_LOSS_MEMORY_MIB leaves beside the gradients. Precision
    is handled as in `plan_chunks` with targets.
    """
    row_bytes = vocab * itemsize
    limit = max(MIN_ROWS, (DEFAULT_MIB << 20) // row_bytes)
    if env.LIGER_HW_LOSS_MEMORY_MIB is not None:
        chunks = plan_chunks(n_rows, hidden, vocab, itemsize, gradients=gradients, with_targets=True)
        limit = max(1, chunks.rows)
    max_chunks = MAX_CHUNKS_WITH_TARGETS if gradients and itemsize == 2 else n_rows
    step = group if 1 < group <= limit else STEP
    return _limit_chunks(max_chunks, n_rows, limit, row_bytes, vocab * hidden, False, step)


def plan_shared(n_rows: int, hidden: int, itemsize: int, *, wide: bool, world: int = 1) -> Chunks:
    """Chunks of multiples of `world` rows, for a head whose vocabulary is split between `world` ranks.

    All ranks must choose the same chunks, but do not know how many columns the other ranks have. So a chunk has
    max(hidden, MIN_ROWS) rows: with `hidden` rows the logits of any rank are as large as its weight gradient.
    LIGER_HW_LOSS_MEMORY_MIB is not read. Precision is handled as in `plan_chunks` with targets.
    """
    max_chunks = MAX_CHUNKS_WITH_TARGETS if itemsize == 2 and not wide else n_rows
    rows = max(2 * MIN_ROWS if wide else MIN_ROWS, hidden // STEP * STEP)
    chunks = _limit_chunks(max_chunks, n_rows, rows, itemsize, hidden, wide, STEP)
    bounds = divide(n_rows // world, max(1, chunks.rows // world), STEP)
    return Chunks(tuple((start * world, stop * world) for start, stop in bounds), chunks.wide)


def borrow_gradient_memory(chunks: Chunks, hidden: int, vocab: int) -> Chunks:
    """Chunks for two heads that take no more memory than `chunks`, with a first chunk of up to twice as many rows.

    The logits of that chunk lie in the memory of the weight's gradient, which is written after it (`sweep_in_fp32`).
    """
    n_rows = chunks.n_rows
    first = min(n_rows, 2 * chunks.rows, vocab * hidden // padded(vocab))
    first = first if first == n_rows else first // STEP * STEP
    if not n_rows or chunks.wide or first < chunks.rows:
        return chunks
    rest = divide(n_rows - first, chunks.rows, STEP) if first < n_rows else ()
    bounds = ((0, first), *((first + start, first + stop) for start, stop in rest))
    return Chunks(bounds, wide=False, borrowed=True)


def padded(columns: int) -> int:
    """Row stride of a logits buffer, in elements: a multiple of 16, so that vector loads work for any vocabulary."""
    return cdiv(columns, 16) * 16


def divide(n_rows: int, rows: int, step: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of chunks of about equal size, at most `rows`; all but the last have a multiple of `step` rows."""
    step = min(step, rows)
    n_steps = cdiv(n_rows, step)
    count = cdiv(n_steps, rows // step)
    stops = [step * n for n in accumulate(n_steps // count + (i < n_steps % count) for i in range(count))]
    return tuple((start, min(stop, n_rows)) for start, stop in zip((0, *stops), stops))


def _limit_chunks(
    max_chunks: int, n_rows: int, rows: int, row_bytes: int, n_weights: int, wide: bool, step: int
) -> Chunks:
    """Chunks of `rows` rows. More than max_chunks become larger, or wide if an fp32 gradient takes less memory."""
    if len(divide(n_rows, rows, step)) > max_chunks:
        larger = step * cdiv(cdiv(n_rows, step), max_chunks)
        if (larger - rows) * row_bytes > 4 * n_weights:
            rows, wide = max(rows, 2 * MIN_ROWS), True
        else:
            rows = larger
    return Chunks(divide(n_rows, rows, step), wide)


# -- gradients -------------------------------------------------------------------------------------------------------


class Needs(NamedTuple):
    """Which gradients of a head are needed."""

    dinput: bool = False
    dweight: bool = False
    dbias: bool = False


class HeadGradients:
    """The gradients of one head, which `sweep` fills chunk by chunk. Those that are not needed stay None.

    dx [n_rows, hidden], zero in rows that no chunk covers; dweight [vocab, hidden], fp32 where the chunks are `wide`;
    dbias [vocab], accumulated in fp32 (fp64 for fp64).

    targets: [rows of the sweep], in its order: for each row the column whose dlogits are accumulated separately
    (`head_targets.py`). Any column gives the right sum; one outside the vocabulary is skipped.
    plain: the targets' entries are accumulated by torch, without Triton kernels
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        chunks: Chunks,
        targets: torch.Tensor | None = None,
        plain: bool = False,
    ) -> None:
        self._like, self.dtype, device = x, weight.dtype, x.device
        vocab, hidden = weight.shape
        sum_dtype = torch.float32 if chunks.wide else weight.dtype
        dx, dweight, dbias = needs
        allocate = torch.empty if chunks.n_rows == x.shape[0] else torch.zeros
        self.dx = allocate(x.shape, dtype=x.dtype, device=device) if dx else None
        allocate = torch.empty if chunks.n_rows else torch.zeros
        self.dweight = allocate(weight.shape, dtype=sum_dtype, device=device) if dweight else None
        bias_dtype = torch.promote_types(weight.dtype, torch.float32)
        self.dbias = torch.zeros(vocab, dtype=bias_dtype, device=device) if dbias else None
        is_rounded = dweight and sum_dtype.itemsize == 2 and len(chunks.bounds) > MAX_PLAIN_CHUNKS
        self._entries = TargetEntries(targets, vocab, hidden, plain) if is_rounded and targets is not None else None

    def add(
        self, dlogits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: slice | torch.Tensor, start: int
    ) -> None:
        """Add the products of one chunk. start: the chunk's first row in the sweep; rows: its rows of the input."""
        if self.dx is not None:
            self.add_dx(dlogits, weight, rows, start)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)
        if self.dweight is not None:
            if self._entries is not None:
                self._entries.extract(dlogits, x, start, add_product)
            dweight_of(dlogits, x, self.dweight, start == 0)

    def add_dx(self, dlogits: torch.Tensor, weight: torch.Tensor, rows: slice | torch.Tensor, start: int) -> None:
        """`add` for dx alone, with the same arguments."""
        if isinstance(rows, slice):
            dx_of(dlogits, weight, self.dx[rows], True)
        else:
            part = self.dx.new_empty((dlogits.shape[0], self.dx.shape[1]))
            dx_of(dlogits, weight, part, True)
            self.dx.index_copy_(0, rows, part)

    def finish(self, x: torch.Tensor, order: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """Call after the last chunk. buffer: the logits' memory, which may be overwritten."""
        if self._entries is not None:
            scratch = buffer.view(-1).view(torch.float32) if buffer.shape[1] % 16 == 0 else None
            self._entries.restore(self.dweight, x, order, scratch)

    def results(self, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dx, dweight, dbias) in the dtypes of x, weight and bias. Gradients that are not needed are empty tensors."""
        return (
            absent(self._like) if self.dx is None else self.dx,
            absent(self._like) if self.dweight is None else self.dweight.to(self.dtype),
            absent(self._like) if self.dbias is None else self.dbias.to(self.dtype if bias is None else bias.dtype),
        )


def scale_gradients(
    grads: Sequence[torch.Tensor], needs: Sequence[bool], grad_output: torch.Tensor, stats: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The backward of a fused loss: `scale_gradient` of each saved gradient, None where not needed."""
    kept = graph_is_kept()
    nan = float("nan")  # for inf: inf * (a - b) may be inf, but the exact gradient, inf * a - inf * b, is nan
    grad_output = torch.nan_to_num(grad_output, nan=nan, posinf=nan, neginf=nan)
    return tuple(scale_gradient(g, grad_output, stats, kept) if w else None for g, w in zip(grads, needs))


# -- the sweep -------------------------------------------------------------------------------------------------------


def sweep(
    chunks: Chunks,
    x: torch.Tensor,
    weight: torch.Tensor,
    grads: HeadGradients | None = None,
    *,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
    order: torch.Tensor | None = None,
    scan: Callable[[int, torch.Tensor], None] | None = None,
    tile: int = 0,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Yields (start, logits, second logits or None) for one chunk after the other; see the top of this file.

    logits [stop - start, vocab] are x[start:stop] @ weight^T, rounded to x's dtype, in a buffer with padded rows (row
    kernels take `uses_padding=True`). The body replaces them by their gradient, which is then added to `grads`.

    scan: called with (first row, logits) of each half of a chunk, before the body. What it sends to other ranks travels
    during the second half's product, or while the body works on the first half.
    tile: rows of every product (`tile_logits`), at least the rows of a chunk; 0: the chunk's rows
    """
    x, weight = x.detach(), weight.detach()
    buffer = logits_buffer(max(chunks.rows, tile), weight.shape[0], x)
    if second is not None:
        x2, weight2 = second[0].detach(), second[1].detach()
        other = logits_buffer(chunks.rows, weight2.shape[0], x2)
    for start, stop in chunks.bounds:
        rows = slice(start, stop) if order is None else order[start:stop]
        part, logits, logits2 = x[rows], buffer[: stop - start], None
        for half in (slice(None),) if scan is None else _halves(stop - start):
            if tile:
                tile_logits(part, weight, buffer[:tile])
            else:
                logits_of(part[half], weight, logits[half])
            if scan is not None:
                scan(start + (half.start or 0), logits[half])
        if second is not None:
            logits2 = other[: stop - start]
            logits_of(x2[rows], weight2, logits2)
        yield start, logits, logits2
        if grads is not None:
            grads.add(logits, part, weight, rows, start)
    if grads is not None:
        grads.finish(x, order, buffer)


def sweep_in_fp32(
    chunks: Chunks,
    x: torch.Tensor,
    weight: torch.Tensor,
    second: tuple[torch.Tensor, torch.Tensor],
    grads: HeadGradients,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`sweep` for two heads with fp32 logits: yields (start, logits, second logits, dlogits) for parts of chunks.

    The body writes the gradient of a part's logits into dlogits, in x's dtype. After the last part of a chunk, the
    chunk's dlogits are added to `grads`. For 16-bit heads this takes the memory of `sweep`: half for the chunk's
    dlogits, half for the fp32 logits of a part (a quarter of the chunk, or MIN_PART rows if more). With
    `chunks.borrowed`, the first chunk's parts are larger and lie in the memory of the weight's gradient.
    """
    x, weight, x2, weight2 = (t.detach() for t in (x, weight, *second))
    vocab, itemsize = weight.shape[0], x.dtype.itemsize
    stride = padded(vocab)
    borrowed = _fp32_logits_in(grads.dweight, vocab) if chunks.borrowed else None
    borrows = borrowed is not None and len(borrowed[0]) > 0
    rows = max((stop - start for start, stop in chunks.bounds[1 if borrows else 0 :]), default=0)
    part = max(rows * itemsize // 8, min(rows, MIN_PART))
    memory = logits_memory(x, max(chunks.rows, rows + part * 8 // itemsize) * stride)
    buffer, fp32_part = logits_in(memory, chunks.rows, vocab), _fp32_logits_in(memory[rows * stride :], vocab)
    for start, stop in chunks.bounds:
        logits, logits2 = borrowed if borrows and not start else fp32_part
        dlogits = buffer[: stop - start]
        for first, last in divide(stop - start, len(logits), STEP):
            part_rows, n = slice(start + first, start + last), last - first
            logits_of(x[part_rows], weight, logits[:n])
            logits_of(x2[part_rows], weight2, logits2[:n])
            yield start + first, logits[:n], logits2[:n], dlogits[first:last]
        grads.add(dlogits, x[start:stop], weight, slice(start, stop), start)
    grads.finish(x, None, buffer)


def _halves(rows: int) -> list[slice]:
    """Two halves of a chunk's rows. A small chunk is not split."""
    half = rows // 2 // STEP * STEP
    return [slice(0, half), slice(half, rows)] if half else [slice(0, rows)]


def logits_memory(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Uninitialised memory of the dtype and device of `like`; zeros on a CPU, where torch's bf16 products with AMX read
    up to 31 elements past a row, and a NaN there would make the row's results NaN."""
    return like.new_zeros(shape) if like.device.type == "cpu" else like.new_empty(shape)


def logits_buffer(rows: int, vocab: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised logits [rows, vocab] with padded rows, of the dtype and device of `like`."""
    return logits_in(logits_memory(like, rows * padded(vocab)), rows, vocab)


def logits_in(memory: torch.Tensor, rows: int, vocab: int) -> torch.Tensor:
    """Logits [rows, vocab] with padded rows, at the beginning of `memory`."""
    stride = padded(vocab)
    buffer = memory.view(-1)[: rows * stride].view(rows, stride)
    if vocab % 16:
        buffer[:, vocab:] = 0.0  # row kernels read the padding, but discard it
    return buffer[:, :vocab]


def _fp32_logits_in(memory: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 buffers of logits [rows, vocab] in `memory`, with as many rows as fit."""
    stride, flat = padded(vocab), memory.view(-1)
    flat = flat[: flat.numel() // 2 * 2].view(torch.float32)
    rows = flat.numel() // (2 * stride)
    return logits_in(flat, rows, vocab), logits_in(flat[rows * stride :], rows, vocab)


# -- the three products ----------------------------------------------------------------------------------------------


def gemm_columns(vocab: int, itemsize: int, alignment: int) -> list[slice]:
    """The columns of each GEMM: the whole vocabulary, or the unaligned last columns and then the aligned part.

    alignment: the GEMM library's fast kernels need rows of a multiple of this many bytes (`Backend.gemm_alignment`)
    """
    aligned = vocab - vocab % max(1, alignment // itemsize)
    if aligned == vocab or vocab < MIN_SPLIT_VOCAB:
        return [slice(0, vocab)]
    return [slice(aligned, vocab), slice(0, aligned)]


def _columns_of(logits: torch.Tensor) -> list[slice]:
    return gemm_columns(logits.shape[1], logits.itemsize, backend_of(logits.device).gemm_alignment)


def logits_of(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    """logits [n, vocab] = x @ weight^T, in x's dtype or fp32"""
    for columns in _columns_of(logits):
        if logits.dtype == x.dtype:
            torch.mm(x, weight[columns].t(), out=logits[:, columns])
        else:  # transposed, because `add_product` may convert its first factor slice by slice
            add_product(logits[:, columns].t(), weight[columns], x.t(), True)


INVARIANT_ROWS = 1024
"""Rows of every product in batch-invariant mode."""


def tile_logits(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    """logits [tile, vocab] = x @ weight^T, where x [at most tile, hidden] is padded to `tile` rows of zeros.

    A GEMM library chooses its kernel, and thus the order in which a row is summed, by a product's sizes and alignment.
    Both are always the same here, so a row's logits do not depend on the other rows.
    """
    rows = x.new_zeros((logits.shape[0], x.shape[1]))
    rows[: x.shape[0]] = x
    logits_of(rows, weight, logits)


def dx_of(dlogits: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor, first: bool) -> None:
    """dx = dlogits @ weight if first, else dx += dlogits @ weight.

    The product of the unaligned columns comes first, since it is rounded twice. It is small, except in rows whose
    target is one of these columns.
    """
    for columns in _columns_of(dlogits):
        add_product(dx, dlogits[:, columns], weight[columns], first)
        first = False


def dweight_of(dlogits: torch.Tensor, x: torch.Tensor, dweight: torch.Tensor, first: bool) -> None:
    """dweight = dlogits^T @ x if first, else dweight += dlogits^T @ x."""
    for columns in _columns_of(dlogits):
        add_product(dweight[columns], dlogits[:, columns].t(), x, first)


_fp32_result: dict[str, bool] = {}
"""Device type -> whether torch.mm supports out_dtype there: 16-bit factors with an fp32 product."""


def _is_unsupported(error: RuntimeError) -> bool:
    """Whether torch raised this error because the device has no GEMM of 16-bit factors with an fp32 result."""
    messages = "out_dtype", "output type float is not supported"  # the latter with ROCm before torch 2.10
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in messages)


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """out = a @ b if first, else out += a @ b; out has the operands' dtype or is fp32."""
    if type(out) is not torch.Tensor:
        return  # fake tensors (autotune/compile_ahead.py), for which torch has no out_dtype
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
        return
    kind = out.device.type
    if _fp32_result.get(kind, True):
        try:
            if first:
                torch.mm(a, b, out_dtype=out.dtype, out=out)
            else:
                torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
            return
        except RuntimeError as error:
            if not _is_unsupported(error):
                raise
            _fp32_result[kind] = False
    b = b.to(out.dtype)
    for start in range(0, out.shape[0], _FP32_SLICE):  # all of `a` in fp32 would take twice the logits' memory
        part = a[start : start + _FP32_SLICE].to(out.dtype)
        into = out[start : start + _FP32_SLICE]
        torch.mm(part, b, out=into) if first else into.addmm_(part, b)
