"""Levels on models: what each layer runs at, plans for a budget, and that everything is put back."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from small_decoder import Decoder, gradients, identical, some_input

import liger_hw
from liger_hw.recompute import dial as dials
from liger_hw.recompute import recipes
from liger_hw.recompute.levels import in_words, level_of_each, parse_size

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IDS = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))


def tiny(family="Mistral", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def step(model, **more):
    model.zero_grad(set_to_none=True)
    model(input_ids=IDS, labels=IDS, **more).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "setting, words",
    [
        ("keep", "keep x4"),
        ("cheap", "cheap x4"),
        ("mlp", "mlp x3, cheap x1"),
        ("full", "full x3, cheap x1"),
        ("tiled", "tiled x4"),
        ("offload", "offload x3, tiled x1"),
        (["full", "mlp", "cheap", "keep"], "full x1, mlp x1, cheap x1, keep x1"),
        ({0: "mlp", -1: "full"}, "mlp x1, keep x2, full x1"),
        ("1GiB", "keep x4"),
    ],
)
def test_levels_on_a_transformers_model(setting, words, ledger):
    model = tiny()
    liger_hw.transformers.apply_liger_kernel_to_mistral(model=model)
    forwards = {name: m.__dict__.get("forward") for name, m in model.named_modules()}
    expected = step(model)
    ledger.computed.clear()  # of the patch's default
    with liger_hw.activations(setting, model) as dial:
        assert identical(step(model), expected)
        assert in_words(dial.levels) == words
        assert (dial.prediction is not None) == (setting == "1GiB")
    assert bool(ledger.computed) == ("cheap" in words or "mlp" in words)
    assert {name: m.__dict__.get("forward") for name, m in model.named_modules()} == forwards
    assert identical(step(model), expected)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_families(family, ledger):
    model = tiny(family, head_dim=8, attn_implementation="eager" if family == "Gemma2" else "sdpa")
    name = {"Llama": "llama", "Qwen3": "qwen3", "Gemma2": "gemma2"}[family]
    report = getattr(liger_hw.transformers, f"apply_liger_kernel_to_{name}")(model=model)
    expected = step(model)
    report.revert()
    ledger.computed.clear()
    with getattr(liger_hw.transformers, f"apply_liger_kernel_to_{name}")(model=model, activations="mlp") as report:
        assert "activations: mlp" in report.summary()
        assert identical(step(model), expected)
    assert {"rms_norm_fwd", "linear"} <= set(ledger.computed)
    assert ("rope" in ledger.computed) == (family == "Qwen3"), "a rotated QK norm is had again, other q and k are kept"


@pytest.mark.parametrize("setting", ["cheap", "full", "offload", ["mlp", "keep", "full", "cheap"], "1GiB"])
def test_on_classes(setting, ledger):
    """Models made before the call and after it, each by its own place in its model."""
    before = tiny()
    with liger_hw.transformers.apply_liger_kernel_to_mistral(activations="keep"):
        expected = step(before)
    original = type(before.model.layers[0]).forward
    with liger_hw.transformers.apply_liger_kernel_to_mistral(activations=setting):
        for model in (before, tiny()):
            assert identical(step(model), expected)
    assert bool(ledger.computed) == (setting not in ("1GiB", "offload"))
    assert type(before.model.layers[0]).forward is original


def test_a_class_whose_layers_do_not_know_their_place(ledger):
    model = Decoder(count=2)
    expected = gradients(model, contextlib.nullcontext())
    for setting in ("mlp", ["cheap", "mlp"]):
        patch = dials.class_patch(type(model.layers[0]), setting)
        patch.apply()
        try:
            if setting == "mlp":
                assert identical(gradients(model, contextlib.nullcontext()), expected)
                assert ledger.computed.count("linear") == 4
            else:
                with pytest.raises(
                    ValueError, match="Layer has no layer_idx or config to find its level by; patch a live"
                ):
                    model(some_input())
        finally:
            patch.revert()


def test_invalid_settings_raise():
    model = tiny()
    for wrong, message in (
        ("chep", "unknown level 'chep'; there are keep, cheap, mlp, full, tiled, offload"),
        (["keep"], "1 levels for 4 layers"),
        ({7: "mlp"}, "7 is not one of 4 layers"),
        (3, "activations takes keep"),
    ):
        with pytest.raises(ValueError, match=message):
            liger_hw.activations(wrong, model)
        assert "forward" not in vars(model.model.layers[0])
    for without_model in ("full", "tiled", "offload", "fit", "80GiB", ["keep"]):
        with pytest.raises(ValueError, match="needs the model.s layers"):
            liger_hw.activations(without_model)
    for mistaken in (("cheap", "a name"), (model, "cheap")):
        with pytest.raises(TypeError, match=r"must be a loaded model, got str; call activations\(setting, model\)"):
            liger_hw.activations(*mistaken)
    with pytest.raises(ValueError, match="activations takes keep.* got 3"):
        liger_hw.transformers.apply_liger_kernel_to_mistral(activations=3)
    with pytest.raises(ValueError, match="has no list of layers"):
        liger_hw.activations("mlp", torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="on the CPU; name a size"), liger_hw.activations("fit", model):
        step(model)
    with liger_hw.activations("mlp", model), pytest.raises(ValueError, match="has a level already"):
        liger_hw.activations("cheap", model)
    with liger_hw.activations("mlp", model):
        copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"a copy of a patched model.* liger_hw.revert\(model\)"):
        liger_hw.activations("cheap", copied)
    liger_hw.revert(copied)
    assert liger_hw.activations("cheap", copied).revert()
    report = liger_hw.transformers.apply_liger_kernel_to_mistral
    with pytest.raises(ValueError, match="unknown level"):
        report(model=model, activations="chep")
    assert not any("forward" in vars(m) for m in model.modules()), "a refused call leaves nothing patched"


def test_an_error_names_the_least_memory():
    model = tiny()
    with liger_hw.activations("1MiB", model), pytest.raises(ValueError, match="needs 0.1 GiB even with .*batch"):
        step(model)


@pytest.mark.parametrize("setting", ["fit", "10GiB"])
def test_what_cannot_be_planned_is_refused_at_the_call(setting):
    """Shared experts and a model without a config raise at the call, not in the first step."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**TINY, **experts)).train()
    for call in (liger_hw.activations, lambda s, m: liger_hw.patch(m, activations=s)):
        with pytest.raises(ValueError, match="like Llama's, .* this model has [0-9,]+; name a level"):
            call(setting, model)
    with pytest.raises(ValueError, match="planning reads a transformers config"):
        liger_hw.activations(setting, Decoder())
    assert not any("forward" in vars(m) or "_apply_gate" in vars(m) for m in model.modules())
    with liger_hw.activations("cheap", model):
        step(model)


