"""Recognising parameters that FSDP1 has flattened, and PEFT's wrapper of a head under FSDP2."""

from __future__ import annotations

import contextlib

import pytest
import ranks
import torch

from liger_hw.distributed import owners


class Norm(torch.nn.Module):
    """Has a weight and tensors that are neither parameters nor buffers. inside: results of `owners` in a forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.used = torch.nn.Parameter(torch.ones(8)), torch.tensor(1.0)
        self.first_half = self.weight.detach()[:4]
        self.inside = []

    def forward(self, x):
        self.inside.append((owners.unknown_flattened(self), owners.sharded_by(self)))
        return x * self.weight


def test_a_tensor_of_its_own_does_not_make_a_module_sharded():
    norm = Norm()
    norm(torch.ones(2, 8))
    assert norm.inside == [([], "")] and not owners.unknown_flattened(norm) and not owners.sharded_by(norm)


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
                assert owners.unknown_flattened(norm) == ["weight"], case
                for mode in modes:
                    with mode():
                        wrapped(torch.ones(2, 8, device=device))
                    assert owners.unknown_flattened(norm) == ["weight"]
                    assert owners.sharded_by(norm) == "FSDP1", (case, mode)
                assert norm.inside == [(["weight"], "FSDP1")] * 3, (case, norm.inside)


@ranks.everywhere
def test_what_fsdp1_flattened_is_named(kind):
    ranks.run(__file__, "check_flattened", kind)


def check_saved_whole(rank, device):
    import transformers
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    import liger_hw
    from liger_hw.transformers import functional
    from liger_hw.transformers.tiny import tiny_model

    fused, plain = [], functional.liger_fused_linear_cross_entropy

    def counted(*args, **options):
        fused.append(args)
        return plain(*args, **options)

    functional.liger_fused_linear_cross_entropy = counted
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(rank)).to(device)
    results = []
    for is_patched in (False, True):
        torch.manual_seed(0)
        options = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = get_peft_model(tiny_model(transformers.LlamaForCausalLM, num_hidden_layers=1), options).to(device)
        if is_patched:
            liger_hw.patch(model)
        base = model.get_base_model()
        fully_shard([base.model.norm, base.lm_head], reshard_after_forward=False)
        fully_shard(model)
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append((loss, base.lm_head.modules_to_save["default"].weight.grad.full_tensor()))
    assert len(fused) == 1
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.cpu
def test_a_head_that_peft_trains_whole_is_read_under_fsdp2():
    """FSDP2 makes a subclass of PEFT's wrapper."""
    pytest.importorskip("peft")
    ranks.run(__file__, "check_saved_whole")
