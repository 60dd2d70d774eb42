"""fused_linear_scaled_cross_entropy over a vocabulary split between the ranks of a process group.

Each rank holds the hidden states of all rows and its part of the head's weight, rank r the rows r * vocab .. (r + 1) *
vocab of the whole. The forward exchanges two numbers a row (three with entropy); backward sums the hidden states'
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...runtime.operator import Function, check_flags, first_order
from ..losses.vocab_parallel_cross_entropy import check_group, combine_log_sum_exp, group_rank
from .fused_linear_scaled_cross_entropy import (
    checked_arguments,
    pack_results,
    scaled_cross_entropy_bwd,
    scaled_cross_entropy_fwd,
)

_IGNORED = -1  # among a rank's own targets, which count from 0


class LigerFusedLinearScaledCrossEntropyTPFunction(Function):
    """Autograd for one rank: saves the inputs, the log-sum-exp over all ranks and the entropy."""

    @staticmethod
    def forward(ctx, x, weight, target, tp_group, temperature, ignore_index, return_entropy):
        (world, rank), y, vocab = group_rank(tp_group), target.long(), weight.shape[0]
        start, ignored = rank * vocab, y == ignore_index
        here = (y >= start) & (y < start + vocab) & ~ignored
        own_target = torch.where(here, y - start, 0).masked_fill(ignored, _IGNORED)
        nll, entropy, selected, own_lse = scaled_cross_entropy_fwd(
            x, weight, own_target, None, temperature, _IGNORED, return_entropy
        )
        lse, (s_y,) = combine_log_sum_exp(own_lse, [torch.where(here, own_lse - nll, 0.0)], tp_group, world)
        nll = torch.where((y >= 0) & (y < vocab * world), lse - s_y, float("nan")).masked_fill(ignored, 0.0)
        if return_entropy and world > 1:
            share = torch.exp(own_lse - lse)  # of the probability; own_lse - entropy is this rank's mean score
            mean = torch.where(share == 0, 0.0, share * (own_lse - entropy))
            dist.all_reduce(mean, group=tp_group)
            entropy = (lse - mean).masked_fill(ignored, 0.0)
        ctx.save_for_backward(x, weight, own_target, None, lse, entropy, selected)
        ctx.here, ctx.group, ctx.world, ctx.has_entropy = here, tp_group, world, return_entropy
        ctx.options = temperature, _IGNORED, False, *ctx.needs_input_grad[:2]
        ctx.set_materialize_grads(False)
        if not return_entropy:
            ctx.mark_non_differentiable(entropy)
        return nll, entropy

    @staticmethod
    @first_order
    def backward(ctx, dnll, dentropy):
        if dnll is None and dentropy is None:
            return (None,) * 7
        grads = dnll, dentropy if ctx.has_entropy else None, None, ctx.here
        dx, dweight = scaled_cross_entropy_bwd(*ctx.saved_tensors, *grads, *ctx.options)
        if ctx.needs_input_grad[0] and ctx.world > 1:
            dist.all_reduce(dx, group=ctx.group)
        return *(g if w else None for g, w in zip((dx, dweight), ctx.needs_input_grad)), *(None,) * 5


def liger_fused_linear_scaled_cross_entropy_tp(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`liger_fused_linear_scaled_cross_entropy` with the vocabulary split over a process group.

    input: [n_rows, hidden], the same on every rank; weight: [vocab, hidden], this rank's part, all parts equally wide;
    target: [n_rows], indices of the whole vocabulary; tp_group: a ProcessGroup, or None for a whole vocabulary.
    tiles_per_reduce: accepted for compatibility. Returns nll [n_rows] in fp32, or (nll, entropy), the same on every
    rank. The gradient of the input is that of the whole vocabulary, summed over the ranks; every rank must run
    backward.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; a target out of range gives nan.
    """
    op = "liger_fused_linear_scaled_cross_entropy_tp"
    input, weight = checked_arguments(op, input, weight, target, temperature, ignore_index)
    check_flags(op, return_entropy=return_entropy)
    check_group(op, tp_group)
    options = tp_group, float(temperature), ignore_index, return_entropy
    nll, entropy = LigerFusedLinearScaledCrossEntropyTPFunction.apply(input, weight, target, *options)
    return pack_results(nll, entropy if return_entropy else None, None)
