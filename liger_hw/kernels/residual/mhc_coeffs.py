"""The coefficients of manifold-constrained hyper-connections, from all residual streams of a token.

    mix = x @ phi / sqrt(mean(x^2) + rms_eps), split into mix_pre, mix_post and mix_res
    h_pre = sigmoid(alpha_pre * mix_pre + b_pre) + pre_eps
    h_post = post_mult * sigmoid(alpha_post * mix_post + b_post)
    h_res = sinkhorn(softmax(alpha_res * mix_res + b_res) + sinkhorn_eps)

sinkhorn divides columns by their sums plus sinkhorn_eps; then, tmax - 1 times, first rows and then columns likewise.

Sums are fp32. In half precision dz, the gradient of z = x @ phi, is rounded to x's dtype before dphi and dx are
computed. Saved for backward: x, phi, b, the alphas, h_res, mix, rstd = 1 / sqrt(...), and the divisors of Sinkhorn.
Backward reverses each Sinkhorn step k = a / s: a = k * s, and da = (dk - sum(dk * k)) / s. After the gradients of
softmax and sigmoid, dz = dmix * rstd, dphi = x^T @ dz,
dx = dz @ phi^T - x * rstd^2 * sum(dmix * mix) / (n_streams * n_cols).

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", https://arxiv.org/abs/2512.24880
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ... import registry
from ...registry import LaunchConfig, Sample, Tunable, next_power_of_2, normal, tile_space
from ...runtime.operator import (
    OperatorFunction,
    cdiv,
    check,
    check_flags,
    check_integers,
    check_numbers,
    define,
    dense,
    empty_like,
    launch,
)
from ...runtime.triton_import import tl, triton
from ..rows.reduce import column_sum, column_sum_tunable, partial_sums
from ..rows.tuning import persistent_misfit

MAX_STREAMS = 16


class Options(NamedTuple):
    tmax: int = 20
    rms_eps: float = 1e-6
    pre_eps: float = 0.0
    sinkhorn_eps: float = 1e-6
    post_mult: float = 2.0


def _coefficients(mix, b, alphas, n, options):
    """(h_pre, h_post, h_res, the divisors of Sinkhorn [..., 2 * tmax - 1, n])."""
    sizes = (n, n, n * n)
    parts = [a * m + c for a, m, c in zip(alphas, mix.split(sizes, -1), b.split(sizes, -1))]
    k, sums = parts[2].unflatten(-1, (n, n)).softmax(-1) + options.sinkhorn_eps, []
    for step in range(2 * options.tmax - 1):
        sums.append(k.sum(-1 if step % 2 else -2) + options.sinkhorn_eps)
        k = k / sums[-1].unsqueeze(-1 if step % 2 else -2)
    return parts[0].sigmoid() + options.pre_eps, options.post_mult * parts[1].sigmoid(), k, torch.stack(sums, -2)


def _fwd_reference(x, phi, b, alpha_pre, alpha_post, alpha_res, options):
    wide = torch.promote_types(x.dtype, torch.float32)
    flat, phi, b = x.to(wide).flatten(-2), phi.to(wide), b.to(wide)
    alphas = [alpha.to(wide).flatten() for alpha in (alpha_pre, alpha_post, alpha_res)]
    z, rstd = flat @ phi, torch.rsqrt(flat.square().mean(-1, keepdim=True) + options.rms_eps)
    if z.requires_grad and x.dtype is not wide:
        z.register_hook(lambda gradient: gradient.to(x.dtype).to(wide))
    h_pre, h_post, h_res, sums = _coefficients(z * rstd, b, alphas, x.shape[-2], options)
    return h_pre, h_post, h_res, (z * rstd)[None].flatten(0, -2), rstd[None].flatten(), sums[None].flatten(0, -3)


def mhc_coeffs_reference(x, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, **numbers):
    return _fwd_reference(x, phi, b, alpha_pre, alpha_post, alpha_res, Options(**numbers))[:3]


# -- kernels ---------------------------------------------------------------------------------------------------------

# A row of `mix` [streams * (streams + 2)] has a token's projections for h_pre, h_post, and h_res (row-major).


@triton.jit
def _operands(a, b):
    """Both unchanged if they have the same 16-bit dtype, else both in fp32."""
    if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16:
        return a, b
    else:
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _mhc_project_fwd_kernel(
    X_ptr,
    Phi_ptr,
    Mix_ptr,
    RSTD_ptr,
    n_rows,
    n_inner,
    n_mix,
    eps,
    MIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """mix = rstd * x @ phi and rstd = 1 / sqrt(mean(x^2) + eps) of BLOCK_N tokens, in one read of x."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    outs = tl.arange(0, MIX)[None, :]
    acc = tl.zeros([BLOCK_N, MIX], dtype=tl.float32)
    squares = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, n_inner, BLOCK_K, num_stages=STAGES):
        inner = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < n_rows) & (inner < n_inner)[None, :]
        x = tl.load(X_ptr + rows * n_inner + inner[None, :], mask=x_mask, other=0.0)
        phi_mask = (inner < n_inner)[:, None] & (outs < n_mix)
        phi = tl.load(Phi_ptr + inner.to(tl.int64)[:, None] * n_mix + outs, mask=phi_mask, other=0.0)
        wide = x.to(tl.float32)
        squares += wide * wide
        a, b = _operands(x, phi)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / n_inner + eps)
    tl.store(RSTD_ptr + rows, rstd, mask=rows < n_rows)
    tl.store(Mix_ptr + rows * n_mix + outs, acc * rstd, mask=(rows < n_rows) & (outs < n_mix))


