"""Kernels of modulated_rms_norm and their tunables; the formulas are in modulated_rms_norm.py.

A modulation (mod) is one row of scale and of shift. Programs take rows that share a modulation and load its factor
(offset + w) * (1 + scale) once, or load a modulation for each row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ...registry import Key, LaunchConfig, Target, row_key, tile_space
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    as_column,
    blocks_key,
    first_columns,
    load_columns,
    load_row_values,
    load_scale,
    load_tile,
    max_columns,
    row_sums,
    second_columns,
    squared,
    store_columns,
    store_tile,
    tile_mask,
    to_fp32,
    which_exist,
)
from ..rows.reduce import column_sum_tunable
from ..rows.tuning import (
    WIDEST_BLOCK,
    bwd_heuristic,
    bwd_space,
    persistent_misfit,
    row_tiles,
    row_tunable,
    rows_per_program,
)
from .backward import means_tunable, store_partial_sums
from .forward import normalised

# -- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_factors(W_ptr, Scale_ptr, mods, Scale_row_stride, cols, exist, mask, offset):
    """(offset + W) * (1 + scale) in fp32, [mods, columns]; None without cols."""
    scale = load_tile(Scale_ptr, mods, Scale_row_stride, cols, mask, "")
    w = load_scale(W_ptr, cols, exist, offset)
    gain = None if scale is None else 1.0 + scale.to(tl.float32)
    gain = gain if gain is None or w is None else gain * w[None, :]
    return gain


@triton.jit
def _modulated(x, rstd, gain, shift, CASTING: tl.constexpr):
    _, h = normalised(x, None, as_column(rstd), CASTING)
    return h * gain if shift is None else h * gain + shift


@triton.jit(do_not_specialize=["rows_per_mod", "rows_per_group", "n_tiles", "chunks"])
def _modulated_rms_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    Scale_ptr,
    Shift_ptr,
    Y_ptr,
    RSTD_ptr,
    X_row_stride,
    Scale_row_stride,
    Shift_row_stride,
    n_cols,
    rows_per_mod,
    rows_per_group,
    n_tiles,
    chunks,
    eps,
    offset,
    CASTING: tl.constexpr,
    LOAD_MODS: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    BLOCK_2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program g * chunks + p takes the row tiles p, p + chunks, ... of group g, each row in one block or two (BLOCK_2).

    LOAD_MODS, when modulations are loaded: 1: once for all rows of a program; a group is the rows of a modulation. Else
    all rows are one group, and each row's modulation is loaded after the row's rstd is computed (0) or, if each program
    has one tile, before (2). Rows too wide to hold are read twice.
    """
    wait_for_previous(DEPENDENT)
    pid = tl.program_id(0)
    if LOAD_MODS == 1:
        group = (pid // chunks).to(tl.int64)
        first, end, step = pid % chunks, n_tiles, chunks
    else:
        group = (pid * 0).to(tl.int64)
        first, end, step = (pid, pid + 1, 1) if LOAD_MODS == 2 else (pid, n_tiles, chunks)
    if WHOLE_ROW:
        cols, exist = first_columns(0, n_cols, BLOCK_SIZE, BLOCK_2)
        cols_2 = second_columns(BLOCK_SIZE, BLOCK_2)
        exist_2 = which_exist(cols_2, n_cols)
    if LOAD_MODS == 1:
        mods = group + tl.zeros([1], dtype=tl.int64)
        gain = _load_factors(W_ptr, Scale_ptr, mods, Scale_row_stride, cols, exist, exist[None, :], offset)
        shift = to_fp32(load_tile(Shift_ptr, mods, Shift_row_stride, cols, exist[None, :], ""))
        mod_mask_2 = tile_mask(tl.full([1], 1, tl.int1), exist_2)
        gain_2 = _load_factors(W_ptr, Scale_ptr, mods, Scale_row_stride, cols_2, exist_2, mod_mask_2, offset)
        shift_2 = to_fp32(load_tile(Shift_ptr, mods, Shift_row_stride, cols_2, mod_mask_2, ""))
    for tile in tl.range(first, end, step, num_stages=STAGES):
        in_group = tile * ROWS + tl.arange(0, ROWS)
        row_mask = in_group < rows_per_group
        rows = group * rows_per_group + in_group
        row_mods = (in_group // rows_per_mod).to(tl.int64)  # valid where all rows are one group
        if WHOLE_ROW:
            mask = tile_mask(row_mask, exist)
            mask_2 = tile_mask(row_mask, exist_2)
            x = load_tile(X_ptr, rows, X_row_stride, cols, mask, "")
            x_2 = load_tile(X_ptr, rows, X_row_stride, cols_2, mask_2, "")
            if LOAD_MODS == 2:
                gain = _load_factors(W_ptr, Scale_ptr, row_mods, Scale_row_stride, cols, exist, mask, offset)
                shift = to_fp32(load_tile(Shift_ptr, row_mods, Shift_row_stride, cols, mask, ""))
                gain_2 = _load_factors(W_ptr, Scale_ptr, row_mods, Scale_row_stride, cols_2, exist_2, mask_2, offset)
                shift_2 = to_fp32(load_tile(Shift_ptr, row_mods, Shift_row_stride, cols_2, mask_2, ""))
            rstd = tl.rsqrt(row_sums(squared(x), squared(x_2)) / n_cols + eps)
            if LOAD_MODS == 0:
                gain = _load_factors(W_ptr, Scale_ptr, row_mods, Scale_row_stride, cols, exist, mask, offset)
                shift = to_fp32(load_tile(Shift_ptr, row_mods, Shift_row_stride, cols, mask, ""))
            store_tile(Y_ptr, rows, n_cols, cols, _modulated(x, rstd, gain, shift, CASTING), mask)
            if BLOCK_2:
                if LOAD_MODS == 0:
                    gain_2 = _load_factors(
                        W_ptr, Scale_ptr, row_mods, Scale_row_stride, cols_2, exist_2, mask_2, offset
                    )
                    shift_2 = to_fp32(load_tile(Shift_ptr, row_mods, Shift_row_stride, cols_2, mask_2, ""))
                y = _modulated(x_2, rstd, gain_2, shift_2, CASTING)
                store_tile(Y_ptr, rows, n_cols, cols_2, y, mask_2)
        else:
            positions = tl.arange(0, BLOCK_SIZE)
            squares = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            for start in range(0, n_cols, BLOCK_SIZE):
                mask = tile_mask(row_mask, start + positions < n_cols)
                squares += squared(load_tile(X_ptr, rows, X_row_stride, start + positions, mask, ""))
            rstd = tl.rsqrt(row_sums(squares, None) / n_cols + eps)
            tiles = tl.cdiv(n_cols, BLOCK_SIZE)
            for turn in range(tiles):  # backwards: the last tiles are still in cache
                at = (tiles - 1 - turn) * BLOCK_SIZE + positions
                mask = tile_mask(row_mask, at < n_cols)
                x = load_tile(X_ptr, rows, X_row_stride, at, mask, "")
                gain = _load_factors(W_ptr, Scale_ptr, row_mods, Scale_row_stride, at, at < n_cols, mask, offset)
                shift = to_fp32(load_tile(Shift_ptr, row_mods, Shift_row_stride, at, mask, ""))
                store_tile(Y_ptr, rows, n_cols, at, _modulated(x, rstd, gain, shift, CASTING), mask)
        tl.store(RSTD_ptr + rows, rstd, mask=row_mask)


# -- gradients of the parameters -------------------------------------------------------------------------------------


@triton.jit
def _store_gradients(q, dshift, scale, w, DScale_ptr, DShift_ptr, DW_ptr, mods, n_cols, cols, mask, exist):
    """Store dscale, dshift and, with a w, dw. q, dshift: sums of dy * h and of dy, [modulations, columns]."""
    dscale = q
    if w is not None:
        dscale = q * w[None, :]
        dw = tl.sum(q * (1.0 + scale.to(tl.float32)), axis=0)
        tl.store(DW_ptr + cols, dw.to(DW_ptr.dtype.element_ty), mask=exist)
    store_tile(DScale_ptr, mods, n_cols, cols, dscale, mask)
    if DShift_ptr is not None:
        store_tile(DShift_ptr, mods, n_cols, cols, dshift, mask)


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
    """Add up the partial sums of one modulation; store its dscale, its dshift and its term of dw."""
    mod = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    width = n_cols
    if DShift_ptr is not None:
        width = 2 * n_cols
        dshift = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    q = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, chunks, BLOCK_M):
        chunk = start + tl.arange(0, BLOCK_M)
        mask = (chunk < chunks)[:, None] & col_mask[None, :]
        partial_ptrs = Partial_ptr + (mod * chunks + chunk)[:, None] * width + cols[None, :]
        q += tl.load(partial_ptrs, mask=mask, other=0.0)
        if DShift_ptr is not None:
            dshift += tl.load(partial_ptrs + n_cols, mask=mask, other=0.0)
    total = tl.sum(q, axis=0)
    dscale = total
    if W_ptr is not None:
        dscale = total * load_scale(W_ptr, cols, col_mask, offset)
        scale = load_columns(Scale_ptr + mod * Scale_row_stride, cols, col_mask).to(tl.float32)
        store_columns(DW_partial_ptr + mod * n_cols, cols, total * (1.0 + scale), col_mask)
    store_columns(DScale_ptr + mod * n_cols, cols, dscale, col_mask)
    if DShift_ptr is not None:
        store_columns(DShift_ptr + mod * n_cols, cols, tl.sum(dshift, axis=0), col_mask)


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
    """Add up the partial sums of all modulations, [MODS, CHUNKS, columns], and store dscale, dshift and dw."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mods = tl.arange(0, MODS).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    exist, mod_mask = cols < n_cols, mods < n_mods
    width = n_cols if DShift_ptr is None else 2 * n_cols
    mask = (mod_mask[:, None] & (chunk < chunks)[None, :])[:, :, None] & exist[None, None, :]
    partial_ptrs = Partial_ptr + (mods[:, None] * chunks + chunk[None, :])[:, :, None] * width + cols[None, None, :]
    q = tl.sum(tl.load(partial_ptrs, mask=mask, other=0.0), axis=1)
    dshift = None if DShift_ptr is None else tl.sum(tl.load(partial_ptrs + n_cols, mask=mask, other=0.0), axis=1)
    mask = mod_mask[:, None] & exist[None, :]
    scale = load_tile(Scale_ptr, mods, Scale_row_stride, cols, mask, "")
    w = load_scale(W_ptr, cols, exist, offset)
    _store_gradients(q, dshift, scale, w, DScale_ptr, DShift_ptr, DW_ptr, mods, n_cols, cols, mask, exist)


# -- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_factor(W_ptr, mod_ptr, cols, exist, offset):
    """(offset + W) * (1 + scale) of one modulation in fp32, or the factor that exists, or None."""
    factor = load_scale(W_ptr, cols, exist, offset)
    scale = load_columns(mod_ptr, cols, exist)
    if scale is not None:
        scale = 1.0 + scale.to(tl.float32)
        if factor is not None:
            scale = factor * scale
        factor = scale
    return factor


@triton.jit
def _modulate_by_row(scale, dy_h, h, dy, m, DScale_ptr, DShift_ptr, rows, n_cols, cols, mask):
    """For rows with a modulation each: store its gradients, if needed, and return (dy_h, m) times 1 + scale."""
    scale = 1.0 + scale.to(tl.float32)
    if DScale_ptr is not None:
        store_tile(DScale_ptr, rows, n_cols, cols, m * h, mask)
    if DShift_ptr is not None:
        store_tile(DShift_ptr, rows, n_cols, cols, dy, mask)
    return dy_h * scale, m * scale


@triton.jit
def _store_sums_of_rows(
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
    n_cols,
    rows_per_mod,
    n_mods,
    tile,
    offset,
    CASTING: tl.constexpr,
    SUM_MODS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
):
    """Store dscale, dshift and dw of a few columns. The tile is [modulations, rows of a modulation, columns]."""
    COLS: tl.constexpr = 16 if SUM_MODS * SUM_ROWS >= 64 else 1024 // (SUM_MODS * SUM_ROWS)  # as `summed_columns`
    cols = tile * COLS + tl.arange(0, COLS)
    mods = tl.arange(0, SUM_MODS).to(tl.int64)
    in_mod = tl.arange(0, SUM_ROWS)
    exist, mod_mask = cols < n_cols, mods < n_mods
    rows = mods[:, None] * rows_per_mod + in_mod[None, :]
    row_mask = mod_mask[:, None] & (in_mod < rows_per_mod)[None, :]
    mask = row_mask[:, :, None] & exist[None, None, :]
    x = tl.load(X_ptr + rows[:, :, None] * X_row_stride + cols[None, None, :], mask=mask, other=0.0)
    dy = tl.load(DY_ptr + rows[:, :, None] * DY_row_stride + cols[None, None, :], mask=mask, other=0.0)
    dy = dy.to(tl.float32)
    rstd = tl.load(RSTD_ptr + rows, mask=row_mask, other=0.0)[:, :, None]
    mask = mod_mask[:, None] & exist[None, :]
    scale = load_tile(Scale_ptr, mods, Scale_row_stride, cols, mask, "")
    w = load_scale(W_ptr, cols, exist, offset)
    _, rounded = normalised(x, None, rstd, CASTING)
    q, dshift = tl.sum(dy * rounded, axis=1), tl.sum(dy, axis=1)
    _store_gradients(q, dshift, scale, w, DScale_ptr, DShift_ptr, DW_ptr, mods, n_cols, cols, mask, exist)


@triton.jit(do_not_specialize=["rows_per_group", "n_mods"])
def _modulated_rms_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    Scale_ptr,
    RSTD_ptr,
    DOT_ptr,
    DX_ptr,
    DScale_ptr,
    DShift_ptr,
    Partial_ptr,
    DY_row_stride,
    X_row_stride,
    Scale_row_stride,
    n_cols,
    rows_per_group,
    n_mods,
    offset,
    CASTING: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    BLOCK_2: tl.constexpr,
    SUM_MODS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (g * chunks + p, c) takes the row tiles p, p + chunks, ... of group g, in column tile c.

    A group is the rows of one modulation, and Partial_ptr gets its sums of dy * h and, if HAS_SHIFT, of dy. If PER_ROW,
    each row has a modulation: all rows are one group, dscale and dshift are stored here, and Partial_ptr gets dw.
    DOT_ptr: mean(m * h) of every row, or None where a tile holds whole rows. Gradients that are not needed are None.
    SUM_MODS: None if programs loop over tiles; else each program has one tile. If SUM_MODS > 0, additional programs
    store dscale, dshift and dw. SUM_MODS, SUM_ROWS: modulations and rows of each, rounded up to powers of two.
    """
    wait_for_previous(DEPENDENT)
    pid = tl.program_id(0)
    ONE_TILE: tl.constexpr = SUM_MODS is not None
    SUMS: tl.constexpr = Partial_ptr is not None and (SUM_MODS is None or SUM_MODS == 0)
    n_tiles = tl.cdiv(rows_per_group, ROWS)
    groups = 1 if PER_ROW else n_mods
    chunks = n_tiles if ONE_TILE else tl.num_programs(0) // groups
    if SUM_MODS:
        if pid >= groups * n_tiles:
            rows_per_mod = 1 if PER_ROW else rows_per_group
            _store_sums_of_rows(
                DY_ptr, X_ptr, W_ptr, Scale_ptr, RSTD_ptr, DScale_ptr, DShift_ptr, Partial_ptr, DY_row_stride,
                X_row_stride, Scale_row_stride, n_cols, rows_per_mod, n_mods, pid - groups * n_tiles, offset,
                CASTING, SUM_MODS, SUM_ROWS,
            )  # fmt: skip
            return
    group = (pid * 0 if PER_ROW else pid // chunks).to(tl.int64)
    first_tile = pid if PER_ROW else pid % chunks
    cols, exist = first_columns(tl.program_id(1) * BLOCK_SIZE, n_cols, BLOCK_SIZE, BLOCK_2)
    cols_2 = second_columns(BLOCK_SIZE, BLOCK_2)
    exist_2 = which_exist(cols_2, n_cols)
    mod_ptr = None if PER_ROW else Scale_ptr + group * Scale_row_stride
    w = _load_factor(W_ptr, mod_ptr, cols, exist, offset)
    w_2 = _load_factor(W_ptr, mod_ptr, cols_2, exist_2, offset)
    if SUMS:
        first = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # summed over rows after the loop
        second = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        if BLOCK_2:
            first_2 = tl.zeros([ROWS, BLOCK_2], dtype=tl.float32)
            second_2 = tl.zeros([ROWS, BLOCK_2], dtype=tl.float32)
    end, step = (first_tile + 1, 1) if ONE_TILE else (n_tiles, chunks)
    for tile in tl.range(first_tile, end, step, num_stages=STAGES):
        in_group = tile * ROWS + tl.arange(0, ROWS)
        row_mask = in_group < rows_per_group
        rows = group * rows_per_group + in_group
        mask = tile_mask(row_mask, exist)
        mask_2 = tile_mask(row_mask, exist_2)
        x = load_tile(X_ptr, rows, X_row_stride, cols, mask, LOAD_HINT)
        dy = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols, mask, LOAD_HINT))
        x_2 = load_tile(X_ptr, rows, X_row_stride, cols_2, mask_2, LOAD_HINT)
        dy_2 = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols_2, mask_2, LOAD_HINT))
        rstd = load_row_values(RSTD_ptr, rows, row_mask)
        h, rounded = normalised(x, None, rstd, CASTING)
        m = dy if w is None else dy * w[None, :]
        dy_h = dy * rounded
        if PER_ROW:
            scale = load_tile(Scale_ptr, rows, Scale_row_stride, cols, mask, LOAD_HINT)
            dscale_ptr = None if SUM_MODS else DScale_ptr
            dshift_ptr = None if SUM_MODS else DShift_ptr
            dy_h, m = _modulate_by_row(scale, dy_h, rounded, dy, m, dscale_ptr, dshift_ptr, rows, n_cols, cols, mask)
        if SUMS:
            first += dy_h
            if HAS_SHIFT:
                second += dy
        mh_2 = None
        if BLOCK_2:
            h_2, rounded = normalised(x_2, None, rstd, CASTING)
            m_2 = dy_2 if w_2 is None else dy_2 * w_2[None, :]
            dy_h = dy_2 * rounded
            if PER_ROW:
                scale = load_tile(Scale_ptr, rows, Scale_row_stride, cols_2, mask_2, LOAD_HINT)
                dy_h, m_2 = _modulate_by_row(
                    scale, dy_h, rounded, dy_2, m_2, dscale_ptr, dshift_ptr, rows, n_cols, cols_2, mask_2
                )
            mh_2 = m_2 * h_2
            if SUMS:
                first_2 += dy_h
                if HAS_SHIFT:
                    second_2 += dy_2
        if DOT_ptr is None:
            dot = as_column(row_sums(m * h, mh_2) / n_cols)
        else:
            dot = load_row_values(DOT_ptr, rows, row_mask)
        store_tile(DX_ptr, rows, n_cols, cols, rstd * (m - h * dot), mask)
        if BLOCK_2:
            store_tile(DX_ptr, rows, n_cols, cols_2, rstd * (m_2 - h_2 * dot), mask_2)
    if SUMS:
        row_ptr = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_SHIFT)
        store_partial_sums(row_ptr, n_cols, first, second, cols, exist, HAS_SHIFT)
        if BLOCK_2:
            store_partial_sums(row_ptr, n_cols, first_2, second_2, cols_2, exist_2, HAS_SHIFT)


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("n_mods", "n_rows", "n_cols")
_BWD_STREAMS = 3  # dy, x and scale


