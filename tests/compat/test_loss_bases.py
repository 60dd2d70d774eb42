"""Custom losses on Liger's base classes, against formulas on whole logits in fp64."""

from __future__ import annotations

import itertools
import math
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from chunked_loss import formulas

import liger_hw.chunked_loss
from liger_hw.compat.loss_bases import (
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPPOBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)

VOCAB, HIDDEN, LENGTH = 37, 5, 7
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class PairFunction(LigerFusedLinearPreferenceBase):
    @staticmethod
    def preference_loss_fn(
        chosen_logps, rejected_logps, full_target, ref_chosen_logps=0.0, ref_rejected_logps=0.0, beta=0.1, margin=0.0
    ):
        c, r = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
        losses = -F.logsigmoid(beta * (c - r) - margin)
        return losses.sum() / (full_target.shape[0] // 2), beta * c, beta * r, losses.sum()

    @classmethod
    def forward(cls, ctx, x, weight, target, bias, ref, nll_target, alpha, beta, margin, average, chunk_size):
        return super().forward(
            cls=cls,
            ctx=ctx,
            _input=x,
            weight=weight,
            target=target,
            bias=bias,
            alpha=alpha,
            beta=beta,
            compute_nll_loss=alpha > 0,
            nll_target=nll_target,
            compiled=True,
            use_ref_model=ref is not None,
            **dict(zip(("ref_input", "ref_weight", "ref_bias"), ref or ())),
            average_log_prob=average,
            chunk_size=chunk_size,
            margin=margin,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], *(None,) * 7


class SequenceFunction(LigerFusedLinearUnpairedPreferenceBase):
    @staticmethod
    def preference_loss_fn(logps, labels, full_target, ref_log_prob_chunk=None, beta=0.1, kl=None):
        ratio = logps if ref_log_prob_chunk is None else logps - ref_log_prob_chunk
        losses = 1 - torch.sigmoid(beta * torch.where(labels, ratio - kl, kl - ratio))
        rewards = (torch.where(which, beta * ratio, 0.0).sum() for which in (labels, ~labels))
        return losses.sum() / full_target.shape[0], *rewards

    @classmethod
    def forward(cls, ctx, x, weight, target, labels, bias, ref, kl, beta, average, chunk_size):
        ref = dict(zip(("ref_input", "ref_weight", "ref_bias"), ref or ()))
        options = {"beta": beta, "kl": kl, "average_log_prob": average, "chunk_size": chunk_size}
        return super().forward(cls, ctx, x, weight, target, labels, bias, use_ref_model=bool(ref), **ref, **options)

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearUnpairedPreferenceBase.backward(ctx, grad_output)[:5], *(None,) * 5


class TeacherFunction(LigerFusedLinearDistillationBase):
    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5):
        p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        middle = torch.logaddexp(q + math.log(beta), p + math.log(1 - beta))
        rows = (beta * q.exp() * (q - middle) + (1 - beta) * p.exp() * (p - middle)).sum(-1)
        return rows.masked_fill(target == ignore_index, 0.0).sum()

    @classmethod
    def forward(
        cls, ctx, x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias, hard, soft, chunk_size, both
    ):
        options = {"weight_hard_loss": hard, "weight_soft_loss": soft, "chunk_size": chunk_size, "beta": 0.3}
        more = {"temperature": 1.7, "return_soft_hard_loss": both, "compiled": True}
        heads = x, weight, teacher_x, teacher_weight
        return super().forward(cls, ctx, *heads, labels, bias, teacher_bias, **options, **more)

    @staticmethod
    def backward(ctx, grad_output, *args):
        return *LigerFusedLinearDistillationBase.backward(ctx, grad_output, *args)[:6], *(None,) * 5


