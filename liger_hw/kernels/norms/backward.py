"""Backward of rms_norm, fused_add_rms_norm and layer_norm, which share these kernels.

    m = dy * (offset + w),  dx = rstd * (m - mean(m) - h * mean(m * h)) + ds        RMS norms have no mean(m)
    dw = sum over rows of dy * h,  db = sum over rows of dy                          h as in `forward.py`

The kernel is persistent: program p takes the row tiles p, p + programs, ... with the next loads in flight. It sums dw
and db of its rows in registers and stores them as one fp32 row; `rows.reduce.column_sum` adds these rows. If rows are
too wide for one program, programs of a cooperative grid share them (`wide_backward.py`); without such grids, one launch
computes the means of rows, and the next takes column tiles. With few rows, additional programs sum dw and db instead.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch

from ...registry import Key, LaunchConfig, Tunable, next_power_of_2, row_key
from ...runtime.cooperative import COOPERATIVE, cooperative_misfit, launch_cooperative
from ...runtime.dependent_launch import is_small_launch, wait_for_previous
from ...runtime.operator import cdiv, dense, empty_like, launch, no_weight, row_major, rows_of
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    aligned_programs,
    as_column,
    blocks_key,
    count_tiles,
    first_columns,
    load_row_values,
    load_scale,
    load_tile,
    row_layout,
    row_sums,
    row_sums_of_two,
    second_columns,
    store_columns,
    store_tile,
    tile_count,
    tile_mask,
    tile_rows,
    to_fp32,
    touched_mask,
    which_exist,
    whole_mask,
)
from ..rows.reduce import column_sum, column_sum_tunable, param_parts, params_dtype, partial_sums
from ..rows.row import row_pad
from ..rows.tuning import DIMS, bwd_heuristic, bwd_space, persistent_misfit, row_tunable, tile_rule
from .forward import normalised
from .wide_backward import norm_wide_bwd_kernel, wide_heuristic


@triton.jit
def store_partial_sums(Row_ptr, width, first, second, cols, exist, BOTH: tl.constexpr, pad=0):
    """Store the column sums of the tile `first` at Row_ptr and, if BOTH, of the tile `second` at Row_ptr + width."""
    store_columns(Row_ptr, cols, tl.sum(first, axis=0), exist, pad)
    if BOTH:
        store_columns(Row_ptr + width, cols, tl.sum(second, axis=0), exist, pad)


@triton.jit
def _load_last_stat(STATS_ptr, rows, row_mask, n_rows, SUBTRACT_MEAN: tl.constexpr):
    """rstd from STATS_ptr or mean(m * h) from MEANS_ptr: the second row of the two if SUBTRACT_MEAN."""
    return load_row_values(STATS_ptr + (n_rows if SUBTRACT_MEAN else 0), rows, row_mask)


@triton.jit
def _products(x, dy, w, mean, rstd, CASTING: tl.constexpr):
    """(m, h, dy * h) of one block in fp32; in dy * h, h is rounded as in the forward."""
    h, rounded = normalised(x, mean, rstd, CASTING)
    m = dy if w is None else dy * w[None, :]
    return m, h, dy * rounded


@triton.jit
def _input_gradient(m, h, mean_m, mean_mh, rstd, ds):
    """dx of one block in fp32; mean_m and ds may be None."""
    dx = rstd * ((m if mean_m is None else m - mean_m) - h * mean_mh)
    return dx if ds is None else dx + ds.to(tl.float32)


@triton.jit
def _store_column_sums(
    DY_ptr,
    X_ptr,
    STATS_ptr,
    Partial_ptr,
    DY_row_stride,
    X_row_stride,
    n_rows,
    n_cols,
    tile,
    CASTING: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Store dw and, if HAS_BIAS, db of a few columns, summed over all rows (at most SUM_ROWS)."""
    WIDE: tl.constexpr = 64 if BLOCK_SIZE >= 16384 else (32 if BLOCK_SIZE >= 8192 else 16)  # as `summed_columns`
    SUM_COLS: tl.constexpr = WIDE if SUM_ROWS * WIDE >= 1024 else 1024 // SUM_ROWS
    rows = tl.arange(0, SUM_ROWS).to(tl.int64)
    row_mask = rows < n_rows
    cols = tile * SUM_COLS + tl.arange(0, SUM_COLS)
    exist = cols < n_cols
    mask = tile_mask(row_mask, exist)
    x = load_tile(X_ptr, rows, X_row_stride, cols, mask, "")
    dy = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols, mask, ""))
    mean = load_row_values(STATS_ptr, rows, row_mask) if SUBTRACT_MEAN else None
    rstd = _load_last_stat(STATS_ptr, rows, row_mask, n_rows, SUBTRACT_MEAN)
    _, _, dw = _products(x, dy, None, mean, rstd, CASTING)
    store_partial_sums(Partial_ptr, n_cols, dw, dy, cols, exist, HAS_BIAS)


