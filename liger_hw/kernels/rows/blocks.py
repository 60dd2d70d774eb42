"""Rows held whole by a program: in one block or two, at any alignment.

Two blocks. A Triton block is a power of two wide, so 2304 columns would leave 44% of a block of 4096 idle. Such a row
is held in a main block of BLOCK_SIZE columns and a tail of TAIL columns (0: there is no tail).

Any alignment. Where the width of a row is odd, the next row begins anywhere, and the compiler must then access one
element at a time. But the skew of a row, the number of elements by which it begins behind an aligned boundary, is the
same for all rows that are a multiple of VECTOR rows apart. So a program takes such rows only: its lanes begin at the
boundary, and lane l holds column l - skew. It loads whole vectors of VECTOR lanes and sets what is not of the row to 0
(row.py says why such a load cannot fail and why nothing comes of it). It stores whole vectors but for the two at
the ends of the row, whose elements it stores singly. With VECTOR = 1 lanes are columns, and nothing is masked but
the end of a row.

The device functions take None for a tail that does not exist, or a tensor that was not given, and return None for it.
They return such values alone: Triton before 3.7 takes no None in a tuple that a function returns, and before 3.3 no
tuple as an argument.
"""

from __future__ import annotations

import torch

from ...registry import Key, next_power_of_2, row_key
from ...runtime.triton_import import tl, triton
from .row import begins_whole

_NARROWEST_MAIN, WIDEST_MAIN = 1024, 8192
"""Widths of a main block beside a tail: narrower rows lose little to padding, of wider ones no program could hold
both."""

# -- how rows are laid out, on the host ------------------------------------------------------------------------------


def row_blocks(n_cols: int, block: int) -> tuple[bool, int]:
    """(WHOLE_ROW, TAIL) of rows of `n_cols`: whether a block of `block` columns and a tail hold them, and the tail."""
    rest = n_cols - block
    if rest <= 0:
        return True, 0
    # a tail of more than half the main block would make the two as wide as the next power of two
    if rest <= block // 2 and _NARROWEST_MAIN <= block <= WIDEST_MAIN:
        return True, next_power_of_2(rest)
    return False, 0


def held_columns(columns: int) -> int:
    """Columns that a program may have to hold, main block and tail, where the key says `columns`."""
    return columns + columns // 2 if _NARROWEST_MAIN <= columns <= WIDEST_MAIN else columns


def blocks_key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """`row_key`; of a row in two blocks that of its main block, and a last 1."""
    main = 1 << max(0, n_cols.bit_length() - 1)
    if row_blocks(n_cols, main)[1]:
        return (*row_key(n_rows, main, itemsize), 1)
    return row_key(n_rows, n_cols, itemsize)


def aligned_key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """`blocks_key`, with a last 0 where rows begin at any alignment: their masks want other configurations."""
    vector = _widest_vector(n_cols, itemsize)
    key = blocks_key(n_rows, n_cols + vector - 1, itemsize)
    return key if vector == 1 else (*key[:3], 0)


def is_unaligned(key: Key) -> bool:
    """Whether an `aligned_key` is of rows that begin at any alignment."""
    return key[3:] == (0,)


def vector_width(n_rows: int, n_cols: int, *tensors: torch.Tensor | None, whole_rows: bool = True) -> int:
    """VECTOR for row-major `tensors` of [n_rows, n_cols], which must all begin at one alignment; else 1.

    whole_rows: whether a program holds whole rows, whose skew must then not need a wider block.
    """
    vector = _widest_vector(n_cols, tensors[0].itemsize, whole_rows)
    if vector == 1 or n_rows == 1:
        return 1
    for t in tensors:
        if t is not None and not (t.is_contiguous() and begins_whole(t, vector)):
            return 1
    return vector


def _widest_vector(n_cols: int, itemsize: int, whole_rows: bool = True) -> int:
    """Elements of 16 bytes, or two where that many more lanes would need a wider block; 1 where rows begin at 16 bytes
    as far as Triton sees: their width is a multiple of 16 elements."""
    if n_cols & 15 == 0:
        return 1
    vector = 16 // itemsize
    if n_cols < 4 * vector or whole_rows and next_power_of_2(n_cols + vector - 1) > next_power_of_2(n_cols):
        return 2
    return vector


