"""Rows that begin anywhere: losses and gradients at widths that are no multiple of 16 bytes, against fp64.

Rows of such a width have a body that begins at a boundary and edges on both sides of it (kernels/rows/row.py). Every
remainder of a width is here, rows narrower than their edges, ties that lie in an edge, and labels that do.
"""

from __future__ import annotations

import pytest
import torch
from harness import make, verify

from liger_hw import registry
from liger_hw.kernels.losses.cross_entropy import cross_entropy_reference, liger_cross_entropy
from liger_hw.kernels.losses.loss_gradient import cross_entropy_bwd, cross_entropy_bwd_
from liger_hw.registry import LaunchConfig

pytestmark = pytest.mark.lanes("interpret", "gpu")
WIDTHS = pytest.mark.parametrize("cols", [1, 7, 9, 24, 37, 65, 161])
LARGE = (8191, 49155, 50257)
ROWS = 5
OPS = [op for op in registry.ops().values() if ".losses." in op.function.__module__]
OF_LOGITS = ("cross_entropy", "fused_ce_tvd", "log_probs", "vocab_parallel_cross_entropy")


def _check(op, options, cols, dtype, device, seed):
    sample = make(op, (ROWS, cols), dtype, device, seed, options)
    labels = [t for t in sample.args if isinstance(t, torch.Tensor) and t.dtype is torch.int64]
    with torch.no_grad():
        if op.name in OF_LOGITS:  # equal logits: the first of the largest counts
            sample.args[0].copy_((3 * sample.args[0]).round())
            sample.args[0][3] = sample.args[0][3, 0].clone()
        for t in labels:
            t[0], t[1], t[2] = 0, cols - 1, options.get("ignore_index", -100)
    verify(op, sample, seed)


CASES = [(op, options) for op in OPS for options in op.options]


@pytest.mark.daily("interpret", cols=("7", "37"))
@WIDTHS
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
def test_every_remainder(lane, case, cols, dtype, seed):
    """Tiles of 16 columns: a row has whole tiles, a last one and edges, or nothing but edges."""
    op, options = case
    scope = op.name if op.name == "log_probs" else f"{op.name}.fwd"  # which has a kernel of its own in backward
    with registry.override(scope, LaunchConfig({"BLOCK_SIZE": 16}, 1)):
        _check(op, options, cols, dtype, lane.device, seed)


@pytest.mark.lanes("gpu")
@pytest.mark.parametrize("cols", LARGE)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_wide_rows(lane, op, cols, seed):
    for options in op.options:
        for dtype in (torch.float32, torch.bfloat16):
            _check(op, options, cols, dtype, lane.device, seed)


@pytest.mark.parametrize("offset", [1, 4])
def test_a_tensor_that_begins_off_a_boundary_and_rows_with_gaps(lane, generator, offset):
    """Nothing is known of such rows, or another distance from the boundary than the gradient's: they are read as they
    come."""
    storage = torch.randn(ROWS * 48 + offset, generator=generator).to(lane.device)
    x = storage[offset : offset + ROWS * 48].view(ROWS, 48)[:, :37]
    target = torch.randint(37, (ROWS,), generator=generator).to(lane.device)
    found, true = x.clone().requires_grad_(), x.double().requires_grad_()
    (grad,) = torch.autograd.grad(liger_cross_entropy(found.view(ROWS, 37), target), found)
    (expected,) = torch.autograd.grad(cross_entropy_reference(true, target), true)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)
    view = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(liger_cross_entropy(view, target), view)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)


@WIDTHS
@pytest.mark.parametrize("in_place", [False, True])
def test_the_saved_gradient_times_the_incoming_one(lane, generator, cols, in_place):
    """A factor a row, of which one is 1, and one factor for all, of tensors whose sizes are no multiple of 16."""
    grad = torch.randn(ROWS, cols, generator=generator).to(lane.device)
    stats = torch.empty(0, device=lane.device)
    for factor in (torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]), torch.tensor(3.0), torch.tensor(1.0)):
        factor = factor.to(lane.device)
        expected = grad * (factor[:, None] if factor.dim() else factor)
        found = grad.clone()
        with registry.override("cross_entropy.bwd", LaunchConfig({"BLOCK_SIZE": 64}, 1, ctas_per_mp=1)):
            if in_place:
                cross_entropy_bwd_(found, factor, stats)
            else:
                found = cross_entropy_bwd(grad, factor, stats)
        assert torch.equal(found, expected)
