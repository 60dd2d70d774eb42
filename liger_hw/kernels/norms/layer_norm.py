"""LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b, over the last dimension.

Shapes: x [..., n_cols], w [n_cols] or None (no scaling), b [n_cols] or None (no shift; only with a w) -> y like x.
Dtypes: x, w, b in fp32, fp16 or bf16, each its own. Statistics, products and sums are fp32; y is rounded once, to x's
dtype. var is the mean squared deviation.
Saved for backward: x, w, and mean and rstd = 1 / sqrt(var + eps), two fp32 a row.
Backward, with m = dy * w and h = (x - mean) * rstd:  dx = rstd * (m - mean(m) - h * mean(m * h)),
dw = sum over rows of dy * h,  db = sum over rows of dy.

Source: Ba, Kiros and Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450; the running mean and deviation of
rows too wide to hold are those of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ... import registry
from ...recompute.recipes import offer
from ...registry import Key, LaunchConfig, Op, Sample, Target, Tunable, row_key
from ...runtime.cooperative import launch_cooperative, resident_options
from ...runtime.dependent_launch import few_elements
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
    row_major,
    rows_of,
)
from ..rows.blocks import aligned_key, count_programs, count_tiles, held_columns, is_unaligned, lay_out, vector_width
from ..rows.reduce import column_sum, column_sum_tunable, halves, param_parts, params_dtype, partial_sums
from ..rows.tuning import (
    DIMS,
    blocks_misfit,
    bwd_heuristic,
    bwd_space,
    fwd_heuristic,
    fwd_space,
    persistent_misfit,
    safe,
)
from .layer_norm_kernels import (
    _layer_norm_bwd_kernel,
    _layer_norm_bwd_means_kernel,
    _layer_norm_fwd_kernel,
)
from .rms_backward import at_once, dot_heuristic, dot_safe, dot_space
from .row_teams import (
    _layer_norm_team_bwd_kernel,
    team_heuristic,
    team_misfit,
    team_space,
    teams_of,
)

# -- reference -------------------------------------------------------------------------------------------------------


def layer_norm_reference(X: torch.Tensor, W: torch.Tensor | None, B: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The specification in plain torch; computes in fp32, or in fp64 when `X` is fp64."""
    wide = torch.promote_types(X.dtype, torch.float32)
    x = X.to(wide)
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if W is not None:
        y = y * W.to(wide)
    if B is not None:
        y = y + B.to(wide)
    return y.to(X.dtype)


# -- tunables --------------------------------------------------------------------------------------------------------

_WIDEST_BWD_TILE = 8192
"""Columns a backward program holds at most: half of rms_norm's, for there are two gradients to keep in registers."""


def narrow_bwd_heuristic(target: Target, key: Key, streams: int = 2) -> LaunchConfig:
    """The tiles of rms_norm's backward; wider rows in column tiles of 4096."""
    block = key[0] if key[0] <= _WIDEST_BWD_TILE else 4096
    return bwd_heuristic(target, (block, *key[1:]), streams, grads=2)


def narrow_bwd_space(target: Target, key: Key, streams: int = 2) -> list[LaunchConfig]:
    return [c for c in bwd_space(target, key, streams) if c.blocks["BLOCK_SIZE"] <= _WIDEST_BWD_TILE]


