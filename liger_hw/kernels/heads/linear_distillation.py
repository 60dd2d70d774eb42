"""A student's linear head distilled from a teacher's head, or from given probabilities, chunk by chunk.

What fused_linear_jsd and fused_linear_kl_div share: the operator over the linear-head core, autograd, and the checks.
The forward computes the gradients of the student's input and weight that will be needed; backward multiplies them by
the incoming gradient, as in cross_entropy.py. The teacher has none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...registry import Tunable
from ...runtime.operator import Function, check, check_floats, check_tensors, define, first_order
from ..losses.cross_entropy_reference import SUM, Options, absent
from ..losses.cross_entropy_rows import RowResults, launch_sum
from ..losses.distill_rows import Distillation, DistillRows, distill_reference, distill_rows, distill_slopes
from ..losses.divergence_rows import check_labels, label_share
from ..losses.log_prob_rows import vocab_key
from .chunk_plan import borrow_gradient_memory, plan_chunks
from .head_inputs import checked_head, sums_in_fp32
from .linear_head import HeadGradients, scale_wanted, sweep


class _Call(NamedTuple):
    """The operators' arguments after the tensors, in the order of their schema.

    per_row: the sum over rows is divided by the rows that count times this; 0 leaves it a sum
    wide: the weight's gradient is accumulated in fp32
    """

    kind: int
    beta: float
    eps: float
    temperature: float
    ignore_index: int
    per_row: int
    wide: bool
    dinput: bool = False
    dweight: bool = False

    @property
    def options(self) -> Distillation:
        return Distillation(self.kind, self.beta, self.eps, self.temperature, self.ignore_index)

    def scales_in_backward(self, dtype: torch.dtype) -> bool:
        """Whether backward divides the gradients by the mean's denominator, which would underflow in fp16 before."""
        return dtype is torch.float16 and self.per_row != 0


def linear_distillation_reference(x, weight, teacher, teacher_weight, labels, options: Distillation, per_row: int):
    """The specification in plain torch. teacher: hidden states, or the probabilities where teacher_weight is None."""
    student = F.linear(x, weight)
    given = teacher if teacher_weight is None else F.linear(teacher, teacher_weight)
    soft = distill_reference(student, given.detach(), labels, options)[0]
    return soft.sum() * _share(x, labels, options, per_row, soft.dtype)


def _share(x, labels, options: Distillation, per_row: int, dtype: torch.dtype):
    """What one row counts in the loss; zero where no row does."""
    if not per_row:
        return torch.ones((), dtype=dtype, device=x.device)
    n_rows = x.new_ones(x.shape[0]).sum(dtype=dtype) if labels is None else (labels != options.ignore_index).sum()
    return torch.where(n_rows == 0, 0.0, 1.0 / (n_rows * per_row).to(dtype))


