"""The linear-head core: chunks, their boundaries, an order of rows, a second head, and the rows of log-probabilities."""

from __future__ import annotations

import pytest
import torch
from harness import make, verify

from liger_hw.kernels import _linear_head
from liger_hw.kernels._linear_head import Chunks, HeadGradients, head_gradients, plan_chunks, sweep
from liger_hw.kernels._log_prob_rows import (
    log_prob_buffers,
    log_probs_reference,
    row_log_prob_gradients,
    row_log_probs,
)
from liger_hw.registry import get_op

MANY = 140  # rows: chunks are whole multiples of 128


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 rows at most."""
    for name, value in {"SMALLEST": 64, "LARGEST": 128, "MOST_ROUNDINGS": 100}.items():
        monkeypatch.setattr(_linear_head, name, value)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("name", ["fused_linear_jsd", "fused_linear_kl_div"])
def test_distillation_over_several_chunks(lane, small_chunks, name, seed):
    op = get_op(name)
    verify(op, make(op, (MANY, 9, 19), torch.float32, lane.device, seed, {"labelled": True}), seed)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize(
    "name, options",
    [
        ("fused_linear_cross_entropy", {"biased": True, "label_smoothing": 0.1}),
        ("fused_linear_cross_entropy", {"reduction": "none", "compact": True, "ignored": 0.4}),
        ("fused_linear_scaled_cross_entropy", {"return_entropy": True, "select": 2}),
    ],
)
def test_cross_entropies_over_several_chunks(lane, small_chunks, name, options, seed):
    op = get_op(name)
    verify(op, make(op, (MANY, 9, 19), torch.float32, lane.device, seed, options), seed)


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("n_rows", [0, 1, 127, 1000, 8192, 65536])
@pytest.mark.parametrize("unit", [1, 64, 1000, 3000])
@pytest.mark.parametrize("itemsize, wide", [(2, False), (2, True), (4, False)])
def test_chunks_cover_the_rows_once(n_rows, unit, itemsize, wide):
    n_rows -= n_rows % unit
    chunks = plan_chunks(n_rows, 4096, 131072, itemsize, wide=wide, unit=unit)
    starts, stops = [a for a, _ in chunks.bounds], [b for _, b in chunks.bounds]
    assert [0, *stops][: len(starts)] == starts and (not n_rows or stops[-1] == n_rows)
    assert all(a < b for a, b in chunks.bounds) and chunks.rows == max((b - a for a, b in chunks.bounds), default=0)
    assert itemsize != 2 or chunks.wide or len(chunks.bounds) <= _linear_head.MOST_ROUNDINGS
    if unit <= chunks.rows:
        assert all(a % unit == 0 for a in starts), "a chunk splits a unit that would have fitted"


@pytest.mark.cpu
def test_a_unit_larger_than_the_budget_is_split():
    """One long sequence must not blow the budget."""
    chunks = plan_chunks(65536, 4096, 131072, 2, wide=True, unit=32768)
    assert chunks.rows <= 2 * _linear_head.LARGEST and len(chunks.bounds) > 2


@pytest.mark.cpu
def test_a_second_head_halves_the_rows(monkeypatch):
    monkeypatch.setattr(_linear_head, "LARGEST", 1 << 20)
    one, two = (plan_chunks(1 << 16, 512, 8192, 4, gradients=False, buffers=n) for n in (1, 2))
    assert two.rows == one.rows / 2


# -- rows of log-probabilities ---------------------------------------------------------------------------------------


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("vocab, temperature, softcap", [(37, 1.0, 0.0), (9000, 0.7, 5.0), (1, 2.0, 0.0)])
def test_log_probs_and_any_loss_of_them(lane, generator, vocab, temperature, softcap, ordered):
    """Two chunks of uneven length, slopes for log-probability and entropy of each row, against autograd in fp64."""
    n_rows, hidden = 7, 5

    def random(*shape):
        return torch.randn(shape, generator=generator).to(lane.device)

    x, weight, bias, slopes = random(n_rows, hidden), random(vocab, hidden), random(vocab), random(2, n_rows)
    target = torch.randint(vocab, (n_rows,), generator=generator).to(lane.device)
    target[1] = -100
    order = torch.tensor([6, 0, 2, 5, 4], device=lane.device) if ordered else torch.arange(n_rows, device=lane.device)
    y, (a, b) = target[order], slopes[:, order].contiguous()
    options = {"bias": bias, "temperature": temperature, "softcap": softcap}
    grads = HeadGradients(x, weight, (True, True, True), True, coming=len(order))
    out = log_prob_buffers(len(order), x.device, entropy=True, logit_sum=True)
    chunks = Chunks.of([(0, 1), (1, len(order))], wide=True)
    for start, logits, _ in sweep(chunks, x, weight, grads, order=order if ordered else None):
        row_log_probs(logits, y, out, row_start=start, **options)
        row_log_prob_gradients(logits, y, out, a, entropy_coef=b, row_start=start, **options)
    found = (out.logp, out.entropy, out.logit_sum, *head_gradients(grads, x, bias))
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    logits = exact[0][order] @ exact[1].t()
    logp, entropy, _ = log_probs_reference(logits, y, exact[2], -100, temperature, softcap)
    total = logits + exact[2]
    total = softcap * torch.tanh(total / softcap) if softcap else total
    expected = (logp, entropy, total.sum(-1), *torch.autograd.grad((logp * a).sum() + (entropy * b).sum(), exact))
    for got, of in zip(found, expected):
        scale = float(of.detach().abs().max())
        torch.testing.assert_close(got.double(), of.detach(), rtol=1e-5, atol=1e-5 * max(scale, 1.0))


@pytest.mark.lanes("interpret", "gpu")
def test_a_second_head_comes_with_the_first(lane, generator):
    def random(*shape):
        return torch.randn(shape, generator=generator).to(lane.device)

    x, w, x2, w2 = random(7, 5), random(19, 5), random(7, 3), random(19, 3)
    seen = [(start, a.clone(), b.clone()) for start, a, b in sweep(Chunks.of([(0, 3), (3, 7)]), x, w, second=(x2, w2))]
    assert [start for start, _, _ in seen] == [0, 3]
    torch.testing.assert_close(torch.cat([a for _, a, _ in seen]), x @ w.t())
    torch.testing.assert_close(torch.cat([b for _, _, b in seen]), x2 @ w2.t())
