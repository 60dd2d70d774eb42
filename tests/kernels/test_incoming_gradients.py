"""Incoming gradients that are infinite, nan or zero: ignored rows have exactly none, the others what torch gives them.

A summed loss that is divided by no counted tokens hands inf to backward. A gradient that the forward saved is
multiplied by that, and 0 * inf would be nan in the ignored rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import changed, checked_inputs, few_sizes, forward, make

from liger_hw.chunked_loss import LigerFusedLinearGRPOLoss, LigerFusedLinearSimPOLoss
from liger_hw.kernels.embedding.embedding import liger_embedding
from liger_hw.kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_hw.kernels.heads.fused_linear_cross_entropy_tp import liger_fused_linear_cross_entropy_tp
from liger_hw.kernels.heads.fused_linear_log_probs import liger_fused_linear_log_probs
from liger_hw.kernels.losses.cross_entropy import liger_cross_entropy
from liger_hw.registry import get_op

ROWS, HIDDEN, VOCAB = 6, 5, 19
IGNORED = torch.tensor([True, False, False, True, False, False])
VALUES = pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 0.0], ids=str)


def _logits_loss(x, weight, target, **options):
    return liger_cross_entropy(F.linear(x, weight), target, **options)


def _tp_loss(x, weight, target, **options):
    return liger_fused_linear_cross_entropy_tp(x, weight, target, None, **options)


def _torch_loss(x, weight, target, **options):
    return F.cross_entropy(F.linear(x, weight), target, **options)


FORMS = pytest.mark.parametrize(
    "loss", [_logits_loss, liger_fused_linear_cross_entropy, _tp_loss], ids=["logits", "fused", "tensor_parallel"]
)


def _head(generator, lane, dtype, labels: bool):
    x, weight = (torch.randn(size, HIDDEN, generator=generator).to(lane.device, dtype) for size in (ROWS, VOCAB))
    target = torch.randint(VOCAB, (ROWS,), generator=generator).masked_fill_(IGNORED | (not labels), -100)
    return x.requires_grad_(), weight.requires_grad_(), target.to(lane.device)


def _gradients(loss, x, weight, target, incoming, **options):
    result = loss(x, weight, target, **options)
    return torch.autograd.grad(result, (x, weight), incoming.to(result.dtype).expand(result.shape))


@FORMS
@VALUES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no_labels"])
def test_a_head_has_the_gradients_of_torchs(lane, dtype, generator, loss, reduction, value, labels):
    x, weight, target = _head(generator, lane, dtype, labels)
    incoming = torch.tensor(value, device=lane.device)
    options = {"reduction": reduction}
    ours = _gradients(loss, x, weight, target, incoming, **options)
    theirs = _gradients(_torch_loss, x, weight, target, incoming, **options)
    assert not ours[0][target == -100].any(), "an ignored row has a gradient"
    for a, b in zip(ours, theirs):
        if labels:
            assert torch.equal(a.isfinite(), b.isfinite())
        else:
            assert not a.any() and not b.any()
        assert loss is _logits_loss or a.isnan()[b.isnan()].all()
        if reduction == "none" and loss is liger_fused_linear_cross_entropy:  # nothing was saved that could be scaled
            assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a[b.isfinite()], b[b.isfinite()])  # zeros


@FORMS
def test_each_row_has_its_own_incoming_gradient(lane, dtype, generator, loss):
    x, weight, target = _head(generator, lane, dtype, True)
    incoming = torch.tensor([float("inf"), 0.0, 1.0, float("nan"), float("inf"), float("nan")], device=lane.device)
    ours, _ = _gradients(loss, x, weight, target, incoming, reduction="none")
    theirs, _ = _gradients(_torch_loss, x, weight, target, incoming, reduction="none")
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert not ours[:2].any() and not ours[3].any() and not ours[4:].isfinite().any()
    torch.testing.assert_close(ours[2].float(), theirs[2].float(), rtol=0.05, atol=16 * torch.finfo(dtype).eps)


CASES = [
    ("cross_entropy", {"label_smoothing": 0.1, "weighted": True}),
    ("cross_entropy", {"softcap": 30.0, "lse_square_scale": 1e-4}),
    ("fused_linear_cross_entropy", {"softcap": 30.0, "label_smoothing": 0.1, "biased": True}),
    ("fused_linear_cross_entropy", {"reduction": "none", "compact": True}),
    ("fused_linear_cross_entropy", {"accum_dtype": torch.float32, "reduction": "sum"}),
    ("fused_linear_cross_entropy", {"use_token_scaling": True}),
    ("log_probs", {}),
    ("log_probs", {"return_entropy": True}),
    ("fused_linear_log_probs", {}),
    ("fused_linear_log_probs", {"return_entropy": True}),
    ("vocab_parallel_cross_entropy", {"label_smoothing": 0.1}),
    ("fused_ce_tvd", {}),
    ("jsd", {"labelled": True}),
    ("jsd", {"labelled": True, "beta": 1.0}),
    ("tvd", {"labelled": True, "reduction": "mean"}),
    ("tvd", {"labelled": True, "reduction": "none"}),
    ("fused_linear_jsd", {"labelled": True}),
    ("fused_linear_kl_div", {"labelled": True}),
]


@VALUES
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_what_counts_for_nothing_stays_zero(lane, dtype, seed, name, options, value):
    """Where the reference has a gradient of exactly zero for every finite incoming one, so have we for any."""
    op = get_op(name)
    sample = make(op, few_sizes(op), dtype, lane.device, seed, options)

    def gradients(function, sample, value):
        outputs = [o for o in forward(function, sample) if o.requires_grad]
        incoming = [torch.full_like(o, value) for o in outputs]
        return torch.autograd.grad(outputs, checked_inputs(sample), incoming)

    ours = gradients(op.function, sample, value)
    plain = changed(sample, torch.Tensor.double)
    finite, theirs = gradients(op.reference, plain, 1.0), gradients(op.reference, plain, value)
    for a, one, b in zip(ours, finite, theirs):
        assert not a[(one == 0) if one.dim() == 1 else (one == 0).all(-1)].any()
        counts = (one != 0) & (a != 0)  # a saved entry that was rounded to zero stays zero
        assert value == 0 or counts.any()
        assert torch.equal(a[counts].isfinite(), b[counts].isfinite())


@VALUES
@pytest.mark.parametrize("loss", [LigerFusedLinearSimPOLoss, LigerFusedLinearGRPOLoss])
def test_ignored_tokens_of_chunked_losses(lane, generator, loss, value):
    x = torch.randn(4, ROWS, HIDDEN, generator=generator).to(lane.device).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(lane.device).requires_grad_()
    tokens = torch.randint(VOCAB, (4, ROWS), generator=generator).to(lane.device)
    ignored = IGNORED.to(lane.device).expand(4, ROWS)
    if loss is LigerFusedLinearGRPOLoss:
        advantages = torch.tensor([1.0, -0.5, 0.3, 0.7], device=lane.device)
        result = loss(beta=0.0, use_ref_model=False)(x, weight, tokens, ~ignored, advantages)[0]
    else:
        result = loss()(weight, x, tokens.masked_fill(ignored, -100))[0]
    dx, dweight = torch.autograd.grad(result, (x, weight), torch.full_like(result, value))
    assert not dx[ignored].any()
    assert bool(dx[~ignored].any()) == bool(dweight.any()) == (value != 0)
    assert value == 0 or not dweight.isfinite().any()


@VALUES
def test_log_probs_of_selected_tokens(lane, generator, value):
    x, weight, target = _head(generator, lane, torch.float32, True)
    ids = torch.tensor([3, 7, 3], device=lane.device)
    output = liger_fused_linear_log_probs(x, weight, target, return_entropy=True, selected_token_ids=ids)
    outputs = [output.log_probs, output.entropy, output.selected]
    dx, _ = torch.autograd.grad(outputs, (x, weight), [torch.full_like(o, value) for o in outputs])
    assert not dx[target == -100].any()
    assert value == 0 or not dx[target != -100].isfinite().any()


@VALUES
def test_the_padding_row_of_a_table(lane, dtype, generator, value):
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(lane.device, dtype).requires_grad_()
    indices = torch.tensor([3, 0, 3, 7], device=lane.device)
    result = liger_embedding(weight, indices, padding_idx=0)
    (dweight,) = torch.autograd.grad(result, weight, torch.full_like(result, value))
    read = torch.zeros(VOCAB, dtype=torch.bool, device=lane.device).index_fill_(0, indices[2:], True)
    assert not dweight[~read].any()
    assert torch.equal(dweight[read].isfinite(), torch.full_like(dweight[read], value == 0, dtype=torch.bool))
