"""The hybrids' convolutions with infinite values, norms of zero and wide document numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import changed, make, oracle, run, verify

from liger_hw import registry

SIZES = {"gated_delta_inputs": (2, 22, 1, 2, 16, 8), "short_conv": (2, 22, 20)}


def test_no_epsilon(lane, seed):
    """Past the last token a kernel reads zeros, whose norm without an epsilon is zero."""
    op = registry.get_op("gated_delta_inputs")
    sample = make(op, SIZES[op.name], torch.float32, lane.device, seed)
    verify(op, dataclasses.replace(sample, kwargs={"eps": 0.0}), seed)


@pytest.mark.daily("interpret", taps=("3",))
@pytest.mark.parametrize("token", [9, 16])
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_inf_reaches_as_many_tokens_as_there_are_taps(lane, name, taps, token, seed):
    """In the middle of a run of tokens, and in the first token of a run, which the run before reads too."""
    op = registry.get_op(name)
    sample = make(op, SIZES[name], torch.float32, lane.device, seed, {"taps": taps})
    with torch.no_grad():
        sample.args[0][0, token, 3] = torch.inf
    result = run(op.function, sample, seed)
    for got, exact in zip(result.bits(), oracle(op, sample, result.incoming).bits()):
        torch.testing.assert_close(got.double(), exact.double(), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", SIZES)
def test_documents_whose_numbers_are_alike_in_32_bits(lane, name, seed):
    op = registry.get_op(name)
    sample = make(op, SIZES[name], torch.float32, lane.device, seed, {"packed": True})
    verify(op, changed(sample, lambda t: t if t.is_floating_point() else t.long() << 32), seed)
