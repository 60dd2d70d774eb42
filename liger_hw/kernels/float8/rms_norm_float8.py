"""RMSNorm to FP8 and FP8 linears of the result: y_i = norm(x) W_i^T + b_i.

norm(x) is rounded as in ../norms/rms_norm.py and quantised with a scale for each row.
Saved for backward: x, w, rstd, norm(x) in FP8, W_i. Backward: as in float8_linear.py, then rms_norm.py.
"""

from __future__ import annotations

from functools import partial
from typing import Sequence

import torch

from ... import registry
from ...runtime.operator import Function, check_numbers, check_tensors, define, first_order
from ..norms.forward import out_dtype
from ..norms.rms_norm import RMSNormFunction, casting_code, fwd_reference, rms_norm_reference
from .formats import Float8Rows, why_no_float8
from .normed_rows import WORKLOADS as WORKLOADS
from .normed_rows import launch_normed, normed_reference, normed_sample, normed_tunable
from .whole_rows import SMALL, linears, linears_reference, placeholder, too_wide

FWD = normed_tunable("rms_norm_float8")
rms_norm_backward = RMSNormFunction.backward  # torch.compile traces this name, not the attribute of the class


def rms_norm_float8_reference(X, W, eps, weights, biases=None, offset=0.0, casting_mode="llama", rounds=None):
    return linears_reference(rms_norm_reference, (X, W, eps, offset, casting_mode), weights, biases, rounds)


rms_norm_float8_rows = define(
    "rms_norm_float8_rows(Tensor X, Tensor? W, float eps, float offset, int casting) -> (Tensor, Tensor, Tensor)",
    shapes="X [*, n]; W [n]",
    misfit=lambda X, *_: too_wide(X),
    launcher=partial(launch_normed, FWD),
    reference=lambda *args: normed_reference(*fwd_reference(*args)),
)


class RMSNormFloat8Function(Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset, casting):
        ctx.numbers = eps, offset, casting
        data, scale, rstd = rms_norm_float8_rows(X, W, eps, offset, casting)
        ctx.save_for_backward(X, W, rstd)
        return placeholder(ctx, X, Float8Rows(data, scale), out_dtype(X, W, casting))

    @staticmethod
    @first_order
    def backward(ctx, dY, d_data, d_scale):
        return (None,) * 5 if dY is None else rms_norm_backward(ctx, dY)


def liger_rms_norm_float8(
    X: torch.Tensor,
    W: torch.Tensor | None,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[torch.Tensor, ...]:
    """RMSNorm of X times the transpose of each of `weights`: q, k, v = liger_rms_norm_float8(x, w, eps, (wq, wk, wv)).

    The normalised rows are written once, in FP8 with a scale for each row, and read by each product.
    X: [..., n_cols], n_cols at most 65536; W: [n_cols] or None; weights: [n_out, n_cols], n_out may differ; biases:
    [n_out] or None for each weight. fp32, fp16 or bf16, all of one dtype. offset, casting_mode: as for
    `liger_rms_norm`. Returns [..., n_out] for each weight.
    Raises `ValueError` for shapes and dtypes that do not fit, and where the device has no FP8.
    """
    name = "liger_rms_norm_float8"
    check_numbers(name, eps=eps, offset=offset)
    check_tensors(name, optional=("W",), X=X, W=W)
    casting = casting_code(name, casting_mode)
    Y, data, scale = RMSNormFloat8Function.apply(X, W, eps, offset, casting)
    return linears(name, Y, Float8Rows(data, scale), weights, biases)


sample = normed_sample(1, 1)

OP = registry.register_file(
    __name__,
    tunables=(FWD,),
    options=({}, {"casting_mode": "gemma", "offset": 1.0}, {"affine": False, "weights": 2, "bias": True}),
    small=SMALL,
    why_not=why_no_float8,
)