class PolicyFunction(LigerFusedLinearPPOBase):
    @staticmethod
    def ppo_loss_fn(
        per_token_logps,
        attention_mask,
        advantages,
        full_attention_mask,
        ref_per_token_logps,
        old_per_token_logps,
        vllm_is_ratio,
        epsilon_low,
        epsilon_high,
        beta,
        num_items_in_batch,
        **kwargs,
    ):
        old = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
        ratio, advantages = (per_token_logps - old).exp(), advantages.unsqueeze(1)
        losses = -torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
        losses = losses if vllm_is_ratio is None else losses * vllm_is_ratio
        kl = torch.zeros_like(losses)
        if ref_per_token_logps is not None:
            kl = (ref_per_token_logps - per_token_logps).exp() - (ref_per_token_logps - per_token_logps) - 1
        count = LigerFusedLinearPPOBase._compute_dapo_normalizer(full_attention_mask, num_items_in_batch)
        kl_mean = (kl * attention_mask).sum() / full_attention_mask.sum()
        return ((losses + beta * kl) * attention_mask).sum() / count, [kl_mean]

    @classmethod
    def forward(cls, ctx, x, weight, ids, mask, advantages, bias, ref_logps, old_logps, ref, vllm, items, chunk_size):
        return super().forward(
            cls=cls,
            ctx=ctx,
            _input=x,
            weight=weight,
            selected_token_ids=ids,
            attention_mask=mask,
            advantages=advantages,
            bias=bias,
            ref_per_token_logps=ref_logps,
            old_per_token_logps=old_logps,
            **dict(zip(("ref_input", "ref_weight", "ref_bias"), ref or ())),
            beta=0.04,
            temperature=0.8,
            use_ref_model=ref is not None or ref_logps is not None,
            chunk_size=chunk_size,
            vllm_is_ratio=vllm,
            num_items_in_batch=items,
        )

    @staticmethod
    def backward(ctx, grad_output, *grad_metrics):
        return *LigerFusedLinearPPOBase.backward(ctx, grad_output)[:6], *(None,) * 6


# -- the same in plain torch, on whole logits ------------------------------------------------------------------------


def token_logps(x, weight, bias, labels, temperature=1.0):
    return formulas.token_logps(formulas.head(x, weight, bias) / temperature, labels)


def plain_pairs(x, weight, target, bias, ref, nll_target, alpha, beta, margin, average, chunk_size):
    def pair_loss(chosen, rejected, ref_chosen, ref_rejected):
        c, r = chosen - ref_chosen, rejected - ref_rejected
        losses = -F.logsigmoid(beta * (c - r) - margin)
        return losses, (beta * c, beta * r, losses.sum())

    options = {"average": average, "nll_weight": alpha or None, "nll_target": nll_target, "ref": ref}
    return formulas.paired(x, weight, target, bias, pair_loss, **options)


def plain_sequences(x, weight, target, labels, bias, ref, kl, beta, average, chunk_size):
    return formulas.kto(x, weight, target, labels, bias, ref, kl, beta=beta, average_log_prob=average)


def plain_teacher(x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias, hard, soft, chunk_size, both):
    logits = F.linear(x, weight, bias)
    padded = F.pad(logits / 1.7, (0, teacher_weight.shape[0] - weight.shape[0]))
    p, q = padded.softmax(-1), (F.linear(teacher_x, teacher_weight, teacher_bias) / 1.7).softmax(-1)
    middle = 0.3 * q + 0.7 * p
    rows = 0.3 * (q * (q / middle).log()).sum(-1) + 0.7 * (p * (p / middle).log()).sum(-1)
    soft_loss, hard_loss = rows[labels != -100].mean(), F.cross_entropy(logits, labels)
    loss = hard * hard_loss + soft * soft_loss
    return (loss, soft_loss, hard_loss) if both else loss


def plain_policy(x, weight, ids, mask, advantages, bias, ref_logps, old_logps, ref, vllm, items, chunk_size):
    options = {"ref_logps": ref_logps, "old_logps": old_logps, "vllm_is_ratio": vllm, "num_items": items}
    loss, (kl, _) = formulas.grpo(x, weight, ids, mask, advantages, bias, ref, temperature=0.8, **options)
    return loss, (kl,)


# -- comparing them --------------------------------------------------------------------------------------------------


class Draw:
    def __init__(self, dtype=torch.float64):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape, scale=1.0):
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale).to(self.dtype)

    def head(self, *shape, bias=True, hidden=HIDDEN, vocab=VOCAB):
        return self(*shape, hidden), self(vocab, hidden), self(vocab) if bias else None

    def labels(self, *shape):
        ids = torch.randint(VOCAB, shape, generator=self.generator)
        ids[torch.rand(shape, generator=self.generator) < 0.3] = -100
        ids[..., 0] = 3
        return ids

    def bools(self, *shape):
        return torch.rand(shape, generator=self.generator) < 0.6


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else [t for part in found for t in flat(part)]


