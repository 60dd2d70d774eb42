"""Losses of token log-probabilities on a linear head, without storing the logits of all tokens.

A loss (DPO, KTO, GRPO, ...) is a function of the log-probabilities of the target tokens. Therefore

    d loss / d logits[t] = c[t] * ([token = target[t]] - softmax(logits[t])),   c[t] = d loss / d logp[t]

and c[t] depends only on the tokens in the *group* of t: the pair of sequences of a preference loss, one sequence (KTO,
sequence-level importance sampling), or the token alone (GRPO). For a chunk of whole groups, one GEMM computes the
logits and a row kernel the log-probabilities; a few torch operations on [groups, tokens] tensors compute c; a second
row kernel overwrites the logits with their gradient, and two GEMMs compute the gradients of x and weight.

A group that is too large for the memory budget is divided into chunks of tokens. Then a first sweep computes all
log-probabilities, and a second sweep, after c, computes the logits again: a fourth GEMM.

The forward computes the gradients; backward multiplies them by the incoming gradient. The host does not synchronise.
The row kernels are in kernels/losses/log_prob_rows.py, the sweep in kernels/heads/linear_head.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterable, NamedTuple, Sequence

import torch

from ..kernels.heads.fused_linear_log_probs import LogProbsCall, linear_log_probs_fwd
from ..kernels.heads.head_reference import fake_gradients
from ..kernels.heads.linear_head import HeadGradients, Needs, checked_head, plan_groups, scale_gradients, sweep
from ..kernels.losses.cross_entropy_rows import absent, check_in_range
from ..kernels.losses.log_prob_rows import LogProbOptions, log_prob_buffers, row_log_prob_gradients, row_log_probs
from ..registry import next_power_of_2
from ..runtime.derivative import differentiate
from ..runtime.operator import Function, check, define, first_order
from .checks import SEQUENCES

TOKEN, SEQUENCE, PAIR = 0, 1, 2
"""A group is a token, a sequence, or a pair: sequence i of the batch's first half and sequence i of the second half."""


class LossInputs(NamedTuple):
    """The inputs of a loss for some groups.

    logp, second: [groups, tokens of a group], fp32 (fp64 for fp64 inputs): log-probabilities of the targets and of the
        second targets (None if there are none), zero where the target is ignored
    logit_sum: [groups, tokens of a group], the sum of each token's logits, for metrics
    grouped, shared: the call's extra tensors: grouped are [groups, ...], shared have any shape
    n_groups, vocab: of the whole call
    """

    logp: torch.Tensor
    second: torch.Tensor | None
    logit_sum: torch.Tensor | None
    grouped: Sequence[torch.Tensor | None]
    shared: Sequence[torch.Tensor | None]
    n_groups: int
    vocab: int


class Spec(NamedTuple):
    """The numbers of a call, in the order of the operator's schema.

    name, kind, numbers: `LOSSES[name](kind, *numbers)` is the loss; group: TOKEN, SEQUENCE or PAIR
    n_grouped: the first n_grouped extra tensors are grouped, the others shared
    scale: factor of d loss / d logp, see `run_loss`
    """

    name: str
    kind: str
    numbers: tuple[float, ...]
    group: int
    n_grouped: int
    ignore_index: int = -100
    temperature: float = 1.0
    scale: float = 1.0
    needs: Needs = Needs()

    @property
    def loss(self) -> Any:
        return LOSSES[self.name](self.kind, *self.numbers)


LOSSES: dict[str, Any] = {}
"""Name -> the class of a loss. A class has

loss(inputs): the contribution of these groups to the loss, differentiable with respect to logp and second
results(inputs): (loss, *metrics), from the inputs of all groups
sums_logits: whether results needs logit_sum"""


