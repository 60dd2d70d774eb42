"""Shared by ops that compute rows and write them in FP8: the end of their kernels, their tunable, and autograd.

A program holds whole rows, rounds them like the op without FP8, and quantises them. FP8 linears read the result. In the
autograd graph a placeholder represents the rows: an expanded tensor of one element, with the shape and dtype of the
rows, which receives the gradient of the linears. The backward of a linear transposes the FP8 data.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key
from ...runtime.operator import cdiv, check, check_tensors, launch
from ...runtime.triton_import import INTERPRET, tl, triton
from ..rows.blocks import store_tile, tile_mask
from ..rows.tuning import row_tunable, row_warps, whole_rows_misfit
from .float8_linear import RECIPES, float8_linear_reference, linear
from .formats import E4M3, Float8Rows, aligned, float8_dtype, largest_bits
from .quantize_float8 import inverse_scale, magnitude_bits, scale_bits, to_float8

WIDEST = 65536  # most columns of a row, which one program holds
ROWWISE = RECIPES["rowwise"]
SMALL = ((37, 48, 32), (1, 17, 16), (24, 40, 24))


@triton.jit
def store_float8_rows(
    Q_ptr, S_ptr, y, rows, row_mask, cols, Q_row_stride, MAX_FP8: tl.constexpr, ROUND_FIRST: tl.constexpr
):
    """Store whole rows y in FP8, padded with zeros, and their scales. MAX_FP8: see `scale_bits`."""
    scale = scale_bits(tl.max(magnitude_bits(y), axis=1), MAX_FP8)
    tl.store(S_ptr + rows, scale.to(tl.float32, bitcast=True), mask=row_mask)
    q = to_float8(y.to(tl.float32) * inverse_scale(scale)[:, None], Q_ptr.dtype.element_ty, MAX_FP8, ROUND_FIRST)
    store_tile(Q_ptr, rows, Q_row_stride, cols, q, tile_mask(row_mask, cols < Q_row_stride))


def _key(n_rows: int, n_cols: int, n_out: int, itemsize: int) -> Key:
    return row_key(n_rows, aligned(n_cols), itemsize)


def whole_rows_tunable(op: str, kernel: Any, n_inputs: int, rows: int = 1) -> Tunable:
    """The tunable `<op>.fwd`. n_inputs: tensors whose rows a program holds; rows: rows of a program if there are more
    rows than multiprocessors, of at most 4096 columns."""

    def heuristic(target: Target, key: Key) -> LaunchConfig:
        few = 1 << key[1] <= target.multiprocessors
        warps = row_warps(target, few, key[0]) if few else target.warps(n_inputs * key[0], 32, 32)
        return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": 1 if few or key[0] > 4096 else rows}, warps)

    return row_tunable(
        *(op, "fwd", kernel),
        key=_key,
        dims=("n_rows", "n_cols", "n_out"),
        heuristic=heuristic,
        safe=lambda target, key: LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": 1}, target.warps(key[0], 64)),
        space=lambda target, key: [
            LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": rows}, warps, 1, 0, hint)
            for rows in (1, 2, 4)
            for warps in (2, 4, 8, 16, 32)
            for hint in ("none", "stream")
            if rows * key[0] <= max(key[0], 8192) and 8 <= rows * key[0] // (warps * target.warp_size) <= 64
        ],
        valid=whole_rows_misfit,
        neutral=frozenset({"num_stages", "hint", "num_warps", "ROWS"}),
    )


def too_wide(x: torch.Tensor) -> str:
    """Why a program cannot hold the rows of x, or ""."""
    return f"{x.shape[-1]} columns, at most {WIDEST}" if x.shape[-1] > WIDEST else ""


def launch_rows(tunable: Tunable, x, n_rows, tensors, numbers, flags) -> Float8Rows:
    """Launch a kernel whose programs hold rows of x's width. It takes tensors, data, scale, numbers, data's stride,
    n_rows, n_cols, flags, MAX_FP8 and ROUND_FIRST, in this order."""
    n_cols, dtype = x.shape[-1], float8_dtype(x.device, E4M3)
    width = aligned(n_cols)
    data = torch.empty((n_rows, width), dtype=dtype, device=x.device)
    scale = x.new_empty(n_rows, dtype=torch.float32)
    if n_rows:
        plan = tunable.plan(x.device, row_key(n_rows, width, x.itemsize))
        args = *tensors, data, scale, *numbers, width, n_rows, n_cols
        grid = (cdiv(n_rows, plan.config.blocks["ROWS"]),)
        launch(plan, tunable.kernels[0], grid, args, (*flags, largest_bits(dtype), INTERPRET))
    return Float8Rows(data, scale)


def placeholder(ctx, like: torch.Tensor, rows: Float8Rows, dtype: torch.dtype | None = None) -> tuple:
    """The results of a Function's forward: a placeholder of the shape of `like`, the rows' data and their scales."""
    ctx.mark_non_differentiable(*rows)
    ctx.set_materialize_grads(False)
    return like.new_full((1,), math.nan, dtype=dtype).expand(like.shape), *rows


def linears(name: str, x: torch.Tensor, rows: Float8Rows, weights, biases) -> tuple[torch.Tensor, ...]:
    """The product of `rows` and each weight in FP8, plus its bias. x: the placeholder of the rows."""
    for argument, value in {"weights": weights, "biases": () if biases is None else biases}.items():
        check(isinstance(value, (list, tuple)), name, f"{argument} must be a list or tuple, got {type(value).__name__}")
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    check(0 < len(weights) == len(biases), name, f"each weight needs a bias, got {len(weights)} and {len(biases)}")
    for weight, bias in zip(weights, biases):
        check_tensors(name, optional=("bias",), weight=weight, bias=bias)
    return tuple(linear(x, weight, bias, rows, ROWWISE, name) for weight, bias in zip(weights, biases))


def linears_reference(function, args, weights, biases, rounds) -> tuple[torch.Tensor, ...]:
    """FP8 linears of function(*args) in plain torch. rounds: None, or for an fp64 reference of an op in a narrower
    dtype, this dtype: `function` is computed in it."""
    y = function(*args)
    if rounds is not None:
        narrow = [arg.to(rounds) if isinstance(arg, torch.Tensor) else arg for arg in args]
        y = y + (function(*narrow).double() - y).detach()
    biases = (None,) * len(weights) if biases is None else biases
    rounds = None if rounds is None else True
    return tuple(float8_linear_reference(y, w, b, "rowwise", rounds) for w, b in zip(weights, biases))
