"""The kernels of multi_token_attention: causal softmax, its backward, and the fill above the diagonal.

`_causal_*` take contiguous tensors [..., n_queries, n_keys] as rows of n_keys: row r is query r % n_queries.
`_channels_*` take tensors [batch, channels, queries, keys] of any strides, and so convert between channels first and
channels last. A program has one query of CHANNELS channels, so that accesses are contiguous in either layout. A query
attends to the keys up to its index; later keys are not read.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.triton_import import tl, triton


class Strides(NamedTuple):
    """A tensor's strides, in elements."""

    batch: int
    channel: int
    query: int
    key: int


@triton.jit
def _rows_of_program(n_rows, n_queries, ROWS: tl.constexpr):
    """(row indices in int64, whether the rows exist, the last visible key of each row), all [ROWS, 1]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows[:, None], (rows < n_rows)[:, None], (rows % n_queries)[:, None]


@triton.jit(do_not_specialize=["n_rows", "n_queries"])
def _causal_softmax_fwd_kernel(X_ptr, Y_ptr, n_rows, n_queries, n_keys, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr):
    rows, exist, last = _rows_of_program(n_rows, n_queries, ROWS)
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    visible = exist & (cols <= last) & (cols < n_keys)
    x = tl.load(X_ptr + rows * n_keys + cols, mask=visible, other=-float("inf")).to(tl.float32)
    x = tl.where(exist, x, 0.0)  # rows past the end: any finite value
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = e / tl.sum(e, axis=1)[:, None]
    tl.store(Y_ptr + rows * n_keys + cols, y.to(Y_ptr.dtype.element_ty), mask=exist & (cols < n_keys))


@triton.jit(do_not_specialize=["n_rows", "n_queries"])
def _causal_softmax_bwd_kernel(
    DY_ptr, Y_ptr, DX_ptr, n_rows, n_queries, n_keys, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """DX_ptr may equal DY_ptr."""
    rows, exist, last = _rows_of_program(n_rows, n_queries, ROWS)
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    offsets = rows * n_keys + cols
    visible = exist & (cols <= last) & (cols < n_keys)
    y = tl.load(Y_ptr + offsets, mask=visible, other=0.0).to(tl.float32)
    dy = tl.load(DY_ptr + offsets, mask=visible, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
    tl.store(DX_ptr + offsets, dx.to(DX_ptr.dtype.element_ty), mask=exist & (cols < n_keys))


@triton.jit(do_not_specialize=["n_rows", "n_queries", "n_channels"])
def _causal_fill_kernel(
    X_ptr,
    Y_ptr,
    Bias_ptr,
    Sums_ptr,
    n_rows,
    n_queries,
    n_keys,
    n_channels,
    INFINITE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Y = X up to the diagonal, zero after it (-inf if INFINITE). IN_PLACE: X is Y; only keys after it are written.

    Bias_ptr [n_channels] or None: added up to the diagonal
    Sums_ptr [batch, n_queries, n_channels] or None: gets the fp32 sum of each row of X up to the diagonal
    """
    rows, exist, last = _rows_of_program(n_rows, n_queries, ROWS)
    channel = (rows // n_queries) % n_channels
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    offsets = rows * n_keys + cols
    mask = exist & (cols < n_keys)
    visible = mask & (cols <= last)
    filler = float("-inf") if INFINITE else 0.0
    if IN_PLACE:
        nothing = tl.full([ROWS, BLOCK_SIZE], filler, dtype=tl.float32).to(Y_ptr.dtype.element_ty)
        tl.store(Y_ptr + offsets, nothing, mask=mask & (cols > last))
    else:
        x = tl.load(X_ptr + offsets, mask=visible, other=filler)
        if Sums_ptr is not None:
            query = rows // n_queries // n_channels * n_queries + last
            total = tl.sum(x.to(tl.float32), axis=1)[:, None]
            tl.store(Sums_ptr + query * n_channels + channel, total, mask=exist)
        if Bias_ptr is not None:
            bias = tl.load(Bias_ptr + channel, mask=exist, other=0.0).to(tl.float32)
            x = tl.where(visible, x.to(tl.float32) + bias, filler).to(Y_ptr.dtype.element_ty)
        tl.store(Y_ptr + offsets, x, mask=mask)


@triton.jit
def _query_tile(n_channels, n_queries, n_keys, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """(batch, query, channels, channel mask, keys, mask of existing elements, mask of those up to the diagonal)."""
    parts = tl.cdiv(n_channels, CHANNELS)
    query = (tl.program_id(0) // parts) % n_queries
    batch = (tl.program_id(0) // parts) // n_queries
    channels = (tl.program_id(0) % parts) * CHANNELS + tl.arange(0, CHANNELS)
    keys = tl.arange(0, BLOCK_SIZE)
    channel_mask = channels < n_channels
    exist = channel_mask[:, None] & (keys < n_keys)[None, :]
    return batch.to(tl.int64), query.to(tl.int64), channels, channel_mask, keys, exist, exist & (keys <= query)[None, :]


@triton.jit
def _pointers(ptr, batch, query, channels, keys, strides):
    row = ptr + batch * strides.batch + query * strides.query
    return row + (channels.to(tl.int64) * strides.channel)[:, None] + (keys * strides.key)[None, :]


@triton.jit(do_not_specialize=["n_queries"])
def _channels_softmax_fwd_kernel(
    X_ptr, Y_ptr, n_channels, n_queries, n_keys, x_strides, y_strides, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr
):
    batch, query, channels, channel_mask, keys, exist, visible = _query_tile(
        n_channels, n_queries, n_keys, BLOCK_SIZE, CHANNELS
    )
    x_ptrs = _pointers(X_ptr, batch, query, channels, keys, x_strides)
    x = tl.load(x_ptrs, mask=visible, other=-float("inf")).to(tl.float32)
    x = tl.where(channel_mask[:, None], x, 0.0)  # channels past the end: any finite value
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = e * (1.0 / tl.sum(e, axis=1))[:, None]
    y_ptrs = _pointers(Y_ptr, batch, query, channels, keys, y_strides)
    tl.store(y_ptrs, y.to(Y_ptr.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=["n_queries"])
def _channels_softmax_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    n_channels,
    n_queries,
    n_keys,
    dy_strides,
    y_strides,
    dx_strides,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    batch, query, channels, channel_mask, keys, exist, visible = _query_tile(
        n_channels, n_queries, n_keys, BLOCK_SIZE, CHANNELS
    )
    y_ptrs = _pointers(Y_ptr, batch, query, channels, keys, y_strides)
    y = tl.load(y_ptrs, mask=visible, other=0.0).to(tl.float32)
    dy_ptrs = _pointers(DY_ptr, batch, query, channels, keys, dy_strides)
    dy = tl.load(dy_ptrs, mask=visible, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
    dx_ptrs = _pointers(DX_ptr, batch, query, channels, keys, dx_strides)
    tl.store(dx_ptrs, dx.to(DX_ptr.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=["n_queries"])
def _channels_fill_kernel(
    X_ptr,
    Y_ptr,
    Bias_ptr,
    Sums_ptr,
    n_channels,
    n_queries,
    n_keys,
    x_strides,
    y_strides,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Y = X up to the diagonal, zero after it; Bias_ptr and Sums_ptr as for `_causal_fill_kernel`."""
    batch, query, channels, channel_mask, keys, exist, visible = _query_tile(
        n_channels, n_queries, n_keys, BLOCK_SIZE, CHANNELS
    )
    x = tl.load(_pointers(X_ptr, batch, query, channels, keys, x_strides), mask=visible, other=0.0)
    if Sums_ptr is not None:
        total = tl.sum(x.to(tl.float32), axis=1)
        tl.store(Sums_ptr + (batch * n_queries + query) * n_channels + channels, total, mask=channel_mask)
    if Bias_ptr is not None:
        bias = tl.load(Bias_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)
        x = tl.where(visible, x.to(tl.float32) + bias[:, None], 0.0).to(Y_ptr.dtype.element_ty)
    tl.store(_pointers(Y_ptr, batch, query, channels, keys, y_strides), x, mask=exist)
