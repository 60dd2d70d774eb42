"""Cross entropy of logits whose vocabulary is split over the ranks of a process group, without gathering them.

For a row of logits s over the whole vocabulary of V, target y and smoothing e, with lse = log(sum(exp(s))):
    pytorch   loss = (1 - e) (lse - s[y]) + e (lse - mean(s))
    megatron  the same with e V / (V - 1) for e
    mode "global" takes the mean over the whole vocabulary; "partition" over each rank's own part, V being its width, as
    Megatron does: the ranks' losses then differ, and a row exchanges one number less
Rank r of the group holds columns r * n_cols .. (r + 1) * n_cols. Rows whose target is ignore_index have no loss and a
gradient of exactly zero.
Shapes: vocab_parallel_logits [..., n_cols] (Megatron: [seq, batch, n_cols]), target [...] int64 or int32 with indices of
the whole vocabulary -> loss [...].
Dtypes: logits in fp32, fp16 or bf16, everything computed in fp32, and so is the loss.
Saved for backward: the logits and one log-sum-exp a row. The forward reads the logits once and exchanges three numbers a
row in two collectives; backward reads them once and needs none.

Source: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ... import registry
from ...registry import Op, Sample, next_power_of_2
from ...runtime.operator import (
    Function,
    check,
    check_floats,
    check_ignore_index,
    check_tensors,
    define,
    first_order,
    row_major,
)
from .cross_entropy import sample_targets
from .cross_entropy_reference import NONE, Options, check_targets
from .cross_entropy_rows import launch_stats
from .log_prob_rows import (
    LogProbs,
    log_prob_buffers,
    log_prob_tunables,
    row_log_prob_gradients,
    row_log_probs,
)

_NAME = "liger_vocab_parallel_cross_entropy"
FORMULAS, MODES = ("pytorch", "megatron"), ("global", "partition")
_IGNORED = -1  # among a rank's own targets, which count from 0

# -- reference -------------------------------------------------------------------------------------------------------


def vocab_parallel_cross_entropy_reference(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    label_smoothing_formula: str = "pytorch",
    label_smoothing_mode: str = "global",
) -> torch.Tensor:
    """The specification for one rank, which holds the whole vocabulary; in fp32, or in fp64 for fp64."""
    s = vocab_parallel_logits.to(torch.promote_types(vocab_parallel_logits.dtype, torch.float32))
    smoothing = _smoothing(label_smoothing, label_smoothing_formula, s.shape[-1])
    ignored = target == ignore_index
    s_y = s.gather(-1, target.long().masked_fill(ignored, 0)[..., None])[..., 0]
    lse = torch.logsumexp(s, -1)
    return (lse - (1 - smoothing) * s_y - smoothing * s.mean(-1)).masked_fill(ignored, 0.0)


def _smoothing(smoothing: float, formula: str, width: int) -> float:
    return smoothing * width / (width - 1) if formula == "megatron" and width > 1 else smoothing


# -- launchers -------------------------------------------------------------------------------------------------------


def _key(n_rows: int, n_cols: int, itemsize: int) -> registry.Key:
    return next_power_of_2(n_cols), itemsize


FWD, BWD = log_prob_tunables("vocab_parallel_cross_entropy", ("n_rows", "n_cols"), _key)


def _own(logits, target, start: int, ignore_index: int):
    """(column of each row's target in this rank's part, whether it is there, the logit there or zero)."""
    ignored = target == ignore_index
    here = (target >= start) & (target < start + logits.shape[1]) & ~ignored
    mine = torch.where(here, target - start, 0)
    s_y = logits.gather(1, mine[:, None])[:, 0].to(torch.promote_types(logits.dtype, torch.float32))
    return mine.masked_fill(ignored, _IGNORED), here, torch.where(here, s_y, 0.0)


@torch.no_grad()
def _fwd(logits, target, start, vocab, ignore_index, logit_sum):
    logits, target, device = row_major(logits), target.contiguous(), logits.device
    none = Options(ignore_index, 0.0, 0.0, 0.0, NONE)
    launch_stats(_NAME, target, None, vocab, none, device)  # asserts the targets
    mine, here, s_y = _own(logits, target, start, ignore_index)
    out = log_prob_buffers(logits.shape[0], device, logit_sum=logit_sum)
    row_log_probs(logits, mine, out, ignore_index=_IGNORED, owned=False, tunable=FWD)
    return out.lse, s_y, s_y.new_empty(0) if out.logit_sum is None else out.logit_sum, mine, here


@torch.no_grad()
def _bwd(logits, mine, lse, push, pull, flat):
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    logits, mine = row_major(logits), mine.contiguous()
    coefs = {"pull": pull, "flat": flat, "dlogits": dx}
    saved = LogProbs(lse, lse)
    row_log_prob_gradients(logits, mine, saved, push, ignore_index=_IGNORED, owned=False, tunable=BWD, **coefs)
    return dx


# -- the operators ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _fwd_reference(logits, target, start, vocab, ignore_index, logit_sum):
    check_targets(_NAME, target, vocab, ignore_index)
    mine, here, s_y = _own(logits, target, start, ignore_index)
    s = logits.to(s_y.dtype)
    lse = torch.logsumexp(s, -1).masked_fill(mine == _IGNORED, 0.0)
    return lse, s_y, s.sum(-1) if logit_sum else lse.new_empty(0), mine, here


@torch.no_grad()
def _bwd_reference(logits, mine, lse, push, pull, flat):
    g = -pull[:, None] * torch.exp(logits.to(lse.dtype) - lse[:, None])
    g = g if flat is None else g + flat[:, None]
    ignored = mine == _IGNORED
    g = g.scatter_add(1, mine.masked_fill(ignored, 0)[:, None], push[:, None])
    return g.masked_fill(ignored[:, None], 0.0).to(logits.dtype)


def _fwd_fake(logits, target, start, vocab, ignore_index, logit_sum):
    wide, n = torch.promote_types(logits.dtype, torch.float32), logits.shape[0]
    sizes = (n, wide), (n, wide), (n if logit_sum else 0, wide), (n, torch.int64), (n, torch.bool)
    return tuple(logits.new_empty(size, dtype=dtype) for size, dtype in sizes)


vocab_parallel_rows = define(
    "vocab_parallel_cross_entropy_fwd(Tensor logits, Tensor target, int start, int vocab, int ignore_index, "
    "bool logit_sum) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
vocab_parallel_gradient = define(
    "vocab_parallel_cross_entropy_bwd(Tensor logits, Tensor mine, Tensor lse, Tensor push, Tensor pull, Tensor? flat)"
    " -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=("logits",),
)


class LigerVocabParallelCEFunction(Function):
    """Autograd for the loss of this rank's part of the vocabulary: saves the logits and one number a row."""

    @staticmethod
    def forward(
        ctx,
        vocab_parallel_logits,
        target,
        tp_group=None,
        ignore_index=-100,
        label_smoothing=0.0,
        label_smoothing_formula="pytorch",
        label_smoothing_mode="global",
    ):
        logits, y = vocab_parallel_logits.flatten(0, -2), target.flatten().long()
        n_cols, world, rank = logits.shape[1], *group_rank(tp_group)
        vocab, partition = n_cols * world, label_smoothing_mode == "partition"
        width = n_cols if partition else vocab
        smoothing = _smoothing(float(label_smoothing), label_smoothing_formula, width)
        call = logits, y, rank * n_cols, vocab, ignore_index, smoothing != 0.0
        lse, s_y, total, mine, here = vocab_parallel_rows(*call)
        apart = not smoothing or partition
        lse, (s_y, *summed) = combine_log_sum_exp(lse, [s_y] if apart else [s_y, total], tp_group, world)
        loss = lse - (1.0 - smoothing) * s_y
        if smoothing:
            loss = loss - smoothing / width * (total if apart else summed[0])
        loss = torch.where((y >= 0) & (y < vocab), loss, float("nan")).masked_fill(y == ignore_index, 0.0)
        ctx.save_for_backward(vocab_parallel_logits, mine, here, lse)
        ctx.smoothing, ctx.flat = smoothing, smoothing / width
        return loss.view(target.shape)

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        logits, mine, here, lse = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        go = grad_output.flatten().to(lse.dtype)
        push = torch.where(here, -(1.0 - ctx.smoothing) * go, 0.0)
        flat = -ctx.flat * go if ctx.smoothing else None
        dx = vocab_parallel_gradient(logits.flatten(0, -2), mine, lse, push, -go, flat)
        return dx.view(logits.shape), *(None,) * 6


