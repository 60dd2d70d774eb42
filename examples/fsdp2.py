"""Data-parallel training with FSDP2 (fully_shard): patch first, then shard.

    torchrun --nproc-per-node 8 examples/fsdp2.py --model Qwen/Qwen3-8B --batch 2 --seq 4096

On machines without GPUs the ranks use gloo. `--unpatched` trains without liger_hw, to compare.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from local import load, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import liger_hw

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--text", type=Path, help="a text file to train on (default: Python's manual)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=4, help="rows a process")
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--unpatched", action="store_true")
options = parser.parse_args()

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.accelerator.is_available():
    device = torch.device(torch.accelerator.current_accelerator().type, rank % torch.accelerator.device_count())
    torch.get_device_module(device).set_device(device)

model, tokenizer = load(options.model)
model.to(device)
if not options.unpatched:
    report = liger_hw.patch(model)
    if rank == 0:
        print(report)
mesh = init_device_mesh(device.type, (size,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = rows(tokenizer, options.text, options.seq, size * options.batch * options.steps).to(device)
metrics = dist.new_group(backend="gloo")  # ended below; the mesh's own group is kept by DTensor's caches
for batch in ids.split(size * options.batch):
    mine = batch[rank * options.batch : (rank + 1) * options.batch]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().float().to("cpu", copy=True)
    dist.all_reduce(mean, group=metrics)
    if rank == 0:
        print(f"loss {mean.item() / size}")
dist.destroy_process_group()
del metrics  # its threads end with its last name; one that lets go of a tensor while Python exits would abort
