"""What elementwise ops share: how a tensor is cut into stretches, the tunables, and rows read where they lie.

An elementwise kernel walks over memory, not over rows: tensors whose rows lie end to end count as one long row, and only
views with a gap between rows are walked row by row. Tiles that lie inside are not masked, so that odd column counts keep
their 16-byte accesses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..registry import Key, LaunchConfig, Target, Tunable, row_key
from ._op import cdiv, launch
from ._triton import tl, triton


@triton.jit
def stretch(n_rows, n_cols, FLAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(row, first column, columns of a row) of this program; FLAT when rows lie end to end and count as one."""
    pid = tl.program_id(0).to(tl.int64)
    if FLAT:
        return pid * 0, pid * BLOCK_SIZE, n_rows.to(tl.int64) * n_cols
    else:
        tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        return pid // tiles, (pid % tiles) * BLOCK_SIZE, n_cols


DIMS = ("n_rows", "n_cols")


def heuristic(target: Target, key: Key, most: int = 16) -> LaunchConfig:
    """One load of `most` bytes a thread and tensor, 1024 elements a program.

    Of 8 bytes where the programs are fewer than the multiprocessors: what is short then is threads (a row of 512 columns
    on an H200, geglu's forward: 0.95 us against 1.01).
    """
    block = min(1024, max(64, key[0]))
    if key[0] << key[1] < block * target.multiprocessors:
        most = 8
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, most // key[2], 8))


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


def elementwise_tunable(op: str, variant: str, *kernels: Any, most: int = 16) -> Tunable:
    """A tunable of one BLOCK_SIZE, its kernel first; no knob of it can change a result. most: the heuristic's."""
    return Tunable(
        op,
        variant,
        kernels=(*kernels, stretch),
        key=row_key,
        dims=DIMS,
        heuristic=partial(heuristic, most=most),
        safe=safe,
        space=space,
        neutral=frozenset({"num_stages", "hint", "num_warps", "BLOCK_SIZE"}),
        valid=valid,
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
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    size: tuple[int, int],
    *numbers: float,
    flags: tuple[Any, ...] = (),
) -> None:
    """Launch the tunable's kernel over `size` = (elements, columns); one stride for each tensor that has one in it.

    The kernel takes tensors, strides, n_rows, n_cols, numbers, flags and FLAT.
    """
    first, (n_elements, n_cols) = tensors[0], size
    if n_elements:
        n_rows = n_elements // n_cols
        plan = tunable.plan(first.device, row_key(n_rows, n_cols, first.itemsize))
        flat = strides == (n_cols,) * len(strides)
        block = plan.config.blocks["BLOCK_SIZE"]
        grid = (cdiv(n_elements, block) if flat else n_rows * cdiv(n_cols, block),)
        launch(plan, tunable.kernels[0], grid, (*tensors, *strides, n_rows, n_cols, *numbers), (*flags, flat))
