"""Residual add, RMSNorm to FP8 and FP8 linears of the result: s = x + r, y_i = norm(s) W_i^T + b_i.

s and norm(s) are rounded as in ../norms/fused_add_rms_norm.py; norm(s) is quantised with a scale for each row.
Saved for backward: s, w, rstd, norm(s) in FP8, W_i. Backward: as in float8_linear.py, then fused_add_rms_norm.py.
"""

from __future__ import annotations

from typing import Sequence

import torch

from ... import registry
from ...runtime.operator import Function, check_numbers, check_tensors, define, first_order
from ..norms.forward import out_dtype
from ..norms.fused_add_rms_norm import FusedAddRMSNormFunction
from ..norms.rms_norm import casting_code, fwd_reference
from .formats import Float8Rows, why_no_float8
from .normed_rows import WORKLOADS as WORKLOADS
from .normed_rows import launch_normed, normed_reference, normed_sample, normed_tunable
from .rms_norm_float8 import rms_norm_float8_reference
from .whole_rows import SMALL, linears, placeholder, too_wide

FWD = normed_tunable("fused_add_rms_norm_float8")
fused_add_rms_norm_backward = (
    FusedAddRMSNormFunction.backward
)  # torch.compile traces this name, not the attribute of the class


def fused_add_rms_norm_float8_reference(
    X, R, W, eps, weights, biases=None, offset=0.0, casting_mode="llama", rounds=None
):
    S = X + R
    if rounds is not None:  # S rounded to the dtype `rounds`, see `linears_reference`
        S = S + (S.to(rounds).double() - S).detach()
    return *rms_norm_float8_reference(S, W, eps, weights, biases, offset, casting_mode, rounds), S


def _rows_reference(x, r, w, eps, offset, casting):
    s = (x + r).contiguous()
    return *normed_reference(*fwd_reference(s, w, eps, offset, casting)), s


fused_add_rms_norm_float8_rows = define(
    "fused_add_rms_norm_float8_rows(Tensor X, Tensor R, Tensor W, float eps, float offset, int casting)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    shapes="T X, R [*, n]; W [n]",
    misfit=lambda X, *_: too_wide(X),
    launcher=lambda x, r, *others: launch_normed(FWD, x, *others, residual=r),
    reference=_rows_reference,
)


class FusedAddRMSNormFloat8Function(Function):
    @staticmethod
    def forward(ctx, X, R, W, eps, offset, casting):
        ctx.numbers = eps, offset, casting
        data, scale, rstd, S = fused_add_rms_norm_float8_rows(X, R, W, eps, offset, casting)
        ctx.save_for_backward(S, W, rstd)
        return *placeholder(ctx, S, Float8Rows(data, scale), out_dtype(S, W, casting)), S

    @staticmethod
    @first_order
    def backward(ctx, dY, d_data, d_scale, dS):
        return fused_add_rms_norm_backward(ctx, dY, dS)


def liger_fused_add_rms_norm_float8(
    X: torch.Tensor,
    R: torch.Tensor,
    W: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[torch.Tensor, ...]:
    """RMSNorm of S = X + R, times the transpose of each of `weights`, and S, the next block's residual.

    X, R: [..., n_cols], of one shape; W: [n_cols]. The other arguments and what is raised are as for
    `liger_rms_norm_float8`. Returns [..., n_out] for each weight, then S like X.
    """
    name = "liger_fused_add_rms_norm_float8"
    check_numbers(name, eps=eps, offset=offset)
    check_tensors(name, X=X, R=R, W=W)
    casting = casting_code(name, casting_mode)
    Y, data, scale, S = FusedAddRMSNormFloat8Function.apply(X, R, W, eps, offset, casting)
    return *linears(name, Y, Float8Rows(data, scale), weights, biases), S


sample = normed_sample(2, 1)

OP = registry.register_file(
    __name__,
    tunables=(FWD,),
    options=({}, {"casting_mode": "gemma", "offset": 1.0, "weights": 2, "bias": True}),
    small=SMALL,
    why_not=why_no_float8,
)
