"""Shared by rms_norm_float8, fused_add_rms_norm_float8 and layer_norm_float8: one kernel, its launcher and samples.

The y of an RMS norm is rounded as in ../norms/forward.py, the y of LayerNorm is not; then y is quantised. The gradient
of the FP8 linears goes to the backward of the norm without FP8.
"""

from __future__ import annotations

from typing import Callable

import torch

from ...registry import Sample, Tunable, normal
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import dense, empty_like, row_major, rows_of
from ...runtime.triton_import import tl, triton
from ..norms.forward import out_dtype, scale_and_shift
from ..rows.blocks import load_columns, load_tile, store_tile, tile_mask
from .float8_linear import as_rows
from .formats import E4M3
from .quantize_float8 import rows_reference
from .whole_rows import launch_rows, store_float8_rows, whole_rows_tunable


@triton.jit(do_not_specialize=["n_rows"])
def _normed_rows_kernel(
    X_ptr,
    R_ptr,
    W_ptr,
    B_ptr,
    S_ptr,
    STATS_ptr,
    Q_ptr,
    SCALE_ptr,
    X_row_stride,
    R_row_stride,
    eps,
    offset,
    Q_row_stride,
    n_rows,
    n_cols,
    CASTING: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ROUND_Y: tl.constexpr,
    MAX_FP8: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """R_ptr, S_ptr: the residual and the result x + residual, or both None. W_ptr, B_ptr and offset may be None.
    ROUND_Y: y is rounded to x's dtype before it is quantised."""
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK_SIZE)
    exist = cols < n_cols
    mask = tile_mask(row_mask, exist)
    x = load_tile(X_ptr, rows, X_row_stride, cols, mask, LOAD_HINT)
    if R_ptr is not None:
        r = load_tile(R_ptr, rows, R_row_stride, cols, mask, LOAD_HINT)
        x = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
        store_tile(S_ptr, rows, n_cols, cols, x, mask)
    w = load_columns(W_ptr, cols, exist)
    b = load_columns(B_ptr, cols, exist)
    y = x.to(tl.float32)
    if SUBTRACT_MEAN:
        mean = tl.sum(y, axis=1) / n_cols
        tl.store(STATS_ptr + rows, mean, mask=row_mask)
        STATS_ptr += n_rows
        y = tl.where(mask, y - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(y * y, axis=1) / n_cols + eps)
    tl.store(STATS_ptr + rows, rstd, mask=row_mask)
    y = scale_and_shift(y * rstd[:, None], w, b, offset, x.dtype, CASTING)
    if ROUND_Y:
        y = y.to(x.dtype)
    store_float8_rows(Q_ptr, SCALE_ptr, y, rows, row_mask, cols, Q_row_stride, MAX_FP8, ROUND_FIRST)


def normed_tunable(op: str, rows: int = 1) -> Tunable:
    return whole_rows_tunable(op, _normed_rows_kernel, 1, rows)


def launch_normed(tunable, x, w, eps, offset, casting, residual=None, b=None, subtract_mean=False):
    """(data, scale, statistics) of a norm's rows in FP8; with a residual also x + residual, as the last result."""
    x, w, b = row_major(x), dense(w), dense(b)
    n_rows, _, stride = rows_of(x)
    s = r_stride = None
    if residual is not None:
        residual, s = row_major(residual), empty_like(x, x.dtype)
        r_stride = rows_of(residual)[2]
    stats = x.new_empty((2, n_rows) if subtract_mean else n_rows, dtype=torch.float32)
    tensors, numbers = (x, residual, w, b, s, stats), (stride, r_stride, eps, offset or None)
    flags = casting, subtract_mean, not subtract_mean and out_dtype(x, w, casting) is x.dtype
    rows = launch_rows(tunable, x, n_rows, tensors, numbers, flags)
    return (*rows, stats) if s is None else (*rows, stats, s)


def normed_reference(y: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of `launch_normed`. y, others: the results of the norm without FP8."""
    return *rows_reference(as_rows(y), E4M3), *others


WORKLOADS = {
    "llama3_8b": (8192, 4096, 4096),
    "qwen3_8b": (8192, 4096, 12288),
    "llama3_70b": (4096, 8192, 8192),
    "gemma2_2b": (8192, 2304, 9216),
}


def normed_sample(n_inputs: int, n_vectors: int) -> Callable[..., Sample]:
    """The `sample` of an op with n_inputs tensors like x and n_vectors tensors [n_cols]. weights: number of linears."""

    def sample(sizes, dtype, device, generator, *, weights=1, bias=False, affine=True, **kwargs) -> Sample:
        n_rows, n_cols, n_out = sizes
        drawn = normal(dtype, device, generator)
        inputs = [drawn(n_rows, n_cols) for _ in range(n_inputs)]
        vectors = [drawn(n_cols) if affine else None for _ in range(n_vectors)]
        linears = [drawn(n_out, n_cols) for _ in range(weights)]
        return Sample(
            args=(*inputs, *vectors, 1e-6, linears, [drawn(n_out) for _ in linears] if bias else None),
            kwargs=kwargs,
            reduction=n_cols,
            grad_reduction=max(n_rows, n_cols, n_out),
            moved=(5 * n_inputs * dtype.itemsize + 3) * n_rows * n_cols + weights * (5 * n_rows + 6 * n_cols) * n_out,
            exact={"rounds": dtype},
            float8=True,
        )

    return sample
