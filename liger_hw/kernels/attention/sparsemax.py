"""Sparsemax: the point of the probability simplex nearest to x, y = max(x - tau, 0) with tau such that y sums to 1.

Arithmetic in fp32, y rounded once to x's dtype. A row that holds a NaN or +inf, or nothing but -inf, gives NaN.
Saved for backward: y. Backward:  dx = dy - mean of dy over the support (y > 0); outside it dx = 0.

tau is found exactly by Newton's method on f(t) = sum(max(x - t, 0)) - 1, which is convex, falling and piecewise linear.
It begins at max(x) - 1, left of the root. Each step, to (sum of x > t, less 1) / count(x > t), stays left of the root
and shrinks the support; when the support no longer shrinks, t is exact. A step halves f or the support (Dinkelbach's
bound), so at most some 50 are needed, about 5 for real rows. Each is two sums over values in registers.

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
    """The specification in plain torch, by sorting; computes in fp32, or in fp64 when `input` is fp64."""
    if not input.numel():
        return input.clone()
    x = input.to(torch.promote_types(input.dtype, torch.float32)).movedim(dim, -1)
    z = x - x.amax(-1, keepdim=True).detach()
    ranked = z.sort(-1, descending=True).values
    sums = ranked.cumsum(-1)
    place = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (1 + place * ranked > sums).sum(-1, keepdim=True).clamp_min(1)  # 0 in a row that holds a NaN or an infinity
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
    """Sparsemax over `dim`: nonnegative, sums to 1, and exactly zero away from the largest values.

    input: of any shape in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a tensor like it.
    Raises `ValueError` for a dtype or `dim` that does not fit.
    """
    check_tensors("liger_sparsemax", input=input)
    check_numbers("liger_sparsemax", dim=dim)
    if not isinstance(dim, int) or dim is True or dim is False or not -input.dim() <= dim < input.dim():
        check(False, "liger_sparsemax", f"dim must be a dimension of input, which has {input.dim()}, got {dim!r}")
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
