"""What a program switches on a model after a patch is obeyed: the step is that of an unpatched model so switched."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from families import counted

import liger_hw
from liger_hw.transformers.tiny import tiny_config, tiny_model


@pytest.fixture(params=["model", "class"])
def scope(request):
    return request.param


# -- switches of every model -----------------------------------------------------------------------------------------


def to_eager_attention(model):
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def to_sdpa_by_its_config(model):
    model.config._attn_implementation = "sdpa"


def to_eval(model):
    model.eval()


def to_half(model):
    model.half()


def to_bfloat16(model):
    model.to(torch.bfloat16)


def to_double(model):
    model.double()


def to_more_tokens(model):
    torch.manual_seed(5)
    model.resize_token_embeddings(77)
    assert model.get_output_embeddings().weight.shape[0] == 77


def to_tied_weights(model):
    model.config.tie_word_embeddings = True
    model.tie_weights()


def to_an_adapter(model):
    least = getattr(transformers.integrations.peft, "MIN_PEFT_VERSION", None)
    peft = pytest.importorskip("peft", least, f"add_adapter wants PEFT {least}")
    torch.manual_seed(5)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False))


def to_an_adapter_that_is_off(model):
    to_an_adapter(model)
    model.disable_adapters()
    model.requires_grad_(True)


def to_checkpointing(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def to_reentrant_checkpointing(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})


def to_a_kernel_of_another(model):
    """As transformers' `use_kernels` does: a forward is put on each module of a kind."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon) * 1.5

    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = types.MethodType(forward, module)


TOLERANCES = {to_half: 2e-2, to_bfloat16: 1e-1}
"""Relative to the largest entry: what may be a rounding of its dtype, twice over two layers; else 1e-3 of fp32."""
SWITCHES = [value for name, value in list(globals().items()) if name.startswith("to_")]


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.__name__)
def test_a_switch_after_the_patch_is_obeyed(switch, scope, llama, batch):
    model, expected = llama.model(), llama.model()
    with counted() as kernel_calls, liger_hw.patch(model if scope == "model" else type(model)):
        model(**batch)
        before = set(kernel_calls)
        kernel_calls.clear()
        for each in (model, expected):
            switch(each)
        assert [m.training for m in model.modules()] == [m.training for m in expected.modules()]
        outputs = model(**batch)
        outputs.loss.backward()
        after = set(kernel_calls)
    wanted = expected(**batch)
    wanted.loss.backward()
    tolerance = TOLERANCES.get(switch, 1e-3)
    torch.testing.assert_close(outputs.loss, wanted.loss, rtol=tolerance, atol=0)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == {n for n, p in expected.named_parameters() if p.grad is not None}
    for name, parameter in expected.named_parameters():
        if parameter.grad is not None:
            found, scale = gradients[name], float(parameter.grad.abs().max())
            torch.testing.assert_close(found, parameter.grad, rtol=0, atol=tolerance * scale + 1e-7, msg=name)
    left = before - after
    assert left == {
        to_a_kernel_of_another: {"rms_norm"},
        to_eval: {"fused_linear_cross_entropy"},  # logits are wanted
        to_an_adapter: {"fused_linear_cross_entropy"},  # on the head
        to_an_adapter_that_is_off: {"fused_linear_cross_entropy"},
    }.get(switch, set())


# -- which implementation runs the experts ----------------------------------------------------------------------------

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def implementations(monkeypatch):
    """Names of transformers' own implementations that run."""
    names = []

    def counting(name, function):
        return lambda *args, **kwargs: names.append(name) or function(*args, **kwargs)

    moe = pytest.importorskip("transformers.integrations.moe", reason="transformers 4 has no such choice")
    functions = moe.ALL_EXPERTS_FUNCTIONS
    for name in ("grouped_mm", "batched_mm"):
        monkeypatch.setitem(functions._global_mapping, name, counting(name, functions[name]))
    return names


def ran(model, moe_calls, implementations):
    """Which ran the experts of a training step: "liger_hw", an implementation of transformers or "eager"."""
    moe_calls.clear()
    implementations.clear()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert torch.isfinite(loss)
    (name,) = {*(["liger_hw"] if moe_calls else []), *implementations} or {"eager"}
    return name


def mixtral(scope, **options):
    """Mixtral and its patch. Classes are patched before it is made: the patch decides what is the default."""
    if scope == "class":
        report = liger_hw.patch(transformers.MixtralForCausalLM)
        return tiny_model(transformers.MixtralForCausalLM, **options), report
    model = tiny_model(transformers.MixtralForCausalLM, **options)
    return model, liger_hw.patch(model)


@pytest.mark.daily(name=("grouped_mm", "batched_mm"), how="method")
@pytest.mark.daily(name="eager", how=("config", "dictionary"), scope="model")
@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("how", ["method", "config", "dictionary"])
def test_an_implementation_that_is_named_after_the_patch_runs(name, how, scope, moe_calls, implementations):
    model, report = mixtral(scope)
    with report:
        assert ran(model, moe_calls, implementations) == "liger_hw"
        for each in (name, "liger_hw", name):
            if how == "method":
                model.set_experts_implementation(each)
            elif how == "dictionary":
                model.set_experts_implementation({"": each})
            else:
                model.config._experts_implementation = each
            assert model.config._experts_implementation == each
            assert ran(model, moe_calls, implementations) == each
    assert ran(model, moe_calls, implementations) == name


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager", None])
def test_an_implementation_that_a_model_is_made_with_runs(name, moe_calls, implementations):
    with liger_hw.patch(transformers.MixtralForCausalLM):
        model = tiny_model(transformers.MixtralForCausalLM, experts_implementation=name)
        assert ran(model, moe_calls, implementations) == (name or "liger_hw")


def test_what_generate_does_for_a_moment_gives_the_kernel_back(scope, moe_calls, implementations):
    model, report = mixtral(scope)
    with report:
        before = model.get_experts_implementation()
        model.set_experts_implementation({name: "batched_mm" for name in before})
        assert ran(model, moe_calls, implementations) == "batched_mm"
        model.set_experts_implementation(before)
        assert ran(model, moe_calls, implementations) == "liger_hw"


def test_revert_gives_back_what_was_chosen(scope, moe_calls, implementations):
    model, report = mixtral(scope)
    report.revert()
    assert ran(model, moe_calls, implementations) == "grouped_mm"
    if scope == "model":
        assert type(model.config._experts_implementation) is str
    assert ran(tiny_model(transformers.MixtralForCausalLM), moe_calls, implementations) == "grouped_mm"


def test_a_model_that_shares_the_configuration_is_not_patched(moe_calls, implementations):
    config = tiny_config(transformers.MixtralConfig)
    one, other = (transformers.MixtralForCausalLM(config) for _ in range(2))
    with liger_hw.patch(one):
        assert ran(one, moe_calls, implementations) == "liger_hw"
        assert ran(other, moe_calls, implementations) == "grouped_mm"


def test_models_made_before_a_class_patch_keep_their_implementation(moe_calls, implementations):
    """Their configurations name one, and do not say whether a program or a default has chosen it."""
    model = tiny_model(transformers.MixtralForCausalLM)
    with liger_hw.patch(transformers.MixtralForCausalLM) as report:
        assert any(row.where == "MixtralExperts.forward of new models" for row in report.patched)
        assert ran(model, moe_calls, implementations) == "grouped_mm"
        model.set_experts_implementation("liger_hw")
        assert ran(model, moe_calls, implementations) == "liger_hw"
