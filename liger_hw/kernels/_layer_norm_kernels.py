"""The kernels of layer_norm; layer_norm.py says what they compute."""

from __future__ import annotations

from ._rms_backward import _at, _scale_of, _store_sums
from ._row_pieces import PIECES, _columns_of, _first_piece, _tail_piece
from ._row_tiles import _after
from ._triton import tl, triton


@triton.jit
def _scale_shift_and_store(h, w, b, Y_ptrs, mask):
    y = h
    if w is not None:
        y = y * w.to(tl.float32)[None, :]
    if b is not None:
        y = y + b.to(tl.float32)[None, :]
    tl.store(Y_ptrs, y.to(Y_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    STATS_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    eps,
    WHOLE_ROW: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """ROWS rows a program, each in one piece or two (TAIL). Rows wider than that are read twice, the second time from
    cache."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = (rows < n_rows)[:, None]
    x_rows = X_ptr + rows[:, None] * X_row_stride
    y_rows = Y_ptr + rows[:, None] * n_cols
    if WHOLE_ROW:
        cols, exist = _first_piece(0, n_cols, BLOCK_SIZE, TAIL)
        mask = row_mask & exist[None, :]
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        if BLOCK_SIZE <= 4096:
            w = _columns_of(W_ptr, cols, exist)  # on their way while the row is summed
            b = _columns_of(B_ptr, cols, exist)
        total = tl.sum(x.to(tl.float32), axis=1)
        if TAIL:
            tail, tail_exist = _tail_piece(n_cols, BLOCK_SIZE, TAIL)
            tail_mask = row_mask & tail_exist[None, :]
            x_tail = tl.load(
                x_rows + tail[None, :], mask=tail_mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT
            )
            w_tail = _columns_of(W_ptr, tail, tail_exist)
            b_tail = _columns_of(B_ptr, tail, tail_exist)
            total += tl.sum(x_tail.to(tl.float32), axis=1)
        mean = total / n_cols
        if BLOCK_SIZE > 4096:
            x = _after(x, mean[:, None])
        centred = tl.where(mask, x.to(tl.float32) - mean[:, None], 0.0)
        squares = tl.sum(centred * centred, axis=1)
        if TAIL:
            centred_tail = tl.where(tail_mask, x_tail.to(tl.float32) - mean[:, None], 0.0)
            squares += tl.sum(centred_tail * centred_tail, axis=1)
        rstd = tl.rsqrt(squares / n_cols + eps)
        if BLOCK_SIZE > 4096:
            w = _columns_of(W_ptr, cols, exist)
            b = _columns_of(B_ptr, cols, exist)
            centred = _after(x, rstd[:, None]).to(tl.float32) - mean[:, None]
        _scale_shift_and_store(centred * rstd[:, None], w, b, y_rows + cols[None, :], mask)
        if TAIL:
            _scale_shift_and_store(centred_tail * rstd[:, None], w_tail, b_tail, y_rows + tail[None, :], tail_mask)
    else:
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        lanes = tl.arange(0, BLOCK_SIZE)
        lane_mean = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        lane_m2 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for tile in range(tiles):
            cols = tile * BLOCK_SIZE + lanes
            mask = row_mask & (cols < n_cols)[None, :]
            x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            step = tl.where(mask, x - lane_mean, 0.0)
            lane_mean += step * (1.0 / (tile + 1.0))
            lane_m2 += step * (x - lane_mean)
        seen = ((n_cols - lanes + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.float32)[None, :]  # values a lane has taken
        mean = tl.sum(lane_mean * seen, axis=1) / n_cols
        apart = lane_mean - mean[:, None]
        rstd = tl.rsqrt(tl.sum(lane_m2 + seen * apart * apart, axis=1) / n_cols + eps)
        for tile in range(tiles):
            cols = (tiles - 1 - tile) * BLOCK_SIZE + lanes  # backwards: what was read last is nearest
            exist = cols < n_cols
            mask = row_mask & exist[None, :]
            x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            h = (x - mean[:, None]) * rstd[:, None]
            w = _columns_of(W_ptr, cols, exist)
            b = _columns_of(B_ptr, cols, exist)
            _scale_shift_and_store(h, w, b, y_rows + cols[None, :], mask)
    tl.store(STATS_ptr + rows, mean, mask=rows < n_rows)
    tl.store(STATS_ptr + n_rows + rows, rstd, mask=rows < n_rows)


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
):
    """mean(m) and mean(m * h) of one row, for rows too wide to hold: the backward kernel then works on column tiles."""
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
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """Program (p, c) takes the row tiles p, p + programs, ... of column tile c; its share of dw, db stays in registers.

    With a TAIL the one column tile is a row's first piece, and the second is taken along with it.
    MEANS_ptr: mean(m) and mean(m * h) of every row, or None when the tile holds whole rows.
    Partial_ptr: a row of dw, then of db if HAS_BIAS, for each p; None when nobody wants them.
    """
    pid = tl.program_id(0)
    cols, exist = _first_piece(tl.program_id(1) * BLOCK_SIZE, n_cols, BLOCK_SIZE, TAIL)
    w = _scale_of(W_ptr, cols, exist, 0.0)
    if Partial_ptr is not None:
        dw = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # one row sum at the end, not one a tile
        db = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    if TAIL:
        tail, tail_exist = _tail_piece(n_cols, BLOCK_SIZE, TAIL)
        w_tail = _scale_of(W_ptr, tail, tail_exist, 0.0)
        if Partial_ptr is not None:
            dw_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
            db_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
    for tile in tl.range(pid, n_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & exist[None, :]
        x_ptrs = _at(X_ptr, rows, X_row_stride, cols)
        dy_ptrs = _at(DY_ptr, rows, DY_row_stride, cols)
        x = tl.load(x_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        dy = tl.load(dy_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        dy = dy.to(tl.float32)
        if TAIL:
            tail_mask = row_mask[:, None] & tail_exist[None, :]
            x_ptrs = _at(X_ptr, rows, X_row_stride, tail)
            dy_ptrs = _at(DY_ptr, rows, DY_row_stride, tail)
            x_tail = tl.load(x_ptrs, mask=tail_mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            dy_tail = tl.load(dy_ptrs, mask=tail_mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            dy_tail = dy_tail.to(tl.float32)
        mean = tl.load(STATS_ptr + rows, mask=row_mask, other=0.0)[:, None]
        rstd = tl.load(STATS_ptr + n_rows + rows, mask=row_mask, other=0.0)[:, None]
        h, m = _centred_and_m(x, dy, mean, rstd, w)
        if Partial_ptr is not None:
            dw += dy * h
            if HAS_BIAS:
                db += dy
        if TAIL:
            h_tail, m_tail = _centred_and_m(x_tail, dy_tail, mean, rstd, w_tail)
            if Partial_ptr is not None:
                dw_tail += dy_tail * h_tail
                if HAS_BIAS:
                    db_tail += dy_tail
        if MEANS_ptr is None:
            shift = tl.sum(m, axis=1)
            dot = tl.sum(m * h, axis=1)
            if TAIL:
                shift += tl.sum(m_tail, axis=1)
                dot += tl.sum(m_tail * h_tail, axis=1)
            shift = (shift / n_cols)[:, None]
            dot = (dot / n_cols)[:, None]
        else:
            shift = tl.load(MEANS_ptr + rows, mask=row_mask, other=0.0)[:, None]
            dot = tl.load(MEANS_ptr + n_rows + rows, mask=row_mask, other=0.0)[:, None]
        dx = rstd * (m - shift - h * dot)
        tl.store(_at(DX_ptr, rows, n_cols, cols), dx.to(DX_ptr.dtype.element_ty), mask=mask)
        if TAIL:
            dx = rstd * (m_tail - shift - h_tail * dot)
            tl.store(_at(DX_ptr, rows, n_cols, tail), dx.to(DX_ptr.dtype.element_ty), mask=tail_mask)
    if Partial_ptr is not None:
        line_ptr = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_BIAS)
        _store_sums(line_ptr, n_cols, dw, db, cols, exist, HAS_BIAS)
        if TAIL:
            _store_sums(line_ptr, n_cols, dw_tail, db_tail, tail, tail_exist, HAS_BIAS)


FWD_KERNELS = (_layer_norm_fwd_kernel, _scale_shift_and_store, _after, *PIECES)
BWD_KERNELS = (_layer_norm_bwd_kernel, _centred_and_m, _store_sums, _scale_of, _at, *PIECES)
"""The kernel first, then all that it calls: what a tuned entry is valid for."""
