"""Ignored rows left out of a linear head's GEMMs: `CountedRows`, the count of the others, known without waiting.

A fused linear loss can leave ignored rows (prompts, padding) out of its matrix products, but a product's size must be
known on the host. Labels are there long before the logits. `CountedRows(labels)` at the start of a forward counts them
on the device and starts the copy of one number; by the time the loss asks, the forward's own work is queued behind that
copy, and the host does not wait for the device to drain. The patched models do so by themselves; a training loop of
your own says

    counted = liger_hw.CountedRows(labels)                                    # first thing in the step
    hidden = model(...)
    loss = liger_fused_linear_cross_entropy(hidden, weight, labels, compact=counted)

Inside torch.compile and while a graph is captured nothing is counted, and every row is computed, as without it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ... import private
from ...registry import is_quiet
from ...runtime.operator import check

MAX_SHARE = 31 / 32
"""Share of rows that count above which none is left out: gathering rows and scattering their gradient has its price."""


class CountedRows:
    """The number of rows of `labels` (any shape) that are not ignore_index, on its way to the host.

    labels: a tensor, or several of which the loss takes one: the largest of their counts.
    The labels of the loss may be these, or these with some more rows ignored (shifted by one, say): what counts is that
    no other row counts. A loss in which more rows count raises on the device.
    """

    def __init__(self, labels: Any, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index
        self._count = self._arrived = None
        several = labels if isinstance(labels, tuple) else (labels,)
        if is_quiet() or not all(type(t) is torch.Tensor and not t.is_meta for t in several):
            return  # a fake tensor has no number to read
        count = functools.reduce(torch.maximum, [(t.detach() != ignore_index).sum() for t in several])
        if count.is_cpu:
            self._count = count
            return
        self._count = torch.empty((), dtype=count.dtype, pin_memory=True).copy_(count, non_blocking=True)
        self._arrived = torch.get_device_module(count.device.type).Event()
        self._arrived.record()

    def most(self) -> int | None:
        """The count, waiting for its copy if it must; None where nothing was counted, or this is no moment to wait.

        It waits for what was queued on the device before the copy, not for what was queued after it.
        """
        if self._count is None or is_quiet():
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._count)


def among_all(rows: torch.Tensor | None, order: torch.Tensor | None, n_rows: int, left_out: int = 0) -> Any:
    """Results [k, ...] of the rows `order` (None: all) among n_rows rows; the others have `left_out`."""
    if rows is None or order is None:
        return rows
    return rows.new_full((n_rows, *rows.shape[1:]), left_out).index_copy_(0, order, rows)


def remaining_rows(
    op: str, target: torch.Tensor, ignore_index: int, compact: bool | CountedRows
) -> torch.Tensor | None:
    """Indices of the rows that count, in their order, or None for all rows.

    compact: True counts now, which waits for the device; a `CountedRows` from earlier in the step does not. All
    rows are taken where too few are ignored, while a graph is captured, inside torch.compile, and for a count of
    another ignore_index.
    """
    if not isinstance(compact, (bool, CountedRows)):
        check(False, op, f"compact must be a bool or a CountedRows, got {type(compact).__name__}")
    if compact is False or is_quiet():
        return None
    counted = CountedRows(target, ignore_index) if compact is True else compact
    most = counted.most() if counted.ignore_index == ignore_index else None
    if most is None or most > MAX_SHARE * target.shape[0]:
        return None
    ignored = target == ignore_index
    order = torch.argsort(ignored.to(torch.uint8), stable=True)  # the rows that count first, each part in order
    if compact is not True:
        fits = (target.shape[0] - ignored.sum()) <= most
        private.assert_async(fits, f"{op}: more rows count than the CountedRows given as compact has")
    return order[:most]
