"""Distillation by the angle between the student's and the teacher's logits; see distillation.py.

soft = beta * (1 - cosine(student logits, teacher logits)); the temperature changes nothing.
"""

from __future__ import annotations

from ..kernels.losses.distill_rows import COSINE
from ..runtime.operator import check_floats
from .distillation import DistillationFunction, DistillationLoss


class LigerFusedLinearCosineSimilarityFunction(DistillationFunction):
    """`LigerFusedLinearCosineSimilarityLoss` as a function, with Liger's order of arguments."""

    name = "liger_fused_linear_cosine"

    @classmethod
    def soft_loss(cls, beta: float, ignore_index: int) -> tuple[int, float, float]:
        check_floats(cls.name, beta=beta)
        return COSINE, 0.0, beta


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """Cosine distillation between two linear heads. beta: scales the soft loss. The rest is `DistillationLoss`."""

    function = LigerFusedLinearCosineSimilarityFunction
