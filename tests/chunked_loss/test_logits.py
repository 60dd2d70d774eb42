"""triton_grpo_loss: the GRPO family on given logits."""

from __future__ import annotations

import inspect

import formulas
import pytest
import torch

from liger_hw.transformers.grpo_loss import triton_grpo_loss

BATCH, LENGTH, VOCAB = 3, 4, 37
OPTIONS = [
    {},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.1},
    {"loss_type": "sapo", "beta": 0.0},
    {"loss_type": "vespo", "temperature": 1.0},
    {"loss_type": "luspo", "use_bias_correction_kl": True},
    {"loss_type": "dr_grpo", "max_completion_length": 9, "eps_low": 0.05, "eps_high": 0.1},
    {"loss_type": "cispo", "eps_high": 1.5, "num_items_in_batch": 23},
    {"loss_type": "bnpo", "vllm_is_ratio": torch.tensor([0.5, 1.2, 0.9])},
    {"loss_type": "sapo", "sapo_temperature_pos": 1.7, "sapo_temperature_neg": 0.8},
    {"loss_type": "vespo", "vespo_k_pos": 1.4, "vespo_lambda_pos": 2.2, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.2},
]
NAMES = {"eps_low": "epsilon_low", "eps_high": "epsilon_high", "num_items_in_batch": "num_items"}
"""Its argument -> the formulas'."""


class _Made:
    def __init__(self, lane, generator):
        def random(*shape, scale=1.0):
            return (torch.randn(shape, generator=generator) * scale).to(lane.device)

        self.logits = random(BATCH, LENGTH + 1, VOCAB).requires_grad_()
        self.ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator).to(lane.device)
        self.mask = (torch.rand(BATCH, LENGTH, generator=generator) < 0.7).long().to(lane.device)
        self.mask[:, 0] = 1
        self.advantages = random(BATCH)
        self.old, self.ref = random(BATCH, LENGTH, scale=0.3) - 3.6, random(BATCH, LENGTH, scale=0.3) - 3.6

    def ours(self, logits, **options):
        refs = self.ref if options.get("beta", 0.04) else None
        options = {k: v.to(logits.device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return triton_grpo_loss(logits, self.old, refs, self.ids, self.advantages, self.mask, **options)

    def exact(self, logits, **options):
        options = {"temperature": 0.9, "epsilon_high": 0.4, **{NAMES.get(k, k): v for k, v in options.items()}}
        if (vllm := options.get("vllm_is_ratio")) is not None:
            options["vllm_is_ratio"] = vllm.to(logits.device).double()
        logps = formulas.token_logps(logits[:, :-1] / options.pop("temperature"), self.ids)
        refs = self.ref.double() if options.get("beta", 0.04) else None
        given = self.mask, self.advantages.double(), refs, self.old.double()
        return formulas.grpo_from_logps(logps, *given, **{**formulas.GRPO_DEFAULTS, **options})


def test_every_option_is_tried():
    arguments = inspect.signature(triton_grpo_loss).parameters.values()
    known = {p.name for p in arguments if p.default is not p.empty}
    assert known - {name for options in OPTIONS for name in options} == {"completion_mask", "inplace", "reduce"}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o.get("loss_type", "default"))
def test_reduced(lane, options, inplace, generator):
    made = _Made(lane, generator)
    exact_logits = made.logits.detach().double().requires_grad_()
    expected, metrics = made.exact(exact_logits, **options)
    (exact_grad,) = torch.autograd.grad(expected, exact_logits)
    found, seen = made.ours(made.logits * 1.0, reduce=True, inplace=inplace, **options)
    (grad,) = torch.autograd.grad(found, made.logits)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-4, atol=1e-7)
    assert len(seen) == len(metrics) and not grad[:, -1].any()
    for a, b in zip(seen, metrics):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def test_each_token(lane, generator):
    made = _Made(lane, generator)
    losses, kl, clipped = made.ours(made.logits, inplace=False)
    assert losses.shape == kl.shape == clipped.shape == made.mask.shape
    for t in (losses, kl, clipped):
        assert not t[made.mask == 0].any()
    reduced, (mean_kl, share) = made.ours(made.logits, inplace=False, reduce=True)
    count = made.mask.sum()
    for whole, part in ((reduced, losses), (mean_kl, kl), (share, clipped)):
        torch.testing.assert_close(part.sum() / count, whole)
    assert made.ours(made.logits, beta=0.0, inplace=False)[1] is None


@pytest.mark.lanes("cpu", "gpu")
def test_where_the_gradient_goes(lane, generator):
    """inplace=True writes it over the logits, but not with retain_graph; inplace=False leaves them unchanged."""
    made = _Made(lane, generator)
    for inplace, kept, overwritten in ((False, False, False), (True, True, False), (True, False, True)):
        logits = made.logits * 1.0
        before = logits.detach().clone()
        loss, _ = made.ours(logits, reduce=True, inplace=inplace)
        torch.autograd.grad(loss, made.logits, retain_graph=kept)
        assert torch.equal(logits, before) != overwritten


@pytest.mark.lanes("cpu", "gpu")
def test_another_use_of_overwritten_logits_raises(lane, generator):
    made = _Made(lane, generator)
    logits = made.logits * 1.0
    other = logits.square().sum()
    loss, _ = made.ours(logits, reduce=True, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(other + loss, made.logits)


@pytest.mark.lanes("cpu")
def test_errors(lane, generator):
    made = _Made(lane, generator)
    with pytest.raises(ValueError, match=r"logits must be \[batch, length \+ 1, vocab\]"):
        made.ours(made.logits[:, :-1])
    with pytest.raises(ValueError, match="beta=0.04 needs ref_logp"):
        triton_grpo_loss(made.logits, None, None, made.ids, made.advantages)
    with pytest.raises(ValueError, match=r"completion_mask must have shape \(3, 4\)"):
        triton_grpo_loss(made.logits, None, made.ref, made.ids, made.advantages, made.mask[:2])
    with pytest.raises(ValueError, match="loss_type must be one of"):
        made.ours(made.logits, loss_type="ppo")
    for wrong, words in ((made.ids.float(), "must hold indices"), (made.ids.to("meta"), "is on meta")):
        with pytest.raises(ValueError, match=f"^triton_grpo_loss: completion_ids {words}"):
            triton_grpo_loss(made.logits, None, made.ref, wrong, made.advantages)
    with pytest.raises(ValueError, match=r"completion_mask must have shape \(3, 4\), got \(\)"):
        triton_grpo_loss(made.logits, None, made.ref, made.ids, made.advantages, made.mask.tolist())
    made.ids[0, 0] = VOCAB
    with pytest.raises(IndexError, match=r"target\[0\] = 37 is out of bounds"):
        made.ours(made.logits)
