"""Distillation of a row of student logits from a row of teacher logits (or probabilities): losses and gradient.

For student logits s, teacher logits t (biases added in fp32) and temperature T, with x = log_softmax(s / T) and
y = log_softmax(t / T):
    soft = a divergence of divergence_rows.py over the row, or 1 - cosine(s, t). TVD compares e^x and e^y; for KL, y is
           the teacher's probability
    hard = -log_softmax(s)[label], optional
    d soft / ds[c] = (g[c] - e^x[c] * sum(g)) / T with g = d soft / dx
One launch sweeps a row two or three times. The first sweep computes the sums of exponentials, the loss and sum(g); JSD
and TVD need a second sweep for the loss and sum(g). The last sweep computes the gradient, which may overwrite the
student's logits. The direction alternates, because the columns that were read last are in cache.

The kernel is bound by arithmetic. To save instructions, exponentials and logarithms have base 2; a log-probability is a
logit minus the log-sum-exp, so only JSD's mixture takes a logarithm; and only a row's last tile is masked. A lane is
the GROUP columns that a thread loads at once. It has its maximum and sum, which are combined at the end of the row.

    for start, logits, teacher in sweep(chunks, x, weight, grads, second=(x2, weight2)):
        distill_rows(plan, logits, teacher, labels, share, options, out, dlogits=logits, row_start=start)

Rows whose label is ignore_index have no loss and a gradient of exactly zero. Everything is computed in fp32.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch
import torch.nn.functional as F

from ... import registry
from ...registry import LaunchConfig, Target, Tunable, columns_key, tile_space
from ...runtime.operator import launch
from ...runtime.triton_import import tl, triton
from ..rows.row import tail_columns
from ..rows.tuning import DIMS, column_tiles, tile_rule
from .divergence_rows import KL, TVD, divergence_terms, jsd_terms, log2_of
from .loss_gradient import gradient_of

_NO_HARD_LOSS, _HARD_USES_SOFT_SUM, _HARD_HAS_SUM = range(3)  # HARD of `_distill_kernel`

COSINE = 5
"""The kind of the cosine distance; divergence_rows.py has the others."""


class Distillation(NamedTuple):
    """The options of one call. soft_weight and hard_weight are for the gradient; the losses are returned unweighted."""

    kind: int
    beta: float = 0.5
    eps: float = 0.0
    temperature: float = 1.0
    ignore_index: int = -100
    soft_weight: float = 1.0
    hard_weight: float = 0.0


def distill_reference(student, teacher, labels, options: Distillation):
    """(soft, hard) of every row in plain differentiable torch, in fp32 (fp64 for fp64); hard is zero without labels.

    teacher: probabilities for KL, logits for other kinds
    """
    wide, kind = torch.promote_types(student.dtype, torch.float32), options.kind
    s, t = student.to(wide), teacher.to(wide)
    if labels is not None:
        ignored = labels == options.ignore_index
        s, t = (logits.masked_fill(ignored[:, None], 0.0) for logits in (s, t))
    if kind == COSINE:
        soft = 1 - F.cosine_similarity(s, t, dim=-1, eps=1e-8)
    else:
        x = torch.log_softmax(s / options.temperature, -1)
        y = t if kind == KL else torch.log_softmax(t / options.temperature, -1)
        if kind == TVD:
            x, y = x.exp(), y.exp()
        soft = divergence_terms(x, y, kind, options.beta, options.eps).sum(-1)
    if labels is None:
        return soft, torch.zeros_like(soft)
    labels = labels.long().masked_fill(ignored, 0)
    hard = -torch.log_softmax(s, -1).gather(1, labels[:, None])[:, 0]
    return soft.masked_fill(ignored, 0.0), hard.masked_fill(ignored, 0.0)


def distill_gradient(student, teacher, labels, options: Distillation) -> torch.Tensor:
    """The gradient of the weighted losses with respect to the student's logits, in fp32 or fp64."""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        soft, hard = distill_reference(logits, teacher, labels, options)
        return options.soft_weight * soft + options.hard_weight * hard

    return gradient_of(loss, student, student.new_ones(student.shape[0]))