def _fwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """rms_norm's, but many rows of 4096 columns by half the warps, which wait for one another twice a row: on the H200
    55 us instead of 63 at 8192 x 6144 (2026-11-21); rows that begin anywhere have more to do a thread.

    Where W and B fit a program's registers beside a row in two pieces, many such rows are taken in a loop, as many
    programs as registers hold: 44.5 us instead of 49.3 at 8192 x 5120, 23.2 instead of 24.0 at 8192 x 2560. Of rows in one
    piece that is no faster: 71.1 instead of 71.4 at 16384 x 4096, 40.8 instead of 40.1 at 36928 x 1024 (2026-11-22).
    """
    config = fwd_heuristic(target, key, 32768)
    warps = target.warps(key[0], 32)
    if key[0] == 4096 and not is_unaligned(key) and 1 << key[1] > 16 * target.multiprocessors:
        config = replace(config, num_warps=warps)
    many = 1 << key[1] > 32 * target.multiprocessors
    looped = key[3:] == (1,) and 2048 <= key[0] <= 4096 and key[2] <= 2 and many
    return looped and _loop(target, key, warps, 3, 12288 // key[0]) or config


def _loop(target: Target, key: Key, warps: int, stages: int, ctas: int) -> LaunchConfig | None:
    """Programs that stay, each with its share of registers; None where a compiler cannot be held to that, or the rows in
    flight do not fit shared memory."""
    if not target.cooperative or ctas * (stages - 1) * held_columns(key[0]) * key[2] > target.shared_memory:
        return None
    registers = {"maxnreg": resident_options(target, warps, ctas)["maxnreg"]}
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": 1}, warps, stages, ctas, vendor=registers)


def _fwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    """rms_norm's, and loops over rows whose W and B a program can keep."""
    loops = (
        _loop(target, key, warps, stages, most // warps)
        for warps in (1, 2, 4, 8)
        for most in (12, 16)
        for stages in (3, 4)
        if 1024 <= key[0] <= 4096 and 16 <= key[0] // (warps * target.warp_size) <= 32
    )
    return [*fwd_space(target, key), *(config for config in loops if config is not None)]


FWD = Tunable(
    "layer_norm",
    "fwd",
    kernels=(_layer_norm_fwd_kernel,),
    key=aligned_key,
    dims=DIMS,
    heuristic=_fwd_heuristic,
    safe=safe,
    space=_fwd_space,
    valid=blocks_misfit,
    ahead=few_elements,
)
BWD = Tunable(
    "layer_norm",
    "bwd",
    kernels=(_layer_norm_bwd_kernel, _layer_norm_team_bwd_kernel),
    key=aligned_key,
    dims=DIMS,
    heuristic=lambda target, key: team_heuristic(target, key, 2) or narrow_bwd_heuristic(target, key),
    safe=safe,
    space=lambda target, key: [*narrow_bwd_space(target, key), *team_space(target, key)],
    valid=lambda config, key: persistent_misfit(config, key) or team_misfit(config, key),
    ahead=few_elements,
)
BWD_MEANS = Tunable(
    "layer_norm",
    "bwd_means",
    kernels=(_layer_norm_bwd_means_kernel,),
    key=row_key,
    dims=DIMS,
    heuristic=dot_heuristic,
    safe=dot_safe,
    space=dot_space,
    ahead=few_elements,
)
DW = column_sum_tunable("layer_norm", columns=lambda n_rows, n_cols: 2 * n_cols)  # dw and db

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(x, w, b, eps):
    x, w, b = row_major(x), dense(w), dense(b)
    n_rows, n_cols, stride = rows_of(x)
    y = empty_like(x, x.dtype)
    stats = x.new_empty((2, n_rows), dtype=torch.float32)
    if n_rows:
        group = vector_width(n_rows, n_cols, x)
        plan = FWD.plan(x.device, aligned_key(n_rows, n_cols, x.itemsize))
        blocks = plan.config.blocks
        pieces = lay_out(n_cols, blocks["BLOCK_SIZE"], group)
        n_tiles = count_tiles(n_rows, blocks["ROWS"], pieces[2])
        loop = pieces[0] and 0 < plan.programs < n_tiles
        programs = count_programs(plan.programs, n_tiles, pieces[2]) if loop else n_tiles
        args = (x, w, b, y, stats, stride, n_rows, n_cols, n_tiles, eps)
        launch(plan, _layer_norm_fwd_kernel, (programs,), args, (*pieces, loop))
    return y, stats


def _bwd(dy, x, w, b, stats, needs_params):
    dy, x, w = row_major(dy), row_major(x), dense(w)
    n_rows, n_cols, x_stride = rows_of(x)
    dx = empty_like(x, x.dtype)
    parts, dtype = param_parts(needs_params, w, b), params_dtype(x, w, b)
    if not n_rows:
        return dx, x.new_zeros(parts * n_cols, dtype=dtype)
    dy_stride = rows_of(dy)[2]
    group = vector_width(n_rows, n_cols, x, dy)
    plan = BWD.plan(x.device, aligned_key(n_rows, n_cols, x.itemsize))
    teams, splits = teams_of(plan, n_rows, n_cols)
    if teams:
        partial = partial_sums(x, teams, parts * n_cols, dtype) if parts else None
        tensors, numbers = (dy, x, w, stats, dx, partial), (dy_stride, x_stride, n_rows, n_cols)
        launch_cooperative(
            plan, _layer_norm_team_bwd_kernel, teams * splits, splits, n_rows, tensors, numbers, (parts == 2,)
        )
        return dx, column_sum(DW, partial, dtype) if parts else x.new_empty(0, dtype=dtype)
    blocks = plan.config.blocks
    whole, tail, group = lay_out(n_cols, blocks["BLOCK_SIZE"], group)
    n_tiles, col_tiles = count_tiles(n_rows, blocks["ROWS"], group), 1 if whole else -(-n_cols // blocks["BLOCK_SIZE"])
    means = None
    if col_tiles > 1:
        means = torch.empty_like(stats)
        args = (dy, x, w, stats, means, dy_stride, x_stride, n_rows, n_cols)
        plan_of_means = BWD_MEANS.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
        launch(plan_of_means, _layer_norm_bwd_means_kernel, (n_rows,), args)
    programs = count_programs(plan.programs // col_tiles, n_tiles, group)
    few, width = at_once(plan, n_rows, n_cols, n_tiles, programs, parts > 0) if whole else (0, 0)
    by_columns = -(-n_cols // width) if width else 0
    partial = partial_sums(x, 1 if by_columns else programs, parts * n_cols, dtype) if parts else None
    args = (dy, x, w, stats, means, dx, partial, dy_stride, x_stride, n_rows, n_cols, n_tiles)
    flags = (parts == 2, tail, group, few, width)
    launch(plan, _layer_norm_bwd_kernel, (programs + by_columns, col_tiles), args, flags)
    return dx, column_sum(DW, partial, dtype) if parts else x.new_empty(0, dtype=dtype)


# -- the operators ---------------------------------------------------------------------------------------------------


def _fwd_reference(x, w, b, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    mean = x.to(wide).mean(-1)
    variance = (x.to(wide) - mean[..., None]).square().mean(-1)
    return layer_norm_reference(x, w, b, eps).contiguous(), torch.stack([mean, torch.rsqrt(variance + eps)]).reshape(
        2, mean.numel()
    )


def _bwd_reference(dy, x, w, b, stats, needs_params):
    wide = stats.dtype
    mean, rstd = stats.view(2, *x.shape[:-1], 1)
    h, g = (x.to(wide) - mean) * rstd, dy.to(wide)
    m = g if w is None else g * w.to(wide)
    dx = rstd * (m - m.mean(-1, keepdim=True) - h * (m * h).mean(-1, keepdim=True))
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    grads = [(g * h).reshape(rows).sum(0), g.reshape(rows).sum(0)][: param_parts(needs_params, w, b)]
    params = torch.cat(grads) if grads else x.new_empty(0)
    return dx.to(x.dtype).contiguous(), params.to(params_dtype(x, w, b))


def _fwd_fake(x, w, b, eps):
    stats = x.new_empty((2, math.prod(x.shape[:-1])), dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), stats


def _bwd_fake(dy, x, w, b, stats, needs_params):
    size = param_parts(needs_params, w, b) * x.shape[-1]
    return x.new_empty(x.shape), x.new_empty(size, dtype=params_dtype(x, w, b))


layer_norm_fwd = define(
    "layer_norm_fwd(Tensor x, Tensor? w, Tensor? b, float eps) -> (Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
layer_norm_bwd = define(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? w, Tensor? b, Tensor stats, bool needs_params) -> (Tensor, Tensor)",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class LigerLayerNormFunction(Function):
    """Autograd for LayerNorm: saves x, w, b (only for its dtype) and the statistics. dw and db share one storage."""

    @staticmethod
    def forward(ctx, X, W, B, eps):
        eps = float(eps)
        Y, STATS = layer_norm_fwd(X, W, B, eps)
        ctx.save_for_backward(X, W, B, STATS)
        offer(ctx, Y, layer_norm_fwd, (X, W, B, eps), 0)
        return Y

    @staticmethod
    @first_order
    def backward(ctx, dY):
        X, W, B, STATS = ctx.saved_tensors
        needed = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dX, dP = layer_norm_bwd(dY, X, W, B, STATS, needed)
        if not needed:
            return dX, None, None, None
        dW, dB = (dP, None) if B is None else halves(dP)
        return dX, dW, dB, None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_layer_norm(X: torch.Tensor, W: torch.Tensor | None, B: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension: (X - mean) / sqrt(var + eps) * W + B.

    X: [..., n_cols]; W, B: [n_cols] or None, B only together with W. fp32, fp16 or bf16 (fp64 too on the CPU).
    Returns [..., n_cols] in X's dtype.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_tensors("liger_layer_norm", optional=("W", "B"), X=X, W=W, B=B)
    check_numbers("liger_layer_norm", eps=eps)
    if not X.dim():
        check(False, "liger_layer_norm", "X must be [..., n_cols], got a scalar")
    for name, parameter in (("W", W), ("B", B)):
        if parameter is not None and parameter.shape != X.shape[-1:]:
            want, have = tuple(X.shape[-1:]), tuple(parameter.shape)
            check(False, "liger_layer_norm", f"{name} must have shape {want} to match X, got {have}")
    check(B is None or W is not None, "liger_layer_norm", "B needs W; pass ones as W for a shift alone")
    return LigerLayerNormFunction.apply(X, W, B, eps)


class LigerLayerNorm(torch.nn.Module):
    """LayerNorm layer: y = (x - mean) / sqrt(var + eps) * weight + bias.

    hidden_size: size of the last dimension; bias=False has no bias at all; init_fn: `ones` or `zeros` for the weight
    (the bias starts at zero).
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones") -> None:
        super().__init__()
        check(init_fn in ("ones", "zeros"), "LigerLayerNorm", f"init_fn must be ones or zeros, got {init_fn!r}")
        self.hidden_size, self.variance_epsilon = hidden_size, eps
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(hidden_size)) if bias else None)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}, bias={self.bias is not None}"


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "command_r_35b": (8192, 8192),
    "stablelm_12b": (8192, 5120),
    "gpt_neox_20b": (8192, 6144),
    "phi_2": (8192, 2560),
    "falcon_11b": (16384, 4096),
    "clip_vit_l": (36928, 1024),
}
"""Problem sizes (n_rows, n_cols) of real models."""


def _sample(sizes, dtype, device, generator, *, bias=True, affine=True) -> Sample:
    n_rows, n_cols = sizes

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device).to(dtype).requires_grad_()

    x, w, b = normal(n_rows, n_cols), normal(n_cols) if affine else None, normal(n_cols) if bias and affine else None
    return Sample(
        args=(x, w, b, 1e-6),
        reduction=n_cols,
        grad_reduction=max(n_rows, n_cols),
        moved=5 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="layer_norm",
        function=liger_layer_norm,
        reference=layer_norm_reference,
        tunables=(FWD, BWD, BWD_MEANS, DW),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"bias": False},
            {"affine": False},
        ),
    )
)
