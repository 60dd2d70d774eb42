"""Core of the gates that write FP8: act(a) * b is rounded as the gate's own op rounds it, then quantised, never stored.

What reads it is a linear in FP8. In autograd's graph a tensor without memory stands for the product, whose gradient
the linear gives; the gate's own backward takes it from there.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, NamedTuple

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import Function, cdiv, check, define, first_order, is_interpreted, launch, row_major
from ...runtime.triton_import import tl, triton
from ..pointwise.elementwise import activation
from ..rows.blocks import load_tile, store_tile, tile_mask
from ..rows.tuning import row_tunable, row_warps
from .float8_linear import RECIPES, as_rows, float8_linear_reference, linear
from .formats import E4M3, Float8Rows, aligned, float8_dtype, largest_bits
from .quantize_float8 import inverse_scale, magnitude_bits, rows_reference, scale_bits, to_float8

WIDEST = 65536
"""Columns that a program holds."""
ROWWISE = RECIPES["rowwise"]


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
    LARGEST: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS whole rows a program."""
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK_SIZE)
    mask = tile_mask(row_mask, cols < n_cols)
    a = load_tile(A_ptr, rows, A_row_stride, cols, mask, LOAD_CACHE, LOAD_EVICT)
    b = load_tile(B_ptr, rows, B_row_stride, cols, mask, LOAD_CACHE, LOAD_EVICT)
    value, _ = activation(a.to(tl.float32), KIND)
    c = (value.to(a.dtype) * b).to(a.dtype)
    scale = scale_bits(tl.max(magnitude_bits(c), axis=1), LARGEST)
    tl.store(S_ptr + rows, scale.to(tl.float32, bitcast=True), mask=row_mask)
    q = to_float8(c.to(tl.float32) * inverse_scale(scale)[:, None], Q_ptr.dtype.element_ty, LARGEST, ROUND_FIRST)
    store_tile(Q_ptr, rows, Q_row_stride, cols, q, tile_mask(row_mask, cols < Q_row_stride))


def _key(n_rows: int, n_cols: int, n_out: int, itemsize: int) -> Key:
    return row_key(n_rows, aligned(n_cols), itemsize)


def _heuristic(target: Target, key: Key) -> LaunchConfig:
    few = 1 << key[1] <= target.multiprocessors
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": 1}, row_warps(target, few, key[0]))


def _misfit(config: LaunchConfig, key: Key) -> str | None:
    block = config.blocks["BLOCK_SIZE"]
    return None if block >= key[0] else f"BLOCK_SIZE={block} holds no row of {key[0]} columns"


class Gate(NamedTuple):
    """A gate that writes FP8. rows: its operator, (a, b) -> (data, scale); backward: of the gate's Function,
    and the numbers that it saves."""

    rows: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple]
    numbers: tuple


def gated_tunable(op: str) -> Tunable:
    """The tunable `<op>.fwd`."""
    return row_tunable(
        *(op, "fwd", _gated_rows_kernel),
        key=_key,
        dims=("n_rows", "n_cols", "n_out"),
        heuristic=_heuristic,
        safe=lambda target, key: LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": 1}, target.warps(key[0], 64)),
        space=lambda target, key: [
            LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": rows}, warps, 1, 0, hint)
            for rows in (1, 2, 4)
            for warps in (2, 4, 8, 16, 32)
            for hint in ("none", "stream")
            if rows * key[0] <= max(key[0], 8192) and 8 <= rows * key[0] // (warps * target.warp_size) <= 64
        ],
        valid=_misfit,
        neutral=frozenset({"num_stages", "hint", "num_warps", "ROWS"}),
    )


def gated_rows(
    tunable: Tunable, kind: str, reference: Callable[..., torch.Tensor], variant: str = ""
) -> Callable[..., Any]:
    """The operator `<op>_<variant>rows(a, b) -> (data, scale)`.

    kind: of `activation`; reference: act(a) * b in plain torch
    """
    return define(
        f"{tunable.op}_{variant}rows(Tensor a, Tensor b) -> (Tensor, Tensor)",
        shapes="T a, b [m, n]",
        misfit=lambda a, b: f"a has {a.shape[1]} columns, at most {WIDEST}" if a.shape[1] > WIDEST else "",
        launcher=partial(_launch, tunable, kind),
        reference=lambda a, b: rows_reference(reference(a, b), E4M3),
    )


def _launch(tunable, kind, a, b):
    a, b, dtype = row_major(a), row_major(b), float8_dtype(a.device, E4M3)
    n_rows, n_cols = a.shape
    width = aligned(n_cols)
    data = torch.empty((n_rows, width), dtype=dtype, device=a.device)
    scale = a.new_empty(n_rows, dtype=torch.float32)
    if n_rows:
        plan = tunable.plan(a.device, row_key(n_rows, width, a.itemsize))
        numbers = a.stride(0), b.stride(0), width, n_rows, n_cols
        flags = kind, largest_bits(dtype), is_interpreted()
        grid = (cdiv(n_rows, plan.config.blocks["ROWS"]),)
        launch(plan, _gated_rows_kernel, grid, (a, b, data, scale, *numbers), flags)
    return data, scale


class GatedRowsFunction(Function):
    """Autograd for act(a) * b in FP8: what stands for it in the graph, data and scale. Saves a and b."""

    @staticmethod
    def forward(ctx, a, b, gate, owned):
        data, scale = gate.rows(as_rows(a), as_rows(b))
        ctx.save_for_backward(a, b)
        ctx.of_gate, ctx.numbers, ctx.owned = gate.backward, gate.numbers, owned
        ctx.mark_non_differentiable(data, scale)
        ctx.set_materialize_grads(False)
        return a.new_full((1,), math.nan).expand(a.shape), data, scale

    @staticmethod
    @first_order
    def backward(ctx, dc, d_data, d_scale):
        return (None,) * 4 if dc is None else (*ctx.of_gate(ctx, dc)[:2], None, None)


def gated_linear(
    gate: Gate,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    owned: bool,
    name: str,
) -> torch.Tensor:
    """act(a) * b times the weight's transpose, in FP8."""
    fits = weight.dim() == 2 and a.dim() > 0 and a.shape == b.shape and a.shape[-1] == weight.shape[1]
    shapes = f"{tuple(a.shape)}, {tuple(b.shape)}, {tuple(weight.shape)}"
    check(fits, name, f"a, b [..., n_cols] and weight [n_out, n_cols] do not fit: {shapes}")
    check(bias is None or bias.shape == weight.shape[:1], name, f"bias must be [{weight.shape[0]}]")
    standing, data, scale = GatedRowsFunction.apply(a, b, gate, owned)
    return linear(standing, weight, bias, Float8Rows(data, scale), ROWWISE, name)


def gated_linear_reference(gate: Callable[..., torch.Tensor], a, b, weight, bias, rounds) -> torch.Tensor:
    """The specification in plain torch. rounds: None, or the dtype of what an exact result in fp64 stands for."""
    c = gate(a, b)
    if rounds is not None:
        c = c + (gate(a.to(rounds), b.to(rounds)).double() - c).detach()
    return float8_linear_reference(c, weight, bias, "rowwise", None if rounds is None else True)
