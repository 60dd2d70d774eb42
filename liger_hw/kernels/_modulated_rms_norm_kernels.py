"""The kernels of modulated_rms_norm; modulated_rms_norm.py says what they compute."""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def _modulate_and_store(
    x, rstd, W_ptr, scale_ptrs, shift_ptrs, Y_ptrs, cols, n_cols, mask, offset, CASTING: tl.constexpr
):
    y = x.to(tl.float32) * rstd[:, None]
    if CASTING == 0:
        y = y.to(x.dtype).to(tl.float32)
    if W_ptr is not None:
        y = y * (tl.load(W_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset)[None, :]
    y = y * (1.0 + tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32))
    if shift_ptrs is not None:
        y = y + tl.load(shift_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y_ptrs, y.to(Y_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "rows_per_mod"])
def _modulated_rms_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    Scale_ptr,
    Shift_ptr,
    Y_ptr,
    RSTD_ptr,
    X_row_stride,
    Scale_row_stride,
    Shift_row_stride,
    n_rows,
    n_cols,
    rows_per_mod,
    eps,
    offset,
    CASTING: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """ROWS rows a program. Rows wider than BLOCK_SIZE are read twice; the second sweep comes from cache."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = (rows < n_rows)[:, None]
    mods = rows // rows_per_mod
    cols = tl.arange(0, BLOCK_SIZE)
    x_ptrs = X_ptr + rows[:, None] * X_row_stride + cols[None, :]
    y_ptrs = Y_ptr + rows[:, None] * n_cols + cols[None, :]
    scale_ptrs = Scale_ptr + mods[:, None] * Scale_row_stride + cols[None, :]
    shift_ptrs = None
    if Shift_ptr is not None:
        shift_ptrs = Shift_ptr + mods[:, None] * Shift_row_stride + cols[None, :]
    if WHOLE_ROW:
        mask = row_mask & (cols < n_cols)[None, :]
        x_raw = tl.load(x_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        x = x_raw.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
        _modulate_and_store(x_raw, rstd, W_ptr, scale_ptrs, shift_ptrs, y_ptrs, cols, n_cols, mask, offset, CASTING)
    else:
        squares = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for start in range(0, n_cols, BLOCK_SIZE):
            mask = row_mask & (start + cols < n_cols)[None, :]
            x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / n_cols + eps)
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        for tile in range(tiles):
            start = (tiles - 1 - tile) * BLOCK_SIZE  # backwards: what was read last is nearest
            mask = row_mask & (start + cols < n_cols)[None, :]
            x_raw = tl.load(x_ptrs + start, mask=mask, other=0.0)
            shifts = None
            if Shift_ptr is not None:
                shifts = shift_ptrs + start
            scales, ys = scale_ptrs + start, y_ptrs + start
            _modulate_and_store(x_raw, rstd, W_ptr, scales, shifts, ys, start + cols, n_cols, mask, offset, CASTING)
    tl.store(RSTD_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit(do_not_specialize=["rows_per_mod"])
def _modulated_rms_norm_bwd_dot_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    Scale_ptr,
    RSTD_ptr,
    DOT_ptr,
    DY_row_stride,
    X_row_stride,
    Scale_row_stride,
    n_cols,
    rows_per_mod,
    offset,
    BLOCK_SIZE: tl.constexpr,
):
    """mean(m * h) of one row, for rows too wide to hold: the backward kernel then works on column tiles."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    scale_row = Scale_ptr + (row // rows_per_mod) * Scale_row_stride
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        mask = start + cols < n_cols
        x = tl.load(X_ptr + row * X_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(DY_ptr + row * DY_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        m = m * (1.0 + tl.load(scale_row + start + cols, mask=mask, other=0.0).to(tl.float32))
        if W_ptr is not None:
            m = m * (tl.load(W_ptr + start + cols, mask=mask, other=0.0).to(tl.float32) + offset)
        total += m * x
    tl.store(DOT_ptr + row, tl.sum(total, axis=0) * tl.load(RSTD_ptr + row) / n_cols)


@triton.jit(do_not_specialize=["rows_per_group", "n_tiles", "chunks"])
def _modulated_rms_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    Scale_ptr,
    RSTD_ptr,
    DOT_ptr,
    DX_ptr,
    DScale_ptr,
    DShift_ptr,
    Partial_ptr,
    DY_row_stride,
    X_row_stride,
    Scale_row_stride,
    n_cols,
    rows_per_group,
    n_tiles,
    chunks,
    offset,
    CASTING: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """Program (g * chunks + p, c) takes the row tiles p, p + chunks, ... of group g, in column tile c.

    A group is the rows of one modulation, and Partial_ptr gets their q and, if HAS_SHIFT, sum of dy. With PER_ROW every
    row has its own: one group of all rows, whose dscale and dshift are stored here, and Partial_ptr gets dw.
    DOT_ptr: mean(m * h) of every row, or None when the tile holds whole rows. Gradients nobody wants are None.
    """
    pid = tl.program_id(0)
    group = (pid // chunks).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    col_mask = cols < n_cols
    w = tl.full([BLOCK_SIZE], 1.0, dtype=tl.float32)
    if W_ptr is not None:
        w = tl.load(W_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    if not PER_ROW:
        w = w * (1.0 + tl.load(Scale_ptr + group * Scale_row_stride + cols, mask=col_mask, other=0.0).to(tl.float32))
    if Partial_ptr is not None:
        first = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # one row sum at the end, not one a tile
        second = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    for tile in tl.range(pid % chunks, n_tiles, chunks, num_stages=STAGES):
        in_group = tile * ROWS + tl.arange(0, ROWS)
        row_mask = in_group < rows_per_group
        rows = group * rows_per_group + in_group
        mask = row_mask[:, None] & col_mask[None, :]
        x_ptrs = X_ptr + rows[:, None] * X_row_stride + cols[None, :]
        dy_ptrs = DY_ptr + rows[:, None] * DY_row_stride + cols[None, :]
        x_raw = tl.load(x_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        dy = tl.load(dy_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        dy = dy.to(tl.float32)
        rstd = tl.load(RSTD_ptr + rows, mask=row_mask, other=0.0)[:, None]
        h = x_raw.to(tl.float32) * rstd
        seen = h
        if CASTING == 0:
            seen = h.to(x_raw.dtype).to(tl.float32)
        m = dy * w[None, :]
        if PER_ROW:
            scale_ptrs = Scale_ptr + rows[:, None] * Scale_row_stride + cols[None, :]
            scale = tl.load(scale_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            scale = 1.0 + scale.to(tl.float32)
            dense = rows[:, None] * n_cols + cols[None, :]
            if DScale_ptr is not None:
                tl.store(DScale_ptr + dense, (m * seen).to(DScale_ptr.dtype.element_ty), mask=mask)
            if DShift_ptr is not None:
                tl.store(DShift_ptr + dense, dy.to(DShift_ptr.dtype.element_ty), mask=mask)
            if Partial_ptr is not None:
                first += dy * seen * scale
            m = m * scale
        elif Partial_ptr is not None:
            first += dy * seen
            if HAS_SHIFT:
                second += dy
        if DOT_ptr is None:
            dot = (tl.sum(m * h, axis=1) / n_cols)[:, None]
        else:
            dot = tl.load(DOT_ptr + rows, mask=row_mask, other=0.0)[:, None]
        dx = rstd * (m - h * dot)
        tl.store(DX_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(DX_ptr.dtype.element_ty), mask=mask)
    if Partial_ptr is not None:
        partial_ptrs = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_SHIFT) + cols
        tl.store(partial_ptrs, tl.sum(first, axis=0), mask=col_mask)
        if HAS_SHIFT:
            tl.store(partial_ptrs + n_cols, tl.sum(second, axis=0), mask=col_mask)


@triton.jit(do_not_specialize=["chunks"])
def _modulated_rms_norm_bwd_sums_kernel(
    Partial_ptr,
    W_ptr,
    Scale_ptr,
    DScale_ptr,
    DShift_ptr,
    DW_partial_ptr,
    Scale_row_stride,
    n_cols,
    chunks,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds up the chunks of one modulation and turns q into dscale and this modulation's share of dw."""
    mod = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    width = n_cols
    if DShift_ptr is not None:
        width = 2 * n_cols
        shift = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    q = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, chunks, BLOCK_M):
        chunk = start + tl.arange(0, BLOCK_M)
        mask = (chunk < chunks)[:, None] & col_mask[None, :]
        partial_ptrs = Partial_ptr + (mod * chunks + chunk)[:, None] * width + cols[None, :]
        q += tl.load(partial_ptrs, mask=mask, other=0.0)
        if DShift_ptr is not None:
            shift += tl.load(partial_ptrs + n_cols, mask=mask, other=0.0)
    total = tl.sum(q, axis=0)
    dscale = total
    if W_ptr is not None:
        dscale = total * (tl.load(W_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset)
        scale = tl.load(Scale_ptr + mod * Scale_row_stride + cols, mask=col_mask, other=0.0).to(tl.float32)
        tl.store(DW_partial_ptr + mod * n_cols + cols, total * (1.0 + scale), mask=col_mask)
    tl.store(DScale_ptr + mod * n_cols + cols, dscale.to(DScale_ptr.dtype.element_ty), mask=col_mask)
    if DShift_ptr is not None:
        dshift = tl.sum(shift, axis=0)
        tl.store(DShift_ptr + mod * n_cols + cols, dshift.to(DShift_ptr.dtype.element_ty), mask=col_mask)
