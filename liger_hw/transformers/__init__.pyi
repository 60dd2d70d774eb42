# Made by `python ci/stubs.py`; do not edit.
from liger_hw.kernels.attention.fused_neighborhood_attention import (
    LigerFusedNeighborhoodAttention as LigerFusedNeighborhoodAttention,
)
from liger_hw.kernels.attention.fused_neighborhood_attention import (
    LigerFusedNeighborhoodAttentionLayer as LigerFusedNeighborhoodAttentionLayer,
)
from liger_hw.kernels.attention.multi_token_attention import LigerMultiTokenAttention as LigerMultiTokenAttention
from liger_hw.kernels.attention.softmax import LigerSoftmax as LigerSoftmax
from liger_hw.kernels.attention.sparsemax import LigerSparsemax as LigerSparsemax
from liger_hw.kernels.embedding.embedding import LigerEmbedding as LigerEmbedding
from liger_hw.kernels.float8.quantize_float8 import Float8Rows as Float8Rows
from liger_hw.kernels.heads.fused_linear_cross_entropy import (
    LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss,
)
from liger_hw.kernels.heads.fused_linear_jsd import LigerFusedLinearJSD as LigerFusedLinearJSD
from liger_hw.kernels.heads.fused_linear_kl_div import LigerFusedLinearKLDivLoss as LigerFusedLinearKLDivLoss
from liger_hw.kernels.losses.cross_entropy import LigerCrossEntropyLoss as LigerCrossEntropyLoss
from liger_hw.kernels.losses.fused_ce_tvd import LigerFusedCETVDLoss as LigerFusedCETVDLoss
from liger_hw.kernels.losses.jsd import LigerJSD as LigerJSD
from liger_hw.kernels.losses.kl_div import LigerKLDIVLoss as LigerKLDIVLoss
from liger_hw.kernels.losses.tvd import LigerTVDLoss as LigerTVDLoss
from liger_hw.kernels.losses.vocab_parallel_cross_entropy import (
    LigerVocabParallelCrossEntropy as LigerVocabParallelCrossEntropy,
)
from liger_hw.kernels.moe.fused_moe import LigerExperts as LigerExperts
from liger_hw.kernels.norms.dyt import LigerDyT as LigerDyT
from liger_hw.kernels.norms.fused_add_rms_norm import LigerFusedAddRMSNorm as LigerFusedAddRMSNorm
from liger_hw.kernels.norms.gated_rms_norm import LigerGatedRMSNorm as LigerGatedRMSNorm
from liger_hw.kernels.norms.group_norm import LigerGroupNorm as LigerGroupNorm
from liger_hw.kernels.norms.layer_norm import LigerLayerNorm as LigerLayerNorm
from liger_hw.kernels.norms.modulated_rms_norm import LigerModulatedRMSNorm as LigerModulatedRMSNorm
from liger_hw.kernels.norms.poly_norm import LigerPolyNorm as LigerPolyNorm
from liger_hw.kernels.norms.rms_norm import LigerRMSNorm as LigerRMSNorm
from liger_hw.kernels.pointwise.fused_gate_up_swiglu import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
from liger_hw.kernels.pointwise.geglu import LigerGEGLUMLP as LigerGEGLUMLP
from liger_hw.kernels.pointwise.geglu import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
from liger_hw.kernels.pointwise.relu_squared import LigerReLUSquared as LigerReLUSquared
from liger_hw.kernels.pointwise.swiglu import LigerSwiGLUMLP as LigerSwiGLUMLP
from liger_hw.kernels.pointwise.swiglu import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
from liger_hw.kernels.pointwise.tiled_mlp import apply_tiled_mlp as apply_tiled_mlp
from liger_hw.kernels.residual.attn_res import LigerAttnRes as LigerAttnRes
from liger_hw.kernels.residual.mhc_post_res import LigerMHC as LigerMHC
from liger_hw.kernels.residual.mhc_post_res import liger_mhc_apply as liger_mhc_apply
from liger_hw.kernels.residual.mhc_post_res import liger_mhc_forward as liger_mhc_forward
from liger_hw.kernels.rotary.llama4_rope import liger_llama4_text_rotary_pos_emb as liger_llama4_text_rotary_pos_emb
from liger_hw.kernels.rotary.llama4_rope import liger_llama4_vision_rotary_pos_emb as liger_llama4_vision_rotary_pos_emb
from liger_hw.kernels.rotary.qk_norm_rope import LigerQKNormRope as LigerQKNormRope
from liger_hw.kernels.rotary.qwen2vl_mrope import liger_multimodal_rotary_pos_emb as liger_multimodal_rotary_pos_emb
from liger_hw.kernels.rotary.vision_rope import liger_rotary_pos_emb_vision as liger_rotary_pos_emb_vision
from liger_hw.recompute.levels import Levels
from liger_hw.transformers import functional as functional
from liger_hw.transformers.apply import MODEL_TYPE_TO_APPLY_LIGER_FN as MODEL_TYPE_TO_APPLY_LIGER_FN
from liger_hw.transformers.apply import Model
from liger_hw.transformers.apply import patch as patch
from liger_hw.transformers.auto_model import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from liger_hw.transformers.experts import register_experts as register_experts
from liger_hw.transformers.packing import packing_leaks as packing_leaks
from liger_hw.transformers.report import PatchReport as PatchReport
from liger_hw.transformers.report import revert as revert

