"""Packed documents: which families and attention implementations keep them apart."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from liger_hw.transformers import packing_leaks  # noqa: E402
from liger_hw.transformers.packing import FORMS  # noqa: E402
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
