"""The cross entropy of given logits under Liger Kernel's names: a target out of bounds raises before the launch.

liger_hw's own `liger_cross_entropy` leaves that to an assertion on the device, which does not wait for the device but
ends the process' use of it. A program written for Liger may catch what Liger raises, and go on. Liger Kernel's fused
heads and its loss over a split vocabulary look at no target, nor do they here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..autotune.notes import is_quiet
from ..kernels.losses.cross_entropy import LigerCrossEntropyLoss as _Loss
from ..kernels.losses.cross_entropy import liger_cross_entropy as _loss
from ..kernels.losses.cross_entropy_reference import CrossEntropyOutput, check_targets


def _check(logits: Any, target: Any, ignore_index: Any) -> None:
    """Raise `TargetError` for a target out of bounds. Waits for the device.

    Does nothing while a graph is captured or traced, for tensors without values, and for arguments that are refused
    anyway.
    """
    valid = isinstance(logits, torch.Tensor) and logits.dim() == 2 and isinstance(ignore_index, int)
    if is_quiet() or not valid or type(target) is not torch.Tensor or target.device.type == "meta":
        return
    if target.dtype in (torch.int64, torch.int32):
        check_targets("liger_cross_entropy", target.reshape(-1), logits.shape[1], ignore_index)


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
    _check(input, target, ignore_index)
    return _loss(input, target, weight, size_average, ignore_index, *options, **named)


class LigerCrossEntropyLoss(_Loss):
    """`liger_hw.transformers.LigerCrossEntropyLoss` over the function above."""

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        _check(_input, target, self.ignore_index)
        return super().forward(_input, target)


__all__ = ["LigerCrossEntropyLoss", "liger_cross_entropy"]
