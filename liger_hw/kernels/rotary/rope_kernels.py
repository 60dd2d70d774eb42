"""The kernels of rope; rope.py says what they compute."""

from __future__ import annotations

from ...registry import Key, Plan, next_power_of_2
from ...runtime.dependent_launch import begin, few
from ...runtime.operator import cdiv
from ...runtime.triton_import import tl, triton


@triton.jit
def _rotate(x1, x2, cos1, cos2, sin1, sin2, BACKWARD: tl.constexpr):
    """The rotated halves of a raw tile, in its own dtype."""
    a, b = x1.to(tl.float32), x2.to(tl.float32)
    if BACKWARD:
        y1 = a * cos1 + b * sin2
        y2 = b * cos2 - a * sin1
    else:
        y1 = a * cos1 - b * sin1
        y2 = b * cos2 + a * sin2
    return y1.to(x1.dtype), y2.to(x2.dtype)


@triton.jit
def _offsets(batch, token, heads, batch_stride, head_stride, token_stride):
    """Where each (token, head) begins, [tokens, heads, 1]."""
    rows = batch * batch_stride + token * token_stride
    return rows[:, None, None] + (heads.to(tl.int64) * head_stride)[None, :, None]


@triton.jit
def _load(ptrs, mask, LOAD_CACHE: tl.constexpr, LOAD_EVICT: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)


def few_tokens(key: Key) -> bool:
    """`Tunable.ahead` of rope's key."""
    q_heads, k_heads, head_dim, tokens_bucket, _ = key
    return few((q_heads + k_heads) * head_dim << tokens_bucket)


