"""Activation levels under FSDP2, which frees and gathers parameters around every layer, and under DDP."""

from __future__ import annotations

import contextlib

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

import liger_hw
from liger_hw.kernels.pointwise import tiled_mlp
from liger_hw.recompute import dial, recipes
from liger_hw.recompute.dial import class_patch
from liger_hw.transformers import replacing
from liger_hw.transformers.tiny import tiny_model
from tests.activations.small_decoder import Decoder, gradients, identical, some_input

transformers = pytest.importorskip("transformers")
IDS = torch.arange(16).reshape(2, 8)


def sharded(model, *parts, mesh):
    """`model` after `fully_shard` of these parts, each before what holds it, and of itself."""
    for part in (*parts, model):
        fully_shard(part, mesh=mesh)
    return model


def whole(tensors):
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def llama():
    return tiny_model(transformers.LlamaForCausalLM, num_hidden_layers=2)


def train(model):
    """Gradients of a step of a causal LM, whole."""
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    return whole(p.grad for p in model.parameters())


@contextlib.contextmanager
def computed_again():
    """A list of the names of operators that recipes run again."""
    names, compute = [], recipes.Recipe._compute
    recipes.Recipe._compute = lambda self: (names.append(self.name), compute(self))[1]
    try:
        yield names
    finally:
        recipes.Recipe._compute = compute


def check_levels(rank, device):
    alone = gradients(Decoder(count=3), contextlib.nullcontext())
    mesh = dist.init_device_mesh("cpu", (2,))

    def same(model, level):
        with liger_hw.activations(level, model):
            return identical(whole(gradients(model, contextlib.nullcontext())), alone)

    with computed_again() as names:
        model = Decoder(count=3)
        assert same(sharded(model, *model.layers, mesh=mesh), "mlp")
        assert names.count("linear") == 4 and names.count("swiglu_fwd") == 3, names  # the last layer is at cheap
        # Projections that are units themselves have their weight in their forward only.
        names.clear()
        model = Decoder(count=3)
        parts = [part for layer in model.layers for part in (layer.mlp.gate_proj, layer.mlp.up_proj, layer)]
        assert same(sharded(model, *parts, mesh=mesh), "mlp")
        assert names.count("linear") == 0 and names.count("swiglu_fwd") == 3, names
        # A norm that is a unit itself has its weight in its forward and its backward only: its output is kept.
        names.clear()
        model = Decoder(count=3)
        assert same(sharded(model, *(p for l in model.layers for p in (l.before, l)), mesh=mesh), "cheap")
        assert names.count("rms_norm_fwd") == 3 and names.count("swiglu_fwd") == 3, names
    model = Decoder(count=3)
    with liger_hw.activations("mlp", model):
        assert identical(gradients(torch.nn.parallel.DistributedDataParallel(model), contextlib.nullcontext()), alone)


def check_budgets_of_shards(rank, device):
    """Plans count FSDP2's shards of a live model, whole or by layer, and of a patched class in its first step."""
    mesh, of_module, shards = dist.init_device_mesh("cpu", (2,)), dial.of_module, []

    def recording(*args):
        planner = of_module(*args)
        shards.append((planner.assumptions.engine, planner.assumptions.shards))
        return planner

    dial.of_module = recording
    try:
        for by_layer in (False, True):
            model = llama()
            sharded(model, *(model.model.layers if by_layer else ()), mesh=mesh)
            with liger_hw.activations("4GiB", model):
                model(IDS)
        cls_to_fsdp_cls.clear()  # transformers wraps what a layer's class has when FSDP2 first makes one of it
        model = llama()
        patch = class_patch(type(model.model.layers[0]), "4GiB")
        patch.apply()
        try:
            sharded(model, *model.model.layers, mesh=mesh)
            model(IDS)
        finally:
            patch.revert()
    finally:
        dial.of_module = of_module
    assert shards == [("fsdp2", 2)] * 5, "each live model at the call and in its first step"


def check_default_level(rank, device):
    """The last layer is at cheap: of a model that is patched before or after it is sharded, and of a class."""
    replacing.LEAST_BYTES = 0  # this model is small
    mesh = dist.init_device_mesh("cpu", (2,))

    def step(setting, order, names):
        cls_to_fsdp_cls.clear()  # transformers wraps what a layer's class has when FSDP2 first makes one of it
        model = llama()
        if order == "sharded first":
            sharded(model, *model.model.layers, mesh=mesh)
        patched = None if order == "classes" else model
        with liger_hw.transformers.apply_liger_kernel_to_llama(model=patched, activations=setting):
            if order != "sharded first":
                sharded(model, *model.model.layers, mesh=mesh)
            names.clear()
            return train(model)

    with computed_again() as names:
        for order in ("patched first", "sharded first", "classes"):
            kept = step("keep", order, names)
            assert not names
            for setting in ({-1: "cheap"}, None):
                assert identical(step(setting, order, names), kept), (order, setting)
                assert names.count("swiglu_fwd") == 1, (order, setting, names)


def check_tiled_mlps(rank, device):
    """Two processes have the gradients of one, summed in fp32 as those of plain parameters are."""
    tiles, are_plain, plain = tiled_mlp.TILE_ROWS, tiled_mlp._are_plain, []
    tiled_mlp.TILE_ROWS = 3
    tiled_mlp._are_plain = lambda *args: plain.append(are_plain(*args)) or plain[-1]
    try:
        x = (some_input(torch.float64, tokens=20) * (1 + rank)).detach()
        alone = Decoder(count=3, dtype=torch.float64)
        alone(x).square().mean().backward()
        expected = [p.grad for p in alone.parameters()]
        for gradient in expected:
            dist.all_reduce(gradient)
        plain.clear()
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for level in ("tiled", "offload"):
            model = Decoder(count=3, dtype=torch.float64)
            sharded(model, *model.layers, mesh=mesh)
            with liger_hw.activations(level, model):
                for _ in range(2):
                    model.zero_grad()
                    model(x).square().mean().backward()
            for gradient, reference in zip(whole(p.grad for p in model.parameters()), expected, strict=True):
                torch.testing.assert_close(gradient, reference / 2, rtol=1e-12, atol=1e-14)
        assert plain and all(plain), "the sums in fp32 are those of plain parameters"
    finally:
        tiled_mlp.TILE_ROWS, tiled_mlp._are_plain = tiles, are_plain


@pytest.mark.parametrize(
    "check", ["check_levels", "check_budgets_of_shards", "check_default_level", "check_tiled_mlps"]
)
def test_two_ranks(check):
    ranks.run(__file__, check)
