"""What every cross entropy on rows of logits launches: statistics of the targets, the row kernel, and the sums of rows.

stats = launch_stats(...)            what a mean divides by; asserts the targets
launch_rows(...)                     losses and gradient of a row in one launch, by the sweeps of softmax_rows.py
losses = launch_sum(...)             the rows' results, reduced in a fixed order
dx = scale_gradient(...)             in backward: the gradient that the forward saved, times the incoming one

Backward reads the incoming gradient on the device. Where that is 1, as in `loss.backward()`, the kernel returns at
once. An entry of exactly zero stays zero whatever it is multiplied by: ignored rows have such entries, and torch gives
them no gradient even where the incoming one is infinite or nan (a summed loss divided by zero counted tokens). The
product is written in place only where the saved gradient cannot be read again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import env, registry
from ...registry import LaunchConfig, Target, Tunable, row_key, tile_space
from ...runtime.operator import cdiv, define, graph_is_kept, launch
from ...runtime.triton_import import INTERPRET, tl, triton
from ..rows.row import body_start, body_width, edge_columns, row_head, row_vector
from ..rows.tuning import DIMS, persistent_misfit
from .cross_entropy_reference import MEAN, NONE, SUM, Options, absent, assert_on_device, check_in_range, check_targets
from .softmax_rows import rows_heuristic, rows_safe, rows_space, scan_row, tanh, write_gradient, write_zeros


# One number of a row is loaded or stored there, so that alignment changes no code: chunks begin anywhere.
@triton.jit(
    do_not_specialize=["ignore_index"],
    do_not_specialize_on_alignment=["Y_ptr", "GO_ptr", "LOSS_ptr", "Z_ptr", "TOP_ptr"],
)
def _cross_entropy_fwd_kernel(
    X_ptr,
    Y_ptr,
    W_ptr,
    BIAS_ptr,
    STATS_ptr,
    GO_ptr,
    LOSS_ptr,
    Z_ptr,
    TOP_ptr,
    DX_ptr,
    X_row_stride,
    DX_row_stride,
    n_cols,
    ignore_index,
    SCALE_IN_BACKWARD: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """One program a row. DX may be X: a row is read and written by its own program only, each element read first.

    STATS: the numbers of the call, see `_cross_entropy_stats_kernel`. VECTOR: as in rows/row.py; 0 where the padding
    between rows may be accessed, and DX has the stride of X.
    """
    # what the first sweep asked to keep is let go by the second, which is the last to need it
    AGAIN_EVICT: tl.constexpr = "evict_first" if LOAD_EVICT == "evict_last" else ""
    ARGMAX: tl.constexpr = TOP_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    head = row_head(row * X_row_stride, VECTOR)
    X_ptr += body_start(row * X_row_stride, head, VECTOR)
    if DX_ptr is not None:
        DX_ptr += body_start(row * DX_row_stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    n_stored = X_row_stride if VECTOR == 0 else n_body
    n_full = 0 if ONE_BLOCK else (n_body - 1) // BLOCK_SIZE
    block_cols = tl.arange(0, BLOCK_SIZE)
    y = tl.load(Y_ptr + row)
    if y == ignore_index:
        if LOSS_ptr is not None:
            tl.store(LOSS_ptr + row, 0.0)
        if Z_ptr is not None:
            tl.store(Z_ptr + row, 0.0)
        if TOP_ptr is not None:
            tl.store(TOP_ptr + row, -1)
        if DX_ptr is not None:
            tail_cols = n_full * BLOCK_SIZE + block_cols
            write_zeros(DX_ptr, block_cols, tail_cols, head, n_body, n_full, n_cols, n_stored, BLOCK_SIZE, VECTOR)
        return

    # Read before the first sweep: its reductions are the barrier between this and another warp's gradient at y.
    inside = (y >= 0) & (y < n_cols)
    y_read = tl.where(inside, y, 0)  # a target out of range reads nothing out of range; its row becomes nan
    s_y = tl.load(X_ptr + (y_read - head)).to(tl.float32)
    if BIAS_ptr is not None:
        s_y += tl.load(BIAS_ptr + y_read).to(tl.float32)
    softcap = None
    if SOFTCAP:
        softcap = tl.load(STATS_ptr + 7)
        s_y = softcap * tanh(s_y * (1.0 / softcap))

    lse, _, weighted, argmax, x_tail, x_edge = scan_row(
        X_ptr, BIAS_ptr, W_ptr, head, n_body, n_full, n_cols, n_stored, softcap, 1.0,
        SOFTCAP, SMOOTHING, False, ARGMAX, BLOCK_SIZE, STAGES, LOAD_CACHE, LOAD_EVICT, VECTOR,
    )  # fmt: skip

    share = tl.load(STATS_ptr)
    target_coef = tl.where(inside, 1.0, float("nan"))
    if W_ptr is not None:
        target_coef *= tl.load(W_ptr + y_read).to(tl.float32)
    smoothing_term = None
    if SMOOTHING:
        label_smoothing = tl.load(STATS_ptr + 5)
        target_coef *= 1.0 - label_smoothing
        smoothing_term = label_smoothing / n_cols
    loss = target_coef * (lse - s_y)
    softmax_coef = target_coef
    if SMOOTHING:
        class_sum = tl.load(STATS_ptr + 2)
        loss += smoothing_term * (class_sum * lse - weighted)
        softmax_coef += smoothing_term * class_sum
    loss *= share
    if SCALE_IN_BACKWARD:
        z_share = tl.load(STATS_ptr + 1) / share
    else:
        z_share = tl.load(STATS_ptr + 1)
        softmax_coef *= share
        target_coef *= share
        if SMOOTHING:
            smoothing_term *= share
    z = 0.0
    if Z_LOSS:
        lse_square_scale = tl.load(STATS_ptr + 6)
        z = lse_square_scale * lse * lse * tl.load(STATS_ptr + 1)
        loss += z
        softmax_coef += 2.0 * lse_square_scale * lse * z_share
    if TOKEN_SCALING:
        p_y = tl.exp(s_y - lse)
        loss *= p_y
        z *= p_y
        softmax_coef *= p_y
        target_coef *= p_y
        if SMOOTHING:
            smoothing_term *= p_y
    if LOSS_ptr is not None:
        tl.store(LOSS_ptr + row, loss)
    if Z_ptr is not None:
        tl.store(Z_ptr + row, z)
    if TOP_ptr is not None:
        tl.store(TOP_ptr + row, argmax)

    if DX_ptr is not None:
        if GO_ptr is not None:
            go = tl.load(GO_ptr + row).to(tl.float32)
            softmax_coef *= go
            target_coef *= go
            if SMOOTHING:
                smoothing_term *= go
        write_gradient(
            X_ptr, DX_ptr, BIAS_ptr, W_ptr, x_tail if ONE_BLOCK else None, x_edge if ONE_BLOCK else None, head, n_body,
            n_full, n_cols, n_stored, softcap, 1.0, y_read.to(tl.int32) - head, lse, softmax_coef, target_coef,
            smoothing_term, None, None, BLOCK_SIZE, STAGES, AGAIN_EVICT, VECTOR,
        )  # fmt: skip


def loss_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """`rows_heuristic`, with tiles of 16384 columns for rows of more than 65536, which an H200 reads faster so."""
    config = rows_heuristic(target, key)
    if key[0] <= 65536:
        return config
    return LaunchConfig({"BLOCK_SIZE": 16384}, target.warps(16384, 32, 16), hint=config.hint)


def rows_tunable(op: str, key, dims: tuple[str, ...] = DIMS, heuristic=loss_heuristic) -> Tunable:
    """The `<op>.fwd` tunable of an op made of `launch_rows`."""
    how = {"dims": dims, "heuristic": heuristic, "safe": rows_safe, "space": rows_space, "version": 2}
    return Tunable(op, "fwd", kernels=(_cross_entropy_fwd_kernel,), key=key, **how)


class RowResults(NamedTuple):
    """Per-row results, written by the row kernel; absent ones are None. fp32 until they are summed.

    top: the first column of the largest logit, -1 in ignored rows
    """

    loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    top: torch.Tensor | None = None

    def rows_from(self, start: int) -> RowResults:
        return RowResults(*(t if t is None else t[start:] for t in self)) if start else self


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

    dx may be x itself. row_grads: the incoming gradient of each row, contiguous, multiplied into dx. owned: the padding
    between rows of x may be accessed, which keeps the last block's accesses wide when n_cols is odd; dx has the same
    stride then.
    """
    n_cols = x.shape[1]
    if row_start:
        target, row_grads = target[row_start:], None if row_grads is None else row_grads[row_start:]
    args = (
        *(x, target, weight, bias, stats, row_grads, *results.rows_from(row_start), dx),
        *(x.stride(0), 0 if dx is None else dx.stride(0), n_cols, options.ignore_index),
    )
    flags = (
        options.scales_in_backward(x.dtype),
        options.label_smoothing != 0.0,
        options.lse_square_scale != 0.0,
        options.softcap != 0.0,
        options.use_token_scaling,
        n_cols <= plan.config.blocks["BLOCK_SIZE"],
        0 if owned else row_vector(x, dx),
    )
    launch(plan, _cross_entropy_fwd_kernel, (x.shape[0],), args, flags)


