"""A student's linear head distilled from a teacher's head, or from given probabilities, chunk by chunk.

What fused_linear_jsd and fused_linear_kl_div share: the operator over the linear-head core, autograd, and the checks.
The forward computes the gradients of the student's input and weight that will be needed; backward multiplies them by
the incoming gradient, as in cross_entropy.py. The teacher has none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...registry import Tunable
from ...runtime.operator import (
    Function,
    autocast_dtype,
    check,
    check_floats,
    check_tensors,
    define,
    first_order,
)
from ..losses.cross_entropy_reference import SUM, Options, absent
from ..losses.cross_entropy_rows import RowResults, launch_sum
from ..losses.cross_entropy_scale import scale_gradients
from ..losses.distill_rows import Distillation, DistillRows, distill_reference, distill_rows, distill_slopes
from ..losses.divergence_rows import check_labels, label_share
from ..losses.log_prob_rows import vocab_key
from .linear_head import HeadGradients, head_gradients, lending, plan_chunks, sweep


def linear_distillation_reference(x, weight, teacher, teacher_weight, labels, options: Distillation, per_row: int):
    """The specification in plain torch. teacher: hidden states, or the probabilities where teacher_weight is None.

    per_row: the sum over rows is divided by rows that count times this; 0 leaves it a sum
    """
    student = F.linear(x, weight)
    given = teacher if teacher_weight is None else F.linear(teacher, teacher_weight)
    soft = distill_reference(student, given.detach(), labels, options)[0]
    return soft.sum() * _share(x, labels, options, per_row, soft.dtype)


def _share(x, labels, options, per_row, dtype):
    if not per_row:
        return torch.ones((), dtype=dtype, device=x.device)
    rows = torch.tensor(x.shape[0]) if labels is None else (labels != options.ignore_index).sum()
    return torch.where(rows == 0, 0.0, 1.0 / (rows * per_row).to(dtype)).to(x.device)


def linear_distillation_operator(op: str, tunable: Tunable) -> Any:
    """The operator `<op>_fwd` -> (loss, dinput, dweight, what a late division needs)."""

    @torch.no_grad()
    def fwd(x, weight, teacher, teacher_weight, labels, *call):
        options, (per_row, wide, *wanted) = _options(call), call[5:]
        (n_rows, hidden), vocab, gradients = x.shape, weight.shape[0], any(wanted)
        labels = labels if labels is None else labels.contiguous()
        size, heads = x.dtype.itemsize, 1 if teacher_weight is None else 2
        generous = gradients and not wide
        chunks = plan_chunks(
            n_rows, hidden, vocab, size, gradients=gradients, wide=wide, buffers=heads, generous=generous
        )
        if heads == 2 and wanted[1] and teacher.dtype == weight.dtype:
            chunks = lending(chunks, hidden, vocab)
        share = label_share(labels, n_rows, per_row, options.ignore_index, x.device)
        soft = torch.empty(n_rows, dtype=torch.float32, device=x.device)
        grads = HeadGradients(x, weight, (*wanted, False), chunks) if gradients else None
        plan = tunable.plan(x.device, vocab_key(n_rows, hidden, vocab, size))
        late = _late(x.dtype, per_row)
        second = None if teacher_weight is None else (teacher, teacher_weight)
        if second is None and teacher.stride(-1) != 1:
            teacher = teacher.contiguous()
        for start, logits, other in sweep(chunks, x, weight, grads, second=second):
            given = teacher[start : start + logits.shape[0]] if other is None else other
            dlogits = logits if gradients else None
            out = DistillRows(soft)
            distill_rows(plan, logits, given, labels, share, options, out, dlogits=dlogits, row_start=start, late=late)
        none = Options(options.ignore_index, 0.0, 0.0, 0.0, SUM)
        loss = launch_sum(RowResults(soft), share, none, torch.float32)[0]
        return loss, *head_gradients(grads, x)[:2], share if gradients and late else absent(share)

    @torch.no_grad()
    def reference(x, weight, teacher, teacher_weight, labels, *call):
        options, (per_row, _, *wanted) = _options(call), call[5:]
        loss = linear_distillation_reference(x, weight, teacher, teacher_weight, labels, options, per_row)
        dx, dweight = absent(x), absent(x)
        if any(wanted):
            given = teacher if teacher_weight is None else F.linear(teacher, teacher_weight)
            slope = distill_slopes(F.linear(x, weight), given, labels, options)[0]
            dlogits = (slope * _share(x, labels, options, per_row, slope.dtype)).to(x.dtype)
            dx = dlogits @ weight if wanted[0] else dx
            dweight = dlogits.t() @ x if wanted[1] else dweight
        late = any(wanted) and _late(x.dtype, per_row)
        return loss, dx, dweight, x.new_ones(5 if late else 0, dtype=torch.float32)

    def fake(x, weight, teacher, teacher_weight, labels, *call):
        per_row, _, *wanted = call[5:]
        late = any(wanted) and _late(x.dtype, per_row)
        return (
            x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32)),
            x.new_empty(x.shape if wanted[0] else 0),
            weight.new_empty(weight.shape if wanted[1] else 0),
            x.new_empty(5 if late else 0, dtype=torch.float32),
        )

    return define(
        f"{op}_fwd(Tensor input, Tensor weight, Tensor teacher, Tensor? teacher_weight, Tensor? labels, int kind, "
        "float beta, float eps, float temperature, int ignore_index, int per_row, bool wide, bool dinput, bool dweight)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        launcher=fwd,
        reference=reference,
        fake=fake,
    )


def _options(call) -> Distillation:
    kind, beta, eps, temperature, ignore_index = call[:5]
    return Distillation(kind, beta, eps, temperature, ignore_index)


def _late(dtype: torch.dtype, per_row: int) -> bool:
    """Whether the gradient leaves the forward before the mean's division, which underflows in fp16."""
    return dtype is torch.float16 and per_row != 0


