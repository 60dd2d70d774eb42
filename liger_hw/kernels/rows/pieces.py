"""A row in two pieces: how the norms hold rows whose width lies well below the next power of two.

A tile is a power of two wide. One of 4096 for 2304 columns leaves 44% of its lanes, registers and shared memory idle; a
piece of 2048 and one of 256 leave none. On the H200 that took rms_norm at 8192 x 2304 from 70% of the copy rate to 88%
(2026-11-21). BLOCK_SIZE is the width of the first piece and TAIL that of the second, 0 where a row has one piece.
"""

from __future__ import annotations

from ...registry import Key, next_power_of_2, row_key
from ...runtime.triton_import import tl, triton

_NARROWEST, WIDEST_FIRST = 1024, 8192
"""Widths of a first piece: narrower rows lose little to padding, of wider ones a program could not hold both pieces."""


def row_pieces(n_cols: int, block: int) -> tuple[bool, int]:
    """(WHOLE_ROW, TAIL) for rows of `n_cols` in a tile of `block`: whether a tile and its tail hold them."""
    rest = n_cols - block
    if rest <= 0:
        return True, 0
    # a second piece of more than half the first would make the two as wide as the next power of two
    if rest <= block // 2 and _NARROWEST <= block <= WIDEST_FIRST:
        return True, next_power_of_2(rest)
    return False, 0


def pieces_key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """`row_key`; of a row in two pieces that of its first, and a last 1: what is best for 4096 columns took 17% longer at
    5120 than what is best there (rms_norm's forward on an H200, 2026-11-22)."""
    first = 1 << max(0, n_cols.bit_length() - 1)
    return (*row_key(n_rows, first, itemsize), 1) if row_pieces(n_cols, first)[1] else row_key(n_rows, n_cols, itemsize)


def widest(columns: int) -> int:
    """Columns a program may hold where the key says `columns`."""
    return columns + columns // 2 if _NARROWEST <= columns <= WIDEST_FIRST else columns


# Triton before 3.7 has no None in a tuple that a function returns: what may be None comes alone.


@triton.jit
def _first_piece(start, n_cols, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr):
    """(columns, which of them exist) from `start` on; before a tail all do, which the compiler then knows."""
    cols = start + tl.arange(0, BLOCK_SIZE)
    if TAIL:
        exist = tl.full([BLOCK_SIZE], 1, tl.int1)
    else:
        exist = cols < n_cols
    return cols, exist


@triton.jit
def _second_piece(BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr):
    """The columns of the second piece, or None."""
    cols = None
    if TAIL:
        cols = BLOCK_SIZE + tl.arange(0, TAIL)
    return cols


@triton.jit
def _below(cols, n_cols):
    """Which columns exist; None for a piece that is None."""
    exist = None
    if cols is not None:
        exist = cols < n_cols
    return exist


@triton.jit
def _both(row_mask, exist):
    """Which elements of one piece of a row tile exist; None for a piece that is None."""
    mask = None
    if exist is not None:
        mask = row_mask[:, None] & exist[None, :]
    return mask


@triton.jit
def _at(Ptr, rows, stride, cols):
    """Pointers [rows, cols] into a tensor, or None where there is no tensor or no such piece."""
    ptrs = None
    if Ptr is not None:
        if cols is not None:
            ptrs = Ptr + rows[:, None] * stride + cols[None, :]
    return ptrs


@triton.jit
def _load_tile(Ptr, rows, stride, cols, mask, LOAD_CACHE: tl.constexpr, LOAD_EVICT: tl.constexpr):
    """One piece of a row tile; None for a piece that is None."""
    x = None
    if cols is not None:
        ptrs = _at(Ptr, rows, stride, cols)
        x = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    return x


@triton.jit
def _wide(x):
    """x in fp32; None for a piece that is None."""
    wide = None
    if x is not None:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _columns_of(W_ptr, cols, exist):
    """A parameter's columns in its own dtype, or None where there is no parameter or no such piece."""
    w = None
    if W_ptr is not None:
        if cols is not None:
            w = tl.load(W_ptr + cols, mask=exist, other=0.0)
    return w


@triton.jit
def _one_a_row(values):
    """[rows] as it is; of a single row the number itself.

    A number has no layout. As a tensor it would have that of one piece, and Triton moves the whole other piece through
    shared memory into that layout, several times a row, where a second piece is too narrow for 16 bytes a thread.
    """
    if values.shape[0] == 1:
        values = tl.sum(values, axis=0)
    return values


@triton.jit
def _to_columns(values):
    """What `_one_a_row` gives, to be used with tiles: [rows, 1] or a number."""
    if values.type.is_block():
        values = values[:, None]
    return values


@triton.jit
def _row_sums(first, second):
    """The sum of each row over its pieces, in fp32; the second piece may be None."""
    total = _one_a_row(tl.sum(first.to(tl.float32), axis=1))
    if second is not None:
        total += _one_a_row(tl.sum(second.to(tl.float32), axis=1))
    return total


@triton.jit
def _squares(x_raw):
    """x * x in fp32; None for a piece that is None."""
    squares = None
    if x_raw is not None:
        x = x_raw.to(tl.float32)
        squares = x * x
    return squares


PIECES = (
    *(_first_piece, _second_piece, _below, _both, _at, _load_tile, _wide, _columns_of),
    *(_one_a_row, _to_columns, _row_sums, _squares),
)
"""For `Tunable(kernels=...)`: an entry is valid for the source of all that a kernel calls."""
