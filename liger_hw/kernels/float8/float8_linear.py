"""A linear layer whose three products are in FP8: y = x W^T + b.

Products are summed in fp32, and the sums are rounded to bf16. Hopper's tensor cores add FP8 products with about 14
bits: the error is 2^-13 of the sum of magnitudes.

Recipe `rowwise`, for tokens t, inputs i and outputs o; each tensor is read once:
    y[t, o] = s[t] w[o] sum_i x8[t, i] W8[o, i]                 s, w: scales of the rows of x8 and W8
    dx[t, i] = g[t] m sum_o dy8[t, o] W8'[o, i]                 g: scales of dy8's rows; m: max of w, one scale of W8'
    dW[o, i] = c sum_t (dy8[t, o] g[t] s[t] / c) x8[t, i]       c: max of g[t] s[t]
The last product sums over tokens, so dy8 is first multiplied by g s / c. These factors are powers of two, so that only
exponents change and nothing is rounded twice. Tokens whose gradients are much smaller than the largest underflow, as in
any product with one scale.

Recipe `tensorwise`: each tensor has one scale, and is read twice.

Saved for backward: x8 and its scales, one byte an element, and the weight, which is quantised again, to W8'. For a
weight that is kept in FP8, W8' is W8 w / m, which changes only exponents.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433; scales of rows:
torchao.float8; of gradients: DeepSeek-AI, "DeepSeek-V3 Technical Report", https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ... import private, registry
from ...registry import Sample, normal
from ...runtime.operator import Function, autocast_dtype, check, check_tensors, first_order, no_view
from .formats import E4M3, E5M2, Float8Rows, aligned, float8_dtype, why_no_float8
from .quantize_float8 import QUANTIZED, TRANSPOSED, float8_transposed, quantized, scales_reference, wide


class Recipe(NamedTuple):
    """rowwise: whether each row has a scale, or all rows have one; gradients: the format of dy."""

    rowwise: bool
    gradients: int


RECIPES = {"rowwise": Recipe(True, E4M3), "tensorwise": Recipe(False, E5M2)}


def product(a, b, scale_a, scale_b, rowwise: bool) -> torch.Tensor:
    """a [m, k] times the transpose of b [n, k], both FP8; returns bf16, on the CPU fp32 or, for fp64, fp64.

    scale_a: [m] or [1]; scale_b: [n] or [1]; rowwise: whether one of them has a scale for each row
    """
    if a.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):  # in fp16 a sum of FP8 numbers overflows
            return (wide(a) @ wide(b).t()) * scale_a[:, None] * scale_b
    n, width = b.shape[0], aligned(b.shape[0])
    if width > n:
        b = pad(b.view(torch.uint8), (0, 0, 0, width - n)).view(b.dtype)
        scale_b = pad(scale_b, (0, width - n), value=1.0) if scale_b.numel() > 1 else scale_b
    if not rowwise:
        scale_a, scale_b = scale_a.view(()), scale_b.view(())
    else:
        scale_a = scale_a.expand(a.shape[0]).contiguous()[:, None]
        scale_b = scale_b.expand(width).contiguous()[None, :]
    y = private.scaled_matmul(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    return y if width == n else y[:, :n]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., n_cols] as [n_rows, n_cols]."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


class _ReferenceFunction(torch.autograd.Function):
    """The formulas above in fp32 or fp64, with inputs rounded to FP8. On a device fp32 products are rounded to bf16."""

    @staticmethod
    def forward(ctx, x, weight, recipe):
        rows, weights = (_reference_rows(t, E4M3, recipe.rowwise) for t in (x, weight))
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return _as_product((rows.data @ weights.data.t()) * rows.scale[:, None] * weights.scale)

    @staticmethod
    def backward(ctx, dy):
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        if not x.shape[0]:
            return torch.zeros_like(x), torch.zeros_like(weight), None
        rows = _reference_rows(x, E4M3, recipe.rowwise)
        gradients = _reference_rows(dy, recipe.gradients, recipe.rowwise)
        weights = _reference_rows(weight, E4M3, False)
        token_scales = gradients.scale * rows.scale
        largest = token_scales.amax()
        dx = (gradients.data @ weights.data) * gradients.scale[:, None] * weights.scale
        factors = torch.where(largest > 0, token_scales / largest, 0.0)
        dw = (_round(gradients.data * factors[:, None], recipe.gradients).t() @ rows.data) * largest
        return _as_product(dx), _as_product(dw), None


def _as_product(y: torch.Tensor) -> torch.Tensor:
    return y if y.device.type == "cpu" or y.dtype is torch.float64 else y.bfloat16().to(y.dtype)


def _round(x: torch.Tensor, format: int) -> torch.Tensor:
    return x.to(float8_dtype(x.device, format)).to(x.dtype)


def _reference_rows(x: torch.Tensor, format: int, rowwise: bool) -> Float8Rows:
    scale = scales_reference(x, format)
    if not rowwise and x.shape[0]:
        scale = scale.amax(0, keepdim=True)
    return Float8Rows(_round(x / scale[:, None], format), scale)


def float8_linear_reference(x, weight, bias=None, recipe="rowwise", rounds=None):
    """rounds: whether tensors are rounded to FP8; None: if `x` is not fp64."""
    if rounds is None:
        rounds = x.dtype is not torch.float64
    rows, w = as_rows(wide(x)), wide(weight)
    y = _ReferenceFunction.apply(rows, w, RECIPES[recipe]) if rounds else rows @ w.t()
    y = y if bias is None else y + wide(bias)
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


class Scales:
    """The scales in a linear's last forward and backward; a row with an infinity or NaN has the scale NaN. Copies are
    empty. All instances are equal, because launches do not depend on them."""

    input: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    gradient: torch.Tensor | None = None

    def record(self, **scales: torch.Tensor) -> None:
        """Keep these scales, except fake tensors (autotune/compile_ahead.py)."""
        vars(self).update({name: scale for name, scale in scales.items() if type(scale) is torch.Tensor})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scales)

    def __hash__(self) -> int:
        return hash(Scales)

    def __getstate__(self) -> None:
        return None


class Float8LinearFunction(Function):
    """rows: x in FP8, if it is already computed, or None
    weight_scale: the scale of a weight that is kept in FP8, or None
    scales: a `Scales` in which the scales are recorded, or None
    """

    @staticmethod
    def forward(ctx, x, weight, bias, rows, recipe, dtype, weight_scale, scales):
        if rows is None:
            rows = quantized(as_rows(x), E4M3, recipe.rowwise)
        weights = Float8Rows(weight, weight_scale)
        if weight_scale is None:
            weights = quantized(weight, E4M3, recipe.rowwise)
        y = product(rows.data, weights.data, rows.scale, weights.scale, recipe.rowwise)
        if bias is not None:
            y = y + bias
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        saved_rows = rows if needs_dw else (None, None)
        saved_scale = weights.scale if weight_scale is not None else weights.scale.amax(0, keepdim=True)
        ctx.save_for_backward(*saved_rows, *((weight, saved_scale) if needs_dx else (None, None)))
        ctx.recipe, ctx.shape, ctx.scales = recipe, x.shape, scales
        if scales is not None:
            scales.record(input=rows.scale, weight=weights.scale)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return no_view(y.to(dtype), (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @first_order
    def backward(ctx, dy):
        data, scale, weight, weight_scale = ctx.saved_tensors
        recipe, (x_dtype, w_dtype, b_dtype) = ctx.recipe, ctx.dtypes
        dy = as_rows(dy)
        dx = dw = db = None
        if ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(b_dtype)
        gradients = quantized(dy, recipe.gradients, recipe.rowwise)
        if ctx.scales is not None:
            ctx.scales.record(gradient=gradients.scale)
        if weight is not None:
            if weight.dtype.itemsize == 1:
                transposed, one_scale = _transposed_with_one_scale(weight, weight_scale, E4M3, recipe.rowwise)
            else:
                transposed, one_scale = float8_transposed(weight, weight_scale.reciprocal(), E4M3), weight_scale
            dx = product(gradients.data, transposed, gradients.scale, one_scale, recipe.rowwise)
            dx = dx.to(x_dtype).reshape(ctx.shape)
        if data is not None:
            token_scales = gradients.scale * scale
            format, x8 = recipe.gradients, float8_transposed(data, None, E4M3)
            dy8, one_scale = _transposed_with_one_scale(gradients.data, token_scales, format, recipe.rowwise)
            dw = product(dy8, x8, one_scale, torch.ones_like(one_scale), False)
            dw = dw[: dy.shape[1], : ctx.shape[-1]].to(w_dtype).contiguous()
        return dx, dw, db, *(None,) * 5


def _transposed_with_one_scale(data, scale, format: int, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(data transposed and, if rowwise, multiplied by scale / max of scale; the one scale of the result, [1])."""
    if not rowwise:
        return float8_transposed(data, None, format), scale
    largest = scale.amax(0, keepdim=True)
    return float8_transposed(data, scale / largest.clamp_min(torch.finfo(torch.float32).tiny), format), largest