def test_a_larger_batch_is_planned_anew():
    model = tiny()
    with liger_hw.activations("1GiB", model) as dial:
        step(model)
        first = dial.prediction
        model(input_ids=IDS[:1], labels=IDS[:1]).loss.backward()
        assert dial.prediction is first
        more = IDS.repeat(2, 1)
        model(input_ids=more, labels=more).loss.backward()
        assert dial.prediction.peak > first.peak


def test_copies_run_their_own_layers():
    model = tiny()
    with liger_hw.activations("cheap", model):
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert step(twin)[1].abs().sum() > 0
        assert twin.model.layers[0].forward.__self__ is twin.model.layers[0]
    assert identical(step(loaded), step(tiny()))


def test_no_cost_in_evaluation(monkeypatch):
    model = tiny().eval()
    monkeypatch.setattr(recipes.Scope, "__enter__", lambda self: pytest.fail("entered without gradients"))
    with liger_hw.activations("cheap", model), torch.no_grad():
        assert model(input_ids=IDS).logits.shape == (2, 11, 61)
        model.generate(IDS, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("setting", ["cheap", "full", "tiled", "offload", ["keep", "full", "keep", "full"]])
def test_caches(setting):
    """In eval() a cache is filled, with gradients too; in training it is not, and a cache with tokens is refused."""
    expected = step(tiny())
    model = tiny()
    with liger_hw.activations(setting, model):
        assert identical(step(model, use_cache=True), expected)
        model.eval()
        whole = model(input_ids=IDS).logits[:, -1]
        cache = model(input_ids=IDS[:, :-1], use_cache=True).past_key_values
        assert cache.get_seq_length() == IDS.shape[1] - 1
        torch.testing.assert_close(model(input_ids=IDS[:, -1:], past_key_values=cache).logits[:, -1], whole)
        refused = pytest.raises(ValueError, match="cannot read a cache that has tokens")
        with contextlib.nullcontext() if setting == "cheap" else refused:
            model.train()(input_ids=IDS[:, -1:], past_key_values=cache)


@pytest.mark.parametrize("setting", ["full", "tiled", ["keep", "keep", "full", "full"]])
def test_recurrent_layers_have_no_tokens_in_a_cache(setting):
    """transformers fills the cache in training too, and does not count the tokens of a recurrent layer."""
    names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    sizes = dict(zip(names, (2, 2, 8, 8)))
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8}
    model = tiny("Qwen3Next", **sizes, **experts, **kinds, shared_expert_intermediate_size=16)
    expected = step(model)
    with liger_hw.activations(setting, model):
        torch.testing.assert_close(step(model, use_cache=True), expected)


