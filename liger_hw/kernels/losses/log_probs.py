"""Log-probabilities of tokens from their logits, with entropy and accuracy.

With s = softcap * tanh(logits / softcap) / temperature of a row, p = softmax(s), and target y:
    log_prob = log p[y]      entropy = -sum p log p      is_top1 = (argmax logits == y)
Rows whose target is ignore_index have results and a gradient of exactly zero. `fused_linear_log_probs` takes hidden
states instead of logits.

Saved for backward: the logits, a log-sum-exp per row, and the entropy. The kernels are in log_prob_rows.py.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ... import registry
from ...runtime.operator import (
    Function,
    check,
    check_flags,
    check_tensors,
    define,
    first_order,
    graph_is_kept,
    nested,
    row_major,
)
from .cross_entropy import WORKLOADS as WORKLOADS
from .cross_entropy import sample_logits
from .cross_entropy_rows import absent, assert_targets, check_arguments
from .log_prob_rows import (
    LogProbOptions,
    LogProbs,
    log_prob_buffers,
    log_prob_options,
    log_prob_rows_reference,
    log_prob_tunables,
    row_log_prob_gradients,
    row_log_probs,
    scores_reference,
    top_reference,
)


class LogProbsOutput(NamedTuple):
    """Log-probabilities and the results of the return_* options that are set.

    log_probs, entropy: fp32, of the target's shape; is_top1: bool, of this shape: whether the target is the first
    column of the largest logit; selected: [..., k] log-probabilities of selected tokens (`fused_linear_log_probs`)
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    selected: torch.Tensor | None = None


def pack_log_probs(log_probs, entropy, is_top1, selected=None) -> torch.Tensor | LogProbsOutput:
    """A LogProbsOutput, or only the log-probabilities if the other results are None."""
    output = LogProbsOutput(log_probs, entropy, is_top1, selected)
    return log_probs if all(t is None for t in output[1:]) else output


