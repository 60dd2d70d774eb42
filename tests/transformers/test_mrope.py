"""Qwen2-VL in transformers 4, with cos and sin of three axes: the kernel reads one of two equal halves in text only.

Of the halves of the towers, made outside an embedding, nothing is known.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import liger_hw.transformers
from liger_hw.kernels.rotary.qwen2vl_mrope import Qwen2VLMRopeFunction
from liger_hw.transformers.tiny import tiny_model
from liger_hw.transformers.verify import step

pytestmark = pytest.mark.cpu

FAMILIES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}


@pytest.fixture(params=FAMILIES)
def family(request):
    modeling = importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")
    if not hasattr(modeling, "apply_multimodal_rotary_pos_emb"):
        pytest.skip("this transformers merges the three axes beforehand")
    return request.param, modeling, getattr(modeling, f"{FAMILIES[request.param]}ForConditionalGeneration")


@pytest.fixture
def shared_halves(monkeypatch):
    """The kernel's `shared_halves` at every call, also of a replacement that an earlier test left in place."""
    found = []
    real = Qwen2VLMRopeFunction.apply
    monkeypatch.setattr(Qwen2VLMRopeFunction, "apply", lambda *a: found.append(a[-1]) or real(*a))
    return found


def _loss(model):
    """Of text whose tokens stand at another place on each axis, and of an image's patches."""
    source = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 100, (2, 12), generator=source)
    places = torch.randint(60, (3, 2, 12), generator=source)
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=source)

    def loss():
        patches = model.model.visual(pixels, torch.tensor([[1, 4, 4]]))
        patches = patches if isinstance(patches, torch.Tensor) else patches[0]
        return model(input_ids=ids, labels=ids, position_ids=places).loss + patches.square().mean()

    return loss


def _rotary_rows(report):
    return {(row.kernel, row.variant) for row in report.patched if row.part == "rope"}


def _steps_alike(family, shared_halves, scope, shared):
    """A step, patched and not: the same numbers, with `shared_halves` as given at every call."""
    name, _, cls = family
    apply = getattr(liger_hw.transformers, f"apply_liger_kernel_to_{name}")
    model = tiny_model(cls)
    expected, wanted = step(model, _loss(model), 0)
    with apply(model=model) if scope == "instance" else apply() as report:
        assert _rotary_rows(report) == {("vision_rope", ""), ("qwen2vl_mrope", "halves shared" if shared else "")}
        found, gradients = step(model, _loss(model), 0)
    assert shared_halves == [shared] * 4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=2e-4, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_halves_of_text_are_known_to_be_equal(family, shared_halves, scope):
    _steps_alike(family, shared_halves, scope, True)


@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_unequal_halves_of_text_are_both_read(family, shared_halves, scope, monkeypatch):
    name, modeling, _ = family
    embedding = getattr(modeling, f"{FAMILIES[name]}RotaryEmbedding")
    real = embedding.forward

    def unequal(self, x, position_ids):
        return tuple(t * torch.linspace(0.5, 1, t.shape[-1]) for t in real(self, x, position_ids))

    monkeypatch.setattr(embedding, "forward", unequal)
    _steps_alike(family, shared_halves, scope, False)
