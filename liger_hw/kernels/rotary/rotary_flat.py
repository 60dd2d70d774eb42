"""The rotary kernel of head widths that are no power of two; _rotary.py says what it computes.

A tile of whole heads has as many columns as the next power of two: at a width of 72, 44% of them idle. Here a tile is
BLOCK_SIZE places, one after the other, of [tokens, HEADS heads, width], and what a place is paired with is loaded as
well, which the L1 answers: 16-byte accesses, and stores that fill their sectors.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from ...registry import Key, LaunchConfig, Plan, Target
from ...runtime.dependent_launch import begin
from ...runtime.operator import cdiv
from ...runtime.triton_import import tl, triton
from ..pointwise import elementwise as _elementwise
from . import rope
from .rope_kernels import _load

# -- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _places(batch, token, head, lane, batch_stride, head_stride, token_stride, ALIGN: tl.constexpr):
    """Offsets of the places. Strides come as multiples of ALIGN: a hint on a product is lost on the way to some devices."""
    return (batch * batch_stride + head * head_stride + token * token_stride) * ALIGN + lane


@triton.jit
def _partner(lane, HALF: tl.constexpr):
    """From a lane to the other of its pair. (A `where` of two constants costs vectors from Triton 3.8 on.)"""
    return HALF - (lane >= HALF).to(tl.int32) * (2 * HALF)


@triton.jit
def _load_partners(
    ptrs, lane, mask, HALF: tl.constexpr, IS_PAIRS: tl.constexpr, CACHE: tl.constexpr, EVICT: tl.constexpr
):
    """(x, what x is paired with); for pairs the second is x again, which holds both."""
    x = _load(ptrs, mask, CACHE, EVICT)
    y = x
    if not IS_PAIRS:
        y = _load(ptrs + _partner(lane, HALF), mask & (lane < 2 * HALF), CACHE, EVICT)
    return x, y


@triton.jit
def _turn(x, y, cos, sin, turned, IS_PAIRS: tl.constexpr, TAIL: tl.constexpr):
    """The places rotated, in their own dtype; those past the rotary width as they are."""
    if IS_PAIRS:
        x1, x2 = tl.split(tl.reshape(x.to(tl.float32), [x.shape[0] // 2, 2]))
        z = tl.reshape(tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin), [x.shape[0]])
    else:
        z = x.to(tl.float32) * cos + y.to(tl.float32) * sin
    z = z.to(x.dtype)
    if TAIL:
        z = tl.where(turned, z, x)
    return z


@triton.jit(do_not_specialize=["n_tokens", "seq_len"])
def _flat_rotary_kernel(
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
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ALIGN: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    SHARED_HALVES: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """BLOCK_SIZE places of HEADS heads of q and as many of k a program, every load before the first store.

    Strides count ALIGN elements each. HEADS divides the heads of q and of k, which are at most GROUPS times as many. K_ptr may be None. IS_PAIRS: pairs lie
    together, their angles are complex numbers in Cos_ptr; else a pair is (i, i + HALF) and every place has its own cos
    and sin, or with SHARED_HALVES those of its pair's first. SEQUENCES: there is more than one.
    """
    begin(AHEAD)
    WIDTH: tl.constexpr = 2 * HALF + TAIL
    pid = tl.program_id(0)
    first = (pid // GROUPS).to(tl.int64) * BLOCK_SIZE
    first_token = first // (HEADS * WIDTH)
    place = (first - first_token * (HEADS * WIDTH)).to(tl.int32) + tl.arange(0, BLOCK_SIZE)
    lane = place % WIDTH
    group = (pid % GROUPS) * HEADS
    head = (group + (place // WIDTH) % HEADS).to(tl.int64)
    tokens = first_token.to(tl.int32) + place // (HEADS * WIDTH)
    mask = tokens < n_tokens
    q_mask = mask & (group < n_q_heads)
    k_mask = mask & (group < n_k_heads)
    turned = lane < 2 * HALF
    batch, token = tl.zeros_like(tokens).to(tl.int64), tokens.to(tl.int64)
    if SEQUENCES:
        batch, token = (tokens // seq_len).to(tl.int64), (tokens % seq_len).to(tl.int64)

    q_ptrs = Q_ptr + _places(batch, token, head, lane, Q_batch_stride, Q_head_stride, Q_token_stride, ALIGN)
    q, q_partner = _load_partners(q_ptrs, lane, q_mask, HALF, IS_PAIRS, LOAD_CACHE, LOAD_EVICT)
    if K_ptr is not None:
        k_ptrs = K_ptr + _places(batch, token, head, lane, K_batch_stride, K_head_stride, K_token_stride, ALIGN)
        k, k_partner = _load_partners(k_ptrs, lane, k_mask, HALF, IS_PAIRS, LOAD_CACHE, LOAD_EVICT)

    angles = _places(batch, token, head, lane, cos_batch_stride, 0, cos_token_stride, ALIGN)
    inside = mask & turned
    if IS_PAIRS:
        both = tl.load(Cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
        cos, sin = tl.split(tl.reshape(both, [BLOCK_SIZE // 2, 2]))
        if BACKWARD:
            sin = -sin
    else:
        if SHARED_HALVES:
            angles -= (lane >= HALF).to(tl.int32) * HALF
        cos = tl.load(Cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
        sin_ptrs = Sin_ptr + angles
        if BACKWARD and not SHARED_HALVES:  # the transposed rotation: the partner's sin
            sin_ptrs += _partner(lane, HALF)
        sin = tl.load(sin_ptrs, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            sin = tl.where(lane < HALF, sin, -sin)
        else:
            sin = tl.where(lane < HALF, -sin, sin)

    out = OutQ_ptr + _places(batch, token, head, lane, OutQ_batch_stride, OutQ_head_stride, OutQ_token_stride, ALIGN)
    tl.store(out, _turn(q, q_partner, cos, sin, turned, IS_PAIRS, TAIL), mask=q_mask)
    if K_ptr is not None:
        out = OutK_ptr + _places(
            batch, token, head, lane, OutK_batch_stride, OutK_head_stride, OutK_token_stride, ALIGN
        )
        tl.store(out, _turn(k, k_partner, cos, sin, turned, IS_PAIRS, TAIL), mask=k_mask)


KERNELS = (_flat_rotary_kernel, begin, _load_partners, _partner, _places, _turn)

# -- tunables: rope's where the width is a power of two --------------------------------------------------------------


def is_flat(key: Key) -> bool:
    """Whether heads of rope's key go through flat tiles: no power of two, and even, since pairs do not begin at odd places."""
    return key[2] % 2 == 0 and key[2] & (key[2] - 1) != 0


