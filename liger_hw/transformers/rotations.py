"""What is patched in for a family's rotary function: makers that take the original and return its replacement.

A replacement has the original's own arguments and calls one kernel. A call that the kernel has no form for (no k, a
cache of another length, learned angles, another layout) runs the original.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import torch


def half_split(shared_halves: bool) -> Callable[[Callable], Callable]:
    """Llama's: one half of the width against the other."""
    from .functional import liger_rope

    return _of_q_and_k(lambda q, k, cos, sin, axis: liger_rope(q, k, cos, sin, None, axis, None, shared_halves))


def half_width() -> Callable[[Callable], Callable]:
    """The same with cos and sin that hold one half, shared by both (gpt-oss)."""
    from .functional import liger_rope

    return _of_q_and_k(lambda q, k, cos, sin, axis: liger_rope(q, k, cos, sin, None, axis, 2 * cos.shape[-1]))


def interleaved(shared_halves: bool, to_halves: bool) -> Callable[[Callable], Callable]:
    """Pairs of neighbours (Cohere, GLM, DeepSeek); see kernels/rotary/interleaved_rope.py for the two options."""
    from .functional import liger_interleaved_rope

    return _of_q_and_k(
        lambda q, k, cos, sin, axis: liger_interleaved_rope(q, k, cos, sin, None, axis, None, shared_halves, to_halves)
    )


def _of_q_and_k(kernel: Callable) -> Callable[[Callable], Callable]:
    """For functions of (q, k, cos, sin, [position_ids], unsqueeze_dim=1); position_ids is ignored, as in transformers
    since 4.40: cos and sin are already gathered."""

    def make(original: Callable) -> Callable:
        def turned(q: Any, k: Any, cos: Any, sin: Any, axis: int) -> Any:
            if axis == 0 and cos.dim() == 2:  # one image's patches: [T, width] for every batch and head
                cos, sin, axis = cos[None], sin[None], 1
            return kernel(q, k, cos, sin, axis) if _rotates(q, k, cos, sin, axis) else None

        if "position_ids" in original.__code__.co_varnames[: original.__code__.co_argcount]:

            def rotary(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
                return turned(q, k, cos, sin, unsqueeze_dim) or original(q, k, cos, sin, position_ids, unsqueeze_dim)

        else:

            def rotary(q, k, cos, sin, unsqueeze_dim=1):
                return turned(q, k, cos, sin, unsqueeze_dim) or original(q, k, cos, sin, unsqueeze_dim)

        return rotary

    return make


def _rotates(q: torch.Tensor, k: Any, cos: torch.Tensor, sin: torch.Tensor, axis: int) -> bool:
    """Whether the kernel has a form for these."""
    if k is None or axis not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return False
    tokens = q.shape[3 - axis]
    alike = k.shape[3 - axis] == tokens and k.shape[0] == q.shape[0] and cos.shape[1] == tokens
    return alike and cos.shape[0] in (1, q.shape[0]) and not cos.requires_grad and not sin.requires_grad


def three_axes(shared_halves: bool) -> Callable[[Callable], Callable]:
    """Qwen2-VL's in transformers 4: cos and sin of three position axes, and the sections that belong to each."""
    from .functional import liger_qwen2vl_mrope

    def make(original: Callable) -> Callable:
        def rotary(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
            if cos.requires_grad or q.dim() != 4 or cos.dim() != 4:
                return original(q, k, cos, sin, mrope_section, unsqueeze_dim)
            return liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim, shared_halves)

        return rotary

    return make


def vision(shared_halves: bool) -> Callable[[Callable], Callable]:
    """Packed patches of all images: q and k [T, heads, width], cos and sin [T, width]."""
    from .functional import liger_vision_rope

    def make(original: Callable) -> Callable:
        def rotary(q, k, cos, sin):
            packed = q.dim() == 3 and cos.dim() == 2 and cos.shape[0] == q.shape[0] == k.shape[0]
            if not packed or cos.requires_grad or sin.requires_grad:
                return original(q, k, cos, sin)
            return liger_vision_rope(q, k, cos, sin, shared_halves)

        return rotary

    return make


def complex_angles(tokens_axis: int) -> Callable[[Callable], Callable]:
    """(q, k, angles) with complex angles: q and k [B, T, heads, width] (Llama 4: 1) or [B, heads, T, width]
    (DeepSeek-V2: 2). Angles [B or 1, T, half], or [T, 1, half] in Llama 4's vision tower."""
    from .functional import liger_llama4_rope

    def make(original: Callable) -> Callable:
        def turned(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> Any:
            if q.dim() != 4 or k.dim() != 4 or angles.dim() != 3 or angles.requires_grad:
                return None
            tokens = q.shape[tokens_axis]
            if angles.shape[1] == 1 and angles.shape[0] == tokens != 1:
                angles = angles.transpose(0, 1)
            if k.shape[tokens_axis] != tokens or angles.shape[1] != tokens or angles.shape[0] not in (1, q.shape[0]):
                return None
            angles = angles.to(q.device)
            if tokens_axis == 1:
                return liger_llama4_rope(q, k, angles)
            q, k = liger_llama4_rope(q.transpose(1, 2), k.transpose(1, 2), angles)
            return q.transpose(1, 2), k.transpose(1, 2)

        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def rotary(*args, **kwargs):
            given = *args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)
            found = turned(*given) if len(given) == len(args) + len(kwargs) == 3 else None
            return found or original(*args, **kwargs)

        del rotary.__wrapped__  # what rebind looks for is a decorator around an original that still runs
        return rotary

    return make
