"""Kernels of qk_norm_rope; the formulas are in qk_norm_rope.py.

The first n_q_programs programs work on q, the others on k. A tile is BLOCK_H heads x BLOCK_T tokens, with heads as its
first dimension. If a program has threads for all its tokens, each thread holds all heads of its columns, so that cos,
sin, weights and their gradients are not exchanged through shared memory. Programs of the forward loop over the heads of
their tokens; programs of the backward, a persistent grid, loop over tiles.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.triton_import import tl, triton
from .rotary_kernels import AngleStrides, Strides, load_angles, load_heads, rotate, row_offsets, store_heads


class ForwardStrides(NamedTuple):
    """x, out: strides of (q, k) and of their outputs."""

    x: tuple[Strides, Strides]
    out: tuple[Strides, Strides]
    cos: AngleStrides


class BackwardStrides(NamedTuple):
    dy: tuple[Strides, Strides]
    x: tuple[Strides, Strides]
    out: tuple[Strides, Strides]
    cos: AngleStrides


@triton.jit
def _load_weight(W_ptr, offset, HEAD: tl.constexpr, BLOCK_T: tl.constexpr):
    """offset + w for (x1, x2, x3) of `load_heads`, in fp32 [1, BLOCK_T, columns], repeated for each token."""
    token_zeros = (tl.arange(0, BLOCK_T) * 0)[None, :, None]
    cols = tl.arange(0, HEAD.block_half)[None, None, :] + token_zeros
    w1 = tl.load(W_ptr + cols, mask=cols < HEAD.half, other=0.0).to(tl.float32) + offset
    w2 = tl.load(W_ptr + cols + HEAD.half, mask=cols < HEAD.half, other=0.0).to(tl.float32) + offset
    w3 = w1
    if HEAD.pass_through:
        passing = tl.arange(0, HEAD.block_pass)[None, None, :] + token_zeros
        w3 = (
            tl.load(W_ptr + passing + 2 * HEAD.half, mask=passing < HEAD.pass_through, other=0.0).to(tl.float32)
            + offset
        )
    return w1, w2, w3


@triton.jit
def _normalised(x1, x2, x3, eps, HEAD: tl.constexpr):
    """(rstd [heads, tokens, 1], normalised x1, x2, x3) in fp32."""
    a, b, c = x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    squares = tl.sum(a * a + b * b, axis=2)
    if HEAD.pass_through:
        squares += tl.sum(c * c, axis=2)
    rstd = tl.rsqrt(squares / (2 * HEAD.half + HEAD.pass_through) + eps)[:, :, None]
    return rstd, a * rstd, b * rstd, c * rstd


@triton.jit
def _rounded(h, x, CASTING: tl.constexpr):
    """h, rounded to x's dtype if CASTING is llama (0)."""
    if CASTING == 0:
        h = h.to(x.dtype).to(tl.float32)
    return h


@triton.jit
def _store_dw(DW_ptr, dw1, dw2, dw3, HEAD: tl.constexpr):
    """Sum dw1, dw2, dw3 [tokens, columns] over tokens, and store the sums as one row at DW_ptr."""
    cols = tl.arange(0, dw1.shape[1])
    tl.store(DW_ptr + cols, tl.sum(dw1, axis=0), mask=cols < HEAD.half)
    tl.store(DW_ptr + cols + HEAD.half, tl.sum(dw2, axis=0), mask=cols < HEAD.half)
    if HEAD.pass_through:
        passing = tl.arange(0, dw3.shape[1])
        tl.store(DW_ptr + passing + 2 * HEAD.half, tl.sum(dw3, axis=0), mask=passing < HEAD.pass_through)


@triton.jit
def _pointer(is_k, Q_ptr, K_ptr):
    if is_k:
        X_ptr = K_ptr
    else:
        X_ptr = Q_ptr
    return X_ptr


@triton.jit
def _number(is_k, for_q, for_k):
    """for_k if is_k else for_q. A branch would fail if Triton specialises one of them to a constant."""
    return for_q + is_k.to(tl.int64) * (for_k - for_q)


@triton.jit
def _strides(is_k, pair):
    """The second `Strides` of the pair if is_k, else the first."""
    q, k = pair[0], pair[1]
    return Strides(_number(is_k, q.batch, k.batch), _number(is_k, q.head, k.head), _number(is_k, q.token, k.token))


