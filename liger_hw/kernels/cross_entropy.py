"""Cross entropy of logits [n_rows, n_cols] with class indices, and its gradient in the same launch.

For a row with logits s, target y, class weights w (1 where absent), smoothing e and lse = log(sum(exp(s))):
    loss = (1 - e) * w[y] * (lse - s[y]) + e / n_cols * sum_c w[c] * (lse - s[c])  +  lse_square_scale * lse^2
A softcap replaces s by softcap * tanh(s / softcap) first. The last term is the z-loss: unweighted, part of the loss,
returned apart on request. Rows whose target is ignore_index have no loss and a gradient of exactly zero.
    none  the loss of every row      sum  their sum
    mean  the sum divided by the sum of w[y] (torch's rule), the z-loss by the number of rows that count; 0 / 0 is nan
Shapes: input [n_rows, n_cols], target [n_rows] int64 or int32, weight [n_cols] -> loss [] or [n_rows].
Dtypes: logits in fp32, fp16 or bf16, everything computed in fp32, the loss rounded to the logits' dtype as torch does
(fp32 under autocast).

The forward reads a row twice at most: once to find lse by blocks, then backwards through the row, so that what was read
last is still in cache, to write the gradient. A row of one block is read once. The gradient goes to a new buffer and is
all that is saved. Backward multiplies it by the incoming gradient, which it reads on the device: where that is 1 the
kernel returns at once. In fp16 the division by the mean's denominator waits for backward too: p / n_rows is below
fp16's range before a gradient scaler's factor, not after it.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867;
label smoothing: Szegedy et al., https://arxiv.org/abs/1512.00567; z-loss: PaLM, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .. import env, registry
from ..registry import LaunchConfig, Op, Sample, Target, Tunable, row_key
from ._op import check, check_tensors, define, is_interpreted, launch, row_major
from ._triton import INTERPRET, libdevice, tl, triton

NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}


@dataclass
class CrossEntropyOutput:
    """What a cross entropy returns when more than the loss was asked for; what was not asked for is None.

    z_loss: part of the loss, reduced like it; token_accuracy: share of counted rows whose first largest logit is the
    target (per row with reduction="none"); predicted_tokens: [n_rows] int64, -1 in ignored rows. None has a gradient.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


class Options(NamedTuple):
    """The numbers of one call, as the kernels take them. softcap 0.0 is none."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float
    reduction: int
    token_scaling: bool = False


# -- reference -------------------------------------------------------------------------------------------------------


def cross_entropy_reference(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """The specification in plain torch; computes in fp32, or in fp64 when `input` is fp64."""
    reduction = _reduction_name("cross_entropy_reference", size_average, reduce, reduction)
    options = Options(ignore_index, label_smoothing, lse_square_scale, softcap or 0.0, REDUCTIONS[reduction])
    loss, z_loss, hits, top = reference_losses(input, target, weight, options)
    extra = return_z_loss, return_token_accuracy, return_predicted_tokens
    return pack(loss.to(input.dtype), z_loss.to(input.dtype), hits, top, extra)


def reference_losses(logits, target, weight, options: Options) -> tuple[torch.Tensor, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) in plain torch, none rounded to the logits' dtype."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    s = logits.to(wide)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    target = target.long()
    w = None if weight is None else weight.to(wide)
    counted = target != options.ignore_index
    y = target.masked_fill(~counted, 0)
    lse = torch.logsumexp(s, -1)
    rows = F.cross_entropy(
        s, target, w, ignore_index=options.ignore_index, reduction="none", label_smoothing=options.label_smoothing
    )
    z = torch.where(counted, options.lse_square_scale * lse.square(), 0.0)
    if options.token_scaling:
        p = torch.where(counted, torch.exp(s.gather(1, y[:, None])[:, 0] - lse), 0.0).detach()
        rows, z = rows * p, z * p
    top = logits.detach().argmax(-1)
    hits = (counted & (top == target)).to(torch.float32)
    top = top.masked_fill(~counted, -1)
    if options.reduction == NONE:
        return rows + z, z.detach(), hits, top
    n = counted.sum()
    hits = hits.sum() / n
    if options.reduction == SUM:
        return (rows + z).sum(), z.detach().sum(), hits, top
    total = n if w is None else torch.where(counted, w[y], 0.0).sum()
    z = z.sum() / n
    return rows.sum() / total + z, z.detach(), hits, top


def reference_gradient(logits, target, weight, options: Options, row_grads=None) -> torch.Tensor:
    """d(sum of the loss, rows times row_grads) / d(logits) in plain torch, in fp32 or fp64: the formula the kernel has.

    Not by autograd, which is not there where an operator runs under a dispatch mode.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    s, slope = logits.to(wide), 1.0
    if options.softcap:
        t = torch.tanh(s / options.softcap)
        s, slope = options.softcap * t, 1.0 - t.square()
    target = target.long()
    counted = target != options.ignore_index
    y = target.masked_fill(~counted, 0)
    w = logits.new_ones(logits.shape[1], dtype=wide) if weight is None else weight.to(wide)
    lse = torch.logsumexp(s, -1)
    push = (1.0 - options.label_smoothing) * w[y]
    smooth = torch.full_like(lse, options.label_smoothing / logits.shape[1])
    pull = push + smooth * w.sum()
    z_pull = 2.0 * options.lse_square_scale * lse
    if options.reduction == MEAN:
        total = torch.where(counted, w[y], 0.0).sum()
        push, pull, smooth, z_pull = push / total, pull / total, smooth / total, z_pull / counted.sum()
    factor = torch.ones_like(lse) if row_grads is None else row_grads.to(wide)
    if options.token_scaling:
        factor = factor * torch.exp(s.gather(1, y[:, None])[:, 0] - lse)
    grad = ((pull + z_pull) * factor)[:, None] * torch.exp(s - lse[:, None])
    if options.label_smoothing:
        grad -= (smooth * factor)[:, None] * w
    grad.scatter_add_(1, y[:, None], -(push * factor)[:, None])
    return torch.where(counted[:, None], grad * slope, 0.0)


