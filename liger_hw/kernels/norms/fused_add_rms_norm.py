"""Residual add and RMSNorm in one pass: s = x + r, y = s / sqrt(mean(s^2) + eps) * (offset + w).

s is rounded to x's dtype, like `x + r` in torch, and the statistics are computed from the rounded s.
Saved for backward: s (an output, so no extra memory), w, and rstd = 1 / sqrt(mean(s^2) + eps), one fp32 a row. The
backward is in backward.py, with ds added to dx in fp32. One tensor is the gradient of x and of r.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import offer
from ...registry import Sample, normal
from ...runtime.operator import Function, check_numbers, define, first_order
from ...runtime.sharding import RowsRule
from ..rows.tuning import row_sample
from . import rms_norm
from .backward import backward_tunables
from .forward import norm_forward, norm_forward_tunable
from .rms_norm import LigerRMSNorm, rms_norm_reference


def fused_add_rms_norm_reference(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    S = X + R
    return rms_norm_reference(S, W, eps, offset, casting_mode), S


FWD = norm_forward_tunable("fused_add_rms_norm")
BACKWARD = backward_tunables("fused_add_rms_norm", streams=3)


def _fwd_reference(x, r, w, eps, offset, casting):
    s = (x + r).contiguous()
    y, rstd = rms_norm.fwd_reference(s, w, eps, offset, casting)
    return y, s, rstd


def _bwd_reference(dy, ds, s, w, *others):
    dx, dw = rms_norm.RMSNormFunction.bwd.reference(dy, s, w, *others)
    return dx if ds is None else (dx + ds).contiguous(), dw


fused_add_rms_norm_fwd = define(
    "fused_add_rms_norm_fwd(Tensor X, Tensor R, Tensor W, float eps, float offset, int casting)"
    " -> (Tensor, Tensor, Tensor)",
    shapes="T X, R [*, n]; W [n]",
    launcher=lambda x, r, *others: norm_forward(FWD, x, *others, residual=r),
    reference=_fwd_reference,
)
fused_add_rms_norm_bwd = define(
    "fused_add_rms_norm_bwd(Tensor dY, Tensor? dS, Tensor S, Tensor W, Tensor rstd, float eps, float offset,"
    " int casting, bool needs_dw) -> (Tensor, Tensor)",
    shapes="S, dY, dS [*, n]; W [n]; rstd of rows",
    launcher=lambda dy, ds, *others: rms_norm.rms_backward(BACKWARD, dy, *others, ds),
    reference=_bwd_reference,
    fake=lambda dy, ds, s, w, *others: (s.new_empty(s.shape), w.new_empty(w.shape if others[-1] else 0)),
)


def _recompute_y(s, w, eps, offset, casting):
    """y from s, recomputed by the same kernel with a residual of zeros, so that it has the same bits."""
    return fused_add_rms_norm_fwd(s, torch.zeros_like(s), w, eps, offset, casting)[0]


class FusedAddRMSNormFunction(Function):
    sharding = RowsRule(inputs=("X", "R"), weights=("W",))

    @staticmethod
    def forward(ctx, X, R, W, eps, offset, casting):
        ctx.numbers = eps, offset, casting
        Y, S, RSTD = fused_add_rms_norm_fwd(X, R, W, *ctx.numbers)
        ctx.save_for_backward(S, W, RSTD)
        offer(ctx, Y, _recompute_y, (S, W, *ctx.numbers))
        ctx.set_materialize_grads(False)  # for an unused y or s, None instead of zeros
        return Y, S

    @staticmethod
    @first_order
    def backward(ctx, dY, dS):
        S, W, RSTD = ctx.saved_tensors
        if dY is None:
            return dS, dS, None, None, None, None
        needs_dw = ctx.needs_input_grad[2]
        dX, dW = fused_add_rms_norm_bwd(dY, dS, S, W, RSTD, *ctx.numbers, needs_dw)
        return dX, dX, dW if needs_dw else None, None, None, None


def liger_fused_add_rms_norm(
    X: torch.Tensor,
    R: torch.Tensor,
    W: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Y, S) with S = X + R and Y = S / sqrt(mean(S^2) + eps) * (offset + W), over the last dimension.

    X, R: [..., n_cols], of one shape and dtype; W: [n_cols]. fp32, fp16 or bf16 (fp64 too on the CPU).
    Y and S are [..., n_cols]; S is the next block's residual.
    casting_mode: `llama`, `gemma` or `none`, as for `liger_rms_norm`.
    in_place: accepted for compatibility; the gradient never overwrites a tensor the caller can see.
    Raises `ValueError` for shapes, dtypes, devices or a casting mode that do not fit.
    """
    check_numbers("liger_fused_add_rms_norm", eps=eps, offset=offset)
    casting = rms_norm.casting_code("liger_fused_add_rms_norm", casting_mode)
    return FusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting)


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """Layer that takes (hidden_states, residual) and returns (normalised sum, sum).

    The arguments are as for `LigerRMSNorm`; there is always a weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states, residual: [..., hidden_size]; returns (normalised sum, sum), each of that shape."""
        return liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )


WORKLOADS = {name: sizes for name, sizes in rms_norm.WORKLOADS.items() if name != "qwen3_8b_qk"}


def sample(sizes, dtype, device, generator, *, casting_mode="llama", offset=0.0) -> Sample:
    n_rows, n_cols = sizes
    drawn = normal(dtype, device, generator)
    x, r, w = drawn(n_rows, n_cols), drawn(n_rows, n_cols), drawn(n_cols)
    return row_sample(sizes, dtype, (x, r, w, 1e-6, offset, casting_mode), moved=8)


OP = registry.register_file(
    __name__,
    tunables=(FWD, *BACKWARD),
    options=({}, {"casting_mode": "gemma", "offset": 1.0}, {"casting_mode": "none"}),
)
