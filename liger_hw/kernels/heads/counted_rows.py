"""How many rows of a loss count, known on the host without waiting for the device to finish.

A fused linear loss can leave ignored rows (prompts, padding) out of its matrix products, but a product's size must be
known on the host. Labels are there long before the logits: `CountedRows(labels)` at the start of a forward counts them on
the device and starts the copy of one number; by the time the loss asks, the forward's own work is queued behind it and
the device has not been drained. The patched models do so by themselves; a training loop of your own says

    counted = CountedRows(labels)                                    # first thing in the step
    hidden = model(...)
    loss = liger_fused_linear_cross_entropy(hidden, weight, labels, compact=counted)

Inside torch.compile and while a graph is captured nothing is counted, and every row is computed, as without it.
"""

from __future__ import annotations

from typing import Any

from ...registry import is_quiet


class CountedRows:
    """The number of rows of `labels` (any shape) that are not ignore_index, on its way to the host.

    The labels of the loss may be these, or these with some more rows ignored (shifted by one, say): what counts is that
    no other row counts. A loss in which more rows count raises on the device.
    """

    def __init__(self, labels: Any, ignore_index: int = -100) -> None:
        import torch

        self.ignore_index = ignore_index
        self._count = self._arrived = None
        if is_quiet() or type(labels) is not torch.Tensor:  # a fake tensor has no number to read
            return
        count = (labels.detach() != ignore_index).sum()
        if count.device.type in ("cpu", "meta"):
            self._count = count
            return
        self._count = torch.empty((), dtype=count.dtype, pin_memory=True)
        self._count.copy_(count, non_blocking=True)
        self._arrived = torch.get_device_module(count.device.type).Event()
        self._arrived.record()

    def most(self) -> int | None:
        """The count, waiting for its copy if it must; None where nothing was counted."""
        if self._count is None or self._count.device.type == "meta":
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._count)
