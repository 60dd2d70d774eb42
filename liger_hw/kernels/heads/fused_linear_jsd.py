"""Generalised Jensen-Shannon divergence of a student's linear head from a teacher's, without the logits of all rows.

    loss = jsd(x, y) of jsd.py, x = log_softmax(student_input @ student_weight^T / temperature), y: the teacher's

The loss is the mean over rows that are not ignored, or zero if all are. Logits, divergence and loss are fp32: rounding
the logits to 16 bits, as other heads do, would change the gradient much, which is the difference of two distributions
that may be close. The logits' gradient is rounded to the student's dtype, as in other heads.

Saved for backward: the gradients of the student's input and weight, computed chunk by chunk in the forward. The teacher
gets none. See `sweep_in_fp32` of linear_head.py for the chunks, distill_rows.py for the rows.

Source: Agarwal et al., "On-Policy Distillation of Language Models", https://arxiv.org/abs/2306.13649
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import registry
from ...registry import Sample, columns_key, normal
from ..losses.distill_rows import Distillation, distill_tunable
from ..losses.divergence_rows import sample_labels
from ..losses.jsd import jsd_options
from ..losses.log_prob_rows import HEAD_DIMS
from ..losses.options_module import OptionsModule
from .head_reference import random_head
from .linear_distillation import linear_distillation, linear_distillation_operator, linear_distillation_reference


def fused_linear_jsd_reference(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels=None,
    *settings,
    accum_dtype=None,
    **named,
):
    """The specification in plain torch: two linear layers and the divergence, in fp32 (fp64 for fp64)."""
    options = _options("fused_linear_jsd_reference", *settings, **named)
    heads = student_input, student_weight, teacher_input, teacher_weight
    return linear_distillation_reference(*heads, shift_labels, options, 1)


def _fp32_columns_key(*sizes: int) -> registry.Key:
    """`columns_key` of fp32 logits."""
    return columns_key(*sizes[:-1], torch.float32.itemsize)


FWD = distill_tunable("fused_linear_jsd", HEAD_DIMS, _fp32_columns_key)
OPERATOR = linear_distillation_operator("fused_linear_jsd", FWD, prefer_large=True, fp32_logits=True)


def liger_fused_linear_jsd(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence of two linear heads, without their logits in memory.

    beta KL(p || m) + (1 - beta) KL(q || m), where p (teacher) and q (student) are softmax(input @ weight.T /
    temperature), and m = beta p + (1 - beta) q. Logits are computed and kept in fp32.

    Inputs are [n_rows, hidden], weights [vocab, hidden]; student and teacher may differ in hidden. fp32, fp16 or bf16
    (fp64 on the CPU), or any under autocast. shift_labels: [n_rows] int64 or int32; rows at ignore_index are left out.
    jsd_beta: 0 is KL(teacher || student), 1 is KL(student || teacher). accum_dtype=torch.float32 sums the weight's
    gradient in an fp32 buffer. Returns the loss [] in fp32. The teacher gets no gradient.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit.
    """
    options = _options("liger_fused_linear_jsd", jsd_beta, ignore_index, temperature)
    heads = student_input, student_weight, teacher_input, teacher_weight
    return linear_distillation("liger_fused_linear_jsd", OPERATOR, *heads, shift_labels, options, 1, accum_dtype)


def _options(op: str, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0) -> Distillation:
    kind = jsd_options(op, jsd_beta, ignore_index).kind
    return Distillation(kind, float(jsd_beta), 0.0, temperature, ignore_index)


@dataclass(eq=False, repr=False)
class LigerFusedLinearJSD(OptionsModule):
    """`liger_fused_linear_jsd` as a module, with the same arguments."""

    jsd_beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    accum_dtype: torch.dtype | None = None

    def check(self) -> None:
        _options("LigerFusedLinearJSD", self.jsd_beta, self.ignore_index, self.temperature)

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Inputs [n_rows, hidden] and weights [vocab, hidden] of student and teacher. Returns the loss [] in fp32."""
        heads = student_input, student_weight, teacher_input, teacher_weight
        return liger_fused_linear_jsd(*heads, shift_labels, **self.options())


WORKLOADS = {"llama3_8b": (4096, 4096, 128256), "mistral_7b": (8192, 4096, 32768), "qwen3_8b": (4096, 4096, 151936)}
"""Problem sizes (n_rows, hidden, vocab) of real models; the teacher has the student's hidden size."""


def sample_distillation(
    sizes, dtype, device, generator, *, given_target=False, labelled=False, frozen=False, **options: Any
) -> Sample:
    """A `Sample` of a student's and a teacher's head; given_target: probabilities replace the teacher.

    labelled: with labels, some of them -100; frozen: the student's weight has no gradient
    """
    n_rows, hidden, vocab = sizes
    labels = (sample_labels(n_rows, min(3, vocab), device, generator),) if labelled else ()
    x, weight = random_head(sizes, dtype, device, generator)
    if given_target:
        scores = normal(torch.float32, device, generator)(n_rows, vocab)
        teacher = (torch.softmax(scores.detach(), -1).to(dtype),)
        moved = 2 * n_rows * hidden + 3 * vocab * hidden + n_rows * vocab
    else:
        teacher = (t.detach() for t in random_head(sizes, dtype, device, generator))
        moved = 3 * n_rows * hidden + 4 * vocab * hidden
    return Sample(
        args=(x, weight.requires_grad_(not frozen), *teacher, *labels),
        kwargs=options,
        reduction=n_rows * vocab,
        grad_reduction=max(n_rows, hidden, vocab),
        moved=moved * dtype.itemsize,
    )


sample = sample_distillation
OP = registry.register_file(
    __name__,
    tunables=(FWD,),
    options=(
        {},
        {"jsd_beta": 0.0, "temperature": 2.0},
        {"jsd_beta": 1.0, "labelled": True, "accum_dtype": torch.float32},
        {"jsd_beta": 0.1, "labelled": True, "temperature": 0.5, "frozen": True},
    ),
)
