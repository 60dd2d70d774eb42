"""Log-probabilities of target tokens from rows of logits, and the gradient of any loss that is computed from them.

For a row of logits x, token y and temperature T, with s = softcap(x + bias) / T, the bias added in fp32:
    lse = log(sum(exp(s)))     logp = s[y] - lse     entropy = lse - sum(softmax(s) * s)     logit_sum = sum(s * T)
    top = the first column of the largest x + bias
    d loss / dx[c] = (a * ([c = y] - p[c]) - b * p[c] * (log p[c] + entropy)) / T, through the softcap
where a = d loss / d logp and b = d loss / d entropy of the row (`coef`, `entropy_coef`). Between the two launches, a
preference or policy loss is a few torch operations on [n_rows] tensors:

    for start, logits, _ in sweep(chunks, x, weight, grads):
        rows = slice(start, start + logits.shape[0])
        row_log_probs(logits, target, out, options, bias=bias, row_start=start)       # fills out.logp[rows], ...
        loss[rows], coef[rows] = my_loss_and_slope(out.logp[rows], ...)                     # slope: d loss / d logp
        row_log_prob_gradients(logits, target, out, coef, options, bias=bias, row_start=start)  # in place

If the slopes depend on a sequence that spans chunks, there are two sweeps: the first calls `row_log_probs` for all
rows, the second `row_log_prob_gradients`.

Rows whose target is ignore_index have logp, entropy and gradient of exactly zero. Their lse is zero too, unless
logit_sum is computed, which reads their logits. A target out of range gives nan in its row, without an assertion.
Everything is computed in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import registry
from ...registry import LaunchConfig, Target, Tunable, columns_key
from ...runtime.operator import check, check_floats, check_ignore_index, launch
from ...runtime.triton_import import tl, triton
from ..rows.row import LINE, body_start, body_width, row_head, row_vector
from ..rows.tuning import DIMS
from .cross_entropy_rows import checked_softcap
from .softmax_rows import rows_heuristic, rows_safe, rows_space, scan_row, tanh, write_gradient, write_zeros

# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["row_start", "ignore_index"])
def _log_prob_rows_kernel(
    X_ptr,
    Y_ptr,
    BIAS_ptr,
    LOGP_ptr,
    LSE_ptr,
    ENTROPY_ptr,
    SUM_ptr,
    TOP_ptr,
    softcap,
    inv_temperature,
    X_row_stride,
    row_start,
    n_cols,
    n_stored,
    ignore_index,
    SOFTCAP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
):
    """One program per row of a chunk, whose first row is row `row_start` of the targets and results.

    The two floats come before the integers: otherwise Triton 3.8.0's LLVM crashes on gfx942 and gfx950 ("Use not
    jointly dominated by defs").
    """
    chunk_row = tl.program_id(0).to(tl.int64)
    row = chunk_row + row_start
    head = row_head(chunk_row * X_row_stride, VECTOR)
    X_ptr += body_start(chunk_row * X_row_stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    if VECTOR > 1:
        n_stored = n_body
    n_full = 0 if ONE_BLOCK else (n_body - 1) // BLOCK_SIZE
    y = tl.load(Y_ptr + row)
    ignored = y == ignore_index
    if SUM_ptr is None:
        if ignored:
            tl.store(LOGP_ptr + row, 0.0)
            tl.store(LSE_ptr + row, 0.0)
            if ENTROPY_ptr is not None:
                tl.store(ENTROPY_ptr + row, 0.0)
            if TOP_ptr is not None:
                tl.store(TOP_ptr + row, -1)
            return
    inside = (y >= 0) & (y < n_cols)
    y_read = tl.where(inside, y, 0)  # an invalid target is not used as an index; its row becomes nan
    s_y = tl.load(X_ptr + (y_read - head)).to(tl.float32)
    if BIAS_ptr is not None:
        s_y += tl.load(BIAS_ptr + y_read).to(tl.float32)
    if SOFTCAP:
        s_y = softcap * tanh(s_y * (1.0 / softcap))
    s_y *= inv_temperature
    ENTROPY: tl.constexpr = ENTROPY_ptr is not None
    SUM: tl.constexpr = SUM_ptr is not None
    TOP: tl.constexpr = TOP_ptr is not None
    lse, entropy, total, top, _, _ = scan_row(
        X_ptr, BIAS_ptr, None, head, n_body, n_full, n_cols, n_stored, softcap, inv_temperature,
        SOFTCAP, SUM, ENTROPY, TOP, BLOCK_SIZE, STAGES, LOAD_HINT, VECTOR,
    )  # fmt: skip
    logp = tl.where(inside, s_y - lse, float("nan"))
    tl.store(LOGP_ptr + row, tl.where(ignored, 0.0, logp))
    tl.store(LSE_ptr + row, lse)
    if ENTROPY_ptr is not None:
        tl.store(ENTROPY_ptr + row, tl.where(ignored, 0.0, entropy))
    if SUM_ptr is not None:
        tl.store(SUM_ptr + row, total)
    if TOP_ptr is not None:
        tl.store(TOP_ptr + row, tl.where(ignored, -1, top))


@triton.jit(do_not_specialize=["row_start", "ignore_index"])
def _log_prob_gradient_kernel(
    X_ptr,
    Y_ptr,
    BIAS_ptr,
    LSE_ptr,
    ENTROPY_ptr,
    A_ptr,
    SOFTMAX_COEF_ptr,
    SMOOTHING_ptr,
    B_ptr,
    DX_ptr,
    X_row_stride,
    DX_row_stride,
    row_start,
    n_cols,
    n_stored,
    ignore_index,
    softcap,
    inv_temperature,
    SOFTCAP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """One program per row of a chunk. DX may be X: the same thread reads and writes an element."""
    chunk_row = tl.program_id(0).to(tl.int64)
    row = chunk_row + row_start
    head = row_head(chunk_row * X_row_stride, VECTOR)
    X_ptr += body_start(chunk_row * X_row_stride, head, VECTOR)
    DX_ptr += body_start(chunk_row * DX_row_stride, head, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    if VECTOR > 1:
        n_stored = n_body
    n_full = 0 if ONE_BLOCK else (n_body - 1) // BLOCK_SIZE
    block_cols = tl.arange(0, BLOCK_SIZE)
    tail_cols = n_full * BLOCK_SIZE + block_cols
    y = tl.load(Y_ptr + row)
    if y == ignore_index:
        write_zeros(DX_ptr, block_cols, tail_cols, head, n_body, n_full, n_cols, n_stored, BLOCK_SIZE, VECTOR)
        return
    a = tl.load(A_ptr + row).to(tl.float32) * inv_temperature
    a = tl.where((y >= 0) & (y < n_cols), a, float("nan"))
    lse = tl.load(LSE_ptr + row)
    softmax_coef = a
    if SOFTMAX_COEF_ptr is not None:
        softmax_coef = tl.load(SOFTMAX_COEF_ptr + row).to(tl.float32) * inv_temperature
    smoothing_term = None
    if SMOOTHING_ptr is not None:
        smoothing_term = -(tl.load(SMOOTHING_ptr + row).to(tl.float32) * inv_temperature)
    b = None
    entropy = None
    if B_ptr is not None:
        b = tl.load(B_ptr + row).to(tl.float32) * inv_temperature
        entropy = tl.load(ENTROPY_ptr + row)
    write_gradient(
        X_ptr, DX_ptr, BIAS_ptr, None, None, None, head, n_body, n_full, n_cols, n_stored,
        softcap if SOFTCAP else None, inv_temperature, y.to(tl.int32) - head, lse, -softmax_coef, -a, smoothing_term,
        b, entropy, BLOCK_SIZE, STAGES, LOAD_EVICT, VECTOR,
    )  # fmt: skip


# -- tunables --------------------------------------------------------------------------------------------------------

HEAD_DIMS = ("n_rows", "hidden", "vocab")


def _rows_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """`rows_heuristic` without a cache hint, as no row is read again. Wide rows have smaller tiles in four stages, if
    shared memory holds the tiles of eight programs."""
    config, tile, stages = rows_heuristic(target, key), 4096, 4
    if key[0] > 2 * tile and 8 * (stages - 1) * tile * key[1] <= target.shared_memory:
        return LaunchConfig({"BLOCK_SIZE": tile}, target.warps(tile, 32, 16), stages)
    return LaunchConfig(config.blocks, config.num_warps, config.num_stages)


def _gradient_heuristic(target: Target, key: registry.Key) -> LaunchConfig:
    """`rows_heuristic` with twice the threads for wide rows, to hide the latency of loads."""
    config = rows_heuristic(target, key)
    block = config.blocks["BLOCK_SIZE"]
    return LaunchConfig(config.blocks, target.warps(block, 16, 16) if key[0] > block else config.num_warps)


def log_prob_tunables(op: str, dims: tuple[str, ...] = DIMS) -> tuple[Tunable, Tunable]:
    """The `<op>.fwd` and `<op>.bwd` tunables of an op that uses the two kernels."""
    rules = {"key": columns_key, "dims": dims, "safe": rows_safe, "space": rows_space}
    return (
        Tunable(op, "fwd", kernels=(_log_prob_rows_kernel,), heuristic=_rows_heuristic, **rules),
        Tunable(op, "bwd", kernels=(_log_prob_gradient_kernel,), heuristic=_gradient_heuristic, **rules),
    )


LOGP, LOGP_GRAD = log_prob_tunables("fused_linear_log_probs", HEAD_DIMS)

# -- launchers -------------------------------------------------------------------------------------------------------


class LogProbOptions(NamedTuple):
    """The options that `log_prob_options` checked. softcap: 0.0 for none."""

    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float = 0.0


def log_prob_options(op: str, ignore_index: int, temperature: float, softcap: float | None = None) -> LogProbOptions:
    """Raises unless temperature and softcap (or None) are positive and finite."""
    check_ignore_index(op, ignore_index)
    check_floats(op, temperature=temperature)
    if not 0.0 < temperature < float("inf"):
        check(False, op, f"temperature must be positive and finite, got {temperature}")
    return LogProbOptions(ignore_index, float(temperature), checked_softcap(op, softcap))


class LogProbs(NamedTuple):
    """Results [n_rows], fp32, None if not computed. top: int64, the largest logit's first column, or -1 if ignored."""

    logp: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    logit_sum: torch.Tensor | None = None
    top: torch.Tensor | None = None