def next_tokens(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The next token of every token in target [..., length]; ignore_index for the last."""
    return F.pad(target, (0, 1), value=ignore_index)[..., 1:]


def log_probs_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_top1: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    shift_labels: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | LogProbsOutput:
    """The specification in plain torch, in fp32 (fp64 for fp64). bias, selected_token_ids: for linear heads."""
    target = next_tokens(target, ignore_index) if shift_labels else target
    rows, y = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    options = log_prob_options("log_probs_reference", ignore_index, temperature, softcap)
    logp, entropy, lse = log_prob_rows_reference(rows, y, bias, options)
    is_top1 = (top_reference(rows, y, bias, ignore_index) == y) & (y != ignore_index)
    results = [logp, entropy if return_entropy else None, is_top1 if return_top1 else None]
    if selected_token_ids is not None:
        results.append(selected_reference(rows, lse, y, bias, selected_token_ids, options))
    return pack_log_probs(*(None if t is None else t.unflatten(0, target.shape) for t in results))


def selected_reference(logits, lse, target, bias, ids, options: LogProbOptions) -> torch.Tensor:
    """Log-probabilities [n_rows, k] of the tokens ids [k], zero in ignored rows."""
    bias = bias if bias is None else bias.index_select(0, ids)
    log_p = scores_reference(logits.index_select(1, ids), bias, options) - lse[:, None]
    return log_p.masked_fill((target == options.ignore_index)[:, None], 0.0)


_NAME = "liger_log_probs"


FWD, BWD = log_prob_tunables("log_probs")


def _fwd(logits, target, entropy, top, options: LogProbOptions, plain=False):
    logits, target = row_major(logits), target.contiguous()
    assert_targets(_NAME, target, logits.shape[1], options.ignore_index, plain)
    out = log_prob_buffers(logits.shape[0], logits, entropy=entropy, top=top)
    row_log_probs(logits, target, out, options, uses_padding=False, tunable=FWD, plain=plain)
    return results_of(out)


def results_of(out: LogProbs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp, entropy, top, lse), `absent` where not computed."""
    entropy = absent(out.lse) if out.entropy is None else out.entropy
    return out.logp, entropy, absent(out.lse).long() if out.top is None else out.top, out.lse


def _write_gradient(dlogits, dlogp, dentropy, logits, target, lse, entropy, options: LogProbOptions, plain=False):
    saved, dentropy = LogProbs(lse, lse, entropy), None if dentropy is None else dentropy.contiguous()
    rows = logits, target.contiguous(), saved, dlogp.contiguous(), options
    row_log_prob_gradients(*rows, entropy_coef=dentropy, dlogits=dlogits, uses_padding=False, tunable=BWD, plain=plain)


def _bwd(dlogp, dentropy, logits, *saved, plain=False):
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_gradient(dlogits, dlogp, dentropy, row_major(logits), *saved, plain=plain)
    return dlogits


def _bwd_in_place(dlogp, dentropy, logits, *saved, plain=False):
    _write_gradient(logits, dlogp, dentropy, logits, *saved, plain=plain)


_SAVED = "Tensor target, Tensor lse, Tensor saved_entropy"
_SHAPES = "logits [n_rows, n_cols]; int target [n_rows]"
_SHAPES_BWD = f"{_SHAPES}; lse, dlogp, dentropy [n_rows]; saved_entropy [0] | [n_rows]"


def _misfit(dlogp, dentropy, logits, target, lse, saved_entropy, options) -> str:
    return entropy_misfit(lse, saved_entropy, dentropy)


def entropy_misfit(lse: torch.Tensor, saved_entropy: torch.Tensor, dentropy: torch.Tensor | None) -> str:
    if dentropy is not None and saved_entropy.shape != lse.shape:
        return f"saved_entropy must be {list(lse.shape)} for a gradient of the entropy, got {list(saved_entropy.shape)}"
    return ""


log_probs_fwd = define(
    "log_probs_fwd(Tensor logits, Tensor target, bool entropy, bool top) -> (Tensor, Tensor, Tensor, Tensor)",
    shapes=_SHAPES,
    launcher=_fwd,
    reference=partial(_fwd, plain=True),
    numbers=LogProbOptions,
)
log_probs_bwd = define(
    f"log_probs_bwd(Tensor dlogp, Tensor? dentropy, Tensor logits, {_SAVED}) -> Tensor",
    shapes=_SHAPES_BWD,
    misfit=_misfit,
    launcher=_bwd,
    reference=partial(_bwd, plain=True),
    fake=("logits",),
    numbers=LogProbOptions,
)
log_probs_bwd_ = define(
    f"log_probs_bwd_(Tensor dlogp, Tensor? dentropy, Tensor(a!) logits, {_SAVED}) -> ()",
    shapes=_SHAPES_BWD,
    misfit=_misfit,
    launcher=_bwd_in_place,
    reference=partial(_bwd_in_place, plain=True),
    fake=(),
    numbers=LogProbOptions,
)


class LogProbsFunction(Function):
    """Returns (logp, entropy, top). inplace: backward may write over the logits, which are contiguous."""

    @staticmethod
    def forward(ctx, logits, target, options: LogProbOptions, return_entropy, return_top, inplace):
        logp, entropy, top, lse = log_probs_fwd(logits, target, return_entropy, return_top, options)
        ctx.save_for_backward(logits, target, lse, entropy)
        ctx.options, ctx.has_entropy, ctx.inplace = options, return_entropy, inplace
        ctx.mark_non_differentiable(top, *(() if return_entropy else (entropy,)))
        ctx.set_materialize_grads(False)
        # The entropy is copied, because the caller may change the result in place.
        return logp, entropy.clone() if return_entropy and any(ctx.needs_input_grad) else entropy, top

    @staticmethod
    @first_order
    def backward(ctx, dlogp, dentropy, _not_differentiable):
        logits, target, lse, entropy = ctx.saved_tensors
        dentropy = dentropy if ctx.has_entropy else None
        if dlogp is None and dentropy is None:
            return (None,) * 6
        dlogp = torch.zeros_like(lse) if dlogp is None else dlogp
        call = dlogp, dentropy, logits, target, lse, entropy, ctx.options
        if not ctx.inplace or graph_is_kept():
            return log_probs_bwd(*call), None, None, None, None, None
        log_probs_bwd_(*call)
        # For other graphs that saved the logits. torch's dispatcher, which would do this, did not call the operator.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None, None, None, None, None


def liger_log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_top1: bool = False,
    shift_labels: bool = False,
) -> torch.Tensor | LogProbsOutput:
    """Log-probability of each target under softmax(softcap(logits) / temperature).

    logits: [..., n_cols] fp32, fp16 or bf16 (fp64 on the CPU); target: [...] int64 or int32, the token that each row
    predicts, or with shift_labels=True the tokens of the sequences, [..., length]: a row predicts the next token, the
    last row none. temperature, softcap: positive numbers. softcap replaces logits by softcap * tanh(logits / softcap).
    return_entropy: the entropy of each row in nats, differentiable; return_top1: see `LogProbsOutput`.
    Returns the log-probabilities, fp32 of the target's shape, or a `LogProbsOutput` if a return_* option is set. Rows
    at ignore_index have zeros.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; for targets see `liger_cross_entropy`.
    """
    check_tensors(_NAME, logits=logits)
    check_flags(_NAME, return_entropy=return_entropy, return_top1=return_top1, shift_labels=shift_labels)
    rows, target, shape = rows_and_targets(_NAME, logits, target, ignore_index, bool(shift_labels))
    options = log_prob_options(_NAME, ignore_index, temperature, softcap)
    check_arguments(_NAME, rows, target, rows.shape[-1])
    if not rows.shape[-1]:
        check(False, _NAME, f"logits must be [..., n_cols] with at least one column, got {tuple(logits.shape)}")
    flags = bool(return_entropy), bool(return_top1)
    logp, entropy, top = LogProbsFunction.apply(rows, target, options, *flags, False)
    is_top1 = (top == target) & (target != ignore_index) if return_top1 else None
    results = logp, entropy if return_entropy else None, is_top1
    return pack_log_probs(*(None if t is None else t.view(shape) for t in results))


def rows_and_targets(
    op: str, x: torch.Tensor, target: torch.Tensor, ignore_index: int, shift: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
    """(x [..., width] as rows, their targets, the shape of target). shift: a row's target is the next token.

    Raises `TypeError` for an argument that is not a tensor, `ValueError` for shapes that do not fit.
    """
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{op}: target must be a tensor, got {type(target).__name__}")
    if target.is_nested:
        check(False, op, nested("target"))
    if x.dim() < 2 or x.shape[:-1] != target.shape:
        expected = f"target must have the shape of the rows, {tuple(x.shape[:-1])}"
        check(False, op, f"{expected}, got {tuple(target.shape)}; a single row is [1, width]")
    shape = target.shape
    if shift:
        target = next_tokens(target, ignore_index)
    return (x, target, shape) if x.dim() == 2 else (x.reshape(-1, x.shape[-1]), target.reshape(-1), shape)


sample = partial(sample_logits, passes=3)
OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD),
    options=(
        {},
        {"temperature": 0.7, "return_entropy": True, "return_top1": True},
        {"softcap": 5.0, "return_entropy": True, "ignored": 0.5},
    ),
)
