"""Quantisation to FP8, and the transposed copy for the matrix products of the backward.

Each operator reads a matrix [n_rows, n_cols] once:
    rows        data and a scale for each row; data has n_cols rounded up to a multiple of 16
    cast        data for one given scale
    scales      a scale for each row, no data
    transposed  FP8 [n_cols, n_rows rounded up to a multiple of 16]. FP8 data is copied or multiplied by a factor for
                each row; fp32, fp16 or bf16 data is multiplied by one factor
The padding is zeros. Factors of rows are powers of two of at most 1, so that only underflow changes FP8 data.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ...registry import Key, LaunchConfig, Target, Tunable, row_key, tile_space
from ...runtime.dependent_launch import is_small_launch, wait_for_previous
from ...runtime.operator import cdiv, check, check_tensors, define, launch, row_major
from ...runtime.triton_import import INTERPRET, tl, triton
from ..rows.blocks import load_tile, store_tile, tile_mask
from ..rows.tuning import row_tunable
from .formats import FORMATS, Float8Rows, aligned, float8_dtype, largest_bits, scale_of


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in fp32. As integers they are ordered like |x|, with infinity and NaN as the largest."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def scale_bits(largest, MAX_FP8: tl.constexpr):
    """The scale for magnitudes up to `largest`. All are fp32 bits; MAX_FP8: of the format's largest number."""
    UP: tl.constexpr = 0x7FFFFF - (MAX_FP8 & 0x7FFFFF)  # rounds mantissas above MAX_FP8's up to the next exponent
    EXPONENT: tl.constexpr = (MAX_FP8 & 0x7F800000) - 0x3F800000
    scale = ((largest + UP) & 0x7F800000) - EXPONENT
    scale = tl.maximum(scale, 0x0D800000)  # 2^-100
    return tl.where(largest >= 0x7F800000, 0x7FC00000, scale)


@triton.jit
def inverse_scale(scale):
    """1 / scale in fp32. scale: the fp32 bits of a power of two or NaN."""
    return tl.where(scale >= 0x7F800000, scale, 0x7F000000 - scale).to(tl.float32, bitcast=True)


