"""Kullback-Leibler divergence of a target distribution from predicted log-probabilities, as in torch.nn.KLDivLoss.

    term = t (log max(t, eps) - x), or 0 if t is 0        t: a probability
    term = e^t (t - x)                                    t: a log-probability (log_target)
    none  every term [n_rows, n_cols]      sum  of all      mean  over all elements      batchmean  sum / n_rows
Everything is computed in fp32, by the kernel of divergence_rows.py.
Saved for backward: the gradient, which the forward writes; with reduction="none" the target.

Source: Kullback and Leibler, "On information and sufficiency", 1951; eps as in liger-kernel's `liger_kl_div`.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import registry
from ...registry import Sample
from ...runtime.operator import check, check_flags, check_floats
from . import divergence_rows as rows


def kl_div_reference(input, target, size_average=True, reduce=True, reduction="mean", log_target=False, eps=1e-10):
    options = _options("kl_div_reference", size_average, reduce, reduction, log_target, eps)
    return rows.divergence_reference(input, target, None, options).to(torch.promote_types(input.dtype, target.dtype))


FWD, OPERATORS = rows.divergence_op("kl_div")
WORKLOADS = rows.WORKLOADS


def liger_kl_div(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> torch.Tensor:
    """KL(target || input) of log-probabilities `input` against probabilities (or log-probabilities) `target`.

    input, target: [n_rows, n_cols] fp32, fp16 or bf16 (fp64 too on the CPU). reduction: none, sum, mean or batchmean;
    size_average=False and reduce=False are torch's deprecated spellings of sum and none. log_target: whether the target
    holds log-probabilities. eps: replaces smaller target probabilities inside the logarithm. The target gets no
    gradient. Returns [] or [n_rows, n_cols] in the promoted dtype of both, fp32 under autocast.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit.
    """
    options = _options("liger_kl_div", size_average, reduce, reduction, log_target, eps)
    return rows.divergence("liger_kl_div", OPERATORS, input, target, None, options)


def _options(op: str, size_average: bool, reduce: bool, reduction: str, log_target: bool, eps: float):
    check_floats(op, eps=eps)
    check_flags(op, size_average=size_average, reduce=reduce, log_target=log_target)
    if not eps >= 0.0:
        check(False, op, f"eps must not be negative, got {eps}")
    if not reduce:
        reduction = "none"
    elif not size_average:
        reduction = "sum"
    return rows.Divergence(rows.KL_LOG if log_target else rows.KL, rows.check_reduction(op, reduction), eps=float(eps))


class LigerKLDIVLoss(torch.nn.KLDivLoss):
    """`liger_kl_div` as a module, with the arguments of torch.nn.KLDivLoss and eps."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows.check_reduction("LigerKLDIVLoss", self.reduction)
        self.eps = eps

    def forward(self, y_pred: torch.Tensor, y_true: torch.Tensor) -> torch.Tensor:
        """y_pred: [n_rows, n_cols] log-probabilities; y_true: the target, of the same shape."""
        return liger_kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, log_target={self.log_target}, eps={self.eps}"


def sample(sizes, dtype, device, generator, *, log_target=False, **options: Any) -> Sample:
    take = {"take": torch.log_softmax, "take_target": torch.log_softmax if log_target else torch.softmax}
    return rows.sample_divergence(sizes, dtype, device, generator, **take, log_target=log_target, **options)


OP = registry.register_file(
    __name__,
    tunables=(FWD,),
    options=(
        {},
        *({"reduction": name} for name in rows.REDUCTIONS if name != "mean"),
        {"log_target": True, "reduction": "batchmean"},
        {"log_target": True, "reduction": "none"},
        {"eps": 1e-2, "reduction": "sum"},
    ),
)
