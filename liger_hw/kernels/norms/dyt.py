"""Dynamic tanh, a replacement of norms: y = gamma * tanh(alpha * x) + beta. gamma, beta: [n_cols]; alpha: a scalar.

Arithmetic and sums are fp32; y is rounded once. Saved for backward: x, alpha, gamma (and beta, for its dtype).
Backward, with t = tanh(alpha * x) and d = dy * gamma * (1 - t^2):  dx = alpha * d,  dalpha = sum of d * x,
dgamma = sum over rows of dy * t,  dbeta = sum over rows of dy.

Source: Zhu, Chen, He, LeCun and Liu, "Transformers without Normalization", https://arxiv.org/abs/2503.10622
"""

from __future__ import annotations

from typing import Any

import torch

from ... import registry
from ...registry import Key, LaunchConfig, Sample, Target, next_power_of_2, normal, row_key, tile_space
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import OperatorFunction, cdiv, define, dense, empty_like, launch, no_weight, row_major, rows_of
from ...runtime.sharding import RowsRule
from ...runtime.triton_import import tl, triton
from ..rows.blocks import (
    aligned_programs,
    count_tiles,
    first_columns,
    load_columns,
    load_tile,
    store_columns,
    store_tile,
    tile_mask,
    tile_rows,
    to_fp32,
    touched_mask,
    whole_mask,
)
from ..rows.reduce import column_sum, column_sum_tunable, param_parts, params_dtype, partial_sums
from ..rows.row import row_pad, row_vector
from ..rows.tuning import persistent_misfit, row_tunable, rows_per_program


