"""What `LigerORPOTrainer` takes of a model, without TRL: hidden states whose product with the head are the logits."""

from __future__ import annotations

import pytest
import torch
import transformers

from liger_hw.compat.orpo_trainer import _FusedORPO, _head_and_hidden
from liger_hw.transformers.tiny import tiny_model

IDS = torch.arange(4, 16).view(2, 6)
MASK = torch.ones_like(IDS)


def _model(family, **chosen):
    model_class = getattr(transformers, f"{family}ForCausalLM", None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return tiny_model(model_class, **chosen).eval()


@pytest.mark.parametrize(("family", "chosen"), [("Llama", {}), ("OPT", {}), ("Granite", {"logits_scaling": 1.0})])
def test_the_logits_are_the_heads_product(family, chosen):
    model = _model(family, **chosen)
    logits = model(IDS, attention_mask=MASK, use_cache=False).logits
    head, hidden = _head_and_hidden(model, IDS, MASK)
    torch.testing.assert_close(head(hidden), logits)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("RecurrentGemma", {"logits_soft_cap": 1.0}),
        ("FalconH1", {"lm_head_multiplier": 0.05}),
        ("Gemma2", {"final_logit_softcapping": 2.0}),
        ("Cohere", {"logit_scale": 0.5}),
        ("Granite", {"logits_scaling": 4.0}),
        ("xLSTM", {"output_logit_soft_cap": 2.0}),
    ],
)
def test_logits_that_are_more_are_refused(family, chosen):
    model = _model(family, **chosen)
    with pytest.raises(ValueError, match="more than a linear layer.*use TRL's ORPOTrainer"):
        _head_and_hidden(model, IDS, MASK)


def test_biased_logits_and_encoder_decoders_are_refused():
    model = _model("Llama")
    head, bias = model.lm_head, torch.ones(model.config.vocab_size)

    class Biased(type(model)):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits + bias
            return outputs

    model.__class__ = Biased
    with pytest.raises(ValueError, match="a bias of their own"):
        _head_and_hidden(model, IDS, MASK)
    model.lm_head = torch.nn.Sequential(head)
    with pytest.raises(ValueError, match="more than a linear layer"):
        _head_and_hidden(model, IDS, MASK)
    trainer = _FusedORPO()
    trainer.is_encoder_decoder = True
    with pytest.raises(ValueError, match="decoders alone; use TRL's ORPOTrainer"):
        trainer.concatenated_forward(model, {})
