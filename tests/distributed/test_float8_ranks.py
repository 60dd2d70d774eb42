"""`liger_hw.float8` in two processes: what data parallelism does with linears in FP8."""

from __future__ import annotations

import pytest
import ranks
import torch

import liger_hw
from liger_hw.transformers.tiny import tiny_model

IDS = torch.arange(24).view(2, 12) * 5 % 64


def _llama(lora):
    import transformers

    torch.manual_seed(0)  # for PEFT
    model = tiny_model(transformers.LlamaForCausalLM, num_hidden_layers=2, vocab_size=64)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    return model


def check_ranks(rank, device):
    """Two ranks, each with half of a batch: DDP and FSDP2 (weights gathered in fp32, or in bf16 as of a mixed precision
    policy; LoRA's base weights in FP8) give the mean of what the halves give alone. On GPUs the order of a sum may
    change, and with it a number's rounding to FP8."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    def gradients(model, ids):
        model(input_ids=ids, labels=ids).loss.backward()
        grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}

    def prepared(lora=False, dtype=None):
        model = _llama(lora).to(device)
        for parameter in model.parameters():  # not the buffers, which FSDP leaves as they are
            parameter.data = parameter.data.to(dtype)
        liger_hw.float8(model, smallest=16, keep_frozen=lora)
        liger_hw.patch(model)
        return model

    halves, mesh = IDS.to(device).chunk(2), init_device_mesh(device.type, (2,))
    hows = ("ddp", "fsdp2", "fsdp2, bf16", "fsdp2, lora")
    for how in hows if device.type == "cpu" else (*hows, "ddp, lora"):  # gloo cannot broadcast FP8
        lora, dtype = "lora" in how, torch.bfloat16 if "bf16" in how else None
        of_halves = [gradients(prepared(lora, dtype), ids) for ids in halves]
        model = prepared(lora)
        if "ddp" in how:
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            layers = [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
            for module in (*layers, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        result = gradients(model, halves[rank])
        assert result.keys() == of_halves[0].keys()
        for name, grad in result.items():
            expected = (of_halves[0][name].float() + of_halves[1][name].float()) / 2
            rounding = 1e-5 if dtype is None and device.type == "cpu" else 0.02
            assert (grad - expected).norm() <= rounding * expected.norm(), (how, name)
        if lora and "fsdp2" in how:  # weights kept in FP8 are stored and loaded in their dtype, also in parts
            state, whole = model.state_dict(), prepared(lora).state_dict()
            assert state.keys() == whole.keys()
            assert all(torch.equal(state[name].full_tensor().cpu(), value.cpu()) for name, value in whole.items())
            for value in state.values():
                value.mul_(2)
            model.load_state_dict(state)
            twice = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
            assert all(torch.equal(value, 2 * whole[name].cpu()) for name, value in twice.items())


@ranks.everywhere
def test_two_ranks(kind):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    ranks.run(__file__, "check_ranks", kind or ranks.accelerator())
