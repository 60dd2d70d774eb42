"""SwiGLU: c = silu(gate_multiplier * a) * b * down_multiplier, with silu(g) = g * sigmoid(g), element by element.

Shapes: a, b [..., n_cols] of one shape and dtype -> c like a. The fused layout takes y [..., 2 * n_cols], whose first
half of every row is a and whose second is b, and writes both gradients into one tensor like y.
Dtypes: fp32, fp16 or bf16; arithmetic in fp32. gate_multiplier * a and silu(...) are rounded to the input's dtype, as
torch rounds them in `act_fn(gate * multiplier) * up`; the product with b and down_multiplier is rounded once.
Saved for backward: a and b (or y).
Backward, with g = gate_multiplier * a and d = dc * down_multiplier:  db = d * silu(g),
da = d * b * gate_multiplier * sigmoid(g) * (1 + g * (1 - sigmoid(g))), rounded once.

Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import registry
from ..registry import LaunchConfig, Op, Sample, Target, Tunable, row_key
from ._op import check, check_tensors, define, empty_like, launch
from ._triton import tl, triton

# -- reference -------------------------------------------------------------------------------------------------------


def swiglu_reference(
    a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    """The specification in plain torch; computes in fp32, or in fp64 when `a` is fp64."""
    wide = torch.promote_types(a.dtype, torch.float32)
    gate = (a.to(wide) * gate_multiplier).to(a.dtype)
    silu = torch.nn.functional.silu(gate.to(wide)).to(a.dtype)
    return (silu.to(wide) * b.to(wide) * down_multiplier).to(a.dtype)


def fused_gate_up_swiglu_reference(
    y: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    """The specification of the fused layout."""
    return swiglu_reference(*y.chunk(2, -1), gate_multiplier, down_multiplier)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _stretch(n_rows, n_cols, FLAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(row, first column, columns of a row) of this program; FLAT when rows lie end to end and count as one."""
    pid = tl.program_id(0).to(tl.int64)
    if FLAT:
        return pid * 0, pid * BLOCK_SIZE, n_rows.to(tl.int64) * n_cols
    else:
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        return pid // tiles, (pid % tiles) * BLOCK_SIZE, n_cols