def lay_out(n_cols: int, block: int, vector: int) -> tuple[bool, int, int]:
    """(WHOLE_ROW, TAIL, VECTOR) of rows of `n_cols` in blocks of `block`; rows too wide for that have VECTOR = 1."""
    whole, tail = row_blocks(n_cols + vector - 1, block)
    return (True, tail, vector) if whole else (*row_blocks(n_cols, block), 1)


def count_tiles(n_rows: int, rows: int, vector: int) -> int:
    """Tiles of `rows` rows in `n_rows`, as `tile_rows` counts them."""
    return -(-n_rows // (rows * vector)) * vector


def count_programs(programs: int, n_tiles: int, vector: int) -> int:
    """Programs, at most `programs`, that share `n_tiles` tiles: each keeps to rows of one skew."""
    return max(vector, min(programs, n_tiles) // vector * vector)


# -- where a program's rows and columns are --------------------------------------------------------------------------


@triton.jit
def tile_rows(tile, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """The rows of a tile, int64: next to each other, or VECTOR apart."""
    if VECTOR == 1:
        rows = tile * ROWS + tl.arange(0, ROWS)
    else:
        rows = tile // VECTOR * (VECTOR * ROWS) + tile % VECTOR + VECTOR * tl.arange(0, ROWS)
    return rows.to(tl.int64)


@triton.jit
def tile_skew(tile, n_cols, VECTOR: tl.constexpr):
    """The skew of the rows of this tile, and of all tiles that are a multiple of VECTOR behind it."""
    skew = 0
    if VECTOR > 1:
        skew = ((tile % VECTOR) * (n_cols % VECTOR) % VECTOR).to(tl.int32)
    return skew


@triton.jit
def main_lanes(start, skew, n_cols, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr, VECTOR: tl.constexpr):
    """(lanes, which of them are columns) of the main block. Before a tail all are, which the compiler then knows."""
    lanes = start + tl.arange(0, BLOCK_SIZE)
    if VECTOR > 1:
        exist = are_columns(lanes, skew, n_cols, VECTOR)
    elif TAIL:
        exist = tl.full([BLOCK_SIZE], 1, tl.int1)
    else:
        exist = lanes < n_cols
    return lanes, exist


@triton.jit
def tail_lanes(BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr):
    """The lanes of the tail, or None."""
    lanes = None
    if TAIL:
        lanes = BLOCK_SIZE + tl.arange(0, TAIL)
    return lanes


@triton.jit
def are_columns(lanes, skew, n_cols, VECTOR: tl.constexpr):
    """Which lanes are columns of the row."""
    exist = None
    if lanes is not None:
        exist = lanes < n_cols + skew
        if VECTOR > 1:
            exist = exist & (lanes >= skew)
    return exist


@triton.jit
def tile_mask(row_mask, exist):
    """[rows, lanes]: which elements of a tile exist."""
    mask = None
    if exist is not None:
        mask = row_mask[:, None] & exist[None, :]
    return mask


# -- loads and stores ------------------------------------------------------------------------------------------------


@triton.jit
def tile_ptrs(Ptr, rows, stride, lanes, VECTOR: tl.constexpr):
    """Pointers [rows, lanes]."""
    ptrs = None
    if Ptr is not None:
        if lanes is not None:
            if VECTOR == 1:
                ptrs = Ptr + rows[:, None] * stride + lanes[None, :]
            else:
                ptrs = Ptr + (rows * stride // VECTOR * VECTOR)[:, None] + lanes[None, :]
    return ptrs


@triton.jit
def load_tile(Ptr, rows, stride, cols, mask, LOAD_CACHE: tl.constexpr, LOAD_EVICT: tl.constexpr):
    """A tile in the tensor's own dtype, 0 outside `mask`."""
    x = None
    ptrs = tile_ptrs(Ptr, rows, stride, cols, 1)
    if ptrs is not None:
        x = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    return x


@triton.jit
def load_skewed_tile(
    Ptr,
    rows,
    stride,
    lanes,
    mask,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    VECTOR: tl.constexpr,
    row_mask,
    skew,
    n_cols,
):
    """`load_tile` of rows of any alignment: vectors that hold an element of a row are loaded whole.

    Of the tensor's last row this reads up to the end of the tensor's last 16 bytes, at most 16 bytes less one element
    behind its end. What is not of the row becomes 0, whatever it was.
    """
    x = None
    ptrs = tile_ptrs(Ptr, rows, stride, lanes, VECTOR)
    if ptrs is not None:
        if VECTOR == 1:
            x = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        else:
            touched = row_mask[:, None] & (lanes // VECTOR * VECTOR < n_cols + skew)[None, :]
            x = tl.load(ptrs, mask=touched, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            x = tl.where(mask, x, 0.0)
    return x


@triton.jit
def store_tile(Ptr, rows, stride, cols, value, mask):
    """Store a tile in the tensor's dtype."""
    ptrs = tile_ptrs(Ptr, rows, stride, cols, 1)
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def store_skewed_tile(Ptr, rows, stride, lanes, value, mask, VECTOR: tl.constexpr, row_mask, skew, n_cols):
    """`store_tile` of rows of any alignment: vectors of one row alone are stored whole, all else by element."""
    store_vectors(tile_ptrs(Ptr, rows, stride, lanes, VECTOR), lanes, value, mask, VECTOR, row_mask, skew, n_cols)


@triton.jit
def store_vectors(ptrs, lanes, value, mask, VECTOR: tl.constexpr, row_mask, skew, n_cols):
    """`store_skewed_tile` at pointers that `tile_ptrs` gave."""
    value = value.to(ptrs.dtype.element_ty)
    if VECTOR == 1:
        tl.store(ptrs, value, mask=mask)
    else:
        first = lanes // VECTOR * VECTOR
        inside = row_mask[:, None] & ((first >= skew) & (first + VECTOR <= n_cols + skew))[None, :]
        tl.store(ptrs, value, mask=inside)
        tl.store(ptrs, value, mask=mask & ~inside)


@triton.jit
def load_columns(Ptr, lanes, exist, skew):
    """The columns of these lanes of a vector, as a weight, in its own dtype."""
    w = None
    if Ptr is not None:
        if lanes is not None:
            w = tl.load(Ptr + (lanes - skew), mask=exist, other=0.0)
    return w


@triton.jit
def store_columns(Ptr, lanes, value, exist, skew):
    """Store the columns of these lanes of a vector, in its dtype."""
    tl.store(Ptr + (lanes - skew), value.to(Ptr.dtype.element_ty), mask=exist)


@triton.jit
def load_row_values(Ptr, rows, row_mask):
    """A saved statistic of these rows, to be used with tiles."""
    return as_column(scalar_if_single(tl.load(Ptr + rows, mask=row_mask, other=0.0)))


# -- arithmetic ------------------------------------------------------------------------------------------------------


@triton.jit
def to_fp32(x):
    """x in fp32."""
    wide = None
    if x is not None:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def squared(x):
    """x * x in fp32."""
    result = None
    if x is not None:
        wide = x.to(tl.float32)
        result = wide * wide
    return result


@triton.jit
def scalar_if_single(values):
    """[rows] as it is; of a single row the scalar.

    A scalar has no layout. As a tensor it would have the layout of one block, and Triton would move the whole other
    block through shared memory into it, several times a row, where a tail is too narrow for 16 bytes a thread.
    """
    if values.shape[0] == 1:
        values = tl.sum(values, axis=0)
    return values


@triton.jit
def as_column(values):
    """What `scalar_if_single` gives, to be used with tiles: [rows, 1] or a scalar."""
    if values.type.is_block():
        values = values[:, None]
    return values


@triton.jit
def row_sums(main, tail):
    """The fp32 sum of each row over its main block and its tail."""
    total = scalar_if_single(tl.sum(main.to(tl.float32), axis=1))
    if tail is not None:
        total += scalar_if_single(tl.sum(tail.to(tl.float32), axis=1))
    return total


@triton.jit
def row_sums_of_two(a, b):
    """The sums of each row of a and of b, in one exchange between the warps."""
    sum_a, sum_b = tl.split(tl.sum(tl.join(a, b), axis=1))
    return scalar_if_single(sum_a), scalar_if_single(sum_b)


@triton.jit
def keep_narrow(x, value):
    """x itself, but only once `value` [rows, 1] is known: it is multiplied by a one that depends on it.

    This keeps a row in its own narrow dtype across a reduction. The compiler would keep the fp32 copy instead, which
    takes registers that other programs could use, or more than there are. (A NaN `value` makes the row NaN in any
    case.)
    """
    if x.dtype != tl.float32:
        x = x * tl.where(value == value, 1.0, 0.0).to(x.dtype)
    return x
