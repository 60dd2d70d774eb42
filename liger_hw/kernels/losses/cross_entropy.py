"""Cross entropy of logits [n_rows, n_cols] with class indices, and its gradient in the same launch.

For a row with logits s, target y, class weights w (1 if absent), smoothing e and lse = log(sum(exp(s))):
    loss = (1 - e) * w[y] * (lse - s[y]) + e / n_cols * sum_c w[c] * (lse - s[c])  +  lse_square_scale * lse^2
A softcap replaces s by softcap * tanh(s / softcap) first. The last term is the z-loss, which has no class weight.
    none  the loss of every row      sum  the sum over rows
    mean  the sum divided by sum(w[y]), as in torch, and the z-loss's sum by the number of counted rows; 0 / 0 is nan
Rows whose target is ignore_index have no loss and a gradient of exactly zero. Everything is computed in fp32.

The forward sweeps a row twice (softmax_rows.py): for lse, then for the gradient. Saved for backward: the gradient, in a
new buffer. Backward multiplies it by the incoming gradient (loss_gradient.py). In fp16 backward also divides by the
mean's denominator: in the forward p / n_rows would underflow, because the loss scale is applied only in backward.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867;
label smoothing: Szegedy et al., https://arxiv.org/abs/1512.00567; z-loss: PaLM, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy  # programs may replace torch's by Liger's later

from ... import registry
from ...registry import Key, LaunchConfig, Sample, Target, normal, row_key
from ...runtime.operator import (
    Function,
    check,
    check_tensors,
    define,
    dense,
    first_order,
    row_major,
    to_flatten,
)
from ...runtime.sharding import LossRule
from .cross_entropy_rows import (
    NONE,
    STATS,
    SUM,
    CrossEntropyOutput,
    Options,
    absent,
    check_arguments,
    check_in_range,
    cross_entropy_options,
    launch_rows,
    launch_stats,
    launch_sum,
    loss_heuristic,
    pack,
    row_buffers,
    rows_tunable,
)
from .divergence_rows import loss_dtype
from .loss_gradient import BWD, gradient_of, scale_gradient
from .options_module import OptionsModule


def cross_entropy_reference(input, target, weight=None, size_average=None, reduce=None, reduction="mean", **settings):
    settings["reduction"] = _reduction_name(size_average, reduce, reduction)
    options = cross_entropy_options("cross_entropy_reference", **settings)
    loss, z_loss, hits, top = reference_losses(input, target, weight, options)
    return pack((loss.to(input.dtype), z_loss.to(input.dtype), hits, top), options)


def reference_losses(logits, target, weight, options: Options) -> tuple[torch.Tensor, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) in plain torch, not rounded to the logits' dtype."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    target = target.long()
    counted = target != options.ignore_index
    s = logits.to(wide).masked_fill(~counted[:, None], 0.0)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    w = None if weight is None else weight.to(wide)
    y = target.masked_fill(~counted, 0)
    lse = torch.logsumexp(s, -1)
    rows = torch_cross_entropy(
        s, target, w, ignore_index=options.ignore_index, reduction="none", label_smoothing=options.label_smoothing
    )
    z = torch.zeros_like(lse)
    if options.lse_square_scale:  # else an infinite incoming gradient times 0 would be nan
        z = torch.where(counted, options.lse_square_scale * lse.square(), 0.0)
    if options.use_token_scaling:
        p = torch.where(counted, torch.exp(s.gather(1, y[:, None])[:, 0] - lse), 0.0).detach()
        rows, z = rows * p, z * p
    top = logits.detach().argmax(-1)
    hits = (counted & (top == target)).to(torch.float32)
    top = top.masked_fill(~counted, -1)
    if options.reduction == NONE:
        return rows + z, z.detach(), hits, top
    n = counted.sum()
    hits = hits.sum() / n
    if options.reduction == SUM:
        return (rows + z).sum(), z.detach().sum(), hits, top
    total = n if w is None else torch.where(counted, w[y], 0.0).sum()
    z = z.sum() / n
    return rows.sum() / total + z, z.detach(), hits, top


def reference_gradient(logits, target, weight, options: Options, row_grads=None) -> torch.Tensor:
    """The gradient of sum(loss * row_grads) with respect to the logits in plain torch, in fp32 or fp64."""
    if row_grads is None:
        row_grads = logits.new_ones(logits.shape[:1] if options.reduction == NONE else ())
    return gradient_of(lambda s: reference_losses(s, target, weight, options)[0], logits, row_grads)


def reference_outputs(outputs, dtype: torch.dtype, options: Options) -> tuple[torch.Tensor, ...]:
    """The results of `reference_losses` as an operator returns them: in its dtype, `absent` for those not asked for."""
    loss, z_loss, hits, top = outputs
    extras = (t if returned else absent(hits) for t, returned in zip((z_loss.to(dtype), hits, top), options.extra))
    return loss.to(dtype), *extras


def _key(n_rows: int, n_cols: int, itemsize: int, loss_only: bool = False) -> Key:
    """`row_key`, and a fourth number, 1, if only the loss is computed: the kernel then reads each row once."""
    key = row_key(n_rows, n_cols, itemsize)
    return (*key, 1) if loss_only else key


def _heuristic(target: Target, key: Key) -> LaunchConfig:
    """`loss_heuristic`, but small tiles for a wide row that is read once, to have several loads in flight."""
    if len(key) == 3 or key[0] <= 8192:  # three numbers: rows are read again for the gradient
        return loss_heuristic(target, key)
    return LaunchConfig({"BLOCK_SIZE": 2048}, target.warps(2048, 16, 16))


FWD = rows_tunable("cross_entropy", _key, heuristic=_heuristic)


def _fwd(input, target, weight, dtype, grad, options: Options):
    x, target, weight = row_major(input), target.contiguous(), dense(weight)
    n_rows, n_cols = x.shape
    stats = launch_stats("liger_cross_entropy", target, weight, n_cols, options, x.device)
    rows = row_buffers(n_rows, options, dtype, x.device)
    dx = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device) if grad else None
    if n_rows:
        plan = FWD.plan(x.device, _key(n_rows, n_cols, x.dtype.itemsize, not grad))
        launch_rows(plan, x, target, weight, stats, options, rows, dx)
    outputs = launch_sum(rows, stats, options, dtype, target)
    later = grad and options.scales_in_backward(x.dtype)
    return *outputs, absent(x) if dx is None else dx, stats if later else absent(stats)


@torch.no_grad()
def _fwd_reference(input, target, weight, dtype, grad, options: Options):
    check_in_range("liger_cross_entropy", target, input.shape[1], options.ignore_index)
    outputs = reference_outputs(reference_losses(input, target, weight, options), dtype, options)
    dx = reference_gradient(input, target, weight, options).to(input.dtype) if grad else absent(input)
    n_stats = 8 if grad and options.scales_in_backward(input.dtype) else 0  # as `launch_stats` returns
    return *outputs, dx, dx.new_ones(n_stats, dtype=torch.float32)


cross_entropy_fwd = define(
    "cross_entropy_fwd(Tensor input, Tensor target, Tensor? weight, ScalarType dtype, bool grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    shapes="input [n_rows, n_cols]; int target [n_rows]; float weight [n_cols]",
    launcher=_fwd,
    reference=_fwd_reference,
    numbers=Options,
)


class CrossEntropyFunction(Function):
    """Returns the loss, or (loss, z_loss, token_accuracy, predicted_tokens) where a return_* option is set."""

    sharding = LossRule("cross_entropy")

    @staticmethod
    def forward(ctx, _input, target, weight, options: Options):
        loss, *extra, grad, stats = _run(_input, target, weight, options, ctx.needs_input_grad[0])
        ctx.save_for_backward(grad, stats)
        if not any(options.extra):  # autograd takes longer for several outputs
            return loss
        ctx.mark_non_differentiable(*extra)
        ctx.set_materialize_grads(False)
        return loss, *extra

    @staticmethod
    @first_order
    def backward(ctx, grad_output, *_not_differentiable):
        if grad_output is None or not ctx.needs_input_grad[0]:
            return None, None, None, None
        grad, stats = ctx.saved_tensors  # read once: under activation checkpointing a second read raises
        return scale_gradient(grad, grad_output, stats), None, None, None


def _run(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, options: Options, grad: bool):
    return cross_entropy_fwd(input, target, weight, loss_dtype(input, input), grad, options)


def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of logits with class indices, as `torch.nn.functional.cross_entropy`, with softcap and z-loss.

    softcap: replaces the logits s by softcap * tanh(s / softcap); lse_square_scale: adds that times logsumexp(s)^2.
    input: [n_rows, n_cols] fp32, fp16 or bf16 (fp64 too on the CPU), never overwritten; target: [n_rows] int64 or
    int32, in 0..n_cols-1 or ignore_index; weight: [n_cols] floating or None. reduction: mean, sum or none; size_average
    and reduce are torch's deprecated spellings of it. label_smoothing: the share of a target that is spread evenly over
    the classes, from 0 to 1. return_z_loss, return_token_accuracy, return_predicted_tokens: see `CrossEntropyOutput`.
    Returns the loss, [] or [n_rows] with reduction="none", in input's dtype (fp32 under autocast), or a
    `CrossEntropyOutput` when any return_* is set.
    Raises `TypeError` for an option of another type, `ValueError` for shapes, dtypes, devices or options that do not
    fit, and `IndexError` for a target out of range (on a GPU only with LIGER_HW_CHECK_TARGETS=1; else it is an
    assertion on the device).
    """
    op = "liger_cross_entropy"
    check_tensors(op, input=input)
    if input.dim() != 2 or not input.shape[1]:
        hint = f"{to_flatten(input=input)}, target.flatten()" if input.dim() > 2 else ""
        check(False, op, f"input must be [n_rows, n_cols], got {tuple(input.shape)}{hint}")
    check_arguments(op, input, target, input.shape[1], weight)
    reduction = _reduction_name(size_average, reduce, reduction)
    numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    options = cross_entropy_options(op, *numbers, return_z_loss, return_token_accuracy, return_predicted_tokens)
    if torch.is_grad_enabled() and input.requires_grad or type(input) is not torch.Tensor:  # DTensor: LossRule
        outputs = CrossEntropyFunction.apply(input, target, weight, options)
        return pack(outputs, options) if any(options.extra) else outputs
    return pack(_run(input, target, weight, options, False)[:4], options)


