"""The losses against TRL's own code, called on the same hidden states: loss and gradient norms.

TRL's trainers compute their losses in methods; each is called here with a stand-in for the trainer that has the few
attributes it reads. Skipped where trl is not installed (pip install trl).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import liger_hw.chunked_loss as chunked_loss

pytest.importorskip("trl", "1.14", reason="written for trl 1.14 and later (TRL=1.16.0 bash ci/cpu.sh)")

BATCH, LENGTH, HIDDEN, VOCAB = 4, 7, 16, 43


class _Accelerator:
    device, num_processes, sync_gradients = torch.device("cpu"), 1, False

    @staticmethod
    def gather(t):
        return t

    gather_for_metrics = gather

    @staticmethod
    def reduce(t, reduction="sum"):
        return t

    @staticmethod
    def unwrap_model(model):
        return getattr(model, "module", model)

    autocast = staticmethod(contextlib.nullcontext)


@pytest.fixture
def head(generator):
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).requires_grad_()
    return x, (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3).requires_grad_()


@pytest.fixture
def ref(generator):
    return torch.randn(BATCH, LENGTH, HIDDEN, generator=generator), torch.randn(
        VOCAB, HIDDEN, generator=generator
    ) * 0.3


def _logps(x, weight, ids):
    return F.linear(x, weight).log_softmax(-1).gather(-1, ids.clamp_min(0)[..., None])[..., 0]


def _same(ours, theirs, head):
    """Losses and gradients agree, and with them the gradient norm that a trainer clips and logs."""
    torch.testing.assert_close(ours, theirs)
    found, expected = torch.autograd.grad(ours, head), torch.autograd.grad(theirs, head)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
        torch.testing.assert_close(a.norm(), b.norm())
    assert found[1].norm() > 0


GRPO_ARGS = {
    "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "steps_per_generation": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "bnpo", "delta": 1.2},
        {"loss_type": "dr_grpo", "max_completion_length": 9},
        {"loss_type": "dapo", "use_bias_correction_kl": True, "vllm": True},
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"loss_type": "sapo"},
        {"loss_type": "luspo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0},
        {"loss_type": "vespo", "vllm": True},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "default",
)
def test_grpo_step(options, head, generator):
    from trl import GRPOTrainer

    options = dict(options)
    vllm = torch.rand(BATCH, LENGTH, generator=generator) + 0.5 if options.pop("vllm", False) else None
    x, weight = head
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    mask = (torch.rand(BATCH, LENGTH, generator=generator) < 0.8).long()
    mask[:, 0] = 1
    advantages = torch.randn(BATCH, generator=generator)
    old, ref_logps = (
        _logps(x, weight, ids).detach() + 0.3 * torch.randn(BATCH, LENGTH, generator=generator) for _ in "ab"
    )
    shown = {"beta": 0.04, "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": "dapo", "max_completion_length": None,
             "importance_sampling_level": "token"} | options  # fmt: skip
    trainer = SimpleNamespace(
        **shown,
        args=SimpleNamespace(**{k: options.get(k, v) for k, v in GRPO_ARGS.items()}),
        accelerator=_Accelerator(),
        model=SimpleNamespace(training=False),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=vllm is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list), "train": defaultdict(list)},
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_a, **_k: (_logps(x, weight, ids), torch.zeros(BATCH, LENGTH), None),
    )
    inputs = {
        **{"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask},
        **{"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref_logps},
        "num_items_in_batch": mask.sum(),
    }
    if vllm is not None:
        inputs["importance_sampling_ratio"] = vllm
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    ours = chunked_loss.LigerFusedLinearGRPOLoss(**options)(
        *(x, weight, ids, mask, advantages),
        ref_per_token_logps=ref_logps,
        old_per_token_logps=old,
        vllm_is_ratio=vllm,
        num_items_in_batch=mask.sum(),
    )[0]
    _same(ours, theirs, head)


class _Model:
    """What a TRL trainer calls: log-probabilities of the shifted labels, from hidden states that are there already."""

    training = False

    def __init__(self, x, weight):
        self.x, self.weight = x, weight

    def __call__(self, input_ids=None, labels=None, **_):
        target = labels[:, 1:]
        logps = _logps(self.x, self.weight, target) * (target != -100)
        nothing = torch.zeros_like(logps)
        return SimpleNamespace(
            log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), log_sum_sq_probs=nothing
        )


def _trained():
    """A trainer's own model is asked for its state only."""
    model = torch.nn.Identity().eval()
    model.is_gradient_checkpointing = False
    return model


