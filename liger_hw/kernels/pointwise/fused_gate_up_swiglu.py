"""SwiGLU of a fused gate-up projection: c = silu(gate_multiplier * a) * b * down_multiplier with [a, b] = y.

Rounding and formulas: swiglu.py. Saved for backward: y. With `owned`, as in an MLP, backward writes the gradient of y
over y.
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import owns_outputs, project, tileable
from ...registry import Sample
from ...runtime.operator import OperatorFunction, check_flags, check_numbers
from ...runtime.sharding import RowsRule
from .elementwise import activation_operators, activation_tunables
from .swiglu import check_silu, swiglu_reference


def fused_gate_up_swiglu_reference(y, gate_multiplier=1.0, down_multiplier=1.0):
    return swiglu_reference(*y.chunk(2, -1), gate_multiplier, down_multiplier)


TUNABLES = activation_tunables("fused_gate_up_swiglu")


class FusedGateUpSiLUMulFunction(OperatorFunction):
    sharding, is_cheap = RowsRule(inputs=("y",)), True
    fwd, bwd, in_place = activation_operators(
        TUNABLES,
        ("y",),
        "float gate_multiplier, float down_multiplier",
        lambda gate_multiplier, down_multiplier: ("silu", gate_multiplier, down_multiplier),
        fused_gate_up_swiglu_reference,
    )


def liger_fused_gate_up_swiglu(
    y: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, *, owned: bool = False
) -> torch.Tensor:
    """`liger_swiglu` of the two halves of y's last dimension: gate first, then up.

    y: [..., 2 * n_cols] in fp32, fp16 or bf16 (fp64 too on the CPU). Returns [..., n_cols].
    owned: the caller made y for this call and does not use it again; backward may write the gradient over it.
    Raises `ValueError` for an odd last dimension or another dtype.
    """
    check_numbers("liger_fused_gate_up_swiglu", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    check_flags("liger_fused_gate_up_swiglu", owned=owned)
    return FusedGateUpSiLUMulFunction.apply(y, gate_multiplier, down_multiplier, owned)


class LigerPhi3SwiGLUMLP(torch.nn.Module):
    """down_proj(silu(gate) * up) with gate, up = the halves of gate_up_proj(x), as in Hugging Face's Phi3MLP.

    config: has hidden_size, intermediate_size and hidden_act (`silu` or `swish`, else `ValueError`). No bias.
    """

    def __init__(self, config) -> None:
        super().__init__()
        check_silu("LigerPhi3SwiGLUMLP", config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = torch.nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    @tileable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]; returns the same shape."""
        owned = owns_outputs(self.gate_up_proj)
        return self.down_proj(liger_fused_gate_up_swiglu(project(self.gate_up_proj, x), owned=owned))


WORKLOADS = {"phi3_mini": (8192, 8192), "phi3_medium": (8192, 17920), "phi4": (4096, 17920), "glm4_9b": (8192, 13696)}


def sample(sizes, dtype, device, generator, *, multipliers=(1.0, 1.0)) -> Sample:
    n_rows, n_cols = sizes
    y = torch.randn(n_rows, 2 * n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(args=(y.requires_grad_(), *multipliers), moved=8 * n_rows * n_cols * dtype.itemsize)


OP = registry.register_file(__name__, tunables=TUNABLES, options=({}, {"multipliers": (0.75, 1.5)}))
