"""Liger's layers of one family against the modules of transformers: same parameters, same numbers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_hw.compat import modules
from liger_hw.transformers import LigerGEGLUMLP, LigerGroupNorm, LigerLayerNorm, LigerPolyNorm, LigerRMSNorm


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
    "ours, family, name, given",
    [
        ("LigerRMSNormForGemma", "gemma", "GemmaRMSNorm", {}),
        ("LigerRMSNormForGemma2", "gemma2", "Gemma2RMSNorm", {}),
        ("LigerRMSNormForGemma3", "gemma3", "Gemma3RMSNorm", {}),
        ("LigerRMSNormForGemma4", "gemma4", "Gemma4RMSNorm", {}),
        ("LigerRMSNormForGemma4", "gemma4", "Gemma4RMSNorm", {"with_scale": False}),
        ("LigerRMSNormForOlmo2", "olmo2", "Olmo2RMSNorm", {}),
        ("LigerRMSNormForGlm4", "glm4", "Glm4RMSNorm", {}),
        ("LigerRMSNormForQwen3Next", "qwen3_next", "Qwen3NextRMSNorm", {}),
        ("LigerRMSNormForMuseGlimmer", "muse_glimmer", "MuseGlimmerRMSNorm", {}),
        ("LigerRMSNormForMuseGlimmer", "muse_glimmer", "MuseGlimmerRMSNorm", {"eps": 1e-6, "with_scale": False}),
        ("LigerRMSNormForMuseGlimmerTextCentered", "muse_glimmer", "MuseGlimmerTextCenteredRMSNorm", {}),
    ],
)
def test_norms(ours, family, name, given):
    width = () if "eps" in given else (24,)  # without a scale, Muse Glimmer's takes no width
    same(getattr(modules, ours)(*width, **given), theirs(family, name)(*width, **given), 24)


def test_muse_glimmer_calls_its_activation_otherwise():
    config = SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_activation="silu")
    ours = modules.LigerSwiGLUMLPForMuseGlimmer(config)
    same(ours, theirs("muse_glimmer", "MuseGlimmerTextMLP")(config), 16)
    assert ours.config is config and not hasattr(config, "hidden_act")
    with pytest.raises(ValueError, match="the config's activation is 'gelu'"):  # Gemma's configs call it so too
        modules.LigerSwiGLUMLP(SimpleNamespace(**{**vars(config), "hidden_activation": "gelu"}))


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
        num_hidden_layers=2,  # transformers before the modes counts layers
        num_kv_shared_layers=1,
    )
    ours = modules.LigerGEGLUMLPForGemma4(config, layer)
    assert ours.gate_proj.out_features == width and config.intermediate_size == 24
    same(ours, theirs("gemma4", "Gemma4TextMLP")(config, layer), 16)


@pytest.mark.parametrize("layer, shared, width", [(0, 1, 24), (1, 1, 48), (1, 0, 24), (None, 1, 24)])
def test_gemma4_by_the_number_of_layers_that_share(layer, shared, width):
    """A config without modes, as Liger reads it."""
    config = SimpleNamespace(
        **{**CONFIG, "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 2},
        use_double_wide_mlp=True,
        num_kv_shared_layers=shared,
    )
    assert modules.LigerGEGLUMLPForGemma4(config, layer).gate_proj.out_features == width


@pytest.mark.parametrize("given", [{}, {"bias": False}, {"bias": True}])
def test_layer_and_group_norm_have_liger_s_parameters(given):
    x, state = torch.randn(4, 8, 8), {"weight": torch.full((8,), 2.0), "bias": torch.full((8,), 3.0)}
    for layer, function, sizes in (
        (LigerLayerNorm(8, eps=1e-3, **given), F.layer_norm, (8,)),
        (LigerGroupNorm(8, 2, eps=1e-3, **given), F.group_norm, 2),
    ):
        assert layer.eps == layer.variance_epsilon == 1e-3
        assert layer.state_dict().keys() == state.keys() and not layer.bias.detach().any()
        layer.load_state_dict(state)
        torch.testing.assert_close(layer(x), function(x, sizes, layer.weight, layer.bias, 1e-3))


def test_norms_take_what_liger_s_take():
    assert LigerLayerNorm(8, bias=None).bias is None and LigerGroupNorm(8, 2, bias=None).bias is None
    for chosen in ({"impl": "triton"}, {"backend": "triton"}):
        layer = LigerLayerNorm(8, mode="persistent", **chosen)
        assert (layer.impl, layer.backend, layer.mode) == ("triton", "triton", "persistent")
    assert LigerPolyNorm().bias.item() == 1.0 and LigerPolyNorm().bias.shape == ()


def test_mixtral_expert():
    torch.manual_seed(0)
    expert, x = modules.LigerBlockSparseTop2MLP(SimpleNamespace(**CONFIG)), torch.randn(4, 16)
    torch.testing.assert_close(expert(x), expert.w2(torch.nn.functional.silu(expert.w1(x)) * expert.w3(x)))


def bound(method, module):
    return method.__get__(module, type(module))


def test_forwards_bound_to_modules_of_other_classes():
    """By programs with a copy of Liger's patch functions: a norm has what these set, an MLP what its own class has."""
    llama, gemma = theirs("llama", "LlamaRMSNorm"), theirs("gemma", "GemmaMLP")
    norm, x = llama(16, 0.3), torch.randn(3, 16)
    torch.nn.init.normal_(norm.weight)
    expected = norm(x)
    norm.offset, norm.casting_mode, norm.in_place, norm.row_mode = 0.0, "llama", False, None
    norm.forward, norm.extra_repr = (bound(f, norm) for f in (LigerRMSNorm.forward, LigerRMSNorm.extra_repr))
    torch.testing.assert_close(norm(x), expected)
    assert repr(norm).startswith("LlamaRMSNorm(16, eps=0.3")
    mlp = gemma(SimpleNamespace(**{**CONFIG, "hidden_act": "gelu_pytorch_tanh"}))
    expected = mlp(x)
    mlp.forward = bound(LigerGEGLUMLP.forward, mlp)
    torch.testing.assert_close(mlp(x), expected)


