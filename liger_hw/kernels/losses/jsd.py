"""Generalised Jensen-Shannon divergence of a student's from a teacher's log-probabilities.

With student log-probabilities x, teacher log-probabilities y, and M = beta e^y + (1 - beta) e^x:
    0 < beta < 1    loss of a row = sum of beta e^y (y - log M) + (1 - beta) e^x (x - log M)
    beta = 0        loss of a row = sum of e^y (y - x), the forward KL(teacher || student)
    beta = 1        loss of a row = sum of e^x (x - y), the reverse KL(student || teacher)
The loss is the mean over the counted rows, zero if no row counts. Everything is computed in fp32, from differences of
log-probabilities so that small probabilities are not lost, by the kernel of divergence_rows.py.
Saved for backward: the gradient, which the forward writes.

Source: Agarwal et al., "On-Policy Distillation of Language Models", https://arxiv.org/abs/2306.13649
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ... import registry
from ...runtime.operator import check, check_floats, check_ignore_index
from . import divergence_rows as rows
from .options_module import OptionsModule


def jsd_reference(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    options = jsd_options("jsd_reference", beta, ignore_index)
    return rows.divergence_reference(input, target, shift_labels, options).to(input.dtype)


FWD, OPERATORS = rows.divergence_op("jsd")
WORKLOADS = rows.WORKLOADS


def liger_jsd(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Generalised JSD of student log-probabilities `input` from teacher log-probabilities `target`.

    input, target: [n_rows, n_cols] fp32, fp16 or bf16 (fp64 too on the CPU); shift_labels: [n_rows] int64 or int32,
    rows at ignore_index do not count; beta: in [0, 1]. The target gets no gradient.
    Returns the loss [] in input's dtype, in fp32 under autocast.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit.
    """
    options = jsd_options("liger_jsd", beta, ignore_index)
    return rows.divergence("liger_jsd", OPERATORS, input, target, shift_labels, options, promotes=False)


def jsd_options(op: str, beta: float, ignore_index: int) -> rows.Divergence:
    check_floats(op, beta=beta)
    check_ignore_index(op, ignore_index)
    if not 0.0 <= beta <= 1.0:
        check(False, op, f"beta must be between 0 and 1, got {beta}")
    kind = rows.KL_LOG if beta == 0.0 else rows.RKL if beta == 1.0 else rows.JSD
    return rows.Divergence(kind, rows.BATCHMEAN, float(beta), 0.0, ignore_index)


@dataclass(eq=False, repr=False)
class LigerJSD(OptionsModule):
    """`liger_jsd` as a module."""

    beta: float = 0.5
    ignore_index: int = -100

    def check(self) -> None:
        jsd_options("LigerJSD", **self.options())

    def forward(
        self, log_q: torch.Tensor, log_p: torch.Tensor, shift_labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """log_q, log_p: [n_rows, n_cols] log-probabilities of student and teacher; shift_labels: [n_rows] or None."""
        return liger_jsd(log_q, log_p, shift_labels, **self.options())


sample = partial(rows.sample_divergence, take=torch.log_softmax)
OP = registry.register_file(
    __name__, tunables=(FWD,), options=({}, {"beta": 0.0}, {"beta": 1.0}, {"beta": 0.1, "labelled": True})
)
