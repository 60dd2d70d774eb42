"""The sums over rows that modulated_rms_norm's backward needs: dscale and dshift of each modulation, and dw.

Many rows leave partial sums, one line a program: `sum_chunks` adds them up, in one launch where one program can hold those
of its columns, else in one for each modulation's and another, `_reduce.column_sum`, for dw. Of few rows, programs of the
backward's own launch take a few columns of all of them (`_sums_of_columns`).
"""

from __future__ import annotations

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, next_power_of_2
from ...runtime.operator import launch
from ...runtime.triton_import import tl, triton
from ..rows.blocks import load_tile, tile_ptrs
from .core import load_scale, most_rows_summed, normalised


@triton.jit
def _store_if(ptrs, value, mask):
    if ptrs is not None:
        tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _store_gradients(q, shift, scale, w, DScale_ptr, DShift_ptr, DW_ptr, mods, n_cols, cols, mask, exist):
    """From q and shift [modulations, columns] of all modulations: dscale, dshift and, where there is a w, dw."""
    dscale = q
    if w is not None:
        dscale = q * w[None, :]
        dw = tl.sum(q * (1.0 + scale.to(tl.float32)), axis=0)
        tl.store(DW_ptr + cols, dw.to(DW_ptr.dtype.element_ty), mask=exist)
    _store_if(tile_ptrs(DScale_ptr, mods, n_cols, cols, 1), dscale, mask)
    if DShift_ptr is not None:
        _store_if(tile_ptrs(DShift_ptr, mods, n_cols, cols, 1), shift, mask)


