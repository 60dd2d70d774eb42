"""The public ways in: liger_hw.patch, the functions by model type for frameworks, AutoLigerKernelForCausalLM."""

from __future__ import annotations

import functools
import logging

import convergence
import pytest
import torch
import transformers

import liger_hw
import liger_hw.transformers
from liger_hw.transformers import apply
from liger_hw.transformers.models import specs
from liger_hw.transformers.tiny import tiny_model

APPLY = liger_hw.transformers.MODEL_TYPE_TO_APPLY_LIGER_FN


def test_patch_takes_a_class_an_instance_and_any_module(family, batch):
    model = family.model()
    expected = model(**batch).loss
    for target in (family.causal_lm, model):
        with liger_hw.patch(target) as report:
            kernels = {row.kernel for row in report.patched}
            assert kernels == {"rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"}
            torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-6)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    assert [row.kernel for row in liger_hw.patch(layers).patched] == ["layer_norm"]


def test_patch_refuses_what_it_cannot_be(family):
    with pytest.raises(TypeError, match="got str; load it first"):
        liger_hw.patch("mistralai/Mistral-7B-v0.1")
    with pytest.raises(TypeError, match="got Linear"):
        liger_hw.patch(torch.nn.Linear)
    for patch in (lambda **part: liger_hw.patch(family.model(), **part), family.apply):
        with pytest.raises(TypeError, match="cross_entropy must be True or False, got 'no'"):
            patch(cross_entropy="no")  # as a configuration file may give it: it would count as True
        with pytest.raises(ValueError, match="exclude each other; pass cross_entropy=True together with"):
            patch(cross_entropy=True)
    with pytest.raises(TypeError, match="revert: model must be a loaded model or a class of models, got str"):
        liger_hw.revert("model")
    with pytest.raises(AttributeError, match="did you mean 'patch'"):
        getattr(liger_hw, "ptach")  # noqa: B009


@pytest.mark.parametrize("name", ["nemotron", "llava", "internvl", "smolvlm"])
def test_functions_that_take_any_keyword_in_liger_warn_of_unknown_ones(name, monkeypatch):
    asked = []
    monkeypatch.setattr(apply, "_patch_family", lambda spec, model, activations, options: asked.append(options))
    function = getattr(liger_hw.transformers, f"apply_liger_kernel_to_{name}")
    with pytest.warns(UserWarning, match=r"unexpected keyword argument 'ropes', which is ignored.*'rope'\?") as said:
        function(ropes=True, rope=False)
    assert len(said) == 1 and "ropes" not in asked[0] and asked[0]["rope"] is False


def test_patch_parts_can_be_left_out(family):
    report = liger_hw.patch(family.model(), rope=False, swiglu=False)
    assert {row.part for row in report.rows} == {"rms_norm", "fused_linear_cross_entropy", "activations"}
    report = liger_hw.patch(family.model(), rope=False, swiglu=False, activations="keep")
    kernels = {row.part for row in report.rows if row.state == "patched"}
    assert kernels == {"rms_norm", "fused_linear_cross_entropy"}


def test_every_family_is_found_by_its_model_types():
    for spec in specs().values():
        for model_type in spec.model_types:
            assert APPLY[model_type].__name__ == spec.function_name
    assert {"llama4_text", "mllama_text_model", "qwen2_vl_text", "gemma3_text"} <= set(APPLY)


def test_apply_by_model_type(family, batch, caplog):
    model = family.model()
    with caplog.at_level(logging.INFO, "liger_hw"):
        report = liger_hw.transformers._apply_liger_kernel(family.name, rms_norm=True, geglu=True, model=object())
    assert "has no keyword geglu; left out" in caplog.text
    with report:
        assert model(**batch).logits.is_deferred


def test_apply_by_model_type_takes_a_partial_function(mistral, monkeypatch):
    """As programs enter for model types of their own; keywords that it does not have are left out."""
    entry = functools.partial(mistral.apply, rope=False)
    monkeypatch.setitem(APPLY, "mistral", entry)
    with liger_hw.transformers._apply_liger_kernel_to_instance(mistral.model(), geglu=True, swiglu=False) as report:
        assert {row.part for row in report.patched} == {"rms_norm", "fused_linear_cross_entropy"}


def test_apply_by_model_type_without_a_function(caplog):
    with liger_hw.transformers._apply_liger_kernel("gpt2") as report:
        assert "fused_linear_cross_entropy" in {row.kernel for row in report.patched}
    with caplog.at_level(logging.WARNING, "liger_hw"):
        assert liger_hw.transformers._apply_liger_kernel("vit") is None
    assert "no causal LM of type 'vit'" in caplog.text


@pytest.mark.parametrize("name, extra", [("llama", "swiglu"), ("gpt2", "layer_norm")])
def test_apply_to_an_instance(name, extra):
    cls = {"llama": transformers.LlamaForCausalLM, "gpt2": transformers.GPT2LMHeadModel}[name]
    report = liger_hw.transformers._apply_liger_kernel_to_instance(tiny_model(cls), **{extra: False})
    assert extra not in {row.part for row in report.rows} and report.patched


def test_auto_model(tmp_path):
    model = tiny_model(transformers.LlamaForCausalLM)
    model.save_pretrained(tmp_path)
    auto = liger_hw.transformers.AutoLigerKernelForCausalLM
    loaded, info = auto.from_pretrained(tmp_path, swiglu=False, dtype=torch.float32, output_loading_info=True)
    assert type(loaded) is transformers.LlamaForCausalLM and not info["missing_keys"]
    forwards = {type(m).__name__ for m in loaded.modules() if "forward" in vars(m)}
    assert "LlamaRMSNorm" in forwards and "LlamaMLP" not in forwards
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-5)
    made = auto.from_config(model.config, swiglu=False)
    assert "forward" in vars(made.model.norm) and "forward" not in vars(made.model.layers[0].mlp)


@pytest.mark.daily(name="llama")
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_patched_and_unpatched_learn_alike(name):
    spec = specs()[name]
    row = convergence.check_training(name, spec.models[0], getattr(liger_hw.transformers, spec.function_name))
    assert row["outcome"] == "verified", row["reason"]
    assert row["last"] < 0.7 * row["first"] and row["calls"]["fused_linear_cross_entropy"] == convergence.STEPS


def test_a_vision_encoder_on_its_own_learns_to_name_bytes():
    spec = specs()["pixtral"]
    row = convergence.check_training(
        "pixtral", spec.models[0], getattr(liger_hw.transformers, spec.function_name), steps=8
    )
    assert row["outcome"] == "verified", row["reason"]
    assert row["last"] < 0.7 * row["first"] and row["calls"]["rms_norm"] and row["calls"]["rope"]
