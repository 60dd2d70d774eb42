"""Kernels of the rotary embeddings, over tiles of heads and over elements; the formulas are in rotary.py."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.dependent_launch import wait_for_previous
from ...runtime.load_hint import load_with_hint
from ...runtime.triton_import import tl, triton


class Strides(NamedTuple):
    """Strides of q, k or an output, in elements."""

    batch: int
    head: int
    token: int


class AngleStrides(NamedTuple):
    """Strides of cos and sin, in elements."""

    batch: int
    token: int
    plane: int = 0


class Head(NamedTuple):
    """The columns of a head: `half` pairs, then `pass_through` columns; block_half, block_pass: both as powers of two.

    align: all strides are multiples of this number of elements (Triton detects only multiples of 16)
    """

    half: int
    pass_through: int
    block_half: int
    block_pass: int
    align: int = 1


class Tiles(NamedTuple):
    """How the tiles of `_rotary_kernel` are distributed over its grid.

    block_k: heads of k of a program; head_tiles: programs that share the heads of a token
    batch_on_grid: the batch is the grid's second axis and n_tokens is the length of a sequence; else n_tokens is the
    number of all tokens, and programs divide by seq_len
    angles_per_head: every head loads its angles
    """

    block_k: int
    head_tiles: int
    batch_on_grid: bool
    angles_per_head: bool


# -- helpers of tiles [heads, tokens, columns] or [tokens, heads, columns] -------------------------------------------


@triton.jit
def rotate(x1, x2, cos1, cos2, sin1, sin2, BACKWARD: tl.constexpr):
    """The rotated pairs, in the dtype of x1 and x2."""
    a, b = x1.to(tl.float32), x2.to(tl.float32)
    if BACKWARD:
        y1 = a * cos1 + b * sin2
        y2 = b * cos2 - a * sin1
    else:
        y1 = a * cos1 - b * sin1
        y2 = b * cos2 + a * sin2
    return y1.to(x1.dtype), y2.to(x2.dtype)


@triton.jit
def along_tokens(x, HEADS_FIRST: tl.constexpr):
    """x [tokens] as a tile [1, tokens, 1] or [tokens, 1, 1]."""
    if HEADS_FIRST:
        return x[None, :, None]
    else:
        return x[:, None, None]


@triton.jit
def along_heads(x, HEADS_FIRST: tl.constexpr):
    """x [heads] as a tile [heads, 1, 1] or [1, heads, 1]."""
    if HEADS_FIRST:
        return x[:, None, None]
    else:
        return x[None, :, None]


@triton.jit
def repeat_heads(x, N_HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """A tile of one head, repeated for N_HEADS."""
    if HEADS_FIRST:
        return tl.broadcast_to(x, [N_HEADS, x.shape[1], x.shape[2]])
    else:
        return tl.broadcast_to(x, [x.shape[0], N_HEADS, x.shape[2]])


@triton.jit
def row_offsets(batch, token, heads, strides, ALIGN: tl.constexpr, HEADS_FIRST: tl.constexpr = True):
    """Offset of each (head, token), [heads, tokens, 1] or [tokens, heads, 1]: multiples of ALIGN elements.

    Alignment hints are given for vectors: Triton's coalescing pass (3.6 to 3.9) fails for a hinted tile of one element.
    """
    rows = along_tokens(tl.multiple_of(batch * strides.batch + token * strides.token, ALIGN), HEADS_FIRST)
    return rows + along_heads(tl.multiple_of(heads.to(tl.int64) * strides.head, ALIGN), HEADS_FIRST)


@triton.jit
def load_heads(ptrs, mask, HEAD: tl.constexpr, IS_PAIRS: tl.constexpr, LOAD_HINT: tl.constexpr):
    """(x1, x2, x3) of the heads at `ptrs` [., ., 1], in the tensor's dtype: the pairs, [., ., block_half] each, and the
    columns that pass through, [., ., block_pass], or x1 if there are none."""
    if IS_PAIRS:
        both = tl.arange(0, 2 * HEAD.block_half)[None, None, :]
        x = load_with_hint(ptrs + both, LOAD_HINT, mask & (both < 2 * HEAD.half), 0.0)
        x1, x2 = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], HEAD.block_half, 2]))
    else:
        cols = tl.arange(0, HEAD.block_half)[None, None, :]
        x1 = load_with_hint(ptrs + cols, LOAD_HINT, mask & (cols < HEAD.half), 0.0)
        x2 = load_with_hint(ptrs + cols + HEAD.half, LOAD_HINT, mask & (cols < HEAD.half), 0.0)
    x3 = x1
    if HEAD.pass_through:
        passing = tl.arange(0, HEAD.block_pass)[None, None, :]
        x3 = load_with_hint(ptrs + passing + 2 * HEAD.half, LOAD_HINT, mask & (passing < HEAD.pass_through), 0.0)
    return x1, x2, x3


@triton.jit
def store_heads(ptrs, y1, y2, y3, mask, HEAD: tl.constexpr, IS_PAIRS: tl.constexpr):
    """Store pairs (y1, y2) and columns y3 that pass through, laid out as `load_heads` returns them."""
    dtype: tl.constexpr = ptrs.dtype.element_ty
    if IS_PAIRS:
        both = tl.arange(0, 2 * y1.shape[2])[None, None, :]
        y = tl.reshape(tl.join(y1, y2), [y1.shape[0], y1.shape[1], 2 * y1.shape[2]])
        tl.store(ptrs + both, y.to(dtype), mask=mask & (both < 2 * HEAD.half))
    else:
        cols = tl.arange(0, y1.shape[2])[None, None, :]
        tl.store(ptrs + cols, y1.to(dtype), mask=mask & (cols < HEAD.half))
        tl.store(ptrs + cols + HEAD.half, y2.to(dtype), mask=mask & (cols < HEAD.half))
    if HEAD.pass_through:
        passing = tl.arange(0, y3.shape[2])[None, None, :]
        tl.store(ptrs + passing + 2 * HEAD.half, y3.to(dtype), mask=mask & (passing < HEAD.pass_through))


@triton.jit
def load_angles(
    Cos_ptr, Sin_ptr, offsets, mask, HEAD: tl.constexpr, ANGLES: tl.constexpr, HEADS_FIRST: tl.constexpr = True
):
    """(cos1, cos2, sin1, sin2), fp32 [., ., block_half]. offsets: of rows, [., ., 1]; with sections [., ., columns]."""
    if ANGLES >= 2:
        both = tl.arange(0, 2 * HEAD.block_half)[None, None, :]
        inside = mask & (both < 2 * HEAD.half)
        cos = tl.load(Cos_ptr + offsets + both, mask=inside, other=0.0).to(tl.float32)
        cos1, cos2 = tl.split(tl.reshape(cos, [cos.shape[0], cos.shape[1], HEAD.block_half, 2]))
        if ANGLES == 3:
            sin1 = cos2
            sin2 = cos2
            cos2 = cos1
        else:
            sin = tl.load(Sin_ptr + offsets + both, mask=inside, other=0.0).to(tl.float32)
            sin1, sin2 = tl.split(tl.reshape(sin, [sin.shape[0], sin.shape[1], HEAD.block_half, 2]))
    else:
        cols = tl.arange(0, HEAD.block_half)[None, None, :]
        inside = mask & (cols < HEAD.half)
        if not HEADS_FIRST:  # one sum of offsets for cos and sin saves registers
            offsets = offsets + cols
            cols = 0
        cos1 = tl.load(Cos_ptr + offsets + cols, mask=inside, other=0.0).to(tl.float32)
        sin1 = tl.load(Sin_ptr + offsets + cols, mask=inside, other=0.0).to(tl.float32)
        cos2 = cos1
        sin2 = sin1
        if ANGLES == 1:
            cos2 = tl.load(Cos_ptr + offsets + cols + HEAD.half, mask=inside, other=0.0).to(tl.float32)
            sin2 = tl.load(Sin_ptr + offsets + cols + HEAD.half, mask=inside, other=0.0).to(tl.float32)
    return cos1, cos2, sin1, sin2


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_tokens", "seq_len"])
def _rotary_kernel(
    Q_ptr,
    K_ptr,
    Cos_ptr,
    Sin_ptr,
    OutQ_ptr,
    OutK_ptr,
    q_strides,
    k_strides,
    out_q_strides,
    out_k_strides,
    cos_strides,
    n_tokens,
    seq_len,
    n_q_heads,
    n_k_heads,
    HEAD: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program takes BLOCK_T tokens of BLOCK_H heads of q and block_k heads of k. All loads come before the first
    store. FORM: rotary.py's, with pairs_in and pairs_out swapped in the backward.

    HEADS_FIRST: heads are the first dimension of a tile, else tokens are. With heads first, and threads for all tokens
    of a program, each thread holds all heads of its columns and loads their angles once.
    """
    wait_for_previous(DEPENDENT)
    ALIGN: tl.constexpr = HEAD.align
    pid = tl.program_id(0)
    tokens = (pid // TILES.head_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    if TILES.batch_on_grid:
        batch = tl.program_id(1).to(tl.int64)
        token = tokens.to(tl.int64)
    else:
        batch = (tokens // seq_len).to(tl.int64)
        token = (tokens % seq_len).to(tl.int64)
    q_heads = (pid % TILES.head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    k_heads = (pid % TILES.head_tiles) * TILES.block_k + tl.arange(0, TILES.block_k)
    token_mask = along_tokens(tokens < n_tokens, HEADS_FIRST)
    q_mask = token_mask & along_heads(q_heads < n_q_heads, HEADS_FIRST)
    k_mask = token_mask & along_heads(k_heads < n_k_heads, HEADS_FIRST)

    rows = row_offsets(batch, token, q_heads, q_strides, ALIGN, HEADS_FIRST)
    q1, q2, q3 = load_heads(Q_ptr + rows, q_mask, HEAD, FORM.pairs_in, LOAD_HINT)
    if K_ptr is not None:
        rows = row_offsets(batch, token, k_heads, k_strides, ALIGN, HEADS_FIRST)
        k1, k2, k3 = load_heads(K_ptr + rows, k_mask, HEAD, FORM.pairs_in, LOAD_HINT)

    angles = along_tokens(tl.multiple_of(batch * cos_strides.batch + token * cos_strides.token, ALIGN), HEADS_FIRST)
    if FORM.section_1:
        cols = tl.arange(0, HEAD.block_half)
        plane = (cols >= FORM.section_0).to(tl.int64) + (cols >= FORM.section_1).to(tl.int64)
        angles = angles + tl.multiple_of(plane * cos_strides.plane, ALIGN)[None, None, :]
    if TILES.angles_per_head:
        k_angles = repeat_heads(angles, TILES.block_k, HEADS_FIRST)
        angles = repeat_heads(angles, BLOCK_H, HEADS_FIRST)
    cos1, cos2, sin1, sin2 = load_angles(Cos_ptr, Sin_ptr, angles, token_mask, HEAD, FORM.angles, HEADS_FIRST)
    k_cos1, k_cos2, k_sin1, k_sin2 = cos1, cos2, sin1, sin2
    if TILES.angles_per_head and K_ptr is not None:
        k_cos1, k_cos2, k_sin1, k_sin2 = load_angles(
            Cos_ptr, Sin_ptr, k_angles, token_mask, HEAD, FORM.angles, HEADS_FIRST
        )

    out = OutQ_ptr + row_offsets(batch, token, q_heads, out_q_strides, ALIGN, HEADS_FIRST)
    q1, q2 = rotate(q1, q2, cos1, cos2, sin1, sin2, BACKWARD)
    store_heads(out, q1, q2, q3, q_mask, HEAD, FORM.pairs_out)
    if K_ptr is not None:
        out = OutK_ptr + row_offsets(batch, token, k_heads, out_k_strides, ALIGN, HEADS_FIRST)
        k1, k2 = rotate(k1, k2, k_cos1, k_cos2, k_sin1, k_sin2, BACKWARD)
        store_heads(out, k1, k2, k3, k_mask, HEAD, FORM.pairs_out)


@triton.jit
def _element_offsets(batch, token, head, column, strides, ALIGN: tl.constexpr):
    """Offsets of elements; strides in units of ALIGN elements, to show alignment to compilers that ignore hints."""
    return (batch * strides.batch + head * strides.head + token * strides.token) * ALIGN + column


@triton.jit
def _partner(column, HALF: tl.constexpr):
    """Offset from a column to its pair's other column. `tl.where` would prevent vector loads from Triton 3.8 on."""
    return HALF - (column >= HALF).to(tl.int32) * (2 * HALF)


@triton.jit
def _load_partners(ptrs, column, mask, HALF: tl.constexpr, IS_PAIRS: tl.constexpr, LOAD_HINT: tl.constexpr):
    """(x, the other element of each pair), or (x, x) if IS_PAIRS, since x then holds whole pairs."""
    x = load_with_hint(ptrs, LOAD_HINT, mask, 0.0)
    y = x
    if not IS_PAIRS:
        y = load_with_hint(ptrs + _partner(column, HALF), LOAD_HINT, mask & (column < 2 * HALF), 0.0)
    return x, y


@triton.jit
def _rotate_elements(x, y, cos, sin, rotates, IS_PAIRS: tl.constexpr, PASS_THROUGH: tl.constexpr):
    """The rotated elements in x's dtype; elements outside `rotates` are unchanged."""
    if IS_PAIRS:
        x1, x2 = tl.split(tl.reshape(x.to(tl.float32), [x.shape[0] // 2, 2]))
        z = tl.reshape(tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin), [x.shape[0]])
    else:
        z = x.to(tl.float32) * cos + y.to(tl.float32) * sin
    z = z.to(x.dtype)
    if PASS_THROUGH:
        z = tl.where(rotates, z, x)
    return z


@triton.jit(do_not_specialize=["n_tokens", "seq_len"])
def _flat_rotary_kernel(
    Q_ptr,
    K_ptr,
    Cos_ptr,
    Sin_ptr,
    OutQ_ptr,
    OutK_ptr,
    q_strides,
    k_strides,
    out_q_strides,
    out_k_strides,
    cos_strides,
    n_tokens,
    seq_len,
    n_q_heads,
    n_k_heads,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`_rotary_kernel` for head widths that are no power of two, where a tile of whole heads would leave threads idle.

    A program takes BLOCK_SIZE consecutive elements of [tokens, HEADS heads, width] of q, and as many of k. The other
    element of each pair is loaded too, from L1, so that accesses are 16 bytes wide.

    The heads of q and of k are multiples of HEADS, at most GROUPS * HEADS. Strides are in units of HEAD.align elements.
    With complex ANGLES a pair is (2i, 2i + 1), else (i, i + HALF). SEQUENCES: there are several sequences.
    """
    wait_for_previous(DEPENDENT)
    HALF: tl.constexpr = HEAD.half
    WIDTH: tl.constexpr = 2 * HALF + HEAD.pass_through
    IS_PAIRS: tl.constexpr = ANGLES == 3
    pid = tl.program_id(0)
    first = (pid // GROUPS).to(tl.int64) * BLOCK_SIZE
    first_token = first // (HEADS * WIDTH)
    element = (first - first_token * (HEADS * WIDTH)).to(tl.int32) + tl.arange(0, BLOCK_SIZE)
    column = element % WIDTH
    group = (pid % GROUPS) * HEADS
    head = (group + (element // WIDTH) % HEADS).to(tl.int64)
    tokens = first_token.to(tl.int32) + element // (HEADS * WIDTH)
    mask = tokens < n_tokens
    q_mask = mask & (group < n_q_heads)
    k_mask = mask & (group < n_k_heads)
    rotates = column < 2 * HALF
    batch, token = tl.zeros_like(tokens).to(tl.int64), tokens.to(tl.int64)
    if SEQUENCES:
        batch, token = (tokens // seq_len).to(tl.int64), (tokens % seq_len).to(tl.int64)

    q_ptrs = Q_ptr + _element_offsets(batch, token, head, column, q_strides, HEAD.align)
    q, q_partner = _load_partners(q_ptrs, column, q_mask, HALF, IS_PAIRS, LOAD_HINT)
    if K_ptr is not None:
        k_ptrs = K_ptr + _element_offsets(batch, token, head, column, k_strides, HEAD.align)
        k, k_partner = _load_partners(k_ptrs, column, k_mask, HALF, IS_PAIRS, LOAD_HINT)

    angles = (batch * cos_strides.batch + token * cos_strides.token) * HEAD.align + column
    inside = mask & rotates
    if IS_PAIRS:
        both = tl.load(Cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
        cos, sin = tl.split(tl.reshape(both, [BLOCK_SIZE // 2, 2]))
        if BACKWARD:
            sin = -sin
    else:
        if ANGLES == 0:
            angles -= (column >= HALF).to(tl.int32) * HALF
        cos = tl.load(Cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
        sin_ptrs = Sin_ptr + angles
        if BACKWARD and ANGLES != 0:  # the transposed rotation uses the sin of the pair's other column
            sin_ptrs += _partner(column, HALF)
        sin = tl.load(sin_ptrs, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            sin = tl.where(column < HALF, sin, -sin)
        else:
            sin = tl.where(column < HALF, -sin, sin)

    out = OutQ_ptr + _element_offsets(batch, token, head, column, out_q_strides, HEAD.align)
    tl.store(out, _rotate_elements(q, q_partner, cos, sin, rotates, IS_PAIRS, HEAD.pass_through), mask=q_mask)
    if K_ptr is not None:
        out = OutK_ptr + _element_offsets(batch, token, head, column, out_k_strides, HEAD.align)
        tl.store(out, _rotate_elements(k, k_partner, cos, sin, rotates, IS_PAIRS, HEAD.pass_through), mask=k_mask)
