"""CPO: DPO's loss without a reference model, plus the negative log-likelihood of the chosen answer.

    loss = alpha * nll + mean over pairs of -log sigmoid(beta (l_chosen - l_rejected))

label_smoothing takes that share of the pairs to be labelled the wrong way round.

Source: Xu et al., "Contrastive Preference Optimization", arXiv 2401.08417
"""

from __future__ import annotations

import torch

from ..runtime.operator import check
from .preference import (
    PAIR_LOSSES,
    Output,
    Pairs,
    by_margin,
    checked_pairs,
    preference_loss,
    smoothed_logistic,
)


def _pair_loss(chosen, rejected, numbers):
    loss, slope = smoothed_logistic(numbers.beta * (chosen - rejected), numbers.label_smoothing)
    return by_margin(loss, numbers.beta * slope)


PAIR_LOSSES["cpo"] = _pair_loss
_NAME = "liger_fused_linear_cpo"


class LigerFusedLinearCPOFunction:
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
        numbers = ignore_index, beta, alpha, average_log_prob, compute_nll_loss, label_smoothing
        pairs = smoothed_pairs(_NAME, "cpo", *numbers)
        return preference_loss(_NAME, pairs, _input, weight, target, bias, ignore_index)


def smoothed_pairs(name: str, *numbers: float, **extra: float) -> Pairs:
    """`checked_pairs` of a label_smoothing, the last of the numbers, from 0 to 1."""
    pairs, label_smoothing = checked_pairs(name, *numbers, **extra), numbers[-1]
    if not 0.0 <= label_smoothing <= 1.0:
        check(False, name, f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    return pairs


class LigerFusedLinearCPOLoss(torch.nn.Module):
    """CPO on a linear head.

    alpha: weight of the negative log-likelihood, added with compute_nll_loss. average_log_prob: sequences count by the
    mean of their tokens' log-probabilities instead of the sum. compiled and chunk_size are accepted and change nothing
    (see docs/losses.md).

    forward(lin_weight [vocab, hidden], _input [2 pairs, length, hidden], target [2 pairs, length], bias [vocab] or None)
    -> (loss, (chosen_logps [pairs], rejected_logps [pairs], chosen_logits_mean, rejected_logits_mean, nll_loss,
    chosen_rewards [pairs], rejected_rewards [pairs])), all fp32
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        numbers = ignore_index, beta, alpha, average_log_prob, compute_nll_loss, label_smoothing
        smoothed_pairs(_NAME, "cpo", *numbers)
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.average_log_prob = compute_nll_loss, average_log_prob
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Output:
        return LigerFusedLinearCPOFunction.apply(
            *(_input, lin_weight, target, bias),
            ignore_index=self.ignore_index,
            beta=self.beta,
            alpha=self.alpha,
            label_smoothing=self.label_smoothing,
            compute_nll_loss=self.compute_nll_loss,
            average_log_prob=self.average_log_prob,
        )

    def extra_repr(self) -> str:
        return f"beta={self.beta}, alpha={self.alpha}, label_smoothing={self.label_smoothing}"
