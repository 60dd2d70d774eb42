"""Log-probabilities of chosen tokens from whole logits, differentiable: logp[row] = log_softmax(logits[row] / T)[target].

For a caller that has the logits already; losses on a linear head never make them (see _linear_head.py). Two reads of the
logits and one write, by the kernels of _log_prob_rows.py. Rows at IGNORED have a log-probability and a gradient of zero.
"""

from __future__ import annotations

import torch

from ...runtime.operator import Function, define, first_order, is_interpreted
from ...runtime.saved_tensors import graph_is_kept
from .cross_entropy_reference import check_targets
from .log_prob_rows import (
    LogProbs,
    log_prob_buffers,
    log_probs_reference,
    row_log_prob_gradients,
    row_log_probs,
)

IGNORED = -100
_NAME = "selected_log_probs"


def _fwd(logits, target, temperature):
    if is_interpreted():
        check_targets(_NAME, target, logits.shape[1], IGNORED)
    out = log_prob_buffers(logits.shape[0], logits.device)
    row_log_probs(logits, target, out, temperature=temperature, owned=False)
    return out.logp, out.lse


def _fwd_reference(logits, target, temperature):
    check_targets(_NAME, target, logits.shape[1], IGNORED)
    logp, _, lse = log_probs_reference(logits, target, None, IGNORED, temperature)
    return logp, lse


def _fwd_fake(logits, target, temperature):
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty(logits.shape[:1], dtype=dtype) for _ in range(2))


def _launch_bwd(grad, logits, target, lse, temperature, dlogits):
    saved = LogProbs(lse, lse)
    options = {"dlogits": dlogits, "temperature": temperature, "owned": False}
    row_log_prob_gradients(logits, target, saved, grad.contiguous(), **options)


def _bwd(grad, logits, target, lse, temperature):
    dlogits = torch.empty_like(logits)
    _launch_bwd(grad, logits, target, lse, temperature, dlogits)
    return dlogits


def _bwd_in_place(grad, logits, target, lse, temperature):
    _launch_bwd(grad, logits, target, lse, temperature, logits)


def _bwd_reference(grad, logits, target, lse, temperature):
    counts = target != IGNORED
    slope = torch.where(counts, grad / temperature, 0.0)[:, None]
    p = torch.exp(logits.to(lse.dtype) / temperature - lse[:, None])
    dlogits = (-slope * p).scatter_add_(1, target.masked_fill(~counts, 0)[:, None], slope.to(p.dtype))
    return dlogits.to(logits.dtype)


def _bwd_in_place_reference(grad, logits, target, lse, temperature):
    logits.copy_(_bwd_reference(grad, logits, target, lse, temperature))


selected_log_probs_fwd = define(
    "selected_log_probs_fwd(Tensor logits, Tensor target, float temperature) -> (Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
selected_log_probs_bwd = define(
    "selected_log_probs_bwd(Tensor grad, Tensor logits, Tensor target, Tensor lse, float temperature) -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=("logits",),
)
selected_log_probs_bwd_ = define(
    "selected_log_probs_bwd_(Tensor grad, Tensor(a!) logits, Tensor target, Tensor lse, float temperature) -> ()",
    launcher=_bwd_in_place,
    reference=_bwd_in_place_reference,
    fake=(),
)


class SelectedLogProbsFunction(Function):
    """Autograd: saves the logits and a log-sum-exp a row. inplace: the caller lets backward write over the logits."""

    @staticmethod
    def forward(ctx, logits, target, temperature, inplace):
        logp, lse = selected_log_probs_fwd(logits, target, temperature)
        ctx.save_for_backward(logits, target, lse)
        ctx.temperature, ctx.inplace = temperature, inplace
        return logp

    @staticmethod
    @first_order
    def backward(ctx, grad):
        logits, target, lse = ctx.saved_tensors
        if not ctx.inplace or graph_is_kept():
            return selected_log_probs_bwd(grad, logits, target, lse, ctx.temperature), None, None, None
        selected_log_probs_bwd_(grad, logits, target, lse, ctx.temperature)
        # another graph that saved the logits must see the change; the dispatcher, which would count it, is not in the way
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None, None, None