@triton.jit
def program_of(seq_len, HEAD_TILES: tl.constexpr, APART: tl.constexpr, BLOCK_T: tl.constexpr):
    """(head tile, tokens, the batch of each, each one's place in it) of this program.

    A division by a number of the launch takes as long as a quarter of a small launch. APART: a program's tokens are of one
    batch, which is the grid's second axis; else programs go over the tokens of all batches, one after the other.
    """
    pid = tl.program_id(0)
    tokens = (pid // HEAD_TILES) * BLOCK_T + tl.arange(0, BLOCK_T)
    if APART:
        batch = tl.program_id(1).to(tl.int64)
        token = tokens.to(tl.int64)
    else:
        batch = (tokens // seq_len).to(tl.int64)
        token = (tokens % seq_len).to(tl.int64)
    return pid % HEAD_TILES, tokens, batch, token


@triton.jit
def _angles(Cos_ptr, Sin_ptr, offsets, mask, HALF: tl.constexpr, SHARED_HALVES: tl.constexpr):
    """cos1, cos2, sin1, sin2 in fp32, of the shape of `offsets`."""
    cos1 = tl.load(Cos_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(Sin_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    cos2 = cos1
    sin2 = sin1
    if not SHARED_HALVES:
        cos2 = tl.load(Cos_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
        sin2 = tl.load(Sin_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    return cos1, cos2, sin1, sin2


@triton.jit(do_not_specialize=["n_tokens", "seq_len"])
def _rope_kernel(
    Q_ptr,
    K_ptr,
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
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    APART: tl.constexpr,
    SPREAD: tl.constexpr,
    SHARED_HALVES: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """BLOCK_T tokens x (BLOCK_H heads of q, BLOCK_K heads of k) a program; cos and sin serve all its heads.

    Every load stands before the first store, to keep as many bytes in flight as there are. K_ptr may be None.
    n_tokens: of one batch where programs are APART, else of all.
    """
    begin(AHEAD)
    tile, tokens, batch, token = program_of(seq_len, HEAD_TILES, APART, BLOCK_T)
    q_heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    k_heads = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    token_mask = (tokens < n_tokens)[:, None, None]
    q_mask = token_mask & (q_heads < n_q_heads)[None, :, None]
    k_mask = token_mask & (k_heads < n_k_heads)[None, :, None]
    cols = tl.arange(0, BLOCK_HALF)[None, None, :]
    col_mask = cols < HALF
    tail_cols = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, None, :]
    tail_mask = tail_cols < 2 * HALF + TAIL

    q_ptrs = Q_ptr + _offsets(batch, token, q_heads, Q_batch_stride, Q_head_stride, Q_token_stride)
    q1 = _load(q_ptrs + cols, q_mask & col_mask, LOAD_CACHE, LOAD_EVICT)
    q2 = _load(q_ptrs + cols + HALF, q_mask & col_mask, LOAD_CACHE, LOAD_EVICT)
    if TAIL:
        q3 = _load(q_ptrs + tail_cols, q_mask & tail_mask, LOAD_CACHE, LOAD_EVICT)
    if K_ptr is not None:
        k_ptrs = K_ptr + _offsets(batch, token, k_heads, K_batch_stride, K_head_stride, K_token_stride)
        k1 = _load(k_ptrs + cols, k_mask & col_mask, LOAD_CACHE, LOAD_EVICT)
        k2 = _load(k_ptrs + cols + HALF, k_mask & col_mask, LOAD_CACHE, LOAD_EVICT)
        if TAIL:
            k3 = _load(k_ptrs + tail_cols, k_mask & tail_mask, LOAD_CACHE, LOAD_EVICT)
    trig = (batch * cos_batch_stride + token * cos_token_stride)[:, None, None] + cols
    trig_mask = token_mask & col_mask
    if SPREAD:
        k_trig = tl.broadcast_to(trig, [BLOCK_T, BLOCK_K, BLOCK_HALF])
        trig = tl.broadcast_to(trig, [BLOCK_T, BLOCK_H, BLOCK_HALF])
    cos1, cos2, sin1, sin2 = _angles(Cos_ptr, Sin_ptr, trig, trig_mask, HALF, SHARED_HALVES)
    if SPREAD and K_ptr is not None:
        k_cos1, k_cos2, k_sin1, k_sin2 = _angles(Cos_ptr, Sin_ptr, k_trig, trig_mask, HALF, SHARED_HALVES)
    else:
        k_cos1, k_cos2, k_sin1, k_sin2 = cos1, cos2, sin1, sin2

    out = OutQ_ptr + _offsets(batch, token, q_heads, OutQ_batch_stride, OutQ_head_stride, OutQ_token_stride)
    q1, q2 = _rotate(q1, q2, cos1, cos2, sin1, sin2, BACKWARD)
    tl.store(out + cols, q1, mask=q_mask & col_mask)
    tl.store(out + cols + HALF, q2, mask=q_mask & col_mask)
    if TAIL:
        tl.store(out + tail_cols, q3, mask=q_mask & tail_mask)
    if K_ptr is not None:
        out = OutK_ptr + _offsets(batch, token, k_heads, OutK_batch_stride, OutK_head_stride, OutK_token_stride)
        k1, k2 = _rotate(k1, k2, k_cos1, k_cos2, k_sin1, k_sin2, BACKWARD)
        tl.store(out + cols, k1, mask=k_mask & col_mask)
        tl.store(out + cols + HALF, k2, mask=k_mask & col_mask)
        if TAIL:
            tl.store(out + tail_cols, k3, mask=k_mask & tail_mask)


# -- launch ------------------------------------------------------------------------------------------------------------

_MOST_BATCHES = 65535
"""What a grid's second axis can hold."""


def tiled(
    sizes: tuple[int, ...], plan: Plan, widths: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, int, bool, bool], tuple[int, ...]]:
    """(grid, (BLOCK_K, HEAD_TILES, APART, SPREAD), (n_tokens, seq_len, heads of q, heads of k)) of the kernels.

    Batches are kept apart (see `program_of`) where that leaves few programs' tokens idle. cos and sin are SPREAD, loaded for
    every head and not once for all, where a thread holds 8 elements: it then has what it needs, else they go through
    shared memory. (H200, 32 tokens of 8 + 4 heads x 256: 2.46 us against 2.83; of 16 elements: no gain, or a loss.)
    """
    tokens, seq_len, n_q_heads, n_k_heads = sizes
    config, half = plan.config, widths[2]
    block_t, block_h = config.blocks["BLOCK_T"], config.blocks["BLOCK_H"]
    head_tiles, threads = cdiv(n_q_heads, block_h), config.num_warps * plan.target.warp_size
    spread = block_t * block_h * half <= 4 * threads
    batches, programs = tokens // seq_len, cdiv(seq_len, block_t)
    apart = batches <= _MOST_BATCHES and (batches == 1 or 16 * programs * block_t <= 17 * seq_len)
    tiles = next_power_of_2(cdiv(n_k_heads, head_tiles)), head_tiles, apart, spread
    if apart:
        return (programs * head_tiles, batches), tiles, (seq_len, seq_len, n_q_heads, n_k_heads)
    return (cdiv(tokens, block_t) * head_tiles,), tiles, sizes
