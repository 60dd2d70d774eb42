"""Programs of one launch that wait for one another: a team holds what no program can, and hands sums round.

They wait, so all must be resident at once. The launch asks for just that (`launch_cooperative_grid`): the driver starts all
programs together or refuses, and what was refused is set aside like any configuration that fails. Until there is room for
all, none starts and none holds room: another kernel on the device, a collective's too, delays a team and is not waited for
by it while it waits itself, so that neither can lock the other.

Two sums travel in one 64-bit word, and words are zeroed before each launch: one relaxed atomic access finds both or neither,
and no order between accesses matters. Every program adds the words up in the same order.
"""

from __future__ import annotations

import torch

from .. import registry
from ..registry import LaunchConfig, Plan, Target, next_power_of_2
from .operator import launch
from .triton_import import tl, triton

COOPERATIVE = "launch_cooperative_grid"
LARGEST_TEAM = 256


@triton.jit
def _bits(value):
    """A sum's 32 bits, behind 32 zeros; any NaN's are those of one NaN."""
    bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _tell(word_ptr, first, second):
    """Leave two sums for the team. No two sums invert to a word of zeros, which says that none are there yet."""
    tl.atomic_xchg(word_ptr, ~((_bits(first) << 32) | _bits(second)), sem="relaxed")


@triton.jit
def _hear(words_ptr, splits, LANES: tl.constexpr):
    """Wait for the sums of all programs of the team, and return both, [LANES]; zeros behind the last."""
    lane = tl.arange(0, LANES)
    words = tl.zeros([LANES], dtype=tl.int64)
    missing = lane < splits
    while tl.max(missing.to(tl.int32), axis=0) > 0:
        found = tl.atomic_add(words_ptr + lane, tl.zeros([LANES], dtype=tl.int64), mask=missing, sem="relaxed")
        words = tl.where(missing, found, words)
        missing = missing & (words == 0)
    first = (~words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    second = (~words).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(lane < splits, first, 0.0), tl.where(lane < splits, second, 0.0)


TEAMS = (_bits, _tell, _hear)
"""For `Tunable(kernels=...)`."""


def team_options(target: Target, warps: int, ctas: int) -> dict[str, bool | int]:
    """A configuration's `vendor`: all programs resident, each with no more registers than so many a multiprocessor have."""
    registers = min(248, target.registers // (ctas * warps * target.warp_size) // 8 * 8)
    return {COOPERATIVE: True, "maxnreg": registers}


def launch_teams(
    plan: Plan,
    kernel,
    programs: int,
    splits: int,
    n_rows: int,
    tensors: tuple,
    numbers: tuple,
    flags: tuple,
    *last: float,
) -> None:
    """Teams of `splits` programs, with a word for each of them and each of `n_rows` behind `tensors`, zeroed so that
    `replay.py` can; `numbers` up to `splits`, `last` behind it, the lanes of a row's words behind `flags`."""
    lanes = next_power_of_2(splits)
    words = torch.empty((n_rows, lanes), dtype=torch.int64, device=tensors[0].device).zero_()
    launch(plan, kernel, (programs,), (*tensors, words, *numbers, splits, *last), (*flags, lanes))


def no_team(config: LaunchConfig, programs: int) -> str | None:
    """Why `programs` may not wait for one another as `config` asks for; None where they may, or need not."""
    if COOPERATIVE not in config.vendor:
        return None
    if config.vendor[COOPERATIVE] is not True:
        return f"{COOPERATIVE} must be true, got {config.vendor[COOPERATIVE]!r}; without it nobody waits"
    if registry.interpreting():
        return "the interpreter runs one program after another: those that wait for one another would hang"
    if programs > LARGEST_TEAM:
        return f"{programs} programs would wait for one another, more than {LARGEST_TEAM}"
    return None
