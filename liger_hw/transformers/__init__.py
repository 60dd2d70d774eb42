"""Hugging Face side: patch functions for model families, layers, and the kernels as functions (`functional`).

from liger_hw.transformers import apply_liger_kernel_to_mistral

apply_liger_kernel_to_mistral()                          # the classes, before a model is made or after
report = apply_liger_kernel_to_mistral(model=model)      # this model alone
print(report); report.revert()
"""

from __future__ import annotations

import importlib
from typing import Any

from .models import specs

_HOME = {
    "LigerRMSNorm": "kernels.rms_norm",
    "LigerFusedAddRMSNorm": "kernels.fused_add_rms_norm",
    "LigerLayerNorm": "kernels.layer_norm",
    "LigerGroupNorm": "kernels.group_norm",
    "LigerModulatedRMSNorm": "kernels.modulated_rms_norm",
    "LigerPolyNorm": "kernels.poly_norm",
    "LigerDyT": "kernels.dyt",
    "LigerSwiGLUMLP": "kernels.swiglu",
    "LigerPhi3SwiGLUMLP": "kernels.fused_gate_up_swiglu",
    "LigerGEGLUMLP": "kernels.geglu",
    "LigerReLUSquared": "kernels.relu_squared",
    "LigerSoftmax": "kernels.softmax",
    "LigerSparsemax": "kernels.sparsemax",
    "LigerCrossEntropyLoss": "kernels.cross_entropy",
    "LigerFusedLinearCrossEntropyLoss": "kernels.fused_linear_cross_entropy",
    "LigerFusedLinearJSD": "kernels.fused_linear_jsd",
    "LigerFusedLinearKLDivLoss": "kernels.fused_linear_kl_div",
    "LigerFusedCETVDLoss": "kernels.fused_ce_tvd",
    "LigerJSD": "kernels.jsd",
    "LigerKLDIVLoss": "kernels.kl_div",
    "LigerTVDLoss": "kernels.tvd",
    "LigerVocabParallelCrossEntropy": "kernels.vocab_parallel_cross_entropy",
    "LigerEmbedding": "kernels.embedding",
    "LigerMultiTokenAttention": "kernels.multi_token_attention",
    "LigerQKNormRope": "kernels.qk_norm_rope",
    "liger_multimodal_rotary_pos_emb": "kernels.qwen2vl_mrope",
    "liger_rotary_pos_emb_vision": "kernels.vision_rope",
    "liger_llama4_text_rotary_pos_emb": "kernels.llama4_rope",
    "liger_llama4_vision_rotary_pos_emb": "kernels.llama4_rope",
    "PatchReport": "transformers.report",
    "revert": "transformers.report",
    "functional": "transformers.functional",
    "AutoLigerKernelForCausalLM": "transformers.auto_model",
    **dict.fromkeys(
        (
            "patch",
            "MODEL_TYPE_TO_APPLY_LIGER_FN",
            "_apply_liger_kernel",
            "_apply_liger_kernel_to_instance",
            *(spec.function_name for spec in specs().values()),
        ),
        "transformers.apply",
    ),
}
"""Public name -> module of liger_hw that defines it; loaded on first use, so importing this package loads no torch."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        import difflib

        near = difflib.get_close_matches(name, _HOME, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module = importlib.import_module(f"liger_hw.{_HOME[name]}")
    value = module if _HOME[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
