"""The sort of slots by expert, on the device without synchronisation or atomics.

A slot is one (token, choice) pair, numbered t * K + k; a row is a slot's position after the sort. A stable counting
sort takes four launches. Slots whose expert is outside [0, E) come last.

    count    the number of slots of each expert, for each program's BLOCK_T slots
    prefix   the number of slots of each expert in all earlier programs, and each expert's total
    offsets  the first row of each expert, and the experts sorted by their number of rows, largest first
    place    the row of every slot

Grouped products work on tiles of BLOCK_M rows of one expert. The host knows only an upper bound of the number of tiles,
so the grid has as many programs as the bound, and surplus programs return at once (tiles).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, next_power_of_2
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton

DIMS = ("n_tokens", "hidden", "inner", "n_experts", "top_k")


def moe_tunable(variant: str, kernel, key, heuristic, space, *neutral: str) -> Tunable:
    """The tunable `fused_moe.<variant>` of a kernel other than the grouped products. neutral: as in `Tunable`."""
    return Tunable(
        "fused_moe",
        variant,
        kernels=(kernel,),
        key=key,
        dims=DIMS,
        heuristic=heuristic,
        safe=lambda target, key: LaunchConfig(dict.fromkeys(heuristic(target, key).blocks, 16), 1),
        space=space,
        neutral=frozenset({"hint", *neutral}),
    )


@triton.jit
def _experts_of(Index_ptr, at, n_slots, n_experts):
    """The expert of each slot; n_experts for slots without an expert and past the last slot."""
    expert = tl.load(Index_ptr + at, mask=at < n_slots, other=-1)
    return tl.where((expert < 0) | (expert >= n_experts), n_experts, expert).to(tl.int32)


@triton.jit(do_not_specialize=["n_slots"])
def _fused_moe_count_kernel(Index_ptr, Counts_ptr, n_slots, n_experts, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Counts [programs, EXPERTS]; EXPERTS is a power of two above n_experts."""
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    counts = tl.histogram(_experts_of(Index_ptr, at, n_slots, n_experts), EXPERTS)
    tl.store(Counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["n_blocks"])
