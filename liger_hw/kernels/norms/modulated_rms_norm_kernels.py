"""The kernels of modulated_rms_norm; modulated_rms_norm.py says what they compute."""

from __future__ import annotations

from ...runtime.dependent_launch import begin
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    are_columns,
    as_column,
    load_columns,
    load_row_values,
    load_tile,
    main_lanes,
    row_sums,
    squared,
    store_tile,
    tail_lanes,
    tile_mask,
    tile_ptrs,
    to_fp32,
)
from .core import load_scale, normalised, store_partial_sums
from .modulated_rms_norm_sums import _store_if, _sums_of_columns


@triton.jit
def _gain_of(W_ptr, Scale_ptr, mods, Scale_row_stride, cols, exist, mask, offset):
    """One piece's (offset + W) * (1 + scale) in fp32, [mods, columns]; None for a piece that is None."""
    gain = to_fp32(load_tile(Scale_ptr, mods, Scale_row_stride, cols, mask, "", ""))
    if gain is not None:
        gain = 1.0 + gain
        w = load_scale(W_ptr, cols, exist, offset)
        if w is not None:
            gain = gain * w[None, :]
    return gain


@triton.jit
def _shift_of(Shift_ptr, mods, Shift_row_stride, cols, mask):
    """One piece's shift in fp32, [mods, columns]; None without a shift and for a piece that is None."""
    shift = None
    if Shift_ptr is not None:
        shift = to_fp32(load_tile(Shift_ptr, mods, Shift_row_stride, cols, mask, "", ""))
    return shift


@triton.jit
def _modulate_and_store(x, rstd, gain, shift, Y_ptrs, mask, CASTING: tl.constexpr):
    y = x.to(tl.float32) * as_column(rstd)
    if CASTING == 0:
        y = y.to(x.dtype).to(tl.float32)
    y = y * gain
    if shift is not None:
        y = y + shift
    tl.store(Y_ptrs, y.to(Y_ptrs.dtype.element_ty), mask=mask)


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
    KEEP: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program g * chunks + p takes the row tiles p, p + chunks, ... of group g, each row in one piece or two (TAIL).

    KEEP: 1 where a group is the rows of one modulation, which the program keeps in registers; else all rows are one group,
    and every row's modulation is read with it: once its sum is known, or, by programs of one tile each, at once (2).
    Rows too wide to hold are read twice, the second time from cache.
    """
    begin(AHEAD)
    pid = tl.program_id(0)
    if KEEP == 1:
        group = (pid // chunks).to(tl.int64)
        first, end, step = pid % chunks, n_tiles, chunks
    else:
        group = (pid * 0).to(tl.int64)
        first, end, step = (pid, pid + 1, 1) if KEEP == 2 else (pid, n_tiles, chunks)
    if WHOLE_ROW:
        cols, exist = main_lanes(0, 0, n_cols, BLOCK_SIZE, TAIL, 1)
        tail = tail_lanes(BLOCK_SIZE, TAIL)
        tail_exist = are_columns(tail, 0, n_cols, 1)
    if KEEP == 1:
        mods = group + tl.zeros([1], dtype=tl.int64)
        gain = _gain_of(W_ptr, Scale_ptr, mods, Scale_row_stride, cols, exist, exist[None, :], offset)
        shift = _shift_of(Shift_ptr, mods, Shift_row_stride, cols, exist[None, :])
        there = tile_mask(tl.full([1], 1, tl.int1), tail_exist)
        gain_tail = _gain_of(W_ptr, Scale_ptr, mods, Scale_row_stride, tail, tail_exist, there, offset)
        shift_tail = _shift_of(Shift_ptr, mods, Shift_row_stride, tail, there)
    for tile in tl.range(first, end, step, num_stages=STAGES):
        in_group = tile * ROWS + tl.arange(0, ROWS)
        row_mask = in_group < rows_per_group
        rows = group * rows_per_group + in_group
        own = (in_group // rows_per_mod).to(tl.int64)  # where all rows are one group
        if WHOLE_ROW:
            mask = tile_mask(row_mask, exist)
            tail_mask = tile_mask(row_mask, tail_exist)
            x = load_tile(X_ptr, rows, X_row_stride, cols, mask, LOAD_CACHE, LOAD_EVICT)
            x_tail = load_tile(X_ptr, rows, X_row_stride, tail, tail_mask, LOAD_CACHE, LOAD_EVICT)
            if KEEP == 2:
                gain = _gain_of(W_ptr, Scale_ptr, own, Scale_row_stride, cols, exist, mask, offset)
                shift = _shift_of(Shift_ptr, own, Shift_row_stride, cols, mask)
                gain_tail = _gain_of(W_ptr, Scale_ptr, own, Scale_row_stride, tail, tail_exist, tail_mask, offset)
                shift_tail = _shift_of(Shift_ptr, own, Shift_row_stride, tail, tail_mask)
            rstd = tl.rsqrt(row_sums(squared(x), squared(x_tail)) / n_cols + eps)
            if KEEP == 0:
                gain = _gain_of(W_ptr, Scale_ptr, own, Scale_row_stride, cols, exist, mask, offset)
                shift = _shift_of(Shift_ptr, own, Shift_row_stride, cols, mask)
            _modulate_and_store(x, rstd, gain, shift, tile_ptrs(Y_ptr, rows, n_cols, cols, 1), mask, CASTING)
            if TAIL:
                if KEEP == 0:
                    gain_tail = _gain_of(W_ptr, Scale_ptr, own, Scale_row_stride, tail, tail_exist, tail_mask, offset)
                    shift_tail = _shift_of(Shift_ptr, own, Shift_row_stride, tail, tail_mask)
                y_ptrs = tile_ptrs(Y_ptr, rows, n_cols, tail, 1)
                _modulate_and_store(x_tail, rstd, gain_tail, shift_tail, y_ptrs, tail_mask, CASTING)
        else:
            lanes = tl.arange(0, BLOCK_SIZE)
            squares = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            for start in range(0, n_cols, BLOCK_SIZE):
                mask = row_mask[:, None] & (start + lanes < n_cols)[None, :]
                squares += squared(load_tile(X_ptr, rows, X_row_stride, start + lanes, mask, "", ""))
            rstd = tl.rsqrt(row_sums(squares, None) / n_cols + eps)
            tiles = tl.cdiv(n_cols, BLOCK_SIZE)
            for back in range(tiles):  # backwards: what was read last is nearest
                at = (tiles - 1 - back) * BLOCK_SIZE + lanes
                mask = row_mask[:, None] & (at < n_cols)[None, :]
                x_raw = load_tile(X_ptr, rows, X_row_stride, at, mask, "", "")
                gains = _gain_of(W_ptr, Scale_ptr, own, Scale_row_stride, at, at < n_cols, mask, offset)
                shifts = _shift_of(Shift_ptr, own, Shift_row_stride, at, mask)
                _modulate_and_store(x_raw, rstd, gains, shifts, tile_ptrs(Y_ptr, rows, n_cols, at, 1), mask, CASTING)
        tl.store(RSTD_ptr + rows, rstd, mask=row_mask)


@triton.jit
def _factor_of(W_ptr, mod_ptr, cols, exist, offset):
    """One piece's (offset + W) * (1 + scale) of one modulation in fp32, each where there is one; None without either."""
    w = load_scale(W_ptr, cols, exist, offset)
    scale = load_columns(mod_ptr, cols, exist)
    if scale is not None:
        scale = 1.0 + scale.to(tl.float32)
        if w is not None:
            scale = w * scale
        w = scale
    return w


