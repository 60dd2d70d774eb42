"""Rows of any width, read and written 16 bytes at a time.

The rows of a tensor of odd width begin anywhere. A compiler that must assume so moves one element at a time: eight
times the instructions in half precision, and no asynchronous copies. A tile may begin at the last 16-byte boundary at
or before its row instead:

              boundary
    memory    |  end of row i - 1  |  the n_cols columns of row i  |  begin of row i + 1
    tile      |<------ pad ------->|<---------- n_cols ----------->|  ... to BLOCK_SIZE

Position p of the tile holds column p - pad. Loads take every 16-byte vector that holds a column of the row, and then
set what is not of the row to `other`. Stores write the vectors that are all the row's own whole, and of the vectors at
its two ends only the row's own elements.

What is read outside the row are elements of the rows beside it, and behind the end of a tensor whose bytes are no
multiple of 16, what lies between that end and the next 16-byte boundary. Such a read cannot fail: its address is a
multiple of 16, so it stays within a unit of 16 bytes that also holds an element of the tensor, and every allocator of
GPU memory gives out whole units of at least that size. (Where a 16-bit tensor and one in fp32 are read by the same
vectors, those of the latter are 32 bytes, and so is the unit: `begins_whole`.) Nothing comes of it: a selection, not a
product, replaces what was read, so that even NaN leaves no trace, and it does no harm if another program is writing
there (tests/kernels/test_read_behind.py). A mask that ended with the row instead would split every load into loads of
single elements, for the compiler sees no vector of one mask then.

VECTOR is the number of elements in a vector, from `row_vector`. It is 1 for rows that are accessed as they come: pad is
0 then, and every function here is a plain masked access. In a kernel, for one row (or rows [ROWS, 1], some of which may
not exist):

    pad = row_pad(row * stride, VECTOR)
    ptrs = X_ptr + align_down(row * stride, VECTOR) + tl.arange(0, BLOCK_SIZE)
    for start in range(0, n_cols + VECTOR - 1, BLOCK_SIZE):
        x = load_row(ptrs, start, None, pad, n_cols, 0.0, VECTOR, "", "")
        store_row(y_ptrs, f(x), start, None, pad, n_cols, VECTOR)
"""

from __future__ import annotations

import math

import torch

from ...runtime.triton_import import tl, triton

_TENSORS = (torch.Tensor, torch.nn.Parameter)


def address(t: torch.Tensor) -> int:
    """Where `t` begins, in bytes. A fake tensor (see `autotune.compile_ahead`) only has an offset into its storage."""
    return t.data_ptr() if type(t) in _TENSORS else t.storage_offset() * t.itemsize


def begins_whole(t: torch.Tensor, vector: int) -> bool:
    """Whether `t` begins at a multiple of 16 bytes, and of `vector` elements where these are more (of the wider of two
    dtypes): then no vector leaves the unit of so many bytes that its first element is in."""
    return address(t) % max(16, vector * t.itemsize) == 0


def row_vector(n_cols: int, stride: int, *tensors: torch.Tensor, width: int | None = None) -> int:
    """VECTOR for rows of `n_cols` columns, `stride` elements from one to the next in the one of `tensors` that may have
    gaps between its rows; the others are contiguous.

    width: positions of a tile that must hold a whole row with its padding; None where rows are read in many tiles.
    1 where the compiler sees the alignment itself (multiples of 16 elements), where the padding does not fit `width`,
    where a tensor does not begin at a 16-byte boundary, and where a gap moves the rows of one tensor against those of
    the others.
    """
    if n_cols & 15 == 0:
        return 1
    vector = 16 // min(t.itemsize for t in tensors)
    if width is not None and n_cols + vector - math.gcd(vector, n_cols) > width:
        return 1
    if (stride - n_cols) % vector or not all(begins_whole(t, vector) for t in tensors):
        return 1
    return vector


@triton.jit
def row_pad(offset, VECTOR: tl.constexpr):
    """Elements from the last boundary to a row that begins `offset` elements into its tensor."""
    pad = 0
    if VECTOR > 1:
        pad = (offset % VECTOR).to(tl.int32)
    return pad


@triton.jit
def align_down(offset, VECTOR: tl.constexpr):
    """The last boundary at or before `offset`, which the compiler then knows to be one."""
    if VECTOR > 1:
        offset = offset // VECTOR * VECTOR
    return offset


@triton.jit
def row_mask(start, rows_exist, pad, n_cols, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """Which of the WIDTH positions from `start` on are columns. rows_exist: [ROWS, 1], or None for a single row."""
    positions = start + tl.arange(0, WIDTH)
    if VECTOR == 1:
        mask = positions < n_cols
        if rows_exist is not None:
            mask = rows_exist & mask[None, :]
    else:
        if rows_exist is not None:
            positions = positions[None, :]
        mask = (positions >= pad) & (positions < pad + n_cols)
        if rows_exist is not None:
            mask = rows_exist & mask
    return mask


@triton.jit
def load_row(
    ptrs,
    start,
    rows_exist,
    pad,
    n_cols,
    other,
    VECTOR: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """The positions from `start` on, `other` where they are not columns; `ptrs` point at the row's first positions.

    Whole vectors are read, the last of which may end behind the tensor, within its last 16 bytes (see above).
    """
    WIDTH: tl.constexpr = ptrs.shape[len(ptrs.shape) - 1]
    mask = row_mask(start, rows_exist, pad, n_cols, WIDTH, VECTOR)
    ptrs += start
    if VECTOR == 1:
        x = tl.load(ptrs, mask=mask, other=other, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
    else:
        vectors = (start + tl.arange(0, WIDTH)) // VECTOR * VECTOR
        if rows_exist is None:
            reached = vectors < pad + n_cols
        else:
            reached = rows_exist & (vectors[None, :] < pad + n_cols)
        x = tl.load(ptrs, mask=reached, other=other, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
        x = tl.where(mask, x, other).to(x.dtype)
    return x


@triton.jit
def store_row(ptrs, value, start, rows_exist, pad, n_cols, VECTOR: tl.constexpr):
    """Write the columns among the positions from `start` on; `ptrs` as in `load_row`, `value` in any dtype."""
    WIDTH: tl.constexpr = ptrs.shape[len(ptrs.shape) - 1]
    mask = row_mask(start, rows_exist, pad, n_cols, WIDTH, VECTOR)
    ptrs += start
    value = value.to(ptrs.dtype.element_ty)
    if VECTOR == 1:
        tl.store(ptrs, value, mask=mask)
    else:
        vectors = (start + tl.arange(0, WIDTH)) // VECTOR * VECTOR
        if rows_exist is None:
            own = (vectors >= pad) & (vectors + VECTOR <= pad + n_cols)
        else:
            vectors = vectors[None, :]
            own = rows_exist & (vectors >= pad) & (vectors + VECTOR <= pad + n_cols)
        tl.store(ptrs, value, mask=own)
        if start == 0 or start + WIDTH > n_cols:  # the row's first or last vectors are in this tile
            tl.store(ptrs, value, mask=mask & ~own)
