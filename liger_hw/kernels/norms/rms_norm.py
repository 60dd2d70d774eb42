"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * (offset + w), over the last dimension.

Shapes: x [..., n_cols], w [n_cols] or None (no scaling) -> y like x.
Dtypes: x, w in fp32, fp16 or bf16; w may differ from x. Statistics and sums are fp32. Casting modes, as the models have it:
    llama   the normalised x is rounded to x's dtype, then multiplied by (offset + w)
    gemma   everything in fp32, y rounded once to x's dtype
    none    everything in fp32 with no rounding to x's dtype before the product; y in the promoted dtype of x and w
Saved for backward: x, w, and rstd = 1 / sqrt(mean(x^2) + eps), one fp32 a row.
Backward, with m = dy * (offset + w) and h = x * rstd:  dx = rstd * (m - h * mean(m * h)),  dw = sum over rows of dy * h.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

import math

import torch

from ... import registry
from ...recompute.recipes import offer
from ...registry import Op, Sample
from ...runtime.dependent_launch import begin
from ...runtime.operator import (
    Function,
    check,
    check_numbers,
    check_tensors,
    define,
    dense,
    empty_like,
    first_order,
    launch,
    no_weight,
    row_major,
    rows_of,
)
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    aligned_key,
    are_columns,
    as_column,
    columns_of,
    count_tiles,
    keep_narrow,
    lay_out,
    load_at,
    load_columns,
    load_tile,
    main_lanes,
    row_sums,
    squared,
    store_at,
    tail_lanes,
    tile_mask,
    tile_ptrs,
    tile_rows,
    tile_skew,
    vector_width,
)
from ..rows.tuning import forward_tunable
from .rms_backward import backward_tunables, rms_backward

LLAMA, GEMMA, NONE = 0, 1, 2
CASTING_MODES = {"llama": LLAMA, "gemma": GEMMA, "none": NONE}

# -- reference -------------------------------------------------------------------------------------------------------


