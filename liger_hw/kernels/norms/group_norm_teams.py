"""group_norm by teams: the programs of a team hold one tile each of a group, so that everything is read once.

What no program holds is otherwise read twice, the second time from cache, which moves bytes no faster than memory does
(H200: 63% of the copy rate). A team's programs hand one another the sums of their tiles and go on to its next group.
How they wait is in `cooperative.py`.
"""

from __future__ import annotations

from ...runtime.cooperative import collect, publish
from ...runtime.triton_import import tl, triton
from ..rows.blocks import keep_narrow
from .group_norm_kernels import (
    _channel_sums,
    _dx,
    _lanes,
    _line_of_partial,
    _shift_and_store,
    _tile_of_group,
    _total,
)


@triton.jit
def _values_of_tile(tile, channels, spatial, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """How many values of the group lie in a tile, for one or many tiles."""
    tiles = tl.cdiv(spatial, BLOCK_SIZE)
    run = tl.minimum(channels - tile // tiles * CHANNELS, CHANNELS)
    return (run * tl.minimum(spatial - tile % tiles * BLOCK_SIZE, BLOCK_SIZE)).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits"])
def _group_norm_team_fwd_kernel(
    X_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    STATS_ptr,
    Words_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    eps,
    EVEN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program t * splits + s: tile s of the groups t, t + teams, ..., the next of which is on its way if STAGES > 1.

    Words_ptr [n_rows, LANES], zeroed: each tile's mean and summed squared deviation from it.
    """
    split = tl.program_id(0) % splits
    teams = tl.num_programs(0) // splits
    offset, own, own_mask, mask = _tile_of_group(split, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
    lanes = offset + _lanes(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    counts = _values_of_tile(tl.arange(0, LANES), channels, spatial, BLOCK_SIZE, CHANNELS)
    counts = tl.where(tl.arange(0, LANES) < splits, counts, 0.0)
    count = _values_of_tile(split, channels, spatial, BLOCK_SIZE, CHANNELS)
    team = tl.program_id(0) // splits
    if STAGES > 1:
        x = tl.load(X_ptr + team * size + lanes, mask=mask, other=0.0)
    for row in tl.range(team, n_rows, teams):
        if STAGES == 1:
            x = tl.load(X_ptr + row * size + lanes, mask=mask, other=0.0)
        mean = _total(x.to(tl.float32)) / count
        x = keep_narrow(x, mean)
        apart = x.to(tl.float32) - mean
        if not EVEN:
            apart = tl.where(mask, apart, 0.0)
        words_ptr = Words_ptr + row * tl.full([], LANES, tl.int64)
        publish(words_ptr + split, mean, _total(apart * apart))
        if STAGES > 1:
            following = X_ptr + (row + teams) * size + lanes
            x_next = tl.load(following, mask=mask & (row + teams < n_rows), other=0.0)
        means, m2 = collect(words_ptr, splits, LANES)
        mean = tl.sum(counts * means, axis=0) / size.to(tl.float32)
        m2 = tl.sum(m2 + counts * (means - mean) * (means - mean), axis=0)
        rstd = tl.rsqrt(m2 / size.to(tl.float32) + eps)
        apart = keep_narrow(x, rstd).to(tl.float32) - mean
        channel = (row % n_groups) * channels + own
        _shift_and_store(apart, rstd, W_ptr, B_ptr, Y_ptr + row * size + lanes, channel, own_mask, mask)
        tl.store(STATS_ptr + row, mean, mask=split == 0)
        tl.store(STATS_ptr + n_rows + row, rstd, mask=split == 0)
        if STAGES > 1:
            x = x_next


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits"])
def _group_norm_team_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    DX_ptr,
    Partial_ptr,
    Words_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Teams as in the forward; Words_ptr holds each tile's sums of m and m * h.

    Partial_ptr [batch * tiles of a channel, num_channels], twice as wide if HAS_BIAS, as in `_group_norm_bwd_kernel`.
    """
    split = tl.program_id(0) % splits
    teams = tl.num_programs(0) // splits
    offset, own, own_mask, mask = _tile_of_group(split, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
    lanes = offset + _lanes(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    parts = tl.cdiv(spatial, BLOCK_SIZE)
    width = n_groups * channels
    team = tl.program_id(0) // splits
    if STAGES > 1:
        x = tl.load(X_ptr + team * size + lanes, mask=mask, other=0.0)
        dy = tl.load(DY_ptr + team * size + lanes, mask=mask, other=0.0)
    for row in tl.range(team, n_rows, teams):
        if STAGES == 1:
            x = tl.load(X_ptr + row * size + lanes, mask=mask, other=0.0)
            dy = tl.load(DY_ptr + row * size + lanes, mask=mask, other=0.0)
        mean = tl.load(STATS_ptr + row)
        rstd = tl.load(STATS_ptr + n_rows + row)
        channel = (row % n_groups) * channels + own
        line_ptr = _line_of_partial(Partial_ptr, (row // n_groups) * parts + split % parts, width, HAS_BIAS)
        totals = dy.to(tl.float32)
        dots = totals * (x.to(tl.float32) - mean)
        total, dot = _channel_sums(totals, dots, rstd, W_ptr, line_ptr, width, channel, own_mask, HAS_BIAS)
        words_ptr = Words_ptr + row * tl.full([], LANES, tl.int64)
        publish(words_ptr + split, tl.sum(total, axis=0), tl.sum(dot, axis=0))
        if STAGES > 1:
            following, more = (row + teams) * size + lanes, mask & (row + teams < n_rows)
            x_next = tl.load(X_ptr + following, mask=more, other=0.0)
            dy_next = tl.load(DY_ptr + following, mask=more, other=0.0)
        totals, dots = collect(words_ptr, splits, LANES)
        total, dot = tl.sum(totals, axis=0), tl.sum(dots, axis=0)
        apart = keep_narrow(x, dot).to(tl.float32) - mean
        dy = keep_narrow(dy, dot).to(tl.float32)
        dx = _dx(dy, apart, rstd, total, dot, size.to(tl.float32), W_ptr, channel, own_mask)
        dx_ptrs = DX_ptr + row * size + lanes
        tl.store(dx_ptrs, dx.to(DX_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
        if STAGES > 1:
            x = x_next
            dy = dy_next
