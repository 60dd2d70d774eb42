"""The two small launches around the row kernel: what a mean divides by, before it, and the sums of the rows, after."""

from __future__ import annotations

import torch

from ... import env, registry
from ...registry import LaunchConfig, Target, Tunable
from ...runtime.operator import is_interpreted, launch
from ...runtime.triton_import import tl, triton
from .cross_entropy_reference import MEAN, NONE, Options, absent, check_targets
from .cross_entropy_rows import DIMS, RowResults, has_block_size


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


def _stats_key(n_rows: int, n_cols: int, itemsize: int) -> registry.Key:
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
    key=_stats_key,
    dims=DIMS,
    heuristic=_stats_heuristic,
    safe=_stats_safe,
    space=_stats_space,
    valid=has_block_size,
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
    plan = STATS.plan(device, _stats_key(n_rows, n_cols, 0))
    args = (target, weight, stats, ok, n_rows, n_cols, options.ignore_index)
    launch(plan, _cross_entropy_stats_kernel, (1,), args, (options.reduction == MEAN,))
    if device.type not in ("cpu", "meta"):
        try:
            torch._assert_async(ok, f"{op}: target out of range; LIGER_HW_CHECK_TARGETS=1 names the row")
        except NotImplementedError:
            pass  # no such operator on this device: the loss and the gradient of the row are nan all the same
    return stats


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