def linear_distillation_operator(op: str, tunable: Tunable) -> Any:
    """The operator `<op>_fwd` -> (loss, dinput, dweight, stats for a division in backward)."""

    @torch.no_grad()
    def fwd(x, weight, teacher, teacher_weight, labels, *arguments):
        call = _Call(*arguments)
        (n_rows, hidden), vocab, itemsize, options = x.shape, weight.shape[0], x.dtype.itemsize, call.options
        gradients, second = call.dinput or call.dweight, None
        chunks = plan_chunks(
            *(n_rows, hidden, vocab, itemsize),
            gradients=gradients,
            wide=call.wide,
            heads=1 if teacher_weight is None else 2,
            prefer_large=gradients and not call.wide,
            device=x.device,
        )
        if teacher_weight is not None:
            second = teacher, teacher_weight
            if call.dweight and teacher.dtype == weight.dtype:
                chunks = borrow_gradient_memory(chunks, hidden, vocab, x.device)
        elif teacher.stride(-1) != 1:
            teacher = teacher.contiguous()
        labels = labels if labels is None else labels.contiguous()
        share = label_share(labels, n_rows, call.per_row, options.ignore_index, x.device)
        soft = torch.empty(n_rows, dtype=torch.float32, device=x.device)
        grads = HeadGradients(x, weight, (call.dinput, call.dweight, False), chunks)
        plan = tunable.plan(x.device, vocab_key(n_rows, hidden, vocab, itemsize))
        scale_in_backward = call.scales_in_backward(x.dtype)
        for start, logits, other in sweep(chunks, x, weight, grads, second=second):
            given = teacher[start : start + logits.shape[0]] if other is None else other
            distill_rows(
                *(plan, logits, given, labels, share, options, DistillRows(soft)),
                dlogits=logits if gradients else None,
                row_start=start,
                scale_in_backward=scale_in_backward,
            )
        loss = launch_sum(RowResults(soft), share, Options(options.ignore_index, 0.0, 0.0, 0.0, SUM), torch.float32)[0]
        dx, dweight, _ = grads.results()
        return loss, dx, dweight, share if gradients and scale_in_backward else absent(share)

    @torch.no_grad()
    def reference(x, weight, teacher, teacher_weight, labels, *arguments):
        call = _Call(*arguments)
        options, gradients = call.options, call.dinput or call.dweight
        loss = linear_distillation_reference(x, weight, teacher, teacher_weight, labels, options, call.per_row)
        dx, dweight = absent(x), absent(weight)
        if gradients:
            given = teacher if teacher_weight is None else F.linear(teacher, teacher_weight)
            slope = distill_slopes(F.linear(x, weight), given, labels, options)[0]
            dlogits = (slope * _share(x, labels, options, call.per_row, slope.dtype)).to(x.dtype)
            dx = dlogits @ weight if call.dinput else dx
            dweight = dlogits.t() @ x if call.dweight else dweight
        scale_in_backward = gradients and call.scales_in_backward(x.dtype)
        return loss, dx, dweight, x.new_ones(5 if scale_in_backward else 0, dtype=torch.float32)

    return define(
        f"{op}_fwd(Tensor input, Tensor weight, Tensor teacher, Tensor? teacher_weight, Tensor? labels, int kind, "
        "float beta, float eps, float temperature, int ignore_index, int per_row, bool wide, bool dinput, bool dweight)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        launcher=fwd,
        reference=reference,
    )


class LinearDistillationFunction(Function):
    """Autograd for the fused heads: saves the finished gradients."""

    @staticmethod
    def forward(ctx, x, weight, teacher, teacher_weight, labels, operator, call: _Call):
        dinput, dweight = ctx.wanted = ctx.needs_input_grad[:2]
        call = call._replace(dinput=dinput, dweight=dweight)
        loss, *saved = operator(x, weight, teacher, teacher_weight, labels, *call)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        *grads, stats = ctx.saved_tensors
        return *scale_wanted(grads, ctx.wanted, grad_output, stats), *(None,) * 5


def linear_distillation(
    op: str, operator, x, weight, teacher, teacher_weight, labels, options: Distillation, per_row: int, accum_dtype
) -> torch.Tensor:
    """Check the arguments of a public function and run it."""
    given = {"target": teacher}
    if teacher_weight is not None:
        given = {"teacher_input": teacher, "teacher_weight": teacher_weight}
    check_tensors(op, student_input=x, student_weight=weight, **given)
    teacher, teacher_weight = (None if t is None else t.detach() for t in (teacher, teacher_weight))
    x, weight, _ = checked_head(op, x, weight, names=("student_input", "student_weight", "student_bias"))
    n_rows, vocab = x.shape[0], weight.shape[0]
    if teacher_weight is None:
        expected = (n_rows, vocab)
        check(teacher.shape == expected, op, f"target must have shape {expected}, got {tuple(teacher.shape)}")
    else:
        names = "teacher_input", "teacher_weight", "teacher_bias"
        teacher, teacher_weight, _ = checked_head(op, teacher, teacher_weight, names=names)
        if teacher.shape[0] != n_rows or teacher_weight.shape[0] != vocab:
            shapes = f"{teacher.shape[0]} rows and a vocabulary of {teacher_weight.shape[0]}"
            check(False, op, f"the teacher must have {n_rows} rows and a vocabulary of {vocab}, got {shapes}")
    check_labels(op, labels, x, options.ignore_index)
    check_floats(op, temperature=options.temperature)
    if not options.temperature > 0.0:
        check(False, op, f"temperature must be positive, got {options.temperature}")
    call = _Call(
        options.kind,
        options.beta,
        options.eps,
        float(options.temperature),
        options.ignore_index,
        per_row,
        sums_in_fp32(op, accum_dtype, weight),
    )
    return LinearDistillationFunction.apply(x, weight, teacher, teacher_weight, labels, operator, call)
