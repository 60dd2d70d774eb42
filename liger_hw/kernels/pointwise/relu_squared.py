"""Squared ReLU: y = max(x, 0)^2, element by element.

Arithmetic is fp32, rounded once. NaN stays NaN. Saved for backward: x. Backward:  dx = 2 * max(x, 0) * dy.

Source: So et al., "Primer: Searching for Efficient Transformers", https://arxiv.org/abs/2109.08668
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.operator import OperatorFunction
from ...runtime.sharding import RowsRule
from .elementwise import activation_operators, activation_tunables


def relu_squared_reference(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).relu().square().to(x.dtype)


TUNABLES = activation_tunables("relu_squared", small_launch=1024, small_block=1024, waves=2)


class ReLUSquaredFunction(OperatorFunction):
    sharding, is_cheap = RowsRule(inputs=("x",), gathered=()), True
    fwd, bwd = activation_operators(
        TUNABLES, ("x",), "", lambda: ("relu_squared",), relu_squared_reference, is_gated=False
    )


def liger_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, element by element.

    x: of any shape, in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a contiguous tensor like x.
    Raises `ValueError` for another dtype.
    """
    if isinstance(x, torch.Tensor) and not x.dim():
        return liger_relu_squared(x.view(1)).view(())
    return ReLUSquaredFunction.apply(x)


class LigerReLUSquared(torch.nn.Module):
    """The squared ReLU as a module without parameters; Hugging Face's name for it is `relu2`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: any shape; returns max(x, 0)^2, of the same shape and dtype."""
        return liger_relu_squared(x)


WORKLOADS = {
    "nemotron_4_15b": (8192, 24576),
    "nemotron_mini_4b": (8192, 9216),
    "minitron_8b": (8192, 16384),
    "nemotron_h_8b": (8192, 21504),
}


def sample(sizes, dtype, device, generator) -> Sample:
    n_rows, n_cols = sizes
    x = normal(dtype, device, generator)(n_rows, n_cols)
    return Sample(args=(x,), moved=5 * n_rows * n_cols * dtype.itemsize)


OP = registry.register_file(__name__, tunables=TUNABLES)
