"""fused_linear_log_probs with logits kept for backward, of the slab and of the rest."""

from __future__ import annotations

import pytest
import torch
from harness import make, verify

from liger_hw.kernels.heads import fused_linear_log_probs, kept_logits
from liger_hw.kernels.heads.fused_linear_log_probs import (
    LogProbsCall,
    backward_rows,
    forward_rows,
    fused_linear_log_probs_reference,
    liger_fused_linear_log_probs,
)
from liger_hw.kernels.heads.kept_logits import plan_kept
from liger_hw.kernels.heads.linear_head import Needs
from liger_hw.kernels.losses.log_prob_rows import LogProbOptions
from liger_hw.kernels.losses.vocab_parts import IGNORED, VocabPart, local_targets
from liger_hw.registry import get_op

OP = get_op("fused_linear_log_probs")
CASES = {  # sizes, kept rows of the rest
    "slab only": ((7, 9, 101), 0),
    "the rest kept": ((16, 9, 101), 7),
    "the rest kept in part": ((16, 9, 101), 4),
    "the rest not kept": ((16, 9, 96), 0),
    "more than three slabs": ((41, 9, 50), 18),
    "no slab": ((8, 72, 50), 8),
}


@pytest.fixture
def narrow(monkeypatch):
    """Slices of 16 columns; `rest` kept rows after the slab."""
    for name, value in {"SLICE_STEP": 16, "MIN_SLICE_WIDTH": 16, "STEP": 1}.items():
        monkeypatch.setattr(kept_logits, name, value)
    for module in (kept_logits, fused_linear_log_probs):
        monkeypatch.setattr(module, "INVARIANT_ROWS", 4)
    seen = []

    def plan(rest):
        def kept(n_rows, hidden, vocab, itemsize):
            found = plan_kept(n_rows, hidden, vocab, itemsize)
            assert found is not None
            seen.append(found if not found.slab else found._replace(rest=rest))
            return seen[-1]

        monkeypatch.setattr(fused_linear_log_probs, "plan_kept", kept)
        return seen

    return plan


OPTIONS = {
    "invariant": {"ignored": 0.3, "return_top1": True, "batch_invariant": True},
    "entropy": {"temperature": 0.7, "return_entropy": True},
    "bias": {"temperature": 2.0, "softcap": 5.0, "biased": True, "return_entropy": True},
}
BIASED = ("the rest kept in part", "no slab")


@pytest.mark.daily("interpret", options=("entropy", "bias"))
@pytest.mark.parametrize(
    "name, options", [(name, kind) for name in CASES for kind in OPTIONS if kind != "bias" or name in BIASED]
)
def test_of_every_kind(lane, narrow, name, options, seed):
    """Results and gradients against fp64."""
    sizes, rest = CASES[name]
    seen = narrow(rest)
    for dtype in lane.dtypes:
        verify(OP, make(OP, sizes, getattr(torch, dtype), lane.device, seed, OPTIONS[options]), seed)
    assert seen and bool(seen[0].slab) == (name != "no slab")


def _tensors(lane, generator, n_rows=16, hidden=9, vocab=101):
    x = torch.randn(n_rows, hidden, generator=generator).to(lane.device).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(lane.device).requires_grad_()
    target = torch.randint(vocab, (n_rows,), generator=generator).to(lane.device)
    return x, weight, target


def _exact(x, weight, target, slopes, **options):
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    found = fused_linear_log_probs_reference(*leaves, target, **options)
    found = found[:2] if isinstance(found, tuple) else (found,)
    return torch.autograd.grad(sum((a * b).sum() for a, b in zip(found, slopes)), leaves)


