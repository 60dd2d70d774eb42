"""The backward of norms of wide rows by teams: each program keeps to its own columns, and memory is read once.

What no program holds is otherwise read twice, to sum m * h and to use the sum. A team's programs take a tile of the same row
each and hand one another the tiles' sums (`cooperative.py`). They hear a row's sums one row later, after they told the next one's:
by then these are there, and nobody waits. x and dy of the earlier row are read again, by the program that read them before
and so from its own L1, not from memory; kept in registers they would leave none for dw, which stays there for all rows.
"""

from __future__ import annotations

from ...registry import Key, LaunchConfig, Plan, Target
from ...runtime.cooperative import COOPERATIVE, MAX_SPLITS, collect, cooperative_misfit, publish, resident_options
from ...runtime.dependent_launch import begin
from ...runtime.operator import cdiv
from ...runtime.triton_import import tl, triton


@triton.jit
def _of_row(Ptr, row, stride, cols, mask):
    """A program's columns of a row."""
    return tl.load(Ptr + row * stride.to(tl.int64) + cols, mask=mask, other=0.0)


@triton.jit
def _m_of(dy, W_ptr, cols, exist, offset):
    """dy * (offset + W); offset may be None. W is read again for each row, from cache."""
    m = dy.to(tl.float32)
    if W_ptr is not None:
        w = tl.load(W_ptr + cols, mask=exist, other=0.0).to(tl.float32)
        if offset is not None:
            w += offset  # of 0.0 too: compilers keep it, for the sake of -0.0
        m = m * w
    return m