def log_prob_buffers(
    n_rows: int, like: torch.Tensor, *, entropy: bool = False, logit_sum: bool = False, top: bool = False
) -> LogProbs:
    """Buffers for n_rows rows on the device of `like`, in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(like.dtype, torch.float32)

    def rows(dtype: torch.dtype = wide) -> torch.Tensor:
        return torch.empty(n_rows, dtype=dtype, device=like.device)

    sums = rows() if logit_sum else None
    return LogProbs(rows(), rows(), rows() if entropy else None, sums, rows(torch.int64) if top else None)


def row_log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    out: LogProbs,
    options: LogProbOptions,
    *,
    bias: torch.Tensor | None = None,
    row_start: int = 0,
    uses_padding: bool = True,
    tunable: Tunable | None = None,
    plain: bool = False,
) -> None:
    """Fill `out` from logits [n, vocab], for the rows row_start to row_start + n - 1 of target and of `out`.

    target: [n_rows] int64 or int32, contiguous; uses_padding: the padding between rows may be accessed, as in
    buffers of `sweep`; tunable: from `log_prob_tunables`, by default LOGP; plain: use torch operations, no kernel
    """
    n, vocab = logits.shape
    if not n:
        return
    if plain:
        _fill_plain(logits, target, out, options, bias, row_start)
        return
    plan = (tunable or LOGP).plan(logits.device, columns_key(vocab, logits.dtype.itemsize))
    stride = logits.stride(0)
    numbers = *_scaling(options), stride, row_start, vocab, stride if uses_padding else vocab, options.ignore_index
    flags = (
        options.softcap != 0.0,
        vocab <= plan.config.blocks["BLOCK_SIZE"],
        1 if uses_padding else row_vector(logits, unit=LINE),
    )
    launch(plan, _log_prob_rows_kernel, (n,), (logits, target, bias, *out, *numbers), flags)


def row_log_prob_gradients(
    logits: torch.Tensor,
    target: torch.Tensor,
    saved: LogProbs,
    coef: torch.Tensor,
    options: LogProbOptions,
    *,
    entropy_coef: torch.Tensor | None = None,
    softmax_coef: torch.Tensor | None = None,
    smoothing_term: torch.Tensor | None = None,
    dlogits: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    row_start: int = 0,
    uses_padding: bool = True,
    tunable: Tunable | None = None,
    plain: bool = False,
) -> None:
    """Write d loss / d logits to `dlogits`, by default over the logits. Other arguments are as in `row_log_probs`.

    saved: the `out` of `row_log_probs`; coef: d loss / d logp, [n_rows] contiguous; entropy_coef: d loss / d entropy,
    needs saved.entropy; softmax_coef: the factor of softmax(s), by default coef; smoothing_term: added to the gradient
    of every logit (label smoothing)
    """
    n, vocab = logits.shape
    if not n:
        return
    dlogits = logits if dlogits is None else dlogits
    entropy = None if entropy_coef is None else saved.entropy
    saved_and_coefs = saved.lse, entropy, coef, softmax_coef, smoothing_term, entropy_coef
    if plain:
        rows = slice(row_start, row_start + n)
        saved_and_coefs = (t if t is None else t[rows] for t in saved_and_coefs)
        dlogits.copy_(_plain_gradient(logits, target[rows], bias, *saved_and_coefs, options))
        return
    plan = (tunable or LOGP_GRAD).plan(logits.device, columns_key(vocab, logits.dtype.itemsize))
    strides = logits.stride(0), dlogits.stride(0)
    n_stored = min(strides) if uses_padding else vocab
    numbers = *strides, row_start, vocab, n_stored, options.ignore_index, *_scaling(options)
    flags = (
        options.softcap != 0.0,
        vocab <= plan.config.blocks["BLOCK_SIZE"],
        1 if uses_padding else row_vector(logits, dlogits, unit=LINE),
    )
    launch(plan, _log_prob_gradient_kernel, (n,), (logits, target, bias, *saved_and_coefs, dlogits, *numbers), flags)


def _scaling(options: LogProbOptions) -> tuple[float, float]:
    return options.softcap, 1.0 / options.temperature


def scores_reference(logits: torch.Tensor, bias: torch.Tensor | None, options: LogProbOptions) -> torch.Tensor:
    """softcap(logits + bias) / temperature in plain differentiable torch, in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    s = logits.to(wide)
    if bias is not None:
        s = s + bias.expand_as(logits).to(wide)  # so the bias gradient sums rounded rows, as a linear layer's does
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    return s / options.temperature


