"""Sparsemax: the point of the probability simplex nearest to x, y = max(x - tau, 0) with tau such that y sums to 1.

Arithmetic in fp32, y rounded once to x's dtype. A row that holds a NaN or +inf, or nothing but -inf, gives NaN.
Saved for backward: y. Backward:  dx = dy - mean of dy over the support (y > 0); outside it dx = 0.

tau is found without a sort, exactly, by Newton's method on f(t) = sum(max(x - t, 0)) - 1, which is convex, falling and
piecewise linear. It begins at max(x) - 1, left of the root. Each step, to (sum of x > t, less 1) / count(x > t), stays
left of it and can only shrink the support; when the support no longer shrinks, the step was exact. A step halves f or
the support (Dinkelbach's bound), so that there are at most some 50 of them, and on real rows about 5. Every step is two
sums over values already in registers.

Source: Martins and Astudillo, "From Softmax to Sparsemax", https://arxiv.org/abs/1602.02068; the iteration is
Michelot's (1986), see Condat, "Fast projection onto the simplex and the l1 ball" (2016)
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import Function, check, check_numbers, check_tensors, first_order, no_view
from ...runtime.triton_import import tl, triton
from ..rows.row import align_down, body_start, body_width, edge_columns, load_row, row_head, row_pad, store_row
from .row_maps import lane_sums, row_map


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


@triton.jit
def _larger(a, b):
    """The larger of both, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite(top):
    """A row's largest value, or NaN where that is not finite."""
    return tl.where(tl.abs(top) < float("inf"), top, float("nan"))


@triton.jit
def _above(z, tau):
    """max(z - tau, 0), NaN where tau is."""
    return tl.maximum(z - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)


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
    LOAD_HINT: tl.constexpr,
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
        z = load_row(x_ptrs, exist, pad, n_cols, -float("inf"), VECTOR, LOAD_HINT).to(tl.float32)
        z = tl.where(exist, z - _finite(tl.reduce(z, 1, _larger)[:, None]), 0.0)  # rows past the end: something finite
        while shrinking:
            inside = z > tau
            support = tl.sum(inside.to(tl.float32), axis=1)[:, None]
            tau = tl.div_rn(tl.sum(tl.where(inside, z, 0.0), axis=1)[:, None] - 1.0, support)
            n_shrinking = tl.sum(tl.sum((support < count).to(tl.int32), axis=1), axis=0)
            count = support
            shrinking = n_shrinking > 0  # last: Triton 3.4 fails where a carried value follows the condition
        y_ptrs = Y_ptr + align_down(rows * n_cols, VECTOR) + cols[None, :]
        store_row(y_ptrs, _above(z, tau), exist, pad, n_cols, VECTOR)