@triton.jit(do_not_specialize=["n_rows", "splits"])
def _rms_norm_team_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    RSTD_ptr,
    DS_ptr,
    DX_ptr,
    DW_partial_ptr,
    Words_ptr,
    DY_row_stride,
    X_row_stride,
    DS_row_stride,
    n_rows,
    n_cols,
    splits,
    offset,
    CASTING: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program t * splits + s: column tile s of the rows t, t + teams, ...

    Words_ptr [n_rows, LANES], zeroed: each tile's sum of m * h. DW_partial_ptr [teams, n_cols], or None.
    """
    begin(AHEAD)
    split = tl.program_id(0) % splits
    teams = tl.num_programs(0) // splits
    team = tl.program_id(0) // splits
    cols = split * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    exist = cols < n_cols
    if DW_partial_ptr is not None:
        dw = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for told in tl.range(team, n_rows + teams, teams):  # the last turn only hears
        mask = exist & (told < n_rows)
        x = _of_row(X_ptr, told, X_row_stride, cols, mask)
        dy = _of_row(DY_ptr, told, DY_row_stride, cols, mask)
        h = x.to(tl.float32) * tl.load(RSTD_ptr + told, mask=told < n_rows, other=0.0)
        if DW_partial_ptr is not None:
            seen = h
            if CASTING == 0:
                seen = h.to(x.dtype).to(tl.float32)
            dw += dy.to(tl.float32) * seen
        dot = tl.sum(_m_of(dy, W_ptr, cols, exist, offset) * h, axis=0)
        if told < n_rows:
            publish(Words_ptr + told * tl.full([], LANES, tl.int64) + split, dot, dot)
        row = told - teams
        mask = exist & (row >= 0)
        rstd = tl.load(RSTD_ptr + row, mask=row >= 0, other=0.0)
        if DS_ptr is not None:
            ds = _of_row(DS_ptr, row, DS_row_stride, cols, mask)
        dots, _ = collect(Words_ptr + row * tl.full([], LANES, tl.int64), tl.where(row >= 0, splits, 0), LANES)
        dot = tl.sum(dots, axis=0) / n_cols
        h = _of_row(X_ptr, row, X_row_stride, cols, mask).to(tl.float32) * rstd
        dx = rstd * (_m_of(_of_row(DY_ptr, row, DY_row_stride, cols, mask), W_ptr, cols, exist, offset) - h * dot)
        if DS_ptr is not None:
            dx += ds.to(tl.float32)
        dx_ptrs = DX_ptr + row * n_cols.to(tl.int64) + cols
        tl.store(dx_ptrs, dx.to(DX_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    if DW_partial_ptr is not None:
        tl.store(DW_partial_ptr + team * n_cols.to(tl.int64) + cols, dw, mask=exist)


@triton.jit(do_not_specialize=["n_rows", "splits"])
def _layer_norm_team_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    DX_ptr,
    Partial_ptr,
    Words_ptr,
    DY_row_stride,
    X_row_stride,
    n_rows,
    n_cols,
    splits,
    HAS_BIAS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """As rms_norm's; words hold each tile's sums of m and of m * h. Partial_ptr: dw, then db if HAS_BIAS, of each team."""
    begin(AHEAD)
    split = tl.program_id(0) % splits
    teams = tl.num_programs(0) // splits
    team = tl.program_id(0) // splits
    cols = split * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    exist = cols < n_cols
    if Partial_ptr is not None:
        dw = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        db = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for told in tl.range(team, n_rows + teams, teams):
        there = told < n_rows
        mask = exist & there
        x = _of_row(X_ptr, told, X_row_stride, cols, mask)
        dy = _of_row(DY_ptr, told, DY_row_stride, cols, mask)
        mean = tl.load(STATS_ptr + told, mask=there, other=0.0)
        rstd = tl.load(STATS_ptr + n_rows + told, mask=there, other=0.0)
        h = (x.to(tl.float32) - mean) * rstd  # not 0 where no column is, but dy is
        if Partial_ptr is not None:
            dw += dy.to(tl.float32) * h
            db += dy.to(tl.float32)
        m = _m_of(dy, W_ptr, cols, exist, None)
        total, dot = tl.split(tl.sum(tl.join(m, m * h), axis=0))  # one exchange between the warps
        if there:
            publish(Words_ptr + told * tl.full([], LANES, tl.int64) + split, total, dot)
        row = told - teams
        there = row >= 0
        mask = exist & there
        mean = tl.load(STATS_ptr + row, mask=there, other=0.0)
        rstd = tl.load(STATS_ptr + n_rows + row, mask=there, other=0.0)
        totals, dots = collect(Words_ptr + row * tl.full([], LANES, tl.int64), tl.where(there, splits, 0), LANES)
        shift = tl.sum(totals, axis=0) / n_cols * rstd
        dot = tl.sum(dots, axis=0) / n_cols * rstd * rstd
        centred = _of_row(X_ptr, row, X_row_stride, cols, mask).to(tl.float32) - mean
        m = _m_of(_of_row(DY_ptr, row, DY_row_stride, cols, mask), W_ptr, cols, exist, None)
        dx = m * rstd - shift - centred * dot  # rstd * (m - mean(m) - h * mean(m * h)) in fewer steps
        dx_ptrs = DX_ptr + row * n_cols.to(tl.int64) + cols
        tl.store(dx_ptrs, dx.to(DX_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    if Partial_ptr is not None:
        line_ptr = Partial_ptr + team * n_cols.to(tl.int64) * (1 + HAS_BIAS)
        tl.store(line_ptr + cols, dw, mask=exist)
        if HAS_BIAS:
            tl.store(line_ptr + n_cols + cols, db, mask=exist)


def _have_teams(target: Target, key: Key) -> bool:
    """Whether rows are wide enough for teams, and begin at 16 bytes."""
    return target.cooperative and key[0] >= 16384 and not key[3:]


def _team(target: Target, key: Key, tile: int, warps: int, ctas: int) -> LaunchConfig | None:
    """Teams whose programs take `tile` bytes of a row; None where rows are fewer than about four a team. `maxnreg` keeps
    programs to the registers they have room for, whatever the dtypes."""
    tile //= key[2]
    programs, splits = ctas * target.multiprocessors, cdiv(key[0], tile)
    if splits > min(programs, MAX_SPLITS) or (1 << key[1]) * splits < 4 * programs:
        return None
    return LaunchConfig({"BLOCK_SIZE": tile, "ROWS": 1}, warps, 1, ctas, vendor=resident_options(target, warps, ctas))


def team_heuristic(target: Target, key: Key, grads: int) -> LaunchConfig | None:
    """Tiles of four warps, as many programs as registers hold with `grads` rows of gradients in them; of wider rows twice
    as many programs of half that. None where there are no teams.

    Backward on the H200, bf16, with what reads twice (2026-11-22): rms_norm takes 263 us instead of 333 at 2048 x 65536,
    134 instead of 171 at 2048 x 32768, 41 instead of 50 at 1024 x 16384; other widths and fp32 were not timed. Plain volatile
    reads instead of atomics, 258 us, would leave memory's order to the compiler. Beside those 258, with the next row's loads
    ahead of the wait, for which registers leave three programs, or with a row's sum heard before the next is told, it takes
    280 and 303 us.

    Later, in one run (`norm-loops-h200.json`), eight programs of 2048 columns by two warps beside four of 4096 by four:
    rms_norm 259 us instead of 266 at 2048 x 65536, 132 instead of 134 at 2048 x 32768, 40.1 instead of 41.0 at 1024 x 16384
    (not taken), fused_add_rms_norm 331 instead of 351, 173 instead of 177 and 49.4 instead of 50.6. layer_norm's six by two
    warps beside three by four: 284 us instead of 302 at 2048 x 65536; the three with the fewer steps that its kernel has
    since, 289, and 145 instead of 152 at 2048 x 32768. Both together were timed only launched early: 285 and 149.
    """
    if not _have_teams(target, key):
        return None
    ctas = 5 - grads
    halves = _team(target, key, 4096, 2, 2 * ctas) if key[0] >= 32768 else None
    return halves or _team(target, key, 8192, 4, ctas)


def team_space(target: Target, key: Key) -> list[LaunchConfig]:
    """Teams for the tuner: of a thread's registers 32 are left beside x, dy and one gradient in fp32 of half precision."""
    if not _have_teams(target, key):
        return []
    tried = (
        _team(target, key, bytes * warps * target.warp_size, warps, ctas)
        for bytes in (16, 32, 64)
        for warps in (2, 4, 8)
        for ctas in (2, 3, 4, 5, 6, 8)
        if 4096 <= bytes * warps * target.warp_size <= 16384
        and 3 * bytes // 2 + 32 <= resident_options(target, warps, ctas)["maxnreg"]
    )
    return [config for config in tried if config is not None]


def team_misfit(config: LaunchConfig, key: Key) -> str | None:
    return cooperative_misfit(config, cdiv(key[0], config.blocks["BLOCK_SIZE"]))


def teams_of(plan: Plan, n_rows: int, n_cols: int) -> tuple[int, int]:
    """(teams, programs of a team that share a row); no teams where programs wait for nobody."""
    if COOPERATIVE not in plan.options:
        return 0, 1
    splits = cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"])
    return min(n_rows, plan.programs // splits), splits
