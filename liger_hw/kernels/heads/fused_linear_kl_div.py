"""KL divergence of given target probabilities from a student's linear head, without the logits of all rows.

    sum of t (log max(t, eps) - x), where t = target, x = log_softmax(student_input @ student_weight^T / temperature)
    reduction: "sum" is over rows that are not ignored; "batchmean" divides by their number, "mean" by that times vocab

The loss is zero if all rows are ignored. Autocast casts input and weight, not the target. Logits are rounded to the
input's dtype as a linear layer's are; everything after that, and the loss, is fp32.

Saved for backward: the gradients of input and weight, computed chunk by chunk in the forward. The target gets none. See
linear_head.py for the chunks, distill_rows.py for the rows.

Source: Kullback and Leibler, "On information and sufficiency", 1951
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ... import registry
from ...runtime.operator import check, check_floats, check_tensors
from ..losses.distill_rows import Distillation, distill_tunable
from ..losses.divergence_rows import KL, check_reduction
from ..losses.log_prob_rows import HEAD_DIMS
from ..losses.options_module import OptionsModule
from .fused_linear_jsd import WORKLOADS as WORKLOADS
from .fused_linear_jsd import sample_distillation
from .linear_distillation import linear_distillation, linear_distillation_operator, linear_distillation_reference


def fused_linear_kl_div_reference(
    student_input, student_weight, target, shift_labels=None, *settings, accum_dtype=None, **named
):
    """The specification in plain torch: a linear layer, then the divergence in fp32 (fp64 for fp64)."""
    options = _options("fused_linear_kl_div_reference", student_weight, *settings, **named)
    return linear_distillation_reference(student_input, student_weight, target, None, shift_labels, *options)


FWD = distill_tunable("fused_linear_kl_div", HEAD_DIMS)
OPERATOR = linear_distillation_operator("fused_linear_kl_div", FWD, prefer_large=True)


def liger_fused_linear_kl_div(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """KL(target || student) of a linear head against target probabilities, without the logits in memory.

    The student is softmax(student_input @ student_weight.T / temperature).

    student_input: [n_rows, hidden]; student_weight: [vocab, hidden]; target: [n_rows, vocab] probabilities; fp32, fp16
    or bf16 (fp64 on the CPU), or any under autocast. shift_labels: [n_rows] int64 or int32; rows at ignore_index are
    left out. reduction: batchmean (over rows), mean (over all elements) or sum; eps: the least target in the logarithm.
    accum_dtype=torch.float32 sums the weight's gradient in an fp32 buffer.
    Returns the loss [] in fp32. The target gets no gradient. Raises `ValueError` for arguments that do not fit.
    """
    op = "liger_fused_linear_kl_div"
    check_tensors(op, student_input=student_input, student_weight=student_weight, target=target)
    options = _options(op, student_weight, reduction, ignore_index, temperature, eps)
    heads = student_input, student_weight, target, None
    return linear_distillation(op, OPERATOR, *heads, shift_labels, *options, accum_dtype)


_REDUCTIONS = ("batchmean", "mean", "sum")


def _options(
    op: str,
    weight: torch.Tensor,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
) -> tuple[Distillation, int]:
    """(options, per_row) of a `DistillationCall`."""
    check_reduction(op, reduction, _REDUCTIONS)
    check_floats(op, eps=eps)
    if not eps >= 0.0:
        check(False, op, f"eps must not be negative, got {eps}")
    per_row = {"batchmean": 1, "sum": 0}.get(reduction, weight.shape[0] if weight.dim() else 1)
    return Distillation(KL, 0.5, float(eps), temperature, ignore_index), per_row


@dataclass(eq=False, repr=False)
class LigerFusedLinearKLDivLoss(OptionsModule):
    """`liger_fused_linear_kl_div` as a module, with the same arguments."""

    reduction: str = "batchmean"
    ignore_index: int = -100
    temperature: float = 1.0
    eps: float = 1e-10
    accum_dtype: torch.dtype | None = None

    def check(self) -> None:
        check_reduction("LigerFusedLinearKLDivLoss", self.reduction, _REDUCTIONS)

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        target: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """student_input: [n_rows, hidden]; student_weight: [vocab, hidden]; target: [n_rows, vocab]."""
        return liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels, **self.options())


sample = partial(sample_distillation, given_target=True)
OP = registry.register_file(
    __name__,
    tunables=(FWD,),
    options=(
        {},
        {"reduction": "mean", "labelled": True, "temperature": 2.0},
        {"reduction": "sum", "eps": 1e-2, "accum_dtype": torch.float32},
    ),
)
