"""What is patched in for each part of a model: functions that take the place of a family's own.

Each maker returns a plain function `forward(self, ...)` (or a rotary function) that calls one kernel. They are used on
classes and, bound, on instances; the parameters stay the family's own, so state dicts do not change.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch


def rms_norm_forward(casting_mode: str, offset: float, eps_name: str) -> Callable:
    """RMSNorm with the module's own `weight` and epsilon; x's dtype, promoted with the weight's as in torch."""
    from .functional import liger_rms_norm

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return liger_rms_norm(hidden_states, self.weight, getattr(self, eps_name), offset, casting_mode)

    return forward


def swiglu_forward(original: Callable) -> Callable:
    """Gated MLP, `down_proj(silu(gate_proj(x)) * up_proj(x))`; a module with another activation runs `original`."""
    from .functional import liger_swiglu

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if why_not_swiglu(self):
            return original(self, x)
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x)))

    return forward


def why_not_swiglu(mlp: torch.nn.Module) -> str:
    """Why a gated MLP module must keep its own forward, or an empty string."""
    activation = type(mlp.act_fn).__name__
    if activation not in ("SiLUActivation", "SiLU"):
        return f"its activation is {activation}, not silu"
    if getattr(mlp.config, "pretraining_tp", 1) > 1:
        return "config.pretraining_tp > 1 splits its projections"
    return ""


def rotary_function(original: Callable, shared_halves: bool) -> Callable:
    """Rotary embedding with the arguments of the family's own function; `shared_halves` is the spec's.

    transformers before 5 passes `position_ids` ahead of `unsqueeze_dim` and ignores it, since cos and sin are already
    gathered; so does this.
    """
    from .functional import liger_rope

    if "position_ids" in inspect.signature(original).parameters:

        def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
            return liger_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, shared_halves=shared_halves)

    else:

        def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            return liger_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, shared_halves=shared_halves)

    return apply_rotary_pos_emb
