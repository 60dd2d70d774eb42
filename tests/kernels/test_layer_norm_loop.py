"""layer_norm's forward by a persistent kernel: each program takes every n-th tile of rows and keeps W and B."""

from __future__ import annotations

import pytest
import torch
from harness import make, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.norms import layer_norm
from liger_hw.kernels.rows.blocks import blocks_key


def _persistent(block: int, rows: int) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, 2, 3, 1)


@pytest.mark.parametrize(
    "n_cols, block, rows",
    [(90, 128, 2), (131, 256, 1), (1025, 1024, 1), (1290, 1024, 2), (1536, 1024, 1), (100, 16, 1)],
)
@pytest.mark.lanes("interpret", "gpu")
def test_forward_in_a_loop(lane, n_cols, block, rows, dtype, seed):
    """Rows in one block and in two, of odd width too; more tiles than programs, not a multiple. Rows that a tile
    does not hold have no loop."""
    op, n_rows = registry.get_op("layer_norm"), 19 if lane.device == "cpu" else 1999
    with registry.override("layer_norm.fwd", _persistent(block, rows)):
        for options in op.options:
            verify(op, make(op, (n_rows, n_cols), dtype, lane.device, seed, options), seed)
        for few in (0, 1):
            verify(op, make(op, (few, n_cols), dtype, lane.device, seed), seed)


@pytest.mark.parametrize("wide", ["x", "w"])
@pytest.mark.lanes("interpret", "gpu")
def test_a_loop_over_rows_that_lie_apart(lane, wide, seed):
    """And W and B in another dtype than x. What is saved and what comes out is what single tiles give."""
    n_rows, generator = 19 if lane.device == "cpu" else 1999, torch.Generator().manual_seed(seed)
    dtype, other = (torch.float32, torch.float16)[:: 1 if wide == "x" else -1]
    x = torch.randn(n_rows, 1600, generator=generator).to(lane.device, dtype)[:, :1536]
    w, b = (torch.randn(1536, generator=generator).to(lane.device, other) for _ in range(2))
    with registry.override("layer_norm.fwd", _persistent(1024, 1)):
        y, stats = layer_norm.LayerNormFunction.fwd(x, w, b, 1e-6)
    with registry.override("layer_norm.fwd", LaunchConfig({"BLOCK_SIZE": 1024, "ROWS": 1}, 2)):
        one_y, one_stats = layer_norm.LayerNormFunction.fwd(x, w, b, 1e-6)
    torch.testing.assert_close(stats, one_stats, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y, one_y)
    assert y.dtype is dtype and stats.dtype is torch.float32
    exact = layer_norm.layer_norm_reference(x.double(), w.double(), b.double(), 1e-6)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.cpu
def test_who_loops():
    """Many rows of half precision in two pieces, or of 16384 columns, where a compiler keeps programs to their
    share of the registers."""
    for arch in ("sm80", "sm90", "sm100", "gfx942", "gfx950", "bmg", "cpu"):
        target = known_target(arch)
        for sizes, itemsize, loops in (
            *(((8192, n_cols), 2, True) for n_cols in (1536, 2304, 2560, 5120, 6144, 14336)),
            *(((8192, n_cols), 2, False) for n_cols in (512, 1024, 2048, 4096, 8192, 10240)),
            *(((8192, 5120), 4, False), ((512, 5120), 2, False), ((1, 5120), 2, False)),
        ):
            key = blocks_key(*sizes, itemsize)
            config = layer_norm.FWD.heuristic(target, key)
            assert bool(config.ctas_per_mp) == (loops and target.cooperative), (arch, sizes)
            if config.ctas_per_mp:
                threads = target.warp_size * config.num_warps * config.ctas_per_mp
                assert threads * config.vendor["maxnreg"] <= target.registers
            assert not layer_norm.FWD.illegal(target, key, config)
            for config in layer_norm.FWD.space(target, key):
                assert not (config.ctas_per_mp and layer_norm.FWD.illegal(target, key, config))
