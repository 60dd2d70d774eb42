"""Programs that wait for one another: as many are resident as the heuristic asks for, or the launch is refused."""

from __future__ import annotations

import os

import pytest
import torch

from liger_hw.autotune import compile as aot
from liger_hw.autotune.workers import CompilePool
from liger_hw.backends import known_target
from liger_hw.kernels.norms import group_norm

OTHERS = ((16, 32, 1024, 320), (32, 32, 256, 1280), (4, 32, 4096, 1280), (3, 32, 197, 1280), (4, 32, 121, 1920))
SPILLS = 16  # 11 x 11 places of 60 channels on sm86 with Triton 3.6: 96 registers for five programs a multiprocessor
ROWS = ((2048, 65536), (1024, 16384))


def _teams(op, sizes, dtype, target) -> set:
    launches = aot.trace(op, sizes, dtype, target, shipped=False)
    return {one for one in launches if "launch_cooperative_grid" in dict(one.options)}


@pytest.mark.aot
# The dtype that models train in, for one architecture; the others are for LANES=full.
@pytest.mark.daily(dtype="bfloat16", arch="sm90")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "sm120"])
def test_a_team_is_resident(arch, dtype):
    target, found = known_target(arch), {}
    for sizes in (*group_norm.WORKLOADS.values(), *OTHERS):
        found |= {one: sizes for one in _teams("group_norm", sizes, dtype, target)}
    for op in ("rms_norm", "fused_add_rms_norm", "layer_norm"):
        for sizes in ROWS:
            found |= {one: sizes for one in _teams(op, sizes, dtype, target)}
    names = {"group_norm.fwd", "group_norm.bwd", "rms_norm.bwd", "fused_add_rms_norm.bwd", "layer_norm.bwd"}
    assert {one.tunable for one in found} == names
    with CompilePool(min(4, os.cpu_count() or 1)) as workers:
        for certificate in aot.certify(found, workers):
            assert certificate.ok and certificate.resources.spills <= SPILLS, str(certificate)
            resources, config = certificate.resources, certificate.launch.config
            fit = round(resources.occupancy * target.max_threads_per_multiprocessor) // resources.threads
            assert fit >= config.ctas_per_mp, f"{found[certificate.launch]}: {fit} of {certificate}"
