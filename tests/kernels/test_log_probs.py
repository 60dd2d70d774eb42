"""Log-probabilities of a head and of logits: what the shared tests do not ask. Shapes, shifted labels, accuracy,
another name for them, and results that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from liger_hw.kernels.heads import fused_linear_log_probs as head
from liger_hw.transformers.functional import (
    liger_fused_linear_log_probs,
    liger_fused_linear_scaled_cross_entropy,
    liger_log_probs,
)

BATCH, LENGTH, HIDDEN, VOCAB = 2, 5, 9, 37


def _head(lane, generator, rows=BATCH * LENGTH, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float32):
    x = torch.randn(rows, hidden, generator=generator).to(lane.device, dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(lane.device, dtype).requires_grad_()
    target = torch.randint(vocab, (rows,), generator=generator).to(lane.device)
    return x, weight, target


def test_sequences_and_shifted_labels(lane, generator):
    """[batch, length, hidden] with the tokens themselves: rows predict the next token, the last none; packed parts
    begin with an ignored token."""
    x, weight, tokens = _head(lane, generator)
    x, tokens = x.detach().view(BATCH, LENGTH, HIDDEN).requires_grad_(), tokens.view(BATCH, LENGTH)
    tokens[1, 2] = -100
    found = liger_fused_linear_log_probs(
        x, weight, tokens, return_entropy=True, return_top1=True, shift_labels=True, temperature=0.5
    )
    logits = F.linear(x, weight)
    of_logits = liger_log_probs(logits, tokens, 0.5, return_entropy=True, return_top1=True, shift_labels=True)
    expected, scored = torch.zeros(BATCH, LENGTH), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    for b in range(BATCH):
        for t in range(LENGTH - 1):
            y = int(tokens[b, t + 1])
            if y != -100:
                expected[b, t] = float(torch.log_softmax(logits[b, t].detach().double() / 0.5, -1)[y])
                scored[b, t] = True
    for one in (found, of_logits):
        torch.testing.assert_close(one.log_probs.cpu(), expected, rtol=1e-4, atol=1e-4)
        assert one.entropy.shape == one.is_top1.shape == expected.shape and one.is_top1.dtype is torch.bool
        assert torch.equal(one.entropy.cpu() > 0, scored)
        top = (logits[:, :-1].argmax(-1) == tokens[:, 1:]).cpu() & scored[:, :-1]
        assert torch.equal(one.is_top1[:, :-1].cpu(), top) and not one.is_top1[:, -1].any()
    (found.log_probs + found.entropy).sum().backward()
    assert x.grad.shape == x.shape and not x.grad[:, -1].any() and not x.grad[1, 1].any() and x.grad[0, 0].any()


@pytest.mark.parametrize("length", [0, 1])
def test_sequences_that_predict_nothing(lane, length):
    x, tokens = torch.zeros(2, length, HIDDEN, device=lane.device), torch.zeros(2, length, dtype=torch.int64)
    tokens, weight = tokens.to(lane.device), torch.ones(VOCAB, HIDDEN, device=lane.device).requires_grad_()
    for found in (
        liger_fused_linear_log_probs(x, weight, tokens, shift_labels=True),
        liger_log_probs(x @ weight.t(), tokens, shift_labels=True),
    ):
        assert found.shape == (2, length) and not found.any()
        assert not torch.autograd.grad(found.sum(), weight)[0].any()


def test_no_selected_tokens(lane, generator):
    """An empty list of ids gets an empty result, and a gradient through it is zero."""
    x, weight, target = _head(lane, generator)
    ids = torch.empty(0, dtype=torch.int64, device=lane.device)
    found = liger_fused_linear_log_probs(x, weight, target, selected_token_ids=ids)
    assert found.selected.shape == (BATCH * LENGTH, 0)
    found.selected.sum().backward()
    assert not x.grad.any() and not weight.grad.any()


def test_scaled_cross_entropy_is_another_name(lane, generator):
    x, weight, target = _head(lane, generator)
    ids = torch.tensor([3, 0], device=lane.device)
    found = liger_fused_linear_log_probs(x, weight, target, selected_token_ids=ids, return_entropy=True)
    nll, entropy, selected = liger_fused_linear_scaled_cross_entropy(x, weight, target, 1.0, -100, True, ids)
    assert torch.equal(nll, -found.log_probs) and torch.equal(entropy, found.entropy)
    assert torch.equal(selected, found.selected) and found.is_top1 is None
    assert torch.equal(liger_fused_linear_scaled_cross_entropy(x, weight, target), nll)


@pytest.mark.parametrize("keeps", [True, False])
def test_batch_invariant_rows(lane, generator, monkeypatch, keeps):
    """A row's results are the same bits alone, among others, in another place and in a longer batch."""
    large = lane.name == "gpu"
    if not large:
        monkeypatch.setattr(head, "INVARIANT_ROWS", 16)
    sizes = {"rows": 2500, "hidden": 512, "vocab": 20000} if large else {"rows": 50, "hidden": 24, "vocab": 101}
    x, weight, target = _head(lane, generator, **sizes, dtype=torch.bfloat16 if large else torch.float32)
    weight.requires_grad_(keeps)
    options = {"return_entropy": True, "batch_invariant": True, "temperature": 0.9}
    whole = liger_fused_linear_log_probs(x, weight, target, **options)
    n = sizes["rows"]
    places = [torch.arange(1), torch.arange(7, 8), torch.arange(5, n // 2), torch.arange(n).flip(0)]
    for rows in places:
        rows = rows.to(lane.device)
        part = liger_fused_linear_log_probs(x[rows], weight, target[rows], **options)
        for a, b in zip(part[:2], whole[:2]):
            assert torch.equal(a, b[rows]), f"{len(rows)} rows: {int((a != b[rows]).sum())} differ"


@pytest.mark.cpu
def test_what_is_refused():
    x, weight, target = torch.randn(4, 8), torch.randn(16, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperature must be positive"):
        liger_fused_linear_log_probs(x, weight, target, temperature=0.0)
    with pytest.raises(ValueError, match="softcap must be positive"):
        liger_log_probs(x, target, softcap=-1.0)
    with pytest.raises(ValueError, match=r"shape of the rows, \(4,\), got \(3,\)"):
        liger_fused_linear_log_probs(x, weight, target[:3])
    with pytest.raises(TypeError, match="target must be a tensor"):
        liger_log_probs(x, [0, 0, 0, 0])
    with pytest.raises(TypeError, match="return_entropy must be True or False"):
        liger_log_probs(x, target, return_entropy="yes")


@pytest.mark.parametrize("width", [37, 9003, 17001])
def test_the_first_of_equal_logits_is_the_top(lane, width, generator):
    """One tile, and several; rows that begin anywhere, so that the first may lie before or behind the whole vectors."""
    logits = torch.randint(3, (7, width), generator=generator).float()
    for row, places in enumerate(
        ((0, width - 1), (width - 1,), (5, 8200), (1, 2), (width - 2, width - 1), (3, 4, 8197))
    ):
        logits[row, [place for place in places if place < width]] = 5.0
    logits[6] = float("-inf")
    logits[6, width // 2] = -3.0
    first = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits])
    given = logits.to(lane.device, torch.float16)
    for offset, expected in ((0, True), (1, False)):
        target = ((first + offset) % width).to(lane.device)
        found = liger_log_probs(given, target, return_entropy=True, return_top1=True)
        assert (found.is_top1 == expected).all(), found.is_top1
        exact = torch.log_softmax(given.double(), -1)
        torch.testing.assert_close(
            found.log_probs.double(), exact.gather(1, target[:, None])[:, 0], rtol=1e-5, atol=1e-5
        )
        entropy = -(exact.exp() * exact.masked_fill(exact == float("-inf"), 0.0)).sum(-1)
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
