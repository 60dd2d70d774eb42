"""Losses over pairs of a chosen and a rejected sequence: common code, and CPO, SimPO and ORPO (DPO: dpo_loss.py).

A batch holds the P chosen sequences, then the P rejected ones in the same order. l is the log-probability of a
sequence: the sum, or the mean, of its tokens' log-probabilities. l_ref is the same under the reference model, 0 without
one. With c = l_chosen - l_ref_chosen and r = l_rejected - l_ref_rejected,

    loss = mean over pairs of pair_loss(c, r) + alpha * nll
    nll = mean over the chosen sequences' tokens of -log p(token)

Only pair_loss differs:

    CPO    -log sigmoid(beta (c - r)); label_smoothing is the share of pairs whose labels are assumed to be swapped
    SimPO  -log sigmoid(beta (c - r) - gamma) with l a mean and a margin gamma; label smoothing as in CPO
    ORPO   -beta log sigmoid(log(odds(c) / odds(r))) with l a mean, odds(l) = exp(l) / (1 - exp(l)), alpha = 1

Sources: Xu et al., "Contrastive Preference Optimization", arXiv 2401.08417; Meng, Xia and Chen, "SimPO: Simple
Preference Optimization with a Reference-Free Reward", 2405.14734; Hong, Lee and Thorne, "ORPO: Monolithic Preference
Optimization without Reference Model", 2403.07691
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from ..kernels.heads.linear_head import checked_head
from ..runtime.operator import check, check_flags, check_floats, check_ignore_index, check_indices
from .checks import HEAD, SEQUENCES, LossModule, function_of
from .log_prob_loss import LOSSES, PAIR, LossInputs, Spec, reference_logps, run_loss

PAIR_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, "Pairs"], torch.Tensor]] = {}
"""Kind -> pair_loss(c, r, numbers), which returns [pairs]. This file and dpo_loss.py add the losses."""


class Pairs(NamedTuple):
    """A loss over pairs. LossInputs.grouped: token counts [pairs, 2], l_ref [pairs, 2] or None; shared: nll's count.

    extra: discopop's tau, SimPO's gamma
    """

    kind: str
    beta: float
    alpha: float = 0.0
    average: float = 0.0
    has_nll: float = 0.0
    label_smoothing: float = 0.0
    extra: float = 0.0

    sums_logits = True

    def _margins(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(l [pairs, 2] for the metrics, c, r). ipo's c and r are always means over tokens."""
        counts, ref = inputs.grouped
        reported = _halves(inputs.logp).sum(-1)
        ratio = reported if ref is None else reported - ref
        if self.average:
            reported, ratio = reported / counts, ratio / counts
        elif self.kind == "dpo_ipo":
            ratio = ratio / counts
        return reported, ratio[:, 0], ratio[:, 1]

    def _nll(self, inputs: LossInputs) -> torch.Tensor:
        if not self.has_nll:
            return inputs.logp.new_zeros(())
        logp = inputs.logp if inputs.second is None else inputs.second
        return -_halves(logp)[:, 0].sum() / inputs.shared[0]

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        _, chosen, rejected = self._margins(inputs)
        loss = PAIR_LOSSES[self.kind](chosen, rejected, self).sum() / inputs.n_groups
        return loss + self.alpha * self._nll(inputs) if self.has_nll else loss

    def results(self, inputs: LossInputs) -> tuple[torch.Tensor, ...]:
        reported, chosen, rejected = self._margins(inputs)
        means = _halves(inputs.logit_sum).mean((0, 2)) / inputs.vocab
        rewards = self.beta * chosen, self.beta * rejected
        if self.kind == "dpo_ipo" and not self.average:
            rewards = tuple(r * n for r, n in zip(rewards, inputs.grouped[0].unbind(1)))
        orpo_metrics = ()
        if self.kind == "orpo":
            log_odds = _log_odds_ratio(chosen, rejected)
            orpo_metrics = F.logsigmoid(log_odds).mean(), log_odds.mean()
        logps = (t.clone() for t in reported.unbind(1))
        return self.loss(inputs), *logps, *(t.clone() for t in means), self._nll(inputs), *rewards, *orpo_metrics


LOSSES["pairs"] = Pairs


def checked_pairs(
    name: str,
    kind: str,
    ignore_index: int,
    beta: float,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = False,
    average_log_prob: bool = False,
    **extra: float,
) -> Pairs:
    """The Pairs of the public options. extra: `Pairs.extra` under its public name.

    Raises `TypeError` or `ValueError` for an invalid option.
    """
    check_ignore_index(name, ignore_index)
    check_floats(name, beta=beta, alpha=alpha, label_smoothing=label_smoothing, **extra)
    check_flags(name, average_log_prob=average_log_prob, compute_nll_loss=compute_nll_loss)
    flags = float(bool(average_log_prob)), float(bool(compute_nll_loss))
    extra_number = float(next(iter(extra.values()), 0.0))
    return Pairs(kind, float(beta), float(alpha), *flags, float(label_smoothing), extra_number)


