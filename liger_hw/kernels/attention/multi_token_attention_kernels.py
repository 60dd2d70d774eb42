"""The row kernels of multi_token_attention: causal softmax, its backward, and what is filled in above the diagonal.

A row r of the flattened [.., n_queries, n_keys] tensors is query r % n_queries and sees the keys up to its own index;
the others are not read.
"""

from __future__ import annotations

from ...runtime.triton_import import tl, triton


@triton.jit
def _rows_and_last(n_rows, n_queries, ROWS: tl.constexpr):
    """Row numbers [ROWS, 1] in int64, whether they are there, and the last key each sees."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows[:, None], (rows < n_rows)[:, None], (rows % n_queries)[:, None]


@triton.jit(do_not_specialize=["n_rows", "n_queries"])
def _causal_softmax_fwd_kernel(
    X_ptr,
    Y_ptr,
    n_rows,
    n_queries,
    n_keys,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows wider than BLOCK_SIZE are read twice, with a running maximum and sum."""
    rows, there, last = _rows_and_last(n_rows, n_queries, ROWS)
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    x_ptrs = X_ptr + rows * n_keys + cols
    y_ptrs = Y_ptr + rows * n_keys + cols
    if WHOLE_ROW:
        seen = there & (cols <= last) & (cols < n_keys)
        x = tl.load(x_ptrs, mask=seen, other=-float("inf")).to(tl.float32)
        x = tl.where(there, x, 0.0)  # rows past the end: something finite
        e = tl.exp(x - tl.max(x, axis=1)[:, None])
        y = e / tl.sum(e, axis=1)[:, None]
        tl.store(y_ptrs, y.to(Y_ptr.dtype.element_ty), mask=there & (cols < n_keys))
    else:
        top = tl.full([ROWS, 1], -float("inf"), dtype=tl.float32)
        total = tl.zeros([ROWS, 1], dtype=tl.float32)
        for start in range(0, n_keys, BLOCK_SIZE):
            seen = there & (start + cols <= last) & (start + cols < n_keys)
            x = tl.load(x_ptrs + start, mask=seen, other=-float("inf")).to(tl.float32)
            x = tl.where(there | (start > 0), x, 0.0)
            higher = tl.maximum(top, tl.max(x, axis=1)[:, None])
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=1)[:, None]
            top = higher
        for start in range(0, n_keys, BLOCK_SIZE):
            seen = there & (start + cols <= last) & (start + cols < n_keys)
            x = tl.load(x_ptrs + start, mask=seen, other=-float("inf")).to(tl.float32)
            y = tl.exp(x - top) / total
            tl.store(y_ptrs + start, y.to(Y_ptr.dtype.element_ty), mask=there & (start + cols < n_keys))


@triton.jit(do_not_specialize=["n_rows", "n_queries"])
def _causal_softmax_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    n_rows,
    n_queries,
    n_keys,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows, there, last = _rows_and_last(n_rows, n_queries, ROWS)
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    places = rows * n_keys + cols
    if WHOLE_ROW:
        seen = there & (cols <= last) & (cols < n_keys)
        y = tl.load(Y_ptr + places, mask=seen, other=0.0).to(tl.float32)
        dy = tl.load(DY_ptr + places, mask=seen, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
        tl.store(DX_ptr + places, dx.to(DX_ptr.dtype.element_ty), mask=there & (cols < n_keys))
    else:
        dot = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        for start in range(0, n_keys, BLOCK_SIZE):
            seen = there & (start + cols <= last) & (start + cols < n_keys)
            y = tl.load(Y_ptr + places + start, mask=seen, other=0.0).to(tl.float32)
            dot += y * tl.load(DY_ptr + places + start, mask=seen, other=0.0).to(tl.float32)
        shift = tl.sum(dot, axis=1)[:, None]
        for start in range(0, n_keys, BLOCK_SIZE):
            seen = there & (start + cols <= last) & (start + cols < n_keys)
            y = tl.load(Y_ptr + places + start, mask=seen, other=0.0).to(tl.float32)
            dy = tl.load(DY_ptr + places + start, mask=seen, other=0.0).to(tl.float32)
            dx = (y * (dy - shift)).to(DX_ptr.dtype.element_ty)
            tl.store(DX_ptr + places + start, dx, mask=there & (start + cols < n_keys))


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
    """Y = X up to the diagonal, -inf or zero after it. IN_PLACE: only what lies after it is written.

    Bias_ptr [n_channels]: added up to the diagonal. Sums_ptr [batch, n_queries, n_channels]: what of a row lies there, summed
    in fp32. Or None.
    """
    rows, there, last = _rows_and_last(n_rows, n_queries, ROWS)
    channel = (rows // n_queries) % n_channels
    if Bias_ptr is not None:
        bias = tl.load(Bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    if Sums_ptr is not None:
        total = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_keys, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)[None, :]
        places = rows * n_keys + cols
        mask = there & (cols < n_keys)
        seen = mask & (cols <= last)
        filler = float("-inf") if INFINITE else 0.0
        if IN_PLACE:
            nothing = tl.full([ROWS, BLOCK_SIZE], filler, dtype=tl.float32).to(Y_ptr.dtype.element_ty)
            tl.store(Y_ptr + places, nothing, mask=mask & (cols > last))
        else:
            x = tl.load(X_ptr + places, mask=seen, other=filler)
            if Sums_ptr is not None:
                total += x.to(tl.float32)
            if Bias_ptr is not None:
                x = tl.where(seen, x.to(tl.float32) + bias, filler).to(Y_ptr.dtype.element_ty)
            tl.store(Y_ptr + places, x, mask=mask)
    if Sums_ptr is not None:
        query = rows // n_queries // n_channels * n_queries + last
        tl.store(Sums_ptr + query * n_channels + channel, tl.sum(total, axis=1)[:, None], mask=there)