# -- tiles and lanes -------------------------------------------------------------------------------------------------


@triton.jit
def logits_tile(PTR, BIAS_ptr, cols, head, n_cols, n_stored, outside, MASKED: tl.constexpr, VECTOR: tl.constexpr):
    """A tile of logits plus bias in fp32. cols: counted from the first column of the body (rows/row.py). MASKED: the
    row ends in this tile; columns past its end get the value `outside`.

    The load's mask ends at n_stored or, for VECTOR > 1, at the end of a vector, so that the load stays wide.
    """
    if MASKED:
        load_mask = cols < n_stored
        exist = cols < n_cols
        if VECTOR > 1:
            load_mask = (cols < tl.cdiv(n_cols, VECTOR) * VECTOR) & (cols >= -tl.cdiv(head, VECTOR) * VECTOR)
            exist = exist & (cols >= -head)
        x = tl.load(PTR + cols, mask=load_mask, other=0.0).to(tl.float32)
        if BIAS_ptr is not None:
            x += tl.load(BIAS_ptr + cols, mask=exist, other=0.0).to(tl.float32)
        x = tl.where(exist, x, outside)
    else:
        x = tl.load(PTR + cols).to(tl.float32)
        if BIAS_ptr is not None:
            x += tl.load(BIAS_ptr + cols).to(tl.float32)
    return x


@triton.jit
def _update_maxima(x, m):
    """(the lanes' maxima m after a tile x [lanes, group], their rise, x minus the new maxima)."""
    m_new = tl.maximum(m, tl.max(x, axis=1))
    return m_new, m_new - m, x - m_new[:, None]


@triton.jit
def _shifted(moment, weights, shift):
    """sum(w * (d + shift)) from `moment` = sum(w * d) and `weights` = sum(w); weights of 0 add 0 for any shift."""
    return moment + tl.where(weights == 0.0, 0.0, weights * shift)


@triton.jit
def _combine_lanes(d, top, m, scale):
    """A row's sum relative to its maximum m, from its lanes' sums d relative to their maxima `top`. nan stays nan."""
    e = tl.exp2((top - m) * scale)
    return tl.sum(tl.where((e == 0.0) & (d == d), 0.0, d * e))


@triton.jit
def _log2_probs(s, t, m_s, l_s, m_t, l_t, scale):
    """log2 of the student's and the teacher's probabilities. Subtracting the maximum first keeps large logits exact."""
    return (s - m_s) * scale - l_s, (t - m_t) * scale - l_t


# -- sweeps ----------------------------------------------------------------------------------------------------------


