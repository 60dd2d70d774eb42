"""The kernels of group_norm; group_norm.py says what they compute."""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def _tile_of_group(tile, channels, spatial, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """(channels of the tile, their mask, offsets inside the group, mask): neighbours in memory come one after another."""
    tiles = tl.cdiv(spatial, BLOCK_SIZE)
    own = (tile // tiles) * CHANNELS + tl.arange(0, CHANNELS)
    place = (tile % tiles) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = (own < channels)[:, None] & (place < spatial)[None, :]
    return own, own < channels, own[:, None] * spatial + place[None, :], mask


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _sums_of_splits(Sums_ptr, row, splits):
    """The two sums of a group, added over the programs that shared it."""
    first = 0.0
    second = 0.0
    for split in range(splits):
        sums = Sums_ptr + (row * splits + split) * 2
        first += tl.load(sums)
        second += tl.load(sums + 1)
    return first, second


@triton.jit
def _shift_and_store(h, W_ptr, B_ptr, Y_ptrs, channel, channel_mask, mask):
    y = h
    if W_ptr is not None:
        y = y * tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    if B_ptr is not None:
        y = y + tl.load(B_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    tl.store(Y_ptrs, y.to(Y_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "share", "splits", "first_size"])
def _group_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    STATS_ptr,
    Sums_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    share,
    first_size,
    eps,
    WHOLE_GROUP: tl.constexpr,
    SUM: tl.constexpr,
    APPLY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """Program (p, s) takes `share` tiles, the s-th, of the groups p, p + programs, ...: SUM measures them, APPLY writes y.

    When a launch does only one of the two, Sums_ptr [n_rows, splits, 2] passes the splits' sums from one to the other.
    first_size: how many values the first tile of a group has; their mean anchors the sums against cancellation.
    """
    split = tl.program_id(1)
    first = split * share
    count = tl.minimum(share, tl.cdiv(channels, CHANNELS) * tl.cdiv(spatial, BLOCK_SIZE) - first)
    size = channels * spatial
    ROW_STAGES: tl.constexpr = STAGES if WHOLE_GROUP else 1
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=ROW_STAGES):
        start = (row + tl.zeros([1, 1], dtype=tl.int64)) * size
        from_channel = (row % n_groups) * channels
        own, own_mask, offsets, mask = _tile_of_group(0, channels, spatial, BLOCK_SIZE, CHANNELS)
        x_ptrs = X_ptr + start + offsets
        x = tl.load(x_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
        anchor = _total(x) / first_size
        if WHOLE_GROUP:
            mean = anchor
            centred = tl.where(mask, x - mean, 0.0)
            rstd = tl.rsqrt(_total(centred * centred) / size + eps)
            _shift_and_store(centred * rstd, W_ptr, B_ptr, Y_ptr + start + offsets, from_channel + own, own_mask, mask)
        else:
            if SUM:
                lane_sum = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                lane_squares = tl.zeros([CHANNELS, BLOCK_SIZE], dtype=tl.float32)
                for tile in tl.range(0, count, num_stages=STAGES):
                    own, own_mask, offsets, mask = _tile_of_group(first + tile, channels, spatial, BLOCK_SIZE, CHANNELS)
                    x = tl.load(X_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
                    apart = tl.where(mask, x - anchor, 0.0)
                    lane_sum += apart
                    lane_squares += apart * apart
                total, squares = _total(lane_sum), _total(lane_squares)
                if not APPLY:
                    sums = Sums_ptr + (row * splits + split) * 2
                    tl.store(sums, total)
                    tl.store(sums + 1, squares)
            else:
                total, squares = _sums_of_splits(Sums_ptr, row, splits)
            if APPLY:
                off = total / size
                mean = anchor + off
                rstd = tl.rsqrt(squares / size - off * off + eps)
                for tile in tl.range(0, count, num_stages=STAGES):
                    at = first + count - 1 - tile  # backwards: what was read last is nearest
                    own, own_mask, offsets, mask = _tile_of_group(at, channels, spatial, BLOCK_SIZE, CHANNELS)
                    x = tl.load(X_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
                    h = (x - mean) * rstd
                    _shift_and_store(h, W_ptr, B_ptr, Y_ptr + start + offsets, from_channel + own, own_mask, mask)
        if APPLY:
            tl.store(STATS_ptr + row, mean, mask=split == 0)
            tl.store(STATS_ptr + n_rows + row, rstd, mask=split == 0)


@triton.jit
def _load_tile(DY_ptrs, X_ptrs, W_ptr, mean, rstd, channel, channel_mask, mask):
    """(dy, w, h) of a tile in fp32; w is 1 where there is none."""
    x = tl.load(X_ptrs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY_ptrs, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(channel_mask, 1.0, 0.0)
    if W_ptr is not None:
        w = tl.load(W_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
    return dy, w, (x - mean) * rstd


@triton.jit
def _sum_tile(dy, h, w, Line_ptr, width, channel, channel_mask, HAS_BIAS: tl.constexpr):
    """This tile's share of the sums of m and m * h, channel by channel; those of dy * h and dy go to Line_ptr, if any."""
    total = tl.sum(dy, axis=1)
    dot = tl.sum(dy * h, axis=1)
    if Line_ptr is not None:
        tl.store(Line_ptr + channel, dot, mask=channel_mask)
        if HAS_BIAS:
            tl.store(Line_ptr + width + channel, total, mask=channel_mask)
    return w * total, w * dot


@triton.jit
def _line_of_partial(Partial_ptr, line, width, HAS_BIAS: tl.constexpr):
    lines = None
    if Partial_ptr is not None:
        lines = Partial_ptr + (line + tl.zeros([1], dtype=tl.int64)) * width * (1 + HAS_BIAS)
    return lines


@triton.jit(do_not_specialize=["n_rows", "n_groups", "channels", "share", "splits"])
def _group_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    STATS_ptr,
    DX_ptr,
    Partial_ptr,
    Sums_ptr,
    n_rows,
    n_groups,
    channels,
    spatial,
    splits,
    share,
    HAS_BIAS: tl.constexpr,
    WHOLE_GROUP: tl.constexpr,
    SUM: tl.constexpr,
    APPLY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs, splits, SUM, APPLY and Sums_ptr as in the forward.

    Partial_ptr [batch * tiles of spatial, num_channels], twice as wide if HAS_BIAS: each tile's sums of dy * h, then of dy;
    None when nobody wants them.
    """
    split = tl.program_id(1)
    s_tiles = tl.cdiv(spatial, BLOCK_SIZE)
    first = split * share
    count = tl.minimum(share, tl.cdiv(channels, CHANNELS) * s_tiles - first)
    size = channels * spatial
    width = n_groups * channels
    ROW_STAGES: tl.constexpr = STAGES if WHOLE_GROUP else 1
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=ROW_STAGES):
        start = (row + tl.zeros([1, 1], dtype=tl.int64)) * size
        from_channel = (row % n_groups) * channels
        line = (row // n_groups) * s_tiles
        mean = tl.load(STATS_ptr + row)
        rstd = tl.load(STATS_ptr + n_rows + row)
        if WHOLE_GROUP:
            own, own_mask, offsets, mask = _tile_of_group(0, channels, spatial, BLOCK_SIZE, CHANNELS)
            at = start + offsets
            channel = from_channel + own
            dy, w, h = _load_tile(DY_ptr + at, X_ptr + at, W_ptr, mean, rstd, channel, own_mask, mask)
            line_ptr = _line_of_partial(Partial_ptr, line, width, HAS_BIAS)
            totals, dots = _sum_tile(dy, h, w, line_ptr, width, channel, own_mask, HAS_BIAS)
            dx = rstd * (dy * w[:, None] - tl.sum(totals, axis=0) / size - h * (tl.sum(dots, axis=0) / size))
            tl.store(DX_ptr + at, dx.to(DX_ptr.dtype.element_ty), mask=mask)
        else:
            if SUM:
                totals = tl.zeros([CHANNELS], dtype=tl.float32)
                dots = tl.zeros([CHANNELS], dtype=tl.float32)
                for tile in tl.range(0, count, num_stages=STAGES):
                    own, own_mask, offsets, mask = _tile_of_group(first + tile, channels, spatial, BLOCK_SIZE, CHANNELS)
                    at = start + offsets
                    channel = from_channel + own
                    dy, w, h = _load_tile(DY_ptr + at, X_ptr + at, W_ptr, mean, rstd, channel, own_mask, mask)
                    line_ptr = _line_of_partial(Partial_ptr, line + (first + tile) % s_tiles, width, HAS_BIAS)
                    of_m, of_mh = _sum_tile(dy, h, w, line_ptr, width, channel, own_mask, HAS_BIAS)
                    totals += of_m
                    dots += of_mh
                total, dot = tl.sum(totals, axis=0), tl.sum(dots, axis=0)
                if not APPLY:
                    sums = Sums_ptr + (row * splits + split) * 2
                    tl.store(sums, total)
                    tl.store(sums + 1, dot)
            else:
                total, dot = _sums_of_splits(Sums_ptr, row, splits)
            if APPLY:
                total = total / size
                dot = dot / size
                for tile in tl.range(0, count, num_stages=STAGES):
                    back = first + count - 1 - tile  # backwards: what was read last is nearest
                    own, own_mask, offsets, mask = _tile_of_group(back, channels, spatial, BLOCK_SIZE, CHANNELS)
                    at = start + offsets
                    channel = from_channel + own
                    dy, w, h = _load_tile(DY_ptr + at, X_ptr + at, W_ptr, mean, rstd, channel, own_mask, mask)
                    dx = rstd * (dy * w[:, None] - total - h * dot)
                    tl.store(DX_ptr + at, dx.to(DX_ptr.dtype.element_ty), mask=mask)
