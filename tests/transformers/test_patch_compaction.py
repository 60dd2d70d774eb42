"""A patched model counts its labels before anything else runs, and its loss leaves ignored rows out by that count."""

from __future__ import annotations

import pytest
import torch

from liger_hw.kernels.heads import fused_linear_cross_entropy as fused
from liger_hw.transformers import loss as loss_module


@pytest.fixture
def seen(monkeypatch):
    """What happens in order: 'counted', and how many rows the loss keeps of how many."""
    events = []
    real = fused.remaining_rows

    def remaining(op, target, ignore_index, compact):
        order = real(op, target, ignore_index, compact)
        events.append((target.shape[0] if order is None else order.shape[0], target.shape[0]))
        return order

    class Counted(loss_module.CountedRows):
        def __init__(self, labels, *more):
            events.append("counted")
            super().__init__(labels, *more)

    monkeypatch.setattr(fused, "remaining_rows", remaining)
    monkeypatch.setattr(loss_module, "CountedRows", Counted)
    return events


@pytest.mark.parametrize("shifted", [False, True])
def test_ignored_labels_are_left_out(mistral, seen, shifted):
    ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :9] = -100  # the prompt
    shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    extra = {"shift_labels": shift_labels} if shifted else {}
    model, plain = mistral.model(), mistral.model()
    mistral.apply(model=model)
    model.model.embed_tokens.register_forward_hook(lambda *_: seen.append("running"))
    expected = plain(input_ids=ids, labels=labels, **extra).loss
    found = model(input_ids=ids, labels=labels, **extra).loss
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert seen[:2] == ["counted", "running"], "the count must start before the model runs"
    assert seen[2:] == [(14, 32)], "2 x 7 labels count of 32 rows"


def test_nothing_ignored_is_nothing_left_out(mistral, seen):
    ids = torch.randint(3, 61, (1, 64), generator=torch.Generator().manual_seed(0))
    model = mistral.model()
    mistral.apply(model=model)
    model(input_ids=ids, labels=ids)
    assert seen == ["counted", (64, 64)]


def test_no_count_without_the_fused_loss(mistral, seen):
    ids = torch.randint(3, 61, (1, 8), generator=torch.Generator().manual_seed(0))
    model = mistral.model()
    mistral.apply(model=model)
    model(input_ids=ids)
    model.eval()
    model(input_ids=ids, labels=ids)
    assert not seen
