"""Sparsemax: the point of the probability simplex nearest to x, y = max(x - tau, 0) with tau such that y sums to 1.

Shapes: x of any shape, one dimension of which (`dim`) is projected -> y like x. Dtypes: fp32, fp16 or bf16; arithmetic
in fp32, y rounded once to x's dtype. Saved for backward: y.
A row that holds a NaN or +inf, or nothing but -inf, gives NaN.
Backward, over the support (y > 0):  dx = dy - mean of dy over the support; outside it dx = 0.

tau is found without a sort, exactly, by Newton's method on f(t) = sum(max(x - t, 0)) - 1, which is convex, falling and
piecewise linear. It begins at max(x) - 1, left of the root. Each step, to (sum of x > t, less 1) / count(x > t), stays
left of it and can only shrink the support; when the support no longer shrinks, the step was exact. A step halves f or
the support (Dinkelbach's bound), so that there are at most some 50 of them, and on real rows about 5. Every step is two
sums over values already in registers.

Source: Martins and Astudillo, "From Softmax to Sparsemax", https://arxiv.org/abs/1602.02068; the iteration is that of
Michelot (1986), see Condat, "Fast projection onto the simplex and the l1 ball" (2016)
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Op, Sample
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import Function, check, check_numbers, check_tensors, first_order
from ...runtime.triton_import import tl, triton
from ..rows.aligned import align_down, load_row, row_pad, store_row
from ..rows.blocks import keep_narrow
from .row_maps import row_map_operators, row_map_tunable

# -- reference -------------------------------------------------------------------------------------------------------


def sparsemax_reference(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The specification in plain torch, by sorting; computes in fp32, or in fp64 when `input` is fp64."""
    if not input.numel():
        return input.clone()
    x = input.to(torch.promote_types(input.dtype, torch.float32)).movedim(dim, -1)
    z = x - x.amax(-1, keepdim=True).detach()
    ranked = z.sort(-1, descending=True).values
    sums = ranked.cumsum(-1)
    place = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (1 + place * ranked > sums).sum(-1, keepdim=True).clamp_min(1)  # 0 in a row that holds a NaN or an infinity
    tau = (sums.gather(-1, size - 1) - 1) / size
    return (z - tau).relu().to(input.dtype).movedim(-1, dim)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _larger(a, b):
    """The larger of both, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _row_max(x):
    """[rows, 1]: the largest value of each row, or NaN where the row holds a NaN or nothing finite on top of it."""
    top = tl.reduce(x, 1, _larger)[:, None]
    return tl.where(tl.abs(top) < float("inf"), top, float("nan"))


@triton.jit
def _above(z, tau):
    """max(z - tau, 0), NaN where tau is."""
    return tl.maximum(z - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _any(flags):
    """Whether one of the flags [rows, 1] is set, as a number that a loop can test."""
    return tl.sum(tl.sum(flags.to(tl.int32), axis=1), axis=0) > 0


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _sparsemax_fwd_kernel(
    X_ptr,
    Y_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    ONE_TILE: tl.constexpr,
    NARROW: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of whole rows, which stay in registers through all of Newton's steps."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        x_ptrs = X_ptr + align_down(rows * X_row_stride, VECTOR) + cols[None, :]
        tau = tl.full([ROWS, 1], -1.0, dtype=tl.float32)
        count = tl.full([ROWS, 1], float("inf"), dtype=tl.float32)
        shrinking = tl.program_id(0) >= 0  # true
        z = load_row(x_ptrs, 0, exist, pad, n_cols, -float("inf"), VECTOR, LOAD_CACHE, LOAD_EVICT).to(tl.float32)
        z = tl.where(exist, z - _row_max(z), 0.0)  # rows past the end: something finite
        while shrinking:
            inside = z > tau
            support = tl.sum(inside.to(tl.float32), axis=1)[:, None]
            tau = tl.div_rn(tl.sum(tl.where(inside, z, 0.0), axis=1)[:, None] - 1.0, support)
            shrinking = _any(support < count)
            count = support
        y_ptrs = Y_ptr + align_down(rows * n_cols, VECTOR) + cols[None, :]
        store_row(y_ptrs, _above(z, tau), 0, exist, pad, n_cols, VECTOR)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _sparsemax_fwd_looped_kernel(
    X_ptr,
    Y_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows wider than BLOCK_SIZE, which are read again, from cache, in each of Newton's steps."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    col_tiles = tl.cdiv(n_cols + (VECTOR - 1), BLOCK_SIZE)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        x_ptrs = X_ptr + align_down(rows * X_row_stride, VECTOR) + cols[None, :]
        y_ptrs = Y_ptr + align_down(rows * n_cols, VECTOR) + cols[None, :]
        tau = tl.full([ROWS, 1], -1.0, dtype=tl.float32)
        count = tl.full([ROWS, 1], float("inf"), dtype=tl.float32)
        shrinking = tl.program_id(0) >= 0  # true
        highest = tl.full([ROWS, BLOCK_SIZE], -float("inf"), dtype=tl.float32)
        for col_tile in range(col_tiles):
            start = col_tile * BLOCK_SIZE
            x = load_row(x_ptrs, start, exist, pad, n_cols, -float("inf"), VECTOR, "", "").to(tl.float32)
            highest = _larger(highest, x)
        top = tl.where(exist, _row_max(highest), 0.0)
        while shrinking:
            above = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            members = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            for col_tile in range(col_tiles):
                start = col_tile * BLOCK_SIZE
                x = load_row(x_ptrs, start, exist, pad, n_cols, -float("inf"), VECTOR, "", "").to(tl.float32)
                z = x - top
                above += tl.where(z > tau, z, 0.0)
                members += (z > tau).to(tl.float32)
            support = tl.sum(members, axis=1)[:, None]
            tau = tl.div_rn(tl.sum(above, axis=1)[:, None] - 1.0, tl.maximum(support, 1.0))
            shrinking = _any(support < count)
            count = support
        for col_tile in range(col_tiles):
            start = col_tile * BLOCK_SIZE
            x = load_row(x_ptrs, start, exist, pad, n_cols, -float("inf"), VECTOR, "", "").to(tl.float32)
            store_row(y_ptrs, _above(x - top, tau), start, exist, pad, n_cols, VECTOR)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _sparsemax_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    ONE_TILE: tl.constexpr,
    NARROW: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of whole rows; y is contiguous."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        dense = align_down(rows * n_cols, VECTOR) + cols[None, :]
        dy_ptrs = DY_ptr + align_down(rows * DY_row_stride, VECTOR) + cols[None, :]
        y = load_row(Y_ptr + dense, 0, exist, pad, n_cols, 0.0, VECTOR, LOAD_CACHE, LOAD_EVICT)
        dy = load_row(dy_ptrs, 0, exist, pad, n_cols, 0.0, VECTOR, LOAD_CACHE, LOAD_EVICT)
        inside = y > 0.0
        total = tl.sum(tl.where(inside, dy, 0.0).to(tl.float32), axis=1)
        mean = (total / tl.maximum(tl.sum(inside.to(tl.float32), axis=1), 1.0))[:, None]
        dx = tl.where(inside, keep_narrow(dy, mean).to(tl.float32) - mean, 0.0)
        store_row(DX_ptr + dense, dx, 0, exist, pad, n_cols, VECTOR)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _sparsemax_bwd_looped_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows wider than BLOCK_SIZE; y is contiguous."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    col_tiles = tl.cdiv(n_cols + (VECTOR - 1), BLOCK_SIZE)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        dense = align_down(rows * n_cols, VECTOR) + cols[None, :]
        dy_ptrs = DY_ptr + align_down(rows * DY_row_stride, VECTOR) + cols[None, :]
        total = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        members = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
            start = col_tile * BLOCK_SIZE
            inside = load_row(Y_ptr + dense, start, exist, pad, n_cols, 0.0, VECTOR, "", "") > 0.0
            dy = load_row(dy_ptrs, start, exist, pad, n_cols, 0.0, VECTOR, "", "").to(tl.float32)
            total += tl.where(inside, dy, 0.0)
            members += inside.to(tl.float32)
        mean = (tl.sum(total, axis=1) / tl.maximum(tl.sum(members, axis=1), 1.0))[:, None]
        for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
            start = (col_tiles - 1 - col_tile) * BLOCK_SIZE  # backwards: what was read last is still in cache
            inside = load_row(Y_ptr + dense, start, exist, pad, n_cols, 0.0, VECTOR, "", "") > 0.0
            dy = load_row(dy_ptrs, start, exist, pad, n_cols, 0.0, VECTOR, "", "").to(tl.float32)
            store_row(DX_ptr + dense, tl.where(inside, dy - mean, 0.0), start, exist, pad, n_cols, VECTOR)


# -- tunables and operators ------------------------------------------------------------------------------------------


def _bwd_reference(dy, y):
    inside = y > 0
    g = torch.where(inside, dy.to(torch.promote_types(y.dtype, torch.float32)), 0.0)
    mean = g.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(inside, g - mean, 0.0)


FWD = row_map_tunable("sparsemax", "fwd", _sparsemax_fwd_kernel, _sparsemax_fwd_looped_kernel, tensors=1)
BWD = row_map_tunable("sparsemax", "bwd", _sparsemax_bwd_kernel, _sparsemax_bwd_looped_kernel, tensors=2)
sparsemax_fwd, sparsemax_bwd = row_map_operators(FWD, BWD, sparsemax_reference, _bwd_reference)


class LigerSparsemaxFunction(Function):
    """Autograd for sparsemax: saves y, with `dim` moved last."""

    @staticmethod
    def forward(ctx, x, dim):
        y = sparsemax_fwd(x.movedim(dim, -1))
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y.movedim(-1, dim)

    @staticmethod
    @first_order
    def backward(ctx, grad_out):
        return sparsemax_bwd(grad_out.movedim(ctx.dim, -1), *ctx.saved_tensors).movedim(-1, ctx.dim), None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_sparsemax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sparsemax over `dim`: nonnegative, sums to 1, and exactly zero away from the largest values.

    input: of any shape in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a tensor like it.
    Raises `ValueError` for a dtype or `dim` that does not fit.
    """
    check_tensors("liger_sparsemax", input=input)
    check_numbers("liger_sparsemax", dim=dim)
    if not isinstance(dim, int) or not -input.dim() <= dim < input.dim():
        check(False, "liger_sparsemax", f"dim={dim!r} is none of the {input.dim()} dimensions of input")
    return LigerSparsemaxFunction.apply(input, dim)


class LigerSparsemax(torch.nn.Module):
    """Sparsemax over `dim` as a module without parameters."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "vocabulary_32k": (4096, 32768),
    "attention_4k": (16384, 4096),
    "attention_1k": (65536, 1024),
    "llama3_8b_vocabulary": (2048, 128256),
}
"""Problem sizes (n_rows, n_cols): output distributions and attention scores."""


def _sample(sizes, dtype, device, generator, *, dim=-1) -> Sample:
    n_rows, n_cols = sizes
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(
        args=(x.requires_grad_(), dim),
        reduction=sizes[dim],
        grad_reduction=sizes[dim],
        moved=5 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="sparsemax",
        function=liger_sparsemax,
        reference=sparsemax_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"dim": 0},
        ),
    )
)
