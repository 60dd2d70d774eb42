"""Cross entropy in plain torch: the options and their checks, the results, and the formulas that the kernels follow.

Shared by `cross_entropy` and the fused linear losses; see cross_entropy.py for the mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence

import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy  # a program may put Liger's in its place

from ... import env, private
from ...runtime.operator import check, check_flags, check_floats, check_ignore_index, check_indices

NONE, MEAN, SUM = REDUCTIONS = "none", "mean", "sum"


@dataclass
class CrossEntropyOutput:
    """What a cross entropy returns when a return_* option is set; the other results are left None.

    z_loss: part of the loss, reduced like it; token_accuracy: share of counted rows whose first largest logit is the
    target (per row with reduction="none"); predicted_tokens: [n_rows] int64, -1 in ignored rows. None has a gradient.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


class Options(NamedTuple):
    """The options of a cross entropy as its operators take them, under the names of `liger_cross_entropy`'s arguments.

    `cross_entropy_options` makes them of what a user passes. softcap: 0.0 for none
    """

    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = MEAN
    softcap: float = 0.0
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    use_token_scaling: bool = False

    @property
    def extra(self) -> tuple[bool, bool, bool]:
        """Which results are returned beside the loss: z-loss, token accuracy, predicted tokens."""
        return self[5:8]

    @property
    def seeks_top(self) -> bool:
        """Whether the largest logit of each row is looked for."""
        return self.return_token_accuracy or self.return_predicted_tokens

    def scales_in_backward(self, dtype: torch.dtype) -> bool:
        """Whether the gradient leaves the forward before the mean's division: p / n_rows underflows in fp16."""
        return dtype is torch.float16 and self.reduction == MEAN


