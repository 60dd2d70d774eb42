"""A linear head and its gradients in plain torch, and random inputs (`Sample`) for its losses."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.nn.functional as F

from ...registry import Sample, normal
from ..losses.cross_entropy import sample_targets
from ..losses.cross_entropy_rows import absent


def reference_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A head's logits in differentiable torch, rounded to x's dtype. A bias is added afterwards, in fp32 or fp64."""
    logits = F.linear(x, weight)
    if bias is None:
        return logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide) + bias.expand_as(logits).to(wide)  # cast after expanding: dbias sums rounded dlogits


def unrounded_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A head's logits in differentiable torch, in fp32 or fp64. Their gradient is rounded to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide))
    if logits.requires_grad and x.dtype != wide:
        logits.register_hook(lambda gradient: gradient.to(x.dtype).to(wide))
    return logits


def reference_gradients(
    dlogits: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`HeadGradients.results` in plain torch. dlogits: [n_rows, vocab], rounded here to x's dtype, or None."""
    dx, dweight, dbias = needs
    rounded = dlogits if dlogits is None else dlogits.to(x.dtype)
    return (
        rounded @ weight if dx else absent(x),
        rounded.t() @ x if dweight else absent(x),
        rounded.sum(0, dtype=dlogits.dtype).to(bias.dtype) if dbias else absent(x),
    )


def fake_gradients(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Uninitialised `HeadGradients.results`, for an operator's fake."""
    inputs = x, weight, weight[:, 0] if bias is None else bias
    return tuple(t.new_empty(t.shape) if is_needed else absent(x) for t, is_needed in zip(inputs, needs))


def random_head(sizes, dtype, device, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n_rows, hidden] and weight [vocab, hidden], which require gradients and whose logits have unit variance."""
    n_rows, hidden, vocab = sizes
    draw = normal(torch.float32, device, generator)
    x, weight = draw(n_rows, hidden).detach(), draw(vocab, hidden).detach() * hidden**-0.5
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def sample_head(
    sizes, dtype, device, generator, *, passes: tuple[int, int], ignored=0.1, biased=False, frozen=False, **options: Any
) -> Sample:
    """A `Sample` (x, weight, target, bias or None) for a loss with targets; the fraction `ignored` of them is -100.

    passes: how often x and the weight are read or written; frozen: the weight has no gradient
    """
    n_rows, hidden, vocab = sizes
    x, weight = random_head(sizes, dtype, device, generator)
    bias = normal(dtype, device, generator)(vocab) if biased else None
    target = sample_targets(n_rows, vocab, device, generator, ignored)
    return Sample(
        args=(x, weight.requires_grad_(not frozen), target, bias),
        kwargs=options,
        reduction=max(hidden, vocab),
        grad_reduction=max(n_rows, hidden, vocab),
        moved=(passes[0] * n_rows * hidden + passes[1] * vocab * hidden) * dtype.itemsize,
    )
