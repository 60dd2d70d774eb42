"""fused_linear_cross_entropy over a vocabulary split between the ranks of a process group, without gathering logits.

Each rank holds its part of the head's weight, in the order of the ranks; parts may be unequal (losses/vocab_parts.py).
The loss of a row is defined in cross_entropy.py, with the log-sum-exp, the target's logit and the sum of the logits
taken over all ranks. It has the same bits on every rank.

A chunk of rows (linear_head.py) costs three GEMMs over this rank's columns. The ranks communicate during the GEMMs:
    logits    are computed in two halves of the chunk's rows. The log-sum-exps of the first half are exchanged while the
              second half's logits are computed; the second half's, while the first half's gradient is written
    dx        is summed over the ranks, in the input's dtype, while dweight is computed. Under sequence parallelism each
              rank holds some rows of the input; all are gathered first, and dx is summed by a reduce-scatter
Numbers that only the loss needs, such as the target's logit, are exchanged once, after the last chunk. The forward
computes the gradients, as in fused_linear_cross_entropy.py. With reduction="none" backward computes them from the
log-sum-exps that the forward saved.

Source: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...runtime.operator import Function, check_flags, define, first_order, with_fallback
from ..losses.cross_entropy_rows import (
    MEAN,
    NONE,
    CrossEntropyOutput,
    Options,
    absent,
    check_arguments,
    cross_entropy_options,
    pack,
)
from ..losses.log_prob_rows import LogProbOptions, LogProbs, log_prob_buffers, row_log_prob_gradients, row_log_probs
from ..losses.vocab_parts import (
    IGNORED,
    GatheredRows,
    LocalTargets,
    VocabPart,
    all_gather_single,
    checked_group,
    gather_rows,
    local_targets,
    reduce_scatter_single,
    vocab_part,
)
from .fused_linear_cross_entropy import run_backward, run_forward
from .head_reference import fake_gradients
from .linear_head import (
    Chunks,
    CountedRows,
    HeadGradients,
    Needs,
    checked_head,
    dx_of,
    plan_shared,
    remaining_rows,
    scatter_rows,
    sums_in_fp32,
    sweep,
)

_NAME = "liger_fused_linear_cross_entropy_tp"


class _Call(NamedTuple):
    """The operators' numbers, in the order of their schema. group: the process group's name, or "" for a whole
    vocabulary; wide: the weight's gradient is accumulated in fp32."""

    group: str
    options: Options
    wide: bool
    sequence_parallel: bool
    needs: Needs = Needs()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return dist.distributed_c10d._resolve_process_group(self.group) if self.group else None


# -- gradients -------------------------------------------------------------------------------------------------------