def row_buffers(n_rows: int, options: Options, dtype: torch.dtype, device: torch.device) -> RowResults:
    """Buffers for n_rows rows: of the result's dtype when the rows are the result, of fp32 when they will be summed."""
    rows = dtype if options.reduction == NONE else torch.float32
    return RowResults(
        torch.empty(n_rows, dtype=rows, device=device),
        torch.empty(n_rows, dtype=rows, device=device) if options.return_z_loss else None,
        torch.empty(n_rows, dtype=torch.int64, device=device) if options.seeks_top else None,
    )


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _cross_entropy_stats_kernel(
    Y_ptr,
    W_ptr,
    STATS_ptr,
    OK_ptr,
    n_rows,
    n_cols,
    ignore_index,
    label_smoothing,
    lse_square_scale,
    softcap,
    MEAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program. STATS [8], the numbers of a call on the device: 0 and 1 the shares a mean gives to the loss, 1 / sum
    of w[y], and to the z-loss, 1 / counted rows (1 each unless MEAN); 2 the sum of w; 3 1 / counted rows; 4 the share
    of the loss again, 1 where no row counts; 5 to 7 the three options."""
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
    tl.store(STATS_ptr + 5, label_smoothing)
    tl.store(STATS_ptr + 6, lse_square_scale)
    tl.store(STATS_ptr + 7, softcap)
    tl.store(OK_ptr, (tl.sum(outside) == 0).to(tl.int32))


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _cross_entropy_sum_kernel(
    STATS_ptr,
    LOSS_rows_ptr,
    Z_rows_ptr,
    TOP_rows_ptr,
    Y_ptr,
    LOSS_ptr,
    Z_ptr,
    HIT_ptr,
    n_rows,
    ignore_index,
    BLOCK_SIZE: tl.constexpr,
):
    """One program sums the rows' results, in a fixed order. Shares in STATS are infinite when no row counts: nan.

    HIT: the share of the counted rows whose largest logit is the target.
    """
    loss = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    z = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    hits = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_rows, BLOCK_SIZE):
        rows = start + tl.arange(0, BLOCK_SIZE)
        loss += tl.load(LOSS_rows_ptr + rows, mask=rows < n_rows, other=0.0)
        if Z_rows_ptr is not None:
            z += tl.load(Z_rows_ptr + rows, mask=rows < n_rows, other=0.0)
        if HIT_ptr is not None:
            y = tl.load(Y_ptr + rows, mask=rows < n_rows, other=ignore_index)
            top = tl.load(TOP_rows_ptr + rows, mask=rows < n_rows, other=-1)
            hits += ((y != ignore_index) & (y == top)).to(tl.float32)
    tl.store(LOSS_ptr, (tl.sum(loss) + 0.0 * tl.load(STATS_ptr)).to(LOSS_ptr.dtype.element_ty))
    if Z_rows_ptr is not None:
        tl.store(Z_ptr, (tl.sum(z) + 0.0 * tl.load(STATS_ptr + 1)).to(Z_ptr.dtype.element_ty))
    if HIT_ptr is not None:
        tl.store(HIT_ptr, tl.sum(hits) * tl.load(STATS_ptr + 3))


def stats_key(n_rows: int, n_cols: int, itemsize: int) -> registry.Key:
    return ((n_rows - 1).bit_length() if n_rows > 1 else 0,)


def _stats_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    block = max(64, min(1 << key[0], 4096))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 4))


def _stats_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    return [LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 4)) for block in (256, 512, 1024, 2048, 4096, 8192)]


STATS = Tunable(
    "cross_entropy",
    "stats",
    kernels=(_cross_entropy_stats_kernel, _cross_entropy_sum_kernel),
    key=stats_key,
    dims=DIMS,
    heuristic=_stats_heuristic,
    safe=lambda target, key: LaunchConfig({"BLOCK_SIZE": 256}, 1),
    space=_stats_space,
)


def launch_stats(op: str, target, weight, n_cols: int, options: Options, device: torch.device) -> torch.Tensor:
    """The numbers of a call on the device, [8] fp32 (`_cross_entropy_stats_kernel`); the targets are checked.

    On a GPU the check is an assertion on the device, without a synchronisation: one extra small launch.
    """
    if INTERPRET or env.get("LIGER_HW_CHECK_TARGETS"):
        check_targets(op, target, n_cols, options.ignore_index)
    n_rows = target.shape[0]
    stats = torch.empty(8, dtype=torch.float32, device=device)
    ok = torch.empty(1, dtype=torch.int32, device=device)
    plan = STATS.plan(device, stats_key(n_rows, n_cols, 0))
    numbers = n_rows, n_cols, options.ignore_index, options.label_smoothing, options.lse_square_scale, options.softcap
    args = (target, weight, stats, ok, *numbers)
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


SUMMED = Options(reduction=SUM)
"""For `launch_sum` of other losses' rows."""


def launch_sum(
    rows: RowResults, stats: torch.Tensor, options: Options, dtype: torch.dtype, target: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) from the rows' results; an absent one is an empty tensor.

    target: of these rows, for the token accuracy
    """
    loss, z_loss, top = rows
    hits = None
    assert loss is not None
    if options.reduction == NONE:
        if options.return_token_accuracy:
            hits = ((target == top) & (target != options.ignore_index)).float()
    else:
        n_rows, device = loss.shape[0], loss.device
        loss = torch.empty((), dtype=dtype, device=device)
        z_loss = None if z_loss is None else torch.empty((), dtype=dtype, device=device)
        hits = torch.empty((), dtype=torch.float32, device=device) if options.return_token_accuracy else None
        plan = STATS.plan(device, stats_key(n_rows, 0, 0))
        args = stats, *rows, None if hits is None else target, loss, z_loss, hits, n_rows, options.ignore_index
        launch(plan, _cross_entropy_sum_kernel, (1,), args)
    top = top if options.return_predicted_tokens else None
    return loss, *(absent(stats) if t is None else t for t in (z_loss, hits, top))


# -- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _scale_tile(G_ptr, OUT_ptr, at, mask, scale):
    g = tl.load(G_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.where(g == 0.0, g, g * scale)
    if OUT_ptr is None:
        tl.store(G_ptr + at, g.to(G_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(OUT_ptr + at, g.to(OUT_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_kernel(G_ptr, OUT_ptr, GO_ptr, STATS_ptr, n_elements, TAIL: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """OUT = G * GO, over the denominator of the mean where the forward left that to backward. In place, where OUT is
    None, a factor of 1 returns at once.

    TAIL: n_elements is no multiple of 16; the first program takes the rest, so that the tiles' accesses stay wide.
    """
    scale = tl.load(GO_ptr).to(tl.float32)
    if STATS_ptr is not None:
        scale *= tl.load(STATS_ptr + 4)
    n_tiled = n_elements
    if TAIL:
        n_tiled = n_elements // 16 * 16
    stop = n_tiled
    if OUT_ptr is None:
        stop = tl.where(scale == 1.0, 0, n_tiled)
    first = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    for start in tl.range(first, stop, tl.num_programs(0) * BLOCK_SIZE):
        at = start + tl.arange(0, BLOCK_SIZE)
        _scale_tile(G_ptr, OUT_ptr, at, at < n_tiled, scale)
    if TAIL:
        at = n_tiled + tl.arange(0, 16).to(tl.int64)
        _scale_tile(G_ptr, OUT_ptr, at, (at < n_elements) & (first == 0), scale)


@triton.jit(do_not_specialize=["n_rows"])
def _scale_rows_kernel(
    G_ptr, OUT_ptr, GO_ptr, GO_stride, n_rows, n_cols, VECTOR: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """OUT = G * GO, one factor a row. In place, without OUT, the tiles of rows with a factor of 1 are skipped."""
    cols = tl.arange(0, BLOCK_SIZE)
    for row in tl.range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        scale = tl.load(GO_ptr + row * GO_stride).to(tl.float32)
        head = row_head(row * n_cols, VECTOR)
        n_body = body_width(n_cols, head, VECTOR)
        stop = n_body
        if OUT_ptr is None:
            stop = tl.where(scale == 1.0, 0, n_body)
        for start in tl.range(0, stop, BLOCK_SIZE):
            mask = start + cols < n_body
            _scale_tile(G_ptr, OUT_ptr, body_start(row * n_cols, head, VECTOR) + start + cols, mask, scale)
        if VECTOR > 1:
            edge = edge_columns(head, n_body, n_cols, VECTOR)
            _scale_tile(G_ptr, OUT_ptr, body_start(row * n_cols, head, VECTOR) + edge, edge < n_cols - head, scale)


def _bwd_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    block = max(64, min(key[0], 2048))
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16 // key[2]), ctas_per_mp=8)


def _bwd_space(target: Target, key: registry.Key) -> list[LaunchConfig]:
    tiles = ({"BLOCK_SIZE": block} for block in (512, 1024, 2048, 4096, 8192))
    return tile_space(target, tiles, (1, 2, 4, 8, 16), per_thread=(4, 32), ctas=(2, 4, 8, 16))


BWD = Tunable(
    "cross_entropy",
    "bwd",
    kernels=(_scale_kernel, _scale_rows_kernel),
    key=row_key,
    dims=DIMS,
    heuristic=_bwd_heuristic,
    safe=lambda target, key: LaunchConfig({"BLOCK_SIZE": 256}, 1, ctas_per_mp=1),
    space=_bwd_space,
    valid=persistent_misfit,
)


def _bwd(grad, grad_output, stats):
    out = torch.empty_like(grad)
    _bwd_in_place(grad, grad_output, stats, out)
    return out


def _bwd_in_place(grad, grad_output, stats, out=None) -> None:
    """out (or grad itself, without out) = grad * grad_output, a scalar or one factor for each row of grad."""
    n_elements = grad.numel()
    if not n_elements:
        return
    per_row = grad_output.dim() == 1
    n_rows, n_cols = grad.shape if grad.dim() == 2 else (1, n_elements)
    plan = BWD.plan(grad.device, row_key(n_rows, n_cols, grad.dtype.itemsize))
    if per_row:
        args = (grad, out, grad_output, grad_output.stride(0), n_rows, n_cols)
        vector = row_vector(grad, out) if grad.dim() == 2 else 1
        launch(plan, _scale_rows_kernel, (min(plan.programs, n_rows),), args, (vector,))
    else:
        programs = min(plan.programs, cdiv(n_elements, plan.config.blocks["BLOCK_SIZE"]))
        denominators = stats if stats.numel() else None
        args = (grad, out, grad_output, denominators, n_elements)
        launch(plan, _scale_kernel, (programs,), args, (n_elements % 16 != 0,))


def _bwd_reference(grad, grad_output, stats):
    wide = torch.promote_types(grad.dtype, torch.float32)
    scale = grad_output.to(wide)
    scale = scale * stats[4] if stats.numel() else scale
    scale = scale[:, None] if scale.dim() == 1 else scale
    return torch.where(grad == 0, 0.0, grad * scale).to(grad.dtype)


def _bwd_in_place_reference(grad, grad_output, stats):
    grad.copy_(_bwd_reference(grad, grad_output, stats))


def _misfit(grad, grad_output, stats) -> str:
    if grad_output.dim() and grad.dim() != 2:
        return f"grad must be [n_rows, n_cols] for one number a row, got {tuple(grad.shape)}"
    return ""


_SHAPES = "grad [n_rows, *]; grad_output [] | [n_rows]; stats [0] | [5] | [8]"
cross_entropy_bwd = define(
    "cross_entropy_bwd(Tensor grad, Tensor grad_output, Tensor stats) -> Tensor",
    shapes=_SHAPES,
    misfit=_misfit,
    launcher=_bwd,
    reference=_bwd_reference,
    fake=("grad",),
)
cross_entropy_bwd_ = define(
    "cross_entropy_bwd_(Tensor(a!) grad, Tensor grad_output, Tensor stats) -> ()",
    shapes=_SHAPES,
    misfit=_misfit,
    launcher=_bwd_in_place,
    reference=_bwd_in_place_reference,
    fake=(),
)


def scale_gradient(
    grad: torch.Tensor, grad_output: torch.Tensor, stats: torch.Tensor, kept: bool | None = None
) -> torch.Tensor:
    """The gradient that a forward saved, times the incoming one; call it in a backward.

    In place where this backward frees the graph, after which the saved tensor cannot be read; else a new tensor.
    kept: what `graph_is_kept` says, where the caller knows
    """
    if graph_is_kept() if kept is None else kept:
        return cross_entropy_bwd(grad, grad_output, stats)
    cross_entropy_bwd_(grad, grad_output, stats)
    return grad
