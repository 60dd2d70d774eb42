"""What only a GPU can show of activations: the same kernels' bits, freed memory, streams, capture."""

from __future__ import annotations

import contextlib

import pytest
import torch
from small_decoder import HIDDEN, Decoder, gradients, identical, some_input
from torch.nn.attention import SDPBackend, sdpa_kernel

import liger_hw
from liger_hw.kernels.norms.rms_norm import liger_rms_norm
from liger_hw.kernels.pointwise import tiled_mlp
from liger_hw.recompute import dial, offload, recipes

pytestmark = [pytest.mark.lanes("gpu")]


@pytest.fixture(autouse=True)
def deterministic():
    """Attention's backward sums in any order unless told otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", ["cheap", "mlp", "full", "tiled"])
@pytest.mark.parametrize("autocast", [False, True])
def test_bits_and_bytes(lane, autocast, level):
    kind = torch.device(lane.device).type
    memory = torch.get_device_module(kind)
    x = some_input(tokens=4096).detach().to(lane.device, torch.float32 if autocast else torch.bfloat16)
    kept, found = [], []
    for setting in ("keep", "keep", level):  # the first compiles
        model = Decoder(count=3, dtype=x.dtype).to(lane.device)
        with liger_hw.activations(setting, model), torch.autocast(kind, torch.bfloat16, enabled=autocast):
            before = memory.memory_allocated()
            loss = model(x.detach().requires_grad_()).float().square().mean()
        kept.append(memory.memory_allocated() - before)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
        del loss
    assert identical(found[2], found[1])
    spared = 2 * 4096 * HIDDEN * (1 if level == "cheap" else 2)  # bytes a layer, far below what is really spared
    assert kept[2] < kept[1] - 3 * spared


@pytest.mark.parametrize("limit", [1 << 30, 3 << 20])
def test_layer_inputs_on_the_host(lane, limit, monkeypatch):
    """Level offload: the bits of level tiled, step after step, with tiles, and where not every input has room."""
    monkeypatch.setattr(tiled_mlp, "TILE_ROWS", 5000)
    monkeypatch.setattr(offload, "CHUNK", 1 << 20)
    memory = offload.HostMemory(torch.device(lane.device), limit)
    monkeypatch.setattr(dial, "host_memory", lambda device: memory)
    x = some_input(tokens=1 << 16).detach().to(lane.device, torch.bfloat16).view(1024, 64, HIDDEN)  # 4 MiB
    model = Decoder(count=5, dtype=x.dtype).to(lane.device)
    results = []
    for level in ("tiled", "tiled", "offload", "offload"):
        with liger_hw.activations(level, model), sdpa_kernel(SDPBackend.MATH):  # cuDNN's sums in any order
            results.append(gradients(model, contextlib.nullcontext(), x=x.detach().requires_grad_()))
    assert identical(results[1], results[0]), "without offload the bits are the same every time"
    assert identical(results[2], results[0]) and identical(results[3], results[0])
    assert 0 < memory.pinned <= limit if limit > 4 << 20 else not memory.pinned


def test_consumers_on_two_streams(lane):
    """Each stream computes its own: nothing orders one behind the other in backward."""
    if torch.device(lane.device).type != "cuda":
        pytest.skip("streams of torch's cuda device type only")
    weights = [torch.randn(512, 1024, device=lane.device, requires_grad=True) for _ in range(2)]
    side = torch.cuda.Stream()

    def run(level):
        x = torch.randn(4096, 1024, device=lane.device, generator=torch.Generator(lane.device).manual_seed(0))
        x.requires_grad_()
        with liger_hw.activations(level):
            y = liger_rms_norm(x, torch.ones(1024, device=lane.device), 1e-6)
            here = torch.nn.functional.linear(y, weights[0])
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                there = torch.nn.functional.linear(y, weights[1])
            torch.cuda.current_stream().wait_stream(side)
        grads = torch.autograd.grad((here.square().sum() + there.square().sum()), [x, *weights])
        torch.cuda.synchronize()
        return grads

    assert identical(run("cheap"), run("keep"))


def test_graph_capture(lane):
    """Forward and backward of a recomputing layer captured once, replayed on another input."""
    if torch.device(lane.device).type != "cuda":
        pytest.skip("graphs of torch's cuda device type only")
    model = Decoder(count=1, dtype=torch.bfloat16).to(lane.device)
    x = some_input(torch.bfloat16, 64).detach().to(lane.device).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(model, liger_hw.activations("mlp"), x=x)
            x.grad = None
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        with liger_hw.activations("mlp"):
            loss = model(x).float().square().mean()
        loss.backward()
    with torch.no_grad():
        x.mul_(0.5)
    graph.replay()
    captured = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    expected = gradients(model, contextlib.nullcontext(), x=x)
    assert identical(captured, expected)
    assert recipes._scopes_open == 0
