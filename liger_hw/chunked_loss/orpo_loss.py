"""ORPO: the negative log-likelihood of the chosen answer plus a penalty on the odds of the rejected one.

With l the mean log-probability of a sequence's tokens and odds(l) = exp(l) / (1 - exp(l)):

    loss = nll - beta * mean over pairs of log sigmoid(log(odds(l_chosen) / odds(l_rejected)))

Source: Hong, Lee and Thorne, "ORPO: Monolithic Preference Optimization without Reference Model", arXiv 2403.07691
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .checks import LossFunction, LossModule
from .preference import PAIR_LOSSES, PAIR_METRICS, Output, checked_pairs, preference_loss


def _log_odds(chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log of the ratio of the odds, exp(l) - 1 of both [2, pairs]): both at once, in half the launches."""
    both = torch.stack((chosen, rejected))
    less = torch.expm1(both)  # log(1 - exp(l)) by expm1: l is near 0 where the model is sure
    log_odds = both - torch.log(-less)
    return log_odds[0] - log_odds[1], less


def _metrics(chosen, rejected, numbers):
    log_odds, _ = _log_odds(chosen, rejected)
    return F.logsigmoid(log_odds).mean(), log_odds.mean()


def _pair_loss(chosen, rejected, numbers):
    log_odds, less = _log_odds(chosen, rejected)
    slopes = numbers.beta * torch.sigmoid(-log_odds) / less  # the slope of log(odds(l)) is -1 / expm1(l)
    loss = -numbers.beta * F.logsigmoid(log_odds)
    return loss, slopes[0], -slopes[1]


PAIR_LOSSES["orpo"] = _pair_loss
PAIR_METRICS["orpo"] = _metrics
_NAME = "liger_fused_linear_orpo"


class LigerFusedLinearORPOFunction(LossFunction):
    """`LigerFusedLinearORPOLoss` as a function, with Liger's order of arguments."""

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        nll_target: torch.Tensor | None = None,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> Output:
        flags = {"compute_nll_loss": compute_nll_loss, "average_log_prob": True}
        pairs = checked_pairs(_NAME, "orpo", ignore_index, beta, **flags)
        return preference_loss(_NAME, pairs, _input, weight, target, bias, ignore_index, nll_target=nll_target)


@dataclass(eq=False, repr=False)
class LigerFusedLinearORPOLoss(LossModule):
    """ORPO on a linear head.

    beta: weight of the odds ratio.
    """

    function = LigerFusedLinearORPOFunction

    ignore_index: int = -100
    beta: float = 0.1
    compute_nll_loss: bool = True
    compiled: bool = True
    chunk_size: int = 1

    def check(self) -> None:
        checked_pairs(_NAME, "orpo", average_log_prob=True, **self.options())

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        nll_target: torch.Tensor | None = None,
    ) -> Output:
        """lin_weight: [vocab, hidden]; _input: [2 pairs, length, hidden]; target: [2 pairs, length]; bias: [vocab];
        nll_target: the nll's own targets, where it covers the prompt too.

        Returns (loss, (chosen_logps [pairs], rejected_logps [pairs], chosen_logits_mean, rejected_logits_mean,
        nll_loss, chosen_rewards [pairs], rejected_rewards [pairs], log_odds_ratio, log_odds_chosen)), all fp32.
        """
        return self.function.apply(_input, lin_weight, target, bias, nll_target=nll_target, **self.options())
