"""PolyNorm: y = w[0] * norm(x^3) + w[1] * norm(x^2) + w[2] * norm(x) + b, norm(u) = u / sqrt(mean(u^2) + eps).

Powers, sums and products are fp32; y is rounded once.
Saved for backward: x, w, b (for its dtype), and rstd = 1 / sqrt(mean(u^2) + eps) of the three powers, three fp32 a row.
Backward, with n_p = x^p * rstd_p, w_p the weight of power p and c_p = mean(dy * n_p):  db = sum of dy,
dx = sum over p of p * x^(p - 1) * w_p * rstd_p * (dy - n_p * c_p),  dw_p = sum over rows of n_cols * c_p.

Source: Zhuo, Wang, Zeng, Li, Zhou and Ma, "Polynomial Composition Activations", https://arxiv.org/abs/2411.03884
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal, row_key
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.load_hint import load_with_hint
from ...runtime.operator import (
    OperatorFunction,
    cdiv,
    check_numbers,
    define,
    dense,
    empty_like,
    launch,
    row_major,
    rows_of,
)
from ...runtime.sharding import RowsRule
from ...runtime.triton_import import tl, triton
from ..rows.reduce import column_sum, column_sum_tunable, params_dtype, partial_sums
from ..rows.tuning import bwd_heuristic, bwd_space, persistent_misfit, row_sample, row_tunable


def poly_norm_reference(X, W, B, eps=1e-6, in_place=True):
    return _fwd_reference(X, W, B, eps)[0]


def _fwd_reference(x, w, b, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    y, rstd = 0.0, []
    for weight, power in zip(w.to(wide), (3, 2, 1)):
        u = x.to(wide) ** power
        rstd.append(torch.rsqrt(u.square().mean(-1, keepdim=True) + eps))
        y = y + weight * u * rstd[-1]
    y = y if b is None else y + b.to(wide).view(())
    return y.to(x.dtype).contiguous(), torch.stack([t.flatten() for t in reversed(rstd)])


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _row_sum(x):
    return tl.sum(x, axis=1)[:, None]


@triton.jit(do_not_specialize=["n_rows"])
def _poly_norm_fwd_kernel(
    X_ptr,
    W_ptr,
    B_ptr,
    Y_ptr,
    RSTD_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    eps,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program takes ROWS rows. Without WHOLE_ROW rows are read twice, the second time from cache."""
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    x_ptrs = X_ptr + rows * X_row_stride + cols
    y_ptrs = Y_ptr + rows * n_cols + cols
    w3 = tl.load(W_ptr).to(tl.float32)
    w2 = tl.load(W_ptr + 1).to(tl.float32)
    w1 = tl.load(W_ptr + 2).to(tl.float32)
    b = 0.0
    if B_ptr is not None:
        b = tl.load(B_ptr).to(tl.float32)
    if WHOLE_ROW:
        mask = row_mask & (cols < n_cols)
        x = load_with_hint(x_ptrs, LOAD_HINT, mask=mask, other=0.0).to(tl.float32)
        square = x * x
        fourth = square * square
        sum1, sum2, sum3 = _row_sum(square), _row_sum(fourth), _row_sum(fourth * square)
    else:
        lanes1 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        lanes2 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        lanes3 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for start in range(0, n_cols, BLOCK_SIZE):
            x = tl.load(x_ptrs + start, mask=row_mask & (start + cols < n_cols), other=0.0).to(tl.float32)
            square = x * x
            fourth = square * square
            lanes1 += square
            lanes2 += fourth
            lanes3 += fourth * square
        sum1, sum2, sum3 = _row_sum(lanes1), _row_sum(lanes2), _row_sum(lanes3)
    rstd1 = tl.rsqrt(sum1 / n_cols + eps)
    rstd2 = tl.rsqrt(sum2 / n_cols + eps)
    rstd3 = tl.rsqrt(sum3 / n_cols + eps)
    tl.store(RSTD_ptr + rows, rstd1, mask=row_mask)
    tl.store(RSTD_ptr + n_rows + rows, rstd2, mask=row_mask)
    tl.store(RSTD_ptr + 2 * n_rows + rows, rstd3, mask=row_mask)
    a1, a2, a3 = w1 * rstd1, w2 * rstd2, w3 * rstd3
    if WHOLE_ROW:
        y = x * (a1 + x * (a2 + x * a3)) + b
        tl.store(y_ptrs, y.to(Y_ptr.dtype.element_ty), mask=mask)
    else:
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        for tile in range(tiles):
            start = (tiles - 1 - tile) * BLOCK_SIZE  # backwards: the last tiles are still in cache
            mask = row_mask & (start + cols < n_cols)
            x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
            y = x * (a1 + x * (a2 + x * a3)) + b
            tl.store(y_ptrs + start, y.to(Y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dx(dy, x, a1, a2, a3, k1, k2, k3):
    """a_p: w_p * rstd_p; k_p: rstd_p * c_p."""
    return a1 * (dy - x * k1) + x * (2.0 * a2 * (dy - x * x * k2) + x * 3.0 * a3 * (dy - x * x * x * k3))


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _poly_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    RSTD_ptr,
    DX_ptr,
    Partial_ptr,
    DY_row_stride,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ... Partial_ptr [programs, 4]: dw and db of its rows."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    col_tiles = tl.cdiv(n_cols, BLOCK_SIZE)
    w3 = tl.load(W_ptr).to(tl.float32)
    w2 = tl.load(W_ptr + 1).to(tl.float32)
    w1 = tl.load(W_ptr + 2).to(tl.float32)
    dw1 = tl.zeros([ROWS, 1], dtype=tl.float32)
    dw2 = tl.zeros([ROWS, 1], dtype=tl.float32)
    dw3 = tl.zeros([ROWS, 1], dtype=tl.float32)
    db = tl.zeros([ROWS, 1], dtype=tl.float32)
    ROW_STAGES: tl.constexpr = STAGES if WHOLE_ROW else 1
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=ROW_STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        row_mask = rows < n_rows
        x_ptrs = X_ptr + rows * X_row_stride + cols
        dy_ptrs = DY_ptr + rows * DY_row_stride + cols
        dx_ptrs = DX_ptr + rows * n_cols + cols
        rstd1 = tl.load(RSTD_ptr + rows, mask=row_mask, other=0.0)
        rstd2 = tl.load(RSTD_ptr + n_rows + rows, mask=row_mask, other=0.0)
        rstd3 = tl.load(RSTD_ptr + 2 * n_rows + rows, mask=row_mask, other=0.0)
        if WHOLE_ROW:
            mask = row_mask & (cols < n_cols)
            x = load_with_hint(x_ptrs, LOAD_HINT, mask=mask, other=0.0)
            dy = load_with_hint(dy_ptrs, LOAD_HINT, mask=mask, other=0.0)
            x, dy = x.to(tl.float32), dy.to(tl.float32)
            dy_x = dy * x
            dy_x2 = dy_x * x
            sum0, sum1, sum2, sum3 = _row_sum(dy), _row_sum(dy_x), _row_sum(dy_x2), _row_sum(dy_x2 * x)
        else:
            lanes0 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            lanes1 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            lanes2 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            lanes3 = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = col_tile * BLOCK_SIZE
                mask = row_mask & (start + cols < n_cols)
                x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_ptrs + start, mask=mask, other=0.0).to(tl.float32)
                lanes0 += dy
                lanes1 += dy * x
                lanes2 += dy * x * x
                lanes3 += dy * x * x * x
            sum0, sum1, sum2, sum3 = _row_sum(lanes0), _row_sum(lanes1), _row_sum(lanes2), _row_sum(lanes3)
        dot1, dot2, dot3 = sum1 * rstd1, sum2 * rstd2, sum3 * rstd3  # n_cols * c_p
        dw1 += dot1
        dw2 += dot2
        dw3 += dot3
        db += sum0
        a1, a2, a3 = w1 * rstd1, w2 * rstd2, w3 * rstd3
        k1, k2, k3 = rstd1 * (dot1 / n_cols), rstd2 * (dot2 / n_cols), rstd3 * (dot3 / n_cols)
        if WHOLE_ROW:
            tl.store(dx_ptrs, _dx(dy, x, a1, a2, a3, k1, k2, k3).to(DX_ptr.dtype.element_ty), mask=mask)
        else:
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = (col_tiles - 1 - col_tile) * BLOCK_SIZE  # backwards: the last tiles are still in cache
                mask = row_mask & (start + cols < n_cols)
                x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_ptrs + start, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_ptrs + start, _dx(dy, x, a1, a2, a3, k1, k2, k3).to(DX_ptr.dtype.element_ty), mask=mask)
    partial_row = Partial_ptr + tl.program_id(0) * 4
    tl.store(partial_row, tl.sum(tl.sum(dw3, axis=1), axis=0).to(Partial_ptr.dtype.element_ty))
    tl.store(partial_row + 1, tl.sum(tl.sum(dw2, axis=1), axis=0).to(Partial_ptr.dtype.element_ty))
    tl.store(partial_row + 2, tl.sum(tl.sum(dw1, axis=1), axis=0).to(Partial_ptr.dtype.element_ty))
    tl.store(partial_row + 3, tl.sum(tl.sum(db, axis=1), axis=0).to(Partial_ptr.dtype.element_ty))


