"""What Triton's interpreter computes wrong is refused or prevented."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import ONE_OF_A_FAMILY, few_sizes, forward, in_threads, make, oracle, run, verify

from liger_hw import registry

pytestmark = pytest.mark.interpret


@pytest.mark.daily("interpret", op=ONE_OF_A_FAMILY)
def test_bfloat16_is_refused(op, seed):
    """The interpreter's arithmetic in bfloat16 silently gives NaN and 1e38."""
    sample = make(op, few_sizes(op), torch.bfloat16, "cpu", seed)
    with pytest.raises(NotImplementedError, match="interpreter computes bfloat16 wrong"):
        forward(op.function, sample)


@pytest.mark.daily("interpret", op=(*ONE_OF_A_FAMILY, "fused_moe"))
def test_float64_is_right_to_float32_or_refused(op, seed):
    """Kernels compute in float32 for any dtype; products of float64 in fused_moe would silently give 1e38."""
    sample = make(op, few_sizes(op), torch.float64, "cpu", seed)
    if op.name == "fused_moe":
        with pytest.raises(NotImplementedError, match="kernels do not multiply float64"):
            forward(op.function, sample)
        return
    result = run(op.function, sample, seed)
    exact, float32 = oracle(op, sample, result.incoming), torch.finfo(torch.float32)
    n_terms = max(sample.reduction, sample.grad_reduction)
    for place, (found, expected) in enumerate(zip(result.bits(), exact.bits(), strict=True)):
        allowed = (4 * float32.eps + (8 + 4 * n_terms**0.5) * float32.eps / 2) * expected.double().norm()
        assert (found.double() - expected.double()).norm() <= allowed, place


def test_threads_take_turns(seed):
    """The interpreter keeps the current launch in globals."""
    op = registry.get_op("rms_norm")

    def work(number: int) -> None:
        for _ in range(3):
            verify(op, make(op, (5, 33 + number), torch.float32, "cpu", seed + number), seed)

    in_threads(*(partial(work, number) for number in range(8)))
