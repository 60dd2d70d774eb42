"""Leaving ignored rows out of a linear head's products: which rows remain, and results put back where they belong."""

from __future__ import annotations

import torch

from ...registry import is_quiet
from ...runtime.operator import check
from ..losses.cross_entropy_rows import RowResults
from .counted_rows import CountedRows

WORTHWHILE = 31 / 32  # of the rows; gathering them and scattering their gradient costs more than so few save


def remaining_rows(
    op: str, target: torch.Tensor, ignore_index: int, compact: bool | CountedRows
) -> torch.Tensor | None:
    """Indices of the rows that count, in their order, or None for all rows.

    compact: True counts now, which waits for the device; a `CountedRows` made early does not. None is the answer where
    too few rows are ignored, while a graph is captured, inside torch.compile, and for a count of another ignore_index.
    """
    if not isinstance(compact, (bool, CountedRows)):
        check(False, op, f"compact must be a bool or a CountedRows, got {type(compact).__name__}")
    if compact is False or is_quiet():
        return None
    counted = CountedRows(target, ignore_index) if compact is True else compact
    most = counted.most() if counted.ignore_index == ignore_index else None
    if most is None or most > WORTHWHILE * target.shape[0]:
        return None
    ignored = target == ignore_index
    order = torch.argsort(ignored.to(torch.uint8), stable=True)  # the rows that count first, each part in order
    if compact is not True:
        fits = (target.shape[0] - ignored.sum()) <= most
        torch._assert_async(fits, f"{op}: more rows count than the CountedRows given as compact has")
    return order[:most]


def spread(rows: RowResults, order: torch.Tensor | None, n_rows: int) -> RowResults:
    """Per-row results of the remaining rows, put back among n_rows; left-out rows get what an ignored row gets."""
    if order is None:
        return rows

    def back(t: torch.Tensor | None, empty: int) -> torch.Tensor | None:
        return None if t is None else t.new_full((n_rows,), empty).index_copy_(0, order, t)

    return RowResults(back(rows.loss, 0), back(rows.z_loss, 0), back(rows.hits, 0), back(rows.top, -1))
