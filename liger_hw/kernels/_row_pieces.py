"""A row in two pieces: how the norms hold rows whose width lies well below the next power of two.

A tile is a power of two wide. One of 4096 for 2304 columns leaves 44% of its lanes, registers and shared memory idle; a
piece of 2048 and one of 256 leave none. On the H200 that took rms_norm at 8192 x 2304 from 70% of the copy rate to 88%
(2026-11-21). BLOCK_SIZE is the width of the first piece and TAIL that of the second, 0 where a row has one piece.
"""

from __future__ import annotations

from ..registry import Key, next_power_of_2, row_key
from ._triton import tl, triton

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
    """`row_key`, but a row in two pieces goes with those as wide as its first: the same configurations suit both."""
    first = 1 << max(0, n_cols.bit_length() - 1)
    return row_key(n_rows, first if row_pieces(n_cols, first)[1] else n_cols, itemsize)


def widest(columns: int) -> int:
    """Columns a program may hold where the key says `columns`."""
    return columns + columns // 2 if _NARROWEST <= columns <= WIDEST_FIRST else columns


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
def _tail_piece(n_cols, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr):
    """(columns, which of them exist) of the second piece."""
    cols = BLOCK_SIZE + tl.arange(0, TAIL)
    return cols, cols < n_cols


@triton.jit
def _columns_of(W_ptr, cols, exist):
    """A parameter's columns in its own dtype, or None where there is no parameter."""
    w = None
    if W_ptr is not None:
        w = tl.load(W_ptr + cols, mask=exist, other=0.0)
    return w


PIECES = (_first_piece, _tail_piece, _columns_of)
"""For `Tunable(kernels=...)`: an entry is valid for the source of all that a kernel calls."""