def pack(loss, z_loss, hits, top, extra: tuple[bool, bool, bool]) -> torch.Tensor | CrossEntropyOutput:
    """The loss alone, or a CrossEntropyOutput with the extras asked for: (z_loss, token_accuracy, predicted_tokens)."""
    if not any(extra):
        return loss
    return CrossEntropyOutput(loss, z_loss if extra[0] else None, hits if extra[1] else None, top if extra[2] else None)


# -- kernels ---------------------------------------------------------------------------------------------------------

if INTERPRET:  # libdevice has no tanh there

    @triton.jit
    def _tanh(x):
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -t, t)

else:

    @triton.jit
    def _tanh(x):
        return libdevice.tanh(x)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _cross_entropy_stats_kernel(
    Y_ptr,
    W_ptr,
    STATS_ptr,
    OK_ptr,
    n_rows,
    n_cols,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program. STATS: the shares a mean gives to the loss, 1 / sum of w[y], and to the z-loss, 1 / counted rows (1
    each unless MEAN); sum of w; 1 / counted rows; and the share of the loss again, 1 where no row counts."""
    counted = tl.zeros([BLOCK_SIZE], dtype=tl.int32)
    outside = tl.zeros([BLOCK_SIZE], dtype=tl.int32)
    weights = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    classes = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_rows, BLOCK_SIZE):
        rows = start + tl.arange(0, BLOCK_SIZE)
        y = tl.load(Y_ptr + rows, mask=rows < n_rows, other=0)
        counts = (rows < n_rows) & (y != ignore_index)
        inside = (y >= 0) & (y < n_cols)
        counted += counts.to(tl.int32)
        outside += (counts & (inside == 0)).to(tl.int32)
        if W_ptr is not None:
            weights += tl.load(W_ptr + y, mask=counts & inside, other=0.0).to(tl.float32)
    n = tl.sum(counted).to(tl.float32)
    total = n
    if W_ptr is not None:
        total = tl.sum(weights)
        for start in range(0, n_cols, BLOCK_SIZE):
            cols = start + tl.arange(0, BLOCK_SIZE)
            classes += tl.load(W_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(STATS_ptr + 2, tl.sum(classes))
    else:
        tl.store(STATS_ptr + 2, n_cols)
    tl.store(STATS_ptr, 1.0 / total if MEAN else 1.0)
    tl.store(STATS_ptr + 1, 1.0 / n if MEAN else 1.0)
    tl.store(STATS_ptr + 3, 1.0 / n)
    tl.store(STATS_ptr + 4, tl.where(n == 0, 1.0, 1.0 / total))
    tl.store(OK_ptr, (tl.sum(outside) == 0).to(tl.int32))


@triton.jit
def _scan_block(
    x,
    cols,
    n_cols,
    W_ptr,
    softcap,
    m,
    d,
    weighted,
    top,
    argmax,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    ARGMAX: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take one block into the running maximum m, sum d of exp(s - m), sum of w * s, and first largest logit.

    MASKED: the block ends past n_cols, where x is -inf.
    """
    s = x
    if SOFTCAP:
        s = softcap * _tanh(x * (1.0 / softcap))
    if SMOOTHING:
        ws = s
        if W_ptr is not None:
            ws = s * tl.load(W_ptr + cols, mask=cols < n_cols, other=1.0).to(tl.float32)
        if MASKED:
            ws = tl.where(cols < n_cols, ws, 0.0)
        weighted += tl.sum(ws)
    if MASKED and SOFTCAP:
        s = tl.where(cols < n_cols, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a block of -inf only (masked classes) adds nothing
    d = d * tl.exp(m - shift) + tl.sum(tl.exp(s - shift))
    if ARGMAX:
        block_top = tl.max(x)
        first = tl.min(tl.where(x == block_top, cols, n_cols))
        argmax = tl.where(block_top > top, first, argmax)
        top = tl.maximum(top, block_top)
    return m_new, d, weighted, top, argmax


@triton.jit
def _gradient_block(
    x, cols, n_cols, W_ptr, softcap, y, lse, pull, push, smooth, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr
):
    """pull * p - push at the target - smooth * w, through the softcap."""
    s = x
    if SOFTCAP:
        t = _tanh(x * (1.0 / softcap))
        s = softcap * t
    g = pull * tl.exp(s - lse)
    if SMOOTHING:
        if W_ptr is not None:
            g -= smooth * tl.load(W_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        else:
            g -= smooth
    g = tl.where(cols == y, g - push, g)
    if SOFTCAP:
        g *= 1.0 - t * t
    return g


@triton.jit
def _tail_logits(X_ptr, BIAS_ptr, cols, n_cols, n_stored):
    """The last block of a row, -inf past its end."""
    x = tl.load(X_ptr + cols, mask=cols < n_stored, other=0.0).to(tl.float32)
    if BIAS_ptr is not None:
        x += tl.load(BIAS_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    return tl.where(cols < n_cols, x, float("-inf"))


@triton.jit(do_not_specialize=["row_start", "ignore_index"])
def _cross_entropy_fwd_kernel(
    X_ptr,
    Y_ptr,
    W_ptr,
    BIAS_ptr,
    STATS_ptr,
    GO_ptr,
    LOSS_ptr,
    Z_ptr,
    HIT_ptr,
    TOP_ptr,
    DX_ptr,
    X_row_stride,
    DX_row_stride,
    GO_stride,
    row_start,
    n_cols,
    n_stored,
    ignore_index,
    label_smoothing,
    lse_square_scale,
    softcap,
    MEAN: tl.constexpr,
    LATE_MEAN: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ARGMAX: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """One program a row. DX may be X: a row is read and written by its own program only, each element read first.

    X and DX hold a chunk of rows that begins at row `row_start` of the rest; columns n_cols..n_stored may be touched.
    Only the last block is masked. A row of ONE_BLOCK stays in registers between the two sweeps.
    """
    # what the first sweep asked to keep is let go by the second, which is the last to need it
    AGAIN_EVICT: tl.constexpr = "evict_first" if LOAD_EVICT == "evict_last" else ""
    chunk_row = tl.program_id(0).to(tl.int64)
    row = chunk_row + row_start
    X_ptr += chunk_row * X_row_stride
    if DX_ptr is not None:
        DX_ptr += chunk_row * DX_row_stride
    n_full = 0 if ONE_BLOCK else (n_cols - 1) // BLOCK_SIZE
    block_cols = tl.arange(0, BLOCK_SIZE)
    tail_cols = n_full * BLOCK_SIZE + block_cols
    y = tl.load(Y_ptr + row)
    if y == ignore_index:
        if LOSS_ptr is not None:
            tl.store(LOSS_ptr + row, 0.0)
        if Z_ptr is not None:
            tl.store(Z_ptr + row, 0.0)
        if HIT_ptr is not None:
            tl.store(HIT_ptr + row, 0.0)
        if TOP_ptr is not None:
            tl.store(TOP_ptr + row, -1)
        if DX_ptr is not None:
            nothing = tl.zeros([BLOCK_SIZE], dtype=DX_ptr.dtype.element_ty)
            for i in range(0, n_full):
                tl.store(DX_ptr + i * BLOCK_SIZE + block_cols, nothing)
            tl.store(DX_ptr + tail_cols, nothing, mask=tail_cols < n_stored)
        return

    m = float("-inf")
    d = 0.0
    weighted = 0.0
    top = float("-inf")
    argmax = 0
    for i in tl.range(0, n_full, num_stages=STAGES):
        cols = i * BLOCK_SIZE + block_cols
        x = tl.load(X_ptr + cols, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(tl.float32)
        if BIAS_ptr is not None:
            x += tl.load(BIAS_ptr + cols).to(tl.float32)
        m, d, weighted, top, argmax = _scan_block(
            x, cols, n_cols, W_ptr, softcap, m, d, weighted, top, argmax, SOFTCAP, SMOOTHING, ARGMAX, False
        )
    x_tail = _tail_logits(X_ptr, BIAS_ptr, tail_cols, n_cols, n_stored)
    m, d, weighted, top, argmax = _scan_block(
        x_tail, tail_cols, n_cols, W_ptr, softcap, m, d, weighted, top, argmax, SOFTCAP, SMOOTHING, ARGMAX, True
    )
    lse = m + tl.log(d)

    inside = (y >= 0) & (y < n_cols)
    y_read = tl.where(inside, y, 0)  # a target out of range reads nothing out of range; its row becomes nan
    s_y = tl.load(X_ptr + y_read).to(tl.float32)
    if BIAS_ptr is not None:
        s_y += tl.load(BIAS_ptr + y_read).to(tl.float32)
    if SOFTCAP:
        s_y = softcap * _tanh(s_y * (1.0 / softcap))
    push = tl.where(inside, 1.0, float("nan"))
    if W_ptr is not None:
        push *= tl.load(W_ptr + y_read).to(tl.float32)
    if SMOOTHING:
        push *= 1.0 - label_smoothing
    loss = push * (lse - s_y)
    pull = push
    smooth = 0.0
    if SMOOTHING:
        smooth = label_smoothing / n_cols
        class_sum = tl.load(STATS_ptr + 2)
        loss += smooth * (class_sum * lse - weighted)
        pull += smooth * class_sum
    z = lse_square_scale * lse * lse
    z_pull = 2.0 * lse_square_scale * lse
    if MEAN:
        share = tl.load(STATS_ptr)
        z_share = tl.load(STATS_ptr + 1)
        loss *= share
        z *= z_share
        if LATE_MEAN:
            z_pull *= z_share / share
        else:
            pull *= share
            push *= share
            smooth *= share
            z_pull *= z_share
    if Z_LOSS:
        loss += z
        pull += z_pull
    if TOKEN_SCALING:
        p_y = tl.exp(s_y - lse)
        loss *= p_y
        z *= p_y
        pull *= p_y
        push *= p_y
        smooth *= p_y
    if LOSS_ptr is not None:
        tl.store(LOSS_ptr + row, loss)
    if Z_ptr is not None:
        tl.store(Z_ptr + row, z)
    if HIT_ptr is not None:
        tl.store(HIT_ptr + row, (argmax == y).to(tl.float32))
    if TOP_ptr is not None:
        tl.store(TOP_ptr + row, argmax)

    if DX_ptr is not None:
        if GO_ptr is not None:
            go = tl.load(GO_ptr + row * GO_stride).to(tl.float32)
            pull *= go
            push *= go
            smooth *= go
        y_col = y_read.to(tl.int32)
        if not ONE_BLOCK:
            x_tail = _tail_logits(X_ptr, BIAS_ptr, tail_cols, n_cols, n_stored)
        g = _gradient_block(
            x_tail, tail_cols, n_cols, W_ptr, softcap, y_col, lse, pull, push, smooth, SOFTCAP, SMOOTHING
        )
        dx_type = DX_ptr.dtype.element_ty
        tl.store(DX_ptr + tail_cols, g.to(dx_type), mask=tail_cols < n_stored, eviction_policy=AGAIN_EVICT)
        for done in tl.range(0, n_full, num_stages=STAGES):
            cols = (n_full - 1 - done) * BLOCK_SIZE + block_cols
            x = tl.load(X_ptr + cols, eviction_policy=AGAIN_EVICT).to(tl.float32)
            if BIAS_ptr is not None:
                x += tl.load(BIAS_ptr + cols).to(tl.float32)
            g = _gradient_block(x, cols, n_cols, W_ptr, softcap, y_col, lse, pull, push, smooth, SOFTCAP, SMOOTHING)
            tl.store(DX_ptr + cols, g.to(dx_type), eviction_policy=AGAIN_EVICT)


@triton.jit(do_not_specialize=["n_rows"])
def _cross_entropy_sum_kernel(
    STATS_ptr,
    LOSS_rows_ptr,
    Z_rows_ptr,
    HIT_rows_ptr,
    LOSS_ptr,
    Z_ptr,
    HIT_ptr,
    n_rows,
    BLOCK_SIZE: tl.constexpr,
):
    """One program sums the rows' results, in a fixed order. Shares in STATS are infinite when no row counts: nan."""
    loss = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    z = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    hits = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_rows, BLOCK_SIZE):
        rows = start + tl.arange(0, BLOCK_SIZE)
        loss += tl.load(LOSS_rows_ptr + rows, mask=rows < n_rows, other=0.0)
        if Z_rows_ptr is not None:
            z += tl.load(Z_rows_ptr + rows, mask=rows < n_rows, other=0.0)
        if HIT_rows_ptr is not None:
            hits += tl.load(HIT_rows_ptr + rows, mask=rows < n_rows, other=0.0)
    tl.store(LOSS_ptr, (tl.sum(loss) + 0.0 * tl.load(STATS_ptr)).to(LOSS_ptr.dtype.element_ty))
    if Z_rows_ptr is not None:
        tl.store(Z_ptr, (tl.sum(z) + 0.0 * tl.load(STATS_ptr + 1)).to(Z_ptr.dtype.element_ty))
    if HIT_rows_ptr is not None:
        tl.store(HIT_ptr, tl.sum(hits) * tl.load(STATS_ptr + 3))


@triton.jit
def _scale_kernel(G_ptr, OUT_ptr, GO_ptr, STATS_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """OUT = G * GO (/ the late denominator of the mean). In place, where OUT is None, a factor of 1 returns at once."""
    scale = tl.load(GO_ptr).to(tl.float32)
    if STATS_ptr is not None:
        scale *= tl.load(STATS_ptr + 4)
    stop = n_elements
    if OUT_ptr is None:
        stop = tl.where(scale == 1.0, 0, n_elements)
    first = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    for start in tl.range(first, stop, tl.num_programs(0) * BLOCK_SIZE):
        at = start + tl.arange(0, BLOCK_SIZE)
        mask = at < n_elements
        g = tl.load(G_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
        if OUT_ptr is None:
            tl.store(G_ptr + at, g.to(G_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(OUT_ptr + at, g.to(OUT_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _scale_rows_kernel(G_ptr, OUT_ptr, GO_ptr, GO_stride, n_rows, n_cols, BLOCK_SIZE: tl.constexpr):
    """OUT = G * GO, one factor a row. In place, where OUT is None, rows with a factor of 1 are left alone."""
    cols = tl.arange(0, BLOCK_SIZE)
    for row in tl.range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        scale = tl.load(GO_ptr + row * GO_stride).to(tl.float32)
        stop = n_cols
        if OUT_ptr is None:
            stop = tl.where(scale == 1.0, 0, n_cols)
        for start in tl.range(0, stop, BLOCK_SIZE):
            mask = start + cols < n_cols
            at = row * n_cols + start + cols
            g = tl.load(G_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
            if OUT_ptr is None:
                tl.store(G_ptr + at, g.to(G_ptr.dtype.element_ty), mask=mask)
            else:
                tl.store(OUT_ptr + at, g.to(OUT_ptr.dtype.element_ty), mask=mask)


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("n_rows", "n_cols")


def rows_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """A row of up to 32768 columns in one block, read once; a wider one by halves of that, kept for the second read."""
    block, hint = (key[0], "none") if key[0] <= 32768 else (16384, "keep")
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16), hint=hint)


def rows_safe(target: Target, key: registry.Key) -> LaunchConfig:
    block = min(key[0], 4096)
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 32, 8))


def rows_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    """One block that holds the row, or smaller ones and a second read of it."""
    smallest, largest = min(key[0], 1024), min(key[0], 65536)
    blocks = [1 << power for power in range(smallest.bit_length() - 1, largest.bit_length())]
    return [
        LaunchConfig({"BLOCK_SIZE": block}, warps, stages, hint=hint)
        for block in blocks
        for warps in (1, 2, 4, 8, 16, 32)
        for stages in ((1,) if block == key[0] else (1, 2, 3))
        for hint in (("none",) if block == key[0] else ("none", "keep"))
        if 4 <= block // (warps * target.warp_size) <= 64
    ]


def _has_block_size(config: LaunchConfig, key: registry.Key) -> str | None:
    return None if set(config.blocks) == {"BLOCK_SIZE"} else f"blocks must be BLOCK_SIZE, got {dict(config.blocks)}"


def _stats_key(n_rows: int, n_cols: int, itemsize: int) -> registry.Key:
    return ((n_rows - 1).bit_length() if n_rows > 1 else 0,)


def _stats_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    block = max(64, min(1 << key[0], 4096))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 4))


def _stats_safe(target: Target, key: registry.Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 256}, 1)


def _stats_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    return [LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 4)) for block in (256, 512, 1024, 2048, 4096, 8192)]


def _bwd_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    block = max(64, min(key[0], 2048))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16 // key[2]), ctas_per_mp=8)


def _bwd_safe(target: Target, key: registry.Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 256}, 1, ctas_per_mp=1)


def _bwd_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_SIZE": block}, warps, ctas_per_mp=ctas)
        for block in (512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8, 16)
        for ctas in (2, 4, 8, 16)
        if 4 <= block // (warps * target.warp_size) <= 32
        and ctas * warps * target.warp_size <= target.max_threads_per_multiprocessor
    ]


def _is_persistent(config: LaunchConfig, key: registry.Key) -> str | None:
    return _has_block_size(config, key) or (None if config.ctas_per_mp else "ctas_per_mp must be at least 1")


ROW_KERNELS = (_cross_entropy_fwd_kernel, _tail_logits, _scan_block, _gradient_block)
FWD = Tunable(
    "cross_entropy",
    "fwd",
    kernels=ROW_KERNELS,
    key=row_key,
    dims=_DIMS,
    heuristic=rows_heuristic,
    safe=rows_safe,
    space=rows_space,
    valid=_has_block_size,
)
STATS = Tunable(
    "cross_entropy",
    "stats",
    kernels=(_cross_entropy_stats_kernel, _cross_entropy_sum_kernel),
    key=_stats_key,
    dims=_DIMS,
    heuristic=_stats_heuristic,
    safe=_stats_safe,
    space=_stats_space,
    valid=_has_block_size,
)
BWD = Tunable(
    "cross_entropy",
    "bwd",
    kernels=(_scale_kernel, _scale_rows_kernel),
    key=row_key,
    dims=_DIMS,
    heuristic=_bwd_heuristic,
    safe=_bwd_safe,
    space=_bwd_space,
    valid=_is_persistent,
)

# -- launchers -------------------------------------------------------------------------------------------------------


class RowResults(NamedTuple):
    """Per-row results, written by the row kernel; an absent one is None. fp32 until they are summed."""

    loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    hits: torch.Tensor | None = None
    top: torch.Tensor | None = None


def launch_stats(op: str, target, weight, n_cols: int, options: Options, device: torch.device) -> torch.Tensor:
    """Shares of the mean and sums over targets and class weights, on the device, [5] fp32; the targets are checked.

    On a GPU the check is an assertion on the device, without a synchronisation: one extra small launch.
    """
    if is_interpreted() or env.get("LIGER_HW_CHECK_TARGETS"):
        check_targets(op, target, n_cols, options.ignore_index)
    n_rows = target.shape[0]
    stats = torch.empty(5, dtype=torch.float32, device=device)
    ok = torch.empty(1, dtype=torch.int32, device=device)
    plan = STATS.plan(device, _stats_key(n_rows, n_cols, 0))
    args = (target, weight, stats, ok, n_rows, n_cols, options.ignore_index)
    launch(plan, _cross_entropy_stats_kernel, (1,), args, (options.reduction == MEAN,))
    if device.type not in ("cpu", "meta"):
        try:
            torch._assert_async(ok, f"{op}: target out of range; LIGER_HW_CHECK_TARGETS=1 names the row")
        except NotImplementedError:
            pass  # no such operator on this device: the loss and the gradient of the row are nan all the same
    return stats


def launch_rows(
    plan: registry.Plan,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    options: Options,
    results: RowResults,
    dx: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    row_grads: torch.Tensor | None = None,
    row_start: int = 0,
    owned: bool = False,
) -> None:
    """Losses, and the gradient into `dx`, of the rows x [n, n_cols], which are rows row_start.. of target and results.

    dx may be x itself. row_grads: the incoming gradient of each row, multiplied into dx. owned: the padding between
    rows of x and dx is ours to touch, which keeps the last block's accesses wide when n_cols is odd.
    """
    n_cols = x.shape[1]
    args = (
        *(x, target, weight, bias, stats, row_grads, *results, dx),
        *(x.stride(0), 0 if dx is None else dx.stride(0), 0 if row_grads is None else row_grads.stride(0)),
        *(row_start, n_cols, x.stride(0) if owned else n_cols),
        *(options.ignore_index, options.label_smoothing, options.lse_square_scale, options.softcap),
    )
    flags = (
        options.reduction == MEAN,
        divides_late(x.dtype, options),
        options.label_smoothing != 0.0,
        options.lse_square_scale != 0.0,
        options.softcap != 0.0,
        options.token_scaling,
        results.hits is not None or results.top is not None,
        n_cols <= plan.config.blocks["BLOCK_SIZE"],
    )
    launch(plan, _cross_entropy_fwd_kernel, (x.shape[0],), args, flags)


def divides_late(dtype: torch.dtype, options: Options) -> bool:
    """Whether the gradient leaves the forward before the mean's division: p / n_rows underflows in fp16."""
    return dtype is torch.float16 and options.reduction == MEAN


def row_buffers(n_rows: int, options: Options, dtype, device, extra: tuple[bool, bool, bool]) -> RowResults:
    """Buffers for n_rows rows: of the result's dtype when the rows are the result, of fp32 when they will be summed."""
    rows = dtype if options.reduction == NONE else torch.float32
    return RowResults(
        torch.empty(n_rows, dtype=rows, device=device),
        torch.empty(n_rows, dtype=rows, device=device) if extra[0] else None,
        torch.empty(n_rows, dtype=torch.float32, device=device) if extra[1] else None,
        torch.empty(n_rows, dtype=torch.int64, device=device) if extra[2] else None,
    )


def launch_sum(rows: RowResults, stats: torch.Tensor, options: Options, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) from the rows' results; an absent one is an empty tensor."""
    loss, z_loss, hits, top = rows
    assert loss is not None
    if options.reduction != NONE:
        n_rows, device = loss.shape[0], loss.device
        loss = torch.empty((), dtype=dtype, device=device)
        z_loss = None if z_loss is None else torch.empty((), dtype=dtype, device=device)
        hits = None if hits is None else torch.empty((), dtype=torch.float32, device=device)
        plan = STATS.plan(device, _stats_key(n_rows, 0, 0))
        launch(plan, _cross_entropy_sum_kernel, (1,), (stats, *rows[:3], loss, z_loss, hits, n_rows))
    return loss, *(absent(stats) if t is None else t for t in (z_loss, hits, top))


def _fwd(input, target, weight, ignore_index, smoothing, lse_scale, softcap, reduction, dtype, z, accuracy, top, grad):
    options = Options(ignore_index, smoothing, lse_scale, softcap, reduction)
    x, target = row_major(input), target.contiguous()
    n_rows, n_cols = x.shape
    weight = None if weight is None else weight.contiguous()
    stats = launch_stats("liger_cross_entropy", target, weight, n_cols, options, x.device)
    rows = row_buffers(n_rows, options, dtype, x.device, (z, accuracy, top))
    dx = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device) if grad else None
    if n_rows:
        plan = FWD.plan(x.device, row_key(n_rows, n_cols, x.dtype.itemsize))
        launch_rows(plan, x, target, weight, stats, options, rows, dx)
    late = grad and divides_late(x.dtype, options)
    outputs = launch_sum(rows, stats, options, dtype)
    return *outputs, absent(x) if dx is None else dx, stats if late else absent(stats)


