"""The backward of RMS normalisation, shared by every op that ends in one.

With s = offset + w, m = dy * s and h = x * rstd:  dx = rstd * (m - h * mean(m * h)) (+ ds),  dw = sum over rows of dy * h.

A persistent grid walks over row tiles with the next loads in flight; each program keeps its share of dw in registers and
leaves one fp32 row, summed by `_reduce.column_sum`. Rows too wide to hold get mean(m * h) from `rms_backward_dot.py`,
and then work on column tiles; where a launch can be cooperative, teams take them (`row_teams.py`). Where rows are few,
a launch costs more than reading them twice: programs of the same launch sum dw, a few columns of all rows each, for which
they need no row's mean.
"""

from __future__ import annotations

import torch

from ...registry import Plan, Target, Tunable, next_power_of_2, row_key
from ...runtime.cooperative import launch_cooperative
from ...runtime.dependent_launch import begin, few_elements
from ...runtime.operator import dense, empty_like, launch, no_weight, row_major, rows_of
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    aligned_key,
    are_columns,
    as_column,
    columns_of,
    count_programs,
    count_tiles,
    lay_out,
    load_at,
    load_columns,
    load_row_values,
    load_tile,
    main_lanes,
    row_sums,
    store_at,
    tail_lanes,
    tile_mask,
    tile_ptrs,
    tile_rows,
    tile_skew,
    to_fp32,
    vector_width,
)
from ..rows.reduce import column_sum, column_sum_tunable, partial_sums
from ..rows.tuning import DIMS, bwd_heuristic, bwd_space, persistent_misfit, safe
from .rms_backward_dot import _rms_norm_bwd_dot_kernel, dot_heuristic, dot_safe, dot_space
from .row_teams import _rms_norm_team_bwd_kernel, team_heuristic, team_misfit, team_space, teams_of


@triton.jit
def _h_and_m(x_raw, dy, rstd, w, CASTING: tl.constexpr):
    """(h, h as the forward multiplied it, m) of one piece; w: its offset + W, or None; rstd from `load_row_values`."""
    h = x_raw.to(tl.float32) * rstd
    seen = h
    if CASTING == 0:
        seen = h.to(x_raw.dtype).to(tl.float32)
    m = dy
    if w is not None:
        m = dy * w[None, :]
    return h, seen, m