def group_rank(group: Any) -> tuple[int, int]:
    """(ranks, this rank) of a group; (1, 0) for None."""
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def combine_log_sum_exp(lse, parts: list[torch.Tensor], group: Any, world: int):
    """The log-sum-exp over all ranks, and the sums of the parts, in two collectives."""
    if world == 1:
        return lse, parts
    highest = lse.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shift = torch.where(highest == float("-inf"), 0.0, highest)
    sums = torch.stack((torch.exp(lse - shift), *parts))
    dist.all_reduce(sums, group=group)
    return shift + torch.log(sums[0]), list(sums[1:])


# -- public ----------------------------------------------------------------------------------------------------------


def liger_vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    label_smoothing_formula: str = "pytorch",
    label_smoothing_mode: str = "global",
) -> torch.Tensor:
    """Per-token cross entropy of logits split over a process group along the vocabulary; see the top of this file.

    vocab_parallel_logits: [..., n_cols], this rank's part, all parts equally wide; fp32, fp16 or bf16 (fp64 on the CPU).
    target: [...] int64 or int32, indices of the whole vocabulary, the same on every rank. tp_group: a ProcessGroup, or
    None for a whole vocabulary. Returns the loss of every token in fp32, the same on every rank (but see the mode
    "partition"). Every rank must call it: it exchanges three numbers a token.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit; for targets see `liger_cross_entropy`.
    """
    check_tensors(_NAME, vocab_parallel_logits=vocab_parallel_logits)
    logits = vocab_parallel_logits
    if logits.dim() < 2 or not logits.shape[-1]:
        check(False, _NAME, f"vocab_parallel_logits must be [..., n_cols], got {tuple(logits.shape)}")
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{_NAME}: target must be a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32) or target.shape != logits.shape[:-1]:
        expected = f"an int64 or int32 tensor of shape {tuple(logits.shape[:-1])}"
        check(False, _NAME, f"target must be {expected}, got {target.dtype} {tuple(target.shape)}")
    if target.device != logits.device:
        check(False, _NAME, f"target is on {target.device} but the logits are on {logits.device}")
    check_smoothing(_NAME, ignore_index, label_smoothing, label_smoothing_formula, label_smoothing_mode)
    check_group(_NAME, tp_group)
    options = ignore_index, label_smoothing, label_smoothing_formula, label_smoothing_mode
    return LigerVocabParallelCEFunction.apply(logits, target, tp_group, *options)


