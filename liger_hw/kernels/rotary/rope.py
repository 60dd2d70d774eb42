"""Rotary position embedding, half-split as in Llama: a pair is one element of the first half and one of the second.

    q'[:h] = q[:h] * cos[:h] - q[h:2h] * sin[:h]        h = rotary_dim // 2
    q'[h:2h] = q[h:2h] * cos[h:] + q[:h] * sin[h:]      dimensions from rotary_dim on pass through; k likewise

Layouts, arithmetic and output: see rotary.py. Saved for backward: cos and sin. Backward is the transposed rotation.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample
from ...runtime.operator import check_flags, check_integers, check_tensors
from ...runtime.sharding import RotaryRule
from .rotary import HALVES, SHARED, Form, Rotary, RotaryFunction, check_no_gradient, rotary_sample, rotated


def rope_reference(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False):
    rotary_dim, angles = rope_angles(cos, rotary_dim, shared_halves)
    options = cos, sin, rotary_dim, unsqueeze_dim, Form(angles=angles)
    return rotated(q, *options), rotated(k, *options)


def rope_angles(cos, rotary_dim, shared_halves, unshared=HALVES):
    """(rotary_dim, layout of the angles). unshared: the layout if each element has an angle."""
    width = cos.shape[-1] if cos.dim() else 0
    rotary_dim = width if rotary_dim is None else rotary_dim
    return rotary_dim, SHARED if shared_halves or width < rotary_dim else unshared


class RopeFunction(RotaryFunction):
    sharding, is_cheap = RotaryRule(), True
    core = Rotary("rope", by_position=16, heads_first=False)


def liger_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    shared_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by their tokens' angles: q * cos + rotate_half(q) * sin, like `apply_rotary_pos_emb` of Llama.

    q: [B, n_q_heads, T, D], k: [B, n_k_heads, T, D]; with unsqueeze_dim=2 [B, T, heads, D]. fp32, fp16 or bf16.
    cos, sin: [1 or B, T, width], also with a head dimension of 1. No gradients.
    position_ids: ignored, as in Liger, because cos and sin have one row for each token.
    rotary_dim: the number of dimensions that rotate (even, default: the width of cos); the others pass through. If the
    width of cos and sin is rotary_dim // 2, both halves use the same angles.
    shared_halves: both halves of cos and of sin are equal, as in most models, and only the first is read.
    Returns new tensors of q's and k's shapes and dtypes; see the top of rotary.py for their layout. Raises `ValueError`
    for shapes, dtypes or devices that do not fit, and for cos or sin that require a gradient.
    """
    check_rope("liger_rope", q, k, cos, sin, unsqueeze_dim, rotary_dim, shared_halves=shared_halves)
    if cos.dim() == 4 and cos.shape == sin.shape and 1 in cos.shape[1:3]:
        head_axis = 1 if cos.shape[1] == 1 else 2
        cos, sin = cos.squeeze(head_axis), sin.squeeze(head_axis)
    rotary_dim, angles = rope_angles(cos, rotary_dim, shared_halves)
    return RopeFunction.apply(q, k, cos, sin, rotary_dim, unsqueeze_dim, Form(angles=angles))


def check_rope(op: str, q, k, cos, sin, unsqueeze_dim, rotary_dim, **flags) -> None:
    """Check all arguments except shapes, which the operator checks."""
    check_tensors(op, q=q, k=k, cos=cos, sin=sin)
    check_no_gradient(op, cos, sin)
    check_integers(op, unsqueeze_dim=unsqueeze_dim, **({} if rotary_dim is None else {"rotary_dim": rotary_dim}))
    check_flags(op, **flags)


WORKLOADS = {
    "mistral_7b": (4, 4096, 32, 8, 128),
    "llama3_8b": (2, 8192, 32, 8, 128),
    "llama3_2_1b": (4, 4096, 32, 8, 64),
    "llama2_7b": (4, 4096, 32, 32, 128),
    "qwen2_7b": (4, 4096, 28, 4, 128),
    "gemma2_2b": (4, 4096, 8, 4, 256),
    "phi3_mini": (4, 4096, 32, 32, 96),
}


def sample(
    sizes, dtype, device, generator, *, unsqueeze_dim=1, transposed=True, partial=False, narrow=False, shared=True
) -> Sample:
    """partial: half the width rotates; narrow: cos and sin have half the width that rotates."""
    _, seq_len, _, _, head_dim = sizes
    rotary_dim = max(2, (head_dim // 2 if partial else head_dim) // 2 * 2)
    frequency = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim)
    angles = torch.arange(seq_len, device=device, dtype=torch.float32)[None, :, None] * frequency
    kwargs = {"unsqueeze_dim": unsqueeze_dim, "shared_halves": shared and not narrow}
    if narrow:
        kwargs |= {"rotary_dim": rotary_dim}
    else:
        angles = torch.cat((angles, angles), -1)
    angles = angles.cos().to(dtype), angles.sin().to(dtype)
    return rotary_sample(sizes, dtype, device, generator, angles, kwargs, unsqueeze_dim, transposed)


OP = registry.register_file(
    __name__,
    tunables=RopeFunction.core.tunables,
    options=(
        {},
        {"unsqueeze_dim": 2, "transposed": False},
        {"transposed": False},
        {"partial": True},
        {"narrow": True},
        {"shared": False},
    ),
)
