"""Faults on a GPU, for `tests/fuzz/device.py`.

`main` replaces the measuring worker `liger_hw.autotune.workers`. A candidate of FUZZ_HANG warps waits for a kernel that
runs for a minute; one of FUZZ_LOSE warps loses the device by a kernel's assertion. The others are measured as usual.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from liger_hw.autotune import measure, workers
from liger_hw.backends import LaunchConfig

MINUTE = 60 * 2_000_000_000
"""Cycles."""
_prepare = measure.LocalMeasurer.prepare


def main() -> None:
    measure.LocalMeasurer.prepare = prepare
    workers.main()


def prepare(measurer: measure.LocalMeasurer, config: LaunchConfig) -> int:
    if config.num_warps == int(os.environ["FUZZ_HANG"]):
        torch.cuda._sleep(MINUTE)
        torch.cuda.synchronize()
    if config.num_warps == int(os.environ["FUZZ_LOSE"]):
        table = torch.zeros(4, device=measurer.device)
        table[torch.tensor([5], device=measurer.device)].sum().item()
    return _prepare(measurer, config)


LENGTH = 61
"""Elements of four bytes: three fewer than whole units of 16 bytes."""


@triton.jit
def _read_behind(x_ptr, out_ptr, length):
    behind = tl.arange(0, 4)
    tl.store(out_ptr + behind, tl.load(x_ptr + length + behind, mask=behind < 3), mask=behind < 3)


@triton.jit
def _write_behind(x_ptr, place):
    tl.store(x_ptr + place, 1.0)


def read_behind() -> list[float]:
    """The values that a kernel reads behind its tensor in the last unit of 16 bytes, which a checker must allow."""
    x, out = torch.zeros(LENGTH, device="cuda"), torch.zeros(4, device="cuda")
    _read_behind[(1,)](x, out, LENGTH)
    return out[:3].tolist()


def write_behind() -> None:
    """A kernel writes right behind the last unit of 16 bytes of its tensor, which a checker must report."""
    x = torch.zeros(LENGTH, device="cuda")
    _write_behind[(1,)](x, LENGTH + 3)
    torch.cuda.synchronize()