def rms_norm_reference(
    X: torch.Tensor,
    W: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    """The specification in plain torch; computes in fp32, or in fp64 when `X` is fp64."""
    wide = torch.promote_types(X.dtype, torch.float32)
    x = X.to(wide)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        y = y.to(X.dtype)
        return y if W is None else (y.to(wide) * (W.to(wide) + offset)).to(torch.promote_types(X.dtype, W.dtype))
    if W is not None:
        y = y * (W.to(wide) + offset)
    return y.to(X.dtype if W is None or casting_mode == "gemma" else torch.promote_types(X.dtype, W.dtype))


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _normalise_and_store(
    x_raw,
    rstd,
    w,
    Y_ptrs,
    lanes,
    mask,
    row_mask,
    skew,
    n_cols,
    offset,
    CASTING: tl.constexpr,
    VECTOR: tl.constexpr,
):
    y = x_raw.to(tl.float32) * as_column(rstd)
    if CASTING == 0:
        y = y.to(x_raw.dtype).to(tl.float32)
    if w is not None:
        y = y * (w.to(tl.float32) + offset)[None, :]
    store_at(Y_ptrs, y, lanes, mask, row_mask, skew, n_cols, VECTOR)


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    Y_ptr,
    RSTD_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    eps,
    offset,
    CASTING: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    TAIL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS rows a program, each in one piece or two (TAIL). Rows wider than that are read twice, the second time from
    cache."""
    begin(AHEAD)
    tile = tl.program_id(0).to(tl.int64)
    rows = tile_rows(tile, ROWS, VECTOR)
    row_mask = rows < n_rows
    skew = tile_skew(tile, n_cols, VECTOR)
    if WHOLE_ROW:
        lanes, exist = main_lanes(0, skew, n_cols, BLOCK_SIZE, TAIL, VECTOR)
        cols = columns_of(lanes, skew, VECTOR)
        tail = tail_lanes(BLOCK_SIZE, TAIL)
        tail_exist = are_columns(tail, skew, n_cols, VECTOR)
        tail_cols = columns_of(tail, skew, VECTOR)
        mask = tile_mask(row_mask, exist)
        tail_mask = tile_mask(row_mask, tail_exist)
        x_ptrs = tile_ptrs(X_ptr, rows, X_row_stride, lanes, VECTOR)
        x = load_at(x_ptrs, lanes, mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
        if BLOCK_SIZE <= 4096:
            w = load_columns(W_ptr, cols, exist)  # on its way while the row is summed
        x_ptrs = tile_ptrs(X_ptr, rows, X_row_stride, tail, VECTOR)
        x_tail = load_at(x_ptrs, tail, tail_mask, row_mask, skew, n_cols, LOAD_CACHE, LOAD_EVICT, VECTOR)
        w_tail = load_columns(W_ptr, tail_cols, tail_exist)
        rstd = tl.rsqrt(row_sums(squared(x), squared(x_tail)) / n_cols + eps)
        if BLOCK_SIZE > 4096:
            w = load_columns(W_ptr, cols, exist)
        if BLOCK_SIZE > 16384:
            x = keep_narrow(x, as_column(rstd))
        y_ptrs = tile_ptrs(Y_ptr, rows, n_cols, lanes, VECTOR)
        _normalise_and_store(x, rstd, w, y_ptrs, lanes, mask, row_mask, skew, n_cols, offset, CASTING, VECTOR)
        if TAIL:
            y_ptrs = tile_ptrs(Y_ptr, rows, n_cols, tail, VECTOR)
            _normalise_and_store(
                x_tail, rstd, w_tail, y_ptrs, tail, tail_mask, row_mask, skew, n_cols, offset, CASTING, VECTOR
            )
    else:
        lanes = tl.arange(0, BLOCK_SIZE)
        squares = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for start in range(0, n_cols, BLOCK_SIZE):
            mask = row_mask[:, None] & (start + lanes < n_cols)[None, :]
            squares += squared(load_tile(X_ptr, rows, X_row_stride, start + lanes, mask, "", ""))
        rstd = tl.rsqrt(row_sums(squares, None) / n_cols + eps)
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        for tile in range(tiles):  # backwards: what was read last is nearest
            cols = (tiles - 1 - tile) * BLOCK_SIZE + lanes
            mask = row_mask[:, None] & (cols < n_cols)[None, :]
            x = load_tile(X_ptr, rows, X_row_stride, cols, mask, "", "")
            w = load_columns(W_ptr, cols, cols < n_cols)
            y_ptrs = tile_ptrs(Y_ptr, rows, n_cols, cols, 1)
            _normalise_and_store(x, rstd, w, y_ptrs, cols, mask, row_mask, 0, n_cols, offset, CASTING, 1)
    tl.store(RSTD_ptr + rows, rstd, mask=row_mask)


# -- tunables --------------------------------------------------------------------------------------------------------


FWD = forward_tunable("rms_norm", _rms_norm_fwd_kernel, widest=65536, key=aligned_key)
BWD, BWD_DOT, DW = backward_tunables("rms_norm")

# -- launchers -------------------------------------------------------------------------------------------------------


def _out_dtype(x: torch.Tensor, w: torch.Tensor | None, casting: int) -> torch.dtype:
    return x.dtype if w is None or casting == GEMMA or w.dtype == x.dtype else torch.promote_types(x.dtype, w.dtype)


def _fwd(x, w, eps, offset, casting):
    x, w = row_major(x), dense(w)
    n_rows, n_cols, stride = rows_of(x)
    y = empty_like(x, _out_dtype(x, w, casting))
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if n_rows:
        group = vector_width(n_rows, n_cols, x)
        plan = FWD.plan(x.device, aligned_key(n_rows, n_cols, x.itemsize))
        blocks = plan.config.blocks
        pieces = lay_out(n_cols, blocks["BLOCK_SIZE"], group)
        flags = (casting, *pieces)
        grid = (count_tiles(n_rows, blocks["ROWS"], pieces[2]),)
        launch(plan, _rms_norm_fwd_kernel, grid, (x, w, y, rstd, stride, n_rows, n_cols, eps, offset), flags)
    return y, rstd


def _bwd(dy, x, w, rstd, offset, casting, needs_dw):
    return rms_backward((BWD, BWD_DOT, DW), dy, x, w, rstd, offset, casting, None, needs_dw)


# -- the operators ---------------------------------------------------------------------------------------------------

_MODE_NAMES = {code: name for name, code in CASTING_MODES.items()}


def _fwd_reference(x, w, eps, offset, casting):
    y = rms_norm_reference(x, w, eps, offset, _MODE_NAMES[casting])
    wide = torch.promote_types(x.dtype, torch.float32)
    return y.contiguous(), torch.rsqrt(x.to(wide).square().mean(-1) + eps).flatten()


def _bwd_reference(dy, x, w, rstd, offset, casting, needs_dw):
    wide, rstd = rstd.dtype, rstd.view(*x.shape[:-1], 1)
    h, g = x.to(wide) * rstd, dy.to(wide)
    m = g if w is None else g * (w.to(wide) + offset)
    dx = (rstd * (m - h * (m * h).mean(-1, keepdim=True))).to(x.dtype).contiguous()
    if w is None or not needs_dw:
        return dx, no_weight(x)
    seen = h.to(x.dtype).to(wide) if casting == LLAMA else h
    return dx, (g * seen).flatten(0, -2).sum(0).to(w.dtype)


def _fwd_fake(x, w, eps, offset, casting):
    rows = math.prod(x.shape[:-1])
    stat = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape, dtype=_out_dtype(x, w, casting)), x.new_empty(rows, dtype=stat)


def _bwd_fake(dy, x, w, rstd, offset, casting, needs_dw):
    return x.new_empty(x.shape), torch.empty_like(w) if needs_dw and w is not None else no_weight(x)


rms_norm_fwd = define(
    "rms_norm_fwd(Tensor x, Tensor? w, float eps, float offset, int casting) -> (Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
rms_norm_bwd = define(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? w, Tensor rstd, float offset, int casting, bool needs_dw)"
    " -> (Tensor, Tensor)",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class LigerRMSNormFunction(Function):
    """Autograd for RMSNorm: saves x, w and rstd."""

    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        eps = float(eps)
        ctx.offset, ctx.casting = float(offset), CASTING_MODES[casting_mode]
        Y, RSTD = rms_norm_fwd(X, W, eps, ctx.offset, ctx.casting)
        ctx.save_for_backward(X, W, RSTD)
        offer(ctx, Y, rms_norm_fwd, (X, W, eps, ctx.offset, ctx.casting), 0)
        return Y

    @staticmethod
    @first_order
    def backward(ctx, dY):
        X, W, RSTD = ctx.saved_tensors
        needs_dw = ctx.needs_input_grad[1]
        dX, dW = rms_norm_bwd(dY, X, W, RSTD, ctx.offset, ctx.casting, needs_dw)
        return dX, dW if needs_dw else None, None, None, None, None, None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    """RMSNorm over the last dimension: X / sqrt(mean(X^2) + eps) * (offset + W).

    X: [..., n_cols]; W: [n_cols] or None. fp32, fp16 or bf16 (fp64 too on the CPU). Returns [..., n_cols].
    casting_mode: `llama`, `gemma` or `none`, see the top of this file.
    in_place: accepted for compatibility; the gradient never overwrites a tensor the caller can see.
    Raises `ValueError` for shapes, dtypes, devices or a casting mode that do not fit.
    """
    check_tensors("liger_rms_norm", optional=("W",), X=X, W=W)
    check_numbers("liger_rms_norm", eps=eps, offset=offset)
    if not isinstance(casting_mode, str) or casting_mode not in CASTING_MODES:
        check(False, "liger_rms_norm", f"casting_mode must be one of {', '.join(CASTING_MODES)}, got {casting_mode!r}")
    if not X.dim():
        check(False, "liger_rms_norm", "X must be [..., n_cols], got a scalar")
    if W is not None and W.shape != X.shape[-1:]:
        check(False, "liger_rms_norm", f"W must have shape {tuple(X.shape[-1:])} to match X, got {tuple(W.shape)}")
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode, in_place)


class LigerRMSNorm(torch.nn.Module):
    """RMSNorm layer: y = x / sqrt(mean(x^2) + eps) * (offset + weight).

    hidden_size: size of the last dimension; init_fn: `ones` or `zeros` for the weight; elementwise_affine=False has no
    weight. The other arguments are those of `liger_rms_norm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        check(init_fn in ("ones", "zeros"), "LigerRMSNorm", f"init_fn must be ones or zeros, got {init_fn!r}")
        check(
            casting_mode in CASTING_MODES,
            "LigerRMSNorm",
            f"casting_mode must be one of {', '.join(CASTING_MODES)}, got {casting_mode!r}",
        )
        self.hidden_size = hidden_size
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place
        self.elementwise_affine = elementwise_affine
        initial = getattr(torch, init_fn)(hidden_size) if elementwise_affine else None
        self.register_parameter("weight", None if initial is None else torch.nn.Parameter(initial))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.variance_epsilon}, offset={self.offset}, "
            f"casting_mode={self.casting_mode}, elementwise_affine={self.elementwise_affine}"
        )


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "mistral_7b": (16384, 4096),
    "llama3_8b": (8192, 4096),
    "llama3_70b": (8192, 8192),
    "qwen3_8b_qk": (65536, 128),
    "gemma2_2b": (8192, 2304),
    "llama3_2_1b": (8192, 2048),
}
"""Problem sizes (n_rows, n_cols) of real models."""


def _sample(sizes, dtype, device, generator, *, casting_mode="llama", offset=0.0, affine=True) -> Sample:
    n_rows, n_cols = sizes
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    w = torch.randn(n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype) if affine else None
    x.requires_grad_()
    if w is not None:
        w.requires_grad_()
    return Sample(
        args=(x, w, 1e-6, offset, casting_mode),
        reduction=n_cols,
        grad_reduction=max(n_rows, n_cols),
        moved=5 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="rms_norm",
        function=liger_rms_norm,
        reference=rms_norm_reference,
        tunables=(FWD, BWD, BWD_DOT, DW),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"casting_mode": "gemma", "offset": 1.0},
            {"casting_mode": "none"},
            {"affine": False},
        ),
    )
)
