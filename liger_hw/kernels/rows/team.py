"""Rows that a team of programs holds: each reads its part of a row once, and keeps it in registers.

No program could hold a row of a vocabulary: 131072 columns of 16 bits are all registers of a multiprocessor. A second
sweep reads it from device memory again, for the rows under way exceed L2. Here the programs of a cooperative grid
exchange their sums (`runtime/cooperative.py`). Program g * splits + s has part s of the rows g, g + groups, ...

A part is of the row's body (row.py), which is accessed in vectors wherever the row begins; the last program of a team
has the edges besides.
"""

from __future__ import annotations

from typing import Any

from ...registry import Key, LaunchConfig, Plan, Target
from ...runtime.cooperative import (
    COOPERATIVE,
    MAX_SPLITS,
    collect,
    cooperative_misfit,
    launch_cooperative,
    publish,
    resident_options,
)
from ...runtime.operator import cdiv, rows_of
from ...runtime.triton_import import tl, triton
from .row import body_width, edge_columns, row_head, row_vector

NARROWEST_SHARED = 65536
"""Columns, rounded up to a power of two, from which rows are shared."""


@triton.jit
def row_part(row, stride, n_cols, split, splits, VECTOR: tl.constexpr):
    """(head and columns of the row's body, first column and number of columns of a part of it)."""
    head = row_head(row * stride, VECTOR)
    n_body = body_width(n_cols, head, VECTOR)
    width = tl.cdiv(n_cols // VECTOR * VECTOR, splits * 64) * 64
    return head, n_body, split * width, tl.minimum(width, n_body - split * width)


@triton.jit
def part_edges(head, n_body, n_cols, split, splits, VECTOR: tl.constexpr):
    """(columns of the row's edges, which of them exist and are this program's)."""
    edge = edge_columns(head, n_body, n_cols, VECTOR)
    return edge, edge < tl.where(split == splits - 1, n_cols - head, -VECTOR)  # no column lies below -VECTOR


@triton.jit
def exp_about(x, anchor):
    """exp(x - anchor) in three instructions, half of what tl.exp takes to keep results below 1e-38."""
    return tl.exp2((x - anchor) * 1.4426950408889634)


@triton.jit
def max_and_sum(s, s_edge, after, Words_ptr, split, splits, LANES: tl.constexpr):
    """(maximum of a row, sum of exponentials about it), of which this program has s and s_edge (None without edges).

    after: a number that must have been read before the team goes on, which may overwrite it
    """
    m = tl.max(s)
    if s_edge is not None:
        m = tl.maximum(m, tl.max(s_edge))
    anchor = tl.where(m == float("-inf"), 0.0, m)
    d = tl.sum(exp_about(s, anchor))
    if s_edge is not None:
        d += tl.sum(exp_about(s_edge, anchor))
    publish(Words_ptr + split, m, tl.where(after == after, d, after))
    m, d = collect(Words_ptr, splits, LANES)
    m = tl.where(tl.arange(0, LANES) < splits, m, float("-inf"))
    top = tl.max(m)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(d * exp_about(m, anchor))
    tl.debug_barrier()  # else the compiler moves what follows up here, and its registers spill
    return top, total


def team_config(target: Target, columns: int, itemsize: int, tensors: int = 1, **blocks: int) -> LaunchConfig | None:
    """Parts fill half of the registers, in eight programs a multiprocessor: some load while others wait, or store.

    tensors: which a program holds its part of. None where rows are not shared.
    """
    ctas, warps = 8, 4
    block = 4 * target.registers // (2 * ctas * tensors * itemsize)
    most = min(MAX_SPLITS, ctas * target.multiprocessors)
    if not target.cooperative or columns < NARROWEST_SHARED or cdiv(columns, block) > most:
        return None
    return LaunchConfig({"BLOCK_SIZE": block, **blocks}, warps, 1, ctas, vendor=resident_options(target, warps, ctas))


def team_misfit(config: LaunchConfig, key: Key) -> str | None:
    """Why the configuration cannot serve the key as a team's, or None; any other can."""
    return cooperative_misfit(config, cdiv(key[0], config.blocks["BLOCK_SIZE"]))


def is_team(plan: Plan) -> bool:
    """Whether the plan's programs share rows."""
    return COOPERATIVE in plan.options


def launch_team(plan: Plan, kernel: Any, rows: tuple, tensors: tuple, numbers: tuple, flags: tuple) -> None:
    """`launch_cooperative` on rows, the tensors that are accessed by parts; VECTOR comes after the flags."""
    n_rows, n_cols, _ = rows_of(rows[0])
    vector = row_vector(*rows)
    splits = max(1, cdiv(n_cols // vector * vector, plan.config.blocks["BLOCK_SIZE"]))
    groups = max(1, min(n_rows, plan.programs // splits))
    launch_cooperative(plan, kernel, groups * splits, splits, n_rows, tensors, numbers, (*flags, vector))
