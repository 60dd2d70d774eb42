"""The layers for the `kernels` package, bound to modules of transformers as that package binds them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

from liger_hw import hub

transformers = pytest.importorskip("transformers", minversion="5")
WIDTH = 64


def _layers():
    """The module of layers, loaded as `kernels` loads it."""
    folder = hub.REPOSITORY / "build" / "torch-universal"
    spec = importlib.util.spec_from_file_location("liger_hw_layers_of_tests", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.layers


LAYERS = _layers()
LAYER_CLASSES = [
    value for value in vars(LAYERS).values() if isinstance(value, type) and issubclass(value, LAYERS._Layer)
][1:]


def _class_of(family: str, name: str) -> type:
    return getattr(pytest.importorskip(f"transformers.models.{family}.modeling_{family}"), name)


def _norm(family: str, name: str, dtype: torch.dtype) -> nn.Module:
    module = _class_of(family, name)(WIDTH)
    with torch.no_grad():
        module.weight.copy_(torch.randn(WIDTH))
    return module.to(dtype)


def _mlp(family: str, name: str, act: str, dtype: torch.dtype) -> nn.Module:
    values = {"hidden_size": 16, "intermediate_size": 24, "hidden_act": act, "hidden_activation": act}
    values |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = {"llama": "LlamaConfig", "gemma": "GemmaConfig", "phi3": "Phi3Config"}[family]
    return _class_of(family, name)(getattr(transformers, config)(**values)).to(dtype)


def _compare(layer: str, module: nn.Module, *inputs: torch.Tensor, uses: str, monkeypatch, tolerance: float) -> None:
    """A layer's outputs and gradients are those of its module, and the kernel `uses` was called."""
    calls = []
    kernel = getattr(LAYERS, uses)
    monkeypatch.setattr(LAYERS, uses, lambda *a, **k: calls.append(1) or kernel(*a, **k))
    leaves = [t for t in (*inputs, *module.parameters()) if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs, gradients = [], []
    for forward in (type(module).forward, getattr(LAYERS, layer).forward):
        result = MethodType(forward, module)(*inputs)
        result = torch.cat([t.flatten() for t in result]) if isinstance(result, tuple) else result
        generator = torch.Generator().manual_seed(1)
        seed = torch.randn(result.shape, generator=generator).to(result.dtype)
        outputs.append(result.detach())
        gradients.append(torch.autograd.grad(result, leaves, seed))
    assert calls == [1]
    assert outputs[0].dtype == outputs[1].dtype
    torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
    for theirs, ours in zip(*gradients):
        assert torch.isfinite(ours).all() and ours.abs().max() > 0
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=tolerance, atol=tolerance)