class _Rows:
    """The row kernels' launches, and their results [n_rows] in the order of the sweep."""

    def __init__(self, x, target, second, bias, spec: Spec, plain: bool) -> None:
        self.bias, self.spec = bias, spec
        self.target, self.second_column, self.has_two = target, None, None
        n_rows, ignored = target.shape[0], spec.ignore_index
        if second is not None:  # the row kernels take one target: the first, or the second where the first is ignored
            self.first_counts = target != ignored
            self.target = torch.where(self.first_counts, target, second)
            self.has_two = (second != ignored) & (second != self.target)  # two different targets
            self.second_is_target = (second != ignored) & (second == self.target)
            self.second_column = second.masked_fill(~self.has_two, 0).long()
        self.out = log_prob_buffers(n_rows, x, logit_sum=spec.loss.sums_logits)
        self.second_logp = None if second is None else torch.empty_like(self.out.logp)
        self.coef = torch.empty_like(self.out.logp)
        self._options, self._plain = LogProbOptions(ignored, spec.temperature), plain

    def compute_all_logps(self, swept: Iterable[tuple[int, torch.Tensor, Any]]) -> None:
        for start, logits, _ in swept:
            self.compute_logps(logits, start)

    def compute_logps(self, logits: torch.Tensor, start: int) -> None:
        """Fill `out` and `second_logp` from the logits of a chunk that begins at row `start`."""
        rows = slice(start, start + logits.shape[0])
        call = {"bias": self.bias, "row_start": start, "plain": self._plain}
        row_log_probs(logits, self.target, self.out, self._options, **call)
        if self.second_column is not None:
            columns = self.second_column[rows]
            score = logits.gather(1, columns[:, None])[:, 0].to(self.coef.dtype)
            if self.bias is not None:
                score = score + self.bias[columns]
            second_logp = score / self.spec.temperature - self.out.lse[rows]
            logp = torch.where(self.second_is_target[rows], self.out.logp[rows], 0.0)
            self.second_logp[rows] = torch.where(self.has_two[rows], second_logp, logp)
            self.out.logp[rows].masked_fill_(~self.first_counts[rows], 0.0)

    def write_gradient(self, logits: torch.Tensor, start: int, second_coef: torch.Tensor | None) -> None:
        """Overwrite the logits with their gradient. second_coef: the second targets' part of `coef`."""
        rows = slice(start, start + logits.shape[0])
        call = {"bias": self.bias, "row_start": start, "plain": self._plain}
        row_log_prob_gradients(logits, self.target, self.out, self.coef, self._options, **call)
        if second_coef is not None:  # divide coef between two different targets
            first_column = self.target[rows].masked_fill(~self.has_two[rows], 0).long()
            coef = self.coef[rows]
            self._write_column(logits, rows, first_column, coef - second_coef - coef * self.out.logp[rows].exp())
            slopes = second_coef - coef * self.second_logp[rows].exp()
            self._write_column(logits, rows, self.second_column[rows], slopes)

    def _write_column(self, logits: torch.Tensor, rows: slice, columns: torch.Tensor, slopes: torch.Tensor) -> None:
        """Write the gradient of one column in each row with two different targets."""
        index = columns[:, None]
        slopes = (slopes / self.spec.temperature).to(logits.dtype)[:, None]
        logits.scatter_(1, index, torch.where(self.has_two[rows, None], slopes, logits.gather(1, index)))


