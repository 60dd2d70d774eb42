"""Every option of every chunked loss is tried: most against the formulas (`cases`), the others here."""

from __future__ import annotations

import inspect

import cases
import pytest
import torch
from cases import CASES, ONE_OF_EACH, VOCAB
from harness import tensors

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


class _Call:
    """A call of a module of each family on the same hidden states, with labels and settings of one's own."""

    def __init__(self, lane, generator):
        def random(*shape):
            return torch.randn(shape, generator=generator).to(lane.device)

        self.x, self.weight = random(4, 5, 16).requires_grad_(), random(VOCAB, 16).requires_grad_()
        self.teacher, self.old = (random(4, 5, 16), random(VOCAB, 16)), random(4, 5) - 4
        self.labels = torch.randint(3, VOCAB, (4, 5), generator=generator).to(lane.device)
        self.labels[:, 3] = -100
        self.labels[1, 2] = -100

    def __call__(self, family, labels, **settings):
        x, w, name = self.x, self.weight, family
        if name in ("dpo", "kto"):
            settings = {"use_ref_model": False, **settings}
        loss = _module(name)(**settings)
        good = torch.arange(4, device=x.device) % 2 == 0
        if name == "kto":
            out = loss(x, w, labels, None, good)
        elif name == "grpo":
            ones = torch.ones_like(labels)
            out = loss(x, w, labels.clamp_min(0), ones, self.old[:, 0], None, self.old, self.old)
        elif name == "distillation":
            teacher, teacher_weight = self.teacher
            out = loss(x.flatten(0, 1), w, teacher.flatten(0, 1), teacher_weight, labels.flatten())
        else:
            out = loss(w, x, labels)
        seen = tensors(out)
        return [t.detach() for t in seen], torch.autograd.grad(seen[0], (x, w))


def _same(one, other):
    assert len(one[0]) == len(other[0])
    torch.testing.assert_close((*one[0], *one[1]), (*other[0], *other[1]), rtol=0, atol=0)
    assert all(gradient.norm() > 0 for gradient in one[1])


# The kernels' own ignore_index is tests/kernels/test_losses_options.py's.
@pytest.mark.daily("interpret", ignored="2")
@pytest.mark.parametrize("ignored", [2, 1 << 40, -1])
@pytest.mark.parametrize("family", [name for name in MODULES if name != "grpo"])
def test_another_ignore_index(lane, family, ignored, generator):
    """A class of the vocabulary, or a number outside of it, instead of -100: the same bits."""
    call = _Call(lane, generator)
    moved = call.labels.masked_fill(call.labels == -100, ignored)
    _same(call(family, call.labels), call(family, moved, ignore_index=ignored))


# No argument of this kind reaches a kernel.
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("settings", [{"compiled": False}, {"chunk_size": 3}])
@pytest.mark.parametrize("family", MODULES)
def test_what_changes_nothing(lane, family, settings, generator):
    call = _Call(lane, generator)
    _same(call(family, call.labels), call(family, call.labels, **settings))


def test_soft_and_hard_losses_are_returned_when_asked_for(lane, generator):
    call = _Call(lane, generator)
    (loss,), gradients = call("distillation", call.labels)
    (again, soft, hard), others = call("distillation", call.labels, return_soft_hard_loss=True)
    _same(([loss], gradients), ([again], others))
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