@triton.jit(do_not_specialize=["n_tokens", "seq_len", "n_q_programs"])
def _qk_norm_rope_fwd_kernel(
    Q_ptr,
    K_ptr,
    WQ_ptr,
    WK_ptr,
    Cos_ptr,
    Sin_ptr,
    OutQ_ptr,
    OutK_ptr,
    strides,
    n_tokens,
    seq_len,
    n_heads,
    n_q_programs,
    eps,
    offset,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEADS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
):
    """A program takes HEADS heads of BLOCK_T tokens, BLOCK_H at a time, and loads the next heads before it stores.

    The products of angles and weight, and the divisions for the offsets of a token, are computed once for all heads.
    """
    ALIGN: tl.constexpr = HEAD.align
    is_k = tl.program_id(0) >= n_q_programs
    tile = tl.program_id(0) - is_k.to(tl.int32) * n_q_programs
    X_ptr, Out_ptr = _pointer(is_k, Q_ptr, K_ptr), _pointer(is_k, OutQ_ptr, OutK_ptr)
    n_heads = _number(is_k, n_heads[0], n_heads[1]).to(tl.int32)
    x_strides, out_strides = _strides(is_k, strides.x), _strides(is_k, strides.out)
    n_groups = tl.cdiv(n_heads, HEADS)
    tokens = (tile // n_groups) * BLOCK_T + tl.arange(0, BLOCK_T)
    first_head = (tile % n_groups) * HEADS
    end_head = tl.minimum(n_heads, first_head + HEADS)
    heads = first_head + tl.arange(0, BLOCK_H)
    token_mask = (tokens < n_tokens)[None, :, None]
    mask = token_mask & (heads < end_head)[:, None, None]
    batch, token = (tokens // seq_len).to(tl.int64), (tokens % seq_len).to(tl.int64)
    ptrs = X_ptr + row_offsets(batch, token, heads, x_strides, ALIGN)
    out = Out_ptr + row_offsets(batch, token, heads, out_strides, ALIGN)
    x1, x2, x3 = load_heads(ptrs, mask, HEAD, False, LOAD_HINT)
    w1, w2, w3 = _load_weight(_pointer(is_k, WQ_ptr, WK_ptr), offset, HEAD, BLOCK_T)
    angles = tl.multiple_of(batch * strides.cos.batch + token * strides.cos.token, ALIGN)[None, :, None]
    cos1, cos2, sin1, sin2 = load_angles(Cos_ptr, Sin_ptr, angles, token_mask, HEAD, ANGLES)
    cos1, cos2, sin1, sin2 = cos1 * w1, cos2 * w2, sin1 * w2, sin2 * w1
    step, out_step = tl.multiple_of(BLOCK_H * x_strides.head, ALIGN), tl.multiple_of(BLOCK_H * out_strides.head, ALIGN)
    for _head in tl.range(0, HEADS, BLOCK_H):
        mask = token_mask & (heads < end_head)[:, None, None]
        heads += BLOCK_H
        ptrs += step
        next_mask = token_mask & (heads < end_head)[:, None, None]
        next1, next2, next3 = load_heads(ptrs, next_mask, HEAD, False, LOAD_HINT)
        _, h1, h2, h3 = _normalised(x1, x2, x3, eps, HEAD)
        y1, y2 = rotate(_rounded(h1, x1, CASTING), _rounded(h2, x2, CASTING), cos1, cos2, sin1, sin2, False)
        store_heads(out, y1, y2, _rounded(h3, x3, CASTING) * w3, mask, HEAD, False)
        out += out_step
        x1, x2, x3 = next1, next2, next3


@triton.jit(do_not_specialize=["n_tokens", "seq_len", "n_q_programs"])
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
    strides,
    n_tokens,
    seq_len,
    n_heads,
    n_q_programs,
    eps,
    offset,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
):
    """DQ, DK: gradients of the outputs. OutQ, OutK: gradients of q and k. DW_ptr: fp32 rows [dwq, dwk], or None.

    Program i of q and program i of k share row i of DW. Where only one of them exists, it stores zeros for the other.
    """
    BLOCK_HALF: tl.constexpr = HEAD.block_half  # Triton 3.4 does not accept fields in a shape
    BLOCK_PASS: tl.constexpr = HEAD.block_pass
    ALIGN: tl.constexpr = HEAD.align
    is_k = tl.program_id(0) >= n_q_programs
    first = tl.program_id(0) - is_k.to(tl.int32) * n_q_programs
    programs = tl.where(is_k, tl.num_programs(0) - n_q_programs, n_q_programs)
    DY_ptr, X_ptr = _pointer(is_k, DQ_ptr, DK_ptr), _pointer(is_k, Q_ptr, K_ptr)
    Out_ptr, W_ptr = _pointer(is_k, OutQ_ptr, OutK_ptr), _pointer(is_k, WQ_ptr, WK_ptr)
    n_heads = _number(is_k, n_heads[0], n_heads[1]).to(tl.int32)
    dy_strides = _strides(is_k, strides.dy)
    x_strides = _strides(is_k, strides.x)
    out_strides = _strides(is_k, strides.out)
    n_head_tiles = tl.cdiv(n_heads, BLOCK_H)
    n_tiles = tl.cdiv(n_tokens, BLOCK_T) * n_head_tiles
    WIDTH: tl.constexpr = 2 * HEAD.half + HEAD.pass_through
    w1, w2, w3 = _load_weight(W_ptr, offset, HEAD, BLOCK_T)
    total1 = tl.zeros([BLOCK_T, BLOCK_HALF], dtype=tl.float32)
    total2 = tl.zeros([BLOCK_T, BLOCK_HALF], dtype=tl.float32)
    total3 = tl.zeros([BLOCK_T, BLOCK_PASS], dtype=tl.float32)
    for tile in tl.range(first, n_tiles, programs, num_stages=STAGES):
        tokens = (tile // n_head_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
        heads = (tile % n_head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        token_mask = (tokens < n_tokens)[None, :, None]
        mask = token_mask & (heads < n_heads)[:, None, None]
        batch, token = (tokens // seq_len).to(tl.int64), (tokens % seq_len).to(tl.int64)
        ptrs = X_ptr + row_offsets(batch, token, heads, x_strides, ALIGN)
        x1, x2, x3 = load_heads(ptrs, mask, HEAD, False, LOAD_HINT)
        ptrs = DY_ptr + row_offsets(batch, token, heads, dy_strides, ALIGN)
        dy1, dy2, dy3 = load_heads(ptrs, mask, HEAD, False, LOAD_HINT)
        angles = tl.multiple_of(batch * strides.cos.batch + token * strides.cos.token, ALIGN)[None, :, None]
        cos1, cos2, sin1, sin2 = load_angles(Cos_ptr, Sin_ptr, angles, token_mask, HEAD, ANGLES)
        rstd, h1, h2, h3 = _normalised(x1, x2, x3, eps, HEAD)
        g1, g2 = rotate(dy1.to(tl.float32), dy2.to(tl.float32), cos1, cos2, sin1, sin2, True)
        m1, m2 = g1 * w1, g2 * w2
        dot = tl.sum(m1 * h1 + m2 * h2, axis=2)
        dx3, dw3 = h3, h3  # not used without pass_through, but Triton must see a value
        if HEAD.pass_through:
            g3 = dy3.to(tl.float32)
            m3 = g3 * w3
            dot += tl.sum(m3 * h3, axis=2)
            dw3 = tl.sum(g3 * _rounded(h3, x3, CASTING), axis=0)
        dot = (dot / WIDTH)[:, :, None]
        if HEAD.pass_through:
            dx3 = rstd * (m3 - h3 * dot)
        dw1 = tl.sum(g1 * _rounded(h1, x1, CASTING), axis=0)
        dw2 = tl.sum(g2 * _rounded(h2, x2, CASTING), axis=0)
        out = Out_ptr + row_offsets(batch, token, heads, out_strides, ALIGN)
        store_heads(out, rstd * (m1 - h1 * dot), rstd * (m2 - h2 * dot), dx3, mask, HEAD, False)
        if DW_ptr is not None:
            total1 += dw1
            total2 += dw2
            if HEAD.pass_through:
                total3 += dw3
    if DW_ptr is not None:
        row = DW_ptr + first.to(tl.int64) * (2 * WIDTH)
        _store_dw(row + is_k.to(tl.int32) * WIDTH, total1, total2, total3, HEAD)
        if first >= tl.num_programs(0) - programs:
            other = row + (1 - is_k.to(tl.int32)) * WIDTH
            _store_dw(other, total1 * 0.0, total2 * 0.0, total3 * 0.0, HEAD)
