"""Backward of norms over rows too wide for one program: a group of programs of a cooperative grid shares each row.

Each program takes one column tile of its group's rows, and sums dw and db of these columns. The group exchanges partial
sums for a row's means (`runtime/cooperative.py`), so that x and dy are read from memory once.
"""

from __future__ import annotations

from ...registry import Key, LaunchConfig, Target
from ...runtime.cooperative import MAX_SPLITS, collect, publish, resident_options
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import cdiv
from ...runtime.triton_import import tl, triton
from ..rows.blocks import load_scale
from .forward import normalised


@triton.jit
def _load_row_tile(Ptr, row, stride, cols, mask):
    return tl.load(Ptr + row * stride.to(tl.int64) + cols, mask=mask, other=0.0)


@triton.jit
def _weighted(dy, W_ptr, cols, exist, offset):
    """dy * (offset + W) in fp32; W is read for each row, from cache."""
    w = load_scale(W_ptr, cols, exist, offset)
    return dy.to(tl.float32) if w is None else dy.to(tl.float32) * w


@triton.jit(do_not_specialize=["n_rows", "splits"])
def norm_wide_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    DS_ptr,
    DX_ptr,
    Partial_ptr,
    Words_ptr,
    DY_row_stride,
    X_row_stride,
    DS_row_stride,
    n_rows,
    n_cols,
    splits,
    offset,
    CASTING: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program g * splits + s takes column tile s of the rows g, g + groups, ...

    The loop is software-pipelined by one row: it publishes its partial sums of row i + 1 before it collects the group's
    sums of row i. It then reads x and dy of row i again, from L1, because dw fills the registers.
    Words_ptr [n_rows, LANES], zeroed: here each tile publishes its sums of m (with SUBTRACT_MEAN) and of m * h.
    Partial_ptr [groups, n_cols], twice as wide if HAS_BIAS: dw, then db; or None.
    """
    wait_for_previous(DEPENDENT)
    split = tl.program_id(0) % splits
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    cols = split * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    exist = cols < n_cols
    rstd_ptr = STATS_ptr + (n_rows if SUBTRACT_MEAN else 0)
    if Partial_ptr is not None:
        dw = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        db = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for next_row in tl.range(group, n_rows + groups, groups):  # the last iteration only collects
        valid = next_row < n_rows
        mask = exist & valid
        x = _load_row_tile(X_ptr, next_row, X_row_stride, cols, mask)
        dy = _load_row_tile(DY_ptr, next_row, DY_row_stride, cols, mask)
        # outside the columns dy is 0, but h is not where there is a mean
        mean = tl.load(STATS_ptr + next_row, mask=valid, other=0.0) if SUBTRACT_MEAN else None
        h, rounded = normalised(x, mean, tl.load(rstd_ptr + next_row, mask=valid, other=0.0), CASTING)
        if Partial_ptr is not None:
            dw += dy.to(tl.float32) * rounded
            if HAS_BIAS:
                db += dy.to(tl.float32)
        m = _weighted(dy, W_ptr, cols, exist, offset)
        if SUBTRACT_MEAN:
            total, dot = tl.split(tl.sum(tl.join(m, m * h), axis=0))  # one reduction across warps for both
        else:
            dot = tl.sum(m * h, axis=0)
            total = dot
        if valid:
            publish(Words_ptr + next_row * tl.full([], LANES, tl.int64) + split, total, dot)
        row = next_row - groups
        valid = row >= 0
        mask = exist & valid
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        if SUBTRACT_MEAN:
            mean = tl.load(STATS_ptr + row, mask=valid, other=0.0)
        if DS_ptr is not None:
            ds = _load_row_tile(DS_ptr, row, DS_row_stride, cols, mask)
        totals, dots = collect(Words_ptr + row * tl.full([], LANES, tl.int64), tl.where(valid, splits, 0), LANES)
        dot = tl.sum(dots, axis=0) / n_cols
        x = _load_row_tile(X_ptr, row, X_row_stride, cols, mask).to(tl.float32)
        m = _weighted(_load_row_tile(DY_ptr, row, DY_row_stride, cols, mask), W_ptr, cols, exist, offset)
        if SUBTRACT_MEAN:
            mean_term = tl.sum(totals, axis=0) / n_cols * rstd
            dx = m * rstd - mean_term - (x - mean) * (dot * rstd * rstd)
        else:
            dx = rstd * (m - x * rstd * dot)
        if DS_ptr is not None:
            dx += ds.to(tl.float32)
        dx_ptrs = DX_ptr + row * n_cols.to(tl.int64) + cols
        tl.store(dx_ptrs, dx.to(DX_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    if Partial_ptr is not None:
        row_ptr = Partial_ptr + group * n_cols.to(tl.int64) * (1 + HAS_BIAS)
        tl.store(row_ptr + cols, dw, mask=exist)
        if HAS_BIAS:
            tl.store(row_ptr + n_cols + cols, db, mask=exist)


def wide_heuristic(target: Target, key: Key, grads: int) -> LaunchConfig | None:
    """Tiles of 4096 bytes and two warps, on as many programs as have registers for gradients of `grads` parameters.

    None if rows are not to be shared: one program can hold a row, rows begin at any address, or a group of programs
    would have fewer than about four rows.
    """
    narrowest = 32768 if grads == 1 and key[2] <= 2 else 16384
    if not target.cooperative or key[0] < narrowest or key[3:]:
        return None
    block, warps, ctas = 4096 // key[2], 2, 2 * (5 - grads)
    programs, splits = ctas * target.multiprocessors, cdiv(key[0], block)
    if splits > min(programs, MAX_SPLITS) or (1 << key[1]) * splits < 4 * programs:
        return None
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, warps, 1, ctas, vendor=resident_options(target, warps, ctas))
