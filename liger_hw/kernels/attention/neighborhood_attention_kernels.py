"""The kernels of fused_neighborhood_attention: banded tiles of scores, of which none is ever stored.

With a dilation d, tokens of one remainder modulo d see only each other. They are a sequence of their own, whose tokens
lie d rows apart, and in it a neighbourhood is a band: program numbers count its tiles, then remainders, then heads.
"""

from __future__ import annotations

from ...runtime.triton_import import tl, triton


@triton.jit
def _place(n_tokens, n_tiles, dilation, BLOCK_M: tl.constexpr):
    """(first row of the program's tile, rows of its sequence, row of memory at which that begins)."""
    program = tl.program_id(0).to(tl.int64)
    sequence = program // n_tiles
    remainder = sequence % dilation
    first = (program % n_tiles * BLOCK_M).to(tl.int32)
    length = ((n_tokens - remainder + dilation - 1) // dilation).to(tl.int32)
    return first, length, sequence // dilation * n_tokens + remainder


@triton.jit
def _tile(X_ptr, start, rows, length, dilation, head_dim, BLOCK_D: tl.constexpr):
    """Rows of a sequence, [rows, BLOCK_D]; zeros where there are none. Half precision stays, all else is fp32."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    at = (start + rows.to(tl.int64) * dilation)[:, None] * head_dim + dims
    x = tl.load(X_ptr + at, mask=(rows < length)[:, None] & (dims < head_dim), other=0.0)
    if X_ptr.dtype.element_ty.primitive_bitwidth != 16:
        x = x.to(tl.float32)
    return x


@triton.jit
def _store(X_ptr, x, start, rows, length, dilation, head_dim, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)[None, :]
    at = (start + rows.to(tl.int64) * dilation)[:, None] * head_dim + dims
    tl.store(X_ptr + at, x.to(X_ptr.dtype.element_ty), mask=(rows < length)[:, None] & (dims < head_dim))


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(a, b, a_rows, b_rows, length, half, log2_scale):
    """log2(e) * scale * a . b, [a_rows, b_rows]; -inf of tokens that do not see each other."""
    a_at, b_at = a_rows[:, None], b_rows[None, :]
    visible = (b_at - a_at <= half) & (a_at - b_at <= half) & (a_at < length) & (b_at < length)
    return tl.where(visible, _dot(a, tl.trans(b)) * log2_scale, -float("inf"))


@triton.jit(do_not_specialize=["n_tokens", "n_tiles", "half"])
def _neighborhood_fwd_kernel(
    Q_ptr,
    K_ptr,
    V_ptr,
    O_ptr,
    LSE_ptr,
    n_tokens,
    n_tiles,
    dilation,
    half,
    log2_scale,
    head_dim,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M queries a program. LSE_ptr [n_heads, n_tokens]: log2 of the sum of the exponentials."""
    first, length, start = _place(n_tokens, n_tiles, dilation, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    q = _tile(Q_ptr, start, rows, length, dilation, head_dim, BLOCK_D)
    top = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for at in tl.range(
        tl.maximum(first - half, 0), tl.minimum(first + BLOCK_M + half, length), BLOCK_N, num_stages=STAGES
    ):
        cols = at + tl.arange(0, BLOCK_N)
        k = _tile(K_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        scores = _scores(q, k, rows, cols, length, half, log2_scale)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # a row that sees nothing yet
        weights = tl.exp2(scores - finite[:, None])
        before = tl.exp2(top - finite)
        v = _tile(V_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        acc = acc * before[:, None] + _dot(weights.to(v.dtype), v)
        total = total * before + tl.sum(weights, axis=1)
        top = higher
    total = tl.where(rows < length, total, 1.0)
    _store(O_ptr, acc / total[:, None], start, rows, length, dilation, head_dim, BLOCK_D)
    tl.store(LSE_ptr + start + rows.to(tl.int64) * dilation, top + tl.log2(total), mask=rows < length)


@triton.jit
def _weights_and_products(a, b, da, db, a_rows, b_rows, length, half, log2_scale, lse):
    """The softmax's weights and their gradients, [a_rows, b_rows]. lse: of the queries, broadcast."""
    scores = _scores(a, b, a_rows, b_rows, length, half, log2_scale)
    return tl.exp2(scores - lse), _dot(da, tl.trans(db))


@triton.jit(do_not_specialize=["n_tokens", "n_tiles", "half"])
def _neighborhood_bwd_queries_kernel(
    DO_ptr,
    Q_ptr,
    K_ptr,
    V_ptr,
    LSE_ptr,
    Shift_ptr,
    DQ_ptr,
    n_tokens,
    n_tiles,
    dilation,
    half,
    log2_scale,
    scale,
    head_dim,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of BLOCK_M queries. Their band is swept twice: first for Shift_ptr [n_heads, n_tokens], the sum over a query's
    neighbours of weight and its gradient. From o it would be had in one sweep, with o's rounding in every gradient."""
    first, length, start = _place(n_tokens, n_tiles, dilation, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    begin, end = tl.maximum(first - half, 0), tl.minimum(first + BLOCK_M + half, length)
    q = _tile(Q_ptr, start, rows, length, dilation, head_dim, BLOCK_D)
    do = _tile(DO_ptr, start, rows, length, dilation, head_dim, BLOCK_D)
    lse = tl.load(LSE_ptr + start + rows.to(tl.int64) * dilation, mask=rows < length, other=0.0)[:, None]
    shift = tl.zeros([BLOCK_M], dtype=tl.float32)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        cols = at + tl.arange(0, BLOCK_N)
        k = _tile(K_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        v = _tile(V_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        weights, products = _weights_and_products(q, k, do, v, rows, cols, length, half, log2_scale, lse)
        shift += tl.sum(weights * products, axis=1)
    tl.store(Shift_ptr + start + rows.to(tl.int64) * dilation, shift, mask=rows < length)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        cols = at + tl.arange(0, BLOCK_N)
        k = _tile(K_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        v = _tile(V_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        weights, products = _weights_and_products(q, k, do, v, rows, cols, length, half, log2_scale, lse)
        dq += _dot((weights * (products - shift[:, None])).to(k.dtype), k)
    _store(DQ_ptr, dq * scale, start, rows, length, dilation, head_dim, BLOCK_D)


@triton.jit(do_not_specialize=["n_tokens", "n_tiles", "half"])
def _neighborhood_bwd_keys_kernel(
    DO_ptr,
    Q_ptr,
    K_ptr,
    V_ptr,
    LSE_ptr,
    Shift_ptr,
    DK_ptr,
    DV_ptr,
    n_tokens,
    n_tiles,
    dilation,
    half,
    log2_scale,
    scale,
    head_dim,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk and dv of BLOCK_M keys, from the queries that see them."""
    first, length, start = _place(n_tokens, n_tiles, dilation, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    k = _tile(K_ptr, start, rows, length, dilation, head_dim, BLOCK_D)
    v = _tile(V_ptr, start, rows, length, dilation, head_dim, BLOCK_D)
    dk = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin, end = tl.maximum(first - half, 0), tl.minimum(first + BLOCK_M + half, length)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        cols = at + tl.arange(0, BLOCK_N)
        q = _tile(Q_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        do = _tile(DO_ptr, start, cols, length, dilation, head_dim, BLOCK_D)
        row = start + cols.to(tl.int64) * dilation
        lse = tl.load(LSE_ptr + row, mask=cols < length, other=0.0)[None, :]
        shift = tl.load(Shift_ptr + row, mask=cols < length, other=0.0)[None, :]
        weights, products = _weights_and_products(k, q, v, do, rows, cols, length, half, log2_scale, lse)
        dv += _dot(weights.to(do.dtype), do)
        dk += _dot((weights * (products - shift)).to(q.dtype), q)
    _store(DK_ptr, dk * scale, start, rows, length, dilation, head_dim, BLOCK_D)
    _store(DV_ptr, dv, start, rows, length, dilation, head_dim, BLOCK_D)
