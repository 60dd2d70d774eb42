"""`liger_hw.float8` in two processes: what data parallelism does with linears in FP8."""

from __future__ import annotations

import pytest
import ranks
import torch

import liger_hw

IDS = torch.arange(24).view(2, 12) * 5 % 64


def _llama(lora):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64))
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    return model


def check_ranks(rank, device):
    """Two ranks, each with half of a batch: DDP and FSDP2 (weights gathered in fp32, or in bf16 as of a mixed precision
    policy; LoRA's base weights in FP8) give the mean of what the halves give alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    def gradients(model, ids):
        model(input_ids=ids, labels=ids).loss.backward()
        grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}

    def prepared(lora=False, dtype=None):
        model = _llama(lora)
        for parameter in model.parameters():  # not the buffers, which FSDP leaves as they are
            parameter.data = parameter.data.to(dtype)
        liger_hw.float8(model, smallest=16, keep_frozen=lora)
        liger_hw.patch(model)
        return model

    halves, mesh = IDS.chunk(2), init_device_mesh("cpu", (2,))
    for how in ("ddp", "fsdp2", "fsdp2, bf16", "fsdp2, lora"):
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
            assert (grad - expected).norm() <= (0.02 if dtype else 1e-5) * expected.norm(), (how, name)
        if lora:  # weights kept in FP8 are stored and loaded in their dtype, also in parts
            state, whole = model.state_dict(), prepared(lora).state_dict()
            assert state.keys() == whole.keys()
            assert all(torch.equal(state[name].full_tensor(), value) for name, value in whole.items())
            for value in state.values():
                value.mul_(2)
            model.load_state_dict(state)
            assert all(torch.equal(value.full_tensor(), 2 * whole[name]) for name, value in model.state_dict().items())


@pytest.mark.cpu
def test_two_ranks():
    ranks.run(__file__, "check_ranks")
