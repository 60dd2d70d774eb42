"""Negated log-probabilities of a linear head, nll = -log softmax(input @ weight^T / temperature)[y].

It calls `liger_fused_linear_log_probs`.

`liger_fused_linear_scaled_cross_entropy_tp` computes this over a vocabulary split between the ranks of a process group.
Each rank holds the hidden states of all rows and its part of the head's weight, in the order of the ranks; parts may be
unequal (losses/vocab_parts.py). The forward exchanges the parts' widths and two numbers a row (three with entropy);
backward sums the hidden states' gradient. Logits are kept as without a process group (kept_logits.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...runtime.operator import Function, check_flags, first_order
from ..losses.cross_entropy_rows import check_arguments
from ..losses.log_prob_rows import LogProbOptions, log_prob_options
from ..losses.vocab_parts import IGNORED, checked_group, gather_rows, local_targets, vocab_part
from .fused_linear_log_probs import LogProbsCall, backward_rows, forward_rows, liger_fused_linear_log_probs
from .linear_head import Needs, checked_head


def liger_fused_linear_scaled_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Each row's -log softmax(input @ weight^T / temperature)[target], optionally entropy and selected tokens' log p.

    input: [n_rows, hidden]; weight: [vocab, hidden]; target: [n_rows]. The arguments are explained at
    `liger_fused_linear_log_probs`. Returns nll [n_rows] in fp32, or a tuple (nll, entropy [n_rows] if return_entropy,
    selected [n_rows, k] if selected_token_ids is given). Raises `ValueError` as that function does.
    """
    options = {"ignore_index": ignore_index, "return_entropy": return_entropy}
    options |= {"selected_token_ids": selected_token_ids, "accum_dtype": accum_dtype}
    output = liger_fused_linear_log_probs(input, weight, target, temperature=temperature, **options)
    if isinstance(output, torch.Tensor):
        return -output
    return -output.log_probs, *(t for t in (output.entropy, output.selected) if t is not None)


# -- over a process group --------------------------------------------------------------------------------------------

_NAME_TP = "liger_fused_linear_scaled_cross_entropy_tp"


class FusedLinearScaledCrossEntropyTPFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, target, tp_group, options: LogProbOptions, return_entropy):
        part = vocab_part(weight.shape[0], tp_group, x.device)
        local = local_targets(_NAME_TP, target, weight.shape[0], part, options.ignore_index)
        dinput, dweight = ctx.needs_input_grad[:2]
        options = options._replace(ignore_index=IGNORED)
        call = LogProbsCall(options, return_entropy, needs=Needs(dinput, dweight))
        results, ctx.plan, memory = forward_rows(x, weight, local.column, None, None, call)
        logp, entropy, _, part_lse, selected = results
        score = torch.where(local.is_local, part_lse + logp, 0.0)
        means = [part_lse - entropy] if return_entropy else []  # the mean score under this part's softmax
        lses, scores, *means = gather_rows([part_lse, score, *means], part)
        lse = torch.logsumexp(lses, 0)
        nll = torch.where(local.valid, lse - scores.sum(0), float("nan")).masked_fill(~local.counted, 0.0)
        if return_entropy:
            p_part = torch.exp(lses - lse)  # the probability of each rank's part
            entropy = (lse - torch.where(p_part == 0, 0.0, p_part * means[0]).sum(0)).masked_fill(~local.counted, 0.0)
        ctx.save_for_backward(x, weight, local.column, None, None, lse, entropy, selected, *memory)
        ctx.is_local, ctx.part, ctx.call = local.is_local, part, call
        ctx.set_materialize_grads(False)
        if not return_entropy:
            ctx.mark_non_differentiable(entropy)
        return nll, entropy

    @staticmethod
    @first_order
    def backward(ctx, dnll, dentropy):
        if dnll is None and dentropy is None:
            return (None,) * 6
        grads = None if dnll is None else -dnll, dentropy if ctx.call.entropy else None, None, ctx.is_local
        dx, dweight, _ = backward_rows(ctx.saved_tensors, grads, ctx.plan, ctx.call)
        if dx is not None and ctx.part.world > 1:
            dist.all_reduce(dx, group=ctx.part.group)
        return dx, dweight, None, None, None, None


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

    input: [n_rows, hidden], the same on every rank; weight: [vocab, hidden], this rank's part; target: [n_rows],
    indices in the whole vocabulary; tp_group: a ProcessGroup, or None if this rank has the whole vocabulary.
    tiles_per_reduce is ignored. Returns nll [n_rows] in fp32, with return_entropy (nll, entropy), the same on every
    rank. The input's gradient is summed over the ranks; every rank must run backward.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; a target out of range gives nan.
    """
    input, weight, _ = checked_head(_NAME_TP, input, weight)
    check_arguments(_NAME_TP, input, target, weight.shape[0])
    options = log_prob_options(_NAME_TP, ignore_index, temperature)
    check_flags(_NAME_TP, return_entropy=return_entropy)
    call = checked_group(_NAME_TP, tp_group), options, return_entropy
    nll, entropy = FusedLinearScaledCrossEntropyTPFunction.apply(input, weight, target, *call)
    return (nll, entropy) if return_entropy else nll
