"""The core of the losses on rows of logits: a sweep for the softmax's statistics, and a sweep that writes a gradient.

For a row x with an optional bias, softcap and temperature T, s = softcap(x + bias) / T, in fp32:
    first sweep     lse = log(sum(exp(s))), and on request the entropy, sum(w * s) * T and argmax(x)
    second sweep    dx[c] = softmax_coef * p[c] - target_coef * [c = y] - smoothing_term * w[c]
                            - entropy_coef * p[c] * (log p[c] + entropy),
                    with p = exp(s - lse), times the derivative of s
The first sweep runs from the first tile to the last, with running maxima (the online softmax). The second runs from the
last tile to the first, because the tiles read last are still in cache. Only a row's last tile is masked. A row of one
tile stays in registers between the sweeps. Rows that do not begin at 16 bytes also have edges (rows/row.py).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from ...registry import Key, LaunchConfig, Target, tile_space
from ...runtime.load_hint import load_with_hint
from ...runtime.triton_import import INTERPRET, libdevice, tl, triton
from ..rows.row import edge_columns
from ..rows.tuning import column_tiles, tile_rule

if INTERPRET:  # libdevice has no tanh there

    @triton.jit
    def tanh(x):
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -t, t)

else:

    @triton.jit
    def tanh(x):
        return libdevice.tanh(x)


# -- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def load_logits(X_ptr, BIAS_ptr, cols, n_cols, n_stored, outside, MASKED: tl.constexpr, LOAD_HINT: tl.constexpr):
    """A tile of logits plus bias in fp32. MASKED: the row ends in this tile; columns from n_cols on get `outside`.

    n_stored: the column where loads end; if it is a multiple of 16 bytes, the last tile's loads stay wide
    """
    if MASKED:
        x = tl.load(X_ptr + cols, mask=cols < n_stored, other=0.0).to(tl.float32)
        if BIAS_ptr is not None:
            x += tl.load(BIAS_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        x = tl.where(cols < n_cols, x, outside)
    else:
        x = load_with_hint(X_ptr + cols, LOAD_HINT).to(tl.float32)
        if BIAS_ptr is not None:
            x += tl.load(BIAS_ptr + cols).to(tl.float32)
    return x


@triton.jit
def load_edges(X_ptr, BIAS_ptr, head, n_body, n_cols, VECTOR: tl.constexpr):
    """The logits at the `edge_columns` of a row; -inf outside the row."""
    if BIAS_ptr is not None:
        BIAS_ptr += head
    n_right = n_cols - head
    edge = edge_columns(head, n_body, n_cols, VECTOR)
    return load_logits(X_ptr, BIAS_ptr, edge, n_right, n_right, float("-inf"), True, "")


@triton.jit
def _gradient_tile(
    x, cols, n_cols, W_ptr, softcap, inv_temperature, y, lse, softmax_coef, target_coef, smoothing_term, entropy_coef,
    entropy,
):  # fmt: skip
    """The gradient of a tile's logits, see the top of this file. Terms with a coefficient None are left out."""
    s = x
    if softcap is not None:
        t = tanh(x * (1.0 / softcap))
        s = softcap * t
    log_p = s * inv_temperature - lse
    p = tl.exp(log_p)
    g = softmax_coef * p
    if smoothing_term is not None:
        if W_ptr is not None:
            g -= smoothing_term * tl.load(W_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        else:
            g -= smoothing_term
    if entropy_coef is not None:
        g -= tl.where(p == 0.0, 0.0, entropy_coef * p * (log_p + entropy))
    g = tl.where(cols == y, g - target_coef, g)
    if softcap is not None:
        g *= 1.0 - t * t
    return g


# -- sweeps ----------------------------------------------------------------------------------------------------------


@triton.jit
def _scan_tile(
    x,
    cols,
    n_cols,
    W_ptr,
    softcap,
    scale,
    m,
    d,
    moment,
    total,
    top,
    SOFTCAP: tl.constexpr,
    TOTAL: tl.constexpr,
    ENTROPY: tl.constexpr,
    TOP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The statistics of each lane after one more tile of logits [lanes, width] (or [width] for one lane).

    Over the logits x that a lane has read, with s = softcap(x) and z = scale * (s - m): m = max(s), d = sum(2^z),
    moment = sum(2^z * z), total = sum(w * s), top = max(rank(x)). MASKED: the row ends in this tile; x is -inf past it
    """
    AXIS: tl.constexpr = len(x.shape) - 1
    s = x
    if SOFTCAP:
        s = softcap * tanh(x * (1.0 / softcap))
    if TOTAL:
        ws = s
        if W_ptr is not None:
            ws = s * tl.load(W_ptr + cols, mask=cols < n_cols, other=1.0).to(tl.float32)
        total += tl.sum(tl.where(cols < n_cols, ws, 0.0), AXIS) if MASKED else tl.sum(ws, AXIS)
    if MASKED and SOFTCAP:
        s = tl.where(cols < n_cols, s, float("-inf"))
    if TOP:
        x = _rank(x)
        if not SOFTCAP:
            s = x  # one maximum for m and top; a NaN, which became inf, is NaN again by inf - inf
    m_new = tl.maximum(m, tl.max(s, AXIS))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a tile of only -inf (masked classes) adds 0
    z = (s - tl.expand_dims(base, AXIS)) * scale
    e = tl.exp2(z)
    d, moment = _rebase(m, base, d, moment, scale, ENTROPY)
    d += tl.sum(e, AXIS)
    if ENTROPY:
        moment += tl.sum(e * tl.maximum(z, -256.0), AXIS)
    if TOP:
        top = tl.maximum(top, tl.max(x, AXIS))
    return m_new, d, moment, total, top


@triton.jit
def _rebase(m, base, d, moment, scale, ENTROPY: tl.constexpr):
    """(d, moment) relative to `base` instead of m. z is clamped to -256, as 0 * -inf is nan; 2^-256 is 0 in fp32."""
    z = (m - base) * scale
    e = tl.exp2(z)
    if ENTROPY:
        moment = (moment + d * tl.maximum(z, -256.0)) * e
    return d * e, moment


@triton.jit
def _rank(x):
    """x with infinity for NaN, to search the largest logit: the first NaN is the prediction, as in torch."""
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _first_column(X_ptr, BIAS_ptr, cols, top, top_row, n_cols, n_stored):
    """The first of `cols` [lanes, width] whose logit is top_row. Reads only lanes whose maximum `top` is top_row."""
    cols = tl.where((top == top_row)[:, None], cols, tl.maximum(n_cols, n_stored))
    x = load_logits(X_ptr, BIAS_ptr, cols, n_cols, n_stored, float("-inf"), True, "")
    return tl.min(tl.min(tl.where(_rank(x) == top_row, cols, n_cols), 1), 0)


@triton.jit
def scan_row(
    X_ptr,
    BIAS_ptr,
    W_ptr,
    head,
    n_body,
    n_full,
    n_cols,
    n_stored,
    softcap,
    inv_temperature,
    SOFTCAP: tl.constexpr,
    TOTAL: tl.constexpr,
    ENTROPY: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The first sweep: (lse, entropy, total, argmax, last tile, edges) of a row, the last two for `write_gradient`.

    X_ptr begins at the body, which has n_full whole tiles and a last one; BIAS_ptr and W_ptr begin at column 0.
    Each 16 bytes of a tile are a lane, whose statistics one thread has in registers until the end of the row. For
    argmax, a lane records the tile of its first largest logit; lanes with the row's largest logit are read again.
    """
    BYTES: tl.constexpr = X_ptr.dtype.element_ty.primitive_bitwidth // 8
    WIDTH: tl.constexpr = 16 // BYTES if BLOCK_SIZE * BYTES >= 16 else BLOCK_SIZE
    LANES: tl.constexpr = BLOCK_SIZE // WIDTH
    scale = inv_temperature * 1.4426950408889634  # log2(e)
    x_edge = 0.0
    if VECTOR > 1:
        x_edge = load_edges(
            X_ptr, BIAS_ptr, head, n_body, n_cols, VECTOR
        )  # used after the sweep, which hides the latency
        if BIAS_ptr is not None:
            BIAS_ptr += head
        if W_ptr is not None:
            W_ptr += head
    lane_cols = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    m = tl.full([LANES], float("-inf"), tl.float32)
    d = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    top = tl.full([LANES], float("-inf"), tl.float32)
    top_tile = tl.zeros([LANES], tl.int32)
    for i in tl.range(0, n_full, num_stages=STAGES):
        cols = i * BLOCK_SIZE + lane_cols
        top_before = top
        x = load_logits(X_ptr, BIAS_ptr, cols, n_body, n_stored, 0.0, False, LOAD_HINT)
        m, d, moment, total, top = _scan_tile(
            x, cols, n_body, W_ptr, softcap, scale, m, d, moment, total, top, SOFTCAP, TOTAL, ENTROPY, TOP, False
        )
        top_tile = tl.where(top > top_before, i, top_tile)
    cols = n_full * BLOCK_SIZE + lane_cols
    top_before = top
    x = load_logits(X_ptr, BIAS_ptr, cols, n_body, n_stored, float("-inf"), True, "")
    m, d, moment, total, top = _scan_tile(
        x, cols, n_body, W_ptr, softcap, scale, m, d, moment, total, top, SOFTCAP, TOTAL, ENTROPY, TOP, True
    )
    top_tile = tl.where(top > top_before, n_full, top_tile)

    m_row = tl.max(m, 0)
    base = tl.where(m_row == float("-inf"), 0.0, m_row)
    d, moment = _rebase(m, base, d, moment, scale, ENTROPY)
    m, d, moment, total = m_row, tl.sum(d, 0), tl.sum(moment, 0), tl.sum(total, 0)
    argmax = 0
    if TOP:
        top_row = tl.max(top, 0)
        argmax = _first_column(
            X_ptr, BIAS_ptr, top_tile[:, None] * BLOCK_SIZE + lane_cols, top, top_row, n_body, n_stored
        )
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)
        if TOP:
            rank = _rank(x_edge)
            top_edge = tl.max(rank, 0)
            first = tl.min(tl.where(rank == top_edge, edge, n_cols), 0)
            better = (top_edge > top_row) | ((top_edge == top_row) & (first < argmax))
            argmax = tl.where(better, first, argmax)
        m, d, moment, total, _ = _scan_tile(
            x_edge, edge, n_cols - head, W_ptr, softcap, scale, m, d, moment, total, 0.0,
            SOFTCAP, TOTAL, ENTROPY, False, True,
        )  # fmt: skip
    entropy = tl.log(d) - moment / d * 0.6931471805599453  # ln(2)
    return m * inv_temperature + tl.log(d), entropy, total, argmax + head, tl.reshape(x, [BLOCK_SIZE]), x_edge


@triton.jit
def write_gradient(
    X_ptr,
    DX_ptr,
    BIAS_ptr,
    W_ptr,
    x_tail,
    x_edge,
    head,
    n_body,
    n_full,
    n_cols,
    n_stored,
    softcap,
    inv_temperature,
    y,
    lse,
    softmax_coef,
    target_coef,
    smoothing_term,
    entropy_coef,
    entropy,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The second sweep. y: counted from the body's first column; x_tail, x_edge: the last tile and the edges, loaded
    here if None. DX may be X: the same thread reads and writes an element."""
    dx_type = DX_ptr.dtype.element_ty
    block_cols = tl.arange(0, BLOCK_SIZE)
    if VECTOR > 1:
        if x_edge is None:
            x_edge = load_edges(X_ptr, BIAS_ptr, head, n_body, n_cols, VECTOR)
        if BIAS_ptr is not None:
            BIAS_ptr += head
        if W_ptr is not None:
            W_ptr += head
    tail_cols = n_full * BLOCK_SIZE + block_cols
    if x_tail is None:
        x_tail = load_logits(X_ptr, BIAS_ptr, tail_cols, n_body, n_stored, float("-inf"), True, "")
    g = _gradient_tile(
        x_tail, tail_cols, n_body, W_ptr, softcap, inv_temperature, y, lse, softmax_coef, target_coef,
        smoothing_term, entropy_coef, entropy,
    )  # fmt: skip
    tl.store(DX_ptr + tail_cols, g.to(dx_type), mask=tail_cols < n_stored, eviction_policy=EVICT)
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)
        n_right = n_cols - head
        g_edge = _gradient_tile(
            x_edge, edge, n_right, W_ptr, softcap, inv_temperature, y, lse, softmax_coef, target_coef,
            smoothing_term, entropy_coef, entropy,
        )  # fmt: skip
        tl.store(DX_ptr + edge, g_edge.to(dx_type), mask=edge < n_right)
    for done in tl.range(0, n_full, num_stages=STAGES):
        cols = (n_full - 1 - done) * BLOCK_SIZE + block_cols
        x = load_logits(X_ptr, BIAS_ptr, cols, n_body, n_stored, 0.0, False, EVICT)
        g = _gradient_tile(
            x, cols, n_body, W_ptr, softcap, inv_temperature, y, lse, softmax_coef, target_coef,
            smoothing_term, entropy_coef, entropy,
        )  # fmt: skip
        tl.store(DX_ptr + cols, g.to(dx_type), eviction_policy=EVICT)


@triton.jit
def write_zeros(
    DX_ptr,
    block_cols,
    tail_cols,
    head,
    n_body,
    n_full,
    n_cols,
    n_stored,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The gradient of an ignored row."""
    zeros = tl.zeros([BLOCK_SIZE], dtype=DX_ptr.dtype.element_ty)
    for i in range(0, n_full):
        tl.store(DX_ptr + i * BLOCK_SIZE + block_cols, zeros)
    tl.store(DX_ptr + tail_cols, zeros, mask=tail_cols < n_stored)
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)
        tl.store(DX_ptr + edge, tl.zeros([2 * VECTOR], dtype=DX_ptr.dtype.element_ty), mask=edge < n_cols - head)


# -- tunables --------------------------------------------------------------------------------------------------------


def rows_heuristic(target: Target, key: Key) -> LaunchConfig:
    """A row of up to 8192 columns is one tile and is read once. A wider row has tiles of 8192 columns and is kept in
    cache for the second sweep. Wider tiles spill where a thread has few registers."""
    block, hint = (key[0], "none") if key[0] <= 8192 else (8192, "keep")
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 32, 16), hint=hint)


rows_safe = tile_rule(4096, 32, 8)


def rows_space(target: Target, key: Key) -> list[LaunchConfig]:
    """One tile that holds the row, or smaller tiles, which are read twice."""
    tiles = column_tiles(key, 1024, 65536)
    whole, parts = [t for t in tiles if t["BLOCK_SIZE"] == key[0]], [t for t in tiles if t["BLOCK_SIZE"] < key[0]]
    limits = {"warps": (1, 2, 4, 8, 16, 32), "per_thread": (4, 64)}
    return [
        *tile_space(target, whole, **limits),
        *tile_space(target, parts, **limits, stages=(1, 2, 3), hints=("none", "keep")),
    ]
