"""A patched tiny model computes what Hugging Face's computes: losses, gradients, logits, generated tokens (fp32)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

SCOPES = ("classes", "instance")


@pytest.fixture(params=SCOPES)
def patched(request, family):
    """patched(**model changes) -> (patched model, unpatched model) of equal weights."""
    reports = []

    def make(options=None, **changes):
        model = family.model(**changes)
        reports.append(family.apply(model=model if request.param == "instance" else None, **(options or {})))
        return model, family.model(cls=family.untouched, **changes)

    yield make
    for report in reports:
        report.revert()


INPUTS = {
    "labels": lambda labels: {},
    "ignore_index": lambda labels: {"labels": labels.masked_fill(labels == -100, 5), "ignore_index": 5},
    "logits_to_keep": lambda labels: {"labels": labels[:, -6:], "logits_to_keep": 6},
}


@pytest.mark.parametrize("inputs", INPUTS)
def test_training_step(patched, batch, calls, same_step, inputs):
    outputs = same_step(*patched(), **{**batch, **INPUTS[inputs](batch["labels"])})
    assert outputs.logits.is_deferred
    assert calls == {"fused": 1, "plain": 0}


def test_training_step_tied_embeddings_get_both_gradient_parts(patched, batch, calls, same_step):
    model, reference = patched(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    same_step(model, reference, **batch)
    assert calls["fused"] == 1
    untied, _ = patched(tie_word_embeddings=False)
    with torch.no_grad():
        for source, copied in ((model.model, untied.model), (model.lm_head, untied.lm_head)):
            copied.load_state_dict(source.state_dict())
    untied(**batch).loss.backward()
    both = untied.model.embed_tokens.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(model.lm_head.weight.grad, both, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("items", [5, torch.tensor(13)])
def test_num_items_in_batch(patched, batch, calls, same_step, items):
    model, reference = patched()
    outputs = same_step(model, reference, num_items_in_batch=items, **batch)
    with torch.no_grad():
        mean = model(**batch).loss
    valid = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(outputs.loss.detach(), mean * valid / items)
    assert calls["fused"] == 2


def test_shift_labels_alone_give_a_loss(patched, batch, calls):
    """test_shift_labels.py has them together with labels."""
    model, _ = patched()
    shifted = torch.roll(batch["labels"], 1, dims=1).contiguous()
    alone = model(batch["input_ids"], shift_labels=shifted).loss
    torch.testing.assert_close(alone, model(**batch, shift_labels=shifted).loss)
    assert calls["fused"] == 2


def test_every_label_ignored(patched, batch):
    model, reference = patched()
    batch["labels"].fill_(-100)
    expected, found = reference(**batch).loss, model(**batch)
    assert expected.isnan() and found.loss.isnan()
    summed = model(**batch, num_items_in_batch=3).loss
    summed.backward()
    assert summed == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_padding_mask_and_labels_by_position(patched, batch, calls, same_step):
    model, reference = patched()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    same_step(model, reference, attention_mask=mask, **batch)
    by_position = model(batch["input_ids"], mask, None, None, None, batch["labels"])
    torch.testing.assert_close(by_position.loss, model(**batch, attention_mask=mask).loss)
    assert by_position.logits.is_deferred
    assert calls["fused"] == 3


def test_tuple_output(patched, batch):
    model, reference = patched()
    found, expected = model(**batch, return_dict=False), reference(**batch, return_dict=False)
    assert isinstance(found, tuple)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1] + 0, expected[1], rtol=1e-4, atol=1e-5)
    kept = model(**batch, return_dict=False, skip_logits=False)
    torch.testing.assert_close(kept[1], expected[1], rtol=1e-4, atol=1e-5)


def test_without_labels_and_in_eval_logits_are_plain(patched, batch, calls):
    model, reference = patched()
    found, expected = model(batch["input_ids"]), reference(batch["input_ids"])
    assert found.loss is None and type(found.logits) is torch.Tensor
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    model.eval(), reference.eval()
    found, expected = model(**batch), reference(**batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert calls == {"fused": 0, "plain": 0}


def test_skip_logits_decides(patched, batch, calls):
    model, reference = patched()
    expected = reference(**batch)
    kept = model(**batch, skip_logits=False)
    torch.testing.assert_close(kept.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept.loss, expected.loss, rtol=1e-4, atol=1e-6)
    assert calls["fused"] == 0
    model.eval()
    skipped = model(**batch, skip_logits=True)
    assert skipped.logits.is_deferred
    torch.testing.assert_close(skipped.loss, expected.loss, rtol=1e-4, atol=1e-6)
    assert calls["fused"] == 1
    torch.testing.assert_close(skipped.logits + 0, expected.logits, rtol=1e-4, atol=1e-5)
    without_labels = model(batch["input_ids"], skip_logits=True)  # Trainer's label smoother takes the labels out
    torch.testing.assert_close(without_labels.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_cross_entropy_keeps_the_logits(patched, batch, calls, same_step):
    model, reference = patched({"cross_entropy": True, "fused_linear_cross_entropy": False})
    outputs = same_step(model, reference, **batch)
    torch.testing.assert_close(outputs.logits, reference(**batch).logits, rtol=1e-4, atol=1e-5)
    assert calls == {"fused": 0, "plain": 1}


def test_token_accuracy(patched, batch):
    model, reference = patched()
    found = model(**batch, return_token_accuracy=True, return_predicted_tokens=True)
    target = batch["labels"][:, 1:]
    hit = (reference(**batch).logits[:, :-1].argmax(-1) == target) & (target != -100)
    expected = hit.sum() / (target != -100).sum()
    torch.testing.assert_close(found.token_accuracy, expected.to(found.token_accuracy.dtype))
    predicted = found.predicted_tokens.view(2, -1)[:, :-1][target != -100]
    assert torch.equal(predicted, reference(**batch).logits[:, :-1].argmax(-1)[target != -100])
    for plain in (model(**batch), model(batch["input_ids"]), model.eval()(**batch)):
        assert plain.token_accuracy is None and plain.predicted_tokens is None  # there, as programs ask for them
        assert not {"token_accuracy", "predicted_tokens"} & set(plain)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "quantised_like"])
@pytest.mark.parametrize("scale", [1.0, math.inf], ids=["fused", "not_fused"])
def test_token_accuracy_of_a_custom_loss(patched, batch, scale, is_whole):
    """`loss_function` of a program gives it too, whether its cross entropy is fused or takes the logits (a cap that the
    fused loss does not have), whether the logits stand in for a tensor or are deferred."""
    model, _ = patched()
    targets = batch["input_ids"].flatten()

    def own(logits, labels, **_):
        capped = logits if scale == 1.0 else -30.0 * torch.tanh(logits / -30.0)
        return F.cross_entropy(capped.flatten(0, 1), targets)

    model.loss_function = own
    if not is_whole:
        model.lm_head.register_forward_hook(lambda *_: None)
    found = model(**batch, return_token_accuracy=True, return_predicted_tokens=True)
    hits = found.logits.detach().flatten(0, 1).argmax(-1) == targets
    torch.testing.assert_close(found.token_accuracy, hits.float().mean())
    torch.testing.assert_close(found.loss, own(found.logits.detach() + 0, None))


def test_a_loss_without_cross_entropy_says_why_there_is_no_accuracy(patched, batch, caplog):
    model, _ = patched()
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    found = model.eval()(**batch, return_token_accuracy=True)
    assert found.token_accuracy is None and "calls no cross entropy, so token_accuracy" in caplog.text


def test_generate_equals_unpatched(patched, batch):
    model, reference = patched()
    model.eval(), reference.eval()
    prompt = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found, expected = model.generate(**prompt, **options), reference.generate(**prompt, **options)
    assert expected.shape[1] > batch["input_ids"].shape[1]
    assert torch.equal(found, expected)