@triton.jit
def _take_tile(x, top, tau, above, members):
    """The sum and the number of a row's values above tau, after one more tile."""
    z = x.to(tl.float32) - top
    LANES: tl.constexpr = above.shape[0]
    return above + lane_sums(tl.where(z > tau, z, 0.0), LANES), members + lane_sums((z > tau).to(tl.float32), LANES)


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
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows wider than BLOCK_SIZE, which are read again, from cache, in each of Newton's steps."""
    wait_for_previous(DEPENDENT)
    block_cols = tl.arange(0, BLOCK_SIZE)
    y_type = Y_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        head = row_head(row * n_cols, VECTOR)
        x_ptr = X_ptr + body_start(row * X_row_stride, head, VECTOR)
        y_ptr = Y_ptr + body_start(row * n_cols, head, VECTOR)
        n_body = body_width(n_cols, head, VECTOR)
        n_full = n_body // BLOCK_SIZE
        tail = n_full * BLOCK_SIZE + block_cols
        highest = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf")).to(tl.float32)
        for i in tl.range(0, n_full, num_stages=STAGES):
            highest = _larger(highest, tl.load(x_ptr + i * BLOCK_SIZE + block_cols).to(tl.float32))
        top = tl.reduce(highest, 0, _larger)
        if VECTOR > 1:
            edge = edge_columns(head, n_body, n_cols, VECTOR)
            x_edge = tl.load(x_ptr + edge, mask=edge < n_cols - head, other=-float("inf")).to(tl.float32)
            top = _larger(top, tl.reduce(x_edge, 0, _larger))
        top = _finite(top)
        tau = tl.cast(-1.0, tl.float32)
        count = tl.cast(float("inf"), tl.float32)
        shrinking = tl.program_id(0) >= 0  # true
        while shrinking:
            nothing = tl.zeros([BLOCK_SIZE * y_type.primitive_bitwidth // 128], dtype=tl.float32)
            x = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf"))
            above, members = _take_tile(x, top, tau, nothing, nothing)
            for i in tl.range(0, n_full, num_stages=STAGES):
                x = tl.load(x_ptr + i * BLOCK_SIZE + block_cols)
                above, members = _take_tile(x, top, tau, above, members)
            total = tl.sum(above)
            support = tl.sum(members)
            if VECTOR > 1:
                z_edge = x_edge - top
                total += tl.sum(tl.where(z_edge > tau, z_edge, 0.0))
                support += tl.sum((z_edge > tau).to(tl.float32))
            tau = tl.div_rn(total - 1.0, tl.maximum(support, 1.0))
            shrinking = support < count
            count = support
        if VECTOR > 1:
            tl.store(y_ptr + edge, _above(x_edge - top, tau).to(y_type), mask=edge < n_cols - head)
        x = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + tail, _above(x - top, tau).to(y_type), mask=tail < n_body)
        for i in tl.range(0, n_full, num_stages=STAGES):
            at = i * BLOCK_SIZE + block_cols
            tl.store(y_ptr + at, _above(tl.load(x_ptr + at).to(tl.float32) - top, tau).to(y_type))


def _bwd_reference(dy, y):
    inside = y > 0
    g = torch.where(inside, dy.to(torch.promote_types(y.dtype, torch.float32)), 0.0)
    mean = g.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(inside, g - mean, 0.0)


FWD, BWD, sparsemax_fwd, sparsemax_bwd = row_map(
    "sparsemax", (_sparsemax_fwd_kernel, _sparsemax_fwd_looped_kernel), sparsemax_reference, _bwd_reference, sparse=True
)


class SparsemaxFunction(Function):
    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = -1 if dim == x.dim() - 1 else dim
        if ctx.dim == -1:
            y = sparsemax_fwd(x)
        else:
            y = no_view(sparsemax_fwd(x.movedim(dim, -1)).movedim(-1, dim))
        ctx.save_for_backward(y)  # the output itself, so that autograd notices a write into it
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_out):
        (y,) = ctx.saved_tensors
        if ctx.dim == -1:
            return sparsemax_bwd(grad_out, y), None
        return sparsemax_bwd(grad_out.movedim(ctx.dim, -1), y.movedim(ctx.dim, -1)).movedim(-1, ctx.dim), None


def liger_sparsemax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sparsemax over `dim`: nonnegative, sums to 1, and exactly zero away from the largest values.

    input: of any shape in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a tensor like it.
    Raises `ValueError` for a dtype or `dim` that does not fit.
    """
    check_tensors("liger_sparsemax", input=input)
    check_numbers("liger_sparsemax", dim=dim)
    if not isinstance(dim, int) or dim is True or dim is False or not -input.dim() <= dim < input.dim():
        check(False, "liger_sparsemax", f"dim must be a dimension of input, which has {input.dim()}, got {dim!r}")
    return SparsemaxFunction.apply(input, dim)


class LigerSparsemax(torch.nn.Module):
    """Sparsemax over `dim` as a module without parameters."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: any shape; returns probabilities of the same shape, which sum to 1 along `dim`."""
        return liger_sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


WORKLOADS = {
    "vocabulary_32k": (4096, 32768),
    "attention_4k": (16384, 4096),
    "attention_1k": (65536, 1024),
    "llama3_8b_vocabulary": (2048, 128256),
}
"""Problem sizes (n_rows, n_cols): output distributions and attention scores."""


def sample(sizes, dtype, device, generator, *, dim=-1) -> Sample:
    n_rows, n_cols = sizes
    x = normal(dtype, device, generator)(n_rows, n_cols)
    return Sample(
        args=(x, dim), reduction=sizes[dim], grad_reduction=sizes[dim], moved=5 * n_rows * n_cols * dtype.itemsize
    )


OP = registry.register_file(__name__, tunables=(FWD, BWD), options=({}, {"dim": 0}))