def results(function, head, args, options, frozen=()):
    """Outputs, and the gradients of input, weight and bias for an incoming gradient of 0.7.

    args, options: what follows the weight, and what follows the bias.
    """
    leaves = [None if t is None else t.detach().clone().requires_grad_(i not in frozen) for i, t in enumerate(head)]
    x, weight, bias = leaves
    outputs = flat(function(x, weight, *args, bias, *options))
    (outputs[0] * 0.7).backward()
    return [t.detach() for t in outputs], [None if t is None else t.grad for t in leaves]


def same(mine, plain):
    torch.testing.assert_close(mine, plain, **EXACT)


HEADS = [(bias, frozen) for bias in (True, False) for frozen in ((), (1,), (0,))]
"""Whether there is a bias, and which of input and weight need no gradient."""


@pytest.mark.parametrize("bias, frozen", HEADS)
@pytest.mark.parametrize("pairs, chunk_size", [(1, 1), (3, 1), (5, 2), (5, 9)])
def test_pairs(bias, frozen, pairs, chunk_size):
    draw = Draw()
    head, ref = draw.head(2 * pairs, LENGTH, bias=bias), draw.head(2 * pairs, LENGTH, bias=bias)
    target, nll_target = draw.labels(2 * pairs, LENGTH), draw.labels(2 * pairs, LENGTH)
    for with_ref, alpha, average, labels in itertools.product(
        (ref, None), (0.0, 0.3), (True, False), (nll_target, None)
    ):
        options = with_ref, labels, alpha, 0.2, 0.1, average, chunk_size
        given = head, (target,), options, frozen
        same(results(PairFunction.apply, *given), results(plain_pairs, *given))


@pytest.mark.parametrize("bias, frozen", HEADS)
@pytest.mark.parametrize("batch, chunk_size", [(1, 1), (3, 1), (7, 2), (5, 9)])
def test_sequences(bias, frozen, batch, chunk_size):
    draw = Draw()
    head, ref = draw.head(batch, LENGTH, bias=bias), draw.head(batch, LENGTH, bias=bias)
    target, good = draw.labels(batch, LENGTH), draw.bools(batch)
    for with_ref, average in itertools.product((ref, None), (True, False)):
        options = with_ref, 0.4, 0.2, average, chunk_size
        given = head, (target, good), options, frozen
        same(results(SequenceFunction.apply, *given), results(plain_sequences, *given))


@pytest.mark.parametrize("bias, frozen", HEADS)
@pytest.mark.parametrize("rows, chunk_size, more_words", [(1, 1024, 0), (13, 4, 0), (13, 5, 3), (12, 4, 0)])
def test_distillation(bias, frozen, rows, chunk_size, more_words):
    draw = Draw()
    head = draw.head(rows, bias=bias)
    teacher_x, teacher_weight, teacher_bias = draw.head(rows, bias=bias, hidden=3, vocab=VOCAB + more_words)
    labels = draw.labels(1, rows)[0]
    for hard, soft, both in itertools.product((0.0, 0.6), (0.0, 0.5), (True, False)):
        options = teacher_bias, hard, soft, chunk_size, both
        given = head, (teacher_x, teacher_weight, labels), options, frozen
        same(results(TeacherFunction.apply, *given), results(plain_teacher, *given))


