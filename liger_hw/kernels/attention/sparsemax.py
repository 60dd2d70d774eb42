"""Sparsemax: the point of the probability simplex nearest to x, y = max(x - tau, 0) with tau such that y sums to 1.

Arithmetic in fp32, y rounded once to x's dtype. A row with a NaN or +inf, or with only -inf, gives NaN.
Saved for backward: y. Backward:  dx = dy - (mean of dy over the support) where y > 0 (the support), else 0.

Newton's method on f(t) = sum(max(x - t, 0)) - 1, which is convex, decreasing and piecewise linear, gives tau exactly.
It starts at t = max(x) - 1, left of the root. Each step, t = (sum of the x above t, minus 1) / (their number), stays
left of the root; when the number no longer shrinks, t is tau. A step halves f or the number (Dinkelbach's bound), so at
most about 50 steps are needed, typically 5. Each step takes two sums.

Source: Martins and Astudillo, "From Softmax to Sparsemax", https://arxiv.org/abs/1602.02068; the iteration is
Michelot's (1986), see Condat, "Fast projection onto the simplex and the l1 ball" (2016)
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.operator import OperatorFunction, check, check_numbers, check_tensors
from .row_maps import row_map


def sparsemax_reference(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The specification in plain torch, by sorting; in fp32 (fp64 for fp64)."""
    if not input.numel():
        return input.clone()
    x = input.to(torch.promote_types(input.dtype, torch.float32)).movedim(dim, -1)
    z = x - x.amax(-1, keepdim=True).detach()
    sorted_z = z.sort(-1, descending=True).values
    sums = sorted_z.cumsum(-1)
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (1 + rank * sorted_z > sums).sum(-1, keepdim=True).clamp_min(1)  # the sum is 0 in a row with NaN or infinity
    tau = (sums.gather(-1, size - 1) - 1) / size
    return (z - tau).relu().to(input.dtype).movedim(-1, dim)


def _bwd_reference(dy, y):
    inside = y > 0
    g = torch.where(inside, dy.to(torch.promote_types(y.dtype, torch.float32)), 0.0)
    mean = g.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(inside, g - mean, 0.0)


FWD, BWD, sparsemax_fwd, sparsemax_bwd = row_map("sparsemax", sparsemax_reference, _bwd_reference, sparse=True)


class SparsemaxFunction(OperatorFunction):
    fwd, bwd = sparsemax_fwd, sparsemax_bwd


def liger_sparsemax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sparsemax over `dim`: results are nonnegative, sum to 1, and are exactly zero except for the largest inputs.

    input: any shape, fp32, fp16 or bf16 (fp64 too on the CPU). Returns a tensor like input.
    Raises `ValueError` for a dtype or `dim` that does not fit.
    """
    check_tensors("liger_sparsemax", input=input)
    check_numbers("liger_sparsemax", dim=dim)
    if not isinstance(dim, int) or dim is True or dim is False or not -input.dim() <= dim < input.dim():
        check(False, "liger_sparsemax", f"dim must be a dimension of the {input.dim()}-D input, got {dim!r}")
    if dim in (-1, input.dim() - 1):
        return SparsemaxFunction.apply(input)
    return SparsemaxFunction.apply(input.movedim(dim, -1)).movedim(-1, dim)


class LigerSparsemax(torch.nn.Module):
    """Sparsemax over `dim` as a module without parameters."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: any shape; returns probabilities of the same shape, which sum to 1 along `dim`."""
        return liger_sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


WORKLOADS = {
    "vocabulary_32k": (4096, 32768),
    "attention_4k": (16384, 4096),
    "attention_1k": (65536, 1024),
    "llama3_8b_vocabulary": (2048, 128256),
}


def sample(sizes, dtype, device, generator, *, dim=-1) -> Sample:
    n_rows, n_cols = sizes
    x = normal(dtype, device, generator)(n_rows, n_cols)
    return Sample(
        args=(x, dim), reduction=sizes[dim], grad_reduction=sizes[dim], moved=5 * n_rows * n_cols * dtype.itemsize
    )


OP = registry.register_file(__name__, tunables=(FWD, BWD), options=({}, {"dim": 0}))
