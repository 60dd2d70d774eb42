"""Reverting patches: copies that no report knows, any order, under somebody else's wrapper; and new models."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from small_models import forwards

import liger_hw
import liger_hw.transformers


def own(model):
    """Modules that hold a forward of their own."""
    return sum("forward" in vars(module) for module in model.modules())


def test_a_deep_copy_is_reverted_alone(family, batch):
    model = family.model()
    report = family.apply(model=model)
    twin = copy.deepcopy(model)
    assert liger_hw.revert(twin) == sum(not row.left_alone for row in report.rows)
    assert forwards(twin) == forwards(family.model()) and own(twin) == 0
    assert model(**batch).logits.is_deferred and type(twin(**batch).logits) is torch.Tensor
    assert liger_hw.revert(twin) == 0
    report.revert()
    assert forwards(model) == forwards(family.model())


def test_parts_are_reverted_in_any_order(family):
    off = {"fused_linear_cross_entropy": False, "rope": False}
    for scope in (None, family.model()):
        before = family.state()
        first = family.apply(model=scope, swiglu=False, **off)
        second = family.apply(model=scope, rms_norm=False, **off)
        third = family.apply(model=scope)
        for report in (first, third, second):
            report.revert()
        assert family.state() == before
        assert scope is None or own(scope) == 0


def test_class_and_instance_in_any_order(family, batch):
    for order in ((0, 1), (1, 0)):
        model = family.model()
        reports = [family.apply(model=model), family.apply()]
        for index in order:
            reports[index].revert()
        assert forwards(model) == forwards(family.model()) and type(model(**batch).logits) is torch.Tensor


def test_a_revert_under_another_wrapper_is_tried_again(family, caplog):
    model = family.model()
    report = family.apply(model=model, rope=False, fused_linear_cross_entropy=False)
    ours = model.model.norm.forward
    model.model.norm.forward = lambda x: ours(x) * 2
    with caplog.at_level(logging.WARNING, "liger_hw"):
        report.revert()
    assert "was changed after patching" in caplog.text and len(report.patches) == 1
    model.model.norm.forward = ours  # they put back what they found
    report.revert()
    assert report.patches == [] and forwards(model) == forwards(family.model())


def test_a_composite_family_patches_what_it_borrows_in_new_models_only():
    transformers = pytest.importorskip("transformers")
    from liger_hw.transformers.tiny import tiny_model

    cls = transformers.SmolVLMForConditionalGeneration
    borrowed = (transformers.models.llama.modeling_llama.LlamaRMSNorm, torch.nn.LayerNorm)
    originals = [kind.forward for kind in borrowed]
    early = tiny_model(cls)
    with liger_hw.transformers.apply_liger_kernel_to_smolvlm() as report:
        assert "LlamaRMSNorm.forward of new models" in str(report)
        late, other = tiny_model(cls), tiny_model(transformers.LlamaForCausalLM)
        assert own(late) >= 9 + 9 + 4 and own(early) == own(other) == 0
        assert [kind.forward for kind in borrowed] == originals
        ids = torch.tensor([[5, 6, 7, 8]])
        torch.testing.assert_close(late(input_ids=ids, labels=ids).loss, early(input_ids=ids, labels=ids).loss)
    assert own(late) == 0 and "post_init" not in vars(cls)
    assert own(tiny_model(cls)) == 0
