"""The logits in a patched model's outputs are to every program what the unpatched model's are, and not computed before.

A case is a function of (outputs, model); patched and unpatched model must return or raise the same.
"""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.autograd.graph import get_gradient_edge

import liger_hw


def saved(outputs):
    buffer = io.BytesIO()
    torch.save(outputs, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)["logits"]


def of_hook(logits):
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.clone()))
    F.cross_entropy(logits.flatten(0, 1), torch.arange(logits[..., 0].numel())).backward()
    return seen


def detached_without_grad(logits):
    with torch.no_grad():
        scaled = logits * 2.0
    return scaled.requires_grad, scaled, F.cross_entropy(scaled.flatten(0, 1), torch.arange(scaled[..., 0].numel()))


CASES = {
    "isinstance": lambda o, m: (isinstance(o.logits, torch.Tensor), torch.is_tensor(o.logits)),
    "what is known": lambda o, m: (
        *(o.logits.shape, o.logits.dtype, o.logits.device, o.logits.ndim, len(o.logits), o.logits.numel()),
        *(o.logits.requires_grad, o.logits.is_leaf, o.logits.is_contiguous(), o.logits.stride(), o.logits.nbytes),
    ),
    "item": lambda o, m: o.to_tuple()[1],
    "detach": lambda o, m: o.logits.detach(),
    "data": lambda o, m: o.logits.data,
    "numpy": lambda o, m: o.logits.detach().numpy(),
    "np.array with gradient": lambda o, m: np.array(o.logits),
    "dlpack": lambda o, m: torch.from_dlpack(o.logits.detach()),
    "dlpack with gradient": lambda o, m: torch.from_dlpack(o.logits),
    "deepcopy": lambda o, m: copy.deepcopy(o),
    "copy": lambda o, m: copy.copy(o)["logits"],
    "pickle": lambda o, m: pickle.loads(pickle.dumps(o))["logits"],
    "save": lambda o, m: saved(o),
    "view of another dtype": lambda o, m: o.logits.view(torch.int32),
    "collate": lambda o, m: torch.utils.data.default_collate([o.logits, o.logits]),
    "pytree": lambda o, m: torch.utils._pytree.tree_map_only(torch.Tensor, torch.exp, dict(o))["logits"],
    "trainer's detach": lambda o, m: transformers.trainer_pt_utils.nested_detach((o.logits,)),
    "vmap": lambda o, m: torch.func.vmap(torch.sum)(o.logits),
    "hook": lambda o, m: of_hook(o.logits),
    "without grad": lambda o, m: detached_without_grad(o.logits),
    "gradient by it": lambda o, m: torch.autograd.grad(o.logits.logsumexp(-1).sum(), o.logits),
    "not a way to the loss": lambda o, m: torch.autograd.grad(o.logits.sum(), m.model.norm.weight),
}


@pytest.fixture
def models(mistral):
    """(unpatched, patched)"""
    pair = mistral.model(num_hidden_layers=1), mistral.model(num_hidden_layers=1)
    with liger_hw.patch(pair[1]):
        yield pair


def of(case, model, batch):
    """What a case returns, or what it raises."""
    outputs = model(**batch)
    assert type(outputs.logits) is torch.Tensor or outputs.logits.is_deferred
    try:
        return case(outputs, model)
    except Exception as error:
        return type(error), str(error).splitlines()[0]


def assert_same(found, expected):
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_same(*pair)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor) and found.requires_grad == expected.requires_grad
        if expected.is_floating_point():
            torch.testing.assert_close(found + 0, expected, rtol=1e-4, atol=1e-5)
        else:
            assert found.shape == expected.shape and found.dtype == expected.dtype
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert found == expected


@pytest.mark.parametrize("name", CASES)
def test_they_are_what_the_unpatched_model_s_are(models, batch, name):
    expected, found = (of(CASES[name], model, batch) for model in models)
    assert_same(found, expected)


def test_what_only_looks_at_them_computes_nothing(models, batch):
    outputs = models[1](**batch)
    logits = outputs.logits
    assert logits.shape == (*batch["input_ids"].shape, logits.size(-1)) and logits.requires_grad and not logits.is_leaf
    for made in (logits.float(), logits[:, 1:].contiguous().flatten(0, 1)):
        assert isinstance(made, torch.Tensor) and made.is_deferred and made.requires_grad
    with torch.no_grad():
        copied = logits.clone()
    assert copied.is_deferred and not copied.requires_grad
    outputs.loss.backward()
    assert logits.is_deferred and "deferred" in repr(logits)


def test_asking_for_their_address_raises(models, batch):
    """An extension in C++ that asks for the memory at once gets an error, and not address 0."""
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(models[1](**batch).logits)


def test_a_loss_is_saved_without_a_warning(models, batch, recwarn):
    saved(models[1](**batch))
    assert not [w for w in recwarn if "will not be serialized" in str(w.message)]


