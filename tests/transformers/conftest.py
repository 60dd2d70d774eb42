"""Fixtures: tiny models of two families, a batch, counters of calls; and a check that classes are given back.

No `__init__.py` in this folder: it would shadow the package `transformers`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from small_models import VOCAB, Family, assert_same_gradients, gradients

from liger_hw.transformers import functional
from liger_hw.transformers import loss as loss_module

FAMILIES = {name: Family(name) for name in ("llama", "mistral")}
"""The families that every test of the engine runs on (daily one); test_families.py has all the others."""


@pytest.fixture(params=[pytest.param("llama", marks=pytest.mark.full), "mistral"])
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
    before = [family.state() for family in FAMILIES.values()]
    yield
    assert [family.state() for family in FAMILIES.values()] == before, "was left patched"


@pytest.fixture(autouse=True)
def warn_again():
    """What is said once a process is said in every test."""
    loss_module.warn_once.cache_clear()


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
    for key, name in (("fused", "liger_fused_linear_cross_entropy"), ("plain", "liger_cross_entropy")):
        original = getattr(functional, name)

        def counted(*args, key=key, function=original, **kwargs):
            counts[key] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(functional, name, counted)
    return counts


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
