"""Promises of the chunked losses that only a GPU shows: no wait for the device, graphs, memory."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, ONE_OF_EACH, VOCAB
from harness import tensors

import liger_hw.chunked_loss as chunked_loss

pytestmark = pytest.mark.gpu


def _step(name, gpu, generator):
    op, sample = CASES[name]((4, 6, VOCAB), torch.bfloat16, torch.device(gpu), generator)
    inputs = [t for t in tensors(sample.args) if t.requires_grad]

    def step():
        loss, *metrics = tensors(op.function(*sample.args, **sample.kwargs))
        return [loss, *metrics, *torch.autograd.grad(loss, inputs)]

    return step, inputs


@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_captured_and_replayed(name, gpu, generator):
    """A training step never waits for the device, and replays on new inputs."""
    step, inputs = _step(name, gpu, generator)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    with torch.no_grad():
        for t in inputs:
            t.mul_(0.5)
    expected = step()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, expected)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO"])
def test_a_long_sample_keeps_the_budget(kind, gpu, set_env):
    """Two sequences of 16384 tokens whose logits would be 2 GiB, with 256 MiB for everything but inputs."""
    set_env("LIGER_HW_LOSS_MEMORY_MIB", 256)
    length, hidden, vocab = 16384, 512, 32768
    generator = torch.Generator(gpu).manual_seed(0)
    x = torch.randn(2, length, hidden, generator=generator, device=gpu, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator, device=gpu) * 0.05).bfloat16().requires_grad_()
    ids = torch.randint(vocab, (2, length), generator=generator, device=gpu)
    labels = torch.tensor([True, False], device=gpu)
    calls = {
        "DPO": lambda: chunked_loss.LigerFusedLinearDPOLoss(use_ref_model=False, average_log_prob=True)(weight, x, ids),
        "KTO": lambda: chunked_loss.LigerFusedLinearKTOLoss()(x, weight, ids, None, labels),
        "GRPO": lambda: chunked_loss.LigerFusedLinearGRPOLoss(beta=0.0, importance_sampling_level="sequence")(
            x, weight, ids, torch.ones_like(ids), labels * 2.0 - 1
        ),
    }  # fmt: skip
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    calls[kind]()[0].backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    rounded = 16384 * 2 / 8 * vocab * 2 / 2**20  # the chunks that eight roundings of a bf16 gradient ask for
    assert peak < rounded + 2 * (2 * length * hidden + vocab * hidden) * 2 / 2**20 + 64, f"{peak:.0f} MiB"
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()
