"""Packed documents: which families and attention implementations keep them apart."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from liger_hw.transformers import packing_leaks  # noqa: E402
from liger_hw.transformers.packing import FORMS, packing_note  # noqa: E402
from liger_hw.transformers.tiny import tiny_model  # noqa: E402

pytestmark = [pytest.mark.lanes("cpu")]


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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name",
    ["Llama", "Qwen3", "Gemma2", "GptOss", "FalconH1", "Qwen3Next", "Qwen2VL"],
)
def test_a_report_says_where_packing_leaks(name, implementation):
    """What the report's table says without running is what trying it gives."""
    suffix = "ForConditionalGeneration" if name == "Qwen2VL" else "ForCausalLM"
    cls = getattr(transformers, f"{name}{suffix}", None)
    if cls is None or implementation == "sdpa" and not cls._supports_sdpa:
        pytest.skip("not in this transformers")
    model = tiny_model(cls, attn_implementation=implementation)
    assert bool(packing_note(model)) == packing_leaks(model)["position_ids"]
    model.config.model_type = "unknown"
    assert not packing_note(model)


def test_the_line_is_in_the_report():
    import liger_hw

    model = tiny_model(transformers.Qwen3NextForCausalLM, attn_implementation="sdpa")
    line = "packed rows leak: with sdpa attention, position_ids do not keep qwen3_next's documents apart"
    assert line in str(liger_hw.patch(model))
    assert "packed rows" not in str(liger_hw.patch(tiny_model(transformers.LlamaForCausalLM)))
