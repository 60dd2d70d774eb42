"""Distillation: a student's head is trained on a teacher's head and on true labels.

    loss = weight_soft * soft + weight_hard * hard

soft: the mean, over tokens that are not ignored, of a distance between the student's and the teacher's logits. hard:
the mean, over the same tokens, of the cross entropy with the true labels at temperature 1. Both are zero if all tokens
are ignored. The distance is JSD_beta(teacher || student) of the softmaxes at `temperature` (beta 0: KL(teacher ||
student), beta 1: KL(student || teacher)), or beta * (1 - cosine) without temperature. Operator and autograd are in
kernels/heads/linear_distillation.py.

Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..kernels.heads.fused_linear_kl_div import FWD
from ..kernels.heads.linear_distillation import (
    STUDENT,
    DistillationCall,
    LinearDistillationFunction,
    checked_teacher,
    linear_distillation_operator,
)
from ..kernels.heads.linear_head import checked_head
from ..kernels.losses.distill_rows import COSINE, Distillation
from ..kernels.losses.jsd import jsd_options
from ..runtime.operator import check, check_flags, check_floats, check_ignore_index, check_indices
from .checks import LossModule, function_of

OPERATOR = linear_distillation_operator("chunked_distillation", FWD, scale=2)
"""It uses the launch configurations of fused_linear_kl_div, whose logits also have the head's dtype."""


@dataclass(eq=False, repr=False)
class DistillationLoss(LossModule):
    """Base of the distillation modules."""

    name: ClassVar[str]

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    compiled: bool = True
    chunk_size: int = 1024
    return_soft_hard_loss: bool = False

    def check(self) -> None:
        name, temperature = self.name, self.temperature
        check_ignore_index(name, self.ignore_index)
        weights = {"weight_hard_loss": self.weight_hard_loss, "weight_soft_loss": self.weight_soft_loss}
        check_floats(name, **weights, temperature=temperature)
        check_flags(name, return_soft_hard_loss=self.return_soft_hard_loss)
        if not 0.0 < temperature < float("inf"):
            check(False, name, f"temperature must be positive and finite, got {temperature}")
        self.soft_loss()

    def soft_loss(self) -> tuple[int, float, float]:
        """(kind of distance, its beta, factor of the soft loss); raises for an invalid beta."""
        raise NotImplementedError

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        true_labels: torch.Tensor,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs: [..., hidden]; weights: [vocab, hidden]; hidden sizes may differ; true_labels: [...]; biases:
        [vocab]. Returns the loss, or with return_soft_hard_loss (loss, soft loss, hard loss); all fp32."""
        self.check()
        name, rows = self.name, (student_input, teacher_input, true_labels)
        if all(isinstance(t, torch.Tensor) for t in rows) and student_input.dim() > 2:
            if student_input.shape[:-1] == teacher_input.shape[:-1]:
                student_input, teacher_input = student_input.flatten(0, -2), teacher_input.flatten(0, -2)
                true_labels = true_labels.flatten()
        x, weight, bias = checked_head(name, student_input, student_weight, student_bias, STUDENT, "tokens")
        teacher = checked_teacher(name, teacher_input, teacher_weight, teacher_bias, x, weight, "tokens")
        check_indices(name, "true_labels", true_labels, x)
        kind, beta, soft_scale = self.soft_loss()
        weights = float(self.weight_soft_loss * soft_scale), float(self.weight_hard_loss)
        options = Distillation(kind, float(beta), 0.0, float(self.temperature), self.ignore_index, *weights)
        with_hard = bool(self.return_soft_hard_loss) or self.weight_hard_loss != 0.0
        call = DistillationCall(options, with_hard, per_row=1, wide=False)
        result = LinearDistillationFunction.apply(x, weight, bias, *teacher, true_labels, OPERATOR, call)
        if not call.with_hard:
            return result
        loss, soft, hard = result
        return (loss, soft * soft_scale, hard) if self.return_soft_hard_loss else loss


_FUNCTION = (
    "student_input student_weight teacher_input teacher_weight true_labels",
    "student_bias teacher_bias weight_hard_loss weight_soft_loss beta ignore_index temperature compiled chunk_size "
    "return_soft_hard_loss",
)


class LigerFusedLinearJSDLoss(DistillationLoss):
    """JSD distillation between two linear heads. beta: in [0, 1]; temperature divides the logits of the soft loss."""

    name = "liger_fused_linear_jsd_distillation"

    def soft_loss(self) -> tuple[int, float, float]:
        return jsd_options(self.name, self.beta, self.ignore_index).kind, self.beta, 1.0


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """Cosine distillation between two linear heads. beta: scales the soft loss."""

    name = "liger_fused_linear_cosine"

    def soft_loss(self) -> tuple[int, float, float]:
        check_floats(self.name, beta=self.beta)
        return COSINE, 0.0, self.beta


LigerFusedLinearJSDFunction = function_of(LigerFusedLinearJSDLoss, *_FUNCTION)
LigerFusedLinearCosineSimilarityFunction = function_of(LigerFusedLinearCosineSimilarityLoss, *_FUNCTION)
