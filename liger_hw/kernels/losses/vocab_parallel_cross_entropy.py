"""Cross entropy of logits whose vocabulary is split over the ranks of a process group, without gathering them.

For a row of logits s over the whole vocabulary of V, target y and smoothing e, with lse = log(sum(exp(s))):
    pytorch   loss = (1 - e) (lse - s[y]) + e (lse - mean(s))
    megatron  the same with e V / (V - 1) in place of e

Mode "global" takes the mean over the whole vocabulary. Mode "partition", as in Megatron, takes the mean and V over the
rank's part only, so that the losses of the ranks differ.
Each rank has a part of the columns, in the order of the ranks; parts may be unequal (vocab_parts.py).
Rows whose target is ignore_index have no loss and a gradient of exactly zero. Everything is computed in fp32.
Saved for backward: the logits and one log-sum-exp per row. The forward exchanges the widths of the parts and two
numbers per row (three for smoothing in mode "global"); backward exchanges nothing.

Source: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ... import registry
from ...runtime.operator import (
    Function,
    check,
    check_floats,
    check_ignore_index,
    check_indices,
    check_tensors,
    define,
    first_order,
    no_view,
    row_major,
)
from .cross_entropy import sample_logits
from .cross_entropy_rows import absent
from .log_prob_rows import (
    LogProbOptions,
    LogProbs,
    log_prob_buffers,
    log_prob_tunables,
    row_log_prob_gradients,
    row_log_probs,
)
from .options_module import OptionsModule
from .vocab_parts import IGNORED, checked_group, gather_rows, local_targets, vocab_part

_NAME = "liger_vocab_parallel_cross_entropy"
FORMULAS, MODES = ("pytorch", "megatron"), ("global", "partition")


def vocab_parallel_cross_entropy_reference(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    label_smoothing_formula: str = "pytorch",
    label_smoothing_mode: str = "global",
) -> torch.Tensor:
    """The specification for one rank with the whole vocabulary, in fp32 (fp64 for fp64)."""
    s = vocab_parallel_logits.to(torch.promote_types(vocab_parallel_logits.dtype, torch.float32))
    smoothing = _smoothing(label_smoothing, label_smoothing_formula, s.shape[-1])
    ignored = target == ignore_index
    outside = (target < 0) | (target >= s.shape[-1])
    s_y = s.gather(-1, target.long().masked_fill(outside, 0)[..., None])[..., 0].masked_fill(outside, 0.0)
    lse = torch.logsumexp(s, -1)
    return (lse - (1 - smoothing) * s_y - smoothing * s.mean(-1)).masked_fill(ignored, 0.0)


def _smoothing(smoothing: float, formula: str, width: Any) -> Any:
    """e of the formula, for V = width. V - 1 is clamped to 1: with one column any e gives the same loss."""
    if formula != "megatron":
        return smoothing
    return smoothing * width / ((width - 1).clamp_min(1) if isinstance(width, torch.Tensor) else max(width - 1, 1))


_OPTIONS = LogProbOptions(IGNORED)
FWD, BWD = log_prob_tunables("vocab_parallel_cross_entropy")


@torch.no_grad()
def _fwd(logits, column, logit_sum, plain=False):
    out = log_prob_buffers(logits.shape[0], logits, logit_sum=logit_sum)
    rows = row_major(logits), column.contiguous(), out, _OPTIONS
    row_log_probs(*rows, uses_padding=False, tunable=FWD, plain=plain)
    return out.lse, out.lse + out.logp, absent(out.lse) if out.logit_sum is None else out.logit_sum


@torch.no_grad()
def _bwd(logits, column, lse, target_coef, softmax_coef, smoothing_term, plain=False):
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rows = row_major(logits), column.contiguous(), LogProbs(lse, lse), target_coef, _OPTIONS
    coefs = {"softmax_coef": softmax_coef, "smoothing_term": smoothing_term}
    row_log_prob_gradients(*rows, **coefs, dlogits=dx, uses_padding=False, tunable=BWD, plain=plain)
    return dx


vocab_parallel_rows = define(
    "vocab_parallel_cross_entropy_fwd(Tensor logits, Tensor column, bool logit_sum) -> (Tensor, Tensor, Tensor)",
    shapes="logits [n_rows, n_cols]; int column [n_rows]",
    launcher=_fwd,
    reference=partial(_fwd, plain=True),
)
vocab_parallel_gradient = define(
    "vocab_parallel_cross_entropy_bwd(Tensor logits, Tensor column, Tensor lse, Tensor target_coef, "
    "Tensor softmax_coef, Tensor? smoothing_term) -> Tensor",
    shapes="logits [n_rows, n_cols]; int column [n_rows]; lse, target_coef, softmax_coef, smoothing_term [n_rows]",
    launcher=_bwd,
    reference=partial(_bwd, plain=True),
    fake=("logits",),
)


class VocabParallelCEFunction(Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, formula, mode):
        logits, y = vocab_parallel_logits.flatten(0, -2), target.flatten()
        n_cols, partition = logits.shape[1], mode == "partition"
        part = vocab_part(n_cols, tp_group, logits.device)
        local = local_targets(_NAME, y, n_cols, part, ignore_index, masked=True)
        lse, s_y, total = vocab_parallel_rows(logits, local.column, label_smoothing != 0.0)
        s_y = torch.where(local.is_local, s_y, 0.0)
        sums = [s_y] if partition or not label_smoothing else [s_y, total]
        gathered = gather_rows([lse, *sums], part)
        lse, (s_y, *summed) = torch.logsumexp(gathered[0], 0), gathered[1:].sum(1)
        smoothing, per_class = 0.0, None
        if label_smoothing:
            width = torch.full_like(lse[:1], n_cols) if partition else part.vocab.to(lse.dtype)
            smoothing = _smoothing(float(label_smoothing), formula, width)
            per_class = smoothing / width
        loss = lse - (1.0 - smoothing) * s_y
        if label_smoothing:
            loss = loss - per_class * (total if partition else summed[0])
        loss = loss.masked_fill(~local.counted, 0.0)
        target_coef = local.is_local.to(lse.dtype) * (smoothing - 1.0)  # zero where another rank has the target
        ctx.save_for_backward(
            vocab_parallel_logits, local.column, lse, target_coef, *(() if per_class is None else (per_class,))
        )
        return loss if loss.shape == target.shape else no_view(loss, target.shape)

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        logits, column, lse, target_coef, *per_class = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        go = grad_output.flatten().to(lse.dtype)
        target_coef = torch.where(target_coef == 0, 0.0, target_coef * go)  # zero stays zero for any go
        coefficients = target_coef, -go, -per_class[0] * go if per_class else None
        dx = vocab_parallel_gradient(logits.flatten(0, -2), column, lse, *coefficients)
        return dx.view(logits.shape), *(None,) * 6


def liger_vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    label_smoothing_formula: str = "pytorch",
    label_smoothing_mode: str = "global",
) -> torch.Tensor:
    """Per-token cross entropy of logits split over a process group along the vocabulary.

    vocab_parallel_logits: [..., n_cols], this rank's part; fp32, fp16 or bf16 (fp64 on the CPU). target: [...] int64 or
    int32, indices into the whole vocabulary, the same on every rank. tp_group: a ProcessGroup, or None if this rank has
    the whole vocabulary. label_smoothing_formula: `pytorch`, or `megatron`, which multiplies label_smoothing by
    V / (V - 1). label_smoothing_mode: smooth over the whole vocabulary (`global`) or this rank's part (`partition`).
    Every rank must call it. Returns the loss of every token in fp32, the same on all ranks except in mode `partition`.
    A target outside the vocabulary has score 0, as in Megatron: its loss is the log-sum-exp and its gradient (without
    smoothing) the softmax, both finite, so that a mask can remove them. LIGER_HW_CHECK_TARGETS=1: `IndexError`.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit.
    """
    check_tensors(_NAME, vocab_parallel_logits=vocab_parallel_logits)
    logits = vocab_parallel_logits
    if logits.dim() < 2 or not logits.shape[-1]:
        check(False, _NAME, f"vocab_parallel_logits must be [..., n_cols], got {tuple(logits.shape)}")
    check_indices(_NAME, "target", target, logits)
    check_smoothing(_NAME, ignore_index, label_smoothing, label_smoothing_formula, label_smoothing_mode)
    tp_group = checked_group(_NAME, tp_group)
    options = ignore_index, label_smoothing, label_smoothing_formula, label_smoothing_mode
    return VocabParallelCEFunction.apply(logits, target, tp_group, *options)


def check_smoothing(op: str, ignore_index: int, smoothing: float, formula: str, mode: str) -> None:
    check_ignore_index(op, ignore_index)
    check_floats(op, label_smoothing=smoothing)
    if not 0.0 <= smoothing < 1.0:
        check(False, op, f"label_smoothing must be in [0, 1), got {smoothing}")
    check(formula in FORMULAS, op, f"label_smoothing_formula must be one of {', '.join(FORMULAS)}, got {formula!r}")
    check(mode in MODES, op, f"label_smoothing_mode must be one of {', '.join(MODES)}, got {mode!r}")


@dataclass(eq=False, repr=False)
class LigerVocabParallelCrossEntropy(OptionsModule):
    """`liger_vocab_parallel_cross_entropy` as a module. reduction must be "none": the caller averages over tokens."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "none"
    label_smoothing_formula: str = "pytorch"
    label_smoothing_mode: str = "global"

    def check(self) -> None:
        op, reduction = "LigerVocabParallelCrossEntropy", self.reduction
        check(reduction == "none", op, f"the loss is per token, reduction must be 'none', got {reduction!r}")
        formula, mode = self.label_smoothing_formula, self.label_smoothing_mode
        check_smoothing(op, self.ignore_index, self.label_smoothing, formula, mode)

    def forward(self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: Any = None) -> torch.Tensor:
        """vocab_parallel_logits: [seq, batch, n_cols], this rank's part; target: [seq, batch]."""
        if vocab_parallel_logits.dim() != 3:
            shape = tuple(vocab_parallel_logits.shape)
            expected = "vocab_parallel_logits must be 3-D, [seq, batch, n_cols]"
            check(False, "LigerVocabParallelCrossEntropy", f"{expected}, got {shape}")
        options = self.label_smoothing, self.label_smoothing_formula, self.label_smoothing_mode
        return liger_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group, self.ignore_index, *options)


WORKLOADS = {"llama3_8b_tp8": (8192, 16032), "qwen3_8b_tp4": (8192, 37984), "mistral_7b": (8192, 32768)}
"""Name -> (n_rows, n_cols) of one rank."""
sample = partial(sample_logits, passes=3)
OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD),
    options=(
        {},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "label_smoothing_formula": "megatron", "label_smoothing_mode": "partition"},
    ),
)
