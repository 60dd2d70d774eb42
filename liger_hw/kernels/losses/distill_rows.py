"""Distillation of a row of student logits from a row of teacher logits (or probabilities): losses and gradient.

For student logits s, teacher logits t (biases added in fp32) and temperature T, with x = log_softmax(s / T) and
y = log_softmax(t / T):
    soft = a divergence of divergence_rows.py over the row (for TVD of e^x and e^y; for KL y is the given probability),
           or 1 - cosine(s, t)
    hard = -log_softmax(s)[label], optional
    d soft / ds[c] = (g[c] - e^x[c] * sum(g)) / T with g = d soft / dx
One launch sweeps a row two or three times: for the sums of exponentials, for the loss and sum(g), which JSD and TVD
need both sums for (the other kinds find theirs in the first sweep), and for the gradient, which may overwrite the
student's logits. Every sweep goes the opposite way of the one before: what was read last is in cache.

The arithmetic takes longer than reading both rows. Hence exponentials and logarithms of base 2, one logarithm for JSD's
mixture and none of a probability (a logit less its log-sum-exp), running maxima and sums for each lane, reduced at the
row's end, and no masks but in a row's last tile. A lane is what a thread loads at once: GROUP neighbouring columns.

    for start, logits, teacher in sweep(chunks, x, weight, grads, second=(x2, weight2)):
        distill_rows(plan, logits, teacher, labels, share, options, out, dlogits=logits, row_start=start)

Rows whose label is ignore_index have no loss and a gradient of exactly zero. Everything is computed in fp32.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F

from ... import registry
from ...registry import LaunchConfig, Target, Tunable, tile_space
from ...runtime.operator import launch
from ...runtime.triton_import import tl, triton
from ..rows.row import body_start, body_width, edge_columns, row_head, row_vector, tail_columns
from ..rows.tuning import DIMS, column_tiles, tile_rule
from .divergence_rows import KL, TVD, divergence_slope, divergence_terms, jsd_of, log2_of
from .log_prob_rows import columns_key

_NO_HARD, _HARD_SHARED, _HARD_OWN = range(3)
SAVED = 6
"""Numbers a row that a later backward needs."""

# -- reference -------------------------------------------------------------------------------------------------------

COSINE = 5
"""The kind of a cosine distance, beside the kinds of divergence_rows.py."""
_SHORTEST = 1e-8


class Distillation(NamedTuple):
    """The numbers of one call. The weights go into the gradient only; the two losses are returned unweighted."""

    kind: int
    beta: float = 0.5
    eps: float = 0.0
    temperature: float = 1.0
    ignore_index: int = -100
    soft_weight: float = 1.0
    hard_weight: float = 0.0


def distill_reference(student, teacher, labels, options: Distillation):
    """(soft, hard) of every row in plain differentiable torch, in fp32 (fp64 for fp64); hard is zero without labels.

    teacher: logits, or probabilities for KL.
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

    The kernel's formulas, not autograd, which is not available where an operator runs under a dispatch mode.
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
def _logits_tile(PTR, BIAS_ptr, cols, head, n_cols, n_stored, outside, MASKED: tl.constexpr, VECTOR: tl.constexpr):
    """A tile of a row in fp32. MASKED: the row ends in it, `outside` stands beyond.

    The load is masked where accesses end, which keeps it wide: by n_stored, or by whole vectors where VECTOR > 1. The
    last of these may end behind the tensor, within its last 16 bytes (rows/row.py); `outside` replaces what it
    reads there.
    """
    if MASKED:
        reached = cols < n_stored
        if VECTOR > 1:
            reached = (cols < tl.cdiv(n_cols, VECTOR) * VECTOR) & (cols >= -tl.cdiv(head, VECTOR) * VECTOR)
        x = tl.load(PTR + cols, mask=reached, other=0.0).to(tl.float32)
        exist = cols < n_cols
        if VECTOR > 1:
            exist = exist & (cols >= -head)
        if BIAS_ptr is not None:
            x += tl.load(BIAS_ptr + cols, mask=exist, other=0.0).to(tl.float32)
        x = tl.where(exist, x, outside)
    else:
        x = tl.load(PTR + cols).to(tl.float32)
        if BIAS_ptr is not None:
            x += tl.load(BIAS_ptr + cols).to(tl.float32)
    return x


