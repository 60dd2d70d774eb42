"""Cross entropy of a student and its total variation distance from a teacher, per row, from both logits in one launch.

    ce = -log softmax(student)[target]        tvd = sum |softmax(student) - softmax(teacher)| / 2
Rows whose target is ignore_index have losses and gradient of exactly zero.
Shapes: student_logits, teacher_logits [n_rows, n_cols], target [n_rows] int64 or int32 -> ce [n_rows], tvd [n_rows].
Dtypes: logits in fp32, fp16 or bf16, everything computed in fp32, and so are the results, which are differentiable one
by one. The teacher has no gradient.
Saved for backward: the logits and six fp32 numbers a row, so that backward reads each of them once. See
distill_rows.py for the kernel.

Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation",
https://arxiv.org/abs/2307.15190
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ... import registry
from ...registry import Op
from ...runtime.operator import (
    Function,
    check,
    check_ignore_index,
    check_tensors,
    define,
    first_order,
    row_major,
    to_flatten,
)
from .cross_entropy import check_arguments, sample_logits
from .cross_entropy_rows import assert_targets
from .distill_rows import (
    SAVED,
    Distillation,
    DistillRows,
    distill_reference,
    distill_rows,
    distill_slopes,
    distill_tunable,
)
from .divergence_rows import TVD, WORKLOADS, label_share
from .log_prob_rows import columns_key
from .options_module import OptionsModule

_NAME = "liger_fused_ce_tvd"

# -- reference -------------------------------------------------------------------------------------------------------


def fused_ce_tvd_reference(student_logits, teacher_logits, target, ignore_index=-100):
    """The specification in plain torch; computes in fp32, or in fp64 for fp64."""
    tvd, ce = distill_reference(student_logits, teacher_logits.detach(), target, _options(ignore_index))
    return ce, tvd


def _options(ignore_index: int) -> Distillation:
    return Distillation(TVD, ignore_index=ignore_index, hard_weight=1.0)


FWD = distill_tunable("fused_ce_tvd")

# -- launchers -------------------------------------------------------------------------------------------------------


def _launch(student, teacher, target, ignore_index, out, **backward):
    plan = FWD.plan(student.device, columns_key(*student.shape, student.dtype.itemsize))
    share = label_share(None, 0, 0, ignore_index, student.device)
    distill_rows(plan, student, teacher, target, share, _options(ignore_index), out, owned=False, **backward)


def _fwd(student, teacher, target, ignore_index):
    student, teacher, target = row_major(student), row_major(teacher), target.contiguous()
    n_rows, device = student.shape[0], student.device
    assert_targets(_NAME, target, student.shape[1], ignore_index)
    ce, tvd = (torch.empty(n_rows, dtype=torch.float32, device=device) for _ in range(2))
    saved = torch.empty(n_rows, SAVED, dtype=torch.float32, device=device)
    _launch(student, teacher, target, ignore_index, DistillRows(tvd, ce, saved))
    return ce, tvd, saved


def _bwd(student, teacher, target, saved, dce, dtvd, ignore_index):
    dx = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    student, teacher, target = row_major(student), row_major(teacher), target.contiguous()
    grads = {"hard_grads": dce, "soft_grads": dtvd}
    _launch(student, teacher, target, ignore_index, DistillRows(saved=saved), dlogits=dx, from_saved=True, **grads)
    return dx


# -- the operators ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _fwd_reference(student, teacher, target, ignore_index):
    assert_targets(_NAME, target, student.shape[1], ignore_index, plain=True)
    ce, tvd = fused_ce_tvd_reference(student, teacher, target, ignore_index)
    return ce, tvd, ce.new_zeros(ce.shape[0], SAVED)


@torch.no_grad()
def _bwd_reference(student, teacher, target, saved, dce, dtvd, ignore_index):
    soft, hard = distill_slopes(student, teacher, target, _options(ignore_index))
    dx = (hard * dce[:, None] + soft * dtvd[:, None]).masked_fill((target == ignore_index)[:, None], 0.0)
    return dx.to(student.dtype).contiguous()


_INPUTS = "Tensor student, Tensor teacher, Tensor target"
fused_ce_tvd_fwd = define(
    f"fused_ce_tvd_fwd({_INPUTS}, int ignore_index) -> (Tensor, Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
)
fused_ce_tvd_bwd = define(
    f"fused_ce_tvd_bwd({_INPUTS}, Tensor saved, Tensor dce, Tensor dtvd, int ignore_index) -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=("student",),
)


class FusedCETVDFunction(Function):
    """Autograd for both losses: saves the logits and six numbers a row."""

    @staticmethod
    def forward(ctx, student_logits, teacher_logits, target, ignore_index):
        ce, tvd, saved = fused_ce_tvd_fwd(student_logits, teacher_logits, target, ignore_index)
        ctx.save_for_backward(student_logits, teacher_logits, target, saved)
        ctx.ignore_index = ignore_index
        return ce, tvd

    @staticmethod
    @first_order
    def backward(ctx, dce, dtvd):
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return fused_ce_tvd_bwd(*ctx.saved_tensors, dce, dtvd, ctx.ignore_index), None, None, None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_fused_ce_tvd(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ce, tvd) of every row: cross entropy of the student, total variation distance from the teacher; see above.

    student_logits, teacher_logits: [n_rows, n_cols] fp32, fp16 or bf16 (fp64 too on the CPU), never overwritten;
    target: [n_rows] int64 or int32, in 0..n_cols-1 or ignore_index. Returns two fp32 tensors [n_rows].
    The teacher gets no gradient.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; for targets see `liger_cross_entropy`.
    """
    check_tensors(_NAME, student_logits=student_logits, teacher_logits=teacher_logits)
    if student_logits.dim() != 2 or not student_logits.shape[1] or student_logits.shape != teacher_logits.shape:
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        hint = to_flatten(student_logits=student_logits, teacher_logits=teacher_logits)
        check(
            False,
            _NAME,
            f"student and teacher logits must be 2D and have the same shape [n_rows, n_cols], got {shapes}{hint}",
        )
    if teacher_logits.requires_grad:
        teacher_logits = teacher_logits.detach()
    check_arguments(_NAME, student_logits, target, student_logits.shape[1])
    check_ignore_index(_NAME, ignore_index)
    if torch.is_grad_enabled() and student_logits.requires_grad:
        return FusedCETVDFunction.apply(student_logits, teacher_logits, target, ignore_index)
    return fused_ce_tvd_fwd(student_logits, teacher_logits, target, ignore_index)[:2]


@dataclass(eq=False, repr=False)
class LigerFusedCETVDLoss(OptionsModule):
    """`liger_fused_ce_tvd` as a module: forward(student_logits, teacher_logits [n_rows, n_cols], target [n_rows])."""

    ignore_index: int = -100

    def check(self) -> None:
        check_ignore_index("LigerFusedCETVDLoss", self.ignore_index)

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """student_logits, teacher_logits: [n_rows, n_cols]; target: [n_rows]. Returns (cross entropy, distance)."""
        return liger_fused_ce_tvd(student_logits, teacher_logits, target, self.ignore_index)


OP = registry.register(
    Op(
        name="fused_ce_tvd",
        function=liger_fused_ce_tvd,
        reference=fused_ce_tvd_reference,
        tunables=(FWD,),
        workloads=WORKLOADS,
        sample=partial(sample_logits, passes=5, teacher=True),
        options=({}, {"ignore_index": 3, "ignored": 0.0}),
    )
)