def test_what_layers_keep_and_need():
    norm = LigerRMSNorm(8, 1e-5, 1.0, "gemma", "zeros", False, None)
    kept = norm.variance_epsilon, norm.offset, norm.casting_mode, norm.in_place, norm.row_mode
    assert kept == (1e-5, 1.0, "gemma", False, None)
    assert repr(LigerRMSNorm(8, elementwise_affine=False)).startswith("LigerRMSNorm(8, ")
    for name, in_place in (("Gemma", True), ("Gemma2", False), ("Qwen3Next", False), ("Glm4", False)):
        layer = getattr(modules, f"LigerRMSNormFor{name}")(8)
        assert layer.in_place is in_place and type(layer).__name__ == f"LigerRMSNormFor{name}"
    assert LigerGEGLUMLP(SimpleNamespace(hidden_size=4, intermediate_size=6)).approximate == "tanh"


@pytest.mark.parametrize("heads_at, unsqueeze_dim", [(1, 1), (2, 1), (2, 2)])
def test_angles_with_a_dimension_for_the_heads(heads_at, unsqueeze_dim):
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    angles = torch.randn(1, q.shape[3 - unsqueeze_dim], 8)
    plain = modules.liger_rotary_pos_emb(q, k, angles.cos(), angles.sin(), None, unsqueeze_dim)
    wide = angles.unsqueeze(heads_at)
    found = modules.liger_rotary_pos_emb(q, k, wide.cos(), wide.sin(), None, unsqueeze_dim)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    with pytest.raises(ValueError, match="cos must be .* to match q"):
        modules.liger_rotary_pos_emb(q, k, *(torch.ones(1, 3, 5, 8) for _ in range(2)))
