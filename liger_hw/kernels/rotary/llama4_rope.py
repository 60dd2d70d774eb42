"""Rotary position embedding of Llama 4: each interleaved pair is a complex number and is multiplied by another.

    (q'[2i] + j q'[2i+1]) = (q[2i] + j q[2i+1]) * freqs_cis[i]          k likewise; j the imaginary unit

freqs_cis has `half` columns; dimensions from 2 * half on pass through. Layouts, arithmetic and output: see rotary.py.
Saved for backward: freqs_cis, complex64 (complex128 too on the CPU). Backward multiplies by its conjugate.

Source: Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, in the complex form of Meta's Llama code
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample
from ...runtime.operator import check, check_tensors, nested
from .rotary import COMPLEX, SMALL, Form, Rotary, RotaryFunction, check_no_gradient, rotary_sample, rotated

_HEAD_AXIS = 2
_FORM = Form(pairs_in=True, pairs_out=True, angles=COMPLEX)


def llama4_rope_reference(xq, xk, freqs_cis):
    freqs = torch.view_as_real(freqs_cis.resolve_conj())
    options = freqs, None, 2 * freqs_cis.shape[-1], _HEAD_AXIS, _FORM
    return rotated(xq, *options), rotated(xk, *options)


class Llama4RopeFunction(RotaryFunction):
    core = Rotary("llama4_rope", flat=True)


def liger_llama4_rope(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by complex angles over interleaved pairs, like `apply_rotary_emb` of Llama 4's text model.

    xq: [B, T, n_q_heads, D], xk: [B, T, n_k_heads, D] in fp32, fp16 or bf16.
    freqs_cis: [1 or B, T, half] complex, half <= D // 2. No gradient.
    Returns new tensors of their shapes and dtypes. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_tensors("liger_llama4_rope", xq=xq, xk=xk)
    if reason := _angles_misfit(xq, freqs_cis):
        check(False, "liger_llama4_rope", reason)
    check_no_gradient("liger_llama4_rope", freqs_cis)
    freqs = torch.view_as_real(freqs_cis.resolve_conj())
    return Llama4RopeFunction.apply(xq, xk, freqs, None, 2 * freqs_cis.shape[-1], _HEAD_AXIS, _FORM)


def _angles_misfit(xq, freqs_cis) -> str:
    if not isinstance(freqs_cis, torch.Tensor) or not freqs_cis.is_complex():
        dtype = getattr(freqs_cis, "dtype", type(freqs_cis).__name__)
        return f"freqs_cis must be a complex tensor (cos + j sin), got {dtype}"
    if freqs_cis.is_nested:
        return nested("freqs_cis")
    if freqs_cis.device != xq.device:
        return f"freqs_cis is on {freqs_cis.device} but xq is on {xq.device}; move them to one device"
    angles = freqs_cis.shape
    if xq.dim() == 4 and (len(angles) != 3 or angles[0] not in (1, xq.shape[0]) or angles[1] != xq.shape[1]):
        return f"freqs_cis must be [1 or {xq.shape[0]}, {xq.shape[1]}, half] to match xq, got {tuple(angles)}"
    return ""


liger_llama4_text_rotary_pos_emb = liger_llama4_rope  # Liger's name, in Llama 4's text model


def liger_llama4_vision_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, freqs_ci: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`liger_llama4_rope` for the vision tower, with the same freqs_ci for all images.

    query, key: [B, T, heads, D]. freqs_ci: T * D // 2 complex numbers of any shape, on any device.
    """
    check_tensors("liger_llama4_vision_rotary_pos_emb", query=query, key=key)
    if query.dim() == 4 and freqs_ci.numel() == query.shape[1] * (query.shape[3] // 2):
        freqs_ci = freqs_ci.to(query.device).view(1, query.shape[1], query.shape[3] // 2)
    return liger_llama4_rope(query, key, freqs_ci)


WORKLOADS = {"llama4_scout": (4, 4096, 40, 8, 128), "llama4_vision": (16, 577, 16, 16, 88)}


def sample(sizes, dtype, device, generator, *, per_batch=False, partial=False) -> Sample:
    """per_batch: each sequence has its own angles; partial: half the width rotates."""
    batch, seq_len, _, _, head_dim = sizes
    half = max(1, head_dim // 4 if partial else head_dim // 2)
    shape = (batch if per_batch else 1, seq_len, half)
    angles = torch.rand(shape, generator=generator, dtype=torch.float32, device=device) * 6.2832
    freqs_cis = torch.polar(torch.ones_like(angles), angles)
    return rotary_sample(sizes, dtype, device, generator, (freqs_cis,), head_axis=_HEAD_AXIS)


OP = registry.register_file(
    __name__,
    tunables=Llama4RopeFunction.core.tunables,
    small=(*SMALL, (1, 5, 3, 2, 7)),
    options=({}, {"per_batch": True, "partial": True}),
)
