"""KTO: answers with a label, good or bad, instead of pairs.

With c = log(pi / pi_ref) of a sequence (log pi without a reference model) and kl, the caller's estimate of the policy's
divergence from the reference model:

    loss = mean of  1 - sigmoid(beta (c - kl))  for a good answer,  1 - sigmoid(beta (kl - c))  for a bad one

Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kernels.heads.linear_head import checked_head
from ..runtime.operator import check, check_flags, check_floats, check_ignore_index, check_indices
from .checks import HEAD, SEQUENCES, LossModule, function_of, on_device
from .log_prob_loss import LOSSES, SEQUENCE, LossInputs, Spec, reference_logps, run_loss
from .preference import Output


class Labelled(NamedTuple):
    """KTO. LossInputs.grouped, each [batch]: 1 or -1 (bad), token count, log pi_ref or None, kl or None."""

    kind: str
    beta: float
    average: float

    sums_logits = True

    def _logps(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(log pi, c)"""
        _, counts, ref, _ = inputs.grouped
        logps = inputs.logp.sum(-1)
        ratio = logps if ref is None else logps - ref
        return (logps / counts, ratio / counts) if self.average else (logps, ratio)

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        sign, _, _, kl = inputs.grouped
        _, ratio = self._logps(inputs)
        margin = sign * (ratio if kl is None else ratio - kl)
        return torch.sigmoid(-self.beta * margin).sum() / inputs.n_groups

    def results(self, inputs: LossInputs) -> tuple[torch.Tensor, ...]:
        """The loss, then the sums over good and over bad answers of log pi, the logits and the reward beta * c."""
        good = inputs.grouped[0] > 0
        logps, ratio = self._logps(inputs)
        values = logps, inputs.logit_sum.sum(-1), self.beta * ratio
        return self.loss(inputs), *(torch.where(mask, v, 0.0).sum() for v in values for mask in (good, ~good))


LOSSES["kto"] = Labelled
_NAME = "liger_fused_linear_kto"


@dataclass(eq=False, repr=False)
class LigerFusedLinearKTOLoss(LossModule):
    """KTO on a linear head. average_log_prob: a sequence's log-probability is the mean, not the sum, of its tokens'
    log-probabilities."""

    ignore_index: int = -100
    beta: float = 0.1
    compiled: bool = True
    use_ref_model: bool = False
    average_log_prob: bool = False
    chunk_size: int = 1

    def check(self) -> None:
        check_ignore_index(_NAME, self.ignore_index)
        check_floats(_NAME, beta=self.beta)
        check_flags(_NAME, use_ref_model=self.use_ref_model, average_log_prob=self.average_log_prob)

    def forward(
        self,
        _input: torch.Tensor,
        lin_weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        preference_labels: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        kl: torch.Tensor | float | None = None,
    ) -> Output:
        """_input: [batch, length, hidden]; lin_weight: [vocab, hidden]; target: [batch, length]; bias: [vocab];
        preference_labels: [batch] bool; ref_input, ref_weight, ref_bias: the reference model's head; kl: a number, or
        [batch].

        Returns (loss, sums over the good and the bad answers (chosen_logps, rejected_logps, chosen_logits,
        rejected_logits, chosen_rewards, rejected_rewards)), all fp32.
        """
        self.check()
        ignore_index = self.ignore_index
        x, weight, bias = checked_head(_NAME, _input, lin_weight, bias, HEAD, SEQUENCES)
        check_indices(_NAME, "target", target, x)
        batch, wide = x.shape[0], torch.promote_types(x.dtype, torch.float32)
        if not isinstance(preference_labels, torch.Tensor) or preference_labels.dtype is not torch.bool:
            got = preference_labels.dtype if isinstance(preference_labels, torch.Tensor) else preference_labels
            check(False, _NAME, f"preference_labels must be a bool tensor, True for good answers, got {got}")
        if preference_labels.shape != (batch,):
            check(False, _NAME, f"preference_labels must have shape ({batch},), got {tuple(preference_labels.shape)}")
        sign = preference_labels.to(x.device, wide) * 2 - 1
        counts = (target != ignore_index).sum(-1).to(wide)
        ref_sums = None
        if self.use_ref_model:
            ref_sums = reference_logps(_NAME, ref_input, ref_weight, ref_bias, x, target, ignore_index).sum(-1)
        if kl is not None:
            if not isinstance(kl, torch.Tensor):  # a tensor may have a number for each sequence
                check_floats(_NAME, kl=kl)
            kl = on_device(kl, wide, x.device)
            if kl.numel() not in (1, batch) or kl.dim() > 1:
                check(False, _NAME, f"kl must be one number or have shape ({batch},), got shape {tuple(kl.shape)}")
            kl = kl.expand(batch)
        numbers = float(self.beta), float(bool(self.average_log_prob))
        spec = Spec("kto", "kto", numbers, SEQUENCE, n_grouped=4, ignore_index=ignore_index)
        loss, *metrics = run_loss(x, weight, bias, target, spec, (sign, counts, ref_sums, kl))
        return loss, tuple(metrics)


LigerFusedLinearKTOFunction = function_of(
    LigerFusedLinearKTOLoss,
    "_input weight target preference_labels",
    "bias ref_input ref_weight ref_bias kl ignore_index beta compiled use_ref_model average_log_prob chunk_size",
    use_ref_model=True,
)