def _batch(generator):
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    mask = (torch.rand(BATCH, LENGTH + 1, generator=generator) < 0.8).long()
    mask[:, 0], mask[:, 1] = 0, 1  # the first token is prompt: nothing predicts it
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    return batch, ids.masked_fill(mask == 0, -100)[:, 1:]


@pytest.mark.parametrize(
    "kind",
    [
        *("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair"),
        *("sppo_hard", "apo_zero", "apo_down", "discopop"),
    ],
)
def test_dpo(kind, head, ref, generator):
    from trl import DPOTrainer

    batch, target = _batch(generator)
    trainer = SimpleNamespace(
        **{"loss_types": [kind], "loss_weights": [1.0], "beta": 0.3, "label_smoothing": 0.1},
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        accelerator=_Accelerator(),
        model=_trained(),
        ref_model=_Model(*ref),
        **{"aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": False, "use_weighting": False},
        **{"f_divergence_type": "reverse_kl", "_total_train_tokens": 0},
        _metrics={"eval": defaultdict(list)},
    )
    theirs = DPOTrainer._compute_loss(trainer, _Model(*head), batch, False)
    loss = chunked_loss.LigerFusedLinearDPOLoss(beta=0.3, loss_type=kind, label_smoothing=0.1)
    x, weight = head
    _same(loss(weight, x, target, None, *ref)[0], theirs, head)


