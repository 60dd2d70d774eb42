"""Rotary embeddings beyond rope.py's: interleaved pairs, complex angles, angles of several position axes.

A pair (x1, x2) turns to (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2). Where a pair lies, in the input and in the output:
    halves   x1 = x[i], x2 = x[i + h]        i < h = rotary_dim // 2
    pairs    x1 = x[2i], x2 = x[2i + 1]
and where its angles lie (TRIG):
    SHARED   cos1 = cos2 = cos[i]            one angle a pair
    HALVES   cos1 = cos[i], cos2 = cos[i + h]
    PAIRS    cos1 = cos[2i], cos2 = cos[2i + 1]
    COMPLEX  cos1 = cos2 = freqs[2i], sin1 = sin2 = freqs[2i + 1], from one tensor of complex numbers seen as real ones
With `section` and `sections` the angles have a plane for each of three position axes: i < section takes plane 0, from
there to `sections` plane 1, the rest plane 2. Shapes, layouts, dtypes and what passes through are those of rope.py.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from ...registry import Tunable
from ...runtime.dependent_launch import begin
from ...runtime.operator import check, define, launch
from ...runtime.triton_import import tl, triton
from . import rotary_flat as _rotary_flat
from .rope import (
    _DIMS,
    _dense,
    _empty,
    _geometry,
    _heads_inside,
    _heuristic,
    _key,
    _readable,
    _safe,
    _space,
    _valid,
)
from .rope_kernels import _load, _rotate, few_tokens, program_of, tiled

SHARED, HALVES, PAIRS, COMPLEX = range(4)
SMALL = ((1, 7, 3, 2, 22), (1, 3, 1, 1, 6), (2, 3, 5, 2, 16))
"""Test sizes of the ops here: widths and heads that are no power of two, one token too few, one of everything."""

# -- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def row_offsets(batch, token, heads, batch_stride, head_stride, token_stride, ALIGN: tl.constexpr):
    """Where each (head, token) begins, [heads, tokens, 1]: all multiples of ALIGN elements.

    The hints stand on vectors: one on a tile, whose sizes may all be 1, fails Triton's coalescing pass (3.6 to 3.9).
    """
    rows = tl.multiple_of(batch * batch_stride + token * token_stride, ALIGN)
    return rows[None, :, None] + tl.multiple_of(heads.to(tl.int64) * head_stride, ALIGN)[:, None, None]


@triton.jit
def _load_pairs(
    ptrs,
    mask,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    CACHE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """x1 and x2 of every pair of the rows at `ptrs` [heads, tokens, 1]: [heads, tokens, BLOCK] each, raw."""
    if IS_PAIRS:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = _load(ptrs + both, mask & (both < 2 * HALF), CACHE, EVICT)
        x1, x2 = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], BLOCK, 2]))
    else:
        cols = tl.arange(0, BLOCK)[None, None, :]
        x1 = _load(ptrs + cols, mask & (cols < HALF), CACHE, EVICT)
        x2 = _load(ptrs + cols + HALF, mask & (cols < HALF), CACHE, EVICT)
    return x1, x2


@triton.jit
def _store_pairs(ptrs, x1, x2, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, IS_PAIRS: tl.constexpr):
    if IS_PAIRS:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.reshape(tl.join(x1, x2), [x1.shape[0], x1.shape[1], 2 * BLOCK])
        tl.store(ptrs + both, x, mask=mask & (both < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK)[None, None, :]
        tl.store(ptrs + cols, x1, mask=mask & (cols < HALF))
        tl.store(ptrs + cols + HALF, x2, mask=mask & (cols < HALF))


@triton.jit
def load_angles(Cos_ptr, Sin_ptr, offsets, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, TRIG: tl.constexpr):
    """cos1, cos2, sin1, sin2 as [1, tokens, BLOCK] fp32; `offsets` [1, tokens, 1 or BLOCK]."""
    if TRIG >= 2:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        inside = mask & (both < 2 * HALF)
        cos = tl.load(Cos_ptr + offsets + both, mask=inside, other=0.0).to(tl.float32)
        cos1, cos2 = tl.split(tl.reshape(cos, [cos.shape[0], cos.shape[1], BLOCK, 2]))
        if TRIG == 3:
            sin1 = cos2
            sin2 = cos2
            cos2 = cos1
        else:
            sin = tl.load(Sin_ptr + offsets + both, mask=inside, other=0.0).to(tl.float32)
            sin1, sin2 = tl.split(tl.reshape(sin, [sin.shape[0], sin.shape[1], BLOCK, 2]))
    else:
        cols = tl.arange(0, BLOCK)[None, None, :]
        inside = mask & (cols < HALF)
        cos1 = tl.load(Cos_ptr + offsets + cols, mask=inside, other=0.0).to(tl.float32)
        sin1 = tl.load(Sin_ptr + offsets + cols, mask=inside, other=0.0).to(tl.float32)
        cos2 = cos1
        sin2 = sin1
        if TRIG == 1:
            cos2 = tl.load(Cos_ptr + offsets + cols + HALF, mask=inside, other=0.0).to(tl.float32)
            sin2 = tl.load(Sin_ptr + offsets + cols + HALF, mask=inside, other=0.0).to(tl.float32)
    return cos1, cos2, sin1, sin2


@triton.jit(do_not_specialize=["n_tokens", "seq_len"])
def _rotary_kernel(
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
    cos_plane_stride,
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
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    TRIG: tl.constexpr,
    FIRST_SECTION: tl.constexpr,
    FIRST_SECTIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """BLOCK_T tokens x (BLOCK_H heads of q, BLOCK_K heads of k) a program, every load before the first store.

    Heads are the outermost dimension of a tile: where a program's threads cover its tokens, a thread holds all heads of
    one place, and cos and sin are its own. (With tokens outermost they pass through shared memory.)
    K_ptr may be None. FIRST_SECTION, FIRST_SECTIONS: columns of plane 0, and of planes 0 and 1; 0 where there is one.
    ALIGN: elements that every stride is a multiple of (Triton itself sees only 16).
    """
    begin(AHEAD)
    tile, tokens, batch, token = program_of(seq_len, HEAD_TILES, APART, BLOCK_T)
    q_heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    k_heads = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    token_mask = (tokens < n_tokens)[None, :, None]
    q_mask = token_mask & (q_heads < n_q_heads)[:, None, None]
    k_mask = token_mask & (k_heads < n_k_heads)[:, None, None]
    tail_cols = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, None, :]
    tail_mask = tail_cols < 2 * HALF + TAIL

    q_ptrs = Q_ptr + row_offsets(batch, token, q_heads, Q_batch_stride, Q_head_stride, Q_token_stride, ALIGN)
    q1, q2 = _load_pairs(q_ptrs, q_mask, HALF, BLOCK_HALF, PAIRS_IN, LOAD_CACHE, LOAD_EVICT)
    if TAIL:
        q3 = _load(q_ptrs + tail_cols, q_mask & tail_mask, LOAD_CACHE, LOAD_EVICT)
    if K_ptr is not None:
        k_ptrs = K_ptr + row_offsets(batch, token, k_heads, K_batch_stride, K_head_stride, K_token_stride, ALIGN)
        k1, k2 = _load_pairs(k_ptrs, k_mask, HALF, BLOCK_HALF, PAIRS_IN, LOAD_CACHE, LOAD_EVICT)
        if TAIL:
            k3 = _load(k_ptrs + tail_cols, k_mask & tail_mask, LOAD_CACHE, LOAD_EVICT)
    angles = tl.multiple_of(batch * cos_batch_stride + token * cos_token_stride, ALIGN)[None, :, None]
    if FIRST_SECTIONS:
        cols = tl.arange(0, BLOCK_HALF)
        plane = (cols >= FIRST_SECTION).to(tl.int64) + (cols >= FIRST_SECTIONS).to(tl.int64)
        angles = angles + tl.multiple_of(plane * cos_plane_stride, ALIGN)[None, None, :]
    if SPREAD:
        k_angles = tl.broadcast_to(angles, [BLOCK_K, BLOCK_T, angles.shape[2]])
        angles = tl.broadcast_to(angles, [BLOCK_H, BLOCK_T, angles.shape[2]])
    cos1, cos2, sin1, sin2 = load_angles(Cos_ptr, Sin_ptr, angles, token_mask, HALF, BLOCK_HALF, TRIG)
    if SPREAD and K_ptr is not None:
        k_cos1, k_cos2, k_sin1, k_sin2 = load_angles(Cos_ptr, Sin_ptr, k_angles, token_mask, HALF, BLOCK_HALF, TRIG)
    else:
        k_cos1, k_cos2, k_sin1, k_sin2 = cos1, cos2, sin1, sin2

    out = OutQ_ptr + row_offsets(batch, token, q_heads, OutQ_batch_stride, OutQ_head_stride, OutQ_token_stride, ALIGN)
    q1, q2 = _rotate(q1, q2, cos1, cos2, sin1, sin2, BACKWARD)
    _store_pairs(out, q1, q2, q_mask, HALF, BLOCK_HALF, PAIRS_OUT)
    if TAIL:
        tl.store(out + tail_cols, q3, mask=q_mask & tail_mask)
    if K_ptr is not None:
        out = OutK_ptr + row_offsets(
            batch, token, k_heads, OutK_batch_stride, OutK_head_stride, OutK_token_stride, ALIGN
        )
        k1, k2 = _rotate(k1, k2, k_cos1, k_cos2, k_sin1, k_sin2, BACKWARD)
        _store_pairs(out, k1, k2, k_mask, HALF, BLOCK_HALF, PAIRS_OUT)
        if TAIL:
            tl.store(out + tail_cols, k3, mask=k_mask & tail_mask)


# -- reference -------------------------------------------------------------------------------------------------------


def turned(x, cos, sin, rotary_dim, head_axis, pairs_in, pairs_out, trig, section=0, sections=0, backward=False):
    """One of q and k, turned, in plain torch; computes in fp32, or in fp64 when `x` is fp64."""
    half = rotary_dim // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    if trig == COMPLEX:
        cos, sin = cos[..., 0], cos[..., 1]
    if sections:
        cos, sin = (_one_plane(t, half, section, sections) for t in (cos, sin))
    cos, sin = cos.to(wide).unsqueeze(head_axis), sin.to(wide).unsqueeze(head_axis)
    if trig in (HALVES, PAIRS):
        cos1, cos2, sin1, sin2 = *_parts(cos, half, trig == PAIRS), *_parts(sin, half, trig == PAIRS)
    else:
        cos1, sin1 = cos[..., :half], sin[..., :half]
        cos2, sin2 = cos1, sin1
    x1, x2 = _parts(x[..., :rotary_dim].to(wide), half, pairs_out if backward else pairs_in)
    if backward:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    to_pairs = pairs_in if backward else pairs_out
    y = torch.stack((y1, y2), -1).flatten(-2) if to_pairs else torch.cat((y1, y2), -1)
    return torch.cat((y.to(x.dtype), x[..., rotary_dim:]), -1)


def _parts(t, half, is_pairs):
    return (t[..., 0::2], t[..., 1::2]) if is_pairs else (t[..., :half], t[..., half:])


def _one_plane(t, half, section, sections):
    """[3, B, T, width] -> [B, T, width], each column of the plane its section names."""
    column = torch.arange(t.shape[-1], device=t.device) % half
    plane = (column >= section).long() + (column >= sections).long()
    return t.gather(0, plane.expand(1, *t.shape[1:]))[0]


# -- tunables and operator of an op ----------------------------------------------------------------------------------


class Rotary:
    """The tunables `<op>.fwd`, `<op>.bwd` and the operator `liger_hw::<op>` of a rotary op.

    The operator takes (q, k or None, cos, sin or None, rotary_dim, head_axis, q_inside, k_inside, pairs_in, pairs_out,
    trig, section, sections, backward). cos [1 or B, T, width] (with sections [3, B, T, width], COMPLEX [1 or B, T, half, 2]).
    pairs_in and pairs_out are those of the forward; backward goes the other way.
    flat: heads whose width is even and no power of two go through `_rotary_flat`, which takes halves with HALVES or SHARED,
    or pairs, in and out, with COMPLEX.
    """

    def __init__(self, op: str, flat: bool = False) -> None:
        self.flat = flat
        self.fwd, self.bwd = (_tunable(op, variant, flat) for variant in ("fwd", "bwd"))
        self.operator = define(
            f"{op}(Tensor q, Tensor? k, Tensor cos, Tensor? sin, int rotary_dim, int head_axis, bool q_inside,"
            " bool k_inside, bool pairs_in, bool pairs_out, int trig, int section, int sections, bool backward)"
            " -> (Tensor, Tensor)",
            launcher=self._launch,
            reference=_reference,
            fake=_fake,
        )

    def _launch(self, q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, *how):
        *_, trig, _section, sections, back = how
        q, q_strides = _readable(q)
        k_shape = k_strides = out_k = None
        if k is not None:
            k, k_strides = _readable(k)
            k_shape = k.shape
        cos, sin = readable_angles(cos, sin, trig)
        cos_shape, cos_strides, plane_stride = cos.shape, cos.stride(), 0
        if sections:
            plane_stride, *cos_strides = cos_strides
            cos_shape, cos_strides = cos_shape[1:], tuple(cos_strides)
        geometry = _geometry(
            *(q.shape, q_strides, k_shape, k_strides, cos_shape, cos_strides),
            *(rotary_dim, head_axis, (q_inside, k_inside), 0),  # crossing gains nothing here: H200, 16 to 128 heads
        )
        out_q = _empty(q, geometry.q_strides)
        if k is not None:
            out_k = _empty(k, geometry.k_strides)
        if geometry.tokens:
            plan = (self.bwd if back else self.fwd).plan(q.device, (*geometry.key, q.itemsize))
            name = plan, how, plane_stride
            known = geometry.launches.get(name)
            if known is None:
                known = geometry.launches[name] = self._numbers(geometry, plan, how, plane_stride)
            kernel, grid, flags, numbers = known
            launch(plan, kernel, grid, (q, k, cos, sin, out_q, out_k, *numbers), flags)
        return out_q, q.new_empty(0) if k is None else out_k

    def _numbers(self, geometry, plan, how, plane_stride):
        """Kernel, grid, flags and runtime numbers of a launch."""
        pairs_in, pairs_out, trig, section, sections, back = how
        if self.flat and _rotary_flat.is_flat(plan.key):
            flags = trig == COMPLEX, trig == SHARED, back
            return _rotary_flat.numbers(plan, geometry.strides, geometry.sizes, geometry.widths, flags)
        grid, tiles, sizes = tiled(geometry.sizes, plan, geometry.widths)
        ways = (pairs_out, pairs_in) if back else (pairs_in, pairs_out)
        strides = (*geometry.strides, plane_stride)
        flags = (*geometry.widths, *tiles, *ways, trig, section, sections, alignment(strides), back)
        return _rotary_kernel, grid, flags, (*strides, *sizes)

    def forward(
        self, ctx: Any, q, k, cos, sin, rotary_dim, head_axis, pairs_in, pairs_out, trig, section=0, sections=0
    ):
        """The forward of an op's autograd Function: saves cos and sin."""
        inside = _heads_inside(q, head_axis), _heads_inside(k, head_axis)
        ctx.layout = rotary_dim, head_axis, *inside, pairs_in, pairs_out, trig, section, sections
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)  # an unused q or k costs no tensor of zeros
        return self.operator(q, k, cos, sin, *ctx.layout, False)

    def backward(self, ctx: Any, dq, dk):
        """(dq, dk) of an op's autograd Function."""
        cos, sin = ctx.saved_tensors
        if dq is not None and dk is not None:
            return self.operator(dq, dk, cos, sin, *ctx.layout, True)
        rotary_dim, head_axis, q_inside, k_inside, *how = ctx.layout
        alone, inside = (dk, k_inside) if dq is None else (dq, q_inside)
        if alone is not None:
            alone = self.operator(alone, None, cos, sin, rotary_dim, head_axis, inside, inside, *how, True)[0]
        return (None, alone) if dq is None else (alone, None)


