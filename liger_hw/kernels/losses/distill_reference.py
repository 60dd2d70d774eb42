"""The distillation of a row in plain torch: the numbers of one call, both losses, and their slopes.

The formulas are in _distill_rows.py, whose kernel computes the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .divergence_rows import KL, TVD, divergence_slope, divergence_terms

COSINE = 5  # beside the kinds of _divergence_rows.py
_SHORTEST = 1e-8


class Distillation(NamedTuple):
    """The numbers of one call. The weights go into the gradient only; the losses come out apart and unweighted."""

    kind: int
    beta: float = 0.5
    eps: float = 0.0
    temperature: float = 1.0
    ignore_index: int = -100
    soft_weight: float = 1.0
    hard_weight: float = 0.0


def distill_reference(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None, options: Distillation
) -> tuple[torch.Tensor, torch.Tensor]:
    """(soft, hard) of every row in plain differentiable torch, in fp32 (fp64 for fp64); hard is zero without labels.

    teacher: logits, or probabilities for KL
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    s, t, kind = student.to(wide), teacher.to(wide), options.kind
    if kind == COSINE:
        soft = 1 - F.cosine_similarity(s, t, dim=-1, eps=_SHORTEST)
    else:
        x = torch.log_softmax(s / options.temperature, -1)
        y = t if kind == KL else torch.log_softmax(t / options.temperature, -1)
        pair = (x.exp(), y.exp()) if kind == TVD else (x, y)
        soft = divergence_terms(*pair, kind, options.beta, options.eps).sum(-1)
    if labels is None:
        return soft, torch.zeros_like(soft)
    ignored = labels == options.ignore_index
    at = labels.long().masked_fill(ignored, 0)
    hard = -torch.log_softmax(s, -1).gather(1, at[:, None])[:, 0]
    return soft.masked_fill(ignored, 0.0), hard.masked_fill(ignored, 0.0)


def distill_slopes(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None, options: Distillation
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d soft / d logits, d hard / d logits) [n_rows, n_cols] of every row, unweighted; hard is zero without labels.

    The formulas of the kernel, not autograd, which is not there where an operator runs under a dispatch mode.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    s, t, kind = student.to(wide), teacher.to(wide), options.kind
    if kind == COSINE:
        ls, lt = (v.norm(dim=-1, keepdim=True).clamp_min(_SHORTEST) for v in (s, t))
        soft = (s * t).sum(-1, keepdim=True) / (ls * lt) * s / ls.square() - t / (ls * lt)
    else:
        x = torch.log_softmax(s / options.temperature, -1)
        y = t if kind == KL else torch.log_softmax(t / options.temperature, -1)
        q = x.exp()
        g = divergence_slope(q, y.exp(), kind) * q if kind == TVD else divergence_slope(x, y, kind, options.beta)
        soft = (g - q * g.sum(-1, keepdim=True)) / options.temperature
    if labels is None:
        return soft, torch.zeros_like(soft)
    ignored = labels == options.ignore_index
    hard = torch.softmax(s, -1)
    hard.scatter_add_(1, labels.long().masked_fill(ignored, 0)[:, None], -torch.ones_like(hard[:, :1]))
    return soft.masked_fill(ignored[:, None], 0.0), hard.masked_fill(ignored[:, None], 0.0)
