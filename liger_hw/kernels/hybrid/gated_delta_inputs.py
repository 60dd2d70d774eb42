"""The inputs of the gated delta rule's scan: convolution, SiLU, split into heads, L2 norm, gates (Qwen3-Next, Qwen3.5).

    q, k, v = split(silu(conv(qkv)));  each head of q and k is then divided by sqrt(its sum of squares + eps)
    beta = sigmoid(b);  g = -exp(A_log) * softplus(a + dt_bias)

conv is defined in causal_conv.py. Arithmetic is fp32, rounded once. Saved for backward: the inputs. The scan of
flash-linear-attention must then be called with use_qk_l2norm_in_kernel=False.

Source: Yang et al., "Gated Delta Networks", https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import registry
from ...registry import LaunchConfig, Sample, Tunable, next_power_of_2, normal
from ...runtime.operator import OperatorFunction, cdiv, check_integers, check_numbers, define, dense, empty_like, launch
from ...runtime.triton_import import tl, triton
from ..rows.reduce import column_sum, column_sum_tunable, params_dtype, partial_sums
from .causal_conv import (
    blocks_of,
    causal_conv_reference,
    conv_key,
    conv_tunables,
    document,
    store_tap_sums,
    tap,
    taps_misfit,
    token_mask,
    within,
)
from .short_conv import documents


class Heads(NamedTuple):
    """The heads of q and k in qkv, and the norm's epsilon."""

    n_k_heads: int
    k_dim: int
    eps: float

    def sizes(self, qkv: torch.Tensor, n_v_heads: int) -> tuple[int, int, int, int]:
        """(n_k_heads, n_v_heads, k_dim, v_dim)"""
        rest = qkv.shape[-1] - 2 * self.n_k_heads * self.k_dim
        return self.n_k_heads, n_v_heads, self.k_dim, rest // n_v_heads


def gated_delta_inputs_reference(qkv, weight, b, a, A_log, dt_bias, n_k_heads, k_dim, seq_idx=None, eps=1e-6):
    wide = torch.promote_types(qkv.dtype, torch.float32)
    n_k_heads, n_v_heads, k_dim, v_dim = Heads(n_k_heads, k_dim, eps).sizes(qkv, A_log.shape[0])
    y = torch.nn.functional.silu(causal_conv_reference(qkv.to(wide), weight, seq_idx))
    k_width = n_k_heads * k_dim
    q, k, v = y.split((k_width, k_width, n_v_heads * v_dim), -1)
    q, k, v = q.unflatten(-1, (n_k_heads, k_dim)), k.unflatten(-1, (n_k_heads, k_dim)), v.unflatten(-1, (-1, v_dim))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + eps) for part in (q, k))
    g = -A_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + dt_bias.to(wide))
    return (*(part.to(qkv.dtype).contiguous() for part in (q, k, v)), b.to(wide).sigmoid().to(b.dtype), g)


# -- queries, keys and values ----------------------------------------------------------------------------------------


@triton.jit
def _head(head, n_k_heads, n_v_heads, k_dim, v_dim, BLOCK_D: tl.constexpr):
    """(first channel in qkv, first column in a row of q, k or v, width of this row, column mask) of a head."""
    is_v = head >= 2 * n_k_heads
    dim = tl.where(is_v, v_dim, k_dim)
    first = tl.where(is_v, 2 * n_k_heads * k_dim + (head - 2 * n_k_heads) * v_dim, head * k_dim)
    place = tl.where(is_v, head - 2 * n_k_heads, head % n_k_heads) * dim
    return first, place, tl.where(is_v, n_v_heads, n_k_heads) * dim, tl.arange(0, BLOCK_D) < dim


@triton.jit
def _of_head(head, n_k_heads, Q_ptr, K_ptr, V_ptr):
    """The pointer of q, k or v, whichever has the head."""
    return tl.where(head < n_k_heads, Q_ptr, tl.where(head < 2 * n_k_heads, K_ptr, V_ptr))


