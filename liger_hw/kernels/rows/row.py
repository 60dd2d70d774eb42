"""Rows of any width, read and written 16 bytes at a time.

The rows of a tensor of odd width begin anywhere. A compiler that must assume so moves one element at a time: eight
times the instructions in half precision, and no asynchronous copies. Kernels over rows as wide as a vocabulary (50257,
128257 words) therefore access memory in vectors of VECTOR elements, 16 bytes, which begin at 16-byte boundaries:

    memory   |  .  .  a  b  |  c  d  e  f  |  g  h  i  j  |  k  .  .  .  |         a to k: one row, VECTOR = 4
             |      |<-head>|<-- body, whole vectors of the row -->|
             |<-pad>|                                              edges: the head and what follows the body

VECTOR comes from `row_vector`. It is 1 for rows whose alignment the compiler sees, and for rows that must be accessed
by element: head and pad are then 0, the body is the whole row, and the compiled code handles no edges.

**A tile that holds a whole row** begins at the last boundary at or before it: position p holds column p - pad. Loads
take every vector that holds an element of the row, and then set the other elements to `other`. Stores write the body in
vectors and the edges by element (`load_row`, `store_row`; ptrs begin at `align_down` of the row, pad is its `row_pad`).

**A row of many tiles** is read from the body's first column on, in tiles whose masks end with the body, and its edges
are one more tile of 2 * VECTOR elements, accessed by element. Columns are counted from the body's first, so that the
columns of the head are negative:

    head = row_head(row * stride, VECTOR)
    X_ptr += body_start(row * stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    for start in range(0, n_body, BLOCK_SIZE): ...                   # masked by cols < n_body
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)            # masked by edge < n_cols - head

With `unit=LINE` the body begins at a cache line: if it began inside one, every warp would access one line more. A
kernel that should not reduce the edges separately reads them in the row's last tile (`tail_columns`).

Why whole vectors may be read: outside the row they hold elements of its neighbours or, at the end of a tensor, what
lies behind that end. Such a read cannot fail: its address is a multiple of 16, so it stays within a unit of 16 bytes
that also holds an element of the tensor, and every allocator of GPU memory gives out whole units of at least that size.
(Where a 16-bit and an fp32 tensor are read by the same vectors, a vector of the latter is 32 bytes: `begins_whole`.)
Nothing of it is used: a selection replaces it, so that even NaN has no effect (tests/kernels/test_read_behind.py). A
mask that ended with the row would split every load into loads of single elements, because the compiler could not see
that a vector has one mask.
"""

from __future__ import annotations

import math

import torch

from ...runtime.checks import rows_of
from ...runtime.load_hint import load_with_hint
from ...runtime.triton_import import tl, triton

LINE = 128
"""Bytes of a cache line."""
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def begins_whole(t: torch.Tensor, vector: int) -> bool:
    """Whether `t` begins at a multiple of 16 bytes, or of `vector` elements if those are more (for the wider of two
    dtypes), so that each vector stays within one unit of that size."""
    # a fake tensor (autotune/fake.py) has no address
    address = t.data_ptr() if type(t) in _TENSORS else t.storage_offset() * t.itemsize
    return address % max(16, vector * t.itemsize) == 0


def row_vector(*tensors: torch.Tensor | None, width: int | None = None, unit: int = 16) -> int:
    """VECTOR for the rows of row-major tensors of one width: elements in 16 bytes of the narrowest dtype, or 1.

    width: positions of the tile that holds a whole row with its pad; None where rows are read in many tiles
    unit: LINE for the elements in a cache line, if all tensors allow it

    1 where width and strides are multiples of 16 elements, which the compiler sees; where the pad does not fit `width`;
    where a tensor does not begin at a 16-byte boundary; where rows of two tensors begin at different distances from it.
    """
    present = [t for t in tensors if t is not None]
    strides = [rows_of(t)[2] for t in present]
    n_cols = present[0].shape[-1]
    if not n_cols & 15 and not any(stride & 15 for stride in strides):
        return 1
    for size in dict.fromkeys((unit, 16)):
        vector = size // min(t.itemsize for t in present)
        fits = width is None or n_cols + vector - math.gcd(vector, *strides) <= width
        together = not any((stride - strides[0]) % vector for stride in strides)
        # a cache line may be counted from the tensor's begin, as edges are then accessed by element
        if fits and together and all(begins_whole(t, vector if size == 16 else 1) for t in present):
            return vector
    return 1


# -- a tile that holds whole rows ------------------------------------------------------------------------------------


@triton.jit
def row_pad(offset, VECTOR: tl.constexpr):
    """Elements from the last boundary to a row that begins `offset` elements into its tensor."""
    return (offset % VECTOR).to(tl.int32) if VECTOR > 1 else 0


