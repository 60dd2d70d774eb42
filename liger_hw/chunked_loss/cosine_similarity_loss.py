"""Distillation by the angle between the student's and the teacher's logits; see distillation.py.

soft = beta * (1 - cosine(student logits, teacher logits)); the temperature changes nothing.
"""

from __future__ import annotations

import torch

from ..kernels.losses.distill_rows import COSINE
from ..runtime.operator import check_floats
from .distillation import DistillationLoss, distillation_loss

_NAME = "liger_fused_linear_cosine"


class LigerFusedLinearCosineSimilarityFunction:
    """`LigerFusedLinearCosineSimilarityLoss` as a function, with Liger's order of arguments."""

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
        check_floats(_NAME, beta=beta)
        weights = weight_hard_loss, weight_soft_loss
        options = *weights, ignore_index, temperature, return_soft_hard_loss
        return distillation_loss(_NAME, COSINE, 0.0, beta, student, teacher, true_labels, *options)


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """Cosine distillation between two linear heads. beta: scales the soft loss. compiled and
    chunk_size are accepted and change nothing (see docs/losses.md). The rest is `DistillationLoss`.
    """

    function = LigerFusedLinearCosineSimilarityFunction
