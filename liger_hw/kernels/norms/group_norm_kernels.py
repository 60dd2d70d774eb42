"""The kernels of group_norm; group_norm.py says what they compute.

A group larger than a tile is read twice, and the second time should come from cache. Results are therefore stored with
`evict_first`: they would only push the groups at work out.
"""

from __future__ import annotations

from ...runtime.triton_import import tl, triton


@triton.jit
def _lanes(spatial, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Where the values of a tile lie behind its first, [CHANNELS, BLOCK_SIZE]; 64 bit, as a channel may be long."""
    return tl.arange(0, CHANNELS).to(tl.int64)[:, None] * spatial + tl.arange(0, BLOCK_SIZE)[None, :]


@triton.jit
def _tile_of_group(tile, channels, spatial, EVEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """(offset of the tile inside its group, its channels, their mask, mask): tiles follow one another in memory."""
    tiles = tl.cdiv(spatial, BLOCK_SIZE)
    run, part = tile // tiles, tile % tiles
    offset = (run * CHANNELS).to(tl.int64) * spatial + part * BLOCK_SIZE
    own = run * CHANNELS + tl.arange(0, CHANNELS)
    if EVEN:  # every tile lies inside its group: constants, which the compiler drops
        own_mask, mask = tl.full([CHANNELS], 1, tl.int1), tl.full([CHANNELS, BLOCK_SIZE], 1, tl.int1)
    else:
        own_mask = own < channels
        mask = own_mask[:, None] & (part * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE) < spatial)[None, :]
    return offset, own, own_mask, mask


@triton.jit
def _share_of(split, share, parts, channels, spatial, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """(first tile, number of tiles) of a split: whole runs of channels, or one of `parts` parts of a run."""
    s_tiles = tl.cdiv(spatial, BLOCK_SIZE)
    span = tl.where(parts == 1, share, s_tiles)
    first = (split // parts) * span + (split % parts) * share
    end = tl.minimum((split // parts + 1) * span, tl.cdiv(channels, CHANNELS) * s_tiles)
    return first, tl.minimum(share, end - first)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _mean_and_m2_of_splits(Stats_ptr, row, splits):
    """Mean and summed squared deviation of a group from (count, mean, m2) of the programs that shared it."""
    lanes = tl.arange(0, 64)
    count = tl.zeros([64], dtype=tl.float32)
    total = tl.zeros([64], dtype=tl.float32)
    for start in range(0, splits, 64):
        stats = Stats_ptr + (row * splits + start + lanes) * 3
        n = tl.load(stats, mask=start + lanes < splits, other=0.0)
        count += n
        total += n * tl.load(stats + 1, mask=start + lanes < splits, other=0.0)
    mean = tl.sum(total, axis=0) / tl.sum(count, axis=0)
    m2 = tl.zeros([64], dtype=tl.float32)
    for start in range(0, splits, 64):
        stats = Stats_ptr + (row * splits + start + lanes) * 3
        n = tl.load(stats, mask=start + lanes < splits, other=0.0)
        apart = tl.load(stats + 1, mask=start + lanes < splits, other=0.0) - mean
        m2 += n * apart * apart + tl.load(stats + 2, mask=start + lanes < splits, other=0.0)
    return mean, tl.sum(m2, axis=0)


@triton.jit
def _sums_of_splits(Sums_ptr, row, splits):
    """The two sums of a group, added over the programs that shared it."""
    lanes = tl.arange(0, 64)
    first = tl.zeros([64], dtype=tl.float32)
    second = tl.zeros([64], dtype=tl.float32)
    for start in range(0, splits, 64):
        sums = Sums_ptr + (row * splits + start + lanes) * 2
        first += tl.load(sums, mask=start + lanes < splits, other=0.0)
        second += tl.load(sums + 1, mask=start + lanes < splits, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _shift_and_store(apart, rstd, W_ptr, B_ptr, Y_ptrs, channel, channel_mask, mask):
    """apart: x - mean"""
    if W_ptr is not None:
        w = tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
        y = apart * (rstd * w)[:, None]
    else:
        y = apart * rstd
    if B_ptr is not None:
        y = y + tl.load(B_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    tl.store(Y_ptrs, y.to(Y_ptrs.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits", "share", "parts"])
def _group_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    STATS_ptr,
    Shared_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    share,
    parts,
    eps,
    EVEN: tl.constexpr,
    WHOLE_GROUP: tl.constexpr,
    SUM: tl.constexpr,
    APPLY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """Program (p, s) takes the s-th share of the groups p, p + programs, ...: SUM measures them, APPLY writes y.

    When a launch does only one of the two, Shared_ptr [n_rows, splits, 3] passes the splits' count, mean and m2 from one
    to the other, and the second takes the groups last first: those are still in cache.
    Every lane of a tile sums what lies apart from the first value it met, which keeps cancellation away as long as that
    value belongs to the group, and costs no reduction before the sums.
    """
    first, count = _share_of(tl.program_id(1), share, parts, channels, spatial, BLOCK_SIZE, CHANNELS)
    lanes = _lanes(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    values = size.to(tl.float32)
    ROW_STAGES: tl.constexpr = STAGES if WHOLE_GROUP else 1
    for turn in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=ROW_STAGES):
        row = turn if SUM else n_rows - 1 - turn
        start = row * size
        from_channel = (row % n_groups) * channels
        if WHOLE_GROUP or SUM:
            _, own, own_mask, mask = _tile_of_group(0, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
            x_ptrs = X_ptr + start + lanes
            x = tl.load(x_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            x = x.to(tl.float32)
        if WHOLE_GROUP:
            mean = _total(x) / values
            centred = tl.where(mask, x - mean, 0.0)
            rstd = tl.rsqrt(_total(centred * centred) / values + eps)
            _shift_and_store(centred, rstd, W_ptr, B_ptr, Y_ptr + start + lanes, from_channel + own, own_mask, mask)
        else:
            if SUM:
                lane_sum = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                lane_squares = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                seen = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, own, own_mask, mask = _tile_of_group(
                        first + tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )
                    apart = tl.load(X_ptr + (start + offset) + lanes, mask=mask, other=0.0).to(tl.float32) - x
                    if not EVEN:
                        apart = tl.where(mask, apart, 0.0)
                        seen += mask.to(tl.float32)
                    lane_sum += apart
                    lane_squares += apart * apart
                if EVEN:
                    seen += count
                off = lane_sum / tl.maximum(seen, 1.0)
                n = _total(seen)
                mean = _total(seen * (x + off)) / n
                apart = x + off - mean
                m2 = _total(lane_squares - lane_sum * off + seen * apart * apart)
                if not APPLY:
                    shared = Shared_ptr + (row * splits + tl.program_id(1)) * 3
                    tl.store(shared, n)
                    tl.store(shared + 1, mean)
                    tl.store(shared + 2, m2)
            else:
                mean, m2 = _mean_and_m2_of_splits(Shared_ptr, row, splits)
            if APPLY:
                rstd = tl.rsqrt(m2 / values + eps)
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, own, own_mask, mask = _tile_of_group(
                        first + count - 1 - tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )  # backwards: what was read last is nearest
                    at = start + offset
                    apart = tl.load(X_ptr + at + lanes, mask=mask, other=0.0).to(tl.float32) - mean
                    _shift_and_store(apart, rstd, W_ptr, B_ptr, Y_ptr + at + lanes, from_channel + own, own_mask, mask)
        if APPLY:
            tl.store(STATS_ptr + row, mean, mask=tl.program_id(1) == 0)
            tl.store(STATS_ptr + n_rows + row, rstd, mask=tl.program_id(1) == 0)


@triton.jit
def _channel_sums(totals, dots, rstd, W_ptr, Line_ptr, width, channel, channel_mask, HAS_BIAS: tl.constexpr):
    """Shares of the sums of m and m * h, one a channel, from those of dy and dy * (x - mean) in each lane.

    Those of dy * h and dy go to Line_ptr, if any.
    """
    total = tl.sum(totals, axis=1)
    dot = tl.sum(dots, axis=1) * rstd
    if Line_ptr is not None:
        tl.store(Line_ptr + channel, dot, mask=channel_mask)
        if HAS_BIAS:
            tl.store(Line_ptr + width + channel, total, mask=channel_mask)
    if W_ptr is not None:
        w = tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
        total, dot = w * total, w * dot
    return total, dot


@triton.jit
def _dx(dy, apart, rstd, total, dot, values, W_ptr, channel, channel_mask):
    """apart: x - mean; total, dot: sums of m and m * h over the group, of `values` values."""
    common = apart * (rstd * rstd * dot / values) + rstd * total / values
    if W_ptr is not None:
        w = tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
        return dy * (rstd * w)[:, None] - common
    else:
        return dy * rstd - common


@triton.jit
def _line_of_partial(Partial_ptr, line, width, HAS_BIAS: tl.constexpr):
    lines = None
    if Partial_ptr is not None:
        lines = Partial_ptr + (line + tl.zeros([1], dtype=tl.int64)) * width * (1 + HAS_BIAS)
    return lines


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "splits", "share", "parts"])
def _group_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    DX_ptr,
    Partial_ptr,
    Shared_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    share,
    parts,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE_GROUP: tl.constexpr,
    SUM: tl.constexpr,
    APPLY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs, shares, SUM and APPLY as in the forward; Shared_ptr [n_rows, splits, 2] holds sums of m and m * h.

    Partial_ptr [batch * parts, num_channels], twice as wide if HAS_BIAS: sums of dy * h, then of dy; None when nobody
    wants them.
    """
    first, count = _share_of(tl.program_id(1), share, parts, channels, spatial, BLOCK_SIZE, CHANNELS)
    run = tl.minimum(count, tl.cdiv(spatial, BLOCK_SIZE))  # tiles of one run of channels
    lanes = _lanes(spatial, BLOCK_SIZE, CHANNELS)
    size = channels.to(tl.int64) * spatial
    values = size.to(tl.float32)
    width = n_groups * channels
    ROW_STAGES: tl.constexpr = STAGES if WHOLE_GROUP else 1
    for turn in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=ROW_STAGES):
        row = turn if SUM else n_rows - 1 - turn
        start = row * size
        from_channel = (row % n_groups) * channels
        line_ptr = _line_of_partial(Partial_ptr, (row // n_groups) * parts + tl.program_id(1) % parts, width, HAS_BIAS)
        mean = tl.load(STATS_ptr + row)
        rstd = tl.load(STATS_ptr + n_rows + row)
        if WHOLE_GROUP:
            _, own, own_mask, mask = _tile_of_group(0, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS)
            channel = from_channel + own
            apart = tl.load(X_ptr + start + lanes, mask=mask, other=0.0).to(tl.float32) - mean
            dy = tl.load(DY_ptr + start + lanes, mask=mask, other=0.0).to(tl.float32)
            total, dot = _channel_sums(dy, dy * apart, rstd, W_ptr, line_ptr, width, channel, own_mask, HAS_BIAS)
            total, dot = tl.sum(total, axis=0), tl.sum(dot, axis=0)
            dx = _dx(dy, apart, rstd, total, dot, values, W_ptr, channel, own_mask)
            tl.store(DX_ptr + start + lanes, dx.to(DX_ptr.dtype.element_ty), mask=mask)
        else:
            if SUM:
                total = tl.zeros([CHANNELS], dtype=tl.float32)
                dot = tl.zeros([CHANNELS], dtype=tl.float32)
                lane_total = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                lane_dot = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, own, own_mask, mask = _tile_of_group(
                        first + tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )
                    at = start + offset
                    apart = tl.load(X_ptr + at + lanes, mask=mask, other=0.0).to(tl.float32) - mean
                    dy = tl.load(DY_ptr + at + lanes, mask=mask, other=0.0).to(tl.float32)
                    lane_total += dy
                    lane_dot += dy * apart
                    if tile % run == run - 1:  # the last tile of these channels
                        channel = from_channel + own
                        of_m, of_mh = _channel_sums(
                            lane_total, lane_dot, rstd, W_ptr, line_ptr, width, channel, own_mask, HAS_BIAS
                        )
                        total += of_m
                        dot += of_mh
                        lane_total = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                        lane_dot = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                total, dot = tl.sum(total, axis=0), tl.sum(dot, axis=0)
                if not APPLY:
                    shared = Shared_ptr + (row * splits + tl.program_id(1)) * 2
                    tl.store(shared, total)
                    tl.store(shared + 1, dot)
            else:
                total, dot = _sums_of_splits(Shared_ptr, row, splits)
            if APPLY:
                for tile in tl.range(0, count, num_stages=STAGES):
                    offset, own, own_mask, mask = _tile_of_group(
                        first + count - 1 - tile, channels, spatial, EVEN, BLOCK_SIZE, CHANNELS
                    )  # backwards: what was read last is nearest
                    at = start + offset
                    apart = tl.load(X_ptr + at + lanes, mask=mask, other=0.0).to(tl.float32) - mean
                    dy = tl.load(DY_ptr + at + lanes, mask=mask, other=0.0).to(tl.float32)
                    dx = _dx(dy, apart, rstd, total, dot, values, W_ptr, from_channel + own, own_mask)
                    dx = dx.to(DX_ptr.dtype.element_ty)
                    tl.store(DX_ptr + at + lanes, dx, mask=mask, eviction_policy="evict_first")
