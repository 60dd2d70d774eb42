"""Every causal LM of transformers, patched against unpatched, in the ways that programs use it; lane `models`, nightly.

Each test builds a tiny model of one family, takes down what it does unpatched, patches it and asks again: losses and
gradients of training, also from the logits and under activation checkpointing, autocast, evaluation and generation.
With OUT set, a line for each family goes into OUT/models.jsonl: what was compared, what a family cannot do unpatched or
does not repeat, and what was wrong.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from families import causal_lms, forwards

import liger_hw
from liger_hw.transformers.tiny import tiny_model

pytestmark = pytest.mark.full

RTOL, GRAD_RTOL, GRAD_ATOL = 1e-5, 2e-3, 2e-5
"""Of losses; of gradients, relative to the largest entry of each, and added to that entry for those that are zero."""
BF16_RTOL = 2e-2


def step(model, loss_of, **inputs):
    """(loss, gradients) with the same random numbers every time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def from_logits(outputs):
    """A loss of the program's own, which reads the logits although labels are given."""
    rows = outputs.logits.float()
    rows = rows.reshape(-1, rows.shape[-1])[:-1]
    target = torch.arange(rows.shape[0]) % 7
    return rows.logsumexp(-1).mean() + F.cross_entropy(rows, target)


def training(model, inputs):
    return step(model.train(), lambda outputs: outputs.loss, **inputs)


def training_on_logits(model, inputs):
    return step(model.train(), from_logits, **inputs)


def training_on_tuples(model, inputs):
    return step(model.train(), lambda outputs: outputs[0], return_dict=False, **inputs)


def checkpointing(reentrant):
    def run(model, inputs):
        if not model.supports_gradient_checkpointing:
            return None
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        try:
            return step(model, lambda outputs: outputs.loss, **inputs)
        finally:
            model.gradient_checkpointing_disable()

    run.__name__ = "reentrant_checkpointing" if reentrant else "checkpointing"
    return run


def under_autocast(model, inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.train()(**inputs).loss
    assert loss.dtype == torch.float32
    return loss.detach(), None


@torch.no_grad()
def evaluation(model, inputs):
    outputs = model.eval()(**inputs)
    return outputs.loss, {"logits": outputs.logits.clone()}


@torch.no_grad()
def generation(model, inputs):
    if not model.can_generate():
        return None
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": False}
    ids = model.eval().generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
    return torch.zeros(()), {"ids": ids.float()}


WAYS = (
    training,
    training_on_logits,
    training_on_tuples,
    checkpointing(False),
    checkpointing(True),
    under_autocast,
    evaluation,
    generation,
)


def differs(found, expected, way):
    """In words, or "" where two results agree."""
    (loss, values), (wanted_loss, wanted) = found, expected
    rtol = BF16_RTOL if way is under_autocast else RTOL
    error = float((loss - wanted_loss).abs())
    if not error <= rtol * float(wanted_loss.abs()) + 1e-6:
        return f"loss {float(loss)}, unpatched {float(wanted_loss)}"
    if wanted is None:
        return ""
    if values.keys() != wanted.keys():
        return f"{sorted(values.keys() ^ wanted.keys())[:3]} of one only"
    for name, value in wanted.items():
        scale = float(value.abs().max()) if value.numel() else 0.0
        error = float((values[name] - value).abs().max()) if value.numel() else 0.0
        if not error <= GRAD_RTOL * (scale + GRAD_ATOL):
            return f"{name} by {error:.1e} of {scale:.1e}"
    return ""


def result_of(way, model, inputs):
    """What `way` gives, or the error that it ends with."""
    try:
        return way(model, inputs)
    except Exception as error:  # a family that cannot do this unpatched need not patched
        return error


def keep_figures(family, **lists):
    """Append the family's line to OUT/models.jsonl, if there is an OUT."""
    if folder := os.environ.get("OUT"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with open(Path(folder, "models.jsonl"), "a") as file:
            file.write(json.dumps({"family": family, **lists}) + "\n")


def skip(family, reason):
    keep_figures(family, skipped=reason)
    pytest.skip(reason)


@pytest.mark.parametrize("family", sorted(causal_lms()))
def test_a_patched_model_does_what_it_did(family):
    try:
        model = tiny_model(getattr(transformers, causal_lms()[family]))
        ids = torch.randint(5, 60, (2, 10), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        labels[0, :3] = -100
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        expected = {way: result_of(way, model, inputs) for way in WAYS}
    except Exception as error:
        skip(family, f"cannot be built: {type(error).__name__}: {error}".splitlines()[0][:150])
    if isinstance(expected[training], Exception):
        skip(family, f"cannot be trained alone: {expected[training]}".splitlines()[0][:150])
    again = {way: result_of(way, model, inputs) for way in WAYS}
    before, compared, unlike, wrong = forwards(model), [], [], []
    with liger_hw.patch(model):
        for way, wanted in expected.items():
            if wanted is None or isinstance(wanted, Exception) or isinstance(again[way], Exception):
                continue
            if differs(again[way], wanted, way):
                unlike.append(way.__name__)  # it does not repeat itself unpatched
                continue
            compared.append(way.__name__)
            found = result_of(way, model, inputs)
            words = repr(found) if isinstance(found, Exception) else differs(found, wanted, way)
            wrong += [f"{way.__name__}: {words}"] if words else []
    keep_figures(family, compared=compared, unlike=unlike, wrong=wrong)
    assert not wrong, "; ".join(wrong)
    assert forwards(model) == before
