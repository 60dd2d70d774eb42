"""Data-parallel training with FSDP2 (fully_shard): patch first, then shard.

    torchrun --nproc-per-node 2 examples/fsdp2.py [--steps 10 --hidden 128 ...]

On machines without GPUs the ranks use gloo. `distributed.sync()` makes every rank launch with rank 0's configurations.
"""

import torch
import torch.distributed as dist
from common import arguments, compare, tiny_llama, windows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from liger_hw import distributed
from liger_hw.transformers import apply_liger_kernel_to_llama


def train(options, patch: bool, steps) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = tiny_llama(options)
    if patch:
        apply_liger_kernel_to_llama(model=model)
        distributed.sync()
    mesh = init_device_mesh(options.device.type, (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    # Losses go over a group of their own, which destroy_process_group ends, threads and all. The mesh's is kept
    # by caches
    # of DTensor (torch 2.13): a gloo thread that lets go of its last tensor while Python exits aborts the process.
    metrics = dist.new_group(backend="gloo")
    losses = []
    for batch in windows(size * options.batch * options.steps, options.seq).split(size * options.batch):
        mine = batch[rank * options.batch : (rank + 1) * options.batch].to(options.device)
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().to("cpu", copy=True)
        dist.all_reduce(mean, group=metrics)
        losses.append(mean.item() / size)
        steps()
    return losses


if __name__ == "__main__":
    options = arguments(__doc__)
    dist.init_process_group()
    if options.device.type != "cpu":
        options.device = torch.device(options.device.type, dist.get_rank())
        torch.get_device_module(options.device).set_device(options.device)
    compare(train, options, dist.get_world_size() * options.batch * options.seq, main=dist.get_rank() == 0)
    dist.destroy_process_group()
