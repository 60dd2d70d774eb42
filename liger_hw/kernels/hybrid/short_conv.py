"""LFM2's gated short convolution: y = C * conv(B * x), where (B, C, x) are the thirds of one projection, bcx.

conv is defined in causal_conv.py. Sums are fp32, rounded once. Saved for backward: bcx and the weight.

Source: Liquid AI, "LFM2 Technical Report", https://arxiv.org/abs/2511.23404
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, next_power_of_2, normal
from ...runtime.operator import OperatorFunction, cdiv, define, dense, empty_like, launch
from ...runtime.triton_import import tl, triton
from ..rows.reduce import column_sum, column_sum_tunable, partial_sums
from .causal_conv import (
    blocks_of,
    causal_conv_reference,
    conv_key,
    conv_tunables,
    document,
    store_tap_sums,
    tap,
    taps_misfit,
    token_mask,
    within,
)


def short_conv_reference(bcx, weight, seq_idx=None):
    b, c, x = bcx.to(torch.promote_types(bcx.dtype, torch.float32)).chunk(3, -1)
    return (c * causal_conv_reference(b * x, weight, seq_idx)).to(bcx.dtype)


@triton.jit(do_not_specialize=["n_tokens", "n_blocks"])
def _short_conv_fwd_kernel(
    BCX_ptr,
    W_ptr,
    Idx_ptr,
    Y_ptr,
    n_tokens,
    n_blocks,
    n_cols,
    TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n_tiles = tl.cdiv(n_cols, BLOCK_D)
    tile, block = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    row = (block // n_blocks).to(tl.int64) * n_tokens
    t = (block % n_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tile * BLOCK_D + tl.arange(0, BLOCK_D)
    col_mask = cols < n_cols
    mask = (t < n_tokens)[:, None] & col_mask[None, :]
    y = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for back in tl.static_range(TAPS):
        at = BCX_ptr + (row + t - back)[:, None] * (3 * n_cols) + cols[None, :]
        exists = token_mask(Idx_ptr, row, t, n_tokens, back)[:, None] & col_mask[None, :]
        b = tl.load(at, mask=exists, other=0.0).to(tl.float32)
        x = tl.load(at + 2 * n_cols, mask=exists, other=0.0).to(tl.float32)
        y += tap(W_ptr, cols, col_mask, back, TAPS) * (b * x)
    at = (row + t)[:, None]
    c = tl.load(BCX_ptr + at * (3 * n_cols) + n_cols + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(Y_ptr + at * n_cols + cols[None, :], (c * y).to(Y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _token(BCX_ptr, Idx_ptr, row, t, n_tokens, n_cols, cols):
    """(B and x in their stored dtype, the document index) of each token t; B and x are zero outside the sequence."""
    at = BCX_ptr + (row + t)[:, None] * (3 * n_cols) + cols[None, :]
    mask = ((t >= 0) & (t < n_tokens))[:, None] & (cols < n_cols)[None, :]
    b, x = tl.load(at, mask=mask, other=0.0), tl.load(at + 2 * n_cols, mask=mask, other=0.0)
    return b, x, document(Idx_ptr, row, t, n_tokens)


@triton.jit
def _product(BCX_ptr, Idx_ptr, row, t, n_tokens, n_cols, cols):
    """(B * x, the document index) of each token t."""
    b, x, index = _token(BCX_ptr, Idx_ptr, row, t, n_tokens, n_cols, cols)
    return b.to(tl.float32) * x.to(tl.float32), index


@triton.jit(do_not_specialize=["n_tokens", "n_blocks"])
def _short_conv_bwd_kernel(
    DY_ptr,
    BCX_ptr,
    W_ptr,
    Idx_ptr,
    DBCX_ptr,
    DW_ptr,
    n_tokens,
    n_blocks,
    n_cols,
    TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    n_tiles = tl.cdiv(n_cols, BLOCK_D)
    tile, block = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    row = (block // n_blocks).to(tl.int64) * n_tokens
    first = ((block % n_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)) * BLOCK_L
    cols = tile * BLOCK_D + tl.arange(0, BLOCK_D)
    col_mask = cols < n_cols
    w0, w1 = tap(W_ptr, cols, col_mask, 0, TAPS), tap(W_ptr, cols, col_mask, 1, TAPS)
    w2, w3 = tap(W_ptr, cols, col_mask, 2, TAPS), tap(W_ptr, cols, col_mask, 3, TAPS)
    u1, i1 = _product(BCX_ptr, Idx_ptr, row, first - 1, n_tokens, n_cols, cols)
    u2, i2 = _product(BCX_ptr, Idx_ptr, row, first - 2, n_tokens, n_cols, cols)
    u3, i3 = _product(BCX_ptr, Idx_ptr, row, first - 3, n_tokens, n_cols, cols)
    # these values never reach a store; with equal ones Triton 3.6 and 3.7 would treat d2 and d3 as constants
    d1, d2, d3 = u1, u2, u3
    dw0 = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    dw1, dw2, dw3 = dw0, dw0, dw0
    b_next, x_next, i_next = _token(BCX_ptr, Idx_ptr, row, first, n_tokens, n_cols, cols)
    after, mask = (row + first)[:, None], (first < n_tokens)[:, None] & col_mask[None, :]
    dy_next = tl.load(DY_ptr + after * n_cols + cols[None, :], mask=mask, other=0.0)
    c_next = tl.load(BCX_ptr + after * (3 * n_cols) + n_cols + cols[None, :], mask=mask, other=0.0)
    for step in range(0, BLOCK_L + 3):
        t = first + step
        u0, i0, dy, c = b_next.to(tl.float32) * x_next.to(tl.float32), i_next, dy_next.to(tl.float32), c_next
        b_next, x_next, i_next = _token(BCX_ptr, Idx_ptr, row, t + 1, n_tokens, n_cols, cols)
        after, mask = (row + t + 1)[:, None], (t + 1 < n_tokens)[:, None] & col_mask[None, :]
        dy_next = tl.load(DY_ptr + after * n_cols + cols[None, :], mask=mask, other=0.0)
        c_next = tl.load(BCX_ptr + after * (3 * n_cols) + n_cols + cols[None, :], mask=mask, other=0.0)
        u1_, u2_ = within(u1, i0, i1, Idx_ptr, 1, TAPS), within(u2, i0, i2, Idx_ptr, 2, TAPS)
        u3_ = within(u3, i0, i3, Idx_ptr, 3, TAPS)
        dc = dy * (w0 * u0 + w1 * u1_ + w2 * u2_ + w3 * u3_)
        is_counted = step < BLOCK_L  # masks products, not factors: later tokens may be infinite, and 0 * inf is NaN
        at = DBCX_ptr + (row + t)[:, None] * (3 * n_cols) + n_cols + cols[None, :]
        tl.store(at, dc.to(DBCX_ptr.dtype.element_ty), mask=(t < n_tokens)[:, None] & col_mask[None, :] & is_counted)
        d0 = dy * c.to(tl.float32)
        dw0, dw1 = dw0 + tl.where(is_counted, d0 * u0, 0.0), dw1 + tl.where(is_counted, d0 * u1_, 0.0)
        dw2, dw3 = dw2 + tl.where(is_counted, d0 * u2_, 0.0), dw3 + tl.where(is_counted, d0 * u3_, 0.0)
        du = w0 * d3 + w1 * within(d2, i3, i2, Idx_ptr, 1, TAPS)
        du += w2 * within(d1, i3, i1, Idx_ptr, 2, TAPS) + w3 * within(d0, i3, i0, Idx_ptr, 3, TAPS)
        done = (t - 3 < n_tokens)[:, None] & col_mask[None, :] & (step >= 3)
        b, x, i_done = _token(BCX_ptr, Idx_ptr, row, t - 3, n_tokens, n_cols, cols)
        before = DBCX_ptr + (row + t - 3)[:, None] * (3 * n_cols) + cols[None, :]
        tl.store(before, (du * x.to(tl.float32)).to(DBCX_ptr.dtype.element_ty), mask=done)
        tl.store(before + 2 * n_cols, (du * b.to(tl.float32)).to(DBCX_ptr.dtype.element_ty), mask=done)
        u3, u2, u1, i3, i2, i1, d3, d2, d1 = u2, u1, u0, i2, i1, i0, d2, d1, d0
    DW_ptr += block.to(tl.int64) * n_cols * TAPS
    store_tap_sums(DW_ptr, cols, col_mask, dw0, 0, TAPS)
    store_tap_sums(DW_ptr, cols, col_mask, dw1, 1, TAPS)
    store_tap_sums(DW_ptr, cols, col_mask, dw2, 2, TAPS)
    store_tap_sums(DW_ptr, cols, col_mask, dw3, 3, TAPS)


def _key(batch, n_tokens, n_cols, itemsize):
    return conv_key(batch * n_tokens, min(128, next_power_of_2(n_cols)), itemsize)


DIMS = "batch", "n_tokens", "n_cols"
FWD, BWD = conv_tunables("short_conv", _short_conv_fwd_kernel, _short_conv_bwd_kernel, DIMS, _key)
DW = column_sum_tunable("short_conv", DIMS, lambda batch, n_tokens, n_cols: 3 * n_cols)


def _fwd(bcx, weight, seq_idx):
    bcx, weight, seq_idx = dense(bcx), dense(weight), dense(seq_idx)
    (batch, n_tokens, _), (n_cols, taps) = bcx.shape, weight.shape
    y = torch.empty((batch, n_tokens, n_cols), dtype=bcx.dtype, device=bcx.device)
    if y.numel():
        plan = FWD.plan(bcx.device, _key(batch, n_tokens, n_cols, bcx.itemsize))
        n_blocks = blocks_of(plan, n_tokens)
        grid = (batch * n_blocks * cdiv(n_cols, plan.key[0]),)
        args = bcx, weight, seq_idx, y, n_tokens, n_blocks, n_cols
        launch(plan, _short_conv_fwd_kernel, grid, args, (taps, plan.key[0]))
    return y


def _bwd(dy, bcx, weight, seq_idx):
    dy, bcx, weight, seq_idx = dense(dy), dense(bcx), dense(weight), dense(seq_idx)
    (batch, n_tokens, _), (n_cols, taps) = bcx.shape, weight.shape
    dbcx = empty_like(bcx, bcx.dtype)
    if not bcx.numel():
        return dbcx, torch.zeros_like(weight)
    plan = BWD.plan(bcx.device, _key(batch, n_tokens, n_cols, bcx.itemsize))
    n_blocks = blocks_of(plan, n_tokens)
    partial = partial_sums(bcx, batch * n_blocks, n_cols * taps, weight.dtype)
    args = dy, bcx, weight, seq_idx, dbcx, partial, n_tokens, n_blocks, n_cols
    grid = (batch * n_blocks * cdiv(n_cols, plan.key[0]),)
    launch(plan, _short_conv_bwd_kernel, grid, args, (taps, plan.key[0]))
    return dbcx, column_sum(DW, partial, weight.dtype).view(n_cols, taps)


_SHAPES = "bcx [batch, tokens, 3n]; weight [n, taps]; int seq_idx [batch, tokens]"


class ShortConvFunction(OperatorFunction):
    fwd = define(
        "short_conv_fwd(Tensor bcx, Tensor weight, Tensor? seq_idx) -> Tensor y",
        shapes=_SHAPES,
        misfit=lambda bcx, weight, seq_idx: taps_misfit(weight),
        launcher=_fwd,
        reference=short_conv_reference,
    )
    bwd = define(
        "short_conv_bwd(Tensor dy, Tensor bcx, Tensor weight, Tensor? seq_idx) -> (Tensor dbcx, Tensor dweight)",
        shapes=f"{_SHAPES}; dy [batch, tokens, n]",
        misfit=lambda dy, bcx, weight, seq_idx: taps_misfit(weight),
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_short_conv(bcx: torch.Tensor, weight: torch.Tensor, seq_idx: torch.Tensor | None = None) -> torch.Tensor:
    """C * conv(B * x) for (B, C, x) = bcx.chunk(3, -1), with a causal depthwise convolution, as in LFM2.

    bcx: [batch, n_tokens, 3 * n_cols]; weight: [n_cols, taps], a Conv1d's weight.squeeze(1), with at most four taps;
    fp32, fp16 or bf16 (fp64 too on the CPU). seq_idx: [batch, n_tokens] int64 or int32, each token's document; the
    convolution does not cross documents. None: each row is one document. Returns [batch, n_tokens, n_cols] in bcx's
    dtype. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    return ShortConvFunction.apply(bcx, weight, seq_idx)


WORKLOADS = {"lfm2_1b": (1, 8192, 2048), "lfm2_8b_a1b": (4, 4096, 2048), "lfm2_350m": (8, 2048, 1024)}


def documents(batch: int, n_tokens: int, device: torch.device) -> torch.Tensor:
    """seq_idx with documents of five tokens."""
    return (torch.arange(n_tokens, device=device, dtype=torch.int32) // 5).repeat(batch, 1)


def sample(sizes, dtype, device, generator, *, taps=3, packed=False) -> Sample:
    batch, n_tokens, n_cols = sizes
    drawn = normal(dtype, device, generator)
    args = drawn(batch, n_tokens, 3 * n_cols), drawn(n_cols, taps)
    if packed:
        args = *args, documents(batch, n_tokens, device)
    moved = 11 * batch * n_tokens * n_cols * dtype.itemsize
    return Sample(args=args, reduction=taps, grad_reduction=batch * n_tokens, moved=moved)


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD, DW),
    options=({}, {"packed": True}, {"taps": 4}, {"taps": 2}),
    small=((2, 9, 20), (1, 1, 7), (1, 37, 130)),
)
