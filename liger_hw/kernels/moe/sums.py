"""Sums before and after the grouped products of fused_moe, each in a fixed order, in fp32 and rounded once.

combine   sums over a token's rows: the output (of rows with bias and weight), and the gradient of x
bias      sums over an expert's rows: the gradients of both biases
"""

from __future__ import annotations

import torch

from ...registry import Key, LaunchConfig, Target, next_power_of_2, tile_space
from ...runtime.load_hint import load_with_hint
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton
from ..rows.tuning import column_tiles
from .routing import Routing, moe_tunable


@triton.jit
def _fused_moe_combine_kernel(
    Y_ptr,
    Weights_ptr,
    Bias_ptr,
    Index_ptr,
    Row_ptr,
    Out_ptr,
    n_cols,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_HINT: tl.constexpr,
):
    """Out[token] = the sum of weight * (Y[row] + Bias[expert]) over the token's slots that have an expert, in order."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    out = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        row = tl.load(Row_ptr + slot).to(tl.int64)
        ptrs = Y_ptr + row * n_cols + cols
        y = load_with_hint(ptrs, LOAD_HINT, mask=mask & (row >= 0), other=0.0)
        y = y.to(tl.float32)
        if Bias_ptr is not None:
            expert = tl.load(Index_ptr + slot).to(tl.int64)
            y += tl.load(Bias_ptr + expert * n_cols + cols, mask=mask & (row >= 0), other=0.0).to(tl.float32)
        if Weights_ptr is not None:
            y = tl.where(row >= 0, y * tl.load(Weights_ptr + slot).to(tl.float32), 0.0)
        out += y
    tl.store(Out_ptr + token * n_cols + cols, out.to(Out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fused_moe_bias_kernel(
    Rows_ptr,
    Weights_ptr,
    Order_ptr,
    Offsets_ptr,
    DBias_ptr,
    row_stride,
    n_cols,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """DBias[expert] = the sum over the expert's rows of Rows[row], or with Weights_ptr of weight * Rows[token]."""
    expert = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    begin = tl.load(Offsets_ptr + expert)
    end = tl.load(Offsets_ptr + expert + 1)
    total = tl.zeros([BLOCK_T, BLOCK_SIZE], dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        at = rows
        if Weights_ptr is not None:
            slots = tl.load(Order_ptr + rows, mask=rows < end, other=0)
            at = slots // TOP_K
        mask = (rows < end)[:, None] & (cols < n_cols)[None, :]
        part = tl.load(Rows_ptr + at[:, None].to(tl.int64) * row_stride + cols[None, :], mask=mask, other=0.0)
        part = part.to(tl.float32)
        if Weights_ptr is not None:
            weight = tl.load(Weights_ptr + slots, mask=rows < end, other=0.0).to(tl.float32)
            part = tl.where(mask, part * weight[:, None], 0.0)
        total += part
    out = DBias_ptr + expert.to(tl.int64) * n_cols + cols
    tl.store(out, tl.sum(total, axis=0).to(DBias_ptr.dtype.element_ty), mask=cols < n_cols)


def _key(n_tokens: int, hidden: int, inner: int, n_experts: int, top_k: int, itemsize: int) -> Key:
    return next_power_of_2(hidden), top_k, (max(1, n_tokens) - 1).bit_length(), itemsize


def _combine_heuristic(target: Target, key: Key) -> LaunchConfig:
    """16 bytes of each row a thread, at most eight warps."""
    block = min(key[0], 2048)
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16 // key[3], 8))


def _combine_space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = column_tiles(key, 512, 4096)
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 32), hints=("none", "stream"))


def _tiled_heuristic(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_T": 16, "BLOCK_SIZE": 128}, target.warps(2048, 16, 8))


def _tiled_space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = [{"BLOCK_T": rows, "BLOCK_SIZE": block} for rows in (8, 16, 32) for block in (64, 128, 256)]
    return tile_space(target, tiles, (2, 4, 8), per_thread=(4, 64))


_NEUTRAL = "num_warps", "num_stages"
COMBINE = moe_tunable("combine", _fused_moe_combine_kernel, _key, _combine_heuristic, _combine_space, *_NEUTRAL)
BIAS = moe_tunable("bias", _fused_moe_bias_kernel, _key, _tiled_heuristic, _tiled_space)
TUNABLES = (COMBINE, BIAS)


def combine(
    y: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None, top_k_index: torch.Tensor, routes: Routing
) -> torch.Tensor:
    """[T, H]: the sum of each token's rows of y [T * K, H], plus the experts' bias [E, H], times weights [T, K]."""
    (n_tokens, top_k), hidden = top_k_index.shape, y.shape[1]
    out = torch.empty((n_tokens, hidden), dtype=y.dtype, device=y.device)
    plan = COMBINE.plan(y.device, _key(n_tokens, hidden, 0, 0, top_k, y.itemsize))
    grid = n_tokens, cdiv(hidden, plan.config.blocks["BLOCK_SIZE"])
    launch(plan, _fused_moe_combine_kernel, grid, (y, weights, bias, top_k_index, routes.row, out, hidden), (top_k,))
    return out


def bias_gradient(
    rows: torch.Tensor, weights: torch.Tensor | None, top_k_index: torch.Tensor, routes: Routing
) -> torch.Tensor:
    """[E, n_cols]: sums of each expert's rows [T * K, n_cols], or with weights of weight * rows[token] ([T, n_cols])"""
    n_experts, n_cols, (n_tokens, top_k) = routes.largest.shape[0], rows.shape[1], top_k_index.shape
    dbias = torch.empty((n_experts, n_cols), dtype=rows.dtype, device=rows.device)
    plan = BIAS.plan(rows.device, _key(n_tokens, n_cols, 0, 0, top_k, rows.itemsize))
    grid = n_experts, cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"])
    args = (rows, weights, routes.order, routes.offsets, dbias, rows.stride(0), n_cols)
    launch(plan, _fused_moe_bias_kernel, grid, args, (top_k,))
    return dbias
