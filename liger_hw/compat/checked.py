"""Cross entropies under Liger Kernel's names, which behave as Liger's in two cases where liger_hw's do not.

The cross entropy of logits checks targets before the launch and raises for one out of bounds, since programs catch this
error. The mean over no targets is zero, not nan.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ..kernels.heads.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss as _LinearLoss
from ..kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy as _linear_loss
from ..kernels.losses.cross_entropy import LigerCrossEntropyLoss as _Loss
from ..kernels.losses.cross_entropy import liger_cross_entropy as _loss
from ..kernels.losses.cross_entropy_rows import CrossEntropyOutput, check_targets
from ..registry import is_capturing_or_tracing


def _check(logits: Any, target: Any, ignore_index: Any) -> None:
    """Raise `TargetError` for a target out of bounds. Waits for the device.

    Checks nothing while a graph is captured or traced, for tensors without values, and for invalid arguments.
    """
    valid = isinstance(logits, torch.Tensor) and logits.dim() == 2 and isinstance(ignore_index, int)
    if is_capturing_or_tracing() or not valid or type(target) is not torch.Tensor or target.device.type == "meta":
        return
    if target.dtype in (torch.int64, torch.int32):
        check_targets("liger_cross_entropy", target.reshape(-1), logits.shape[1], ignore_index)


def _zero_of_no_rows(result: Any, target: torch.Tensor, ignore_index: int) -> Any:
    """`result` of a cross entropy, with a loss of zero if every target is ignored."""
    output = result if isinstance(result, CrossEntropyOutput) else CrossEntropyOutput(result)
    if output.loss.dim() or type(output.loss) is not torch.Tensor or type(target) is not torch.Tensor:
        return result
    none = (target == ignore_index).all()
    loss, z_loss = (None if t is None else t.masked_fill(none, 0.0) for t in (output.loss, output.z_loss))
    return loss if output is not result else dataclasses.replace(output, loss=loss, z_loss=z_loss)


@functools.wraps(_loss, assigned=("__doc__",))
def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    *options: Any,
    **named: Any,
) -> torch.Tensor | CrossEntropyOutput:
    deferred = getattr(type(input), "cross_entropy", None)  # logits of a patched model compute their loss
    if deferred is not None:
        return deferred(input, target, weight, size_average, ignore_index, *options, **named)
    _check(input, target, ignore_index)
    result = _loss(input, target, weight, size_average, ignore_index, *options, **named)
    return _zero_of_no_rows(result, target, ignore_index)


@functools.wraps(_linear_loss, assigned=("__doc__",))
def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    *options: Any,
    **named: Any,
) -> torch.Tensor | CrossEntropyOutput:
    result = _linear_loss(input, weight, target, bias, ce_weight, ignore_index, *options, **named)
    return _zero_of_no_rows(result, target, ignore_index)


class LigerCrossEntropyLoss(_Loss):
    """`liger_hw.transformers.LigerCrossEntropyLoss` with the behaviour of `liger_cross_entropy` here."""

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        _check(_input, target, self.ignore_index)
        return _zero_of_no_rows(super().forward(_input, target), target, self.ignore_index)


class LigerFusedLinearCrossEntropyLoss(_LinearLoss):
    """The class in `liger_hw.transformers` with the behaviour of `liger_fused_linear_cross_entropy` here."""

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | CrossEntropyOutput:
        return _zero_of_no_rows(super().forward(lin_weight, _input, target, bias), target, self.ignore_index)


__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
]