class _Groups(NamedTuple):
    """The groups of a call. width: rows of a group; extras: the grouped, then the shared tensors of the call."""

    n_groups: int
    width: int
    vocab: int
    extras: Sequence[torch.Tensor | None]
    n_grouped: int

    def inputs(self, rows: _Rows, first: int, last: int) -> LossInputs:
        """The inputs of the loss for the groups first to last - 1."""

        def part(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t[first * self.width : last * self.width].view(last - first, self.width)

        return LossInputs(
            logp=part(rows.out.logp),
            second=part(rows.second_logp),
            logit_sum=part(rows.out.logit_sum),
            grouped=[None if t is None else t[first:last] for t in self.extras[: self.n_grouped]],
            shared=self.extras[self.n_grouped :],
            n_groups=self.n_groups,
            vocab=self.vocab,
        )

    def fill_coef(self, loss: Any, rows: _Rows, scale: float, first: int, last: int) -> torch.Tensor | None:
        """Fill `rows.coef` for the groups first to last - 1. Returns the second targets' part of it."""
        inputs = self.inputs(rows, first, last)
        logps = [inputs.logp] if inputs.second is None else [inputs.logp, inputs.second]

        def loss_of(*logps: torch.Tensor) -> torch.Tensor:
            return loss.loss(inputs._replace(**dict(zip(("logp", "second"), logps))))

        within = slice(first * self.width, last * self.width)
        coef, *second = (t.reshape(-1) for t in differentiate(loss_of, logps, [inputs.logp.new_full((), scale)]))
        if not second:
            rows.coef[within] = coef
            return None
        second_coef = torch.where((rows.has_two | rows.second_is_target)[within], second[0], 0.0)
        rows.coef[within] = torch.where(rows.first_counts[within], coef, 0.0) + second_coef
        return second_coef


def _prepared(x, weight, bias, target, second, extras, spec: Spec, plain: bool = False):
    """(rows, groups, the order of the sweep, or None for the order of x)"""
    batch, length = target.shape
    n_rows, width = batch * length, (1, length, 2 * length)[spec.group]
    order = None
    target, second = target.reshape(-1).contiguous(), None if second is None else second.reshape(-1).contiguous()
    if spec.group == PAIR and batch > 2:  # pair by pair, instead of all chosen and then all rejected sequences
        rows = torch.arange(n_rows, device=x.device).view(2, batch // 2, length)
        order = rows.transpose(0, 1).reshape(-1)
        target, second = target[order], None if second is None else second[order]
    n_groups = n_rows if spec.group == TOKEN else batch // spec.group
    groups = _Groups(n_groups, width, weight.shape[0], extras, spec.n_grouped)
    return _Rows(x, target, second, bias, spec, plain), groups, order


@torch.no_grad()
def _run(x, weight, bias, target, second, extras, spec: Spec, plain=False):
    loss, needs, (vocab, hidden) = spec.loss, spec.needs, weight.shape
    check_in_range("chunked_loss", target, vocab, spec.ignore_index)
    check_in_range("chunked_loss", second, vocab, spec.ignore_index)
    rows, groups, order = _prepared(x, weight, bias, target, second, extras, spec, plain)
    flat, n_groups, width = x.reshape(-1, hidden), groups.n_groups, groups.width
    chunks = plan_groups(len(flat), width, hidden, vocab, x.dtype.itemsize, any(needs))
    grads = HeadGradients(flat, weight, needs, chunks, rows.target, plain)
    if not any(needs):
        rows.compute_all_logps(sweep(chunks, flat, weight, order=order))
    elif any(start % width for start, _ in chunks.bounds):  # a group does not fit a chunk: two sweeps
        rows.compute_all_logps(sweep(chunks, flat, weight, order=order))
        second = groups.fill_coef(loss, rows, spec.scale, 0, n_groups)
        for start, logits, _ in sweep(chunks, flat, weight, grads, order=order):
            rows.write_gradient(logits, start, None if second is None else second[start : start + logits.shape[0]])
    else:
        for start, logits, _ in sweep(chunks, flat, weight, grads, order=order):
            rows.compute_logps(logits, start)
            last = (start + logits.shape[0]) // width
            rows.write_gradient(logits, start, groups.fill_coef(loss, rows, spec.scale, start // width, last))
    return [*loss.results(groups.inputs(rows, 0, n_groups)), *grads.results(bias)]


def _fake(x, weight, bias, target, second, extras, spec: Spec):
    rows, groups, _ = _prepared(x, weight, bias, target, second, extras, spec)
    inputs = groups.inputs(rows, 0, groups.n_groups)
    return [*spec.loss.results(inputs), *fake_gradients(x.reshape(-1, x.shape[-1]), weight, bias, spec.needs)]


_SHAPES = "T x [batch, length, hidden]; T weight [vocab, hidden]; T bias [vocab]; int target [batch, length]"
chunked_loss = define(
    "chunked_loss(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? second, Tensor?[] extras) -> Tensor[]",
    shapes=f"{_SHAPES}; int second [batch, length]; extras",
    launcher=_run,
    reference=partial(_run, plain=True),
    fake=_fake,
    numbers=Spec,
    recorded=False,
)


class ChunkedLossFunction(Function):
    """Autograd for the losses of this folder except distillation. Saves the gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, second, spec, *extras):
        ctx.needs = Needs(*ctx.needs_input_grad[:3])
        spec = spec._replace(needs=ctx.needs)
        *outputs, dx, dweight, dbias = chunked_loss(x, weight, bias, target, second, list(extras), spec)
        ctx.save_for_backward(dx, dweight, dbias)
        ctx.scale, ctx.shape = spec.scale, x.shape
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, *_not_differentiable):
        no_gradients = (None,) * (len(ctx.needs_input_grad) - 3)
        if grad_loss is None:
            return None, None, None, *no_gradients
        if ctx.scale != 1.0:
            grad_loss = grad_loss / ctx.scale
        dx, dweight, dbias = scale_gradients(ctx.saved_tensors, ctx.needs, grad_loss, absent(grad_loss))
        return None if dx is None else dx.view(ctx.shape), dweight, dbias, *no_gradients


def run_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    spec: Spec,
    extras: Sequence[torch.Tensor | None] = (),
    second: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(loss, *metrics). x [batch, length, hidden], target and second [batch, length]; extras: grouped, then shared."""
    # The gradients of a mean, about probability / n_terms, underflow in fp16. The forward multiplies them by a power of
    # two near n_terms, and backward divides the incoming gradient by it.
    n_terms = target.numel() if spec.group == TOKEN else target.shape[0]
    scale = float(next_power_of_2(n_terms)) if x.dtype is torch.float16 else 1.0
    return ChunkedLossFunction.apply(x, weight, bias, target, second, spec._replace(scale=scale), *extras)


@torch.no_grad()
def reference_logps(
    op: str,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    policy: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities [batch, length] of the targets under the reference model, without gradients. policy: the input
    of the policy's head; raises unless x has its batch and length."""
    if x is None or weight is None:
        missing = " and ".join(n for n, t in (("ref_input", x), ("ref_weight", weight)) if t is None)
        check(False, op, f"use_ref_model=True needs {missing}; give them, or use_ref_model=False")
    x, weight, bias = checked_head(op, x, weight, bias, ("ref_input", "ref_weight", "ref_bias"), SEQUENCES)
    if x.shape[:-1] != policy.shape[:-1]:
        expected, got = tuple(policy.shape[:-1]), tuple(x.shape[:-1])
        check(False, op, f"ref_input must have the batch and length of _input, {expected}, got {got}")
    if x.device != policy.device:
        check(False, op, f"ref_input is on {x.device} but _input is on {policy.device}; move them to one device")
    call = LogProbsCall(LogProbOptions(ignore_index, temperature))
    return linear_log_probs_fwd(x.flatten(0, -2), weight, target.flatten(), bias, None, call)[0].view(target.shape)
