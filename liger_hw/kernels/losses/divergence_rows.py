"""Divergences of two rows of (log-)probabilities: the terms, their row sums and the gradient, in one pass.

A divergence is the sum of f(x, y) over the columns. The right column is df / dx:

    KL       y (log max(y, eps) - x)             x a log-probability, y a probability       -y
    KL_LOG   e^y (y - x)                         both log-probabilities                     -e^y
    RKL      e^x (x - y)                         both log-probabilities                     e^x (x - y + 1)
    JSD      b e^y (y - m) + (1 - b) e^x (x - m), m = log(b e^y + (1 - b) e^x)              (1 - b) e^x (x - m)
    TVD      |x - y| / 2                         both probabilities                         sign(x - y) / 2, 0 at a tie

A term whose factor e^x, e^y or y (KL) is zero is zero, never nan. Everything is computed in fp32. The forward reads x
and y once and writes the gradient of the reduced loss. Backward multiplies it by the incoming gradient
(loss_gradient.py). With reduction="none" the forward returns the terms, and backward computes df / dx.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch

from ... import registry
from ...registry import LaunchConfig, Sample, Target, Tunable, normal, row_key, tile_space
from ...runtime.load_hint import load_with_hint
from ...runtime.operator import (
    Function,
    autocast_dtype,
    cdiv,
    check,
    check_ignore_index,
    check_indices,
    check_tensors,
    define,
    first_order,
    launch,
    row_major,
    to_flatten,
)
from ...runtime.triton_import import libdevice, tl, triton
from ..rows.row import LINE, body_start, body_width, edge_columns, row_head, row_vector
from ..rows.tuning import DIMS, column_tiles, tile_rule
from .cross_entropy_rows import MEAN, NONE, STATS, SUM, SUMMED, RowResults, absent, launch_sum, stats_key
from .loss_gradient import gradient_of, scale_gradient

KL, KL_LOG, RKL, JSD, TVD = range(5)
BATCHMEAN = "batchmean"
REDUCTIONS = NONE, MEAN, SUM, BATCHMEAN


class Divergence(NamedTuple):
    """The options of one call. beta: for JSD; eps: for KL."""

    kind: int
    reduction: str
    beta: float = 0.5
    eps: float = 0.0
    ignore_index: int = -100


def divergence_terms(x: torch.Tensor, y: torch.Tensor, kind: int, beta: float = 0.5, eps: float = 0.0) -> torch.Tensor:
    """f(x, y) of every element in plain differentiable torch, in the dtype of x."""
    if kind == TVD:
        return 0.5 * (x - y).abs()
    if kind == KL:
        return torch.where(y == 0, 0.0, y * (torch.log(y.clamp_min(eps)) - x))
    p, q = y.exp(), x.exp()
    if kind == KL_LOG:
        return _weighted(p, y - x)
    if kind == RKL:
        return _weighted(q, x - y)
    high = torch.maximum(x, y).detach()
    both_zero = high == float("-inf")
    a, b, high = (t.masked_fill(both_zero, 0.0) for t in (x, y, high))
    m = high + torch.log(beta * torch.exp(b - high) + (1 - beta) * torch.exp(a - high))
    return beta * _weighted(p, y - m) + (1 - beta) * _weighted(q, x - m)


def _weighted(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """p * value. Where p is 0, the product and its gradient are 0, even if value is infinite."""
    return p * torch.where(p == 0, 0.0, value)


def divergence_reference(x, y, labels, options: Divergence):
    """The reduced loss in plain torch, in fp32 or fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    p, q = x.to(wide), y.to(wide)
    if labels is not None:  # the inputs are masked as well as the terms: the gradient through a nan would be nan
        ignored = (labels == options.ignore_index)[:, None]
        p, q = p.masked_fill(ignored, 0.0), q.masked_fill(ignored, 0.0)
    terms = divergence_terms(p, q, options.kind, options.beta, options.eps)
    if labels is not None:
        terms = terms.masked_fill(ignored, 0.0)
    if options.reduction == NONE:
        return terms
    return terms.sum() * share_reference(x, labels, _elements_per_row(options, x.shape[1]), options.ignore_index, wide)


