"""For `liger_kernel.ops`: Liger Kernel's autograd functions.

Each class has only `apply`, with Liger's arguments in Liger's order, which calls the public function. The public
function checks its arguments, also under torch.compile, which would skip the `apply` of an autograd.Function. Arguments
that choose among Liger's implementations or allow in-place gradients have no effect.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..kernels.pointwise.tiled_mlp import apply_tiled_mlp
from ..transformers import functional
from .functional import cross_entropy, fused_linear_cross_entropy, kl_div


def _applied(function: Callable[..., Any], *unused: int) -> Any:
    """A class whose `apply` calls the function. unused: positions of Liger's arguments that have no effect."""

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


def _mhc_coeffs(
    x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
):
    numbers = {"rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps, "post_mult": post_mult}
    weights = phi, b, alpha_pre, alpha_post, alpha_res
    return functional.liger_mhc_coeffs(x, *weights, allow_fp32=allow_fp32, tmax=tmax, **numbers)


def _mlp(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
    """down(silu(gate_multiplier * gate(x)) * up(x)) * down_multiplier, with linear layers without bias."""
    gate, up = (torch.nn.functional.linear(input, weight) for weight in (gate_weight, up_weight))
    y = torch.nn.functional.linear(functional.liger_swiglu(gate, up, gate_multiplier), down_weight)
    return y if down_multiplier == 1.0 else y * down_multiplier


def _tvd(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
    return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


LigerKLDivLossFunction = _applied(kl_div)
LigerMHCCoeffsFunction = _applied(_mhc_coeffs)
LigerMLPFunction = _applied(_mlp)
LigerTVDLossFunction = _applied(_tvd)
LigerTiledMLPFunction = _applied(apply_tiled_mlp, 4)  # compute_params

__all__ = sorted(name for name in globals() if name.startswith("Liger"))