class _Rotary(nn.Module):
    """`apply_rotary_pos_emb` as the module in which `kernels` wraps a function."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return self.function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    @property
    def function(self):
        function = _class_of("llama", "apply_rotary_pos_emb")
        return function if inspect.isfunction(function) else type(function).forward.__get__(function)


def _gated(family: str, name: str, activation: str, dtype: torch.dtype) -> nn.Module:
    module = _norm(family, name, dtype)
    module.activation = activation
    return module


def _rows(width: int, count: int = 1):
    return lambda dtype: [torch.randn(3, 5, width).to(dtype).requires_grad_() for _ in range(count)]


def _heads(dtype: torch.dtype, unsqueeze_dim: int = 1) -> list[torch.Tensor]:
    """q, k of fewer heads, and the cosines and sines of the same angles in both halves."""
    shapes = [(2, heads, 7, 16) if unsqueeze_dim == 1 else (2, 7, heads, 16) for heads in (4, 1)]
    q, k = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    angles = torch.randn(2, 7, 8, dtype=dtype).repeat(1, 1, 2)
    return [q, k, angles.cos(), angles.sin()]


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # bf16: the module's code rounds twice
NORMS = [
    ("RMSNorm", "liger_rms_norm", partial(_norm, "llama", "LlamaRMSNorm"), _rows(WIDTH)),
    ("RMSNorm", "liger_rms_norm", partial(_norm, "qwen3", "Qwen3RMSNorm"), _rows(WIDTH)),
    ("RMSNormFp32Weight", "liger_rms_norm", partial(_norm, "olmo2", "Olmo2RMSNorm"), _rows(WIDTH)),
    ("RMSNormZeroCentered", "liger_rms_norm", partial(_norm, "gemma", "GemmaRMSNorm"), _rows(WIDTH)),
    ("RMSNormZeroCentered", "liger_rms_norm", partial(_norm, "qwen3_next", "Qwen3NextRMSNorm"), _rows(WIDTH)),
    ("LayerNorm", "liger_layer_norm", lambda dtype: nn.LayerNorm(WIDTH, dtype=dtype), _rows(WIDTH)),
    (
        "RMSNormGated",
        "liger_gated_rms_norm",
        partial(_gated, "qwen3_next", "Qwen3NextRMSNormGated", "silu"),
        _rows(WIDTH, 2),
    ),
    (
        "RMSNormGatedFp32Weight",
        "liger_gated_rms_norm",
        partial(_gated, "kimi_linear", "KimiLinearRMSNormGated", "sigmoid"),
        _rows(WIDTH, 2),
    ),
]
OTHERS = [
    ("SwiGLUMLP", "liger_swiglu", partial(_mlp, "llama", "LlamaMLP", "silu"), _rows(16)),
    ("SwiGLUMLP", "liger_swiglu", partial(_mlp, "phi3", "Phi3MLP", "silu"), _rows(16)),
    ("GeGLUMLP", "liger_geglu", partial(_mlp, "gemma", "GemmaMLP", "gelu_pytorch_tanh"), _rows(16)),
    ("GeGLUMLP", "liger_geglu", partial(_mlp, "llama", "LlamaMLP", "gelu"), _rows(16)),
    ("RotaryPosEmb", "liger_rope", lambda dtype: _Rotary(), _heads),
]
"""Layer, the kernel that it calls, a module, inputs of it."""


@pytest.mark.parametrize(
    "layer, uses, module, inputs, dtype",
    [(*case, dtype) for dtype in TOLERANCE for case in NORMS] + [(*case, torch.float32) for case in OTHERS],
)
def test_a_layer_computes_what_the_module_does(layer, uses, module, inputs, dtype, monkeypatch):
    _compare(layer, module(dtype), *inputs(dtype), uses=uses, monkeypatch=monkeypatch, tolerance=TOLERANCE[dtype])


def test_the_rotary_embedding_of_heads_behind_tokens(monkeypatch):
    options = {"uses": "liger_rope", "monkeypatch": monkeypatch, "tolerance": 1e-5}
    _compare("RotaryPosEmb", _Rotary(), *_heads(torch.float32, 2), 2, **options)


def _refuses(monkeypatch) -> None:
    """Every kernel that a layer could call raises from here on."""

    def called(*args, **kwargs):
        raise AssertionError("a kernel was called")

    for name in [name for name in vars(LAYERS) if name.startswith("liger_")]:
        monkeypatch.setattr(LAYERS, name, called)


def _own(layer: str, module: nn.Module, *inputs) -> None:
    ours, theirs = getattr(LAYERS, layer).forward(module, *inputs), type(module).forward(module, *inputs)
    for a, b in [(ours, theirs)] if isinstance(ours, torch.Tensor) else zip(ours, theirs):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_the_modules_own_forward_runs_where_the_kernel_would_differ(monkeypatch):
    _refuses(monkeypatch)
    x = torch.randn(3, 16)
    _own("SwiGLUMLP", _mlp("llama", "LlamaMLP", "relu", torch.float32), x)
    _own("GeGLUMLP", _mlp("llama", "LlamaMLP", "silu", torch.float32), x)
    _own("SwiGLUMLP", _class_of("gpt2", "GPT2MLP")(32, transformers.GPT2Config(n_embd=16, n_head=2)).eval(), x)
    _own("SwiGLUMLP", _mlp("llama", "LlamaMLP", "silu", torch.float64), x.double())
    # A weight of another dtype: Llama's own code returns the promoted one.
    _own("RMSNorm", _norm("llama", "LlamaRMSNorm", torch.float32), torch.randn(3, WIDTH).bfloat16())
    _own("RMSNorm", _norm("llama", "LlamaRMSNorm", torch.float64), torch.randn(3, WIDTH).double())
    _own("LayerNorm", nn.LayerNorm((4, 16)), torch.randn(3, 4, 16))
    with torch.autocast("cpu", torch.bfloat16):
        _own("LayerNorm", nn.LayerNorm(16, dtype=torch.bfloat16), torch.randn(3, 16).bfloat16())
    angles = torch.randn(2, 7, 16)
    _own("RotaryPosEmb", _Rotary(), *(torch.randn(2, 4, 7, 16).double() for _ in range(2)), angles.cos(), angles.sin())


def test_a_rotary_embedding_of_another_width_keeps_its_code(monkeypatch):
    """gpt-oss rotates with cosines of half the width."""
    _refuses(monkeypatch)

    class Halves(nn.Module):
        def forward(self, q, k, cos, sin, unsqueeze_dim=1):
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            halves = [t.chunk(2, -1) for t in (q, k)]
            return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves)

    angles = torch.randn(2, 7, 8)
    _own("RotaryPosEmb", Halves(), torch.randn(2, 4, 7, 16), torch.randn(2, 1, 7, 16), angles.cos(), angles.sin())


def test_experts_are_those_of_experts_implementation():
    moe = pytest.importorskip("transformers.integrations.moe")
    assert hasattr(moe, "ALL_EXPERTS_FUNCTIONS")
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_local_experts=4, num_attention_heads=2, num_key_value_heads=1
    )
    config._experts_implementation = "grouped_mm"
    experts = _class_of("mixtral", "MixtralExperts")(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.2)
    x = torch.randn(6, 16, requires_grad=True)
    weights, index = torch.rand(6, 4).topk(2)
    results = [cls.forward(experts, x, index, weights) for cls in (type(experts), LAYERS.Experts)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), (x, *experts.parameters())) for y in results]
    for theirs, ours in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", LAYER_CLASSES, ids=lambda cls: cls.__name__)
def test_a_layer_has_the_form_that_kernels_asks_for(layer):
    assert layer.__init__ is nn.Module.__init__
    members = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert members == {"has_backward", "can_torch_compile"} and layer.has_backward and layer.can_torch_compile


def test_every_layer_of_the_table_is_there():
    assert {each for layers in hub.LAYERS.values() for each in layers} == {cls.__name__ for cls in LAYER_CLASSES}


@pytest.mark.parametrize("layer, _, module, inputs", NORMS + OTHERS)
def test_a_layer_compiles_whole_with_its_backward(layer, _, module, inputs):
    module, tensors = module(torch.float32), inputs(torch.float32)
    module.forward = MethodType(getattr(LAYERS, layer).forward, module)
    leaves = [t for t in (*tensors, *module.parameters()) if t.requires_grad]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: module(*t), backend="aot_eager", fullgraph=True)
    totals = []
    for run in (module, compiled):
        result = run(*tensors)
        total = sum(
            (t * torch.arange(t.numel()).view(t.shape)).sum()
            for t in (result if isinstance(result, tuple) else [result])
        )
        totals.append((total.detach(), *torch.autograd.grad(total, leaves)))
    for eager, whole in zip(*totals):
        torch.testing.assert_close(whole, eager)


REGISTERED = re.compile(r'@use_kernel_forward_from_hub\("(RMSNorm\w*)"\)\n(?:@[^\n]*\n)*class (\w+)')


@pytest.mark.full
def test_every_registered_norm_of_transformers_has_its_layer():
    """Each class that transformers registers as a norm is computed by one layer for its name."""
    without, seen = [], 0
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name, cls in REGISTERED.findall(file.read_text()):
            module = getattr(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"), cls)(WIDTH)
            seen += 1
            if hub.layer_of(module, name, LAYERS) is None:
                without.append(cls)
    assert seen > 100 and not without


def test_the_error_names_the_versions_of_kernels(monkeypatch):
    """`pip install -U kernels` may install one that is too new for transformers."""
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    monkeypatch.setattr(import_utils, "KERNELS_MIN_VERSION", "0.18.2")
    monkeypatch.setattr(import_utils, "KERNELS_MAX_VERSION", "0.19.0", raising=False)
    with pytest.raises(ImportError, match=re.escape("'kernels>=0.18.2,<0.19.0'")):
        hub._config_class.__wrapped__()


@pytest.mark.parametrize("wrong", ["meta-llama/Llama-3.2-1B", nn.Linear])
def test_only_a_loaded_model_is_taken(wrong):
    with pytest.raises(TypeError, match="^kernel_config: model must be a loaded model or None, got (str|Linear); load"):
        hub.kernel_mapping(wrong)