def log_prob_rows_reference(
    logits: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, options: LogProbOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp, entropy, lse) of every row in plain differentiable torch, in fp32 (fp64 for fp64)."""
    s = scores_reference(logits, bias, options)
    ignored = target == options.ignore_index
    y = target.long().masked_fill(ignored, 0)
    lse = torch.logsumexp(s, -1)
    log_p = s - lse[:, None]
    logp = log_p.gather(1, y[:, None])[:, 0].masked_fill(ignored, 0.0)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)
    return logp, entropy.masked_fill(ignored, 0.0), lse


def top_reference(
    logits: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """The first column of each row's largest logit, -1 in ignored rows."""
    return scores_reference(logits, bias, LogProbOptions()).argmax(-1).masked_fill(target == ignore_index, -1)


@torch.no_grad()
def _fill_plain(logits, target, out: LogProbs, options: LogProbOptions, bias, row_start) -> None:
    rows = slice(row_start, row_start + logits.shape[0])
    y = target[rows]
    logp, entropy, lse = log_prob_rows_reference(logits, y, bias, options)
    if out.logit_sum is None:
        lse = lse.masked_fill(y == options.ignore_index, 0.0)
    else:
        out.logit_sum[rows] = scores_reference(logits, bias, options._replace(temperature=1.0)).sum(-1)
    out.logp[rows], out.lse[rows] = logp, lse
    if out.entropy is not None:
        out.entropy[rows] = entropy
    if out.top is not None:
        out.top[rows] = top_reference(logits, y, bias, options.ignore_index)


@torch.no_grad()
def _plain_gradient(
    logits, target, bias, lse, entropy, coef, softmax_coef, smoothing_term, entropy_coef, options: LogProbOptions
) -> torch.Tensor:
    """The gradient of the given rows, in fp32 (fp64 for fp64). lse may include columns of other ranks' logits."""
    s = scores_reference(logits, bias, options)
    log_p = s - lse[:, None]
    p, is_ignored = log_p.exp(), target == options.ignore_index
    g = -(coef if softmax_coef is None else softmax_coef)[:, None] * p
    if smoothing_term is not None:
        g += smoothing_term[:, None]
    if entropy_coef is not None:
        g -= entropy_coef[:, None] * p * (log_p.masked_fill(p == 0, 0.0) + entropy[:, None])
    g.scatter_add_(1, target.long().masked_fill(is_ignored, 0)[:, None], coef[:, None])
    if options.softcap:
        g *= 1.0 - (s * (options.temperature / options.softcap)).square()
    return (g / options.temperature).masked_fill(is_ignored[:, None], 0.0)
