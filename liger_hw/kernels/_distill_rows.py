"""Distillation of a row of student logits from a row of teacher logits (or probabilities): losses and gradient.

For student logits s, teacher logits t (biases added in fp32), temperature T, x = log_softmax(s / T), y = log_softmax(t / T):
    soft = a divergence of _divergence_rows.py over the row (for TVD of e^x and e^y; for KL y is the given probability),
           or 1 - cosine(s, t)
    hard = -log_softmax(s)[label], optional
    d soft / ds[c] = (g[c] - e^x[c] * sum(g)) / T with g = d soft / dx
so one launch sweeps a row up to three times: for the log-sum-exps, for the loss and sum(g), and for the gradient, which
may go over the student's logits. The last two go the opposite way of the one before: what was read last is in cache.

    for start, logits, teacher in sweep(chunks, x, weight, grads, second=(x2, weight2)):
        distill_rows(plan, logits, teacher, labels, share, options, out, dlogits=logits, row_start=start)

Rows whose label is ignore_index have no loss and a gradient of exactly zero. Everything is computed in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import registry
from ..registry import LaunchConfig, Target, Tunable
from ._cross_entropy_rows import has_block_size
from ._divergence_rows import KL, TVD, divergence_of, divergence_slope, divergence_terms, jsd_of
from ._log_prob_rows import vocab_key
from ._op import launch
from ._triton import tl, triton

COSINE = 5  # beside the kinds of _divergence_rows.py
_NO_HARD, _HARD_SAME, _HARD_APART = range(3)
_SHORTEST = 1e-8


class Distillation(NamedTuple):
    """The numbers of one call. The weights go into the gradient only; the losses come out apart and unweighted."""

    kind: int
    beta: float = 0.5
    eps: float = 0.0
    temperature: float = 1.0
    ignore_index: int = -100
    soft_weight: float = 1.0
    hard_weight: float = 0.0


# -- reference -------------------------------------------------------------------------------------------------------


def distill_reference(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None, options: Distillation
) -> tuple[torch.Tensor, torch.Tensor]:
    """(soft, hard) of every row in plain differentiable torch, in fp32 (fp64 for fp64); hard is zero without labels.

    teacher: logits, or probabilities for KL
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    s, t, kind = student.to(wide), teacher.to(wide), options.kind
    if kind == COSINE:
        soft = 1 - F.cosine_similarity(s, t, dim=-1, eps=_SHORTEST)
    else:
        x = torch.log_softmax(s / options.temperature, -1)
        y = t if kind == KL else torch.log_softmax(t / options.temperature, -1)
        pair = (x.exp(), y.exp()) if kind == TVD else (x, y)
        soft = divergence_terms(*pair, kind, options.beta, options.eps).sum(-1)
    if labels is None:
        return soft, torch.zeros_like(soft)
    ignored = labels == options.ignore_index
    at = labels.long().masked_fill(ignored, 0)
    hard = -torch.log_softmax(s, -1).gather(1, at[:, None])[:, 0]
    return soft.masked_fill(ignored, 0.0), hard.masked_fill(ignored, 0.0)


def distill_slopes(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None, options: Distillation
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d soft / d logits, d hard / d logits) [n_rows, n_cols] of every row, unweighted; hard is zero without labels.

    The formulas of the kernel, not autograd, which is not there where an operator runs under a dispatch mode.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    s, t, kind = student.to(wide), teacher.to(wide), options.kind
    if kind == COSINE:
        ls, lt = (v.norm(dim=-1, keepdim=True).clamp_min(_SHORTEST) for v in (s, t))
        soft = (s * t).sum(-1, keepdim=True) / (ls * lt) * s / ls.square() - t / (ls * lt)
    else:
        x = torch.log_softmax(s / options.temperature, -1)
        y = t if kind == KL else torch.log_softmax(t / options.temperature, -1)
        q = x.exp()
        g = divergence_slope(q, y.exp(), kind) * q if kind == TVD else divergence_slope(x, y, kind, options.beta)
        soft = (g - q * g.sum(-1, keepdim=True)) / options.temperature
    if labels is None:
        return soft, torch.zeros_like(soft)
    ignored = labels == options.ignore_index
    hard = torch.softmax(s, -1)
    hard.scatter_add_(1, labels.long().masked_fill(ignored, 0)[:, None], -torch.ones_like(hard[:, :1]))
    return soft.masked_fill(ignored[:, None], 0.0), hard.masked_fill(ignored[:, None], 0.0)


