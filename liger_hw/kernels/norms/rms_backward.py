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

from ...registry import Key, LaunchConfig, Plan, Target, Tunable, next_power_of_2, row_key
from ...runtime.cooperative import launch_teams
from ...runtime.dependent_launch import begin, few_elements
from ...runtime.operator import dense, empty_like, launch, no_weight, row_major, rows_of
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
    begin_anywhere,
    group_pieces,
    grouped_key,
    programs_of,
    row_group,
    tiles_of,
)
from ..rows.pieces import (
    PIECES,
    _both,
    _columns_of,
    _load_tile,
    _one_a_row,
    _row_sums,
    _second_piece,
    _to_columns,
    _wide,
    widest,
)
from ..rows.reduce import column_sum, column_sum_tunable, partial_sums
from .rms_backward_dot import _rms_norm_bwd_dot_kernel, dot_heuristic, dot_safe, dot_space
from .row_teams import RMS_TEAMS, _rms_norm_team_bwd_kernel, team_heuristic, team_misfit, team_space, teams_of


@triton.jit
def _h_and_m(x_raw, dy, rstd, w, CASTING: tl.constexpr):
    """(h, h as the forward multiplied it, m) of one piece; w: its offset + W, or None; rstd from `_values_of`."""
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
    w = _columns_of(W_ptr, cols, exist)
    if w is not None:
        w = w.to(tl.float32) + offset
    return w


