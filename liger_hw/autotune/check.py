"""Checks of a candidate's results, before it is timed and before it is stored."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..registry import Op, Sample
from .record import tensors_in

CHUNK = 1 << 25
"""Number of elements that are compared at a time."""
_NORM = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest ||out - reference|| / ||reference|| by dtype; looser than in the tests."""
_ELEMENT = {torch.float64: 1e-5, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of one element, relative to its size plus the tensor's root mean square."""


def disagreement(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Why two tensors are not the same up to rounding, or `""`. Makes no copy of full size.

    Elements that are NaN in both are equal: neither run wrote them, in a work buffer.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{tuple(result.shape)} {result.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    if not result.numel():
        return ""
    if not result.is_floating_point():
        return "" if torch.equal(result, expected) else "different integers"
    a, b = result.detach().reshape(-1), expected.detach().reshape(-1)
    chunks = list(zip(a.split(CHUNK), b.split(CHUNK)))
    wide = torch.promote_types(result.dtype, torch.float32)
    difference = size = worst = 0.0
    count = unmatched = 0
    for chunk in chunks:
        x, y = (t.to(wide) for t in chunk)
        finite = torch.isfinite(y)
        unmatched += int(((torch.isfinite(x) != finite) | (~finite & (x != y) & ~(x.isnan() & y.isnan()))).sum())
        x, y = torch.where(finite, x, 0), torch.where(finite, y, 0)
        difference += float((x - y).double().square().sum())
        size += float(y.double().square().sum())
        count += int(finite.sum())
    if unmatched:
        return f"{unmatched} elements are NaN or infinite on one side only"
    relative = math.sqrt(difference / max(size, 1e-60))
    if relative > _NORM[result.dtype]:
        return f"relative error {relative:.1e} exceeds {_NORM[result.dtype]:.0e}"
    rms = math.sqrt(size / max(count, 1))
    for chunk in chunks:
        x, y = (t.to(wide) for t in chunk)
        gap = torch.where(torch.isfinite(y), (x - y).abs() / (y.abs() + rms).clamp(min=1e-30), 0)
        worst = max(worst, float(gap.nan_to_num(nan=0.0).max()))
    if worst > _ELEMENT[result.dtype]:
        return f"an element is off by {worst:.1e} of its size, more than {_ELEMENT[result.dtype]:.0e}"
    return ""


def disagreements(results: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """The first disagreement between two lists of results, with its position, or `""`."""
    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}"
    for number, pair in enumerate(zip(results, expected)):
        if reason := disagreement(*pair):
            return f"result {number}: {reason}"
    return ""


def run(function: Any, sample: Sample, seed: int = 0) -> list[torch.Tensor]:
    """Outputs and input gradients of one call on copies of the sample's tensors.

    The incoming gradient of a scalar output is 1/2, since some kernels skip a multiplication by 1. Other outputs get
    random gradients from `seed`.
    """
    args = [_leaf(a) for a in sample.args]
    kwargs = {name: _leaf(value) for name, value in sample.kwargs.items()}
    outputs = tensors_in(function(*args, **kwargs))
    with_grad = [t for t in outputs if t.requires_grad]
    leaves = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.requires_grad]
    grads: list[torch.Tensor] = []
    if with_grad and leaves:
        incoming = [_gradient(t, seed + i) for i, t in enumerate(with_grad)]
        gradients = torch.autograd.grad(with_grad, leaves, incoming, allow_unused=True)
        grads = [g for g in gradients if g is not None]
    return [t.detach() for t in outputs] + grads


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _gradient(output: torch.Tensor, seed: int) -> torch.Tensor:
    if output.dim() == 0:
        return torch.full_like(output, 0.5)
    generator = torch.Generator(output.device).manual_seed(seed)
    return torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float32).to(output.dtype)


def against_reference(op: Op, sizes: tuple[int, ...], dtype: torch.dtype, device: Any) -> str:
    """Why `op.function` and `op.reference` disagree, or `""`."""
    generator = torch.Generator(device).manual_seed(1)
    sample = op.sample(sizes, dtype, device, generator)
    expected = run(op.reference, sample)
    results = run(op.function, sample)
    same_kind = [e.to(f.dtype) if f.is_floating_point() else e for f, e in zip(results, expected)]
    return disagreements(results, same_kind + expected[len(results) :])
