"""Tiled MLPs under FSDP2: two processes have the gradients of one, from weights that are gathered a layer at a time."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from small_decoder import Decoder, some_input

import liger_hw
from liger_hw.kernels.pointwise import tiled_mlp

pytestmark = [pytest.mark.lanes("cpu")]


def _rank(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    tiled_mlp.TILE_ROWS = 3
    x = (some_input(torch.float64, tokens=20) * (1 + rank)).detach()
    whole = Decoder(count=3, dtype=torch.float64)
    whole(x).square().mean().backward()
    expected = [p.grad for p in whole.parameters()]
    for gradient in expected:
        dist.all_reduce(gradient)
    plain, are_plain = [], tiled_mlp._are_plain
    tiled_mlp._are_plain = lambda *args: plain.append(are_plain(*args)) or plain[-1]
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for level in ("tiled", "offload"):
        model = Decoder(count=3, dtype=torch.float64)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with liger_hw.activations(level, model):
            for _ in range(2):
                model.zero_grad()
                model(x).square().mean().backward()
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), gradient / 2, rtol=1e-12, atol=1e-14)
    assert plain and all(plain), "the sums in fp32 are those of plain parameters"
    dist.destroy_process_group()


def test_two_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port,), nprocs=2)