@triton.jit(do_not_specialize=["n_tokens", "n_blocks", "n_v_heads"])
def _gated_delta_inputs_fwd_kernel(
    X_ptr,
    W_ptr,
    Idx_ptr,
    Q_ptr,
    K_ptr,
    V_ptr,
    n_tokens,
    n_blocks,
    n_k_heads,
    n_v_heads,
    k_dim,
    v_dim,
    eps,
    TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n_heads, n_cols = 2 * n_k_heads + n_v_heads, 2 * n_k_heads * k_dim + n_v_heads * v_dim
    head, block = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    row = (block // n_blocks).to(tl.int64) * n_tokens
    t = (block % n_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    first, place, width, col_mask = _head(head, n_k_heads, n_v_heads, k_dim, v_dim, BLOCK_D)
    cols = first + tl.arange(0, BLOCK_D)
    y = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for back in tl.static_range(TAPS):
        at = (row + t - back)[:, None] * n_cols + cols[None, :]
        exists = token_mask(Idx_ptr, row, t, n_tokens, back)[:, None] & col_mask[None, :]
        x = tl.load(X_ptr + at, mask=exists, other=0.0).to(tl.float32)
        y += tap(W_ptr, cols, col_mask, back, TAPS) * x
    y *= tl.sigmoid(y)
    if head < 2 * n_k_heads:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
    at = (row + t)[:, None] * width + place + tl.arange(0, BLOCK_D)[None, :]
    mask = (t < n_tokens)[:, None] & col_mask[None, :]
    Y_ptr = _of_head(head, n_k_heads, Q_ptr, K_ptr, V_ptr)
    tl.store(Y_ptr + at, y.to(V_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _token(X_ptr, Idx_ptr, row, t, n_tokens, n_cols, cols, col_mask):
    """(x in its stored dtype, the document index) of each token t; x is zero outside the sequence."""
    mask = ((t >= 0) & (t < n_tokens))[:, None] & col_mask[None, :]
    x = tl.load(X_ptr + (row + t)[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    return x, document(Idx_ptr, row, t, n_tokens)


@triton.jit(do_not_specialize=["n_tokens", "n_blocks", "n_v_heads"])
def _gated_delta_inputs_bwd_kernel(
    DQ_ptr,
    DK_ptr,
    DV_ptr,
    X_ptr,
    W_ptr,
    Idx_ptr,
    DX_ptr,
    DW_ptr,
    n_tokens,
    n_blocks,
    n_k_heads,
    n_v_heads,
    k_dim,
    v_dim,
    eps,
    TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    n_heads, n_cols = 2 * n_k_heads + n_v_heads, 2 * n_k_heads * k_dim + n_v_heads * v_dim
    head, block = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    row = (block // n_blocks).to(tl.int64) * n_tokens
    start = ((block % n_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)) * BLOCK_L
    first, place, width, col_mask = _head(head, n_k_heads, n_v_heads, k_dim, v_dim, BLOCK_D)
    cols = first + tl.arange(0, BLOCK_D)
    DY_ptr = _of_head(head, n_k_heads, DQ_ptr, DK_ptr, DV_ptr) + place + tl.arange(0, BLOCK_D)[None, :]
    w0, w1 = tap(W_ptr, cols, col_mask, 0, TAPS), tap(W_ptr, cols, col_mask, 1, TAPS)
    w2, w3 = tap(W_ptr, cols, col_mask, 2, TAPS), tap(W_ptr, cols, col_mask, 3, TAPS)
    x_next, i_next = _token(X_ptr, Idx_ptr, row, start, n_tokens, n_cols, cols, col_mask)
    x1, i1 = _token(X_ptr, Idx_ptr, row, start - 1, n_tokens, n_cols, cols, col_mask)
    x2, i2 = _token(X_ptr, Idx_ptr, row, start - 2, n_tokens, n_cols, cols, col_mask)
    x3, i3 = _token(X_ptr, Idx_ptr, row, start - 3, n_tokens, n_cols, cols, col_mask)
    x1, x2, x3 = x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    mask = (start < n_tokens)[:, None] & col_mask[None, :]
    dy_next = tl.load(DY_ptr + (row + start)[:, None] * width, mask=mask, other=0.0)
    # these values never reach a store; with equal ones Triton 3.6 and 3.7 would treat d2 and d3 as constants
    d1, d2, d3 = x1, x2, x3
    dw0 = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    dw1, dw2, dw3 = dw0, dw0, dw0
    for step in range(0, BLOCK_L + 3):
        t = start + step
        x0, i0, dy = x_next.to(tl.float32), i_next, dy_next.to(tl.float32)
        x_next, i_next = _token(X_ptr, Idx_ptr, row, t + 1, n_tokens, n_cols, cols, col_mask)
        mask = (t + 1 < n_tokens)[:, None] & col_mask[None, :]
        dy_next = tl.load(DY_ptr + (row + t + 1)[:, None] * width, mask=mask, other=0.0)
        x1_, x2_ = within(x1, i0, i1, Idx_ptr, 1, TAPS), within(x2, i0, i2, Idx_ptr, 2, TAPS)
        x3_ = within(x3, i0, i3, Idx_ptr, 3, TAPS)
        z = w0 * x0 + w1 * x1_ + w2 * x2_ + w3 * x3_
        sigmoid = tl.sigmoid(z)
        if head < 2 * n_k_heads:
            y = z * sigmoid
            rstd = tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
            y *= rstd
            dy = rstd * (dy - y * tl.sum(dy * y, axis=1)[:, None])
        # past the end dy is NaN if eps=0
        d0 = tl.where((t < n_tokens)[:, None], dy * sigmoid * (1.0 + z * (1.0 - sigmoid)), 0.0)
        counted = tl.where(step < BLOCK_L, d0, 0.0)
        dw0, dw1, dw2, dw3 = dw0 + counted * x0, dw1 + counted * x1_, dw2 + counted * x2_, dw3 + counted * x3_
        dx = w0 * d3 + w1 * within(d2, i3, i2, Idx_ptr, 1, TAPS)
        dx += w2 * within(d1, i3, i1, Idx_ptr, 2, TAPS) + w3 * within(d0, i3, i0, Idx_ptr, 3, TAPS)
        done = (t - 3 < n_tokens)[:, None] & col_mask[None, :] & (step >= 3)
        at = (row + t - 3)[:, None] * n_cols + cols[None, :]
        tl.store(DX_ptr + at, dx.to(DX_ptr.dtype.element_ty), mask=done)
        x3, x2, x1, i3, i2, i1, d3, d2, d1 = x2, x1, x0, i2, i1, i0, d2, d1, d0
    DW_ptr += block.to(tl.int64) * n_cols * TAPS
    store_tap_sums(DW_ptr, cols, col_mask, dw0, 0, TAPS)
    store_tap_sums(DW_ptr, cols, col_mask, dw1, 1, TAPS)
    store_tap_sums(DW_ptr, cols, col_mask, dw2, 2, TAPS)
    store_tap_sums(DW_ptr, cols, col_mask, dw3, 3, TAPS)


# -- gates -----------------------------------------------------------------------------------------------------------


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), accurate even where 1 + exp(x) rounds to 1."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit(do_not_specialize=["n_rows"])
def _gates_fwd_kernel(
    B_ptr, A_ptr, A_log_ptr, Dt_ptr, Beta_ptr, G_ptr, n_rows, n_heads, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    heads = tl.arange(0, BLOCK_H)
    mask = (rows < n_rows)[:, None] & (heads < n_heads)[None, :]
    at = rows[:, None] * n_heads + heads[None, :]
    beta = tl.sigmoid(tl.load(B_ptr + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(Beta_ptr + at, beta.to(Beta_ptr.dtype.element_ty), mask=mask)
    rate = -tl.exp(tl.load(A_log_ptr + heads, mask=heads < n_heads, other=0.0).to(tl.float32))
    bias = tl.load(Dt_ptr + heads, mask=heads < n_heads, other=0.0).to(tl.float32)
    a = tl.load(A_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    tl.store(G_ptr + at, rate[None, :] * _softplus(a), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _gates_bwd_kernel(
    DBeta_ptr,
    DG_ptr,
    B_ptr,
    A_ptr,
    A_log_ptr,
    Dt_ptr,
    DB_ptr,
    DA_ptr,
    DHead_ptr,
    n_rows,
    n_heads,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    heads = tl.arange(0, BLOCK_H)
    mask = (rows < n_rows)[:, None] & (heads < n_heads)[None, :]
    at = rows[:, None] * n_heads + heads[None, :]
    beta = tl.sigmoid(tl.load(B_ptr + at, mask=mask, other=0.0).to(tl.float32))
    db = tl.load(DBeta_ptr + at, mask=mask, other=0.0).to(tl.float32) * beta * (1.0 - beta)
    tl.store(DB_ptr + at, db.to(DB_ptr.dtype.element_ty), mask=mask)
    rate = -tl.exp(tl.load(A_log_ptr + heads, mask=heads < n_heads, other=0.0).to(tl.float32))
    bias = tl.load(Dt_ptr + heads, mask=heads < n_heads, other=0.0).to(tl.float32)
    a = tl.load(A_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    dg = tl.load(DG_ptr + at, mask=mask, other=0.0).to(tl.float32) * rate[None, :]
    da = dg * tl.sigmoid(a)
    tl.store(DA_ptr + at, da.to(DA_ptr.dtype.element_ty), mask=mask)
    DHead_ptr += tl.program_id(0).to(tl.int64) * 2 * n_heads + heads
    tl.store(DHead_ptr, tl.sum(dg * _softplus(a), axis=0), mask=heads < n_heads)
    tl.store(DHead_ptr + n_heads, tl.sum(da, axis=0), mask=heads < n_heads)


# -- tunables --------------------------------------------------------------------------------------------------------


def _key(batch, n_tokens, n_k_heads, n_v_heads, k_dim, v_dim, itemsize):
    return conv_key(batch * n_tokens, next_power_of_2(max(k_dim, v_dim)), itemsize)


def _gates_key(batch, n_tokens, n_k_heads, n_v_heads, k_dim, v_dim, itemsize):
    return next_power_of_2(n_v_heads), itemsize


def _gates_heuristic(target, key):
    tokens = max(1, 1024 // key[0])
    return LaunchConfig({"BLOCK_T": tokens}, target.warps(tokens * key[0], 8, 8))


def _gates_tunable(variant, kernel):
    """No search space: the gates have a hundredth of the convolution's bytes."""
    return Tunable(
        "gated_delta_inputs",
        variant,
        kernels=(kernel,),
        key=_gates_key,
        dims=DIMS,
        heuristic=_gates_heuristic,
        safe=lambda target, key: LaunchConfig({"BLOCK_T": 4}, target.warps(4 * key[0], 8, 8)),
        space=lambda target, key: [],
    )


def _columns(batch, n_tokens, n_k_heads, n_v_heads, k_dim, v_dim):
    return 4 * (2 * n_k_heads * k_dim + n_v_heads * v_dim)


DIMS = "batch", "n_tokens", "n_k_heads", "n_v_heads", "k_dim", "v_dim"
FWD, BWD = conv_tunables(
    "gated_delta_inputs", _gated_delta_inputs_fwd_kernel, _gated_delta_inputs_bwd_kernel, DIMS, _key
)
GATES_FWD, GATES_BWD = _gates_tunable("gates_fwd", _gates_fwd_kernel), _gates_tunable("gates_bwd", _gates_bwd_kernel)
DW = column_sum_tunable("gated_delta_inputs", DIMS, _columns)


# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(qkv, weight, b, a, A_log, dt_bias, seq_idx, heads):
    qkv, weight, b, a, A_log, dt_bias, seq_idx = map(dense, (qkv, weight, b, a, A_log, dt_bias, seq_idx))
    (batch, n_tokens, _), taps = qkv.shape, weight.shape[1]
    sizes = n_k_heads, n_v_heads, k_dim, v_dim = heads.sizes(qkv, A_log.shape[0])
    q = torch.empty((batch, n_tokens, n_k_heads, k_dim), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((batch, n_tokens, n_k_heads, k_dim), dtype=qkv.dtype, device=qkv.device)
    v = torch.empty((batch, n_tokens, n_v_heads, v_dim), dtype=qkv.dtype, device=qkv.device)
    beta, g = empty_like(b, b.dtype), empty_like(b, torch.float32)
    if b.numel():
        plan = FWD.plan(qkv.device, _key(batch, n_tokens, *sizes, qkv.itemsize))
        n_blocks = blocks_of(plan, n_tokens)
        args = qkv, weight, seq_idx, q, k, v, n_tokens, n_blocks, *sizes, heads.eps
        grid = (batch * n_blocks * (2 * n_k_heads + n_v_heads),)
        launch(plan, _gated_delta_inputs_fwd_kernel, grid, args, (taps, plan.key[0]))
        plan = GATES_FWD.plan(b.device, _gates_key(batch, n_tokens, *sizes, b.itemsize))
        args = b, a, A_log, dt_bias, beta, g, batch * n_tokens, n_v_heads
        grid = (cdiv(batch * n_tokens, plan.config.blocks["BLOCK_T"]),)
        launch(plan, _gates_fwd_kernel, grid, args, plan.key[:1])
    return q, k, v, beta, g


def _bwd(dq, dk, dv, dbeta, dg, qkv, weight, b, a, A_log, dt_bias, seq_idx, heads):
    qkv, weight, b, a, A_log, dt_bias, seq_idx = map(dense, (qkv, weight, b, a, A_log, dt_bias, seq_idx))
    (batch, n_tokens, n_cols), taps = qkv.shape, weight.shape[1]
    sizes = n_k_heads, n_v_heads, _, _ = heads.sizes(qkv, A_log.shape[0])
    dqkv, db, da = empty_like(qkv, qkv.dtype), empty_like(b, b.dtype), empty_like(a, a.dtype)
    dtype = params_dtype(b, A_log, dt_bias)
    if not b.numel():
        return dqkv, torch.zeros_like(weight), db, da, b.new_zeros(2 * n_v_heads, dtype=dtype)
    plan = BWD.plan(qkv.device, _key(batch, n_tokens, *sizes, qkv.itemsize))
    n_blocks = blocks_of(plan, n_tokens)
    partial = partial_sums(qkv, batch * n_blocks, n_cols * taps, weight.dtype)
    grads = dense(dq), dense(dk), dense(dv)
    args = *grads, qkv, weight, seq_idx, dqkv, partial, n_tokens, n_blocks, *sizes, heads.eps
    grid = (batch * n_blocks * (2 * n_k_heads + n_v_heads),)
    launch(plan, _gated_delta_inputs_bwd_kernel, grid, args, (taps, plan.key[0]))
    dweight = column_sum(DW, partial, weight.dtype).view(n_cols, taps)
    plan = GATES_BWD.plan(b.device, _gates_key(batch, n_tokens, *sizes, b.itemsize))
    programs = cdiv(batch * n_tokens, plan.config.blocks["BLOCK_T"])
    partial = partial_sums(b, programs, 2 * n_v_heads, dtype)
    args = dense(dbeta), dense(dg), b, a, A_log, dt_bias, db, da, partial, batch * n_tokens, n_v_heads
    launch(plan, _gates_bwd_kernel, (programs,), args, plan.key[:1])
    return dqkv, dweight, db, da, column_sum(DW, partial, dtype)


def _fwd_reference(qkv, weight, b, a, A_log, dt_bias, seq_idx, heads):
    sizes = heads.n_k_heads, heads.k_dim, seq_idx, heads.eps
    return gated_delta_inputs_reference(qkv, weight, b, a, A_log, dt_bias, *sizes)


def _misfit(qkv, weight, b, a, A_log, dt_bias, seq_idx, heads):
    if heads.n_k_heads < 1 or not 1 <= heads.k_dim <= MAX_HEAD_DIM:
        return f"n_k_heads must be positive and k_dim 1 to {MAX_HEAD_DIM}, got {heads.n_k_heads} and {heads.k_dim}"
    rest, n_v_heads = qkv.shape[-1] - 2 * heads.n_k_heads * heads.k_dim, A_log.shape[0]
    if n_v_heads < 1 or rest < 1 or rest % n_v_heads or rest > MAX_HEAD_DIM * n_v_heads:
        return (
            f"qkv must have 2 * n_k_heads * k_dim channels, and 1 to {MAX_HEAD_DIM} more for each of A_log's"
            f" {n_v_heads} heads, got {qkv.shape[-1]} with n_k_heads={heads.n_k_heads}, k_dim={heads.k_dim}"
        )
    return taps_misfit(weight)


MAX_HEAD_DIM = 512
"""One program holds all dimensions of a head, for the norm."""
_TENSORS = "Tensor qkv, Tensor weight, Tensor b, Tensor a, Tensor A_log, Tensor dt_bias, Tensor? seq_idx"
_SHAPES = (
    "qkv [batch, tokens, n]; weight [n, taps]; b, a [batch, tokens, heads]; A_log, dt_bias [heads]; "
    "int seq_idx [batch, tokens]"
)


class GatedDeltaInputsFunction(OperatorFunction):
    fwd = define(
        f"gated_delta_inputs_fwd({_TENSORS}) -> (Tensor q, Tensor k, Tensor v, Tensor beta, Tensor g)",
        shapes=_SHAPES,
        misfit=_misfit,
        launcher=_fwd,
        reference=_fwd_reference,
        numbers=Heads,
    )
    bwd = define(
        f"gated_delta_inputs_bwd(Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg, {_TENSORS})"
        " -> (Tensor dqkv, Tensor dweight, Tensor db, Tensor da, Tensor dA_log_ddt_bias)",
        shapes=f"{_SHAPES}; T dq, dk [batch, tokens, k_heads, k_dim]; T dv [batch, tokens, heads, v_dim]; "
        "dbeta, dg [batch, tokens, heads]",
        misfit=lambda dq, dk, dv, dbeta, dg, *others: _misfit(*others),
        launcher=_bwd,
        derivative_of=fwd,
        numbers=Heads,
    )


def liger_gated_delta_inputs(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    n_k_heads: int,
    k_dim: int,
    seq_idx: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v, beta, g) for the scan of the gated delta rule, which must not normalise q and k again.

    qkv: [batch, n_tokens, channels]: n_k_heads heads of queries, as many of keys, each of k_dim, n_v_heads of values
    weight: [channels, taps], the weight.squeeze(1) of a causal depthwise Conv1d, at most four taps
    b, a: [batch, n_tokens, n_v_heads]; A_log, dt_bias: [n_v_heads]. All fp32, fp16 or bf16 (fp64 too on the CPU).
    seq_idx: [batch, n_tokens] int64 or int32, each token's document; the convolution does not cross documents. None:
    each row is one document. eps: added to the sums of squares of q and k; with eps=0, zeros (padding) give NaN
    Returns q, k [batch, n_tokens, n_k_heads, k_dim], v [batch, n_tokens, n_v_heads, v_dim] in qkv's dtype, beta in b's
    and g in fp32. Raises `ValueError` for shapes, dtypes or devices that do not fit. https://arxiv.org/abs/2412.06464
    """
    check_integers("liger_gated_delta_inputs", n_k_heads=n_k_heads, k_dim=k_dim)
    check_numbers("liger_gated_delta_inputs", eps=eps)
    heads = Heads(n_k_heads, k_dim, float(eps))
    return GatedDeltaInputsFunction.apply(qkv, weight, b, a, A_log, dt_bias, seq_idx, heads)


WORKLOADS = {
    "qwen3_next_80b": (1, 8192, 16, 32, 128, 128),
    "qwen3_5_4b": (4, 4096, 16, 32, 128, 128),
    "qwen3_5_0_8b": (8, 2048, 16, 16, 128, 128),
}


def sample(sizes, dtype, device, generator, *, taps=4, packed=False) -> Sample:
    batch, n_tokens, n_k_heads, n_v_heads, k_dim, v_dim = sizes
    drawn, n_cols = normal(dtype, device, generator), 2 * n_k_heads * k_dim + n_v_heads * v_dim
    gates = (drawn(batch, n_tokens, n_v_heads) for _ in range(2))
    args = drawn(batch, n_tokens, n_cols), drawn(n_cols, taps), *gates, drawn(n_v_heads), drawn(n_v_heads)
    return Sample(
        args=(*args, n_k_heads, k_dim, documents(batch, n_tokens, device) if packed else None),
        reduction=k_dim * taps,
        grad_reduction=batch * n_tokens,
        moved=batch * n_tokens * (5 * n_cols * dtype.itemsize + n_v_heads * (7 * dtype.itemsize + 8)),
    )


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD, GATES_FWD, GATES_BWD, DW),
    options=({}, {"packed": True}, {"taps": 3}),
    small=((2, 9, 1, 2, 16, 8), (1, 1, 1, 1, 7, 20), (1, 37, 1, 1, 16, 16)),
)
