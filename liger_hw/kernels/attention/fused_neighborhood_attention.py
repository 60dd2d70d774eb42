"""Neighbourhood attention: token i attends to the tokens i + dilation * n, where |n| <= kernel_size // 2.

    o_i = sum over j of  softmax over j of (scale * q_i . k_j) * v_j,    j = i + dilation * (-half, ..., half)

Here half = kernel_size // 2; j outside the sequence are left out.

Scores and sums are fp32. In half precision the softmax's weights and the gradients of the scores are rounded before
they are multiplied. Saved for backward: query, key, value and, in fp32, each query's log2 of the softmax's sum.
Backward, with p the weights and dp_ij = do_i . v_j:  ds_ij = p_ij * (dp_ij - sum over m of p_im dp_im),
dv_j = sum over i of p_ij do_i,  dq_i = scale * sum over j of ds_ij k_j,  dk_j = scale * sum over i of ds_ij q_i.

Source: Hassani et al., "Generalized Neighborhood Attention", https://arxiv.org/abs/2504.16922
"""

from __future__ import annotations

import math

import torch

from ... import registry
from ...registry import LaunchConfig, Sample, Tunable, next_power_of_2, normal
from ...runtime.operator import (
    OperatorFunction,
    cdiv,
    check,
    check_integers,
    check_numbers,
    define,
    dense,
    empty_like,
    launch,
)
from ...runtime.triton_import import tl, triton

MAX_HEAD_DIM = 256


def _scale(query, scale):
    return max(1, query.shape[-1]) ** -0.5 if scale is None else scale


def _fwd_reference(query, key, value, kernel_size, dilation, scale):
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    half, n_tokens = kernel_size // 2, query.shape[2]
    tokens = torch.arange(n_tokens, device=query.device)[:, None]
    at = tokens + dilation * torch.arange(-half, half + 1, device=query.device)  # [n_tokens, neighbours]
    exist = (at >= 0) & (at < n_tokens)
    at = torch.where(exist, at, tokens)
    scores = (query.to(wide)[..., None, :] * key.to(wide)[:, :, at]).sum(-1) * _scale(query, scale)
    scores = scores.masked_fill(~exist, float("-inf"))
    if scores.requires_grad and dtype is not wide:
        scores.register_hook(lambda gradient: gradient.to(dtype).to(wide))
    weights = scores.softmax(-1).to(dtype).to(wide)
    o = (weights[..., None] * value.to(wide)[:, :, at]).sum(-2).to(dtype)
    return o.contiguous(), scores.logsumexp(-1) * math.log2(math.e)


def fused_neighborhood_attention_reference(query, key, value, kernel_size=7, dilation=1, scale=None):
    return _fwd_reference(query, key, value, kernel_size, dilation, scale)[0]


# -- kernels ---------------------------------------------------------------------------------------------------------

# Tokens with the same remainder modulo the dilation form a sequence, in which neighbours are adjacent. Program ids run
# over the tiles of a sequence, then over remainders, then over heads.


