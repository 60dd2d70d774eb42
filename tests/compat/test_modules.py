"""Liger's layers of one family against the modules of transformers: same parameters, same numbers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from liger_hw.compat import modules

pytestmark = pytest.mark.cpu


def theirs(family: str, name: str):
    try:
        return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {name}")


def same(ours: torch.nn.Module, other: torch.nn.Module, width: int) -> None:
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    ours.load_state_dict(other.state_dict())
    x = torch.randn(3, 5, width)
    torch.testing.assert_close(ours(x), other(x))


@pytest.mark.parametrize(
    "ours, family, name",
    [
        ("LigerRMSNormForGemma", "gemma", "GemmaRMSNorm"),
        ("LigerRMSNormForGemma2", "gemma2", "Gemma2RMSNorm"),
        ("LigerRMSNormForGemma3", "gemma3", "Gemma3RMSNorm"),
        ("LigerRMSNormForGemma4", "gemma4", "Gemma4RMSNorm"),
        ("LigerRMSNormForOlmo2", "olmo2", "Olmo2RMSNorm"),
        ("LigerRMSNormForGlm4", "glm4", "Glm4RMSNorm"),
        ("LigerRMSNormForQwen3Next", "qwen3_next", "Qwen3NextRMSNorm"),
    ],
)
def test_norms(ours, family, name):
    same(getattr(modules, ours)(24), theirs(family, name)(24), 24)


def test_a_norm_without_scale():
    same(
        modules.LigerRMSNormForGemma4(24, with_scale=False), theirs("gemma4", "Gemma4RMSNorm")(24, with_scale=False), 24
    )


CONFIG = dict(hidden_size=16, intermediate_size=24, hidden_act="silu", mlp_bias=True, mlp_multipliers=(1.5, 0.5))


def test_falcon_h1():
    config = SimpleNamespace(**CONFIG)
    same(modules.LigerFalconH1SwiGLUMLP(config), theirs("falcon_h1", "FalconH1MLP")(config), 16)


def test_hunyuan():
    config = SimpleNamespace(**{**CONFIG, "mlp_bias": False}, attention_bias=False, pretraining_tp=1)
    same(
        modules.LigerHunyuanV1SwiGLUMLP(config, layer_idx=0),
        theirs("hunyuan_v1_dense", "HunYuanDenseV1MLP")(config, layer_idx=0),
        16,
    )


@pytest.mark.parametrize("layer, width", [(0, 24), (1, 48)])
def test_gemma4(layer, width):
    config = SimpleNamespace(
        **{**CONFIG, "hidden_activation": "gelu_pytorch_tanh"},
        use_double_wide_mlp=True,
        kv_sharing_modes=["keep", "reuse"],
    )
    ours = modules.LigerGEGLUMLPForGemma4(config, layer)
    assert ours.gate_proj.out_features == width and config.intermediate_size == 24
    same(ours, theirs("gemma4", "Gemma4TextMLP")(config, layer), 16)


def test_mixtral_expert():
    torch.manual_seed(0)
    expert, x = modules.LigerBlockSparseTop2MLP(SimpleNamespace(**CONFIG)), torch.randn(4, 16)
    torch.testing.assert_close(expert(x), expert.w2(torch.nn.functional.silu(expert.w1(x)) * expert.w3(x)))
