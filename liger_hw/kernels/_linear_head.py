"""The head under a loss: logits = x @ weight^T in chunks of rows, and what comes back from their gradient.

    x [n_rows, hidden], weight [vocab, hidden], dlogits [chunk, vocab]: dx = dlogits @ weight, dweight += dlogits^T @ x

The logits of one chunk at a time exist, in a buffer that every chunk uses again. Each chunk costs three GEMMs, each
into its final place: no temporary, no concatenation.

How many rows a chunk has: as many as fit LIGER_HW_LOSS_MEMORY_MIB beside the gradients (unset: 1 GiB, and LARGEST rows at
most), but at least SMALLEST, below
which the GEMMs slow down (H200, 8192 x 4096 x 131072 bf16: 2048 rows a chunk cost 3% more than one chunk, 1024 rows 5%,
512 rows 36%); twice that where every chunk reads and writes an fp32 weight gradient.

A weight gradient in 16 bits is rounded once a chunk. One chunk has two roundings, of dlogits and of the result; k
chunks add the variance of (k - 1) / 2 more, for partial sums that grow as random walks do. So MOST_ROUNDINGS = 6 keeps
the error within sqrt(4.5 / 2) = 1.5 times that of one chunk (simulated bf16 heads, rounded logits included: 1.13 to
1.38 at 6, up to 1.5 at 8, 1.9 at 16). Where the budget means more chunks they grow instead, or, where that is cheaper,
the gradient is summed in an fp32 buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import env
from ._op import cdiv

SMALLEST = 1024
LARGEST = 2048
DEFAULT_MIB = 1024
MOST_ROUNDINGS = 6
_SLICE = 4096


class Chunks(NamedTuple):
    """rows: of each chunk but the last; wide: whether the weight gradient is summed in an fp32 buffer."""

    rows: int
    wide: bool


def plan_chunks(
    n_rows: int,
    hidden: int,
    vocab: int,
    itemsize: int,
    *,
    gradients: bool = True,
    wide: bool = False,
    scale: int = 1,
) -> Chunks:
    """Chunk size for a head; see the top of this file. `scale` multiplies the memory budget."""
    row = vocab * itemsize
    weight = vocab * hidden * (4 if wide else itemsize)
    taken = weight + n_rows * hidden * itemsize if gradients else 0
    smallest = 2 * SMALLEST if wide else SMALLEST
    budget = env.get("LIGER_HW_LOSS_MEMORY_MIB")
    rows = max(smallest, ((scale * (budget or DEFAULT_MIB) << 20) - taken) // row)
    if budget is None:
        rows = min(rows, scale * max(smallest, LARGEST))
    if gradients and itemsize == 2 and not wide and cdiv(n_rows, rows) > MOST_ROUNDINGS:
        fewer = cdiv(n_rows, MOST_ROUNDINGS)
        wide = (fewer - rows) * row > 4 * vocab * hidden
        rows = max(rows, 2 * SMALLEST) if wide else fewer
    even = cdiv(n_rows, cdiv(n_rows, rows)) if n_rows else 1
    return Chunks(min(max(n_rows, 1), cdiv(even, 128) * 128), wide)


def logits_buffer(rows: int, vocab: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, vocab], each row starting at a multiple of 16 elements: an odd vocabulary loads as wide as an even one."""
    buffer = torch.empty((rows, cdiv(vocab, 16) * 16), dtype=like.dtype, device=like.device)
    if vocab % 16:
        buffer[:, vocab:] = 0.0  # read, never used
    return buffer[:, :vocab]


class HeadGradients:
    """The gradients of one head, filled chunk by chunk; an unwanted one is None.

    dx [n_rows, hidden]; dweight [vocab, hidden], in fp32 when `wide`; dbias [vocab], always summed in fp32.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool], wide: bool) -> None:
        self.dtype, device = weight.dtype, x.device
        vocab = weight.shape[0]
        summed = torch.float32 if wide else weight.dtype
        empty = torch.empty if x.shape[0] else torch.zeros
        self.dx = empty(x.shape, dtype=x.dtype, device=device) if wanted[0] else None
        self.dweight = empty(weight.shape, dtype=summed, device=device) if wanted[1] else None
        self.dbias = torch.zeros(vocab, dtype=torch.float32, device=device) if wanted[2] else None

    def add(self, dlogits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, start: int) -> None:
        """Take in the gradient of the logits of the rows x, which begin at row `start`."""
        if self.dx is not None:
            torch.mm(dlogits, weight, out=self.dx[start : start + x.shape[0]])
        if self.dweight is not None:
            _add_product(self.dweight, dlogits.t(), x, start == 0)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)

    def dweight_as_weight(self) -> torch.Tensor | None:
        return self.dweight if self.dweight is None else self.dweight.to(self.dtype)


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