@triton.jit
def _tile(n_rows, n_cols, FLAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(row, columns, mask) of this program, for kernels that always mask."""
    row, start, size = _stretch(n_rows, n_cols, FLAT, BLOCK_SIZE)
    cols = start + tl.arange(0, BLOCK_SIZE)
    return row, cols, cols < size


@triton.jit
def _swiglu_fwd_tile(
    a_ptrs,
    b_ptrs,
    c_ptrs,
    mask,
    gate_multiplier,
    down_multiplier,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    a_raw = tl.load(a_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    b = tl.load(b_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    gate = (a_raw.to(tl.float32) * gate_multiplier).to(a_raw.dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(a_raw.dtype).to(tl.float32)
    c = silu * b * down_multiplier
    tl.store(c_ptrs, c.to(c_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_fwd_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    A_row_stride,
    B_row_stride,
    b_offset,
    n_rows,
    n_cols,
    gate_multiplier,
    down_multiplier,
    FLAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """b_offset: where b begins in its row; the fused layout passes one tensor as A and B."""
    row, start, size = _stretch(n_rows, n_cols, FLAT, BLOCK_SIZE)
    cols = start + tl.arange(0, BLOCK_SIZE)
    a_ptrs = A_ptr + row * A_row_stride + cols
    b_ptrs = B_ptr + row * B_row_stride + b_offset + cols
    c_ptrs = C_ptr + row * n_cols + cols
    if start + BLOCK_SIZE <= size:  # no mask: 16-byte accesses whatever n_cols divides by
        _swiglu_fwd_tile(a_ptrs, b_ptrs, c_ptrs, None, gate_multiplier, down_multiplier, LOAD_CACHE, LOAD_EVICT)
    else:
        _swiglu_fwd_tile(a_ptrs, b_ptrs, c_ptrs, cols < size, gate_multiplier, down_multiplier, LOAD_CACHE, LOAD_EVICT)


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
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    a_raw = tl.load(a_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    b = tl.load(b_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    dc = tl.load(dc_ptrs, mask=mask, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
    gate = (a_raw.to(tl.float32) * gate_multiplier).to(a_raw.dtype).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d = dc * down_multiplier
    da = d * b * gate_multiplier * (sigmoid + silu * (1.0 - sigmoid))
    db = d * silu.to(a_raw.dtype).to(tl.float32)
    tl.store(da_ptrs, da.to(da_ptrs.dtype.element_ty), mask=mask)
    tl.store(db_ptrs, db.to(db_ptrs.dtype.element_ty), mask=mask)


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
    b_offset,
    n_rows,
    n_cols,
    gate_multiplier,
    down_multiplier,
    FLAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """b_offset: where b and its gradient begin in their rows, as in the forward."""
    row, start, size = _stretch(n_rows, n_cols, FLAT, BLOCK_SIZE)
    cols = start + tl.arange(0, BLOCK_SIZE)
    dc = DC_ptr + row * DC_row_stride + cols
    a = A_ptr + row * A_row_stride + cols
    b = B_ptr + row * B_row_stride + b_offset + cols
    da = DA_ptr + row * D_row_stride + cols
    db = DB_ptr + row * D_row_stride + b_offset + cols
    if start + BLOCK_SIZE <= size:
        _swiglu_bwd_tile(dc, a, b, da, db, None, gate_multiplier, down_multiplier, LOAD_CACHE, LOAD_EVICT)
    else:
        _swiglu_bwd_tile(dc, a, b, da, db, cols < size, gate_multiplier, down_multiplier, LOAD_CACHE, LOAD_EVICT)


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("n_rows", "n_cols")


def _heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """Two loads of 16 bytes a thread and tensor, 1024 elements a program."""
    block = min(1024, max(64, key[0]))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16 // key[2], 8))


def _safe(target: Target, key: registry.Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 256}, target.warps(256, 8))


def _space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_SIZE": block}, warps, hint=hint)
        for block in (256, 512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8, 16)
        for hint in ("none", "stream")
        if 4 <= block // (warps * target.warp_size) <= 32
    ]


def _valid(config: LaunchConfig, key: registry.Key) -> str | None:
    return None if set(config.blocks) == {"BLOCK_SIZE"} else f"blocks must be BLOCK_SIZE, got {dict(config.blocks)}"


def _tunable(op: str, variant: str, *kernels) -> Tunable:
    return Tunable(
        op,
        variant,
        kernels=(*kernels, _stretch, _tile),
        key=row_key,
        dims=_DIMS,
        heuristic=_heuristic,
        safe=_safe,
        space=_space,
        neutral=frozenset({"num_stages", "hint", "num_warps", "BLOCK_SIZE"}),
        valid=_valid,
    )


FWD = _tunable("swiglu", "fwd", _swiglu_fwd_kernel, _swiglu_fwd_tile)
BWD = _tunable("swiglu", "bwd", _swiglu_bwd_kernel, _swiglu_bwd_tile)
FUSED_FWD = _tunable("fused_gate_up_swiglu", "fwd", _swiglu_fwd_kernel, _swiglu_fwd_tile)
FUSED_BWD = _tunable("fused_gate_up_swiglu", "bwd", _swiglu_bwd_kernel, _swiglu_bwd_tile)

# -- launchers -------------------------------------------------------------------------------------------------------


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` and its elements from one row to the next; a contiguous copy when its rows are not evenly spaced."""
    if x.is_contiguous():
        return x, x.shape[-1]
    stride = span = None
    for size, step in zip(x.shape[-2::-1], x.stride()[-2::-1]):
        if size != 1:
            if stride is None:
                stride, span = step, step
            elif step != span:
                break
            span *= size
    else:
        if x.stride(-1) == 1 and stride is not None:
            return x, stride
    return x.contiguous(), x.shape[-1]


def _grid(plan, n_rows, n_cols, flat):
    block = plan.config.blocks["BLOCK_SIZE"]
    return (-(-n_rows * n_cols // block) if flat else n_rows * -(-n_cols // block),)


def _launch(tunable, kernel, tensors, strides, b_offset, size, *multipliers):
    """Launch over `size` = (elements, columns) of one half; one stride for each tensor that has one in the kernel."""
    first, (n_elements, n_cols) = tensors[0], size
    if n_elements:
        n_rows = n_elements // n_cols
        plan = tunable.plan(first.device, row_key(n_rows, n_cols, first.itemsize))
        flat = strides == (n_cols,) * len(strides)
        args = (*tensors, *strides, b_offset, n_rows, n_cols, *multipliers)
        launch(plan, kernel, _grid(plan, n_rows, n_cols, flat), args, (flat,))


def _fwd(a, b, gate_multiplier, down_multiplier):
    (a, a_stride), (b, b_stride), n_cols = _rows(a), _rows(b), a.shape[-1]
    c = empty_like(a, a.dtype)
    size, strides = (a.numel(), n_cols), (a_stride, b_stride)
    _launch(FWD, _swiglu_fwd_kernel, (a, b, c), strides, 0, size, gate_multiplier, down_multiplier)
    return c


def _bwd(dc, a, b, gate_multiplier, down_multiplier):
    (dc, dc_stride), (a, a_stride), (b, b_stride), n_cols = _rows(dc), _rows(a), _rows(b), a.shape[-1]
    da, db = empty_like(a, a.dtype), empty_like(a, a.dtype)
    size, strides = (a.numel(), n_cols), (dc_stride, a_stride, b_stride, n_cols)
    _launch(BWD, _swiglu_bwd_kernel, (dc, a, b, da, db), strides, 0, size, gate_multiplier, down_multiplier)
    return da, db


def _fused_fwd(y, gate_multiplier, down_multiplier):
    (y, y_stride), n_cols = _rows(y), y.shape[-1] // 2
    c = y.new_empty((*y.shape[:-1], n_cols))
    size, strides = (c.numel(), n_cols), (y_stride, y_stride)
    _launch(FUSED_FWD, _swiglu_fwd_kernel, (y, y, c), strides, n_cols, size, gate_multiplier, down_multiplier)
    return c


def _fused_bwd(dc, y, gate_multiplier, down_multiplier):
    (dc, dc_stride), (y, y_stride), n_cols = _rows(dc), _rows(y), dc.shape[-1]
    dy = empty_like(y, y.dtype)
    size, strides = (dc.numel(), n_cols), (dc_stride, y_stride, y_stride, 2 * n_cols)
    _launch(FUSED_BWD, _swiglu_bwd_kernel, (dc, y, y, dy, dy), strides, n_cols, size, gate_multiplier, down_multiplier)
    return dy


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


def _fused_fwd_reference(y, gate_multiplier, down_multiplier):
    return _fwd_reference(*y.chunk(2, -1), gate_multiplier, down_multiplier)


def _fused_bwd_reference(dc, y, gate_multiplier, down_multiplier):
    return torch.cat(_bwd_reference(dc, *y.chunk(2, -1), gate_multiplier, down_multiplier), -1)


def _fwd_fake(a, b, gate_multiplier, down_multiplier):
    return a.new_empty(a.shape)


def _bwd_fake(dc, a, b, gate_multiplier, down_multiplier):
    return a.new_empty(a.shape), a.new_empty(a.shape)


def _fused_fwd_fake(y, gate_multiplier, down_multiplier):
    return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))


def _fused_bwd_fake(dc, y, gate_multiplier, down_multiplier):
    return y.new_empty(y.shape)


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
fused_gate_up_swiglu_fwd = define(
    "fused_gate_up_swiglu_fwd(Tensor y, float gate_multiplier, float down_multiplier) -> Tensor",
    launcher=_fused_fwd,
    reference=_fused_fwd_reference,
    fake=_fused_fwd_fake,
)
fused_gate_up_swiglu_bwd = define(
    "fused_gate_up_swiglu_bwd(Tensor dc, Tensor y, float gate_multiplier, float down_multiplier) -> Tensor",
    launcher=_fused_bwd,
    reference=_fused_bwd_reference,
    fake=_fused_bwd_fake,
)


class LigerSiLUMulFunction(torch.autograd.Function):
    """Autograd for SwiGLU on two tensors: saves a and b."""

    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        ctx.multipliers = float(gate_multiplier), float(down_multiplier)
        ctx.save_for_backward(a, b)
        return swiglu_fwd(a, b, *ctx.multipliers)

    @staticmethod
    @once_differentiable
    def backward(ctx, dc):
        return *swiglu_bwd(dc, *ctx.saved_tensors, *ctx.multipliers), None, None


class LigerFusedGateUpSiLUMulFunction(torch.autograd.Function):
    """Autograd for SwiGLU on the fused gate-up layout: saves y. `in_place` is accepted and changes nothing."""

    @staticmethod
    def forward(ctx, y, in_place=False, gate_multiplier=1.0, down_multiplier=1.0):
        ctx.multipliers = float(gate_multiplier), float(down_multiplier)
        ctx.save_for_backward(y)
        return fused_gate_up_swiglu_fwd(y, *ctx.multipliers)

    @staticmethod
    @once_differentiable
    def backward(ctx, dc):
        return fused_gate_up_swiglu_bwd(dc, *ctx.saved_tensors, *ctx.multipliers), None, None, None


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
    if a.shape != b.shape or a.dtype != b.dtype or not a.dim():
        have = f"{a.dtype} of shape {tuple(a.shape)} and {b.dtype} of shape {tuple(b.shape)}"
        check(False, "liger_swiglu", f"a and b must be [..., n_cols] of one shape and dtype, got {have}")
    return LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)