@triton.jit
def _place(n_tokens, n_tiles, dilation, BLOCK_M: tl.constexpr):
    """(tile's first row in its sequence, sequence's length, row in memory of the sequence's first token)."""
    program = tl.program_id(0).to(tl.int64)
    sequence = program // n_tiles
    remainder = sequence % dilation
    first = (program % n_tiles * BLOCK_M).to(tl.int32)
    length = ((n_tokens - remainder + dilation - 1) // dilation).to(tl.int32)
    return first, length, sequence // dilation * n_tokens + remainder


@triton.jit
def _tile(X_ptr, start, rows, length, dilation, head_dim, BLOCK_D: tl.constexpr):
    """Rows of a sequence, [rows, BLOCK_D]; zeros outside. 16-bit dtypes are kept, others become fp32."""
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
    """log2(e) * scale * a . b, [a_rows, b_rows]; -inf for tokens that are not neighbours."""
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
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # rows without a neighbour so far
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
    """(the softmax's weights, their gradients), [a_rows, b_rows]. lse: of the queries, [a_rows, 1] or [1, b_rows]."""
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
    """dq of BLOCK_M queries. Their neighbours are read twice: first for Shift_ptr [n_heads, n_tokens], each query's sum
    of weight * dweight over its neighbours. (do . o would be this sum, but with o's rounding.)"""
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
    """dk and dv of BLOCK_M keys, from the queries that attend to them."""
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


# -- tunables --------------------------------------------------------------------------------------------------------

DIMS = ("n_heads", "n_tokens", "head_dim", "kernel_size")


def _key(n_heads, n_tokens, head_dim, kernel_size, itemsize):
    return max(16, next_power_of_2(head_dim)), min(256, next_power_of_2(kernel_size)), itemsize


def _config(target, key, rows, cols, stages):
    """Tiles that fit shared memory, which holds three tiles of `rows`, and for each stage three tiles of `cols`."""
    head_dim, _, itemsize = key
    max_elements = 8192 if itemsize == 2 else 2048  # fp32 products read their operands from registers
    while 16 < rows and rows * head_dim > max_elements:
        rows //= 2
    cols = max(16, min(cols, rows))
    while stages > 1 and head_dim * itemsize * 3 * (rows + stages * cols) > target.shared_memory:
        stages -= 1
    blocks = {"BLOCK_D": head_dim, "BLOCK_M": rows, "BLOCK_N": cols}
    return LaunchConfig(blocks, target.warps(rows * head_dim, 16 if stages > 1 else 32, 8), stages)


def _heuristic(target, key):
    """With few neighbours memory is the bound, and a small BLOCK_N avoids loading keys that are no neighbours. With
    little shared memory there is one stage of small tiles."""
    if target.shared_memory <= 65536:
        return _config(target, key, 64, 16, 1)
    return _config(target, key, 64, 64 if key[1] > 32 else 32, 2)


def _space(target, key):
    choices = [(rows, cols, stages) for rows in (32, 64, 128) for cols in (16, 32, 64) for stages in (1, 2, 3)]
    configs = [_config(target, key, *choice) for choice in choices]
    return list(dict.fromkeys(LaunchConfig(c.blocks, warps, c.num_stages) for c in configs for warps in (4, 8)))


def _tunable(variant, kernel):
    rules = {"heuristic": _heuristic, "safe": lambda target, key: _config(target, key, 16, 16, 1), "space": _space}
    return Tunable("fused_neighborhood_attention", variant, kernels=(kernel,), key=_key, dims=DIMS, **rules)


FWD = _tunable("fwd", _neighborhood_fwd_kernel)
BWD_QUERIES = _tunable("bwd_queries", _neighborhood_bwd_queries_kernel)
BWD_KEYS = _tunable("bwd_keys", _neighborhood_bwd_keys_kernel)

# -- launchers -------------------------------------------------------------------------------------------------------


def _launch(tunable, tensors, query, kernel_size, dilation, scales):
    batch, heads, n_tokens, head_dim = query.shape
    if not query.numel():
        return
    plan = tunable.plan(query.device, _key(batch * heads, n_tokens, head_dim, kernel_size, query.itemsize))
    dilation = min(dilation, n_tokens)  # a larger dilation gives the same result: no token has neighbours
    n_tiles = cdiv(cdiv(n_tokens, dilation), plan.config.blocks["BLOCK_M"])
    numbers = (n_tokens, n_tiles, dilation, min(kernel_size // 2, n_tokens), *scales, head_dim)
    launch(plan, tunable.kernels[0], (n_tiles * dilation * batch * heads,), (*tensors, *numbers))


def _fwd(query, key, value, kernel_size, dilation, scale):
    query, key, value = dense(query), dense(key), dense(value)
    o = empty_like(query, query.dtype)
    lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    scales = (_scale(query, scale) * math.log2(math.e),)
    _launch(FWD, (query, key, value, o, lse), query, kernel_size, dilation, scales)
    return o, lse


def _bwd(do, query, key, value, lse, kernel_size, dilation, scale):
    do, query, key, value = dense(do), dense(query), dense(key), dense(value)
    dq, dk, dv = (empty_like(t, t.dtype) for t in (query, key, value))
    tensors = (do, query, key, value, lse, empty_like(lse, lse.dtype))
    scale = _scale(query, scale)
    sizes = query, kernel_size, dilation, (scale * math.log2(math.e), scale)
    _launch(BWD_QUERIES, (*tensors, dq), *sizes)
    _launch(BWD_KEYS, (*tensors, dk, dv), *sizes)
    return dq, dk, dv


def _misfit(query, *_rest):
    head_dim = query.shape[-1]
    return "" if head_dim <= MAX_HEAD_DIM else f"query must have head_dim at most {MAX_HEAD_DIM}, got {head_dim}"


class FusedNeighborhoodAttentionFunction(OperatorFunction):
    fwd = define(
        "fused_neighborhood_attention_fwd(Tensor query, Tensor key, Tensor value, int kernel_size, int dilation,"
        " float? scale) -> (Tensor o, Tensor lse)",
        shapes="T query, key, value [batch, heads, tokens, head_dim]",
        misfit=_misfit,
        launcher=_fwd,
        reference=_fwd_reference,
    )
    bwd = define(
        "fused_neighborhood_attention_bwd(Tensor do, Tensor query, Tensor key, Tensor value, Tensor lse,"
        " int kernel_size, int dilation, float? scale) -> (Tensor dquery, Tensor dkey, Tensor dvalue)",
        shapes="T query, key, value [batch, heads, tokens, head_dim]; do [batch, heads, tokens, head_dim]; "
        "lse [batch, heads, tokens]",
        misfit=lambda do, *args: _misfit(*args),
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_fused_neighborhood_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in which token i attends to the tokens i + dilation * n, where |n| <= kernel_size // 2.

    query, key, value: [batch, n_heads, n_tokens, head_dim] of one shape and dtype, fp32, fp16 or bf16 (fp64 too on the
    CPU), head_dim at most 256. Tokens near the ends of the sequence have fewer neighbours.
    scale: factor of the scores; None: 1 / sqrt(head_dim). Returns [batch, n_heads, n_tokens, head_dim].
    Raises `ValueError` for shapes, dtypes, devices or sizes that do not fit. https://arxiv.org/abs/2504.16922
    """
    name = "liger_fused_neighborhood_attention"
    check_integers(name, kernel_size=kernel_size, dilation=dilation)
    check(kernel_size > 0, name, f"kernel_size must be positive, got {kernel_size}")
    check(dilation > 0, name, f"dilation must be positive, got {dilation}")
    if scale is not None:
        check_numbers(name, scale=scale)
        scale = float(scale)
    return FusedNeighborhoodAttentionFunction.apply(query, key, value, kernel_size, dilation, scale)


class LigerFusedNeighborhoodAttention(torch.nn.Module):
    """Multi-head neighbourhood attention with its four projections.

    hidden_size: divisible by num_heads; kernel_size: odd; dropout: its probability, for the output. The other arguments
    are as for `liger_fused_neighborhood_attention`. Raises `ValueError` for sizes that do not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        is_odd = kernel_size > 0 and kernel_size % 2 == 1
        check(is_odd, name, f"kernel_size must be positive and odd, got {kernel_size}")
        check(dilation > 0, name, f"dilation must be positive, got {dilation}")
        if hidden_size % num_heads:
            check(False, name, f"hidden_size {hidden_size} must be divisible by num_heads {num_heads}")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q_proj = torch.nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = torch.nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = torch.nn.Linear(hidden_size, hidden_size, bias=bias)
        self.out_proj = torch.nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = torch.nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_states: [batch, n_tokens, hidden_size]; returns the same shape. Raises `NotImplementedError` for a
        mask."""
        if attention_mask is not None:
            raise NotImplementedError(f"{type(self).__name__}: attention_mask is not supported; pass None")
        heads = (*hidden_states.shape[:2], self.num_heads, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
        o = liger_fused_neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale)
        output = self.out_proj(o.transpose(1, 2).flatten(2))
        return output if self.dropout is None else self.dropout(output)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"kernel_size={self.kernel_size}, dilation={self.dilation}, scale={self.scale}, dropout={self.dropout_p}"
        )


class LigerFusedNeighborhoodAttentionLayer(torch.nn.Module):
    """x + attention(layer_norm(x)). Arguments: as for `LigerFusedNeighborhoodAttention`, and the norm's epsilon."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = torch.nn.LayerNorm(hidden_size, eps=layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_states: [batch, n_tokens, hidden_size]; returns the same shape."""
        return hidden_states + self.attention(self.layer_norm(hidden_states), attention_mask)


WORKLOADS = {"window_7": (16, 4096, 64, 7), "window_65": (32, 8192, 128, 65), "window_513": (32, 16384, 128, 513)}
"""Sizes (batch * n_heads, n_tokens, head_dim, kernel_size)."""


def sample(sizes, dtype, device, generator, *, dilation=1, scale=None) -> Sample:
    n_heads, n_tokens, head_dim, kernel_size = sizes
    drawn = normal(dtype, device, generator)
    query, key, value = (drawn(1, n_heads, n_tokens, head_dim) for _ in range(3))
    return Sample(
        args=(query, key, value, kernel_size, dilation, scale),
        reduction=head_dim * kernel_size,
        grad_reduction=head_dim * kernel_size,
        moved=12 * n_heads * n_tokens * head_dim * dtype.itemsize,
    )


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD_QUERIES, BWD_KEYS),
    options=({}, {"dilation": 3}, {"scale": 0.3}),
    small=((2, 100, 20, 7), (1, 37, 16, 64), (3, 5, 33, 4)),
)