@pytest.mark.parametrize("bias, frozen", HEADS)
@pytest.mark.parametrize("batch, chunk_size", [(1, 1), (3, 1), (7, 2), (5, 9)])
def test_policy(bias, frozen, batch, chunk_size):
    draw = Draw()
    head, ref = draw.head(batch, LENGTH, bias=bias), draw.head(batch, LENGTH, bias=bias)
    ids, mask, advantages = draw.labels(batch, LENGTH).clamp_min(0), draw.bools(batch, LENGTH).long(), draw(batch)
    mask[:, 0] = 1
    near = token_logps(*head, ids, 0.8)
    old, ref_logps = near + draw(batch, LENGTH, scale=0.4), near + draw(batch, LENGTH, scale=0.4)
    ratios = draw(batch, LENGTH).exp()
    for refs, vllm, items in (
        ((None, None, None), None, None),
        ((ref_logps, old, None), ratios, 11),
        ((None, old, ref), ratios[:, :1], None),
        ((None, None, ref), ratios[:, 0], 11),
    ):
        options = *refs, vllm, items, chunk_size
        given = head, (ids, mask, advantages), options, frozen
        same(results(PolicyFunction.apply, *given), results(plain_policy, *given))


def test_a_bf16_weight_s_gradient_is_summed_in_fp32():
    """64 chunks of one sequence: a sum in bf16 is farther from fp64 than one rounding is."""
    draw = Draw(torch.bfloat16)
    head = draw.head(64, LENGTH)
    ids, mask = draw.labels(64, LENGTH).clamp_min(0), torch.ones(64, LENGTH)
    given = (ids, mask, draw(64).abs() + 0.5), (None, None, None, None, None, 1)
    exact = results(plain_policy, [t.double() for t in head], *given)[1][1]
    mine = results(PolicyFunction.apply, head, *given)[1][1]
    assert mine.dtype is torch.bfloat16
    assert (mine.double() - exact).norm() < 2**-8 * exact.norm()


def test_one_chunk_s_logits_are_alive():
    seen = []

    class Function(TeacherFunction):
        @staticmethod
        def distillation_loss_fn(student_logits, teacher_logits, **options):
            assert all(kept() is None for kept in seen) and student_logits.shape == (4, VOCAB)
            seen.extend(weakref.ref(t) for t in (student_logits, teacher_logits))
            return (student_logits - teacher_logits).square().sum()

    draw = Draw()
    x, weight, _ = (t.requires_grad_() for t in draw.head(12))
    Function.apply(x, weight, *draw.head(12)[:2], draw.labels(12), None, None, 0.5, 0.5, 4, False).backward()
    assert len(seen) == 6


def test_backward_again_and_second_derivatives():
    draw = Draw()
    x, weight, bias = (t.requires_grad_() for t in draw.head(2, LENGTH))
    target = draw.labels(2, LENGTH)
    loss, _ = PairFunction.apply(x, weight, target, bias, None, None, 0.3, 0.2, 0.0, True, 1)
    first = torch.autograd.grad(3 * loss, (x, weight, bias), retain_graph=True)
    same(torch.autograd.grad(3 * loss, (x, weight, bias), retain_graph=True), first)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_call_keeps_no_graph_and_a_weight_s_hook_runs_once():
    draw, calls = Draw(), []
    x, weight, bias = (t.requires_grad_() for t in draw.head(6, LENGTH))
    weight.register_hook(calls.append)
    loss, metrics = PairFunction.apply(x, weight, draw.labels(6, LENGTH), bias, None, None, 0.3, 0.2, 0.0, True, 1)
    assert not any(t.requires_grad for t in metrics)
    loss.backward()
    assert len(calls) == 1


def test_a_loss_that_depends_on_nothing_has_gradients_of_zero():
    class Function(SequenceFunction):
        @staticmethod
        def preference_loss_fn(logps, labels, full_target, **options):
            return torch.ones((), dtype=logps.dtype)

    draw = Draw()
    x, weight, bias = (t.requires_grad_() for t in draw.head(3, LENGTH))
    loss, _ = Function.apply(x, weight, draw.labels(3, LENGTH), draw.bools(3), bias, None, None, 0.1, False, 1)
    loss.backward()
    assert loss == 3 and not any(t.grad.any() for t in (x, weight, bias))


def test_soft_and_hard_loss_have_no_gradient():
    draw = Draw()
    x, weight, bias = (t.requires_grad_() for t in draw.head(6))
    heads = x, weight, *draw.head(6)[:2]
    loss, soft, hard = TeacherFunction.apply(*heads, draw.labels(6), bias, None, 0.5, 0.5, 4, True)
    assert loss.requires_grad and not soft.requires_grad and not hard.requires_grad


