"""SimPO: CPO over mean log-probabilities, with a margin that the chosen answer must be ahead by.

    loss = alpha * nll + mean over pairs of -log sigmoid(beta (l_chosen - l_rejected) - gamma)

l is the mean log-probability of a sequence's tokens; label_smoothing as in CPO.

Source: Meng, Xia and Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv 2405.14734
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import LossFunction
from .cpo_loss import smoothed_margin
from .preference import PAIR_LOSSES, Output, ReferenceFreeLoss, preference_loss, smoothed_pairs

PAIR_LOSSES["simpo"] = smoothed_margin
_NAME = "liger_fused_linear_simpo"


class LigerFusedLinearSimPOFunction(LossFunction):
    """`LigerFusedLinearSimPOLoss` as a function, with Liger's order of arguments."""

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
        compute_nll_loss: bool = False,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> Output:
        numbers = ignore_index, beta, alpha, label_smoothing, compute_nll_loss, True
        pairs = smoothed_pairs(_NAME, "simpo", *numbers, gamma=gamma)
        return preference_loss(_NAME, pairs, _input, weight, target, bias, ignore_index)


@dataclass(eq=False, repr=False)
class LigerFusedLinearSimPOLoss(ReferenceFreeLoss):
    """SimPO on a linear head.

    gamma: the margin; alpha: weight of the negative log-likelihood, added with compute_nll_loss.
    """

    function = LigerFusedLinearSimPOFunction

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    gamma: float = 0.5
    chunk_size: int = 1

    def check(self) -> None:
        smoothed_pairs(_NAME, "simpo", average_log_prob=True, **self.options())
