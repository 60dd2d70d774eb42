"""A student's linear head distilled from a teacher's head, or from given probabilities, chunk by chunk.

    soft: the sum of a divergence (distill_rows.py) of student's and teacher's logits, over rows that are not ignored
    hard: the sum of the cross entropy with the labels over the same rows; optional
    loss = soft_weight * soft + hard_weight * hard; for a mean, both sums are divided by the number of these rows

Shared by fused_linear_jsd, fused_linear_kl_div and the distillation losses of chunked_loss/. The forward computes the
needed gradients of the student's input, weight and bias; backward multiplies them by the incoming gradient, as in
cross_entropy.py. The teacher gets no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...registry import Tunable
from ...runtime.operator import Function, check, check_floats, check_tensors, define, dense, first_order
from ..losses.cross_entropy_rows import SUMMED, RowResults, absent, check_in_range, launch_sum
from ..losses.distill_rows import Distillation, DistillRows, distill_gradient, distill_reference, distill_rows
from ..losses.divergence_rows import check_labels, label_share, share_reference
from .head_reference import reference_gradients, reference_logits, unrounded_logits
from .linear_head import (
    HeadGradients,
    Needs,
    borrow_gradient_memory,
    checked_head,
    plan_chunks,
    scale_gradients,
    sums_in_fp32,
    sweep,
    sweep_in_fp32,
)


class DistillationCall(NamedTuple):
    """The operators' numbers, in the order of their schema.

    with_hard: compute the hard loss; wide: the weight's gradient is accumulated in fp32
    per_row: sums over rows are divided by per_row times the number of rows that are not ignored; 0: they stay sums
    """

    options: Distillation
    with_hard: bool
    per_row: int
    wide: bool
    needs: Needs = Needs()

    def scales_in_backward(self, dtype: torch.dtype) -> bool:
        """Whether backward divides by the mean's denominator: fp16 gradients divided in the forward would underflow."""
        return dtype is torch.float16 and self.per_row != 0 and any(self.needs)


def linear_distillation_reference(x, weight, teacher, teacher_weight, labels, options: Distillation, per_row: int):
    """The soft loss in plain torch. teacher: hidden states, or without teacher_weight probabilities."""
    if teacher_weight is None:
        logits = reference_logits(x, weight), teacher.detach()
    else:
        logits = unrounded_logits(x, weight), unrounded_logits(teacher, teacher_weight).detach()
    soft = distill_reference(*logits, labels, options)[0]
    return soft.sum() * share_reference(x, labels, per_row, options.ignore_index, soft.dtype)


def linear_distillation_operator(
    op: str, tunable: Tunable, scale: int = 1, prefer_large: bool = False, fp32_logits: bool = False
) -> Any:
    """The operator `<op>_fwd` -> (soft, hard, dinput, dweight, dbias, the factor of `label_share` if backward divides).

    scale, prefer_large: see `plan_chunks`; prefer_large is ignored with an fp32 weight gradient
    fp32_logits: logits are not rounded to the heads' dtype; for two heads without biases
    """

    @torch.no_grad()
    def fwd(x, weight, bias, teacher, teacher_weight, teacher_bias, labels, call: DistillationCall):
        (n_rows, hidden), vocab, itemsize, options = x.shape, weight.shape[0], x.dtype.itemsize, call.options
        gradients, scale_in_backward, second_head = any(call.needs), call.scales_in_backward(x.dtype), None
        chunks = plan_chunks(
            *(n_rows, hidden, vocab, itemsize),
            gradients=gradients,
            wide=call.wide,
            scale=scale,
            heads=1 if teacher_weight is None else 2,
            prefer_large=prefer_large and gradients and not call.wide,
        )
        if teacher_weight is not None:
            second_head = teacher, teacher_weight
            if fp32_logits and call.needs.dweight and teacher.dtype == weight.dtype:
                chunks = borrow_gradient_memory(chunks, hidden, vocab)
        elif teacher.stride(-1) != 1:
            teacher = teacher.contiguous()
        labels = dense(labels)
        if call.with_hard:
            check_in_range("chunked_loss", labels, vocab, options.ignore_index)
        share = label_share(labels, n_rows, call.per_row, options.ignore_index, x.device)
        soft = torch.empty(n_rows, dtype=torch.float32, device=x.device)
        rows = DistillRows(soft, torch.empty_like(soft) if call.with_hard else None)
        grads = HeadGradients(x, weight, call.needs, chunks, labels if options.hard_weight else None)
        plan = tunable.plan(x.device, tunable.key(vocab, itemsize))
        if fp32_logits:
            parts = sweep_in_fp32(chunks, x, weight, second_head, grads)
        else:  # the gradient is written over the logits
            parts = ((start, s, t, s) for start, s, t in sweep(chunks, x, weight, grads, second=second_head))
        for start, logits, teacher_logits, dlogits in parts:
            if teacher_logits is None:
                teacher_logits = teacher[start : start + logits.shape[0]]
            distill_rows(
                *(plan, logits, teacher_logits, labels, share, options, rows),
                dlogits=dlogits if gradients else None,
                student_bias=bias,
                teacher_bias=teacher_bias,
                row_start=start,
                scale_in_backward=scale_in_backward,
            )
        soft, hard, *_ = launch_sum(RowResults(rows.soft, rows.hard), share, SUMMED, soft.dtype)
        return soft, hard, *grads.results(bias), share if scale_in_backward else absent(share)

    @torch.no_grad()
    def reference(x, weight, bias, teacher, teacher_weight, teacher_bias, labels, call: DistillationCall):
        options = call.options
        if call.with_hard:
            check_in_range("chunked_loss", labels, weight.shape[0], options.ignore_index)
        if fp32_logits:
            logits = unrounded_logits(x, weight), unrounded_logits(teacher, teacher_weight)
        else:
            if teacher_weight is not None:
                teacher = reference_logits(teacher, teacher_weight, teacher_bias)
            logits = reference_logits(x, weight, bias), teacher
        soft, hard = distill_reference(*logits, labels, options)
        share = share_reference(x, labels, call.per_row, options.ignore_index, soft.dtype)
        scale_in_backward, dlogits = call.scales_in_backward(x.dtype), None
        if any(call.needs):
            dlogits = distill_gradient(*logits, labels, options)
            dlogits = dlogits if scale_in_backward else dlogits * share
        hard = hard.sum() * share if call.with_hard else absent(soft)
        stats = share.repeat(5) if scale_in_backward else absent(share)
        return soft.sum() * share, hard, *reference_gradients(dlogits, x, weight, bias, call.needs), stats

    def misfit(x, weight, bias, teacher, teacher_weight, *_) -> str:
        if teacher_weight is None and teacher.shape[1] != weight.shape[0]:
            expected = f"[{x.shape[0]}, {weight.shape[0]}]"
            return f"teacher must be {expected} without teacher_weight, got {list(teacher.shape)}"
        return ""

    return define(
        f"{op}_fwd(Tensor input, Tensor weight, Tensor? bias, Tensor teacher, Tensor? teacher_weight, "
        "Tensor? teacher_bias, Tensor? labels) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        shapes="T input [n_rows, hidden]; T weight [vocab, hidden]; T bias [vocab]; U teacher [n_rows, width]; "
        "U teacher_weight [vocab, width]; U teacher_bias [vocab]; int labels [n_rows]",
        misfit=misfit,
        launcher=fwd,
        reference=reference,
        numbers=DistillationCall,
        recorded=False,
    )


class LinearDistillationFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, teacher, teacher_weight, teacher_bias, labels, operator, call: DistillationCall):
        ctx.needs = Needs(*ctx.needs_input_grad[:3])
        call = call._replace(needs=ctx.needs)
        soft, hard, *saved = operator(x, weight, bias, teacher, teacher_weight, teacher_bias, labels, call)
        ctx.save_for_backward(*saved)
        soft_weight, hard_weight = call.options.soft_weight, call.options.hard_weight
        if not call.with_hard:
            return soft if soft_weight == 1.0 else soft_weight * soft
        ctx.mark_non_differentiable(soft, hard)
        ctx.set_materialize_grads(False)
        return soft_weight * soft + hard_weight * hard, soft, hard

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, *_not_differentiable):
        if grad_loss is None:
            return (None,) * 9
        *grads, stats = ctx.saved_tensors
        return *scale_gradients(grads, ctx.needs, grad_loss, stats), *(None,) * 6


def linear_distillation(
    op: str, operator, x, weight, teacher, teacher_weight, labels, options: Distillation, per_row: int, accum_dtype
) -> torch.Tensor:
    """Check the arguments of a public function that has only a soft loss, and run it."""
    if teacher_weight is None:
        check_tensors(op, student_input=x, student_weight=weight, target=teacher)
    x, weight, _ = checked_head(op, x, weight, names=STUDENT)
    if teacher_weight is None:
        expected = (x.shape[0], weight.shape[0])
        check(teacher.shape == expected, op, f"target must have shape {expected}, got {tuple(teacher.shape)}")
        teacher = teacher.detach()
    else:
        teacher, teacher_weight, _ = checked_teacher(op, teacher, teacher_weight, None, x, weight)
    check_labels(op, labels, x, options.ignore_index)
    check_floats(op, temperature=options.temperature)
    if not 0.0 < options.temperature < float("inf"):
        check(False, op, f"temperature must be positive and finite, got {options.temperature}")
    call = DistillationCall(options, with_hard=False, per_row=per_row, wide=sums_in_fp32(op, accum_dtype, weight))
    tensors = x, weight, None, teacher, teacher_weight, None, labels
    return LinearDistillationFunction.apply(*tensors, operator, call)


STUDENT = "student_input", "student_weight", "student_bias"
TEACHER = "teacher_input", "teacher_weight", "teacher_bias"


def checked_teacher(
    op: str, teacher, teacher_weight, teacher_bias, x: torch.Tensor, weight: torch.Tensor, rows: str = "n_rows"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`checked_head` of the teacher, without gradients; raises unless it fits the student's x and weight."""
    with torch.no_grad():
        head = checked_head(op, teacher, teacher_weight, teacher_bias, TEACHER, rows)
    got, expected = (head[0].shape[0], head[1].shape[0]), (x.shape[0], weight.shape[0])
    if got != expected:
        unit = rows.removeprefix("n_")
        shapes = f"{expected[0]} {unit} and vocabulary of {expected[1]}, got {got[0]} and {got[1]}"
        check(False, op, f"the teacher must have the student's {shapes}")
    if head[0].device != x.device:
        check(False, op, f"the teacher is on {head[0].device} but the student on {x.device}")
    return head
