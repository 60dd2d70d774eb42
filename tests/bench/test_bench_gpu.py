"""Benchmarks on a GPU: kernels replayed from graphs."""

from __future__ import annotations

import host_time as host
import pytest
import torch

from liger_hw.bench import ops
from liger_hw.bench.timing import Meter

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(request) -> str:
    return request.config.getoption("--device") or str(torch.accelerator.current_accelerator())


def test_kernels_are_replayed_from_graphs(device):
    todo = ops.cases(["rms_norm"], ["4096x1024"])
    rows = ops.bench(todo, device, against=("torch", "compile"), modes=("fwd", "bwd", "full"), repeats=1)
    assert {row["status"] for row in rows} == {"ok"}, rows
    graphs = hasattr(torch.get_device_module(torch.device(device)), "graph_pool_handle")
    for row in rows:
        assert row["method"] == ("graph" if graphs else "events"), row["note"]
        assert 0 < row["share"] < 2 and row["peak_mib"] > 0
        assert row["error_out"] < 1e-2 and row["error_grad"] < 1e-2


def test_a_syncing_call_leaves_the_random_state_usable(device):
    from liger_hw.bench.inputs import Inputs, Work
    from liger_hw.bench.timing import Calls

    with Meter(device) as meter:
        if not meter.graphs:
            pytest.skip("no graphs on this device")
        inputs = Inputs((torch.randn(64, 64, device=meter.device, requires_grad=True),))
        work = Work(lambda x: x * x.detach().sum().item(), [inputs], backward=True)
        work.learn_overwrites()
        runner = meter.runner(work, floor_ms=0.01)
        assert isinstance(runner, Calls) and runner.why == "syncs" and min(runner.burst(3)) > 0
    assert torch.randn(4, device=device).isfinite().all()


def test_a_launch_is_split_into_its_parts(device):
    with Meter(device) as meter:
        (parts,) = host.measure(["rms_norm"], meter, torch.bfloat16, [])["parts"]
    assert not parts.get("note") and parts["launches_fwd"] == 1
    assert 0 < parts["registry"] < 5 and 0 < parts["launch"] <= 2 * parts["ordinary"]
