"""GEGLU: c = gelu(a) * b, element by element, with gelu(a) = a * P(a) in one of two forms:
    tanh   P(a) = sigmoid(2 u),  u = sqrt(2 / pi) * (a + 0.044715 a^3);  the same as (1 + tanh(u)) / 2
    none   P(a) = (1 + erf(a / sqrt(2))) / 2, the exact normal distribution

Shapes: a, b [..., n_cols] of one shape and dtype -> c like a.
Dtypes: fp32, fp16 or bf16; arithmetic in fp32. gelu(a) is rounded to the input's dtype, as torch rounds it in
`act_fn(gate) * up`; the product is rounded once, at the end.
Saved for backward: a and b. Where nobody else can see them (`saved_tensors.py`), their gradients take their place.
Backward:  db = dc * gelu(a),  da = dc * b * (P + a * P'),  with P' = 2 u' P (1 - P) or exp(-a^2 / 2) / sqrt(2 pi).

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", https://arxiv.org/abs/1606.08415;
Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import offer, project
from ...registry import Op, Sample
from ...runtime import saved_tensors as _reuse
from ...runtime.dependent_launch import begin
from ...runtime.operator import Function, check, check_tensors, define, empty_like, first_order
from ...runtime.triton_import import tl, triton
from .elementwise import elementwise_tunable, evenly_spaced, launch_elementwise, stretch

APPROXIMATIONS = ("tanh", "none")

# -- reference -------------------------------------------------------------------------------------------------------


def geglu_reference(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """The specification in plain torch; computes in fp32, or in fp64 when `a` is fp64."""
    wide = torch.promote_types(a.dtype, torch.float32)
    gelu = torch.nn.functional.gelu(a.to(wide), approximate=approximate).to(a.dtype)
    return (gelu.to(wide) * b.to(wide)).to(a.dtype)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _gelu_and_slope(a, TANH: tl.constexpr):
    """(gelu(a), its derivative) in fp32; what is not used costs nothing."""
    if TANH:
        share = tl.sigmoid(a * (1.5957691216057308 + 0.07135481282052533 * a * a))  # 2 sqrt(2 / pi) (1, 0.044715)
        density = share * (1.0 - share) * (1.5957691216057308 + 0.21406443846157598 * a * a)
    else:
        share = 0.5 + 0.5 * tl.erf(a * 0.7071067811865476)
        density = 0.3989422804014327 * tl.exp(-0.5 * a * a)
    return a * share, share + a * density


@triton.jit
def _geglu_fwd_tile(
    a_ptrs, b_ptrs, c_ptrs, mask, TANH: tl.constexpr, LOAD_CACHE: tl.constexpr, LOAD_EVICT: tl.constexpr
):
    a = tl.load(a_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    b = tl.load(b_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    gelu, _ = _gelu_and_slope(a.to(tl.float32), TANH)
    c = gelu.to(a.dtype).to(tl.float32) * b
    tl.store(c_ptrs, c.to(c_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _geglu_fwd_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    A_row_stride,
    B_row_stride,
    n_rows,
    n_cols,
    TANH: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    begin(AHEAD)
    row, cols, mask, whole = stretch(n_rows, n_cols, TILES, WIDTH, BLOCK_SIZE)
    a_ptrs = A_ptr + row * A_row_stride + cols
    b_ptrs = B_ptr + row * B_row_stride + cols
    c_ptrs = C_ptr + row * n_cols + cols
    if SPLIT:
        if whole:  # no mask: 16-byte accesses whatever n_cols divides by
            _geglu_fwd_tile(a_ptrs, b_ptrs, c_ptrs, None, TANH, LOAD_CACHE, LOAD_EVICT)
        else:
            _geglu_fwd_tile(a_ptrs, b_ptrs, c_ptrs, mask, TANH, LOAD_CACHE, LOAD_EVICT)
    else:
        _geglu_fwd_tile(a_ptrs, b_ptrs, c_ptrs, mask, TANH, LOAD_CACHE, LOAD_EVICT)


@triton.jit
def _geglu_bwd_tile(
    dc_ptrs,
    a_ptrs,
    b_ptrs,
    da_ptrs,
    db_ptrs,
    mask,
    TANH: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    a = tl.load(a_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    b = tl.load(b_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    dc = tl.load(dc_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    gelu, slope = _gelu_and_slope(a.to(tl.float32), TANH)
    da = dc * b * slope
    db = dc * gelu.to(a.dtype).to(tl.float32)
    tl.store(da_ptrs, da.to(da_ptrs.dtype.element_ty), mask=mask)
    tl.store(db_ptrs, db.to(db_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _geglu_bwd_kernel(
    DC_ptr,
    A_ptr,
    B_ptr,
    DA_ptr,
    DB_ptr,
    DC_row_stride,
    A_row_stride,
    B_row_stride,
    n_rows,
    n_cols,
    TANH: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    begin(AHEAD)
    row, cols, mask, whole = stretch(n_rows, n_cols, TILES, WIDTH, BLOCK_SIZE)
    dc = DC_ptr + row * DC_row_stride + cols
    a = A_ptr + row * A_row_stride + cols
    b = B_ptr + row * B_row_stride + cols
    dense = row * n_cols + cols
    if SPLIT:
        if whole:
            _geglu_bwd_tile(dc, a, b, DA_ptr + dense, DB_ptr + dense, None, TANH, LOAD_CACHE, LOAD_EVICT)
        else:
            _geglu_bwd_tile(dc, a, b, DA_ptr + dense, DB_ptr + dense, mask, TANH, LOAD_CACHE, LOAD_EVICT)
    else:
        _geglu_bwd_tile(dc, a, b, DA_ptr + dense, DB_ptr + dense, mask, TANH, LOAD_CACHE, LOAD_EVICT)


# -- tunables --------------------------------------------------------------------------------------------------------
# The backward by loads of 8 bytes: 271.7 us against 273.5 at 8192 x 14336 on an H200. swiglu's was not timed so.

FWD = elementwise_tunable("geglu", "fwd", _geglu_fwd_kernel, _geglu_fwd_tile, _gelu_and_slope)
BWD = elementwise_tunable("geglu", "bwd", _geglu_bwd_kernel, _geglu_bwd_tile, _gelu_and_slope, most=8)

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(a, b, tanh):
    (a, a_stride), (b, b_stride) = evenly_spaced(a), evenly_spaced(b)
    c = empty_like(a, a.dtype)
    launch_elementwise(FWD, (a, b, c), (a_stride, b_stride), (a.numel(), a.shape[-1]), flags=(tanh,))
    return c


def _bwd(dc, a, b, tanh):
    da, db = empty_like(a, a.dtype), empty_like(a, a.dtype)
    _launch_bwd(dc, a, b, da, db, tanh)
    return da, db


def _bwd_in_place(dc, a, b, tanh):
    """As `_bwd`, over a and b, which are contiguous."""
    _launch_bwd(dc, a, b, a, b, tanh)


def _launch_bwd(dc, a, b, da, db, tanh):
    (dc, dc_stride), (a, a_stride), (b, b_stride) = evenly_spaced(dc), evenly_spaced(a), evenly_spaced(b)
    strides, size = (dc_stride, a_stride, b_stride), (a.numel(), a.shape[-1])
    launch_elementwise(BWD, (dc, a, b, da, db), strides, size, flags=(tanh,))


# -- the operators ---------------------------------------------------------------------------------------------------


def _name(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def _fwd_reference(a, b, tanh):
    return geglu_reference(a, b, _name(tanh)).contiguous()


def _bwd_reference(dc, a, b, tanh):
    wide = torch.promote_types(a.dtype, torch.float32)
    gate, d = a.to(wide), dc.to(wide)
    db = d * torch.nn.functional.gelu(gate, approximate=_name(tanh)).to(a.dtype).to(wide)
    da = torch.ops.aten.gelu_backward(d * b.to(wide), gate, approximate=_name(tanh))
    return da.to(a.dtype).contiguous(), db.to(a.dtype).contiguous()


def _bwd_in_place_reference(dc, a, b, tanh):
    da, db = _bwd_reference(dc, a, b, tanh)
    a.copy_(da)
    b.copy_(db)


def _fwd_fake(a, b, tanh):
    return a.new_empty(a.shape)


def _bwd_fake(dc, a, b, tanh):
    return a.new_empty(a.shape), a.new_empty(a.shape)


geglu_fwd = define(
    "geglu_fwd(Tensor a, Tensor b, bool tanh) -> Tensor",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
geglu_bwd = define(
    "geglu_bwd(Tensor dc, Tensor a, Tensor b, bool tanh) -> (Tensor, Tensor)",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)
geglu_bwd_ = define(
    "geglu_bwd_(Tensor dc, Tensor(a!) a, Tensor(b!) b, bool tanh) -> ()",
    launcher=_bwd_in_place,
    reference=_bwd_in_place_reference,
    fake=lambda dc, a, b, tanh: None,
)


class LigerGELUMulFunction(Function):
    """Autograd for GEGLU on two tensors: saves a and b."""

    @staticmethod
    def forward(ctx, a, b, approximate="tanh"):
        ctx.tanh = approximate == "tanh"
        ctx.save_for_backward(a, b)
        c = geglu_fwd(a, b, ctx.tanh)
        offer(ctx, c, geglu_fwd, (a, b, ctx.tanh))
        return c

    @staticmethod
    @first_order
    def backward(ctx, dc):
        (a, b), private = _reuse.unpack(ctx)
        if private and a.is_contiguous() and b.is_contiguous():
            geglu_bwd_(dc, a, b, ctx.tanh)
            return a.detach(), b.detach(), None
        return *geglu_bwd(dc, a, b, ctx.tanh), None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_geglu(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """gelu(a) * b, element by element.

    a (gate), b (up): [..., n_cols], of one shape and dtype: fp32, fp16 or bf16 (fp64 too on the CPU). Views with evenly
    spaced rows, such as the halves of a fused projection, are read where they lie. Returns a contiguous tensor like a.
    approximate: `tanh` or `none` (exact), the names of torch.nn.functional.gelu.
    Raises `ValueError` for shapes, dtypes, devices or an approximation that do not fit.
    """
    check_tensors("liger_geglu", a=a, b=b)
    if a.shape != b.shape or a.dtype != b.dtype or not a.dim():
        have = f"{a.dtype} of shape {tuple(a.shape)} and {b.dtype} of shape {tuple(b.shape)}"
        check(False, "liger_geglu", f"a and b must be [..., n_cols] of one shape and dtype, got {have}")
    if approximate not in APPROXIMATIONS:
        check(False, "liger_geglu", f"approximate must be one of {', '.join(APPROXIMATIONS)}, got {approximate!r}")
    return LigerGELUMulFunction.apply(a, b, approximate)


_TANH_NAMES = frozenset({"gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"})
_EXACT_NAMES = frozenset({"gelu", "gelu_python"})


class LigerGEGLUMLP(torch.nn.Module):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), with the parameter names of Hugging Face's GemmaMLP.

    config: needs hidden_size, intermediate_size and an activation, `hidden_activation` or else `hidden_act`: a gelu by
    Hugging Face's name, tanh (`gelu_pytorch_tanh`) or exact (`gelu`); any other raises `ValueError`. No bias.
    """

    def __init__(self, config) -> None:
        super().__init__()
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        if activation not in _TANH_NAMES | _EXACT_NAMES:
            other = "; silu takes LigerSwiGLUMLP" if activation in ("silu", "swish") else ""
            check(False, "LigerGEGLUMLP", f"computes gelu, but the config's activation is {activation!r}{other}")
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.approximate = "tanh" if activation in _TANH_NAMES else "none"
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_geglu(project(self.gate_proj, x), project(self.up_proj, x), self.approximate))


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "gemma_7b": (8192, 24576),
    "gemma2_2b": (8192, 9216),
    "gemma2_9b": (8192, 14336),
    "gemma3_4b": (8192, 10240),
    "gemma3_27b": (8192, 21504),
}
"""Problem sizes (n_rows, n_cols) of real models; n_cols is the intermediate size."""


def _sample(sizes, dtype, device, generator, *, approximate="tanh", strided=False) -> Sample:
    n_rows, n_cols = sizes
    y = torch.randn(n_rows, 2 * n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    a, b = y.chunk(2, -1)
    if not strided:
        a, b = a.contiguous(), b.contiguous()
    return Sample(
        args=(a.requires_grad_(), b.requires_grad_(), approximate),
        moved=8 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="geglu",
        function=liger_geglu,
        reference=geglu_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"approximate": "none"},
            {"strided": True},
        ),
    )
)
