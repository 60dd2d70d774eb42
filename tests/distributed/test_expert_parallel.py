"""A mixture of experts over two ranks has the losses and gradients of the whole model on one.

Expert parallelism of transformers over ranks that share a batch (tensor parallel attention), over ranks with batches of
their own (FSDP2), and with a rank whose experts no token chooses; tensor parallelism, with some columns of every expert
on each rank; FSDP2 over only the experts' parameters. Without `DistributedConfig(ep_size=...)`, ranks share a batch.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import liger_hw.transformers
from liger_hw.transformers import functional
from liger_hw.transformers.tiny import tiny_model

transformers = pytest.importorskip("transformers")
DistributedConfig = pytest.importorskip("transformers.distributed").DistributedConfig
KNOWN = inspect.signature(DistributedConfig).parameters
if "base_model_ep_plan" not in vars(transformers.PretrainedConfig) or not {"ep_size", "tp_size"} & KNOWN.keys():
    pytest.skip(
        f"transformers {transformers.__version__} spreads no experts by DistributedConfig", allow_module_level=True
    )
if "ep_size" in KNOWN:
    SHARED, APART = {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}
    MORE = [("own batches", APART, "model", False), ("an empty rank", APART, "model", True)]
else:
    SHARED, MORE = {"tp_size": 2, "enable_expert_parallel": True}, []
CASES = [
    ("shared", SHARED, "model", False),
    ("shared, classes", SHARED, "classes", False),
    ("columns", {"tp_size": 2}, "model", False),  # every expert on both ranks, half of it on each
    *MORE,
]
LAYERS = 2
OPTIONS = {"fused_linear_cross_entropy": False}


def model_alone(device):
    return tiny_model(transformers.Qwen3MoeForCausalLM, num_hidden_layers=LAYERS).to(device)


def first_two_experts(model):
    """Every token chooses experts 0 and 1, which one rank has."""
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: (*output[:-1], output[-1] % 2))


def whole(gradient):
    """A parameter's gradient from all ranks; torch 2.11 cannot gather strided shards of one dimension."""
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


def step(model, *batches):
    """(losses, gradients) of the mean of a model's losses on batches; gradients whole."""
    losses = [model(batch, labels=batch).loss for batch in batches]
    torch.stack(losses).mean().backward()
    return [loss.detach() for loss in losses], {n: whole(p.grad) for n, p in model.named_parameters()}


def check(name, results, expected, tolerance):
    (losses, gradients), (expected_losses, expected_gradients) = results, expected
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
    for parameter, gradient in expected_gradients.items():
        scale = float(gradient.abs().max())
        close = torch.allclose(gradients[parameter], gradient, rtol=1e-3, atol=max(1e-3, tolerance) * scale)
        assert close, f"{name}: {parameter}"


def check_experts(rank, device):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    rows = []  # of every call of the op

    def counting(x, *args, original=functional.liger_fused_moe, **options):
        rows.append(len(x))
        return original(x, *args, **options)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        mock.patch.object(functional, "liger_fused_moe", counting),
    ):
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)
        if rank == 0:
            model_alone("cpu").save_pretrained(folder)
        dist.barrier()
        _check_experts(rank, device, folders[0], rows)
        dist.barrier()


def _check_experts(rank, device, folder, rows):
    tolerance = 1e-5 if device.type == "cpu" else 1e-3
    batches = torch.randint(5, 100, (2, 1, 9), generator=torch.Generator().manual_seed(0)).to(device)
    for name, plan, patch, one_sided in CASES:
        used = [batches[0]] if "tp_size" in plan else list(batches)
        alone = model_alone(device)
        if one_sided:
            first_two_experts(alone)
        losses, gradients = step(alone, *used)
        if patch == "classes":
            report = liger_hw.transformers.apply_liger_kernel_to_qwen3_moe(**OPTIONS)
        config = DistributedConfig(**plan)
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)
        if patch == "model":
            report = liger_hw.patch(model, **OPTIONS)
        if one_sided:
            first_two_experts(model)
        rows.clear()
        batch = used[rank % len(used)]
        results = step(model.train(), batch)
        assert len(rows) == LAYERS, rows
        total = torch.tensor(sum(rows), device=device)
        dist.all_reduce(total)
        slots = 2 * len(used) * batch.shape[1] * LAYERS
        assert total == slots + (LAYERS if one_sided else 0)  # a row stands for none
        check(name, results, ([losses[rank % len(used)]], gradients), tolerance)
        report.revert()

    expected = step(model_alone(device), batches[rank])[0], step(model_alone(device), *batches)[1]
    model = model_alone(device)
    liger_hw.patch(model, **OPTIONS)
    mesh = dist.init_device_mesh(device.type, (2,))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows.clear()
    results = step(model, batches[rank])
    assert len(rows) == LAYERS
    check("fsdp2", results, expected, tolerance)


@pytest.mark.full  # tests/transformers/test_experts.py has slots of other ranks' experts, in one process
@ranks.everywhere
def test_two_ranks(kind):
    ranks.run(__file__, "check_experts", kind, world=2)
