"""Grouped products of fused_moe: the rows of each expert times its weights, and the gradients of the weights.

    rows      y[row] = a[row] @ weight[expert of row], or a[token of row] @ weight[expert of row] (a is gathered)
    weights   dweight[expert] = p^T @ q over the expert's rows; p or q may be gathered

A plan's ENGINE is KERNELS, the kernels of this file, or LIBRARY, torch's grouped product. The library takes no indices,
so gathered rows are copied first. It is only used if it needs no further copy, one launch and no synchronisation
(`_uses_library`); else the kernels run with the plan's tiles.

The kernels work on the tiles of `routing.py`. Weights are addressed by strides, so transposed ones need no copy. A
tile's rows past the end of its expert repeat the expert's last row and are never stored, so that a NaN in another
expert's row has no effect.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from ... import private
from ...registry import Key, LaunchConfig, Plan, Target, Tunable, backend, next_power_of_2
from ...runtime.operator import Routine, call_routine, cdiv, launch
from ...runtime.triton_import import tl, triton
from . import routing
from .routing import DIMS, Routing

# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _swizzled(local, n_row_tiles, n_col_tiles, GROUP: tl.constexpr):
    """(tile of rows, tile of columns) of program `local`; GROUP tiles of rows read each tile of columns from cache."""
    group = local // (GROUP * n_col_tiles)
    size = tl.minimum(n_row_tiles - group * GROUP, GROUP)
    inside = local % (GROUP * n_col_tiles)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _rows_tile(
    A_ptr,
    W_ptr,
    Y_ptr,
    Token_ptr,
    expert,
    first_row,
    end,
    first_col,
    A_row_stride,
    W_expert_stride,
    W_col_stride,
    W_inner_stride,
    n_inner,
    n_cols,
    GATHERED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the tile of ROWS rows from first_row on, for an expert whose rows end at `end`."""
    rows = first_row + tl.arange(0, ROWS)
    a_rows = tl.minimum(rows, end - 1)
    if GATHERED:
        a_rows = tl.load(Token_ptr + a_rows)
    a_base = A_ptr + a_rows[:, None].to(tl.int64) * A_row_stride
    cols = first_col + tl.arange(0, BLOCK_N)
    y = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            a = tl.load(a_base + k[None, :])
        else:
            a = tl.load(a_base + k[None, :], mask=(k < n_inner)[None, :], other=0.0)
        w_ptrs = (
            W_ptr
            + expert.to(tl.int64) * W_expert_stride
            + (cols[None, :].to(tl.int64) * W_col_stride + k[:, None] * W_inner_stride)
        )
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs)
        elif EVEN_N:
            w = tl.load(w_ptrs, mask=(k < n_inner)[:, None], other=0.0)
        elif EVEN_K:
            w = tl.load(w_ptrs, mask=(cols < n_cols)[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs, mask=(k < n_inner)[:, None] & (cols < n_cols)[None, :], other=0.0)
        y = tl.dot(a, w, y, input_precision="ieee")
    mask = (rows < end)[:, None] & (cols < n_cols)[None, :]
    out = Y_ptr + first_row.to(tl.int64) * n_cols + (tl.arange(0, ROWS)[:, None] * n_cols + cols[None, :])
    tl.store(out, y.to(Y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fused_moe_rows_kernel(
    A_ptr,
    W_ptr,
    Y_ptr,
    Token_ptr,
    Offsets_ptr,
    Expert_ptr,
    First_ptr,
    A_row_stride,
    W_expert_stride,
    W_col_stride,
    W_inner_stride,
    n_experts,
    n_inner,
    n_cols,
    GATHERED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Y[row] = A[row] @ W[expert], or A[token] @ W[expert] if GATHERED; a program has a tile [BLOCK_M, BLOCK_N].

    If an expert's last tile has at most BLOCK_M // 2 rows, half a tile is computed.
    EVEN_N, EVEN_K: BLOCK_N divides n_cols, BLOCK_K divides n_inner
    """
    n_col_tiles = tl.cdiv(n_cols, BLOCK_N)
    expert = tl.load(Expert_ptr + tl.program_id(0) // n_col_tiles)
    if expert >= n_experts:
        return
    first = tl.load(First_ptr + expert)
    n_row_tiles = tl.load(First_ptr + expert + 1) - first
    row_tile, col_tile = _swizzled(tl.program_id(0) - first * n_col_tiles, n_row_tiles, n_col_tiles, GROUP)
    first_row = tl.load(Offsets_ptr + expert) + row_tile * BLOCK_M
    end = tl.load(Offsets_ptr + expert + 1)
    first_col = col_tile * BLOCK_N
    if BLOCK_M >= 128 and end - first_row <= BLOCK_M // 2:
        _rows_tile(
            *(A_ptr, W_ptr, Y_ptr, Token_ptr, expert, first_row, end, first_col),
            *(A_row_stride, W_expert_stride, W_col_stride, W_inner_stride, n_inner, n_cols),
            *(GATHERED, EVEN_N, EVEN_K, BLOCK_M // 2, BLOCK_N, BLOCK_K),
        )
    else:
        _rows_tile(
            *(A_ptr, W_ptr, Y_ptr, Token_ptr, expert, first_row, end, first_col),
            *(A_row_stride, W_expert_stride, W_col_stride, W_inner_stride, n_inner, n_cols),
            *(GATHERED, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K),
        )


@triton.jit
def _operand(P_ptr, Token_ptr, rows, cols, in_rows, n_cols, row_stride, GATHERED: tl.constexpr, EVEN: tl.constexpr):
    """A tile [BLOCK_K, columns] of one expert's rows; zeros past the expert's last row."""
    at = rows
    if GATHERED:
        at = tl.load(Token_ptr + rows, mask=in_rows, other=0)
    ptrs = P_ptr + at[:, None].to(tl.int64) * row_stride + cols[None, :]
    if EVEN:
        return tl.load(ptrs, mask=in_rows[:, None], other=0.0)
    return tl.load(ptrs, mask=in_rows[:, None] & (cols < n_cols)[None, :], other=0.0)


@triton.jit
def _fused_moe_weights_kernel(
    P_ptr,
    Q_ptr,
    DW_ptr,
    Token_ptr,
    Offsets_ptr,
    Largest_ptr,
    P_row_stride,
    Q_row_stride,
    n_p,
    n_q,
    P_GATHERED: tl.constexpr,
    Q_GATHERED: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
):
    """dW[expert] [n_p, n_q] = p^T @ q over the expert's rows, summed in fp32 and rounded once; zeros without rows.

    The largest experts come first, so that no large expert starts late. A program computes TILES tiles in one loop over
    their steps, so that the next tile is loaded while one is stored.
    """
    p_tiles = tl.cdiv(n_p, BLOCK_M)
    q_tiles = tl.cdiv(n_q, BLOCK_N * TILES)
    expert = tl.load(Largest_ptr + tl.program_id(0) // (p_tiles * q_tiles))
    p_tile, q_tile = _swizzled(tl.program_id(0) % (p_tiles * q_tiles), p_tiles, q_tiles, GROUP)
    begin = tl.load(Offsets_ptr + expert)
    end = tl.load(Offsets_ptr + expert + 1)
    p_cols = p_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = q_tile * (BLOCK_N * TILES)
    out = DW_ptr + (expert.to(tl.int64) * n_p + p_tile * BLOCK_M) * n_q
    out += tl.arange(0, BLOCK_M)[:, None] * n_q
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if TILES == 1:
        q_cols = first_col + tl.arange(0, BLOCK_N)
        for start in range(begin, end, BLOCK_K):
            rows = start + tl.arange(0, BLOCK_K)
            p = _operand(P_ptr, Token_ptr, rows, p_cols, rows < end, n_p, P_row_stride, P_GATHERED, EVEN_M)
            q = _operand(Q_ptr, Token_ptr, rows, q_cols, rows < end, n_q, Q_row_stride, Q_GATHERED, EVEN_N)
            acc = tl.dot(tl.trans(p), q, acc, input_precision="ieee")
        mask = (p_cols < n_p)[:, None] & (q_cols < n_q)[None, :]
        tl.store(out + q_cols[None, :], acc.to(DW_ptr.dtype.element_ty), mask=mask)
    else:
        n_steps = tl.maximum(tl.cdiv(end - begin, BLOCK_K), 1)
        n_tiles = tl.minimum(TILES, tl.cdiv(n_q - first_col, BLOCK_N))
        for step in range(0, n_tiles * n_steps):
            start = begin + step % n_steps * BLOCK_K
            q_cols = first_col + step // n_steps * BLOCK_N + tl.arange(0, BLOCK_N)
            rows = start + tl.arange(0, BLOCK_K)
            p = _operand(P_ptr, Token_ptr, rows, p_cols, rows < end, n_p, P_row_stride, P_GATHERED, EVEN_M)
            q = _operand(Q_ptr, Token_ptr, rows, q_cols, rows < end, n_q, Q_row_stride, Q_GATHERED, EVEN_N)
            acc = tl.dot(tl.trans(p), q, acc, input_precision="ieee")
            if step % n_steps == n_steps - 1:
                mask = (p_cols < n_p)[:, None] & (q_cols < n_q)[None, :]
                tl.store(out + q_cols[None, :], acc.to(DW_ptr.dtype.element_ty), mask=mask)
                acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)


# -- tunables --------------------------------------------------------------------------------------------------------

KERNELS, LIBRARY = 1, 2
"""Values of ENGINE."""


def product_key(n_tokens: int, hidden: int, inner: int, n_experts: int, top_k: int, itemsize: int) -> Key:
    """(hidden, inner, n_experts, log2 bucket of the mean number of rows of an expert, itemsize)."""
    rows = n_tokens * top_k // max(1, n_experts)
    return hidden, inner, n_experts, (max(1, rows) - 1).bit_length(), itemsize


def _tile(
    block_m: int, block_n: int, block_k: int, warps: int, stages: int, engine: int = KERNELS, **more: int
) -> LaunchConfig:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8, "ENGINE": engine, **more}
    return LaunchConfig(blocks, warps, stages)


def _shared_bytes(config: LaunchConfig, itemsize: int) -> int:
    blocks = config.blocks
    return (blocks["BLOCK_M"] + blocks["BLOCK_N"]) * blocks["BLOCK_K"] * itemsize * config.num_stages


_LIBRARY_ROWS = {_fused_moe_rows_kernel: 6, _fused_moe_weights_kernel: 7}
"""log2 bucket of the mean rows of an expert from which the library is chosen; below, reading weights dominates."""
_LIBRARY_COLUMNS = {_fused_moe_rows_kernel: 4096, _fused_moe_weights_kernel: 768}
"""Fewest columns of a product for which the library is chosen: the copy of gathered rows costs less in wide products.
Gradients of weights gain more from the library."""
_SMALL_EXPERT = 1 << 22
"""Elements of a down projection below which an expert is small: its products have few steps."""


def _multiplies_from_shared(target: Target) -> bool:
    return backend(target.vendor).multiplies_from_shared(target)


def _product(variant: str, kernel, columns, library_columns=None, may_use_library: bool = True) -> Tunable:
    """The tunable of one product. columns: a function (hidden, inner) -> columns of the result.

    library_columns: a function (hidden, inner) -> columns compared with _LIBRARY_COLUMNS; default `columns`
    may_use_library: False: the heuristic never chooses the library (for a product with half the work of `up`, but the
    same copy); the tuner tries it
    """
    is_weights = kernel is _fused_moe_weights_kernel
    library_columns = library_columns or columns
    single = {"TILES": 1} if is_weights else {}

    def has_several_tiles(key: Key) -> bool:
        """Whether a program may compute several tiles: for gradients of weights with few rows, and so few steps."""
        return is_weights and key[3] < _LIBRARY_ROWS[kernel]

    def engine(target: Target, key: Key) -> int:
        if not backend(target.vendor).has_grouped_gemm(target) or key[3] < _LIBRARY_ROWS[kernel] or not may_use_library:
            return KERNELS
        return LIBRARY if library_columns(*key[:2]) >= _LIBRARY_COLUMNS[kernel] else KERNELS

    def heuristic(target: Target, key: Key) -> LaunchConfig:
        """The largest tiles whose stages fit shared memory, no taller than an expert's rows, no wider than the result.

        Tiles below 64 * 128 are bound by memory and have the warps of 64 * 128. Small experts have few steps: rows get
        one more stage; weights, if matrix units read shared memory, half the warps. On devices where they do, a
        program of weights over few rows computes 16 tiles.
        """
        if key[4] > 2:
            return _tile(64, 32, 32, target.warps(64 * 32, 16, 8), 2, **single)
        is_small = key[0] * key[1] < _SMALL_EXPERT
        rows = 128 if is_weights else max(16, min(128, 1 << key[3]))
        widest = max(32, next_power_of_2(columns(*key[:2])))
        if has_several_tiles(key) and _multiplies_from_shared(target):
            depth, stages = (64, 3) if key[3] > 5 else (32, 4)
            return _tile(rows, min(128, widest), depth, target.warps(rows * 128, 128, 8), stages, TILES=16)
        for cols, depth, stages in ((256, 64, 4), (256, 64, 3), (128, 64, 3), (128, 64, 2), (128, 32, 2)):
            if cols == 256 and (is_weights or rows < 128 or (stages == 4 and not is_small)):
                continue
            cols = min(cols, widest)
            per_thread = 128 if is_weights and is_small and _multiplies_from_shared(target) else 64
            warps = target.warps(max(rows * cols, 64 * 128), per_thread, 8)
            config = _tile(rows, cols, depth, warps, stages, engine(target, key), **single)
            if _shared_bytes(config, key[4]) <= target.shared_memory:
                break
        return config

    def space(target: Target, key: Key) -> list[LaunchConfig]:
        configs = []
        if backend(target.vendor).has_grouped_gemm(target):
            chosen = heuristic(target, key)
            configs.append(replace(chosen, blocks={**chosen.blocks, "ENGINE": LIBRARY}))
        lowest = 32 if is_weights else min(64, 1 << key[3])
        sizes = ((32, 128), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (128, 256), (256, 128))
        several = (single, {"TILES": 16}) if has_several_tiles(key) else (single,)
        knobs = itertools.product(sizes, (32, 64, 128), (4, 8), (2, 3, 4), several)
        for (block_m, block_n), block_k, warps, stages, tiles in knobs:
            config = _tile(block_m, block_n, block_k, warps, stages, **tiles)
            accumulators = block_m * block_n // (warps * target.warp_size)
            shared = _shared_bytes(config, key[4])
            hides_latency = 4 * shared >= target.shared_memory  # enough loads are in flight
            if block_m >= lowest and shared <= target.shared_memory and hides_latency and 32 <= accumulators <= 128:
                configs.append(config)
        return configs

    def valid(config: LaunchConfig, key: Key) -> str | None:
        if config.blocks["ENGINE"] not in (KERNELS, LIBRARY):
            return f"ENGINE must be {KERNELS} or {LIBRARY}"
        too_small = [name for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if config.blocks[name] < 16]
        return f"{', '.join(too_small)} must be at least 16" if too_small else None

    return Tunable(
        "fused_moe",
        variant,
        kernels=(kernel,),
        key=product_key,
        dims=DIMS,
        heuristic=heuristic,
        safe=lambda target, key: _tile(32, 32, 32, target.warps(1024, 8, 4), 1, **single),
        space=space,
        neutral=frozenset({"num_stages", "hint", "GROUP"}),
        valid=valid,
        version=2 if is_weights else 1,
    )


UP = _product("up", _fused_moe_rows_kernel, lambda hidden, inner: 2 * inner)
DOWN = _product("down", _fused_moe_rows_kernel, lambda hidden, inner: hidden)
DOWN_BWD = _product("down_bwd", _fused_moe_rows_kernel, lambda hidden, inner: inner, may_use_library=False)
UP_BWD = _product("up_bwd", _fused_moe_rows_kernel, lambda hidden, inner: hidden)
DOWN_WEIGHTS = _product("down_weights", _fused_moe_weights_kernel, lambda hidden, inner: inner)
UP_WEIGHTS = _product(
    "up_weights", _fused_moe_weights_kernel, lambda hidden, inner: hidden, lambda hidden, inner: 2 * inner
)
TUNABLES = (UP, DOWN, DOWN_BWD, UP_BWD, DOWN_WEIGHTS, UP_WEIGHTS)

# -- launchers -------------------------------------------------------------------------------------------------------


def _uses_library(plan: Plan, *operands: torch.Tensor) -> bool:
    """Whether the plan's engine is the library, and it computes this product in one launch: bf16 and `_is_aligned`.

    When kernels are compiled ahead, the operands may be on another device than the plan's target.
    """
    if plan.config.blocks["ENGINE"] != LIBRARY or not backend(plan.target.vendor).has_grouped_gemm(plan.target):
        return False
    return all(t.dtype is torch.bfloat16 and t.device.type != "cpu" and _is_aligned(t) for t in operands)


def _is_aligned(t: torch.Tensor) -> bool:
    """Whether one of t's last two strides is 1, t is aligned to 16 bytes, and the other strides and the sizes (except a
    matrix's number of rows) are multiples of 8 elements."""
    by_row, by_col = t.stride()[-2:]
    outer, length = (by_row, t.shape[-1]) if by_col == 1 else (by_col, t.shape[-2])
    in_eights = not any(n % 8 for n in (outer, *t.stride()[:-2], *(t.shape[-2:] if t.dim() == 3 else t.shape[1:])))
    return min(by_row, by_col) == 1 and outer >= length and in_eights and not t.data_ptr() % 16


def _library_rows(a, weight, token, offsets, inner_axis: int, gathered: bool) -> torch.Tensor:
    a = a.index_select(0, token) if gathered else a
    return private.grouped_matmul(a, weight.mT if inner_axis == 2 else weight, offs=offsets[1:])


def _library_weights(p, q, token, offsets, gathered: tuple[bool, bool]) -> torch.Tensor:
    p, q = (t.index_select(0, token) if is_gathered else t for t, is_gathered in zip((p, q), gathered))
    return private.grouped_matmul(p.mT, q, offs=offsets[1:])


_ROWS = Routine(
    _library_rows,
    lambda a, weight, token, offsets, inner_axis, gathered: a.new_empty(len(token), weight.shape[3 - inner_axis]),
)
_WEIGHTS = Routine(
    _library_weights, lambda p, q, token, offsets, gathered: p.new_empty(len(offsets) - 1, p.shape[1], q.shape[1])
)


def _divide_evenly(plan: Plan, **sizes: int) -> tuple[bool, ...]:
    """Whether the plan's blocks divide the sizes, so that loads need no masks."""
    return tuple([size % plan.config.blocks[name] == 0 for name, size in sizes.items()])


def rows_product(
    tunable: Tunable, key: Key, a: torch.Tensor, weight: torch.Tensor, inner_axis: int, gathered: bool, routes: Routing
) -> torch.Tensor:
    """[T * K, n_cols]: each row of a times its expert's weight.

    a: [T * K, n_inner], sorted by expert; if gathered [T, n_inner], a row for each token
    weight: [E, ., .], whose axis inner_axis (1 or 2) is summed over
    """
    n_rows, n_experts = routes.token.shape[0], weight.shape[0]
    n_cols, n_inner = weight.shape[3 - inner_axis], weight.shape[inner_axis]
    plan = tunable.plan(a.device, key)
    if _uses_library(plan, a, weight):
        return call_routine(plan, _ROWS, (a, weight, routes.token, routes.offsets, inner_axis, gathered))
    y = torch.empty((n_rows, n_cols), dtype=a.dtype, device=a.device)
    blocks = plan.config.blocks
    tiles = routing.tiles_of(routes.offsets, n_rows, blocks["BLOCK_M"])
    args = (a, weight, y, routes.token, routes.offsets, tiles.expert, tiles.first, a.stride(0), weight.stride(0))
    args = (*args, weight.stride(3 - inner_axis), weight.stride(inner_axis), n_experts, n_inner, n_cols)
    flags = (gathered, *_divide_evenly(plan, BLOCK_N=n_cols, BLOCK_K=n_inner))
    launch(plan, _fused_moe_rows_kernel, (tiles.count * cdiv(n_cols, blocks["BLOCK_N"]),), args, flags)
    return y


def weights_product(
    tunable: Tunable, key: Key, p: torch.Tensor, q: torch.Tensor, gathered: tuple[bool, bool], routes: Routing
) -> torch.Tensor:
    """[E, n_p, n_q]: p^T @ q over each expert's rows. gathered: whether p, and q, has a row for each token instead."""
    n_experts, n_p, n_q = routes.largest.shape[0], p.shape[1], q.shape[1]
    plan = tunable.plan(p.device, key)
    if _uses_library(plan, p, q):
        return call_routine(plan, _WEIGHTS, (p, q, routes.token, routes.offsets, gathered))
    dweight = torch.empty((n_experts, n_p, n_q), dtype=p.dtype, device=p.device)
    blocks = plan.config.blocks
    grid = (n_experts * cdiv(n_p, blocks["BLOCK_M"]) * cdiv(n_q, blocks["BLOCK_N"] * blocks["TILES"]),)
    args = (p, q, dweight, routes.token, routes.offsets, routes.largest, p.stride(0), q.stride(0), n_p, n_q)
    launch(plan, _fused_moe_weights_kernel, grid, args, (*gathered, *_divide_evenly(plan, BLOCK_M=n_p, BLOCK_N=n_q)))
    return dweight