def heuristic(target: Target, key: Key) -> LaunchConfig:
    """1024 places a program and 8 a thread, or half of both where halves are whole 16-byte loads or places are few, 256
    where they are very few.

    On an H200, 16 + 16 heads, a forward and a backward: 79.4 us against 79.9 at 72, 92.6 against 88.2 at 80, where the
    forward of 1024 places loses 4 us (its cos and sin lie a multiple of a mebibyte apart there).
    """
    if not is_flat(key):
        return rope._heuristic(target, key)
    heads, _, width, tokens_bucket, itemsize = key
    places = heads * width << tokens_bucket
    if places <= 16384 * target.multiprocessors:
        block = 256 if places <= 256 * target.multiprocessors else 512
        return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, block // 128, 8))
    block = 512 if width // 2 * itemsize % 16 == 0 else 1024
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, block // 128, 8))


def safe(target: Target, key: Key) -> LaunchConfig:
    return _elementwise.flat_safe(target, key) if is_flat(key) else rope._safe(target, key)


def space(target: Target, key: Key) -> list[LaunchConfig]:
    return _elementwise.flat_space(target, key) if is_flat(key) else rope._space(target, key)


def valid(config: LaunchConfig, key: Key) -> str | None:
    return _elementwise.flat_valid(config, key) if is_flat(key) else rope._valid(config, key)


TUNABLES = {"key": rope._key, "heuristic": heuristic, "safe": safe, "space": space, "valid": valid}


# -- launcher --------------------------------------------------------------------------------------------------------


def numbers(plan: Plan, strides: tuple, sizes: tuple, widths: tuple, flags: tuple) -> tuple[Any, tuple, tuple, tuple]:
    """Kernel, grid, flags and runtime numbers of a launch.

    strides, sizes and widths as rope's `_geometry` has them; flags: IS_PAIRS, SHARED_HALVES, BACKWARD.
    """
    n_tokens, seq_len, n_q_heads, n_k_heads = sizes
    half, tail = widths[:2]
    heads = gcd(n_q_heads, n_k_heads)
    groups = max(n_q_heads, n_k_heads) // heads
    programs = cdiv(n_tokens * heads * (2 * half + tail), plan.config.blocks["BLOCK_SIZE"]) * groups
    align = gcd(8, *strides)
    flags = (half, tail, heads, groups, seq_len < n_tokens, align, *flags)
    return _flat_rotary_kernel, (programs,), flags, (*[stride // align for stride in strides], *sizes)
