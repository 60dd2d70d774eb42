"""What softmax and sparsemax share: maps of a row to a row of its shape, y = f(x), whose backward needs y alone.

Backward has one kernel pair for both, dx = w * (dy - shift): for softmax w = y and shift = sum(y * dy); for sparsemax
w = 1 where y > 0, else 0, and shift is the mean of dy there.

Each direction has two kernels: one that holds a tile of whole rows in registers, and one that reads a row too wide for
that in tiles of columns, once for its sums and again, from cache, for the result. For rows of odd width see
rows/row.py. Program p takes the tiles, or the rows, p, p + programs, ... Both kernels take

    forward   X, Y, X_row_stride, n_rows, n_cols, n_tiles         backward   DY, Y, DX, DY_row_stride, ...

then constexpr flags, and the plan's BLOCK_SIZE, ROWS, STAGES and others. The flags of the first kernel are ONE_TILE
(every program has one tile and no loop), NARROW (the tile's fp32 copy would take more than a quarter of the registers)
and VECTOR; the second kernel takes VECTOR alone. In backward SPARSE is the first flag of both.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key, tile_space
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import cdiv, define, empty_like, launch, row_major, rows_of
from ...runtime.triton_import import tl, triton
from ..rows.blocks import keep_narrow
from ..rows.row import (
    align_down,
    body_start,
    body_width,
    edge_columns,
    load_row,
    row_head,
    row_pad,
    row_vector,
    store_row,
)
from ..rows.tuning import row_tunable, row_warps, rows_per_program


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _row_map_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    SPARSE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    NARROW: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of whole rows; y is contiguous."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    first = tl.program_id(0)
    end, step = (first + 1, 1) if ONE_TILE else (n_tiles, tl.num_programs(0))
    for tile in tl.range(first, end, step, num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        dense = align_down(rows * n_cols, VECTOR) + cols[None, :]
        dy_ptrs = DY_ptr + align_down(rows * DY_row_stride, VECTOR) + cols[None, :]
        y = load_row(Y_ptr + dense, exist, pad, n_cols, 0.0, VECTOR, LOAD_HINT)
        dy = load_row(dy_ptrs, exist, pad, n_cols, 0.0, VECTOR, LOAD_HINT)
        if SPARSE:
            inside = y > 0.0
            total = tl.sum(tl.where(inside, dy, 0.0).to(tl.float32), axis=1)
            shift = (total / tl.maximum(tl.sum(inside.to(tl.float32), axis=1), 1.0))[:, None]
            dx = tl.where(inside, keep_narrow(dy, shift).to(tl.float32) - shift, 0.0)
        else:
            shift = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)[:, None]
            if NARROW or not ONE_TILE:  # in a small launch there are enough registers for the fp32 values
                y, dy = keep_narrow(y, shift), keep_narrow(dy, shift)
            dx = y.to(tl.float32) * (dy.to(tl.float32) - shift)
        store_row(DX_ptr + dense, dx, exist, pad, n_cols, VECTOR)


@triton.jit
def lane_sums(x, LANES: tl.constexpr):
    """[LANES] sums, each of the adjacent elements of one thread's vector load: accumulators in few registers."""
    return tl.sum(tl.reshape(x, [LANES, x.shape[0] // LANES]), axis=1)


@triton.jit
def _load_weighted(Y_ptr, DY_ptr, cols, mask, SPARSE: tl.constexpr, EVICT: tl.constexpr):
    """(w, dy) of some columns in fp32, all if mask is None; where SPARSE, dy is 0 outside the support."""
    if mask is None:
        w = tl.load(Y_ptr + cols, eviction_policy=EVICT).to(tl.float32)
        dy = tl.load(DY_ptr + cols, eviction_policy=EVICT).to(tl.float32)
    else:
        w = tl.load(Y_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if SPARSE:
        dy = tl.where(w > 0.0, dy, 0.0)
        w = (w > 0.0).to(tl.float32)
    return w, dy


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _row_map_bwd_looped_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    SPARSE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows wider than BLOCK_SIZE; y is contiguous."""
    wait_for_previous(DEPENDENT)
    block_cols = tl.arange(0, BLOCK_SIZE)
    dx_type = DX_ptr.dtype.element_ty
    LANES: tl.constexpr = BLOCK_SIZE * dx_type.primitive_bitwidth // 128
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        head = row_head(row * n_cols, VECTOR)
        dense = body_start(row * n_cols, head, VECTOR)
        y_ptr, dx_ptr = Y_ptr + dense, DX_ptr + dense
        dy_ptr = DY_ptr + body_start(row * DY_row_stride, head, VECTOR)
        n_body = body_width(n_cols, head, VECTOR)
        n_full = n_body // BLOCK_SIZE
        tail = n_full * BLOCK_SIZE + block_cols
        w, dy = _load_weighted(y_ptr, dy_ptr, tail, tail < n_body, SPARSE, "")
        weights, products = lane_sums(w, LANES), lane_sums(w * dy, LANES)
        for i in tl.range(0, n_full, num_stages=STAGES):
            w, dy = _load_weighted(y_ptr, dy_ptr, i * BLOCK_SIZE + block_cols, None, SPARSE, "evict_last")
            products += lane_sums(w * dy, LANES)
            weights += lane_sums(w, LANES)
        shift = tl.sum(products)
        support = tl.sum(weights)
        if VECTOR > 1:
            edge = edge_columns(head, n_body, n_cols, VECTOR)
            w_edge, dy_edge = _load_weighted(y_ptr, dy_ptr, edge, edge < n_cols - head, SPARSE, "")
            shift += tl.sum(w_edge * dy_edge)
            support += tl.sum(w_edge)
        if SPARSE:
            shift = shift / tl.maximum(support, 1.0)
        if VECTOR > 1:
            tl.store(dx_ptr + edge, (w_edge * (dy_edge - shift)).to(dx_type), mask=edge < n_cols - head)
        w, dy = _load_weighted(y_ptr, dy_ptr, tail, tail < n_body, SPARSE, "")
        tl.store(dx_ptr + tail, (w * (dy - shift)).to(dx_type), mask=tail < n_body)
        for done in tl.range(0, n_full, num_stages=STAGES):
            at = (n_full - 1 - done) * BLOCK_SIZE + block_cols  # backwards: what was read last is still in cache
            w, dy = _load_weighted(y_ptr, dy_ptr, at, None, SPARSE, "evict_first")
            tl.store(dx_ptr + at, (w * (dy - shift)).to(dx_type), eviction_policy="evict_first")


_WIDEST_TILE = 32768
"""Columns a program holds at most: one fp32 copy of the row is half the registers of a multiprocessor."""


def _heuristic(target: Target, key: Key, tensors: int) -> LaunchConfig:
    """Whole rows, several programs a multiprocessor; for wide fp32 rows one program, that prefetches its next row.

    Rows whose fp32 copies would spill go in tiles of at most 32 KiB, by as many warps as are allowed, so that the
    second sweep follows soon and finds the row in L2. If all rows fit the device at once, each has its own program.
    """
    n_cols, rows_bucket, itemsize = key
    if n_cols <= 16384:
        resident = 1 << rows_bucket <= 4 * target.multiprocessors
        rows = 1 if resident else rows_per_program(target, rows_bucket, max(1, min(16, 2048 // n_cols)))
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": rows}, row_warps(target, resident, n_cols * rows))
    row_bytes = tensors * n_cols * itemsize
    if n_cols <= _WIDEST_TILE and (itemsize <= 2 or tensors == 1):
        pipelined = itemsize > 2 and row_bytes <= target.shared_memory
        stages, ctas = (2, 1) if pipelined else (1, 0)
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": 1}, target.warps(n_cols, 32), stages, ctas)
    block = 32768 // itemsize
    if tensors == 1:
        block = min(block, max(8192, n_cols // 8))
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, target.warps(block, 8, 32))


def _space(target: Target, key: Key, tensors: int) -> list[LaunchConfig]:
    n_cols, _, itemsize = key
    tiles = [
        {"BLOCK_SIZE": block, "ROWS": rows}
        for block in sorted({n_cols} | ({4096, 8192, 16384} if n_cols > 16384 else set()))
        for rows in (1, 2, 4, 8, 16, 32)
        if rows * block <= max(block, 8192) and (rows == 1 or block == n_cols) and block <= _WIDEST_TILE
    ]
    warps, how = (1, 2, 4, 8, 16, 32), {"per_thread": (4, 64), "hints": ("none", "stream")}
    persistent = {"stages": (2, 3), "ctas": (1, 2, 4), "staged_bytes": tensors * itemsize}
    return [*tile_space(target, tiles, warps, **how), *tile_space(target, tiles, warps, **how, **persistent)]


def _misfit(config: LaunchConfig, key: Key) -> str | None:
    wider = config.blocks["BLOCK_SIZE"] < key[0]
    return "ROWS must be 1 where a row is wider than BLOCK_SIZE" if wider and config.blocks["ROWS"] > 1 else None


def row_map(
    op: str, kernels: tuple[Any, Any], reference: Callable[..., Any], bwd_reference: Callable[..., Any], *, sparse: bool
) -> tuple[Tunable, Tunable, Any, Any]:
    """The tunables `<op>.fwd` and `<op>.bwd`, and the operators `<op>_fwd(x) -> y` and `<op>_bwd(dy, y) -> dx`.

    kernels: the two forward kernels; reference, bwd_reference: the operators in torch
    sparse: whether backward has sparsemax's weights, see the top of this file
    """

    def tunable(variant: str, kernels: tuple[Any, Any], tensors: int) -> Tunable:
        return row_tunable(
            op,
            variant,
            *kernels,
            heuristic=lambda target, key: _heuristic(target, key, tensors),
            space=lambda target, key: _space(target, key, tensors),
            valid=_misfit,
        )

    fwd = tunable("fwd", kernels, tensors=1)
    bwd = tunable("bwd", (_row_map_bwd_kernel, _row_map_bwd_looped_kernel), tensors=2)

    def forward(x):
        x = row_major(x)
        y = empty_like(x, x.dtype)
        _launch(fwd, (x, y), x, ())
        return y

    def backward(dy, y):
        dy, y = row_major(dy), y.contiguous()
        dx = empty_like(y, y.dtype)
        _launch(bwd, (dy, y, dx), dy, (sparse,))
        return dx

    forward_operator = define(
        f"{op}_fwd(Tensor x) -> Tensor y",
        shapes="x [*, n]",
        launcher=forward,
        reference=lambda x: reference(x).contiguous(),
        fake=("x",),
    )
    backward_operator = define(
        f"{op}_bwd(Tensor dy, Tensor y) -> Tensor dx",
        shapes="y, dy [*, n]",
        launcher=backward,
        reference=lambda dy, y: bwd_reference(dy, y).to(y.dtype).contiguous(),
        fake=("y",),
    )
    return fwd, bwd, forward_operator, backward_operator


def _launch(tunable: Tunable, tensors: tuple[torch.Tensor, ...], strided: torch.Tensor, flags: tuple) -> None:
    """Launch over row tiles, on a persistent grid if the plan has one; strided: the tensor whose rows may have gaps."""
    n_rows, n_cols, stride = rows_of(strided)
    if not n_rows:
        return
    plan = tunable.plan(strided.device, row_key(n_rows, n_cols, strided.itemsize))
    block, rows = plan.config.blocks["BLOCK_SIZE"], plan.config.blocks["ROWS"]
    n_tiles = cdiv(n_rows, rows)
    grid = (min(plan.programs or n_tiles, n_tiles),)
    args = (*tensors, stride, n_rows, n_cols, n_tiles)
    whole_rows_kernel, looped_kernel = tunable.kernels
    if block < n_cols:
        vector = row_vector(*tensors)
        launch(plan, looped_kernel, grid, args, (*flags, vector))
        return
    one_tile = grid[0] == n_tiles <= 4 * plan.target.multiprocessors
    narrow = rows * block > plan.target.registers // 4
    vector = row_vector(*tensors, width=block)
    launch(plan, whole_rows_kernel, grid, args, (*flags, one_tile, narrow, vector))
