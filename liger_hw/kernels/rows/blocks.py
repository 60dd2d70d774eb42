"""Rows held whole by a program, in one block or in two.

A Triton block is a power of two wide, so a row of 2304 columns would leave 44% of a block of 4096 idle. Instead it is
held in a first block of BLOCK_SIZE columns and a second block of BLOCK_2 columns (0: no second block). Names of the
second block's columns, values and masks end in _2.

Rows that do not begin at 16 bytes have the layout of row.py: position p of the blocks holds column p - pad. The rows of
a program are VECTOR rows apart, so that they have the same pad, and weights and column sums have the same positions.

The device functions take None for a second block or a tensor that does not exist, and return None for it. They do not
return None in a tuple, which needs Triton 3.7.
"""

from __future__ import annotations

import math

import torch

from ...registry import Key, next_power_of_2, row_key
from ...runtime.load_hint import load_with_hint
from ...runtime.triton_import import tl, triton
from .row import align_down, holds_column, in_touched_vector, in_whole_vector, row_vector

_MIN_FIRST_BLOCK, _MAX_FIRST_BLOCK = 1024, 8192
"""Limits for a first block with a second block: narrower rows lose little by padding, wider rows do not fit."""

# -- how rows are laid out, on the host ------------------------------------------------------------------------------


