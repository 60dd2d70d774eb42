"""benchmarks/registry_cost.py and host_time.py: the figures are there and mean what they say."""

from __future__ import annotations

import host_time as host
import pytest
import registry_cost
import torch

from liger_hw import registry
from liger_hw.bench.timing import Budget, Meter

pytestmark = pytest.mark.cpu


def test_a_registry_hit_is_within_its_budget():
    found = registry_cost.measure(torch.device("cpu"), loops=2000, repeats=5)
    assert 0 < found["hit_us"] <= found["lookup_us"]
    assert found["loop_floor_us"] > 0 and found["perf_counter_us"] > 0
    assert found["hit_us"] < 4 * registry_cost.BUDGET_US  # generous: other tests share the cores
    assert set(found["tunables"]) == {t.name for op in registry.ops().values() for t in op.tunables}
    assert "us" in registry_cost.as_text(found)


def _times_in_order(found) -> bool:
    """Whether a step takes longer than its forward, and the floor, which computes nothing, less than the op."""
    arms = {row["arm"]: row for row in found["calls"]}
    (parts,) = found["parts"]
    timed = [arms[arm] for arm in ("liger_hw", "torch", "floor")]
    return (
        all(row["full_us"] > row["fwd_us"] for row in timed)
        and arms["floor"]["full_us"] < arms["liger_hw"]["full_us"]
        and parts["full"] > parts["forward"]
    )


def test_host_compares_arms_and_splits_the_call():
    for _ in range(4):  # other processes of a busy machine can turn microseconds round
        found = host.measure(["rms_norm"], Meter("cpu"), torch.float32, ["torch", "liger"])
        if _times_in_order(found):
            break
    else:
        raise AssertionError(found)
    arms = {row["arm"]: row for row in found["calls"]}
    assert all(arms[arm]["fwd_us"] > 0 and arms[arm]["batch_us"] > 0 for arm in ("liger_hw", "torch", "floor"))
    if arms["liger"]["status"] == "absent":
        assert "not installed" in arms["liger"]["note"]
    (parts,) = found["parts"]
    assert parts["forward"] > 0 and parts["operator"] > 0 and parts["alloc"] > 0
    assert "rms_norm" in host.as_text(found)


def test_host_stops_at_the_budget():
    found = host.measure(["rms_norm"], Meter("cpu"), torch.float32, [], Budget(0.0))
    assert found["calls"] == [] and "0 s is spent" in host.as_text(found)


def test_host_keeps_what_it_has_when_interrupted(monkeypatch):
    def of_op(op, *rest, whole=host._of_op):
        if op.name == "rope":
            raise KeyboardInterrupt
        return whole(op, *rest)

    monkeypatch.setattr(host, "_of_op", of_op)
    found = host.measure(["softmax", "rope"], Meter("cpu"), torch.float32, [])
    assert {row["op"] for row in found["calls"]} == {"softmax"} and found["ended"] == "interrupted"
    assert "interrupted" in host.as_text(found)
