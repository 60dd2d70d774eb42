"""A NaN in an input is never lost on the way: outputs and gradients are NaN wherever the reference's are."""

from __future__ import annotations

import pytest
import torch
from harness import checked_inputs, few_sizes, make, reference, run, tensors


def _row(sample, rows):
    """The last row that reaches the result: its target is not ignored, or it is looked up in a table."""
    numbers = [t.flatten() for t in tensors((sample.args, sample.kwargs)) if t.dtype == torch.int64]
    if not numbers:
        return rows - 1
    if numbers[0].numel() == rows:
        return int((numbers[0] != sample.kwargs.get("ignore_index", -100)).nonzero()[-1])
    return int(numbers[0][-1])


# A maximum or a mask could lose a NaN; an op's option sets mostly share them.
@pytest.mark.daily("interpret", options="default")
@pytest.mark.lanes("interpret", "gpu")
def test_a_nan_is_never_lost(lane, case, seed):
    """In one element of the first input. The interpreter's maxima drop NaN as devices' do (tests/conftest.py)."""
    op, options = case
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed, options)
    x = checked_inputs(sample)[0]
    before = x.shape[:-1]
    with torch.no_grad():
        x[(*torch.unravel_index(torch.tensor(_row(sample, before.numel())), before), -1)] = float("nan")
    result = run(op.function, sample, seed)
    exact = reference(op, sample, result.incoming, torch.clone)
    assert any(t.isnan().any() for t in exact.bits() if t.is_floating_point())
    for what, ours, theirs in (
        ("output", result.outputs, exact.outputs),
        ("gradient", result.gradients, exact.gradients),
    ):
        for i, (a, b) in enumerate(zip(ours, theirs)):
            if b is not None and b.is_floating_point():
                lost = int((b.isnan() & ~a.isnan()).sum())
                assert not lost, f"{what} {i}: {lost} of {int(b.isnan().sum())} NaN are lost"