def _reduction_name(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    return torch.nn._reduction.legacy_get_string(size_average, reduce)


class LigerCrossEntropyLoss(OptionsModule):
    """`liger_cross_entropy` as a module, with the same arguments."""

    option_names = Options._fields[:-1]  # all but use_token_scaling

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        numbers = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
        self.set_options(*numbers, return_z_loss, return_token_accuracy, return_predicted_tokens)

    def check(self) -> None:
        cross_entropy_options("LigerCrossEntropyLoss", **self.options())

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        """_input: [n_rows, n_cols] logits; target: [n_rows] class indices."""
        return liger_cross_entropy(_input, target, self.weight, **self.options())


WORKLOADS = {
    "mistral_7b": (8192, 32768),
    "llama3_8b": (8192, 128256),
    "qwen3_8b": (8192, 151936),
    "gemma2_2b": (4096, 256000),
    "gpt2": (8192, 50257),
}


def sample_targets(n_rows, n_cols, device, generator, ignored: float) -> torch.Tensor:
    """Random class indices, of which a share `ignored` is -100."""
    target = torch.randint(n_cols, (n_rows,), generator=generator, device=device)
    chance = torch.rand(n_rows, generator=generator, device=device)
    return target.masked_fill(chance < ignored, -100)


def sample_logits(
    sizes, dtype, device, generator, *, passes: int, ignored=0.1, weighted=False, teacher=False, **options: Any
) -> Sample:
    """A `Sample` of logits and targets. passes: reads and writes of the logits; ignored: the share of targets at -100;
    weighted: with class weights; teacher: with a teacher's logits before the targets."""
    n_rows, n_cols = sizes
    draw = normal(dtype, device, generator)
    args = [draw(n_rows, n_cols)]
    if teacher:
        args.append(draw(n_rows, n_cols).detach())
    args.append(sample_targets(n_rows, n_cols, device, generator, ignored))
    if weighted:
        args.append(torch.rand(n_cols, generator=generator, dtype=torch.float32, device=device))
    moved = passes * n_rows * n_cols * dtype.itemsize
    return Sample(args=tuple(args), kwargs=options, reduction=n_cols, grad_reduction=n_cols, moved=moved)


OPTIONS = (
    {},
    {"weighted": True, "label_smoothing": 0.1},
    {"softcap": 30.0, "lse_square_scale": 1e-4, "return_z_loss": True},
    {"reduction": "sum", "return_token_accuracy": True, "return_predicted_tokens": True},
    {"reduction": "none", "label_smoothing": 0.1},
)
sample = partial(sample_logits, passes=2)
OP = registry.register_file(__name__, tunables=(FWD, STATS, BWD), options=OPTIONS)
