"""A kernel stands in for a module only while the module computes what it computed when it was recognised."""

from __future__ import annotations

import functools
import time
import types

import pytest
import torch
import torch.nn.functional as F
from harness import in_threads
from torch import nn

import liger_hw
from liger_hw.transformers.report import Patch


class SomeMLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return F.silu(x) * self.scale


class OfFunction(nn.Module):
    """As transformers' activations, which keep a partial function or one of their own methods."""

    def __init__(self, approximate):
        super().__init__()
        self.act = functools.partial(F.gelu, approximate=approximate) if approximate else self.own

    def own(self, x):
        return F.gelu(x)

    def forward(self, x):
        return self.act(x)


def assert_unchanged(model, change=lambda model: None):
    """The patched model computes what the unpatched one does, also after `change`."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 5
    model(x)
    change(model)
    found = model(x)
    liger_hw.revert(model)
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-6)


ACTIVATIONS = {
    "attributes": lambda: (Scaled(1.0), Scaled(2.0)),
    "gelu": lambda: (nn.GELU("none"), nn.GELU("tanh")),
    "partial functions": lambda: (OfFunction("none"), OfFunction("tanh"), OfFunction(None), OfFunction("tanh")),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("backwards", [False, True])
def test_activations_of_one_class_differ_by_what_they_compute(name, backwards):
    acts = ACTIVATIONS[name]()[:: -1 if backwards else 1]
    model = nn.Sequential(*(SomeMLP(act) for act in acts))
    report = liger_hw.patch(model)
    known = [act for act in acts if not (isinstance(act, Scaled) and act.scale != 1.0)]
    assert sum(row.kernel in ("swiglu", "geglu") for row in report.patched) == len(known)
    assert_unchanged(model)


CHANGES = {
    "replaced": lambda mlp: setattr(mlp, "act_fn", nn.ReLU()),
    "attribute": lambda mlp: setattr(mlp.act_fn, "scale", 3.0),
    "hook": lambda mlp: mlp.act_fn.register_forward_hook(lambda module, args, y: y * 2),
    "pre-hook": lambda mlp: mlp.act_fn.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "forward": lambda mlp: setattr(mlp.act_fn, "forward", torch.relu),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_activation_changed_on_a_live_model(name, when):
    model = nn.Sequential(SomeMLP(Scaled(1.0)), SomeMLP(Scaled(1.0)))
    if when == "before":
        CHANGES[name](model[1])
        assert sum(row.kernel == "swiglu" for row in liger_hw.patch(model).patched) == 1
        assert_unchanged(model)
    else:
        assert sum(row.kernel == "swiglu" for row in liger_hw.patch(model).patched) == 2
        assert_unchanged(model, lambda model: CHANGES[name](model[1]))


def test_an_activation_whose_class_s_forward_changed_after_the_patch(monkeypatch):
    model = nn.Sequential(SomeMLP(Scaled(1.0)))
    assert [row.kernel for row in liger_hw.patch(model).patched] == ["swiglu"]
    assert_unchanged(model, lambda model: monkeypatch.setattr(Scaled, "forward", lambda self, x: torch.relu(x)))


@pytest.mark.parametrize("scope", ["classes", "instance"])
@pytest.mark.parametrize("name", ["replaced", "hook", "forward"])
def test_an_activation_changed_in_a_family(mistral, batch, name, scope):
    model = mistral.model()
    with mistral.apply(model=model if scope == "instance" else None):
        model(**batch)
        CHANGES[name](model.model.layers[0].mlp)
        found = model(**batch).loss
    torch.testing.assert_close(found, model(**batch).loss, rtol=1e-4, atol=1e-6)


def test_threads_that_patch_and_revert_follow_one_another(mistral, monkeypatch):
    """Each call of the patch function sees the classes as another call leaves them, never half patched."""
    real = Patch.apply

    def slow(self):
        real(self)
        time.sleep(0.02)

    monkeypatch.setattr(Patch, "apply", slow)
    before = mistral.state()
    reports = []
    in_threads(*[lambda: reports.append(mistral.apply())] * 2)
    assert sorted(len(report.patched) for report in reports) == [0, 4]
    in_threads(*(report.revert for report in reports))
    assert mistral.state() == before


REPLACED = {
    "one element": lambda norm: setattr(norm, "weight", nn.Parameter(torch.full((1,), 1.3))),
    "one row for each token": lambda norm: setattr(
        norm, "weight", nn.Parameter(torch.linspace(0.5, 2, 352).view(11, 32))
    ),
    "epsilon": lambda norm: setattr(norm, "variance_epsilon", torch.tensor(0.3)),
}


@pytest.mark.parametrize("scope", ["classes", "instance"])
@pytest.mark.parametrize("name", REPLACED)
def test_a_norm_whose_weight_or_epsilon_was_replaced_runs_its_own_code(mistral, batch, name, scope, same_step):
    model, reference = mistral.model(), mistral.model(cls=mistral.untouched)
    with mistral.apply(model=model if scope == "instance" else None):
        model(**batch)
        for each in (model, reference):
            REPLACED[name](each.model.norm)
        same_step(model, reference, rtol=1e-5, atol=1e-6, **batch)


def test_a_layer_norm_without_the_weight_that_it_had_runs_its_own_code():
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    assert len(liger_hw.patch(model).patched) == 2

    def without(model):
        model[0].weight = model[1].bias = None

    assert_unchanged(model, without)


def half(y):
    """Half of what a module returns, or of a model's loss."""
    if hasattr(y, "loss"):
        y.loss = y.loss / 2
        return y
    return (y[0] / 2, *y[1:]) if isinstance(y, tuple) else y / 2


