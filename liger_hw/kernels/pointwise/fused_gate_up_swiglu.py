"""SwiGLU of a fused gate-up projection: c = silu(gate_multiplier * a) * b * down_multiplier with [a, b] = y.

Shapes: y [..., 2 * n_cols], the gate a first in every row, then b -> c [..., n_cols]. Both gradients go into one tensor
like y. Dtypes, rounding, formula and kernels are swiglu.py's.
Saved for backward: y. Where nobody else can see it (`saved_tensors.py`), its gradient takes its place.
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import offer, project
from ...registry import Op, Sample
from ...runtime import saved_tensors as _reuse
from ...runtime.operator import Function, check, check_numbers, check_tensors, define, empty_like, first_order
from . import swiglu
from .elementwise import elementwise_tunable, evenly_spaced

# -- reference -------------------------------------------------------------------------------------------------------


def fused_gate_up_swiglu_reference(
    y: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    """The specification of the fused layout."""
    return swiglu.swiglu_reference(*y.chunk(2, -1), gate_multiplier, down_multiplier)


# -- tunables --------------------------------------------------------------------------------------------------------

FWD = elementwise_tunable("fused_gate_up_swiglu", "fwd", swiglu._swiglu_fwd_kernel, swiglu._swiglu_fwd_tile)
BWD = elementwise_tunable("fused_gate_up_swiglu", "bwd", swiglu._swiglu_bwd_kernel, swiglu._swiglu_bwd_tile)

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(y, gate_multiplier, down_multiplier):
    (y, y_stride), n_cols = evenly_spaced(y), y.shape[-1] // 2
    c = y.new_empty((*y.shape[:-1], n_cols))
    size, strides = (c.numel(), n_cols), (y_stride, y_stride)
    swiglu.launch_swiglu(FWD, (y, None, c), strides, size, n_cols, gate_multiplier, down_multiplier)
    return c


def _bwd(dc, y, gate_multiplier, down_multiplier):
    y, y_stride = evenly_spaced(y)
    dy = empty_like(y, y.dtype)
    _launch_bwd(dc, y, y_stride, dy, gate_multiplier, down_multiplier)
    return dy


def _bwd_in_place(dc, y, gate_multiplier, down_multiplier):
    """As `_bwd`, over y, which is contiguous."""
    _launch_bwd(dc, y, y.shape[-1], y, gate_multiplier, down_multiplier)


def _launch_bwd(dc, y, y_stride, dy, gate_multiplier, down_multiplier):
    (dc, dc_stride), n_cols = evenly_spaced(dc), dc.shape[-1]
    size, strides = (dc.numel(), n_cols), (dc_stride, y_stride, y_stride, 2 * n_cols)
    swiglu.launch_swiglu(BWD, (dc, y, None, dy, None), strides, size, n_cols, gate_multiplier, down_multiplier)


# -- the operators ---------------------------------------------------------------------------------------------------


def _fwd_reference(y, gate_multiplier, down_multiplier):
    return swiglu._fwd_reference(*y.chunk(2, -1), gate_multiplier, down_multiplier)


def _bwd_reference(dc, y, gate_multiplier, down_multiplier):
    return torch.cat(swiglu._bwd_reference(dc, *y.chunk(2, -1), gate_multiplier, down_multiplier), -1)


def _bwd_in_place_reference(dc, y, gate_multiplier, down_multiplier):
    y.copy_(_bwd_reference(dc, y, gate_multiplier, down_multiplier))


def _fwd_fake(y, gate_multiplier, down_multiplier):
    return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))


def _bwd_fake(dc, y, gate_multiplier, down_multiplier):
    return y.new_empty(y.shape)


fused_gate_up_swiglu_fwd = define(
    "fused_gate_up_swiglu_fwd(Tensor y, float gate_multiplier, float down_multiplier) -> Tensor",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
fused_gate_up_swiglu_bwd = define(
    "fused_gate_up_swiglu_bwd(Tensor dc, Tensor y, float gate_multiplier, float down_multiplier) -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)
fused_gate_up_swiglu_bwd_ = define(
    "fused_gate_up_swiglu_bwd_(Tensor dc, Tensor(a!) y, float gate_multiplier, float down_multiplier) -> ()",
    launcher=_bwd_in_place,
    reference=_bwd_in_place_reference,
    fake=lambda dc, y, gate_multiplier, down_multiplier: None,
)


class LigerFusedGateUpSiLUMulFunction(Function):
    """Autograd for SwiGLU on the fused gate-up layout: saves y. `in_place` is accepted; the tensor decides."""

    @staticmethod
    def forward(ctx, y, in_place=False, gate_multiplier=1.0, down_multiplier=1.0):
        ctx.multipliers = float(gate_multiplier), float(down_multiplier)
        ctx.save_for_backward(y)
        c = fused_gate_up_swiglu_fwd(y, *ctx.multipliers)
        offer(ctx, c, fused_gate_up_swiglu_fwd, (y, *ctx.multipliers))
        return c

    @staticmethod
    @first_order
    def backward(ctx, dc):
        (y,), private = _reuse.unpack(ctx)
        if private and y.is_contiguous():
            fused_gate_up_swiglu_bwd_(dc, y, *ctx.multipliers)
            return y.detach(), None, None, None
        return fused_gate_up_swiglu_bwd(dc, y, *ctx.multipliers), None, None, None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_fused_gate_up_swiglu(
    y: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    """`liger_swiglu` of the two halves of y's last dimension: gate first, then up. One gradient tensor, like y.

    y: [..., 2 * n_cols] in fp32, fp16 or bf16 (fp64 too on the CPU). Returns [..., n_cols].
    Raises `ValueError` for an odd last dimension or a dtype that does not fit.
    """
    check_tensors("liger_fused_gate_up_swiglu", y=y)
    check_numbers("liger_fused_gate_up_swiglu", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    if not y.dim() or y.shape[-1] % 2:
        check(False, "liger_fused_gate_up_swiglu", f"y's last dimension must be even, got shape {tuple(y.shape)}")
    return LigerFusedGateUpSiLUMulFunction.apply(y, False, gate_multiplier, down_multiplier)


class LigerPhi3SwiGLUMLP(torch.nn.Module):
    """down_proj(silu(gate) * up) with gate, up = the halves of gate_up_proj(x), as in Hugging Face's Phi3MLP.

    config: needs hidden_size, intermediate_size and hidden_act (`silu` or `swish`, else `ValueError`). No bias.
    """

    def __init__(self, config) -> None:
        super().__init__()
        swiglu.check_silu("LigerPhi3SwiGLUMLP", config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = torch.nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_fused_gate_up_swiglu(project(self.gate_up_proj, x)))


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "phi3_mini": (8192, 8192),
    "phi3_medium": (8192, 17920),
    "phi4": (4096, 17920),
    "glm4_9b": (8192, 13696),
}
"""Problem sizes (n_rows, n_cols) of real models with a fused gate-up projection of 2 * n_cols."""


def _sample(sizes, dtype, device, generator, *, multipliers=(1.0, 1.0)) -> Sample:
    n_rows, n_cols = sizes
    y = torch.randn(n_rows, 2 * n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(args=(y.requires_grad_(), *multipliers), moved=8 * n_rows * n_cols * dtype.itemsize)


OP = registry.register(
    Op(
        name="fused_gate_up_swiglu",
        function=liger_fused_gate_up_swiglu,
        reference=fused_gate_up_swiglu_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"multipliers": (0.75, 1.5)},
        ),
    )
)
