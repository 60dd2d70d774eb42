"""The kernels of layer_norm; layer_norm.py says what they compute."""

from __future__ import annotations

from ...runtime.dependent_launch import begin
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    are_columns,
    as_column,
    columns_of,
    keep_narrow,
    load_at,
    load_columns,
    load_row_values,
    load_tile,
    main_lanes,
    row_sums,
    row_sums_of_two,
    squared,
    store_at,
    tail_lanes,
    tile_mask,
    tile_ptrs,
    tile_rows,
    tile_skew,
    to_fp32,
)
from .rms_backward import _all_rows, _scale_of, _store_sums


@triton.jit
def _centred(x, mean, mask):
    """x - mean in fp32, 0 where there is no column; None for a piece that is None."""
    centred = None
    if x is not None:
        centred = tl.where(mask, x.to(tl.float32) - as_column(mean), 0.0)
    return centred


@triton.jit
def _scale_shift_and_store(h, w, b, Y_ptrs, lanes, mask, row_mask, skew, n_cols, VECTOR: tl.constexpr):
    y = h
    if w is not None:
        y = y * w.to(tl.float32)[None, :]
    if b is not None:
        y = y + b.to(tl.float32)[None, :]
    store_at(Y_ptrs, y, lanes, mask, row_mask, skew, n_cols, VECTOR)


