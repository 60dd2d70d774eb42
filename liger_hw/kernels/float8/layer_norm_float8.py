"""LayerNorm to FP8 and FP8 linears of the result: y_i = norm(x) W_i^T + b_i.

norm(x) is computed in fp32 and rounded once, to FP8 with a scale for each row.
Saved for backward: x, w, b, mean, rstd, norm(x) in FP8, W_i. Backward: as in float8_linear.py, then layer_norm.py.
"""

from __future__ import annotations

from typing import Sequence

import torch

from ... import registry
from ...runtime.operator import Function, check_numbers, check_tensors, define, first_order
from ..norms.forward import GEMMA
from ..norms.layer_norm import LayerNormFunction, fwd_reference, layer_norm_reference, misfit
from .formats import Float8Rows, why_no_float8
from .normed_rows import WORKLOADS as WORKLOADS
from .normed_rows import launch_normed, normed_reference, normed_sample, normed_tunable
from .quantize_float8 import wide
from .whole_rows import SMALL, linears, linears_reference, placeholder, too_wide

FWD = normed_tunable("layer_norm_float8", rows=2)
layer_norm_backward = LayerNormFunction.backward  # torch.compile traces this name, not the attribute of the class


def layer_norm_float8_reference(X, W, B, eps, weights, biases=None, rounds=None):
    rounds = None if rounds is None else torch.float32
    return linears_reference(layer_norm_reference, (X, W, B, eps), weights, biases, rounds)


layer_norm_float8_rows = define(
    "layer_norm_float8_rows(Tensor X, Tensor? W, Tensor? B, float eps) -> (Tensor, Tensor, Tensor)",
    shapes="X [*, n]; W [n]; B [n]",
    misfit=lambda *args: misfit(*args) or too_wide(args[0]),
    launcher=lambda x, w, b, eps: launch_normed(FWD, x, w, eps, None, GEMMA, b=b, subtract_mean=True),
    reference=lambda x, *others: normed_reference(*fwd_reference(wide(x), *others)),
)


class LayerNormFloat8Function(Function):
    @staticmethod
    def forward(ctx, X, W, B, eps):
        data, scale, stats = layer_norm_float8_rows(X, W, B, eps)
        ctx.save_for_backward(X, W, B, stats)
        ctx.numbers = (eps,)
        return placeholder(ctx, X, Float8Rows(data, scale))

    @staticmethod
    @first_order
    def backward(ctx, dY, d_data, d_scale):
        return (None,) * 4 if dY is None else layer_norm_backward(ctx, dY)


def liger_layer_norm_float8(
    X: torch.Tensor,
    W: torch.Tensor | None,
    B: torch.Tensor | None,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, ...]:
    """LayerNorm of X times the transpose of each of `weights`.

    W, B: [n_cols] or None; B needs W. The other arguments, the result and the errors are as for
    `liger_rms_norm_float8`.
    """
    name = "liger_layer_norm_float8"
    check_numbers(name, eps=eps)
    check_tensors(name, optional=("W", "B"), X=X, W=W, B=B)
    Y, data, scale = LayerNormFloat8Function.apply(X, W, B, eps)
    return linears(name, Y, Float8Rows(data, scale), weights, biases)


sample = normed_sample(1, 2)

OP = registry.register_file(
    __name__,
    tunables=(FWD,),
    options=({}, {"affine": False, "weights": 2, "bias": True}),
    small=SMALL,
    why_not=why_no_float8,
)
