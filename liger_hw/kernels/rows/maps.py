"""What softmax and sparsemax share: maps of a row to a row of its shape, y = f(x), whose backward needs y alone.

Program p takes the row tiles p, p + programs, ...; a tile holds whole rows where they fit, else rows are read in column
tiles and again, from cache, for the result. Both kernels of such an op take

    forward   X, Y, X_row_stride, n_rows, n_cols, n_tiles         backward   DY, Y, DX, DY_row_stride, ...

then WHOLE_ROW (2 where, besides, every program has one tile and there are few: no loop needs to stand before its load)
and the plan's BLOCK_SIZE, ROWS, STAGES, LOAD_CACHE and LOAD_EVICT.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key
from ...runtime.dependent_launch import begin, few_elements
from ...runtime.operator import define, empty_like, launch, row_major, rows_of
from .tuning import DIMS, blocks_misfit, row_warps, rows_per_program, safe

# -- tunables --------------------------------------------------------------------------------------------------------

_WIDEST_TILE = 32768
"""Columns a program holds at most: one fp32 copy of the row is half the registers of a multiprocessor."""


def heuristic(target: Target, key: Key, tensors: int) -> LaunchConfig:
    """Whole rows, several programs a multiprocessor; wide fp32 rows one, that has its next row in flight.

    Rows whose fp32 copies would spill go in tiles, on a grid so small that the second sweep finds some of them in L2.
    While all rows fit the device at once each has a program of its own: 257 x 777 takes softmax 1.64 us forward and
    1.99 backward on the H200, 1.76 and 2.33 two rows at a time (2026-11-22).
    """
    n_cols, rows_bucket, itemsize = key
    if n_cols <= 16384:
        few = 1 << rows_bucket <= 4 * target.multiprocessors
        rows = 1 if few else rows_per_program(target, rows_bucket, max(1, min(16, 2048 // n_cols)))
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": rows}, row_warps(target, few, n_cols * rows))
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


def row_tunables(
    op: str,
    fwd: tuple[Any, ...],
    bwd: tuple[Any, ...],
    heuristic: Callable[[Target, Key, int], LaunchConfig] = heuristic,
) -> tuple[Tunable, Tunable]:
    """The `fwd` and `bwd` tunables of an op from the jit functions of each, the kernel first."""

    def tunable(variant: str, kernels: tuple[Any, ...], tensors: int) -> Tunable:
        return Tunable(
            op,
            variant,
            kernels=(*kernels, begin),
            key=row_key,
            dims=DIMS,
            heuristic=lambda target, key: heuristic(target, key, tensors),
            safe=safe,
            space=lambda target, key: _space(target, key, tensors),
            valid=blocks_misfit,
            ahead=few_elements,
        )

    return tunable("fwd", fwd, 1), tunable("bwd", bwd, 2)


# -- operators -------------------------------------------------------------------------------------------------------


def row_operators(
    fwd: Tunable, bwd: Tunable, reference: Callable[..., Any], bwd_reference: Callable[..., Any]
) -> tuple:
    """The operators `<op>_fwd(x) -> y` and `<op>_bwd(dy, y) -> dx`; `bwd_reference(dy, y)` computes the latter in
    torch."""

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
            fake=lambda x: x.new_empty(x.shape),
        ),
        define(
            f"{bwd.op}_bwd(Tensor dy, Tensor y) -> Tensor",
            launcher=backward,
            reference=lambda dy, y: bwd_reference(dy, y).to(y.dtype).contiguous(),
            fake=lambda dy, y: y.new_empty(y.shape),
        ),
    )


def _launch(tunable: Tunable, tensors: tuple[torch.Tensor, ...], strided: torch.Tensor) -> None:
    """Over row tiles, on the plan's persistent grid if it has one; `strided`: the tensor whose rows may lie apart."""
    n_rows, n_cols, stride = rows_of(strided)
    if not n_rows:
        return
    plan = tunable.plan(strided.device, row_key(n_rows, n_cols, strided.itemsize))
    blocks = plan.config.blocks
    n_tiles = -(-n_rows // blocks["ROWS"])
    grid = (min(plan.programs or n_tiles, n_tiles),)
    args = (*tensors, stride, n_rows, n_cols, n_tiles)
    once = grid[0] == n_tiles <= 4 * plan.target.multiprocessors
    launch(plan, tunable.kernels[0], grid, args, ((blocks["BLOCK_SIZE"] >= n_cols) * (1 + once),))