def check_group(op: str, tp_group: Any) -> None:
    """Raise `TypeError` for what is no process group."""
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup (of a DeviceMesh: mesh.get_group()) or None"
        raise TypeError(f"{op}: tp_group must be {expected}, got {type(tp_group).__name__}")


def check_smoothing(op: str, ignore_index: int, smoothing: float, formula: str, mode: str) -> None:
    """Raise `ValueError` for options that do not fit."""
    check_ignore_index(op, ignore_index)
    check_floats(op, label_smoothing=smoothing)
    if not 0.0 <= smoothing < 1.0:
        check(False, op, f"label_smoothing must be in [0, 1), got {smoothing}")
    check(formula in FORMULAS, op, f"label_smoothing_formula must be one of {', '.join(FORMULAS)}, got {formula!r}")
    check(mode in MODES, op, f"label_smoothing_mode must be one of {', '.join(MODES)}, got {mode!r}")


class LigerVocabParallelCrossEntropy(torch.nn.Module):
    """`liger_vocab_parallel_cross_entropy` as a module: forward(vocab_parallel_logits, target, tp_group=None).

    reduction must be "none": the loss is per token, and how tokens are averaged over ranks is the caller's matter.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "pytorch",
        label_smoothing_mode: str = "global",
    ) -> None:
        super().__init__()
        op = "LigerVocabParallelCrossEntropy"
        check(reduction == "none", op, f"the loss is per token, reduction must be 'none', got {reduction!r}")
        check_smoothing(op, ignore_index, label_smoothing, label_smoothing_formula, label_smoothing_mode)
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: Any = None) -> torch.Tensor:
        options = self.label_smoothing, self.label_smoothing_formula, self.label_smoothing_mode
        return liger_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group, self.ignore_index, *options)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "llama3_8b_tp8": (8192, 16032),
    "qwen3_8b_tp4": (8192, 37984),
    "mistral_7b": (8192, 32768),
}
"""Problem sizes (n_rows, n_cols) of one rank of real models."""


def _sample(sizes, dtype, device, generator, *, ignored=0.1, **options: Any) -> Sample:
    n_rows, n_cols = sizes
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(
        args=(x.requires_grad_(), sample_targets(n_rows, n_cols, device, generator, ignored)),
        kwargs=options,
        reduction=n_cols,
        grad_reduction=n_cols,
        moved=3 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="vocab_parallel_cross_entropy",
        function=liger_vocab_parallel_cross_entropy,
        reference=vocab_parallel_cross_entropy_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
        options=(
            {},
            {"label_smoothing": 0.1},
            {"label_smoothing": 0.1, "label_smoothing_formula": "megatron", "label_smoothing_mode": "partition"},
        ),
    )
)
