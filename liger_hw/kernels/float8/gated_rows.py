"""Shared by swiglu_float8 and geglu_float8: act(a) * b is rounded as by swiglu or geglu, then quantised.

An FP8 linear reads the result. Its gradient goes to the backward of swiglu or geglu.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch

from ...registry import Tunable
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import Function, check, define, first_order, row_major
from ...runtime.triton_import import tl, triton
from ..pointwise.elementwise import activation
from ..rows.blocks import load_tile, tile_mask
from .float8_linear import as_rows, linear
from .formats import E4M3, Float8Rows
from .quantize_float8 import rows_reference
from .whole_rows import ROWWISE, launch_rows, placeholder, store_float8_rows, too_wide, whole_rows_tunable


@triton.jit(do_not_specialize=["n_rows"])
def _gated_rows_kernel(
    A_ptr,
    B_ptr,
    Q_ptr,
    S_ptr,
    A_row_stride,
    B_row_stride,
    Q_row_stride,
    n_rows,
    n_cols,
    KIND: tl.constexpr,
    MAX_FP8: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK_SIZE)
    mask = tile_mask(row_mask, cols < n_cols)
    a = load_tile(A_ptr, rows, A_row_stride, cols, mask, LOAD_HINT)
    b = load_tile(B_ptr, rows, B_row_stride, cols, mask, LOAD_HINT)
    value, _ = activation(a.to(tl.float32), KIND)
    c = (value.to(a.dtype) * b).to(a.dtype)
    store_float8_rows(Q_ptr, S_ptr, c, rows, row_mask, cols, Q_row_stride, MAX_FP8, ROUND_FIRST)


class Gate(NamedTuple):
    """rows: the operator (a, b) -> (data, scale); backward: of the op without FP8; numbers: `ctx.numbers` for it."""

    rows: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple]
    numbers: tuple


def gated_tunable(op: str) -> Tunable:
    return whole_rows_tunable(op, _gated_rows_kernel, 2)


def gated_rows(tunable: Tunable, kind: str, reference: Callable[..., torch.Tensor], variant: str = "") -> Any:
    """The operator `<op>_<variant>rows(a, b) -> (data, scale)`. reference: act(a) * b in plain torch."""

    def launcher(a, b):
        a, b = row_major(a), row_major(b)
        strides = a.stride(0), b.stride(0)
        return tuple(launch_rows(tunable, a, a.shape[0], (a, b), strides, (kind,)))

    return define(
        f"{tunable.op}_{variant}rows(Tensor a, Tensor b) -> (Tensor, Tensor)",
        shapes="T a, b [m, n]",
        misfit=lambda a, b: too_wide(a),
        launcher=launcher,
        reference=lambda a, b: rows_reference(reference(a, b), E4M3),
    )


class GatedRowsFunction(Function):
    @staticmethod
    def forward(ctx, a, b, gate, owned):
        ctx.save_for_backward(a, b)
        ctx.gate_backward, ctx.numbers, ctx.owned = gate.backward, gate.numbers, owned
        return placeholder(ctx, a, Float8Rows(*gate.rows(as_rows(a), as_rows(b))))

    @staticmethod
    @first_order
    def backward(ctx, dc, d_data, d_scale):
        return (None,) * 4 if dc is None else (*ctx.gate_backward(ctx, dc)[:2], None, None)


def gated_linear(
    gate: Gate,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    owned: bool,
    name: str,
    *state: Any,
) -> torch.Tensor:
    """(act(a) * b) weight^T + bias in FP8. state: weight_scale and scales of `linear`."""
    check(a.shape == b.shape, name, f"a and b must be of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    c, data, scale = GatedRowsFunction.apply(a, b, gate, owned)
    return linear(c, weight, bias, Float8Rows(data, scale), ROWWISE, name, *state)