@pytest.mark.parametrize("rest", [0, 4, 7])
@pytest.mark.parametrize("which", ["x", "weight", "entropy"])
def test_of_part_of_the_gradients(lane, narrow, generator, rest, which):
    """One input's gradient alone; entropy's gradient without that of the log-probabilities."""
    seen = narrow(rest)
    x, weight, target = _tensors(lane, generator)
    slopes = torch.randn(16, generator=generator).to(lane.device)
    given = (0 * slopes, slopes) if which == "entropy" else (slopes,)
    expected = _exact(x, weight, target, given, return_entropy=which == "entropy")
    if which != "entropy":
        (weight if which == "x" else x).requires_grad_(False)
    found = liger_fused_linear_log_probs(x, weight, target, return_entropy=which == "entropy")
    (found[1] if which == "entropy" else found).backward(slopes)
    assert bool(seen) == (which != "x"), "a head whose weight has no gradient has no memory to keep logits in"
    for leaf, of in zip((x, weight), expected):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad.double(), of, rtol=1e-4, atol=1e-4 * float(of.abs().max()))
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("rest", [0, 4, 7])
def test_several_backwards_agree(lane, narrow, generator, rest):
    """retain_graph leaves the kept logits unchanged; the last of three backwards overwrites them."""
    narrow(rest)
    x, weight, target = _tensors(lane, generator)
    slopes = torch.randn(16, generator=generator).to(lane.device)
    logp = liger_fused_linear_log_probs(x, weight, target)
    found = [torch.autograd.grad(logp, (x, weight), slopes, retain_graph=turn < 2) for turn in range(3)]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-4, atol=1e-5)
    for a, b in zip(found[2], _exact(x, weight, target, (slopes,))):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("rest", [0, 7])
def test_two_heads_of_one_weight(lane, narrow, generator, rest):
    """Both forwards come first and keep logits; the gradients add up."""
    narrow(rest)
    x, weight, target = _tensors(lane, generator)
    slopes = torch.randn(2, 16, generator=generator).to(lane.device)
    first = liger_fused_linear_log_probs(x, weight, target)
    second = liger_fused_linear_log_probs(x, weight, target.flip(0), temperature=2.0)
    ((first * slopes[0]).sum() + (second * slopes[1]).sum()).backward()
    a, b = _exact(x, weight, target, slopes[:1]), _exact(x, weight, target.flip(0), slopes[1:], temperature=2.0)
    for leaf, one, other in zip((x, weight), a, b):
        of = one + other
        torch.testing.assert_close(leaf.grad.double(), of, rtol=1e-4, atol=1e-4 * float(of.abs().max()))


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("rest", [0, 4, 7])
def test_tokens_of_probability_zero(lane, narrow, generator, rest):
    """Logits of -inf in whole slices: no nan, and a zero gradient for these tokens."""
    narrow(rest)
    x, weight, target = _tensors(lane, generator)
    with torch.no_grad():
        x.abs_()
        weight[:40] = float("-inf")
    target = target.clamp_min(40)
    logp, entropy = liger_fused_linear_log_probs(x, weight, target, return_entropy=True)[:2]
    few = fused_linear_log_probs_reference(x, weight[40:], target - 40, return_entropy=True)[:2]
    torch.testing.assert_close((logp, entropy), few, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(logp.sum() + entropy.sum(), weight)
    (expected,) = torch.autograd.grad(sum(t.sum() for t in few), weight)
    torch.testing.assert_close(found[40:], expected[40:], rtol=1e-4, atol=1e-4)
    assert not found[:40].any()


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("n_rows", [1, 512, 513, 1024, 4096, 5000, 8192, 12288, 12289, 16384, 20480])
@pytest.mark.parametrize(
    "hidden, vocab", [(4096, 32768), (4096, 50257), (4096, 128256), (2304, 256000), (4096, 151936)]
)
def test_memory(n_rows, hidden, vocab):
    """Kept rows, tail and fp32 sums take at most EXTRA_MEMORY times the weight gradient; up to 8192 rows of 4096 take
    at most 2.5 GiB with the gradients."""
    kept = plan_kept(n_rows, hidden, vocab, 2)
    if kept is None:
        assert n_rows > kept_logits.MAX_SLABS * hidden
        return
    rest = n_rows - kept.slab
    most = rest if kept.rest < rest else 0
    sums = max(most, kept.slab if kept.width < 2 * kept.slab else 0) * hidden * 4
    spare = 2 * (kept.tail + kept.rest * vocab) + sums
    assert spare <= kept_logits.EXTRA_MEMORY * 2 * vocab * hidden or not kept.slab
    assert n_rows > 8192 or spare + 2 * (vocab + n_rows) * hidden < 2.5 * 2**30


@pytest.mark.cpu
@pytest.mark.parametrize("mib, rest", [(2304, 4096), (1600, 1536), (1024, None)])
def test_a_budget_decides_how_many_rows_are_kept(set_env, mib, rest):
    """All rows of the rest, some of them, and no memory even for the weight's gradient and a tail."""
    set_env("LIGER_HW_LOSS_MEMORY_MIB", mib)
    kept = plan_kept(8192, 4096, 128256, 2)
    assert (kept and kept.rest) == rest


@pytest.mark.lanes("interpret", "gpu")
def test_selective_checkpointing_may_keep_the_operator_s_results(lane, narrow, generator):
    """Then the memory for kept logits is allocated again but not filled: no logits may be kept."""
    from torch.utils import checkpoint

    narrow(7)
    x, weight, target = _tensors(lane, generator)
    slopes = torch.randn(len(target), generator=generator, dtype=torch.float64).to(lane.device)

    def policy(ctx, operator, *args, **kwargs):
        ours = "liger_hw" in str(operator)
        return checkpoint.CheckpointPolicy.MUST_SAVE if ours else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    logp = checkpoint.checkpoint(
        lambda x: liger_fused_linear_log_probs(x, weight, target),
        x,
        use_reentrant=False,
        context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),
    )
    found = torch.autograd.grad(logp, (x, weight), slopes.float())
    for a, b in zip(found, _exact(x, weight, target, (slopes,))):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.lanes("interpret", "gpu")
