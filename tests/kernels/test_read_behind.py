"""Kernels that read whole vectors of 16 bytes use nothing of what they read outside a tensor (docs/safety.md)."""

from __future__ import annotations

import pytest
import torch
from harness import ONE_OF_A_FAMILY, changed, few_sizes, make, run, small_sizes

from liger_hw import registry
from liger_hw.kernels.rows.row import LINE
from liger_hw.registry import LaunchConfig

AROUND = LINE
"""Elements of poison before and behind a tensor: whole cache lines, which keep its place in them."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def poisoned(t: torch.Tensor) -> torch.Tensor:
    """The tensor's values, contiguous, in the middle of NaN, or of the largest number of an integer dtype."""
    if t.dtype is torch.bool:
        return t.clone()
    poison = torch.iinfo(t.dtype).max if t.dtype in _INTEGERS else float("nan")
    room = torch.full((t.numel() + 2 * AROUND,), poison, dtype=t.dtype, device=t.device)
    return room[AROUND : AROUND + t.numel()].view(t.shape).copy_(t)


@pytest.fixture
def poisoned_allocations(monkeypatch):
    """What launchers allocate lies in the middle of poison too."""

    def around(make):
        def allocate(*args, **kwargs):
            made = make(*args, **kwargs)
            return poisoned(made) if made.device.type != "meta" and made.is_contiguous() else made

        return allocate

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, around(getattr(owner, name)))


def _same_bits(op, sizes, dtype, device, seed, options):
    sample = make(op, sizes, dtype, device, seed, options)
    plain = run(op.function, sample, seed)
    grads = [g if g is None else poisoned(g) for g in plain.incoming]
    found = run(op.function, changed(sample, poisoned), grads=grads)
    for place, (got, expected) in enumerate(zip(found.bits(), plain.bits(), strict=True)):
        assert torch.equal(got.nan_to_num(7e3), expected.nan_to_num(7e3)), f"result {place}"


@pytest.mark.parametrize("rows", ["few", "small"])
@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, options="default", dtype="float32", rows="few")
@pytest.mark.lanes("interpret", "gpu")
def test_nothing_outside_a_tensor_is_used(lane, case, dtype, rows, seed, poisoned_allocations):
    op, options = case
    sizes = few_sizes(op) if rows == "few" else small_sizes(op)[-1]
    _same_bits(op, sizes, dtype, lane.device, seed, options)


TILES = {
    "whole": LaunchConfig({"BLOCK_SIZE": 256, "ROWS": 2}, 4),
    "looped": LaunchConfig({"BLOCK_SIZE": 64, "ROWS": 2}, 2, 2, 1),
}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
@pytest.mark.lanes("interpret", "gpu")
def test_nothing_outside_a_row_map_is_used(lane, name, tiles, dtype, seed, poisoned_allocations):
    """Rows held whole and rows read in several tiles."""
    with registry.override(name, TILES[tiles]):
        _same_bits(registry.get_op(name), (9, 131), dtype, lane.device, seed, {})