def dyt_reference(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = gamma.to(wide) * torch.tanh(alpha.to(wide) * x.to(wide))
    return (y if beta is None else y + beta.to(wide)).to(x.dtype)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _tanh_and_slope(x, FULL: tl.constexpr):
    """(tanh(x), (1 - tanh(x)^2) / 4) in fp32 from one exponential: with more, the kernel would be compute-bound.

    FULL: accurate to a few units in fp32's last place. Otherwise to 2e-6, far below the rounding of half precision:
    1 / u is then rsqrt(u)^2, which has half the instructions of a division.
    """
    decay = tl.exp2(-2.885390082 * tl.abs(x))  # exp(-2 |x|)
    u = 1.0 + decay
    s = x * x
    if FULL:
        inverse = 1.0 / u
        series = s * (-0.3333333333 + s * (0.1333333333 + s * (-0.05396825397 + s * 0.02186948854)))
        close = s < 0.0625
    else:
        root = tl.rsqrt(u)
        inverse = root * root
        series = s * (-0.3333333333 + s * 0.1333333333)
        close = s < 0.01
    far = ((1.0 - decay) * inverse).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    t = tl.where(close, x + x * series, far.to(tl.float32, bitcast=True))  # near 0, 1 - decay would cancel
    return t, decay * inverse * inverse


@triton.jit(do_not_specialize=["n_rows"])
def _dyt_fwd_kernel(
    X_ptr,
    Alpha_ptr,
    Gamma_ptr,
    Beta_ptr,
    Y_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (r, c) computes row tile r in column tile c."""
    wait_for_previous(DEPENDENT)
    tile = tl.program_id(0).to(tl.int64)
    rows = tile_rows(tile, ROWS, VECTOR)
    row_mask = rows < n_rows
    pad = row_pad(tile * n_cols, VECTOR)
    positions, exist = first_columns(tl.program_id(1) * BLOCK_SIZE, n_cols, BLOCK_SIZE, 0, pad, VECTOR)
    mask = tile_mask(row_mask, exist)
    touched = touched_mask(row_mask, positions, pad, n_cols, VECTOR)
    x = load_tile(X_ptr, rows, X_row_stride, positions, mask, LOAD_HINT, touched, VECTOR).to(tl.float32)
    gamma = load_columns(Gamma_ptr, positions, exist, pad).to(tl.float32)
    t, _ = _tanh_and_slope(tl.load(Alpha_ptr).to(tl.float32) * x, X_ptr.dtype.element_ty == tl.float32)
    y = gamma[None, :] * t
    if Beta_ptr is not None:
        y += load_columns(Beta_ptr, positions, exist, pad).to(tl.float32)[None, :]
    store_tile(Y_ptr, rows, n_cols, positions, y, mask, whole_mask(row_mask, positions, pad, n_cols, VECTOR), VECTOR)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _dyt_bwd_kernel(
    DY_ptr,
    X_ptr,
    Alpha_ptr,
    Gamma_ptr,
    DX_ptr,
    Partial_ptr,
    Alpha_partial_ptr,
    DY_row_stride,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    HAS_BETA: tl.constexpr,
    VECTOR: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (p, c) takes the row tiles p, p + programs, ... of column tile c; its sums stay in registers.

    Partial_ptr: for each p a row of dgamma, then of dbeta if HAS_BETA. Alpha_partial_ptr: dalpha of each program. Both
    are None if the parameters need no gradient. ONE_TILE: each program has one tile, without a loop.
    """
    wait_for_previous(DEPENDENT)
    pid = tl.program_id(0)
    pad = row_pad(pid * n_cols, VECTOR)
    positions, exist = first_columns(tl.program_id(1) * BLOCK_SIZE, n_cols, BLOCK_SIZE, 0, pad, VECTOR)
    alpha = tl.load(Alpha_ptr).to(tl.float32)
    gamma = 4.0 * load_columns(Gamma_ptr, positions, exist, pad).to(tl.float32)  # 4: the slope comes divided by 4
    if Partial_ptr is not None:
        dalpha = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)  # summed after the loop
        dgamma = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
        dbeta = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    end, step = (pid + 1, 1) if ONE_TILE else (n_tiles, tl.num_programs(0))
    for tile in tl.range(pid, end, step, num_stages=STAGES):
        rows = tile_rows(tile, ROWS, VECTOR)
        row_mask = rows < n_rows
        mask = tile_mask(row_mask, exist)
        touched = touched_mask(row_mask, positions, pad, n_cols, VECTOR)
        x = to_fp32(load_tile(X_ptr, rows, X_row_stride, positions, mask, LOAD_HINT, touched, VECTOR))
        dy = to_fp32(load_tile(DY_ptr, rows, DY_row_stride, positions, mask, LOAD_HINT, touched, VECTOR))
        t, slope = _tanh_and_slope(alpha * x, X_ptr.dtype.element_ty == tl.float32)
        d = dy * slope
        if Partial_ptr is not None:
            dalpha += d * x
            dgamma += dy * t
            if HAS_BETA:
                dbeta += dy
        dx = alpha * gamma[None, :] * d
        whole = whole_mask(row_mask, positions, pad, n_cols, VECTOR)
        store_tile(DX_ptr, rows, n_cols, positions, dx, mask, whole, VECTOR)
    if Partial_ptr is not None:
        partial_ptr = Partial_ptr + pid.to(tl.int64) * n_cols * (1 + HAS_BETA)
        store_columns(partial_ptr, positions, tl.sum(dgamma, axis=0), exist, pad)
        if HAS_BETA:
            store_columns(partial_ptr + n_cols, positions, tl.sum(dbeta, axis=0), exist, pad)
        program_dalpha = tl.sum(tl.sum(dalpha, axis=0) * gamma, axis=0)
        alpha_ptr = Alpha_partial_ptr + pid * tl.num_programs(1) + tl.program_id(1)
        tl.store(alpha_ptr, program_dalpha.to(Alpha_partial_ptr.dtype.element_ty))


# -- tunables --------------------------------------------------------------------------------------------------------


def _tile(target: Target, key: Key, max_elements: int) -> tuple[int, int, int]:
    """(columns, rows, factor) of a tile of at most `max_elements`; a thread has 1 / factor of the usual elements. Small
    inputs take tiles of fewer rows, so that the device has enough programs."""
    block = min(key[0], 128)
    elements, programs = key[0] << key[1], 16 * target.multiprocessors
    if elements >= programs * 4096:
        return block, max_elements // block, 1
    if elements >= programs * 1024:
        return block, 1024 // block, 2
    return block, rows_per_program(target, key[1], max_elements // block), 1


def _fwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Tiles of 32 rows and 128 columns, 32 elements a thread. Smaller inputs take smaller tiles, so that each
    multiprocessor has at least eight programs. With at most as many rows as multiprocessors a tile has one row."""
    max_tile = next_power_of_2((key[0] << key[1]) // (8 * target.multiprocessors))
    if 1 << key[1] <= target.multiprocessors:
        block = min(key[0], max(128, min(1024, max_tile)))
        return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, target.warps(block, 8, 8))
    block, rows, factor = _tile(target, key, 4096)
    rows = max(rows, min(2048, max_tile) // (2 * block))
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, target.warps(block * rows, 32 // factor, 8))


def _bwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Half the forward's tile, with two more in flight, in four programs a multiprocessor.

    With at most as many rows as multiprocessors, each program has one tile of all rows, so that no other launch sums
    dgamma and dbeta. This tile has at least 16 columns, or 32 if there are columns for two programs a multiprocessor.
    """
    if 1 << key[1] <= target.multiprocessors:
        rows = 1 << key[1]
        narrowest = 32 if key[0] >= 64 * target.multiprocessors else 16
        block = min(key[0], max(narrowest, 1024 // rows) if key[1] else 4096)
        warps = target.warps(block * rows, 8, 8) if key[1] else target.warps(block, 2, 16)
        return LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, warps, 1, 4)
    block, rows, factor = _tile(target, key, 2048)
    tile = block * rows
    stages = 3 if 4 * 2 * 2 * tile * key[2] <= target.shared_memory else 2
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, target.warps(tile, 16 // factor, 16), stages, 4)


def _space(target: Target, key: Key, **persistent: Any) -> list[LaunchConfig]:
    blocks = sorted({min(key[0], width) for width in (256, 512, 1024, 2048, 4096)})
    tiles = [{"BLOCK_SIZE": block, "ROWS": rows} for block in blocks for rows in (1, 2, 4, 8, 16, 32)]
    return tile_space(target, tiles, (2, 4, 8, 16), per_thread=(4, 32), hints=("none", "stream"), **persistent)


def _bwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    return _space(target, key, stages=(1, 2, 3, 4), ctas=(1, 2, 3, 4, 6), staged_bytes=2 * key[2])


FWD = row_tunable(
    "dyt",
    "fwd",
    _dyt_fwd_kernel,
    heuristic=_fwd_heuristic,
    space=_space,
    neutral=frozenset({"num_stages", "hint", "num_warps", "BLOCK_SIZE", "ROWS"}),
)
BWD = row_tunable("dyt", "bwd", _dyt_bwd_kernel, heuristic=_bwd_heuristic, space=_bwd_space, valid=persistent_misfit)
DW = column_sum_tunable("dyt", columns=lambda n_rows, n_cols: 2 * n_cols)  # dgamma and dbeta

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(x, alpha, gamma, beta):
    x, gamma, beta = row_major(x), dense(gamma), dense(beta)
    n_rows, n_cols, stride = rows_of(x)
    y = empty_like(x, x.dtype)
    if n_rows:
        plan = FWD.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
        blocks = plan.config.blocks
        vector = row_vector(x, y)
        grid = (count_tiles(n_rows, blocks["ROWS"], vector), cdiv(n_cols + vector - 1, blocks["BLOCK_SIZE"]))
        launch(plan, _dyt_fwd_kernel, grid, (x, alpha, gamma, beta, y, stride, n_rows, n_cols), (vector,))
    return y


def _bwd(dy, x, alpha, gamma, beta, needs_params):
    dy, x, gamma = row_major(dy), row_major(x), dense(gamma)
    n_rows, n_cols, x_stride = rows_of(x)
    dx = empty_like(x, x.dtype)
    parts, dtype = param_parts(needs_params, gamma, beta), params_dtype(x, gamma, beta)
    if not n_rows:
        return dx, x.new_zeros(parts * n_cols, dtype=dtype), alpha.new_zeros(alpha.shape if needs_params else 0)
    plan = BWD.plan(x.device, row_key(n_rows, n_cols, x.itemsize))
    blocks = plan.config.blocks
    # vector 1 keeps all rows in one tile where they fit; with more tiles another launch sums dgamma
    vector = 1 if n_rows <= blocks["ROWS"] else row_vector(x, dy, dx)
    n_tiles, col_tiles = count_tiles(n_rows, blocks["ROWS"], vector), cdiv(n_cols + vector - 1, blocks["BLOCK_SIZE"])
    programs = aligned_programs(plan.programs // col_tiles, n_tiles, vector)
    partial = alpha_partial = None
    if parts:
        partial = partial_sums(x, programs, parts * n_cols, dtype)
        alpha_partial = partial_sums(x, programs * col_tiles, 1, alpha.dtype)
    strides = rows_of(dy)[2], x_stride
    args = (dy, x, alpha, gamma, dx, partial, alpha_partial, *strides, n_rows, n_cols, n_tiles)
    launch(plan, _dyt_bwd_kernel, (programs, col_tiles), args, (parts == 2, vector, programs == n_tiles))
    if not parts:
        return dx, no_weight(x), no_weight(x)
    return dx, column_sum(DW, partial, dtype), column_sum(DW, alpha_partial, alpha.dtype).view(alpha.shape)


class DyTFunction(OperatorFunction):
    sharding, params = RowsRule(inputs=("x",), weights=("alpha", "gamma", "beta")), ("alpha", "gamma", "beta")
    fwd = define(
        "dyt_fwd(Tensor x, Tensor alpha, Tensor gamma, Tensor? beta) -> Tensor y",
        shapes="x [*, n]; alpha of 1; gamma [n]; beta [n]",
        launcher=_fwd,
        reference=lambda *tensors: dyt_reference(*tensors).contiguous(),
        fake=("x",),
    )
    bwd = define(
        "dyt_bwd(Tensor dy, Tensor x, Tensor alpha, Tensor gamma, Tensor? beta, bool needs_params)"
        " -> (Tensor dx, Tensor dgamma_dbeta, Tensor dalpha)",
        shapes="x, dy [*, n]; alpha of 1; gamma [n]; beta [n]",
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    """gamma * tanh(alpha * x) + beta, over the last dimension.

    x: [..., n_cols]; alpha: one element of any shape; gamma: [n_cols]; beta: [n_cols] or None. fp32, fp16 or bf16 (fp64
    too on the CPU). Returns [..., n_cols] in x's dtype.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    return DyTFunction.apply(x, alpha, gamma, beta)


class LigerDyT(torch.nn.Module):
    """Dynamic tanh layer: y = gamma * tanh(alpha * x) + beta.

    hidden_size: size of the last dimension; beta=False: no beta; init_alpha: the initial value of alpha.
    """

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = torch.nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = torch.nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", torch.nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]; returns the same shape."""
        return liger_dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


WORKLOADS = {
    "llama_7b": (16384, 4096),
    "llama_13b": (8192, 5120),
    "llama_70b": (8192, 8192),
    "vit_large": (50432, 1024),
    "dit_xl": (16384, 1152),
}


def sample(sizes, dtype, device, generator, *, beta=True) -> Sample:
    n_rows, n_cols = sizes
    drawn = normal(dtype, device, generator)
    alpha = torch.full((1,), 0.5, dtype=dtype, device=device).requires_grad_()
    return Sample(
        args=(drawn(n_rows, n_cols), alpha, drawn(n_cols), drawn(n_cols) if beta else None),
        grad_reduction=n_rows * n_cols,
        moved=5 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register_file(__name__, tunables=(FWD, BWD, DW), options=({}, {"beta": False}))
