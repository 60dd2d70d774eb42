"""Norms of rows that do not begin at 16 bytes: read in whole groups, and what is not of the row has no part in it."""

from __future__ import annotations

import pytest
import torch
from harness import make, verify

from liger_hw import registry
from liger_hw.kernels.rows.blocks import aligned_key, count_programs, count_tiles, lay_out, vector_width

NORMS = ("rms_norm", "fused_add_rms_norm", "layer_norm", "dyt")


@pytest.mark.cpu
def test_group_of_rows():
    """16 bytes, or two elements where more would need a wider tile; 1 where rows begin at 16 bytes or lie anyhow."""
    half, full = torch.float16, torch.float32
    groups = {(2304, half): 1, (2305, half): 8, (2047, half): 2, (2040, half): 8, (4097, half): 8, (2047, full): 2}
    groups |= {(777, full): 4, (777, half): 8, (24, half): 2, (16400, half): 1, (8200, half): 8}
    for (n_cols, dtype), group in groups.items():
        x = torch.empty(9, n_cols, dtype=dtype)
        assert vector_width(9, n_cols, x, None, x) == group, (n_cols, dtype)
    x = torch.empty(9 * 777 + 8, dtype=half)
    assert (
        vector_width(9, 777, x[8:].view(9, 777)) == 8
        and vector_width(9, 777, x[:-8].view(9, 777), x[1:-7].view(9, 777)) == 1
    )
    assert (
        vector_width(9, 777, torch.empty(9, 800, dtype=half)[:, :777]) == 1
        and vector_width(1, 777, x[:777].view(1, 777)) == 1
    )
    assert aligned_key(9, 2304, 2) == (2048, 4, 2, 1) and aligned_key(9, 2305, 2) == (2048, 4, 2, 0)
    assert aligned_key(9, 4095, 2) == (4096, 4, 2, 0) and aligned_key(9, 4097, 2) == (4096, 4, 2, 0)
    assert vector_width(9, 4095, torch.empty(9, 4095, dtype=half), whole_rows=False) == 8
    assert lay_out(2305, 2048, 8) == (True, 512, 8) and lay_out(2047, 2048, 8) == (True, 8, 8)
    assert lay_out(2047, 2048, 2) == (True, 0, 2) and lay_out(5001, 1024, 8) == (False, 0, 1)
    assert lay_out(9001, 8192, 1) == (True, 1024, 1) and lay_out(513, 512, 8) == (False, 0, 1)
    assert [count_tiles(n, 2, 8) for n in (1, 16, 17)] == [8, 8, 16] and count_tiles(17, 2, 1) == 9
    assert (
        [count_programs(n, 24, 8) for n in (1, 12, 132)] == [8, 8, 24]
        and count_programs(0, 5, 1) == 1
        and count_programs(9, 5, 1) == 5
    )


@pytest.mark.parametrize("n_cols", [127, 131, 1290])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.lanes("interpret", "gpu")
def test_rows_that_begin_anywhere(lane, name, n_cols, dtype, seed):
    """Every place behind a boundary where a row can begin, more tiles than programs, groups of 2 and of 16 bytes."""
    op = registry.get_op(name)
    sample = make(op, (19, n_cols), dtype, lane.device, seed)
    assert vector_width(19, n_cols, sample.args[0]) > 1
    verify(op, sample, seed)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.lanes("interpret", "gpu")
def test_a_row_of_nans_is_alone(lane, name, dtype, seed):
    """A group at a row's end holds elements of the next one."""
    op = registry.get_op(name)
    sample = make(op, (19, 131), dtype, lane.device, seed)
    upstream = torch.randn(19, 131, generator=torch.Generator().manual_seed(seed)).to(lane.device, dtype)

    def results(broken: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x = sample.args[0].detach().clone()
        x[list(broken)] = float("nan")
        y = op.function(x.requires_grad_(), *sample.args[1:])
        y = y[0] if isinstance(y, tuple) else y
        return y.detach(), torch.autograd.grad(y, x, upstream)[0]

    whole = [i for i in range(19) if i not in (4, 9, 18)]
    for plain, seen in zip(results(()), results((4, 9, 18))):
        assert seen[[4, 9, 18]].isnan().all() and torch.equal(seen[whole], plain[whole])
