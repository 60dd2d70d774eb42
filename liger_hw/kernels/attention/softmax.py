"""Softmax over the last dimension: y = exp(x - max(x)) / sum(exp(x - max(x))).

Arithmetic in fp32, y rounded once to x's dtype. A row of -inf gives NaN, as in torch.
Saved for backward: y. Backward:  dx = y * (dy - sum(y * dy)).

Source: Bridle, "Training Stochastic Model Recognition Algorithms as Networks" (1989); the running maximum and sum of
rows too wide to hold are from Milakov and Gimelshein, "Online normalizer calculation",
https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import OperatorFunction
from ...runtime.sharding import RowsRule
from ...runtime.triton_import import tl, triton
from ..rows.blocks import keep_narrow
from ..rows.row import align_down, body_start, body_width, edge_columns, load_row, row_head, row_pad, store_row
from ..rows.tuning import row_sample
from .row_maps import row_map


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """The specification in plain torch. It sums in fp32 (fp64 for fp64), and its backward sees the rounded y."""
    return torch.softmax(x, -1)


@triton.jit
def _exp(x, anchor):
    """exp(x - anchor) in three instructions; tl.exp takes twice as many, to be right for results below 1e-38 too."""
    return tl.exp2((x - anchor) * 1.4426950408889634)


@triton.jit
def _exp_folded(x, anchor, log2_base):
    """`_exp` in two instructions: the compiler fuses the first product with the subtraction.

    Then only the anchor's product is rounded, which multiplies a row by one factor. The division by the row's sum
    cancels it. `_log2_base` bounds the factor.
    """
    return tl.exp2(x * log2_base - anchor * log2_base)


@triton.jit
def _log2_base(top):
    """log2(e), or 1 for a row whose maximum reaches 2^30.

    For such a row, rounding in `_exp_folded` could multiply by 2^64 or more; a product with 1 is exact. The result does
    not depend on the base: two numbers of that size are equal or differ by at least 64.
    """
    return tl.where(tl.abs(top) < 1073741824.0, 1.4426950408889634, 1.0)


@triton.jit
def _below_2_30(x, top):
    """A 16-bit row and its maximum, scaled by a power of two so that the maximum's size is below 2^30.

    Softmax of the scaled row is the same: both before and after, two numbers of the maximum's size are equal or differ
    by at least 64.
    """
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    factor = tl.where(exponent < 157, 1.0, ((283 - exponent) << 23).to(tl.float32, bitcast=True))
    return x * factor.to(x.dtype), top * factor


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _softmax_fwd_kernel(
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
    """Tiles of whole rows. A NARROW row is kept in its 16-bit dtype across both reductions and its exponentials are
    computed twice: their fp32 values would not fit the registers."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    first = tl.program_id(0)
    end, step = (first + 1, 1) if ONE_TILE else (n_tiles, tl.num_programs(0))
    for tile in tl.range(first, end, step, num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        x_ptrs = X_ptr + align_down(rows * X_row_stride, VECTOR) + cols[None, :]
        x = load_row(x_ptrs, exist, pad, n_cols, -float("inf"), VECTOR, LOAD_HINT)
        top = tl.max(x.to(tl.float32), axis=1)[:, None]
        if NARROW and x.dtype != tl.float32:
            x, top = _below_2_30(x, top)
            scale = 1.0 / tl.sum(_exp_folded(x.to(tl.float32), top, 1.4426950408889634), axis=1)[:, None]
            y = _exp_folded(keep_narrow(x, scale).to(tl.float32), top, 1.4426950408889634) * scale
        else:
            e = _exp_folded(x.to(tl.float32), top, _log2_base(top))
            y = e * (1.0 / tl.sum(e, axis=1))[:, None]
        store_row(Y_ptr + align_down(rows * n_cols, VECTOR) + cols[None, :], y, exist, pad, n_cols, VECTOR)


@triton.jit
def _take_tile(x, highest, total):
    """Each lane's running maximum and sum after one more tile [LANES, PER_LANE]."""
    higher = tl.maximum(highest, tl.max(x, axis=1))
    anchor = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: every term is 0
    return higher, total * _exp(highest, anchor) + tl.sum(_exp(x, anchor[:, None]), axis=1)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _softmax_fwd_looped_kernel(
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
    """Rows wider than BLOCK_SIZE. A tile is LANES groups of the elements that a thread loads at once. Each group has
    its own running maximum and sum, so that threads exchange nothing until the whole row is read."""
    wait_for_previous(DEPENDENT)
    block_cols = tl.arange(0, BLOCK_SIZE)
    y_type = Y_ptr.dtype.element_ty
    PER_LANE: tl.constexpr = 128 // X_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = BLOCK_SIZE // PER_LANE
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        head = row_head(row * n_cols, VECTOR)
        x_ptr = X_ptr + body_start(row * X_row_stride, head, VECTOR)
        y_ptr = Y_ptr + body_start(row * n_cols, head, VECTOR)
        n_body = body_width(n_cols, head, VECTOR)
        n_full = n_body // BLOCK_SIZE
        tail = n_full * BLOCK_SIZE + block_cols
        highest = tl.full([LANES], -float("inf"), dtype=tl.float32)
        total = tl.zeros([LANES], dtype=tl.float32)
        for i in tl.range(0, n_full, num_stages=STAGES):
            x = tl.load(x_ptr + i * BLOCK_SIZE + block_cols, eviction_policy="evict_last").to(tl.float32)
            highest, total = _take_tile(tl.reshape(x, [LANES, PER_LANE]), highest, total)
        x = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf")).to(tl.float32)
        highest, total = _take_tile(tl.reshape(x, [LANES, PER_LANE]), highest, total)
        top = tl.max(highest)
        if VECTOR > 1:
            edge = edge_columns(head, n_body, n_cols, VECTOR)
            x_edge = tl.load(x_ptr + edge, mask=edge < n_cols - head, other=-float("inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(x_edge))
        anchor = tl.where(top == -float("inf"), 0.0, top)
        denominator = tl.sum(total * _exp(highest, anchor))
        if VECTOR > 1:
            denominator += tl.sum(_exp(x_edge, anchor))
        scale = tl.where(top == -float("inf"), float("nan"), 1.0 / denominator)
        if VECTOR > 1:
            tl.store(y_ptr + edge, (_exp(x_edge, anchor) * scale).to(y_type), mask=edge < n_cols - head)
        tl.store(y_ptr + tail, (_exp(x, anchor) * scale).to(y_type), mask=tail < n_body, eviction_policy="evict_first")
        for done in tl.range(0, n_full, num_stages=STAGES):
            at = (n_full - 1 - done) * BLOCK_SIZE + block_cols  # backwards: what was read last is still in cache
            x = tl.load(x_ptr + at, eviction_policy="evict_first").to(tl.float32)
            tl.store(y_ptr + at, (_exp(x, anchor) * scale).to(y_type), eviction_policy="evict_first")


def _bwd_reference(dy, y):
    wide = torch.promote_types(y.dtype, torch.float32)
    p, g = y.to(wide), dy.to(wide)
    return p * (g - (p * g).sum(-1, keepdim=True))


FWD, BWD, softmax_fwd, softmax_bwd = row_map(
    "softmax", (_softmax_fwd_kernel, _softmax_fwd_looped_kernel), softmax_reference, _bwd_reference, sparse=False
)


class SoftmaxFunction(OperatorFunction):
    sharding, fwd, bwd = RowsRule(inputs=("x",)), softmax_fwd, softmax_bwd


def liger_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension.

    x: [..., n_cols] in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a contiguous tensor like x.
    Raises `ValueError` for a dtype that does not fit or a tensor without dimensions.
    """
    return SoftmaxFunction.apply(x)


class LigerSoftmax(torch.nn.Module):
    """Softmax over the last dimension as a module without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., n_cols]; returns probabilities of the same shape, which sum to 1 along the last dimension."""
        return liger_softmax(x)


WORKLOADS = {
    "attention_4k": (16384, 4096),
    "attention_1k": (65536, 1024),
    "mistral_7b_vocabulary": (8192, 32768),
    "llama3_8b_vocabulary": (4096, 128256),
    "qwen3_moe_router": (65536, 128),
}
"""Problem sizes (n_rows, n_cols): attention scores, output distributions, expert routers."""


def sample(sizes, dtype, device, generator) -> Sample:
    return row_sample(sizes, dtype, (normal(dtype, device, generator)(*sizes),), grad_reduction=sizes[1])


OP = registry.register_file(__name__, tunables=(FWD, BWD))