def _halves(t: torch.Tensor) -> torch.Tensor:
    """[pairs, tokens of a pair] as [pairs, 2, length]: the chosen sequence, then the rejected one."""
    return t.view(t.shape[0], 2, t.shape[1] // 2)


Output = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


def preference_loss(
    name: str,
    pairs: Pairs,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    ref: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None = None,
    nll_target: torch.Tensor | None = None,
) -> Output:
    """(loss, metrics) as `PairLoss.forward` has them, after checking the arguments; ref: (input, weight, bias) of
    the reference model."""
    x, weight, bias = checked_head(name, x, weight, bias, HEAD, SEQUENCES)
    check_indices(name, "target", target, x)
    if nll_target is not None:
        check_indices(name, "nll_target", nll_target, x)
    batch = x.shape[0]
    if batch % 2:
        check(False, name, f"_input must hold chosen sequences, then as many rejected ones; got {batch} sequences")
    counted = target != ignore_index
    half = batch // 2
    # token counts are floats, because 0 / 0 must be nan, like torch's mean of no elements
    wide = torch.promote_types(x.dtype, torch.float32)
    counts = counted.sum(-1).view(2, half).t().to(wide)
    ref_sums = None
    if ref is not None:
        ref_sums = reference_logps(name, *ref, x, target, ignore_index).sum(-1).view(2, half).t()
    labels = target if nll_target is None else nll_target
    nll_tokens = (labels[:half] != ignore_index).sum().to(wide)
    kind, *numbers = pairs
    spec = Spec("pairs", kind, tuple(numbers), PAIR, n_grouped=2, ignore_index=ignore_index)
    second = nll_target if pairs.has_nll else None
    loss, *metrics = run_loss(x, weight, bias, target, spec, (counts, ref_sums, nll_tokens), second)
    return loss, tuple(metrics)


class PairLoss(LossModule):
    """A loss over pairs as a module."""

    name: ClassVar[str]

    def pairs(self) -> Pairs:
        """The Pairs of the options; raises if they are invalid."""
        raise NotImplementedError

    def check(self) -> None:
        self.pairs()

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Output:
        """lin_weight: [vocab, hidden]; _input: [2 pairs, length, hidden]; target: [2 pairs, length]; bias: [vocab].

        Returns (loss, (chosen_logps [pairs], rejected_logps [pairs], chosen_logits_mean, rejected_logits_mean,
        nll_loss, chosen_rewards [pairs], rejected_rewards [pairs])), all fp32.
        """
        return preference_loss(self.name, self.pairs(), _input, lin_weight, target, bias, self.ignore_index)


# -- CPO and SimPO ---------------------------------------------------------------------------------------------------


def _smoothed_margin(chosen, rejected, numbers):
    """-log sigmoid(beta (c - r) - gamma) with label smoothing; gamma is 0 for CPO."""
    margin, e = numbers.beta * (chosen - rejected) - numbers.extra, numbers.label_smoothing
    return -(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)


PAIR_LOSSES["cpo"] = _smoothed_margin


def _smoothed_pairs(name: str, *numbers: float, **named: float) -> Pairs:
    pairs = checked_pairs(name, "cpo", *numbers, **named)
    if not 0.0 <= pairs.label_smoothing <= 1.0:
        check(False, name, f"label_smoothing must be between 0 and 1, got {pairs.label_smoothing}")
    return pairs


@dataclass(eq=False, repr=False)
class LigerFusedLinearCPOLoss(PairLoss):
    """CPO on a linear head. alpha: weight of the nll, added with compute_nll_loss; average_log_prob: l is the mean of a
    sequence's token log-probabilities instead of their sum."""

    name = "liger_fused_linear_cpo"

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1

    def pairs(self) -> Pairs:
        return _smoothed_pairs(self.name, **self.options())


LigerFusedLinearCPOFunction = function_of(
    LigerFusedLinearCPOLoss,
    "_input weight target",
    "bias ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
)


@dataclass(eq=False, repr=False)
class LigerFusedLinearSimPOLoss(PairLoss):
    """SimPO on a linear head. gamma: the margin; alpha: weight of the nll, added with compute_nll_loss."""

    name = "liger_fused_linear_simpo"

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    gamma: float = 0.5
    chunk_size: int = 1

    def pairs(self) -> Pairs:
        return _smoothed_pairs(self.name, average_log_prob=True, **self.options())


LigerFusedLinearSimPOFunction = function_of(
    LigerFusedLinearSimPOLoss,
    "_input weight target",
    "bias ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
    compute_nll_loss=False,
)


# -- ORPO ------------------------------------------------------------------------------------------------------------


def _log_odds_ratio(chosen, rejected):
    """log(odds(c) / odds(r)). expm1 is accurate for l near 0, where the model is certain."""
    chosen_odds, rejected_odds = (logp - torch.log(-torch.expm1(logp)) for logp in (chosen, rejected))
    return chosen_odds - rejected_odds


def _orpo(chosen, rejected, numbers):
    return -numbers.beta * F.logsigmoid(_log_odds_ratio(chosen, rejected))


PAIR_LOSSES["orpo"] = _orpo


@dataclass(eq=False, repr=False)
class LigerFusedLinearORPOLoss(PairLoss):
    """ORPO on a linear head. beta: weight of -log sigmoid(log odds ratio)."""

    name = "liger_fused_linear_orpo"

    ignore_index: int = -100
    beta: float = 0.1
    compute_nll_loss: bool = True
    compiled: bool = True
    chunk_size: int = 1

    def pairs(self) -> Pairs:
        return checked_pairs(self.name, "orpo", average_log_prob=True, **self.options())

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        nll_target: torch.Tensor | None = None,
    ) -> Output:
        """As `PairLoss.forward`, with metrics (..., log_odds_ratio, log_odds_chosen). nll_target: the targets of the
        nll, for example with the prompt; by default `target`."""
        head = _input, lin_weight, target, bias
        return preference_loss(self.name, self.pairs(), *head, self.ignore_index, nll_target=nll_target)


LigerFusedLinearORPOFunction = function_of(
    LigerFusedLinearORPOLoss,
    "_input weight target",
    "bias ignore_index beta compute_nll_loss nll_target compiled chunk_size",
)