def _scale(grad, out, grad_output, stats) -> None:
    """out (or grad itself, where out is None) = grad * grad_output, a scalar or one factor for each row of grad."""
    n_elements = grad.numel()
    if not n_elements:
        return
    per_row = grad_output.dim() == 1
    n_rows, n_cols = grad.shape if grad.dim() == 2 else (1, n_elements)
    plan = BWD.plan(grad.device, row_key(n_rows, n_cols, grad.dtype.itemsize))
    if per_row:
        args = (grad, out, grad_output, grad_output.stride(0), n_rows, n_cols)
        launch(plan, _scale_rows_kernel, (min(plan.programs, n_rows),), args)
    else:
        programs = min(plan.programs, triton.cdiv(n_elements, plan.config.blocks["BLOCK_SIZE"]))
        late = stats if stats.numel() else None
        launch(plan, _scale_kernel, (programs,), (grad, out, grad_output, late, n_elements))


def _bwd(grad, grad_output, stats):
    out = torch.empty_like(grad)
    _scale(grad, out, grad_output, stats)
    return out


def _bwd_in_place(grad, grad_output, stats):
    _scale(grad, None, grad_output, stats)


# -- the operators ---------------------------------------------------------------------------------------------------


def absent(like: torch.Tensor) -> torch.Tensor:
    """Stands for a result that was not asked for: an operator may not return None."""
    return like.new_empty(0)


