"""SwiGLU: c = silu(gate_multiplier * a) * b * down_multiplier, with silu(g) = g * sigmoid(g), element by element.

Shapes: a, b [..., n_cols] of one shape and dtype -> c like a. fused_gate_up_swiglu.py takes both in one tensor.
Dtypes: fp32, fp16 or bf16; arithmetic in fp32. gate_multiplier * a and silu(...) are rounded to the input's dtype, as
torch rounds them in `act_fn(gate * multiplier) * up`; the product with b and down_multiplier is rounded once.
Saved for backward: a and b. Where nobody else can see them (`saved_tensors.py`), their gradients take their place.
Backward, with g = gate_multiplier * a and d = dc * down_multiplier:  db = d * silu(g),
da = d * b * gate_multiplier * sigmoid(g) * (1 + g * (1 - sigmoid(g))), rounded once.

Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import offer, project
from ...registry import Op, Sample
from ...runtime import saved_tensors as _reuse
from ...runtime.dependent_launch import begin
from ...runtime.operator import Function, check, check_numbers, check_tensors, define, empty_like, first_order
from ...runtime.triton_import import tl, triton
from .elementwise import elementwise_tunable, evenly_spaced, launch_elementwise, stretch

# -- reference -------------------------------------------------------------------------------------------------------


def swiglu_reference(
    a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    """The specification in plain torch; computes in fp32, or in fp64 when `a` is fp64."""
    wide = torch.promote_types(a.dtype, torch.float32)
    gate = (a.to(wide) * gate_multiplier).to(a.dtype)
    silu = torch.nn.functional.silu(gate.to(wide)).to(a.dtype)
    return (silu.to(wide) * b.to(wide) * down_multiplier).to(a.dtype)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_fwd_tile(
    a_ptrs,
    b_ptrs,
    c_ptrs,
    mask,
    gate_multiplier,
    down_multiplier,
    PLAIN: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """PLAIN: both multipliers are 1: there is one product, in the input's dtype, that rounds it once too. (On an H200, bf16,
    forward and backward, 2026-11-22: 16 x 4096 takes 2.27 us instead of 2.35 with inputs in L2, 4096 x 1024 18.0 for 18.4.)"""
    a = tl.load(a_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    b = tl.load(b_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    gate = a.to(tl.float32)
    if not PLAIN:
        gate = (gate * gate_multiplier).to(a.dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(a.dtype)
    if PLAIN:
        c = silu * b
    else:
        c = (silu.to(tl.float32) * b.to(tl.float32) * down_multiplier).to(a.dtype)
    tl.store(c_ptrs, c, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_fwd_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    A_row_stride,
    B_row_stride,
    n_rows,
    n_cols,
    b_offset,
    gate_multiplier,
    down_multiplier,
    PLAIN: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """B_ptr None: the fused layout, b lies b_offset behind a in its row. PLAIN: both multipliers are 1."""
    begin(AHEAD)
    row, cols, mask, whole = stretch(n_rows, n_cols, TILES, WIDTH, BLOCK_SIZE)
    a_ptrs = A_ptr + row * A_row_stride + cols
    b_ptrs = a_ptrs + b_offset if B_ptr is None else B_ptr + row * B_row_stride + cols
    c_ptrs = C_ptr + row * n_cols + cols
    if SPLIT:
        if whole:  # no mask: 16-byte accesses whatever n_cols divides by
            _swiglu_fwd_tile(
                a_ptrs, b_ptrs, c_ptrs, None, gate_multiplier, down_multiplier, PLAIN, LOAD_CACHE, LOAD_EVICT
            )
        else:
            _swiglu_fwd_tile(
                a_ptrs, b_ptrs, c_ptrs, mask, gate_multiplier, down_multiplier, PLAIN, LOAD_CACHE, LOAD_EVICT
            )
    else:
        _swiglu_fwd_tile(a_ptrs, b_ptrs, c_ptrs, mask, gate_multiplier, down_multiplier, PLAIN, LOAD_CACHE, LOAD_EVICT)


@triton.jit
def _swiglu_bwd_tile(
    dc_ptrs,
    a_ptrs,
    b_ptrs,
    da_ptrs,
    db_ptrs,
    mask,
    gate_multiplier,
    down_multiplier,
    PLAIN: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    a = tl.load(a_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    b = tl.load(b_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    dc = tl.load(dc_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    gate, d = a.to(tl.float32), dc.to(tl.float32)
    if not PLAIN:
        gate, d = (gate * gate_multiplier).to(a.dtype).to(tl.float32), d * down_multiplier
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid + silu * (1.0 - sigmoid)
    if PLAIN:
        da = d * b.to(tl.float32) * slope
        db = dc * silu.to(a.dtype)
    else:
        da = d * b.to(tl.float32) * gate_multiplier * slope
        db = (d * silu.to(a.dtype).to(tl.float32)).to(a.dtype)
    tl.store(da_ptrs, da.to(a.dtype), mask=mask)
    tl.store(db_ptrs, db, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_bwd_kernel(
    DC_ptr,
    A_ptr,
    B_ptr,
    DA_ptr,
    DB_ptr,
    DC_row_stride,
    A_row_stride,
    B_row_stride,
    D_row_stride,
    n_rows,
    n_cols,
    b_offset,
    gate_multiplier,
    down_multiplier,
    PLAIN: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """B_ptr and DB_ptr None: as in the forward."""
    begin(AHEAD)
    row, cols, mask, whole = stretch(n_rows, n_cols, TILES, WIDTH, BLOCK_SIZE)
    dc = DC_ptr + row * DC_row_stride + cols
    a = A_ptr + row * A_row_stride + cols
    b = a + b_offset if B_ptr is None else B_ptr + row * B_row_stride + cols
    da = DA_ptr + row * D_row_stride + cols
    db = da + b_offset if DB_ptr is None else DB_ptr + row * D_row_stride + cols
    if SPLIT:
        if whole:
            _swiglu_bwd_tile(dc, a, b, da, db, None, gate_multiplier, down_multiplier, PLAIN, LOAD_CACHE, LOAD_EVICT)
        else:
            _swiglu_bwd_tile(dc, a, b, da, db, mask, gate_multiplier, down_multiplier, PLAIN, LOAD_CACHE, LOAD_EVICT)
    else:
        _swiglu_bwd_tile(dc, a, b, da, db, mask, gate_multiplier, down_multiplier, PLAIN, LOAD_CACHE, LOAD_EVICT)


# -- tunables --------------------------------------------------------------------------------------------------------

_FEW = 32768
"""Elements a multiprocessor: 4096 x 1024 takes 17.6 us, forward and backward, on the H200; 18.0 beyond (2026-11-22)."""
FWD = elementwise_tunable("swiglu", "fwd", _swiglu_fwd_kernel, _swiglu_fwd_tile, few=_FEW)
BWD = elementwise_tunable("swiglu", "bwd", _swiglu_bwd_kernel, _swiglu_bwd_tile, few=_FEW)

# -- launchers -------------------------------------------------------------------------------------------------------


def launch_swiglu(tunable, tensors, strides, size, b_offset, gate_multiplier, down_multiplier) -> None:
    plain = gate_multiplier == down_multiplier == 1.0
    launch_elementwise(tunable, tensors, strides, size, b_offset, gate_multiplier, down_multiplier, flags=(plain,))


def _fwd(a, b, gate_multiplier, down_multiplier):
    (a, a_stride), (b, b_stride), n_cols = evenly_spaced(a), evenly_spaced(b), a.shape[-1]
    c = empty_like(a, a.dtype)
    size, strides = (a.numel(), n_cols), (a_stride, b_stride)
    launch_swiglu(FWD, (a, b, c), strides, size, 0, gate_multiplier, down_multiplier)
    return c


def _bwd(dc, a, b, gate_multiplier, down_multiplier):
    (dc, dc_stride), (a, a_stride), (b, b_stride), n_cols = (
        evenly_spaced(dc),
        evenly_spaced(a),
        evenly_spaced(b),
        a.shape[-1],
    )
    da, db = empty_like(a, a.dtype), empty_like(a, a.dtype)
    size, strides = (a.numel(), n_cols), (dc_stride, a_stride, b_stride, n_cols)
    launch_swiglu(BWD, (dc, a, b, da, db), strides, size, 0, gate_multiplier, down_multiplier)
    return da, db


def _bwd_in_place(dc, a, b, gate_multiplier, down_multiplier):
    """As `_bwd`, over a and b, which are contiguous."""
    (dc, dc_stride), n_cols = evenly_spaced(dc), a.shape[-1]
    size, strides = (a.numel(), n_cols), (dc_stride, n_cols, n_cols, n_cols)
    launch_swiglu(BWD, (dc, a, b, a, b), strides, size, 0, gate_multiplier, down_multiplier)


# -- the operators ---------------------------------------------------------------------------------------------------


def _fwd_reference(a, b, gate_multiplier, down_multiplier):
    return swiglu_reference(a, b, gate_multiplier, down_multiplier).contiguous()


def _bwd_reference(dc, a, b, gate_multiplier, down_multiplier):
    wide = torch.promote_types(a.dtype, torch.float32)
    gate = (a.to(wide) * gate_multiplier).to(a.dtype).to(wide)
    sigmoid, d = torch.sigmoid(gate), dc.to(wide) * down_multiplier
    silu = gate * sigmoid
    da = d * b.to(wide) * gate_multiplier * (sigmoid + silu * (1.0 - sigmoid))
    db = d * silu.to(a.dtype).to(wide)
    return da.to(a.dtype).contiguous(), db.to(a.dtype).contiguous()


def _bwd_in_place_reference(dc, a, b, gate_multiplier, down_multiplier):
    da, db = _bwd_reference(dc, a, b, gate_multiplier, down_multiplier)
    a.copy_(da)
    b.copy_(db)


def _fwd_fake(a, b, gate_multiplier, down_multiplier):
    return a.new_empty(a.shape)


def _bwd_fake(dc, a, b, gate_multiplier, down_multiplier):
    return a.new_empty(a.shape), a.new_empty(a.shape)


swiglu_fwd = define(
    "swiglu_fwd(Tensor a, Tensor b, float gate_multiplier, float down_multiplier) -> Tensor",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
swiglu_bwd = define(
    "swiglu_bwd(Tensor dc, Tensor a, Tensor b, float gate_multiplier, float down_multiplier) -> (Tensor, Tensor)",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)
swiglu_bwd_ = define(
    "swiglu_bwd_(Tensor dc, Tensor(a!) a, Tensor(b!) b, float gate_multiplier, float down_multiplier) -> ()",
    launcher=_bwd_in_place,
    reference=_bwd_in_place_reference,
    fake=lambda dc, a, b, gate_multiplier, down_multiplier: None,
)


class LigerSiLUMulFunction(Function):
    """Autograd for SwiGLU on two tensors: saves a and b."""

    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        ctx.multipliers = float(gate_multiplier), float(down_multiplier)
        ctx.save_for_backward(a, b)
        c = swiglu_fwd(a, b, *ctx.multipliers)
        offer(ctx, c, swiglu_fwd, (a, b, *ctx.multipliers))
        return c

    @staticmethod
    @first_order
    def backward(ctx, dc):
        (a, b), private = _reuse.unpack(ctx)
        if private and a.is_contiguous() and b.is_contiguous():
            swiglu_bwd_(dc, a, b, *ctx.multipliers)
            return a.detach(), b.detach(), None, None
        return *swiglu_bwd(dc, a, b, *ctx.multipliers), None, None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_swiglu(
    a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    """silu(gate_multiplier * a) * b * down_multiplier, element by element.

    a (gate), b (up): [..., n_cols], of one shape and dtype: fp32, fp16 or bf16 (fp64 too on the CPU). Views with evenly
    spaced rows, such as the halves of a fused projection, are read where they lie. Returns a contiguous tensor like a.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_tensors("liger_swiglu", a=a, b=b)
    check_numbers("liger_swiglu", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    if a.shape != b.shape or a.dtype != b.dtype or not a.dim():
        have = f"{a.dtype} of shape {tuple(a.shape)} and {b.dtype} of shape {tuple(b.shape)}"
        check(False, "liger_swiglu", f"a and b must be [..., n_cols] of one shape and dtype, got {have}")
    return LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)


