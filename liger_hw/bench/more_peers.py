"""What others have of the rotary ops, embedding and multi-token attention, with the argument lists of `liger_<op>`.

EAGER: torch, as models write it. LIGER: liger-kernel's, where its functional API has none of the op's name or arguments.
APART: our own ops one after the other, where an op of ours does their work in one.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable

import torch
import torch.nn.functional as F

# -- torch, as models write it ---------------------------------------------------------------------------------------


def _rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _turn(q, k, cos, sin, rotate=_rotate_half):
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def _qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1, shared_halves=False):
    sections = list(mrope_section) * 2
    cos, sin = (torch.cat([t[i % 3] for i, t in enumerate(x.split(sections, -1))], -1) for x in (cos, sin))
    return _turn(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def _llama4_rope(xq, xk, freqs_cis):
    def turned(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(3).type_as(x)

    return turned(xq), turned(xk)


def _vision_rope(q, k, cos, sin):
    found = _turn(q.float(), k.float(), cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float())
    return found[0].to(q.dtype), found[1].to(k.dtype)


def _interleaved_rope(
    q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False, to_halves=False
):
    half = cos.shape[-1] // 2 if shared_halves else cos.shape[-1]
    cos, sin = cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim)
    if shared_halves:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return _turn(q, k, cos, sin, _rotate_pairs)


def _qk_norm_rope(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps=1e-6,
    offset=0.0,
    casting_mode="llama",
    position_ids=None,
    unsqueeze_dim=1,
    rotary_dim=None,
    shared_halves=False,
):
    def normed(x, w):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return (h * (offset + w.float())).to(x.dtype) if casting_mode == "gemma" else (w + offset) * h.to(x.dtype)

    return _turn(normed(q, q_weight), normed(k, k_weight), cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def _embedding(weight, indices, padding_idx=None):
    return F.embedding(indices, weight, padding_idx)


def _multi_token_attention(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    p = torch.softmax(scores.masked_fill(future, -float("inf")), -1)
    return torch.conv2d(p, weight, bias, stride, padding, dilation, groups).masked_fill(future, 0.0)


EAGER: dict[str, Callable[..., Any]] = {
    "qwen2vl_mrope": _qwen2vl_mrope,
    "llama4_rope": _llama4_rope,
    "vision_rope": _vision_rope,
    "interleaved_rope": _interleaved_rope,
    "qk_norm_rope": _qk_norm_rope,
    "embedding": _embedding,
    "multi_token_attention": _multi_token_attention,
}

# -- liger-kernel ----------------------------------------------------------------------------------------------------


def _liger_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1, shared_halves=False):
    function = importlib.import_module("liger_kernel.transformers.functional").liger_qwen2vl_mrope
    return function(q, k, cos, sin, mrope_section, unsqueeze_dim)


def _liger_llama4(xq, xk, freqs_cis):
    module = importlib.import_module("liger_kernel.transformers.llama4_rope")
    return module.liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis)


def _liger_vision(q, k, cos, sin):
    return importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb_vision(q, k, cos, sin)


def _liger_qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", **how):
    """Its norm and its rope, one after the other, as its patch does."""
    module = importlib.import_module("liger_kernel.transformers.functional")
    q, k = (module.liger_rms_norm(x, w, eps, offset, casting_mode) for x, w in ((q, q_weight), (k, k_weight)))
    return module.liger_rope(q, k, cos, sin)


def _liger_embedding(weight, indices, padding_idx=None):
    module = importlib.import_module("liger_kernel.ops.experimental.embedding")
    return module.LigerEmbeddingFunction.apply(weight, indices)


LIGER: dict[str, Callable[..., Any]] = {
    "qwen2vl_mrope": _liger_mrope,
    "llama4_rope": _liger_llama4,
    "vision_rope": _liger_vision,
    "qk_norm_rope": _liger_qk_norm_rope,
    "embedding": _liger_embedding,
}

# -- our own, apart --------------------------------------------------------------------------------------------------


def _qk_norm_rope_apart(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps=1e-6,
    offset=0.0,
    casting_mode="llama",
    position_ids=None,
    unsqueeze_dim=1,
    rotary_dim=None,
    shared_halves=False,
):
    from ..kernels.rms_norm import liger_rms_norm
    from ..kernels.rope import liger_rope

    def normed(x, w):
        """Rows as they lie in memory: a model norms before it transposes."""
        swap = unsqueeze_dim == 1 and x.stride(1) < x.stride(2)
        y = liger_rms_norm(x.transpose(1, 2) if swap else x, w, eps, offset, casting_mode)
        return y.transpose(1, 2) if swap else y

    q, k = normed(q, q_weight), normed(k, k_weight)
    return liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, shared_halves)


APART: dict[str, Callable[..., Any]] = {"qk_norm_rope": _qk_norm_rope_apart}