@pytest.mark.parametrize("watched", ["weight", "hidden states"])
def test_a_gradient_s_hook_runs_once(models, batch, watched):
    """The logits' own backward is a backward inside the backward: hooks of what they are computed from are outside."""
    gradients = []
    for model in models:
        model.zero_grad()
        outputs = model(**batch, output_hidden_states=True)
        tensor = model.lm_head.weight if watched == "weight" else outputs.hidden_states[-1]
        handle = tensor.register_hook(lambda grad: grad * 0.5)
        outputs.logits.logsumexp(-1).square().mean().backward()
        handle.remove()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*reversed(gradients), rtol=1e-3, atol=1e-5)


def _of_program(outputs, ids):
    logits = outputs.logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def _backward(loss, logits, watched):
    loss.backward(inputs=None if watched else [logits])
    return logits.grad


def _seen_by_a_hook(loss, logits):
    gradients = []
    logits.register_hook(gradients.append)
    loss.backward()
    return gradients[0]


FUSED_LOSSES = {
    "the model's": lambda outputs, ids: outputs.loss,
    "a program's": _of_program,
    "both": lambda outputs, ids: outputs.loss + 2 * _of_program(outputs, ids),
    "and a penalty": lambda outputs, ids: outputs.loss + outputs.logits.square().mean(),
    "a program's and a penalty": lambda outputs, ids: _of_program(outputs, ids) + outputs.logits.square().mean(),
    "a penalty": lambda outputs, ids: outputs.logits.square().mean(),
}
WAYS = {
    "grad": lambda loss, logits: torch.autograd.grad(loss, logits)[0],
    "grad of several": lambda loss, logits: torch.autograd.grad([loss, loss * 2], [logits], allow_unused=True)[0],
    "grad of an edge": lambda loss, logits: torch.autograd.grad([get_gradient_edge(loss)], [logits], [torch.ones(())])[
        0
    ],
    "backward to them": lambda loss, logits: _backward(loss, logits, False),
    "retain_grad": lambda loss, logits: [logits.retain_grad(), _backward(loss, logits, True)][1],
    "register_hook": _seen_by_a_hook,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", FUSED_LOSSES)
def test_a_gradient_with_respect_to_logits_is_right_or_refused(models, batch, loss, way):
    """Where a fused loss is in the graph, its part would be missing. (A penalty's gradient alone, read from `.grad`,
    could be right: which loss wrote it is not known.)"""
    expected = models[0](**batch)
    expected = WAYS[way](FUSED_LOSSES[loss](expected, batch["input_ids"]), expected.logits)
    for options in ({}, {"skip_logits": False}):
        outputs = models[1](**batch, **options)
        value = FUSED_LOSSES[loss](outputs, batch["input_ids"])
        if options or loss == "a penalty" and way != "backward to them":
            torch.testing.assert_close(WAYS[way](value, outputs.logits), expected, rtol=1e-4, atol=1e-5)
        elif way == "backward to them" and "penalty" not in loss:  # torch wrote no gradient there
            with pytest.warns(UserWarning, match="does not pass through the logits.*; call the model with skip"):
                assert WAYS[way](value, outputs.logits) is None
        else:
            with pytest.raises(RuntimeError, match="does not pass through the logits.*; call the model with skip"):
                WAYS[way](value, outputs.logits)


@pytest.mark.filterwarnings("ignore")
def test_no_gradient_is_kept_where_torch_keeps_none(models, batch):
    for loss in (*FUSED_LOSSES.values(), lambda outputs, ids: outputs.logits.sum()):
        for model in models:
            outputs = model(**batch)
            loss(outputs, batch["input_ids"]).backward()
            assert outputs.logits.grad is None and hasattr(outputs.logits, "grad")


@pytest.mark.parametrize("module", ["torch.distributed.fsdp", "deepspeed.runtime.utils", "lightning.fabric.wrappers"])
def test_an_engine_s_hook_on_every_output_waits_for_backward_to_begin(models, batch, module):
    for read in (lambda out: out.loss, lambda out: out.logits.float().square().mean()):
        gradients, begun = [], []
        for model in models:
            model.zero_grad()
            outputs, count = model(**batch), []
            for output in (outputs.loss, outputs.logits):

                def hook(grad, count=count):
                    count.append(grad)

                hook.__module__ = module
                output.register_hook(hook)
            read(outputs).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            begun.append(bool(count))
        assert begun == [True, True]
        torch.testing.assert_close(*reversed(gradients), rtol=1e-3, atol=1e-5)


def test_a_second_derivative_is_refused(models, batch):
    loss = models[1](**batch).logits.square().sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, models[1].lm_head.weight, create_graph=True)


def test_logits_are_as_wide_as_the_weight(models, batch, calls):
    for model in models:
        torch.manual_seed(0)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32))  # out_features still says 61
        model.config.vocab_size = model.vocab_size = 96
    expected, found = (model(**batch) for model in models)
    assert found.logits.is_deferred and calls["fused"] == 1 and found.logits.shape == expected.logits.shape
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits + 0, expected.logits)
