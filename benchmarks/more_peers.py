"""Peers beside those of `liger-hw bench`; importing this file adds them to `liger_hw.bench.peers.PEERS`.

aten   torch's own fused op, where it has one
quack  quack-kernels (CuTe DSL, NVIDIA only)
cce    cut-cross-entropy (and `cce_exact`, gradients unfiltered)
"""

from __future__ import annotations

import importlib
from typing import Any, Callable

import torch
import torch.nn.functional as F

from liger_hw import registry
from liger_hw.bench import peers
from liger_hw.bench.peers.common import only

# -- quack-kernels ---------------------------------------------------------------------------------------------------


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


# -- cut-cross-entropy -----------------------------------------------------------------------------------------------


def _cce(filter_eps: str | None) -> dict[str, Callable[..., Any]]:
    """filter_eps: its filter of small gradients; None computes them all"""

    def fused_linear_cross_entropy(
        input, weight, target, bias=None, ce_weight=None, ignore_index=-100, reduction="mean", softcap=None, **more
    ):
        only({}, bias=bias, ce_weight=ce_weight, **{name: value for name, value in more.items() if value})
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        options = {"ignore_index": ignore_index, "softcap": softcap, "reduction": reduction, "filter_eps": filter_eps}
        return function(input, weight, target, **options)

    return {"fused_linear_cross_entropy": fused_linear_cross_entropy}


# -- torch's own fused ops -------------------------------------------------------------------------------------------


def _aten_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    only({"offset": 0.0}, offset=offset)
    return F.rms_norm(X, X.shape[-1:], W, eps)


def _aten_layer_norm(X, W, B, eps):
    return F.layer_norm(X, X.shape[-1:], W, B, eps)


ATEN: dict[str, Callable[..., Any]] = {
    "rms_norm": _aten_rms_norm,
    "layer_norm": _aten_layer_norm,
    "softmax": lambda x: F.softmax(x, -1),
}


def table_of(table: dict[str, Callable[..., Any]], peer: str) -> Callable[[registry.Op], Callable[..., Any]]:
    """A `Peer.build` that looks an op's function up in a table."""

    def build(op: registry.Op) -> Callable[..., Any]:
        if op.name not in table:
            raise peers.Absent(f"{peer} has no {op.name}")
        return table[op.name]

    return build


peers.PEERS |= {
    peer.name: peer
    for peer in (
        peers.Peer("aten", "torch", "torch", table_of(ATEN, "aten")),
        peers.Peer("quack", "quack", "quack-kernels", table_of(QUACK, "quack")),
        peers.Peer("cce", "cut_cross_entropy", "cut-cross-entropy", table_of(_cce("high"), "cce")),
        peers.Peer("cce_exact", "cut_cross_entropy", "cut-cross-entropy", table_of(_cce(None), "cce")),
    )
}