@triton.jit
def to_float8(x, DTYPE: tl.constexpr, MAX_FP8: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """x, fp32, rounded to FP8. ROUND_FIRST: round before the conversion, which truncates in Triton's interpreter."""
    if ROUND_FIRST:  # MAX_FP8 is below 512 (0x44000000) for e4m3 only
        BITS: tl.constexpr = 20 if MAX_FP8 < 0x44000000 else 21  # fp32's mantissa bits minus the format's
        STEP: tl.constexpr = 24576.0 if MAX_FP8 < 0x44000000 else 192.0  # 1.5 * 2^23 * the smallest subnormal number
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)) >> BITS << BITS
        MIN_NORMAL: tl.constexpr = 0.015625 if MAX_FP8 < 0x44000000 else 0.00006103515625
        x = tl.where(tl.abs(x) < MIN_NORMAL, (x + STEP) - STEP, tl.where(x == x, bits.to(tl.float32, bitcast=True), x))
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["n_rows"])
def _float8_rows_kernel(
    X_ptr,
    SCALE_ptr,
    Q_ptr,
    S_ptr,
    X_row_stride,
    Q_row_stride,
    n_rows,
    n_cols,
    MAX_FP8: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program takes ROWS rows. SCALE_ptr: [1], the scale of all rows, or None: S_ptr gets the scale of each row.

    Q_ptr: the FP8 data, or None for scales alone. WHOLE_ROW: a block holds a row of Q; wider rows are read twice.
    """
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK_SIZE)
    if WHOLE_ROW:
        mask = tile_mask(row_mask, cols < n_cols)
        x = load_tile(X_ptr, rows, X_row_stride, cols, mask, LOAD_HINT)
    if SCALE_ptr is not None:
        scale = tl.load(SCALE_ptr).to(tl.int32, bitcast=True)
        inverse = inverse_scale(scale)
    else:
        if WHOLE_ROW:
            largest = tl.max(magnitude_bits(x), axis=1)
        else:
            largest_by_column = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.int32)
            for start in range(0, n_cols, BLOCK_SIZE):
                mask = tile_mask(row_mask, start + cols < n_cols)
                x = load_tile(X_ptr, rows, X_row_stride, start + cols, mask, "")
                largest_by_column = tl.maximum(largest_by_column, magnitude_bits(x))
            largest = tl.max(largest_by_column, axis=1)
        scale = scale_bits(largest, MAX_FP8)
        tl.store(S_ptr + rows, scale.to(tl.float32, bitcast=True), mask=row_mask)
        inverse = inverse_scale(scale)[:, None]
    if Q_ptr is not None:
        if WHOLE_ROW:
            q = to_float8(x.to(tl.float32) * inverse, Q_ptr.dtype.element_ty, MAX_FP8, ROUND_FIRST)
            store_tile(Q_ptr, rows, Q_row_stride, cols, q, tile_mask(row_mask, cols < Q_row_stride))
        else:
            for start in range(0, Q_row_stride, BLOCK_SIZE):
                mask = tile_mask(row_mask, start + cols < n_cols)
                x = load_tile(X_ptr, rows, X_row_stride, start + cols, mask, "")
                q = to_float8(x.to(tl.float32) * inverse, Q_ptr.dtype.element_ty, MAX_FP8, ROUND_FIRST)
                store_tile(Q_ptr, rows, Q_row_stride, start + cols, q, tile_mask(row_mask, start + cols < Q_row_stride))


@triton.jit(do_not_specialize=["n_rows"])
def _float8_transposed_kernel(
    X_ptr,
    FACTOR_ptr,
    Y_ptr,
    X_row_stride,
    Y_row_stride,
    n_rows,
    n_cols,
    MAX_FP8: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    FACTOR_OF_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program takes ROWS rows of BLOCK_SIZE columns. FACTOR_ptr: [n_rows] or [1], or None to copy FP8."""
    wait_for_previous(DEPENDENT)
    tiles = tl.cdiv(n_cols, BLOCK_SIZE)
    pid = tl.program_id(0).to(tl.int64)
    rows = pid // tiles * ROWS + tl.arange(0, ROWS)
    cols = pid % tiles * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    row_mask = rows < n_rows
    x = load_tile(X_ptr, rows, X_row_stride, cols, tile_mask(row_mask, cols < n_cols), LOAD_HINT)
    if FACTOR_ptr is not None:
        if FACTOR_OF_ROW:
            factor = tl.load(FACTOR_ptr + rows, mask=row_mask, other=0.0)[:, None]
        else:
            factor = tl.load(FACTOR_ptr)
        x = to_float8(x.to(tl.float32) * factor, Y_ptr.dtype.element_ty, MAX_FP8, ROUND_FIRST)
    y_mask = (rows < Y_row_stride)[:, None] & (cols < n_cols)[None, :]
    tl.store(Y_ptr + cols[None, :] * Y_row_stride + rows[:, None], x, mask=y_mask)


def _tile_space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = [{"ROWS": rows, "BLOCK_SIZE": block} for rows in (32, 64, 128, 256) for block in (32, 64, 128, 256)]
    return tile_space(target, tiles, (2, 4, 8, 16), per_thread=(16, 128), hints=("none", "stream"))


def _key(n_rows: int, n_in: int, n_out: int, itemsize: int) -> Key:
    """`row_key` of a linear layer's input. Launches for the weight and the gradient use `row_key` of their sizes."""
    return row_key(n_rows, n_in, itemsize)


_NEUTRAL = frozenset({"num_stages", "hint", "num_warps", "ROWS", "BLOCK_SIZE"})  # results do not depend on these
DIMS = ("n_rows", "n_in", "n_out")
QUANTIZED = row_tunable("float8_linear", "rows", _float8_rows_kernel, key=_key, dims=DIMS, neutral=_NEUTRAL)
TRANSPOSED = Tunable(
    "float8_linear",
    "transposed",
    kernels=(_float8_transposed_kernel,),
    key=_key,
    dims=DIMS,
    heuristic=lambda target, key: LaunchConfig({"ROWS": 64, "BLOCK_SIZE": 128}, target.warps(64 * 128, 64, 8)),
    safe=lambda target, key: LaunchConfig({"ROWS": 32, "BLOCK_SIZE": 32}, target.warps(1024, 8, 4)),
    space=_tile_space,
    neutral=_NEUTRAL,
    dependent_launch=is_small_launch,
)


def _launch_rows(x, format, scale=None, has_data=True):
    """(data or, without has_data, None; the scale of each row, or None if `scale` is given, for all rows)."""
    x, dtype = row_major(x), float8_dtype(x.device, format)
    n_rows, n_cols = x.shape
    width = aligned(n_cols)
    data = torch.empty((n_rows, width), dtype=dtype, device=x.device) if has_data else None
    scales = x.new_empty(n_rows, dtype=torch.float32) if scale is None else None
    if n_rows:
        plan = QUANTIZED.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
        blocks = plan.config.blocks
        flags = largest_bits(dtype), INTERPRET, width <= blocks["BLOCK_SIZE"]
        numbers = x.stride(0), width, n_rows, n_cols
        launch(plan, _float8_rows_kernel, (cdiv(n_rows, blocks["ROWS"]),), (x, scale, data, scales, *numbers), flags)
    return data, scales


def _transposed(x, factor, format):
    x, dtype = row_major(x), float8_dtype(x.device, format)
    n_rows, n_cols = x.shape
    y = torch.empty((n_cols, aligned(n_rows)), dtype=dtype, device=x.device)
    if y.numel():
        plan = TRANSPOSED.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
        blocks = plan.config.blocks
        tiles = cdiv(y.shape[1], blocks["ROWS"]) * cdiv(n_cols, blocks["BLOCK_SIZE"])
        numbers = x.stride(0), y.shape[1], n_rows, n_cols
        flags = largest_bits(dtype), INTERPRET, factor is not None and factor.numel() > 1
        launch(plan, _float8_transposed_kernel, (tiles,), (x, factor, y, *numbers), flags)
    return y


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in fp32 or, if it is fp64, in fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.dtype.itemsize > 1 else x.float()


def _rounded(x: torch.Tensor, format: int) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.to(float8_dtype(x.device, format))


def scales_reference(x, format):
    x = wide(x)
    amax = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    return scale_of(amax, float8_dtype(x.device, format))


def cast_reference(x, scale, format):
    return _rounded(pad(wide(x) / scale[:, None], (0, aligned(x.shape[1]) - x.shape[1])), format)


def rows_reference(x, format):
    scale = scales_reference(x, format)
    return cast_reference(x, scale, format), scale


def transposed_reference(x, factor, format):
    if factor is not None:
        x = _rounded(wide(x) * factor[:, None], format)
    y = x.new_zeros((x.shape[1], aligned(x.shape[0])))
    y[:, : x.shape[0]] = x.t()
    return y


def _transposed_fake(x, factor, format):
    """Not the reference, because its slices would specialise symbolic sizes."""
    keeps_dtype = factor is None or x.dtype is torch.float64
    dtype = x.dtype if keeps_dtype else float8_dtype(x.device, format)
    return x.new_empty((x.shape[1], aligned(x.shape[0])), dtype=dtype)


float8_rows = define(
    "float8_rows(Tensor x, int format) -> (Tensor, Tensor)",
    shapes="x [m, n]",
    launcher=_launch_rows,
    reference=rows_reference,
)
float8_cast = define(
    "float8_cast(Tensor x, Tensor scale, int format) -> Tensor",
    shapes="x [m, n]; scale [1]",
    launcher=lambda x, scale, format: _launch_rows(x, format, scale)[0],
    reference=cast_reference,
)
float8_scales = define(
    "float8_scales(Tensor x, int format) -> Tensor",
    shapes="x [m, n]",
    launcher=lambda x, format: _launch_rows(x, format, has_data=False)[1],
    reference=scales_reference,
)
float8_transposed = define(
    "float8_transposed(Tensor x, Tensor? factor, int format) -> Tensor",
    shapes="float x [m, n]; factor [m] | [1]",
    launcher=_transposed,
    reference=transposed_reference,
    fake=_transposed_fake,
)


def quantized(x: torch.Tensor, format: int, rowwise: bool) -> Float8Rows:
    """A matrix in FP8, with one scale for each row or one for all."""
    if rowwise:
        return Float8Rows(*float8_rows(x, format))
    scale = float8_scales(x, format)
    scale = scale.amax(0, keepdim=True) if len(scale) else scale.new_ones(1)
    return Float8Rows(float8_cast(x, scale, format), scale)


def liger_quantize_float8(
    X: torch.Tensor, scaling: str = "row", format: str = "e4m3", transposed: bool = False
) -> Float8Rows | tuple[Float8Rows, torch.Tensor]:
    """X in FP8, with scales that are powers of two. The result has no gradient.

    X: [n_rows, n_cols] in fp32, fp16 or bf16. scaling: `row` (a scale for each row, X is read once) or `tensor` (one
    scale, X is read twice). format: `e4m3` or `e5m2`; data has the device's dtype for it, fn or fnuz.
    transposed: also return data transposed, [n_cols rounded up to 16, n_rows rounded up to 16], for products that sum
    over rows. For a scale for each column, pass X.t().
    Returns `Float8Rows(data, scale)`. A row with an infinity or NaN has the scale NaN.
    Raises `ValueError` for other arguments, and where the device has no FP8.
    """
    check_tensors("liger_quantize_float8", X=X)
    check(X.dim() == 2, "liger_quantize_float8", f"X must be [n_rows, n_cols], got shape {tuple(X.shape)}")
    check(scaling in ("row", "tensor"), "liger_quantize_float8", f"scaling must be row or tensor, got {scaling!r}")
    check(format in FORMATS, "liger_quantize_float8", f"format must be e4m3 or e5m2, got {format!r}")
    with torch.no_grad():
        rows = quantized(X, FORMATS[format], scaling == "row")
        return (rows, float8_transposed(rows.data, None, FORMATS[format])) if transposed else rows
