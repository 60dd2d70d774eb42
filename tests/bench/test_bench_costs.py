"""benchmarks/registry_cost.py and host_time.py: the figures are there and mean what they say."""

from __future__ import annotations

import host_time as host
import registry_cost
import torch

from liger_hw import registry
from liger_hw.bench.timing import Meter


def test_every_tunable_has_the_time_of_a_hit():
    found = registry_cost.measure(torch.device("cpu"), loops=2000, repeats=5)
    assert all(found[name] > 0 for name in ("hit_us", "lookup_us", "loop_floor_us", "perf_counter_us"))
    assert set(found["tunables"]) == {t.name for op in registry.ops().values() for t in op.tunables}
    assert "us" in registry_cost.as_text(found)


def test_host_compares_arms_and_splits_the_call():
    found = host.measure(["rms_norm"], Meter("cpu"), torch.float32, ["torch", "liger"])
    arms = {row["arm"]: row for row in found["calls"]}
    measured = ("fwd_us", "full_us", "batch_us")
    assert all(arms[arm][name] > 0 for arm in ("liger_hw", "torch", "floor") for name in measured)
    if arms["liger"]["status"] == "absent":
        assert "not installed" in arms["liger"]["note"]
    (parts,) = found["parts"]
    assert parts["forward"] > 0 and parts["operator"] > 0 and parts["alloc"] > 0
    assert "rms_norm" in host.as_text(found)