@triton.jit
def align_down(offset, VECTOR: tl.constexpr):
    """The last boundary at or before `offset`, written so that the compiler sees the alignment."""
    return offset // VECTOR * VECTOR if VECTOR > 1 else offset


@triton.jit
def holds_column(positions, pad, n_cols, VECTOR: tl.constexpr):
    """Which positions hold columns of the row."""
    return positions < n_cols if VECTOR == 1 else (positions >= pad) & (positions < pad + n_cols)


@triton.jit
def in_touched_vector(positions, pad, n_cols, VECTOR: tl.constexpr):
    """Which positions are in a vector that begins before the row ends."""
    return positions // VECTOR * VECTOR < pad + n_cols


@triton.jit
def in_whole_vector(positions, pad, n_cols, VECTOR: tl.constexpr):
    """Which positions are in a vector that holds only columns of the row."""
    vectors = positions // VECTOR * VECTOR
    return (vectors >= pad) & (vectors + VECTOR <= pad + n_cols)


@triton.jit
def _row_mask(rows_exist, pad, n_cols, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """[rows, WIDTH]: which positions hold columns."""
    positions = tl.arange(0, WIDTH)
    exist = (positions < n_cols)[None, :] if VECTOR == 1 else holds_column(positions[None, :], pad, n_cols, VECTOR)
    return rows_exist & exist


@triton.jit
def load_row(ptrs, rows_exist, pad, n_cols, other, VECTOR: tl.constexpr, LOAD_HINT: tl.constexpr):
    """The rows at `ptrs` [rows, positions], `other` outside of them. rows_exist, pad: [rows, 1]."""
    mask = _row_mask(rows_exist, pad, n_cols, ptrs.shape[1], VECTOR)
    if VECTOR == 1:
        x = load_with_hint(ptrs, LOAD_HINT, mask=mask, other=other)
    else:
        touched = rows_exist & in_touched_vector(tl.arange(0, ptrs.shape[1])[None, :], pad, n_cols, VECTOR)
        x = load_with_hint(ptrs, LOAD_HINT, mask=touched, other=other)
        x = tl.where(mask, x, other).to(x.dtype)
    return x


@triton.jit
def store_row(ptrs, value, rows_exist, pad, n_cols, VECTOR: tl.constexpr):
    """Write the columns of `value` at the `ptrs` of `load_row`: the body in vectors, the edges by element."""
    mask = _row_mask(rows_exist, pad, n_cols, ptrs.shape[1], VECTOR)
    value = value.to(ptrs.dtype.element_ty)
    if VECTOR == 1:
        tl.store(ptrs, value, mask=mask)
    else:
        body = rows_exist & in_whole_vector(tl.arange(0, ptrs.shape[1])[None, :], pad, n_cols, VECTOR)
        tl.store(ptrs, value, mask=body)
        tl.store(ptrs, value, mask=mask & ~body)


# -- a row of many tiles ---------------------------------------------------------------------------------------------


@triton.jit
def row_head(offset, VECTOR: tl.constexpr):
    """Elements before the first boundary, in a row that begins `offset` elements into its tensor."""
    return ((VECTOR - offset % VECTOR) % VECTOR).to(tl.int32) if VECTOR > 1 else 0


@triton.jit
def body_start(offset, head, VECTOR: tl.constexpr):
    """Where the body begins, written so that the compiler sees the alignment."""
    return (offset + head) // VECTOR * VECTOR if VECTOR > 1 else offset


@triton.jit
def body_width(n_cols, head, VECTOR: tl.constexpr):
    """Columns of the body, written so that the compiler sees a multiple of VECTOR."""
    return tl.maximum(n_cols - head, 0) // VECTOR * VECTOR if VECTOR > 1 else n_cols


@triton.jit
def edge_columns(head, n_body, n_cols, VECTOR: tl.constexpr):
    """[2 * VECTOR] columns: those before the body, then those behind it; n_cols for columns that do not exist."""
    position = tl.arange(0, 2 * VECTOR)
    cols = tl.where(position < VECTOR, position - head, n_body + position - VECTOR)
    exist = ((position < head) | (position >= VECTOR)) & (cols < n_cols - head)
    return tl.where(exist, cols, n_cols)


@triton.jit
def tail_columns(positions, n_body, VECTOR: tl.constexpr):
    """The columns of a tile that holds the body's end, and behind it the two vectors that hold the edges.

    There, columns outside [-head, n_cols - head) belong to the row's neighbours: they may be loaded, but not stored.
    """
    if VECTOR > 1:
        edge = positions - n_body
        behind = n_body + edge - VECTOR
        positions = tl.where(edge < 0, positions, tl.where(edge < VECTOR, edge - VECTOR, behind))
    return positions
