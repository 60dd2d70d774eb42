"""What must go wrong on a GPU, for `tests/fuzz/device.py`.

`main` is a measuring worker that misbehaves: it stands for `liger_hw.autotune.workers`. A candidate of FUZZ_HANG
warps waits for a kernel that runs for a minute, one of FUZZ_LOSE warps loses the device by a kernel's assertion. Every
other candidate is measured as ever. `write_behind` is what a memory checker must see.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

from liger_hw.autotune import measure, workers

MINUTE = 60 * 2_000_000_000
"""Cycles."""
_prepare = measure.LocalMeasurer.prepare


def main() -> None:
    measure.LocalMeasurer.prepare = prepare
    workers.main()


def prepare(measurer: measure.LocalMeasurer, config: dict[str, Any]) -> dict[str, Any]:
    if config["num_warps"] == int(os.environ["FUZZ_HANG"]):
        torch.cuda._sleep(MINUTE)
        torch.cuda.synchronize()
    if config["num_warps"] == int(os.environ["FUZZ_LOSE"]):
        table = torch.zeros(4, device=measurer.device)
        table[torch.tensor([5], device=measurer.device)].sum().item()
    return _prepare(measurer, config)


@triton.jit
def _write_behind(x_ptr, length):
    tl.store(x_ptr + length + tl.arange(0, 32), 1.0)


def write_behind() -> None:
    """A kernel that writes behind its tensor's end: what a memory checker must see."""
    x = torch.zeros(64, device="cuda")
    _write_behind[(1,)](x, x.numel())
    torch.cuda.synchronize()
