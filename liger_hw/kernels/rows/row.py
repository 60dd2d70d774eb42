"""Rows of any width, read and written 16 bytes at a time.

If the width of a tensor is odd, its rows begin at any address. The compiler then accesses one element at a time: eight
times the instructions in half precision, and no asynchronous copies. Kernels over rows as wide as a vocabulary (50257,
128257 words) therefore access memory in vectors of VECTOR elements, 16 bytes, that begin at 16-byte boundaries:

    memory   |  .  .  a  b  |  c  d  e  f  |  g  h  i  j  |  k  .  .  .  |         a to k: one row, VECTOR = 4
             |      |<-head>|<-- body, whole vectors of the row -->|
             |<-pad>|                                              edges: the head and what follows the body

VECTOR comes from `row_vector`. It is 1 for rows whose alignment the compiler sees, and for rows that must be accessed
by element. Then head and pad are 0, the body is the whole row, and the compiled code handles no edges.

**A tile that holds a whole row** begins at the last boundary at or before the row: position p holds column p - pad.
`load_row` reads every vector that holds an element of the row, and sets the other elements to `other`. `store_row`
writes the body in vectors and the edges by element. ptrs begin at the row's `align_down`; pad is its `row_pad`.

**A row of many tiles** is read from the first column of the body on, in tiles whose masks end with the body. The edges
are one more tile of 2 * VECTOR elements, accessed by element. Columns are counted from the first column of the body, so
the columns of the head are negative:

    head = row_head(row * stride, VECTOR)
    X_ptr += body_start(row * stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    for start in range(0, n_body, BLOCK_SIZE): ...                   # masked by cols < n_body
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)            # masked by edge < n_cols - head

With `unit=LINE` the body begins at a cache line; otherwise every warp would access one line more. A kernel that does
not reduce the edges separately reads them in the row's last tile (`tail_columns`).

Why whole vectors may be read: outside the row they hold elements of neighbouring rows or, at the end of a tensor, other
memory. This read cannot fail: its address is a multiple of 16, so it stays within a unit of 16 bytes that also holds an
element of the tensor, and GPU allocators return whole units of at least 16 bytes. (If a 16-bit and an fp32 tensor are
read with one VECTOR, the fp32 vectors have 32 bytes: `_is_aligned`.) The elements outside the row are not used: a
selection replaces them, so that even NaN has no effect (tests/kernels/test_read_behind.py). A mask that ends with the
row would split every load into loads of single elements, because the compiler cannot see that a vector has one mask.
"""

from __future__ import annotations

import math

import torch

from ...runtime.checks import rows_of
from ...runtime.load_hint import load_with_hint
from ...runtime.triton_import import tl, triton

LINE = 128
"""Bytes of a cache line."""
_TYPES_WITH_ADDRESS = (torch.Tensor, torch.nn.Parameter)  # not fake tensors (autotune/fake.py)


def _is_aligned(t: torch.Tensor, vector: int) -> bool:
    """Whether `t` begins at a multiple of 16 bytes and of `vector` elements. With two dtypes, a vector of the wider
    dtype has more than 16 bytes."""
    address = t.data_ptr() if type(t) in _TYPES_WITH_ADDRESS else t.storage_offset() * t.itemsize
    return address % max(16, vector * t.itemsize) == 0


def row_vector(*tensors: torch.Tensor | None, width: int | None = None, unit: int = 16) -> int:
    """VECTOR for the rows of row-major tensors of one width: elements in 16 bytes of the narrowest dtype, or 1.

    width: positions of the tile that holds a whole row and its pad; None if a row has many tiles
    unit: LINE for the elements in a cache line, if all tensors allow it

    1 if width and strides are multiples of 16 elements, which the compiler sees; if row and pad do not fit `width`; if
    a tensor does not begin at a 16-byte boundary; or if two tensors' rows begin at different distances from a boundary.
    """
    present = [t for t in tensors if t is not None]
    strides = [rows_of(t)[2] for t in present]
    n_cols = present[0].shape[-1]
    if not n_cols & 15 and not any(stride & 15 for stride in strides):
        return 1
    for size in dict.fromkeys((unit, 16)):
        vector = size // min(t.itemsize for t in present)
        fits = width is None or n_cols + vector - math.gcd(vector, *strides) <= width
        same_offsets = not any((stride - strides[0]) % vector for stride in strides)
        # Cache lines are counted from the tensor's first element, which 16 bytes align enough: edges go by element.
        if fits and same_offsets and all(_is_aligned(t, vector if size == 16 else 1) for t in present):
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
    """[2 * VECTOR] columns: those before the body, then those after it; n_cols in place of columns outside the row."""
    position = tl.arange(0, 2 * VECTOR)
    cols = tl.where(position < VECTOR, position - head, n_body + position - VECTOR)
    exist = ((position < head) | (position >= VECTOR)) & (cols < n_cols - head)
    return tl.where(exist, cols, n_cols)


@triton.jit
def tail_columns(positions, n_body, VECTOR: tl.constexpr):
    """The columns of a row's last tile: the end of the body, then the two vectors that hold the edges.

    In these vectors, columns outside [-head, n_cols - head) belong to other rows: they may be loaded, but not stored.
    """
    if VECTOR > 1:
        edge = positions - n_body
        after_body = n_body + edge - VECTOR
        positions = tl.where(edge < 0, positions, tl.where(edge < VECTOR, edge - VECTOR, after_body))
    return positions
