"""benchmarks/host_time.py over real launches, in Triton's interpreter."""

from __future__ import annotations

import host_time as host
import pytest
import torch

from liger_hw import registry
from liger_hw.bench import ops
from liger_hw.bench.timing import Meter
from liger_hw.runtime.launch import observers

pytestmark = pytest.mark.interpret


def test_a_launch_is_split_into_its_parts():
    op = registry.get_op("rms_norm")
    case = ops.Case(op, "few", (2, 16), torch.float32)
    inputs = ops.make_inputs(case, case.sizes, torch.device("cpu"), 0)
    parts = host.breakdown(op, inputs, Meter("cpu"), calls=1, blocks=3)
    assert parts["launches_fwd"] == 1 and parts["launches_full"] > 1 and parts["fast_launch"] is False
    assert parts["operator"] > parts["registry"] > 0 and parts["ordinary"] > 0 and parts["bwd_launcher"] > 0
    assert not observers  # nobody watches any more
