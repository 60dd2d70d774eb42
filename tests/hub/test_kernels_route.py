"""The layers through the kernels package itself and through transformers' `use_kernels`, on the CPU.

Skipped where kernels is not installed; TRL=1.16.0 bash ci/cpu.sh installs it beside the environment. transformers 5.23
and 5.24 ask for kernels 0.18.2 or later; where an older one is installed, that check is lowered in the process of this
test, and in none of a user's.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from harness import python

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "Llama": "LlamaForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Gemma 3": "Gemma3ForCausalLM",
    "OLMo 2": "Olmo2ForCausalLM",
    "Phi-3": "Phi3ForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "Qwen3-Next": "Qwen3NextForCausalLM",
    "Qwen3.5": "Qwen3_5ForCausalLM",
}

CODE = '''
import collections, json, logging, sys, tempfile
logging.disable(logging.WARNING)
import torch
import transformers.utils.import_utils as import_utils
import kernels
if not import_utils.is_kernels_available():
    import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17.2", "1.0")
    import_utils.is_kernels_available.cache_clear()
import transformers
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from transformers.integrations import hub_kernels
import liger_hw
from liger_hw import hub
from liger_hw.transformers.tiny import tiny_model

TOKENS = torch.arange(18).view(2, 9) % 32
DEFAULT = hub_kernels.get_kernel_mapping_transformers()


def step(model):
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), gradients


def registered(model):
    names = {getattr(type(module), "kernel_layer_name", None) for module in model.modules()}
    for module in model.modules():
        names |= {type(f).kernel_layer_name for f in getattr(module, "_kernel_funcs", {}).values()}
    return names - {None}


def trains_from_the_hub(name):
    """Whether transformers has a layer of the Hub for this name, for training on CUDA and without torch.compile."""
    entry = DEFAULT.get(name, {}).get("cuda")
    modes = entry if isinstance(entry, dict) else {} if entry is None else {Mode.TRAINING: entry}
    return any(Mode.TRAINING in mode and Mode.TORCH_COMPILE not in mode for mode in modes)


def bound(model):
    """Layer of ours -> modules whose forward it is."""
    layers = collections.Counter()
    for module in model.modules():
        function = getattr(module.forward, "__func__", None)
        if "liger_hw_torch" in getattr(function, "__module__", ""):
            layers[function.__qualname__.partition(".")[0]] += 1
    return dict(layers)


def rotary(model):
    for module in model.modules():
        for function in getattr(module, "_kernel_funcs", {}).values():
            if type(function).kernel_layer_name == "rotary_pos_emb":
                return function
    return None


def calls_of(model):
    """Calls of each layer of ours in one forward."""
    layers = sys.modules["_liger_hw_torch_universal"].layers
    counted, real = collections.Counter(), {}
    for name in [name for name in vars(layers) if name.startswith("liger_")]:
        real[name] = getattr(layers, name)
        def call(*args, _name=name, **kwargs):
            counted[_name] += 1
            return real[_name](*args, **kwargs)
        setattr(layers, name, call)
    model(input_ids=TOKENS)
    for name, function in real.items():
        setattr(layers, name, function)
    return dict(counted)


results = {"versions": [transformers.__version__, kernels.__version__]}
for title, name in MODELS.items():
    if not hasattr(transformers, name):
        continue
    cls = getattr(transformers, name)
    model = tiny_model(cls)
    loss, gradients = step(model)
    parts = sorted({row.part for row in liger_hw.patch(tiny_model(cls)).rows if row.state == "patched"})
    hub_names = sorted(filter(trains_from_the_hub, registered(model)))
    config = liger_hw.kernel_config(model)
    chosen = {n: layer.rpartition(":")[2] for n, layer in config.kernel_mapping.items()}
    model.set_use_kernels(True, config)
    ours, our_gradients = step(model)
    layers, counts, turned = bound(model), calls_of(model), rotary(model)
    model.eval().train()
    results[title] = {
        "hub": hub_names, "chosen": chosen, "layers": layers, "counts": counts, "patched": parts,
        "loss": [loss, ours], "again": bound(model),
        "apart": max(float((g - our_gradients[n]).abs().max() / g.abs().max().clamp(1e-3))
                     for n, g in gradients.items()),
        "rotary": turned is not None and "liger_hw_torch" in turned.forward.__func__.__module__,
    }
    if turned is not None:
        vars(turned).pop("forward", None)  # it is one object for the family

# kernels' own API, without transformers' part of it
model = tiny_model(transformers.LlamaForCausalLM)
loss, _ = step(model)
mapping = {"RMSNorm": {"cpu": LocalLayerRepository(hub.REPOSITORY, layer_name="RMSNorm")}}
with use_kernel_mapping(mapping):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
results["kernelize"] = {"layers": bound(model), "loss": [loss, step(model)[0]]}
with use_kernel_mapping(hub.kernel_mapping(model)):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
results["kernel_mapping"] = {"layers": bound(model), "loss": [loss, step(model)[0]]}
vars(rotary(model)).pop("forward", None)

from transformers.utils import kernel_config as module
module.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")  # which a plain one refuses

# from_pretrained, as TRL's model_init_kwargs reach it
with tempfile.TemporaryDirectory() as folder:
    tiny_model(transformers.LlamaForCausalLM).save_pretrained(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, use_kernels=True, kernel_config=liger_hw.kernel_config())
    evaluated = bound(model)
    model.train()
    results["from_pretrained"] = {"eval": evaluated, "train": bound(model), "loss": [loss, step(model)[0]]}
    vars(rotary(model)).pop("forward", None)
    plain = transformers.KernelConfig({"RMSNorm": f"{hub.REPOSITORY}:RMSNorm"}, use_local_kernel=True)
    try:
        load(folder, use_kernels=True, kernel_config=plain)
        results["plain"] = ""
    except Exception as error:
        results["plain"] = f"{type(error).__name__}: {error}"
model = tiny_model(transformers.LlamaForCausalLM).eval()
model.set_use_kernels(True, transformers.KernelConfig({"RMSNorm": f"{hub.REPOSITORY}:RMSNorm"}, use_local_kernel=True))
results["plain modes"] = [bound(model), bound(model.train())]
model = tiny_model(transformers.LlamaForCausalLM)
model.set_use_kernels(True, transformers.KernelConfig({"RMSNorm": f"{hub.REPOSITORY}:RMSNorm"}, use_local_kernel=True))
results["plain in training"] = bound(model)
try:
    liger_hw.kernel_config(torch.nn.Sequential(torch.nn.Linear(3, 3)))
except ValueError as error:
    results["nothing"] = str(error)
json.dump(results, open(sys.argv[1], "w"))
'''


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    for name in ("kernels", "transformers"):
        try:
            importlib.metadata.version(name)  # not find_spec: tests/kernels is a package of that name too
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} not installed (TRL=1.16.0 bash ci/cpu.sh)")
    out = tmp_path_factory.mktemp("hub") / "results.json"
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "LIGER_HW_CPU_REFERENCE": "1"}
    python("-c", CODE.replace("MODELS", repr(MODELS), 1), out, env=environment)
    return json.loads(out.read_text())


@pytest.mark.parametrize("title", MODELS)
def test_a_model_computes_the_same(results, title):
    if title not in results:
        pytest.skip(f"transformers {results['versions'][0]} has no {title}")
    one = results[title]
    assert one["loss"][1] == pytest.approx(one["loss"][0], rel=1e-6)
    assert one["apart"] < 1e-4
    assert one["layers"] and one["again"] == one["layers"]  # also after eval() and train()


def test_each_layer_is_called_once_a_module(results):
    for title, layers, calls in (
        ("Llama", {"RMSNorm": 9, "SwiGLUMLP": 4}, {"liger_rms_norm": 9, "liger_swiglu": 4, "liger_rope": 4}),
        (
            "Gemma 3",
            {"RMSNormZeroCentered": 25, "GeGLUMLP": 4},
            {"liger_rms_norm": 25, "liger_geglu": 4, "liger_rope": 4},
        ),
    ):
        one = results[title]
        assert (one["layers"], one["counts"], one["rotary"]) == (layers, calls, True)


def test_through_the_api_of_kernels(results):
    assert results["kernelize"]["layers"] == {"RMSNorm": 9}
    assert results["kernel_mapping"]["layers"] == {"RMSNorm": 9, "SwiGLUMLP": 4}
    for name in ("kernelize", "kernel_mapping"):
        loss, ours = results[name]["loss"]
        assert ours == pytest.approx(loss, rel=1e-6)


def test_through_from_pretrained(results):
    one = results["from_pretrained"]
    assert one["eval"] == one["train"] == {"RMSNorm": 9, "SwiGLUMLP": 4}
    assert one["loss"][1] == pytest.approx(one["loss"][0], rel=1e-6)


def test_what_a_plain_kernel_config_does(results):
    """What docs/guides/use-kernels.md says of transformers' own configuration of local layers."""
    assert results["plain"] == "AttributeError: 'tuple' object has no attribute 'split'"
    assert results["plain modes"] == [{"RMSNorm": 9}, {}]
    assert results["plain in training"] == {"RMSNorm": 9}