class SharedGradients(HeadGradients):
    """`HeadGradients` with this rank's dweight, and with dx summed over the ranks.

    scattered: x [n_rows, hidden] was gathered from all ranks, and dx has only this rank's rows. Every chunk must have
    equally many rows of each rank.
    """

    def __init__(
        self, x, weight, needs, chunks: Chunks, targets, part: VocabPart, plain: bool, scattered=False
    ) -> None:
        super().__init__(x, weight, (needs[0] and not scattered, *needs[1:]), chunks, targets, plain)
        if needs[0] and scattered:
            self.dx = x.new_empty((x.shape[0] // part.world, x.shape[1]))
        self._part, self._scattered, self._pending = part, scattered, []

    def add_dx(self, dlogits: torch.Tensor, weight: torch.Tensor, rows: slice | torch.Tensor, start: int) -> None:
        group, world = self._part.group, self._part.world
        if world == 1:
            super().add_dx(dlogits, weight, rows, start)
            return
        partial_dx = self.dx[rows] if isinstance(rows, slice) else self.dx.new_empty((len(dlogits), self.dx.shape[1]))
        dx_of(dlogits, weight, partial_dx, True)
        if self._scattered:
            dx = self.dx[start // world : (start + len(dlogits)) // world]
            work = reduce_scatter_single(dx, partial_dx, group=group, async_op=True)
        else:
            work = dist.all_reduce(partial_dx, group=group, async_op=True)
        self._pending.append((work, partial_dx, rows))

    def finish(self, x: torch.Tensor, order: torch.Tensor | None, buffer: torch.Tensor) -> None:
        super().finish(x, order, buffer)
        for work, partial_dx, rows in self._pending:
            work.wait()
            if not self._scattered and not isinstance(rows, slice):
                self.dx.index_copy_(0, rows, partial_dx)
        self._pending.clear()


# -- rows ------------------------------------------------------------------------------------------------------------


class _RowLosses:
    """The row-wise part of one call on one rank. Tensors [n_rows] are in the order of the sweep.

    incoming: [] or [n_rows], the incoming gradient of each row's loss
    lse: log-sum-exps over the whole vocabulary, saved by the forward; None: the ranks exchange theirs
    sent: the exchanges that `send` has begun and `receive` has not completed
    """

    def __init__(
        self, local: LocalTargets, part: VocabPart, bias, options: Options, like, plain: bool, incoming, lse=None
    ) -> None:
        self.local, self.part, self.options, self.sent = local, part, options, []
        n_rows, smoothing = local.column.shape[0], options.label_smoothing
        self._results = log_prob_buffers(n_rows, like, logit_sum=bool(smoothing), top=options.needs_top)
        self._top = torch.empty_like(self._results.lse) if options.needs_top else None
        self.lse = torch.empty_like(self._results.lse) if lse is None else lse
        self._row_options, self._bias, self._plain = LogProbOptions(IGNORED, softcap=options.softcap), bias, plain
        self._per_class = smoothing / part.vocab.to(self.lse.dtype) if smoothing else None
        self._target_coef = torch.where(local.is_local, (smoothing - 1.0) * incoming, 0.0)
        self._softmax_coef = torch.where(local.valid, -incoming, float("nan"))
        self._smoothing_term = (-self._per_class * incoming).expand(n_rows).contiguous() if smoothing else None

    def send(self, start: int, logits: torch.Tensor) -> None:
        """Compute the statistics of rows `start`.. from their logits, and send the log-sum-exps to the other ranks."""
        rows = slice(start, start + logits.shape[0])
        call = partial(row_log_probs, logits, self.local.column, self._results, self._row_options)
        with_fallback(partial(call, bias=self._bias, row_start=start, plain=self._plain))()
        if self._top is not None:
            column = self._results.top[rows].clamp_min(0)
            self._top[rows] = logits.gather(1, column[:, None])[:, 0]
            if self._bias is not None:
                self._top[rows] += self._bias[column]
        self.sent.append((rows, GatheredRows(self._results.lse[None, rows], self.part)))

    def receive(self) -> slice:
        """Wait for the oldest exchange, store the log-sum-exps over all ranks, and return the exchange's rows."""
        rows, gathered = self.sent.pop(0)
        self.lse[rows] = reduce(torch.logaddexp, gathered.wait()[0])
        return rows

    def results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(loss, its z-loss part, column of the largest logit or None) of every row. Call after all are received."""
        local, results, options = self.local, self._results, self.options
        numbers = [torch.where(local.is_local, results.lse + results.logp, 0.0)]
        numbers += [] if results.logit_sum is None else [results.logit_sum]
        numbers += [] if self._top is None else [self._top, results.top.to(self._top.dtype)]
        scores, *more = gather_rows(numbers, self.part)
        loss = self.lse - (1.0 - options.label_smoothing) * scores.sum(0)
        if self._per_class is not None:
            loss = loss - self._per_class * more.pop(0).sum(0)
        z = options.lse_square_scale * self.lse.square()
        loss = torch.where(local.valid, loss + z, float("nan")).masked_fill(~local.counted, 0.0)
        top = None
        if options.needs_top:
            values, columns = more
            winner = values.argmax(0, keepdim=True)
            top = (columns.gather(0, winner).long() + self.part.starts[winner])[0].masked_fill(~local.counted, -1)
        return loss, z.masked_fill(~local.counted, 0.0), top

    def gradient(self, start: int, logits: torch.Tensor) -> None:
        """Overwrite the logits of the rows `start`.. with their gradient."""
        softmax_coef = self._softmax_coef
        if scale := self.options.lse_square_scale:
            softmax_coef = softmax_coef * (1.0 + 2.0 * scale * self.lse)
        rows = logits, self.local.column, LogProbs(self.lse, self.lse), self._target_coef, self._row_options
        coefs = {"softmax_coef": softmax_coef, "smoothing_term": self._smoothing_term}
        call = partial(row_log_prob_gradients, *rows, bias=self._bias, row_start=start, plain=self._plain)
        with_fallback(partial(call, **coefs))()


# -- forward and backward --------------------------------------------------------------------------------------------


def _all_rows(x: torch.Tensor, part: VocabPart, sequence_parallel: bool) -> torch.Tensor:
    """The rows of all ranks [n_rows, hidden], in the order of the ranks: gathered if sequence_parallel."""
    x = x.detach()
    if not sequence_parallel or part.world == 1:
        return x
    rows = x.new_empty((part.world * x.shape[0], x.shape[1]))
    all_gather_single(rows, x.contiguous(), group=part.group)
    return rows


def _interleaved_order(chunks: Chunks, world: int, device: torch.device) -> torch.Tensor:
    """An order of the gathered rows in which every chunk has equally many rows of each rank."""
    rows = torch.arange(chunks.n_rows, device=device).view(world, -1)
    return torch.cat([rows[:, start // world : stop // world].reshape(-1) for start, stop in chunks.bounds])


@torch.no_grad()
def _run(x, weight, target, bias, order, call: _Call, plain: bool, lse=None, row_grads=None):
    """(a `_RowLosses`, the order of its rows or None, gradients, factor of each row's loss in the reduction).

    lse, row_grads: [n_rows], only in the backward of reduction="none": the forward's log-sum-exps, and each row's
    incoming gradient; plain: rows are computed in torch, without Triton kernels
    """
    part = vocab_part(weight.shape[0], call.process_group, x.device)
    scattered = call.sequence_parallel and part.world > 1
    all_x, n_rows = _all_rows(x, part, call.sequence_parallel), len(target if order is None else order)
    options, world = call.options, part.world if scattered else 1
    chunks = plan_shared(n_rows, x.shape[1], x.dtype.itemsize, wide=call.wide, world=world)
    if scattered:
        order = _interleaved_order(chunks, part.world, x.device)
    if order is not None:
        target, lse, row_grads = (None if t is None else t[order] for t in (target, lse, row_grads))
    local = local_targets(_NAME, target, weight.shape[0], part, options.ignore_index)
    entries = torch.where(local.is_local, local.column, -1)
    grads = SharedGradients(all_x, weight, call.needs, chunks, entries, part, plain, scattered)
    one = x.new_ones((), dtype=torch.promote_types(x.dtype, torch.float32))
    row_weight = local.counted.sum().to(one.dtype).reciprocal() if options.reduction == MEAN else one
    incoming = (one if options.scales_in_backward(x.dtype) else row_weight) if row_grads is None else row_grads
    losses = _RowLosses(local, part, bias, options, x, plain, incoming, lse)
    head_grads, scan = grads if any(call.needs) else None, losses.send if lse is None else None
    for start, logits, _ in sweep(chunks, all_x, weight, head_grads, order=order, scan=scan):
        if lse is not None:
            losses.gradient(start, logits)
        while losses.sent:
            rows = losses.receive()
            if any(call.needs):
                losses.gradient(rows.start, logits[rows.start - start : rows.stop - start])
    return losses, order, grads.results(bias), row_weight


def _forward(x, weight, target, bias, order, call: _Call, plain=False):
    n_rows, options = len(target), call.options
    losses, order, grads, row_weight = _run(x, weight, target, bias, order, call, plain)
    counted, (loss, z_loss, top) = losses.local.counted, losses.results()

    def in_order(t: torch.Tensor, fill: int = 0) -> torch.Tensor:
        return scatter_rows(t, order, n_rows, fill)

    by_row, hits = options.reduction == NONE, absent(loss)
    if options.return_token_accuracy:
        hits = (counted & (top == (target if order is None else target[order]))).float()
        hits = in_order(hits) if by_row else hits.sum() / counted.sum()
    loss = in_order(loss) if by_row else loss.sum() * row_weight
    z_loss = in_order(z_loss) if by_row else z_loss.sum() * row_weight
    z_loss = z_loss if options.return_z_loss else absent(z_loss)
    top = in_order(top, -1) if options.return_predicted_tokens else absent(target)
    stats = absent(row_weight)
    if options.scales_in_backward(x.dtype):  # if every row is ignored, row_weight is 1 / 0, and the gradients are zero
        stats = torch.where(row_weight.isfinite(), row_weight, 0.0).repeat(5)  # `scale_gradient` reads element 4
    return loss, z_loss, hits, top, in_order(losses.lse), *grads, stats


def _backward(grad_output, lse, x, weight, target, bias, order, call: _Call, plain=False):
    return _run(x, weight, target, bias, order, call, plain, lse, grad_output.to(lse.dtype))[2]


def _fwd_fake(x, weight, target, bias, order, call: _Call):
    wide, (n_rows,), options = torch.promote_types(x.dtype, torch.float32), target.shape, call.options
    size = (n_rows,) if options.reduction == NONE else ()
    sizes = (size, size if options.return_z_loss else 0, size if options.return_token_accuracy else 0)
    n_stats = 5 if options.scales_in_backward(x.dtype) else 0
    loss, z_loss, hits, lse, stats = (x.new_empty(size, dtype=wide) for size in (*sizes, n_rows, n_stats))
    top = target.new_empty(n_rows if options.return_predicted_tokens else 0, dtype=torch.int64)
    return loss, z_loss, hits.float(), top, lse, *fake_gradients(x, weight, bias, call.needs), stats


def _bwd_fake(grad_output, lse, x, weight, target, bias, order, call: _Call):
    return fake_gradients(x, weight, bias, call.needs)


_TENSORS = "Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? order"
_SHAPES = (
    "T input [n_local, hidden]; T weight [vocab, hidden]; int target [n_rows]; T bias [vocab]; int order [n_counted]"
)


def _misfit(x, weight, target, bias, order, call: _Call) -> str:
    world = dist.get_world_size(call.process_group) if call.sequence_parallel and call.group else 1
    if target.shape[0] != world * x.shape[0]:
        return f"target must be [{world * x.shape[0]}] to match input {tuple(x.shape)}, got {tuple(target.shape)}"
    return ""


fused_linear_cross_entropy_tp_fwd = define(
    f"fused_linear_cross_entropy_tp_fwd({_TENSORS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    shapes=_SHAPES,
    misfit=_misfit,
    launcher=_forward,
    reference=partial(_forward, plain=True),
    fake=_fwd_fake,
    numbers=_Call,
    recorded=False,
)
fused_linear_cross_entropy_tp_bwd = define(
    f"fused_linear_cross_entropy_tp_bwd(Tensor grad_output, Tensor lse, {_TENSORS}) -> (Tensor, Tensor, Tensor)",
    shapes=f"{_SHAPES}; grad_output, lse [n_rows]",
    misfit=lambda grad_output, lse, *args: _misfit(*args),
    launcher=_backward,
    reference=partial(_backward, plain=True),
    fake=_bwd_fake,
    numbers=_Call,
    recorded=False,
)


class FusedLinearCrossEntropyTPFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, target, bias, order, call):
        return run_forward(ctx, fused_linear_cross_entropy_tp_fwd, (x, weight, target, bias, order), call)

    @staticmethod
    @first_order
    def backward(ctx, grad_output, *_not_differentiable):
        return *run_backward(ctx, fused_linear_cross_entropy_tp_bwd, grad_output), None, None


def liger_fused_linear_cross_entropy_tp(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    compact: bool | CountedRows = False,
    sequence_parallel: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """`liger_fused_linear_cross_entropy` with the vocabulary split over a process group.

    input: [n_rows, hidden], the same on every rank; with sequence_parallel this rank's rows, equally many on every
    rank. weight: [vocab, hidden] and bias: [vocab], this rank's part, of any width; one dtype, fp32, fp16 or bf16 (fp64
    on the CPU), or any under autocast. target: [n_rows] int64 or int32, indices in the whole vocabulary for the rows of
    all ranks (with sequence_parallel in the order of the ranks), the same on every rank. tp_group: a ProcessGroup, or
    None if this rank has the whole vocabulary. compact is ignored with sequence_parallel. The other arguments are
    explained at `liger_fused_linear_cross_entropy`.
    Returns the loss of all rows in fp32, the same on every rank, [] or [n_rows] with reduction="none", or a
    `CrossEntropyOutput` when any return_* is set. The input's gradient is summed over the ranks. Every rank must call
    the function and run backward.
    Raises as `liger_cross_entropy` does, and `TypeError` for a tp_group that is not a process group.
    """
    numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    options = cross_entropy_options(_NAME, *numbers, return_z_loss, return_token_accuracy, return_predicted_tokens)
    how = accum_dtype, compact, sequence_parallel
    return tensor_parallel_head(input, weight, target, tp_group, bias, options, *how)


def tensor_parallel_head(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any,
    bias: torch.Tensor | None,
    options: Options,
    accum_dtype: torch.dtype | None = None,
    compact: bool | CountedRows = False,
    sequence_parallel: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """`liger_fused_linear_cross_entropy_tp` with options that are checked already."""
    input, weight, bias = checked_head(_NAME, input, weight, bias)
    wide = sums_in_fp32(_NAME, accum_dtype, weight)
    tp_group = checked_group(_NAME, tp_group)
    check_flags(_NAME, sequence_parallel=sequence_parallel)
    scattered = bool(sequence_parallel) and tp_group is not None and dist.get_world_size(tp_group) > 1
    n_rows = input.shape[0] * (dist.get_world_size(tp_group) if scattered else 1)
    check_arguments(_NAME, input.new_empty((n_rows, 0)), target, weight.shape[0])
    order = None if scattered else remaining_rows(_NAME, target, options.ignore_index, compact)
    call = _Call("" if tp_group is None else tp_group.group_name, options, wide, scattered)
    return pack(FusedLinearCrossEntropyTPFunction.apply(input, weight, target, bias, order, call), options)