@triton.jit
def _store_stats(STATS_ptr, mean, rstd, rows, row_mask, n_rows):
    tl.store(STATS_ptr + rows, mean, mask=row_mask)
    tl.store(STATS_ptr + n_rows + rows, rstd, mask=row_mask)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _layer_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    STATS_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    eps,
    WHOLE_ROW: tl.constexpr,
    TAIL: tl.constexpr,
    VECTOR: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS rows a program, each in one piece or two (TAIL). Rows wider than that are read twice, the second time from
    cache.

    LOOP, for whole rows: program p takes the tiles p, p + programs, ... with the next ones' loads in flight, and keeps W and
    B in registers.
    """
    begin(AHEAD)
    pid = tl.program_id(0).to(tl.int64)
    skew = tile_skew(pid, n_cols, VECTOR)
    if WHOLE_ROW:
        LATE: tl.constexpr = BLOCK_SIZE > 4096 and not LOOP
        lanes, exist = main_lanes(0, skew, n_cols, BLOCK_SIZE, TAIL, VECTOR)
        cols = columns_of(lanes, skew, VECTOR)
        tail = tail_lanes(BLOCK_SIZE, TAIL)
        tail_exist = are_columns(tail, skew, n_cols, VECTOR)
        tail_cols = columns_of(tail, skew, VECTOR)
        if LOOP:
            w = load_columns(W_ptr, cols, exist)
            b = load_columns(B_ptr, cols, exist)
            w_tail = load_columns(W_ptr, tail_cols, tail_exist)
            b_tail = load_columns(B_ptr, tail_cols, tail_exist)
        start, end, step = (pid, n_tiles, tl.num_programs(0)) if LOOP else (0, 1, 1)  # a single turn is no loop
        for turn in tl.range(start, end, step, num_stages=STAGES):
            rows = tile_rows(turn if LOOP else pid, ROWS, VECTOR)
            row_mask = rows < n_rows
            mask = tile_mask(row_mask, exist)
            tail_mask = tile_mask(row_mask, tail_exist)
            x_ptrs = tile_ptrs(X_ptr, rows, X_row_stride, lanes, VECTOR)
            x = load_at(x_ptrs, lanes, mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
            if not (LOOP or LATE):
                w = load_columns(W_ptr, cols, exist)  # on their way while the row is summed
                b = load_columns(B_ptr, cols, exist)
            x_ptrs = tile_ptrs(X_ptr, rows, X_row_stride, tail, VECTOR)
            x_tail = load_at(x_ptrs, tail, tail_mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
            if not LOOP:
                w_tail = load_columns(W_ptr, tail_cols, tail_exist)
                b_tail = load_columns(B_ptr, tail_cols, tail_exist)
            mean = row_sums(x, x_tail) / n_cols
            if LATE:
                x = keep_narrow(x, as_column(mean))
            centred = _centred(x, mean, mask)
            centred_tail = _centred(x_tail, mean, tail_mask)
            rstd = tl.rsqrt(row_sums(squared(centred), squared(centred_tail)) / n_cols + eps)
            if LATE:
                w = load_columns(W_ptr, cols, exist)
                b = load_columns(B_ptr, cols, exist)
                centred = keep_narrow(x, as_column(rstd)).to(tl.float32) - as_column(mean)
            h = centred * as_column(rstd)
            y_ptrs = tile_ptrs(Y_ptr, rows, n_cols, lanes, VECTOR)
            _scale_shift_and_store(h, w, b, y_ptrs, lanes, mask, row_mask, skew, n_cols, VECTOR)
            if TAIL:
                h = centred_tail * as_column(rstd)
                y_ptrs = tile_ptrs(Y_ptr, rows, n_cols, tail, VECTOR)
                _scale_shift_and_store(h, w_tail, b_tail, y_ptrs, tail, tail_mask, row_mask, skew, n_cols, VECTOR)
            _store_stats(STATS_ptr, mean, rstd, rows, row_mask, n_rows)
    else:
        rows = tile_rows(pid, ROWS, VECTOR)
        row_mask = rows < n_rows
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        lanes = tl.arange(0, BLOCK_SIZE)
        lane_mean = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        lane_m2 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for tile in range(tiles):
            cols = tile * BLOCK_SIZE + lanes
            mask = row_mask[:, None] & (cols < n_cols)[None, :]
            x = load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "").to(tl.float32)
            step = tl.where(mask, x - lane_mean, 0.0)
            lane_mean += step * (1.0 / (tile + 1.0))
            lane_m2 += step * (x - lane_mean)
        seen = ((n_cols - lanes + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.float32)[None, :]  # values a lane has taken
        mean = row_sums(lane_mean * seen, None) / n_cols
        apart = lane_mean - as_column(mean)
        rstd = tl.rsqrt(row_sums(lane_m2 + seen * apart * apart, None) / n_cols + eps)
        for tile in range(tiles):
            cols = (tiles - 1 - tile) * BLOCK_SIZE + lanes  # backwards: what was read last is nearest
            exist = cols < n_cols
            mask = row_mask[:, None] & exist[None, :]
            x = load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "").to(tl.float32)
            h = (x - as_column(mean)) * as_column(rstd)
            w = load_columns(W_ptr, cols, exist)
            b = load_columns(B_ptr, cols, exist)
            y_ptrs = tile_ptrs(Y_ptr, rows, n_cols, cols, 1)
            _scale_shift_and_store(h, w, b, y_ptrs, cols, mask, row_mask, 0, n_cols, 1)
        _store_stats(STATS_ptr, mean, rstd, rows, row_mask, n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_bwd_means_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    MEANS_ptr,
    DY_row_stride,
    X_row_stride,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """mean(m) and mean(m * h) of one row, for rows too wide to hold: the backward kernel then works on column tiles."""
    begin(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    mean = tl.load(STATS_ptr + row)
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    dot = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        mask = start + cols < n_cols
        x = tl.load(X_ptr + row * X_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(DY_ptr + row * DY_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        if W_ptr is not None:
            m = m * tl.load(W_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        total += m
        dot += m * (x - mean)
    tl.store(MEANS_ptr + row, tl.sum(total, axis=0) / n_cols)
    tl.store(MEANS_ptr + n_rows + row, tl.sum(dot, axis=0) * tl.load(STATS_ptr + n_rows + row) / n_cols)


@triton.jit
def _centred_and_m(x, dy, mean, rstd, w):
    """(h, m) of one piece; w: W in fp32, or None."""
    h = (x.to(tl.float32) - mean) * rstd
    m = dy
    if w is not None:
        m = dy * w[None, :]
    return h, m


@triton.jit
def _sums_of_columns(
    DY_ptr,
    X_ptr,
    STATS_ptr,
    Sums_ptr,
    DY_row_stride,
    X_row_stride,
    tile,
    n_rows,
    n_cols,
    HAS_BIAS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dw and, if HAS_BIAS, db of WIDTH columns, from all rows."""
    rows, row_mask, cols, exist = _all_rows(tile, n_rows, n_cols, AT_ONCE, WIDTH)
    mask = row_mask[:, None] & exist[None, :]
    x = load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "")
    dy = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols, mask, "", ""))
    mean = load_row_values(STATS_ptr, rows, row_mask)
    rstd = load_row_values(STATS_ptr + n_rows, rows, row_mask)
    h, _ = _centred_and_m(x, dy, mean, rstd, None)
    _store_sums(Sums_ptr, n_cols, dy * h, dy, cols, exist, HAS_BIAS)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _layer_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    MEANS_ptr,
    DX_ptr,
    Partial_ptr,
    DY_row_stride,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    HAS_BIAS: tl.constexpr,
    TAIL: tl.constexpr,
    VECTOR: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program (p, c) takes the row tiles p, p + programs, ... of column tile c; its share of dw, db stays in registers.

    With a TAIL the one column tile is a row's first piece, and the second is taken along with it.
    MEANS_ptr: mean(m) and mean(m * h) of every row, or None when the tile holds whole rows.
    Partial_ptr: a row of dw, then of db if HAS_BIAS, for each p; None when nobody wants them.
    AT_ONCE, WIDTH: as in rms_norm's backward; programs behind those of the rows leave dw and db themselves.
    """
    begin(AHEAD)
    pid = tl.program_id(0)
    SUMS: tl.constexpr = Partial_ptr is not None and AT_ONCE < 2
    if AT_ONCE > 1:
        if pid >= n_tiles:
            _sums_of_columns(
                DY_ptr,
                X_ptr,
                STATS_ptr,
                Partial_ptr,
                DY_row_stride,
                X_row_stride,
                pid - n_tiles,
                n_rows,
                n_cols,
                HAS_BIAS,
                AT_ONCE,
                WIDTH,
            )
            return
    skew = tile_skew(pid, n_cols, VECTOR)
    lanes, exist = main_lanes(tl.program_id(1) * BLOCK_SIZE, skew, n_cols, BLOCK_SIZE, TAIL, VECTOR)
    cols = columns_of(lanes, skew, VECTOR)
    tail = tail_lanes(BLOCK_SIZE, TAIL)
    tail_exist = are_columns(tail, skew, n_cols, VECTOR)
    tail_cols = columns_of(tail, skew, VECTOR)
    w = _scale_of(W_ptr, cols, exist, 0.0)
    w_tail = _scale_of(W_ptr, tail_cols, tail_exist, 0.0)
    if SUMS:
        dw = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # one row sum at the end, not one a tile
        db = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        if TAIL:
            dw_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
            db_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
    end, step = (pid + 1, 1) if AT_ONCE else (n_tiles, tl.num_programs(0))
    for tile in tl.range(pid, end, step, num_stages=STAGES):
        rows = tile_rows(tile, ROWS, VECTOR)
        row_mask = rows < n_rows
        mask = tile_mask(row_mask, exist)
        tail_mask = tile_mask(row_mask, tail_exist)
        x_ptrs = tile_ptrs(X_ptr, rows, X_row_stride, lanes, VECTOR)
        x = load_at(x_ptrs, lanes, mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
        dy_ptrs = tile_ptrs(DY_ptr, rows, DY_row_stride, lanes, VECTOR)
        dy = to_fp32(load_at(dy_ptrs, lanes, mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR))
        x_ptrs = tile_ptrs(X_ptr, rows, X_row_stride, tail, VECTOR)
        x_tail = load_at(x_ptrs, tail, tail_mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
        dy_ptrs = tile_ptrs(DY_ptr, rows, DY_row_stride, tail, VECTOR)
        dy_tail = to_fp32(load_at(dy_ptrs, tail, tail_mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR))
        mean = load_row_values(STATS_ptr, rows, row_mask)
        rstd = load_row_values(STATS_ptr + n_rows, rows, row_mask)
        h, m = _centred_and_m(x, dy, mean, rstd, w)
        if SUMS:
            dw += dy * h
            if HAS_BIAS:
                db += dy
        if TAIL:
            h_tail, m_tail = _centred_and_m(x_tail, dy_tail, mean, rstd, w_tail)
            if SUMS:
                dw_tail += dy_tail * h_tail
                if HAS_BIAS:
                    db_tail += dy_tail
        if MEANS_ptr is None:
            shift, dot = row_sums_of_two(m, m * h)
            if TAIL:
                shift_tail, dot_tail = row_sums_of_two(m_tail, m_tail * h_tail)
                shift += shift_tail
                dot += dot_tail
            shift = as_column(shift / n_cols)
            dot = as_column(dot / n_cols)
        else:
            shift = load_row_values(MEANS_ptr, rows, row_mask)
            dot = load_row_values(MEANS_ptr + n_rows, rows, row_mask)
        dx = rstd * (m - shift - h * dot)
        dx_ptrs = tile_ptrs(DX_ptr, rows, n_cols, lanes, VECTOR)
        store_at(dx_ptrs, dx, lanes, mask, row_mask, skew, n_cols, VECTOR)
        if TAIL:
            dx = rstd * (m_tail - shift - h_tail * dot)
            dx_ptrs = tile_ptrs(DX_ptr, rows, n_cols, tail, VECTOR)
            store_at(dx_ptrs, dx, tail, tail_mask, row_mask, skew, n_cols, VECTOR)
    if SUMS:
        line_ptr = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_BIAS)
        _store_sums(line_ptr, n_cols, dw, db, cols, exist, HAS_BIAS)
        if TAIL:
            _store_sums(line_ptr, n_cols, dw_tail, db_tail, tail_cols, tail_exist, HAS_BIAS)