def check_targets(op: str, target: torch.Tensor, n_cols: int, ignore_index: int) -> None:
    """Raise `IndexError` that names the first row whose target is out of range. Synchronises on a GPU."""
    bad = (target != ignore_index) & ((target < 0) | (target >= n_cols))
    if bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(
            f"{op}: target[{row}] = {int(target[row])} is out of range: expected 0 <= target < {n_cols} "
            f"or ignore_index={ignore_index}"
        )


@torch.no_grad()
def _fwd_reference(input, target, weight, ignore_index, smoothing, lse_scale, softcap, reduction, dtype, *wanted):
    options = Options(ignore_index, smoothing, lse_scale, softcap, reduction)
    check_targets("liger_cross_entropy", target, input.shape[1], ignore_index)
    *extra, grad = wanted
    outputs = reference_losses(input, target, weight, options)
    dx = reference_gradient(input, target, weight, options).to(input.dtype) if grad else absent(input)
    stats = torch.ones(5) if grad and divides_late(input.dtype, options) else torch.empty(0)
    return *reference_outputs(outputs, dtype, extra), dx, stats


def reference_outputs(outputs, dtype: torch.dtype, extra) -> tuple[torch.Tensor, ...]:
    """What `reference_losses` gave, in the dtypes and with the absences an operator returns."""
    loss, z_loss, hits, top = outputs
    extras = (t if asked else torch.empty(0) for t, asked in zip((z_loss.to(dtype), hits, top), extra))
    return loss.to(dtype), *extras


