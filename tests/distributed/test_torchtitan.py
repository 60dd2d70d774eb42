"""torchtitan's own parallelise function on two layers of its Llama 3, patched against unpatched (needs torchtitan)."""

from __future__ import annotations

import importlib.util

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F

import liger_hw
from liger_hw.runtime.launch import observing

needs_torchtitan = pytest.mark.skipif(
    not importlib.util.find_spec("torchtitan"), reason="needs torchtitan: bash ci/distributed.sh installs it"
)


def attention(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, **_):
    """Replaces flex attention, which torchtitan compiles for GPUs."""
    q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def train(tensor_parallel, patched, tokens):
    """(loss, whole gradients, operators that ran) of one step."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = llama3_configs["debugmodel"](attn_backend="flex", tp_gemm_backend="default")
    config.layers = config.layers[:2]
    degree = dist.get_world_size() if tensor_parallel else 1
    parallelism = ParallelismConfig(
        tensor_parallel_degree=degree,
        data_parallel_shard_degree=dist.get_world_size() // degree,
        enable_sequence_parallel=tensor_parallel,
        spmd_backend="partial_dtensor",
    )
    if tensor_parallel:
        set_llama3_sharding_config(config, enable_sp=True)
    model = config.build().train()
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.05)
    if patched:
        report = liger_hw.patch(model)
        assert {row.part for row in report.patched} == {"rms_norm", "swiglu"}
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    calls = ranks.Calls()
    with observing(calls, every_thread=True):
        logits = whole(model(tokens))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    return loss.detach(), {name: whole(p.grad) for name, p in model.named_parameters()}, calls.names


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def check_llama(rank, device):
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = device.type  # it takes a machine without a GPU for one with CUDA
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention.forward = attention
    tokens = torch.randint(0, 2048, (2, 32), generator=torch.Generator().manual_seed(1))
    for tensor_parallel in (False, True):
        mine = tokens if tensor_parallel else tokens[rank : rank + 1]
        expected, gradients, none = train(tensor_parallel, False, mine)
        loss, found, names = train(tensor_parallel, True, mine)
        torch.testing.assert_close(loss, expected)
        for name, gradient in gradients.items():
            error = float((found[name] - gradient).norm() / gradient.norm())
            assert error < 1e-5, (name, error)
        assert not none and names.count("rms_norm_fwd") == 5 and names.count("swiglu_fwd") == 2, names


@pytest.mark.cpu
@pytest.mark.full
@needs_torchtitan
def test_llama_by_fsdp_and_by_tensor_parallelism():
    ranks.run(__file__, "check_llama")
