"""CPO: DPO's loss without a reference model, plus the negative log-likelihood of the chosen answer.

    loss = alpha * nll + mean over pairs of -log sigmoid(beta (l_chosen - l_rejected))

label_smoothing takes that share of the pairs to be labelled the wrong way round.

Source: Xu et al., "Contrastive Preference Optimization", arXiv 2401.08417
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import LossFunction
from .preference import (
    PAIR_LOSSES,
    Output,
    ReferenceFreeLoss,
    by_margin,
    preference_loss,
    smoothed_logistic,
    smoothed_pairs,
)


def smoothed_margin(chosen, rejected, numbers):
    """-log sigmoid of the margin, less SimPO's gamma."""
    margin = numbers.beta * (chosen - rejected) - numbers.extra
    loss, slope = smoothed_logistic(margin, numbers.label_smoothing)
    return by_margin(loss, numbers.beta * slope)


PAIR_LOSSES["cpo"] = smoothed_margin
_NAME = "liger_fused_linear_cpo"


class LigerFusedLinearCPOFunction(LossFunction):
    """`LigerFusedLinearCPOLoss` as a function, with Liger's order of arguments."""

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> Output:
        numbers = ignore_index, beta, alpha, label_smoothing, compute_nll_loss, average_log_prob
        pairs = smoothed_pairs(_NAME, "cpo", *numbers)
        return preference_loss(_NAME, pairs, _input, weight, target, bias, ignore_index)


@dataclass(eq=False, repr=False)
class LigerFusedLinearCPOLoss(ReferenceFreeLoss):
    """CPO on a linear head.

    alpha: weight of the negative log-likelihood, added with compute_nll_loss. average_log_prob: sequences count by the
    mean of their tokens' log-probabilities instead of the sum.
    """

    function = LigerFusedLinearCPOFunction

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1

    def check(self) -> None:
        smoothed_pairs(_NAME, "cpo", **self.options())