def _fused_moe_prefix_kernel(
    Counts_ptr, Totals_ptr, n_blocks, EXPERTS: tl.constexpr, COLS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Counts [n_blocks, EXPERTS] become their exclusive prefix sums over the blocks. A program has COLS columns."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    before = tl.zeros([COLS], dtype=tl.int32)
    for start in range(0, n_blocks, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        ptrs = Counts_ptr + rows[:, None] * EXPERTS + cols[None, :]
        mask = (rows < n_blocks)[:, None] & (cols >= 0)[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        before += tl.sum(counts, axis=0)
    tl.store(Totals_ptr + cols, before)


@triton.jit
def _fused_moe_offsets_kernel(
    Totals_ptr, Offsets_ptr, Largest_ptr, n_experts, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Offsets [n_experts + 1]: the first row of each expert, and the end of the last expert's rows.

    Largest [n_experts]: the experts sorted by their number of rows, largest first. A program ranks BLOCK_T experts; the
    first program also stores the offsets.
    """
    experts = tl.arange(0, EXPERTS)
    totals = tl.load(Totals_ptr + experts)
    if tl.program_id(0) == 0:
        tl.store(Offsets_ptr + experts, tl.cumsum(totals, axis=0) - totals, mask=experts <= n_experts)
    expert = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    size = tl.load(Totals_ptr + expert, mask=expert < n_experts, other=0)
    ahead = (totals[None, :] > size[:, None]) | (
        (totals[None, :] == size[:, None]) & (experts[None, :] < expert[:, None])
    )
    ahead = ahead & (experts < n_experts)[None, :]
    tl.store(Largest_ptr + tl.sum(ahead.to(tl.int32), axis=1), expert, mask=expert < n_experts)


@triton.jit(do_not_specialize=["n_slots"])
def _fused_moe_place_kernel(
    Index_ptr,
    Counts_ptr,
    Offsets_ptr,
    Order_ptr,
    Token_ptr,
    Row_ptr,
    n_slots,
    n_experts,
    top_k,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Order, Token [n_slots]: each row's slot and token; Row [n_slots]: each slot's row, -1 if it has no expert."""
    start = tl.program_id(0) * BLOCK_T
    at = start + tl.arange(0, BLOCK_T)
    expert = _experts_of(Index_ptr, at, n_slots, n_experts)
    row = tl.load(Counts_ptr + tl.program_id(0) * EXPERTS + expert) + tl.load(Offsets_ptr + expert)
    for first in range(start, start + BLOCK_T, CHUNK):
        other_at = first + tl.arange(0, CHUNK)
        other = _experts_of(Index_ptr, other_at, n_slots, n_experts)
        before = (other[None, :] == expert[:, None]) & (other_at[None, :] < at[:, None])
        row += tl.sum(before.to(tl.int32), axis=1)
    tl.store(Order_ptr + row, at, mask=at < n_slots)
    tl.store(Token_ptr + row, at // top_k, mask=at < n_slots)
    tl.store(Row_ptr + at, tl.where(expert < n_experts, row, -1), mask=at < n_slots)


@triton.jit(do_not_specialize=["n_tiles"])
def _fused_moe_tiles_kernel(
    Offsets_ptr,
    Expert_ptr,
    First_ptr,
    n_tiles,
    n_experts,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Expert [n_tiles]: the expert of each tile of BLOCK_M rows, n_experts for a surplus tile; First [n_experts + 1]:
    the first tile of each expert, and of the surplus. Program e writes both for expert e, the last for the surplus."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    rows = tl.load(Offsets_ptr + experts + 1, mask=experts < n_experts, other=0)
    rows -= tl.load(Offsets_ptr + experts, mask=experts < n_experts, other=0)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    end = tl.where(expert < n_experts, tl.sum(tl.where(experts <= expert, tiles, 0), axis=0), n_tiles)
    tl.store(First_ptr + expert, first)
    for start in range(first, end, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        tl.store(Expert_ptr + at, tl.zeros([BLOCK_T], dtype=tl.int32) + expert, mask=at < end)


def _key(n_tokens: int, hidden: int, inner: int, n_experts: int, top_k: int, itemsize: int) -> Key:
    return next_power_of_2(n_experts + 1), (max(1, n_tokens * top_k) - 1).bit_length()


def _tunable(variant: str, kernel, blocks: dict[str, int], tile: int, per_thread: int) -> Tunable:
    """No search space: all five launches take microseconds, while the products take milliseconds.

    blocks: the heuristic's blocks; tile, per_thread: the integers that a program and a thread hold at a time
    """

    def heuristic(target: Target, key: Key) -> LaunchConfig:
        return LaunchConfig(dict(blocks), target.warps(tile, per_thread))

    return moe_tunable(variant, kernel, _key, heuristic, lambda target, key: [], "num_warps", "num_stages", *blocks)


_SLOTS = 256
"""BLOCK_T of count and place."""
_COLS = 16
"""COLS of prefix."""


COUNT = _tunable("count", _fused_moe_count_kernel, {}, _SLOTS, 2)
PREFIX = _tunable("prefix", _fused_moe_prefix_kernel, {"BLOCK_T": 64}, 64 * _COLS, 8)
OFFSETS = _tunable("offsets", _fused_moe_offsets_kernel, {"BLOCK_T": 16}, 16 * 256, 32)
PLACE = _tunable("place", _fused_moe_place_kernel, {"CHUNK": 16}, 16 * _SLOTS, 16)
TILES = _tunable("tiles", _fused_moe_tiles_kernel, {"BLOCK_T": 32}, 32, 1)
TUNABLES = (COUNT, PREFIX, OFFSETS, PLACE, TILES)


class Routing(NamedTuple):
    """The slots sorted by expert; all int32.

    order, token [T * K]: the slot and the token of each row; row [T * K]: each slot's row, -1 if it has no expert
    offsets, largest: see `_fused_moe_offsets_kernel`
    """

    order: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    offsets: torch.Tensor
    largest: torch.Tensor


def route(top_k_index: torch.Tensor, n_experts: int) -> Routing:
    """Sort the slots of `top_k_index` [T, K], contiguous, by expert."""
    (n_tokens, top_k), device = top_k_index.shape, top_k_index.device
    n_slots, experts = n_tokens * top_k, next_power_of_2(n_experts + 1)
    n_blocks, key = cdiv(n_slots, _SLOTS), _key(n_tokens, 0, 0, n_experts, top_k, 0)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    routing = Routing(empty(n_slots), empty(n_slots), empty(n_slots), empty(n_experts + 1), empty(n_experts))
    counts, totals = empty(n_blocks, experts), empty(experts)
    if n_blocks:
        args = (top_k_index, counts, n_slots, n_experts)
        launch(COUNT.plan(device, key), _fused_moe_count_kernel, (n_blocks,), args, (experts, _SLOTS))
    cols = min(experts, _COLS)
    args = (counts, totals, n_blocks)
    launch(PREFIX.plan(device, key), _fused_moe_prefix_kernel, (experts // cols,), args, (experts, cols))
    args = (totals, routing.offsets, routing.largest, n_experts)
    plan = OFFSETS.plan(device, key)
    launch(plan, _fused_moe_offsets_kernel, (cdiv(n_experts, plan.config.blocks["BLOCK_T"]),), args, (experts,))
    if n_blocks:
        args = (top_k_index, counts, routing.offsets, *routing[:3], n_slots, n_experts, top_k)
        launch(PLACE.plan(device, key), _fused_moe_place_kernel, (n_blocks,), args, (experts, _SLOTS))
    return routing


class Tiles(NamedTuple):
    """expert, first: see `_fused_moe_tiles_kernel`; count: the upper bound of the number of tiles."""

    expert: torch.Tensor
    first: torch.Tensor
    count: int


def tiles_of(offsets: torch.Tensor, n_rows: int, block_m: int) -> Tiles:
    n_experts, device = offsets.shape[0] - 1, offsets.device
    count = cdiv(n_rows, block_m) + min(n_experts, n_rows)
    expert, first = (torch.empty(n, dtype=torch.int32, device=device) for n in (count, n_experts + 1))
    plan = TILES.plan(device, _key(n_rows, 0, 0, n_experts, 1, 0))
    args = (offsets, expert, first, count, n_experts)
    launch(plan, _fused_moe_tiles_kernel, (n_experts + 1,), args, (block_m, next_power_of_2(n_experts)))
    return Tiles(expert, first, count)
