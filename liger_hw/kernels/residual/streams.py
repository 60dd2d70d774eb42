"""Mixing of residual streams by one small matrix h for each token, shared by mhc_pre and mhc_post_res.

    y[o] = sum over i of h[o, i] * x[i]  (+ p[o] * f)

x [n_tokens, n_in, n_cols], y [n_tokens, n_out, n_cols], h [n_tokens, n_out, n_in], f [n_tokens, n_cols],
p [n_tokens, n_out]; mhc_pre has n_out = 1 and no f. Sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from ...registry import LaunchConfig, Tunable, next_power_of_2, tile_space
from ...runtime.operator import empty_like, launch
from ...runtime.triton_import import tl, triton


@triton.jit
def _coefficients(H_ptr, row, n_out, n_in, OUT: tl.constexpr, IN: tl.constexpr):
    """(h [OUT, IN, 1], its offsets and mask [OUT, IN]) of a token."""
    o, i = tl.arange(0, OUT)[:, None], tl.arange(0, IN)[None, :]
    mask = (o < n_out) & (i < n_in)
    h = tl.load(H_ptr + row * n_out * n_in + o * n_in + i, mask=mask, other=0.0).to(tl.float32)
    return h[:, :, None], row * n_out * n_in + o * n_in + i, mask


@triton.jit
def _streams(X_ptr, row, n_streams, n_cols, cols, STREAMS: tl.constexpr):
    """(pointers, mask) of a tile of all streams of a token, [STREAMS, BLOCK_SIZE]."""
    streams = tl.arange(0, STREAMS)[:, None]
    mask = (streams < n_streams) & (cols < n_cols)[None, :]
    return X_ptr + (row * n_streams + streams) * n_cols + cols[None, :], mask


@triton.jit
def _mix_fwd_kernel(
    X_ptr,
    F_ptr,
    H_ptr,
    P_ptr,
    Y_ptr,
    n_in,
    n_out,
    n_cols,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h, _, _ = _coefficients(H_ptr, row, n_out, n_in, OUT, IN)
    if F_ptr is not None:
        outs = tl.arange(0, OUT)
        p = tl.load(P_ptr + row * n_out + outs, mask=outs < n_out, other=0.0).to(tl.float32)[:, None]
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x_ptrs, mask = _streams(X_ptr, row, n_in, n_cols, cols, IN)
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        y = tl.sum(h * x[None, :, :], axis=1)
        if F_ptr is not None:
            f = tl.load(F_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            y += p * f[None, :]
        y_ptrs, mask = _streams(Y_ptr, row, n_out, n_cols, cols, OUT)
        tl.store(y_ptrs, y.to(Y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mix_bwd_kernel(
    DY_ptr,
    X_ptr,
    F_ptr,
    H_ptr,
    P_ptr,
    DX_ptr,
    DF_ptr,
    DH_ptr,
    DP_ptr,
    n_in,
    n_out,
    n_cols,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h, h_at, h_mask = _coefficients(H_ptr, row, n_out, n_in, OUT, IN)
    outs = tl.arange(0, OUT)
    dh = tl.zeros([OUT, IN, BLOCK_SIZE], dtype=tl.float32)
    dp = tl.zeros([OUT, BLOCK_SIZE], dtype=tl.float32)
    if F_ptr is not None:
        p = tl.load(P_ptr + row * n_out + outs, mask=outs < n_out, other=0.0).to(tl.float32)[:, None]
    for start in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x_ptrs, x_mask = _streams(X_ptr, row, n_in, n_cols, cols, IN)
        dy_ptrs, dy_mask = _streams(DY_ptr, row, n_out, n_cols, cols, OUT)
        x = tl.load(x_ptrs, mask=x_mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptrs, mask=dy_mask, other=0.0).to(tl.float32)
        dx_ptrs, _ = _streams(DX_ptr, row, n_in, n_cols, cols, IN)
        tl.store(dx_ptrs, tl.sum(h * dy[:, None, :], axis=0).to(DX_ptr.dtype.element_ty), mask=x_mask)
        dh += dy[:, None, :] * x[None, :, :]
        if F_ptr is not None:
            f = tl.load(F_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            df = tl.sum(p * dy, axis=0)
            tl.store(DF_ptr + row * n_cols + cols, df.to(DF_ptr.dtype.element_ty), mask=cols < n_cols)
            dp += dy * f[None, :]
    tl.store(DH_ptr + h_at, tl.sum(dh, axis=2).to(DH_ptr.dtype.element_ty), mask=h_mask)
    if F_ptr is not None:
        tl.store(DP_ptr + row * n_out + outs, tl.sum(dp, axis=1).to(DP_ptr.dtype.element_ty), mask=outs < n_out)


def _key(n_tokens, n_streams, n_cols, itemsize):
    return next_power_of_2(n_cols), next_power_of_2(n_streams), itemsize


def _fwd_heuristic(target, key):
    block = max(16, min(key[0], 4096 // key[1]))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block * key[1], 32, 8))


def _bwd_heuristic(target, key):
    """dh has a sum for each pair of streams and each column of the tile: 64 registers a thread."""
    block = max(16, min(key[0], 4096 // key[1] ** 2))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block * key[1] ** 2, 64, 8), 2)


def _safe(target, key):
    return LaunchConfig({"BLOCK_SIZE": 16}, target.warps(16 * key[1] ** 2, 64, 8), 1)


def _space(target, key):
    tiles = [{"BLOCK_SIZE": block} for block in (32, 64, 128, 256, 512, 1024, 2048) if block <= key[0]]
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 64), stages=(1, 2, 3), width=key[1])


def mix_tunables(op: str) -> tuple[Tunable, Tunable]:
    rules: dict[str, Any] = {"key": _key, "dims": ("n_tokens", "n_streams", "n_cols"), "safe": _safe, "space": _space}
    return (
        Tunable(op, "fwd", kernels=(_mix_fwd_kernel,), heuristic=_fwd_heuristic, **rules),
        Tunable(op, "bwd", kernels=(_mix_bwd_kernel,), heuristic=_bwd_heuristic, **rules),
    )


def _launch(tunable, x, y, tensors):
    n_in, n_cols = x.shape[-2:]
    n_out = y.numel() * n_in // x.numel()
    plan = tunable.plan(x.device, _key(x.numel() // (n_in * n_cols), n_in, n_cols, x.itemsize))
    blocks = next_power_of_2(n_in), next_power_of_2(n_out)
    launch(plan, tunable.kernels[0], (x.numel() // (n_in * n_cols),), (*tensors, n_in, n_out, n_cols), blocks)


def mix(tunable: Tunable, x: torch.Tensor, f: Any, h: torch.Tensor, p: Any, y: torch.Tensor) -> torch.Tensor:
    """Write y = h x (+ p f) and return it. All tensors are contiguous; f and p may be None."""
    if x.numel():
        _launch(tunable, x, y, (x, f, h, p, y))
    return y


def mix_backward(tunable: Tunable, dy: Any, x: Any, f: Any, h: Any, p: Any) -> tuple[torch.Tensor | None, ...]:
    """(dx, df, dh, dp); without f, df and dp are None. All tensors are contiguous."""
    dx, df, dh, dp = (None if t is None else empty_like(t, t.dtype) for t in (x, f, h, p))
    if x.numel():
        _launch(tunable, x, dy, (dy, x, f, h, p, dx, df, dh, dp))
    else:
        dh.zero_()
        dp = None if dp is None else dp.zero_()
    return dx, df, dh, dp
