"""Packed documents: which families and attention implementations keep them apart."""

from __future__ import annotations

import pytest
import transformers

from liger_hw.transformers import packing_leaks
from liger_hw.transformers.packing import FORMS, LEAKING, packing_note
from liger_hw.transformers.tiny import tiny_model


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_llama_keeps_documents_apart(implementation):
    model = tiny_model(transformers.LlamaForCausalLM, attn_implementation=implementation)
    assert packing_leaks(model) == dict.fromkeys(FORMS, False)


def test_a_recurrent_model_does_not():
    leaks = packing_leaks(transformers.MambaForCausalLM)
    assert leaks["position_ids"] and leaks["position_ids of several rows"]


def test_a_mask_of_its_own_is_seen(monkeypatch):
    """Attention that ignores positions leaks in every form."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: None)
    assert packing_leaks(transformers.LlamaForCausalLM) == dict.fromkeys(FORMS, True)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("family", [*LEAKING, "llama", "qwen3", "gemma2", "phi3"])
def test_a_report_says_where_packing_leaks(family, implementation, monkeypatch):
    """What the report's table says without running is what trying it gives. Flex attention is not compiled: which
    tokens it masks is the same, and inductor does not compile all of it on a CPU."""
    auto = transformers.models.auto.modeling_auto
    maps = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = (names[kind] for names in maps for kind in (f"{family}_text", family) if kind in names)
    cls = next((getattr(transformers, name, None) for name in names), None)
    supports = {"eager": True, "sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}[implementation]
    if cls is None or supports is not True and not getattr(cls, supports, False):
        pytest.skip("not in this transformers")
    raising = "glm4v glm4v_moe granitemoehybrid jamba recurrent_gemma xglm xlstm"
    if transformers.__version__ < "5" and family in raising.split():
        pytest.skip("transformers 4 raises for such a model's packed positions, or without a cache")
    if (family, implementation) == ("gpt_oss", "flex_attention"):
        pytest.skip("its sinks refuse a CPU")
    if implementation == "flex_attention":
        flex = pytest.importorskip("transformers.integrations.flex_attention")
        monkeypatch.setattr(flex.WrappedFlexAttention, "_instance", None)  # what is compiled once for all
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model = tiny_model(cls, attn_implementation=implementation)
    assert bool(packing_note(model)) == packing_leaks(model)["position_ids"]
    model.config.model_type = "unknown"
    assert not packing_note(model)


@pytest.mark.parametrize("family, attention", [("llama", "flash_attention_2"), ("gpt_oss", "flex_attention")])
def test_a_report_says_what_a_cpu_cannot_tell(family, attention):
    model = tiny_model(transformers.LlamaForCausalLM)
    model.config.model_type, model.config._attn_implementation = family, attention
    assert packing_note(model).startswith(f"packed rows: {attention} needs a GPU; call")


def test_a_patch_of_classes_names_every_attention_that_leaks():
    from liger_hw.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3_next

    with apply_liger_kernel_to_qwen3_next() as report:
        assert "packed rows leak: with eager, sdpa attention" in str(report)
    with apply_liger_kernel_to_llama() as report:
        assert "packed rows" not in str(report)


def test_the_line_is_in_the_report():
    import liger_hw

    model = tiny_model(transformers.Qwen3NextForCausalLM, attn_implementation="sdpa")
    line = "packed rows leak: with sdpa attention, position_ids do not keep qwen3_next's documents apart"
    assert line in str(liger_hw.patch(model))
    assert "packed rows" not in str(liger_hw.patch(tiny_model(transformers.LlamaForCausalLM)))
