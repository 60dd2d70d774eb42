"""One of two processes that share a mixture of experts, against the whole model on one.

python two_ranks.py RANK PORT FOLDER DEVICE

Expert parallelism as transformers plans it: over ranks that share a batch (tensor parallel attention), over ranks that
have their own (FSDP2), and with one rank whose experts nobody chooses; tensor parallelism, which gives each rank some
columns of every expert; then FSDP2 over the experts' parameters alone.
Before `DistributedConfig(ep_size=...)`, ranks could only share a batch, with attention whole on each.
"""

import inspect
import os
import sys

import torch
import torch.distributed as dist

rank, port, folder, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
torch.set_num_threads(1)
device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
if kind != "cpu":
    torch.get_device_module(kind).set_device(rank)
dist.init_process_group("gloo" if kind == "cpu" else None, rank=rank, world_size=2)

import transformers  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import liger_hw  # noqa: E402
import liger_hw.transformers  # noqa: E402
from liger_hw.transformers import functional  # noqa: E402
from liger_hw.transformers.tiny import tiny_model  # noqa: E402

LAYERS, TOLERANCE = 2, 1e-5 if kind == "cpu" else 1e-3
rows = []  # of every call of the op


def counting(x, *args, original=functional.liger_fused_moe, **options):
    rows.append(len(x))
    return original(x, *args, **options)


functional.liger_fused_moe = counting
own = {"fused_linear_cross_entropy": False}
batches = torch.randint(5, 100, (2, 1, 9), generator=torch.Generator().manual_seed(0)).to(device)


def model_alone():
    return tiny_model(transformers.Qwen3MoeForCausalLM, num_hidden_layers=LAYERS).to(device)


def first_two_experts(model):
    """Every token chooses experts 0 and 1, which one rank has."""
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, found: (*found[:-1], found[-1] % 2))


def whole(gradient):
    """A parameter's gradient from all ranks; torch 2.11 gathers no strided shards of one dimension itself."""
    if not hasattr(gradient, "full_tensor"):
        return gradient
    placement = gradient.placements[0]
    if len(gradient.placements) > 1 or type(placement).__name__ != "_StridedShard":
        return gradient.full_tensor()
    part = gradient.to_local().contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    blocks = zip(*(p.chunk(placement.split_factor, placement.dim) for p in parts))
    return torch.cat([block for ranks in blocks for block in ranks], placement.dim)


def step(model, *used):
    """(losses, gradients) of the mean of a model's losses on batches; gradients whole."""
    losses = [model(batch, labels=batch).loss for batch in used]
    torch.stack(losses).mean().backward()
    return [loss.detach() for loss in losses], {n: whole(p.grad) for n, p in model.named_parameters()}


def check(name, found, expected):
    (losses, gradients), (wanted, theirs) = found, expected
    torch.testing.assert_close(losses, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    for parameter, gradient in theirs.items():
        scale = float(gradient.abs().max())
        close = torch.allclose(gradients[parameter], gradient, rtol=1e-3, atol=max(1e-3, TOLERANCE) * scale)
        assert close, f"{name}: {parameter}"
    print(name, "rows", sum(rows))
    rows.clear()


if rank == 0:
    model_alone().save_pretrained(folder)
dist.barrier()
if "ep_size" in inspect.signature(DistributedConfig).parameters:
    shared, apart = {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}
    more = [("own batches", apart, "model", False), ("an empty rank", apart, "model", True)]
else:
    shared = {"tp_size": 2, "enable_expert_parallel": True}
    more = []
for name, plan, patch, one_sided in [
    ("shared", shared, "model", False),
    ("shared, classes", shared, "classes", False),
    ("columns", {"tp_size": 2}, "model", False),  # every expert on both ranks, half of it on each
    *more,
]:
    used = [batches[0]] if "tp_size" in plan else list(batches)
    alone = model_alone()
    if one_sided:
        first_two_experts(alone)
    wanted, gradients = step(alone, *used)
    report = liger_hw.transformers.apply_liger_kernel_to_qwen3_moe(**own) if patch == "classes" else None
    config = DistributedConfig(**plan)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)
    if patch == "model":
        report = liger_hw.patch(model, **own)
    if one_sided:
        first_two_experts(model)
    rows.clear()
    mine = used[rank % len(used)]
    found = step(model.train(), mine)
    slots = 2 * len(used) * mine.shape[1] * LAYERS
    assert len(rows) == LAYERS, rows
    total = torch.tensor(sum(rows), device=device)
    dist.all_reduce(total)
    assert total == slots + (LAYERS if one_sided else 0)  # a row stands for none
    check(name, found, ([wanted[rank % len(used)]], gradients))
    report.revert()

expected = step(model_alone(), batches[rank])[0], step(model_alone(), *batches)[1]
model = model_alone()
liger_hw.patch(model, **own)
mesh = dist.init_device_mesh(device.type, (2,))
for layer in model.model.layers:
    fully_shard(layer.mlp.experts, mesh=mesh)
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
found = step(model, batches[rank])
assert len(rows) == LAYERS
check("fsdp2", found, expected)
dist.destroy_process_group()
