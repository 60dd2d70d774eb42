"""Qwen2-VL in transformers 4, with cos and sin of three axes; test_probing.py has halves that are unequal."""

from __future__ import annotations

import importlib

import pytest
import torch
from families import counted, step

import liger_hw.transformers
from liger_hw.transformers.tiny import tiny_model

FAMILIES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}


@pytest.fixture(params=FAMILIES)
def family(request):
    modeling = importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")
    if not hasattr(modeling, "apply_multimodal_rotary_pos_emb"):
        pytest.skip("this transformers merges the three axes beforehand")
    return request.param, modeling, getattr(modeling, f"{FAMILIES[request.param]}ForConditionalGeneration")


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


@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_a_step_of_text_and_patches(family, scope):
    name, modeling, cls = family
    apply = getattr(liger_hw.transformers, f"apply_liger_kernel_to_{name}")
    model = tiny_model(cls)
    expected, expected_gradients = step(model, _loss(model), 0)
    with counted() as calls, apply(model=model) if scope == "instance" else apply() as report:
        assert _rotary_rows(report) == {("vision_rope", ""), ("qwen2vl_mrope", "")}
        loss, gradients = step(model, _loss(model), 0)
    assert calls["qwen2vl_mrope"] == 4
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=2e-4, atol=1e-5, msg=parameter)
