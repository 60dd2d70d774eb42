"""Squared ReLU: y = max(x, 0)^2, element by element.

Shapes: x of any shape -> y like x. Dtypes: fp32, fp16 or bf16; arithmetic in fp32, rounded once. NaN stays NaN.
Saved for backward: x. Backward:  dx = 2 * max(x, 0) * dy.

Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", https://arxiv.org/abs/2109.08668
"""

from __future__ import annotations

import torch

from ... import registry
from ...recompute.recipes import offer
from ...registry import Op, Sample
from ...runtime.dependent_launch import begin
from ...runtime.operator import Function, check_tensors, define, empty_like, first_order
from ...runtime.triton_import import tl, triton
from .elementwise import elementwise_tunable, evenly_spaced, launch_elementwise, stretch

# -- reference -------------------------------------------------------------------------------------------------------


def relu_squared_reference(x: torch.Tensor) -> torch.Tensor:
    """The specification in plain torch; computes in fp32, or in fp64 when `x` is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).relu().square().to(x.dtype)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _fwd_tile(x_ptrs, y_ptrs, mask, LOAD_CACHE: tl.constexpr, LOAD_EVICT: tl.constexpr):
    x = tl.load(x_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    y = tl.where(x <= 0.0, 0.0, x * x)
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _relu_squared_fwd_kernel(
    X_ptr,
    Y_ptr,
    X_row_stride,
    n_rows,
    n_cols,
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
    x_ptrs = X_ptr + row * X_row_stride + cols
    y_ptrs = Y_ptr + row * n_cols + cols
    if SPLIT:
        if whole:  # no mask: 16-byte accesses whatever n_cols divides by
            _fwd_tile(x_ptrs, y_ptrs, None, LOAD_CACHE, LOAD_EVICT)
        else:
            _fwd_tile(x_ptrs, y_ptrs, mask, LOAD_CACHE, LOAD_EVICT)
    else:
        _fwd_tile(x_ptrs, y_ptrs, mask, LOAD_CACHE, LOAD_EVICT)


@triton.jit
def _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, mask, LOAD_CACHE: tl.constexpr, LOAD_EVICT: tl.constexpr):
    dy = tl.load(dy_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    x = tl.load(x_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    dx = tl.where(x <= 0.0, 0.0, 2.0 * x * dy)
    tl.store(dx_ptrs, dx.to(dx_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _relu_squared_bwd_kernel(
    DY_ptr,
    X_ptr,
    DX_ptr,
    DY_row_stride,
    X_row_stride,
    n_rows,
    n_cols,
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
    dy_ptrs = DY_ptr + row * DY_row_stride + cols
    x_ptrs = X_ptr + row * X_row_stride + cols
    dx_ptrs = DX_ptr + row * n_cols + cols
    if SPLIT:
        if whole:
            _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, None, LOAD_CACHE, LOAD_EVICT)
        else:
            _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, mask, LOAD_CACHE, LOAD_EVICT)
    else:
        _bwd_tile(dy_ptrs, x_ptrs, dx_ptrs, mask, LOAD_CACHE, LOAD_EVICT)


# -- tunables --------------------------------------------------------------------------------------------------------
# The tiles of swiglu, but of two or three streams: 16 bytes a thread sooner.

FWD = elementwise_tunable("relu_squared", "fwd", _relu_squared_fwd_kernel, _fwd_tile, few=1024, small=1024, waves=2)
BWD = elementwise_tunable("relu_squared", "bwd", _relu_squared_bwd_kernel, _bwd_tile, few=1024, small=1024, waves=2)

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(x):
    x, stride = evenly_spaced(x)
    y = empty_like(x, x.dtype)
    launch_elementwise(FWD, (x, y), (stride,), (x.numel(), x.shape[-1]))
    return y


def _bwd(dy, x):
    (dy, dy_stride), (x, x_stride) = evenly_spaced(dy), evenly_spaced(x)
    dx = empty_like(x, x.dtype)
    launch_elementwise(BWD, (dy, x, dx), (dy_stride, x_stride), (x.numel(), x.shape[-1]))
    return dx


# -- the operators ---------------------------------------------------------------------------------------------------


def _fwd_reference(x):
    return relu_squared_reference(x).contiguous()


def _bwd_reference(dy, x):
    wide = torch.promote_types(x.dtype, torch.float32)
    slope = 2.0 * x.to(wide).relu()
    return torch.where(x <= 0, 0.0, slope * dy.to(wide)).to(x.dtype).contiguous()


def _fwd_fake(x):
    return x.new_empty(x.shape)


def _bwd_fake(dy, x):
    return x.new_empty(x.shape)


relu_squared_fwd = define(
    "relu_squared_fwd(Tensor x) -> Tensor",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
relu_squared_bwd = define(
    "relu_squared_bwd(Tensor dy, Tensor x) -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class LigerReLUSquaredFunction(Function):
    """Autograd for the squared ReLU: saves x."""

    @staticmethod
    def forward(ctx, X):
        ctx.save_for_backward(X)
        Y = relu_squared_fwd(X)
        offer(ctx, Y, relu_squared_fwd, (X,))
        return Y

    @staticmethod
    @first_order
    def backward(ctx, dY):
        return relu_squared_bwd(dY, *ctx.saved_tensors)


# -- public ----------------------------------------------------------------------------------------------------------


def liger_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, element by element.

    x: of any shape, in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a contiguous tensor like x.
    Raises `ValueError` for another dtype.
    """
    check_tensors("liger_relu_squared", x=x)
    if not x.dim():
        return liger_relu_squared(x.view(1)).view(())
    return LigerReLUSquaredFunction.apply(x)


class LigerReLUSquared(torch.nn.Module):
    """The squared ReLU as a module without parameters; `relu2` in Hugging Face's table of activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_relu_squared(x)


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "nemotron_4_15b": (8192, 24576),
    "nemotron_mini_4b": (8192, 9216),
    "minitron_8b": (8192, 16384),
    "nemotron_h_8b": (8192, 21504),
}
"""Problem sizes (n_rows, n_cols) of real models; n_cols is the intermediate size."""


def _sample(sizes, dtype, device, generator) -> Sample:
    n_rows, n_cols = sizes
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(args=(x.requires_grad_(),), moved=5 * n_rows * n_cols * dtype.itemsize)


OP = registry.register(
    Op(
        name="relu_squared",
        function=liger_relu_squared,
        reference=relu_squared_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
    )
)
