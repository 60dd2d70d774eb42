"""Rows that do not begin at 16 bytes are read and written in whole vectors."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import make, verify

from liger_hw import registry
from liger_hw.kernels.rows.blocks import aligned_programs, count_tiles, row_layout
from liger_hw.kernels.rows.row import row_vector
from liger_hw.registry import LaunchConfig

OPS = ("softmax", "sparsemax")
NORMS = [("rms_norm", None), ("layer_norm", None), ("dyt", None)]
TILES = {
    "whole": LaunchConfig({"BLOCK_SIZE": 256, "ROWS": 2}, 4),
    "looped": LaunchConfig({"BLOCK_SIZE": 64, "ROWS": 2}, 2, 2, 1),
}


@pytest.mark.cpu
def test_elements_of_a_vector():
    """16 bytes, 1 where the padding would need a wider tile and where rows are aligned or not aligned alike."""
    half, full = torch.float16, torch.float32

    def vector(n_cols, dtype=half, stride=None, offset=0, width=None):
        stride = stride or n_cols
        x = torch.empty(5 * stride + offset, dtype=dtype)[offset:].view(5, stride)[:, :n_cols]
        return row_vector(x, None, torch.empty(5, n_cols, dtype=dtype), width=width)

    assert [vector(n) for n in (2304, 2305, 2040, 49155)] == [1, 8, 8, 8]
    assert [vector(n, full) for n in (777, 4096)] == [4, 1]
    assert [vector(n, width=4096) for n in (4089, 4090, 4092, 4094, 4095)] == [8, 8, 8, 1, 1]
    assert vector(777, offset=8) == 8 and vector(777, offset=1) == 1
    assert vector(777, stride=785) == 8 and vector(777, stride=784) == 1
    assert vector(4096, stride=8192) == 1 and vector(4096, stride=4104) == 8

    def with_fp32(offset):  # whose vectors are 32 bytes, and must begin at multiples of 32
        return row_vector(torch.empty(5, 77, dtype=half), torch.empty(5 * 77 + offset)[offset:].view(5, 77))

    assert [with_fp32(offset) for offset in (0, 8, 4, 1)] == [8, 8, 1, 1]


@pytest.mark.cpu
def test_layout_of_norms():
    """The widest vectors whose pad fits, in no more blocks than the columns need; by element else."""

    def layout(n_cols, block, dtype=torch.float16, stride=None):
        return row_layout(n_cols, block, torch.empty(5, stride or n_cols, dtype=dtype)[:, :n_cols])

    assert layout(2304, 2048) == (True, 256, 1) and layout(2305, 2048) == (True, 512, 8)
    assert layout(1000, 1024) == (True, 0, 8) and layout(2047, 2048) == (True, 0, 2)
    assert layout(4097, 4096) == (True, 512, 8) and layout(3070, 2048) == (True, 1024, 4)
    assert layout(511, 512) == (True, 0, 2) and layout(512, 512) == (True, 0, 1) and layout(513, 512) == (False, 0, 1)
    assert layout(2047, 2048, torch.float32) == (True, 0, 2) and layout(777, 1024, stride=785) == (True, 0, 8)
    assert [count_tiles(n, 2, 8) for n in (1, 7, 16, 17, 31)] == [1, 7, 8, 9, 16] and count_tiles(17, 2, 1) == 9
    assert [aligned_programs(n, 24, 8) for n in (1, 12, 132)] == [8, 8, 24] and aligned_programs(0, 5, 1) == 1
    assert [aligned_programs(n, 5, 8) for n in (1, 132)] == [5, 5]


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("n_cols", [129, 250, 255])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.lanes("interpret", "gpu")
def test_rows_that_begin_anywhere(lane, name, n_cols, tiles, dtype, seed):
    """Every offset from a boundary at which a row can begin, and a last tile of rows that is not full."""
    op = registry.get_op(name)
    with registry.override(name, TILES[tiles]):
        verify(op, make(op, (9, n_cols), dtype, lane.device, seed), seed)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.lanes("interpret", "gpu")
def test_gaps_between_rows_and_offsets(lane, tiles, dtype, seed):
    """Gaps that keep the alignment of a result without gaps, gaps that do not, and tensors between boundaries."""
    op = registry.get_op("softmax")
    values, upstream = torch.randn(2, 9 * 147 + 8, generator=torch.Generator().manual_seed(seed)).to(lane.device, dtype)

    def results(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        y = op.function(x)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    with registry.override("softmax", TILES[tiles]):
        for stride, offset in ((131, 0), (147, 0), (140, 0), (131, 8), (131, 3)):
            x, dy = (t[offset:][: 9 * stride].view(9, stride)[:, :131] for t in (values, upstream))
            torch.testing.assert_close(results(x, dy), results(x.contiguous(), dy.contiguous()))


@pytest.mark.parametrize("name, tiles", [("softmax", "whole"), ("softmax", "looped"), *NORMS])
@pytest.mark.lanes("interpret", "gpu")
def test_a_row_of_nans_is_alone(lane, name, tiles, dtype, seed):
    """The vectors at a row's ends hold elements of its neighbours. Norms: one block and two, several rows a program."""
    op, broken = registry.get_op(name), [2, 4, 18]
    whole = [i for i in range(19) if i not in broken]
    for n_cols in (131,) if tiles else (131, 1030):
        x, *others = make(op, (19, n_cols), dtype, lane.device, seed).args
        results = []
        for rows in ([], broken):
            x = x.detach().index_fill(0, torch.tensor(rows, dtype=torch.int64, device=x.device), float("nan"))
            with registry.override(name, TILES[tiles]) if tiles else contextlib.nullcontext():
                y = op.function(x.requires_grad_(), *others)
                results.append((y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]))
        for plain, seen in zip(*results):
            assert torch.equal(seen[whole], plain[whole])
        assert results[1][0][broken].isnan().all()


@pytest.mark.parametrize("sizes", [(257, 4097), (130, 32767), (133, 49155), (64, 50257)])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.lanes("gpu")
def test_wide_rows_that_begin_anywhere(lane, name, sizes, dtype, seed):
    op = registry.get_op(name)
    verify(op, make(op, sizes, dtype, lane.device, seed), seed)