def _tunable(op: str, variant: str, flat: bool) -> Tunable:
    kernels = (_rotary_kernel, program_of, begin, row_offsets, _load_pairs, _store_pairs, load_angles, _rotate, _load)
    how = {"key": _key, "heuristic": _heuristic, "safe": _safe, "space": _space, "valid": _valid}
    if flat:
        kernels, how = kernels + _rotary_flat.KERNELS, _rotary_flat.TUNABLES
    neutral = frozenset({"num_stages", "hint", "num_warps", "BLOCK_T", "BLOCK_H", "BLOCK_SIZE"})
    return Tunable(op, variant, kernels=kernels, dims=_DIMS, neutral=neutral, ahead=few_tokens, **how)


def alignment(strides: tuple[int, ...]) -> int:
    """ALIGN of the kernels here: 8 where every stride is a multiple of it."""
    return 1 if gcd(*strides) & 7 else 8


def readable_angles(cos, sin, trig):
    """cos and sin with contiguous columns and one set of strides; complex ones with contiguous numbers too."""
    if trig == COMPLEX:
        return (cos if cos.stride()[-2:] == (2, 1) else cos.contiguous()), None
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        return cos.contiguous(), sin.contiguous()
    return cos, sin


def _reference(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, *how):
    out_q = _dense(q, head_axis, q_inside).copy_(turned(q, cos, sin, rotary_dim, head_axis, *how))
    if k is None:
        return out_q, q.new_empty(0)
    return out_q, _dense(k, head_axis, k_inside).copy_(turned(k, cos, sin, rotary_dim, head_axis, *how))


