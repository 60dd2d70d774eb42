"""Distillation by generalised Jensen-Shannon divergence, with true labels beside it; see distillation.py.

soft = JSD_beta(teacher || student) of the softmaxes at a temperature: beta 0 is KL(teacher || student), 1 its reverse.

Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649
"""

from __future__ import annotations

import torch

from ..kernels.losses.jsd import jsd_options
from .distillation import DistillationLoss, distillation_loss

_NAME = "liger_fused_linear_jsd_distillation"


class LigerFusedLinearJSDFunction:
    """`LigerFusedLinearJSDLoss` as a function, with Liger's order of arguments."""

    @staticmethod
    def apply(
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        true_labels: torch.Tensor,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        student, teacher = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
        weights = weight_hard_loss, weight_soft_loss
        options = *weights, ignore_index, temperature, return_soft_hard_loss
        kind = jsd_options(_NAME, beta, ignore_index).kind
        return distillation_loss(_NAME, kind, beta, 1.0, student, teacher, true_labels, *options)


class LigerFusedLinearJSDLoss(DistillationLoss):
    """JSD distillation between two linear heads. beta: in [0, 1]; temperature divides the logits of the
    soft loss. compiled and chunk_size are accepted and change nothing (see docs/losses.md). The rest is `DistillationLoss`.
    """

    function = LigerFusedLinearJSDFunction

    def _check(self) -> None:
        super()._check()
        jsd_options(_NAME, self.beta, self.ignore_index)
