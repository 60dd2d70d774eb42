"""The kernels of qk_norm_rope; qk_norm_rope.py says what they compute.

A tile is BLOCK_T tokens x (BLOCK_H heads of q, BLOCK_K heads of k), whole heads, each as its rotary halves and the tail
that does not turn. Persistent programs walk over tiles with the next loads in flight and read the weights once.
"""

from __future__ import annotations

from ._rope_kernels import _load, _rotate
from ._rotary import load_angles, row_offsets
from ._triton import tl, triton


@triton.jit
def _load_head(
    ptrs,
    mask,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    CACHE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Both halves and the tail of the heads at `ptrs` [tokens, heads, 1], raw; without a tail the first half again."""
    cols = tl.arange(0, BLOCK_HALF)[None, None, :]
    x1 = _load(ptrs + cols, mask & (cols < HALF), CACHE, EVICT)
    x2 = _load(ptrs + cols + HALF, mask & (cols < HALF), CACHE, EVICT)
    x3 = x1
    if TAIL:
        tail = tl.arange(0, BLOCK_TAIL)[None, None, :]
        x3 = _load(ptrs + tail + 2 * HALF, mask & (tail < TAIL), CACHE, EVICT)
    return x1, x2, x3


@triton.jit
def _store_head(ptrs, y1, y2, y3, mask, HALF: tl.constexpr, TAIL: tl.constexpr):
    cols = tl.arange(0, y1.shape[2])[None, None, :]
    tl.store(ptrs + cols, y1.to(ptrs.dtype.element_ty), mask=mask & (cols < HALF))
    tl.store(ptrs + cols + HALF, y2.to(ptrs.dtype.element_ty), mask=mask & (cols < HALF))
    if TAIL:
        tail = tl.arange(0, y3.shape[2])[None, None, :]
        tl.store(ptrs + tail + 2 * HALF, y3.to(ptrs.dtype.element_ty), mask=mask & (tail < TAIL))


@triton.jit
def _load_weight(
    W_ptr, offset, HALF: tl.constexpr, TAIL: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_TAIL: tl.constexpr
):
    """offset + w of both halves and the tail, [1, 1, block] fp32."""
    cols = tl.arange(0, BLOCK_HALF)
    w1 = tl.load(W_ptr + cols, mask=cols < HALF, other=0.0).to(tl.float32) + offset
    w2 = tl.load(W_ptr + cols + HALF, mask=cols < HALF, other=0.0).to(tl.float32) + offset
    w3 = w1
    if TAIL:
        tail = tl.arange(0, BLOCK_TAIL)
        w3 = tl.load(W_ptr + tail + 2 * HALF, mask=tail < TAIL, other=0.0).to(tl.float32) + offset
    return w1[None, None, :], w2[None, None, :], w3[None, None, :]


@triton.jit
def _normalised(x1, x2, x3, eps, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """rstd [tokens, heads, 1] and the normalised parts, fp32."""
    a, b, c = x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    squares = tl.sum(a * a + b * b, axis=2)
    if TAIL:
        squares += tl.sum(c * c, axis=2)
    rstd = tl.rsqrt(squares / WIDTH + eps)[:, :, None]
    return rstd, a * rstd, b * rstd, c * rstd


@triton.jit
def _seen(h, x, CASTING: tl.constexpr):
    """What the weight multiplies: llama's casting mode rounds it to the dtype of x."""
    if CASTING == 0:
        h = h.to(x.dtype).to(tl.float32)
    return h


@triton.jit
def _norm_and_turn(x1, x2, x3, w1, w2, w3, trig, eps, WIDTH: tl.constexpr, TAIL: tl.constexpr, CASTING: tl.constexpr):
    _, h1, h2, h3 = _normalised(x1, x2, x3, eps, WIDTH, TAIL)
    y1, y2 = _rotate(_seen(h1, x1, CASTING) * w1, _seen(h2, x2, CASTING) * w2, *trig, False)
    return y1, y2, _seen(h3, x3, CASTING) * w3


@triton.jit
def _gradients(x, dy, w, trig, eps, WIDTH: tl.constexpr, TAIL: tl.constexpr, CASTING: tl.constexpr):
    """dx and the terms of dw of one tile; x, dy and w are three parts each."""
    rstd, h1, h2, h3 = _normalised(x[0], x[1], x[2], eps, WIDTH, TAIL)
    g1, g2 = _rotate(dy[0].to(tl.float32), dy[1].to(tl.float32), *trig, True)
    m1, m2 = g1 * w[0], g2 * w[1]
    dot = tl.sum(m1 * h1 + m2 * h2, axis=2)
    dx3 = h3
    dw3 = h3
    if TAIL:
        g3 = dy[2].to(tl.float32)
        m3 = g3 * w[2]
        dot += tl.sum(m3 * h3, axis=2)
        dw3 = g3 * _seen(h3, x[2], CASTING)
    dot = (dot / WIDTH)[:, :, None]
    if TAIL:
        dx3 = rstd * (m3 - h3 * dot)
    dx1, dx2 = rstd * (m1 - h1 * dot), rstd * (m2 - h2 * dot)
    return dx1, dx2, dx3, g1 * _seen(h1, x[0], CASTING), g2 * _seen(h2, x[1], CASTING), dw3


@triton.jit
def _add_up(DW_ptr, dw1, dw2, dw3, HALF: tl.constexpr, TAIL: tl.constexpr):
    cols = tl.arange(0, dw1.shape[2])
    tl.store(DW_ptr + cols, tl.sum(tl.sum(dw1, axis=0), axis=0), mask=cols < HALF)
    tl.store(DW_ptr + cols + HALF, tl.sum(tl.sum(dw2, axis=0), axis=0), mask=cols < HALF)
    if TAIL:
        tail = tl.arange(0, dw3.shape[2])
        tl.store(DW_ptr + tail + 2 * HALF, tl.sum(tl.sum(dw3, axis=0), axis=0), mask=tail < TAIL)


@triton.jit(do_not_specialize=["n_tokens", "seq_len", "n_head_tiles", "n_tiles"])
def _qk_norm_rope_fwd_kernel(
    Q_ptr,
    K_ptr,
    WQ_ptr,
    WK_ptr,
    Cos_ptr,
    Sin_ptr,
    OutQ_ptr,
    OutK_ptr,
    Q_batch_stride,
    Q_head_stride,
    Q_token_stride,
    K_batch_stride,
    K_head_stride,
    K_token_stride,
    OutQ_batch_stride,
    OutQ_head_stride,
    OutQ_token_stride,
    OutK_batch_stride,
    OutK_head_stride,
    OutK_token_stride,
    cos_batch_stride,
    cos_token_stride,
    n_tokens,
    seq_len,
    n_q_heads,
    n_k_heads,
    n_head_tiles,
    n_tiles,
    eps,
    offset,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRIG: tl.constexpr,
    ALIGN: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * HALF + TAIL
    wq1, wq2, wq3 = _load_weight(WQ_ptr, offset, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL)
    wk1, wk2, wk3 = _load_weight(WK_ptr, offset, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        tokens = (tile // n_head_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
        q_heads = (tile % n_head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        k_heads = (tile % n_head_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
        batch = (tokens // seq_len).to(tl.int64)
        token = (tokens % seq_len).to(tl.int64)
        token_mask = (tokens < n_tokens)[:, None, None]
        q_mask = token_mask & (q_heads < n_q_heads)[None, :, None]
        k_mask = token_mask & (k_heads < n_k_heads)[None, :, None]
        ptrs = Q_ptr + row_offsets(batch, token, q_heads, Q_batch_stride, Q_head_stride, Q_token_stride, ALIGN)
        q1, q2, q3 = _load_head(ptrs, q_mask, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL, LOAD_CACHE, LOAD_EVICT)
        ptrs = K_ptr + row_offsets(batch, token, k_heads, K_batch_stride, K_head_stride, K_token_stride, ALIGN)
        k1, k2, k3 = _load_head(ptrs, k_mask, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL, LOAD_CACHE, LOAD_EVICT)
        angles = (batch * cos_batch_stride + token * cos_token_stride)[:, None, None]
        trig = load_angles(Cos_ptr, Sin_ptr, angles, token_mask, HALF, BLOCK_HALF, TRIG)

        y1, y2, y3 = _norm_and_turn(q1, q2, q3, wq1, wq2, wq3, trig, eps, WIDTH, TAIL, CASTING)
        out = OutQ_ptr + row_offsets(
            batch, token, q_heads, OutQ_batch_stride, OutQ_head_stride, OutQ_token_stride, ALIGN
        )
        _store_head(out, y1, y2, y3, q_mask, HALF, TAIL)
        y1, y2, y3 = _norm_and_turn(k1, k2, k3, wk1, wk2, wk3, trig, eps, WIDTH, TAIL, CASTING)
        out = OutK_ptr + row_offsets(
            batch, token, k_heads, OutK_batch_stride, OutK_head_stride, OutK_token_stride, ALIGN
        )
        _store_head(out, y1, y2, y3, k_mask, HALF, TAIL)


@triton.jit(do_not_specialize=["n_tokens", "seq_len", "n_head_tiles", "n_tiles"])
def _qk_norm_rope_bwd_kernel(
    DQ_ptr,
    DK_ptr,
    Q_ptr,
    K_ptr,
    WQ_ptr,
    WK_ptr,
    Cos_ptr,
    Sin_ptr,
    OutQ_ptr,
    OutK_ptr,
    DW_ptr,
    DQ_batch_stride,
    DQ_head_stride,
    DQ_token_stride,
    DK_batch_stride,
    DK_head_stride,
    DK_token_stride,
    Q_batch_stride,
    Q_head_stride,
    Q_token_stride,
    K_batch_stride,
    K_head_stride,
    K_token_stride,
    OutQ_batch_stride,
    OutQ_head_stride,
    OutQ_token_stride,
    OutK_batch_stride,
    OutK_head_stride,
    OutK_token_stride,
    cos_batch_stride,
    cos_token_stride,
    n_tokens,
    seq_len,
    n_q_heads,
    n_k_heads,
    n_head_tiles,
    n_tiles,
    eps,
    offset,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRIG: tl.constexpr,
    ALIGN: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """OutQ, OutK: the gradients of q and k. DW_ptr: one fp32 row [dwq, dwk] a program, or None when none is wanted.

    1 / rms is computed again from x, which is here anyway: nothing but the inputs is saved.
    """
    WIDTH: tl.constexpr = 2 * HALF + TAIL
    wq = _load_weight(WQ_ptr, offset, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL)
    wk = _load_weight(WK_ptr, offset, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL)
    dwq1 = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_HALF], dtype=tl.float32)
    dwq2 = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_HALF], dtype=tl.float32)
    dwq3 = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_TAIL], dtype=tl.float32)
    dwk1 = tl.zeros([BLOCK_T, BLOCK_K, BLOCK_HALF], dtype=tl.float32)
    dwk2 = tl.zeros([BLOCK_T, BLOCK_K, BLOCK_HALF], dtype=tl.float32)
    dwk3 = tl.zeros([BLOCK_T, BLOCK_K, BLOCK_TAIL], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        tokens = (tile // n_head_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
        q_heads = (tile % n_head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        k_heads = (tile % n_head_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
        batch = (tokens // seq_len).to(tl.int64)
        token = (tokens % seq_len).to(tl.int64)
        token_mask = (tokens < n_tokens)[:, None, None]
        q_mask = token_mask & (q_heads < n_q_heads)[None, :, None]
        k_mask = token_mask & (k_heads < n_k_heads)[None, :, None]
        ptrs = Q_ptr + row_offsets(batch, token, q_heads, Q_batch_stride, Q_head_stride, Q_token_stride, ALIGN)
        q = _load_head(ptrs, q_mask, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL, LOAD_CACHE, LOAD_EVICT)
        ptrs = DQ_ptr + row_offsets(batch, token, q_heads, DQ_batch_stride, DQ_head_stride, DQ_token_stride, ALIGN)
        dq = _load_head(ptrs, q_mask, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL, LOAD_CACHE, LOAD_EVICT)
        ptrs = K_ptr + row_offsets(batch, token, k_heads, K_batch_stride, K_head_stride, K_token_stride, ALIGN)
        k = _load_head(ptrs, k_mask, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL, LOAD_CACHE, LOAD_EVICT)
        ptrs = DK_ptr + row_offsets(batch, token, k_heads, DK_batch_stride, DK_head_stride, DK_token_stride, ALIGN)
        dk = _load_head(ptrs, k_mask, HALF, TAIL, BLOCK_HALF, BLOCK_TAIL, LOAD_CACHE, LOAD_EVICT)
        angles = (batch * cos_batch_stride + token * cos_token_stride)[:, None, None]
        trig = load_angles(Cos_ptr, Sin_ptr, angles, token_mask, HALF, BLOCK_HALF, TRIG)

        dx1, dx2, dx3, dw1, dw2, dw3 = _gradients(q, dq, wq, trig, eps, WIDTH, TAIL, CASTING)
        out = OutQ_ptr + row_offsets(
            batch, token, q_heads, OutQ_batch_stride, OutQ_head_stride, OutQ_token_stride, ALIGN
        )
        _store_head(out, dx1, dx2, dx3, q_mask, HALF, TAIL)
        if DW_ptr is not None:
            dwq1 += dw1
            dwq2 += dw2
            if TAIL:
                dwq3 += dw3
        dx1, dx2, dx3, dw1, dw2, dw3 = _gradients(k, dk, wk, trig, eps, WIDTH, TAIL, CASTING)
        out = OutK_ptr + row_offsets(
            batch, token, k_heads, OutK_batch_stride, OutK_head_stride, OutK_token_stride, ALIGN
        )
        _store_head(out, dx1, dx2, dx3, k_mask, HALF, TAIL)
        if DW_ptr is not None:
            dwk1 += dw1
            dwk2 += dw2
            if TAIL:
                dwk3 += dw3
    if DW_ptr is not None:
        row = DW_ptr + tl.program_id(0).to(tl.int64) * (2 * WIDTH)
        _add_up(row, dwq1, dwq2, dwq3, HALF, TAIL)
        _add_up(row + WIDTH, dwk1, dwk2, dwk3, HALF, TAIL)