def liger_fused_gate_up_swiglu(
    y: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> torch.Tensor:
    """`liger_swiglu` of the two halves of y's last dimension: gate first, then up. One gradient tensor, like y.

    y: [..., 2 * n_cols] in fp32, fp16 or bf16 (fp64 too on the CPU). Returns [..., n_cols].
    Raises `ValueError` for an odd last dimension or a dtype that does not fit.
    """
    check_tensors("liger_fused_gate_up_swiglu", y=y)
    if not y.dim() or y.shape[-1] % 2:
        check(False, "liger_fused_gate_up_swiglu", f"y's last dimension must be even, got shape {tuple(y.shape)}")
    return LigerFusedGateUpSiLUMulFunction.apply(y, False, gate_multiplier, down_multiplier)


def _check_silu(module: str, activation: str) -> None:
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
        _check_silu("LigerSwiGLUMLP", config.hidden_act)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerPhi3SwiGLUMLP(torch.nn.Module):
    """down_proj(silu(gate) * up) with gate, up = the halves of gate_up_proj(x), as in Hugging Face's Phi3MLP.

    config: needs hidden_size, intermediate_size and hidden_act (`silu` or `swish`, else `ValueError`). No bias.
    """

    def __init__(self, config) -> None:
        super().__init__()
        _check_silu("LigerPhi3SwiGLUMLP", config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = torch.nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(liger_fused_gate_up_swiglu(self.gate_up_proj(x)))


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "mistral_7b": (8192, 14336),
    "llama2_7b": (8192, 11008),
    "llama3_70b": (4096, 28672),
    "qwen3_8b": (8192, 12288),
    "llama3_2_1b": (8192, 8192),
}
"""Problem sizes (n_rows, n_cols) of real models; n_cols is the intermediate size."""

FUSED_WORKLOADS = {
    "phi3_mini": (8192, 8192),
    "phi3_medium": (8192, 17920),
    "phi4": (4096, 17920),
    "glm4_9b": (8192, 13696),
}
"""Problem sizes (n_rows, n_cols) of real models with a fused gate-up projection of 2 * n_cols."""


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


def _fused_sample(sizes, dtype, device, generator, *, multipliers=(1.0, 1.0)) -> Sample:
    n_rows, n_cols = sizes
    y = torch.randn(n_rows, 2 * n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(args=(y.requires_grad_(), *multipliers), moved=8 * n_rows * n_cols * dtype.itemsize)


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
FUSED_OP = registry.register(
    Op(
        name="fused_gate_up_swiglu",
        function=liger_fused_gate_up_swiglu,
        reference=fused_gate_up_swiglu_reference,
        tunables=(FUSED_FWD, FUSED_BWD),
        workloads=FUSED_WORKLOADS,
        sample=_fused_sample,
        options=(
            {},
            {"multipliers": (0.75, 1.5)},
        ),
    )
)
