"""Rows of many tiles that begin anywhere: a body of whole 16-byte vectors, and the edges on both sides of it.

Rows of odd width do not begin at 16-byte boundaries, and a compiler that must assume so accesses them an element at a
time. The body of a row is what lies between the first and the last boundary in it. Its tiles are accessed 16 bytes at
a time, with masks that end at a multiple of VECTOR elements. The edges, at most VECTOR - 1 columns before and as many
behind, are one tile of 2 * VECTOR elements, which is accessed element by element, once a row, and nothing outside the
row is touched. (A kernel that holds a whole row in one tile shifts the row within the tile instead, see aligned.py:
edges need reductions of their own.)

Columns are counted from the body's first: those before it are negative. In a kernel, with VECTOR from `edge_vector`:

    head = row_head(row * stride, VECTOR)
    X_ptr += body_start(row * stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    for start in range(0, n_body, BLOCK_SIZE): ...                   # masked by cols < n_body
    if VECTOR > 1:
        cols = edge_columns(head, n_body, n_cols, VECTOR)            # masked by cols < n_cols - head

VECTOR is 1 for rows whose alignment the compiler sees. The body is the whole row then, and the code that of a kernel
without this.
"""

from __future__ import annotations

import torch

from ...runtime.triton_import import tl, triton
from .aligned import begins_whole


def edge_vector(*tensors: torch.Tensor | None) -> int:
    """VECTOR for the rows of 2D tensors of one width: elements in 16 bytes of the narrowest dtype.

    1 where rows and width are multiples of 16 elements, as far as Triton sees alignment, where a tensor does not begin
    at a 16-byte boundary, and where rows of two tensors begin at different distances from one.
    """
    given = [t for t in tensors if t is not None]
    strides = [t.stride(0) for t in given]
    if not (given[0].shape[1] | strides[0]) & 15 and len(set(strides)) == 1:
        return 1
    vector = 16 // min(t.itemsize for t in given)
    if any((stride - strides[0]) % vector for stride in strides) or not all(begins_whole(t, vector) for t in given):
        return 1
    return vector


@triton.jit
def row_head(offset, VECTOR: tl.constexpr):
    """Elements before the first boundary, in a row that begins `offset` elements into its tensor."""
    head = 0
    if VECTOR > 1:
        head = ((VECTOR - offset % VECTOR) % VECTOR).to(tl.int32)
    return head


@triton.jit
def body_start(offset, head, VECTOR: tl.constexpr):
    """Where the body begins, which the compiler then knows to be a boundary."""
    if VECTOR > 1:
        offset = (offset + head) // VECTOR * VECTOR
    return offset


@triton.jit
def body_width(n_cols, head, VECTOR: tl.constexpr):
    """Columns of the body, which the compiler then knows to be a multiple of VECTOR."""
    if VECTOR > 1:
        n_cols = tl.maximum(n_cols - head, 0) // VECTOR * VECTOR
    return n_cols


@triton.jit
def edge_columns(head, n_body, n_cols, VECTOR: tl.constexpr):
    """[2 * VECTOR] columns: those before the body, then those behind it; n_cols stands for none."""
    position = tl.arange(0, 2 * VECTOR)
    cols = tl.where(position < VECTOR, position - head, n_body + position - VECTOR)
    exist = ((position < head) | (position >= VECTOR)) & (cols < n_cols - head)
    return tl.where(exist, cols, n_cols)


@triton.jit
def tail_columns(positions, n_body, VECTOR: tl.constexpr):
    """The columns of a tile that holds the body's end, and behind it the two vectors that hold the edges.

    Columns from -head to n_cols - head are the row's. The others of these two vectors belong to its neighbours: they
    may be loaded (a vector that holds a column of the row never leaves the allocation, see aligned.py), but not stored.
    """
    if VECTOR > 1:
        edge = positions - n_body
        behind = n_body + edge - VECTOR
        positions = tl.where(edge < 0, positions, tl.where(edge < VECTOR, edge - VECTOR, behind))
    return positions