@triton.jit
def _values_of(Ptr, rows, row_mask):
    """A saved statistic of these rows, to be used with tiles."""
    return _to_columns(_one_a_row(tl.load(Ptr + rows, mask=row_mask, other=0.0)))


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
    x = _load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "")
    dy = _wide(_load_tile(DY_ptr, rows, DY_row_stride, cols, mask, "", ""))
    _, seen, _ = _h_and_m(x, dy, _values_of(RSTD_ptr, rows, row_mask), None, CASTING)
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
    lead = _lead_of(pid, n_cols, GROUP)
    lanes, exist = _first_lanes(tl.program_id(1) * BLOCK_SIZE, lead, n_cols, BLOCK_SIZE, TAIL, GROUP)
    cols = _columns(lanes, lead, GROUP)
    tail = _second_piece(BLOCK_SIZE, TAIL)
    tail_exist = _are_columns(tail, lead, n_cols, GROUP)
    tail_cols = _columns(tail, lead, GROUP)
    w = _scale_of(W_ptr, cols, exist, offset)
    w_tail = _scale_of(W_ptr, tail_cols, tail_exist, offset)
    if SUMS:
        dw = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # one row sum at the end, not one a tile
        if TAIL:
            dw_tail = tl.zeros([ROWS, TAIL], dtype=tl.float32)
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
        if AT_ONCE:  # ds is asked for with the rest, not after the row is summed
            ds_ptrs = _places(DS_ptr, rows, DS_row_stride, lanes, GROUP)
            ds = _load_part(ds_ptrs, lanes, mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
            ds_ptrs = _places(DS_ptr, rows, DS_row_stride, tail, GROUP)
            ds_tail = _load_part(ds_ptrs, tail, tail_mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
        rstd = _values_of(RSTD_ptr, rows, row_mask)
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
            dot = _to_columns(_row_sums(m * h, mh_tail) / n_cols)
        else:
            dot = _values_of(DOT_ptr, rows, row_mask)
        dx_ptrs = _places(DX_ptr, rows, n_cols, lanes, GROUP)
        ds_ptrs = _places(DS_ptr, rows, DS_row_stride, lanes, GROUP)
        dx = rstd * (m - h * dot)
        if not AT_ONCE:
            ds = _load_part(ds_ptrs, lanes, mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
        if DS_ptr is not None:
            dx += ds.to(tl.float32)
        _store_part(dx_ptrs, dx, lanes, mask, row_mask, lead, n_cols, GROUP)
        if TAIL:
            dx_ptrs = _places(DX_ptr, rows, n_cols, tail, GROUP)
            ds_ptrs = _places(DS_ptr, rows, DS_row_stride, tail, GROUP)
            dx = rstd * (m_tail - h_tail * dot)
            if not AT_ONCE:
                ds_tail = _load_part(ds_ptrs, tail, tail_mask, row_mask, lead, n_cols, LOAD_CACHE, LOAD_EVICT, GROUP)
            if DS_ptr is not None:
                dx += ds_tail.to(tl.float32)
            _store_part(dx_ptrs, dx, tail, tail_mask, row_mask, lead, n_cols, GROUP)
    if SUMS:
        dw_ptr = DW_partial_ptr + pid.to(tl.int64) * n_cols
        tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(DW_partial_ptr.dtype.element_ty), mask=exist)
        if TAIL:
            tl.store(dw_ptr + tail_cols, tl.sum(dw_tail, axis=0).to(DW_partial_ptr.dtype.element_ty), mask=tail_exist)


RMS_BACKWARD = (_rms_norm_bwd_kernel, _all_rows, _dw_of_columns, _h_and_m, _scale_of, _values_of, *GROUPS, *PIECES)
WIDEST_TILE = 16384
"""Columns a program holds at most by default: beyond it fp32 weight-gradient registers spill on every vendor."""
DIMS = ("n_rows", "n_cols")


def few_rows(target: Target, rows_bucket: int, rows: int) -> int:
    """`rows` a program, or fewer (a power of two) where that would leave multiprocessors without a program."""
    return max(1, min(rows, 1 << max(0, rows_bucket - target.multiprocessors.bit_length())))


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


def few_rows_warps(target: Target, elements: int, per_thread: int) -> int:
    """Warps of a program of rows too few to fill the device, where only latency counts: those of 128 threads; more where a
    thread would read more than `per_thread` of `elements`, fewer where not even 4. Loads of one thread are on their way
    together, whereas a sum over more warps takes longer."""
    return max(target.warps(elements, 4, 4), target.warps(elements, per_thread, 16))


def one_by_one(key: Key) -> bool:
    """Whether a `grouped_key` is of a single row that is read an element a load, see `row_group`."""
    return begin_anywhere(key) and not key[1]


def row_warps(target: Target, few: bool, elements: int) -> int:
    """Warps of a program that reads `elements` once: two loads of 16 bytes a thread; beyond 8 warps rather more loads than
    more threads. few: as in `few_rows_warps`; 16 x 4096 takes softmax 1.69 us forward and 1.46 backward on the H200, with one
    load a thread 1.78 and 1.50, with four 1.67 and 1.56 (2026-11-22)."""
    per_thread = 16 if elements < 8192 else 32
    if few:
        return few_rows_warps(target, elements, per_thread)
    return target.warps(elements, per_thread, 16 if elements <= 16384 else 32)


def bwd_heuristic(target: Target, key: Key, streams: int = 2, grads: int = 0) -> LaunchConfig:
    """Tiles of 4096 elements with two more in flight, on a grid of 8192 elements a multiprocessor.

    Where every program has but one tile there is nothing to keep in flight.

    streams: tensors of x's size that the loop reads; each keeps `stages - 1` tiles in shared memory.
    grads: rows of parameter gradients in a program's registers, for an op that takes rows in two pieces.

    On the H200 this is within 4% of the best found at 128 to 8192 columns (2026-11-20). With rows in two pieces those of
    2048 columns are best taken singly with three more in flight. So are those of 4096 where there are two gradients to
    keep, by one program a multiprocessor: layer_norm takes 20 us instead of 26 at 1500 x 5120, 78 instead of 86 by two at
    8192 x 6144, 107 instead of 116 at 16384 x 4096 (102 two at a time, which rows in two pieces, of the same key, have no
    registers for). With one gradient many rows of 4096 go two at a time: 100 us instead of 108 at 16384 x 4096 (2026-11-22).

    Of few rows, whose gradients programs of about 1024 elements sum in the same launch, 16 x 4096 take 1.69 us by 4 warps,
    1.80 by 8 and 2.39 by 16 (layer_norm 2.01, 2.51 and 3.73), 1 x 512 1.12 by 4, 1.16 by 2 and 1.15 by 1 (2026-11-22).
    Rows in two pieces, or that begin anywhere, have up to half as much again to hold: they are given 8 (not timed). 1 x 12289,
    read one by one in a tile of 16384, takes 5.53 us by 32 warps and 5.77 by 16, fused_add_rms_norm, which spills 73 registers
    by 16 and 18 by 32, 6.28 and 7.10.
    """
    block = min(key[0], WIDEST_TILE if key[0] <= WIDEST_TILE else 4096)
    rows = few_rows(target, key[1], max(1, min(32, 4096 // block)))
    ctas = max(1, min(4, 8192 // (block * rows)))
    deepest = 3
    many = 1 << key[1] > 32 * target.multiprocessors
    piece_bytes = streams * widest(block) * key[2]
    if grads and block == 2048:
        rows, ctas, deepest = 1, 2, 4
    elif block == 1024 and many and grads > 1 and streams > 2:
        rows, ctas, deepest = 1, 4, 4  # modulated_rms_norm: four rows' gradients and scales spill
    elif block == 4096 and grads > 1 and streams == 2 and 3 * piece_bytes <= target.shared_memory:
        rows, ctas, deepest = 1, 1, 4
    elif block == 4096 and begin_anywhere(key):
        rows, ctas = 1, 1  # rows that begin anywhere: masks and parts of groups leave registers for one program
    elif block == 4096 and many and grads == 1 and 4 * piece_bytes <= target.shared_memory:
        rows, ctas = 2, 1
    tile, held = block * rows, (widest(block) if grads else block) * rows
    room = 1 + target.shared_memory // (streams * held * key[2])
    if 1 << key[1] <= rows * ctas * target.multiprocessors or room < 3 and held == tile:
        room = 1
    warps = target.warps(tile, 32 if rows > 3 or rows > 1 and tile > 4096 else 16, 16)
    if 1 << key[1] <= target.multiprocessors:
        warps = few_rows_warps(target, tile, 16 if key[3:] else 32) if grads else target.warps(tile, 8, 16)
    if one_by_one(key) and block == WIDEST_TILE:
        warps = target.warps(tile, 16)
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, warps, min(deepest, room), ctas)


def bwd_space(target: Target, key: Key, streams: int = 2) -> list[LaunchConfig]:
    columns = key[0]
    return [
        LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, warps, stages, ctas, hint)
        for block in ({columns} if columns <= 8192 else {2048, 4096, min(columns, 16384)})
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (2, 4, 8, 16)
        for stages in (1, 2, 3, 4)
        for ctas in (1, 2, 3, 4, 6)
        for hint in ("none", "stream")
        if rows * block <= max(block, 8192)
        and 8 <= rows * block // (warps * target.warp_size) <= 64
        and ctas * warps * target.warp_size <= target.max_threads_per_multiprocessor
        and streams * (stages - 1) * rows * key[2] * max(block * ctas, widest(block)) <= target.shared_memory
    ]


def safe(target: Target, key: Key) -> LaunchConfig:
    block = min(key[0], 4096)
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, target.warps(block, 32), 1, 1)


def tiles_rows(config: LaunchConfig, key: Key) -> str | None:
    if set(config.blocks) != {"BLOCK_SIZE", "ROWS"}:
        return f"blocks must be BLOCK_SIZE and ROWS, got {dict(config.blocks)}"
    return None


def tiles_rows_persistently(config: LaunchConfig, key: Key) -> str | None:
    return tiles_rows(config, key) or (None if config.ctas_per_mp else "ctas_per_mp must be at least 1")


def backward_tunables(op: str, streams: int = 2) -> tuple[Tunable, Tunable, Tunable]:
    """The `bwd`, `bwd_dot` and `dw` tunables of an op whose backward is `rms_backward`; `streams` is 3 with a ds."""
    bwd = Tunable(
        op,
        "bwd",
        kernels=(*RMS_BACKWARD, *RMS_TEAMS, begin),
        key=grouped_key,
        dims=DIMS,
        heuristic=lambda target, key: team_heuristic(target, key, 1) or bwd_heuristic(target, key, streams, grads=1),
        safe=safe,
        space=lambda target, key: [*bwd_space(target, key, streams), *team_space(target, key)],
        valid=lambda config, key: tiles_rows_persistently(config, key) or team_misfit(config, key),
        ahead=few_elements,
    )
    bwd_dot = Tunable(
        op,
        "bwd_dot",
        kernels=(_rms_norm_bwd_dot_kernel, begin),
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
    group = row_group(n_rows, n_cols, x, dy, ds)
    plan = bwd.plan(x.device, grouped_key(n_rows, n_cols, x.itemsize))
    teams, splits = teams_of(plan, n_rows, n_cols)
    if teams:
        partial = partial_sums(x, teams, n_cols, w.dtype) if needs_dw else None
        tensors, numbers = (dy, x, w, rstd, ds, dx, partial), (*strides, n_rows, n_cols)
        launch_teams(
            plan, _rms_norm_team_bwd_kernel, teams * splits, splits, n_rows, tensors, numbers, (casting,), offset
        )
        return dx, column_sum(dw, partial, w.dtype) if needs_dw else no_weight(x)
    blocks = plan.config.blocks
    whole, tail, group = group_pieces(n_cols, blocks["BLOCK_SIZE"], group)
    n_tiles, col_tiles = tiles_of(n_rows, blocks["ROWS"], group), 1 if whole else -(-n_cols // blocks["BLOCK_SIZE"])
    dot = None
    if col_tiles > 1:
        dot = torch.empty_like(rstd)
        args = (dy, x, w, rstd, dot, dy_stride, x_stride, n_cols, offset)
        plan_of_dot = bwd_dot.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
        launch(plan_of_dot, _rms_norm_bwd_dot_kernel, (n_rows,), args)
    programs = programs_of(plan.programs // col_tiles, n_tiles, group)
    few, width = at_once(plan, n_rows, n_cols, n_tiles, programs, needs_dw) if whole else (0, 0)
    by_columns = -(-n_cols // width) if width else 0
    partial = partial_sums(x, 1 if by_columns else programs, n_cols, w.dtype) if needs_dw else None
    args = (dy, x, w, rstd, dot, ds, dx, partial, *strides, n_rows, n_cols, n_tiles, offset)
    launch(plan, _rms_norm_bwd_kernel, (programs + by_columns, col_tiles), args, (casting, tail, group, few, width))
    return dx, column_sum(dw, partial, w.dtype) if needs_dw else no_weight(x)
