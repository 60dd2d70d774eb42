"""The kernels as functions, under the names and with the arguments of Liger 0.8.5.

Each one lives in `liger_hw/kernels/<op>.py`; importing this module loads none of them.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "liger_rms_norm": "rms_norm",
    "liger_fused_add_rms_norm": "fused_add_rms_norm",
    "liger_rope": "rope",
    "liger_swiglu": "swiglu",
    "liger_fused_gate_up_swiglu": "fused_gate_up_swiglu",
    "liger_geglu": "geglu",
    "liger_relu_squared": "relu_squared",
    "liger_layer_norm": "layer_norm",
    "liger_cross_entropy": "cross_entropy",
    "liger_fused_linear_cross_entropy": "fused_linear_cross_entropy",
    "CrossEntropyOutput": "cross_entropy",
    "liger_fused_linear_scaled_cross_entropy": "fused_linear_scaled_cross_entropy",
    "liger_fused_linear_scaled_cross_entropy_tp": "_scaled_cross_entropy_tp",
    "liger_fused_linear_jsd": "fused_linear_jsd",
    "liger_fused_linear_kl_div": "fused_linear_kl_div",
    "liger_jsd": "jsd",
    "liger_kl_div": "kl_div",
    "liger_tvd": "tvd",
    "liger_fused_ce_tvd": "fused_ce_tvd",
    "liger_vocab_parallel_cross_entropy": "vocab_parallel_cross_entropy",
    "liger_group_norm": "group_norm",
    "liger_modulated_rms_norm": "modulated_rms_norm",
    "liger_poly_norm": "poly_norm",
    "liger_dyt": "dyt",
    "liger_softmax": "softmax",
    "liger_sparsemax": "sparsemax",
    "liger_qwen2vl_mrope": "qwen2vl_mrope",
    "liger_llama4_rope": "llama4_rope",
    "liger_vision_rope": "vision_rope",
    "liger_interleaved_rope": "interleaved_rope",
    "liger_qk_norm_rope": "qk_norm_rope",
    "liger_embedding": "embedding",
    "liger_multi_token_attention": "multi_token_attention",
}
"""Name -> the file in `liger_hw/kernels` that defines it."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOME)}")
    value = getattr(importlib.import_module(f"liger_hw.kernels.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
