"""Forward of rms_norm, fused_add_rms_norm and layer_norm, which share one kernel.

    h = (x - mean) * rstd,  y = h * (offset + w) + b,  mean and rstd of each row

RMS norms have no mean. With a residual, x is the sum of x and the residual. Statistics are fp32: rstd [n_rows] or, with
SUBTRACT_MEAN, mean and rstd [2, n_rows]. Other norms' kernels call the device functions of this file.
"""

from __future__ import annotations

from typing import Callable

import torch

from ...registry import Key, LaunchConfig, Target, Tunable
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import dense, empty_like, launch, row_major, rows_of
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    aligned_programs,
    as_column,
    blocks_key,
    count_tiles,
    first_columns,
    keep_narrow,
    load_columns,
    load_tile,
    row_layout,
    row_sums,
    second_columns,
    squared,
    store_at,
    store_tile,
    tile_count,
    tile_mask,
    tile_rows,
    touched_mask,
    which_exist,
    whole_mask,
)
from ..rows.row import align_down, row_pad
from ..rows.tuning import fwd_heuristic, fwd_space, row_tunable

_WIDEST_ROW = 65536  # columns of a 16-bit dtype that an RMS norm's forward holds in registers
LLAMA, GEMMA, NONE = 0, 1, 2
"""CASTING: llama rounds h to x's dtype before the product with w. gemma and none round only y: gemma to x's dtype, none
to the promoted dtype of x and w."""


