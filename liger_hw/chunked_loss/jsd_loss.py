"""Distillation by generalised Jensen-Shannon divergence, with true labels beside it; see distillation.py.

soft = JSD_beta(teacher || student) of the softmaxes at a temperature: beta 0 is KL(teacher || student), 1 its reverse.

Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649
"""

from __future__ import annotations

from ..kernels.losses.jsd import jsd_options
from .distillation import DistillationFunction, DistillationLoss


class LigerFusedLinearJSDFunction(DistillationFunction):
    """`LigerFusedLinearJSDLoss` as a function, with Liger's order of arguments."""

    name = "liger_fused_linear_jsd_distillation"

    @classmethod
    def soft_loss(cls, beta: float, ignore_index: int) -> tuple[int, float, float]:
        return jsd_options(cls.name, beta, ignore_index).kind, beta, 1.0


class LigerFusedLinearJSDLoss(DistillationLoss):
    """JSD distillation between two linear heads.

    beta: in [0, 1]; temperature divides the logits of the soft loss. The rest is `DistillationLoss`.
    """

    function = LigerFusedLinearJSDFunction