def _bwd_reference(grad, grad_output, stats):
    wide = torch.promote_types(grad.dtype, torch.float32)
    scale = grad_output.to(wide)
    return (grad * (scale[:, None] if scale.dim() == 1 else scale)).to(grad.dtype)


def _bwd_in_place_reference(grad, grad_output, stats):
    grad.copy_(_bwd_reference(grad, grad_output, stats))


def fake_outputs(like, n_rows, reduction: int, dtype: torch.dtype, extra) -> tuple[torch.Tensor, ...]:
    """Empty (loss, z_loss, token_accuracy, predicted_tokens) of the shapes and dtypes an operator returns."""
    shape = (n_rows,) if reduction == NONE else ()
    shapes = (shape, shape, (n_rows,))
    dtypes = (dtype, torch.float32, torch.int64)
    extras = (
        like.new_empty(s, dtype=d) if asked else like.new_empty(0, dtype=torch.float32)
        for s, d, asked in zip(shapes, dtypes, extra)
    )
    return like.new_empty(shape, dtype=dtype), *extras


def _fwd_fake(input, target, weight, ignore_index, smoothing, lse_scale, softcap, reduction, dtype, *wanted):
    options = Options(ignore_index, smoothing, lse_scale, softcap, reduction)
    *extra, grad = wanted
    dx = input.new_empty(input.shape) if grad else absent(input)
    stats = input.new_empty(5 if grad and divides_late(input.dtype, options) else 0, dtype=torch.float32)
    return *fake_outputs(input, input.shape[0], reduction, dtype, extra), dx, stats


