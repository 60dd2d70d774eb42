"""The code that all cross entropies on rows of logits use: options, checks of targets, and three launches.

launch_stats    the denominators of a mean; asserts that the targets are in bounds
launch_rows     losses and gradient of every row, by the sweeps of softmax_rows.py
launch_sum      sums of the rows' results, in a fixed order

Backward multiplies this gradient by the incoming gradient (loss_gradient.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence

import torch

from ... import env, private, registry
from ...registry import LaunchConfig, Target, Tunable
from ...runtime.operator import check, check_flags, check_floats, check_ignore_index, check_indices, launch
from ...runtime.triton_import import INTERPRET, tl, triton
from ..rows.row import LINE, body_start, body_width, row_head, row_vector
from ..rows.tuning import DIMS
from .softmax_rows import rows_heuristic, rows_safe, rows_space, scan_row, tanh, write_gradient, write_zeros

NONE, MEAN, SUM = REDUCTIONS = "none", "mean", "sum"


@dataclass
class CrossEntropyOutput:
    """The result of a cross entropy with a return_* option; None for the options that are not set.

    z_loss: the part of the loss that lse_square_scale adds, reduced like the loss; predicted_tokens: [n_rows] int64,
    the first column of the row's largest logit, -1 in ignored rows; token_accuracy: the share of counted rows whose
    predicted token is the target (per row with reduction="none"). Only the loss has a gradient.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


class Options(NamedTuple):
    """The options that `cross_entropy_options` checked. softcap: 0.0 for none."""

    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = MEAN
    softcap: float = 0.0
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    use_token_scaling: bool = False

    @property
    def extra(self) -> tuple[bool, bool, bool]:
        """Whether z-loss, token accuracy and predicted tokens are returned beside the loss."""
        return self[5:8]

    @property
    def needs_top(self) -> bool:
        return self.return_token_accuracy or self.return_predicted_tokens

    def scales_in_backward(self, dtype: torch.dtype) -> bool:
        """Whether backward, not the forward, divides by the mean's denominator: in fp16 p / n_rows underflows."""
        return dtype is torch.float16 and self.reduction == MEAN


