"""What the distillation losses share: a student's head trained on a teacher's head and on true labels at once.

    loss = weight_soft * soft + weight_hard * hard

soft: the mean over counted tokens of a distance between the student's and the teacher's logits (JSD, cosine); hard: the
mean over the same tokens of the cross entropy with the true labels, at temperature 1. Both are zero where no token counts.
Every token's slope is its own matter: any chunk will do. The row kernel is `kernels/losses/distill_rows.py`, which reads a row
of both heads and writes the gradient of both terms over the student's.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.heads.chunk_plan import borrow_gradient_memory, plan_chunks
from ..kernels.heads.fused_linear_jsd import FWD
from ..kernels.heads.linear_head import HeadGradients, sweep
from ..kernels.losses.cross_entropy_reference import absent
from ..kernels.losses.distill_rows import Distillation, DistillRows, distill_reference, distill_rows, distill_slopes
from ..kernels.losses.log_prob_rows import vocab_key
from ..runtime.operator import (
    Function,
    check,
    check_flags,
    check_floats,
    check_ignore_index,
    define,
    first_order,
    is_interpreted,
)
from ._checks import checked_head, checked_target
from ._head import check_in_range, gradient_scale, save_gradients, saved_gradients


class _Rows:
    """The row step and its per-token losses, times the share of one token. On the CPU in plain torch."""

    def __init__(self, x, weight, bias, teacher_bias, target, options: Distillation, with_hard: bool) -> None:
        self.bias, self.teacher_bias, self.target, self.options = bias, teacher_bias, target, options
        wide = torch.promote_types(x.dtype, torch.float32)
        counted = (target != options.ignore_index).sum()
        self.share = torch.where(counted == 0, 0.0, 1.0 / counted.to(wide)).to(wide).reshape(1)
        self.plain = x.device.type == "cpu" and not is_interpreted()
        self.soft = torch.empty(x.shape[0], dtype=wide, device=x.device)
        self.hard = torch.empty_like(self.soft) if with_hard else None
        if not self.plain:
            self.plan = FWD.plan(x.device, vocab_key(*x.shape, weight.shape[0], x.dtype.itemsize))

    def step(self, logits: torch.Tensor, teacher: torch.Tensor, start: int, gradients: bool) -> None:
        """Losses of the rows `start`.., and with gradients the logits become theirs."""
        if not self.plain:
            distill_rows(
                *(self.plan, logits, teacher, self.target, self.share, self.options, DistillRows(self.soft, self.hard)),
                dlogits=logits if gradients else None,
                student_bias=self.bias,
                teacher_bias=self.teacher_bias,
                row_start=start,
            )
            return
        rows, options = slice(start, start + logits.shape[0]), self.options
        wide = self.soft.dtype
        student, teacher = logits.to(wide), teacher.to(wide)
        student = student if self.bias is None else student + self.bias
        teacher = teacher if self.teacher_bias is None else teacher + self.teacher_bias
        soft, hard = distill_reference(student, teacher, self.target[rows], options)
        self.soft[rows] = soft * self.share
        if self.hard is not None:
            self.hard[rows] = hard * self.share
        if gradients:
            soft, hard = distill_slopes(student, teacher, self.target[rows], options)
            logits.copy_((options.soft_weight * soft + options.hard_weight * hard) * self.share)


@torch.no_grad()
def _run(
    x, weight, bias, teacher, teacher_weight, teacher_bias, target, kind, beta, temperature, ignore_index, soft_scale,
    soft_weight, hard_weight, with_hard, scale, *wanted,
):  # fmt: skip
    check_in_range(target, weight.shape[0], ignore_index)
    weights = scale * soft_weight * soft_scale, scale * hard_weight  # of the gradient
    options = Distillation(kind, beta, 0.0, temperature, ignore_index, *weights)
    target, gradients = target.contiguous(), any(wanted)
    rows = _Rows(x, weight, bias, teacher_bias, target, options, with_hard)
    hidden, vocab, size = x.shape[1], weight.shape[0], x.dtype.itemsize
    chunks = plan_chunks(x.shape[0], hidden, vocab, size, gradients=gradients, scale=2, heads=2, device=x.device)
    if wanted[1] and teacher.dtype == weight.dtype:
        chunks = borrow_gradient_memory(chunks, hidden, vocab, x.device)
    grads = HeadGradients(x, weight, wanted, chunks, target if hard_weight else None, rows.plain)
    for start, logits, other in sweep(chunks, x, weight, grads, second=(teacher, teacher_weight)):
        rows.step(logits, other, start, gradients)
    soft = rows.soft.sum() * soft_scale
    hard = rows.hard.sum() if with_hard else torch.zeros_like(soft)
    loss = soft_weight * soft + hard_weight * hard
    return loss, soft, hard, *grads.results(bias)


def _fake(x, weight, bias, teacher, teacher_weight, teacher_bias, target, *call):
    wide = torch.promote_types(x.dtype, torch.float32)
    shapes = (x, weight, weight[:, 0] if bias is None else bias)
    wanted = call[-3:]
    grads = [t.new_empty(t.shape) if w else absent(x) for t, w in zip(shapes, wanted)]
    return (*(x.new_empty((), dtype=wide) for _ in range(3)), *grads)


chunked_distillation = define(
    "chunked_distillation(Tensor x, Tensor weight, Tensor? bias, Tensor teacher, Tensor teacher_weight, "
    "Tensor? teacher_bias, Tensor target, int kind, float beta, float temperature, int ignore_index, float soft_scale, "
    "float soft_weight, float hard_weight, bool with_hard, float scale, bool dx, bool dweight, bool dbias) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launcher=_run,
    reference=_run,
    fake=_fake,
)


class _DistillationFunction(Function):
    """Autograd for both losses: saves the finished gradients of the student; the teacher has none."""

    @staticmethod
    def forward(ctx, x, *rest):
        return save_gradients(ctx, chunked_distillation(x, *rest, *ctx.needs_input_grad[:3]), x, rest[-1])

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, *_not_differentiable):
        return saved_gradients(ctx, grad_loss)


def distillation_loss(
    name: str,
    kind: int,
    beta: float,
    soft_scale: float,
    student: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    teacher: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    true_labels: torch.Tensor,
    weight_hard_loss: float,
    weight_soft_loss: float,
    ignore_index: int,
    temperature: float,
    return_soft_hard_loss: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, or (loss, soft, hard), after checking the arguments; soft is reported times soft_scale."""
    check_options(name, weight_hard_loss, weight_soft_loss, ignore_index, temperature, return_soft_hard_loss)
    x, weight, bias = checked_head(name, *student, "student_", 2)
    teacher_x, teacher_weight, teacher_bias = (
        t if t is None else t.detach() for t in checked_head(name, *teacher, "teacher_", 2)
    )
    if teacher_x.shape[0] != x.shape[0] or teacher_weight.shape[0] != weight.shape[0]:
        expected = f"the student's {x.shape[0]} tokens and vocabulary of {weight.shape[0]}"
        check(False, name, f"the teacher must have {expected}, got {teacher_x.shape[0]} and {teacher_weight.shape[0]}")
    check(teacher_x.device == x.device, name, f"the teacher is on {teacher_x.device} but the student on {x.device}")
    target = checked_target(name, "true_labels", true_labels, x)
    with_hard = bool(return_soft_hard_loss) or weight_hard_loss != 0.0
    numbers = float(beta), float(temperature), ignore_index, float(soft_scale)
    call = (
        *(x, weight, bias, teacher_x, teacher_weight, teacher_bias, target, kind, *numbers),
        *(float(weight_soft_loss), float(weight_hard_loss), with_hard, gradient_scale(x.dtype, x.shape[0])),
    )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        outputs = _DistillationFunction.apply(*call)
    else:
        outputs = chunked_distillation(*call, False, False, False)
    return tuple(outputs[:3]) if return_soft_hard_loss else outputs[0]


