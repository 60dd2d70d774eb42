"""A vocabulary whose columns are split over the ranks of a process group, in the order of the ranks.

The parts may have unequal widths (50 | 46). The ranks exchange the widths in every call, one integer per rank. A cache
could deadlock: a rank with an entry would skip an exchange for which another rank waits. The host does not synchronise:
the first column and the size of the vocabulary are tensors.

A loss needs a few numbers per row from the other ranks: log-sum-exp, the target's score, and sums. `gather_rows` sends
them in one collective, and every rank combines them in the same order, so that all ranks get the same bits.

A rank computes them by `row_log_probs` with `LocalTargets.column`; logp is not used where another rank has the target.
`row_log_prob_gradients` takes the log-sum-exp over all ranks, and coefficients that are zero for other ranks' targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
import torch.distributed as dist

from ... import env
from ...runtime.operator import check
from .cross_entropy_rows import check_in_range

# torch 2.13 renamed both functions
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

IGNORED = -1
"""The value of `LocalTargets.column` in ignored rows."""


class VocabPart(NamedTuple):
    """One rank's part of a vocabulary.

    group: the process group, or None if this rank has the whole vocabulary; world, rank: its size, and this rank in it
    starts: [world] int64, the first column of every rank's part; start: [] int64, the first column of this rank's part
    vocab: [] int64, the number of columns of all parts
    """

    group: Any
    world: int
    rank: int
    starts: torch.Tensor
    start: torch.Tensor
    vocab: torch.Tensor


def vocab_part(width: int, group: Any, device: torch.device) -> VocabPart:
    """The part of a rank that has `width` columns. Collective: every rank of the group must call it."""
    world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    widths = torch.full((1,), width, dtype=torch.int64, device=device)
    if world > 1:
        local_width, widths = widths, widths.new_zeros(world)
        all_gather_single(widths, local_width, group=group)
    starts = widths.cumsum(0) - widths
    return VocabPart(group, world, rank, starts, starts[rank], widths.sum())


def checked_group(op: str, tp_group: Any) -> dist.ProcessGroup | None:
    """tp_group, or None if it has another type and size() is 1. Raises `TypeError` for other arguments."""
    if tp_group is None or isinstance(tp_group, dist.ProcessGroup):
        return tp_group
    size = getattr(tp_group, "size", None)
    if callable(size) and size() == 1:
        return None
    expected = "a torch.distributed.ProcessGroup (of a DeviceMesh: mesh.get_group()) or None"
    raise TypeError(f"{op}: tp_group must be {expected}, got {type(tp_group).__name__}")


class LocalTargets(NamedTuple):
    """The targets of the rows for one rank, [n_rows] each.

    column: the target's column in this rank's part; 0 if another rank has it, IGNORED in ignored rows
    is_local: whether this rank has the target
    counted: whether the row is not ignored
    valid: whether the row is counted and the target is in the vocabulary
    """

    column: torch.Tensor
    is_local: torch.Tensor
    counted: torch.Tensor
    valid: torch.Tensor


def local_targets(
    op: str, target: torch.Tensor, width: int, part: VocabPart, ignore_index: int, *, masked: bool = False
) -> LocalTargets:
    """target: [n_rows], columns of the whole vocabulary. A target out of range raises as in `check_in_range`.

    masked: as in Megatron, no rank has a target out of range; it raises only with LIGER_HW_CHECK_TARGETS=1
    """
    if target.is_floating_point():
        check(False, op, f"target must be int32 or int64, got {target.dtype}")
    y = target.long()
    counted = y != ignore_index
    valid = counted & (y >= 0) & (y < part.vocab)
    if not masked or env.LIGER_HW_CHECK_TARGETS:
        check_in_range(op, y, part.vocab, ignore_index)
    column = y - part.start
    is_local = valid & (column >= 0) & (column < width)
    return LocalTargets(torch.where(is_local, column, 0).masked_fill(~counted, IGNORED), is_local, counted, valid)


class GatheredRows:
    """An asynchronous all-gather of rows [numbers, n_rows], contiguous."""

    def __init__(self, rows: torch.Tensor, part: VocabPart) -> None:
        self._all, self._work = rows[None], None
        if part.world > 1:
            self._all = rows.new_empty((part.world, *rows.shape))
            self._work = all_gather_single(self._all.flatten(0, 1), rows, group=part.group, async_op=True)

    def wait(self) -> torch.Tensor:
        """The rows of all ranks, [numbers, world, n_rows]."""
        if self._work is not None:
            self._work.wait()
        return self._all.transpose(0, 1)


def gather_rows(rows: Sequence[torch.Tensor], part: VocabPart) -> torch.Tensor:
    """All ranks' rows, [numbers, world, n_rows], in one collective. rows: tensors [n_rows] of one dtype."""
    return GatheredRows(torch.stack(tuple(rows)), part).wait()