@triton.jit(do_not_specialize=["n_rows"])
def _norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    MEANS_ptr,
    DS_ptr,
    DX_ptr,
    Partial_ptr,
    DY_row_stride,
    X_row_stride,
    DS_row_stride,
    n_rows,
    n_cols,
    offset,
    CASTING: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_2: tl.constexpr,
    VECTOR: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (p, c) takes the row tiles p, p + programs, ... of column tile c.

    MEANS_ptr: the result of `_norm_bwd_means_kernel`, or None where a tile holds whole rows.
    DS_ptr: a gradient to add to dx, or None.
    Partial_ptr: for each p a row of dw, then of db if HAS_BIAS; None where neither is needed.
    SUM_ROWS: None if programs loop over tiles; else each program has one tile. If SUM_ROWS > 0, it is n_rows rounded up
    to a power of two, and additional programs store dw and db.
    """
    wait_for_previous(DEPENDENT)
    pid = tl.program_id(0)
    ONE_TILE: tl.constexpr = SUM_ROWS is not None
    SUMS: tl.constexpr = Partial_ptr is not None and (SUM_ROWS is None or SUM_ROWS == 0)
    n_tiles = tile_count(n_rows, ROWS, VECTOR)
    if SUM_ROWS:
        if pid >= n_tiles:
            _store_column_sums(
                DY_ptr, X_ptr, STATS_ptr, Partial_ptr, DY_row_stride, X_row_stride, n_rows, n_cols, pid - n_tiles,
                CASTING, SUBTRACT_MEAN, HAS_BIAS, SUM_ROWS, BLOCK_SIZE,
            )  # fmt: skip
            return
    pad = row_pad(pid * n_cols, VECTOR)
    cols, exist = first_columns(tl.program_id(1) * BLOCK_SIZE, n_cols, BLOCK_SIZE, BLOCK_2, pad, VECTOR)
    cols_2 = second_columns(BLOCK_SIZE, BLOCK_2)
    exist_2 = which_exist(cols_2, n_cols, pad, VECTOR)
    w = load_scale(W_ptr, cols, exist, offset, pad)
    w_2 = load_scale(W_ptr, cols_2, exist_2, offset, pad)
    if SUMS:
        dw = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # summed over rows at the end, not in each tile
        db = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        if BLOCK_2:
            dw_2 = tl.zeros([ROWS, BLOCK_2], dtype=tl.float32)
            db_2 = tl.zeros([ROWS, BLOCK_2], dtype=tl.float32)
    end, step = (pid + 1, 1) if ONE_TILE else (n_tiles, tl.num_programs(0))
    for tile in tl.range(pid, end, step, num_stages=STAGES):
        rows = tile_rows(tile, ROWS, VECTOR)
        row_mask = rows < n_rows
        mask = tile_mask(row_mask, exist)
        mask_2 = tile_mask(row_mask, exist_2)
        touched = touched_mask(row_mask, cols, pad, n_cols, VECTOR)
        touched_2 = touched_mask(row_mask, cols_2, pad, n_cols, VECTOR)
        x = load_tile(X_ptr, rows, X_row_stride, cols, mask, LOAD_HINT, touched, VECTOR)
        dy = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols, mask, LOAD_HINT, touched, VECTOR))
        x_2 = load_tile(X_ptr, rows, X_row_stride, cols_2, mask_2, LOAD_HINT, touched_2, VECTOR)
        dy_2 = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, cols_2, mask_2, LOAD_HINT, touched_2, VECTOR))
        if ONE_TILE:  # else ds is loaded after the row is summed, so that it takes no registers until then
            ds = load_tile(DS_ptr, rows, DS_row_stride, cols, mask, LOAD_HINT, touched, VECTOR)
            ds_2 = load_tile(DS_ptr, rows, DS_row_stride, cols_2, mask_2, LOAD_HINT, touched_2, VECTOR)
        mean = load_row_values(STATS_ptr, rows, row_mask) if SUBTRACT_MEAN else None
        rstd = _load_last_stat(STATS_ptr, rows, row_mask, n_rows, SUBTRACT_MEAN)
        m, h, dy_h = _products(x, dy, w, mean, rstd, CASTING)
        mh_2 = None
        if BLOCK_2:
            m_2, h_2, dy_h_2 = _products(x_2, dy_2, w_2, mean, rstd, CASTING)
            mh_2 = m_2 * h_2
        if SUMS:
            dw += dy_h
            if HAS_BIAS:
                db += dy
            if BLOCK_2:
                dw_2 += dy_h_2
                if HAS_BIAS:
                    db_2 += dy_2
        mean_m = None
        if MEANS_ptr is not None:
            if SUBTRACT_MEAN:
                mean_m = load_row_values(MEANS_ptr, rows, row_mask)
            mean_mh = _load_last_stat(MEANS_ptr, rows, row_mask, n_rows, SUBTRACT_MEAN)
        else:
            if SUBTRACT_MEAN:
                sum_m, sum_mh = row_sums_of_two(m, m * h)
                if BLOCK_2:
                    sum_m_2, sum_mh_2 = row_sums_of_two(m_2, mh_2)
                    sum_m += sum_m_2
                    sum_mh += sum_mh_2
                mean_m = as_column(sum_m / n_cols)
            else:
                sum_mh = row_sums(m * h, mh_2)
            mean_mh = as_column(sum_mh / n_cols)
        if not ONE_TILE:
            ds = load_tile(DS_ptr, rows, DS_row_stride, cols, mask, LOAD_HINT, touched, VECTOR)
        whole = whole_mask(row_mask, cols, pad, n_cols, VECTOR)
        dx = _input_gradient(m, h, mean_m, mean_mh, rstd, ds)
        store_tile(DX_ptr, rows, n_cols, cols, dx, mask, whole, VECTOR)
        if BLOCK_2:
            if not ONE_TILE:
                ds_2 = load_tile(DS_ptr, rows, DS_row_stride, cols_2, mask_2, LOAD_HINT, touched_2, VECTOR)
            whole_2 = whole_mask(row_mask, cols_2, pad, n_cols, VECTOR)
            dx_2 = _input_gradient(m_2, h_2, mean_m, mean_mh, rstd, ds_2)
            store_tile(DX_ptr, rows, n_cols, cols_2, dx_2, mask_2, whole_2, VECTOR)
    if SUMS:
        row_ptr = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_BIAS)
        store_partial_sums(row_ptr, n_cols, dw, db, cols, exist, HAS_BIAS, pad)
        if BLOCK_2:
            store_partial_sums(row_ptr, n_cols, dw_2, db_2, cols_2, exist_2, HAS_BIAS, pad)


@triton.jit(do_not_specialize=["n_rows", "rows_per_mod"])
def _norm_bwd_means_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    Scale_ptr,
    STATS_ptr,
    MEANS_ptr,
    DY_row_stride,
    X_row_stride,
    Scale_row_stride,
    n_rows,
    n_cols,
    rows_per_mod,
    offset,
    SUBTRACT_MEAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Store mean(m * h) of a row in MEANS_ptr [n_rows]; if SUBTRACT_MEAN, mean(m) and mean(m * h) in [2, n_rows].

    Scale_ptr: a modulated norm's scale, each row of which applies to rows_per_mod rows, or None.
    """
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    dot = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    if SUBTRACT_MEAN:
        mean = tl.load(STATS_ptr + row)
        total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        mask = start + cols < n_cols
        x = tl.load(X_ptr + row * X_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(DY_ptr + row * DY_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        if Scale_ptr is not None:
            scale_ptrs = Scale_ptr + (row // rows_per_mod) * Scale_row_stride + start + cols
            m = m * (1.0 + tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32))
        if W_ptr is not None:
            m = m * load_scale(W_ptr + start, cols, mask, offset)
        if SUBTRACT_MEAN:
            total += m
            x = x - mean
        dot += m * x
    last_stat = n_rows if SUBTRACT_MEAN else 0  # offset of rstd and mean(m * h)
    if SUBTRACT_MEAN:
        tl.store(MEANS_ptr + row, tl.sum(total, axis=0) / n_cols)
    tl.store(MEANS_ptr + last_stat + row, tl.sum(dot, axis=0) * tl.load(STATS_ptr + last_stat + row) / n_cols)


# -- tunables of the backward ----------------------------------------------------------------------------------------


class BackwardTunables(NamedTuple):
    bwd: Tunable
    means: Tunable
    sums: Tunable


def means_tunable(op: str, variant: str, key: Callable[..., Key] = row_key, dims: tuple[str, ...] = DIMS) -> Tunable:
    """The tunable of `row_means`."""
    return Tunable(
        op,
        variant,
        kernels=(_norm_bwd_means_kernel,),
        key=key,
        dims=dims,
        heuristic=tile_rule(8192, 16, 16),
        safe=tile_rule(4096, 32, 16),
        space=lambda target, key: [
            LaunchConfig({"BLOCK_SIZE": block}, warps) for block in (2048, 4096, 8192, 16384) for warps in (4, 8, 16)
        ],
        dependent_launch=is_small_launch,
    )


def backward_tunables(op: str, means: str = "bwd_dot", streams: int = 2, grads: int = 1) -> BackwardTunables:
    """The tunables of an op whose backward is `norm_backward`.

    means: variant name of the means kernel; streams: tensors of x's size that the backward reads; grads: parameters
    """
    bwd = row_tunable(
        op,
        "bwd",
        _norm_bwd_kernel,
        norm_wide_bwd_kernel,
        key=blocks_key,
        heuristic=lambda target, key: wide_heuristic(target, key, grads) or bwd_heuristic(target, key, streams, grads),
        space=lambda target, key: bwd_space(target, key, streams, grads),
        valid=lambda config, key: (
            persistent_misfit(config, key) or cooperative_misfit(config, cdiv(key[0], config.blocks["BLOCK_SIZE"]))
        ),
    )
    sums = column_sum_tunable(op, columns=lambda n_rows, n_cols: grads * n_cols)
    return BackwardTunables(bwd, means_tunable(op, means), sums)


# -- launching the backward ------------------------------------------------------------------------------------------


MOST_ROWS_SUMMED = 128
"""Up to this many rows, a tile of all rows fits the registers, and additional programs of the launch sum dw and db."""


def summed_columns(rows: int, block: int = 0) -> int:
    """Columns of a program that sums `rows` rows: a tile of 1024 elements; wider for blocks of 8192 columns or more."""
    return max(16, 1024 // rows, min(64, block // 256))


def row_means(
    tunable: Tunable, dy, x, w, stats, offset, subtract_mean, scale=None, scale_stride=None, rows_per_mod=None
) -> torch.Tensor:
    """The result of `_norm_bwd_means_kernel`, a tensor like `stats`."""
    n_rows, n_cols, x_stride = rows_of(x)
    means = torch.empty_like(stats)
    strides = rows_of(dy)[2], x_stride, scale_stride
    args = (dy, x, w, scale, stats, means, *strides, n_rows if subtract_mean else None, n_cols, rows_per_mod, offset)
    plan = tunable.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
    launch(plan, _norm_bwd_means_kernel, (n_rows,), args, (subtract_mean,))
    return means


def norm_backward(
    tunables: BackwardTunables, dy, x, w, b, stats, ds, offset, casting, subtract_mean, needs_params
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw and db in one tensor) of a norm over the rows of `x`. ds: a gradient like x to add to dx, or None."""
    parts, dtype = param_parts(needs_params, w, b), params_dtype(x, w, b)
    dy, x, w = row_major(dy), row_major(x), dense(w)
    ds = None if ds is None else row_major(ds)
    n_rows, n_cols, x_stride = rows_of(x)
    dx = empty_like(x, x.dtype)
    if not n_rows:
        return dx, x.new_zeros(parts * n_cols, dtype=dtype)
    strides = rows_of(dy)[2], x_stride, 0 if ds is None else rows_of(ds)[2]
    plan = tunables.bwd.plan(x.device, blocks_key(n_rows, n_cols, x.itemsize))
    norm_flags = casting, subtract_mean, parts == 2
    block, rows = plan.config.blocks["BLOCK_SIZE"], plan.config.blocks["ROWS"]
    if COOPERATIVE in plan.options:
        splits = cdiv(n_cols, block)
        groups = min(n_rows, plan.programs // splits)
        partial = partial_sums(x, groups, parts * n_cols, dtype) if parts else None
        tensors, numbers = (dy, x, w, stats, ds, dx, partial), (*strides, n_rows, n_cols)
        grid = groups * splits, splits, n_rows
        launch_cooperative(plan, norm_wide_bwd_kernel, *grid, tensors, numbers, norm_flags, offset)
    else:
        whole, block_2, vector = row_layout(n_cols, block, x, dy, ds, dx)
        n_tiles, col_tiles = count_tiles(n_rows, rows, vector), 1 if whole else cdiv(n_cols, block)
        means = None if whole else row_means(tunables.means, dy, x, w, stats, offset, subtract_mean)
        programs = aligned_programs(plan.programs // col_tiles, n_tiles, vector)
        # with more rows the cost of a loop that runs once is not measurable
        one_tile = whole and programs == n_tiles and n_rows <= 4 * plan.target.multiprocessors
        sum_rows, sum_programs = 0 if one_tile else None, 0
        if one_tile and parts and 1 < n_rows <= min(MOST_ROWS_SUMMED, plan.target.multiprocessors):
            sum_rows = next_power_of_2(n_rows)
            sum_programs = cdiv(n_cols, summed_columns(sum_rows, block))
        partial = partial_sums(x, 1 if sum_rows else programs, parts * n_cols, dtype) if parts else None
        args = (dy, x, w, stats, means, ds, dx, partial, *strides, n_rows, n_cols, offset)
        flags = *norm_flags, block_2, vector, sum_rows
        launch(plan, _norm_bwd_kernel, (programs + sum_programs, col_tiles), args, flags)
    return dx, column_sum(tunables.sums, partial, dtype) if parts else no_weight(x)
