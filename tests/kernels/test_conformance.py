"""Every op in the interpreter with exactly the configurations of GPUs that are not here: what their tables and heuristics
would launch at small odd shapes, against fp64. One target for each width of warp and each vendor."""

from __future__ import annotations

import pytest
import torch
from harness import few_sizes, make, shipped_tables, small_sizes, verify, wide_sizes

from liger_hw import registry
from liger_hw.backends import known_target

pytestmark = pytest.mark.interpret
TARGETS = ("gfx942", "gfx1201", "sm90", "pvc")


@pytest.mark.parametrize("arch", TARGETS)
def test_heuristic(case, arch, seed, clean_registry):
    op, options = case
    target = known_target(arch)
    registry.set_tables(target, [])
    with registry.pretend(target):
        for sizes in (few_sizes(op), small_sizes(op)[1], wide_sizes(op)):
            verify(op, make(op, sizes, torch.float32, "cpu", seed, options), seed)
    layers = {plan.layer for plan in registry.plans()}
    assert layers <= {"heuristic"}, f"answers came from {layers}"


TABLES = shipped_tables()


@pytest.mark.parametrize("table", TABLES)
def test_shipped_tables(op, table, seed, clean_registry):
    """Every block size and grid of a shipped table, at a small shape: the key it was tuned for does not fit here.

    Warps, stages and hints mean nothing to the interpreter, so configurations that differ in those are run once.
    """
    target = known_target(table.split("/")[1].split("-")[0])
    chosen = {}
    for (name, variant, _), entry in TABLES[table]:
        if name == op.name:
            chosen[variant, str(sorted(entry.config.blocks.items())), entry.config.ctas_per_mp] = entry.config
    registry.set_tables(target, [])
    for (variant, *_), config in chosen.items():
        with registry.pretend(target), registry.override(f"{op.name}.{variant}", config):
            verify(op, make(op, few_sizes(op), torch.float32, "cpu", seed), seed)
