"""Cooperative grids: programs share a task (a row, a group of channels) that is too large for one, and exchange sums.

Programs wait for one another, so all must be resident at once. With `launch_cooperative_grid` the driver starts all of
them together or refuses the launch, which quarantines the configuration. Another kernel on the device, such as a
collective's, can delay the grid but cannot deadlock with it.

Each program publishes two partial sums in one 64-bit word and collects the words of its task's programs (splits). Words
are zeroed before each launch, and one relaxed atomic access reads both sums or neither, so memory accesses need no
order. Every program adds the words in the same order.
"""

from __future__ import annotations

import torch

from .. import registry
from ..registry import LaunchConfig, Plan, Target, next_power_of_2
from .operator import launch
from .triton_import import tl, triton

COOPERATIVE = "launch_cooperative_grid"
MAX_SPLITS = 256


@triton.jit
def _bits(value):
    """The 32 bits of an fp32 sum, after 32 zeros; all NaNs have the same bits."""
    bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def publish(word_ptr, first, second):
    """Publish two partial sums. Their bits are inverted, so the word is never 0, which means "not published yet"."""
    tl.atomic_xchg(word_ptr, ~((_bits(first) << 32) | _bits(second)), sem="relaxed")


@triton.jit
def collect(words_ptr, splits, LANES: tl.constexpr):
    """Wait for the partial sums of all splits. Returns two fp32 [LANES], 0 from `splits` on. LANES >= splits."""
    lane = tl.arange(0, LANES)
    words = tl.zeros([LANES], dtype=tl.int64)
    missing = lane < splits
    while tl.max(missing.to(tl.int32), axis=0) > 0:
        arrived = tl.atomic_add(words_ptr + lane, tl.zeros([LANES], dtype=tl.int64), mask=missing, sem="relaxed")
        words = tl.where(missing, arrived, words)
        missing = missing & (words == 0)
    first = (~words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    second = (~words).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(lane < splits, first, 0.0), tl.where(lane < splits, second, 0.0)


def resident_options(target: Target, warps: int, ctas: int) -> dict[str, bool | int]:
    """`LaunchConfig.vendor` for a cooperative grid; limits registers so that `ctas` programs fit a multiprocessor."""
    registers = min(248, target.registers // (ctas * warps * target.warp_size) // 8 * 8)
    return {COOPERATIVE: True, "maxnreg": registers}


def launch_cooperative(
    plan: Plan, kernel, programs: int, splits: int, n_tasks: int, tensors, numbers, flags: tuple, *last
) -> None:
    """Launch `programs` programs; each task has `splits` of them.

    The kernel takes tensors, words [n_tasks, LANES], numbers, splits, last, flags and LANES, in this order.
    """
    lanes = next_power_of_2(splits)
    words = torch.empty((n_tasks, lanes), dtype=torch.int64, device=tensors[0].device).zero_()
    launch(plan, kernel, (programs,), (*tensors, words, *numbers, splits, *last), (*flags, lanes))


def cooperative_misfit(config: LaunchConfig, splits: int) -> str | None:
    """Why `splits` programs cannot wait for one another with `config`, or None."""
    if COOPERATIVE not in config.vendor:
        return None
    if config.vendor[COOPERATIVE] is not True:
        return f"{COOPERATIVE} must be true, got {config.vendor[COOPERATIVE]!r}; without it programs do not wait"
    if registry.interpreting():
        return "the interpreter runs one program after another, so programs that wait for one another would hang"
    if splits > MAX_SPLITS:
        return f"{splits} programs would wait for one another, more than {MAX_SPLITS}"
    return None
