"""Tiny models of the patched families, and a counter of the losses' calls.

No `__init__.py` in this folder: it would shadow the package `transformers`.
"""

from __future__ import annotations

import importlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

import liger_hw.transformers  # noqa: E402
from liger_hw.transformers import functional  # noqa: E402
from liger_hw.transformers.models import specs  # noqa: E402

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

    def model(self, seed=0, **changes):
        """A tiny model in training mode, weights drawn from `seed` and large enough that logits differ clearly."""
        torch.manual_seed(seed)
        model = self.causal_lm(self.config_class(**{**SIZES, **changes})).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    def slots(self):
        """What a class patch may change: (owner, attribute) pairs."""
        owners = [(cls, "forward") for cls in (self.norm, self.mlp, self.attention, self.causal_lm)]
        return [*owners, (self.modeling, "apply_rotary_pos_emb")]


FAMILIES = {name: Family(name) for name in ("llama", "mistral")}
"""The families that every test of the engine runs on; test_families.py has all the others."""


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def mistral():
    return FAMILIES["mistral"]


@pytest.fixture
def llama():
    return FAMILIES["llama"]


@pytest.fixture(autouse=True)
def nothing_left_patched():
    """Every test gives the classes back as it found them."""
    before = {(id(o), n): vars(o).get(n) for f in FAMILIES.values() for o, n in f.slots()}
    yield
    for each in FAMILIES.values():
        for owner, name in each.slots():
            assert vars(owner).get(name) is before[id(owner), name], f"{owner.__name__}.{name} was left patched"


@pytest.fixture
def batch():
    """Token ids int64 [2, 11] and labels of which some are ignored."""
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(7))
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, -1] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of the two losses: {"fused": n, "plain": n}."""
    counts = {"fused": 0, "plain": 0}

    def counting(name, key):
        function = getattr(functional, name)

        def counted(*args, **kwargs):
            counts[key] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(functional, name, counted)

    counting("liger_fused_linear_cross_entropy", "fused")
    counting("liger_cross_entropy", "plain")
    return counts


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


@pytest.fixture
def same_step():
    """Assert that a patched model gives the loss and gradients of an unpatched one; returns the patched outputs."""

    def check(patched, unpatched, *, expected_inputs=None, rtol=2e-4, atol=2e-6, **inputs):
        expected, wanted = gradients(unpatched, **(expected_inputs or inputs))
        outputs, found = gradients(patched, **inputs)
        torch.testing.assert_close(outputs.loss, expected.loss, rtol=rtol, atol=atol)
        assert_same_gradients(found, wanted, rtol, atol)
        return outputs

    return check


@pytest.fixture
def moe_calls(monkeypatch):
    """The arguments of every call of `liger_fused_moe` by patches made in the test."""
    made, original = [], functional.liger_fused_moe

    def fused_moe(*args, **options):
        made.append((args, options))
        return original(*args, **options)

    monkeypatch.setattr(functional, "liger_fused_moe", fused_moe)
    return made