# -- tunables --------------------------------------------------------------------------------------------------------

FWD = row_tunable("poly_norm", "fwd", _poly_norm_fwd_kernel)
BWD = row_tunable(
    "poly_norm", "bwd", _poly_norm_bwd_kernel, heuristic=bwd_heuristic, space=bwd_space, valid=persistent_misfit
)
DW = column_sum_tunable("poly_norm", columns=lambda n_rows, n_cols: 4)  # dw and db

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(x, w, b, eps):
    x, w = row_major(x), dense(w)
    n_rows, n_cols, stride = rows_of(x)
    y = empty_like(x, x.dtype)
    rstd = x.new_empty((3, n_rows), dtype=torch.float32)
    if n_rows:
        plan = FWD.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
        blocks = plan.config.blocks
        args = (x, w, b, y, rstd, stride, n_rows, n_cols, eps)
        grid = (cdiv(n_rows, blocks["ROWS"]),)
        launch(plan, _poly_norm_fwd_kernel, grid, args, (blocks["BLOCK_SIZE"] >= n_cols,))
    return y, rstd


def _bwd(dy, x, w, b, rstd, eps):
    dy, x, w = row_major(dy), row_major(x), dense(w)
    n_rows, n_cols, x_stride = rows_of(x)
    dx = empty_like(x, x.dtype)
    dtype = params_dtype(x, w, b)
    if not n_rows:
        return dx, x.new_zeros(3 if b is None else 4, dtype=dtype)
    plan = BWD.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
    blocks = plan.config.blocks
    n_tiles = cdiv(n_rows, blocks["ROWS"])
    programs = min(plan.programs, n_tiles)
    partial = partial_sums(x, programs, 4, dtype)
    args = (dy, x, w, rstd, dx, partial, rows_of(dy)[2], x_stride, n_rows, n_cols, n_tiles)
    launch(plan, _poly_norm_bwd_kernel, (programs,), args, (blocks["BLOCK_SIZE"] >= n_cols,))
    params = column_sum(DW, partial, dtype)
    return dx, params[:3] if b is None else params


