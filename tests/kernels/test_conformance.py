"""Every op in the interpreter with exactly the configurations of GPUs that are not here: what their tables and
heuristics would launch at small odd shapes, against fp64. One target for each width of warp and each vendor."""

from __future__ import annotations

import math

import pytest
import torch
from harness import ONE_OF_A_FAMILY, few_sizes, make, shipped_tables, small_sizes, verify, wide_sizes

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target

pytestmark = pytest.mark.interpret
TARGETS = ("gfx942", "gfx1201", "sm90", "pvc")


@pytest.mark.daily(options="default", arch="sm90", op=ONE_OF_A_FAMILY)
@pytest.mark.parametrize("arch", TARGETS)
def test_heuristic(case, arch, seed, clean_registry, record_property):
    op, options = case
    record_property("op", op.name)  # for ci/support.py
    record_property("arch", arch)
    target = known_target(arch)
    registry.set_table(target, {})
    with registry.pretend(target):
        for sizes in (few_sizes(op), small_sizes(op)[1], wide_sizes(op)):
            verify(op, make(op, sizes, torch.float32, "cpu", seed, options), seed)
    layers = {plan.layer for plan in registry.plans()}
    assert layers <= {"heuristic"}, f"answers came from {layers}"


TABLES = {name: table for name, table in shipped_tables().items() if name.split("/")[1].split("-")[0] in TARGETS}
PAIRS = sorted({(table, name) for table, entries in TABLES.items() for (name, _, _), _ in entries})


@pytest.mark.daily(name=ONE_OF_A_FAMILY)
@pytest.mark.parametrize(("table", "name"), PAIRS)
def test_shipped_tables(table, name, seed, clean_registry):
    """The smallest, middle and largest tiles of a shipped table, at a small shape: the key each was tuned for does not
    fit.

    Warps, stages and hints mean nothing to the interpreter, so configurations that differ in those are run once, and
    the tables of TARGETS stand for those of their vendors.
    """
    op, target = registry.get_op(name), known_target(table.split("/")[1].split("-")[0])
    tiles: dict[str, dict[str, LaunchConfig]] = {}
    for (made_for, variant, _), entry in TABLES[table]:
        if made_for == name:
            grid = str(sorted(entry.config.blocks.items())) + str(entry.config.ctas_per_mp)
            tiles.setdefault(variant, {})[grid] = entry.config
    registry.set_table(target, {})
    for variant, configs in tiles.items():
        ordered = sorted(configs.values(), key=lambda config: (math.prod(config.blocks.values()), config.to_text()))
        for config in {ordered[0], ordered[len(ordered) // 2], ordered[-1]}:
            with registry.pretend(target), registry.override(f"{name}.{variant}", config):
                verify(op, make(op, few_sizes(op), torch.float32, "cpu", seed), seed)
