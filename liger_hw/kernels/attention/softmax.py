"""Softmax over the last dimension: y = exp(x - max(x)) / sum(exp(x - max(x))).

Arithmetic in fp32, y rounded once to x's dtype. A row of -inf gives NaN, as in torch.
Saved for backward: y. Backward:  dx = y * (dy - sum(y * dy)).

Source: Bridle, "Training Stochastic Model Recognition Algorithms as Networks" (1989); for wide rows, Milakov and
Gimelshein, "Online normalizer calculation", https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.operator import OperatorFunction
from ...runtime.sharding import RowsRule
from ..rows.tuning import row_sample
from .row_maps import row_map


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """The specification in plain torch; sums in fp32 (fp64 for fp64)."""
    return torch.softmax(x, -1)


def _bwd_reference(dy, y):
    wide = torch.promote_types(y.dtype, torch.float32)
    p, g = y.to(wide), dy.to(wide)
    return p * (g - (p * g).sum(-1, keepdim=True))


FWD, BWD, softmax_fwd, softmax_bwd = row_map("softmax", softmax_reference, _bwd_reference, sparse=False)


class SoftmaxFunction(OperatorFunction):
    sharding, fwd, bwd = RowsRule(inputs=("x",)), softmax_fwd, softmax_bwd


def liger_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension.

    x: [..., n_cols] in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a contiguous tensor like x.
    Raises `ValueError` for a dtype that does not fit or a tensor without dimensions.
    """
    return SoftmaxFunction.apply(x)


class LigerSoftmax(torch.nn.Module):
    """Softmax over the last dimension as a module without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., n_cols]; returns probabilities of the same shape, which sum to 1 along the last dimension."""
        return liger_softmax(x)


WORKLOADS = {
    "attention_4k": (16384, 4096),
    "attention_1k": (65536, 1024),
    "mistral_7b_vocabulary": (8192, 32768),
    "llama3_8b_vocabulary": (4096, 128256),
    "qwen3_moe_router": (65536, 128),
}


def sample(sizes, dtype, device, generator) -> Sample:
    return row_sample(sizes, dtype, (normal(dtype, device, generator)(*sizes),), grad_reduction=sizes[1])


OP = registry.register_file(__name__, tunables=(FWD, BWD))