def share_reference(
    x: torch.Tensor, labels: torch.Tensor | None, per_row: int, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """The factor of each row in a loss: 1 / (counted rows * per_row), 0 if no row counts; 1 for per_row=0 (no mean)."""
    if not per_row:
        return torch.ones((), dtype=dtype, device=x.device)
    n_rows = x.new_ones(x.shape[0]).sum(dtype=dtype) if labels is None else (labels != ignore_index).sum()
    return torch.where(n_rows == 0, 0.0, 1.0 / (n_rows * per_row).to(dtype))


def _elements_per_row(options: Divergence, n_cols: int) -> int:
    return {MEAN: n_cols, BATCHMEAN: 1}.get(options.reduction, 0)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def log2_of(x, FAST_LOG2: tl.constexpr):
    """log2 of normal numbers; a denormal number may give the log2 of zero."""
    if FAST_LOG2:
        y = libdevice.fast_log2f(x)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def jsd_terms(d, y, beta, FAST_LOG2: tl.constexpr):
    """(p, q, log2(m / p), log2(q / m)) for p = 2^y, q = 2^(y + d) and JSD's mixture m = beta p + (1 - beta) q.

    The caller clamps y to at least -126, so that p is normal and q / p is finite; smaller probabilities do not change
    an fp32 sum over a row. d = -inf gives q = 0 exactly, and d = 0 gives logarithms of exactly 0.
    """
    d = tl.maximum(d, -400.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(y)
    ratio = tl.exp2(d)
    log_mp = log2_of((1.0 - beta) * ratio + beta, FAST_LOG2)
    return p, p * ratio, log_mp, d - log_mp


@triton.jit
def divergence_of(x, y, beta, eps, KIND: tl.constexpr, FAST_LOG2: tl.constexpr):
    """(f, df / dx) of a block. The caller masks elements past the row's end."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    if KIND == 4:
        d = x - y
        f = 0.5 * tl.abs(d)
        g = tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, d))  # d at a tie: 0, and nan stays nan
    elif KIND == 0:
        f = tl.where(y == 0.0, 0.0, y * (log2_of(tl.maximum(y, tl.maximum(eps, 1.2e-38)), FAST_LOG2) * LN2 - x))
        g = -y
    elif KIND == 1:
        p = tl.exp2(y * LOG2E)
        f = tl.where(p == 0.0, 0.0, p * (y - x))
        g = -p
    elif KIND == 2:
        q = tl.exp2(x * LOG2E)
        f = tl.where(q == 0.0, 0.0, q * (x - y))
        g = f + q
    else:
        y = tl.maximum(y, -87.3, propagate_nan=tl.PropagateNan.ALL)
        p, q, log_mp, log_qm = jsd_terms((x - y) * LOG2E, y * LOG2E, beta, FAST_LOG2)
        g = LN2 * (1.0 - beta) * (q * log_qm)
        f = g - LN2 * beta * (p * log_mp)
    return f, g


@triton.jit
def _divergence_tile(
    X_ptr,
    Y_ptr,
    GO_ptr,
    TERM_ptr,
    DX_ptr,
    row_offset,
    cols,
    n_cols,
    total,
    slope,
    beta,
    eps,
    KIND: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """Returns `total` plus the terms of the columns below n_cols; stores the terms in TERM and the gradient in DX."""
    mask = cols < n_cols
    x = load_with_hint(X_ptr + cols, LOAD_HINT, mask=mask, other=0.0)
    y = load_with_hint(Y_ptr + cols, LOAD_HINT, mask=mask, other=0.0)
    f, g = divergence_of(x.to(tl.float32), y.to(tl.float32), beta, eps, KIND, FAST_LOG2)
    total += tl.where(mask, f, 0.0)
    if TERM_ptr is not None:
        tl.store(TERM_ptr + row_offset + cols, f.to(TERM_ptr.dtype.element_ty), mask=mask)
    if DX_ptr is not None:
        if GO_ptr is not None:
            g *= tl.load(GO_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(DX_ptr + row_offset + cols, (g * slope).to(DX_ptr.dtype.element_ty), mask=mask)
    return total


@triton.jit
def _store_zeros(PTR, row_offset, cols, n_cols):
    if PTR is not None:
        tl.store(PTR + row_offset + cols, tl.zeros(cols.shape, dtype=PTR.dtype.element_ty), mask=cols < n_cols)


@triton.jit(do_not_specialize=["ignore_index"])
def _divergence_kernel(
    X_ptr,
    Y_ptr,
    LABEL_ptr,
    SHARE_ptr,
    GO_ptr,
    SUM_ptr,
    TERM_ptr,
    DX_ptr,
    X_row_stride,
    Y_row_stride,
    GO_row_stride,
    n_cols,
    ignore_index,
    beta,
    eps,
    KIND: tl.constexpr,
    SCALE_IN_BACKWARD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """Program (row, part) takes the row's tiles part, part + parts, ... and stores their sum in SUM[row, part]. Part 0
    also takes the row's edges, for VECTOR > 1 (rows/row.py).

    SHARE: the reduction's factor; with SCALE_IN_BACKWARD the gradient is not multiplied by it here. GO: the incoming
    gradient of every term. TERM and DX: [n_rows, n_cols], contiguous; None for a result that is not needed.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = row_head(row * X_row_stride, VECTOR)
    X_ptr += body_start(row * X_row_stride, head, VECTOR)
    Y_ptr += body_start(row * Y_row_stride, head, VECTOR)
    row_offset = body_start(row * n_cols, head, VECTOR)
    if GO_ptr is not None:
        GO_ptr += body_start(row * GO_row_stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    stop = n_body
    counts = True
    if LABEL_ptr is not None:
        counts = tl.load(LABEL_ptr + row) != ignore_index
        stop = tl.where(counts, n_body, 0)
    share = tl.load(SHARE_ptr)
    slope = 1.0 if SCALE_IN_BACKWARD else share
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    step = tl.num_programs(1) * BLOCK_SIZE
    for start in tl.range(part * BLOCK_SIZE, stop, step, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_SIZE)
        total = _divergence_tile(
            X_ptr, Y_ptr, GO_ptr, TERM_ptr, DX_ptr, row_offset, cols, n_body, total, slope, beta, eps,
            KIND, LOAD_HINT, FAST_LOG2,
        )  # fmt: skip
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)
        n_right = tl.where((part == 0) & counts, n_cols - head, -VECTOR)  # -VECTOR masks all columns
        edge_total = _divergence_tile(
            X_ptr, Y_ptr, GO_ptr, TERM_ptr, DX_ptr, row_offset, edge, n_right, tl.zeros([2 * VECTOR], dtype=tl.float32),
            slope, beta, eps, KIND, "", FAST_LOG2,
        )  # fmt: skip
    if SUM_ptr is not None:
        sum_ptr = SUM_ptr + row * tl.num_programs(1) + part
        part_sum = tl.sum(total)
        if VECTOR > 1:
            part_sum += tl.sum(edge_total)
        tl.store(sum_ptr, part_sum * share)
    if LABEL_ptr is not None:
        for start in tl.range(tl.where(counts, n_body, part * BLOCK_SIZE), n_body, step):
            cols = start + tl.arange(0, BLOCK_SIZE)
            _store_zeros(TERM_ptr, row_offset, cols, n_body)
            _store_zeros(DX_ptr, row_offset, cols, n_body)
        if VECTOR > 1:
            n_right = tl.where((part == 0) & (counts == 0), n_cols - head, -VECTOR)
            _store_zeros(TERM_ptr, row_offset, edge, n_right)
            _store_zeros(DX_ptr, row_offset, edge, n_right)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _label_share_kernel(LABEL_ptr, SHARE_ptr, n_rows, ignore_index, per_row, BLOCK_SIZE: tl.constexpr):
    """One program: SHARE[0] to SHARE[4] = 1 / (counted rows * per_row), zero where no row counts."""
    counted = tl.zeros([BLOCK_SIZE], dtype=tl.int32)
    for start in range(0, n_rows, BLOCK_SIZE):
        rows = start + tl.arange(0, BLOCK_SIZE)
        label = tl.load(LABEL_ptr + rows, mask=rows < n_rows, other=0)
        counted += ((rows < n_rows) & (label != ignore_index)).to(tl.int32)
    n = tl.sum(counted)
    share = tl.where(n == 0, 0.0, 1.0 / (tl.maximum(n, 1).to(tl.float32) * per_row))
    slots = tl.arange(0, 8)
    tl.store(SHARE_ptr + slots, share, mask=slots < 5)


# -- tunables --------------------------------------------------------------------------------------------------------


def _space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    tiles, warps, hints = column_tiles(key, 1024, 16384), (1, 2, 4, 8, 16, 32), ("none", "stream")
    return tile_space(target, tiles, warps, per_thread=(4, 32), stages=(1, 2, 3), hints=hints)


def _tunable(op: str) -> Tunable:
    """The heuristic: tiles of at most 4096 columns, and 16 elements of x and of y a thread, so two loads in flight."""
    rules = {"heuristic": tile_rule(4096, 16, 16, hint="stream"), "safe": tile_rule(1024, 16, 8), "space": _space}
    return Tunable(op, "fwd", kernels=(_divergence_kernel,), key=row_key, dims=DIMS, **rules)


# -- launchers -------------------------------------------------------------------------------------------------------


def label_share(labels, n_rows: int, per_row: int, ignore_index: int, device: torch.device) -> torch.Tensor:
    """`share_reference` on the device as fp32 [5], five equal elements: `scale_gradient` reads element 4."""
    share = torch.empty(5, dtype=torch.float32, device=device)
    if not per_row or labels is None:
        return share.fill_(1.0 / (n_rows * per_row) if n_rows * per_row else float(not per_row))
    plan = STATS.plan(device, stats_key(n_rows, 0, 0))
    launch(plan, _label_share_kernel, (1,), (labels, share, n_rows, ignore_index, float(per_row)))
    return share


def _scales_in_backward(dtype: torch.dtype, options: Divergence) -> bool:
    """Whether backward, not the forward, divides by the mean's denominator: in fp16 the quotient underflows."""
    return dtype is torch.float16 and options.reduction in (MEAN, BATCHMEAN)


def _run(tunable: Tunable, x, y, labels, share, options: Divergence, sums: bool, terms=None, dx=None, go=None):
    """Launch the kernel on row-major inputs. Returns partial sums of the loss, or None without `sums`."""
    n_rows, n_cols = x.shape
    plan = tunable.plan(x.device, row_key(n_rows, n_cols, x.dtype.itemsize))
    # several programs per row if there are too few rows to fill the device
    parts = min(cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"]), cdiv(8 * plan.target.multiprocessors, n_rows))
    partial = torch.empty(n_rows * parts, dtype=torch.float32, device=x.device) if sums else None
    args = (x, y, labels, share, go, partial, terms, dx, x.stride(0), y.stride(0), 0 if go is None else go.stride(0))
    numbers = n_cols, options.ignore_index, options.beta, options.eps
    flags = options.kind, _scales_in_backward(x.dtype, options), row_vector(x, y, terms, dx, go, unit=LINE)
    launch(plan, _divergence_kernel, (n_rows, parts), (*args, *numbers), flags)
    return partial


def divergence_op(op: str) -> tuple[Tunable, tuple[Any, Any]]:
    """(the `<op>.fwd` tunable, (forward, backward) operators); the backward operator is for reduction="none".

    forward(input, target, labels?, dtype, grad, Divergence) -> (loss, gradient or empty, stats for backward or empty)
    """
    tunable = _tunable(op)

    def fwd(x, y, labels, dtype, grad, options: Divergence):
        x, y, labels = row_major(x), row_major(y), labels if labels is None else labels.contiguous()
        n_rows, n_cols = x.shape
        share = label_share(labels, n_rows, _elements_per_row(options, n_cols), options.ignore_index, x.device)
        reduced = options.reduction != NONE
        dx = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device) if grad and reduced else None
        terms = None if reduced else torch.empty((n_rows, n_cols), dtype=dtype, device=x.device)
        sums = _run(tunable, x, y, labels, share, options, reduced, terms, dx) if n_rows else share.new_zeros(1)
        if terms is not None:
            return terms, absent(share), absent(share)
        loss = launch_sum(RowResults(sums), share, SUMMED, dtype)[0]
        stats = share if grad and _scales_in_backward(x.dtype, options) else absent(share)
        return loss, absent(x) if dx is None else dx, stats

    def bwd(go, x, y, labels, options: Divergence):
        x, y, go = row_major(x), row_major(y), row_major(go)
        labels = labels if labels is None else labels.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            share = label_share(None, 0, 0, 0, x.device)
            _run(tunable, x, y, labels, share, options, False, None, dx, go)
        return dx

    def reference_dx(x, y, labels, options, go):
        dx = gradient_of(lambda x: divergence_reference(x, y, labels, options), x, go)
        return dx.to(x.dtype).contiguous()

    def fwd_reference(x, y, labels, dtype, grad, options: Divergence):
        loss = divergence_reference(x, y, labels, options).to(dtype).contiguous()
        grad = grad and options.reduction != NONE
        stats = x.new_ones(5 if grad and _scales_in_backward(x.dtype, options) else 0, dtype=torch.float32)
        return loss, reference_dx(x, y, labels, options, x.new_ones(())) if grad else absent(x), stats

    def bwd_reference(go, x, y, labels, options: Divergence):
        return reference_dx(x, y, labels, options, go)

    tensors = "Tensor input, Tensor target, Tensor? labels"
    forward = define(
        f"{op}_fwd({tensors}, ScalarType dtype, bool grad) -> (Tensor, Tensor, Tensor)",
        shapes="input, target [n_rows, n_cols]; int labels [n_rows]",
        launcher=torch.no_grad()(fwd),
        reference=torch.no_grad()(fwd_reference),
        numbers=Divergence,
    )
    backward = define(
        f"{op}_bwd(Tensor grad_output, {tensors}) -> Tensor",
        shapes="input, target, grad_output [n_rows, n_cols]; int labels [n_rows]",
        launcher=bwd,
        reference=bwd_reference,
        fake=("input",),
        numbers=Divergence,
    )
    return tunable, (forward, backward)


class DivergenceFunction(Function):
    """Autograd for a divergence. Saves the gradient, for reduction="none" the inputs."""

    @staticmethod
    def forward(ctx, input, target, labels, operators, options: Divergence, dtype: torch.dtype):
        ctx.backward_operator, ctx.options = operators[1], options
        loss, grad, stats = operators[0](input, target, labels, dtype, True, options)
        ctx.save_for_backward(*((input, target, labels) if options.reduction == NONE else (grad, stats)))
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        if ctx.options.reduction == NONE:
            return ctx.backward_operator(grad_output, *ctx.saved_tensors, ctx.options), *(None,) * 5
        grad, stats = ctx.saved_tensors
        return scale_gradient(grad, grad_output, stats), *(None,) * 5


# -- common code of the public functions -----------------------------------------------------------------------------


def loss_dtype(input: torch.Tensor, target: torch.Tensor) -> torch.dtype:
    """The dtype that torch's losses return: the promoted dtype of both, at least fp32 under autocast."""
    dtype = input.dtype if target.dtype is input.dtype else torch.promote_types(input.dtype, target.dtype)
    low = dtype.itemsize < 4 and autocast_dtype(input.device.type) is not None
    return torch.float32 if low else dtype


def divergence(op: str, operators, input, target, labels, options: Divergence, promotes: bool = True) -> torch.Tensor:
    """Check a public function's arguments and run it. promotes: the result's dtype depends on target's dtype too."""
    check_pair(op, input=input, target=target)
    check_labels(op, labels, input, options.ignore_index)
    dtype = loss_dtype(input, target if promotes else input)
    if target.requires_grad:
        target = target.detach()
    if torch.is_grad_enabled() and input.requires_grad:
        return DivergenceFunction.apply(input, target, labels, operators, options, dtype)
    return operators[0](input, target, labels, dtype, False, options)[0]


def check_pair(op: str, **pair: torch.Tensor) -> None:
    """Raise unless the two tensors have the same shape [n_rows, n_cols] with at least one column."""
    check_tensors(op, **pair)
    x, y = pair.values()
    if x.dim() != 2 or not x.shape[1] or x.shape != y.shape:
        got = f"{tuple(x.shape)} and {tuple(y.shape)}{to_flatten(**pair)}"
        check(False, op, f"{' and '.join(pair)} must be 2D and have the same shape [n_rows, n_cols], got {got}")


def check_labels(op: str, labels, rows: torch.Tensor, ignore_index) -> None:
    """Raise unless ignore_index is an int and labels, if there are any, fit rows [n_rows, ...]."""
    check_ignore_index(op, ignore_index)
    if labels is not None:
        check_indices(op, "shift_labels", labels, rows)


def check_reduction(op: str, reduction: str, names: Sequence[str] = REDUCTIONS) -> str:
    """The reduction. Raises unless it is one of `names`."""
    if reduction not in names:
        check(False, op, f"reduction must be one of {', '.join(names)}, got {reduction!r}")
    return reduction


WORKLOADS = {"llama3_8b": (4096, 128256), "mistral_7b": (8192, 32768), "qwen3_8b": (4096, 151936)}


def sample_labels(n_rows: int, n_labels: int, device, generator) -> torch.Tensor:
    """Random labels below n_labels, some of them -100."""
    labels = torch.randint(-1, n_labels, (n_rows,), generator=generator, device=device)
    return labels.masked_fill(labels == -1, -100)


def sample_divergence(
    sizes, dtype, device, generator, *, take, take_target=None, labelled=False, **options: Any
) -> Sample:
    """A `Sample` of two distributions of random logits. take, take_target: softmax or log_softmax of input and target.

    labelled: with labels, some of them -100
    """
    n_rows, n_cols = sizes
    draw = normal(torch.float32, device, generator)

    def rows(distribution: Callable[..., torch.Tensor]) -> torch.Tensor:
        return distribution(draw(n_rows, n_cols).detach(), -1).to(dtype)

    labels = (sample_labels(n_rows, 3, device, generator),) if labelled else ()
    return Sample(
        args=(rows(take).requires_grad_(), rows(take_target or take), *labels),
        kwargs=options,
        reduction=n_rows * n_cols,
        grad_reduction=n_cols,
        moved=3 * n_rows * n_cols * dtype.itemsize,
    )
