"""Every op against its reference in fp64: all options, odd sizes, all dtypes of the lane, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import ONE_OF_A_FAMILY, few_sizes, make, real_sizes, small_sizes, verify, wide_sizes

from liger_hw import registry

MULTIPLIES = ("fused_moe",)
"""Ops whose kernels multiply matrices. In fp32 they leave a GPU's matrix units alone: every multiplication of a tile is
an instruction, and the compiler takes a minute for the widest tile."""


# The interpreter runs every option set in test_conformance.py too, at the sizes and with the configurations of a GPU.
@pytest.mark.daily("interpret", options="default", dtype="float32")
@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, dtype="float32")
@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, options="default")
def test_options(lane, dtype, case, seed):
    op, options = case
    for sizes in small_sizes(op):
        verify(op, make(op, sizes, dtype, lane.device, seed, options), seed)


# test_conformance.py runs the same sizes in the interpreter with every option set.
@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY, options="default", dtype="float32")
def test_wide(lane, dtype, case, seed):
    op, options = case
    verify(op, make(op, wide_sizes(op), dtype, lane.device, seed, options), seed)


# The safe configuration and the narrowest are near the heuristic's at these sizes.
@pytest.mark.daily("interpret", pick="widest", op=ONE_OF_A_FAMILY)
@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("pick", ["safe", "narrowest", "widest", "middle"])
def test_other_configurations(lane, op, pick, seed, monkeypatch):
    """What the tuner may choose gives the same result: the safe configuration and the corners of the search space."""
    for tunable in op.tunables:
        monkeypatch.setattr(tunable, "heuristic", tunable.safe if pick == "safe" else _picker(tunable, pick))
    registry.invalidate()
    dtype = torch.float16 if lane.name == "gpu" and op.name in MULTIPLIES else torch.float32
    for sizes in (few_sizes(op), wide_sizes(op)):
        verify(op, make(op, sizes, dtype, lane.device, seed), seed)


def _picker(tunable, pick):
    tunable = copy.copy(tunable)  # with its own heuristic: `illegal` asks for it

    def choose(target, key):
        legal = [c for c in tunable.space(target, key) if tunable.illegal(target, key, c) is None]
        if not legal:
            return tunable.safe(target, key)
        legal.sort(key=lambda c: (sorted(c.blocks.items()), c.num_warps, c.num_stages, c.ctas_per_mp, c.hint))
        return legal[{"narrowest": 0, "widest": -1, "middle": len(legal) // 2}[pick]]

    return choose


# Measured on an H200: weights of a whole vocabulary or of many experts, in fp64 too.
@pytest.mark.memory(
    16,
    multi_token_attention=22,
    embedding=50,
    fused_linear_jsd=50,
    fused_linear_kl_div=50,
    fused_linear_log_probs=50,
    fused_moe=58,
)
@pytest.mark.lanes("gpu")
def test_real_width(lane, dtype, case, seed):
    """A few rows of the first workload's real width, with the configuration users get."""
    op, options = case
    verify(op, make(op, real_sizes(op), dtype, lane.device, seed, options), seed)
