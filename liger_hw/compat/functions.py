"""Behind `liger_kernel.ops`: Liger Kernel's autograd functions, which are liger_hw's functions here.

Each has the one thing that code written for Liger does with it, `apply`, with Liger's arguments in Liger's order. It
goes through the public function, which checks its arguments: an op's own autograd class does not, and a kernel would
read past the end of a weight that is too short. Under torch.compile that holds too, since no class here is an
autograd.Function, of which torch traces `forward` and passes `apply` over.
Arguments that choose among Liger's implementations (`*_impl`, `*_mode`), or say where a gradient may be written, change
nothing here.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..transformers.functional import (
    liger_dyt,
    liger_embedding,
    liger_fused_add_rms_norm,
    liger_fused_ce_tvd,
    liger_fused_gate_up_swiglu,
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
    liger_fused_linear_scaled_cross_entropy,
    liger_fused_linear_scaled_cross_entropy_tp,
    liger_fused_moe,
    liger_geglu,
    liger_group_norm,
    liger_jsd,
    liger_kl_div,
    liger_layer_norm,
    liger_llama4_rope,
    liger_modulated_rms_norm,
    liger_multi_token_attention,
    liger_poly_norm,
    liger_qwen2vl_mrope,
    liger_relu_squared,
    liger_rms_norm,
    liger_rope,
    liger_softmax,
    liger_sparsemax,
    liger_swiglu,
    liger_tvd,
    liger_vocab_parallel_cross_entropy,
)
from .functional import cross_entropy, fused_linear_cross_entropy


def _applied(function: Callable[..., Any]) -> Any:
    """A class whose `apply` is this function."""
    return type(function.__name__, (), {"__doc__": f"`{function.__name__}`", "apply": staticmethod(function)})


LigerCrossEntropyFunction = _applied(cross_entropy)
LigerDyTFunction = _applied(liger_dyt)
LigerEmbeddingFunction = _applied(liger_embedding)
LigerFusedAddRMSNormFunction = _applied(liger_fused_add_rms_norm)
LigerFusedCETVDFunction = _applied(liger_fused_ce_tvd)
LigerFusedLinearKLDivFunction = _applied(liger_fused_linear_kl_div)
LigerFusedLinearScaledCrossEntropyTPFunction = _applied(liger_fused_linear_scaled_cross_entropy_tp)
LigerFusedMoEFunction = _applied(liger_fused_moe)
LigerGELUMulFunction = _applied(liger_geglu)
LigerGroupNormFunction = _applied(liger_group_norm)
LigerLayerNormFunction = _applied(liger_layer_norm)
LigerModulatedRMSNormFunction = _applied(liger_modulated_rms_norm)
LigerMultiTokenAttentionFunction = _applied(liger_multi_token_attention)
LigerPolyNormFunction = _applied(liger_poly_norm)
LigerQwen2VLMRopeFunction = _applied(liger_qwen2vl_mrope)
LigerReLUSquaredFunction = _applied(liger_relu_squared)
LigerRopeFunction = _applied(liger_rope)
LigerSiLUMulFunction = _applied(liger_swiglu)
LigerSoftmaxFunction = _applied(liger_softmax)
LigerSparsemaxFunction = _applied(liger_sparsemax)
LigerVocabParallelCEFunction = _applied(liger_vocab_parallel_cross_entropy)


class LigerFusedGateUpSiLUMulFunction:
    """`liger_fused_gate_up_swiglu`"""

    @staticmethod
    def apply(
        y: torch.Tensor, in_place: bool = False, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
    ) -> torch.Tensor:
        return liger_fused_gate_up_swiglu(y, gate_multiplier, down_multiplier)


class LigerFusedLinearCrossEntropyFunction:
    """`fused_linear_cross_entropy`, in whose arguments there are two more."""

    @staticmethod
    def apply(
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
        tensors = _input, weight, target, bias, ce_weight
        settings = ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype
        more = use_token_scaling, return_token_accuracy, return_predicted_tokens, chunk_mem_const
        return fused_linear_cross_entropy(*tensors, *settings, *more)


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


class LigerLlama4RopeFunction:
    """`liger_llama4_rope`"""

    @staticmethod
    def apply(
        q: torch.Tensor, k: torch.Tensor, freqs_cis: torch.Tensor, BLOCK_SIZE: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return liger_llama4_rope(q, k, freqs_cis)


class LigerRMSNormFunction:
    """`liger_rms_norm`"""

    @staticmethod
    def apply(
        X: torch.Tensor,
        W: torch.Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> torch.Tensor:
        return liger_rms_norm(X, W, eps, offset, casting_mode, in_place)


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