def check_options(name, weight_hard_loss, weight_soft_loss, ignore_index, temperature, return_soft_hard_loss) -> None:
    """Raise unless the options that need no tensors are valid; the modules ask when they are made."""
    check_ignore_index(name, ignore_index)
    check_floats(name, weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss, temperature=temperature)
    check_flags(name, return_soft_hard_loss=return_soft_hard_loss)
    if not temperature > 0.0:
        check(False, name, f"temperature must be positive, got {temperature}")


class DistillationLoss(torch.nn.Module):
    """What the distillation modules share: Liger's arguments, handed to `function`.

    forward(student_input [tokens, hidden], student_weight [vocab, hidden], teacher_input [tokens, teacher's hidden],
    teacher_weight [vocab, teacher's hidden], true_labels [tokens], student_bias and teacher_bias [vocab] or None) -> the
    loss, or with return_soft_hard_loss (loss, soft loss, hard loss); all fp32
    """

    function: Any
    """The class whose `apply` computes the loss."""

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature = ignore_index, temperature
        self.compiled, self.chunk_size, self.return_soft_hard_loss = compiled, chunk_size, return_soft_hard_loss
        self._check()

    def _check(self) -> None:
        """Raise for options that the loss does not take."""
        name, weights = type(self).__name__, (self.weight_hard_loss, self.weight_soft_loss)
        check_floats(name, beta=self.beta)
        check_options(name, *weights, self.ignore_index, self.temperature, self.return_soft_hard_loss)

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        true_labels: torch.Tensor,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.function.apply(
            *(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias),
            weight_hard_loss=self.weight_hard_loss,
            weight_soft_loss=self.weight_soft_loss,
            beta=self.beta,
            ignore_index=self.ignore_index,
            temperature=self.temperature,
            return_soft_hard_loss=self.return_soft_hard_loss,
        )

    def extra_repr(self) -> str:
        return f"beta={self.beta}, temperature={self.temperature}, weight_hard_loss={self.weight_hard_loss}"