@triton.jit
def scan_pair(
    S_ptr,
    T_ptr,
    S_BIAS_ptr,
    T_BIAS_ptr,
    head,
    n_body,
    n_cols,
    s_stored,
    t_stored,
    n_full,
    tiles,
    scale,
    eps,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """The first sweep: (top_s, sum_s, top_t, sum_t, sum_hard, moment), each [lanes].

    top: maxima; they begin at the lowest finite number, so that a lane of -inf (masked classes) has terms of 0, not nan
    sum: sums of exponentials (KL's sum_t: of probabilities); sum_hard: the same at temperature 1
    moment: sums of the terms of KL, KL_LOG and RKL, computed from logits minus the maxima
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    T_IS_LOGITS: tl.constexpr = KIND != 0
    VECTOR_WIDTH: tl.constexpr = 128 // S_ptr.dtype.element_ty.primitive_bitwidth  # columns in 16 bytes
    GROUP: tl.constexpr = VECTOR_WIDTH if VECTOR_WIDTH < BLOCK_SIZE else BLOCK_SIZE
    LANES: tl.constexpr = BLOCK_SIZE // GROUP
    t_outside = 0.0 if KIND == 0 else float("-inf")
    top_s = tl.full([LANES], -3.4028234663852886e38, dtype=tl.float32)
    top_t = tl.full([LANES], -3.4028234663852886e38, dtype=tl.float32)
    sum_s = tl.zeros([LANES], dtype=tl.float32)
    sum_t = tl.zeros([LANES], dtype=tl.float32)
    sum_hard = tl.zeros([LANES], dtype=tl.float32)
    moment = tl.zeros([LANES], dtype=tl.float32)
    for PART in tl.static_range(2):  # the whole tiles, then the one that the row ends in
        for tile in tl.range(n_full if PART else 0, tiles if PART else n_full, num_stages=STAGES):
            cols = tile * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            if PART == 1:
                cols = tail_columns(cols, n_body, VECTOR)
            s = logits_tile(S_ptr, S_BIAS_ptr, cols, head, n_cols, s_stored, float("-inf"), PART == 1, VECTOR)
            t = logits_tile(T_ptr, T_BIAS_ptr, cols, head, n_cols, t_stored, t_outside, PART == 1, VECTOR)
            top_s, rise_s, low_s = _update_maxima(tl.reshape(s, [LANES, GROUP]), top_s)
            factor_s = tl.exp2(-rise_s * scale)
            e_s = tl.exp2(low_s * scale)
            if HARD == 2:
                sum_hard = sum_hard * tl.exp2(-rise_s * LOG2E) + tl.sum(tl.exp2(low_s * LOG2E), axis=1)
            if KIND == 0:
                p = tl.reshape(t, [LANES, GROUP])
                terms = p * (log2_of(tl.maximum(p, tl.maximum(eps, 1.2e-38)), FAST_LOG2) - low_s * scale)
                moment = _shifted(moment, sum_t, rise_s * scale) + tl.sum(tl.where(p == 0.0, 0.0, terms), axis=1)
                sum_t += tl.sum(p, axis=1)
            if T_IS_LOGITS:
                top_t, rise_t, low_t = _update_maxima(tl.reshape(t, [LANES, GROUP]), top_t)
                factor_t = tl.exp2(-rise_t * scale)
                e_t = tl.exp2(low_t * scale)
                if KIND == 1:
                    moment = tl.where(factor_t == 0.0, 0.0, _shifted(moment, sum_t, rise_s - rise_t) * factor_t)
                    moment += tl.sum(tl.where(e_t == 0.0, 0.0, e_t * (low_t - low_s)), axis=1)
                if KIND == 2:
                    moment = tl.where(factor_s == 0.0, 0.0, _shifted(moment, sum_s, rise_t - rise_s) * factor_s)
                    moment += tl.sum(tl.where(e_s == 0.0, 0.0, e_s * (low_s - low_t)), axis=1)
                sum_t = sum_t * factor_t + tl.sum(e_t, axis=1)
            sum_s = sum_s * factor_s + tl.sum(e_s, axis=1)
    return top_s, sum_s, top_t, sum_t, sum_hard, moment


@triton.jit
def loss_of_lanes(top_s, sum_s, top_t, sum_t, moment, scale, inv_temperature, KIND: tl.constexpr):
    """(m_s, l_s, m_t, l_t, soft loss, dot) of a row: m its maximum, l log2 of its sum of exponentials, from its lanes.

    dot: sum(g) of the formula above. For JSD and TVD, `compare_pair` computes loss and dot.
    """
    LN2: tl.constexpr = 0.6931471805599453
    m_s = tl.max(top_s)
    d_s = _combine_lanes(sum_s, top_s, m_s, scale)
    l_s = tl.log2(d_s)
    m_t = 0.0
    l_t = 0.0
    if KIND != 0:
        m_t = tl.max(top_t)
        d_t = _combine_lanes(sum_t, top_t, m_t, scale)
        l_t = tl.log2(d_t)
    soft = 0.0
    dot = 0.0
    if KIND == 0:
        dot = tl.sum(sum_t)
        soft = LN2 * (tl.sum(_shifted(moment, sum_t, (m_s - top_s) * scale)) + dot * l_s)
    elif KIND == 1:
        dot = -1.0
        moment = _shifted(moment, sum_t, (m_s - top_s) - (m_t - top_t))
        soft = inv_temperature * _combine_lanes(moment, top_t, m_t, scale) / d_t + LN2 * (l_s - l_t)
    elif KIND == 2:
        moment = _shifted(moment, sum_s, (m_t - top_t) - (m_s - top_s))
        soft = inv_temperature * _combine_lanes(moment, top_s, m_s, scale) / d_s + LN2 * (l_t - l_s)
        dot = soft
    return m_s, l_s, m_t, l_t, soft, dot


@triton.jit
def compare_pair(
    S_ptr,
    T_ptr,
    S_BIAS_ptr,
    T_BIAS_ptr,
    head,
    n_body,
    n_cols,
    s_stored,
    t_stored,
    n_full,
    tiles,
    m_s,
    l_s,
    m_t,
    l_t,
    scale,
    beta,
    KIND: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """The middle sweep of JSD and TVD, from the last tile to the first: (soft loss, dot)."""
    LN2: tl.constexpr = 0.6931471805599453
    loss_terms = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    dot_terms = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for PART in tl.static_range(2):
        for done in tl.range(0, n_full if PART else tiles - n_full, num_stages=STAGES):
            cols = ((n_full if PART else tiles) - 1 - done) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            if PART == 0:
                cols = tail_columns(cols, n_body, VECTOR)
            s = logits_tile(S_ptr, S_BIAS_ptr, cols, head, n_cols, s_stored, float("-inf"), PART == 0, VECTOR)
            t = logits_tile(T_ptr, T_BIAS_ptr, cols, head, n_cols, t_stored, float("-inf"), PART == 0, VECTOR)
            x, y = _log2_probs(s, t, m_s, l_s, m_t, l_t, scale)
            if KIND == 3:
                y = tl.maximum(y, -126.0, propagate_nan=tl.PropagateNan.ALL)
                p, q, log_mp, log_qm = jsd_terms(x - y, y, beta, FAST_LOG2)
                loss_terms += p * log_mp
                dot_terms += q * log_qm
            else:
                p = tl.exp2(y)
                q = tl.exp2(x)
                loss_terms += tl.abs(q - p)
                dot_terms += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
    zero_or_nan = 0.0 * (l_s + l_t)  # nan if a logit is nan, which the maxima in jsd_terms would drop
    if KIND == 3:
        dot = LN2 * (1.0 - beta) * tl.sum(dot_terms) + zero_or_nan
        soft = dot - LN2 * beta * tl.sum(loss_terms)
    else:
        dot = 0.5 * tl.sum(dot_terms) + zero_or_nan
        soft = 0.5 * tl.sum(loss_terms)
    return soft, dot


@triton.jit
def _scan_cosine(
    S_ptr,
    T_ptr,
    S_BIAS_ptr,
    T_BIAS_ptr,
    n_cols,
    s_stored,
    t_stored,
    HARD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The first sweep of a cosine: (1 / |s|^2, 1 / (|s| |t|), the cosine, max(s), log2(sum(e^s)) for the hard loss)."""
    LOG2E: tl.constexpr = 1.4426950408889634
    VECTOR_WIDTH: tl.constexpr = 128 // S_ptr.dtype.element_ty.primitive_bitwidth
    GROUP: tl.constexpr = VECTOR_WIDTH if VECTOR_WIDTH < BLOCK_SIZE else BLOCK_SIZE
    LANES: tl.constexpr = BLOCK_SIZE // GROUP
    n_full = n_cols // BLOCK_SIZE
    tiles = tl.cdiv(n_cols, BLOCK_SIZE)
    top = tl.full([LANES], -3.4028234663852886e38, dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    s_squares = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    t_squares = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    products = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for PART in tl.static_range(2):  # the whole tiles, then the one that the row ends in
        for tile in tl.range(n_full if PART else 0, tiles if PART else n_full, num_stages=STAGES):
            cols = tile * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            s = logits_tile(S_ptr, S_BIAS_ptr, cols, 0, n_cols, s_stored, 0.0, PART == 1, 1)
            t = logits_tile(T_ptr, T_BIAS_ptr, cols, 0, n_cols, t_stored, 0.0, PART == 1, 1)
            s_squares += s * s
            t_squares += t * t
            products += s * t
            if HARD:
                s = tl.where(cols < n_cols, s, float("-inf"))
                top, rise, low = _update_maxima(tl.reshape(s, [LANES, GROUP]), top)
                total = total * tl.exp2(-rise * LOG2E) + tl.sum(tl.exp2(low * LOG2E), axis=1)
    s_norm = tl.maximum(tl.sqrt(tl.sum(s_squares)), 1e-8)
    inv_norms = 1.0 / (s_norm * tl.maximum(tl.sqrt(tl.sum(t_squares)), 1e-8))
    m_s = 0.0
    l_hard = 0.0
    if HARD:
        m_s = tl.max(top)
        l_hard = tl.log2(_combine_lanes(total, top, m_s, LOG2E))
    return 1.0 / (s_norm * s_norm), inv_norms, tl.sum(products) * inv_norms, m_s, l_hard


@triton.jit
def gradient_tile(
    s,
    t,
    m_s,
    l_s,
    m_t,
    l_t,
    l_hard,
    scale,
    soft_slope,
    hard_slope,
    q_coef,
    beta,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """The gradient of a tile's student logits, without the hard loss's term at the label. For a cosine, l_s is
    1 / |s|^2, l_t is 1 / (|s| |t|) and q_coef is the cosine."""
    if KIND == 5:
        ds = soft_slope * (q_coef * s * l_s - t * l_t)
    elif KIND == 3:
        x, y = _log2_probs(s, t, m_s, l_s, m_t, l_t, scale)
        y = tl.maximum(y, -126.0, propagate_nan=tl.PropagateNan.ALL)
        p, q, log_mp, log_qm = jsd_terms(x - y, y, beta, FAST_LOG2)
        ds = q * (soft_slope * log_qm + q_coef)
    else:
        x, y = _log2_probs(s, t, m_s, l_s, m_t, l_t, scale)
        q = tl.exp2(x)
        if KIND == 0:
            ds = q * q_coef - soft_slope * t
        elif KIND == 1:
            ds = q * q_coef - soft_slope * tl.exp2(y)
        elif KIND == 2:
            ds = tl.where(q == 0.0, 0.0, q * (soft_slope * (x - y) + q_coef))
        else:
            p = tl.exp2(y)
            ds = q * tl.where(q > p, q_coef + soft_slope, tl.where(q < p, q_coef - soft_slope, q_coef))
    if HARD == 2:
        ds += hard_slope * tl.exp2((s - m_s) * 1.4426950408889634 - l_hard)
    return ds


# -- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["row_start", "ignore_index"])
def _distill_kernel(
    S_ptr,
    T_ptr,
    LABEL_ptr,
    S_BIAS_ptr,
    T_BIAS_ptr,
    SHARE_ptr,
    SOFT_ptr,
    HARD_ptr,
    DS_ptr,
    S_row_stride,
    T_row_stride,
    row_start,
    n_cols,
    ignore_index,
    inv_temperature,
    beta,
    eps,
    soft_weight,
    hard_weight,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    SCALE_IN_BACKWARD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """One program per row of a chunk, whose first row is row `row_start` of LABEL, SOFT and HARD.

    HARD: 0: no hard loss; 1: the hard loss uses the soft loss's sum of exponentials (T = 1); 2: it has a second sum. DS
    has the student's row stride and may be S: the same thread reads and writes an element. The padding between rows of
    logits may be accessed; the padding between rows of probabilities (KL's teacher) may not.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    COSINE: tl.constexpr = KIND == 5
    COMPARES: tl.constexpr = KIND == 3 or KIND == 4  # a middle sweep: the loss needs both sums of exponentials
    TAIL: tl.constexpr = 1 if COMPARES else 0  # the part of the gradient's sweep that holds the row's last tile
    chunk_row = tl.program_id(0).to(tl.int64)
    row = chunk_row + row_start
    S_ptr += chunk_row * S_row_stride
    T_ptr += chunk_row * T_row_stride
    if DS_ptr is not None:
        DS_ptr += chunk_row * S_row_stride
    t_stored = n_cols if KIND == 0 else T_row_stride
    block = tl.arange(0, BLOCK_SIZE)
    n_full = n_cols // BLOCK_SIZE
    tiles = tl.cdiv(n_cols, BLOCK_SIZE)
    label = -1
    if LABEL_ptr is not None:
        label = tl.load(LABEL_ptr + row)
        if label == ignore_index:
            tl.store(SOFT_ptr + row, 0.0)
            if HARD_ptr is not None:
                tl.store(HARD_ptr + row, 0.0)
            if DS_ptr is not None:
                for i in range(0, tiles):
                    cols = i * BLOCK_SIZE + block
                    zeros = tl.zeros([BLOCK_SIZE], dtype=DS_ptr.dtype.element_ty)
                    tl.store(DS_ptr + cols, zeros, mask=cols < S_row_stride)
            return
    share = tl.load(SHARE_ptr)
    s_label = 0.0
    if HARD:  # read now: reductions of the first sweep are a barrier before another thread writes the gradient there
        inside = (label >= 0) & (label < n_cols)
        label_at = tl.where(inside, label, 0)
        s_label = tl.load(S_ptr + label_at).to(tl.float32)
        if S_BIAS_ptr is not None:
            s_label += tl.load(S_BIAS_ptr + label_at).to(tl.float32)
        s_label = tl.where(inside, s_label, float("nan"))

    scale = LOG2E if COSINE else inv_temperature * LOG2E
    m_t = 0.0
    if COSINE:
        l_s, l_t, dot, m_s, l_hard = _scan_cosine(
            S_ptr, T_ptr, S_BIAS_ptr, T_BIAS_ptr, n_cols, S_row_stride, t_stored, HARD, BLOCK_SIZE, STAGES
        )
        soft = 1.0 - dot
    else:
        top_s, sum_s, top_t, sum_t, sum_hard, moment = scan_pair(
            S_ptr, T_ptr, S_BIAS_ptr, T_BIAS_ptr, 0, n_cols, n_cols, S_row_stride, t_stored, n_full, tiles, scale, eps,
            KIND, HARD, 1, BLOCK_SIZE, STAGES, FAST_LOG2,
        )  # fmt: skip
        m_s, l_s, m_t, l_t, soft, dot = loss_of_lanes(top_s, sum_s, top_t, sum_t, moment, scale, inv_temperature, KIND)
        l_hard = l_s
        if HARD == 2:
            l_hard = tl.log2(_combine_lanes(sum_hard, top_s, m_s, LOG2E))
        if COMPARES:
            soft, dot = compare_pair(
                S_ptr, T_ptr, S_BIAS_ptr, T_BIAS_ptr, 0, n_cols, n_cols, S_row_stride, t_stored, n_full, tiles,
                m_s, l_s, m_t, l_t, scale, beta, KIND, 1, BLOCK_SIZE, STAGES, FAST_LOG2,
            )  # fmt: skip
    tl.store(SOFT_ptr + row, soft * share)
    if HARD_ptr is not None:
        tl.store(HARD_ptr + row, (m_s - s_label + LN2 * l_hard) * share)

    if DS_ptr is not None:
        slope = 1.0 if SCALE_IN_BACKWARD else share
        soft_slope = soft_weight * slope
        hard_slope = hard_weight * slope
        q_coef = dot
        # The gradient is q * (q_coef + a term of the kind). q_coef includes the hard loss's factor if HARD is 1.
        if not COSINE:
            soft_slope *= inv_temperature
            q_coef = soft_slope * (dot if KIND == 0 else -dot)
        if HARD == 1:
            q_coef += hard_slope
        if KIND == 2:
            soft_slope *= LN2
        if KIND == 3:
            soft_slope *= LN2 * (1.0 - beta)
        if KIND == 4:
            soft_slope *= 0.5
        outside = 0.0 if COSINE else float("-inf")
        t_outside = 0.0 if (COSINE or KIND == 0) else float("-inf")
        label_col = label.to(tl.int32) if LABEL_ptr is not None else -1
        for PART in tl.static_range(2):  # in the direction opposite to the previous sweep
            for done in tl.range(0, tiles - n_full if PART == TAIL else n_full, num_stages=STAGES):
                if COMPARES:
                    tile = done + (n_full if PART == TAIL else 0)
                else:
                    tile = (tiles if PART == TAIL else n_full) - 1 - done
                cols = tile * BLOCK_SIZE + block
                s = logits_tile(S_ptr, S_BIAS_ptr, cols, 0, n_cols, S_row_stride, outside, PART == TAIL, 1)
                t = logits_tile(T_ptr, T_BIAS_ptr, cols, 0, n_cols, t_stored, t_outside, PART == TAIL, 1)
                ds = gradient_tile(
                    s, t, m_s, l_s, m_t, l_t, l_hard, scale, soft_slope, hard_slope, q_coef, beta,
                    KIND, HARD, FAST_LOG2,
                )  # fmt: skip
                if HARD:
                    ds = tl.where(block == label_col - tile * BLOCK_SIZE, ds - hard_slope, ds)
                tl.store(DS_ptr + cols, ds.to(DS_ptr.dtype.element_ty), mask=cols < S_row_stride)


# -- tunables --------------------------------------------------------------------------------------------------------


def _space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    per_thread = min(key[0] // target.warp_size, 16 // key[1]), 32
    tiles = column_tiles(key, 1024, 16384)
    return tile_space(target, tiles, (1, 2, 4, 8, 16, 32), per_thread=per_thread, stages=(1, 2, 3))


def distill_tunable(
    op: str,
    dims: tuple[str, ...] = DIMS,
    key: Callable[..., registry.Key] = columns_key,
    kernels: Sequence[Any] = (_distill_kernel,),
) -> Tunable:
    """The `<op>.fwd` tunable of an op that uses `_distill_kernel`. key: called with (..., columns, bytes per element).

    The heuristic gives a thread 8 elements of each row: one lane of 16-bit logits, which is one wide load.
    """
    rules = {"heuristic": tile_rule(2048, 8, 16), "safe": tile_rule(1024, 8, 8), "space": _space}
    return Tunable(op, "fwd", kernels=kernels, key=key, dims=dims, **rules)


# -- launcher --------------------------------------------------------------------------------------------------------


class DistillRows(NamedTuple):
    """The losses of the rows times `share`, fp32 [n_rows]; hard: None without a hard loss."""

    soft: torch.Tensor
    hard: torch.Tensor | None = None


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
    row_start: int = 0,
    scale_in_backward: bool = False,
) -> None:
    """Compute losses and gradient of student [n, vocab], for the rows row_start to row_start + n - 1 of labels and out.

    student, teacher, dlogits: buffers of `sweep`, whose padding between rows may be accessed; for KL, teacher holds the
    probabilities of the n rows; share: fp32 on the device, a factor of the losses and, without scale_in_backward, of
    the gradient; dlogits: the buffer for the gradient, which may be `student`, or None
    """
    n, n_cols = student.shape
    if not n:
        return
    assert dlogits is None or dlogits.stride(0) == student.stride(0), "dlogits must have the row stride of student"
    hard = _NO_HARD_LOSS
    if out.hard is not None or options.hard_weight:
        hard = _HARD_USES_SOFT_SUM if options.temperature == 1.0 and options.kind != COSINE else _HARD_HAS_SUM
    args = (
        *(student, teacher, labels, student_bias, teacher_bias, share, *out, dlogits),
        *(student.stride(0), teacher.stride(0), row_start, n_cols, options.ignore_index),
        *(1.0 / options.temperature, options.beta, options.eps, options.soft_weight, options.hard_weight),
    )
    launch(plan, _distill_kernel, (n,), args, (options.kind, hard, scale_in_backward))