def row_blocks(n_cols: int, block: int) -> tuple[bool, int]:
    """(whether a block of `block` columns and a second block hold n_cols columns, the width of the second block)."""
    remaining = n_cols - block
    if remaining <= 0:
        return True, 0
    # With a second block of more than half the first, one block of the next power of two is as good. A second block of
    # less than an eighth gives a thread under 4 bytes, and these loads are not pipelined.
    if remaining <= block // 2 and _MIN_FIRST_BLOCK <= block <= _MAX_FIRST_BLOCK:
        return True, max(block // 8, next_power_of_2(remaining))
    return False, 0


def max_columns(columns: int) -> int:
    """The most columns that both blocks hold, if the key has `columns`."""
    return columns + columns // 2 if _MIN_FIRST_BLOCK <= columns <= _MAX_FIRST_BLOCK else columns


def blocks_key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """`row_key` of the first block, followed by 1 for two blocks, or by 0 for one block of rows of odd width."""
    first = 1 << max(0, n_cols.bit_length() - 1)
    if row_blocks(n_cols, first)[1]:
        return (*row_key(n_rows, first, itemsize), 1)
    key = row_key(n_rows, n_cols, itemsize)
    return (*key, 0) if n_cols & 15 else key


def row_layout(n_cols: int, block: int, *tensors: torch.Tensor | None) -> tuple[bool, int, int]:
    """(WHOLE_ROW, BLOCK_2, VECTOR) for the rows of row-major tensors: the widest vectors whose pad does not add a
    second block, which would be slower than narrow vectors."""
    whole, block_2 = row_blocks(n_cols, block)
    vector = row_vector(*tensors) if whole and n_cols & 15 else 1
    while vector > 1:
        fits, padded_2 = row_blocks(n_cols + vector - math.gcd(vector, n_cols), block)
        if fits and (padded_2 > 0) == (block_2 > 0):
            return True, padded_2, vector
        vector //= 2
    return whole, block_2, 1


def count_tiles(n_rows: int, rows: int, vector: int) -> int:
    """The number of tiles in n_rows. A tile has `rows` rows that are `vector` rows apart."""
    full, remaining = divmod(n_rows, rows * vector)
    return full * vector + min(remaining, vector)


def aligned_programs(programs: int, n_tiles: int, vector: int) -> int:
    """The number of programs, about `programs` at most, with which all rows of a program have the same pad."""
    return min(n_tiles, max(vector, programs // vector * vector))


# -- rows, positions and masks ---------------------------------------------------------------------------------------


@triton.jit
def tile_count(n_rows, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """`count_tiles` on the device."""
    full = n_rows // (ROWS * VECTOR) * VECTOR
    return tl.cdiv(n_rows, ROWS) if VECTOR == 1 else full + tl.minimum(n_rows % (ROWS * VECTOR), VECTOR)


@triton.jit
def tile_rows(tile, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """The row numbers of a tile, int64: VECTOR rows apart."""
    first = tile * ROWS if VECTOR == 1 else tile // VECTOR * (VECTOR * ROWS) + tile % VECTOR
    return (first + VECTOR * tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def first_columns(start, n_cols, BLOCK_SIZE: tl.constexpr, BLOCK_2: tl.constexpr, pad=0, VECTOR: tl.constexpr = 1):
    """(positions, which of them hold columns) of the first block. With a second block and no pad, all do."""
    positions = start + tl.arange(0, BLOCK_SIZE)
    if BLOCK_2 and VECTOR == 1:
        exist = tl.full([BLOCK_SIZE], 1, tl.int1)
    else:
        exist = holds_column(positions, pad, n_cols, VECTOR)
    return positions, exist


@triton.jit
def second_columns(BLOCK_SIZE: tl.constexpr, BLOCK_2: tl.constexpr):
    """The positions of the second block, or None."""
    positions = BLOCK_SIZE + tl.arange(0, BLOCK_2) if BLOCK_2 else None
    return positions


@triton.jit
def which_exist(positions, n_cols, pad=0, VECTOR: tl.constexpr = 1):
    """Which of these positions hold columns, or None if there are no positions."""
    exist = None if positions is None else holds_column(positions, pad, n_cols, VECTOR)
    return exist


@triton.jit
def tile_mask(row_mask, exist):
    mask = None if exist is None else row_mask[:, None] & exist[None, :]
    return mask


@triton.jit
def touched_mask(row_mask, positions, pad, n_cols, VECTOR: tl.constexpr):
    """[rows, positions]: the vectors that `load_tile` reads whole, past the row's ends; None for VECTOR = 1."""
    exist = None if VECTOR == 1 or positions is None else in_touched_vector(positions, pad, n_cols, VECTOR)
    return tile_mask(row_mask, exist)


@triton.jit
def whole_mask(row_mask, positions, pad, n_cols, VECTOR: tl.constexpr):
    """[rows, positions]: the vectors that `store_tile` stores whole; None for VECTOR = 1."""
    exist = None if VECTOR == 1 or positions is None else in_whole_vector(positions, pad, n_cols, VECTOR)
    return tile_mask(row_mask, exist)


# -- loads and stores ------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(Ptr, rows, stride, positions, mask, LOAD_HINT: tl.constexpr, touched=None, VECTOR: tl.constexpr = 1):
    """A tile in the tensor's dtype, 0 outside `mask`. touched: from `touched_mask`."""
    x = None
    if Ptr is not None:
        if positions is not None:
            ptrs = Ptr + align_down(rows[:, None] * stride, VECTOR) + positions[None, :]
            read = mask if touched is None else touched
            x = load_with_hint(ptrs, LOAD_HINT, mask=read, other=0.0)
            if touched is not None:
                x = tl.where(mask, x, 0.0).to(x.dtype)
    return x


@triton.jit
def store_tile(Ptr, rows, stride, positions, value, mask, whole=None, VECTOR: tl.constexpr = 1):
    """Store a tile in the tensor's dtype. whole: from `whole_mask`."""
    ptrs = Ptr + align_down(rows[:, None] * stride, VECTOR) + positions[None, :]
    store_at(ptrs, value, mask, whole)


@triton.jit
def store_at(ptrs, value, mask, whole):
    """`store_tile` at pointers."""
    value = value.to(ptrs.dtype.element_ty)
    if whole is None:
        tl.store(ptrs, value, mask=mask)
    else:
        tl.store(ptrs, value, mask=whole)
        tl.store(ptrs, value, mask=mask & ~whole)


@triton.jit
def load_columns(Ptr, positions, exist, pad=0):
    """The elements of a tensor [n_cols] at these positions, in its dtype."""
    w = None if Ptr is None or positions is None else tl.load(Ptr + (positions - pad), mask=exist, other=0.0)
    return w


@triton.jit
def store_columns(Ptr, positions, value, exist, pad=0):
    """Store `value` at these positions of a tensor [n_cols], in its dtype."""
    tl.store(Ptr + (positions - pad), value.to(Ptr.dtype.element_ty), mask=exist)


@triton.jit
def load_row_values(Ptr, rows, row_mask):
    """A saved statistic of these rows, in the form of `as_column`."""
    return as_column(scalar_if_single(tl.load(Ptr + rows, mask=row_mask, other=0.0)))


# -- arithmetic ------------------------------------------------------------------------------------------------------


@triton.jit
def to_fp32(x):
    wide = None if x is None else x.to(tl.float32)
    return wide


@triton.jit
def load_scale(W_ptr, cols, exist, offset, pad=0):
    """offset + the weight at these positions, in fp32; offset may be None."""
    w = to_fp32(load_columns(W_ptr, cols, exist, pad))
    w = w if w is None or offset is None else w + offset
    return w


@triton.jit
def squared(x):
    result = None if x is None else x.to(tl.float32) * x.to(tl.float32)
    return result


@triton.jit
def scalar_if_single(values):
    """`values` [rows], or a scalar for a single row.

    A scalar has no layout. A tensor has the layout of one block, to which Triton would convert the other block through
    shared memory, several times per row, if the second block is too narrow for 16 bytes a thread.
    """
    return tl.sum(values, axis=0) if values.shape[0] == 1 else values


@triton.jit
def as_column(values):
    """The result of `scalar_if_single` for use with tiles: [rows, 1] or a scalar."""
    return values[:, None] if values.type.is_block() else values


@triton.jit
def row_sums(x, x_2):
    """The fp32 sum of each row over both blocks."""
    total = scalar_if_single(tl.sum(x.to(tl.float32), axis=1))
    if x_2 is not None:
        total += scalar_if_single(tl.sum(x_2.to(tl.float32), axis=1))
    return total


@triton.jit
def row_sums_of_two(a, b):
    """The sums of each row of a and of b, in one reduction across warps."""
    sum_a, sum_b = tl.split(tl.sum(tl.join(a, b), axis=1))
    return scalar_if_single(sum_a), scalar_if_single(sum_b)


@triton.jit
def keep_narrow(x, value):
    """x times a 1 that is computed from `value` [rows, 1] (0 if value is NaN: the row becomes NaN in any case).

    Without this dependence, the compiler would keep an fp32 copy of the row during the reduction that computes `value`,
    which takes more registers than the row in its 16-bit dtype.
    """
    if x.dtype != tl.float32:
        x = x * tl.where(value == value, 1.0, 0.0).to(x.dtype)
    return x
