"""Behind `liger_kernel.ops`: autograd functions that Liger Kernel names and that are ordinary functions here.

Each has the one thing that code written for Liger does with it, `apply`, with Liger's arguments in Liger's order.
Those that choose among Liger's implementations (`*_impl`, `*_mode`) change nothing here.
"""

from __future__ import annotations

import torch

from ..kernels.heads.fused_linear_cross_entropy import (
    LigerFusedLinearCrossEntropyFunction as _FusedLinearCrossEntropyFunction,
)
from ..kernels.heads.fused_linear_jsd import liger_fused_linear_jsd
from ..kernels.heads.fused_linear_kl_div import liger_fused_linear_kl_div
from ..kernels.heads.fused_linear_scaled_cross_entropy import liger_fused_linear_scaled_cross_entropy
from ..kernels.heads.fused_linear_scaled_cross_entropy_tp import (
    LigerFusedLinearScaledCrossEntropyTPFunction as LigerFusedLinearScaledCrossEntropyTPFunction,
)
from ..kernels.losses.fused_ce_tvd import liger_fused_ce_tvd
from ..kernels.losses.jsd import liger_jsd
from ..kernels.losses.kl_div import liger_kl_div
from ..kernels.losses.tvd import liger_tvd


class LigerFusedCETVDFunction:
    """`liger_fused_ce_tvd`"""

    apply = staticmethod(liger_fused_ce_tvd)


class LigerFusedLinearCrossEntropyFunction(_FusedLinearCrossEntropyFunction):
    """`liger_fused_linear_cross_entropy` as its autograd function: returns (loss, z_loss, token_accuracy,
    predicted_tokens), None where not asked for."""

    @classmethod
    def apply(
        cls,
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[torch.Tensor | None, ...]:
        settings = ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype
        more = use_token_scaling, return_token_accuracy, return_predicted_tokens, chunk_mem_const
        loss, *others = _FusedLinearCrossEntropyFunction.apply(
            _input, weight, target, bias, ce_weight, *settings, *more
        )
        wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
        return loss, *(found if asked else None for found, asked in zip(others, wanted))


class LigerJSDFunction:
    """`liger_jsd`"""

    @staticmethod
    def apply(
        _input: torch.Tensor,
        target: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> torch.Tensor:
        return liger_jsd(_input, target, shift_labels, beta, ignore_index)


class LigerFusedLinearJSDFunction:
    """`liger_fused_linear_jsd`"""

    @staticmethod
    def apply(
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> torch.Tensor:
        heads = student_input, student_weight, teacher_input, teacher_weight
        return liger_fused_linear_jsd(*heads, shift_labels, jsd_beta, ignore_index, temperature, accum_dtype)


class LigerFusedLinearKLDivFunction:
    """`liger_fused_linear_kl_div`"""

    apply = staticmethod(liger_fused_linear_kl_div)


class LigerFusedLinearScaledCrossEntropyFunction:
    """`liger_fused_linear_scaled_cross_entropy`; m_tiles_per_cluster changes nothing here."""

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        options = temperature, ignore_index, return_entropy, selected_token_ids
        return liger_fused_linear_scaled_cross_entropy(_input, weight, target, *options)


class LigerKLDivLossFunction:
    """`liger_kl_div`, of which the batch's mean is the default."""

    @staticmethod
    def apply(
        y_pred: torch.Tensor,
        y_true: torch.Tensor,
        reduction: str = "batchmean",
        log_target: bool = False,
        eps: float = 1e-10,
    ) -> torch.Tensor:
        return liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


class LigerTVDLossFunction:
    """`liger_tvd`, of which the batch's mean is the default."""

    @staticmethod
    def apply(
        p: torch.Tensor,
        q: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> torch.Tensor:
        return liger_tvd(p, q, shift_labels, reduction, ignore_index)


__all__ = sorted(name for name in globals() if name.startswith("Liger"))
