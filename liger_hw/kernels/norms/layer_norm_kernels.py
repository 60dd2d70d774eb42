"""The kernels of layer_norm; layer_norm.py says what they compute."""

from __future__ import annotations

from ...runtime.dependent_launch import begin
from ...runtime.triton_import import tl, triton
from ..rows.groups import (
    GROUPS,
    _are_columns,
    _columns,
    _first_lanes,
    _lead_of,
    _load_part,
    _places,
    _store_part,
    _tile_rows,
)
from ..rows.pieces import (
    PIECES,
    _at,
    _both,
    _columns_of,
    _load_tile,
    _one_a_row,
    _row_sums,
    _second_piece,
    _squares,
    _to_columns,
    _wide,
)
from ..rows.tiles import _after
from .rms_backward import _all_rows, _scale_of, _store_sums, _values_of


@triton.jit
def _centred(x, mean, mask):
    """x - mean in fp32, 0 where there is no column; None for a piece that is None."""
    centred = None
    if x is not None:
        centred = tl.where(mask, x.to(tl.float32) - _to_columns(mean), 0.0)
    return centred


@triton.jit
def _scale_shift_and_store(h, w, b, Y_ptrs, lanes, mask, row_mask, lead, n_cols, GROUP: tl.constexpr):
    y = h
    if w is not None:
        y = y * w.to(tl.float32)[None, :]
    if b is not None:
        y = y + b.to(tl.float32)[None, :]
    _store_part(Y_ptrs, y, lanes, mask, row_mask, lead, n_cols, GROUP)


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
    GROUP: tl.constexpr,
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
    lead = _lead_of(pid, n_cols, GROUP)
    if WHOLE_ROW:
        LATE: tl.constexpr = BLOCK_SIZE > 4096 and not LOOP
        lanes, exist = _first_lanes(0, lead, n_cols, BLOCK_SIZE, TAIL, GROUP)
        cols = _columns(lanes, lead, GROUP)
        tail = _second_piece(BLOCK_SIZE, TAIL)
        tail_exist = _are_columns(tail, lead, n_cols, GROUP)
        tail_cols = _columns(tail, lead, GROUP)
        if LOOP:
            w = _columns_of(W_ptr, cols, exist)
            b = _columns_of(B_ptr, cols, exist)
            w_tail = _columns_of(W_ptr, tail_cols, tail_exist)
            b_tail = _columns_of(B_ptr, tail_cols, tail_exist)
        start, end, step = (pid, n_tiles, tl.num_programs(0)) if LOOP else (0, 1, 1)  # a single turn is no loop
        for turn in tl.range(start, end, step, num_stages=STAGES):
            rows = _tile_rows(turn if LOOP else pid, ROWS, GROUP)
            row_mask = rows < n_rows
            mask = _both(row_mask, exist)
            tail_mask = _both(row_mask, tail_exist)
            x_ptrs = _places(X_ptr, rows, X_row_stride, lanes, GROUP)
            x = _load_part(x_ptrs, lanes, mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
            if not (LOOP or LATE):
                w = _columns_of(W_ptr, cols, exist)  # on their way while the row is summed
                b = _columns_of(B_ptr, cols, exist)
            x_ptrs = _places(X_ptr, rows, X_row_stride, tail, GROUP)
            x_tail = _load_part(x_ptrs, tail, tail_mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
            if not LOOP:
                w_tail = _columns_of(W_ptr, tail_cols, tail_exist)
                b_tail = _columns_of(B_ptr, tail_cols, tail_exist)
            mean = _row_sums(x, x_tail) / n_cols
            if LATE:
                x = _after(x, _to_columns(mean))
            centred = _centred(x, mean, mask)
            centred_tail = _centred(x_tail, mean, tail_mask)
            rstd = tl.rsqrt(_row_sums(_squares(centred), _squares(centred_tail)) / n_cols + eps)
            if LATE:
                w = _columns_of(W_ptr, cols, exist)
                b = _columns_of(B_ptr, cols, exist)
                centred = _after(x, _to_columns(rstd)).to(tl.float32) - _to_columns(mean)
            h = centred * _to_columns(rstd)
            y_ptrs = _places(Y_ptr, rows, n_cols, lanes, GROUP)
            _scale_shift_and_store(h, w, b, y_ptrs, lanes, mask, row_mask, lead, n_cols, GROUP)
            if TAIL:
                h = centred_tail * _to_columns(rstd)
                y_ptrs = _places(Y_ptr, rows, n_cols, tail, GROUP)
                _scale_shift_and_store(h, w_tail, b_tail, y_ptrs, tail, tail_mask, row_mask, lead, n_cols, GROUP)
            _store_stats(STATS_ptr, mean, rstd, rows, row_mask, n_rows)
    else:
        rows = _tile_rows(pid, ROWS, GROUP)
        row_mask = rows < n_rows
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        lanes = tl.arange(0, BLOCK_SIZE)
        lane_mean = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        lane_m2 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for tile in range(tiles):
            cols = tile * BLOCK_SIZE + lanes
            mask = row_mask[:, None] & (cols < n_cols)[None, :]
            x = _load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "").to(tl.float32)
            step = tl.where(mask, x - lane_mean, 0.0)
            lane_mean += step * (1.0 / (tile + 1.0))
            lane_m2 += step * (x - lane_mean)
        seen = ((n_cols - lanes + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.float32)[None, :]  # values a lane has taken
        mean = _row_sums(lane_mean * seen, None) / n_cols
        apart = lane_mean - _to_columns(mean)
        rstd = tl.rsqrt(_row_sums(lane_m2 + seen * apart * apart, None) / n_cols + eps)
        for tile in range(tiles):
            cols = (tiles - 1 - tile) * BLOCK_SIZE + lanes  # backwards: what was read last is nearest
            exist = cols < n_cols
            mask = row_mask[:, None] & exist[None, :]
            x = _load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "").to(tl.float32)
            h = (x - _to_columns(mean)) * _to_columns(rstd)
            w = _columns_of(W_ptr, cols, exist)
            b = _columns_of(B_ptr, cols, exist)
            y_ptrs = _at(Y_ptr, rows, n_cols, cols)
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
def _two_row_sums(a, b):
    """The sums of each row of a and of b, in one exchange between the warps."""
    sum_a, sum_b = tl.split(tl.sum(tl.join(a, b), axis=1))
    return _one_a_row(sum_a), _one_a_row(sum_b)


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
    x = _load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "")
    dy = _wide(_load_tile(DY_ptr, rows, DY_row_stride, cols, mask, "", ""))
    mean = _values_of(STATS_ptr, rows, row_mask)
    rstd = _values_of(STATS_ptr + n_rows, rows, row_mask)
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
    GROUP: tl.constexpr,
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
    lead = _lead_of(pid, n_cols, GROUP)
    lanes, exist = _first_lanes(tl.program_id(1) * BLOCK_SIZE, lead, n_cols, BLOCK_SIZE, TAIL, GROUP)
    cols = _columns(lanes, lead, GROUP)
    tail = _second_piece(BLOCK_SIZE, TAIL)
    tail_exist = _are_columns(tail, lead, n_cols, GROUP)
    tail_cols = _columns(tail, lead, GROUP)
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
        rows = _tile_rows(tile, ROWS, GROUP)
        row_mask = rows < n_rows
        mask = _both(row_mask, exist)
        tail_mask = _both(row_mask, tail_exist)
        x_ptrs = _places(X_ptr, rows, X_row_stride, lanes, GROUP)
        x = _load_part(x_ptrs, lanes, mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
        dy_ptrs = _places(DY_ptr, rows, DY_row_stride, lanes, GROUP)
        dy = _wide(_load_part(dy_ptrs, lanes, mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP))
        x_ptrs = _places(X_ptr, rows, X_row_stride, tail, GROUP)
        x_tail = _load_part(x_ptrs, tail, tail_mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
        dy_ptrs = _places(DY_ptr, rows, DY_row_stride, tail, GROUP)
        dy_tail = _wide(_load_part(dy_ptrs, tail, tail_mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP))
        mean = _values_of(STATS_ptr, rows, row_mask)
        rstd = _values_of(STATS_ptr + n_rows, rows, row_mask)
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
            shift, dot = _two_row_sums(m, m * h)
            if TAIL:
                shift_tail, dot_tail = _two_row_sums(m_tail, m_tail * h_tail)
                shift += shift_tail
                dot += dot_tail
            shift = _to_columns(shift / n_cols)
            dot = _to_columns(dot / n_cols)
        else:
            shift = _values_of(MEANS_ptr, rows, row_mask)
            dot = _values_of(MEANS_ptr + n_rows, rows, row_mask)
        dx = rstd * (m - shift - h * dot)
        dx_ptrs = _places(DX_ptr, rows, n_cols, lanes, GROUP)
        _store_part(dx_ptrs, dx, lanes, mask, row_mask, lead, n_cols, GROUP)
        if TAIL:
            dx = rstd * (m_tail - shift - h_tail * dot)
            dx_ptrs = _places(DX_ptr, rows, n_cols, tail, GROUP)
            _store_part(dx_ptrs, dx, tail, tail_mask, row_mask, lead, n_cols, GROUP)
    if SUMS:
        line_ptr = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_BIAS)
        _store_sums(line_ptr, n_cols, dw, db, cols, exist, HAS_BIAS)
        if TAIL:
            _store_sums(line_ptr, n_cols, dw_tail, db_tail, tail_cols, tail_exist, HAS_BIAS)


FWD_KERNELS = (_layer_norm_fwd_kernel, _scale_shift_and_store, _store_stats, _centred, _after, begin, *GROUPS, *PIECES)
BWD_KERNELS = (
    _layer_norm_bwd_kernel,
    _centred_and_m,
    _two_row_sums,
    _all_rows,
    _sums_of_columns,
    _store_sums,
    _scale_of,
    _values_of,
    begin,
    *GROUPS,
    *PIECES,
)
"""The kernel first, then all that it calls: what a tuned entry is valid for."""
