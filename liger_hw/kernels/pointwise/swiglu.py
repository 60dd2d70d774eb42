"""SwiGLU: c = silu(gate_multiplier * a) * b * down_multiplier, with silu(g) = g * sigmoid(g), element by element.

Arithmetic is fp32. gate_multiplier * a and silu(...) are rounded to the input's dtype, like torch's
`act_fn(gate * multiplier) * up`; the product with b and down_multiplier is rounded once. Saved for backward: a and b.
With `owned`, as in an MLP, backward writes their gradients over them. Backward, with g = gate_multiplier * a
and d = dc * down_multiplier:  db = d * silu(g),
da = d * b * gate_multiplier * sigmoid(g) * (1 + g * (1 - sigmoid(g))), rounded once.

Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import owns_outputs, project, tileable
from ...runtime.operator import OperatorFunction, check, check_flags, check_numbers
from ...runtime.sharding import RowsRule
from .elementwise import activation_operators, activation_tunables, gated_sample
from .tiled_mlp import apply_tiled_mlp


def swiglu_reference(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    wide = torch.promote_types(a.dtype, torch.float32)
    gate = (a.to(wide) * gate_multiplier).to(a.dtype)
    silu = torch.nn.functional.silu(gate.to(wide)).to(a.dtype)
    return (silu.to(wide) * b.to(wide) * down_multiplier).to(a.dtype)


TUNABLES = activation_tunables("swiglu", small_launch=32768)


class SiLUMulFunction(OperatorFunction):
    sharding, is_cheap = RowsRule(inputs=("a", "b"), gathered=()), True
    fwd, bwd, in_place = activation_operators(
        TUNABLES,
        ("a", "b"),
        "float gate_multiplier, float down_multiplier",
        lambda gate_multiplier, down_multiplier: ("silu", gate_multiplier, down_multiplier),
        swiglu_reference,
    )


def liger_swiglu(
    a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, *, owned: bool = False
) -> torch.Tensor:
    """silu(gate_multiplier * a) * b * down_multiplier, element by element.

    a (gate), b (up): [..., n_cols], of one shape and dtype: fp32, fp16 or bf16 (fp64 too on the CPU). Views with evenly
    spaced rows, such as the halves of a fused projection, are not copied. Returns a contiguous tensor like a.
    owned: the caller made a and b for this call and does not use them again; backward may write over them.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_numbers("liger_swiglu", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    check_flags("liger_swiglu", owned=owned)
    return SiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier, owned)


def check_silu(module: str, activation: str) -> None:
    """Raise `ValueError` unless a config's activation is silu."""
    if activation not in ("silu", "swish"):
        other = "; for gelu use LigerGEGLUMLP" if "gelu" in activation else ""
        check(False, module, f"computes silu (swish), but the config's activation is {activation!r}{other}")


class LigerSwiGLUMLP(torch.nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), with the parameter names of Hugging Face's LlamaMLP.

    config: has hidden_size and intermediate_size. Its activation, `hidden_activation` or else `hidden_act`, must be
    `silu` or `swish` (default silu), else `ValueError`. With mlp_bias=True the three projections have a bias.
    intermediate_size: overrides the config's.
    """

    def __init__(self, config, intermediate_size: int | None = None) -> None:
        super().__init__()
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
        check_silu("LigerSwiGLUMLP", activation)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    @tileable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]; returns the same shape."""
        owned = owns_outputs(self.gate_proj, self.up_proj)
        return self.down_proj(liger_swiglu(project(self.gate_proj, x), project(self.up_proj, x), owned=owned))


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` in num_shards tiles of the sequence, by default ceil(seq / hidden_size); see tiled_mlp.py."""

    def __init__(self, config, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., seq, hidden_size]; returns the same shape."""
        return apply_tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards)


WORKLOADS = {
    "mistral_7b": (8192, 14336),
    "llama2_7b": (8192, 11008),
    "llama3_70b": (4096, 28672),
    "qwen3_8b": (8192, 12288),
    "llama3_2_1b": (8192, 8192),
}


def sample(sizes, dtype, device, generator, *, multipliers=(1.0, 1.0), strided=False):
    return gated_sample(sizes, dtype, device, generator, *multipliers, strided=strided)


OP = registry.register_file(__name__, tunables=TUNABLES, options=({}, {"multipliers": (0.75, 1.5)}, {"strided": True}))
