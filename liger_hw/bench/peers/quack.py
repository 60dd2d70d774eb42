"""quack-kernels (CuTe DSL, NVIDIA only)."""

from __future__ import annotations

import importlib
from typing import Any, Callable

import torch

from .common import only


def _rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return importlib.import_module("quack.rmsnorm").rmsnorm(X, W, eps=eps, weight_offset=offset)


def _fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    norm = importlib.import_module("quack.rmsnorm").rmsnorm
    return norm(X, W, residual=R, eps=eps, prenorm=True, weight_offset=offset)


class _LayerNorm(torch.autograd.Function):
    """Its kernels' forward and backward, which it does not join itself; they take weights in fp32 only."""

    @staticmethod
    def forward(ctx, x, w, b, eps):
        module = importlib.import_module("quack.rmsnorm")
        wide = w.float()
        y, rstd, mean = module.layernorm_fwd(x, wide, None if b is None else b.float(), eps, True, True)
        ctx.save_for_backward(x, wide, rstd, mean)
        ctx.dtypes = w.dtype, None if b is None else b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, wide, rstd, mean = ctx.saved_tensors
        w_dtype, b_dtype = ctx.dtypes
        bwd = importlib.import_module("quack.rmsnorm").layernorm_bwd
        dx, dw, db = bwd(x, wide, dy.contiguous(), rstd, mean, has_bias=b_dtype is not None)
        return dx, dw.to(w_dtype), None if db is None else db.to(b_dtype), None


def _layer_norm(X, W, B, eps):
    return _LayerNorm.apply(X, W, B, eps)


def _softmax(x):
    return importlib.import_module("quack.softmax").softmax(x)


def _rotary(q, k, cos, sin, unsqueeze_dim, interleaved):
    """q and k each in a kernel of their own; it reads [B, T, heads, D], and half of cos and sin for all sequences."""
    if cos.dim() == 3:
        only({"batch of cos": 1}, **{"batch of cos": cos.shape[0]})
        cos, sin = cos[0], sin[0]
    turn = importlib.import_module("quack.rotary").apply_rotary_emb
    half = cos.shape[-1] // 2
    tables = cos[:, :half].contiguous(), sin[:, :half].contiguous()
    if unsqueeze_dim == 2:
        return tuple(turn(x, *tables, interleaved=interleaved) for x in (q, k))
    return tuple(turn(x.transpose(1, 2), *tables, interleaved=interleaved).transpose(1, 2) for x in (q, k))


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False):
    only({}, position_ids=position_ids, rotary_dim=rotary_dim)
    return _rotary(q, k, cos, sin, unsqueeze_dim, False)


def _interleaved_rope(
    q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False, to_halves=False
):
    only({"shared_halves": True, "to_halves": False}, shared_halves=shared_halves, to_halves=to_halves)
    only({}, position_ids=position_ids, rotary_dim=rotary_dim)
    return _rotary(q, k, cos, sin, unsqueeze_dim, True)


def _cross_entropy(input, target, weight=None, ignore_index=-100, reduction="mean", **more):
    only({}, **{name: value for name, value in more.items() if value})
    function = importlib.import_module("quack.cross_entropy").cross_entropy
    return function(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)


def _fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, reduction="mean", **more
):
    only({}, bias=bias, ce_weight=ce_weight, **{name: value for name, value in more.items() if value})
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return function(input, weight, target, ignore_index=ignore_index, reduction=reduction)


QUACK: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "rope": _rope,
    "interleaved_rope": _interleaved_rope,
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
}
