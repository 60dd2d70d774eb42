"""Rotary position embedding of vision towers such as Qwen2-VL's: half-split, over the packed patches of all images.

    q'[:h] = q[:h] * cos[:h] - q[h:] * sin[:h]        h = D // 2
    q'[h:] = q[h:] * cos[h:] + q[:h] * sin[h:]        k likewise

q and k may be slices of one projection. Dimensions from the width of cos on pass through. cos and sin are usually fp32.
Layouts, arithmetic, output and saved tensors are as in rope.py.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample
from ...runtime.operator import Function, check, check_flags, check_tensors, first_order, no_view
from .rotary import HALVES, SHARED, SMALL, Form, Rotary, check_no_gradient, rotated

_HEAD_AXIS = 2


def vision_rope_reference(q, k, cos, sin, shared_halves=False):
    options = cos[None], sin[None], cos.shape[-1], _HEAD_AXIS, _form(shared_halves)
    return rotated(q[None], *options)[0], rotated(k[None], *options)[0]


def _form(shared_halves: bool) -> Form:
    return Form(angles=SHARED if shared_halves else HALVES)


_rotary = Rotary("vision_rope", flat=True)


class VisionRopeFunction(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, shared_halves):
        layout = cos.shape[-1], _HEAD_AXIS, _form(shared_halves)
        q, k = _rotary.forward(ctx, q[None], k[None], cos[None], sin[None], *layout)
        return no_view(q, q.shape[1:]), no_view(k, k.shape[1:])

    @staticmethod
    @first_order
    def backward(ctx, dq, dk):
        grads = (None if grad is None else grad[None] for grad in (dq, dk))
        dq, dk = _rotary.backward(ctx, *grads)
        return None if dq is None else dq[0], None if dk is None else dk[0], None, None, None


def liger_vision_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shared_halves: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by the angles of their patches, like `apply_rotary_pos_emb_vision` of Qwen2-VL.

    q: [T, n_q_heads, D], k: [T, n_k_heads, D] in fp32, fp16 or bf16; cos, sin: [T, width], width <= D, no gradients.
    shared_halves: both halves of cos and of sin are equal, and only the first is read.
    Returns new tensors of q's and k's shapes and dtypes. Raises `ValueError` for arguments that do not fit.
    """
    check_tensors("liger_vision_rope", q=q, k=k, cos=cos, sin=sin)
    if reason := _misfit(q.shape, k.shape, cos.shape, sin.shape):
        check(False, "liger_vision_rope", reason)
    check_no_gradient("liger_vision_rope", cos, sin)
    check_flags("liger_vision_rope", shared_halves=shared_halves)
    return VisionRopeFunction.apply(q, k, cos, sin, shared_halves)


def _misfit(q, k, cos, sin) -> str:
    if len(q) != 3 or len(k) != 3:
        return f"q and k must be [T, heads, D], got {tuple(q)} and {tuple(k)}"
    if cos != sin or len(cos) != 2 or cos[0] != q[0]:
        return f"cos and sin must both be [{q[0]}, width], got {tuple(cos)} and {tuple(sin)}"
    return ""


liger_rotary_pos_emb_vision = liger_vision_rope  # Liger's name


WORKLOADS = {"qwen2_5_vl": (16, 1024, 16, 16, 80), "qwen3_vl": (16, 1024, 16, 16, 72)}
"""(images, patches of each, n_q_heads, n_k_heads, head_dim)"""


def sample(sizes, dtype, device, generator, *, shared=True) -> Sample:
    """q and k are slices of one projection."""
    batch, seq_len, n_q_heads, n_k_heads, head_dim = sizes
    tokens, heads = batch * seq_len, n_q_heads + n_k_heads
    qkv = torch.randn(tokens, heads, head_dim, generator=generator, dtype=torch.float32, device=device).to(dtype)
    q, k = qkv[:, :n_q_heads].requires_grad_(), qkv[:, n_q_heads:].requires_grad_()
    half = max(1, head_dim // 2)
    angles = torch.rand(tokens, half, generator=generator, dtype=torch.float32, device=device) * 6.2832
    angles = torch.cat((angles, angles), -1)
    return Sample(
        args=(q, k, angles.cos(), angles.sin()),
        kwargs={"shared_halves": shared},
        reduction=2,
        grad_reduction=2,
        moved=4 * tokens * heads * head_dim * dtype.itemsize,
    )


OP = registry.register_file(
    __name__, tunables=_rotary.tunables, small=(*SMALL, (1, 5, 3, 2, 7)), options=({}, {"shared": False})
)
