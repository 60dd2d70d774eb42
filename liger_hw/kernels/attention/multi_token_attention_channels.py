"""multi_token_attention with its channels last in memory between the softmax and the convolution.

That is how libraries convolve 16-bit tensors on matrix units; given channels first they transpose every operand and result, a
third to a half of the whole op's time (4 x 32 x 1024 x 1024 on an H200: 4.35 ms channels first, 2.27 so; 2026-11-22). Scores,
results and their gradients stay as the caller has them, channels first: the kernels here read one and write the other.

A program is one query of CHANNELS channels of one example and sees the keys up to its own index; the others are not read.
"""

from __future__ import annotations

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, backend_of, row_key
from ...runtime.operator import cdiv, launch
from ...runtime.replay import repeated
from ...runtime.triton_import import tl, triton

WIDEST = 4096
"""Keys that a program holds at most."""


@triton.jit
def _query_of(n_channels, n_queries, n_keys, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """(example, query, channels, whether they are there, keys, which values exist, which are seen) of this program."""
    parts = tl.cdiv(n_channels, CHANNELS)
    query = (tl.program_id(0) // parts) % n_queries
    batch = (tl.program_id(0) // parts) // n_queries
    channels = (tl.program_id(0) % parts) * CHANNELS + tl.arange(0, CHANNELS)
    keys = tl.arange(0, BLOCK_SIZE)
    own = channels < n_channels
    exist = own[:, None] & (keys < n_keys)[None, :]
    return batch.to(tl.int64), query.to(tl.int64), channels, own, keys, exist, exist & (keys <= query)[None, :]


@triton.jit
def _where(ptr, batch, query, channels, keys, batch_stride, channel_stride, query_stride, key_stride):
    row = ptr + batch * batch_stride + query * query_stride
    return row + (channels.to(tl.int64) * channel_stride)[:, None] + (keys * key_stride)[None, :]


@triton.jit(do_not_specialize=["n_queries"])
def _channels_softmax_fwd_kernel(
    X_ptr,
    Y_ptr,
    n_channels,
    n_queries,
    n_keys,
    X_batch_stride,
    X_channel_stride,
    X_query_stride,
    X_key_stride,
    Y_batch_stride,
    Y_channel_stride,
    Y_query_stride,
    Y_key_stride,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    batch, query, channels, own, keys, exist, seen = _query_of(n_channels, n_queries, n_keys, BLOCK_SIZE, CHANNELS)
    strides = X_batch_stride, X_channel_stride, X_query_stride, X_key_stride
    x_ptrs = _where(X_ptr, batch, query, channels, keys, *strides)
    x = tl.load(x_ptrs, mask=seen, other=-float("inf")).to(tl.float32)
    x = tl.where(own[:, None], x, 0.0)  # channels past the end: something finite
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = e * (1.0 / tl.sum(e, axis=1))[:, None]
    strides = Y_batch_stride, Y_channel_stride, Y_query_stride, Y_key_stride
    tl.store(_where(Y_ptr, batch, query, channels, keys, *strides), y.to(Y_ptr.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=["n_queries"])
def _channels_softmax_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    n_channels,
    n_queries,
    n_keys,
    DY_batch_stride,
    DY_channel_stride,
    DY_query_stride,
    DY_key_stride,
    Y_batch_stride,
    Y_channel_stride,
    Y_query_stride,
    Y_key_stride,
    DX_batch_stride,
    DX_channel_stride,
    DX_query_stride,
    DX_key_stride,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    batch, query, channels, own, keys, exist, seen = _query_of(n_channels, n_queries, n_keys, BLOCK_SIZE, CHANNELS)
    strides = Y_batch_stride, Y_channel_stride, Y_query_stride, Y_key_stride
    y_ptrs = _where(Y_ptr, batch, query, channels, keys, *strides)
    y = tl.load(y_ptrs, mask=seen, other=0.0).to(tl.float32)
    strides = DY_batch_stride, DY_channel_stride, DY_query_stride, DY_key_stride
    dy_ptrs = _where(DY_ptr, batch, query, channels, keys, *strides)
    dy = tl.load(dy_ptrs, mask=seen, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
    strides = DX_batch_stride, DX_channel_stride, DX_query_stride, DX_key_stride
    tl.store(_where(DX_ptr, batch, query, channels, keys, *strides), dx.to(DX_ptr.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=["n_queries"])
def _channels_fill_kernel(
    X_ptr,
    Y_ptr,
    Bias_ptr,
    Sums_ptr,
    n_channels,
    n_queries,
    n_keys,
    X_batch_stride,
    X_channel_stride,
    X_query_stride,
    X_key_stride,
    Y_batch_stride,
    Y_channel_stride,
    Y_query_stride,
    Y_key_stride,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Y = X, plus Bias_ptr [channels] if any, up to the diagonal, zero after it; Sums_ptr [batch, queries, channels], if any:
    what of X lies there, summed over the keys in fp32."""
    batch, query, channels, own, keys, exist, seen = _query_of(n_channels, n_queries, n_keys, BLOCK_SIZE, CHANNELS)
    strides = X_batch_stride, X_channel_stride, X_query_stride, X_key_stride
    x = tl.load(_where(X_ptr, batch, query, channels, keys, *strides), mask=seen, other=0.0)
    if Sums_ptr is not None:
        total = tl.sum(x.to(tl.float32), axis=1)
        tl.store(Sums_ptr + (batch * n_queries + query) * n_channels + channels, total, mask=own)
    if Bias_ptr is not None:
        bias = tl.load(Bias_ptr + channels, mask=own, other=0.0).to(tl.float32)
        x = tl.where(seen, x.to(tl.float32) + bias[:, None], 0.0).to(Y_ptr.dtype.element_ty)
    strides = Y_batch_stride, Y_channel_stride, Y_query_stride, Y_key_stride
    tl.store(_where(Y_ptr, batch, query, channels, keys, *strides), x, mask=exist)


# -- tunables --------------------------------------------------------------------------------------------------------


def _heuristic(target: Target, key: Key, most: int) -> LaunchConfig:
    """16 channels of a query, 32 bytes side by side, of at most `most` values in all; 64 values a thread."""
    block = min(key[0], WIDEST)
    channels = max(1, min(16, most // block))
    return LaunchConfig({"BLOCK_SIZE": block, "CHANNELS": channels}, target.warps(block * channels, 64, 16))


def _safe(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": min(key[0], WIDEST), "CHANNELS": 1}, 4)


def _space(target: Target, key: Key) -> list[LaunchConfig]:
    block = min(key[0], WIDEST)
    return [
        LaunchConfig({"BLOCK_SIZE": block, "CHANNELS": channels}, warps)
        for channels in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16)
        if 8 <= channels * block // (warps * target.warp_size) <= 64
    ]


def _valid(config: LaunchConfig, key: Key) -> str | None:
    names = {"BLOCK_SIZE", "CHANNELS"}
    if set(config.blocks) != names:
        return f"blocks must be {sorted(names)}, got {dict(config.blocks)}"
    whole = config.blocks["BLOCK_SIZE"] >= min(key[0], WIDEST)
    return None if whole else f"BLOCK_SIZE must hold all {key[0]} keys"


def _tunable(variant: str, kernel, most: int) -> Tunable:
    return Tunable(
        "multi_token_attention",
        variant,
        kernels=(kernel, _query_of, _where),
        key=lambda batch, seq_len, n_channels, itemsize: row_key(batch * n_channels * seq_len, seq_len, itemsize),
        dims=("batch", "seq_len", "n_channels"),
        heuristic=lambda target, key: _heuristic(target, key, most),
        safe=_safe,
        space=_space,
        valid=_valid,
    )


CHANNELS_FWD = _tunable("channels_fwd", _channels_softmax_fwd_kernel, 32768)
CHANNELS_BWD = _tunable("channels_bwd", _channels_softmax_bwd_kernel, 16384)
CHANNELS_FILL = _tunable("channels_fill", _channels_fill_kernel, 32768)

# -- launchers -------------------------------------------------------------------------------------------------------


def convolves_channels_last(
    scores: torch.Tensor, n_filters: int, padding: tuple[int, ...], groups: int, sparse: bool
) -> bool:
    """Whether the scores' softmax, and what is convolved after it, are to have their channels last."""
    if sparse or groups > 1 or scores.itemsize != 2 or scores.shape[1] % 8 or n_filters % 8:
        return False
    return scores.shape[-1] + 2 * max(padding) <= WIDEST and backend_of(scores.device).convolves_channels_last


def empty_channels_last(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _over_queries(tunable: Tunable, tensors: tuple[torch.Tensor, ...], *others: torch.Tensor | None) -> None:
    """Launch over every query of `tensors`, of one shape [batch, channels, queries, keys] and any strides."""
    batch, n_channels, n_queries, n_keys = tensors[0].shape
    if tensors[0].numel():
        plan = tunable.plan(tensors[0].device, row_key(batch * n_channels * n_queries, n_keys, tensors[0].itemsize))
        strides = [step for t in tensors for step in t.stride()]
        grid = (batch * n_queries * cdiv(n_channels, plan.config.blocks["CHANNELS"]),)
        args = (*tensors, *others, n_channels, n_queries, n_keys, *strides)
        launch(plan, tunable.kernels[0], grid, args)


@repeated
def softmax_to_channels_last(scores: torch.Tensor) -> torch.Tensor:
    p = empty_channels_last(scores)
    _over_queries(CHANNELS_FWD, (scores, p))
    return p


@repeated
def softmax_gradient(dp: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    dx = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    _over_queries(CHANNELS_BWD, (dp, p, dx))
    return dx


@repeated
def filled(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x up to the diagonal, plus `bias`, and zero after it, with its channels first."""
    y = x.new_empty(x.shape)
    _over_queries(CHANNELS_FILL, (x, y), bias, None)
    return y


@repeated
def filled_channels_last(dy: torch.Tensor, wants_sums: bool) -> tuple[torch.Tensor, ...]:
    """dy up to the diagonal and zero after it, with its channels last; and, if wanted, `query_sums` of that."""
    g = empty_channels_last(dy)
    sums = query_sums(dy) if wants_sums else None
    _over_queries(CHANNELS_FILL, (dy, g), None, sums)
    return (g,) if sums is None else (g, sums)


def query_sums(dy: torch.Tensor) -> torch.Tensor:
    """For a fill's sums over the keys: [batch * queries, channels] fp32; zeros where there is nothing to launch over."""
    shape = dy.shape[0] * dy.shape[2], dy.shape[1]
    return (torch.empty if dy.numel() else torch.zeros)(shape, dtype=torch.float32, device=dy.device)
