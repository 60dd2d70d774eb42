"""Every family that has a function of its own, and a spread of those that need none: patched tiny models compute what
unpatched ones do, loss and gradients, and the kernels that should have run did."""

from __future__ import annotations

import inspect
import json
from importlib.metadata import version
from pathlib import Path

import families as verify
import pytest

import liger_hw.transformers
from liger_hw.transformers.models import specs

SPECS = specs()
# Families whose own classes hold no norm or MLP: those of their text and vision models are patched on a live model.
COMPOSITES = {"llava", "paligemma", "internvl", "smolvlm"}
if version("transformers").startswith("4."):  # where these take their norms from Qwen2
    COMPOSITES |= {"qwen2_vl", "qwen2_5_vl"}
ROPE = {name for name, spec in SPECS.items() if dict(spec.parameters).get("rope")}
NORMS, FUSED = {"rms_norm", "layer_norm"}, "fused_linear_cross_entropy"
LOSSES = {"cross_entropy", FUSED}
ROTARY = ("rope", "interleaved_rope", "llama4_rope", "qwen2vl_mrope")
# A spread over norms (casting, offset, LayerNorm), MLPs (relu2, fused, experts), rotary kinds and heads.
UNNAMED = (
    *("apertus", "arcee", "bamba", "bert", "cohere", "deepseek_v32", "diffllama", "gpt2", "helium", "jamba", "lfm2"),
    *("modernbert-decoder", "moshi", "nanochat", "olmo", "stablelm", "xglm", "zaya"),
)
# One of each kind of norm, MLP, rotary function, head and model around a model.
DAILY = (
    *("apertus", "bert", "cohere", "gpt2", "jamba", "lfm2", "nanochat"),
    *("llama", "gemma2", "gemma3", "glm4", "granite", "mixtral", "olmo2", "phi3", "qwen2_vl", "qwen3", "nemotron"),
    *("deepseek_v3", "gpt_oss", "llama4", "llava", "pixtral", "qwen3_next"),
)


def _needs(name, class_name):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, class_name):
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    if class_name == "Llama4ForConditionalGeneration" and transformers.__version__ == "5.24.0":
        pytest.skip("it reads image_outputs of its text model's output, which has none")


@pytest.mark.daily(name=DAILY)
@pytest.mark.parametrize("name", SPECS)
def test_named_family(name):
    spec = SPECS[name]
    _needs(name, spec.models[0])
    row = verify.check_step(
        name, spec.models[0], getattr(liger_hw.transformers, spec.function_name), name not in COMPOSITES
    )
    assert row.outcome == verify.VERIFIED, row.reason
    assert row.calls.keys() & NORMS, row.left
    assert row.calls.keys() & LOSSES or name == "pixtral"
    assert (FUSED in row.calls) == (name != "pixtral")
    assert name not in ROPE or any(kernel in row.calls for kernel in ROTARY), row.left


@pytest.mark.daily(name=DAILY)
@pytest.mark.parametrize("name", UNNAMED)
def test_unnamed_family(name):
    class_name = verify.causal_lms().get(name, "")
    _needs(name, class_name or name)
    row = verify.check_step(name, class_name)
    if "Fast Mamba kernels" in row.reason:
        pytest.skip(row.reason)
    assert row.outcome == verify.VERIFIED, row.reason
    assert row.calls.keys() & NORMS and FUSED in row.calls, row.left


@pytest.mark.parametrize(
    "asked, kernel",
    [
        ({}, "fused_linear_cross_entropy"),
        ({"cross_entropy": True}, "cross_entropy"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": False}, "cross_entropy"),
        ({"fused_linear_cross_entropy": True}, "fused_linear_cross_entropy"),
    ],
    ids=str,
)
def test_granite_fuses_its_head_unless_asked_otherwise(asked, kernel):
    _needs("granite", "GraniteForCausalLM")
    with liger_hw.transformers.apply_liger_kernel_to_granite(**asked) as report:
        patched = [row.kernel for row in report.rows if row.state == "patched" and "cross_entropy" in row.kernel]
        assert patched == [kernel]


def test_signatures_are_those_of_liger_0_8_5():
    found = {}
    names = json.loads((Path(__file__).parents[1] / "compat" / "liger_names.json").read_text())
    known = {name for module in names.values() for name in module}
    for name, spec in SPECS.items():
        if spec.function_name not in known:  # a family that Liger does not have
            continue
        parameters = inspect.signature(getattr(liger_hw.transformers, spec.function_name)).parameters
        found[name] = ", ".join(f"{p}" for p in parameters.values() if p.kind is not p.KEYWORD_ONLY)
        assert [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == ["experts", "activations"]  # ours
    usual = "rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None"
    assert len(found) == 45 and sum(text == usual for text in found.values()) == 17
    # Liger's has the plain loss by default; here it is asked for with cross_entropy=True alone, as there
    assert found["granite"] == usual.replace("fused_linear_cross_entropy=True", "fused_linear_cross_entropy=None")
    assert found["gemma3"] == (
        "rope=True, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=True, rms_norm=True, geglu=True, "
        "model=None"
    )
    assert found["llama4"] == f"{usual}, layer_norm=True"
    assert found["llava"] == "cross_entropy=False, fused_linear_cross_entropy=True, model=None, **kwargs"
    assert found["deepseek_v4"] == usual.replace("rope=True", "rope=False").replace("swiglu=True", "swiglu=False")
    assert found["pixtral"] == "rope=True, rms_norm=True, swiglu=True, model=None"
    assert found["nemotron"].startswith("relu_squared=True, cross_entropy=False")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "mixtral", "phi3", "nemotron", "deepseek_v3", "gpt_oss", "qwen2_vl"]
)
def test_on_the_device(name, gpu):
    """The real kernels in the place of the references, in fp32."""
    spec = SPECS[name]
    _needs(name, spec.models[0])
    row = verify.check_step(name, spec.models[0], getattr(liger_hw.transformers, spec.function_name), device=gpu)
    assert row.outcome == verify.VERIFIED, row.reason
    assert row.calls.keys() & NORMS and FUSED in row.calls, row.left