@triton.jit
def _load_sum(
    X_ptr, R_ptr, rows, X_stride, R_stride, cols, mask, LOAD_HINT: tl.constexpr, touched=None, VECTOR: tl.constexpr = 1
):
    """`load_tile` of x or, with a residual, of x + residual, rounded to x's dtype."""
    x = load_tile(X_ptr, rows, X_stride, cols, mask, LOAD_HINT, touched, VECTOR)
    r = load_tile(R_ptr, rows, R_stride, cols, mask, LOAD_HINT, touched, VECTOR)
    x = x if x is None or r is None else (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def normalised(x, mean, rstd, CASTING: tl.constexpr):
    """(h, h rounded if CASTING says so) in fp32."""
    h = (x.to(tl.float32) if mean is None else x.to(tl.float32) - mean) * rstd
    rounded = h.to(x.dtype).to(tl.float32) if CASTING == 0 else h
    return h, rounded


@triton.jit
def _centred(x, mean, mask):
    """x - mean in fp32, 0 outside `mask`."""
    centred = None if x is None else tl.where(mask, x.to(tl.float32) - as_column(mean), 0.0)
    return centred


@triton.jit
def scale_and_shift(h, w, b, offset, DTYPE: tl.constexpr, CASTING: tl.constexpr):
    """h * (offset + w) + b in fp32. DTYPE: the dtype of x, to which llama rounds h."""
    y = h.to(DTYPE).to(tl.float32) if CASTING == 0 else h
    if w is not None:
        scale = w.to(tl.float32)
        if offset is not None:
            scale = scale + offset
        y = y * scale[None, :]
    if b is not None:
        y = y + b.to(tl.float32)[None, :]
    return y


@triton.jit
def _store_stats(STATS_ptr, mean, rstd, rows, row_mask, n_rows):
    if mean is None:
        tl.store(STATS_ptr + rows, rstd, mask=row_mask)
    else:
        tl.store(STATS_ptr + rows, mean, mask=row_mask)
        tl.store(STATS_ptr + n_rows + rows, rstd, mask=row_mask)


@triton.jit
def _norm_by_tiles(
    X_ptr,
    R_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    S_ptr,
    STATS_ptr,
    X_row_stride,
    R_row_stride,
    rows,
    row_mask,
    n_rows,
    n_cols,
    eps,
    offset,
    CASTING: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """`_norm_fwd_kernel` for rows too wide for one block: each is read twice, the second time from cache.

    Welford's algorithm: each position of a tile keeps a running mean and a sum of squared deviations from it, so that
    the variance of a row is accurate even if its mean is far from zero.
    """
    DTYPE: tl.constexpr = X_ptr.dtype.element_ty
    positions = tl.arange(0, BLOCK_SIZE)
    squares = tl.zeros([rows.shape[0], BLOCK_SIZE], dtype=tl.float32)
    if SUBTRACT_MEAN:
        running_mean = tl.zeros([rows.shape[0], BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + positions
        mask = tile_mask(row_mask, cols < n_cols)
        x = _load_sum(X_ptr, R_ptr, rows, X_row_stride, R_row_stride, cols, mask, "")
        if S_ptr is not None:
            store_tile(S_ptr, rows, n_cols, cols, x, mask)
        if SUBTRACT_MEAN:
            step = tl.where(mask, x.to(tl.float32) - running_mean, 0.0)
            running_mean += step * (1.0 / (start // BLOCK_SIZE + 1.0))
            squares += step * (x.to(tl.float32) - running_mean)
        else:
            squares += squared(x)
    mean = None
    if SUBTRACT_MEAN:
        count = ((n_cols - positions + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.float32)[None, :]  # values per position
        mean = row_sums(running_mean * count, None) / n_cols
        deviation = running_mean - as_column(mean)
        squares = squares + count * deviation * deviation
    rstd = tl.rsqrt(row_sums(squares, None) / n_cols + eps)
    tiles = tl.cdiv(n_cols, BLOCK_SIZE)
    for tile in range(tiles):  # backwards: the last tiles are still in cache
        cols = (tiles - 1 - tile) * BLOCK_SIZE + positions
        exist = cols < n_cols
        mask = tile_mask(row_mask, exist)
        h = _load_sum(X_ptr, R_ptr, rows, X_row_stride, R_row_stride, cols, mask, "").to(tl.float32)
        if SUBTRACT_MEAN:
            h = h - as_column(mean)
        w = load_columns(W_ptr, cols, exist)
        b = load_columns(B_ptr, cols, exist)
        y = scale_and_shift(h * as_column(rstd), w, b, offset, DTYPE, CASTING)
        store_tile(Y_ptr, rows, n_cols, cols, y, mask)
    _store_stats(STATS_ptr, mean, rstd, rows, row_mask, n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _norm_fwd_kernel(
    X_ptr,
    R_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    S_ptr,
    STATS_ptr,
    X_row_stride,
    R_row_stride,
    n_rows,
    n_cols,
    eps,
    offset,
    CASTING: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    BLOCK_2: tl.constexpr,
    VECTOR: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program takes ROWS rows, VECTOR rows apart: with WHOLE_ROW in one or two (BLOCK_2) blocks, else in tiles.

    R_ptr, S_ptr: the residual and the result x + residual, or both None. W_ptr, B_ptr and offset may be None.
    LOOP (with WHOLE_ROW): program p takes the row tiles p, p + programs, ... and keeps W and B in registers.
    """
    wait_for_previous(DEPENDENT)
    pid = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = X_ptr.dtype.element_ty
    if not LOOP:
        rows = tile_rows(pid, ROWS, VECTOR)
        row_mask = rows < n_rows
    if WHOLE_ROW:
        # to fit into the registers, wide rows load W and B after the reductions and keep x in its dtype until then
        LATE: tl.constexpr = BLOCK_SIZE > 4096 and not LOOP
        NARROW: tl.constexpr = LATE if SUBTRACT_MEAN else BLOCK_SIZE > 16384
        pad = row_pad(pid * n_cols, VECTOR)
        cols, exist = first_columns(0, n_cols, BLOCK_SIZE, BLOCK_2, pad, VECTOR)
        cols_2 = second_columns(BLOCK_SIZE, BLOCK_2)
        exist_2 = which_exist(cols_2, n_cols, pad, VECTOR)
        if LOOP:
            w = load_columns(W_ptr, cols, exist, pad)
            b = load_columns(B_ptr, cols, exist, pad)
            w_2 = load_columns(W_ptr, cols_2, exist_2, pad)
            b_2 = load_columns(B_ptr, cols_2, exist_2, pad)
        n_tiles = tile_count(n_rows, ROWS, VECTOR)
        start, end, step = (pid, n_tiles, tl.num_programs(0)) if LOOP else (0, 1, 1)  # (0, 1, 1) compiles to no loop
        for turn in tl.range(start, end, step, num_stages=STAGES):
            if LOOP:
                rows = tile_rows(turn, ROWS, VECTOR)
                row_mask = rows < n_rows
            mask = tile_mask(row_mask, exist)
            mask_2 = tile_mask(row_mask, exist_2)
            touched = touched_mask(row_mask, cols, pad, n_cols, VECTOR)
            touched_2 = touched_mask(row_mask, cols_2, pad, n_cols, VECTOR)
            x = _load_sum(X_ptr, R_ptr, rows, X_row_stride, R_row_stride, cols, mask, LOAD_HINT, touched, VECTOR)
            if not (LOOP or LATE):
                w = load_columns(W_ptr, cols, exist, pad)
                b = load_columns(B_ptr, cols, exist, pad)
            x_2 = _load_sum(
                X_ptr, R_ptr, rows, X_row_stride, R_row_stride, cols_2, mask_2, LOAD_HINT, touched_2, VECTOR
            )
            if not LOOP:
                w_2 = load_columns(W_ptr, cols_2, exist_2, pad)
                b_2 = load_columns(B_ptr, cols_2, exist_2, pad)
            whole = whole_mask(row_mask, cols, pad, n_cols, VECTOR)
            whole_2 = whole_mask(row_mask, cols_2, pad, n_cols, VECTOR)
            if S_ptr is not None:
                store_tile(S_ptr, rows, n_cols, cols, x, mask, whole, VECTOR)
                if BLOCK_2:
                    store_tile(S_ptr, rows, n_cols, cols_2, x_2, mask_2, whole_2, VECTOR)
            h = x
            h_2 = x_2
            mean = None
            if SUBTRACT_MEAN:
                mean = row_sums(x, x_2) / n_cols
                if NARROW:
                    x = keep_narrow(x, as_column(mean))
                h = _centred(x, mean, mask)
                h_2 = _centred(x_2, mean, mask_2)
            rstd = tl.rsqrt(row_sums(squared(h), squared(h_2)) / n_cols + eps)
            if LATE:
                w = load_columns(W_ptr, cols, exist, pad)
                b = load_columns(B_ptr, cols, exist, pad)
            if NARROW:
                h = keep_narrow(x, as_column(rstd))
                if SUBTRACT_MEAN:
                    h = h.to(tl.float32) - as_column(mean)
            # the compiler keeps this order of addresses and arithmetic: on an H200 an RMS norm is up to 3% faster with
            # the addresses first, a layer norm of 4096 columns 2% faster with the arithmetic first
            if not SUBTRACT_MEAN:
                y_ptrs = Y_ptr + align_down(rows[:, None] * n_cols, VECTOR) + cols[None, :]
            y = scale_and_shift(h.to(tl.float32) * as_column(rstd), w, b, offset, DTYPE, CASTING)
            if SUBTRACT_MEAN:
                y_ptrs = Y_ptr + align_down(rows[:, None] * n_cols, VECTOR) + cols[None, :]
            store_at(y_ptrs, y, mask, whole)
            if BLOCK_2:
                h_2 = h_2.to(tl.float32) * as_column(rstd)
                y = scale_and_shift(h_2, w_2, b_2, offset, DTYPE, CASTING)
                store_tile(Y_ptr, rows, n_cols, cols_2, y, mask_2, whole_2, VECTOR)
            _store_stats(STATS_ptr, mean, rstd, rows, row_mask, n_rows)
    else:
        _norm_by_tiles(
            X_ptr, R_ptr, W_ptr, B_ptr, Y_ptr, S_ptr, STATS_ptr, X_row_stride, R_row_stride, rows, row_mask, n_rows,
            n_cols, eps, offset, CASTING, SUBTRACT_MEAN, BLOCK_SIZE,
        )  # fmt: skip


def norm_forward_tunable(
    op: str,
    heuristic: Callable[[Target, Key], LaunchConfig] = lambda target, key: fwd_heuristic(target, key, _WIDEST_ROW),
    space: Callable[[Target, Key], list[LaunchConfig]] = fwd_space,
) -> Tunable:
    """The `fwd` tunable for `norm_forward`."""
    return row_tunable(op, "fwd", _norm_fwd_kernel, key=blocks_key, heuristic=heuristic, space=space)


def out_dtype(x: torch.Tensor, w: torch.Tensor | None, casting: int) -> torch.dtype:
    """The dtype of y: x's for gemma, else the promoted dtype of x and w."""
    return x.dtype if w is None or casting == GEMMA or w.dtype == x.dtype else torch.promote_types(x.dtype, w.dtype)


def norm_forward(tunable, x, w, eps, offset, casting, residual=None, b=None, subtract_mean=False):
    """(y, stats) of a norm over the rows of x or, with a residual, (y, x + residual, stats). w, offset may be None."""
    x, w, b = row_major(x), dense(w), dense(b)
    n_rows, n_cols, stride = rows_of(x)
    y = empty_like(x, out_dtype(x, w, casting))
    s = r_stride = None
    if residual is not None:
        residual, s = row_major(residual), empty_like(x, x.dtype)
        r_stride = rows_of(residual)[2]
    stats = x.new_empty((2, n_rows) if subtract_mean else n_rows, dtype=torch.float32)
    if n_rows:
        plan = tunable.plan(x.device, blocks_key(n_rows, n_cols, x.itemsize))
        whole, block_2, vector = row_layout(n_cols, plan.config.blocks["BLOCK_SIZE"], x, residual, y)
        n_tiles = programs = count_tiles(n_rows, plan.config.blocks["ROWS"], vector)
        loop = whole and 0 < plan.programs < n_tiles
        if loop:
            programs = aligned_programs(plan.programs, n_tiles, vector)
        tensors = x, residual, w, b, y, s, stats
        numbers = stride, r_stride, n_rows, n_cols, eps, offset
        flags = casting, subtract_mean, whole, block_2, vector, loop
        launch(plan, _norm_fwd_kernel, (programs,), (*tensors, *numbers), flags)
    return (y, stats) if residual is None else (y, s, stats)