def _bwd_fake(grad, grad_output, stats):
    return torch.empty_like(grad)


def _bwd_in_place_fake(grad, grad_output, stats):
    return None


cross_entropy_fwd = define(
    "cross_entropy_fwd(Tensor input, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
    "float lse_square_scale, float softcap, int reduction, ScalarType dtype, bool z_loss, bool token_accuracy, "
    "bool predicted_tokens, bool grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
cross_entropy_bwd = define(
    "cross_entropy_bwd(Tensor grad, Tensor grad_output, Tensor stats) -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)
cross_entropy_bwd_ = define(
    "cross_entropy_bwd_(Tensor(a!) grad, Tensor grad_output, Tensor stats) -> ()",
    launcher=_bwd_in_place,
    reference=_bwd_in_place_reference,
    fake=_bwd_in_place_fake,
)

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def scale_gradients(grads, grad_output: torch.Tensor, stats: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each gradient saved by a forward, times the incoming one; call it in a backward.

    In place where nobody can see the saved tensor again: when the graph is freed by this backward. Where it is kept
    (retain_graph), or may be (a compiled graph), to a new tensor.
    """
    if torch.compiler.is_compiling() or _keeps_graph is None or _keeps_graph():
        return tuple(cross_entropy_bwd(grad, grad_output, stats) for grad in grads)
    for grad in grads:
        cross_entropy_bwd_(grad, grad_output, stats)
    return grads


class LigerCrossEntropyFunction(torch.autograd.Function):
    """Autograd for cross entropy: saves the gradient, which the forward has already computed."""

    @staticmethod
    def forward(
        ctx,
        _input,
        target,
        weight,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        *outputs, grad, stats = _run(
            *(_input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap),
            *(return_z_loss, return_token_accuracy, return_predicted_tokens, ctx.needs_input_grad[0]),
        )
        ctx.save_for_backward(grad, stats)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, *_not_differentiable):
        if grad_output is None or not ctx.needs_input_grad[0]:
            return (None,) * 11
        grad, stats = ctx.saved_tensors
        return *scale_gradients((grad,), grad_output, stats), *(None,) * 10


def _run(
    input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, z, accuracy, top, grad
):
    dtype = input.dtype
    if dtype.itemsize < 4 and torch.is_autocast_enabled(input.device.type):
        dtype = torch.float32
    return cross_entropy_fwd(
        *(input, target, weight, ignore_index, float(label_smoothing), float(lse_square_scale)),
        *(float(softcap or 0.0), REDUCTIONS[reduction], dtype, z, accuracy, top, grad),
    )


# -- public ----------------------------------------------------------------------------------------------------------


def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of logits with class indices; see the top of this file for the formula.

    input: [n_rows, n_cols] fp32, fp16 or bf16 (fp64 too on the CPU), never overwritten; target: [n_rows] int64 or
    int32, in 0..n_cols-1 or ignore_index; weight: [n_cols] floating or None. size_average and reduce are torch's
    deprecated spellings of reduction. Returns the loss, [] or [n_rows] with reduction="none", or a `CrossEntropyOutput`
    when any return_* is set.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit, and `IndexError` for a target out of
    range on the CPU or with LIGER_HW_CHECK_TARGETS=1; otherwise that is an assertion on the device.
    """
    op = "liger_cross_entropy"
    check_tensors(op, input=input)
    check(input.dim() == 2 and input.shape[1] > 0, op, f"input must be [n_rows, n_cols], got {tuple(input.shape)}")
    reduction = _reduction_name(op, size_average, reduce, reduction)
    check_arguments(op, input, target, input.shape[1], weight, ignore_index, label_smoothing, reduction, softcap)
    options = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    extra = return_z_loss, return_token_accuracy, return_predicted_tokens
    if torch.is_grad_enabled() and input.requires_grad:
        outputs = LigerCrossEntropyFunction.apply(input, target, weight, *options, *extra)
    else:
        outputs = _run(input, target, weight, *options, *extra, False)[:4]
    return pack(*outputs, extra)


def _reduction_name(op: str, size_average, reduce, reduction: str) -> str:
    if size_average is not None or reduce is not None:
        return torch.nn._reduction.legacy_get_string(size_average, reduce)
    if reduction not in REDUCTIONS:
        check(False, op, f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return reduction


def check_arguments(op, rows, target, n_cols, weight, ignore_index, label_smoothing, reduction, softcap) -> None:
    """Raise unless target, class weight and options fit rows [n_rows, ...] scored over n_cols classes."""
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{op}: target must be a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        check(False, op, f"target must hold class indices (int64 or int32), got {target.dtype}")
    if target.shape != rows.shape[:1]:
        check(False, op, f"target must have shape {tuple(rows.shape[:1])} to match the rows, got {tuple(target.shape)}")
    if target.device != rows.device:
        check(False, op, f"target is on {target.device} but the rows are on {rows.device}; move them to one device")
    if weight is not None:
        if not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point:
            kind = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
            check(False, op, f"the class weight must be a floating point tensor, got {kind}")
        if tuple(weight.shape) != (n_cols,):
            check(False, op, f"the class weight must have shape ({n_cols},), got {tuple(weight.shape)}")
        if weight.device != rows.device:
            check(False, op, f"the class weight is on {weight.device} but the rows are on {rows.device}")
        check(not weight.requires_grad, op, "the class weight has no gradient; detach it")
    if type(ignore_index) is not int:
        check(False, op, f"ignore_index must be an int, got {ignore_index!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        check(False, op, f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if reduction not in REDUCTIONS:
        check(False, op, f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if softcap is not None and not softcap > 0.0:
        check(False, op, f"softcap must be positive or None, got {softcap}")


class LigerCrossEntropyLoss(torch.nn.Module):
    """`liger_cross_entropy` as a module, with the same arguments. forward(_input [n_rows, n_cols], target [n_rows])."""

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap = _reduction_name("LigerCrossEntropyLoss", None, None, reduction), softcap
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        return liger_cross_entropy(
            _input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}"


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "mistral_7b": (8192, 32768),
    "llama3_8b": (8192, 128256),
    "qwen3_8b": (8192, 151936),
    "gemma2_2b": (4096, 256000),
    "gpt2": (8192, 50257),
}
"""Problem sizes (n_rows, n_cols) of real models."""


def sample_targets(n_rows, n_cols, device, generator, ignored: float) -> torch.Tensor:
    """Random class indices, a share `ignored` of them -100."""
    target = torch.randint(n_cols, (n_rows,), generator=generator, device=device)
    chance = torch.rand(n_rows, generator=generator, device=device)
    return target.masked_fill(chance < ignored, -100)


def _sample(sizes, dtype, device, generator, *, ignored=0.1, weighted=False, **options: Any) -> Sample:
    n_rows, n_cols = sizes
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    weight = torch.rand(n_cols, generator=generator, dtype=torch.float32, device=device) if weighted else None
    return Sample(
        args=(x.requires_grad_(), sample_targets(n_rows, n_cols, device, generator, ignored), weight),
        kwargs=options,
        reduction=n_cols,
        grad_reduction=n_cols,
        moved=2 * n_rows * n_cols * dtype.itemsize,
    )


OPTIONS = (
    {},
    {"weighted": True, "label_smoothing": 0.1},
    {"softcap": 30.0, "lse_square_scale": 1e-4, "return_z_loss": True},
    {"reduction": "sum", "return_token_accuracy": True, "return_predicted_tokens": True},
    {"reduction": "none", "label_smoothing": 0.1},
)
OP = registry.register(
    Op(
        name="cross_entropy",
        function=liger_cross_entropy,
        reference=cross_entropy_reference,
        tunables=(FWD, STATS, BWD),
        workloads=WORKLOADS,
        sample=_sample,
        options=OPTIONS,
    )
)
