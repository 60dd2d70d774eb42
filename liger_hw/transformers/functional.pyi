# Made by `python ci/stubs.py`; do not edit.
from liger_hw.kernels.attention.fused_neighborhood_attention import (
    liger_fused_neighborhood_attention as liger_fused_neighborhood_attention,
)
from liger_hw.kernels.attention.multi_token_attention import liger_multi_token_attention as liger_multi_token_attention
from liger_hw.kernels.attention.softmax import liger_softmax as liger_softmax
from liger_hw.kernels.attention.sparsemax import liger_sparsemax as liger_sparsemax
from liger_hw.kernels.embedding.embedding import liger_embedding as liger_embedding
from liger_hw.kernels.float8.float8_linear import liger_float8_linear as liger_float8_linear
from liger_hw.kernels.float8.fused_add_rms_norm_float8 import (
    liger_fused_add_rms_norm_float8 as liger_fused_add_rms_norm_float8,
)
from liger_hw.kernels.float8.geglu_float8 import liger_geglu_float8 as liger_geglu_float8
from liger_hw.kernels.float8.layer_norm_float8 import liger_layer_norm_float8 as liger_layer_norm_float8
from liger_hw.kernels.float8.quantize_float8 import liger_quantize_float8 as liger_quantize_float8
from liger_hw.kernels.float8.rms_norm_float8 import liger_rms_norm_float8 as liger_rms_norm_float8
from liger_hw.kernels.float8.swiglu_float8 import liger_swiglu_float8 as liger_swiglu_float8
from liger_hw.kernels.heads.fused_linear_cross_entropy import (
    liger_fused_linear_cross_entropy as liger_fused_linear_cross_entropy,
)
from liger_hw.kernels.heads.fused_linear_cross_entropy_tp import (
    liger_fused_linear_cross_entropy_tp as liger_fused_linear_cross_entropy_tp,
)
from liger_hw.kernels.heads.fused_linear_jsd import liger_fused_linear_jsd as liger_fused_linear_jsd
from liger_hw.kernels.heads.fused_linear_kl_div import liger_fused_linear_kl_div as liger_fused_linear_kl_div
from liger_hw.kernels.heads.fused_linear_log_probs import liger_fused_linear_log_probs as liger_fused_linear_log_probs
from liger_hw.kernels.heads.fused_linear_scaled_cross_entropy import (
    liger_fused_linear_scaled_cross_entropy as liger_fused_linear_scaled_cross_entropy,
)
from liger_hw.kernels.heads.fused_linear_scaled_cross_entropy import (
    liger_fused_linear_scaled_cross_entropy_tp as liger_fused_linear_scaled_cross_entropy_tp,
)
from liger_hw.kernels.hybrid.gated_delta_inputs import liger_gated_delta_inputs as liger_gated_delta_inputs
from liger_hw.kernels.hybrid.short_conv import liger_short_conv as liger_short_conv
from liger_hw.kernels.losses.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
from liger_hw.kernels.losses.cross_entropy import liger_cross_entropy as liger_cross_entropy
from liger_hw.kernels.losses.fused_ce_tvd import liger_fused_ce_tvd as liger_fused_ce_tvd
from liger_hw.kernels.losses.jsd import liger_jsd as liger_jsd
from liger_hw.kernels.losses.kl_div import liger_kl_div as liger_kl_div
from liger_hw.kernels.losses.log_probs import LogProbsOutput as LogProbsOutput
from liger_hw.kernels.losses.log_probs import liger_log_probs as liger_log_probs
from liger_hw.kernels.losses.tvd import liger_tvd as liger_tvd
from liger_hw.kernels.losses.vocab_parallel_cross_entropy import (
    liger_vocab_parallel_cross_entropy as liger_vocab_parallel_cross_entropy,
)
from liger_hw.kernels.moe.fused_moe import liger_fused_moe as liger_fused_moe
from liger_hw.kernels.norms.dyt import liger_dyt as liger_dyt
from liger_hw.kernels.norms.fused_add_rms_norm import liger_fused_add_rms_norm as liger_fused_add_rms_norm
from liger_hw.kernels.norms.gated_rms_norm import liger_gated_rms_norm as liger_gated_rms_norm
from liger_hw.kernels.norms.group_norm import liger_group_norm as liger_group_norm
from liger_hw.kernels.norms.layer_norm import liger_layer_norm as liger_layer_norm
from liger_hw.kernels.norms.modulated_rms_norm import liger_modulated_rms_norm as liger_modulated_rms_norm
from liger_hw.kernels.norms.poly_norm import liger_poly_norm as liger_poly_norm
from liger_hw.kernels.norms.rms_norm import liger_rms_norm as liger_rms_norm
from liger_hw.kernels.pointwise.fused_gate_up_swiglu import liger_fused_gate_up_swiglu as liger_fused_gate_up_swiglu
from liger_hw.kernels.pointwise.geglu import liger_geglu as liger_geglu
from liger_hw.kernels.pointwise.relu_squared import liger_relu_squared as liger_relu_squared
from liger_hw.kernels.pointwise.swiglu import liger_swiglu as liger_swiglu
from liger_hw.kernels.residual.attn_res import liger_attn_res as liger_attn_res
from liger_hw.kernels.residual.mhc_coeffs import liger_mhc_coeffs as liger_mhc_coeffs
from liger_hw.kernels.residual.mhc_post_res import liger_mhc_post_res as liger_mhc_post_res
from liger_hw.kernels.residual.mhc_pre import liger_mhc_pre as liger_mhc_pre
from liger_hw.kernels.rotary.interleaved_rope import liger_interleaved_rope as liger_interleaved_rope
from liger_hw.kernels.rotary.llama4_rope import liger_llama4_rope as liger_llama4_rope
from liger_hw.kernels.rotary.qk_norm_rope import liger_qk_norm_rope as liger_qk_norm_rope
from liger_hw.kernels.rotary.qwen2vl_mrope import liger_qwen2vl_mrope as liger_qwen2vl_mrope
from liger_hw.kernels.rotary.rope import liger_rope as liger_rope
from liger_hw.kernels.rotary.vision_rope import liger_vision_rope as liger_vision_rope