def apply_liger_kernel_to_deepseek_v2(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run deepseek_v2 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_deepseek_v3(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run deepseek_v3 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_deepseek_v4(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = False,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run deepseek_v4 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_exaone4(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run exaone4 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_falcon_h1(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run falcon_h1 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_gemma(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run gemma models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_gemma2(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run gemma2 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_gemma3(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run gemma3 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_gemma3_text(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run gemma3_text models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_gemma4(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = False,
    rms_norm: bool = True,
    geglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run gemma4 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_gemma4_text(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run gemma4_text models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_glm4(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run glm4 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_glm4v(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run glm4v models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_glm4v_moe(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run glm4v_moe models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_gpt_oss(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = False,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run gpt_oss models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_granite(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool | None = None,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run granite models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_hunyuan_v1_dense(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run hunyuan_v1_dense models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_hunyuan_v1_moe(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run hunyuan_v1_moe models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_internvl(
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
    **kwargs: object,
) -> PatchReport:
    """Run internvl models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_llama(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run llama models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_llama4(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    layer_norm: bool = True,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run llama4 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_llava(
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
    **kwargs: object,
) -> PatchReport:
    """Run llava models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_ministral(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run ministral models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_mistral(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run mistral models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_mixtral(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run mixtral models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_mllama(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run mllama models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_muse_glimmer(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run muse_glimmer models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_nemotron(
    relu_squared: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
    **kwargs: object,
) -> PatchReport:
    """Run nemotron models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_olmo2(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run olmo2 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_olmo3(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run olmo3 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_paligemma(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run paligemma models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_phi3(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run phi3 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_pixtral(
    rope: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run pixtral models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen2(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen2 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen2_5_vl(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen2_5_vl models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen2_vl(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen2_vl models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen3(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen3 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen3_5(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen3_5 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen3_5_moe(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen3_5_moe models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen3_moe(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen3_moe models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen3_next(
    rope: bool = False,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen3_next models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen3_vl(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = False,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen3_vl models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_qwen3_vl_moe(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run qwen3_vl_moe models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_smollm3(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
) -> PatchReport:
    """Run smollm3 models on the kernels; keywords as of `patch`."""

def apply_liger_kernel_to_smolvlm(
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    model: Model | None = None,
    *,
    activations: Levels | None = None,
    **kwargs: object,
) -> PatchReport:
    """Run smolvlm models on the kernels; keywords as of `patch`."""
