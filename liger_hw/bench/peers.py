"""The same computation by others: one arm a peer, each op's function with the argument list of `liger_<op>`.

    torch    eager, as models write it            liger  liger-kernel's functional API, its defaults
    compile  torch.compile of the same            quack  quack-kernels (CuTe DSL, NVIDIA only)
    aten     torch's own fused op, where it has   cce    cut-cross-entropy (and `cce_exact`, gradients unfiltered)
    apart    our own ops one after the other, where an op of ours does in one what several can

A new op needs a line in `_EAGER` only when models write it differently from its reference, and a line for each peer
that has it. A peer that is not installed is reported absent; an option it has not raises `Unsupported`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Callable

import torch
import torch.nn.functional as F

from ..registry import Op
from . import chunked
from .more_peers import APART, EAGER, LIGER

OURS = "liger_hw"


class Absent(Exception):
    """The peer is not installed, or has no such op; the message says which."""


class Unsupported(Exception):
    """The peer has the op but not this option."""


@dataclass(frozen=True)
class Peer:
    """module: what to import, distribution: whose version to report; build(op) -> function, or raises `Absent`"""

    name: str
    module: str
    distribution: str
    build: Callable[[Op], Callable[..., Any]]

    def version(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


def arm(name: str, op: Op) -> Callable[..., Any]:
    """The function of an arm for an op. Raises `Absent`; anything else a broken install raises is passed on."""
    if name == OURS:
        return op.function
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    peer = PEERS[name]
    if importlib.util.find_spec(peer.module) is None:
        raise Absent(f"{peer.distribution} is not installed")
    return peer.build(op)


def _only(default: dict[str, Any], **given: Any) -> None:
    wrong = [f"{name}={value!r}" for name, value in given.items() if value != default.get(name)]
    if wrong:
        raise Unsupported(f"has no {', '.join(wrong)}")


# -- torch, as models write it ---------------------------------------------------------------------------------------


def _rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    x = X.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if W is None:
        return x.to(X.dtype)
    if casting_mode == "gemma":
        return (x * (offset + W.float())).to(X.dtype)
    return (W + offset if offset else W) * (x.to(X.dtype) if casting_mode == "llama" else x)


def _fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    S = X + R
    return _rms_norm(S, W, eps, offset, casting_mode), S


def _rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    width = rotary_dim or cos.shape[-1]
    cos, sin = cos[..., :width].unsqueeze(unsqueeze_dim), sin[..., :width].unsqueeze(unsqueeze_dim)
    if width == q.shape[-1]:
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin
    parts = []
    for x in (q, k):
        turned, kept = x[..., :width], x[..., width:]
        parts.append(torch.cat((turned * cos + _rotate_half(turned) * sin, kept), dim=-1))
    return tuple(parts)


def _swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    y = F.silu(a if gate_multiplier == 1.0 else a * gate_multiplier) * b
    return y if down_multiplier == 1.0 else y * down_multiplier


def _fused_gate_up_swiglu(y, gate_multiplier=1.0, down_multiplier=1.0):
    gate, up = y.chunk(2, dim=-1)
    return _swiglu(gate, up, gate_multiplier, down_multiplier)


def _geglu(a, b, approximate="tanh"):
    return F.gelu(a, approximate=approximate) * b


def _cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
    lse_square_scale=0.0,
    softcap=None,
    **more,
):
    _only({}, **{name: value for name, value in more.items() if value})
    logits = input.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if lse_square_scale:
        _only({"reduction": "mean"}, reduction=reduction)
        valid = target != ignore_index
        z = torch.where(valid, torch.logsumexp(logits, -1).square(), 0.0)
        loss = loss + lse_square_scale * z.sum() / valid.sum()
    return loss


def _fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None, ignore_index=-100, **options):
    options.pop("accum_dtype", None)
    options.pop("chunk_mem_const", None)
    return _cross_entropy(F.linear(input, weight, bias), target, ce_weight, ignore_index=ignore_index, **options)


def _kl_div(input, target, size_average=True, reduce=True, reduction="mean", log_target=False, eps=1e-10):
    _only({"size_average": True, "reduce": True, "eps": 1e-10}, size_average=size_average, reduce=reduce, eps=eps)
    return F.kl_div(input, target, reduction=reduction, log_target=log_target)


_EAGER: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "fused_gate_up_swiglu": _fused_gate_up_swiglu,
    "geglu": _geglu,
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    **EAGER,
}


def _torch(op: Op) -> Callable[..., Any]:
    return _EAGER.get(op.name, op.reference)


def _compile(op: Op) -> Callable[..., Any]:
    torch._dynamo.reset()  # every case gets a fresh compile, none is refused for too many recompiles
    return torch.compile(_torch(op), dynamic=False)


def _aten(op: Op) -> Callable[..., Any]:
    def rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        _only({"offset": 0.0}, offset=offset)
        return F.rms_norm(X, X.shape[-1:], W, eps)

    def softmax(x):
        return F.softmax(x, -1)

    def layer_norm(X, W, B, eps):
        return F.layer_norm(X, X.shape[-1:], W, B, eps)

    return _lookup("aten", op, {"rms_norm": rms_norm, "softmax": softmax, "layer_norm": layer_norm})


# -- other packages --------------------------------------------------------------------------------------------------


def _apart(op: Op) -> Callable[..., Any]:
    return _lookup("apart", op, APART)


def _liger(op: Op) -> Callable[..., Any]:
    if op.name in chunked.OPS:
        return chunked.liger(op.name)
    if op.name in LIGER:
        return LIGER[op.name]
    if op.name in _LIGER_ELSEWHERE:
        return _LIGER_ELSEWHERE[op.name]
    functional = importlib.import_module("liger_kernel.transformers.functional")
    function = getattr(functional, f"liger_{op.name}", None)
    if function is None:
        raise Absent(f"liger-kernel has no liger_{op.name}")
    narrower = {"swiglu": _liger_swiglu, "geglu": _liger_geglu}.get(op.name)
    return functools.partial(narrower, function) if narrower else function


def _liger_fused_ce_tvd(student_logits, teacher_logits, target, ignore_index=-100):
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedCETVDLoss(ignore_index)
    return loss(student_logits, teacher_logits, target)


def _liger_scaled_cross_entropy(
    input,
    weight,
    target,
    temperature=1.0,
    ignore_index=-100,
    return_entropy=False,
    selected_token_ids=None,
    accum_dtype=None,
):
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    _only({}, accum_dtype=accum_dtype)
    options = temperature, ignore_index, 1, return_entropy, selected_token_ids
    return module.LigerFusedLinearScaledCrossEntropyFunction.apply(input, weight, target, *options)


def _liger_vocab_parallel(logits, target, tp_group=None, ignore_index=-100, label_smoothing=0.0, *rest, **more):
    module = importlib.import_module("liger_kernel.transformers")
    loss = module.LigerVocabParallelCrossEntropy(ignore_index, label_smoothing, "none", *rest, **more)
    return loss(logits[:, None], target[:, None], tp_group)[:, 0]


_LIGER_ELSEWHERE = {
    "fused_ce_tvd": _liger_fused_ce_tvd,
    "fused_linear_scaled_cross_entropy": _liger_scaled_cross_entropy,
    "vocab_parallel_cross_entropy": _liger_vocab_parallel,
}
"""What liger-kernel has outside its functional API."""


def _liger_swiglu(function, a, b, gate_multiplier=1.0, down_multiplier=1.0):
    given = {"gate_multiplier": gate_multiplier, "down_multiplier": down_multiplier}
    _only({"gate_multiplier": 1.0, "down_multiplier": 1.0}, **given)
    return function(a, b)


def _liger_geglu(function, a, b, approximate="tanh"):
    _only({"approximate": "tanh"}, approximate=approximate)
    return function(a, b)


def _quack(op: Op) -> Callable[..., Any]:
    norm = importlib.import_module("quack.rmsnorm").rmsnorm

    def rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        return norm(X, W, eps=eps, weight_offset=offset)

    def fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        return norm(X, W, residual=R, eps=eps, prenorm=True, weight_offset=offset)

    def cross_entropy(input, target, weight=None, ignore_index=-100, reduction="mean", **more):
        _only({}, **{name: value for name, value in more.items() if value})
        function = importlib.import_module("quack.cross_entropy").cross_entropy
        return function(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)

    def fused_linear_cross_entropy(
        input, weight, target, bias=None, ce_weight=None, ignore_index=-100, reduction="mean", **more
    ):
        _only({}, bias=bias, ce_weight=ce_weight, **{name: value for name, value in more.items() if value})
        function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        return function(input, weight, target, ignore_index=ignore_index, reduction=reduction)

    def softmax(x):
        return importlib.import_module("quack.softmax").softmax(x)

    found = (rms_norm, fused_add_rms_norm, cross_entropy, fused_linear_cross_entropy, softmax)
    return _lookup("quack", op, {function.__name__: function for function in found})


def _cce(filter_eps: str | None) -> Callable[[Op], Callable[..., Any]]:
    def build(op: Op) -> Callable[..., Any]:
        def fused_linear_cross_entropy(
            input, weight, target, bias=None, ce_weight=None, ignore_index=-100, reduction="mean", softcap=None, **more
        ):
            _only({}, bias=bias, ce_weight=ce_weight, **{name: value for name, value in more.items() if value})
            function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
            return function(
                input,
                weight,
                target,
                ignore_index=ignore_index,
                softcap=softcap,
                reduction=reduction,
                filter_eps=filter_eps,
            )

        return _lookup("cce", op, {"fused_linear_cross_entropy": fused_linear_cross_entropy})

    return build


def _lookup(peer: str, op: Op, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    if op.name not in table:
        raise Absent(f"{peer} has no {op.name}")
    return table[op.name]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch", "torch", "torch", _torch),
        Peer("compile", "torch", "torch", _compile),
        Peer("aten", "torch", "torch", _aten),
        Peer("apart", "torch", "torch", _apart),
        Peer("liger", "liger_kernel", "liger-kernel", _liger),
        Peer("quack", "quack", "quack-kernels", _quack),
        Peer("cce", "cut_cross_entropy", "cut-cross-entropy", _cce("high")),
        Peer("cce_exact", "cut_cross_entropy", "cut-cross-entropy", _cce(None)),
    )
}
DEFAULT = ("torch", "compile", "liger", "quack", "cce")