def _key(n_mods: int, n_rows: int, n_cols: int, itemsize: int) -> Key:
    return blocks_key(n_rows, n_cols, itemsize)


def _column_tiles_key(n_mods: int, n_rows: int, n_cols: int, itemsize: int) -> Key:
    return row_key(n_rows, n_cols, itemsize)


def _fwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Tiles of 4096 elements with two more in flight, four programs a multiprocessor; with many rows of 1024 columns,
    tiles of one row."""
    block = min(key[0], WIDEST_BLOCK)
    singly = block == 1024 and 1 << key[1] > 32 * target.multiprocessors
    rows = 1 if singly else rows_per_program(target, key[1], max(1, min(32, 4096 // block)))
    tile = block * rows
    ctas = max(1, min(16 if singly else 4, 16384 // tile))
    stage_bytes = 3 * max_columns(block) * rows * key[2]  # x, scale and shift if each row has a modulation
    stages = min(3, 1 + target.shared_memory // stage_bytes)
    if block < key[0] or 1 << key[1] <= rows * ctas * target.multiprocessors:
        stages = 1
    per_thread = 8 if 1 << key[1] <= target.multiprocessors else 32
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, target.warps(tile, per_thread, 16), stages, ctas)


def _fwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    configs = []
    for block in sorted({min(key[0], 8192), min(key[0], WIDEST_BLOCK)}):
        how = {"per_thread": (8, 64), "stages": (1, 2, 3, 4), "ctas": (1, 2, 3, 4, 6, 8, 16)}
        element_bytes = 3 * key[2] * max_columns(block) // block  # for an element of the first block
        configs += tile_space(target, row_tiles({block}), (1, 2, 4, 8, 16), **how, staged_bytes=element_bytes)
    return configs


def _bwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """As for layer_norm, which also keeps two sums in registers; for few rows 8 elements a thread."""
    config = bwd_heuristic(target, key, _BWD_STREAMS, grads=2)
    if 1 << key[1] > target.multiprocessors:
        return config
    return replace(config, num_warps=target.warps(math.prod(config.blocks.values()), 8, 16))


def _sums_space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = [{"BLOCK_M": rows, "BLOCK_N": columns} for rows in (4, 8, 16, 32, 64) for columns in (32, 64, 128, 256)]
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 32))


_tunable = partial(row_tunable, "modulated_rms_norm", dims=_DIMS)
FWD = _tunable("fwd", _modulated_rms_norm_fwd_kernel, key=_key, heuristic=_fwd_heuristic, space=_fwd_space)
BWD = _tunable(
    "bwd",
    _modulated_rms_norm_bwd_kernel,
    key=_key,
    heuristic=_bwd_heuristic,
    space=lambda target, key: bwd_space(target, key, _BWD_STREAMS, grads=2),
    valid=persistent_misfit,
)
BWD_DOT = means_tunable("modulated_rms_norm", "bwd_dot", _column_tiles_key, _DIMS)
BWD_SUMS = _tunable(
    "bwd_sums",
    _modulated_rms_norm_bwd_sums_kernel,
    key=_column_tiles_key,
    heuristic=lambda target, key: LaunchConfig({"BLOCK_M": 4, "BLOCK_N": 64}, target.warps(256, 4)),
    safe=lambda target, key: LaunchConfig({"BLOCK_M": 8, "BLOCK_N": 32}, 1),
    space=_sums_space,
    dependent_launch=None,
)
BWD_ALL_SUMS = _tunable(
    "bwd_all_sums",
    _modulated_rms_norm_bwd_all_sums_kernel,
    key=_column_tiles_key,
    # narrow tiles, because there is one program for each column tile
    heuristic=lambda target, key: LaunchConfig({"BLOCK_N": 16}, target.warps(4096, 32)),
    safe=lambda target, key: LaunchConfig({"BLOCK_N": 8}, 4),
    space=lambda target, key: [LaunchConfig({"BLOCK_N": n}, warps) for n in (8, 16, 32) for warps in (2, 4, 8, 16)],
    dependent_launch=None,
)
DW = column_sum_tunable("modulated_rms_norm", _DIMS)
