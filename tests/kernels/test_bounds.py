"""The bounds of `tolerance` are no smaller than the roundings that an op's definition makes, and no larger than that
takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import check, few_sizes, make, run, verify

from liger_hw import registry


@pytest.mark.parametrize("number", [3072, 3143, 3500, 3778])
@pytest.mark.lanes("interpret", "gpu")
def test_a_row_whose_norm_is_one_element(lane, number):
    """Samples of three columns in which dy and n mean(dy n) cancel, at the element that is most of its row."""
    op = registry.get_op("poly_norm")
    sample = make(op, (7, 3), torch.float32, lane.device, number)
    result = verify(op, sample, number)
    off = [g * (1 + 1e-4) for g in result.gradients]
    with pytest.raises(AssertionError, match="gradient 0"):
        check(op, sample, dataclasses.replace(result, gradients=off))


@pytest.mark.lanes("cpu", "interpret", "gpu")
@pytest.mark.parametrize("name", ["log_probs", "fused_linear_log_probs"])
def test_a_vocabulary_of_one_class(lane, name, seed):
    """Log-probability and entropy are zero, as differences of equal numbers: where the log-sum-exp is rounded and a
    multiply-add takes the logit's product unrounded, half a unit in its last place is left."""
    op = registry.get_op(name)
    sizes = (*few_sizes(op)[:-1], 1)
    sample = make(op, sizes, torch.float32, lane.device, seed, {"return_entropy": True, "temperature": 0.7})
    result = verify(op, sample, seed)
    logits = sample.args[0] if name == "log_probs" else sample.args[0] @ sample.args[1].t()
    unit = float(torch.finfo(torch.float32).eps / 2 * logits.detach().abs().max() / 0.7)
    for place in range(2):
        outputs = [t + unit * (i == place) if t.is_floating_point() else t for i, t in enumerate(result.outputs)]
        check(op, sample, dataclasses.replace(result, outputs=outputs))
        outputs = [t + 1e3 * unit * (i == place) if t.is_floating_point() else t for i, t in enumerate(result.outputs)]
        with pytest.raises(AssertionError, match=f"output {place}"):
            check(op, sample, dataclasses.replace(result, outputs=outputs))


@pytest.mark.lanes("cpu")
def test_terms_that_only_the_kernel_cancels_grant_nothing(lane):
    """A variance as the mean of squares less the square of the mean, of rows far from zero: the definition takes the
    mean off first."""
    op = registry.get_op("layer_norm")
    sample = make(op, (7, 69), torch.float32, lane.device, 0)
    with torch.no_grad():
        sample.args[0].add_(100.0)

    def cancelling(x, weight, bias, eps=1e-6, **_):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) - mean.square() + eps)
        return (x - mean) * rstd * weight + bias

    check(op, sample, run(op.reference, sample))
    with pytest.raises(AssertionError, match="output 0"):
        check(op, sample, run(cancelling, sample))
