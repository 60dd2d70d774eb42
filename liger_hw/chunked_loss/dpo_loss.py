"""DPO and its relatives: losses over a chosen and a rejected answer, with a frozen reference model.

With c and r the log-ratios log(pi / pi_ref) of the chosen and the rejected sequence (preference.py),
m = beta (c - r), e = label_smoothing, s = sigmoid:

    sigmoid    -log s(m)                                                 Rafailov et al., arXiv 2305.18290
    hinge      max(0, 1 - m)                                             Zhao et al. (SLiC), 2305.10425
    ipo        (c - r - 1 / (2 beta))^2, c and r averaged over tokens    Azar et al., 2310.12036
    robust     (-(1 - e) log s(m) + e log s(-m)) / (1 - 2 e)             Chowdhury et al., 2403.00409
    exo_pair   KL of (s(m), s(-m)) from (1 - e, e)                       Ji et al., 2402.00856
    bco_pair   -log s(beta c) - log s(-beta r)                           Jung et al., 2404.04656
    sppo_hard  (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2               Wu et al., 2405.00675
    nca_pair   -log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2    Chen et al., 2402.05369
    apo_zero   1 - s(beta c) + s(beta r)                                 D'Oosterlinck et al., 2408.06266
    apo_down   s(beta c) + 1 - s(m)                                      D'Oosterlinck et al., 2408.06266
    discopop   (1 - w) (-log s(m)) + w exp(-m), w = s(m / tau)           Lu et al., 2406.08414
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from ..runtime.operator import check, check_flags
from .checks import function_of
from .preference import PAIR_LOSSES, Output, PairLoss, Pairs, checked_pairs, preference_loss


def _robust(c, r, o):
    margin, e = o.beta * (c - r), o.label_smoothing
    return (e * logsigmoid(-margin) - (1 - e) * logsigmoid(margin)) / (1 - 2 * e)


def _exo_pair(c, r, o):
    margin, e = o.beta * (c - r), o.label_smoothing
    log_ratio, log_ratio_swapped = logsigmoid(margin) - math.log1p(-e), logsigmoid(-margin) - math.log(e)
    return torch.sigmoid(margin) * log_ratio + torch.sigmoid(-margin) * log_ratio_swapped


def _nca_pair(c, r, o):
    chosen, rejected = o.beta * c, o.beta * r
    return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))


def _discopop(c, r, o):
    margin = o.beta * (c - r)
    w = torch.sigmoid(margin / o.extra)
    return (1 - w) * -logsigmoid(margin) + w * torch.exp(-margin)


DPO_LOSSES = {
    "sigmoid": lambda c, r, o: -logsigmoid(o.beta * (c - r)),
    "hinge": lambda c, r, o: torch.relu(1 - o.beta * (c - r)),
    "ipo": lambda c, r, o: (c - r - 0.5 / o.beta).square(),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "bco_pair": lambda c, r, o: -logsigmoid(o.beta * c) - logsigmoid(-o.beta * r),
    "sppo_hard": lambda c, r, o: (c - 0.5 / o.beta).square() + (r + 0.5 / o.beta).square(),
    "nca_pair": _nca_pair,
    "apo_zero": lambda c, r, o: torch.sigmoid(-o.beta * c) + torch.sigmoid(o.beta * r),
    "apo_down": lambda c, r, o: torch.sigmoid(o.beta * c) + torch.sigmoid(-o.beta * (c - r)),
    "discopop": _discopop,
}
PAIR_LOSSES.update({f"dpo_{kind}": loss for kind, loss in DPO_LOSSES.items()})


@dataclass(eq=False, repr=False)
class LigerFusedLinearDPOLoss(PairLoss):
    """DPO and its relatives on a linear head.

    loss_type: sigmoid, hinge, ipo, robust, exo_pair, bco_pair, sppo_hard, nca_pair, apo_zero, apo_down or discopop
    (docs/losses.md has the formulas); label_smoothing: for robust and exo_pair; discopop_tau: for discopop
    alpha: weight of the chosen tokens' negative log-likelihood, added with compute_nll_loss
    average_log_prob: a sequence's log-probability is the mean, not the sum, of its tokens' log-probabilities
    """

    name = "liger_fused_linear_dpo"

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    compute_nll_loss: bool = False
    compiled: bool = True
    use_ref_model: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05

    def pairs(self) -> Pairs:
        options, name = self.options(), self.name
        check_flags(name, use_ref_model=options.pop("use_ref_model"))
        loss_type = options.pop("loss_type")
        pairs = checked_pairs(name, f"dpo_{loss_type}", **options)
        smoothing = pairs.label_smoothing
        if not isinstance(loss_type, str) or loss_type not in DPO_LOSSES:
            check(False, name, f"Unsupported loss_type {loss_type!r}: it must be one of {', '.join(DPO_LOSSES)}")
        if loss_type == "exo_pair":
            expected = "label_smoothing must be > 0 for loss_type='exo_pair', and below 1 (its paper takes 1e-3)"
            check(0.0 < smoothing < 1.0, name, f"{expected}, got {smoothing}")
        if loss_type == "robust":
            expected = "label_smoothing must lie in [0.0, 0.5) for loss_type='robust'"
            check(0.0 <= smoothing < 0.5, name, f"{expected}, got {smoothing}")
        if loss_type in ("ipo", "sppo_hard"):
            check(pairs.beta != 0.0, name, f"beta must not be 0 for loss_type={loss_type!r}: the loss divides by it")
        if loss_type == "discopop":
            check(pairs.extra > 0.0, name, f"discopop_tau must be positive, got {pairs.extra}")
        return pairs

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
    ) -> Output:
        """As `PairLoss.forward`; ref_input, ref_weight, ref_bias: the reference model's head."""
        pairs, ref = self.pairs(), (ref_input, ref_weight, ref_bias) if self.use_ref_model else None
        return preference_loss(self.name, pairs, _input, lin_weight, target, bias, self.ignore_index, ref)


LigerFusedLinearDPOFunction = function_of(
    LigerFusedLinearDPOLoss,
    "_input weight target",
    "bias ref_input ref_weight ref_bias ignore_index beta compute_nll_loss compiled use_ref_model average_log_prob "
    "chunk_size loss_type label_smoothing discopop_tau alpha",
)
