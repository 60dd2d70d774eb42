"""Multimodal rotary position embedding of Qwen2-VL: three position axes (time, height, width) share the rotary width.

Half-split like rope.py, but a token has three sets of angles. The first mrope_section[0] columns of a half use the
angles of time, the next mrope_section[1] columns the angles of height, and the rest the angles of width.

Dimensions from 2 * sum(mrope_section) on pass through. Layouts, arithmetic, output and saved tensors are as in rope.py.
Models that merge the three sets before (Qwen3-VL, and Qwen2-VL in transformers 5) call rope.

Source: Wang et al., "Qwen2-VL", https://arxiv.org/abs/2409.12191
"""

from __future__ import annotations

from typing import Sequence

import torch

from ... import registry
from ...registry import Sample
from ...runtime.operator import check, check_flags, check_integers, check_tensors
from .rotary import HALVES, SHARED, SMALL, Form, Rotary, RotaryFunction, check_no_gradient, rotary_sample, rotated


def qwen2vl_mrope_reference(q, k, cos, sin, mrope_section, unsqueeze_dim=1, shared_halves=False):
    options = cos, sin, 2 * sum(mrope_section), unsqueeze_dim, _form(mrope_section, shared_halves)
    return rotated(q, *options), rotated(k, *options)


def _form(mrope_section: Sequence[int], shared_halves: bool) -> Form:
    time, height, _ = mrope_section
    angles = SHARED if shared_halves else HALVES
    return Form(angles=angles, section_0=time, section_1=time + height)


class Qwen2VLMRopeFunction(RotaryFunction):
    core = Rotary("qwen2vl_mrope")


def liger_qwen2vl_mrope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mrope_section: Sequence[int],
    unsqueeze_dim: int = 1,
    shared_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by the angles of three position axes, like `apply_multimodal_rotary_pos_emb` of Qwen2-VL.

    q: [B, n_q_heads, T, D], k: [B, n_k_heads, T, D]; with unsqueeze_dim=2 [B, T, heads, D]. fp32, fp16 or bf16.
    cos, sin: [3, 1 or B, T, 2 * sum(mrope_section)], one set for each axis. No gradients.
    mrope_section: the columns of a half for time, height and width, such as [16, 24, 24].
    shared_halves: both halves of cos and of sin are equal, and only the first is read.
    Returns new tensors of q's and k's shapes and dtypes. Raises `ValueError` for arguments that do not fit.
    """
    check_tensors("liger_qwen2vl_mrope", q=q, k=k, cos=cos, sin=sin)
    fits = hasattr(mrope_section, "__len__") and len(mrope_section) == 3
    if not fits or any([type(n) is not int or n < 1 for n in mrope_section]):
        expected = "three positive integers (time, height, width)"
        check(False, "liger_qwen2vl_mrope", f"mrope_section must be {expected}, got {mrope_section!r}")
    check_no_gradient("liger_qwen2vl_mrope", cos, sin)
    check_integers("liger_qwen2vl_mrope", unsqueeze_dim=unsqueeze_dim)
    check_flags("liger_qwen2vl_mrope", shared_halves=shared_halves)
    form = _form(mrope_section, shared_halves)
    return Qwen2VLMRopeFunction.apply(q, k, cos, sin, 2 * sum(mrope_section), unsqueeze_dim, form)


liger_multimodal_rotary_pos_emb = liger_qwen2vl_mrope  # Liger's name, in Qwen2-VL's model


WORKLOADS = {"qwen2_5_vl_7b": (4, 4096, 28, 4, 128), "qwen2_vl_72b": (2, 4096, 64, 8, 128)}


def sample(sizes, dtype, device, generator, *, transposed=True, shared=True, one_batch=False) -> Sample:
    """one_batch: all sequences have the same angles."""
    batch, seq_len, _, _, head_dim = sizes
    half = max(3, head_dim // 2)
    sections = [max(1, half // 4), max(1, half * 3 // 8)]
    sections.append(half - sum(sections))
    frequency = 1e6 ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
    shape = (3, 1 if one_batch else batch, seq_len, 1)
    angles = torch.randint(4 * seq_len + 1, shape, generator=generator, device=device) * frequency
    angles = torch.cat((angles, angles), -1)
    angles = angles.cos().to(dtype), angles.sin().to(dtype), sections
    return rotary_sample(sizes, dtype, device, generator, angles, {"shared_halves": shared}, transposed=transposed)


OP = registry.register_file(
    __name__,
    tunables=Qwen2VLMRopeFunction.core.tunables,
    small=SMALL,
    options=({}, {"shared": False}, {"transposed": False, "one_batch": True}),
)
