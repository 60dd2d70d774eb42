"""The experts of a layer as transformers 5 runs them: its function for an `experts_implementation`."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any, Callable

import torch

from ...registry import Op
from .common import Absent, only

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def of(implementation: str) -> Callable[[Op], Callable[..., Any]]:
    """A `Peer.build` for `eager` (a loop over experts), `grouped_mm` or `batched_mm`."""

    def build(op: Op) -> Callable[..., Any]:
        if op.name != "fused_moe":
            raise Absent(f"experts_implementation={implementation!r} is of fused_moe alone")
        try:
            module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
            forward = module.MixtralExperts.forward
        except (ImportError, AttributeError):
            raise Absent("transformers 5 is not installed") from None
        return functools.partial(_experts, forward, implementation)

    return build


def _experts(
    forward: Callable[..., Any],
    implementation: str,
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Mixtral's experts, whose forward asks its module for these attributes."""
    only({}, **more)

    def gated(z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    module = SimpleNamespace(
        config=SimpleNamespace(_experts_implementation=implementation),
        num_experts=down_proj.shape[0],
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        act_fn=torch.nn.functional.silu,
        _apply_gate=gated,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
    )
    return forward(module, x, top_k_index, top_k_weights)
