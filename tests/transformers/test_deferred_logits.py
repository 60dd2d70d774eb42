"""DeferredLogits: what is recorded reaches the fused loss. test_logits_sweep.py has everything else, which computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

import liger_hw
from liger_hw.transformers.loss import OutputHead

HIDDEN, VOCAB = 8, 13
ROW = torch.linspace(-1.0, 2.0, VOCAB)
OFF = torch.zeros(1, VOCAB).masked_fill(torch.arange(VOCAB) == 12, float("-inf"))


@pytest.fixture
def head():
    torch.manual_seed(0)
    return torch.nn.Linear(HIDDEN, VOCAB, bias=True)


@pytest.fixture
def hidden():
    return torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def labels():
    labels = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(2))
    labels[0, 1] = -100
    return labels


def both(head, hidden, compute, fused=True):
    """compute(logits) on deferred and on real logits, with the gradients of hidden, weight and bias of each."""
    results = []
    for logits_of in (OutputHead(head, fused), head):
        head.zero_grad()
        hidden.grad = None
        logits = logits_of(hidden)
        value = compute(logits)
        value.sum().backward()
        results.append((logits, value.detach(), hidden.grad.clone(), head.weight.grad.clone(), head.bias.grad.clone()))
    return results


FUSED = {
    "view": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1)),
    "float": lambda x, y: F.cross_entropy(x.float().reshape(-1, x.size(-1)), y.view(-1)),
    "shifted slices": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, VOCAB), y[..., 1:].contiguous().view(-1)
    ),
    "slice of positions": lambda x, y: F.cross_entropy(x[:, -2:].flatten(0, 1), y[:, -2:].flatten()),
    "positions by index": lambda x, y: F.cross_entropy(
        x[:, torch.tensor([0, 3])].reshape(-1, VOCAB), y[:, torch.tensor([0, 3])].reshape(-1)
    ),
    "boolean mask": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "one row": lambda x, y: F.cross_entropy(x[0], y[0]),
    "ellipsis": lambda x, y: F.cross_entropy(x[1, ...], y[1]),
    "scaled": lambda x, y: F.cross_entropy((x * 0.25).view(-1, VOCAB), y.view(-1)),
    "scaled from the left": lambda x, y: F.cross_entropy((2.0 * x).view(-1, VOCAB), y.view(-1)),
    "divided": lambda x, y: F.cross_entropy((x / 3.0).view(-1, VOCAB), y.view(-1)),
    "softcap": lambda x, y: F.cross_entropy((torch.tanh(x / 1.5) * 1.5).view(-1, VOCAB), y.view(-1)),
    "softcap by method": lambda x, y: F.cross_entropy(((x / 2.0).tanh() * 2.0).view(-1, VOCAB), y.view(-1)),
    "scale, softcap, scale": lambda x, y: F.cross_entropy(
        (torch.tanh(x * 0.7 / 3.0) * 3.0 * 0.5).view(-1, VOCAB), y.view(-1)
    ),
    "row added": lambda x, y: F.cross_entropy((x + ROW).view(-1, VOCAB), y.view(-1)),
    "rows by function and method": lambda x, y: F.cross_entropy(
        torch.add(x.add(ROW[None]), ROW).view(-1, VOCAB), y.view(-1)
    ),
    "scale, row, scale": lambda x, y: F.cross_entropy(((x * 0.5 + ROW) * 3.0).view(-1, VOCAB), y.view(-1)),
    "row, softcap": lambda x, y: F.cross_entropy((torch.tanh((x + ROW) / 1.5) * 1.5).view(-1, VOCAB), y.view(-1)),
    "row of rows sliced": lambda x, y: F.cross_entropy((x + ROW)[:, 1:].reshape(-1, VOCAB), y[:, 1:].reshape(-1)),
    "column switched off": lambda x, y: F.cross_entropy((x + OFF).view(-1, VOCAB), y.masked_fill(y == 12, 3).view(-1)),
    "row changed afterwards": lambda x, y: _row_changed(x, y),
    "functional forms": lambda x, y: F.cross_entropy(
        torch.reshape(torch.mul(torch.div(x, 2.0), 3.0), (-1, VOCAB)), y.view(-1)
    ),
    "sum": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1), reduction="sum"),
    "rows": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1), reduction="none"),
    "ignore_index": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.clamp(min=3).view(-1), ignore_index=3),
    "label smoothing": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1), label_smoothing=0.1),
    "class weights": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1), torch.linspace(0.5, 2.0, VOCAB)),
    "module": lambda x, y: torch.nn.CrossEntropyLoss(ignore_index=-100)(x.view(-1, VOCAB), y.view(-1)),
    "input by name": lambda x, y: F.cross_entropy(input=x.view(-1, VOCAB), target=y.view(-1)),
    "same device and dtype": lambda x, y: F.cross_entropy(
        x.to(x.device).to("cpu").to(x.dtype).to(device=x.device, dtype=torch.float32).view(-1, VOCAB), y.view(-1)
    ),
}


def _row_changed(x, y):
    row = ROW.clone()
    x = x + row
    row.zero_()
    return F.cross_entropy(x.view(-1, VOCAB), y.view(-1))


@pytest.mark.parametrize("name", FUSED)
def test_recorded_operations_reach_the_fused_loss(head, hidden, labels, calls, name):
    (logits, *found), (_, *expected) = both(head, hidden, lambda x: FUSED[name](x, labels))
    assert calls == {"fused": 1, "plain": 0} and logits.is_deferred
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", [torch.div, torch.divide, lambda x, by, **how: x.div(by, **how)])
def test_a_rounded_quotient_is_computed(head, hidden, form):
    """A program's forward that divided so ended in a TypeError and ran again, with its logits computed."""
    logits = form(OutputHead(head, True)(hidden), 0.25, rounding_mode="floor")
    assert torch.equal(logits, head(hidden).div(0.25, rounding_mode="floor"))


