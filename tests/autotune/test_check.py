"""What counts as the same result."""

from __future__ import annotations

import pytest
import torch

from liger_hw.autotune import check, record
from liger_hw.kernels.losses.cross_entropy_rows import assert_on_device


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_passes_and_one_wrong_element_does_not(dtype):
    x = torch.randn(64, 128, dtype=torch.float64)
    right, other = x.to(dtype), (x * (1 + 1e-6)).to(dtype)
    assert check.disagreement(other, right) == ""
    for value in (5.0, float("nan"), float("inf")):
        wrong = right.clone()
        wrong[3, 7] = value
        assert check.disagreement(wrong, right)
    row = right.clone()
    row[63] = 0
    assert check.disagreement(row, right), "a single unwritten row is small in norm"


def test_shapes_dtypes_and_integers_count():
    x = torch.randn(4, 4)
    assert check.disagreement(x[:2], x) and check.disagreement(x.double(), x)
    assert check.disagreement(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert check.disagreements([x], [x, x])


def test_unwritten_in_both_is_equal_and_infinities_must_match():
    nan, inf = float("nan"), float("inf")
    assert check.disagreement(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])) == ""
    assert check.disagreement(torch.tensor([1.0, inf]), torch.tensor([1.0, inf])) == ""
    assert check.disagreement(torch.tensor([1.0, inf]), torch.tensor([1.0, -inf]))
    assert check.disagreement(torch.tensor([1.0, 2.0]), torch.tensor([1.0, nan]))


def test_large_tensors_are_compared_whole(monkeypatch):
    monkeypatch.setattr(check, "CHUNK", 64)
    x = torch.randn(4097)
    for at in (0, 2000, 4096):
        wrong = x.clone()
        wrong[at] = 100.0
        assert check.disagreement(wrong, x)


@pytest.mark.unpoisoned
def test_poison_reaches_operators_and_is_undone():
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with record.poisoned():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(3)).isnan().all()
        assert torch.ones(2).new_empty(4).isnan().all()
        assert torch.empty(3, dtype=torch.int64).shape == (3,)
        assert record.is_poisoned(torch.empty(2, 2)) and not record.is_poisoned(torch.ones(2))
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before


def test_one_changed_element_is_seen_and_nan_equals_nan():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.ones(1000, dtype=dtype)
        y = x.clone()
        y[500] = 0
        assert not record.same_bits(x, y) and record.same_bits(x, x.clone())
    assert record.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_assertions_on_the_device_are_left_out_where_nothing_is_launched():
    with pytest.raises(RuntimeError, match="a label"):
        assert_on_device(torch.tensor([False]), "a label")
    with record.unasserted():
        assert_on_device(torch.tensor([False]), "a label")