def test_a_backward_that_failed_is_not_run_again(lane, narrow, generator, monkeypatch):
    """It may have overwritten logits already: a second one raises."""
    narrow(7)
    x, weight, target = _tensors(lane, generator)
    logp = liger_fused_linear_log_probs(x, weight, target).sum()

    def fails(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(kept_logits, "dweight_of", fails)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(logp, (x, weight))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logp, (x, weight))


@pytest.mark.lanes("interpret", "gpu")
def test_batched_gradients(lane, narrow, generator):
    narrow(7)
    x, weight, target = _tensors(lane, generator)
    logp = liger_fused_linear_log_probs(x, weight, target)
    rows = torch.eye(len(target), device=lane.device)
    found = torch.autograd.grad(logp, x, rows, is_grads_batched=True)[0]
    for row in (0, len(target) - 1):
        exact = _exact(x, weight, target, (rows[row].double(),))[0]
        torch.testing.assert_close(found[row].double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rest", [0, 4, 7])
def test_of_two_parts_of_a_vocabulary(lane, narrow, generator, rest, monkeypatch):
    """As on two ranks: gradients of each part, with targets in either."""
    seen = narrow(rest)
    monkeypatch.setattr(fused_linear_log_probs, "graph_is_kept", lambda: False)  # no autograd engine is under way
    x, weight, target = _tensors(lane, generator)
    target[3] = -100
    slopes = torch.randn(16, generator=generator).to(lane.device)
    call = LogProbsCall(LogProbOptions(IGNORED, 0.7), needs=Needs(True, True))
    starts, ran = torch.tensor([0, 61], device=lane.device), []
    for start, part in zip(starts, weight.detach().split((61, 40))):
        own = local_targets("test", target, len(part), VocabPart(None, 2, 0, starts, start, starts[1] + 40), -100)
        ran.append((part, own, forward_rows(x.detach(), part, own.column, None, None, call)))
    lse = torch.logaddexp(*(forward.results[3] for _, _, forward in ran))
    found = []
    for part, own, (results, plan, memory) in ran:
        saved = x.detach(), part, own.column, None, None, lse, results[1], results[4], *memory
        found.append(backward_rows(saved, (slopes, None, None, own.is_local), plan, call))
        assert found[-1][1].data_ptr() == memory[0].data_ptr(), "the logits were computed again"
    assert len(seen) == 2 and all(plan.slab for plan in seen)
    dx, dweight = found[0][0] + found[1][0], torch.cat([part[1] for part in found])
    ignored = slopes.masked_fill(target == -100, 0.0)
    expected = _exact(x, weight, target.clamp_min(0), (ignored,), temperature=0.7)
    for got, of in zip((dx, dweight), expected):
        torch.testing.assert_close(got.double(), of, rtol=1e-4, atol=1e-4 * float(of.abs().max()))
