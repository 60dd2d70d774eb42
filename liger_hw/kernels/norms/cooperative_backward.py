"""The backward of wide rows by a cooperative grid: programs share a row, and memory is read once.

What no program can hold is otherwise read twice, to sum m * h and to use the sum. Here each program keeps to its own columns,
and the programs of a row exchange their partial sums (`runtime/cooperative.py`). The loop is software-pipelined by one row:
it publishes the partial sums of row i + 1 before it collects those of row i, which are there by then. x and dy of row i are
read again, by the program that read them before and so from its own L1: kept in registers they would leave none for dw,
which stays there for all rows.

Formulas and names are those of `core.py`.
"""

from __future__ import annotations

from ...registry import Key, LaunchConfig, Plan, Target
from ...runtime.cooperative import COOPERATIVE, MAX_SPLITS, collect, cooperative_misfit, publish, resident_options
from ...runtime.dependent_launch import begin
from ...runtime.operator import cdiv
from ...runtime.triton_import import tl, triton


@triton.jit
def _load_split(Ptr, row, stride, cols, mask):
    """A program's columns of a row."""
    return tl.load(Ptr + row * stride.to(tl.int64) + cols, mask=mask, other=0.0)


@triton.jit
def _weighted(dy, W_ptr, cols, exist, offset):
    """dy * (offset + W) in fp32; offset may be None. W is read again for each row, from cache."""
    m = dy.to(tl.float32)
    if W_ptr is not None:
        w = tl.load(W_ptr + cols, mask=exist, other=0.0).to(tl.float32)
        if offset is not None:
            w += offset
        m = m * w
    return m


@triton.jit(do_not_specialize=["n_rows", "splits"])
def _norm_cooperative_bwd_kernel(
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
    AHEAD: tl.constexpr,
):
    """Program g * splits + s takes column tile s of the rows g, g + groups, ...

    Words_ptr [n_rows, LANES], zeroed: each tile's sums of m (with SUBTRACT_MEAN) and of m * h.
    Partial_ptr [groups, n_cols], or None: dw; twice as wide if HAS_BIAS, for db behind it.
    """
    begin(AHEAD)
    split = tl.program_id(0) % splits
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    cols = split * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    exist = cols < n_cols
    rstd_ptr = STATS_ptr + (n_rows if SUBTRACT_MEAN else 0)
    if Partial_ptr is not None:
        dw = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        db = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for ahead in tl.range(group, n_rows + groups, groups):  # the last turn only collects
        valid = ahead < n_rows
        mask = exist & valid
        x = _load_split(X_ptr, ahead, X_row_stride, cols, mask)
        dy = _load_split(DY_ptr, ahead, DY_row_stride, cols, mask)
        h = x.to(tl.float32)
        if SUBTRACT_MEAN:
            h = h - tl.load(STATS_ptr + ahead, mask=valid, other=0.0)  # not 0 where no column is, but dy is
        h = h * tl.load(rstd_ptr + ahead, mask=valid, other=0.0)
        if Partial_ptr is not None:
            rounded = h
            if CASTING == 0:
                rounded = h.to(x.dtype).to(tl.float32)
            dw += dy.to(tl.float32) * rounded
            if HAS_BIAS:
                db += dy.to(tl.float32)
        m = _weighted(dy, W_ptr, cols, exist, offset)
        if SUBTRACT_MEAN:
            total, dot = tl.split(tl.sum(tl.join(m, m * h), axis=0))  # one exchange between the warps
        else:
            dot = tl.sum(m * h, axis=0)
            total = dot
        if valid:
            publish(Words_ptr + ahead * tl.full([], LANES, tl.int64) + split, total, dot)
        row = ahead - groups
        valid = row >= 0
        mask = exist & valid
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        if SUBTRACT_MEAN:
            mean = tl.load(STATS_ptr + row, mask=valid, other=0.0)
        if DS_ptr is not None:
            ds = _load_split(DS_ptr, row, DS_row_stride, cols, mask)
        totals, dots = collect(Words_ptr + row * tl.full([], LANES, tl.int64), tl.where(valid, splits, 0), LANES)
        dot = tl.sum(dots, axis=0) / n_cols
        x = _load_split(X_ptr, row, X_row_stride, cols, mask).to(tl.float32)
        m = _weighted(_load_split(DY_ptr, row, DY_row_stride, cols, mask), W_ptr, cols, exist, offset)
        if SUBTRACT_MEAN:
            shift = tl.sum(totals, axis=0) / n_cols * rstd
            dx = m * rstd - shift - (x - mean) * (dot * rstd * rstd)
        else:
            dx = rstd * (m - x * rstd * dot)
        if DS_ptr is not None:
            dx += ds.to(tl.float32)
        dx_ptrs = DX_ptr + row * n_cols.to(tl.int64) + cols
        tl.store(dx_ptrs, dx.to(DX_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    if Partial_ptr is not None:
        line_ptr = Partial_ptr + group * n_cols.to(tl.int64) * (1 + HAS_BIAS)
        tl.store(line_ptr + cols, dw, mask=exist)
        if HAS_BIAS:
            tl.store(line_ptr + n_cols + cols, db, mask=exist)


# -- configurations --------------------------------------------------------------------------------------------------


def _is_wide(target: Target, key: Key) -> bool:
    """Whether rows are wide enough to be shared, and begin at 16 bytes."""
    return target.cooperative and key[0] >= 16384 and not key[3:]


def _shared_row(target: Target, key: Key, tile_bytes: int, warps: int, ctas: int) -> LaunchConfig | None:
    """Programs that take `tile_bytes` of a row each; None where rows are fewer than about four a group of programs."""
    block = tile_bytes // key[2]
    programs, splits = ctas * target.multiprocessors, cdiv(key[0], block)
    if splits > min(programs, MAX_SPLITS) or (1 << key[1]) * splits < 4 * programs:
        return None
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, warps, 1, ctas, vendor=resident_options(target, warps, ctas))


def cooperative_heuristic(target: Target, key: Key, grads: int) -> LaunchConfig | None:
    """Tiles of four warps, as many programs as registers hold with `grads` rows of gradients in them; of wider rows twice
    as many programs of half that. None where rows are not shared."""
    if not _is_wide(target, key):
        return None
    ctas = 5 - grads
    config = _shared_row(target, key, 4096, 2, 2 * ctas) if key[0] >= 32768 else None
    return _shared_row(target, key, 8192, 4, ctas) if config is None else config


def cooperative_space(target: Target, key: Key) -> list[LaunchConfig]:
    """For the tuner: a thread has 32 registers beside x, dy and one gradient in fp32 of half precision."""
    if not _is_wide(target, key):
        return []
    tried = (
        _shared_row(target, key, size * warps * target.warp_size, warps, ctas)
        for size in (16, 32, 64)
        for warps in (2, 4, 8)
        for ctas in (2, 3, 4, 5, 6, 8)
        if 4096 <= size * warps * target.warp_size <= 16384
        and 3 * size // 2 + 32 <= resident_options(target, warps, ctas)["maxnreg"]
    )
    return [config for config in tried if config is not None]


def splits_misfit(config: LaunchConfig, key: Key) -> str | None:
    return cooperative_misfit(config, cdiv(key[0], config.blocks["BLOCK_SIZE"]))


def row_splits(plan: Plan, n_rows: int, n_cols: int) -> tuple[int, int]:
    """(groups of programs, programs of a group, which share a row); no groups where programs share none."""
    if COOPERATIVE not in plan.options:
        return 0, 1
    splits = cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"])
    return min(n_rows, plan.programs // splits), splits
