"""What is said about who owns a module's tensors: FSDP1, or the module itself."""

from __future__ import annotations

import contextlib

import pytest
import ranks
import torch

from liger_hw.distributed import owners


class Norm(torch.nn.Module):
    """A weight, and a tensor that is neither a parameter nor a buffer. inside: what was `forgotten` in a forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.used = torch.nn.Parameter(torch.ones(8)), torch.tensor(1.0)
        self.first_half = self.weight.detach()[:4]
        self.inside = []

    def forward(self, x):
        self.inside.append((owners.forgotten(self), owners.sharded_by(self)))
        return x * self.weight


def test_a_tensor_of_its_own_does_not_make_a_module_sharded():
    norm = Norm()
    norm(torch.ones(2, 8))
    assert norm.inside == [([], "")] and not owners.forgotten(norm) and not owners.sharded_by(norm)


def check_flattened(rank, device):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    modes = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        for original in (False, True):
            for precision, frozen in ((None, False), (MixedPrecision(param_dtype=torch.bfloat16), True)):
                norm = Norm()
                norm.weight.requires_grad_(not frozen)
                wrapped = FullyShardedDataParallel(
                    torch.nn.Sequential(norm),
                    sharding_strategy=strategy,
                    use_orig_params=original,
                    mixed_precision=precision,
                    device_id=device,
                )
                case = strategy, original, frozen
                assert owners.forgotten(norm) == ["weight"], case
                for mode in modes:
                    with mode():
                        wrapped(torch.ones(2, 8, device=device))
                    assert owners.forgotten(norm) == ["weight"] and owners.sharded_by(norm) == "FSDP1", (case, mode)
                assert norm.inside == [(["weight"], "FSDP1")] * 3, (case, norm.inside)


@pytest.mark.cpu
def test_what_fsdp1_flattened_is_named():
    ranks.run(__file__, "check_flattened")


@pytest.mark.multigpu
def test_what_fsdp1_flattened_is_named_on_two_gpus():
    ranks.run(__file__, "check_flattened", ranks.accelerator())