@triton.jit
def _own_modulation(scale, share, seen, dy, m, DScale_ptrs, DShift_ptrs, mask):
    """Where every row has a modulation of its own: stores one piece's gradients by it (None: nobody wants them), and
    gives (share, m) times 1 + scale."""
    scale = 1.0 + scale.to(tl.float32)
    _store_if(DScale_ptrs, m * seen, mask)
    _store_if(DShift_ptrs, dy, mask)
    return share * scale, m * scale


@triton.jit(do_not_specialize=["rows_per_group", "n_tiles", "chunks", "n_mods"])
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
    n_tiles,
    chunks,
    n_mods,
    offset,
    CASTING: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    TAIL: tl.constexpr,
    ONCE: tl.constexpr,
    MODS: tl.constexpr,
    PER_MOD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program (g * chunks + p, c) takes the row tiles p, p + chunks, ... of group g, in column tile c.

    With a TAIL the one column tile is a row's first piece, and the second is taken along with it.
    A group is the rows of one modulation, and Partial_ptr gets their q and, if HAS_SHIFT, sum of dy. With PER_ROW every
    row has its own: one group of all rows, whose dscale and dshift are stored here, and Partial_ptr gets dw.
    DOT_ptr: mean(m * h) of every row, or None when the tile holds whole rows. Gradients nobody wants are None.
    ONCE: every program has one tile, and no loop stands between its loads. With a WIDTH (else 0) the programs behind those
    leave dscale, dshift and dw themselves, of so many columns each; MODS and PER_MOD: powers of two that are no less than
    the modulations and the rows of one.
    """
    begin(AHEAD)
    pid = tl.program_id(0)
    SUMS: tl.constexpr = Partial_ptr is not None and WIDTH == 0
    if WIDTH:
        row_programs = chunks if PER_ROW else n_mods * chunks
        if pid >= row_programs:
            _sums_of_columns(
                DY_ptr,
                X_ptr,
                W_ptr,
                Scale_ptr,
                RSTD_ptr,
                DScale_ptr,
                DShift_ptr,
                Partial_ptr,
                DY_row_stride,
                X_row_stride,
                Scale_row_stride,
                pid - row_programs,
                n_mods,
                1 if PER_ROW else rows_per_group,
                n_cols,
                offset,
                CASTING,
                MODS,
                PER_MOD,
                WIDTH,
            )
            return
    if PER_ROW:
        group, first_tile = (pid * 0).to(tl.int64), pid
    else:
        group, first_tile = (pid // chunks).to(tl.int64), pid % chunks
    cols, exist = main_lanes(tl.program_id(1) * BLOCK_SIZE, 0, n_cols, BLOCK_SIZE, TAIL, 1)
    tail = tail_lanes(BLOCK_SIZE, TAIL)
    tail_exist = are_columns(tail, 0, n_cols, 1)
    mod_ptr = None
    if not PER_ROW:
        mod_ptr = Scale_ptr + group * Scale_row_stride
    w = _factor_of(W_ptr, mod_ptr, cols, exist, offset)
    w_tail = _factor_of(W_ptr, mod_ptr, tail, tail_exist, offset)
    if SUMS:
        first = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # one row sum at the end, not one a tile
        second = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        if TAIL:
            first_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
            second_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
    end, step = (first_tile + 1, 1) if ONCE else (n_tiles, chunks)
    for tile in tl.range(first_tile, end, step, num_stages=STAGES):
        in_group = tile * ROWS + tl.arange(0, ROWS)
        row_mask = in_group < rows_per_group
        rows = group * rows_per_group + in_group
        mask = tile_mask(row_mask, exist)
        tail_mask = tile_mask(row_mask, tail_exist)
        x = load_tile(X_ptr, rows, X_row_stride, cols, mask, LOAD_CACHE, LOAD_EVICT)
        dy = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols, mask, LOAD_CACHE, LOAD_EVICT))
        x_tail = load_tile(X_ptr, rows, X_row_stride, tail, tail_mask, LOAD_CACHE, LOAD_EVICT)
        dy_tail = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, tail, tail_mask, LOAD_CACHE, LOAD_EVICT))
        rstd = load_row_values(RSTD_ptr, rows, row_mask)
        h, seen = normalised(x, None, rstd, CASTING)
        m = dy if w is None else dy * w[None, :]
        mh_tail = None
        share = dy * seen
        if PER_ROW:
            scale = load_tile(Scale_ptr, rows, Scale_row_stride, cols, mask, LOAD_CACHE, LOAD_EVICT)
            ds_ptrs = tile_ptrs(None if WIDTH else DScale_ptr, rows, n_cols, cols, 1)
            dh_ptrs = tile_ptrs(None if WIDTH else DShift_ptr, rows, n_cols, cols, 1)
            share, m = _own_modulation(scale, share, seen, dy, m, ds_ptrs, dh_ptrs, mask)
        if SUMS:
            first += share
            if HAS_SHIFT:
                second += dy
        if TAIL:
            h_tail, seen = normalised(x_tail, None, rstd, CASTING)
            m_tail = dy_tail if w_tail is None else dy_tail * w_tail[None, :]
            share = dy_tail * seen
            if PER_ROW:
                scale = load_tile(Scale_ptr, rows, Scale_row_stride, tail, tail_mask, LOAD_CACHE, LOAD_EVICT)
                ds_ptrs = tile_ptrs(None if WIDTH else DScale_ptr, rows, n_cols, tail, 1)
                dh_ptrs = tile_ptrs(None if WIDTH else DShift_ptr, rows, n_cols, tail, 1)
                share, m_tail = _own_modulation(scale, share, seen, dy_tail, m_tail, ds_ptrs, dh_ptrs, tail_mask)
            mh_tail = m_tail * h_tail
            if SUMS:
                first_tail += share
                if HAS_SHIFT:
                    second_tail += dy_tail
        if DOT_ptr is None:
            dot = as_column(row_sums(m * h, mh_tail) / n_cols)
        else:
            dot = load_row_values(DOT_ptr, rows, row_mask)
        store_tile(DX_ptr, rows, n_cols, cols, rstd * (m - h * dot), mask)
        if TAIL:
            store_tile(DX_ptr, rows, n_cols, tail, rstd * (m_tail - h_tail * dot), tail_mask)
    if SUMS:
        line_ptr = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_SHIFT)
        store_partial_sums(line_ptr, n_cols, first, second, cols, exist, HAS_SHIFT)
        if TAIL:
            store_partial_sums(line_ptr, n_cols, first_tail, second_tail, tail, tail_exist, HAS_SHIFT)
