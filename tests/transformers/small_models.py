"""Tiny models of a patched family, and what one training step of them gives.

Not in conftest.py: a run of several folders has several modules of that name, and an import finds any of them.
"""

from __future__ import annotations

import functools
import importlib.util
import sys

import torch
import transformers

import liger_hw.transformers
from liger_hw.transformers.models import specs

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Family:
    """One family: its public function and its transformers classes."""

    def __init__(self, name):
        spec = specs()[name]
        prefix = spec.models[0].removesuffix("ForCausalLM")
        self.name, self.apply = name, getattr(liger_hw.transformers, spec.function_name)
        self.config_class = getattr(transformers, f"{prefix}Config")
        self.causal_lm = getattr(transformers, f"{prefix}ForCausalLM")
        self.modeling = importlib.import_module(spec.modeling_module)
        self.norm = getattr(self.modeling, f"{prefix}RMSNorm")
        self.mlp = getattr(self.modeling, f"{prefix}MLP")
        self.attention = getattr(self.modeling, f"{prefix}Attention")

    @functools.cached_property
    def untouched(self):
        """The causal LM of a second copy of the family's module, which no patch of its classes reaches."""
        spec = importlib.util.spec_from_file_location(f"{self.modeling.__name__}_untouched", self.modeling.__file__)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, self.causal_lm.__name__)

    def model(self, seed=0, cls=None, **changes):
        """A tiny model in training mode, weights drawn from `seed` and large enough that logits differ clearly."""
        torch.manual_seed(seed)
        model = (cls or self.causal_lm)(self.config_class(**{**SIZES, **changes})).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    def state(self):
        """(owner, attribute) -> the object there, for all that a class patch may change."""
        slots = [(cls, "forward") for cls in (self.norm, self.mlp, self.attention, self.causal_lm)]
        slots += [(self.modeling, "apply_rotary_pos_emb")]
        return {(owner, name): vars(owner).get(name) for owner, name in slots}


def forwards(model):
    """Module name -> the function that its forward is."""
    return {name: getattr(m.forward, "__func__", m.forward) for name, m in model.named_modules()}


def gradients(model, **inputs):
    """(outputs, {parameter name: gradient}) of one forward and backward."""
    model.zero_grad(set_to_none=True)
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, expected, rtol=2e-4, atol=2e-6):
    assert found.keys() == expected.keys()
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
