"""Kernels of group_norm; the formulas are in group_norm.py.

A tile is BLOCK_SIZE values of each channel of a run, which is CHANNELS neighbouring channels. In `_group_norm_*_kernel`
programs are independent, and groups larger than a tile are read twice. In `_group_norm_cooperative_*_kernel` each
program holds one tile of a group and exchanges partial sums with the others (`runtime.cooperative`).
"""

from __future__ import annotations

from ...runtime.cooperative import collect, publish
from ...runtime.triton_import import tl, triton
from ..rows.blocks import keep_narrow


@triton.jit
def _offsets(spatial, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Offsets of a tile's values from its first, [CHANNELS, BLOCK_SIZE], int64 because channels may be long."""
    return tl.arange(0, CHANNELS).to(tl.int64)[:, None] * spatial + tl.arange(0, BLOCK_SIZE)[None, :]


@triton.jit
def _tile_of_group(tile, channels, spatial, EVEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """(offset of the tile in its group, indices of its channels in the group, channel mask, mask of its values)."""
    run_tiles = tl.cdiv(spatial, BLOCK_SIZE)
    run, tile_of_run = tile // run_tiles, tile % run_tiles
    offset = (run * CHANNELS).to(tl.int64) * spatial + tile_of_run * BLOCK_SIZE
    in_group = run * CHANNELS + tl.arange(0, CHANNELS)
    if EVEN:  # tiles fill the group exactly: constant masks, which the compiler drops
        channel_mask, mask = tl.full([CHANNELS], 1, tl.int1), tl.full([CHANNELS, BLOCK_SIZE], 1, tl.int1)
    else:
        channel_mask = in_group < channels
        mask = channel_mask[:, None] & (tile_of_run * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE) < spatial)[None, :]
    return offset, in_group, channel_mask, mask


@triton.jit
def _split_range(split, split_tiles, run_splits, channels, spatial, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """(first tile, number of tiles) of a split: whole runs if run_splits is 1, else a run's run_splits-th part."""
    run_tiles = tl.cdiv(spatial, BLOCK_SIZE)
    span = tl.where(run_splits == 1, split_tiles, run_tiles)
    first = (split // run_splits) * span + (split % run_splits) * split_tiles
    end = tl.minimum((split // run_splits + 1) * span, tl.cdiv(channels, CHANNELS) * run_tiles)
    return first, tl.minimum(split_tiles, end - first)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _combined_mean_and_m2(Stats_ptr, row, splits):
    """(mean, sum of squared deviations) of a group, from (count, mean, sum of squared deviations) of its splits."""
    offsets = tl.arange(0, 64)
    count = tl.zeros([64], dtype=tl.float32)
    total = tl.zeros([64], dtype=tl.float32)
    for start in range(0, splits, 64):
        stats = Stats_ptr + (row * splits + start + offsets) * 3
        n = tl.load(stats, mask=start + offsets < splits, other=0.0)
        count += n
        total += n * tl.load(stats + 1, mask=start + offsets < splits, other=0.0)
    mean = tl.sum(total, axis=0) / tl.sum(count, axis=0)
    m2 = tl.zeros([64], dtype=tl.float32)
    for start in range(0, splits, 64):
        stats = Stats_ptr + (row * splits + start + offsets) * 3
        n = tl.load(stats, mask=start + offsets < splits, other=0.0)
        centred = tl.load(stats + 1, mask=start + offsets < splits, other=0.0) - mean
        m2 += n * centred * centred + tl.load(stats + 2, mask=start + offsets < splits, other=0.0)
    return mean, tl.sum(m2, axis=0)


@triton.jit
def _combined_sums(Sums_ptr, row, splits):
    offsets = tl.arange(0, 64)
    first = tl.zeros([64], dtype=tl.float32)
    second = tl.zeros([64], dtype=tl.float32)
    for start in range(0, splits, 64):
        sums = Sums_ptr + (row * splits + start + offsets) * 2
        first += tl.load(sums, mask=start + offsets < splits, other=0.0)
        second += tl.load(sums + 1, mask=start + offsets < splits, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _normalize_and_store(centred, rstd, W_ptr, B_ptr, Y_ptrs, channel, channel_mask, mask):
    """Store y = centred * rstd * w + b; centred: x - mean. `evict_first` keeps x in the cache for its second read."""
    if W_ptr is not None:
        w = tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
        y = centred * (rstd * w)[:, None]
    else:
        y = centred * rstd
    if B_ptr is not None:
        y = y + tl.load(B_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    tl.store(Y_ptrs, y.to(Y_ptrs.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits", "split_tiles", "run_splits"])
def _group_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    STATS_ptr,
    Split_stats_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    split_tiles,
    run_splits,
    eps,
    EVEN: tl.constexpr,
    WHOLE_GROUP: tl.constexpr,
    SUM: tl.constexpr,
    APPLY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (p, s) takes split s of the groups p, p + programs, ...: SUM computes statistics, APPLY writes y.

    One launch does both if a group has one split. Otherwise the first launch stores each split's count, mean and sum of
    squared deviations in Split_stats_ptr [n_rows, splits, 3]. The second begins with the last groups, which are still
    in cache. To avoid cancellation, each position of the tile sums differences from the first value it read.
    """
    first, count = _split_range(tl.program_id(1), split_tiles, run_splits, channels, spatial, BLOCK_SIZE, CHANNELS)
    offsets = _offsets(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    n_values = size.to(tl.float32)
    ROW_STAGES: tl.constexpr = STAGES if WHOLE_GROUP else 1
    for turn in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=ROW_STAGES):
        row = turn if SUM else n_rows - 1 - turn
        start = row * size
        first_channel = (row % n_groups) * channels
        if WHOLE_GROUP or SUM:
            _, in_group, channel_mask, mask = _tile_of_group(0, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
            x = tl.load(X_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        if WHOLE_GROUP:
            mean = _sum(x) / n_values
            centred = tl.where(mask, x - mean, 0.0)
            rstd = tl.rsqrt(_sum(centred * centred) / n_values + eps)
            _normalize_and_store(
                centred, rstd, W_ptr, B_ptr, Y_ptr + start + offsets, first_channel + in_group, channel_mask, mask
            )
        else:
            if SUM:
                shifted_sum = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                shifted_squares = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                counts = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, in_group, channel_mask, mask = _tile_of_group(
                        first + tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )
                    shifted = tl.load(X_ptr + (start + offset) + offsets, mask=mask, other=0.0).to(tl.float32) - x
                    if not EVEN:
                        shifted = tl.where(mask, shifted, 0.0)
                        counts += mask.to(tl.float32)
                    shifted_sum += shifted
                    shifted_squares += shifted * shifted
                if EVEN:
                    counts += count
                mean_shifted = shifted_sum / tl.maximum(counts, 1.0)
                n = _sum(counts)
                mean = _sum(counts * (x + mean_shifted)) / n
                centred = x + mean_shifted - mean
                m2 = _sum(shifted_squares - shifted_sum * mean_shifted + counts * centred * centred)
                if not APPLY:
                    stats_ptr = Split_stats_ptr + (row * splits + tl.program_id(1)) * 3
                    tl.store(stats_ptr, n)
                    tl.store(stats_ptr + 1, mean)
                    tl.store(stats_ptr + 2, m2)
            else:
                mean, m2 = _combined_mean_and_m2(Split_stats_ptr, row, splits)
            if APPLY:
                rstd = tl.rsqrt(m2 / n_values + eps)
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, in_group, channel_mask, mask = _tile_of_group(
                        first + count - 1 - tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )  # backwards: the last tiles are still in cache
                    at = start + offset
                    centred = tl.load(X_ptr + at + offsets, mask=mask, other=0.0).to(tl.float32) - mean
                    _normalize_and_store(
                        centred, rstd, W_ptr, B_ptr, Y_ptr + at + offsets, first_channel + in_group, channel_mask, mask
                    )
        if APPLY:
            tl.store(STATS_ptr + row, mean, mask=tl.program_id(1) == 0)
            tl.store(STATS_ptr + n_rows + row, rstd, mask=tl.program_id(1) == 0)


@triton.jit
def _channel_sums(totals, dots, rstd, W_ptr, Row_ptr, width, channel, channel_mask, HAS_BIAS: tl.constexpr):
    """Return the sums of m and m * h of each channel; totals, dots: sums of dy and dy * (x - mean) at each position.

    Store the sums of dy * h and, if HAS_BIAS, of dy in Row_ptr, which may be None.
    """
    total = tl.sum(totals, axis=1)
    dot = tl.sum(dots, axis=1) * rstd
    if Row_ptr is not None:
        tl.store(Row_ptr + channel, dot, mask=channel_mask)
        if HAS_BIAS:
            tl.store(Row_ptr + width + channel, total, mask=channel_mask)
    if W_ptr is not None:
        w = tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
        total, dot = w * total, w * dot
    return total, dot


@triton.jit
def _dx(dy, centred, rstd, total, dot, n_values, W_ptr, channel, channel_mask):
    """dx of a tile. centred: x - mean; total, dot: sums of m and m * h over the n_values values of the group."""
    common = centred * (rstd * rstd * dot / n_values) + rstd * total / n_values
    if W_ptr is not None:
        w = tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
        return dy * (rstd * w)[:, None] - common
    else:
        return dy * rstd - common


@triton.jit
def _partial_row(Partial_ptr, row, width, HAS_BIAS: tl.constexpr):
    row_ptr = None
    if Partial_ptr is not None:
        row_ptr = Partial_ptr + (row + tl.zeros([1], dtype=tl.int64)) * width * (1 + HAS_BIAS)
    return row_ptr


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits", "split_tiles", "run_splits"])
def _group_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    DX_ptr,
    Partial_ptr,
    Split_sums_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    split_tiles,
    run_splits,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE_GROUP: tl.constexpr,
    SUM: tl.constexpr,
    APPLY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs, splits, SUM and APPLY as in the forward. Split_sums_ptr [n_rows, splits, 2]: sums of m and of m * h.

    Partial_ptr [batch * run_splits, num_channels], twice as wide if HAS_BIAS: sums of dy * h, then of dy; None if the
    parameters need no gradient.
    """
    first, count = _split_range(tl.program_id(1), split_tiles, run_splits, channels, spatial, BLOCK_SIZE, CHANNELS)
    run_tiles = tl.minimum(count, tl.cdiv(spatial, BLOCK_SIZE))  # tiles of a run in this split
    offsets = _offsets(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    n_values = size.to(tl.float32)
    width = n_groups * channels
    ROW_STAGES: tl.constexpr = STAGES if WHOLE_GROUP else 1
    for turn in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=ROW_STAGES):
        row = turn if SUM else n_rows - 1 - turn
        start = row * size
        first_channel = (row % n_groups) * channels
        partial_row = (row // n_groups) * run_splits + tl.program_id(1) % run_splits
        row_ptr = _partial_row(Partial_ptr, partial_row, width, HAS_BIAS)
        mean = tl.load(STATS_ptr + row)
        rstd = tl.load(STATS_ptr + n_rows + row)
        if WHOLE_GROUP:
            _, in_group, channel_mask, mask = _tile_of_group(0, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
            channel = first_channel + in_group
            centred = tl.load(X_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32) - mean
            dy = tl.load(DY_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
            total, dot = _channel_sums(dy, dy * centred, rstd, W_ptr, row_ptr, width, channel, channel_mask, HAS_BIAS)
            total, dot = tl.sum(total, axis=0), tl.sum(dot, axis=0)
            dx = _dx(dy, centred, rstd, total, dot, n_values, W_ptr, channel, channel_mask)
            tl.store(DX_ptr + start + offsets, dx.to(DX_ptr.dtype.element_ty), mask=mask)
        else:
            if SUM:
                total = tl.zeros([CHANNELS], dtype=tl.float32)
                dot = tl.zeros([CHANNELS], dtype=tl.float32)
                totals = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                dots = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, in_group, channel_mask, mask = _tile_of_group(
                        first + tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )
                    at = start + offset
                    centred = tl.load(X_ptr + at + offsets, mask=mask, other=0.0).to(tl.float32) - mean
                    dy = tl.load(DY_ptr + at + offsets, mask=mask, other=0.0).to(tl.float32)
                    totals += dy
                    dots += dy * centred
                    if tile % run_tiles == run_tiles - 1:  # the last tile of these channels
                        channel = first_channel + in_group
                        channel_total, channel_dot = _channel_sums(
                            totals, dots, rstd, W_ptr, row_ptr, width, channel, channel_mask, HAS_BIAS
                        )
                        total += channel_total
                        dot += channel_dot
                        totals = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                        dots = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                total, dot = tl.sum(total, axis=0), tl.sum(dot, axis=0)
                if not APPLY:
                    sums_ptr = Split_sums_ptr + (row * splits + tl.program_id(1)) * 2
                    tl.store(sums_ptr, total)
                    tl.store(sums_ptr + 1, dot)
            else:
                total, dot = _combined_sums(Split_sums_ptr, row, splits)
            if APPLY:
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, in_group, channel_mask, mask = _tile_of_group(
                        first + count - 1 - tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )  # backwards: the last tiles are still in cache
                    at = start + offset
                    centred = tl.load(X_ptr + at + offsets, mask=mask, other=0.0).to(tl.float32) - mean
                    dy = tl.load(DY_ptr + at + offsets, mask=mask, other=0.0).to(tl.float32)
                    dx = _dx(dy, centred, rstd, total, dot, n_values, W_ptr, first_channel + in_group, channel_mask)
                    dx = dx.to(DX_ptr.dtype.element_ty)
                    tl.store(DX_ptr + at + offsets, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def _count_of_tile(tile, channels, spatial, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """The number of values of tile number `tile`, which may be a tensor of numbers."""
    run_tiles = tl.cdiv(spatial, BLOCK_SIZE)
    tile_channels = tl.minimum(channels - tile // run_tiles * CHANNELS, CHANNELS)
    return (tile_channels * tl.minimum(spatial - tile % run_tiles * BLOCK_SIZE, BLOCK_SIZE)).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits"])
def _group_norm_cooperative_fwd_kernel(
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
    """Program t * splits + s holds tile s of the groups t, t + groups_at_once, ...; if STAGES > 1 it prefetches them.

    Words_ptr [n_rows, LANES], zeroed: here each tile publishes its mean and its sum of squared deviations from it.
    """
    split = tl.program_id(0) % splits
    groups_at_once = tl.num_programs(0) // splits
    offset, in_group, channel_mask, mask = _tile_of_group(split, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
    offsets = offset + _offsets(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    counts = _count_of_tile(tl.arange(0, LANES), channels, spatial, BLOCK_SIZE, CHANNELS)
    counts = tl.where(tl.arange(0, LANES) < splits, counts, 0.0)
    count = _count_of_tile(split, channels, spatial, BLOCK_SIZE, CHANNELS)
    first_row = tl.program_id(0) // splits
    if STAGES > 1:
        x = tl.load(X_ptr + first_row * size + offsets, mask=mask, other=0.0)
    for row in tl.range(first_row, n_rows, groups_at_once):
        if STAGES == 1:
            x = tl.load(X_ptr + row * size + offsets, mask=mask, other=0.0)
        mean = _sum(x.to(tl.float32)) / count
        x = keep_narrow(x, mean)
        centred = x.to(tl.float32) - mean
        if not EVEN:
            centred = tl.where(mask, centred, 0.0)
        words_ptr = Words_ptr + row * tl.full([], LANES, tl.int64)
        publish(words_ptr + split, mean, _sum(centred * centred))
        if STAGES > 1:
            next_ptrs = X_ptr + (row + groups_at_once) * size + offsets
            x_next = tl.load(next_ptrs, mask=mask & (row + groups_at_once < n_rows), other=0.0)
        means, m2 = collect(words_ptr, splits, LANES)
        mean = tl.sum(counts * means, axis=0) / size.to(tl.float32)
        m2 = tl.sum(m2 + counts * (means - mean) * (means - mean), axis=0)
        rstd = tl.rsqrt(m2 / size.to(tl.float32) + eps)
        centred = keep_narrow(x, rstd).to(tl.float32) - mean
        channel = (row % n_groups) * channels + in_group
        _normalize_and_store(centred, rstd, W_ptr, B_ptr, Y_ptr + row * size + offsets, channel, channel_mask, mask)
        tl.store(STATS_ptr + row, mean, mask=split == 0)
        tl.store(STATS_ptr + n_rows + row, rstd, mask=split == 0)
        if STAGES > 1:
            x = x_next


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits"])
def _group_norm_cooperative_bwd_kernel(
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
):
    """Programs as in the forward. Words_ptr [n_rows, LANES], zeroed: here each tile publishes its sums of m and m * h.

    Partial_ptr [batch * run_tiles, num_channels], twice as wide if HAS_BIAS: as in `_group_norm_bwd_kernel`.
    """
    split = tl.program_id(0) % splits
    groups_at_once = tl.num_programs(0) // splits
    offset, in_group, channel_mask, mask = _tile_of_group(split, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
    offsets = offset + _offsets(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    run_tiles = tl.cdiv(spatial, BLOCK_SIZE)
    width = n_groups * channels
    for row in tl.range(tl.program_id(0) // splits, n_rows, groups_at_once):
        x = tl.load(X_ptr + row * size + offsets, mask=mask, other=0.0)
        dy = tl.load(DY_ptr + row * size + offsets, mask=mask, other=0.0)
        mean = tl.load(STATS_ptr + row)
        rstd = tl.load(STATS_ptr + n_rows + row)
        channel = (row % n_groups) * channels + in_group
        row_ptr = _partial_row(Partial_ptr, (row // n_groups) * run_tiles + split % run_tiles, width, HAS_BIAS)
        totals = dy.to(tl.float32)
        dots = totals * (x.to(tl.float32) - mean)
        total, dot = _channel_sums(totals, dots, rstd, W_ptr, row_ptr, width, channel, channel_mask, HAS_BIAS)
        words_ptr = Words_ptr + row * tl.full([], LANES, tl.int64)
        publish(words_ptr + split, tl.sum(total, axis=0), tl.sum(dot, axis=0))
        totals, dots = collect(words_ptr, splits, LANES)
        total, dot = tl.sum(totals, axis=0), tl.sum(dots, axis=0)
        centred = keep_narrow(x, dot).to(tl.float32) - mean
        dy = keep_narrow(dy, dot).to(tl.float32)
        dx = _dx(dy, centred, rstd, total, dot, size.to(tl.float32), W_ptr, channel, channel_mask)
        dx_ptrs = DX_ptr + row * size + offsets
        tl.store(dx_ptrs, dx.to(DX_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
