"""Rows in two pieces: what a narrow second piece must not cost in the compiled kernels."""

from __future__ import annotations

import pytest
import torch

from liger_hw.autotune import compile as aot
from liger_hw.autotune.workers import CompilePool
from liger_hw.backends import known_target

pytestmark = pytest.mark.aot
SCRATCH = 128
"""Bytes through which the warps of a program hand each other their partial sums: 4 a warp and sum, twice, and room."""


@pytest.fixture(scope="module")
def workers():
    with CompilePool(1) as workers:
        yield workers


@pytest.mark.parametrize("n_cols", [2304, 2560, 5120])
@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm", "layer_norm"])
def test_a_narrow_second_piece_moves_nothing(op, n_cols, workers):
    """A program with one row keeps its statistics as numbers. As tensors they had the second piece's layout (2 or 4
    values a thread), and the first piece, all 4 to 8 KiB of it, went through shared memory into that layout."""
    launches = aot.trace(op, (8192, n_cols), torch.bfloat16, known_target("sm90"), shipped=False)
    forward = [one for one in launches if one.tunable == f"{op}.fwd"]
    assert forward and all(one.config.blocks["ROWS"] == 1 for one in forward)
    for made in aot.certify(forward, workers):
        assert made.ok, made
        in_flight = 2 * n_cols * (made.launch.config.num_stages - 1)  # what a loop has asked for lies there
        assert made.resources.shared <= in_flight + SCRATCH, f"{made}: {made.resources.shared} bytes of shared memory"