def test_a_model_without_such_layers_is_refused(results):
    assert "Sequential has no layer" in results["nothing"] and "liger_hw.patch" in results["nothing"]


PARTS = {"rms_norm": "RMSNorm", "swiglu": "SwiGLU", "geglu": "GeGLU", "rope": "rotary", "experts": "experts"}
PARTS |= {"fused_linear_cross_entropy": "loss", "short_conv": "convolution"}
LAYER_PARTS = {"RotaryPosEmb": "rotary", "SwiGLUMLP": "SwiGLU", "GeGLUMLP": "GeGLU"}
HUB_PARTS = {"causal_conv1d_fn": "convolution", "chunk_gated_delta_rule": "delta rule"}
ORDER = ["RMSNorm", "gated RMSNorm", "rotary", "SwiGLU", "GeGLU", "experts", "loss", "convolution", "delta rule"]


def _cell(parts: set[str]) -> str:
    assert parts <= set(ORDER), parts
    return ", ".join(part for part in ORDER if part in parts) or "nothing"


def _row(title: str, one: dict) -> str:
    ours = {
        LAYER_PARTS.get(layer, "gated RMSNorm" if "Gated" in layer else "RMSNorm") for layer in one["chosen"].values()
    }
    hub_parts = {"RMSNorm": "RMSNorm", "RMSNormGated": "gated RMSNorm", **HUB_PARTS}
    from_hub = {hub_parts[name] for name in one["hub"] if name in hub_parts}
    patched = {PARTS[part] for part in one["patched"]} | ({"gated RMSNorm"} if "gated RMSNorm" in ours else set())
    return f"| {title} | {_cell(from_hub)} | {_cell(ours)} | {_cell(patched)} |"


def test_the_table_of_the_guide(results):
    page = (ROOT / "docs" / "guides" / "use-kernels.md").read_text()
    there = re.findall(r"^\| (?:%s) \|.*\|$" % "|".join(map(re.escape, MODELS)), page, re.MULTILINE)
    assert there == [_row(title, results[title]) for title in MODELS if title in results]