@pytest.mark.parametrize("family", ["Bloom", "Falcon", "GPTNeoX"])
def test_a_cache_under_another_name_or_as_a_positional_argument(family):
    """Such as `layer_past`; recomputed with it, a layer would read its own tokens."""
    model = tiny(family)
    expected = step(model, use_cache=True)
    with liger_hw.activations("full", model):
        assert identical(step(model, use_cache=True), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_gradient_checkpointing(reentrant, ledger):
    """transformers checkpoints two layers, which the dial leaves alone."""
    model = tiny()
    liger_hw.transformers.apply_liger_kernel_to_mistral(model=model)
    expected = step(model, use_cache=False)
    ledger.computed.clear()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for layer in model.model.layers[:2]:
        layer.gradient_checkpointing = False
    for setting in ("cheap", "full"):
        with liger_hw.activations(setting, model):
            assert identical(step(model, use_cache=False), expected)
    assert ledger.computed


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
def test_fake_tensors(ledger):
    """A step on fake tensors or traced by make_fx recomputes the same operators."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = Decoder(count=2), some_input()
    parts = list(model.parameters())

    def gradients_of(x):
        return torch.autograd.grad(model(x).square().mean(), parts)

    with liger_hw.activations("cheap", model):
        gradients_of(x)
        names = list(ledger.computed)
        ledger.computed.clear()
        make_fx(gradients_of, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        assert ledger.computed == names
        ledger.computed.clear()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            gradients_of(mode.from_tensor(x))
        assert ledger.computed == names


@pytest.mark.parametrize("on", ["model", "class"])
def test_compiled_models_are_left_alone(on, caplog, ledger):
    model = Decoder(count=2)
    expected = gradients(model, contextlib.nullcontext())
    recipes._logged.clear()
    torch._dynamo.reset()
    patch = dials.class_patch(type(model.layers[0]), "mlp") if on == "class" else None
    with contextlib.ExitStack() as stack, caplog.at_level("INFO", "liger_hw"):
        if patch is None:
            stack.enter_context(liger_hw.activations("full", model))
        else:
            patch.apply()
            stack.callback(patch.revert)
        found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), contextlib.nullcontext())
    torch.testing.assert_close(found, expected)
    assert not ledger.computed
    assert len([r for r in caplog.records if "torch.compile decides" in r.message]) == 1


class _PassedOn(torch.autograd.Function):
    """Passes a tensor on, as ZeRO-3's hooks do with inputs and outputs of modules, or copies it."""

    @staticmethod
    def forward(ctx, t, copies):
        return t.clone() if copies else t.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _hook(model, copies):
    def before(module, args):
        return tuple(_PassedOn.apply(arg, copies) for arg in args)

    def behind(module, args, output):
        return _PassedOn.apply(output, copies)

    before.__module__ = behind.__module__ = "deepspeed.runtime.zero"
    for module in model.modules():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(behind)


def test_hooks_of_a_program_inside_a_layer_keep_it(ledger, caplog):
    """They may make writes that torch does not count; hooks on the layer itself run around its forward."""
    recipes._logged.clear()
    for part, keeps in (("before", True), ("", False)):
        model = Decoder(count=2)
        for layer in model.layers:
            layer.get_submodule(part).register_forward_hook(lambda *_: None)
        ledger.computed.clear()
        with caplog.at_level("WARNING", "liger_hw"), liger_hw.activations("cheap", model):
            gradients(model, contextlib.nullcontext())
        assert bool(ledger.computed) is not keeps
    assert len([r for r in caplog.records if "keeps everything in layers" in r.message]) == 1


@pytest.mark.parametrize("copies", [None, False, True])
def test_a_level_that_saves_nothing_says_so_once(copies, caplog, ledger):
    model = Decoder(count=3)
    expected = gradients(model, contextlib.nullcontext())
    recipes._logged.clear()
    if copies is not None:
        _hook(model, copies)
    with caplog.at_level("WARNING", "liger_hw"), liger_hw.activations("mlp", model):
        for _ in range(2):
            assert identical(gradients(model, contextlib.nullcontext()), expected)
    messages = [record.message for record in caplog.records]
    assert bool(ledger.computed) is not (copies is True)
    assert len([m for m in messages if "level mlp keeps the output of a Linear" in m]) == (copies is not None), messages
    assert len([m for m in messages if "level mlp saves no memory in Layer" in m]) == (copies is True), messages


def test_cheap_saves_as_much_with_the_hooks_of_zero3(ledger):
    kept = []
    for hooked in (False, True):
        model = Decoder(count=3)
        if hooked:
            _hook(model, copies=False)
        ledger.kept.clear()
        with liger_hw.activations("cheap", model):
            out = model(some_input() * 1)
        kept.append(ledger.elements)
        del out
    assert kept[0] == kept[1] > 0


def test_no_warning_for_frozen_layers(caplog):
    model = Decoder(count=2).requires_grad_(False)
    recipes._logged.clear()
    with caplog.at_level("WARNING", "liger_hw"), liger_hw.activations("cheap", model):
        model(some_input().detach())
    assert not caplog.records


def test_lora(ledger):
    """Frozen projections with adapters are recomputed unless they have active dropout."""
    peft = pytest.importorskip("peft")

    def run(setting, dropout):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], lora_dropout=dropout)
        model = peft.get_peft_model(tiny(), config)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
        liger_hw.transformers.apply_liger_kernel_to_mistral(model=model, activations=setting)
        return step(model)

    for dropout in (0.0, 0.5):
        ledger.computed.clear()
        assert identical(run("mlp", dropout), run("keep", dropout))
        assert ledger.computed.count("call_module") == (0 if dropout else 6)
        assert ("swiglu_fwd" in ledger.computed) == (not dropout), "else adapters save what dropout left of it"


def test_words():
    assert parse_size("80GiB") == 80 << 30 and parse_size("1.5 gb") == 15 * 10**8 and parse_size("80") is None
    assert level_of_each("mlp", 1) == ("cheap",)