def _fake(q, k, cos, sin, rotary_dim, head_axis, q_inside, k_inside, *how):
    return _dense(q, head_axis, q_inside), q.new_empty(0) if k is None else _dense(k, head_axis, k_inside)


# -- what ops check alike --------------------------------------------------------------------------------------------


def misfit(q: torch.Size, k: torch.Size, head_axis: int) -> str:
    """What is wrong with the shapes of q and k and what was expected, or nothing."""
    if type(head_axis) is not int or head_axis not in (1, 2):
        return f"unsqueeze_dim must be 1 ([B, heads, T, D]) or 2 ([B, T, heads, D]), got {head_axis!r}"
    token_axis = 3 - head_axis
    if len(q) != 4 or len(k) != 4 or any(q[axis] != k[axis] for axis in (0, token_axis, 3)):
        return f"q and k must be 4-D and differ in heads only, got {tuple(q)} and {tuple(k)}"
    if not q[head_axis] or not k[head_axis]:
        return f"q and k need at least one head, got {tuple(q)} and {tuple(k)}"
    return ""


def no_gradient(op: str, *angles: torch.Tensor) -> None:
    """Raise where an angle tensor asks for a gradient: it gets none."""
    if torch.is_grad_enabled() and any([t.requires_grad for t in angles]):
        check(False, op, "the angles get no gradient; pass them detached")
