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

from ..kernels.pointwise.tiled_mlp import apply_tiled_mlp
from ..transformers import functional
from .functional import cross_entropy, fused_linear_cross_entropy


def _applied(function: Callable[..., Any], *unused: int) -> Any:
    """A class whose `apply` is this function. unused: positions of Liger's arguments that change nothing here."""

    def apply(*args: Any) -> Any:
        return function(*(arg for place, arg in enumerate(args) if place not in unused))

    apply = apply if unused else function
    return type(function.__name__, (), {"__doc__": f"`{function.__name__}`", "apply": staticmethod(apply)})


LigerAttnResFunction = _applied(functional.liger_attn_res)
LigerCrossEntropyFunction = _applied(cross_entropy)
LigerDyTFunction = _applied(functional.liger_dyt)
LigerEmbeddingFunction = _applied(functional.liger_embedding)
LigerFusedAddRMSNormFunction = _applied(functional.liger_fused_add_rms_norm)
LigerFusedCETVDFunction = _applied(functional.liger_fused_ce_tvd)
LigerFusedGateUpSiLUMulFunction = _applied(functional.liger_fused_gate_up_swiglu, 1)  # in_place
LigerFusedLinearCrossEntropyFunction = _applied(fused_linear_cross_entropy, 15, 16)  # ce_impl, ce_mode
LigerFusedLinearJSDFunction = _applied(functional.liger_fused_linear_jsd, 9, 10)  # jsd_impl, jsd_mode
LigerFusedLinearKLDivFunction = _applied(functional.liger_fused_linear_kl_div)
LigerFusedLinearScaledCrossEntropyFunction = _applied(
    functional.liger_fused_linear_scaled_cross_entropy, 5
)  # m_tiles_per_cluster
LigerFusedLinearScaledCrossEntropyTPFunction = _applied(functional.liger_fused_linear_scaled_cross_entropy_tp)
LigerFusedMoEFunction = _applied(functional.liger_fused_moe)
LigerFusedNeighborhoodAttentionFunction = _applied(functional.liger_fused_neighborhood_attention)
LigerGELUMulFunction = _applied(functional.liger_geglu)
LigerGroupNormFunction = _applied(functional.liger_group_norm)
LigerJSDFunction = _applied(functional.liger_jsd, 5, 6)  # jsd_impl, jsd_mode
LigerLayerNormFunction = _applied(functional.liger_layer_norm)
LigerLlama4RopeFunction = _applied(functional.liger_llama4_rope, 3)  # BLOCK_SIZE
LigerMHCPostResFunction = _applied(functional.liger_mhc_post_res)
LigerMHCPreFunction = _applied(functional.liger_mhc_pre)
LigerModulatedRMSNormFunction = _applied(functional.liger_modulated_rms_norm)
LigerMultiTokenAttentionFunction = _applied(functional.liger_multi_token_attention)
LigerPolyNormFunction = _applied(functional.liger_poly_norm)
LigerQwen2VLMRopeFunction = _applied(functional.liger_qwen2vl_mrope)
LigerRMSNormFunction = _applied(functional.liger_rms_norm, 6)  # row_mode
LigerReLUSquaredFunction = _applied(functional.liger_relu_squared)
LigerRopeFunction = _applied(functional.liger_rope)
LigerSiLUMulFunction = _applied(functional.liger_swiglu)
LigerSoftmaxFunction = _applied(functional.liger_softmax)
LigerSparsemaxFunction = _applied(functional.liger_sparsemax)
LigerVocabParallelCEFunction = _applied(functional.liger_vocab_parallel_cross_entropy)


class LigerMHCCoeffsFunction:
    """`liger_mhc_coeffs` with all arguments by position."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        phi: torch.Tensor,
        b: torch.Tensor,
        alpha_pre: torch.Tensor,
        alpha_post: torch.Tensor,
        alpha_res: torch.Tensor,
        allow_fp32: bool,
        tmax: int,
        *numbers: float,
    ) -> tuple[torch.Tensor, ...]:
        names = "rms_eps", "pre_eps", "sinkhorn_eps", "post_mult"
        options = {"allow_fp32": allow_fp32, "tmax": tmax, **dict(zip(names, numbers, strict=True))}
        return functional.liger_mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)


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
        return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


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
        return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


class LigerTiledMLPFunction:
    """`apply_tiled_mlp` in `shards` tiles; compute_params change nothing."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        mlp_module: torch.nn.Module,
        x: torch.Tensor,
        shards: int,
        compute_params: Any = None,
    ) -> torch.Tensor:
        return apply_tiled_mlp(fn, mlp_module, x, shards)


class LigerMLPFunction:
    """down(silu(gate_multiplier * gate(x)) * up(x)) * down_multiplier of three linear layers without a bias."""

    @staticmethod
    def apply(
        input: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> torch.Tensor:
        gate, up = (torch.nn.functional.linear(input, weight) for weight in (gate_weight, up_weight))
        y = torch.nn.functional.linear(functional.liger_swiglu(gate, up, gate_multiplier), down_weight)
        return y if down_multiplier == 1.0 else y * down_multiplier


__all__ = sorted(name for name in globals() if name.startswith("Liger"))