@triton.jit
def _raised(x, m):
    """(running maximum of every lane after a tile x [lanes, group], its increase, x less the maximum)."""
    higher = tl.maximum(m, tl.max(x, axis=1))
    return higher, higher - m, x - higher[:, None]


@triton.jit
def _moved(moment, weights, by):
    """sum(w * (d + by)) from `moment` = sum(w * d) and `weights` = sum(w).

    0 where the weights are, even for an infinite `by`.
    """
    return moment + tl.where(weights == 0.0, 0.0, weights * by)


@triton.jit
def _row_sum(d, m, top, scale):
    """The sum of a row from its lanes' sums d about their own maxima m.

    A lane of nan makes it nan, whatever its maximum.
    """
    e = tl.exp2((m - top) * scale)
    return tl.sum(tl.where((e == 0.0) & (d == d), 0.0, d * e))


@triton.jit
def _log2_pair(s, t, m_s, l_s, m_t, l_t, scale):
    """log2 of both distributions. The maximum is subtracted first, which is exact for logits of any size."""
    return (s - m_s) * scale - l_s, (t - m_t) * scale - l_t


@triton.jit
def _slope_tile(
    s,
    t,
    m_s,
    l_s,
    m_t,
    l_t,
    l_hard,
    dot,
    scale,
    soft_slope,
    hard_slope,
    q_coef,
    beta,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """The gradient of a tile's student logits, but for the hard loss's share at the label."""
    x, y = _log2_pair(s, t, m_s, l_s, m_t, l_t, scale)
    if KIND == 5:
        ds = soft_slope * (dot * s * l_s - t * l_t)
    elif KIND == 3:
        y = tl.maximum(y, -126.0, propagate_nan=tl.PropagateNan.ALL)
        p, q, l, u = jsd_of(x - y, y, beta, FAST_LOG2)
        ds = q * (soft_slope * u + q_coef)
    else:
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
    SCALE_IN_BACKWARD: tl.constexpr,
    FROM_SAVED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """One program a row of a chunk that begins at row `row_start` of labels, losses and SAVED [n_rows, 6].

    HARD: 0 no hard loss, 1 one that shares the soft loss's sum of exponentials (T = 1), 2 one with a sum of its own.
    FROM_SAVED: a backward, which has the last sweep only. DS may be S: the same thread reads and writes an element.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    COSINE: tl.constexpr = KIND == 5
    MIDDLE: tl.constexpr = (KIND == 3 or KIND == 4) and not FROM_SAVED  # the loss needs both sums of exponentials first
    LAST: tl.constexpr = 1 if MIDDLE else 0  # the part of the last sweep that holds the tile the row ends in
    LANES_S: tl.constexpr = not COSINE or HARD == 2
    LANES_T: tl.constexpr = not COSINE and KIND != 0
    VECTOR_WIDTH: tl.constexpr = 128 // S_ptr.dtype.element_ty.primitive_bitwidth  # columns in 16 bytes
    GROUP: tl.constexpr = VECTOR_WIDTH if VECTOR_WIDTH < BLOCK_SIZE else BLOCK_SIZE
    LANES: tl.constexpr = BLOCK_SIZE // GROUP
    chunk_row = tl.program_id(0).to(tl.int64)
    row = chunk_row + row_start
    head = row_head(chunk_row * S_row_stride, VECTOR)
    S_ptr += body_start(chunk_row * S_row_stride, head, VECTOR)
    T_ptr += body_start(chunk_row * T_row_stride, head, VECTOR)
    if DS_ptr is not None:
        DS_ptr += body_start(chunk_row * DS_row_stride, head, VECTOR)
    block = tl.arange(0, BLOCK_SIZE)
    n_body = body_width(n_cols, head, VECTOR)
    n_right = n_cols - head  # columns are counted from the body's first, and end here
    tiles = tl.cdiv(n_body, BLOCK_SIZE)
    if VECTOR > 1:
        tiles = tl.cdiv(n_body + 2 * VECTOR, BLOCK_SIZE)
        s_stored = n_body
        t_stored = n_body
        if S_BIAS_ptr is not None:
            S_BIAS_ptr += head
        if T_BIAS_ptr is not None:
            T_BIAS_ptr += head
    n_full = n_body // BLOCK_SIZE
    label = -1
    if LABEL_ptr is not None:
        label = tl.load(LABEL_ptr + row)
        if label == ignore_index:
            if SOFT_ptr is not None:
                tl.store(SOFT_ptr + row, 0.0)
            if HARD_ptr is not None:
                tl.store(HARD_ptr + row, 0.0)
            if SAVED_ptr is not None and not FROM_SAVED:
                slot = tl.arange(0, 8)
                tl.store(SAVED_ptr + row * 6 + slot, tl.zeros([8], dtype=tl.float32), mask=slot < 6)
            if DS_ptr is not None:
                for i in range(0, tiles):
                    cols = i * BLOCK_SIZE + block
                    nothing = tl.zeros([BLOCK_SIZE], dtype=DS_ptr.dtype.element_ty)
                    tl.store(DS_ptr + cols, nothing, mask=cols < s_stored)
                if VECTOR > 1:
                    edge = edge_columns(head, n_body, n_cols, VECTOR)
                    nothing = tl.zeros([2 * VECTOR], dtype=DS_ptr.dtype.element_ty)
                    tl.store(DS_ptr + edge, nothing, mask=edge < n_right)
            return
    share = tl.load(SHARE_ptr)
    scale = LOG2E if COSINE else inv_temperature * LOG2E
    outside = 0.0 if COSINE else float("-inf")
    t_outside = 0.0 if (COSINE or KIND == 0) else float("-inf")

    if FROM_SAVED:
        m_s = tl.load(SAVED_ptr + row * 6)
        l_s = tl.load(SAVED_ptr + row * 6 + 1)
        m_t = tl.load(SAVED_ptr + row * 6 + 2)
        l_t = tl.load(SAVED_ptr + row * 6 + 3)
        l_hard = tl.load(SAVED_ptr + row * 6 + 4)
        dot = tl.load(SAVED_ptr + row * 6 + 5)
    else:
        s_label = 0.0
        if HARD:  # read before the first sweep: its reductions are the barrier between this and the gradient there
            inside = (label >= 0) & (label < n_cols)
            label_at = tl.where(inside, label, 0) - head
            s_label = tl.load(S_ptr + label_at).to(tl.float32)
            if S_BIAS_ptr is not None:
                s_label += tl.load(S_BIAS_ptr + label_at).to(tl.float32)
            s_label = tl.where(inside, s_label, float("nan"))
        # Every lane has its own maximum and sums: no thread waits for another until the row is read. The maximum begins
        # at the lowest finite number, so that a lane of -inf (masked classes) has terms of 0, not nan.
        top_s = tl.full([LANES], -3.4028234663852886e38, dtype=tl.float32)
        top_t = tl.full([LANES], -3.4028234663852886e38, dtype=tl.float32)
        sum_s = tl.zeros([LANES], dtype=tl.float32)
        sum_t = tl.zeros([LANES], dtype=tl.float32)
        sum_hard = tl.zeros([LANES], dtype=tl.float32)
        moment = tl.zeros([LANES], dtype=tl.float32)  # terms of KL, KL_LOG and RKL about the maxima
        one = tl.zeros([BLOCK_SIZE], dtype=tl.float32)  # of the cosine: s^2, t^2 and s * t
        two = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        three = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        for PART in tl.static_range(2):  # the whole tiles, then the one that the row ends in
            for tile in tl.range(n_full if PART else 0, tiles if PART else n_full, num_stages=STAGES):
                cols = tile * BLOCK_SIZE + block
                if PART == 1:
                    cols = tail_columns(cols, n_body, VECTOR)
                s = _logits_tile(S_ptr, S_BIAS_ptr, cols, head, n_right, s_stored, outside, PART == 1, VECTOR)
                t = _logits_tile(T_ptr, T_BIAS_ptr, cols, head, n_right, t_stored, t_outside, PART == 1, VECTOR)
                if COSINE:
                    one += s * s
                    two += t * t
                    three += s * t
                if LANES_S:
                    if COSINE:
                        exist = cols < n_right
                        if VECTOR > 1 and PART == 1:
                            exist = exist & (cols >= -head)
                        s = tl.where(exist, s, float("-inf"))
                    top_s, rise_s, low_s = _raised(tl.reshape(s, [LANES, GROUP]), top_s)
                    again_s = tl.exp2(-rise_s * scale)
                    e_s = tl.exp2(low_s * scale)
                    if HARD == 2 and not COSINE:
                        sum_hard = sum_hard * tl.exp2(-rise_s * LOG2E) + tl.sum(tl.exp2(low_s * LOG2E), axis=1)
                if KIND == 0:
                    t_lanes = tl.reshape(t, [LANES, GROUP])
                    terms = t_lanes * (
                        log2_of(tl.maximum(t_lanes, tl.maximum(eps, 1.2e-38)), FAST_LOG2) - low_s * scale
                    )
                    moment = _moved(moment, sum_t, rise_s * scale) + tl.sum(
                        tl.where(t_lanes == 0.0, 0.0, terms), axis=1
                    )
                    sum_t += tl.sum(t_lanes, axis=1)
                if LANES_T:
                    top_t, rise_t, low_t = _raised(tl.reshape(t, [LANES, GROUP]), top_t)
                    again_t = tl.exp2(-rise_t * scale)
                    e_t = tl.exp2(low_t * scale)
                    if KIND == 1:
                        moment = tl.where(again_t == 0.0, 0.0, _moved(moment, sum_t, rise_s - rise_t) * again_t)
                        moment += tl.sum(tl.where(e_t == 0.0, 0.0, e_t * (low_t - low_s)), axis=1)
                    if KIND == 2:
                        moment = tl.where(again_s == 0.0, 0.0, _moved(moment, sum_s, rise_t - rise_s) * again_s)
                        moment += tl.sum(tl.where(e_s == 0.0, 0.0, e_s * (low_s - low_t)), axis=1)
                    sum_t = sum_t * again_t + tl.sum(e_t, axis=1)
                if LANES_S:
                    sum_s = sum_s * again_s + tl.sum(e_s, axis=1)
        m_s = 0.0
        l_s = 0.0
        m_t = 0.0
        l_t = 0.0
        if LANES_S:
            m_s = tl.max(top_s)
            d_s = _row_sum(sum_s, top_s, m_s, scale)
            l_s = tl.log2(d_s)
        l_hard = l_s
        if HARD == 2 and not COSINE:
            l_hard = tl.log2(_row_sum(sum_hard, top_s, m_s, LOG2E))
        if LANES_T:
            m_t = tl.max(top_t)
            d_t = _row_sum(sum_t, top_t, m_t, scale)
            l_t = tl.log2(d_t)
        if COSINE:  # l_s, l_t and dot stand for 1 / |s|^2, 1 / (|s| |t|) and the cosine
            norm_s = tl.maximum(tl.sqrt(tl.sum(one)), 1e-8)
            l_s = 1.0 / (norm_s * norm_s)
            l_t = 1.0 / (norm_s * tl.maximum(tl.sqrt(tl.sum(two)), 1e-8))
            dot = tl.sum(three) * l_t
            soft = 1.0 - dot
        elif KIND == 0:
            dot = tl.sum(sum_t)  # less the sum of the slopes
            soft = LN2 * (tl.sum(_moved(moment, sum_t, (m_s - top_s) * scale)) + dot * l_s)
        elif KIND == 1:
            dot = -1.0
            moment = _moved(moment, sum_t, (m_s - top_s) - (m_t - top_t))
            soft = inv_temperature * _row_sum(moment, top_t, m_t, scale) / d_t + LN2 * (l_s - l_t)
        elif KIND == 2:
            moment = _moved(moment, sum_s, (m_t - top_t) - (m_s - top_s))
            soft = inv_temperature * _row_sum(moment, top_s, m_s, scale) / d_s + LN2 * (l_t - l_s)
            dot = soft  # the sum of the slopes less 1
        if MIDDLE:
            for PART in tl.static_range(2):  # the other way: what was read last is in cache
                for done in tl.range(0, n_full if PART else tiles - n_full, num_stages=STAGES):
                    tile = (n_full if PART else tiles) - 1 - done
                    cols = tile * BLOCK_SIZE + block
                    if PART == 0:
                        cols = tail_columns(cols, n_body, VECTOR)
                    s = _logits_tile(S_ptr, S_BIAS_ptr, cols, head, n_right, s_stored, outside, PART == 0, VECTOR)
                    t = _logits_tile(T_ptr, T_BIAS_ptr, cols, head, n_right, t_stored, t_outside, PART == 0, VECTOR)
                    x, y = _log2_pair(s, t, m_s, l_s, m_t, l_t, scale)
                    if KIND == 3:
                        y = tl.maximum(y, -126.0, propagate_nan=tl.PropagateNan.ALL)
                        p, q, l, u = jsd_of(x - y, y, beta, FAST_LOG2)
                        one += p * l
                        two += q * u
                    else:
                        p = tl.exp2(y)
                        q = tl.exp2(x)
                        one += tl.abs(q - p)
                        two += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
            known = 0.0 * (l_s + l_t)  # nan where a logit is: the maxima of jsd_of lose it
            if KIND == 3:
                dot = LN2 * (1.0 - beta) * tl.sum(two) + known
                soft = dot - LN2 * beta * tl.sum(one)
            else:
                dot = 0.5 * tl.sum(two) + known
                soft = 0.5 * tl.sum(one)
        if SOFT_ptr is not None:
            tl.store(SOFT_ptr + row, soft * share)
        if HARD_ptr is not None:
            tl.store(HARD_ptr + row, (m_s - s_label + LN2 * l_hard) * share)
        if SAVED_ptr is not None:
            tl.store(SAVED_ptr + row * 6, m_s)
            tl.store(SAVED_ptr + row * 6 + 1, l_s)
            tl.store(SAVED_ptr + row * 6 + 2, m_t)
            tl.store(SAVED_ptr + row * 6 + 3, l_t)
            tl.store(SAVED_ptr + row * 6 + 4, l_hard)
            tl.store(SAVED_ptr + row * 6 + 5, dot)

    if DS_ptr is not None:
        slope = 1.0 if SCALE_IN_BACKWARD else share
        soft_slope = soft_weight * slope
        hard_slope = hard_weight * slope
        if GO_SOFT_ptr is not None:
            soft_slope *= tl.load(GO_SOFT_ptr + row * GO_SOFT_stride).to(tl.float32)
        if GO_HARD_ptr is not None:
            hard_slope *= tl.load(GO_HARD_ptr + row * GO_HARD_stride).to(tl.float32)
        if not COSINE:
            soft_slope *= inv_temperature
        # the gradient is q * (q_coef + a term of each kind), with the hard loss's factor where it has q too
        q_coef = soft_slope * (dot if KIND == 0 else -dot)
        if HARD == 1:
            q_coef += hard_slope
        if KIND == 2:
            soft_slope *= LN2
        if KIND == 3:
            soft_slope *= LN2 * (1.0 - beta)
        if KIND == 4:
            soft_slope *= 0.5
        label_col = (label.to(tl.int32) if LABEL_ptr is not None else -1) - head
        for PART in tl.static_range(2):  # the opposite way of the sweep before
            for done in tl.range(0, tiles - n_full if PART == LAST else n_full, num_stages=STAGES):
                if MIDDLE:
                    tile = done + (n_full if PART == LAST else 0)
                else:
                    tile = (tiles if PART == LAST else n_full) - 1 - done
                cols = tile * BLOCK_SIZE + block
                s = _logits_tile(S_ptr, S_BIAS_ptr, cols, 0, n_body, s_stored, outside, PART == LAST, 1)
                t = _logits_tile(T_ptr, T_BIAS_ptr, cols, 0, n_body, t_stored, t_outside, PART == LAST, 1)
                ds = _slope_tile(
                    s, t, m_s, l_s, m_t, l_t, l_hard, dot, scale, soft_slope, hard_slope, q_coef, beta,
                    KIND, HARD, FAST_LOG2,
                )  # fmt: skip
                if HARD:
                    ds = tl.where(block == label_col - tile * BLOCK_SIZE, ds - hard_slope, ds)
                tl.store(DS_ptr + cols, ds.to(DS_ptr.dtype.element_ty), mask=cols < s_stored)
        if VECTOR > 1:
            cols = edge_columns(head, n_body, n_cols, VECTOR)
            s = _logits_tile(S_ptr, S_BIAS_ptr, cols, 0, n_right, n_right, outside, True, 1)
            t = _logits_tile(T_ptr, T_BIAS_ptr, cols, 0, n_right, n_right, t_outside, True, 1)
            ds = _slope_tile(
                s, t, m_s, l_s, m_t, l_t, l_hard, dot, scale, soft_slope, hard_slope, q_coef, beta,
                KIND, HARD, FAST_LOG2,
            )  # fmt: skip
            if HARD:
                ds = tl.where(cols == label_col, ds - hard_slope, ds)
            tl.store(DS_ptr + cols, ds.to(DS_ptr.dtype.element_ty), mask=cols < n_right)


# -- tunables --------------------------------------------------------------------------------------------------------


def _space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    how = {"per_thread": (min(key[0] // target.warp_size, 16 // key[1]), 32), "stages": (1, 2, 3)}
    return tile_space(target, column_tiles(key, 1024, 16384), (1, 2, 4, 8, 16, 32), **how)


def distill_tunable(op: str, dims: tuple[str, ...] = DIMS, key: Callable[..., registry.Key] = columns_key) -> Tunable:
    """The `<op>.fwd` tunable of an op made of `_distill_kernel`. key: of sizes (..., columns, bytes an element).

    Its heuristic: 8 elements of each row a thread, so that a lane is a thread, and its part of a tile one wide load.
    """
    rules = {"heuristic": tile_rule(2048, 8, 16), "safe": tile_rule(1024, 8, 8), "space": _space}
    return Tunable(op, "fwd", kernels=(_distill_kernel,), key=key, dims=dims, **rules)


# -- launcher --------------------------------------------------------------------------------------------------------


class DistillRows(NamedTuple):
    """Per-row results, fp32 [n_rows] times the share, and what a later backward needs [n_rows, SAVED].

    None: unwanted.
    """

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
    scale_in_backward: bool = False,
    from_saved: bool = False,
    owned: bool = True,
) -> None:
    """Losses of the rows student [n, vocab], which are rows row_start.. of labels and out, and their gradient.

    teacher: logits [n, vocab], or for KL the probabilities of these n rows; share: fp32 on the device, multiplies
    losses and gradient (scale_in_backward: the losses alone); soft_grads, hard_grads: incoming gradient of each row;
    dlogits: where the gradient goes, None for none, `student` itself for in place. owned: padding between the student's
    rows is ours.
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
        hard = _HARD_SHARED if options.temperature == 1.0 and options.kind != COSINE else _HARD_OWN
    args = (
        *(student, teacher, labels, student_bias, teacher_bias, share, soft_grads, hard_grads, *out, dlogits),
        *(stride(student), stride(teacher), stride(dlogits), stride(soft_grads), stride(hard_grads)),
        *(row_start, n_cols, s_stored, t_stored, options.ignore_index, 1.0 / options.temperature),
        *(options.beta, options.eps, options.soft_weight, options.hard_weight),
    )
    vector = 1 if owned else row_vector(student, teacher, dlogits)
    launch(plan, _distill_kernel, (n,), args, (options.kind, hard, scale_in_backward, from_saved, vector))
