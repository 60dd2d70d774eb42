"""What every cross entropy on rows of logits launches: statistics of the targets, the row kernel, and the sums of rows.

stats = launch_stats(...)            what a mean divides by; asserts the targets
launch_rows(...)                     losses and gradient of a row in one launch, by the sweeps of softmax_rows.py
losses = launch_sum(...)             the rows' results, reduced in a fixed order
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import env, registry
from ...registry import LaunchConfig, Target, Tunable
from ...runtime.operator import is_interpreted, launch
from ...runtime.triton_import import tl, triton
from ..rows.row import body_start, body_width, row_head, row_vector
from ..rows.tuning import DIMS
from .cross_entropy_reference import MEAN, NONE, Options, absent, assert_on_device, check_in_range, check_targets
from .softmax_rows import rows_heuristic, rows_safe, rows_space, scan_row, tanh, write_gradient, write_zeros


# One target is loaded, so that its alignment changes no code: shifted labels of one sequence begin 8 bytes into theirs.
@triton.jit(do_not_specialize=["row_start", "ignore_index"], do_not_specialize_on_alignment=["Y_ptr"])
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
    SCALE_IN_BACKWARD: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ARGMAX: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """One program a row. DX may be X: a row is read and written by its own program only, each element read first.

    X and DX hold a chunk of rows that begins at row `row_start` of the rest; columns n_cols..n_stored may be touched.
    """
    # what the first sweep asked to keep is let go by the second, which is the last to need it
    AGAIN_EVICT: tl.constexpr = "evict_first" if LOAD_EVICT == "evict_last" else ""
    chunk_row = tl.program_id(0).to(tl.int64)
    row = chunk_row + row_start
    head = row_head(chunk_row * X_row_stride, VECTOR)
    X_ptr += body_start(chunk_row * X_row_stride, head, VECTOR)
    if DX_ptr is not None:
        DX_ptr += body_start(chunk_row * DX_row_stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    if VECTOR > 1:
        n_stored = n_body
    n_full = 0 if ONE_BLOCK else (n_body - 1) // BLOCK_SIZE
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
            write_zeros(DX_ptr, block_cols, tail_cols, head, n_body, n_full, n_cols, n_stored, BLOCK_SIZE, VECTOR)
        return

    # Read before the first sweep: its reductions are the barrier between this and another warp's gradient at y.
    inside = (y >= 0) & (y < n_cols)
    y_read = tl.where(inside, y, 0)  # a target out of range reads nothing out of range; its row becomes nan
    s_y = tl.load(X_ptr + (y_read - head)).to(tl.float32)
    if BIAS_ptr is not None:
        s_y += tl.load(BIAS_ptr + y_read).to(tl.float32)
    if SOFTCAP:
        s_y = softcap * tanh(s_y * (1.0 / softcap))

    m, d, weighted, argmax, x_tail, x_edge = scan_row(
        X_ptr, BIAS_ptr, W_ptr, block_cols, head, n_body, n_full, n_cols, n_stored, softcap,
        SOFTCAP, SMOOTHING, ARGMAX, BLOCK_SIZE, STAGES, LOAD_CACHE, LOAD_EVICT, VECTOR,
    )  # fmt: skip
    lse = m + tl.log(d)

    target_coef = tl.where(inside, 1.0, float("nan"))
    if W_ptr is not None:
        target_coef *= tl.load(W_ptr + y_read).to(tl.float32)
    if SMOOTHING:
        target_coef *= 1.0 - label_smoothing
    loss = target_coef * (lse - s_y)
    softmax_coef = target_coef
    smoothing_term = 0.0
    if SMOOTHING:
        smoothing_term = label_smoothing / n_cols
        class_sum = tl.load(STATS_ptr + 2)
        loss += smoothing_term * (class_sum * lse - weighted)
        softmax_coef += smoothing_term * class_sum
    z = lse_square_scale * lse * lse
    z_coef = 2.0 * lse_square_scale * lse
    if MEAN:
        share = tl.load(STATS_ptr)
        z_share = tl.load(STATS_ptr + 1)
        loss *= share
        z *= z_share
        if SCALE_IN_BACKWARD:
            z_coef *= z_share / share
        else:
            softmax_coef *= share
            target_coef *= share
            smoothing_term *= share
            z_coef *= z_share
    if Z_LOSS:
        loss += z
        softmax_coef += z_coef
    if TOKEN_SCALING:
        p_y = tl.exp(s_y - lse)
        loss *= p_y
        z *= p_y
        softmax_coef *= p_y
        target_coef *= p_y
        smoothing_term *= p_y
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
            softmax_coef *= go
            target_coef *= go
            smoothing_term *= go
        y_col = y_read.to(tl.int32) - head
        write_gradient(
            X_ptr, DX_ptr, BIAS_ptr, W_ptr, x_tail, x_edge, block_cols, head, n_body, n_full, n_cols,
            n_stored, softcap, 1.0, y_col, lse, softmax_coef, target_coef, smoothing_term, 0.0, 0.0,
            SOFTCAP, SMOOTHING, False, ONE_BLOCK, BLOCK_SIZE, STAGES, AGAIN_EVICT, VECTOR,
        )  # fmt: skip


def rows_tunable(op: str, key, dims: tuple[str, ...] = DIMS, heuristic=rows_heuristic) -> Tunable:
    """The `<op>.fwd` tunable of an op made of `launch_rows`."""
    kernels = (_cross_entropy_fwd_kernel,)
    return Tunable(
        op, "fwd", kernels=kernels, key=key, dims=dims, heuristic=heuristic, safe=rows_safe, space=rows_space
    )


class RowResults(NamedTuple):
    """Per-row results, written by the row kernel; an absent one is None. fp32 until they are summed."""

    loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    hits: torch.Tensor | None = None
    top: torch.Tensor | None = None


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
        options.scales_in_backward(x.dtype),
        options.label_smoothing != 0.0,
        options.lse_square_scale != 0.0,
        options.softcap != 0.0,
        options.use_token_scaling,
        results.hits is not None or results.top is not None,
        n_cols <= plan.config.blocks["BLOCK_SIZE"],
        1 if owned else row_vector(x, dx),
    )
    launch(plan, _cross_entropy_fwd_kernel, (x.shape[0],), args, flags)


def row_buffers(n_rows: int, options: Options, dtype: torch.dtype, device: torch.device) -> RowResults:
    """Buffers for n_rows rows: of the result's dtype when the rows are the result, of fp32 when they will be summed."""
    rows = dtype if options.reduction == NONE else torch.float32
    return RowResults(
        torch.empty(n_rows, dtype=rows, device=device),
        torch.empty(n_rows, dtype=rows, device=device) if options.return_z_loss else None,
        torch.empty(n_rows, dtype=torch.float32, device=device) if options.return_token_accuracy else None,
        torch.empty(n_rows, dtype=torch.int64, device=device) if options.return_predicted_tokens else None,
    )


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _cross_entropy_stats_kernel(
    Y_ptr, W_ptr, STATS_ptr, OK_ptr, n_rows, n_cols, ignore_index, MEAN: tl.constexpr, BLOCK_SIZE: tl.constexpr
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


@triton.jit(do_not_specialize=["n_rows"])
def _cross_entropy_sum_kernel(
    STATS_ptr, LOSS_rows_ptr, Z_rows_ptr, HIT_rows_ptr, LOSS_ptr, Z_ptr, HIT_ptr, n_rows, BLOCK_SIZE: tl.constexpr
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


def stats_key(n_rows: int, n_cols: int, itemsize: int) -> registry.Key:
    return ((n_rows - 1).bit_length() if n_rows > 1 else 0,)


def _stats_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    block = max(64, min(1 << key[0], 4096))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 4))


