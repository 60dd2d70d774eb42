"""What a report shows, how a patch is undone without it, and what a wrong call is told."""

from __future__ import annotations

import pytest
import torch
from harness import python

import liger_hw
from liger_hw.transformers import apply_liger_kernel_to_llama
from liger_hw.transformers.tiny import tiny_config


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(tiny_config(LlamaConfig))


def test_repr_is_short(model):
    report = liger_hw.patch(model)
    assert repr(report).startswith("<PatchReport LlamaForCausalLM (one LlamaForCausalLM): ") and len(repr(report)) < 120
    assert "rms_norm" in str(report)


def test_what_is_left_alone_is_named_by_its_path(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Mish()
    model.model.layers[1].input_layernorm.register_buffer("more", torch.ones(1))
    model.model.layers[1].post_attention_layernorm.register_buffer("more", torch.ones(1))
    report = liger_hw.patch(model)
    rows = [row for row in report.rows if row.state.startswith("left alone")]
    assert [row.path for row in rows if row.part == "swiglu"] == ["model.layers.0.mlp"]
    text = str(report)
    assert "LlamaMLP.forward (model.layers.0.mlp)" in text
    assert "LlamaRMSNorm.forward x2 (first model.layers.1.input_layernorm)" in text


def test_a_long_reason_stands_below_the_table(model, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    model.model.layers[0].mlp.act_fn = torch.nn.Mish()
    model.lm_head.register_forward_hook(lambda *_: None)
    lines = str(liger_hw.patch(model)).splitlines()
    reasons = [line for line in lines if line.startswith("(")]
    assert [line.partition(":")[0] for line in reasons] == ["(1) left alone", "(2) cross_entropy (logits computed"]
    assert "left alone (1)" in "".join(lines) and "cross_entropy (2)" in "".join(lines)
    assert max(len(line) for line in lines if line not in reasons) < 160


def test_it_ends_with_what_matters_most(model):
    model.lm_head.register_forward_hook(lambda *_: None)
    model.model.layers[0].mlp.act_fn = torch.nn.Mish()
    report = liger_hw.patch(model)
    row = next(line for line in str(report).splitlines() if "cross_entropy (" in line)
    assert "logits kept" in row and "patched" not in row
    size = f"{model.config.vocab_size} a token, {model.config.vocab_size / 512:.1f} KiB in bf16"
    why = "its hooks need its logits"
    last = f"A training step holds the logits of the head ({size}): {why}; left alone: swiglu."
    assert str(report).splitlines()[-1] == last
    report.revert()
    assert str(report).splitlines()[-1] == "Reverted: none of this is in place any more."
    assert "reverted" in repr(report)
    model.lm_head._forward_hooks.clear()
    with liger_hw.patch(model) as report:
        last = f"A training step with labels never holds the logits ({size}); left alone: swiglu."
        assert str(report).splitlines()[-1] == last
    with liger_hw.patch(model, fused_linear_cross_entropy=False, cross_entropy=True) as report:
        assert "holds the logits of the head" in str(report) and "cross_entropy=True asks for them" in str(report)


class Ln(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * x


class FeedFwd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Attention(FeedFwd):
    def forward(self, x, position_ids):
        return x


class SomeNorm(Ln):
    pass


def test_what_is_not_looked_at_for_its_name_is_listed():
    own = torch.nn.Sequential(Ln(), FeedFwd(), FeedFwd(), SomeNorm(), Attention(), torch.nn.Embedding(2, 8))
    text = " ".join(str(liger_hw.patch(own)).split())
    assert "not looked at, as the names say neither norm nor MLP: Ln, FeedFwd x2" in text and "Attention" not in text
    assert "SomeNorm.forward" in text and "liger_fused_linear_cross_entropy" in text


def test_nothing_of_a_llama_is_overlooked(model):
    assert "not looked at" not in str(liger_hw.patch(model))


def test_reverting_a_model_says_where_its_classes_are_patched(model, caplog):
    with apply_liger_kernel_to_llama():
        liger_hw.patch(model)
        assert liger_hw.revert(model) == 0
        assert "liger_hw.revert(LlamaForCausalLM)" in caplog.text
        assert liger_hw.revert(type(model)) > 0
    caplog.clear()
    liger_hw.patch(model)
    assert liger_hw.revert(model) > 0 and not caplog.text


def test_a_discarded_report_is_found_by_the_class(llama):
    before = llama.state()
    llama.apply()
    assert sum(value is not before[key] for key, value in llama.state().items()) == 4
    assert liger_hw.revert(llama.causal_lm) >= 4
    assert llama.state() == before
    assert liger_hw.revert(llama.causal_lm) == 0


def test_reverting_a_class_leaves_other_families_patched(llama, mistral):
    with mistral.apply() as report:
        assert liger_hw.revert(llama.causal_lm) == 0 and report.patches
        assert liger_hw.revert(mistral.causal_lm) > 0 and not report.patches


def test_a_positional_model_raises_with_the_right_call(model):
    for wrong in (model, type(model)):
        with pytest.raises(
            TypeError, match=r"^apply_liger_kernel_to_llama\(\): pass the model by name: .*\(model=model\)$"
        ):
            apply_liger_kernel_to_llama(wrong)


def test_disabled_means_no_kernel_anywhere():
    """Nothing is patched, and an op runs its reference even where kernels are interpreted: no launch is resolved."""
    code = """
import torch, liger_hw
from transformers import LlamaConfig, LlamaForCausalLM
from liger_hw import registry
from liger_hw.transformers.functional import liger_rms_norm
model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     vocab_size=16))
report = liger_hw.patch(model, activations="full")
assert not report.patched and not report.patches and "LIGER_HW_DISABLE" in str(report)
x = torch.ones(2, 16, requires_grad=True)
liger_rms_norm(x, torch.ones(16), 1e-6).sum().backward()
print(len(registry.plans()))
"""
    env = {"LIGER_HW_DISABLE": "1", "LIGER_HW_INTERPRET": "1", "TRITON_INTERPRET": "1"}
    assert python("-c", code, env=env) == "0\n"
