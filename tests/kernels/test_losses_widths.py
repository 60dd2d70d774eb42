"""Rows that begin anywhere: losses and gradients at widths that are no multiple of 16 bytes, against fp64.

Rows of such a width have a body that is accessed 16 bytes at a time and edges on both sides of it
(kernels/rows/row.py). Every remainder of a width is here, rows narrower than their edges, ties that lie in an edge,
and labels that do.
"""

from __future__ import annotations

import pytest
import torch

from liger_hw import registry
from liger_hw.kernels.losses.cross_entropy import cross_entropy_reference, liger_cross_entropy
from liger_hw.kernels.losses.fused_ce_tvd import fused_ce_tvd_reference, liger_fused_ce_tvd
from liger_hw.kernels.losses.jsd import jsd_reference, liger_jsd
from liger_hw.kernels.losses.kl_div import kl_div_reference, liger_kl_div
from liger_hw.kernels.losses.log_probs import liger_log_probs, log_probs_reference
from liger_hw.kernels.losses.loss_gradient import cross_entropy_bwd, cross_entropy_bwd_
from liger_hw.kernels.losses.tvd import liger_tvd, tvd_reference
from liger_hw.kernels.losses.vocab_parallel_cross_entropy import (
    liger_vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_reference,
)
from liger_hw.registry import LaunchConfig

pytestmark = pytest.mark.lanes("interpret", "gpu")
WIDTHS = pytest.mark.parametrize("cols", [1, 7, 9, 24, 37, 65])
LARGE = (8191, 49155, 50257)
ROWS = 5
EXTRAS = {"softcap": 3.0, "return_token_accuracy": True, "return_predicted_tokens": True, "reduction": "none"}


def _log_softmax(x):
    return torch.log_softmax(x, -1)


def _softmax(x):
    return torch.softmax(x, -1)


CASES = {
    "cross_entropy": (liger_cross_entropy, cross_entropy_reference, None, {}),
    "cross_entropy smoothed": (liger_cross_entropy, cross_entropy_reference, None, {"label_smoothing": 0.1}),
    "cross_entropy extras": (liger_cross_entropy, cross_entropy_reference, None, EXTRAS),
    "vocab_parallel_cross_entropy": (
        liger_vocab_parallel_cross_entropy,
        vocab_parallel_cross_entropy_reference,
        None,
        {"label_smoothing": 0.1},
    ),
    "fused_ce_tvd": (liger_fused_ce_tvd, fused_ce_tvd_reference, lambda x: x, {}),
    "kl_div": (liger_kl_div, kl_div_reference, _softmax, {"reduction": "sum"}),
    "kl_div none": (liger_kl_div, kl_div_reference, _softmax, {"reduction": "none"}),
    "jsd": (liger_jsd, jsd_reference, _log_softmax, {"beta": 0.3}),
    "tvd none": (liger_tvd, tvd_reference, _softmax, {"reduction": "none"}),
    "log_probs": (liger_log_probs, log_probs_reference, None, {"temperature": 0.7}),
}


def _tensors(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs if isinstance(outputs, tuple) else vars(outputs).values()
    return [value for value in values if value is not None]


def _check(case, cols, dtype, device, generator):
    function, reference, teacher, options = CASES[case]
    x = (torch.randn(ROWS, cols, generator=generator) * 3).round()  # equal logits: the first of the largest counts
    x[3] = x[3, 0]
    target = torch.randint(cols, (ROWS,), generator=generator)
    target[0], target[1], target[2] = 0, cols - 1, -100
    if teacher is not None and function is not liger_fused_ce_tvd:
        x = _log_softmax(x) if function is not liger_tvd else _softmax(x)
    inputs = [x.to(dtype).to(device)]
    if teacher is not None:
        inputs.append(teacher(torch.randn(ROWS, cols, generator=generator)).to(dtype).to(device))
    labels = () if function is liger_kl_div else (target.to(device),)
    found_x, expected_x = inputs[0].clone().requires_grad_(), inputs[0].double().requires_grad_()
    found = _tensors(function(found_x, *inputs[1:], *labels, **options))
    expected = _tensors(reference(expected_x, *(t.double() for t in inputs[1:]), *labels, **options))
    tolerance = cols**0.5 * torch.finfo(dtype).eps * 4
    for one, other in zip(found, expected, strict=True):
        if one.dtype is torch.int64:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)
    pairs = [(a, b) for a, b in zip(found, expected) if a.requires_grad]
    grads = [torch.rand(a.shape, generator=generator).to(device) for a, _ in pairs]
    (grad,) = torch.autograd.grad([a for a, _ in pairs], found_x, [g.to(a.dtype) for g, (a, _) in zip(grads, pairs)])
    (true,) = torch.autograd.grad([b for _, b in pairs], expected_x, [g.to(b.dtype) for g, (_, b) in zip(grads, pairs)])
    torch.testing.assert_close(grad.double(), true, rtol=tolerance, atol=tolerance)


@pytest.mark.daily("interpret", cols=("7", "37"))
@WIDTHS
@pytest.mark.parametrize("case", CASES)
def test_every_remainder(lane, generator, case, cols):
    """Tiles of 16 columns: a row has whole tiles, a last one and edges, or nothing but edges."""
    scope = case.split()[0]
    scope = scope if scope == "log_probs" else f"{scope}.fwd"  # which has a kernel of its own in backward
    with registry.override(scope, LaunchConfig({"BLOCK_SIZE": 16}, 1)):
        _check(case, cols, torch.float32, lane.device, generator)
        if lane.name == "gpu":
            _check(case, cols, torch.bfloat16, lane.device, generator)


@pytest.mark.parametrize("cols", [37, 65])
def test_half_precision_and_one_tile(lane, generator, cols):
    """Eight elements in 16 bytes, and a row that one tile holds."""
    for case in CASES:
        _check(case, cols, torch.float16, lane.device, generator)


@pytest.mark.lanes("gpu")
@pytest.mark.parametrize("cols", LARGE)
@pytest.mark.parametrize("case", CASES)
def test_wide_rows(lane, generator, case, cols):
    for dtype in (torch.float32, torch.bfloat16):
        _check(case, cols, dtype, lane.device, generator)


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
