"""Per row, the cross entropy of a student and its total variation distance from a teacher, in one launch from logits.

    ce = -log softmax(student)[target]        tvd = sum |softmax(student) - softmax(teacher)| / 2
Rows whose target is ignore_index have losses and gradient of exactly zero. Everything is computed in fp32, by the
functions of distill_rows.py. Saved for backward: the logits, which it reads once, and five fp32 numbers per row.

Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation",
https://arxiv.org/abs/2307.15190
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ... import registry
from ...runtime.operator import OperatorFunction, check_ignore_index, define, launch, row_major
from ...runtime.triton_import import tl, triton
from ..rows.row import body_start, body_width, edge_columns, row_head, row_vector
from .cross_entropy import sample_logits
from .cross_entropy_rows import assert_targets, check_arguments
from .distill_rows import (
    Distillation,
    compare_pair,
    distill_reference,
    distill_tunable,
    gradient_tile,
    logits_tile,
    loss_of_lanes,
    scan_pair,
)
from .divergence_rows import TVD, check_pair
from .divergence_rows import WORKLOADS as WORKLOADS
from .options_module import OptionsModule
from .softmax_rows import write_zeros

_NAME = "liger_fused_ce_tvd"


def fused_ce_tvd_reference(student_logits, teacher_logits, target, ignore_index=-100):
    tvd, ce = distill_reference(student_logits, teacher_logits.detach(), target, _options(ignore_index))
    return ce, tvd


def _options(ignore_index: int) -> Distillation:
    return Distillation(TVD, ignore_index=ignore_index, hard_weight=1.0)


@triton.jit(do_not_specialize=["ignore_index"])
def _ce_tvd_fwd_kernel(
    S_ptr,
    T_ptr,
    LABEL_ptr,
    CE_ptr,
    TVD_ptr,
    S_TOP_ptr,
    S_LOG2_ptr,
    T_TOP_ptr,
    T_LOG2_ptr,
    DOT_ptr,
    S_row_stride,
    T_row_stride,
    n_cols,
    ignore_index,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row, read twice. TOP: largest logit; LOG2: log2(sum(e^(x - TOP))); DOT: see `loss_of_lanes`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    KIND: tl.constexpr = 4  # TVD
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABEL_ptr + row)
    if label == ignore_index:
        tl.store(CE_ptr + row, 0.0)
        tl.store(TVD_ptr + row, 0.0)
        tl.store(S_TOP_ptr + row, 0.0)
        tl.store(S_LOG2_ptr + row, 0.0)
        tl.store(T_TOP_ptr + row, 0.0)
        tl.store(T_LOG2_ptr + row, 0.0)
        tl.store(DOT_ptr + row, 0.0)
        return
    head = row_head(row * S_row_stride, VECTOR)
    S_ptr += body_start(row * S_row_stride, head, VECTOR)
    T_ptr += body_start(row * T_row_stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    n_right = n_cols - head
    n_full = n_body // BLOCK_SIZE
    tiles = tl.cdiv(n_body, BLOCK_SIZE)
    if VECTOR > 1:
        tiles = tl.cdiv(n_body + 2 * VECTOR, BLOCK_SIZE)
    inside = (label >= 0) & (label < n_cols)
    s_label = tl.load(S_ptr + (tl.where(inside, label, 0) - head)).to(tl.float32)
    s_label = tl.where(inside, s_label, float("nan"))

    top_s, sum_s, top_t, sum_t, _, moment = scan_pair(
        S_ptr, T_ptr, None, None, head, n_body, n_right, n_body, n_body, n_full, tiles, LOG2E, 0.0,
        KIND, 1, VECTOR, BLOCK_SIZE, STAGES, False,
    )  # fmt: skip
    m_s, l_s, m_t, l_t, _, _ = loss_of_lanes(top_s, sum_s, top_t, sum_t, moment, LOG2E, 1.0, KIND)
    tl.store(CE_ptr + row, m_s - s_label + 0.6931471805599453 * l_s)
    tl.store(S_TOP_ptr + row, m_s)
    tl.store(S_LOG2_ptr + row, l_s)
    tl.store(T_TOP_ptr + row, m_t)
    tl.store(T_LOG2_ptr + row, l_t)
    distance, dot = compare_pair(
        S_ptr, T_ptr, None, None, head, n_body, n_right, n_body, n_body, n_full, tiles, m_s, l_s, m_t, l_t, LOG2E, 0.0,
        KIND, VECTOR, BLOCK_SIZE, STAGES, False,
    )  # fmt: skip
    tl.store(TVD_ptr + row, distance)
    tl.store(DOT_ptr + row, dot)


@triton.jit(do_not_specialize=["ignore_index"])
def _ce_tvd_bwd_kernel(
    S_ptr,
    T_ptr,
    LABEL_ptr,
    S_TOP_ptr,
    S_LOG2_ptr,
    T_TOP_ptr,
    T_LOG2_ptr,
    DOT_ptr,
    GO_CE_ptr,
    GO_TVD_ptr,
    DS_ptr,
    S_row_stride,
    T_row_stride,
    GO_CE_stride,
    GO_TVD_stride,
    n_cols,
    ignore_index,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row, read once, from the last tile to the first. DS is contiguous."""
    LOG2E: tl.constexpr = 1.4426950408889634
    KIND: tl.constexpr = 4  # TVD
    row = tl.program_id(0).to(tl.int64)
    head = row_head(row * S_row_stride, VECTOR)
    S_ptr += body_start(row * S_row_stride, head, VECTOR)
    T_ptr += body_start(row * T_row_stride, head, VECTOR)
    DS_ptr += body_start(row * n_cols, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    n_right = n_cols - head
    n_full = n_body // BLOCK_SIZE
    tiles = tl.cdiv(n_body, BLOCK_SIZE)
    block = tl.arange(0, BLOCK_SIZE)
    label = tl.load(LABEL_ptr + row)
    if label == ignore_index:
        write_zeros(
            DS_ptr, block, n_full * BLOCK_SIZE + block, head, n_body, n_full, n_cols, n_body, BLOCK_SIZE, VECTOR
        )
        return
    m_s = tl.load(S_TOP_ptr + row)
    l_s = tl.load(S_LOG2_ptr + row)
    m_t = tl.load(T_TOP_ptr + row)
    l_t = tl.load(T_LOG2_ptr + row)
    soft_slope = tl.load(GO_TVD_ptr + row * GO_TVD_stride).to(tl.float32)
    hard_slope = tl.load(GO_CE_ptr + row * GO_CE_stride).to(tl.float32)
    q_coef = hard_slope - soft_slope * tl.load(DOT_ptr + row)
    soft_slope *= 0.5
    label_col = label.to(tl.int32) - head
    for PART in tl.static_range(2):
        for done in tl.range(0, n_full if PART else tiles - n_full, num_stages=STAGES):
            tile = (n_full if PART else tiles) - 1 - done
            cols = tile * BLOCK_SIZE + block
            s = logits_tile(S_ptr, None, cols, 0, n_body, n_body, float("-inf"), PART == 0, 1)
            t = logits_tile(T_ptr, None, cols, 0, n_body, n_body, float("-inf"), PART == 0, 1)
            ds = gradient_tile(s, t, m_s, l_s, m_t, l_t, 0.0, LOG2E, soft_slope, 0.0, q_coef, 0.0, KIND, 0, False)
            ds = tl.where(block == label_col - tile * BLOCK_SIZE, ds - hard_slope, ds)
            tl.store(DS_ptr + cols, ds.to(DS_ptr.dtype.element_ty), mask=cols < n_body)
    if VECTOR > 1:
        cols = edge_columns(head, n_body, n_cols, VECTOR)
        s = logits_tile(S_ptr, None, cols, 0, n_right, n_right, float("-inf"), True, 1)
        t = logits_tile(T_ptr, None, cols, 0, n_right, n_right, float("-inf"), True, 1)
        ds = gradient_tile(s, t, m_s, l_s, m_t, l_t, 0.0, LOG2E, soft_slope, 0.0, q_coef, 0.0, KIND, 0, False)
        ds = tl.where(cols == label_col, ds - hard_slope, ds)
        tl.store(DS_ptr + cols, ds.to(DS_ptr.dtype.element_ty), mask=cols < n_right)


FWD = distill_tunable("fused_ce_tvd", kernels=(_ce_tvd_fwd_kernel, _ce_tvd_bwd_kernel))
_N_SAVED = 5  # fp32 numbers per row that backward needs


def _fwd(student, teacher, target, ignore_index):
    student, teacher, target = row_major(student), row_major(teacher), target.contiguous()
    (n_rows, n_cols), device = student.shape, student.device
    assert_targets(_NAME, target, n_cols, ignore_index)
    ce, tvd = (torch.empty(n_rows, dtype=torch.float32, device=device) for _ in range(2))
    saved = torch.empty(_N_SAVED, n_rows, dtype=torch.float32, device=device)
    if n_rows:
        plan = FWD.plan(device, registry.columns_key(n_rows, n_cols, student.dtype.itemsize))
        numbers = student.stride(0), teacher.stride(0), n_cols, ignore_index
        args = student, teacher, target, ce, tvd, *saved, *numbers
        launch(plan, _ce_tvd_fwd_kernel, (n_rows,), args, (row_vector(student, teacher),))
    return ce, tvd, saved


def _bwd(dce, dtvd, student, teacher, target, saved, ignore_index):
    (n_rows, n_cols), device = student.shape, student.device
    dx = torch.empty((n_rows, n_cols), dtype=student.dtype, device=device)
    student, teacher, target = row_major(student), row_major(teacher), target.contiguous()
    if n_rows:
        plan = FWD.plan(device, registry.columns_key(n_rows, n_cols, student.dtype.itemsize))
        numbers = student.stride(0), teacher.stride(0), dce.stride(0), dtvd.stride(0), n_cols, ignore_index
        args = student, teacher, target, *saved, dce, dtvd, dx, *numbers
        launch(plan, _ce_tvd_bwd_kernel, (n_rows,), args, (row_vector(student, teacher, dx),))
    return dx


def _fwd_reference(student, teacher, target, ignore_index):
    assert_targets(_NAME, target, student.shape[1], ignore_index, plain=True)
    ce, tvd = fused_ce_tvd_reference(student, teacher, target, ignore_index)
    return ce, tvd, ce.new_zeros(_N_SAVED, ce.shape[0])


_INPUTS = "Tensor student, Tensor teacher, Tensor target"
_SHAPES = "student, teacher [n_rows, n_cols]; int target [n_rows]"
fused_ce_tvd_fwd = define(
    f"fused_ce_tvd_fwd({_INPUTS}, int ignore_index) -> (Tensor ce, Tensor tvd, Tensor saved)",
    shapes=_SHAPES,
    launcher=_fwd,
    reference=_fwd_reference,
)
fused_ce_tvd_bwd = define(
    f"fused_ce_tvd_bwd(Tensor dce, Tensor dtvd, {_INPUTS}, Tensor saved, int ignore_index) -> Tensor dstudent",
    shapes=f"{_SHAPES}; saved [{_N_SAVED}, n_rows]; dce, dtvd [n_rows]",
    launcher=_bwd,
    derivative_of=fused_ce_tvd_fwd,
)


class FusedCETVDFunction(OperatorFunction):
    fwd, bwd = fused_ce_tvd_fwd, fused_ce_tvd_bwd


def liger_fused_ce_tvd(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ce, tvd) of every row: cross entropy of the student, total variation distance from the teacher.

    student_logits, teacher_logits: [n_rows, n_cols] fp32, fp16 or bf16 (fp64 too on the CPU), never overwritten;
    target: [n_rows] int64 or int32, in 0..n_cols-1 or ignore_index. The teacher gets no gradient. The results are fp32.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; for targets see `liger_cross_entropy`.
    """
    check_pair(_NAME, student_logits=student_logits, teacher_logits=teacher_logits)
    if teacher_logits.requires_grad:
        teacher_logits = teacher_logits.detach()
    check_arguments(_NAME, student_logits, target, student_logits.shape[1])
    check_ignore_index(_NAME, ignore_index)
    return FusedCETVDFunction.apply(student_logits, teacher_logits, target, ignore_index)


@dataclass(eq=False, repr=False)
class LigerFusedCETVDLoss(OptionsModule):
    """`liger_fused_ce_tvd` as a module."""

    ignore_index: int = -100

    def check(self) -> None:
        check_ignore_index("LigerFusedCETVDLoss", self.ignore_index)

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """student_logits, teacher_logits: [n_rows, n_cols]; target: [n_rows]. Returns (ce, tvd)."""
        return liger_fused_ce_tvd(student_logits, teacher_logits, target, self.ignore_index)


sample = partial(sample_logits, passes=5, teacher=True)
OP = registry.register_file(__name__, tunables=(FWD,), options=({}, {"ignore_index": 3, "ignored": 0.0}))
