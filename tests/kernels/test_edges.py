"""Every op at the edges of what it may be given: no columns, one dimension, one element; outputs changed in place. On
every path an op gives the right answer or refuses, with one sentence that begins with its name."""

from __future__ import annotations

import pytest
import torch
from harness import changed, checked_inputs, few_sizes, forward, make, oracle, output_grads, run, tensors, verify

from liger_hw import registry


def _ops_of(*folders):
    return {op.name for op in registry.ops().values() if op.function.__module__.split(".")[2] in folders}


LOSSES, ROTARY = _ops_of("losses", "heads"), _ops_of("rotary")
CONVOLUTIONS = {"gated_delta_inputs", "short_conv"}
REFUSES = {
    "no columns": LOSSES
    | ROTARY
    | CONVOLUTIONS
    | {"fused_moe", "gated_rms_norm", "mhc_coeffs", "multi_token_attention"},
    "one dimension": LOSSES
    | (ROTARY - {"vision_rope"})
    | CONVOLUTIONS
    | {"fused_moe", "fused_neighborhood_attention", "group_norm", "multi_token_attention"},
    "one element": ROTARY,  # they turn pairs
}
"""Edge -> the ops that have no meaning there."""


def _edge(op, edge, device, seed):
    sizes = few_sizes(op)
    if edge == "one element":
        return make(op, (1,) * len(sizes), torch.float32, device, seed)
    if edge == "one dimension":
        sample = make(op, (1, *sizes[1:]), torch.float32, device, seed)
        return changed(sample, lambda t: t[0].clone() if t.dim() > 1 and t.shape[0] == 1 else t)
    sample = make(op, sizes, torch.float32, device, seed)
    # Parameters of other sizes than the columns stay: dyt's alpha, poly_norm's three weights.
    width = max(t.shape[-1] for t in tensors(sample.args) if t.is_floating_point() and t.dim())
    return changed(sample, lambda t: t[..., :0].clone() if t.is_floating_point() and t.shape[-1:] == (width,) else t)


@pytest.mark.parametrize("edge", REFUSES)
def test_edge(lane, op, edge, seed):
    sample = _edge(op, edge, lane.device, seed)
    if op.name in REFUSES[edge]:
        with pytest.raises((TypeError, ValueError), match=f"^liger_{op.name}: "):
            forward(op.function, sample)
    elif (op.name, edge) == ("embedding", "no columns"):  # torch's own gradient writes out of bounds here, on CUDA
        result = run(op.function, sample, seed)
        assert [t.shape for t in result.bits()] == [(*sample.args[1].shape, 0), sample.args[0].shape]
    elif edge != "one element":
        verify(op, sample, seed)
    else:
        result = run(op.function, sample, seed)
        exact = oracle(op, sample, result.incoming)
        for got, expected in zip(result.bits(), exact.bits()):
            # A norm of one element has a gradient of almost zero, as the difference of terms up to 1 / sqrt(eps).
            torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-4)


SAVED = {"fused_add_rms_norm", "fused_add_rms_norm_float8", "mhc_coeffs", "softmax", "sparsemax"}
"""Ops whose backward reads an output, as torch's softmax does: changed in place, backward raises."""


@pytest.mark.daily("interpret", options="default", op=("softmax", "sparsemax", "vision_rope"))
def test_an_output_may_be_changed_in_place(lane, case, seed):
    op, options = case
    expected = run(op.function, make(op, few_sizes(op), torch.float32, lane.device, seed, options), seed)
    sample = make(op, few_sizes(op), torch.float32, lane.device, seed, options)
    outputs = forward(op.function, sample)
    grads = output_grads(outputs, seed)
    for output in outputs:
        output.logical_not_() if output.dtype is torch.bool else output.mul_(2)
    pairs = [(o, g / 2) for o, g in zip(outputs, grads) if g is not None]
    try:
        found = torch.autograd.grad(
            [o for o, _ in pairs], checked_inputs(sample), [g for _, g in pairs], allow_unused=True
        )
    except RuntimeError as error:
        assert op.name in SAVED and "modified by an inplace operation" in str(error), error
    else:
        for a, b in zip(found, expected.gradients):
            assert (a is None) == (b is None)
            torch.testing.assert_close(a, b)
