"""Rows that do not begin at 16 bytes, read as wide as those that do.

Where a row's width is odd, the next row begins anywhere, and a compiler that must assume so reads and writes one element
at a time: eight times the instructions in half precision, nothing copied asynchronously. But a row's lead, how far it
begins behind a boundary of GROUP elements, is the same for all rows that are a multiple of GROUP apart. So a program takes
such rows only. Its lanes begin at the boundary; lane l holds column l - lead. It reads whole groups of lanes (a group that
holds an element of the row lies in the row's memory page), sets what is not of the row to 0, and writes whole groups but
for the two at the ends. Weights are read and their gradients left with that lead, once a program.

GROUP is 1 for rows that are read as they come: lanes are columns then, and every function here is what it was without.
"""

from __future__ import annotations

import torch

from ...registry import Key, next_power_of_2
from ...runtime.triton_import import tl, triton
from .pieces import _at, _below, _first_piece, pieces_key, row_pieces

_REAL = (torch.Tensor, torch.nn.Parameter)


def _address(t: torch.Tensor) -> int:
    """Where `t` begins. A fake tensor (see `autotune.compile_ahead`) has no address, only a place in its storage."""
    return t.data_ptr() if type(t) in _REAL else t.storage_offset() * t.itemsize


def _widest_group(n_cols: int, itemsize: int, whole_rows: bool = True) -> int:
    """16 bytes, or two elements where tiles hold whole rows and that of n_cols would not fit more lanes; 1 where rows begin
    at 16 bytes as far as Triton sees: their width is a multiple of 16 elements."""
    if n_cols & 15 == 0:
        return 1
    group = 16 // itemsize
    if n_cols < 4 * group or whole_rows and next_power_of_2(n_cols + group - 1) > next_power_of_2(n_cols):
        return 2
    return group


def row_group(n_rows: int, n_cols: int, *tensors: torch.Tensor | None, whole_rows: bool = True) -> int:
    """GROUP for row-major `tensors` of [n_rows, n_cols], which must all begin alike; else 1.

    On the H200 forward and backward of fused_add_rms_norm took 82 us instead of 250 at 8192 x 2047 and 692 instead of 1059
    at 16384 x 8191, of rms_norm 514 instead of 611 there (2026-11-22); groups of 16 bytes with a second piece for the
    lanes that do not fit were no faster than two elements.
    """
    group = _widest_group(n_cols, tensors[0].itemsize, whole_rows)
    if group == 1 or n_rows == 1:
        return 1
    for t in tensors:
        if t is not None and (not t.is_contiguous() or _address(t) & 15):
            return 1
    return group


def grouped_key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """`pieces_key`, and a last 0 where rows do not begin at 16 bytes: with their masks and parts of groups they want other
    configurations. On the H200 4095 columns took 22 us with the best of 4096, by 4 warps, and 12 by 8 (2026-11-22)."""
    group = _widest_group(n_cols, itemsize)
    key = pieces_key(n_rows, n_cols + group - 1, itemsize)
    return key if group == 1 else (*key[:3], 0)


def begin_anywhere(key: Key) -> bool:
    """Whether a `grouped_key` is of rows that do not begin at 16 bytes."""
    return key[3:] == (0,)


def group_pieces(n_cols: int, block: int, group: int) -> tuple[bool, int, int]:
    """(WHOLE_ROW, TAIL, GROUP) for rows of `n_cols` in a tile of `block`; rows that it does not hold are read as they come."""
    whole, tail = row_pieces(n_cols + group - 1, block)
    return (True, tail, group) if whole else (*row_pieces(n_cols, block), 1)


def tiles_of(n_rows: int, rows: int, group: int) -> int:
    """Tiles of `rows` rows in `n_rows`, as `_tile_rows` counts them."""
    return -(-n_rows // (rows * group)) * group


def programs_of(programs: int, n_tiles: int, group: int) -> int:
    """How many programs share `n_tiles` tiles when there may be `programs`: each keeps to rows of one lead."""
    return max(group, min(programs, n_tiles) // group * group)


@triton.jit
def _tile_rows(tile, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The rows of a tile: next to each other, or GROUP apart."""
    if GROUP == 1:
        rows = tile * ROWS + tl.arange(0, ROWS)
    else:
        rows = tile // GROUP * (GROUP * ROWS) + tile % GROUP + GROUP * tl.arange(0, ROWS)
    return rows.to(tl.int64)


@triton.jit
def _lead_of(tile, n_cols, GROUP: tl.constexpr):
    """How far the rows of this tile, and of all a multiple of GROUP tiles behind it, begin behind a boundary."""
    lead = 0
    if GROUP > 1:
        lead = ((tile % GROUP) * (n_cols % GROUP) % GROUP).to(tl.int32)
    return lead


@triton.jit
def _first_lanes(start, lead, n_cols, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr):
    """(lanes, which of them are columns) from `start` on."""
    if GROUP == 1:
        lanes, exist = _first_piece(start, n_cols, BLOCK_SIZE, TAIL)
    else:
        lanes = start + tl.arange(0, BLOCK_SIZE)
        exist = _are_columns(lanes, lead, n_cols, GROUP)
    return lanes, exist


@triton.jit
def _are_columns(lanes, lead, n_cols, GROUP: tl.constexpr):
    """Which lanes are columns; None for a piece that is None."""
    exist = _below(lanes, n_cols + lead)
    if GROUP > 1:
        if lanes is not None:
            exist = exist & (lanes >= lead)
    return exist


@triton.jit
def _columns(lanes, lead, GROUP: tl.constexpr):
    """The columns of the lanes; None for a piece that is None."""
    cols = lanes
    if GROUP > 1:
        if lanes is not None:
            cols = lanes - lead
    return cols


@triton.jit
def _places(Ptr, rows, stride, lanes, GROUP: tl.constexpr):
    """Pointers [rows, lanes] into a tensor, or None where there is no tensor or no such piece."""
    ptrs = None
    if GROUP == 1:
        ptrs = _at(Ptr, rows, stride, lanes)
    elif Ptr is not None:
        if lanes is not None:
            ptrs = Ptr + (rows * stride // GROUP * GROUP)[:, None] + lanes[None, :]
    return ptrs


@triton.jit
def _load_part(
    ptrs,
    lanes,
    mask,
    row_mask,
    lead,
    n_cols,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """What is there, 0 where `mask` is not; None where there are no pointers. Groups that a row reaches are read whole."""
    x = None
    if ptrs is not None:
        if GROUP == 1:
            x = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        else:
            reached = row_mask[:, None] & (lanes // GROUP * GROUP < n_cols + lead)[None, :]
            x = tl.load(ptrs, mask=reached, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            x = tl.where(mask, x, 0.0)
    return x


@triton.jit
def _store_part(ptrs, value, lanes, mask, row_mask, lead, n_cols, GROUP: tl.constexpr):
    """Groups that are of this row alone are written whole, of the two at its ends the elements that are."""
    value = value.to(ptrs.dtype.element_ty)
    if GROUP == 1:
        tl.store(ptrs, value, mask=mask)
    else:
        first = lanes // GROUP * GROUP
        own = row_mask[:, None] & ((first >= lead) & (first + GROUP <= n_cols + lead))[None, :]
        tl.store(ptrs, value, mask=own)
        tl.store(ptrs, value, mask=mask & ~own)


GROUPS = (
    *(_tile_rows, _lead_of, _first_lanes, _are_columns, _columns),
    *(_places, _load_part, _store_part, _first_piece, _below, _at),
)
"""For `Tunable(kernels=...)`: an entry is valid for the source of all that a kernel calls."""