@triton.jit
def _store_dx(DX_ptrs, DS_ptrs, rstd, h, m, dot, mask, LOAD_CACHE: tl.constexpr, LOAD_EVICT: tl.constexpr):
    dx = rstd * (m - h * dot)
    if DS_ptrs is not None:
        ds = tl.load(DS_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        dx += ds.to(tl.float32)
    tl.store(DX_ptrs, dx.to(DX_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _scale_of(W_ptr, cols, exist, offset):
    """offset + W in fp32, or None where there is no W or no such piece."""
    w = load_columns(W_ptr, cols, exist)
    if w is not None:
        w = w.to(tl.float32) + offset
    return w


@triton.jit
def _store_sums(Line_ptr, width, first, second, cols, exist, BOTH: tl.constexpr):
    """Sums of one piece over its rows, for ops with two gradients: those of `second`, if BOTH, `width` behind `first`'s."""
    tl.store(Line_ptr + cols, tl.sum(first, axis=0).to(Line_ptr.dtype.element_ty), mask=exist)
    if BOTH:
        tl.store(Line_ptr + width + cols, tl.sum(second, axis=0).to(Line_ptr.dtype.element_ty), mask=exist)


@triton.jit
def _all_rows(tile, n_rows, n_cols, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr):
    """(rows, which of them there are, columns, which of them there are) of a program that sums columns over all rows."""
    rows = tl.arange(0, AT_ONCE).to(tl.int64)
    cols = tile * WIDTH + tl.arange(0, WIDTH)
    return rows, rows < n_rows, cols, cols < n_cols


@triton.jit
def _dw_of_columns(
    DY_ptr,
    X_ptr,
    RSTD_ptr,
    DW_ptr,
    DY_row_stride,
    X_row_stride,
    tile,
    n_rows,
    n_cols,
    CASTING: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dw of WIDTH columns, from all rows."""
    rows, row_mask, cols, exist = _all_rows(tile, n_rows, n_cols, AT_ONCE, WIDTH)
    mask = row_mask[:, None] & exist[None, :]
    x = load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "")
    dy = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols, mask, "", ""))
    _, seen, _ = _h_and_m(x, dy, load_row_values(RSTD_ptr, rows, row_mask), None, CASTING)
    tl.store(DW_ptr + cols, tl.sum(dy * seen, axis=0).to(DW_ptr.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _rms_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    RSTD_ptr,
    DOT_ptr,
    DS_ptr,
    DX_ptr,
    DW_partial_ptr,
    DY_row_stride,
    X_row_stride,
    DS_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    offset,
    CASTING: tl.constexpr,
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
    """Program (p, c) takes the row tiles p, p + programs, ... of column tile c; its share of dw stays in registers.

    With a TAIL the one column tile is a row's first piece, and the second is taken along with it.
    DOT_ptr: mean(m * h) of every row, or None when the tile holds whole rows. DS_ptr: a gradient to add to dx, or None.
    DW_partial_ptr: one row a program, or None when dw is not wanted.
    AT_ONCE: 0, or 1 where every program has one tile: no loop then stands between its loads. More, a power of two that is no
    less than the rows: the programs behind those leave dw itself, of WIDTH columns each.
    """
    begin(AHEAD)
    pid = tl.program_id(0)
    SUMS: tl.constexpr = DW_partial_ptr is not None and AT_ONCE < 2
    if AT_ONCE > 1:
        if pid >= n_tiles:
            _dw_of_columns(
                DY_ptr,
                X_ptr,
                RSTD_ptr,
                DW_partial_ptr,
                DY_row_stride,
                X_row_stride,
                pid - n_tiles,
                n_rows,
                n_cols,
                CASTING,
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
    w = _scale_of(W_ptr, cols, exist, offset)
    w_tail = _scale_of(W_ptr, tail_cols, tail_exist, offset)
    if SUMS:
        dw = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # one row sum at the end, not one a tile
        if TAIL:
            dw_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
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
        if AT_ONCE:  # ds is asked for with the rest, not after the row is summed
            ds_ptrs = tile_ptrs(DS_ptr, rows, DS_row_stride, lanes, VECTOR)
            ds = load_at(ds_ptrs, lanes, mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
            ds_ptrs = tile_ptrs(DS_ptr, rows, DS_row_stride, tail, VECTOR)
            ds_tail = load_at(ds_ptrs, tail, tail_mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
        rstd = load_row_values(RSTD_ptr, rows, row_mask)
        h, seen, m = _h_and_m(x, dy, rstd, w, CASTING)
        mh_tail = None
        if SUMS:
            dw += dy * seen
        if TAIL:
            h_tail, seen, m_tail = _h_and_m(x_tail, dy_tail, rstd, w_tail, CASTING)
            mh_tail = m_tail * h_tail
            if SUMS:
                dw_tail += dy_tail * seen
        if DOT_ptr is None:
            dot = as_column(row_sums(m * h, mh_tail) / n_cols)
        else:
            dot = load_row_values(DOT_ptr, rows, row_mask)
        dx_ptrs = tile_ptrs(DX_ptr, rows, n_cols, lanes, VECTOR)
        ds_ptrs = tile_ptrs(DS_ptr, rows, DS_row_stride, lanes, VECTOR)
        dx = rstd * (m - h * dot)
        if not AT_ONCE:
            ds = load_at(ds_ptrs, lanes, mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
        if DS_ptr is not None:
            dx += ds.to(tl.float32)
        store_at(dx_ptrs, dx, lanes, mask, row_mask, skew, n_cols, VECTOR)
        if TAIL:
            dx_ptrs = tile_ptrs(DX_ptr, rows, n_cols, tail, VECTOR)
            ds_ptrs = tile_ptrs(DS_ptr, rows, DS_row_stride, tail, VECTOR)
            dx = rstd * (m_tail - h_tail * dot)
            if not AT_ONCE:
                ds_tail = load_at(ds_ptrs, tail, tail_mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
            if DS_ptr is not None:
                dx += ds_tail.to(tl.float32)
            store_at(dx_ptrs, dx, tail, tail_mask, row_mask, skew, n_cols, VECTOR)
    if SUMS:
        dw_ptr = DW_partial_ptr + pid.to(tl.int64) * n_cols
        tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(DW_partial_ptr.dtype.element_ty), mask=exist)
        if TAIL:
            tl.store(dw_ptr + tail_cols, tl.sum(dw_tail, axis=0).to(DW_partial_ptr.dtype.element_ty), mask=tail_exist)


def few_at_most(target: Target) -> int:
    """Rows up to which one launch sums parameter gradients beside the rows' own programs: those that leave none of the
    device's multiprocessors a second row, and fit a tile a few columns wide."""
    return min(128, target.multiprocessors)


def at_once(plan: Plan, n_rows: int, n_cols: int, n_tiles: int, programs: int, sums: bool) -> tuple[int, int]:
    """(AT_ONCE, WIDTH) of a backward that holds whole rows; `sums`: whether it has to sum over them. With many rows a loop of
    one turn costs nothing that counts.

    1024 elements a program that sums, or up to 64 columns of wide rows, for two such programs a multiprocessor: 128 x 14336
    takes rms_norm 9.69 us by 64, 10.9 by 32 and 12.8 by 16 (128 x 4096 3.00 by 32, 3.10 by 16; H200, 2026-11-22).
    """
    if programs < n_tiles or n_rows > 4 * plan.target.multiprocessors:
        return 0, 0
    if not sums or n_rows == 1 or n_rows > few_at_most(plan.target):
        return 1, 0
    rows = next_power_of_2(n_rows)
    fair = next_power_of_2(n_cols // (2 * plan.target.multiprocessors))
    return rows, max(16, 1024 // rows, min(64, fair))


def backward_tunables(op: str, streams: int = 2) -> tuple[Tunable, Tunable, Tunable]:
    """The `bwd`, `bwd_dot` and `dw` tunables of an op whose backward is `rms_backward`; `streams` is 3 with a ds."""
    bwd = Tunable(
        op,
        "bwd",
        kernels=(_rms_norm_bwd_kernel, _rms_norm_team_bwd_kernel),
        key=aligned_key,
        dims=DIMS,
        heuristic=lambda target, key: team_heuristic(target, key, 1) or bwd_heuristic(target, key, streams, grads=1),
        safe=safe,
        space=lambda target, key: [*bwd_space(target, key, streams), *team_space(target, key)],
        valid=lambda config, key: persistent_misfit(config, key) or team_misfit(config, key),
        ahead=few_elements,
    )
    bwd_dot = Tunable(
        op,
        "bwd_dot",
        kernels=(_rms_norm_bwd_dot_kernel,),
        key=row_key,
        dims=DIMS,
        heuristic=dot_heuristic,
        safe=dot_safe,
        space=dot_space,
        ahead=few_elements,
    )
    return bwd, bwd_dot, column_sum_tunable(op)


def rms_backward(tunables, dy, x, w, rstd, offset, casting, ds, needs_dw):
    """(dx, dw) of RMSNorm; `ds` [like x] or None is added to dx. `tunables` are `backward_tunables(op)`.

    dw is empty where there is no weight or `needs_dw` is false.
    """
    bwd, bwd_dot, dw = tunables
    dy, x, w = row_major(dy), row_major(x), dense(w)
    ds = None if ds is None else row_major(ds)
    n_rows, n_cols, x_stride = rows_of(x)
    dx = empty_like(x, x.dtype)
    needs_dw = needs_dw and w is not None
    if not n_rows:
        return dx, torch.zeros_like(w) if needs_dw else no_weight(x)
    dy_stride, ds_stride = rows_of(dy)[2], 0 if ds is None else rows_of(ds)[2]
    strides = (dy_stride, x_stride, ds_stride)
    group = vector_width(n_rows, n_cols, x, dy, ds)
    plan = bwd.plan(x.device, aligned_key(n_rows, n_cols, x.itemsize))
    teams, splits = teams_of(plan, n_rows, n_cols)
    if teams:
        partial = partial_sums(x, teams, n_cols, w.dtype) if needs_dw else None
        tensors, numbers = (dy, x, w, rstd, ds, dx, partial), (*strides, n_rows, n_cols)
        launch_cooperative(
            plan, _rms_norm_team_bwd_kernel, teams * splits, splits, n_rows, tensors, numbers, (casting,), offset
        )
        return dx, column_sum(dw, partial, w.dtype) if needs_dw else no_weight(x)
    blocks = plan.config.blocks
    whole, tail, group = lay_out(n_cols, blocks["BLOCK_SIZE"], group)
    n_tiles, col_tiles = count_tiles(n_rows, blocks["ROWS"], group), 1 if whole else -(-n_cols // blocks["BLOCK_SIZE"])
    dot = None
    if col_tiles > 1:
        dot = torch.empty_like(rstd)
        args = (dy, x, w, rstd, dot, dy_stride, x_stride, n_cols, offset)
        plan_of_dot = bwd_dot.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
        launch(plan_of_dot, _rms_norm_bwd_dot_kernel, (n_rows,), args)
    programs = count_programs(plan.programs // col_tiles, n_tiles, group)
    few, width = at_once(plan, n_rows, n_cols, n_tiles, programs, needs_dw) if whole else (0, 0)
    by_columns = -(-n_cols // width) if width else 0
    partial = partial_sums(x, 1 if by_columns else programs, n_cols, w.dtype) if needs_dw else None
    args = (dy, x, w, rstd, dot, ds, dx, partial, *strides, n_rows, n_cols, n_tiles, offset)
    launch(plan, _rms_norm_bwd_kernel, (programs + by_columns, col_tiles), args, (casting, tail, group, few, width))
    return dx, column_sum(dw, partial, w.dtype) if needs_dw else no_weight(x)