PARTS = {
    "norm": lambda model: model.model.norm,
    "mlp": lambda model: model.model.layers[0].mlp,
    "attention": lambda model: model.model.layers[0].self_attn,
    "model": lambda model: model,
}


@pytest.mark.parametrize("way", ["the part's class", "its class's forward"])
@pytest.mark.parametrize("part", PARTS)
def test_another_class_or_forward_given_to_a_live_model_runs(mistral, batch, part, way, same_step, monkeypatch):
    model, reference = mistral.model(), mistral.model()
    mistral.apply(model=model)
    model(**batch)
    cls = type(PARTS[part](model))
    original = cls.forward
    halved = functools.wraps(original)(lambda self, *args, **kwargs: half(original(self, *args, **kwargs)))
    if way == "the part's class":
        for each in (model, reference):
            PARTS[part](each).__class__ = type("Halved", (cls,), {"forward": halved})
    else:
        monkeypatch.setattr(cls, "forward", halved)
    same_step(model, reference, rtol=1e-5, atol=1e-6, **batch)


def test_a_rotary_function_replaced_in_its_module_runs(mistral, batch, same_step, monkeypatch):
    """A live model's attention calls the kernel under a name of its own."""
    model, reference = mistral.model(), mistral.model()
    mistral.apply(model=model)
    model(**batch)
    monkeypatch.setattr(mistral.modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: (q / 2, k / 2))
    same_step(model, reference, rtol=1e-5, atol=1e-6, **batch)


class HalvesMLP(nn.Module):
    """Its forward calls a method of the class's, which a module may replace with one of its own."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(16, 8)

    def gated(self, halves):
        gate, up = halves.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x):
        return self.down_proj(self.gated(self.gate_up_proj(x)))


@pytest.mark.parametrize("where", ["module", "class"])
def test_a_method_that_the_forward_calls_replaced_after_the_patch(where, monkeypatch):
    def other(self, halves):
        gate, up = halves.chunk(2, -1)
        return torch.tanh(gate) * up

    model = nn.Sequential(HalvesMLP())
    owner, method = (HalvesMLP, other) if where == "class" else (model[0], types.MethodType(other, model[0]))
    assert [row.kernel for row in liger_hw.patch(model).patched] == ["fused_gate_up_swiglu"]
    assert_unchanged(model, lambda _: monkeypatch.setattr(owner, "gated", method))


def test_a_method_replaced_between_two_patches_is_read_anew(monkeypatch):
    """What a class's code reads is not remembered: another method of it may read another attribute."""

    def scaled(self, halves):
        gate, up = halves.chunk(2, -1)
        return F.silu(gate) * up * self.scale

    model = nn.Sequential(HalvesMLP())
    first = liger_hw.patch(model)
    first.revert()
    with monkeypatch.context() as context:
        context.setattr(HalvesMLP, "gated", lambda self, halves: halves.chunk(2, -1)[0].tanh())
        refused = liger_hw.patch(model)
        assert not refused.patched and refused.revert() is None
    again = liger_hw.patch(model)
    assert again.rows == first.rows
    again.revert()
    monkeypatch.setattr(HalvesMLP, "gated", scaled)
    model[0].scale = 1.0
    assert [row.kernel for row in liger_hw.patch(model).patched] == ["fused_gate_up_swiglu"]
    assert_unchanged(model, lambda model: setattr(model[0], "scale", 2.0))


def test_a_class_replaced_between_two_patches_of_the_classes_is_seen(mistral, batch, monkeypatch):
    class Halved(mistral.norm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) / 2

    Halved.__module__ = mistral.modeling.__name__
    with mistral.apply() as report:
        assert "MistralRMSNorm.forward" in str(report)
    monkeypatch.setattr(mistral.modeling, "MistralRMSNorm", Halved)
    expected = mistral.model()(**batch).loss
    with mistral.apply() as report:
        norms = [(row.where, row.left_alone) for row in report.rows if row.part == "rms_norm"]
        assert norms == [("Halved.forward", True)]
        torch.testing.assert_close(mistral.model()(**batch).loss, expected)


GAIN = 1.0
TABLE = {"gain": 1.0}


class OfGlobal(SomeMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x) * GAIN) * self.up_proj(x))


class OfTable(SomeMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * TABLE["gain"])


def _scaled_by_global(x):
    return F.silu(x) * GAIN


class ThroughFunction(SomeMLP):
    def forward(self, x):
        return self.down_proj(_scaled_by_global(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("cls", [OfGlobal, OfTable, ThroughFunction])
def test_a_forward_that_reads_a_global_variable_keeps_its_code(cls, monkeypatch):
    """It was recognised with the value that the variable had, and went on with that one when a program changed it."""
    model, x = nn.Sequential(cls(nn.SiLU())), torch.randn(5, 8)
    report = liger_hw.patch(model)
    reasons = [row.state for row in report.rows if row.left_alone and row.part == "swiglu"]
    assert not report.patched and "reads the global variable" in reasons[0], str(report)
    before = model(x)
    monkeypatch.setitem(globals(), "GAIN", 2.0)
    monkeypatch.setitem(TABLE, "gain", 2.0)
    assert not torch.allclose(model(x), before)