def cross_entropy_options(
    op: str,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = MEAN,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    use_token_scaling: bool = False,
) -> Options:
    """The Options of public arguments. Raises `TypeError` for an option of another type, `ValueError` for its value."""
    check_ignore_index(op, ignore_index)
    check_floats(op, label_smoothing=label_smoothing, lse_square_scale=lse_square_scale)
    check_flags(
        op,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        use_token_scaling=use_token_scaling,
    )
    if not 0.0 <= label_smoothing <= 1.0:
        check(False, op, f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if reduction not in REDUCTIONS:
        check(False, op, f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    flags = bool(return_z_loss), bool(return_token_accuracy), bool(return_predicted_tokens), bool(use_token_scaling)
    numbers = ignore_index, float(lse_square_scale), float(label_smoothing)
    return Options(*numbers, reduction, checked_softcap(op, softcap), *flags)


def check_arguments(op: str, rows: torch.Tensor, target: torch.Tensor, n_cols: int, weight: Any = None) -> None:
    """Raise unless target and class weight fit rows [n_rows, ...] scored over n_cols classes."""

    def hint() -> str:
        if tuple(target.shape) == (n_cols,):
            return "; it has one element per class: are input and weight, or rows and classes, swapped?"
        too_many = target.dim() > 1 and target.numel() == rows.shape[0]
        return "; flatten it: target.flatten()" if too_many else ""

    check_indices(op, "target", target, rows, hint)
    if weight is None:
        return
    if not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point:
        kind = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
        check(False, op, f"the class weight must be a floating point tensor, got {kind}")
    if tuple(weight.shape) != (n_cols,):
        check(False, op, f"the class weight must have shape ({n_cols},), got {tuple(weight.shape)}")
    if weight.device != rows.device:
        check(False, op, f"the class weight is on {weight.device} but the rows are on {rows.device}")
    check(not weight.requires_grad, op, "no gradient for the class weight; detach it")


def checked_softcap(op: str, softcap: float | None) -> float:
    """The softcap as operators take it, 0.0 for None. Raises unless it is positive and finite."""
    if softcap is None:
        return 0.0
    check_floats(op, softcap=softcap)
    if not 0.0 < softcap < float("inf"):
        check(False, op, f"softcap must be positive and finite, or None, got {softcap}")
    return float(softcap)


def reference_losses(logits, target, weight, options: Options) -> tuple[torch.Tensor, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) in plain torch, none rounded to the logits' dtype."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    s = logits.to(wide)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    target = target.long()
    w = None if weight is None else weight.to(wide)
    counted = target != options.ignore_index
    y = target.masked_fill(~counted, 0)
    lse = torch.logsumexp(s, -1)
    rows = torch_cross_entropy(
        s, target, w, ignore_index=options.ignore_index, reduction="none", label_smoothing=options.label_smoothing
    )
    z = torch.where(counted, options.lse_square_scale * lse * lse, 0.0)  # in this order: 0 * inf would be nan
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
    """d(sum of the loss, rows times row_grads) / d(logits) in plain torch, in fp32 or fp64: the formula the kernel has.

    Not by autograd: a fake runs this, and a GPU's backward is in a thread without the mode of fake tensors.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    s, slope = logits.to(wide), 1.0
    if options.softcap:
        t = torch.tanh(s / options.softcap)
        s, slope = options.softcap * t, 1.0 - t.square()
    target = target.long()
    counted = target != options.ignore_index
    y = target.masked_fill(~counted, 0)
    w = logits.new_ones(logits.shape[1], dtype=wide) if weight is None else weight.to(wide)
    lse = torch.logsumexp(s, -1)
    target_coef = (1.0 - options.label_smoothing) * w[y]
    smoothing_term = torch.full_like(lse, options.label_smoothing / logits.shape[1])
    softmax_coef = target_coef + smoothing_term * w.sum()
    z_coef = 2.0 * options.lse_square_scale * lse
    if options.reduction == MEAN:
        total = torch.where(counted, w[y], 0.0).sum()
        target_coef, softmax_coef, smoothing_term = (t / total for t in (target_coef, softmax_coef, smoothing_term))
        z_coef = z_coef / counted.sum()
    factor = torch.ones_like(lse) if row_grads is None else row_grads.to(wide)
    if options.use_token_scaling:
        factor = factor * torch.exp(s.gather(1, y[:, None])[:, 0] - lse)
    grad = ((softmax_coef + z_coef) * factor)[:, None] * torch.exp(s - lse[:, None])
    if options.label_smoothing:
        grad -= (smoothing_term * factor)[:, None] * w
    grad.scatter_add_(1, y[:, None], -(target_coef * factor)[:, None])
    return torch.where(counted[:, None], grad * slope, 0.0)


def pack(outputs: Sequence[torch.Tensor], options: Options) -> torch.Tensor | CrossEntropyOutput:
    """The loss alone, or a CrossEntropyOutput where a return_* option is set; outputs: (loss, z_loss, hits, top)."""
    loss, *extra = outputs
    if not any(options.extra):
        return loss
    return CrossEntropyOutput(loss, *(t if returned else None for t, returned in zip(extra, options.extra)))


class TargetError(IndexError, AssertionError):
    """A target out of bounds: an IndexError as torch raises on the CPU, and an AssertionError as Liger Kernel does."""


def check_targets(op: str, target: torch.Tensor, n_cols: int, ignore_index: int) -> None:
    """Raise `TargetError` that names the first row whose target is out of bounds. Synchronises on a GPU."""
    bad = (target != ignore_index) & ((target < 0) | (target >= n_cols))
    if bad.any():
        row = int(bad.nonzero()[0])
        raise TargetError(
            f"{op}: target[{row}] = {int(target[row])} is out of bounds: expected 0 <= target < {n_cols} "
            f"or ignore_index={ignore_index}"
        )


def check_in_range(op: str, target: torch.Tensor | None, n_cols: int | torch.Tensor, ignore_index: int) -> None:
    """`check_targets` on the CPU or with LIGER_HW_CHECK_TARGETS=1, elsewhere an assertion on the device.

    A tensor in a compiled graph has no values to look at, nor has a fake one, by which kernels are compiled ahead.
    """
    if type(target) is not torch.Tensor or torch.compiler.is_compiling():
        return
    if target.device.type == "cpu" or env.get("LIGER_HW_CHECK_TARGETS"):
        check_targets(op, target.reshape(-1), int(n_cols), ignore_index)
    elif target.device.type != "meta":
        inside = (target == ignore_index) | ((target >= 0) & (target < n_cols))
        assert_on_device(inside.all(), f"{op}: target out of bounds; LIGER_HW_CHECK_TARGETS=1 names it")


def assert_on_device(holds: torch.Tensor, message: str) -> None:
    """An assertion that the host does not wait for. Where torch has none, the row's loss and gradient are nan."""
    try:
        private.assert_async(holds, message)
    except NotImplementedError:
        pass


def absent(like: torch.Tensor) -> torch.Tensor:
    """Stands for a result that is not returned: an operator may not return None."""
    return like.new_empty(0)


def reference_outputs(outputs, dtype: torch.dtype, options: Options) -> tuple[torch.Tensor, ...]:
    """The results of `reference_losses` as an operator returns them: of its dtype, and `absent` where not returned."""
    loss, z_loss, hits, top = outputs
    nothing = absent(hits)
    extras = (t if returned else nothing.clone() for t, returned in zip((z_loss.to(dtype), hits, top), options.extra))
    return loss.to(dtype), *extras
