"""Total variation distance of two distributions.

    term = |p - q| / 2, with the derivative 0 at a tie
    none  every term [n_rows, n_cols]     sum  of all     batchmean  sum / counted rows     mean  batchmean / n_cols
If no row counts, the loss is zero. Everything is computed in fp32, by the kernel of divergence_rows.py.
Saved for backward: the gradient of p, which the forward writes; with reduction="none" p and q.

Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation",
https://arxiv.org/abs/2307.15190
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ... import registry
from . import divergence_rows as rows
from .options_module import OptionsModule


def tvd_reference(input, target, shift_labels=None, *settings, **named):
    options = _options("tvd_reference", *settings, **named)
    loss = rows.divergence_reference(input, target, shift_labels, options)
    return loss.to(torch.promote_types(input.dtype, target.dtype))


FWD, OPERATORS = rows.divergence_op("tvd")
WORKLOADS = rows.WORKLOADS


def liger_tvd(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Total variation distance of probabilities: |input - target| / 2, summed over a row.

    input, target: [n_rows, n_cols] fp32, fp16 or bf16 (fp64 too on the CPU); shift_labels: [n_rows] int64 or int32,
    rows at ignore_index do not count; reduction: none, sum, mean or batchmean. The target gets no gradient.
    Returns [] or [n_rows, n_cols] in the promoted dtype of both, fp32 under autocast.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit.
    """
    options = _options("liger_tvd", reduction, ignore_index)
    return rows.divergence("liger_tvd", OPERATORS, input, target, shift_labels, options)


def _options(op: str, reduction: str = "mean", ignore_index: int = -100) -> rows.Divergence:
    return rows.Divergence(rows.TVD, rows.check_reduction(op, reduction), ignore_index=ignore_index)


@dataclass(eq=False, repr=False)
class LigerTVDLoss(OptionsModule):
    """`liger_tvd` as a module."""

    reduction: str = "batchmean"
    ignore_index: int = -100

    def check(self) -> None:
        _options("LigerTVDLoss", **self.options())

    def forward(self, p: torch.Tensor, q: torch.Tensor, shift_labels: torch.Tensor | None = None) -> torch.Tensor:
        """p, q: [n_rows, n_cols] probabilities; shift_labels: [n_rows] or None."""
        return liger_tvd(p, q, shift_labels, **self.options())


sample = partial(rows.sample_divergence, take=torch.softmax)
OP = registry.register_file(
    __name__,
    tunables=(FWD,),
    options=(
        {},
        {"reduction": "none", "labelled": True},
        {"reduction": "sum"},
        {"reduction": "batchmean", "labelled": True},
    ),
)
