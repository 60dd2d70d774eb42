"""A patched model under torch.compile(fullgraph=True): one graph, the same results, one graph more for new shapes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Dynamo traces the same forward for both scopes; eager tests take both.
@pytest.mark.daily(scope="instance")
@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_fullgraph_training_step(mistral, batch, calls, scope):
    model, reference = mistral.model(), mistral.model()
    expected = reference(**batch).loss
    expected.backward()
    with mistral.apply(model=model if scope == "instance" else None):
        counter = CompileCounterWithBackend("aot_eager")
        found = torch.compile(model, backend=counter, fullgraph=True)(**batch)
        found.loss.backward()
    assert found.logits is None and counter.frame_count == 1 and calls["plain"] == 0
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_items_in_batch": torch.tensor(9)},
        pytest.param({"return_token_accuracy": True}, marks=pytest.mark.full),
        {"labels": None},
    ],
    ids=lambda c: next(iter(c)),
)
def test_fullgraph_with_other_arguments(mistral, batch, changes):
    model = mistral.model(num_hidden_layers=1)
    with mistral.apply(model=model):
        inputs = {**batch, **changes}
        expected = model(**inputs)
        found = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    assert found.keys() | {"logits"} == expected.keys() | {"logits"} and {"loss", "logits"} & set(found)
    for key in {"loss", "logits", "token_accuracy"} & set(found):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


def test_new_shapes_recompile_once_for_dynamic_sizes(mistral):
    counter = CompileCounterWithBackend("eager")
    with mistral.apply():
        compiled = torch.compile(mistral.model(num_hidden_layers=1), backend=counter, fullgraph=True)
        for rows, length in ((2, 7), (3, 9), (5, 12), (4, 17)):
            ids = torch.randint(3, 61, (rows, length))
            assert torch.isfinite(compiled(input_ids=ids, labels=ids, use_cache=False).loss)
    assert counter.frame_count <= 2


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        return grad * 2 * logits / logits.numel()


@pytest.mark.full  # a graph break and more graphs; test_logits_sweep.py has such a loss without a compiler
def test_a_loss_by_an_autograd_function_keeps_its_gradient(mistral, batch):
    """Traced into, it would be cut off from the logits: the graph breaks and real logits are computed."""
    model, reference = mistral.model(num_hidden_layers=0), mistral.model(num_hidden_layers=0)
    for each in (model, reference):
        each.loss_function = lambda logits, labels, **_: _Squared.apply(logits.float())
    reference(**batch).loss.backward()
    with mistral.apply(model=model):
        torch.compile(model, backend="eager")(**batch).loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, reference.lm_head.weight.grad, rtol=2e-4, atol=2e-6)