def test_only_the_loss_is_replaced_when_not_fused(head, hidden, labels, calls):
    (logits, *found), (real, *expected) = both(head, hidden, lambda x: FUSED["view"](x, labels), fused=False)
    assert calls == {"fused": 0, "plain": 1}
    torch.testing.assert_close(logits.materialise(), real)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_what_is_known_without_computing(head, hidden):
    logits = OutputHead(head, True)(hidden)
    assert logits.shape == (2, 5, VOCAB) and logits.size() == logits.shape and logits.size(-1) == VOCAB
    assert logits.dim() == logits.ndim == 3 and logits.device == hidden.device and logits.dtype == torch.float32
    assert logits[:, -1:].shape == (2, 1, VOCAB) and logits.view(-1, VOCAB).shape == (10, VOCAB)
    assert "deferred" in repr(logits) and logits.is_deferred
    assert logits.requires_grad and not logits.is_deferred and "computed" in repr(logits)
    with pytest.raises(AttributeError, match="no_such"):
        _ = logits.no_such


def test_the_head_runs_once_and_only_when_needed(head, hidden):
    runs = []
    head.register_forward_hook(lambda *_: runs.append(1))
    logits = OutputHead(head, True)(hidden)
    rows = logits.view(-1, VOCAB).float()
    assert runs == []
    assert torch.equal(rows.materialise(), head(hidden).view(-1, VOCAB))
    assert logits.materialise() is logits.materialise() and len(runs) == 2


def test_the_loss_is_computed_under_the_grad_mode_of_the_head(head, hidden, labels):
    with torch.no_grad():
        logits = OutputHead(head, True)(hidden)
        assert not FUSED["view"](logits, labels).requires_grad
    assert not FUSED["view"](logits, labels).requires_grad
    assert not logits.materialise().requires_grad
    logits = OutputHead(head, True)(hidden)
    with torch.no_grad():
        assert logits.materialise().requires_grad


def test_head_attributes_are_the_module_s(head):
    stand_in = OutputHead(head, True)
    assert stand_in.weight is head.weight and stand_in.bias is head.bias and stand_in.out_features == VOCAB


def test_the_loss_under_autocast_is_fp32_whatever_the_logits():
    """T5 hands its logits to CrossEntropyLoss as autocast made them; torch's loss is fp32, and so is the fused one."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=61, dropout_rate=0.0, **sizes))
    batch = {"input_ids": torch.arange(1, 13).view(2, 6), "labels": torch.arange(3, 13).view(2, 5)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**batch).loss
        with liger_hw.patch(model) as report:
            assert "fused_linear_cross_entropy" in {row.kernel for row in report.patched}
            loss = model(**batch).loss
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0.0)


def test_a_row_with_a_gradient_gets_it(head, hidden, labels):
    gradients = []
    for logits_of in (OutputHead(head, True), head):
        row = ROW.clone().requires_grad_()
        F.cross_entropy((logits_of(hidden) + row).view(-1, VOCAB), labels.view(-1)).backward()
        gradients.append(row.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0