# -- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _logits_block(PTR, BIAS_ptr, cols, n_cols, n_stored, outside):
    """A block of a row; `outside` past its end. Masked where it may be loaded, so that an odd width loads as wide."""
    x = tl.load(PTR + cols, mask=cols < n_stored, other=0.0).to(tl.float32)
    if BIAS_ptr is not None:
        x += tl.load(BIAS_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    return tl.where(cols < n_cols, x, outside)


@triton.jit
def _online(s, m, d):
    """Take a block into the running maximum m and sum d of exp(s - m)."""
    m_new = tl.maximum(m, tl.max(s))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a block of -inf only adds nothing
    return m_new, d * tl.exp(m - shift) + tl.sum(tl.exp(s - shift))


@triton.jit
def _soft_terms(s, t, inv_temperature, lse_s, lse_t, beta, eps, KIND: tl.constexpr):
    """(f, df / dx, e^x) of a block with x = s / T - lse_s; t are logits, probabilities for KL."""
    x = s * inv_temperature - lse_s
    if KIND == 3:
        return jsd_of(x, t * inv_temperature - lse_t, beta)
    q = tl.exp(x)
    if KIND == 0:
        f, g = divergence_of(x, t, beta, eps, KIND)
    elif KIND == 4:
        f, g = divergence_of(q, tl.exp(t * inv_temperature - lse_t), beta, eps, KIND)
        g *= q
    else:
        f, g = divergence_of(x, t * inv_temperature - lse_t, beta, eps, KIND)
    return f, g, q


@triton.jit(do_not_specialize=["row_start", "ignore_index"])
def _distill_kernel(
    S_ptr,
    T_ptr,
    LABEL_ptr,
    S_BIAS_ptr,
    T_BIAS_ptr,
    SHARE_ptr,
    GO_SOFT_ptr,
    GO_HARD_ptr,
    SOFT_ptr,
    HARD_ptr,
    SAVED_ptr,
    DS_ptr,
    S_row_stride,
    T_row_stride,
    DS_row_stride,
    GO_SOFT_stride,
    GO_HARD_stride,
    row_start,
    n_cols,
    s_stored,
    t_stored,
    ignore_index,
    inv_temperature,
    beta,
    eps,
    soft_weight,
    hard_weight,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    LATE: tl.constexpr,
    FROM_SAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a row of a chunk that begins at row `row_start` of labels, losses and SAVED [n_rows, 4].

    HARD: 0 none, 1 with the soft loss's log-sum-exp (T = 1), 2 with its own. FROM_SAVED: a backward, which skips the
    first two sweeps. DS may be S: every element is read and written by the same thread, in the last sweep.
    """
    chunk_row = tl.program_id(0).to(tl.int64)
    row = chunk_row + row_start
    S_ptr += chunk_row * S_row_stride
    T_ptr += chunk_row * T_row_stride
    if DS_ptr is not None:
        DS_ptr += chunk_row * DS_row_stride
    block = tl.arange(0, BLOCK_SIZE)
    tiles = tl.cdiv(n_cols, BLOCK_SIZE)
    label = -1
    if LABEL_ptr is not None:
        label = tl.load(LABEL_ptr + row)
        if label == ignore_index:
            if SOFT_ptr is not None:
                tl.store(SOFT_ptr + row, 0.0)
            if HARD_ptr is not None:
                tl.store(HARD_ptr + row, 0.0)
            if DS_ptr is not None:
                for i in range(0, tiles):
                    cols = i * BLOCK_SIZE + block
                    nothing = tl.zeros([BLOCK_SIZE], dtype=DS_ptr.dtype.element_ty)
                    tl.store(DS_ptr + cols, nothing, mask=cols < s_stored)
            return
    share = tl.load(SHARE_ptr)
    outside = 0.0 if KIND == 5 else float("-inf")
    t_outside = 0.0 if (KIND == 5 or KIND == 0) else float("-inf")

    if FROM_SAVED:
        lse_s = tl.load(SAVED_ptr + row * 4)
        lse_hard = tl.load(SAVED_ptr + row * 4 + 1)
        lse_t = tl.load(SAVED_ptr + row * 4 + 2)
        dot = tl.load(SAVED_ptr + row * 4 + 3)
    else:
        s_label = 0.0
        if HARD:  # read before the first sweep: its reductions are the barrier between this and the gradient there
            inside = (label >= 0) & (label < n_cols)
            at = tl.where(inside, label, 0)
            s_label = tl.load(S_ptr + at).to(tl.float32)
            if S_BIAS_ptr is not None:
                s_label += tl.load(S_BIAS_ptr + at).to(tl.float32)
            s_label = tl.where(inside, s_label, float("nan"))
        m_s = float("-inf")
        m_t = float("-inf")
        m_h = float("-inf")
        d_s = 0.0
        d_t = 0.0
        d_h = 0.0
        for i in tl.range(0, tiles, num_stages=STAGES):
            cols = i * BLOCK_SIZE + block
            s = _logits_block(S_ptr, S_BIAS_ptr, cols, n_cols, s_stored, outside)
            t = _logits_block(T_ptr, T_BIAS_ptr, cols, n_cols, t_stored, t_outside)
            if KIND == 5:
                d_s += tl.sum(s * s)
                d_t += tl.sum(t * t)
                m_t = tl.where(i == 0, 0.0, m_t) + tl.sum(s * t)
            else:
                m_s, d_s = _online(s * inv_temperature, m_s, d_s)
                if KIND == 0:
                    d_t += tl.sum(t)
                else:
                    m_t, d_t = _online(t * inv_temperature, m_t, d_t)
            if HARD == 2:
                m_h, d_h = _online(tl.where(cols < n_cols, s, float("-inf")), m_h, d_h)
        if KIND == 5:  # lse_s, lse_t and dot stand for 1 / |s|^2, 1 / (|s| |t|) and the cosine
            norm_s = tl.maximum(tl.sqrt(d_s), 1e-8)
            lse_s = 1.0 / (norm_s * norm_s)
            lse_t = 1.0 / (norm_s * tl.maximum(tl.sqrt(d_t), 1e-8))
            dot = m_t * lse_t
            soft = 1.0 - dot
        else:
            lse_s = m_s + tl.log(d_s)
            lse_t = m_t + tl.log(d_t)
            soft_terms = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
            slopes = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
            for done in tl.range(0, tiles, num_stages=STAGES):
                cols = (tiles - 1 - done) * BLOCK_SIZE + block
                s = _logits_block(S_ptr, S_BIAS_ptr, cols, n_cols, s_stored, outside)
                t = _logits_block(T_ptr, T_BIAS_ptr, cols, n_cols, t_stored, t_outside)
                f, g, q = _soft_terms(s, t, inv_temperature, lse_s, lse_t, beta, eps, KIND)
                soft_terms += f
                slopes += g
            soft = tl.sum(soft_terms)
            dot = tl.sum(slopes)
        lse_hard = lse_s
        if HARD == 2:
            lse_hard = m_h + tl.log(d_h)
        if SOFT_ptr is not None:
            tl.store(SOFT_ptr + row, soft * share)
        if HARD_ptr is not None:
            tl.store(HARD_ptr + row, (lse_hard - s_label) * share)
        if SAVED_ptr is not None:
            tl.store(SAVED_ptr + row * 4, lse_s)
            tl.store(SAVED_ptr + row * 4 + 1, lse_hard)
            tl.store(SAVED_ptr + row * 4 + 2, lse_t)
            tl.store(SAVED_ptr + row * 4 + 3, dot)

    if DS_ptr is not None:
        slope = 1.0 if LATE else share
        soft_slope = soft_weight * slope
        hard_slope = hard_weight * slope
        if GO_SOFT_ptr is not None:
            soft_slope *= tl.load(GO_SOFT_ptr + row * GO_SOFT_stride).to(tl.float32)
        if GO_HARD_ptr is not None:
            hard_slope *= tl.load(GO_HARD_ptr + row * GO_HARD_stride).to(tl.float32)
        label_col = label.to(tl.int32) if LABEL_ptr is not None else -1
        for i in tl.range(0, tiles, num_stages=STAGES):
            cols = i * BLOCK_SIZE + block
            s = _logits_block(S_ptr, S_BIAS_ptr, cols, n_cols, s_stored, outside)
            t = _logits_block(T_ptr, T_BIAS_ptr, cols, n_cols, t_stored, t_outside)
            if KIND == 5:
                ds = soft_slope * (dot * s * lse_s - t * lse_t)
            else:
                f, g, q = _soft_terms(s, t, inv_temperature, lse_s, lse_t, beta, eps, KIND)
                ds = soft_slope * inv_temperature * (g - q * dot)
            if HARD:
                h = hard_slope * tl.exp(s - lse_hard)
                ds += tl.where(cols == label_col, h - hard_slope, h)
            tl.store(DS_ptr + cols, ds.to(DS_ptr.dtype.element_ty), mask=cols < s_stored)


KERNELS = (_distill_kernel, _logits_block, _online, _soft_terms, divergence_of, jsd_of)

# -- tunables --------------------------------------------------------------------------------------------------------


def _heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """Tiles of 2048, 8 elements of each row a thread: two tiles and their terms stay in registers on every target."""
    block = min(key[0], 2048)
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 8, 16))


def _safe(target: Target, key: registry.Key) -> LaunchConfig:
    block = min(key[0], 1024)
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 8, 8))


def _space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_SIZE": block}, warps, stages)
        for block in {min(key[0], size) for size in (1024, 2048, 4096, 8192, 16384)}
        for warps in (1, 2, 4, 8, 16, 32)
        for stages in (1, 2, 3)
        if 4 <= block // (warps * target.warp_size) <= 32
    ]


def distill_tunable(op: str, dims: tuple[str, ...], key=vocab_key) -> Tunable:
    """The `<op>.fwd` tunable of an op made of `_distill_kernel`. Its key is (columns, bytes an element)."""
    return Tunable(
        op, "fwd", kernels=KERNELS, key=key, dims=dims, heuristic=_heuristic, safe=_safe, space=_space,
        valid=has_block_size,
    )  # fmt: skip


# -- launcher --------------------------------------------------------------------------------------------------------


class DistillRows(NamedTuple):
    """Per-row results, fp32 [n_rows] times the share, and what a later backward needs [n_rows, 4]; None: unwanted."""

    soft: torch.Tensor | None = None
    hard: torch.Tensor | None = None
    saved: torch.Tensor | None = None


def distill_rows(
    plan: registry.Plan,
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None,
    share: torch.Tensor,
    options: Distillation,
    out: DistillRows,
    *,
    dlogits: torch.Tensor | None = None,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    soft_grads: torch.Tensor | None = None,
    hard_grads: torch.Tensor | None = None,
    row_start: int = 0,
    late: bool = False,
    from_saved: bool = False,
    owned: bool = True,
) -> None:
    """Losses of the rows student [n, vocab], which are rows row_start.. of labels and out, and their gradient.

    teacher: logits [n, vocab], or for KL the probabilities of these n rows; share: fp32 on the device, multiplies losses
    and gradient (late: the losses alone); soft_grads, hard_grads: incoming gradient of each row; dlogits: where the
    gradient goes, None for none, `student` itself for in place. owned: padding between the student's rows is ours.
    """
    n, n_cols = student.shape
    if not n:
        return

    def stride(t: torch.Tensor | None) -> int:
        return 0 if t is None else t.stride(0)

    given = options.kind == KL
    s_stored = min(stride(student), stride(dlogits) if dlogits is not None else stride(student)) if owned else n_cols
    t_stored = stride(teacher) if owned and not given else n_cols
    hard = _NO_HARD
    if out.hard is not None or options.hard_weight:
        hard = _HARD_SAME if options.temperature == 1.0 and options.kind != COSINE else _HARD_APART
    args = (
        *(student, teacher, labels, student_bias, teacher_bias, share, soft_grads, hard_grads, *out, dlogits),
        *(stride(student), stride(teacher), stride(dlogits), stride(soft_grads), stride(hard_grads)),
        *(row_start, n_cols, s_stored, t_stored, options.ignore_index, 1.0 / options.temperature),
        *(options.beta, options.eps, options.soft_weight, options.hard_weight),
    )
    launch(plan, _distill_kernel, (n,), args, (options.kind, hard, late, from_saved))

