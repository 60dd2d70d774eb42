"""What the distillation losses share: a student's head trained on a teacher's head and on true labels at once.

    loss = weight_soft * soft + weight_hard * hard

soft: the mean over counted tokens of a distance between the student's and the teacher's logits (JSD, cosine); hard: the
mean over the same tokens of the cross entropy with the true labels, at temperature 1. Both are zero where no token
counts. Every token's slope is its own matter: any chunk will do. The row kernel is `kernels/losses/distill_rows.py`,
which reads a row of both heads and writes the gradient of both terms over the student's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kernels.heads.chunk_plan import borrow_gradient_memory, plan_chunks
from ..kernels.heads.fused_linear_jsd import FWD
from ..kernels.heads.head_inputs import checked_head
from ..kernels.heads.linear_head import HeadGradients, fake_gradients, sweep
from ..kernels.losses.distill_rows import Distillation, DistillRows, distill_reference, distill_rows, distill_slopes
from ..kernels.losses.log_prob_rows import vocab_key
from ..runtime.operator import (
    Function,
    check,
    check_flags,
    check_floats,
    check_ignore_index,
    check_indices,
    define,
    first_order,
    is_interpreted,
)
from .checks import LossModule
from .log_prob_loss import check_in_range, gradient_scale, save_gradients, saved_gradients


class _Call(NamedTuple):
    """The operator's arguments after the tensors, in the order of its schema.

    soft_scale: factor of the soft loss; with_hard: whether the hard loss is asked for
    scale: factor of the gradients (`gradient_scale`); dx, dweight, dbias: those that are wanted
    """

    kind: int
    beta: float
    temperature: float
    ignore_index: int
    soft_scale: float
    soft_weight: float
    hard_weight: float
    with_hard: bool
    scale: float
    dx: bool = False
    dweight: bool = False
    dbias: bool = False

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        return self.dx, self.dweight, self.dbias

    @property
    def options(self) -> Distillation:
        """The row kernel's options; the weights are the gradient's."""
        weights = self.scale * self.soft_weight * self.soft_scale, self.scale * self.hard_weight
        return Distillation(self.kind, self.beta, 0.0, self.temperature, self.ignore_index, *weights)


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
def _run(x, weight, bias, teacher, teacher_weight, teacher_bias, target, *arguments):
    call = _Call(*arguments)
    check_in_range(target, weight.shape[0], call.ignore_index)
    target = target.contiguous()
    rows = _Rows(x, weight, bias, teacher_bias, target, call.options, call.with_hard)
    (n_rows, hidden), vocab, gradients = x.shape, weight.shape[0], any(call.wanted)
    sizes = n_rows, hidden, vocab, x.dtype.itemsize
    chunks = plan_chunks(*sizes, gradients=gradients, scale=2, heads=2, device=x.device)
    if call.dweight and teacher.dtype == weight.dtype:
        chunks = borrow_gradient_memory(chunks, hidden, vocab, x.device)
    grads = HeadGradients(x, weight, call.wanted, chunks, target if call.hard_weight else None, rows.plain)
    for start, logits, other in sweep(chunks, x, weight, grads, second=(teacher, teacher_weight)):
        rows.step(logits, other, start, gradients)
    soft = rows.soft.sum() * call.soft_scale
    hard = rows.hard.sum() if call.with_hard else torch.zeros_like(soft)
    loss = call.soft_weight * soft + call.hard_weight * hard
    return loss, soft, hard, *grads.results(bias)


def _fake(x, weight, bias, teacher, teacher_weight, teacher_bias, target, *arguments):
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = (x.new_empty((), dtype=wide) for _ in range(3))
    return *losses, *fake_gradients(x, weight, bias, _Call(*arguments).wanted)


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
    def forward(ctx, x, weight, bias, teacher, teacher_weight, teacher_bias, target, call):
        dx, dweight, dbias = ctx.needs_input_grad[:3]
        call = call._replace(dx=dx, dweight=dweight, dbias=dbias)
        outputs = chunked_distillation(x, weight, bias, teacher, teacher_weight, teacher_bias, target, *call)
        return save_gradients(ctx, outputs, x, call.scale)

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, *_not_differentiable):
        return saved_gradients(ctx, grad_loss)


class DistillationFunction:
    """A distillation loss as a function, with Liger's order of arguments. Subclasses state what their soft loss is."""

    name: str

    @classmethod
    def soft_loss(cls, beta: float, ignore_index: int) -> tuple[int, float, float]:
        """(kind of distance, its beta, factor of the soft loss); raises for a beta that makes no sense."""
        raise NotImplementedError

    @classmethod
    def apply(
        cls,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        true_labels: torch.Tensor,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        name = cls.name
        kind, beta, soft_scale = cls.soft_loss(beta, ignore_index)
        check_options(name, weight_hard_loss, weight_soft_loss, ignore_index, temperature, return_soft_hard_loss)
        names = "student_input", "student_weight", "student_bias"
        x, weight, bias = checked_head(name, student_input, student_weight, student_bias, names, "tokens")
        names = "teacher_input", "teacher_weight", "teacher_bias"
        with torch.no_grad():
            teacher = checked_head(name, teacher_input, teacher_weight, teacher_bias, names, "tokens")
        given, expected = (teacher[0].shape[0], teacher[1].shape[0]), (x.shape[0], weight.shape[0])
        if given != expected:
            expected = f"the student's {x.shape[0]} tokens and vocabulary of {weight.shape[0]}"
            check(False, name, f"the teacher must have {expected}, got {given[0]} and {given[1]}")
        device = teacher[0].device
        check(device == x.device, name, f"the teacher is on {device} but the student on {x.device}")
        check_indices(name, "true_labels", true_labels, x)
        call = _Call(
            kind=kind,
            beta=float(beta),
            temperature=float(temperature),
            ignore_index=ignore_index,
            soft_scale=float(soft_scale),
            soft_weight=float(weight_soft_loss),
            hard_weight=float(weight_hard_loss),
            with_hard=bool(return_soft_hard_loss) or weight_hard_loss != 0.0,
            scale=gradient_scale(x.dtype, x.shape[0]),
        )
        loss, soft, hard = _DistillationFunction.apply(x, weight, bias, *teacher, true_labels, call)
        return (loss, soft, hard) if return_soft_hard_loss else loss


def check_options(name, weight_hard_loss, weight_soft_loss, ignore_index, temperature, return_soft_hard_loss) -> None:
    """Raise unless the options that need no tensors are valid; the modules ask when they are made."""
    check_ignore_index(name, ignore_index)
    check_floats(name, weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss, temperature=temperature)
    check_flags(name, return_soft_hard_loss=return_soft_hard_loss)
    if not temperature > 0.0:
        check(False, name, f"temperature must be positive, got {temperature}")


@dataclass(eq=False, repr=False)
class DistillationLoss(LossModule):
    """What the distillation modules share: Liger's arguments, handed to `function`."""

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    compiled: bool = True
    chunk_size: int = 1024
    return_soft_hard_loss: bool = False

    def check(self) -> None:
        weights = self.weight_hard_loss, self.weight_soft_loss
        options = self.ignore_index, self.temperature, self.return_soft_hard_loss
        check_options(type(self).__name__, *weights, *options)
        self.function.soft_loss(self.beta, self.ignore_index)

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
        """Inputs: [tokens, hidden], of the teacher's own hidden size; weights: [vocab, hidden]; true_labels: [tokens];
        biases: [vocab]. Returns the loss, or with return_soft_hard_loss (loss, soft loss, hard loss); all fp32."""
        heads = student_input, student_weight, teacher_input, teacher_weight
        return self.function.apply(*heads, true_labels, student_bias, teacher_bias, **self.options())
