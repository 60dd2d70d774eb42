"""The ops: one family is one package, one op is one file in it.

`EXPORTS` is the one line an op needs beside its file: where it is and which public names it defines. The registry's
table of ops, `liger_hw.transformers` and `liger_hw.transformers.functional` read it; importing this module imports none
of them.
"""

from __future__ import annotations

EXPORTS: dict[str, tuple[str, ...]] = {
    "norms.rms_norm": ("liger_rms_norm", "LigerRMSNorm"),
    "norms.fused_add_rms_norm": ("liger_fused_add_rms_norm", "LigerFusedAddRMSNorm"),
    "norms.layer_norm": ("liger_layer_norm", "LigerLayerNorm"),
    "norms.group_norm": ("liger_group_norm", "LigerGroupNorm"),
    "norms.modulated_rms_norm": ("liger_modulated_rms_norm", "LigerModulatedRMSNorm"),
    "norms.poly_norm": ("liger_poly_norm", "LigerPolyNorm"),
    "norms.gated_rms_norm": ("liger_gated_rms_norm", "LigerGatedRMSNorm"),
    "norms.dyt": ("liger_dyt", "LigerDyT"),
    "pointwise.swiglu": ("liger_swiglu", "LigerSwiGLUMLP", "LigerTiledSwiGLUMLP"),
    "pointwise.fused_gate_up_swiglu": ("liger_fused_gate_up_swiglu", "LigerPhi3SwiGLUMLP"),
    "pointwise.geglu": ("liger_geglu", "LigerGEGLUMLP", "LigerTiledGEGLUMLP"),
    "pointwise.relu_squared": ("liger_relu_squared", "LigerReLUSquared"),
    "rotary.rope": ("liger_rope",),
    "rotary.qwen2vl_mrope": ("liger_qwen2vl_mrope", "liger_multimodal_rotary_pos_emb"),
    "rotary.llama4_rope": (
        "liger_llama4_rope",
        "liger_llama4_text_rotary_pos_emb",
        "liger_llama4_vision_rotary_pos_emb",
    ),
    "rotary.vision_rope": ("liger_vision_rope", "liger_rotary_pos_emb_vision"),
    "rotary.interleaved_rope": ("liger_interleaved_rope",),
    "rotary.qk_norm_rope": ("liger_qk_norm_rope", "LigerQKNormRope"),
    "losses.cross_entropy": ("liger_cross_entropy", "CrossEntropyOutput", "LigerCrossEntropyLoss"),
    "losses.jsd": ("liger_jsd", "LigerJSD"),
    "losses.kl_div": ("liger_kl_div", "LigerKLDIVLoss"),
    "losses.tvd": ("liger_tvd", "LigerTVDLoss"),
    "losses.fused_ce_tvd": ("liger_fused_ce_tvd", "LigerFusedCETVDLoss"),
    "losses.vocab_parallel_cross_entropy": ("liger_vocab_parallel_cross_entropy", "LigerVocabParallelCrossEntropy"),
    "losses.log_probs": ("liger_log_probs", "LogProbsOutput"),
    "heads.fused_linear_cross_entropy": ("liger_fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss"),
    "heads.fused_linear_cross_entropy_tp": ("liger_fused_linear_cross_entropy_tp",),
    "heads.fused_linear_log_probs": ("liger_fused_linear_log_probs",),
    "heads.fused_linear_scaled_cross_entropy": (
        "liger_fused_linear_scaled_cross_entropy",
        "liger_fused_linear_scaled_cross_entropy_tp",
    ),
    "heads.fused_linear_jsd": ("liger_fused_linear_jsd", "LigerFusedLinearJSD"),
    "heads.fused_linear_kl_div": ("liger_fused_linear_kl_div", "LigerFusedLinearKLDivLoss"),
    "heads.mm_int8int2": (),
    "attention.softmax": ("liger_softmax", "LigerSoftmax"),
    "attention.sparsemax": ("liger_sparsemax", "LigerSparsemax"),
    "attention.multi_token_attention": ("liger_multi_token_attention", "LigerMultiTokenAttention"),
    "attention.fused_neighborhood_attention": (
        "liger_fused_neighborhood_attention",
        "LigerFusedNeighborhoodAttention",
        "LigerFusedNeighborhoodAttentionLayer",
    ),
    "residual.mhc_coeffs": ("liger_mhc_coeffs",),
    "residual.mhc_pre": ("liger_mhc_pre",),
    "residual.mhc_post_res": ("liger_mhc_post_res", "liger_mhc_apply", "liger_mhc_forward", "LigerMHC"),
    "residual.attn_res": ("liger_attn_res", "LigerAttnRes"),
    "hybrid.gated_delta_inputs": ("liger_gated_delta_inputs",),
    "hybrid.short_conv": ("liger_short_conv",),
    "moe.fused_moe": ("liger_fused_moe", "LigerExperts"),
    "float8.float8_linear": ("liger_float8_linear",),
    "float8.swiglu_float8": ("liger_swiglu_float8",),
    "float8.geglu_float8": ("liger_geglu_float8",),
    "float8.rms_norm_float8": ("liger_rms_norm_float8",),
    "float8.fused_add_rms_norm_float8": ("liger_fused_add_rms_norm_float8",),
    "float8.layer_norm_float8": ("liger_layer_norm_float8",),
    "float8.quantize_float8": ("liger_quantize_float8", "Float8Rows"),
    "embedding.embedding": ("liger_embedding", "LigerEmbedding"),
}
"""`family.op`, the module below this package -> the public names that it defines."""


def home_of(name: str) -> str | None:
    """The full name of the module that defines the op `name` (`rms_norm`), or None where there is no such op."""
    for module in EXPORTS:
        if module.rpartition(".")[2] == name:
            return f"{__name__}.{module}"
    return None
