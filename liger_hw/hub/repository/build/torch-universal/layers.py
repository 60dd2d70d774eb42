"""Layers that replace those of transformers, under the names that transformers registers.

`kernels.kernelize` binds the `forward` of one of these classes to a module of transformers. So a layer has no state and
no constructor, `self` is the module, and `type(self).forward` is the original forward. A layer calls the original
forward where the kernel would not compute the same: for an unsupported dtype, width, activation or module structure.
"""

from __future__ import annotations

import torch
from torch import nn

from liger_hw.transformers.experts import experts_forward
from liger_hw.transformers.functional import (
    liger_gated_rms_norm,
    liger_geglu,
    liger_layer_norm,
    liger_rms_norm,
    liger_rope,
    liger_swiglu,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SILU = ("SiLU", "SiLUActivation")
_GELU = {"GELUTanh": "tanh", "GELUActivation": "none"}
"""Activation class in transformers -> the argument `approximate` of `liger_geglu`."""


def _share_a_dtype(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether all tensors have the same dtype, and it is one of _DTYPES."""
    return x.dtype in _DTYPES and all(other is None or other.dtype == x.dtype for other in others)


def _activation(module: nn.Module) -> str:
    """The name of a gated MLP's activation class; "" if the module is no gated MLP."""
    has_both = hasattr(module, "gate_up_proj") or (hasattr(module, "gate_proj") and hasattr(module, "up_proj"))
    if not has_both or not hasattr(module, "down_proj"):
        return ""
    return type(module.act_fn if hasattr(module, "act_fn") else getattr(module, "activation_fn", None)).__name__


def _gate_and_up(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if hasattr(module, "gate_up_proj"):
        return module.gate_up_proj(x).chunk(2, dim=-1)
    return module.gate_proj(x), module.up_proj(x)


class _Layer(nn.Module):
    """The attributes that `kernels` reads: the layer supports training and torch.compile."""

    has_backward = True
    can_torch_compile = True


class RMSNorm(_Layer):
    """RMSNorm of Llama: the normalised input is rounded to its dtype, then scaled by the weight."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not _share_a_dtype(hidden_states, self.weight):
            return type(self).forward(self, hidden_states)
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon)


class RMSNormFp32Weight(_Layer):
    """RMSNorm of OLMo 2 and gpt-oss: scaled in fp32, then rounded."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not _share_a_dtype(hidden_states, self.weight):
            return type(self).forward(self, hidden_states)
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, 0.0, "gemma")


class RMSNormZeroCentered(_Layer):
    """RMSNorm of Gemma and Qwen3.5: scaled by 1 + weight in fp32, then rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _share_a_dtype(x, self.weight):
            return type(self).forward(self, x)
        return liger_rms_norm(x, self.weight, self.eps, 1.0, "gemma")


class RMSNormGated(_Layer):
    """Gated RMSNorm of Qwen3-Next and Qwen3.5: rounded after the norm, after the scale and after the gate."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is None or not _share_a_dtype(hidden_states, gate, self.weight):
            return type(self).forward(self, hidden_states, gate)
        return liger_gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, self.activation)


class RMSNormGatedFp32Weight(_Layer):
    """Gated RMSNorm of Kimi Linear: scaled and gated in fp32, then rounded."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is None or not _share_a_dtype(hidden_states, gate, self.weight):
            return type(self).forward(self, hidden_states, gate)
        return liger_gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, self.activation, "gemma")


class LayerNorm(_Layer):
    """torch's LayerNorm over one dimension."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        autocast = torch.is_autocast_enabled(input.device.type)  # torch returns fp32 then
        if autocast or len(self.normalized_shape) > 1 or not _share_a_dtype(input, self.weight, self.bias):
            return type(self).forward(self, input)
        return liger_layer_norm(input, self.weight, self.bias, self.eps)


class RotaryPosEmb(_Layer):
    """`apply_rotary_pos_emb` of Llama: q * cos + rotate_half(q) * sin, over the whole width of a head."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        fits = cos.dim() == 3 and q.dim() == 4 and cos.shape[-1] == q.shape[-1] and cos.shape == sin.shape
        if not fits or cos.requires_grad or sin.requires_grad or not _share_a_dtype(q, k):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return liger_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


class SwiGLUMLP(_Layer):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), also if one linear layer `gate_up_proj` computes both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _activation(self) not in _SILU or x.dtype not in _DTYPES:
            return type(self).forward(self, x)
        return self.down_proj(liger_swiglu(*_gate_and_up(self, x)))


class GeGLUMLP(_Layer):
    """Like `SwiGLUMLP`, with the exact gelu or its tanh approximation in place of silu."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = _activation(self)
        if activation not in _GELU or x.dtype not in _DTYPES:
            return type(self).forward(self, x)
        return self.down_proj(liger_geglu(*_gate_and_up(self, x), _GELU[activation]))


class Experts(_Layer):
    """Experts of transformers 5 with 3-D parameters, computed by `fused_moe` where it computes the same."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
