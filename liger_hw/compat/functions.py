"""Behind `liger_kernel.ops`: autograd functions that Liger Kernel names and that are ordinary functions here.

Each has the one thing that code written for Liger does with it, `apply`, with Liger's arguments in Liger's order.
"""

from __future__ import annotations

import torch

from ..kernels.heads.fused_linear_jsd import liger_fused_linear_jsd
from ..kernels.heads.fused_linear_kl_div import liger_fused_linear_kl_div
from ..kernels.heads.fused_linear_scaled_cross_entropy import liger_fused_linear_scaled_cross_entropy
from ..kernels.heads.fused_linear_scaled_cross_entropy_tp import (
    LigerFusedLinearScaledCrossEntropyTPFunction as LigerFusedLinearScaledCrossEntropyTPFunction,
)
from ..kernels.losses.jsd import liger_jsd
from ..kernels.losses.kl_div import liger_kl_div
from ..kernels.losses.tvd import liger_tvd


class LigerJSDFunction:
    """`liger_jsd`"""

    apply = staticmethod(liger_jsd)


class LigerFusedLinearJSDFunction:
    """`liger_fused_linear_jsd`"""

    apply = staticmethod(liger_fused_linear_jsd)


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
