"""Backward of the losses on rows: the gradient that the forward computed, times the incoming gradient.

The incoming gradient is read on the device. If it is 1, as in `loss.backward()`, the kernels in place skip the tiles.
Zeros stay zero even if the incoming gradient is infinite or nan (a summed loss divided by zero counted tokens), because
ignored rows are zeros and torch gives them no gradient.
"""

from __future__ import annotations

from typing import Callable

import torch

from ... import registry
from ...registry import LaunchConfig, Target, Tunable, row_key, tile_space
from ...runtime.derivative import differentiate
from ...runtime.operator import cdiv, define, graph_is_kept, launch
from ...runtime.triton_import import tl, triton
from ..rows.row import LINE, body_start, body_width, edge_columns, row_head, row_vector
from ..rows.tuning import DIMS, persistent_misfit


@triton.jit
def _scale_tile(G_ptr, OUT_ptr, offsets, mask, scale):
    g = tl.load(G_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.where(g == 0.0, g, g * scale)
    if OUT_ptr is None:
        tl.store(G_ptr + offsets, g.to(G_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(OUT_ptr + offsets, g.to(OUT_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_kernel(G_ptr, OUT_ptr, GO_ptr, STATS_ptr, n_elements, TAIL: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """OUT = G * GO, with STATS also times STATS[4], which is 1 / a mean's denominator. Without OUT, in place.

    TAIL: n_elements is not a multiple of 16; the first program takes the remainder, so that tiles are accessed widely.
    """
    scale = tl.load(GO_ptr).to(tl.float32)
    if STATS_ptr is not None:
        scale *= tl.load(STATS_ptr + 4)
    n_tiled = n_elements
    if TAIL:
        n_tiled = n_elements // 16 * 16
    stop = n_tiled
    if OUT_ptr is None:
        stop = tl.where(scale == 1.0, 0, n_tiled)
    first = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    for start in tl.range(first, stop, tl.num_programs(0) * BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        _scale_tile(G_ptr, OUT_ptr, offsets, offsets < n_tiled, scale)
    if TAIL:
        offsets = n_tiled + tl.arange(0, 16).to(tl.int64)
        _scale_tile(G_ptr, OUT_ptr, offsets, (offsets < n_elements) & (first == 0), scale)


@triton.jit(do_not_specialize=["n_rows"])
def _scale_rows_kernel(
    G_ptr, OUT_ptr, GO_ptr, GO_stride, n_rows, n_cols, VECTOR: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """OUT = G * GO, one factor per row. Without OUT, in place: the tiles of rows with a factor of 1 are skipped."""
    cols = tl.arange(0, BLOCK_SIZE)
    for row in tl.range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        scale = tl.load(GO_ptr + row * GO_stride).to(tl.float32)
        head = row_head(row * n_cols, VECTOR)
        n_body = body_width(n_cols, head, VECTOR)
        stop = n_body
        if OUT_ptr is None:
            stop = tl.where(scale == 1.0, 0, n_body)
        for start in tl.range(0, stop, BLOCK_SIZE):
            mask = start + cols < n_body
            _scale_tile(G_ptr, OUT_ptr, body_start(row * n_cols, head, VECTOR) + start + cols, mask, scale)
        if VECTOR > 1:
            edge = edge_columns(head, n_body, n_cols, VECTOR)
            _scale_tile(G_ptr, OUT_ptr, body_start(row * n_cols, head, VECTOR) + edge, edge < n_cols - head, scale)


def _bwd_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    block = max(64, min(key[0], 2048))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16 // key[2]), ctas_per_mp=8)


def _bwd_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    tiles = ({"BLOCK_SIZE": block} for block in (512, 1024, 2048, 4096, 8192))
    return tile_space(target, tiles, (1, 2, 4, 8, 16), per_thread=(4, 32), ctas=(2, 4, 8, 16))


BWD = Tunable(
    "cross_entropy",
    "bwd",
    kernels=(_scale_kernel, _scale_rows_kernel),
    key=row_key,
    dims=DIMS,
    heuristic=_bwd_heuristic,
    safe=lambda target, key: LaunchConfig({"BLOCK_SIZE": 256}, 1, ctas_per_mp=1),
    space=_bwd_space,
    valid=persistent_misfit,
)


def _bwd(grad, grad_output, stats):
    out = torch.empty_like(grad)
    _bwd_in_place(grad, grad_output, stats, out)
    return out


def _bwd_in_place(grad, grad_output, stats, out=None) -> None:
    """out = grad * grad_output. grad_output: a scalar or one factor per row; out: by default grad."""
    n_elements = grad.numel()
    if not n_elements:
        return
    n_rows, n_cols = grad.shape if grad.dim() == 2 else (1, n_elements)
    plan = BWD.plan(grad.device, row_key(n_rows, n_cols, grad.dtype.itemsize))
    if grad_output.dim():
        args = (grad, out, grad_output, grad_output.stride(0), n_rows, n_cols)
        launch(plan, _scale_rows_kernel, (min(plan.programs, n_rows),), args, (row_vector(grad, out, unit=LINE),))
    else:
        programs = min(plan.programs, cdiv(n_elements, plan.config.blocks["BLOCK_SIZE"]))
        args = (grad, out, grad_output, stats if stats.numel() else None, n_elements)
        launch(plan, _scale_kernel, (programs,), args, (n_elements % 16 != 0,))


def _bwd_reference(grad, grad_output, stats):
    wide = torch.promote_types(grad.dtype, torch.float32)
    scale = grad_output.to(wide)
    scale = scale * stats[4] if stats.numel() else scale
    scale = scale[:, None] if scale.dim() else scale
    return torch.where(grad == 0, 0.0, grad * scale).to(grad.dtype)


def _bwd_in_place_reference(grad, grad_output, stats):
    grad.copy_(_bwd_reference(grad, grad_output, stats))


def _misfit(grad, grad_output, stats) -> str:
    if grad_output.dim() and grad.dim() != 2:
        return f"grad must be [n_rows, n_cols] for a grad_output [n_rows], got {tuple(grad.shape)}"
    return ""


_SHAPES = "grad [n_rows, *]; grad_output [] | [n_rows]; stats [0] | [5] | [8]"
cross_entropy_bwd = define(
    "cross_entropy_bwd(Tensor grad, Tensor grad_output, Tensor stats) -> Tensor",
    shapes=_SHAPES,
    misfit=_misfit,
    launcher=_bwd,
    reference=_bwd_reference,
    fake=("grad",),
)
cross_entropy_bwd_ = define(
    "cross_entropy_bwd_(Tensor(a!) grad, Tensor grad_output, Tensor stats) -> ()",
    shapes=_SHAPES,
    misfit=_misfit,
    launcher=_bwd_in_place,
    reference=_bwd_in_place_reference,
    fake=(),
)


def scale_gradient(
    grad: torch.Tensor, grad_output: torch.Tensor, stats: torch.Tensor, kept: bool | None = None
) -> torch.Tensor:
    """The saved `grad` times the incoming gradient, in place unless the graph is kept. To be called in backward.

    kept: the result of `graph_is_kept`, if the caller has it
    """
    if graph_is_kept() if kept is None else kept:
        return cross_entropy_bwd(grad, grad_output, stats)
    cross_entropy_bwd_(grad, grad_output, stats)
    return grad


def gradient_of(loss: Callable[..., torch.Tensor], logits: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The gradient of sum(loss(logits) * slope) with respect to logits by autograd, in fp32 or fp64.

    For fake tensors, which operators pass to references, it is only allocated: autograd's GPU thread has no fake mode.
    """
    if hasattr(logits, "fake_mode"):
        return logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    return differentiate(loss, [logits], [slope])[0]
