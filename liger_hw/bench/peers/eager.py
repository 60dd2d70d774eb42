"""torch: each op eager, as models write it.

An op that models write as its reference does needs no entry in `EAGER`.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F

from .common import only


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


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False):
    only({}, position_ids=position_ids)
    width = rotary_dim or cos.shape[-1]
    cos, sin = cos[..., :width].unsqueeze(unsqueeze_dim), sin[..., :width].unsqueeze(unsqueeze_dim)
    if width == q.shape[-1]:
        return _turn(q, k, cos, sin)
    turned = _turn(q[..., :width], k[..., :width], cos, sin)
    return tuple(torch.cat((y, x[..., width:]), dim=-1) for y, x in zip(turned, (q, k)))


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
    only({}, **{name: value for name, value in more.items() if value})
    logits = input.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if lse_square_scale:
        only({"reduction": "mean"}, reduction=reduction)
        valid = target != ignore_index
        z = torch.where(valid, torch.logsumexp(logits, -1).square(), 0.0)
        loss = loss + lse_square_scale * z.sum() / valid.sum()
    return loss


def _fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None, ignore_index=-100, **options):
    options.pop("accum_dtype", None)
    options.pop("chunk_mem_const", None)
    return _cross_entropy(F.linear(input, weight, bias), target, ce_weight, ignore_index=ignore_index, **options)


def _fused_linear_jsd(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels=None,
    jsd_beta=0.5,
    ignore_index=-100,
    temperature=1.0,
    accum_dtype=None,
):
    """The reference multiplies in fp32; models multiply in 16 bits and widen the logits."""
    only({}, shift_labels=shift_labels)
    with torch.no_grad():
        teacher = F.log_softmax(F.linear(teacher_input, teacher_weight).float() / temperature, -1)
    student = F.log_softmax(F.linear(student_input, student_weight).float() / temperature, -1)
    if jsd_beta in (0, 1):
        of, to = (teacher, student) if jsd_beta == 0 else (student, teacher)
        return F.kl_div(to, of, reduction="batchmean", log_target=True)
    mixture = torch.log(jsd_beta * teacher.exp() + (1 - jsd_beta) * student.exp())
    by_teacher, by_student = (F.kl_div(mixture, p, reduction="batchmean", log_target=True) for p in (teacher, student))
    return jsd_beta * by_teacher + (1 - jsd_beta) * by_student


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


def _vision_rope(q, k, cos, sin, shared_halves=False):
    turned = _turn(q.float(), k.float(), cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float())
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


def _interleaved_rope(
    q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, shared_halves=False, to_halves=False
):
    only({"to_halves": False}, position_ids=position_ids, rotary_dim=rotary_dim, to_halves=to_halves)
    half = cos.shape[-1] // 2 if shared_halves else cos.shape[-1]
    cos, sin = cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim)
    if shared_halves:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return _turn(q, k, cos, sin, _rotate_pairs)


def _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", **rope):
    q, k = (_rms_norm(x, w, eps, offset, casting_mode) for x, w in ((q, q_weight), (k, k_weight)))
    return _rope(q, k, cos, sin, **rope)


def _embedding(weight, indices, padding_idx=None):
    return F.embedding(indices, weight, padding_idx)


def _multi_token_attention(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    p = torch.softmax(scores.masked_fill(future, -float("inf")), -1)
    return torch.conv2d(p, weight, bias, stride, padding, dilation, groups).masked_fill(future, 0.0)


def _fused_neighborhood_attention(query, key, value, kernel_size=7, dilation=1, scale=None):
    """Scaled dot product attention with the band as a mask."""
    tokens = torch.arange(query.shape[2], device=query.device)
    apart = (tokens[:, None] - tokens).abs()
    band = (apart <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    return F.scaled_dot_product_attention(query, key, value, band, scale=scale)


EAGER: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "rope": _rope,
    "qwen2vl_mrope": _qwen2vl_mrope,
    "llama4_rope": _llama4_rope,
    "vision_rope": _vision_rope,
    "interleaved_rope": _interleaved_rope,
    "qk_norm_rope": _qk_norm_rope,
    "swiglu": _swiglu,
    "fused_gate_up_swiglu": _fused_gate_up_swiglu,
    "geglu": _geglu,
    "embedding": _embedding,
    "multi_token_attention": _multi_token_attention,
    "fused_neighborhood_attention": _fused_neighborhood_attention,
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "fused_linear_jsd": _fused_linear_jsd,
}
