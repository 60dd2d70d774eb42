"""A few numbers of the device that the host needs later: `HostCopy`, whose copy starts early and is read late."""

from __future__ import annotations

import torch

from ..registry import is_quiet


class HostCopy:
    """The numbers of a small tensor, on their way to the host.

    Whoever reads them waits for what was queued on the device before the copy, not for what was queued after it.
    Inside torch.compile, while a graph is captured, and of a tensor without numbers (fake or meta) nothing is copied.
    """

    def __init__(self, t: torch.Tensor) -> None:
        self._numbers = self._arrived = None
        if is_quiet() or type(t) is not torch.Tensor or t.is_meta:
            return
        if t.is_cpu:
            self._numbers = t
            return
        self._numbers = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        self._numbers.copy_(t, non_blocking=True)
        self._arrived = torch.get_device_module(t.device.type).Event()
        self._arrived.record()

    def read(self) -> torch.Tensor | None:
        """The numbers, once they are there; None where nothing was copied or this is no moment to wait."""
        if is_quiet():
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._numbers
