"""Sum of per-program partial results: [n_partials, n_cols] fp32 -> [n_cols] in any dtype, in one kernel.

Each program of a persistent backward writes one fp32 row of parameter gradients. One launch sums and casts the rows, in
a fixed order (deterministic). With a single program, its row is the result.
"""

from __future__ import annotations

from typing import Callable

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, next_power_of_2, tile_space
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton


@triton.jit(do_not_specialize=["n_partials"])
def _column_sum_kernel(Partial_ptr, Out_ptr, n_partials, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, n_partials, BLOCK_M):
        row = start + rows
        mask = (row < n_partials)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(Partial_ptr + row.to(tl.int64)[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(Out_ptr + cols, tl.sum(total, axis=0).to(Out_ptr.dtype.element_ty), mask=cols < n_cols)


def column_sum_tunable(
    op: str, dims: tuple[str, ...] = ("n_rows", "n_cols"), columns: Callable[..., int] = lambda *sizes: sizes[-1]
) -> Tunable:
    """The `<op>.dw` tunable. columns: the partial rows' width from the problem sizes; by default the last size."""

    def key(*sizes_and_itemsize: int) -> Key:
        return (next_power_of_2(columns(*sizes_and_itemsize[:-1])),)

    def heuristic(target: Target, key: Key) -> LaunchConfig:
        """Column tiles so narrow that every multiprocessor has a program; 1024 rows at once for a single column."""
        if key[0] == 1:
            return LaunchConfig({"BLOCK_M": 1024, "BLOCK_N": 1}, target.warps(1024, 8, 8))
        columns = max(16, min(128, next_power_of_2(key[0] // (2 * target.multiprocessors))))
        rows = max(8, 2048 // columns)
        return LaunchConfig({"BLOCK_M": rows, "BLOCK_N": columns}, target.warps(rows * columns, 8, 8))

    def safe(target: Target, key: Key) -> LaunchConfig:
        return LaunchConfig({"BLOCK_M": 8, "BLOCK_N": 32}, 1)

    def space(target: Target, key: Key) -> list[LaunchConfig]:
        rows, columns = ((256, 512, 1024, 2048), (1,)) if key[0] == 1 else ((8, 16, 32, 64, 128), (16, 32, 64, 128))
        tiles = [{"BLOCK_M": m, "BLOCK_N": n} for m in rows for n in columns]
        return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 64))

    return Tunable(
        op, "dw", kernels=(_column_sum_kernel,), key=key, dims=dims, heuristic=heuristic, safe=safe, space=space
    )


def param_parts(needed: bool, w: torch.Tensor | None, b: torch.Tensor | None) -> int:
    """The number of parameter gradients that backward computes: one per parameter, 0 if not `needed`."""
    return (w is not None) + (b is not None) if needed else 0


def params_dtype(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.dtype:
    """The dtype of the parameters' summed gradients; x's dtype without parameters."""
    if w is None:
        return x.dtype
    return w.dtype if b is None or b.dtype is w.dtype else torch.promote_types(w.dtype, b.dtype)


def partial_sums(x: torch.Tensor, programs: int, n_cols: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer [programs, n_cols] in fp32, or in `dtype` for a single program, whose row is the result."""
    return x.new_empty((programs, n_cols), dtype=dtype if programs == 1 else torch.float32)


def column_sum(tunable: Tunable, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of `partial_sums` [n_partials, n_cols] over the partials, [n_cols] of `dtype`."""
    n_partials, n_cols = partial.shape
    if n_partials == 1:
        return partial.view(n_cols).to(dtype)
    out = partial.new_empty(n_cols, dtype=dtype)
    plan = tunable.plan(partial.device, (next_power_of_2(n_cols),))
    grid = (cdiv(n_cols, plan.config.blocks["BLOCK_N"]),)
    launch(plan, _column_sum_kernel, grid, (partial, out, n_partials, n_cols))
    return out
