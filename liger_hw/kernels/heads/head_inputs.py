"""Inputs of a linear head: the checks that its losses share, and random ones for their samples."""

from __future__ import annotations

import torch

from ...runtime.operator import autocast_dtype, check, check_tensors, to_flatten


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
    Raises `TypeError` for what is no tensor, `ValueError` for shapes, dtypes or devices that do not fit.
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
        given = [(name, str(t.dtype)) for name, t in zip(names, (x, weight, bias)) if t is not None]
        given_names, dtypes = (", ".join(words) for words in zip(*given))
        check(False, op, f"{given_names} must share one dtype, got {dtypes}; cast them or use autocast")
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


def random_head(
    n_rows: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n_rows, hidden] and weight [vocab, hidden] whose logits are of unit variance."""
    x = torch.randn(n_rows, hidden, generator=generator, dtype=torch.float32, device=device)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float32, device=device) * hidden**-0.5
    return x.to(dtype), weight.to(dtype)