def _stats_safe(target: Target, key: registry.Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 256}, 1)


def _stats_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    return [LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 4)) for block in (256, 512, 1024, 2048, 4096, 8192)]


STATS = Tunable(
    "cross_entropy",
    "stats",
    kernels=(_cross_entropy_stats_kernel, _cross_entropy_sum_kernel),
    key=stats_key,
    dims=DIMS,
    heuristic=_stats_heuristic,
    safe=_stats_safe,
    space=_stats_space,
)


def launch_stats(op: str, target, weight, n_cols: int, options: Options, device: torch.device) -> torch.Tensor:
    """Shares of the mean and sums over targets and class weights, on the device, [5] fp32; the targets are checked.

    On a GPU the check is an assertion on the device, without a synchronisation: one extra small launch.
    """
    if is_interpreted() or env.get("LIGER_HW_CHECK_TARGETS"):
        check_targets(op, target, n_cols, options.ignore_index)
    n_rows = target.shape[0]
    stats = torch.empty(5, dtype=torch.float32, device=device)
    ok = torch.empty(1, dtype=torch.int32, device=device)
    plan = STATS.plan(device, stats_key(n_rows, n_cols, 0))
    args = (target, weight, stats, ok, n_rows, n_cols, options.ignore_index)
    launch(plan, _cross_entropy_stats_kernel, (1,), args, (options.reduction == MEAN,))
    if device.type not in ("cpu", "meta"):
        assert_on_device(ok, f"{op}: target out of bounds; LIGER_HW_CHECK_TARGETS=1 names the row")
    return stats


def assert_targets(op: str, target: torch.Tensor, n_cols: int, ignore_index: int, plain: bool = False) -> None:
    """The check of `launch_stats` for a loss that needs none of its numbers. plain: on the host."""
    if plain:
        check_in_range(op, target, n_cols, ignore_index)
    else:
        launch_stats(op, target, None, n_cols, Options(ignore_index, reduction=NONE), target.device)


def launch_sum(rows: RowResults, stats: torch.Tensor, reduction: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) from the rows' results; an absent one is an empty tensor."""
    loss, z_loss, hits, top = rows
    assert loss is not None
    if reduction != NONE:
        n_rows, device = loss.shape[0], loss.device
        loss = torch.empty((), dtype=dtype, device=device)
        z_loss = None if z_loss is None else torch.empty((), dtype=dtype, device=device)
        hits = None if hits is None else torch.empty((), dtype=torch.float32, device=device)
        plan = STATS.plan(device, stats_key(n_rows, 0, 0))
        launch(plan, _cross_entropy_sum_kernel, (1,), (stats, *rows[:3], loss, z_loss, hits, n_rows))
    return loss, *(absent(stats) if t is None else t for t in (z_loss, hits, top))
