"""Losses of rows that begin anywhere: their tiles are accessed 16 bytes at a time, with the registers of aligned
rows."""

from __future__ import annotations

import pytest
import torch

from liger_hw.autotune import compile as aot
from liger_hw.autotune.workers import CompilePool
from liger_hw.backends import known_target

pytestmark = pytest.mark.aot
CASES = [
    ("cross_entropy", torch.bfloat16),
    ("kl_div", torch.float32),
    ("jsd", torch.bfloat16),
    ("fused_ce_tvd", torch.bfloat16),
    ("vocab_parallel_cross_entropy", torch.bfloat16),
]


@pytest.fixture(scope="module")
def workers():
    with CompilePool(1) as workers:
        yield workers


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[op for op, _ in CASES])
def test_an_odd_width_is_accessed_as_wide(op, dtype, arch, workers):
    """49155 columns (Granite's vocabulary) against 49152: as many wide instructions, and narrow ones for the edges
    alone."""

    def rows(n_cols):
        launches = aot.trace(op, (4097, n_cols), dtype, known_target(arch), shipped=False)
        certified = list(aot.certify([one for one in launches if one.key and one.key[0] == 65536], workers))
        assert certified and all(one.ok for one in certified), certified
        return [one.resources for one in certified if one.launch.tunable.startswith(op)]

    for odd, even in zip(rows(49155), rows(49152), strict=True):
        assert (
            odd.spills == 0
            and odd.loads.get(128) == even.loads.get(128)
            and odd.stores.get(128) == even.stores.get(128)
        )
        narrow = [sum(taken.values()) - taken.get(128, 0) for taken in (odd.loads, odd.stores, even.loads, even.stores)]
        assert narrow[0] <= narrow[2] + 4 and narrow[1] <= narrow[3] + 4
        assert odd.registers <= even.registers + 32
