"""Liger Kernel's layers for single model families, for programs that construct them by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.norms.rms_norm import LigerRMSNorm
from ..kernels.pointwise.fused_gate_up_swiglu import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP  # the same in Liger
from ..kernels.pointwise.geglu import LigerGEGLUMLP
from ..kernels.pointwise.swiglu import LigerSwiGLUMLP, check_silu, liger_swiglu
from ..kernels.rotary.llama4_rope import liger_llama4_text_rotary_pos_emb, liger_llama4_vision_rotary_pos_emb
from ..kernels.rotary.rope import liger_rope as liger_rotary_pos_emb
from ..kernels.rotary.vision_rope import liger_rotary_pos_emb_vision


def _rms_norm(family: str, *defaults: Any) -> Any:
    """`LigerRMSNormFor<family>`; defaults: of offset, casting_mode, init_fn and in_place."""

    class Norm(LigerRMSNorm):
        def __init__(
            self,
            hidden_size,
            eps=1e-6,
            offset=defaults[0],
            casting_mode=defaults[1],
            init_fn=defaults[2],
            in_place=defaults[3],
            row_mode=None,
        ) -> None:
            super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)

    Norm.__name__ = Norm.__qualname__ = f"LigerRMSNormFor{family}"
    Norm.__doc__ = f"`LigerRMSNorm` with the defaults of {family}."
    return Norm


LigerRMSNormForGemma = _rms_norm("Gemma", 1.0, "gemma", "zeros", True)
LigerRMSNormForGemma2 = _rms_norm("Gemma2", 1.0, "gemma", "zeros", False)
LigerRMSNormForQwen3Next = _rms_norm("Qwen3Next", 1.0, "gemma", "zeros", False)
LigerRMSNormForMuseGlimmerTextCentered = _rms_norm("MuseGlimmerTextCentered", 1.0, "gemma", "zeros", False)
LigerRMSNormForOlmo2 = _rms_norm("Olmo2", 0.0, "llama", "ones", False)
LigerRMSNormForGlm4 = _rms_norm("Glm4", 0.0, "llama", "ones", False)


class LigerRMSNormForGemma3(LigerRMSNorm):
    """`LigerRMSNormForGemma2` with the width called `dim`, as Gemma 3 does."""

    def __init__(self, dim, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4's norm. with_scale: False for a norm without a weight, which needs no `dim`"""

    def __init__(
        self, dim=None, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


LigerRMSNormForMuseGlimmer = LigerRMSNormForGemma4
LigerQwen3MoeSwiGLUMLP = LigerSwiGLUMLPForMuseGlimmer = LigerSwiGLUMLP


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """A gated MLP of HunYuan; layer_idx and is_shared_mlp are accepted without effect."""

    def __init__(self, config, layer_idx=None, is_shared_mlp=False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """A gated MLP of Gemma 4, twice as wide in layers that reuse keys and values if `use_double_wide_mlp` is set."""

    def __init__(self, config, layer_idx=None) -> None:
        if layer_idx is not None and getattr(config, "use_double_wide_mlp", False):
            modes = getattr(config, "kv_sharing_modes", None)
            if modes is not None:
                reuses = modes[layer_idx] == "reuse"
            else:  # an older config: the last num_kv_shared_layers layers
                layers, shared = (getattr(config, name, 0) for name in ("num_hidden_layers", "num_kv_shared_layers"))
                reuses = layer_idx >= layers - shared and shared > 0
            if reuses:
                config = copy.copy(config)
                config.intermediate_size *= 2
        super().__init__(config)


class LigerBlockSparseTop2MLP(torch.nn.Module):
    """One expert of Mixtral: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, config) -> None:
        super().__init__()
        check_silu("LigerBlockSparseTop2MLP", config.hidden_act)
        self.hidden_dim, self.ffn_dim = config.hidden_size, config.intermediate_size
        self.w1 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = torch.nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(liger_swiglu(self.w1(x), self.w3(x)))


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """Falcon H1's gated MLP; the config has multipliers of the gate and of the result (`mlp_multipliers`)."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = liger_swiglu(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(hidden) * self.down_multiplier  # multiplies the projection's bias too


LigerMLP = LigerSwiGLUMLP
LigerFalconH1MLP = LigerFalconH1SwiGLUMLP


def liger_rotary_pos_emb_gpt_oss(q, k, cos, sin) -> tuple:
    """`liger_rope` for GPT-OSS, where all columns of a head rotate, with one cosine and sine for each pair."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])


def apply_liger_llama4_rope_full(modeling_module) -> None:
    """Replace the two rotary functions of Llama 4's modeling module. Raises `TypeError` for another argument."""
    if not hasattr(modeling_module, "apply_rotary_emb") or not hasattr(modeling_module, "vision_apply_rotary_emb"):
        kind = getattr(modeling_module, "__name__", type(modeling_module).__name__)
        raise TypeError(f"apply_liger_llama4_rope_full: {kind} is not transformers.models.llama4.modeling_llama4")
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb


@dataclass
class LigerFusedNeighborhoodAttentionConfig:
    """The arguments of `LigerFusedNeighborhoodAttentionLayer`; `to_dict()` returns them by name."""

    hidden_size: int = 768
    num_heads: int = 12
    kernel_size: int = 7
    dilation: int = 1
    bias: bool = True
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    scale: float | None = None

    def to_dict(self) -> dict:
        return dict(vars(self))


__all__ = sorted(name for name in globals() if name.startswith("Liger")) + [
    "apply_liger_llama4_rope_full",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision",
]