def test_kto(head, ref, generator):
    from trl import KTOTrainer

    batch, target = _batch(generator)
    labels = torch.tensor([True, False, True, True])
    trainer = SimpleNamespace(
        **{"loss_type": "kto", "beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.0, "calculate_KL": True},
        accelerator=_Accelerator(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        model=_trained(),
        ref_model="reference",
        **{"aux_loss_enabled": False, "precompute_ref_logps": False, "_total_train_tokens": 0},
        _metrics={"eval": defaultdict(list)},
    )
    kl_logps = {"policy": torch.tensor([-3.0, -2.0, -4.0, -1.0]), "reference": torch.tensor([-3.5, -2.5, -4.5, -2.5])}
    reference = _Model(*ref)
    trainer.ref_model = reference
    trainer._compute_kl_logps = lambda model, _: kl_logps["reference" if model is reference else "policy"]
    theirs = KTOTrainer._compute_loss(trainer, _Model(*head), batch | {"label": labels}, False)
    kl = (kl_logps["policy"] - kl_logps["reference"]).mean().clamp_min(0)
    x, weight = head
    loss = chunked_loss.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True)
    _same(loss(x, weight, target, None, labels, *ref, None, kl)[0], theirs, head)


def _sums(head, target, average):
    x, weight = head
    logps = (_logps(x, weight, target) * (target != -100)).sum(-1)
    logps = logps / (target != -100).sum(-1) if average else logps
    return logps.chunk(2)


def _nll(head, target):
    x, weight = head
    half = BATCH // 2
    return F.cross_entropy(F.linear(x, weight)[:half].flatten(0, 1), target[:half].flatten())


@pytest.mark.parametrize("kind", ["cpo", "simpo"])
def test_cpo_and_simpo(kind, head, generator):
    from trl.experimental.cpo import CPOTrainer

    _, target = _batch(generator)
    names = {"cpo": "sigmoid", "simpo": "simpo"}
    trainer = SimpleNamespace(
        **{"alpha": 0.0, "beta": 0.3, "label_smoothing": 0.1, "loss_type": names[kind], "simpo_gamma": 0.5},
        accelerator=_Accelerator(),
    )
    losses = CPOTrainer.cpo_loss(trainer, *_sums(head, target, kind == "simpo"))[0]
    theirs = losses.mean() + 0.7 * _nll(head, target)
    module = {"cpo": chunked_loss.LigerFusedLinearCPOLoss, "simpo": chunked_loss.LigerFusedLinearSimPOLoss}[kind]
    x, weight = head
    _same(module(beta=0.3, alpha=0.7, label_smoothing=0.1)(weight, x, target)[0], theirs, head)


def test_orpo(head, generator):
    from trl.experimental.orpo import ORPOTrainer

    batch, target = _batch(generator)
    whole = batch["input_ids"][:, 1:]  # TRL's likelihood is that of prompt and answer
    trainer = SimpleNamespace(beta=0.3, accelerator=_Accelerator())
    losses, _, _, ratio, odds = ORPOTrainer.odds_ratio_loss(trainer, *_sums(head, target, True))
    theirs = _nll(head, whole) - losses.mean()
    x, weight = head
    ours, metrics = chunked_loss.LigerFusedLinearORPOLoss(beta=0.3)(weight, x, target, nll_target=whole)
    _same(ours, theirs, head)
    torch.testing.assert_close(torch.stack(metrics[-2:]), torch.stack([ratio, odds]).detach())


@pytest.mark.parametrize("train_eval", ["train", "eval"])
def test_the_orpo_trainer_of_liger(train_eval, generator):
    """`LigerORPOTrainer` returns what TRL's trainer does, of a model whose logits it never asks for."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.experimental.orpo import ORPOTrainer

    from liger_hw.compat.orpo_trainer import LigerORPOTrainer
    from liger_hw.transformers.tiny import tiny_config

    with torch.random.fork_rng():
        model = LlamaForCausalLM(tiny_config(LlamaConfig))
    batch = {}
    for side, length in (("chosen", LENGTH), ("rejected", LENGTH - 2)):
        ids = torch.randint(4, model.config.vocab_size, (BATCH, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        labels = torch.where(mask == 1, ids, -100)
        labels[:, :2] = -100
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    results = []
    for cls, called in ((ORPOTrainer, model), (LigerORPOTrainer, torch.nn.DataParallel(model))):
        trainer = object.__new__(cls)
        trainer.__dict__ |= {"accelerator": _Accelerator(), "beta": 0.3, "is_encoder_decoder": False}
        trainer.__dict__ |= {"padding_value": 0, "aux_loss_enabled": False}
        loss, metrics = trainer.get_batch_loss_metrics(called, batch, train_eval)
        results.append((loss, metrics, torch.autograd.grad(loss, list(model.parameters()))))
    (expected, their_metrics, their_grads), (loss, metrics, grads) = results
    torch.testing.assert_close(loss, expected)
    assert metrics == pytest.approx(their_metrics, rel=1e-4, abs=1e-5) and "forward" not in vars(model)
    for a, b in zip(grads, their_grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def test_functions_of_tokens(head, generator):
    """The table of docs/losses.md: what replaces TRL's functions of logits and its fused head."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    from liger_hw.transformers.functional import liger_fused_linear_log_probs, liger_log_probs

    x, weight = head
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    mask = torch.rand(BATCH, LENGTH, generator=generator) < 0.7
    target = tokens.masked_fill(~mask, -100)
    theirs = utils.selective_log_softmax_and_entropy(F.linear(x, weight), tokens, temperature=0.7, row_mask=mask)
    ours = liger_log_probs(F.linear(x, weight), target, 0.7, return_entropy=True)
    _same((ours.log_probs + 2 * ours.entropy).sum(), (theirs[0] + 2 * theirs[1]).sum(), head)
    torch.testing.assert_close(
        liger_log_probs(F.linear(x, weight), tokens), utils.selective_log_softmax(F.linear(x, weight), tokens)
    )
    torch.testing.assert_close(
        liger_log_probs(F.linear(x, weight), tokens, return_entropy=True).entropy,
        utils.entropy_from_logits(F.linear(x, weight)),
    )
    bias, outputs = torch.randn(VOCAB, generator=generator), ("log_probs", "entropy", "is_top1")
    rows = F.pad(target[:, 1:], (0, 1), value=-100)
    theirs = ChunkedLogProbFunction.apply(x[rows != -100], weight, bias, rows[rows != -100], 0.7, 16, 5.0, 1.0, outputs)
    ours = liger_fused_linear_log_probs(
        x, weight, target, bias, 0.7, 5.0, shift_labels=True, return_entropy=True, return_top1=True
    )
    torch.testing.assert_close(ours.log_probs[rows != -100], theirs[0])
    assert torch.equal(ours.is_top1[rows != -100], theirs[4].bool())
    _same((ours.log_probs + 2 * ours.entropy).sum(), (theirs[0] + 2 * theirs[1]).sum(), head)
