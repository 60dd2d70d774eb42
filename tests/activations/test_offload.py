"""Level offload: tensors come back from host memory bit for bit, in order, and pinned memory is bounded and reused.

On a CPU the copies are ordinary ones; test_activations_gpu.py has the streams.
"""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from small_decoder import Decoder, gradients, identical, some_input

import liger_hw
from liger_hw.kernels.pointwise import tiled_mlp
from liger_hw.recompute import dial, offload
from liger_hw.recompute.offload import HostMemory, free_host_memory
from liger_hw.transformers import apply_liger_kernel_to_llama

pytestmark = [pytest.mark.lanes("cpu")]


@pytest.fixture
def memory(monkeypatch):
    """Host memory for the CPU, in small pieces, that small tensors use."""
    monkeypatch.setattr(offload, "CHUNK", 256)
    monkeypatch.setattr(offload, "SMALLEST", 64)
    return HostMemory(torch.device("cpu"), limit=1 << 20)


@pytest.fixture
def offloading(memory, monkeypatch):
    """The dial's level offload with that memory."""
    monkeypatch.setattr(dial, "host_memory", lambda device: memory)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64,), (3, 65), (2, 5, 32), (300,)])
def test_back_bit_for_bit(memory, shape, dtype):
    x = torch.randn(shape).to(dtype).requires_grad_()
    y = (x * 1).t() if len(shape) == 2 else x * 1  # a strided one too
    with memory.hooks():
        z = y.pow(3)
    saved = z.grad_fn._saved_self
    assert torch.equal(saved, y) and saved.data_ptr() != y.data_ptr()
    z.sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


def test_gradients_are_those_of_tiled(offloading, monkeypatch):
    monkeypatch.setattr(tiled_mlp, "TILE_ROWS", 4)
    model = Decoder(count=4, dtype=torch.float64)
    expected = gradients(model, liger_hw.activations("tiled", model))
    found = gradients(model, liger_hw.activations("offload", model))
    assert identical(found, expected)
    torch.testing.assert_close(found, gradients(model, contextlib.nullcontext()), rtol=1e-11, atol=1e-12)
    assert offloading.pinned > 0


def test_tiles_under_zero3(offloading, monkeypatch):
    """As ZeRO-3 has them: checkpoints of tiles within a layer's checkpoint, summed by autograd."""
    monkeypatch.setattr(tiled_mlp, "TILE_ROWS", 4)
    model = Decoder(count=3, dtype=torch.float64)
    expected = gradients(model, contextlib.nullcontext())
    for p in model.parameters():
        p.ds_id = 1
    calls = []
    model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    for level in ("tiled", "offload"):
        torch.testing.assert_close(
            gradients(model, liger_hw.activations(level, model)), expected, rtol=1e-11, atol=1e-12
        )
    assert len(calls) >= 2 * 2 * 3, "three tiles, forward and backward"


def test_pinned_memory_is_used_again(offloading):
    model = Decoder(count=4)
    with liger_hw.activations("offload", model):
        gradients(model, contextlib.nullcontext())
        once = offloading.pinned
        gradients(model, contextlib.nullcontext())
        assert offloading.pinned == once == 3 * 1280  # three layers' inputs of 2 x 5 x 32 floats
        abandoned = model(some_input()).sum()
        del abandoned
        gradients(model, contextlib.nullcontext())
        assert offloading.pinned == once


def test_the_next_tensor_is_copied_back_early(memory):
    values = [torch.randn(100, requires_grad=True) * 1 for _ in range(3)]
    with memory.hooks():
        graphs = [value.pow(2) for value in values]
    started = []
    copy_back = memory.copy_back
    memory.copy_back = lambda chunks, like: started.append(like) or copy_back(chunks, like)
    assert torch.equal(graphs[2].grad_fn._saved_self, values[2]) and len(started) == 2
    assert torch.equal(graphs[1].grad_fn._saved_self, values[1]) and len(started) == 3
    assert torch.equal(graphs[0].grad_fn._saved_self, values[0]) and len(started) == 3
    assert torch.equal(graphs[2].grad_fn._saved_self, values[2]) and len(started) == 5, "again, with retain_graph"


def test_beyond_the_limit_tensors_stay_on_the_device(memory, monkeypatch):
    memory.limit = 512
    sentences = []
    monkeypatch.setattr(offload.recipes, "log_once", lambda message, level: sentences.append((level, message)))
    values = [torch.randn(100, requires_grad=True) * 1 for _ in range(2)]
    with memory.hooks():
        graphs = [value.pow(2) for value in values]
    assert memory.pinned == 512
    assert graphs[0].grad_fn._saved_self.data_ptr() != values[0].data_ptr()
    assert graphs[1].grad_fn._saved_self.data_ptr() == values[1].data_ptr()
    ((level, sentence),) = sentences
    assert level == logging.WARNING and "Give fewer layers the level offload" in sentence


def test_a_change_in_place_raises(memory):
    value = torch.randn(100, requires_grad=True) * 1
    with memory.hooks():
        y = value.pow(2)
        value.detach().mul_(2)
        with pytest.raises(RuntimeError, match="was changed in place"):
            (value * 2).pow(2)
        (value * 3).pow(2)  # the next one is another tensor's matter
    assert y.grad_fn is not None


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_change_in_place_beyond_the_limit_or_without_a_backward(memory, limit):
    """Beyond the limit a change raises too; a forward without a backward leaves nothing behind."""
    memory.limit = limit
    value = torch.randn(100, requires_grad=True) * 1
    with memory.hooks():
        y = value.pow(2)
        value.detach().mul_(2)
        if not limit:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        del y
        value.pow(2)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("level", ["tiled", "offload"])
def test_transformers_checkpointing_around_a_level(offloading, monkeypatch, live, level):
    """Layers are computed twice, not three times, both times in tiles."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(tiled_mlp, "TILE_ROWS", 5)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    ids, found, rows = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(1)), [], []
    for setting in ("keep", level):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        report = apply_liger_kernel_to_llama(model=model if live else None, activations=setting)
        if setting == level:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, y: rows.append(len(args[0])))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad for p in model.parameters()])
        report.revert()
    assert rows == [4] * 8
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_small_tensors_and_parameters_stay():
    memory = HostMemory(torch.device("cpu"), limit=1 << 30)
    weight = torch.nn.Parameter(torch.randn(1 << 19))
    with memory.hooks():
        y = weight * (torch.randn(4, requires_grad=True) * 1).sum()
        y.sum().backward()
    assert memory.pinned == 0


def test_free_host_memory(monkeypatch):
    with open("/proc/meminfo") as file:
        total = int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024
    alone = free_host_memory()
    assert 0 < alone <= total
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_host_memory() < alone / 4