class LinearDistillationFunction(Function):
    """Autograd for the fused heads: saves the finished gradients."""

    @staticmethod
    def forward(ctx, x, weight, teacher, teacher_weight, labels, operator, *call):
        ctx.wanted = ctx.needs_input_grad[:2]
        loss, *saved = operator(x, weight, teacher, teacher_weight, labels, *call, *ctx.wanted)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        *grads, stats = ctx.saved_tensors
        scaled = iter(scale_gradients([g for g, w in zip(grads, ctx.wanted) if w], grad_output, stats))
        return *(next(scaled) if w else None for w in ctx.wanted), *(None,) * 11


def linear_distillation(
    op: str, operator, x, weight, teacher, teacher_weight, labels, options: Distillation, per_row: int, accum_dtype
) -> torch.Tensor:
    """Check the arguments of a public function and run it."""
    heads = {"student_input": x, "student_weight": weight}
    if teacher_weight is None:
        heads["target"] = teacher
    else:
        heads |= {"teacher_input": teacher, "teacher_weight": teacher_weight}
    check_tensors(op, **heads)
    for name, tensor in heads.items():
        check(tensor.dim() == 2, op, f"{name} must have two dimensions, got shape {tuple(tensor.shape)}")
        if not name.startswith("student"):
            check(not tensor.requires_grad, op, f"{name} has no gradient; detach it")
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        x, weight = x.to(dtype), weight.to(dtype)
        if teacher_weight is not None:
            teacher, teacher_weight = teacher.to(dtype), teacher_weight.to(dtype)
    _check_head(op, "student", x, weight)
    n_rows, vocab = x.shape[0], weight.shape[0]
    if teacher_weight is None:
        expected = (n_rows, vocab)
        check(teacher.shape == expected, op, f"target must have shape {expected}, got {tuple(teacher.shape)}")
    else:
        _check_head(op, "teacher", teacher, teacher_weight)
        if teacher.shape[0] != n_rows or teacher_weight.shape[0] != vocab:
            shapes = f"{teacher.shape[0]} rows and a vocabulary of {teacher_weight.shape[0]}"
            check(False, op, f"the teacher must have {n_rows} rows and a vocabulary of {vocab}, got {shapes}")
    check_labels(op, labels, x, options.ignore_index)
    check_floats(op, temperature=options.temperature)
    if not options.temperature > 0.0:
        check(False, op, f"temperature must be positive, got {options.temperature}")
    if accum_dtype not in (None, torch.float32, weight.dtype):
        check(False, op, f"accum_dtype must be None, torch.float32 or the weight's dtype, got {accum_dtype}")
    call = (options.kind, options.beta, options.eps, float(options.temperature), options.ignore_index, per_row)
    call = *call, accum_dtype is torch.float32 and weight.dtype.itemsize < 4
    tensors = x, weight, teacher, teacher_weight, labels
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return LinearDistillationFunction.apply(*tensors, operator, *call)
    return operator(*tensors, *call, False, False)[0]


def _check_head(op: str, name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.shape[1] != weight.shape[1] or not weight.numel():
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        check(False, op, f"{name}_input must be [n_rows, hidden] and {name}_weight [vocab, hidden], got {shapes}")
    if x.dtype != weight.dtype:
        check(False, op, f"{name}_input and {name}_weight must share one dtype, got {x.dtype} and {weight.dtype}")
