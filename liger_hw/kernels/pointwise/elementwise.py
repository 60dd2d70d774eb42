"""What elementwise ops share: how a tensor is cut into stretches, the tunables, and rows read where they lie.

An elementwise kernel walks over memory, not over rows: tensors whose rows lie end to end count as one long row, and only
views with a gap between rows are walked row by row, several at once where they are narrow. Of odd column counts, tiles
that lie inside are not masked, so that they keep their 16-byte accesses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, next_power_of_2, row_key
from ...runtime.dependent_launch import begin, few_elements
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton


@triton.jit
def stretch(n_rows, n_cols, TILES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(row, columns, which of them there are, whether that is all) of this program.

    TILES: tiles of a row, 0 where rows lie end to end and count as one. (A constant: one row of 4096 takes 1 us, a division
    by a number of the launch 0.2.) WIDTH: columns of a tile; BLOCK_SIZE // WIDTH rows a tile, of one tile each.
    """
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_SIZE)
    if TILES == 0:
        start = pid.to(tl.int64) * BLOCK_SIZE
        size = n_rows.to(tl.int64) * n_cols
        return pid * 0, start + lanes, start + lanes < size, start + BLOCK_SIZE <= size
    elif WIDTH < BLOCK_SIZE:
        row = pid.to(tl.int64) * (BLOCK_SIZE // WIDTH) + lanes // WIDTH
        cols = lanes % WIDTH
        return row, cols, (row < n_rows) & (cols < n_cols), pid < 0
    else:
        start = (pid % TILES).to(tl.int64) * BLOCK_SIZE
        return (pid // TILES).to(tl.int64), start + lanes, start + lanes < n_cols, start + BLOCK_SIZE <= n_cols


DIMS = ("n_rows", "n_cols")
_ROW = 1024


def _key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    """`row_key`; narrow rows count as fewer rows of `_ROW` columns."""
    if n_cols < _ROW:
        n_rows, n_cols = cdiv(n_rows * n_cols, _ROW), _ROW
    return row_key(n_rows, n_cols, itemsize)


def heuristic(
    target: Target, key: Key, most: int = 16, few: int = 8192, small: int = 512, waves: int = 1
) -> LaunchConfig:
    """One load of `most` bytes a thread and tensor, 1024 elements a program.

    Of 8 bytes, `small` elements a program, where there are at most `few` elements a multiprocessor, of 4 bytes where they
    are a handful: what is short then is threads. (On an H200, swiglu, forward and backward: a row of 4096 columns 2.04 us
    against 2.30, 512 rows of 2048 6.82 against 7.14.)

    waves: 2 where what is more than one wave of resident threads, and not more than two, becomes one of two loads a thread.
    (relu_squared, 512 rows of 8192, on the H200, forward and backward: 11.8 us against 12.2, 2026-11-22.)
    """
    elements = key[0] << key[1]
    if elements <= 128 * target.multiprocessors:
        return LaunchConfig({"BLOCK_SIZE": 256}, target.warps(256, max(1, 4 // key[2]), 8))
    if elements <= few * target.multiprocessors:
        return LaunchConfig({"BLOCK_SIZE": small}, target.warps(small, 8 // key[2], 8))
    resident = target.multiprocessors * target.max_threads_per_multiprocessor * most // key[2]  # elements
    block = 2048 if resident < elements <= waves * resident else 1024
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(1024, most // key[2], 8))


def safe(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 256}, target.warps(256, 8))


def space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_SIZE": block}, warps, hint=hint)
        for block in (256, 512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8, 16)
        for hint in ("none", "stream")
        if 4 <= block // (warps * target.warp_size) <= 32
    ]


def valid(config: LaunchConfig, key: Key) -> str | None:
    return None if set(config.blocks) == {"BLOCK_SIZE"} else f"blocks must be BLOCK_SIZE, got {dict(config.blocks)}"


def elementwise_tunable(op: str, variant: str, *kernels: Any, **limits: int) -> Tunable:
    """A tunable of one BLOCK_SIZE, its kernel first; no knob of it can change a result. limits: the heuristic's."""
    return Tunable(
        op,
        variant,
        kernels=(*kernels, stretch, begin),
        key=_key,
        dims=DIMS,
        heuristic=partial(heuristic, **limits),
        safe=safe,
        space=space,
        neutral=frozenset({"num_stages", "hint", "num_warps", "BLOCK_SIZE"}),
        valid=valid,
        ahead=few_elements,
    )


def evenly_spaced(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` and its elements from one row to the next; a contiguous copy when its rows are not evenly spaced."""
    if x.is_contiguous():
        return x, x.shape[-1]
    stride = span = None
    for size, step in zip(x.shape[-2::-1], x.stride()[-2::-1]):
        if size != 1:
            if stride is None:
                stride, span = step, step
            elif step != span:
                break
            span *= size
    else:
        if x.stride(-1) == 1 and stride is not None:
            return x, stride
    return x.contiguous(), x.shape[-1]


def launch_elementwise(
    tunable: Tunable,
    tensors: tuple[torch.Tensor | None, ...],
    strides: tuple[int, ...],
    size: tuple[int, int],
    *numbers: float,
    flags: tuple[Any, ...] = (),
) -> None:
    """Launch the tunable's kernel over `size` = (elements, columns); one stride for each tensor that has one in it.

    The kernel takes tensors, strides, n_rows, n_cols, numbers, flags, then `stretch`'s TILES and WIDTH, and SPLIT: whether
    tiles that lie inside are worth code of their own, without masks.
    """
    first, (n_elements, n_cols) = tensors[0], size
    if n_elements:
        n_rows = n_elements // n_cols
        plan = tunable.plan(first.device, _key(n_rows, n_cols, first.itemsize))
        width = block = plan.config.blocks["BLOCK_SIZE"]
        split = n_cols & 15 != 0
        if n_rows == 1 or strides == (n_cols,) * len(strides):
            tiles, grid = 0, cdiv(n_elements, block)
        else:
            width = min(block, next_power_of_2(n_cols))
            tiles = cdiv(n_cols, width)
            grid = cdiv(n_rows, block // width) * tiles
            split = split and width == block and any(stride & 15 == 0 for stride in strides)
        numbers = n_rows, n_cols, *numbers
        launch(plan, tunable.kernels[0], (grid,), (*tensors, *strides, *numbers), (*flags, tiles, width, split))
