"""The head under a loss: logits = x @ weight^T in chunks of rows, and what comes back from their gradient.

    x [n_rows, hidden], weight [vocab, hidden], dlogits [chunk, vocab]: dx = dlogits @ weight, dweight += dlogits^T @ x

The logits of one chunk at a time exist, in a buffer that every chunk uses again. Each chunk costs three GEMMs, each
into its final place: no temporary, no concatenation. A loss says what happens between them:

    chunks = plan_chunks(n_rows, hidden, vocab, x.itemsize, gradients=any(wanted))
    grads = HeadGradients(x, weight, wanted, chunks.wide) if any(wanted) else None
    for start, logits, _ in sweep(chunks, x, weight, grads):
        launch_my_rows(plan, logits, bias, target, loss_rows, row_start=start)  # makes logits their own gradient
    dx, dweight, dbias = head_gradients(grads, x, bias)

What the body leaves in `logits` is the gradient that goes into `grads`; with grads=None nothing comes back and only the
first GEMM runs. Per-row tensors (target, loss_rows) are whole: a row kernel adds `start` to its row. The bias is added
by the row kernel, in fp32; its gradient is the column sum of dlogits. Losses with a teacher or a reference model give
`second=(x2, weight2)` and get its logits too, in a buffer of their own. Losses over pairs of sequences give `unit`, the
rows that a chunk should not split, to plan_chunks, or boundaries of their own (`Chunks.of`); `order` sweeps rows in
another order, or some of them only: row i of the sweep is then row order[i] of x.

How many rows a chunk has: as many as fit LIGER_HW_LOSS_MEMORY_MIB beside the gradients (unset: 1 GiB, and LARGEST rows at
most), but at least SMALLEST, below which the GEMMs slow down (H200, 8192 x 4096 x 131072 bf16: 2048 rows a chunk cost 3%
more than one chunk, 1024 rows 5%, 512 rows 36%); twice that where every chunk reads and writes an fp32 weight gradient.

A weight gradient in 16 bits is rounded once a chunk. One chunk has two roundings, of dlogits and of the result; k
chunks add the variance of (k - 1) / 2 more, for partial sums that grow as random walks do. So MOST_ROUNDINGS = 6 keeps
the error within sqrt(4.5 / 2) = 1.5 times that of one chunk (simulated bf16 heads, rounded logits included: 1.13 to
1.38 at 6, up to 1.5 at 8, 1.9 at 16). Where the budget means more chunks they grow instead, or, where that is cheaper,
the gradient is summed in an fp32 buffer.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

import torch

from .. import env
from ._op import cdiv

SMALLEST = 1024
LARGEST = 2048
DEFAULT_MIB = 1024
MOST_ROUNDINGS = 6
_SLICE = 4096


class Chunks(NamedTuple):
    """bounds: (start, stop) of each chunk; wide: whether the weight gradient is summed in an fp32 buffer."""

    bounds: tuple[tuple[int, int], ...]
    wide: bool

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
    scale: int = 1,
    buffers: int = 1,
    unit: int = 1,
) -> Chunks:
    """Chunks for a head; see the top of this file.

    scale: multiplies the memory budget; buffers: logits of so many heads exist at a time
    unit: rows that belong together, for example of one pair of sequences. Chunks hold whole units, unless one alone is
    larger than what the budget gives: then they split units (`chunks.rows < unit`).
    """
    row = vocab * itemsize * buffers
    weight = vocab * hidden * (4 if wide else itemsize)
    taken = weight + n_rows * hidden * itemsize if gradients else 0
    smallest = 2 * SMALLEST if wide else SMALLEST
    budget = env.get("LIGER_HW_LOSS_MEMORY_MIB")
    rows = max(smallest, ((scale * (budget or DEFAULT_MIB) << 20) - taken) // row)
    if budget is None:
        rows = min(rows, scale * max(smallest, LARGEST))
    whole = unit if unit <= rows else 1
    rows -= rows % whole
    if gradients and itemsize == 2 and not wide and cdiv(n_rows, rows) > MOST_ROUNDINGS:
        fewer = cdiv(cdiv(n_rows, MOST_ROUNDINGS), whole) * whole
        wide = (fewer - rows) * row > 4 * vocab * hidden
        rows = max(rows, 2 * SMALLEST // whole * whole) if wide else fewer
    even = cdiv(n_rows, cdiv(n_rows, rows)) if n_rows else 1
    step = cdiv(even, whole) * whole if whole > 1 else cdiv(even, 128) * 128
    return Chunks(tuple((start, min(start + step, n_rows)) for start in range(0, n_rows, step)), wide)


def logits_buffer(rows: int, vocab: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, vocab], each row starting at a multiple of 16 elements: an odd vocabulary loads as wide as an even one."""
    buffer = torch.empty((rows, cdiv(vocab, 16) * 16), dtype=like.dtype, device=like.device)
    if vocab % 16:
        buffer[:, vocab:] = 0.0  # read, never used
    return buffer[:, :vocab]


class HeadGradients:
    """The gradients of one head, filled chunk by chunk; an unwanted one is None.

    dx [n_rows, hidden]; dweight [vocab, hidden], in fp32 when `wide`; dbias [vocab], always summed in fp32 (fp64).
    coming: how many rows of x will come, where not all will; the others have a gradient of zero.
    """

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool], wide: bool, coming: int | None = None
    ) -> None:
        self.dtype, device = weight.dtype, x.device
        vocab = weight.shape[0]
        summed = torch.float32 if wide else weight.dtype
        coming = x.shape[0] if coming is None else coming
        rows = torch.empty if coming == x.shape[0] else torch.zeros
        self.dx = rows(x.shape, dtype=x.dtype, device=device) if wanted[0] else None
        self.dweight = (torch.empty if coming else torch.zeros)(weight.shape, dtype=summed, device=device) if wanted[1] else None
        wide_bias = torch.promote_types(weight.dtype, torch.float32)
        self.dbias = torch.zeros(vocab, dtype=wide_bias, device=device) if wanted[2] else None
        self._first = True

    def add(self, dlogits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Take in the gradient of the logits of x, which holds the rows `rows` (a slice, or indices) of all."""
        if self.dx is not None:
            if isinstance(rows, slice):
                torch.mm(dlogits, weight, out=self.dx[rows])
            else:
                self.dx.index_copy_(0, rows, torch.mm(dlogits, weight))
        if self.dweight is not None:
            _add_product(self.dweight, dlogits.t(), x, self._first)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)
        self._first = False


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
    buffer = logits_buffer(chunks.rows, weight.shape[0], x)
    other = None
    if second is not None:
        x2, weight2 = second[0].detach(), second[1].detach()
        other = logits_buffer(chunks.rows, weight2.shape[0], x2)
    for start, stop in chunks.bounds:
        rows = slice(start, stop) if order is None else order[start:stop]
        part, logits, logits2 = x[rows], buffer[: stop - start], None
        torch.mm(part, weight.t(), out=logits)
        if other is not None:
            logits2 = other[: stop - start]
            torch.mm(x2[rows], weight2.t(), out=logits2)
        yield start, logits, logits2
        if grads is not None:
            grads.add(logits, part, weight, rows)


_wide_output: dict[str, bool] = {}
"""Device type -> whether torch multiplies 16-bit matrices into an fp32 one there (torch.mm's out_dtype)."""


def _refused(error: Exception) -> bool:
    """Whether torch said no before anything ran: an older torch, or a device without such a GEMM."""
    return isinstance(error, (TypeError, NotImplementedError)) or "out_dtype" in str(error)


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """out = a @ b, or out += a @ b, in out's dtype: the operands' own, or fp32."""
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
