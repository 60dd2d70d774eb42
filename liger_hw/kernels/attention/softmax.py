"""Softmax over the last dimension: y = exp(x - max(x)) / sum(exp(x - max(x))).

Shapes: x [..., n_cols] -> y like x. Dtypes: fp32, fp16 or bf16; arithmetic in fp32, y rounded once to x's dtype.
A row of -inf gives NaN, as in torch. Saved for backward: y. Backward:  dx = y * (dy - sum(y * dy)).

Source: Bridle, "Training Stochastic Model Recognition Algorithms as Networks" (1989); the running maximum and sum of
rows too wide to hold are those of Milakov and Gimelshein, "Online normalizer calculation", https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Key, LaunchConfig, Op, Sample, Target
from ...runtime.dependent_launch import begin
from ...runtime.operator import Function, check, check_tensors, first_order
from ...runtime.triton_import import tl, triton
from ..rows.blocks import keep_narrow
from ..rows.maps import heuristic, row_operators, row_tunables

# -- reference -------------------------------------------------------------------------------------------------------


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """The specification in plain torch: it sums in fp32 (fp64 for fp64) and, as here, its backward sees the rounded y."""
    return torch.softmax(x, -1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x, anchor):
    """exp(x - anchor) in three instructions, half of what tl.exp takes to keep results below 1e-38."""
    return tl.exp2((x - anchor) * 1.4426950408889634)


@triton.jit
def _exp_folded(x, anchor, log2_base):
    """The same in two. The compiler fuses the first product with the subtraction, so that the anchor's alone is rounded: it
    moves every value of a row by the same factor, which the sum takes out again. See `_log2_base` for how large that is."""
    return tl.exp2(x * log2_base - anchor * log2_base)


@triton.jit
def _log2_base(top):
    """log2(e), or 1 for a row that reaches 2^30: there the rounding of a product would move values by up to 2^64 and more,
    and 1 has none; and the base no longer matters, since two numbers up there differ by 64 at least or not at all."""
    return tl.where(tl.abs(top) < 1073741824.0, 1.4426950408889634, 1.0)


@triton.jit
def _below_2_30(x, top):
    """A 16-bit row and its maximum; times the power of two that brings them under 2^30 where the maximum's size is not. To
    softmax that is the same row: numbers up there, and those they become, differ by 64 at least or not at all."""
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
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ... Rows wider than BLOCK_SIZE are read twice, then from cache."""
    begin(AHEAD)
    cols = tl.arange(0, BLOCK_SIZE)
    if WHOLE_ROW:
        first = tl.program_id(0)
        end, step = (first + 1, 1) if WHOLE_ROW == 2 else (n_tiles, tl.num_programs(0))
        for tile in tl.range(first, end, step, num_stages=STAGES):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            mask = (rows < n_rows) & (cols < n_cols)[None, :]
            x_ptrs = X_ptr + rows * X_row_stride + cols[None, :]
            x = tl.load(x_ptrs, mask=mask, other=-float("inf"), cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            top = tl.max(x.to(tl.float32), axis=1)[:, None]
            if (
                BLOCK_SIZE > 16384 and x.dtype != tl.float32
            ):  # narrow across both sums; the exponentials are computed twice
                x, top = _below_2_30(x, top)
                scale = 1.0 / tl.sum(_exp_folded(x.to(tl.float32), top, 1.4426950408889634), axis=1)[:, None]
                y = _exp_folded(keep_narrow(x, scale).to(tl.float32), top, 1.4426950408889634) * scale
            else:
                e = _exp_folded(x.to(tl.float32), top, _log2_base(top))
                y = e * (1.0 / tl.sum(e, axis=1))[:, None]
            tl.store(Y_ptr + rows * n_cols + cols[None, :], y.to(Y_ptr.dtype.element_ty), mask=mask)
    else:
        FEW: tl.constexpr = 128 // X_ptr.dtype.element_ty.primitive_bitwidth  # neighbours that a thread loads at once
        LANES: tl.constexpr = BLOCK_SIZE // FEW
        col_tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            x_ptrs = X_ptr + rows * X_row_stride + cols[None, :]
            y_ptrs = Y_ptr + rows * n_cols + cols[None, :]
            highest = tl.full([ROWS, LANES], -float("inf"), dtype=tl.float32)  # a maximum and a sum of its own a lane:
            total = tl.zeros([ROWS, LANES], dtype=tl.float32)  # no thread waits for another until the row is read
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = col_tile * BLOCK_SIZE
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                x = tl.load(x_ptrs + start, mask=mask, other=-float("inf")).to(tl.float32)
                x = tl.reshape(x, [ROWS, LANES, FEW])
                higher = tl.maximum(highest, tl.max(x, axis=2))
                anchor = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: every term is 0
                total = total * _exp(highest, anchor) + tl.sum(_exp(x, anchor[:, :, None]), axis=2)
                highest = higher
            top = tl.max(highest, axis=1)[:, None]
            anchor = tl.where(top == -float("inf"), 0.0, top)
            scale = 1.0 / tl.sum(total * _exp(highest, anchor), axis=1)[:, None]
            scale = tl.where(top == -float("inf"), float("nan"), scale)
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = (col_tiles - 1 - col_tile) * BLOCK_SIZE  # backwards: what was read last is nearest
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                x = tl.load(x_ptrs + start, mask=mask, other=-float("inf")).to(tl.float32)
                tl.store(y_ptrs + start, (_exp(x, anchor) * scale).to(Y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _softmax_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """As the forward, with y (always contiguous) and dy read instead of x."""
    begin(AHEAD)
    cols = tl.arange(0, BLOCK_SIZE)
    if WHOLE_ROW:
        first = tl.program_id(0)
        end, step = (first + 1, 1) if WHOLE_ROW == 2 else (n_tiles, tl.num_programs(0))
        for tile in tl.range(first, end, step, num_stages=STAGES):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            mask = (rows < n_rows) & (cols < n_cols)[None, :]
            dense = rows * n_cols + cols[None, :]
            dy_ptrs = DY_ptr + rows * DY_row_stride + cols[None, :]
            y = tl.load(Y_ptr + dense, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            dy = tl.load(dy_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            shift = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)[:, None]
            if WHOLE_ROW == 1 or BLOCK_SIZE > 16384:  # of few rows every program has registers enough
                y, dy = keep_narrow(y, shift), keep_narrow(dy, shift)
            dx = y.to(tl.float32) * (dy.to(tl.float32) - shift)
            tl.store(DX_ptr + dense, dx.to(DX_ptr.dtype.element_ty), mask=mask)
    else:
        col_tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            dense = rows * n_cols + cols[None, :]
            dy_ptrs = DY_ptr + rows * DY_row_stride + cols[None, :]
            dot = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = col_tile * BLOCK_SIZE
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                y = tl.load(Y_ptr + dense + start, mask=mask, other=0.0).to(tl.float32)
                dot += y * tl.load(dy_ptrs + start, mask=mask, other=0.0).to(tl.float32)
            shift = tl.sum(dot, axis=1)[:, None]
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = (col_tiles - 1 - col_tile) * BLOCK_SIZE  # backwards: what was read last is nearest
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                y = tl.load(Y_ptr + dense + start, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_ptrs + start, mask=mask, other=0.0).to(tl.float32)
                tl.store(DX_ptr + dense + start, (y * (dy - shift)).to(DX_ptr.dtype.element_ty), mask=mask)


# -- tunables and operators ------------------------------------------------------------------------------------------


def _bwd_reference(dy, y):
    wide = torch.promote_types(y.dtype, torch.float32)
    p, g = y.to(wide), dy.to(wide)
    return p * (g - (p * g).sum(-1, keepdim=True))


def _heuristic(target: Target, key: Key, tensors: int) -> LaunchConfig:
    """The shared one, but for two buckets of 16-bit rows (on an H200, bf16, forward and backward, 2026-11-22):

    rows of 1024, beyond those that fit the device at once and up to 8192: 8192 x 640 takes 15.5 us by one row of 2 warps, by
    two rows of 4 together 16.5; backward 16384 columns of at most a row a multiprocessor: 1 x 12289 takes 6.0 us with 16
    elements a thread, 6.4 with 32.
    """
    n_cols, rows_bucket, itemsize = key
    n_rows = 1 << rows_bucket
    medium = n_cols == 1024 and 4 * target.multiprocessors < n_rows <= 8192
    wide = n_cols == 16384 and n_rows <= target.multiprocessors and tensors == 2
    if itemsize == 2 and (medium or wide):
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": 1}, target.warps(n_cols, 16))
    return heuristic(target, key, tensors)


FWD, BWD = row_tunables(
    "softmax",
    (_softmax_fwd_kernel, _exp, _exp_folded, _log2_base, _below_2_30, keep_narrow),
    (_softmax_bwd_kernel, keep_narrow),
    _heuristic,
)
softmax_fwd, softmax_bwd = row_operators(FWD, BWD, softmax_reference, _bwd_reference)


class LigerSoftmaxFunction(Function):
    """Autograd for softmax: saves y."""

    @staticmethod
    def forward(ctx, input_):
        y = softmax_fwd(input_)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        return softmax_bwd(grad_output, *ctx.saved_tensors)


# -- public ----------------------------------------------------------------------------------------------------------


def liger_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension.

    x: [..., n_cols] in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a contiguous tensor like x.
    Raises `ValueError` for a dtype that does not fit or a tensor without dimensions.
    """
    check_tensors("liger_softmax", x=x)
    check(x.dim() > 0, "liger_softmax", "x must have at least one dimension")
    return LigerSoftmaxFunction.apply(x)


class LigerSoftmax(torch.nn.Module):
    """Softmax over the last dimension as a module without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_softmax(x)


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "attention_4k": (16384, 4096),
    "attention_1k": (65536, 1024),
    "mistral_7b_vocabulary": (8192, 32768),
    "llama3_8b_vocabulary": (4096, 128256),
    "qwen3_moe_router": (65536, 128),
}
"""Problem sizes (n_rows, n_cols): attention scores, output distributions, expert routers."""


def _sample(sizes, dtype, device, generator) -> Sample:
    n_rows, n_cols = sizes
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(
        args=(x.requires_grad_(),),
        reduction=n_cols,
        grad_reduction=n_cols,
        moved=5 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="softmax",
        function=liger_softmax,
        reference=softmax_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
    )
)