def check_silu(module: str, activation: str) -> None:
    if activation not in ("silu", "swish"):
        other = "; gelu variants take LigerGEGLUMLP" if "gelu" in activation else ""
        check(False, module, f"computes silu (swish), but the config's hidden_act is {activation!r}{other}")


class LigerSwiGLUMLP(torch.nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), with the parameter names of Hugging Face's LlamaMLP.

    config: needs hidden_size, intermediate_size and hidden_act (`silu` or `swish`, else `ValueError`); mlp_bias=True
    gives the three projections a bias. intermediate_size overrides the config's.
    """

    def __init__(self, config, intermediate_size: int | None = None) -> None:
        super().__init__()
        check_silu("LigerSwiGLUMLP", config.hidden_act)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_swiglu(project(self.gate_proj, x), project(self.up_proj, x)))


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "mistral_7b": (8192, 14336),
    "llama2_7b": (8192, 11008),
    "llama3_70b": (4096, 28672),
    "qwen3_8b": (8192, 12288),
    "llama3_2_1b": (8192, 8192),
}
"""Problem sizes (n_rows, n_cols) of real models; n_cols is the intermediate size."""


def _sample(sizes, dtype, device, generator, *, multipliers=(1.0, 1.0), strided=False) -> Sample:
    n_rows, n_cols = sizes
    y = torch.randn(n_rows, 2 * n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    a, b = y.chunk(2, -1)
    if not strided:
        a, b = a.contiguous(), b.contiguous()
    return Sample(
        args=(a.requires_grad_(), b.requires_grad_(), *multipliers),
        moved=8 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="swiglu",
        function=liger_swiglu,
        reference=swiglu_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"multipliers": (0.75, 1.5)},
            {"strided": True},
        ),
    )
)
