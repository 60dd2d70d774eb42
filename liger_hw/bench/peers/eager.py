"""The peer `torch`: each op in eager mode, as models write it, by the op's name and with the arguments of its sample.

For ops that are not here, models write the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(X, W, eps, offset, casting_mode):
    """As Llama casts: no offset."""
    x = X.to(torch.float32)
    return W * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(X.dtype)


def fused_add_rms_norm(X, R, W, *how):
    S = X + R
    return rms_norm(S, W, *how), S


def _rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _rotate(q, k, cos, sin, rotate=_rotate_half):
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def rope(q, k, cos, sin, shared_halves):
    return _rotate(q, k, cos.unsqueeze(1), sin.unsqueeze(1))


def qwen2vl_mrope(q, k, cos, sin, mrope_section, shared_halves):
    sections = list(mrope_section) * 2
    cos, sin = (torch.cat([t[i % 3] for i, t in enumerate(x.split(sections, -1))], -1) for x in (cos, sin))
    return rope(q, k, cos, sin, shared_halves)


def llama4_rope(xq, xk, freqs_cis):
    def rotated(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(3).type_as(x)

    return rotated(xq), rotated(xk)


def vision_rope(q, k, cos, sin, shared_halves):
    rotated = _rotate(q.float(), k.float(), cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float())
    return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


def interleaved_rope(q, k, cos, sin, shared_halves):
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].unsqueeze(1).repeat_interleave(2, dim=-1) for x in (cos, sin))
    return _rotate(q, k, cos, sin, _rotate_pairs)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *how, shared_halves):
    return rope(rms_norm(q, q_weight, *how), rms_norm(k, k_weight, *how), cos, sin, shared_halves)


def swiglu(a, b, *multipliers):
    """The multipliers are 1."""
    return F.silu(a) * b


def fused_gate_up_swiglu(y, *multipliers):
    return swiglu(*y.chunk(2, dim=-1))


def geglu(a, b, approximate):
    return F.gelu(a, approximate=approximate) * b


def cross_entropy(input, target):
    return F.cross_entropy(input.float(), target)


def fused_linear_cross_entropy(input, weight, target, bias, ce_weight):
    return F.cross_entropy(F.linear(input, weight, bias).float(), target, ce_weight)


def fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, jsd_beta=0.5, temperature=1.0):
    """The reference multiplies in fp32; models multiply in 16 bits and widen the logits."""
    with torch.no_grad():
        teacher = F.log_softmax(F.linear(teacher_input, teacher_weight).float() / temperature, -1)
    student = F.log_softmax(F.linear(student_input, student_weight).float() / temperature, -1)
    mixture = torch.log(jsd_beta * teacher.exp() + (1 - jsd_beta) * student.exp())
    by_teacher, by_student = (F.kl_div(mixture, p, reduction="batchmean", log_target=True) for p in (teacher, student))
    return jsd_beta * by_teacher + (1 - jsd_beta) * by_student


def embedding(weight, indices):
    return F.embedding(indices, weight)


def multi_token_attention(scores, weight, bias, padding):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    p = torch.softmax(scores.masked_fill(future, -float("inf")), -1)
    return torch.conv2d(p, weight, bias, padding=padding).masked_fill(future, 0.0)


def fused_neighborhood_attention(query, key, value, kernel_size, dilation, scale):
    """Scaled dot product attention with the band as a mask."""
    tokens = torch.arange(query.shape[2], device=query.device)
    apart = (tokens[:, None] - tokens).abs()
    band = (apart <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    return F.scaled_dot_product_attention(query, key, value, band, scale=scale)
