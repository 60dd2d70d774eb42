"""Losses, metrics and gradients of every chunked loss against its formula in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, KERNEL_CASES, ONE_OF_EACH, VOCAB
from harness import changed, check, output_grads, run, tensors

from liger_hw.chunked_loss import log_prob_loss
from liger_hw.kernels.heads.linear_head import Chunks

SIZES = (4, 6, VOCAB)


def _verified(name, sizes, dtype, lane, generator, seed):
    """The loss's incoming gradient is random in fp32. In 16 bits it is 2, because the formula rounds slopes times that
    gradient and we round the slopes: other factors would give other rounding errors."""
    op, sample = CASES[name](sizes, dtype, lane.device, generator)
    loss = torch.zeros((), device=lane.device, requires_grad=True)
    given = output_grads([loss], seed) if dtype is torch.float32 else [torch.full_like(loss, 2.0)]
    check(op, sample, run(op.function, sample, grads=given))


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("name", CASES)
def test_every_option(lane, dtype, name, generator, seed):
    _verified(name, SIZES, dtype, lane, generator, seed)


@pytest.mark.lanes("interpret")
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_kernels(lane, dtype, name, generator, seed):
    _verified(name, (2, 4, VOCAB), dtype, lane, generator, seed)


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("sizes", [(2, 1, 3), (2, 9, 50), (6, 3, 128)], ids=str)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_sizes(lane, name, sizes, generator, seed):
    _verified(name, sizes, torch.float32, lane, generator, seed)


def _in_chunks(monkeypatch, rows, wide=False):
    """Chunks of `rows` rows, whatever a group is: a group that does not fit is swept twice."""

    def plan(n_rows, *_args, **_options):
        return Chunks([(start, min(start + rows, n_rows)) for start in range(0, n_rows, rows)], wide)

    monkeypatch.setattr(log_prob_loss, "plan_groups", plan)


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("rows", [5, 12], ids=["groups_split", "groups_whole"])
@pytest.mark.parametrize("name", [n for n in KERNEL_CASES if not n.startswith("distillation")])
def test_chunks_change_nothing(lane, name, rows, generator, seed, monkeypatch):
    """Pairs are 12 rows here and sequences 6: chunks of 5 split every group, chunks of 12 are several sweeps."""
    _in_chunks(monkeypatch, rows)
    _verified(name, (6, 6, VOCAB), torch.float32, lane, generator, seed)


@pytest.mark.lanes("interpret")
@pytest.mark.parametrize("name", [ONE_OF_EACH[0], "orpo-nll=True-beta=0.5"])
def test_the_kernels_in_chunks(lane, name, generator, seed, monkeypatch):
    _in_chunks(monkeypatch, 5)
    _verified(name, (2, 4, VOCAB), torch.float32, lane, generator, seed)


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("rows", [5, 12])
def test_chunks_summed_in_fp32(lane, rows, generator, seed, monkeypatch):
    _in_chunks(monkeypatch, rows, wide=True)
    _verified(ONE_OF_EACH[0], (6, 6, VOCAB), torch.bfloat16, lane, generator, seed)


@pytest.mark.lanes("cpu")
@pytest.mark.parametrize("name", CASES)
def test_fp64(lane, name, generator):
    """On the CPU fp64 is not rounded to fp32 anywhere."""
    op, sample = CASES[name](SIZES, torch.float64, lane.device, generator)
    inputs = [t for t in tensors(sample.args) if t.requires_grad]
    found, expected = op.function(*sample.args, **sample.kwargs), op.reference(*sample.args, **sample.kwargs)
    torch.testing.assert_close(tensors(found), tensors(expected), rtol=1e-9, atol=1e-12)
    pairs = zip(torch.autograd.grad(tensors(found)[0], inputs), torch.autograd.grad(tensors(expected)[0], inputs))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


EMPTY = {"no sequences": (0, 3, VOCAB), "no tokens": (2, 0, VOCAB), "all ignored": (2, 3, VOCAB)}


@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("mib", [None, 64])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_counts(lane, name, mib, empty, generator, set_env):
    """As in the formulas, means over nothing are nan and sums zero; gradients are zero, or nan where the loss is."""
    if mib is not None:
        set_env("LIGER_HW_LOSS_MEMORY_MIB", mib)
    op, sample = CASES[name](EMPTY[empty], torch.float32, lane.device, generator)

    def ignored(t):
        if t.is_floating_point() or t.dtype is torch.bool:
            return torch.zeros_like(t) if t.dtype is torch.bool and t.dim() == 2 else t.clone()  # GRPO's mask
        return torch.full_like(t, 0 if name.startswith("grpo") else -100)

    sample = changed(sample, ignored) if empty == "all ignored" else sample
    found, expected = (tensors(f(*sample.args, **sample.kwargs)) for f in (op.function, op.reference))
    torch.testing.assert_close(found, expected, equal_nan=True)
    inputs = [t for t in tensors(sample.args) if t.requires_grad]
    for t, grad in zip(inputs, torch.autograd.grad(found[0], inputs)):
        assert grad.shape == t.shape and not (grad.isfinite() & (grad != 0)).any()
        assert not grad.any() or found[0].isnan()
