"""Inputs of a linear head: the checks that its losses share, and random ones for their samples."""

from __future__ import annotations

from typing import Any

import torch

from ...registry import Sample, normal
from ...runtime.operator import autocast_dtype, check, check_tensors, to_flatten
from ..losses.cross_entropy import sample_targets


def checked_head(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    names: tuple[str, str, str] = ("input", "weight", "bias"),
    rows: str = "n_rows",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [rows, hidden], weight [vocab, hidden] and bias [vocab] or None, cast to autocast's dtype where it is on.

    Under torch.no_grad they are detached, so that a Function's forward computes no gradients.

    names: what the caller calls them; rows: names of the leading dimensions of x ("batch, length")
    Raises `TypeError` for an argument that is not a tensor, `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_tensors(op, optional=names[2:], **dict(zip(names, (x, weight, bias))))
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():
        x, weight, bias = x.detach(), weight.detach(), bias if bias is None else bias.detach()
    dims = 2 + rows.count(",")
    if x.dim() != dims or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not weight.numel():
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        expected = f"{names[0]} must be [{rows}, hidden] and {names[1]} [vocab, hidden]"
        check(False, op, f"{expected}, got {got}{_misfit(x, weight, dims, names)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        pairs = [(name, str(t.dtype)) for name, t in zip(names, (x, weight, bias)) if t is not None]
        present, dtypes = (", ".join(words) for words in zip(*pairs))
        check(False, op, f"{present} must share one dtype, got {dtypes}; cast them or use autocast")
    if bias is not None and bias.shape != weight.shape[:1]:
        check(False, op, f"{names[2]} must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    return x, weight, bias


def _misfit(x: torch.Tensor, weight: torch.Tensor, dims: int, names: tuple[str, ...]) -> str:
    """What the shapes look like, and what to do; "" where that is not clear."""
    if x.dim() == 2 and weight.dim() == max(3, dims) and x.shape[1] == weight.shape[-1]:
        return f": {names[0]} and {names[1]} are swapped"
    if x.dim() == 3 and dims == 2 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]:
        return to_flatten(**{names[0]: x})
    if x.dim() == dims and weight.dim() == 2 and x.shape[-1] == weight.shape[0]:
        return f": {names[1]} is transposed, pass {names[1]}.T"
    return ""


def sums_in_fp32(op: str, accum_dtype: torch.dtype | None, weight: torch.Tensor) -> bool:
    """Whether `accum_dtype` asks for an fp32 buffer that the weight's own dtype is not."""
    if accum_dtype not in (None, torch.float32, weight.dtype):
        check(False, op, f"accum_dtype must be None, torch.float32 or the weight's dtype, got {accum_dtype}")
    return accum_dtype is torch.float32 and weight.dtype.itemsize < 4


def random_head(sizes, dtype, device, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n_rows, hidden] and weight [vocab, hidden] whose logits are of unit variance; leaves with gradients."""
    n_rows, hidden, vocab = sizes
    draw = normal(torch.float32, device, generator)
    x, weight = draw(n_rows, hidden).detach(), draw(vocab, hidden).detach() * hidden**-0.5
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def sample_head(
    sizes, dtype, device, generator, *, passes: tuple[int, int], ignored=0.1, biased=False, frozen=False, **options: Any
) -> Sample:
    """A `Sample` (x, weight, target, bias or None) for a loss with targets, of which a share `ignored` is -100.

    passes: reads and writes of x and of the weight; frozen: the weight has no gradient
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