def cross_entropy_options(
    op: str,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = MEAN,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    use_token_scaling: bool = False,
) -> Options:
    """Raises `TypeError` for an option of a wrong type, `ValueError` for an invalid value."""
    check_ignore_index(op, ignore_index)
    check_floats(op, label_smoothing=label_smoothing, lse_square_scale=lse_square_scale)
    check_flags(
        op,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        use_token_scaling=use_token_scaling,
    )
    if not 0.0 <= label_smoothing <= 1.0:
        check(False, op, f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if reduction not in REDUCTIONS:
        check(False, op, f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    flags = bool(return_z_loss), bool(return_token_accuracy), bool(return_predicted_tokens), bool(use_token_scaling)
    numbers = ignore_index, float(lse_square_scale), float(label_smoothing)
    return Options(*numbers, reduction, checked_softcap(op, softcap), *flags)


def check_arguments(op: str, rows: torch.Tensor, target: torch.Tensor, n_cols: int, weight: Any = None) -> None:
    """Raise unless target fits rows [n_rows, ...] of n_cols classes and the class weight needs no gradient."""

    def hint() -> str:
        if tuple(target.shape) == (n_cols,):
            return "; it has one element per class: are input and weight, or rows and classes, swapped?"
        too_many = target.dim() > 1 and target.numel() == rows.shape[0]
        return "; flatten it: target.flatten()" if too_many else ""

    check_indices(op, "target", target, rows, hint)
    if weight is None:
        return
    check(isinstance(weight, torch.Tensor), op, f"the class weight must be a tensor, got {type(weight).__name__}")
    check(not weight.requires_grad, op, "no gradient for the class weight; detach it")


def checked_softcap(op: str, softcap: float | None) -> float:
    """The softcap, 0.0 for None. Raises unless it is positive and finite."""
    if softcap is None:
        return 0.0
    check_floats(op, softcap=softcap)
    if not 0.0 < softcap < float("inf"):
        check(False, op, f"softcap must be positive and finite, or None, got {softcap}")
    return float(softcap)


def pack(outputs: Sequence[torch.Tensor], options: Options) -> torch.Tensor | CrossEntropyOutput:
    """The loss, or a CrossEntropyOutput where a return_* option is set. outputs: (loss, z_loss, hits, top)."""
    loss, *extra = outputs
    if not any(options.extra):
        return loss
    return CrossEntropyOutput(loss, *(t if returned else None for t, returned in zip(extra, options.extra)))


def absent(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor for a result that is not returned: an operator cannot return None."""
    return like.new_empty(0)


# -- targets -----------------------------------------------------------------------------------------------------------


class TargetError(IndexError, AssertionError):
    """A target out of bounds: an IndexError as in torch on the CPU, and an AssertionError as in Liger Kernel."""


def check_targets(op: str, target: torch.Tensor, n_cols: int, ignore_index: int) -> None:
    """Raise a `TargetError` for the first row whose target is out of bounds. Synchronises on a GPU."""
    bad = (target != ignore_index) & ((target < 0) | (target >= n_cols))
    if bad.any():
        row = int(bad.nonzero()[0])
        raise TargetError(
            f"{op}: target[{row}] = {int(target[row])} is out of bounds: expected 0 <= target < {n_cols} "
            f"or ignore_index={ignore_index}"
        )


def check_in_range(op: str, target: torch.Tensor | None, n_cols: int | torch.Tensor, ignore_index: int) -> None:
    """`check_targets` on the CPU or with LIGER_HW_CHECK_TARGETS=1, else an assertion on the device. Does nothing inside
    torch.compile, or for fake tensors, which have no values."""
    if type(target) is not torch.Tensor or torch.compiler.is_compiling():
        return
    if target.device.type == "cpu" or env.LIGER_HW_CHECK_TARGETS:
        check_targets(op, target.reshape(-1), int(n_cols), ignore_index)
    elif target.device.type != "meta":
        inside = (target == ignore_index) | ((target >= 0) & (target < n_cols))
        assert_on_device(inside.all(), f"{op}: target out of bounds; LIGER_HW_CHECK_TARGETS=1 names the row")


def assert_on_device(holds: torch.Tensor, message: str) -> None:
    """An assertion that does not synchronise. Devices for which torch has none get no error; the row's loss is nan."""
    try:
        private.assert_async(holds, message)
    except NotImplementedError:
        pass


# -- rows --------------------------------------------------------------------------------------------------------------


# A program accesses one element of these tensors: alignment gains nothing, and a chunk may begin at any row.
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
    LOAD_HINT: tl.constexpr,
):
    """One program per row. DX may be X: a program reads each element of the row before it writes it.

    STATS: see `_cross_entropy_stats_kernel`. VECTOR: as in rows/row.py; 0 where the padding between rows may be
    accessed and DX has the stride of X.
    """
    # The first sweep keeps the row in cache for the second sweep, which is the last to read it.
    AGAIN_EVICT: tl.constexpr = "evict_first" if LOAD_HINT == "evict_last" else ""
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

    # Read before the first sweep, whose reductions are the barrier before another warp writes the gradient at y.
    inside = (y >= 0) & (y < n_cols)
    y_read = tl.where(inside, y, 0)  # an invalid target is not used as an index; its row becomes nan
    s_y = tl.load(X_ptr + (y_read - head)).to(tl.float32)
    if BIAS_ptr is not None:
        s_y += tl.load(BIAS_ptr + y_read).to(tl.float32)
    softcap = None
    if SOFTCAP:
        softcap = tl.load(STATS_ptr + 7)
        s_y = softcap * tanh(s_y * (1.0 / softcap))

    lse, _, weighted, argmax, x_tail, x_edge = scan_row(
        X_ptr, BIAS_ptr, W_ptr, head, n_body, n_full, n_cols, n_stored, softcap, 1.0,
        SOFTCAP, SMOOTHING, False, ARGMAX, BLOCK_SIZE, STAGES, LOAD_HINT, VECTOR,
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
    """`rows_heuristic`, with tiles of 16384 columns for rows of more than 65536."""
    config = rows_heuristic(target, key)
    if key[0] <= 65536:
        return config
    return LaunchConfig({"BLOCK_SIZE": 16384}, target.warps(16384, 32, 16), hint=config.hint)


def rows_tunable(op: str, key, dims: tuple[str, ...] = DIMS, heuristic=loss_heuristic) -> Tunable:
    """The `<op>.fwd` tunable of an op that uses `launch_rows`."""
    rules = {"dims": dims, "heuristic": heuristic, "safe": rows_safe, "space": rows_space, "version": 2}
    return Tunable(op, "fwd", kernels=(_cross_entropy_fwd_kernel,), key=key, **rules)


class RowResults(NamedTuple):
    """Results [n_rows] of the row kernel, None if not computed.

    top: the first column of the largest logit, -1 in ignored rows
    """

    loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
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
    uses_padding: bool = False,
) -> None:
    """Compute losses and gradient of x [n, n_cols], for the rows row_start to row_start + n - 1 of target and results.

    dx: the buffer for the gradient, which may be x, or None; row_grads: the incoming gradient of each row, contiguous,
    a factor of dx; uses_padding: the padding between rows of x may be accessed, so that accesses are wide at any
    n_cols; dx then has the stride of x
    """
    n_cols, per_row = x.shape[1], (target, row_grads, *results)
    if row_start:
        per_row = tuple(t if t is None else t[row_start:] for t in per_row)
    target, row_grads, *outputs = per_row
    args = (
        *(x, target, weight, bias, stats, row_grads, *outputs, dx),
        *(x.stride(0), 0 if dx is None else dx.stride(0), n_cols, options.ignore_index),
    )
    flags = (
        options.scales_in_backward(x.dtype),
        options.label_smoothing != 0.0,
        options.lse_square_scale != 0.0,
        options.softcap != 0.0,
        options.use_token_scaling,
        n_cols <= plan.config.blocks["BLOCK_SIZE"],
        0 if uses_padding else row_vector(x, dx, unit=LINE),
    )
    launch(plan, _cross_entropy_fwd_kernel, (x.shape[0],), args, flags)


def row_buffers(n_rows: int, options: Options, dtype: torch.dtype, device: torch.device) -> RowResults:
    """Buffers for n_rows rows: in `dtype` with reduction="none", in fp32 if they will be summed."""
    loss_dtype = dtype if options.reduction == NONE else torch.float32
    return RowResults(
        torch.empty(n_rows, dtype=loss_dtype, device=device),
        torch.empty(n_rows, dtype=loss_dtype, device=device) if options.return_z_loss else None,
        torch.empty(n_rows, dtype=torch.int64, device=device) if options.needs_top else None,
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
    """One program computes the eight numbers of a call. STATS[0]: the factor of the loss, 1 / sum(w[y]) for MEAN, else
    1; [1]: the factor of the z-loss, 1 / counted rows for MEAN, else 1; [2]: sum(w); [3]: 1 / counted rows; [4]:
    1 / sum(w[y]), or 1 if no row counts; [5] to [7]: the options. OK: whether all targets are in bounds."""
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
    """One program sums the rows' results in a fixed order. If no row counts, STATS' factors are inf and a mean is nan.

    HIT: the share of counted rows with top = target
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
    """STATS, see `_cross_entropy_stats_kernel`. Checks the targets, on a GPU by an assertion on the device."""
    if INTERPRET or env.LIGER_HW_CHECK_TARGETS:
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
    """The check of `launch_stats`, for a loss that does not use STATS. plain: without a kernel."""
    if plain:
        check_in_range(op, target, n_cols, ignore_index)
    else:
        launch_stats(op, target, None, n_cols, Options(ignore_index, reduction=NONE), target.device)


SUMMED = Options(reduction=SUM)
"""The options with which other losses call `launch_sum`."""


def launch_sum(
    rows: RowResults, stats: torch.Tensor, options: Options, dtype: torch.dtype, target: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) from the rows' results; `absent` where the option is not set.

    target: for the token accuracy
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
