"""Megatron-core's GPTModel with the kernels against itself without, on one rank and on two (needs megatron-core)."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist

from liger_hw.megatron import (
    LigerMegatronCrossEntropy,
    LigerMegatronRMSNorm,
    LigerMegatronSwiGLU,
    _fused_loss,
    _layer_norm,
    _loss,
    _norm_of,
    _replace,
)
from liger_hw.megatron import apply_liger_kernel_to_megatron as apply
from liger_hw.transformers.report import ALREADY, PATCHED, PatchReport

needs_megatron = pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="needs megatron-core: pip install --no-deps megatron-core"
)
CONFIG = SimpleNamespace(normalization="RMSNorm", sequence_parallel=True, layernorm_zero_centered_gamma=True)


def build(device, fused, sequence_parallel=False):
    """(model, its losses) of a small GPTModel, the same weights for every way to run it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=fused,
        cross_entropy_fusion_impl="native",
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="learned_absolute",
    ).to(device)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device), 1)
    positions = torch.arange(16, device=device)[None].expand(2, -1)
    losses = model(tokens, positions, mask, labels=tokens.flip(1))
    losses.mean().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grads[name] = parameter.grad
        if sequence_parallel and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)  # as megatron's finalize_model_grads does for tagged weights
    return model, losses.detach(), grads


def check_gpt_model(rank, device):
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.tensor_parallel import random

    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    if device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # where megatron-core makes its buffers
        random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # for dropout, of which there is none
    else:
        random.model_parallel_cuda_manual_seed(0)
    # its fused loss rounds the gradient to bf16, so that of the unfused one is what both are held to
    _, losses, grads = build(device, False)
    ran, ours = [], None
    with apply(rms_norm=True, cross_entropy=True, swiglu=True) as report:
        assert {row.kernel for row in report.patched} == {
            "rms_norm",
            "vocab_parallel_cross_entropy",
            "fused_gate_up_swiglu",
        }
        assert not apply(cross_entropy=True, swiglu=True).patched
        ours = fused_bias_swiglu.SwiGLUFunction.apply
        fused_bias_swiglu.SwiGLUFunction.apply = staticmethod(lambda *args: (ran.append(1), ours(*args))[1])
        for fused in (False, True):
            for sequence_parallel in (False, True)[:world]:
                model, found, found_grads = build(device, fused, sequence_parallel)
                norms = [m for m in model.modules() if isinstance(m, LigerMegatronRMSNorm)]
                assert len(norms) == 5 and ran, "a kernel did not run"
                ran.clear()
                torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
                for name, grad in grads.items():
                    torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert fused_bias_swiglu.SwiGLUFunction.__module__.startswith("megatron")
    parallel_state.destroy_model_parallel()


@pytest.mark.cpu
@needs_megatron
@pytest.mark.parametrize("world", [1, 2])
def test_gpt_model(world):
    ranks.run(__file__, "check_gpt_model", world=world)


@pytest.mark.multigpu
@needs_megatron
def test_gpt_model_on_two_gpus():
    ranks.run(__file__, "check_gpt_model", ranks.accelerator())


def test_modules_without_megatron(lane):
    x = torch.randn(3, 2, 16, device=lane.device)
    norm = LigerMegatronRMSNorm(CONFIG, 16).to(lane.device)
    assert norm.weight.sequence_parallel and not norm.weight.any()
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-5))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(LigerMegatronSwiGLU()(x), torch.nn.functional.silu(gate) * up)
    target = torch.zeros(3, 2, dtype=torch.long, device=lane.device)
    expected = torch.nn.functional.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    torch.testing.assert_close(LigerMegatronCrossEntropy()(x, target), expected)


@pytest.mark.cpu
@pytest.mark.parametrize("build_loss", [_fused_loss, _loss])
def test_without_a_group_a_loss_takes_the_models(build_loss, monkeypatch):
    """Releases of Megatron-core call their losses without one; None alone would stand for a whole vocabulary."""
    state = ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda check_initialized=True: "the model's group"
    monkeypatch.setitem(sys.modules, state.__name__, state)
    monkeypatch.setattr(LigerMegatronCrossEntropy, "forward", lambda self, logits, target, tp_group=None: tp_group)
    loss, logits, target = build_loss(), torch.zeros(2, 1, 4), torch.tensor([[1], [2]])
    assert loss(logits, target) == "the model's group"
    assert loss(logits, target, tp_group="its own") == "its own"


@pytest.mark.cpu
@pytest.mark.parametrize("held", [lambda: None, dict], ids=["function", "class"])
def test_a_place_is_replaced_once(held):
    """A function or a class, as Megatron has both; a second call finds the first one's."""
    place = ModuleType("place")
    place.name = held
    for replacement in (_norm_of(held), _layer_norm(held)):
        report = PatchReport("megatron", "megatron-core")
        for state in (PATCHED, ALREADY):
            _replace(report, "part", "kernel", place, "name", replacement)
            assert place.name is replacement and report.rows[-1].state == state
        report.revert()
        assert place.name is held


@pytest.mark.cpu
def test_what_is_refused():
    with pytest.raises(ValueError, match="normalization must be RMSNorm"):
        LigerMegatronRMSNorm(SimpleNamespace(normalization="LayerNorm"), 16)
    with pytest.raises(NotImplementedError, match="fallback_impl"):
        LigerMegatronSwiGLU()(torch.zeros(2, 8), torch.zeros(8))