def liger_float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, recipe: str = "rowwise"
) -> torch.Tensor:
    """x weight^T + bias, with x, weight and the gradient in FP8 in the forward and in both products of the backward.

    x: [..., n_in]; weight: [n_out, n_in]; bias: [n_out] or None; fp32, fp16 or bf16, all of one dtype unless autocast
    is on. On the CPU fp64 too, which is not rounded. n_in and n_out are padded to multiples of 16.
    recipe: `rowwise` (a scale for each row, gradients in E4M3) or `tensorwise` (one scale, gradients in E5M2)
    Returns [..., n_out] in x's dtype or autocast's.
    Raises `ValueError` for shapes and dtypes that do not fit, and where the device has no FP8.
    """
    name = "liger_float8_linear"
    check_tensors(name, optional=("bias",), x=x, weight=weight, bias=bias)
    known = isinstance(recipe, str) and recipe in RECIPES
    check(known, name, f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    return linear(x, weight, bias, None, RECIPES[recipe], name)


def linear(x, weight, bias, rows, recipe: Recipe, name: str, weight_scale=None, scales=None) -> torch.Tensor:
    """Check shapes and dtypes, with `name` in errors, and apply the Function; see there for rows and what follows."""
    fits = weight.dim() == 2 and x.shape[-1:] == weight.shape[1:]
    shapes = f"{tuple(x.shape)}, {tuple(weight.shape)}"
    check(fits, name, f"the input must be [..., n_in] and the weight [n_out, n_in], got {shapes}")
    if bias is not None:
        check(bias.shape == weight.shape[:1], name, f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    dtype = autocast_dtype(x.device.type)
    if dtype is None:
        dtype = x.dtype
        same = (weight_scale is not None or weight.dtype is dtype) and (bias is None or bias.dtype is dtype)
        check(same, name, f"x is {x.dtype}, weight {weight.dtype}; they must be of one dtype unless autocast is on")
    if not x.numel() or not weight.numel():
        return torch.nn.functional.linear(x, weight, bias)
    return Float8LinearFunction.apply(x, weight, bias, rows, recipe, dtype, weight_scale, scales)


WORKLOADS = {
    "deepseek_v3_kv_a": (4096, 7168, 576),
    "llama3_8b_qo": (8192, 4096, 4096),
    "llama3_8b_gate_up": (8192, 4096, 14336),
    "llama3_8b_down": (8192, 14336, 4096),
    "llama3_70b_gate_up": (4096, 8192, 28672),
}


def sample(sizes, dtype, device, generator, *, recipe="rowwise", bias=False) -> Sample:
    n_rows, n_in, n_out = sizes
    drawn = normal(dtype, device, generator)
    x, weight = drawn(n_rows, n_in), drawn(n_out, n_in)
    return Sample(
        args=(x, weight, drawn(n_out) if bias else None, recipe),
        reduction=n_in,
        grad_reduction=max(n_rows, n_out),
        moved=5 * (n_rows * n_in + n_rows * n_out) + 6 * n_in * n_out,
        exact={"rounds": True},
        float8=True,
    )


OP = registry.register_file(
    __name__,
    tunables=(QUANTIZED, TRANSPOSED),
    options=({}, {"recipe": "tensorwise"}, {"bias": True}),
    small=((37, 32, 48), (1, 16, 32), (24, 48, 16)),
    why_not=why_no_float8,
)
