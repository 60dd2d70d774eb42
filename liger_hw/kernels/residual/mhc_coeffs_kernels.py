"""The kernels of mhc_coeffs: the projection of all streams of a token, and the Sinkhorn iterations on its result.

A token's projections are in a row `mix` [streams * (streams + 2)]: for h_pre, for h_post, and for h_res row by row.
"""

from __future__ import annotations

from ...runtime.triton_import import tl, triton


@triton.jit
def _operands(a, b):
    """Both as they are where one dtype of 16 bits serves both, else both in fp32."""
    if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16:
        return a, b
    else:
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _mhc_project_fwd_kernel(
    X_ptr,
    Phi_ptr,
    Mix_ptr,
    RSTD_ptr,
    n_rows,
    n_inner,
    n_mix,
    eps,
    MIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """mix = rstd * x @ phi and rstd = 1 / sqrt(mean(x^2) + eps) of BLOCK_N tokens, in one read of x."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    outs = tl.arange(0, MIX)[None, :]
    acc = tl.zeros([BLOCK_N, MIX], dtype=tl.float32)
    squares = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, n_inner, BLOCK_K, num_stages=STAGES):
        inner = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < n_rows) & (inner < n_inner)[None, :]
        x = tl.load(X_ptr + rows * n_inner + inner[None, :], mask=x_mask, other=0.0)
        phi_mask = (inner < n_inner)[:, None] & (outs < n_mix)
        phi = tl.load(Phi_ptr + inner.to(tl.int64)[:, None] * n_mix + outs, mask=phi_mask, other=0.0)
        wide = x.to(tl.float32)
        squares += wide * wide
        a, b = _operands(x, phi)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / n_inner + eps)
    tl.store(RSTD_ptr + rows, rstd, mask=rows < n_rows)
    tl.store(Mix_ptr + rows * n_mix + outs, acc * rstd, mask=(rows < n_rows) & (outs < n_mix))


@triton.jit(do_not_specialize=["n_rows", "n_steps"])
def _mhc_project_bwd_kernel(
    X_ptr,
    Phi_ptr,
    DZ_ptr,
    Shrink_ptr,
    DX_ptr,
    Partial_ptr,
    n_rows,
    n_inner,
    n_mix,
    n_steps,
    MIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = dz @ phi^T - shrink * x, and a share of dphi = x^T @ dz, for BLOCK_K columns of n_steps tiles of tokens."""
    inner = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    outs = tl.arange(0, MIX)[None, :]
    phi_at = inner.to(tl.int64)[:, None] * n_mix + outs
    phi_mask = (inner < n_inner)[:, None] & (outs < n_mix)
    phi = tl.load(Phi_ptr + phi_at, mask=phi_mask, other=0.0)
    dphi = tl.zeros([BLOCK_K, MIX], dtype=tl.float32)
    first = tl.program_id(1).to(tl.int64) * n_steps * BLOCK_N
    for step in tl.range(0, n_steps, num_stages=STAGES):
        rows = first + step * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        x_at, x_mask = rows * n_inner + inner[None, :], (rows < n_rows) & (inner < n_inner)[None, :]
        x = tl.load(X_ptr + x_at, mask=x_mask, other=0.0)
        dz = tl.load(DZ_ptr + rows * n_mix + outs, mask=(rows < n_rows) & (outs < n_mix), other=0.0)
        shrink = tl.load(Shrink_ptr + rows, mask=rows < n_rows, other=0.0)
        dz_phi, phi_dz = _operands(dz, phi)
        dx = tl.dot(dz_phi, tl.trans(phi_dz), input_precision="ieee") - shrink * x.to(tl.float32)
        tl.store(DX_ptr + x_at, dx.to(DX_ptr.dtype.element_ty), mask=x_mask)
        x_dz, dz_x = _operands(x, dz)
        dphi = tl.dot(tl.trans(x_dz), dz_x, dphi, input_precision="ieee")
    partial = Partial_ptr + tl.program_id(1).to(tl.int64) * n_inner * n_mix
    tl.store(partial + phi_at, dphi.to(Partial_ptr.dtype.element_ty), mask=phi_mask)


@triton.jit
def _places(tile, n_rows, n_streams, TOKENS: tl.constexpr, STREAMS: tl.constexpr):
    """Of a tile of tokens: offsets of a row of streams [TOKENS, STREAMS] and of a matrix [TOKENS, STREAMS, STREAMS] in
    tensors of their own, and which of them exist."""
    tokens = tl.cast(tile, tl.int64) * TOKENS + tl.arange(0, TOKENS)
    streams = tl.arange(0, STREAMS)
    line = tokens[:, None] * n_streams + streams[None, :]
    line_mask = (tokens < n_rows)[:, None] & (streams < n_streams)[None, :]
    square = line[:, :, None] * n_streams + streams[None, None, :]
    return tokens, line, line_mask, square, line_mask[:, :, None] & (streams < n_streams)[None, None, :]


@triton.jit
def _logits(Mix_ptr, B_ptr, Alpha_ptr, at, group_at, mask):
    """(mix, alpha * mix + b): at, group_at: offsets in the token's row and in b."""
    mix = tl.load(Mix_ptr + at, mask=mask, other=0.0)
    alpha = tl.load(Alpha_ptr).to(tl.float32)
    return mix, alpha * mix + tl.load(B_ptr + group_at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _softmax(logits, mask):
    """Over the last axis; zeros where nothing exists."""
    top = tl.max(tl.where(mask, logits, -float("inf")), axis=2)
    top = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.where(mask, tl.exp(logits - top[:, :, None]), 0.0)
    total = tl.sum(weights, axis=2)
    return weights / tl.where(total == 0.0, 1.0, total)[:, :, None]


@triton.jit(do_not_specialize=["n_rows"])
def _mhc_sinkhorn_fwd_kernel(
    Mix_ptr,
    B_ptr,
    Alpha_pre_ptr,
    Alpha_post_ptr,
    Alpha_res_ptr,
    Pre_ptr,
    Post_ptr,
    Res_ptr,
    Sums_ptr,
    n_rows,
    n_streams,
    tmax,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    STREAMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Sums_ptr [n_rows, 2 * tmax - 1, n_streams]: what each step divided by, from which the backward goes back."""
    tokens, line, line_mask, square, mask = _places(tl.program_id(0), n_rows, n_streams, TOKENS, STREAMS)
    streams = tl.arange(0, STREAMS)
    n_mix = n_streams * (n_streams + 2)
    start = tokens[:, None] * n_mix + streams[None, :]
    _, pre = _logits(Mix_ptr, B_ptr, Alpha_pre_ptr, start, streams[None, :], line_mask)
    tl.store(Pre_ptr + line, tl.sigmoid(pre) + pre_eps, mask=line_mask)
    post_at = n_streams + streams[None, :]
    _, post = _logits(Mix_ptr, B_ptr, Alpha_post_ptr, start + n_streams, post_at, line_mask)
    tl.store(Post_ptr + line, tl.sigmoid(post) * post_mult, mask=line_mask)
    entry = 2 * n_streams + streams[None, :, None] * n_streams + streams[None, None, :]
    _, logits = _logits(Mix_ptr, B_ptr, Alpha_res_ptr, tokens[:, None, None] * n_mix + entry, entry, mask)
    k = tl.where(mask, _softmax(logits, mask) + sinkhorn_eps, 0.0)
    step_ptrs = Sums_ptr + tokens[:, None] * ((2 * tmax - 1) * n_streams) + streams[None, :]
    for step in range(tmax):
        if step > 0:
            sums = tl.sum(k, axis=2) + sinkhorn_eps
            tl.store(step_ptrs + (2 * step - 1) * n_streams, sums, mask=line_mask)
            k = k / sums[:, :, None]
        sums = tl.sum(k, axis=1) + sinkhorn_eps
        tl.store(step_ptrs + 2 * step * n_streams, sums, mask=line_mask)
        k = k / sums[:, None, :]
    tl.store(Res_ptr + square, k, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _mhc_sinkhorn_bwd_kernel(
    DPre_ptr,
    DPost_ptr,
    DRes_ptr,
    Mix_ptr,
    RSTD_ptr,
    Res_ptr,
    Sums_ptr,
    B_ptr,
    Alpha_pre_ptr,
    Alpha_post_ptr,
    Alpha_res_ptr,
    DZ_ptr,
    Shrink_ptr,
    Partial_ptr,
    n_rows,
    n_streams,
    n_tiles,
    tmax,
    post_mult,
    inner_inverse,
    STREAMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """dz, the gradient of x @ phi, and shrink: x gets -shrink * x. Program p takes the tiles p, p + programs, ...

    inner_inverse: 1 / (n_streams * n_cols). Partial_ptr [programs, 2 * n_mix]: this program's share of db, and of
    logits' gradients times mix, whose sums are the gradients of alpha.
    """
    streams = tl.arange(0, STREAMS)
    n_mix = n_streams * (n_streams + 2)
    entry = 2 * n_streams + streams[:, None] * n_streams + streams[None, :]
    db_pre, da_pre = tl.zeros([STREAMS], dtype=tl.float32), tl.zeros([STREAMS], dtype=tl.float32)
    db_post, da_post = tl.zeros([STREAMS], dtype=tl.float32), tl.zeros([STREAMS], dtype=tl.float32)
    db_res = tl.zeros([STREAMS, STREAMS], dtype=tl.float32)
    da_res = tl.zeros([STREAMS, STREAMS], dtype=tl.float32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        tokens, line, line_mask, square, mask = _places(tile, n_rows, n_streams, TOKENS, STREAMS)
        start = tokens[:, None] * n_mix + streams[None, :]
        pre_mix, pre = _logits(Mix_ptr, B_ptr, Alpha_pre_ptr, start, streams[None, :], line_mask)
        pre = tl.sigmoid(pre)
        dpre = tl.load(DPre_ptr + line, mask=line_mask, other=0.0) * pre * (1.0 - pre)
        post_at = n_streams + streams[None, :]
        post_mix, post = _logits(Mix_ptr, B_ptr, Alpha_post_ptr, start + n_streams, post_at, line_mask)
        post = tl.sigmoid(post)
        dpost = tl.load(DPost_ptr + line, mask=line_mask, other=0.0) * post_mult * post * (1.0 - post)
        res_at = tokens[:, None, None] * n_mix + entry[None, :, :]
        res_mix, logits = _logits(Mix_ptr, B_ptr, Alpha_res_ptr, res_at, entry[None, :, :], mask)
        k = tl.load(Res_ptr + square, mask=mask, other=0.0)
        g = tl.load(DRes_ptr + square, mask=mask, other=0.0)
        step_ptrs = Sums_ptr + tokens[:, None] * ((2 * tmax - 1) * n_streams) + streams[None, :]
        for back in range(tmax):
            step = tmax - 1 - back
            sums = tl.load(step_ptrs + 2 * step * n_streams, mask=line_mask, other=1.0)
            g = (g - tl.sum(g * k, axis=1)[:, None, :]) / sums[:, None, :]
            k = k * sums[:, None, :]
            if step > 0:
                sums = tl.load(step_ptrs + (2 * step - 1) * n_streams, mask=line_mask, other=1.0)
                g = (g - tl.sum(g * k, axis=2)[:, :, None]) / sums[:, :, None]
                k = k * sums[:, :, None]
        weights = _softmax(logits, mask)
        dres = tl.where(mask, weights * (g - tl.sum(weights * g, axis=2)[:, :, None]), 0.0)
        db_pre += tl.sum(dpre, axis=0)
        da_pre += tl.sum(dpre * pre_mix, axis=0)
        db_post += tl.sum(dpost, axis=0)
        da_post += tl.sum(dpost * post_mix, axis=0)
        db_res += tl.sum(dres, axis=0)
        da_res += tl.sum(dres * res_mix, axis=0)
        dpre *= tl.load(Alpha_pre_ptr).to(tl.float32)
        dpost *= tl.load(Alpha_post_ptr).to(tl.float32)
        dres *= tl.load(Alpha_res_ptr).to(tl.float32)
        rstd = tl.load(RSTD_ptr + tokens, mask=tokens < n_rows, other=0.0)
        dot = tl.sum(dpre * pre_mix + dpost * post_mix, axis=1) + tl.sum(tl.sum(dres * res_mix, axis=2), axis=1)
        tl.store(Shrink_ptr + tokens, rstd * rstd * dot * inner_inverse, mask=tokens < n_rows)
        dtype = DZ_ptr.dtype.element_ty
        tl.store(DZ_ptr + start, (dpre * rstd[:, None]).to(dtype), mask=line_mask)
        tl.store(DZ_ptr + start + n_streams, (dpost * rstd[:, None]).to(dtype), mask=line_mask)
        tl.store(DZ_ptr + res_at, (dres * rstd[:, None, None]).to(dtype), mask=mask)
    partial = Partial_ptr + tl.program_id(0) * 2 * n_mix
    there = streams < n_streams
    tl.store(partial + streams, db_pre, mask=there)
    tl.store(partial + n_streams + streams, db_post, mask=there)
    both = there[:, None] & there[None, :]
    tl.store(partial + entry, db_res, mask=both)
    tl.store(partial + n_mix + streams, da_pre, mask=there)
    tl.store(partial + n_mix + n_streams + streams, da_post, mask=there)
    tl.store(partial + n_mix + entry, da_res, mask=both)
