"""One of two gloo processes: FSDP2, which frees and gathers parameters around every layer, and DDP.

python two_ranks.py RANK STORE
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import transformers
from small_decoder import Decoder, gradients, identical
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

import liger_hw
from liger_hw.recompute import recipes
from liger_hw.recompute.dial import class_patch

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
computed = []
compute = recipes.Recipe._compute
recipes.Recipe._compute = lambda self: (computed.append(self.name), compute(self))[1]
alone = gradients(Decoder(count=3), contextlib.nullcontext())
mesh = dist.init_device_mesh("cpu", (2,))
for of_its_own in (False, True):  # projections that are units themselves have their weight in their forward only
    model = Decoder(count=3)
    for layer in model.layers:
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj) if of_its_own else ():
            fully_shard(part, mesh=mesh)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    computed.clear()
    with liger_hw.activations("mlp", model):
        found = gradients(model, contextlib.nullcontext())
    assert identical([g.full_tensor() if hasattr(g, "full_tensor") else g for g in found], alone)
    assert computed.count("linear") == (0 if of_its_own else 4), computed  # two layers: the last is at cheap
    assert computed.count("swiglu_fwd") == 3
# A norm that is a unit itself has its weight in its forward and its backward only: what it computed is kept.
model = Decoder(count=3)
for layer in model.layers:
    fully_shard(layer.before, mesh=mesh, reshard_after_forward=True)
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
fully_shard(model, mesh=mesh)
computed.clear()
with liger_hw.activations("cheap", model):
    found = gradients(model, contextlib.nullcontext())
assert identical([g.full_tensor() if hasattr(g, "full_tensor") else g for g in found], alone)
assert computed.count("rms_norm_fwd") == 3 and computed.count("swiglu_fwd") == 3, computed
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
for of_classes in (False, True):  # a plan would count whole parameters: refused at the call, or in the first step
    model = transformers.LlamaForCausalLM(config).train()
    patch = class_patch(type(model.model.layers[0]), "4GiB")
    if of_classes:
        patch.apply()
    for layer in model.model.layers if of_classes else (model,):
        fully_shard(layer, mesh=mesh)
    try:
        model(torch.arange(8)[None]) if of_classes else liger_hw.activations("4GiB", model)
        raise AssertionError("a plan for a sharded model")
    except ValueError as error:
        assert "this one is sharded (FSDP2); name a level" in str(error), error
    if of_classes:
        patch.revert()
ids = torch.arange(16).reshape(2, 8)


def train(model):
    """Gradients of a step of a causal LM, whole."""
    model(ids, labels=ids, use_cache=False).loss.backward()
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]


def llama(sharded):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    for part in (*model.model.layers, model) if sharded else ():
        fully_shard(part, mesh=mesh)
    return model


for of_classes in (False, True):  # the last layer of a live model, or of a class, at cheap
    for first in (False, True):  # patched, then sharded, and the other way round
        gradients_of = {}
        for setting in ("keep", {-1: "cheap"}, None):
            cls_to_fsdp_cls.clear()  # transformers wraps what a layer's class has when FSDP2 first makes one of it
            model = None if of_classes else llama(False) if first else llama(True)
            with liger_hw.transformers.apply_liger_kernel_to_llama(model=model, activations=setting):
                if model is None:
                    model = llama(True)
                elif first:
                    for part in (*model.model.layers, model):
                        fully_shard(part, mesh=mesh)
                computed.clear()
                gradients_of[str(setting)] = train(model)
            assert computed.count("swiglu_fwd") == (setting != "keep"), computed
        assert all(identical(found, gradients_of["keep"]) for found in gradients_of.values())
model = Decoder(count=3)
with liger_hw.activations("mlp", model):
    assert identical(gradients(torch.nn.parallel.DistributedDataParallel(model), contextlib.nullcontext()), alone)
dist.destroy_process_group()
