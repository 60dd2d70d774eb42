"""Losses over a vocabulary that is split over two processes have the results of one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F

from liger_hw.kernels.losses.vocab_parallel_cross_entropy import (
    LigerVocabParallelCrossEntropy,
    liger_vocab_parallel_cross_entropy,
)
from liger_hw.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp

WIDTHS = {2: ((23, 23), (26, 20), (5, 41)), 4: ((12, 12, 12, 10), (5, 19, 2, 20))}
SMOOTHINGS = (
    (0.0, "pytorch", "global"),
    (0.1, "pytorch", "global"),
    (0.1, "megatron", "global"),
    (0.1, "megatron", "partition"),
)


def own_columns(widths, rank):
    """The slice of the whole vocabulary that a rank has."""
    return slice(sum(widths[:rank]), sum(widths[: rank + 1]))


def check_vocab_parallel(rank, device):
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(3, 4, 46, generator=generator).to(device)
    target = torch.randint(46, (3, 4), generator=generator).to(device)
    target[0, 0], target[1, 2], target[2, 3] = 45, -100, 22
    target[0, 1], target[2, 0] = 46, -1  # outside the vocabulary
    flowing = torch.randn(3, 4, generator=generator).to(device)
    for widths in WIDTHS[dist.get_world_size()]:
        mine = own_columns(widths, rank)
        impossible = whole.clone()
        impossible[0, 0, : widths[0]] = float("-inf")  # classes that cannot be, the whole part of a rank
        for smoothing, formula, mode in SMOOTHINGS:
            logits = whole if smoothing else impossible  # smoothing over an impossible class is infinite
            part = logits[..., mine].clone().requires_grad_()
            options = -100, smoothing, formula, mode
            loss = liger_vocab_parallel_cross_entropy(part, target, dist.group.WORLD, *options)
            (grad,) = torch.autograd.grad(loss, part, flowing)
            exact = logits.double().requires_grad_()
            width = widths[rank] if mode == "partition" else 46
            e = smoothing * width / (width - 1) if formula == "megatron" else smoothing
            log_p = torch.log_softmax(exact, -1)
            ignored = target == -100
            outside = (target < 0) | (target >= 46)
            nll = -log_p.gather(-1, target.masked_fill(outside, 0)[..., None])[..., 0]
            nll = torch.where(outside, torch.logsumexp(exact, -1), nll)
            averaged = log_p[..., mine if mode == "partition" else slice(None)]
            expected = (1 - e) * nll - (e * averaged.mean(-1) if e else 0)
            expected = expected.masked_fill(ignored, 0.0)
            (exact_grad,) = torch.autograd.grad(expected, exact, flowing.double())
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grad.double(), exact_grad[..., mine].nan_to_num(0.0), rtol=1e-5, atol=1e-6)
            assert not grad[1, 2].any()
            if mode == "global":
                both = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
                dist.all_gather(both, loss.detach())
                assert all(torch.equal(one, both[0]) for one in both), "the ranks disagree"


def check_scaled(rank, device):
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(n, 5, generator=generator).to(device) for n in (12, 46))
    y = torch.randint(46, (12,), generator=generator).to(device)
    y[0], y[6] = 45, -100
    flowing, bend = (torch.randn(12, generator=generator).to(device) for _ in range(2))
    for widths in WIDTHS[dist.get_world_size()]:
        mine = own_columns(widths, rank)
        for entropy in (False, True):
            hidden, part = x.clone().requires_grad_(), weight[mine].clone().requires_grad_()
            options = {"temperature": 0.5, "return_entropy": entropy}
            found = liger_fused_linear_scaled_cross_entropy_tp(hidden, part, y, dist.group.WORLD, **options)
            nll, h = found if entropy else (found, torch.zeros_like(bend))
            grads = torch.autograd.grad((nll * flowing).sum() + (h * bend).sum(), (hidden, part))
            exact = [t.double().requires_grad_() for t in (x, weight)]
            log_p = torch.log_softmax(exact[0] @ exact[1].t() / 0.5, -1)
            ignored = y == -100
            exact_nll = -log_p.gather(-1, y.masked_fill(ignored, 0)[:, None])[:, 0].masked_fill(ignored, 0.0)
            exact_h = -(log_p.exp() * log_p).sum(-1).masked_fill(ignored, 0.0) * entropy
            total = (exact_nll * flowing).sum() + (exact_h * bend).sum()
            exact_x, exact_w = torch.autograd.grad(total, exact)
            for got, of in ((nll, exact_nll), (h, exact_h), (grads[0], exact_x), (grads[1], exact_w[mine])):
                # of the terms: sums of 46 of them in fp32, (8 + 4 sqrt(46)) / 2^24 is 2e-6; results are differences of
                # scores
                scale = float((log_p if of is exact_nll or of is exact_h else of).detach().abs().max())
                torch.testing.assert_close(got.double(), of, rtol=1e-5, atol=4e-6 * scale)


def check_all(rank, device):
    check_vocab_parallel(rank, device)
    check_scaled(rank, device)


@ranks.everywhere
def test_ranks(kind):
    ranks.run(__file__, "check_all", kind)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_without_a_group_it_is_the_cross_entropy(lane, generator, smoothing):
    x = torch.randn(2, 3, 37, generator=generator).to(lane.device).requires_grad_()
    target = torch.tensor([[0, 36, -100], [5, 5, 1]], device=lane.device)
    found = LigerVocabParallelCrossEntropy(label_smoothing=smoothing)(x, target)
    options = {"reduction": "none", "label_smoothing": smoothing}
    expected = F.cross_entropy(x.flatten(0, 1), target.flatten(), **options).view(2, 3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_target_outside_the_vocabulary_is_masked(lane, generator, smoothing, set_env):
    """Megatron later gives such a row a weight of zero, so the loss and its gradient must be finite."""
    x = torch.randn(2, 3, 37, generator=generator).to(lane.device).requires_grad_()
    target = torch.tensor([[0, 37, -1], [5, -100, 1000]], device=lane.device)
    found = liger_vocab_parallel_cross_entropy(x, target, label_smoothing=smoothing)
    log_p = torch.log_softmax(x, -1)
    score = x.gather(-1, target.clamp(0, 36)[..., None])[..., 0].where((target >= 0) & (target < 37), 0.0)
    nll = torch.logsumexp(x, -1) - (1 - smoothing) * score - smoothing * x.mean(-1)
    expected = nll.masked_fill(target == -100, 0.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))
    torch.testing.assert_close(found[0, 0], -(1 - smoothing) * log_p[0, 0, 0] - smoothing * log_p[0, 0].mean())
    set_env("LIGER_HW_CHECK_TARGETS", 1)
    with pytest.raises(IndexError, match=r"target\[1\] = 37 is out of bounds"):
        liger_vocab_parallel_cross_entropy(x, target, label_smoothing=smoothing)


@pytest.mark.cpu
def test_a_group_of_one_rank_exchanges_nothing():
    """Also of another type, such as programs' substitutes for a process group, or a device mesh."""
    x, target = torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.long)
    one, two = (SimpleNamespace(size=lambda ranks=ranks: ranks) for ranks in (1, 2))
    torch.testing.assert_close(
        LigerVocabParallelCrossEntropy()(x, target, tp_group=one), LigerVocabParallelCrossEntropy()(x, target)
    )
    with pytest.raises(TypeError, match="tp_group must be a torch.distributed.ProcessGroup"):
        LigerVocabParallelCrossEntropy()(x, target, tp_group=two)


@pytest.mark.cpu
def test_what_is_refused():
    x, target = torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="reduction must be 'none'"):
        LigerVocabParallelCrossEntropy(reduction="mean")
    with pytest.raises(ValueError, match="label_smoothing_formula must be one of pytorch, megatron"):
        liger_vocab_parallel_cross_entropy(x, target, label_smoothing_formula="other")
    for shape in ((6, 7), (1, 2, 3, 7)):  # the class has Megatron's shape only
        with pytest.raises(ValueError, match="must be 3-D"):
            LigerVocabParallelCrossEntropy()(x.view(shape), target.view(shape[:-1]))
    with pytest.raises(
        TypeError, match=r"tp_group must be a torch.distributed.ProcessGroup \(of a DeviceMesh.*got str"
    ):
        liger_vocab_parallel_cross_entropy(x, target, "tp")