@triton.jit
def _sums_of_columns(
    DY_ptr,
    X_ptr,
    W_ptr,
    Scale_ptr,
    RSTD_ptr,
    DScale_ptr,
    DShift_ptr,
    DW_ptr,
    DY_row_stride,
    X_row_stride,
    Scale_row_stride,
    tile,
    n_mods,
    rows_per_mod,
    n_cols,
    offset,
    CASTING: tl.constexpr,
    MODS: tl.constexpr,
    PER_MOD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dscale, dshift and dw of WIDTH columns, from all rows: [modulations, rows of one, columns]."""
    cols = tile * WIDTH + tl.arange(0, WIDTH)
    mods = tl.arange(0, MODS).to(tl.int64)
    in_mod = tl.arange(0, PER_MOD)
    exist, is_mod = cols < n_cols, mods < n_mods
    rows = mods[:, None] * rows_per_mod + in_mod[None, :]
    row_mask = is_mod[:, None] & (in_mod < rows_per_mod)[None, :]
    mask = row_mask[:, :, None] & exist[None, None, :]
    x = tl.load(X_ptr + rows[:, :, None] * X_row_stride + cols[None, None, :], mask=mask, other=0.0)
    dy = tl.load(DY_ptr + rows[:, :, None] * DY_row_stride + cols[None, None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(RSTD_ptr + rows, mask=row_mask, other=0.0)[:, :, None]
    mask = is_mod[:, None] & exist[None, :]
    scale = load_tile(Scale_ptr, mods, Scale_row_stride, cols, mask, "", "")
    w = load_scale(W_ptr, cols, exist, offset)
    _, seen = normalised(x, None, rstd, CASTING)
    q, shift = tl.sum(dy * seen, axis=1), tl.sum(dy, axis=1)
    _store_gradients(q, shift, scale, w, DScale_ptr, DShift_ptr, DW_ptr, mods, n_cols, cols, mask, exist)


@triton.jit(do_not_specialize=["chunks"])
def _modulated_rms_norm_bwd_sums_kernel(
    Partial_ptr,
    W_ptr,
    Scale_ptr,
    DScale_ptr,
    DShift_ptr,
    DW_partial_ptr,
    Scale_row_stride,
    n_cols,
    chunks,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds up the chunks of one modulation and turns q into dscale and this modulation's share of dw."""
    mod = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    width = n_cols
    if DShift_ptr is not None:
        width = 2 * n_cols
        shift = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    q = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, chunks, BLOCK_M):
        chunk = start + tl.arange(0, BLOCK_M)
        mask = (chunk < chunks)[:, None] & col_mask[None, :]
        partial_ptrs = Partial_ptr + (mod * chunks + chunk)[:, None] * width + cols[None, :]
        q += tl.load(partial_ptrs, mask=mask, other=0.0)
        if DShift_ptr is not None:
            shift += tl.load(partial_ptrs + n_cols, mask=mask, other=0.0)
    total = tl.sum(q, axis=0)
    dscale = total
    if W_ptr is not None:
        dscale = total * (tl.load(W_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset)
        scale = tl.load(Scale_ptr + mod * Scale_row_stride + cols, mask=col_mask, other=0.0).to(tl.float32)
        tl.store(DW_partial_ptr + mod * n_cols + cols, total * (1.0 + scale), mask=col_mask)
    tl.store(DScale_ptr + mod * n_cols + cols, dscale.to(DScale_ptr.dtype.element_ty), mask=col_mask)
    if DShift_ptr is not None:
        dshift = tl.sum(shift, axis=0)
        tl.store(DShift_ptr + mod * n_cols + cols, dshift.to(DShift_ptr.dtype.element_ty), mask=col_mask)


@triton.jit(do_not_specialize=["n_mods", "chunks"])
def _modulated_rms_norm_bwd_all_sums_kernel(
    Partial_ptr,
    W_ptr,
    Scale_ptr,
    DScale_ptr,
    DShift_ptr,
    DW_ptr,
    Scale_row_stride,
    n_mods,
    n_cols,
    chunks,
    offset,
    MODS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The same for all modulations at once, and dw: [modulations, chunks, columns], powers of two that hold them."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mods = tl.arange(0, MODS).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    exist, is_mod = cols < n_cols, mods < n_mods
    width = n_cols
    if DShift_ptr is not None:
        width = 2 * n_cols
    mask = (is_mod[:, None] & (chunk < chunks)[None, :])[:, :, None] & exist[None, None, :]
    partial_ptrs = Partial_ptr + (mods[:, None] * chunks + chunk[None, :])[:, :, None] * width + cols[None, None, :]
    q = tl.sum(tl.load(partial_ptrs, mask=mask, other=0.0), axis=1)
    shift = None
    if DShift_ptr is not None:
        shift = tl.sum(tl.load(partial_ptrs + n_cols, mask=mask, other=0.0), axis=1)
    mask = is_mod[:, None] & exist[None, :]
    scale = load_tile(Scale_ptr, mods, Scale_row_stride, cols, mask, "", "")
    w = load_scale(W_ptr, cols, exist, offset)
    _store_gradients(q, shift, scale, w, DScale_ptr, DShift_ptr, DW_ptr, mods, n_cols, cols, mask, exist)


# -- tunables --------------------------------------------------------------------------------------------------------


def _sums_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Tiles for 4 chunks of a modulation: for 16, 64 x 16384 x 1152 takes 38.9 us backward on the H200, not 36.7 (2026-11-22)."""
    return LaunchConfig({"BLOCK_M": 4, "BLOCK_N": 64}, target.warps(256, 4))


def _sums_safe(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_M": 8, "BLOCK_N": 32}, 1)


def _sums_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_M": rows, "BLOCK_N": columns}, warps)
        for rows in (4, 8, 16, 32, 64)
        for columns in (32, 64, 128, 256)
        for warps in (1, 2, 4, 8)
        if 4 <= rows * columns // (warps * target.warp_size) <= 32
    ]


def _all_sums_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Narrow tiles, for there is a program for each column tile only. H200, 8 x 8192 x 2304: 34.7 us backward by 4 warps, 38.3 by 8."""
    return LaunchConfig({"BLOCK_N": 16}, target.warps(4096, 32))


def _all_sums_safe(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_N": 8}, 4)


def _all_sums_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [LaunchConfig({"BLOCK_N": columns}, warps) for columns in (8, 16, 32) for warps in (2, 4, 8, 16)]


SUMS = ((_modulated_rms_norm_bwd_sums_kernel,), _sums_heuristic, _sums_safe, _sums_space)
ALL_SUMS = ((_modulated_rms_norm_bwd_all_sums_kernel,), _all_sums_heuristic, _all_sums_safe, _all_sums_space)
"""Of the tunables `bwd_sums` and `bwd_all_sums`: kernels, the one that is launched first, heuristic, safe, space."""

# -- launchers -------------------------------------------------------------------------------------------------------

_MOST_AT_ONCE = 512
"""Partial sums of one column that one program adds up: of so many a tile 16 columns wide fits its registers."""


def columns_at_once(target: Target, n_mods: int, n_rows: int, n_cols: int) -> tuple[int, int, int]:
    """(MODS, PER_MOD, WIDTH) of `_sums_of_columns`; zeros for more rows than `most_rows_summed`, for one, which has no sum, and for
    more than 2048 elements a multiprocessor: on the H200 32 x 128 x 4096 takes 10.8 us backward with them and 6.5 with
    launches that sum what row programs leave (2026-11-22)."""
    mods, per_mod = next_power_of_2(n_mods), next_power_of_2(n_rows // n_mods)
    rows = mods * per_mod
    if n_rows == 1 or max(n_rows, rows) > most_rows_summed(target) or rows * n_cols > 2048 * target.multiprocessors:
        return 0, 0, 0
    return mods, per_mod, max(16, 1024 // rows)


def sum_chunks(
    each: Tunable,
    every: Tunable,
    key: Key,
    partial,
    w,
    scale,
    dscale,
    dshift,
    scale_stride,
    n_mods,
    n_cols,
    chunks,
    offset,
) -> torch.Tensor | None:
    """Fills dscale and, if there is one, dshift from `partial` [n_mods * chunks, (1 or 2) * n_cols]; returns lines that add
    up to dw, or None without a w."""
    tile = next_power_of_2(n_mods), next_power_of_2(chunks)
    at_once = tile[0] * tile[1] <= _MOST_AT_ONCE
    plan = (every if at_once else each).plan(partial.device, key)
    col_tiles = -(-n_cols // plan.config.blocks["BLOCK_N"])
    dw = None
    if w is not None:
        dw = partial.new_empty((1 if at_once else n_mods, n_cols), dtype=w.dtype if at_once else torch.float32)
    tensors = partial, w, scale, dscale, dshift, dw
    if at_once:
        args = (*tensors, scale_stride, n_mods, n_cols, chunks, offset)
        launch(plan, _modulated_rms_norm_bwd_all_sums_kernel, (col_tiles,), args, tile)
    else:
        args = (*tensors, scale_stride, n_cols, chunks, offset)
        launch(plan, _modulated_rms_norm_bwd_sums_kernel, (n_mods, col_tiles), args)
    return dw
