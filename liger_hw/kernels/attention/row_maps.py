"""What softmax and sparsemax share: maps of a row to a row of its shape, y = f(x), whose backward needs y alone.

Each direction of such an op has two kernels: one that holds a tile of whole rows in registers, and one that reads rows
too wide for that in tiles of columns, once for their sums and again, from cache, for the result. Program p takes the
row tiles p, p + programs, ... Both take

    forward   X, Y, X_row_stride, n_rows, n_cols, n_tiles         backward   DY, Y, DX, DY_row_stride, ...

then constexpr flags, and the plan's BLOCK_SIZE, ROWS, STAGES and others. The flags of the first kernel are ONE_TILE
(every program has one tile, so that no loop needs to stand before its load), NARROW (the row's fp32 copy would take
more than a quarter of the registers) and VECTOR (see `rows.aligned`); that of the second is VECTOR.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key
from ...runtime.dependent_launch import is_small_launch
from ...runtime.operator import cdiv, define, empty_like, launch, row_major, rows_of
from ..rows.aligned import row_vector
from ..rows.tuning import DIMS, blocks_misfit, row_warps, rows_per_program, safe

# -- tunables --------------------------------------------------------------------------------------------------------

_WIDEST_TILE = 32768
"""Columns a program holds at most: one fp32 copy of the row is half the registers of a multiprocessor."""


def _heuristic(target: Target, key: Key, tensors: int) -> LaunchConfig:
    """Whole rows, several programs a multiprocessor; wide fp32 rows one, that has its next row in flight.

    Rows whose fp32 copies would spill go in tiles, on a grid so small that the second sweep finds some of them in L2.
    While all rows fit the device at once, each has a program of its own.
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
    block = 16384 // tensors
    ctas = max(1, min(4, target.l2 // (2 * target.multiprocessors * row_bytes)))
    room = target.shared_memory // (ctas * tensors * block * itemsize)
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, target.warps(block, 16, 16), max(1, min(3, 1 + room)), ctas)


def _space(target: Target, key: Key, tensors: int) -> list[LaunchConfig]:
    n_cols, _, itemsize = key
    return [
        LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, warps, stages, ctas, hint)
        for block in sorted({n_cols} | ({4096, 8192, 16384} if n_cols > 16384 else set()))
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16, 32)
        for stages, ctas in ((1, 0), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4))
        for hint in ("none", "stream")
        if rows * block <= max(block, 8192)
        and block <= _WIDEST_TILE
        and 4 <= rows * block // (warps * target.warp_size) <= 64
        and tensors * (stages - 1) * rows * block * itemsize * max(1, ctas) <= target.shared_memory
    ]


def row_map_tunable(op: str, variant: str, whole_rows_kernel: Any, looped_kernel: Any, tensors: int) -> Tunable:
    """`<op>.<variant>`; tensors: how many the kernels read."""
    return Tunable(
        op,
        variant,
        kernels=(whole_rows_kernel, looped_kernel),
        key=row_key,
        dims=DIMS,
        heuristic=lambda target, key: _heuristic(target, key, tensors),
        safe=safe,
        space=lambda target, key: _space(target, key, tensors),
        valid=blocks_misfit,
        dependent_launch=is_small_launch,
    )


# -- operators -------------------------------------------------------------------------------------------------------


def row_map_operators(
    fwd: Tunable, bwd: Tunable, reference: Callable[..., Any], bwd_reference: Callable[..., Any]
) -> tuple:
    """The operators `<op>_fwd(x) -> y` and `<op>_bwd(dy, y) -> dx`; `bwd_reference(dy, y)` is the latter in torch."""

    def forward(x):
        x = row_major(x)
        y = empty_like(x, x.dtype)
        _launch(fwd, (x, y), x)
        return y

    def backward(dy, y):
        dy, y = row_major(dy), y.contiguous()
        dx = empty_like(y, y.dtype)
        _launch(bwd, (dy, y, dx), dy)
        return dx

    return (
        define(
            f"{fwd.op}_fwd(Tensor x) -> Tensor",
            launcher=forward,
            reference=lambda x: reference(x).contiguous(),
            fake=("x",),
        ),
        define(
            f"{bwd.op}_bwd(Tensor dy, Tensor y) -> Tensor",
            launcher=backward,
            reference=lambda dy, y: bwd_reference(dy, y).to(y.dtype).contiguous(),
            fake=("y",),
        ),
    )


def _launch(tunable: Tunable, tensors: tuple[torch.Tensor, ...], strided: torch.Tensor) -> None:
    """Over row tiles, on the plan's persistent grid if it has one; `strided`: the tensor whose rows may have gaps."""
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
        launch(plan, looped_kernel, grid, args, (row_vector(n_cols, stride, *tensors),))
        return
    one_tile = grid[0] == n_tiles <= 4 * plan.target.multiprocessors
    narrow = rows * block > plan.target.registers // 4
    vector = row_vector(n_cols, stride, *tensors, width=block)
    launch(plan, whole_rows_kernel, grid, args, (one_tile, narrow, vector))