@triton.jit(do_not_specialize=["n_rows", "n_steps"])
def _mhc_project_bwd_kernel(
    X_ptr,
    Phi_ptr,
    DZ_ptr,
    Shrink_ptr,
    DX_ptr,
    Partial_ptr,
    n_rows,
    n_inner,
    n_mix,
    n_steps,
    MIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = dz @ phi^T - shrink * x, and a partial sum of dphi = x^T @ dz, for BLOCK_K columns and n_steps tiles of
    tokens. Shrink [n_rows]: rstd^2 * sum(dmix * mix) / n_inner."""
    inner = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    outs = tl.arange(0, MIX)[None, :]
    phi_at = inner.to(tl.int64)[:, None] * n_mix + outs
    phi_mask = (inner < n_inner)[:, None] & (outs < n_mix)
    phi = tl.load(Phi_ptr + phi_at, mask=phi_mask, other=0.0)
    dphi = tl.zeros([BLOCK_K, MIX], dtype=tl.float32)
    first = tl.program_id(1).to(tl.int64) * n_steps * BLOCK_N
    for step in tl.range(0, n_steps, num_stages=STAGES):
        rows = first + step * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        x_at, x_mask = rows * n_inner + inner[None, :], (rows < n_rows) & (inner < n_inner)[None, :]
        x = tl.load(X_ptr + x_at, mask=x_mask, other=0.0)
        dz = tl.load(DZ_ptr + rows * n_mix + outs, mask=(rows < n_rows) & (outs < n_mix), other=0.0)
        shrink = tl.load(Shrink_ptr + rows, mask=rows < n_rows, other=0.0)
        dz_phi, phi_dz = _operands(dz, phi)
        dx = tl.dot(dz_phi, tl.trans(phi_dz), input_precision="ieee") - shrink * x.to(tl.float32)
        tl.store(DX_ptr + x_at, dx.to(DX_ptr.dtype.element_ty), mask=x_mask)
        x_dz, dz_x = _operands(x, dz)
        dphi = tl.dot(tl.trans(x_dz), dz_x, dphi, input_precision="ieee")
    partial = Partial_ptr + tl.program_id(1).to(tl.int64) * n_inner * n_mix
    tl.store(partial + phi_at, dphi.to(Partial_ptr.dtype.element_ty), mask=phi_mask)


@triton.jit
def _places(tile, n_rows, n_streams, TOKENS: tl.constexpr, STREAMS: tl.constexpr):
    """(token indices; offsets and mask [TOKENS, STREAMS] for a tensor [n_rows, n_streams]; offsets and mask
    [TOKENS, STREAMS, STREAMS] for a tensor [n_rows, n_streams, n_streams]) of a tile of tokens."""
    tokens = tl.cast(tile, tl.int64) * TOKENS + tl.arange(0, TOKENS)
    streams = tl.arange(0, STREAMS)
    line = tokens[:, None] * n_streams + streams[None, :]
    line_mask = (tokens < n_rows)[:, None] & (streams < n_streams)[None, :]
    square = line[:, :, None] * n_streams + streams[None, None, :]
    return tokens, line, line_mask, square, line_mask[:, :, None] & (streams < n_streams)[None, None, :]


@triton.jit
def _logits(Mix_ptr, B_ptr, Alpha_ptr, at, group_at, mask):
    """(mix, alpha * mix + b). at, group_at: offsets in Mix and in b."""
    mix = tl.load(Mix_ptr + at, mask=mask, other=0.0)
    scaled = tl.load(Alpha_ptr).to(tl.float32) * mix
    b_ptrs = tl.broadcast_to(B_ptr + group_at, mask.shape)  # Triton 3.4 does not broadcast pointers to the mask
    return mix, scaled + tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _softmax(logits, mask):
    """Softmax over the last axis; zeros where the mask is false."""
    top = tl.max(tl.where(mask, logits, -float("inf")), axis=2)
    top = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.where(mask, tl.exp(logits - top[:, :, None]), 0.0)
    total = tl.sum(weights, axis=2)
    return weights / tl.where(total == 0.0, 1.0, total)[:, :, None]


@triton.jit(do_not_specialize=["n_rows"])
def _mhc_sinkhorn_fwd_kernel(
    Mix_ptr,
    B_ptr,
    Alpha_pre_ptr,
    Alpha_post_ptr,
    Alpha_res_ptr,
    Pre_ptr,
    Post_ptr,
    Res_ptr,
    Sums_ptr,
    n_rows,
    n_streams,
    tmax,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    STREAMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Sums_ptr [n_rows, 2 * tmax - 1, n_streams]: the divisors of each Sinkhorn step, for the backward."""
    tokens, line, line_mask, square, mask = _places(tl.program_id(0), n_rows, n_streams, TOKENS, STREAMS)
    streams = tl.arange(0, STREAMS)
    n_mix = n_streams * (n_streams + 2)
    start = tokens[:, None] * n_mix + streams[None, :]
    _, pre = _logits(Mix_ptr, B_ptr, Alpha_pre_ptr, start, streams[None, :], line_mask)
    tl.store(Pre_ptr + line, tl.sigmoid(pre) + pre_eps, mask=line_mask)
    post_at = n_streams + streams[None, :]
    _, post = _logits(Mix_ptr, B_ptr, Alpha_post_ptr, start + n_streams, post_at, line_mask)
    tl.store(Post_ptr + line, tl.sigmoid(post) * post_mult, mask=line_mask)
    entry = 2 * n_streams + streams[None, :, None] * n_streams + streams[None, None, :]
    _, logits = _logits(Mix_ptr, B_ptr, Alpha_res_ptr, tokens[:, None, None] * n_mix + entry, entry, mask)
    k = tl.where(mask, _softmax(logits, mask) + sinkhorn_eps, 0.0)
    step_ptrs = Sums_ptr + tokens[:, None] * ((2 * tmax - 1) * n_streams) + streams[None, :]
    for step in range(tmax):
        if step > 0:
            sums = tl.sum(k, axis=2) + sinkhorn_eps
            tl.store(step_ptrs + (2 * step - 1) * n_streams, sums, mask=line_mask)
            k = k / sums[:, :, None]
        sums = tl.sum(k, axis=1) + sinkhorn_eps
        tl.store(step_ptrs + 2 * step * n_streams, sums, mask=line_mask)
        k = k / sums[:, None, :]
    tl.store(Res_ptr + square, k, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _mhc_sinkhorn_bwd_kernel(
    DPre_ptr,
    DPost_ptr,
    DRes_ptr,
    Mix_ptr,
    RSTD_ptr,
    Res_ptr,
    Sums_ptr,
    B_ptr,
    Alpha_pre_ptr,
    Alpha_post_ptr,
    Alpha_res_ptr,
    DZ_ptr,
    Shrink_ptr,
    Partial_ptr,
    n_rows,
    n_streams,
    n_tiles,
    tmax,
    post_mult,
    inner_inverse,
    STREAMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """DZ, the gradient of x @ phi, and Shrink for `_mhc_project_bwd_kernel`. Program p takes tiles p, p + programs, ...

    inner_inverse: 1 / (n_streams * n_cols). Partial_ptr [programs, n_mix + 3]: each program's partial sums of db and of
    the gradients of the three alphas.
    """
    streams = tl.arange(0, STREAMS)
    n_mix = n_streams * (n_streams + 2)
    entry = 2 * n_streams + streams[:, None] * n_streams + streams[None, :]
    db_pre, da_pre = tl.zeros([STREAMS], dtype=tl.float32), tl.zeros([STREAMS], dtype=tl.float32)
    db_post, da_post = tl.zeros([STREAMS], dtype=tl.float32), tl.zeros([STREAMS], dtype=tl.float32)
    db_res = tl.zeros([STREAMS, STREAMS], dtype=tl.float32)
    da_res = tl.zeros([STREAMS, STREAMS], dtype=tl.float32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        tokens, line, line_mask, square, mask = _places(tile, n_rows, n_streams, TOKENS, STREAMS)
        start = tokens[:, None] * n_mix + streams[None, :]
        pre_mix, pre = _logits(Mix_ptr, B_ptr, Alpha_pre_ptr, start, streams[None, :], line_mask)
        pre = tl.sigmoid(pre)
        dpre = tl.load(DPre_ptr + line, mask=line_mask, other=0.0) * pre * (1.0 - pre)
        post_at = n_streams + streams[None, :]
        post_mix, post = _logits(Mix_ptr, B_ptr, Alpha_post_ptr, start + n_streams, post_at, line_mask)
        post = tl.sigmoid(post)
        dpost = tl.load(DPost_ptr + line, mask=line_mask, other=0.0) * post_mult * post * (1.0 - post)
        res_at = tokens[:, None, None] * n_mix + entry[None, :, :]
        res_mix, logits = _logits(Mix_ptr, B_ptr, Alpha_res_ptr, res_at, entry[None, :, :], mask)
        k = tl.load(Res_ptr + square, mask=mask, other=0.0)
        g = tl.load(DRes_ptr + square, mask=mask, other=0.0)
        step_ptrs = Sums_ptr + tokens[:, None] * ((2 * tmax - 1) * n_streams) + streams[None, :]
        for back in range(tmax):
            step = tmax - 1 - back
            sums = tl.load(step_ptrs + 2 * step * n_streams, mask=line_mask, other=1.0)
            g = (g - tl.sum(g * k, axis=1)[:, None, :]) / sums[:, None, :]
            k = k * sums[:, None, :]
            if step > 0:
                sums = tl.load(step_ptrs + (2 * step - 1) * n_streams, mask=line_mask, other=1.0)
                g = (g - tl.sum(g * k, axis=2)[:, :, None]) / sums[:, :, None]
                k = k * sums[:, :, None]
        weights = _softmax(logits, mask)
        dres = tl.where(mask, weights * (g - tl.sum(weights * g, axis=2)[:, :, None]), 0.0)
        db_pre += tl.sum(dpre, axis=0)
        da_pre += tl.sum(dpre * pre_mix, axis=0)
        db_post += tl.sum(dpost, axis=0)
        da_post += tl.sum(dpost * post_mix, axis=0)
        db_res += tl.sum(dres, axis=0)
        da_res += tl.sum(dres * res_mix, axis=0)
        dpre *= tl.load(Alpha_pre_ptr).to(tl.float32)
        dpost *= tl.load(Alpha_post_ptr).to(tl.float32)
        dres *= tl.load(Alpha_res_ptr).to(tl.float32)
        rstd = tl.load(RSTD_ptr + tokens, mask=tokens < n_rows, other=0.0)
        dot = tl.sum(dpre * pre_mix + dpost * post_mix, axis=1) + tl.sum(tl.sum(dres * res_mix, axis=2), axis=1)
        tl.store(Shrink_ptr + tokens, rstd * rstd * dot * inner_inverse, mask=tokens < n_rows)
        dtype = DZ_ptr.dtype.element_ty
        tl.store(DZ_ptr + start, (dpre * rstd[:, None]).to(dtype), mask=line_mask)
        tl.store(DZ_ptr + start + n_streams, (dpost * rstd[:, None]).to(dtype), mask=line_mask)
        tl.store(DZ_ptr + res_at, (dres * rstd[:, None, None]).to(dtype), mask=mask)
    partial = Partial_ptr + tl.program_id(0) * (n_mix + 3)
    stream_mask = streams < n_streams
    tl.store(partial + streams, db_pre, mask=stream_mask)
    tl.store(partial + n_streams + streams, db_post, mask=stream_mask)
    tl.store(partial + entry, db_res, mask=stream_mask[:, None] & stream_mask[None, :])
    tl.store(partial + n_mix, tl.sum(da_pre, axis=0))
    tl.store(partial + n_mix + 1, tl.sum(da_post, axis=0))
    tl.store(partial + n_mix + 2, tl.sum(tl.sum(da_res, axis=1), axis=0))


# -- tunables --------------------------------------------------------------------------------------------------------

DIMS = ("n_tokens", "n_streams", "n_cols")


def _key(n_tokens, n_streams, n_cols, itemsize):
    tokens = (n_tokens - 1).bit_length() if n_tokens > 1 else 0
    return next_power_of_2(n_streams * n_cols), next_power_of_2(n_streams), tokens, itemsize


def _project_config(target, key, tokens, inner, stages, ctas=0):
    """Tiles whose stages fit half of shared memory. fp32 has small tiles and one stage: its products use registers."""
    columns = next_power_of_2(max(16, key[1] * (key[1] + 2)))
    if key[3] > 2:
        tokens, inner, stages = 16, 32, 1
    while stages > 1 and stages * inner * (tokens + columns) * key[3] > target.shared_memory // 2:
        stages -= 1
    return LaunchConfig({"BLOCK_N": tokens, "BLOCK_K": inner}, target.warps(256 if ctas else 128, 1), stages, ctas)


def _project_safe(target, key):
    return _project_config(target, key, 16, 32, 1, 1)


def _project_space(ctas):
    def space(target, key):
        choices = [(n, k, s, c) for n in (16, 32, 64) for k in (32, 64, 128, 256) for s in (1, 2, 3, 4) for c in ctas]
        return list(dict.fromkeys(_project_config(target, key, *choice) for choice in choices))

    return space


def _sinkhorn_heuristic(target, key):
    """Four elements of h_res a thread: the backward has six tensors of h_res' size in registers."""
    tokens = max(1, min(64, 512 // key[1] ** 2))
    return LaunchConfig({"TOKENS": tokens}, target.warps(tokens * key[1] ** 2, 4, 4), 1, 4)


def _sinkhorn_safe(target, key):
    return LaunchConfig({"TOKENS": 1}, target.warps(key[1] ** 2, 8, 4), 1, 1)


def _sinkhorn_space(target, key):
    tiles = [{"TOKENS": tokens} for tokens in (1, 2, 4, 8, 16, 32, 64, 128)]
    return tile_space(target, tiles, (1, 2, 4), per_thread=(1, 32), ctas=(1, 2, 4, 8), width=key[1] ** 2)


def _tunable(variant, kernel, heuristic, safe, space, **more):
    rules = {"key": _key, "dims": DIMS, "heuristic": heuristic, "safe": safe, "space": space}
    return Tunable("mhc_coeffs", variant, kernels=(kernel,), **rules, **more)


_SINKHORN = _sinkhorn_heuristic, _sinkhorn_safe, _sinkhorn_space
PROJECT_FWD = _tunable(
    "project_fwd",
    _mhc_project_fwd_kernel,
    lambda target, key: _project_config(target, key, 32, 128, 4),
    _project_safe,
    _project_space((0,)),
)
SINKHORN_FWD = _tunable("sinkhorn_fwd", _mhc_sinkhorn_fwd_kernel, *_SINKHORN)
SINKHORN_BWD = _tunable("sinkhorn_bwd", _mhc_sinkhorn_bwd_kernel, *_SINKHORN, valid=persistent_misfit)
PROJECT_BWD = _tunable(
    "project_bwd",
    _mhc_project_bwd_kernel,
    lambda target, key: _project_config(target, key, 32, 64 if key[1] > 4 else 128, 2, 4),
    _project_safe,
    _project_space((1, 2, 4, 8)),
    valid=persistent_misfit,
)
DW = column_sum_tunable(
    "mhc_coeffs", DIMS, columns=lambda n_tokens, n_streams, n_cols: n_streams**2 * (n_streams + 2) * n_cols
)

# -- launchers -------------------------------------------------------------------------------------------------------


def _sizes(x):
    n_streams, n_cols = x.shape[-2:]
    return x.shape[:-2].numel(), n_streams, n_cols, n_streams * n_cols, n_streams * (n_streams + 2)


def _fwd(x, phi, b, alpha_pre, alpha_post, alpha_res, options):
    x, phi, b = dense(x), dense(phi), dense(b)
    n_rows, n_streams, n_cols, n_inner, n_mix = _sizes(x)
    outer, wide = x.shape[:-2], {"dtype": torch.float32, "device": x.device}
    h_pre, h_post = torch.empty((*outer, n_streams), **wide), torch.empty((*outer, n_streams), **wide)
    h_res = torch.empty((*outer, n_streams, n_streams), **wide)
    mix, rstd = torch.empty((n_rows, n_mix), **wide), torch.empty((n_rows,), **wide)
    sums = torch.empty((n_rows, 2 * options.tmax - 1, n_streams), **wide)
    if n_rows:
        key = _key(n_rows, n_streams, n_cols, x.itemsize)
        plan = PROJECT_FWD.plan(x.device, key)
        grid, flags = (cdiv(n_rows, plan.config.blocks["BLOCK_N"]),), (max(16, next_power_of_2(n_mix)),)
        args = (x, phi, mix, rstd, n_rows, n_inner, n_mix, options.rms_eps)
        launch(plan, _mhc_project_fwd_kernel, grid, args, flags)
        plan = SINKHORN_FWD.plan(x.device, key)
        args = (mix, b, alpha_pre, alpha_post, alpha_res, h_pre, h_post, h_res, sums, n_rows, n_streams)
        numbers = (options.tmax, options.pre_eps, options.sinkhorn_eps, options.post_mult)
        grid = (cdiv(n_rows, plan.config.blocks["TOKENS"]),)
        launch(plan, _mhc_sinkhorn_fwd_kernel, grid, (*args, *numbers), (next_power_of_2(n_streams),))
    return h_pre, h_post, h_res, mix, rstd, sums


def _bwd(dpre, dpost, dres, x, phi, b, alpha_pre, alpha_post, alpha_res, h_res, mix, rstd, sums, options):
    dpre, dpost, dres, x, phi, b = (dense(t) for t in (dpre, dpost, dres, x, phi, b))
    n_rows, n_streams, n_cols, n_inner, n_mix = _sizes(x)
    dx = empty_like(x, x.dtype)
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in (b, alpha_pre, alpha_post, alpha_res)])
    if not n_rows:
        return dx, phi.new_zeros(phi.shape), mix.new_zeros(n_mix + 3, dtype=dtype)
    key = _key(n_rows, n_streams, n_cols, x.itemsize)
    dz, shrink = torch.empty((n_rows, n_mix), dtype=x.dtype, device=x.device), empty_like(rstd, rstd.dtype)
    plan = SINKHORN_BWD.plan(x.device, key)
    n_tiles = cdiv(n_rows, plan.config.blocks["TOKENS"])
    programs = min(plan.programs, n_tiles)
    params = partial_sums(x, programs, n_mix + 3, dtype)
    tensors = (dpre, dpost, dres, mix, rstd, h_res, sums, b, alpha_pre, alpha_post, alpha_res, dz, shrink, params)
    numbers = (n_rows, n_streams, n_tiles, options.tmax, options.post_mult, 1.0 / n_inner)
    launch(plan, _mhc_sinkhorn_bwd_kernel, (programs,), (*tensors, *numbers), (next_power_of_2(n_streams),))
    plan = PROJECT_BWD.plan(x.device, key)
    tiles, columns = (cdiv(n, plan.config.blocks[name]) for n, name in ((n_rows, "BLOCK_N"), (n_inner, "BLOCK_K")))
    steps = cdiv(tiles, max(1, min(tiles, plan.programs // columns)))
    n_parts = cdiv(tiles, steps)
    partial = partial_sums(x, n_parts, n_inner * n_mix, phi.dtype)
    args = (x, phi, dz, shrink, dx, partial, n_rows, n_inner, n_mix, steps)
    launch(plan, _mhc_project_bwd_kernel, (columns, n_parts), args, (max(16, next_power_of_2(n_mix)),))
    return dx, column_sum(DW, partial, phi.dtype).view(phi.shape), column_sum(DW, params, dtype)


def _misfit(x, phi, b, *_rest):
    n_streams, n_cols = x.shape[-2:]
    if not 0 < n_streams <= MAX_STREAMS:
        return f"x must have 1 to {MAX_STREAMS} streams, got {n_streams}"
    if not n_cols:
        return "x must have columns to be mixed, got none"
    expected = (n_streams * n_cols, n_streams * (n_streams + 2))
    return "" if phi.shape == expected else f"phi must have shape {expected} to match x, got {tuple(phi.shape)}"


_SHAPES = "x [*, streams, n]; phi [inner, mixes]; b [mixes]; alpha_pre, alpha_post, alpha_res of 1"


class MHCCoeffsFunction(OperatorFunction):
    fwd = define(
        "mhc_coeffs_fwd(Tensor x, Tensor phi, Tensor b, Tensor alpha_pre, Tensor alpha_post, Tensor alpha_res)"
        " -> (Tensor h_pre, Tensor h_post, Tensor h_res, Tensor mix, Tensor rstd, Tensor sums)",
        shapes=_SHAPES,
        misfit=_misfit,
        launcher=_fwd,
        reference=_fwd_reference,
        numbers=Options,
    )
    bwd = define(
        "mhc_coeffs_bwd(Tensor dh_pre, Tensor dh_post, Tensor dh_res, Tensor x, Tensor phi, Tensor b, Tensor alpha_pre,"
        " Tensor alpha_post, Tensor alpha_res, Tensor h_res, Tensor mix, Tensor rstd, Tensor sums)"
        " -> (Tensor dx, Tensor dphi, Tensor db_dalpha_pre_dalpha_post_dalpha_res)",
        shapes=f"{_SHAPES}; dh_pre, dh_post [*, streams]; dh_res, h_res [*, streams, streams]; mix [rows, mixes]; "
        "rstd [rows]; sums [rows, steps, streams]",
        misfit=lambda dh_pre, dh_post, dh_res, *args: _misfit(*args),
        launcher=_bwd,
        derivative_of=fwd,
        numbers=Options,
    )


def liger_mhc_coeffs(
    x: torch.Tensor,
    phi: torch.Tensor,
    b: torch.Tensor,
    alpha_pre: torch.Tensor,
    alpha_post: torch.Tensor,
    alpha_res: torch.Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h_pre, h_post, h_res) of manifold-constrained hyper-connections, from all residual streams of each token.

    x: [..., n_streams, n_cols] with 1 to 16 streams, fp16 or bf16; with allow_fp32 also fp32 (and fp64 on the CPU)
    phi: [n_streams * n_cols, n_mix]; b: [n_mix], n_mix = n_streams * (n_streams + 2); alphas: tensors of one element
    tmax: Sinkhorn iterations, at least 1; the eps and post_mult: see the formulas at the top of this module
    Returns in fp32 h_pre and h_post [..., n_streams], and h_res [..., n_streams, n_streams], whose rows and columns sum
    to about 1. Raises `ValueError` for shapes, dtypes or devices that do not fit. https://arxiv.org/abs/2512.24880
    """
    name = "liger_mhc_coeffs"
    check_flags(name, allow_fp32=allow_fp32)
    check_integers(name, tmax=tmax)
    check_numbers(name, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult)
    check(tmax >= 1, name, f"tmax must be at least 1, got {tmax}")
    if not allow_fp32 and isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.float64):
        check(False, name, f"x must be float16 or bfloat16, got {x.dtype}; to allow it, pass allow_fp32=True")
    options = Options(tmax, float(rms_eps), float(pre_eps), float(sinkhorn_eps), float(post_mult))
    return MHCCoeffsFunction.apply(x, phi, b, alpha_pre, alpha_post, alpha_res, options)


WORKLOADS = {"deepseek_4_streams": (8192, 4, 2560), "wide": (8192, 4, 4096), "two_streams": (16384, 2, 2048)}


def sample(sizes, dtype, device, generator, *, tmax=20, pre_eps=0.0) -> Sample:
    n_tokens, n_streams, n_cols = sizes
    n_inner, n_mix = n_streams * n_cols, n_streams * (n_streams + 2)
    drawn, wide = normal(dtype, device, generator), torch.promote_types(dtype, torch.float32)
    x, phi = drawn(n_tokens, n_streams, n_cols), drawn(n_inner, n_mix)
    phi = (phi.detach() / max(1, n_inner) ** 0.5).requires_grad_()
    drawn = normal(wide, device, generator)
    b, alphas = drawn(n_mix), [drawn(1).detach().view(()).abs().requires_grad_() for _ in range(3)]
    return Sample(
        args=(x, phi, b, *alphas),
        kwargs={"allow_fp32": True, "tmax": tmax, "pre_eps": pre_eps},
        reduction=n_inner,
        grad_reduction=max(n_tokens * n_mix, n_inner),
        moved=3 * n_tokens * n_inner * dtype.itemsize,
    )


OP = registry.register_file(
    __name__,
    tunables=(PROJECT_FWD, SINKHORN_FWD, SINKHORN_BWD, PROJECT_BWD, DW),
    options=({}, {"tmax": 1, "pre_eps": 0.1}),
)