def test_autocast_sums_the_gradient_of_an_fp32_weight():
    draw = Draw(torch.float32)
    head, target = draw.head(6, LENGTH), draw.labels(6, LENGTH)

    given = (target,), (None, None, 0.3, 0.2, 0.0, True, 1)

    def mine(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return PairFunction.apply(*args)

    (loss, *_), gradients = results(mine, head, *given)
    (expected, *_), exact = results(plain_pairs, [t.double() for t in head], *given)
    assert loss.dtype is torch.float32 and abs(loss - expected) < 2**-7 * expected
    for found, wanted in zip(gradients, exact):
        assert found.dtype is torch.float32 and (found - wanted).norm() < 2**-6 * wanted.norm()


def test_invalid_arguments_raise():
    draw = Draw()
    x, weight, bias = draw.head(3, LENGTH)
    target, good = draw.labels(3, LENGTH), draw.bools(3)
    with pytest.raises(ValueError, match="as many rejected ones; got 3 and 3 sequences"):
        PairFunction.apply(x, weight, target, bias, None, None, 0.0, 0.1, 0.0, True, 1)
    with pytest.raises(ValueError, match="preference_labels must be provided"):
        SequenceFunction.apply(x, weight, target, None, bias, None, None, 0.1, False, 1)
    with pytest.raises(ValueError, match=r"vllm_is_ratio must have shape \(3,\), \(3, 1\) or \(3, 7\), got \(3, 2\)"):
        PolicyFunction.apply(x, weight, target, target, x[:, 0, 0], bias, None, None, None, x[:, :2, 0], None, 1)
    with pytest.raises(ValueError, match="max_completion_length must be provided"):
        LigerFusedLinearPPOBase.forward(PolicyFunction, None, x, weight, target, target, good, loss_type="dr_grpo")
    with pytest.raises(ValueError, match="needs ref_input and ref_weight"):
        PairFunction.apply(x[:2], weight, target[:2], bias, (None, None, None), None, 0.0, 0.1, 0.0, True, 1)
    for function, args in {
        PairFunction: (target[:2, 1:], bias, None, None, 0.0, 0.1, 0.0, True, 1),
        SequenceFunction: (target[:2, 1:], good[:2], bias, None, None, 0.1, False, 1),
        TeacherFunction: (x[:2], weight, target[:2, 1:], bias, None, 0.5, 0.5, 4, False),
        PolicyFunction: (target[:2, 1:], target[:2, 1:], good[:2], bias, None, None, None, None, None, 1),
    }.items():
        with pytest.raises(ValueError, match="(target|selected_token_ids) must"):
            function.apply(x[:2], weight, *args)


def test_the_normalizer(monkeypatch):
    count, mask = LigerFusedLinearPPOBase._compute_dapo_normalizer, torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert count(mask) == 3 and count(mask).dtype is torch.float32 and count(0 * mask) == 1
    assert count(mask, 7) == count(mask, torch.tensor(7)) == 7 and count(mask, 0) == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t: t.add_(17))
    assert count(mask) == 5 and count(mask, 36) == 9 and count(mask, 2) == 1


def test_torch_compile_breaks_its_graph_there():
    draw = Draw()
    head, target = draw.head(6, LENGTH), draw.labels(6, LENGTH)

    def step(x, weight, bias):
        return 3 * PairFunction.apply(2 * x, weight, target, bias, None, None, 0.3, 0.2, 0.0, True, 1)[0]

    same(results(torch.compile(step, backend="aot_eager"), head, (), ()), results(step, head, (), ()))


@pytest.mark.parametrize("name", ["CPO", "CosineSimilarity", "DPO", "GRPO", "JSD", "KTO", "ORPO", "SimPO"])
def test_a_ready_loss_cannot_be_given_another_function(name):
    """It would never be called."""
    home = getattr(liger_hw.chunked_loss, f"LigerFusedLinear{name}Loss").__module__
    ready = getattr(sys.modules[home], f"LigerFusedLinear{name}Function")
    with pytest.raises(TypeError, match="Mine: ppo_loss_fn would never be called"):
        type("Mine", (ready,), {"ppo_loss_fn": staticmethod(lambda **given: None)})
    assert type("Mine", (ready,), {"note": 1}).note == 1