class PolyNormFunction(OperatorFunction):
    sharding = RowsRule(inputs=("X",), weights=("W", "B"))
    fwd = define(
        "poly_norm_fwd(Tensor X, Tensor W, Tensor? B, float eps) -> (Tensor Y, Tensor rstd)",
        shapes="X [*, n]; W [3]; B of 1",
        launcher=_fwd,
        reference=_fwd_reference,
    )
    bwd = define(
        "poly_norm_bwd(Tensor dY, Tensor X, Tensor W, Tensor? B, Tensor rstd, float eps) -> (Tensor dX, Tensor dW_dB)",
        shapes="X, dY [*, n]; W [3]; B of 1; rstd [3, rows]",
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_poly_norm(
    X: torch.Tensor, W: torch.Tensor, B: torch.Tensor | None, eps: float = 1e-6, in_place: bool = True
) -> torch.Tensor:
    """W[0] * norm(X^3) + W[1] * norm(X^2) + W[2] * norm(X) + B, over the last dimension; norm is RMSNorm.

    X: [..., n_cols]; W: [3]; B: one element of any shape, or None. fp32, fp16 or bf16 (fp64 too on the CPU).
    Returns [..., n_cols] in X's dtype. in_place: accepted for compatibility; the gradient never overwrites a tensor the
    caller can see. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_numbers("liger_poly_norm", eps=eps)
    return PolyNormFunction.apply(X, W, B, eps)


class LigerPolyNorm(torch.nn.Module):
    """PolyNorm layer. As in PolyCom, weights start at 1/3 and the bias at 1. in_place: as for `liger_poly_norm`."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.variance_epsilon, self.in_place = eps, in_place
        self.weight = torch.nn.Parameter(torch.full((3,), 1.0 / 3.0))
        self.bias = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [..., n_cols]; returns the same shape and dtype."""
        return liger_poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon, self.in_place)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"


WORKLOADS = {
    "polycom_1b": (16384, 4096),
    "polycom_moe_7b": (16384, 2048),
    "motif_2_6b": (8192, 8192),
    "wide_mlp": (8192, 14336),
}


def sample(sizes, dtype, device, generator, *, bias=(1,)) -> Sample:
    n_rows, n_cols = sizes
    drawn = normal(dtype, device, generator)
    x, w = drawn(n_rows, n_cols), drawn(3)
    b = None if bias is None else drawn(1).detach().view(bias).requires_grad_()
    return row_sample(sizes, dtype, (x, w, b), grad_reduction=n_rows * n_cols)


OP = registry.register_file(__name__, tunables=(FWD, BWD, DW), options=({}, {"bias": ()}, {"bias": None}))
