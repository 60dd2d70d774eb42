"""patch() with the kernels package installed, in which transformers' rotary functions are modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import liger_hw
from liger_hw.transformers import apply_liger_kernel_to_llama
from liger_hw.transformers.probing import rotary
from liger_hw.transformers.tiny import tiny_model

modeling = pytest.importorskip("transformers.models.llama.modeling_llama")


def _module_of(func):
    """A function as `kernels.use_kernel_forward_from_hub` wraps it."""

    class Func(nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


@pytest.fixture
def as_module(monkeypatch):
    plain = rotary.plain_function(modeling.apply_rotary_pos_emb)
    module = _module_of(plain)
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", module)
    return module


def _loss(model, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("whole_class", (False, True), ids=("instance", "class"))
def test_rope_is_patched(as_module, whole_class):
    model, tokens = tiny_model(modeling.LlamaForCausalLM), torch.arange(18).view(2, 9)
    before = _loss(model, tokens)
    report = apply_liger_kernel_to_llama() if whole_class else liger_hw.patch(model)
    try:
        rows = [row for row in report.rows if row.part == "rope"]
        assert {row.kernel for row in rows} == {"rope"} and all(row.state == "patched" for row in rows)
        after = _loss(model, tokens)
    finally:
        report.revert()
    assert modeling.apply_rotary_pos_emb is as_module
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after[1], before[1], rtol=1e-4, atol=1e-5)


def test_one_that_kernels_has_replaced_is_left_alone(as_module):
    as_module.forward = lambda *args, **kwargs: None  # as `kernelize` binds one
    assert rotary.plain_function(as_module) is None
    assert rotary.functions_called(modeling.LlamaAttention.forward) == {}


def test_a_function_that_a_program_puts_in_its_place_later_runs(as_module, monkeypatch):
    model, tokens = tiny_model(modeling.LlamaForCausalLM), torch.arange(18).view(2, 9)
    liger_hw.patch(model)
    calls = []

    def unrotated(q, k, cos, sin, unsqueeze_dim=1):
        calls.append(1)
        return q, k

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", unrotated)
    model(input_ids=tokens)
    assert len(calls) == model.config.num_hidden_layers
