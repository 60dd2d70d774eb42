"""The default where a patch installs the fused loss and nobody names levels: the last layer is at `cheap`."""

from __future__ import annotations

import logging
import types

import pytest
import torch
import transformers
from small_models import SIZES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import liger_hw
from liger_hw.recompute import dial, recipes
from liger_hw.transformers import replacing
from liger_hw.transformers.report import patched_parts
from liger_hw.transformers.tiny import tiny_config

IDS = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "olmo2": "Olmo2", "qwen3": "Qwen3", "granite": "Granite"}
KEEP = {"activations": "keep"}
both = pytest.mark.parametrize("classes", [False, True], ids=["instance", "classes"])


def tiny(family="llama", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**{**SIZES, "num_hidden_layers": 3, **changes})
    return getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).train()


def patched(model, family="llama", classes=False, **options):
    apply = getattr(liger_hw.transformers, f"apply_liger_kernel_to_{family}")
    return apply(model=None if classes else model, **options)


def step(model, **more):
    model.zero_grad(set_to_none=True)
    model(input_ids=IDS, labels=IDS, use_cache=False, **more).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(found, expected):
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


class _Storages(TorchDispatchMode):
    """The storages of everything that operators return while this is open; `alive` says how many bytes are left."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_iter(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.seen.setdefault(storage._cdata, (storage._weak_ref(), storage.nbytes()))
        return result

    def alive(self):
        return sum(n for weak, n in self.seen.values() if not torch.UntypedStorage._expired(weak))


def kept(model):
    """Bytes that exist after a forward, all of them for its backward."""
    step(model)
    model.zero_grad(set_to_none=True)
    with _Storages() as storages:
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        count = storages.alive()
    loss.backward()
    return count


@pytest.fixture(autouse=True)
def small_inputs_count(monkeypatch):
    """The default is in force for these models, whose inputs are far below what it asks for."""
    monkeypatch.setattr(replacing, "LEAST_BYTES", 0)


@pytest.fixture
def recomputed(monkeypatch):
    """Names of the operators that backward ran again."""
    found, compute = [], recipes.Recipe._compute

    def noting(self):
        found.append(self.name)
        return compute(self)

    monkeypatch.setattr(recipes.Recipe, "_compute", noting)
    return found


@pytest.mark.daily(classes="False")
@pytest.mark.daily(family="llama")
@both
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_keeps_less_and_its_gradients_are_the_same(family, classes):
    model = tiny(family)
    with patched(model, family, classes, **KEEP):
        everything, expected = kept(model), step(model)
    with patched(model, family, classes, activations={-1: "cheap"}):
        named = kept(model)
    with patched(model, family, classes):
        assert kept(model) == named < everything
        assert same(step(model), expected)
    if family == "llama":  # two norms' outputs and the gate's, in fp32
        assert everything - named == IDS.numel() * (2 * SIZES["hidden_size"] + SIZES["intermediate_size"]) * 4


@both
def test_the_report_says_so_and_revert_takes_it_back(classes):
    model = tiny()
    last, before = model.model.layers[-1], type(model.model.layers[-1]).forward
    report = patched(model, classes=classes)
    (row,) = [row for row in report.rows if row.part == "activations"]
    assert row.where == "last LlamaDecoderLayer.forward" and not row.left_alone
    assert row.state == 'at cheap by default; activations="keep" keeps all'
    assert row.state in str(report) and "left alone" not in repr(report)
    assert ("forward" in vars(last)) is not classes and "forward" not in vars(model.model.layers[0])
    assert (type(last).forward is before) is not classes
    again = patched(model, classes=classes)
    assert not again.patches and not [row for row in again.rows if row.part == "activations"]
    report.revert()
    assert "forward" not in vars(last) and type(last).forward is before
    assert not patched_parts(model)
    patched(model, classes=classes)
    liger_hw.revert(type(model) if classes else model)
    assert not any("forward" in vars(module) for module in model.modules()) and type(last).forward is before


def test_a_vision_tower_as_large_has_not_the_decoder_s_layers():
    config = tiny_config(transformers.Qwen2VLConfig)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    assert type(dial.layers_of(model)[-1]).__name__ == "Qwen2VLDecoderLayer"


@pytest.mark.parametrize(
    "options", [{"fused_linear_cross_entropy": False}, {"activations": "keep"}], ids=lambda options: next(iter(options))
)
@both
def test_where_it_is_not_installed(classes, options, recomputed):
    """Without the fused loss, and where everything is to be kept."""
    model = tiny()
    with patched(model, classes=classes, **options) as report:
        assert "at cheap by default" not in str(report)
        step(model)
    assert not recomputed


@both
def test_small_inputs_keep_everything(classes, monkeypatch, recomputed):
    """Below LEAST_BYTES the default keeps everything; a level that is named is in force at any size."""
    model, nbytes = tiny(), IDS.numel() * SIZES["hidden_size"] * 4
    for least, names in ((nbytes, 1), (nbytes + 1, 0)):
        monkeypatch.setattr(replacing, "LEAST_BYTES", least)
        with patched(model, classes=classes):
            recomputed.clear()
            step(model)
            assert recomputed.count("swiglu_fwd") == names
        with patched(model, classes=classes, activations={-1: "cheap"}):
            recomputed.clear()
            step(model)
            assert recomputed.count("swiglu_fwd") == 1


@both
def test_levels_that_are_named_take_its_place(classes, recomputed):
    model = tiny()
    with patched(model, classes=classes):
        expected = step(model)
        assert recomputed
        for setting, again in (("keep", 0), ("cheap", 3)):
            recomputed.clear()
            with liger_hw.activations(setting, model) as dial:
                assert set(dial.levels) == {setting} and same(step(model), expected)
            assert recomputed.count("swiglu_fwd") == again
            recomputed.clear()
            with liger_hw.activations(setting):
                loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            assert recomputed.count("swiglu_fwd") == again
        recomputed.clear()
        with pytest.raises(ValueError, match="has a level already"), liger_hw.activations("mlp", model):
            liger_hw.activations("cheap", model)
        assert same(step(model), expected) and recomputed.count("swiglu_fwd") == 1
        with patched(model, **KEEP):
            recomputed.clear()
            assert same(step(model), expected) and not recomputed
    with liger_hw.activations("cheap", model), patched(model, classes=classes):
        recomputed.clear()
        assert same(step(model), expected) and recomputed.count("swiglu_fwd") == 3


def test_a_dial_that_outlives_the_patch_leaves_nothing(recomputed):
    model = tiny()
    report = patched(model)
    with liger_hw.activations("cheap", model):
        report.revert()
    step(model)
    assert not recomputed
    report.revert()
    assert not any("forward" in vars(module) for module in model.modules())


@both
def test_it_steps_aside(classes, recomputed, caplog):
    """Without gradients, inside the hooks of others, and where hooks are forbidden, as torch.func forbids them."""
    model = tiny()
    with patched(model, classes=classes), caplog.at_level(logging.INFO, "liger_hw"):
        expected = step(model)
        recomputed.clear()
        recipes._logged.clear()
        caplog.clear()
        with torch.no_grad():
            model(input_ids=IDS, labels=IDS)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert same(step(model), expected)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert same(step(model), expected)
        model.gradient_checkpointing_disable()
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            assert same(step(model), expected)
        assert not recomputed and not caplog.records, caplog.text
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        assert same(step(model), expected) and not caplog.records, caplog.text


@both
@pytest.mark.parametrize("options", [{}, {"activations": "cheap"}], ids=["default", "named"])
def test_checkpointing_stays_on(classes, options):
    """Of a class that somebody makes of the layer's as well, as FSDP2 does, and which stays when the patch is gone."""
    model = tiny()
    ran = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda *_: ran.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = step(model)
    assert len(ran) == 2 * len(model.model.layers)
    own = type(model.model.layers[0])
    with patched(model, classes=classes, **options):
        ran.clear()
        assert len(step(model)) == len(expected) and len(ran) == 6
        made = type("Made", (own,), {})
        for layer in model.model.layers:
            layer.__class__ = made
        ran.clear()
        step(model)
        assert len(ran) == 6
    model.gradient_checkpointing_disable()
    with liger_hw.activations("cheap", model):
        assert same(step(model), expected)


@pytest.mark.daily(classes="False")
@both
def test_a_part_that_is_compiled_alone_is_compiled_once(classes):
    """As flex attention is: that the last layer's runs in a scope is no reason to compile it again."""
    model = tiny()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with patched(model, classes=classes):
        for layer in model.model.layers:
            layer.self_attn.compile(backend="aot_eager", fullgraph=True)
        assert step(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@both
def test_odd_models_are_left_as_they_are(classes, recomputed):
    """Layers that were taken away since, none at all, and one that somebody runs by a function of his own."""
    model = tiny()
    with patched(model, classes=classes):
        model.model.layers = model.model.layers[:2]
        step(model)
        assert not recomputed
    with patched(tiny(num_hidden_layers=0)) as report:
        assert not [row for row in report.rows if row.part == "activations"]
    model = tiny()
    last = model.model.layers[-1]
    last.forward = types.MethodType(type(last).forward, model.model.layers[0])
    with patched(model) as report:
        assert not [row for row in report.rows if row.part == "activations"]
