"""GEGLU: c = gelu(a) * b, element by element, with gelu(a) = a * P(a) in one of two forms:
    tanh   P(a) = sigmoid(2 u) = (1 + tanh(u)) / 2,  u = sqrt(2 / pi) * (a + 0.044715 a^3)
    none   P(a) = (1 + erf(a / sqrt(2))) / 2, exact

Arithmetic is fp32; gelu(a) and the product are rounded to the input's dtype, like torch's `act_fn(gate) * up`.
Saved for backward: a and b. With `owned`, as in an MLP, backward writes their gradients over them.
Backward:  db = dc * gelu(a),  da = dc * b * (P + a * P'),  with P' = 2 u' P (1 - P) or exp(-a^2 / 2) / sqrt(2 pi).

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", https://arxiv.org/abs/1606.08415;
Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import owns_outputs, project, tileable
from ...runtime.operator import OperatorFunction, check, check_flags
from ...runtime.sharding import RowsRule
from .elementwise import activation_operators, activation_tunables, gated_sample
from .tiled_mlp import apply_tiled_mlp

APPROXIMATIONS = ("tanh", "none")


def geglu_reference(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    gelu = torch.nn.functional.gelu(a.to(wide), approximate=approximate).to(a.dtype)
    return (gelu.to(wide) * b.to(wide)).to(a.dtype)


TUNABLES = activation_tunables("geglu", bwd={"load_bytes": 8})


class GELUMulFunction(OperatorFunction):
    sharding, is_cheap = RowsRule(inputs=("a", "b"), gathered=()), True
    fwd, bwd, in_place = activation_operators(
        TUNABLES,
        ("a", "b"),
        "bool tanh",
        lambda tanh: ("gelu_tanh" if tanh else "gelu", 1.0, 1.0),
        lambda a, b, tanh: geglu_reference(a, b, "tanh" if tanh else "none"),
    )


def liger_geglu(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh", *, owned: bool = False) -> torch.Tensor:
    """gelu(a) * b, element by element.

    a (gate), b (up): [..., n_cols], of one shape and dtype: fp32, fp16 or bf16 (fp64 too on the CPU). Views with evenly
    spaced rows, such as the halves of a fused projection, are not copied. Returns a contiguous tensor like a.
    approximate: `tanh` or `none` (exact), as in torch.nn.functional.gelu.
    owned: the caller made a and b for this call and does not use them again; backward may write over them.
    Raises `ValueError` for shapes, dtypes, devices or an approximation that do not fit.
    """
    if approximate not in APPROXIMATIONS:
        check(False, "liger_geglu", f"approximate must be one of {', '.join(APPROXIMATIONS)}, got {approximate!r}")
    check_flags("liger_geglu", owned=owned)
    return GELUMulFunction.apply(a, b, approximate == "tanh", owned)


_TANH_NAMES = frozenset({"gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"})
_EXACT_NAMES = frozenset({"gelu", "gelu_python"})


class LigerGEGLUMLP(torch.nn.Module):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), with the parameter names of Hugging Face's GemmaMLP.

    config: has hidden_size and intermediate_size. Its activation, `hidden_activation` or else `hidden_act`, is
    `gelu_pytorch_tanh` (tanh, the default) or `gelu` (exact); any other raises `ValueError`. No bias.
    """

    def __init__(self, config) -> None:
        super().__init__()
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "gelu_pytorch_tanh")
        if activation not in _TANH_NAMES | _EXACT_NAMES:
            other = "; for silu use LigerSwiGLUMLP" if activation in ("silu", "swish") else ""
            check(False, "LigerGEGLUMLP", f"computes gelu, but the config's activation is {activation!r}{other}")
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.approximate = "tanh" if activation in _TANH_NAMES else "none"
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    @tileable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]; returns the same shape."""
        approximate = getattr(self, "approximate", "tanh")  # users bind this method to MLPs of other classes
        owned = owns_outputs(self.gate_proj, self.up_proj)
        gate, up = project(self.gate_proj, x), project(self.up_proj, x)
        return self.down_proj(liger_geglu(gate, up, approximate, owned=owned))


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """`LigerGEGLUMLP` in num_shards tiles of the sequence, by default ceil(seq / hidden_size); see tiled_mlp.py."""

    def __init__(self, config, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., seq, hidden_size]; returns the same shape."""
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards)


WORKLOADS = {
    "gemma_7b": (8192, 24576),
    "gemma2_2b": (8192, 9216),
    "gemma2_9b": (8192, 14336),
    "gemma3_4b": (8192, 10240),
    "gemma3_27b": (8192, 21504),
}


def sample(sizes, dtype, device, generator, *, approximate="tanh", strided=False):
    return gated_sample(sizes, dtype, device, generator, approximate, strided=strided)


OP = registry.register_file(__name__, tunables=TUNABLES, options=({}, {"approximate": "none"}, {"strided": True}))
