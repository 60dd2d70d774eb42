"""Rotary position embedding over interleaved pairs, as in GPT-J, GLM, Cohere and DeepSeek: (x0, x1), (x2, x3), ...

    q'[2i]     = q[2i] * cos[2i] - q[2i+1] * sin[2i]            2i < rotary_dim
    q'[2i + 1] = q[2i+1] * cos[2i+1] + q[2i] * sin[2i+1]        dimensions from rotary_dim on pass through; k likewise

Layouts, arithmetic, output and saved tensors are as in rope.py.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample
from . import rope
from .rope import check_rope, rope_angles
from .rotary import PAIRS, SMALL, Form, Rotary, RotaryFunction, rotated


def interleaved_rope_reference(
    q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False, to_halves=False
):
    rotary_dim, angles = rope_angles(cos, rotary_dim, shared_halves, unshared=PAIRS)
    options = cos, sin, rotary_dim, unsqueeze_dim, Form(True, not to_halves, angles)
    return rotated(q, *options), rotated(k, *options)


class InterleavedRopeFunction(RotaryFunction):
    core = Rotary("interleaved_rope")


def liger_interleaved_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    shared_halves: bool = False,
    to_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by the angles of their tokens, over interleaved pairs.

    q: [B, n_q_heads, T, D], k: [B, n_k_heads, T, D]; with unsqueeze_dim=2 [B, T, heads, D]. fp32, fp16 or bf16.
    cos, sin: [1 or B, T, width]. No gradients. position_ids: ignored, as for `liger_rope`.
    rotary_dim: the number of dimensions that rotate (default: width). If width is rotary_dim, each element has an angle
    (Cohere); if width is rotary_dim // 2, each pair has one (GPT-J).
    shared_halves: width is rotary_dim with two equal halves (GLM, Ernie, Helium, DeepSeek); pair i uses column i.
    to_halves: in the result, first elements of pairs form the first half, second elements the second (DeepSeek-V3).
    Returns new tensors of q's and k's shapes and dtypes, laid out as by `liger_rope`. Raises `ValueError` for shapes,
    dtypes or devices that do not fit, and for cos or sin that require a gradient.
    """
    flags = {"shared_halves": shared_halves, "to_halves": to_halves}
    check_rope("liger_interleaved_rope", q, k, cos, sin, unsqueeze_dim, rotary_dim, **flags)
    rotary_dim, angles = rope_angles(cos, rotary_dim, shared_halves, unshared=PAIRS)
    form = Form(True, not to_halves, angles)
    return InterleavedRopeFunction.apply(q, k, cos, sin, rotary_dim, unsqueeze_dim, form)


WORKLOADS = {"glm4_9b": (4, 4096, 32, 2, 128), "command_r_35b": (2, 4096, 64, 64, 128)}


def sample(sizes, dtype, device, generator, *, to_halves=False, **options) -> Sample:
    """The sample of rope; its cos and sin have two equal halves, as in GLM."""
    sample = rope.sample(sizes, dtype, device, generator, **options)
    if not options.get("narrow"):
        sample.kwargs["shared_halves"] = options.get("shared", True)
    sample.kwargs["to_halves"] = to_halves
    return sample


OP = registry.register_file(
    __name__,
    tunables=InterleavedRopeFunction.core.tunables,
    small=SMALL,
    options=({}, {"to_halves": True, "narrow": True, "partial": True}),
)
