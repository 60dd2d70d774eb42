"""Every option of every chunked loss is tested: most against the formulas (`cases`), the others here."""

from __future__ import annotations

import inspect

import cases
import pytest
import torch
from cases import CASES, ONE_OF_EACH, VOCAB
from harness import changed, tensors

import liger_hw.chunked_loss as chunked_loss

MODULES = {"dpo": "DPO", "orpo": "ORPO", "cpo": "CPO", "simpo": "SimPO", "kto": "KTO", "grpo": "GRPO"}
MODULES |= {"distillation": "JSD"}
HERE = {"ignore_index", "compiled", "chunk_size", "return_soft_hard_loss", "use_ref_model"}
"""use_ref_model is what `ref` of a case sets."""


def _module(family):
    return getattr(chunked_loss, f"LigerFusedLinear{MODULES[family]}Loss")


@pytest.mark.parametrize("family", MODULES)
def test_every_option_is_tried(family):
    known = set(inspect.signature(_module(family).__init__).parameters) - {"self"}
    tried = {name for options in cases._OPTIONS[family] for name in options}
    assert known - tried <= HERE
    assert "use_ref_model" not in known or {True, None} <= {bool(o.get("ref")) or None for o in cases._OPTIONS[family]}


def _run(name, lane, seed, change=torch.clone, **settings):
    """Results and gradients of a case, with changed tensors and settings of its module."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    op, sample = case._replace(options={**case.options, **settings})(
        (4, 5, VOCAB), torch.float32, lane.device, generator
    )
    sample = changed(sample, change)
    seen = tensors(op.function(*sample.args, **sample.kwargs))
    inputs = [t for t in tensors(sample.args) if t.requires_grad]
    return [t.detach() for t in seen], torch.autograd.grad(seen[0], inputs)


def _same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert all(gradient.norm() > 0 for gradient in one[1])


# The kernels' own ignore_index is tests/kernels/test_losses_options.py's.
@pytest.mark.daily("interpret", ignored="2")
@pytest.mark.parametrize("ignored", [2, 1 << 40, -1])
@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if not name.startswith("grpo")])
def test_another_ignore_index(lane, name, ignored, seed):
    """A class of the vocabulary, or a number outside of it, instead of -100: the same bits."""

    def without_class_2(t):
        return t.masked_fill(t == 2, 3) if t.dtype is torch.int64 else t.clone()

    def moved(t):
        return without_class_2(t).masked_fill(t == -100, ignored) if t.dtype is torch.int64 else t.clone()

    _same(_run(name, lane, seed, without_class_2), _run(name, lane, seed, moved, ignore_index=ignored))


# No argument of this kind reaches a kernel.
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("settings", [{"compiled": False}, {"chunk_size": 3}])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_changes_nothing(lane, name, settings, seed):
    _same(_run(name, lane, seed), _run(name, lane, seed, **settings))


def test_soft_and_hard_losses_are_returned_when_asked_for(lane, generator):
    op, sample = CASES["distillation-kind=jsd"]((4, 5, VOCAB), torch.float32, lane.device, generator)
    x, weight, bias, teacher, labels = sample.args
    call = x, weight, *teacher[:2], labels, bias, teacher[2]
    loss = chunked_loss.LigerFusedLinearJSDLoss()(*call)
    again, soft, hard = chunked_loss.LigerFusedLinearJSDLoss(return_soft_hard_loss=True)(*call)
    _same(([loss], torch.autograd.grad(loss, (x, weight))), ([again], torch.autograd.grad(again, (x, weight))))
    torch.testing.assert_close(0.5 * soft + 0.5 * hard, loss)


def test_a_reference_model_that_is_switched_off_is_not_used(lane, generator):
    """use_ref_model=False ignores a reference head that is given, as Liger's does."""
    name = next(n for n in ONE_OF_EACH if n.startswith("dpo"))
    op, sample = CASES[name]((4, 5, VOCAB), torch.float32, lane.device, generator)
    x, weight, bias, target, ref = sample.args
    loss = chunked_loss.LigerFusedLinearDPOLoss(use_ref_model=False)
    torch.testing.assert_close(loss(weight, x, target, bias, *ref)[0], loss(weight, x, target, bias)[0], rtol=0, atol=0)
    with_ref = chunked_loss.LigerFusedLinearDPOLoss(use_ref_model=True)(weight, x, target, bias, *ref)[0]
    assert with_ref.item() != loss(weight, x, target, bias)[0].item()


@pytest.mark.cpu
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "vespo"])
def test_policy_options_are_checked_where_they_are_used(loss_type):
    chunked_loss.LigerFusedLinearGRPOLoss(loss_type=loss_type, sapo_temperature_neg=0.0, sapo_temperature_pos=-1.0)
    with pytest.raises(ValueError, match="sapo_temperature_neg must be positive"):
        chunked_loss.LigerFusedLinearGRPOLoss(loss_type="sapo", sapo_temperature_neg=0.0)
    chunked_loss.LigerFusedLinearGRPOLoss(loss_type="sapo", delta=-1.0)
    with pytest.raises(ValueError, match="delta must be positive"):
        chunked_loss.LigerFusedLinearGRPOLoss(loss_type="grpo", delta=-1.0)
