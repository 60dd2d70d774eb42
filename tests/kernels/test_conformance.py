"""Every op in the interpreter with exactly the configurations of GPUs that are not here: what their tables and heuristics
would launch at small odd shapes, against fp64. One target for each width of warp and each vendor."""

from __future__ import annotations

import pytest
import torch
from harness import few_sizes, make, small_sizes, verify, wide_sizes

from liger_hw import registry
from liger_hw.autotune import store
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


@pytest.mark.parametrize("arch", TARGETS)
def test_shipped_tables(op, arch, seed, clean_registry, monkeypatch):
    """Every stored configuration of the op, at a small shape: the key it was tuned for may be larger than what fits here."""
    target = known_target(arch)
    entries: dict = {}
    for layer, table in store.layers(target):
        for (name, variant, _), entry in table.items():
            if layer.startswith("shipped") and name == op.name:
                entries.setdefault(variant, {})[entry.config.to_text()] = entry.config
    registry.set_tables(target, [])
    for tunable in op.tunables:
        for config in entries.get(tunable.variant, {}).values():
            with registry.pretend(target), registry.override(tunable.name, config):
                verify(op, make(op, few_sizes(op), torch.float32, "cpu", seed), seed)
