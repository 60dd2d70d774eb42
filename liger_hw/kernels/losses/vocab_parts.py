"""A vocabulary whose columns are split over the ranks of a process group, in the order of the ranks.

The parts may have unequal widths (50 | 46). The ranks exchange the widths in every call, one integer a rank: with a
cache, a rank that had an entry would skip the exchange while another waits for it. The host does not wait: the first
column and the size of the vocabulary are tensors.

A loss needs a few numbers a row from the other ranks: log-sum-exp, the target's score, and sums. `gather_rows` sends
them in one collective, and every rank combines them in the same order, so that all have the same bits.

A rank computes its numbers by `row_log_probs` with `OwnTargets.mine`; where another rank has the target, logp is not
used. `row_log_prob_gradients` takes the log-sum-exp over all ranks, and a target's coefficient that is zero there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
import torch.distributed as dist

from ... import env
from ...runtime.operator import check
from .cross_entropy_rows import check_in_range

# names since torch 2.13, or before
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

IGNORED = -1
"""Marks an ignored row in `OwnTargets.mine`."""


class VocabPart(NamedTuple):
    """One rank's part of a vocabulary.

    group: the process group, or None if this rank has the whole vocabulary; world, rank: its size, and this rank in it
    starts: [world] int64, the first column of every rank's part; start: [] int64, this rank's; whole: [] int64, the
    number of all columns
    """

    group: Any
    world: int
    rank: int
    starts: torch.Tensor
    start: torch.Tensor
    whole: torch.Tensor


def vocab_part(width: int, group: Any, device: torch.device) -> VocabPart:
    """The part of a rank that has `width` columns. Collective: every rank of the group must call it."""
    world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    widths = torch.full((1,), width, dtype=torch.int64, device=device)
    if world > 1:
        mine, widths = widths, widths.new_zeros(world)
        all_gather_single(widths, mine, group=group)
    starts = widths.cumsum(0) - widths
    return VocabPart(group, world, rank, starts, starts[rank], widths.sum())


def checked_group(op: str, tp_group: Any) -> dist.ProcessGroup | None:
    """The process group, or None for a group of one rank of any other type. Raises `TypeError` for other arguments."""
    if tp_group is None or isinstance(tp_group, dist.ProcessGroup):
        return tp_group
    size = getattr(tp_group, "size", None)
    if callable(size) and size() == 1:
        return None
    expected = "a torch.distributed.ProcessGroup (of a DeviceMesh: mesh.get_group()) or None"
    raise TypeError(f"{op}: tp_group must be {expected}, got {type(tp_group).__name__}")


class OwnTargets(NamedTuple):
    """The rows' targets as one rank sees them, [n_rows] each.

    mine: the target's column in this rank's part; 0 where another rank has it, IGNORED in rows that do not count
    here: whether this rank has the target
    counted: whether the row counts
    valid: whether it counts and its target is in the whole vocabulary
    """

    mine: torch.Tensor
    here: torch.Tensor
    counted: torch.Tensor
    valid: torch.Tensor


def own_targets(
    op: str, target: torch.Tensor, width: int, part: VocabPart, ignore_index: int, *, masked: bool = False
) -> OwnTargets:
    """target: [n_rows], columns of the whole vocabulary. A target out of range raises as `check_in_range` says.

    masked: as in Megatron, no rank has a target out of range; it raises only with LIGER_HW_CHECK_TARGETS=1
    """
    if target.is_floating_point():
        check(False, op, f"target must be int32 or int64, got {target.dtype}")
    y = target.long()
    counted = y != ignore_index
    valid = counted & (y >= 0) & (y < part.whole)
    if not masked or env.LIGER_HW_CHECK_TARGETS:
        check_in_range(op, y, part.whole, ignore_index)
    column = y - part.start
    here = valid & (column >= 0) & (column < width)
    return OwnTargets(torch.where(here, column, 0).masked_fill(~counted, IGNORED), here, counted, valid)


class GatheredRows:
    """An asynchronous all-gather of rows [numbers, n_rows], contiguous."""

    def __init__(self, rows: torch.Tensor, part: VocabPart) -> None:
        self._all, self._work = rows[None], None
        if part.world > 1:
            self._all = rows.new_empty((part.world, *rows.shape))
            self._work = all_gather_single(self._all.flatten(0, 1), rows, group=part.group, async_op=True)

    def wait(self) -> torch.Tensor:
        """[numbers, world, n_rows]"""
        if self._work is not None:
            self._work.wait()
        return self._all.transpose(0, 1)


def gather_rows(rows: Sequence[torch.Tensor], part: VocabPart) -> torch.Tensor:
    """All ranks' `rows`, tensors [n_rows] of one dtype, in one collective: [numbers, world, n_rows]."""
    return GatheredRows(torch.stack(tuple(rows)), part).wait()
