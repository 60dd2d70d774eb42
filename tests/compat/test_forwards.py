"""`liger_kernel.transformers.model.<family>`: forwards that programs bind to models and classes themselves."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")

from liger_hw.compat import checked, forwards  # noqa: E402
from liger_hw.compat.loss_utils import LigerForCausalLMLoss  # noqa: E402
from liger_hw.transformers import apply_liger_kernel_to_llama  # noqa: E402
from liger_hw.transformers.models import specs  # noqa: E402
from liger_hw.transformers.tiny import tiny_model  # noqa: E402

LABELS = torch.tensor([[5, 9, -100, 7, 3, 11], [-100, -100, 4, 8, 12, 6]])
INPUTS = {"input_ids": LABELS.abs() % 64, "labels": LABELS}
FAMILIES = [name for name in (*specs(), "hunyuan_v1") if forwards.classes_of(name)]


def module_of(family: str) -> forwards.FamilyModule:
    module = forwards.FamilyModule(f"liger_kernel.transformers.model.{family}")
    try:
        module.fill(family)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return module


@functools.lru_cache(maxsize=1)
def llama():
    return tiny_model(transformers.LlamaForCausalLM)


@pytest.fixture
def of_llama(monkeypatch):
    """Its module; the class gets its forward back."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", transformers.LlamaForCausalLM.forward)
    return module_of("llama")


def trained(model, **changes):
    """The loss of a step and its gradients, by name."""
    model.zero_grad()
    loss = model(**{**INPUTS, **changes}).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# tests/transformers/test_families.py patches every family's forward.
@pytest.mark.daily(family=("llama", "gemma3", "mixtral", "qwen2_vl", "deepseek_v3", "hunyuan_v1"))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_forward_trains_as_its_own(family):
    module = module_of(family)
    modeling = importlib.import_module(specs()[forwards._FAMILIES.get(family, family)].modeling_module)
    for name, cls in forwards.classes_of(family).items():
        try:
            model = tiny_model(getattr(modeling, cls))
            expected = trained(model)
        except Exception as error:  # as where it needs an image
            pytest.skip(f"no tiny {cls} runs on text: {error}")
        forward = getattr(module, name)
        assert (forward.__module__, forward.__name__) == (module.__name__, name)
        model.forward = types.MethodType(forward, model)
        torch.testing.assert_close(trained(model), expected, rtol=1e-4, atol=1e-5)
        assert type(model(**INPUTS)["logits"]) is not torch.Tensor, "deferred"
        assert model.eval()(**INPUTS).logits.shape[:2] == LABELS.shape


def test_names_are_liger_s():
    names = {family: tuple(forwards.classes_of(family).items()) for family in FAMILIES}
    assert names["llama"] == (("lce_forward", "LlamaForCausalLM"),)
    assert names["llava"] == (("lce_forward", "LlavaForConditionalGeneration"),)
    assert names["mllama"] == (("lce_forward", "MllamaForCausalLM"),)
    assert dict(names["gemma3"]) == {
        "causal_forward": "Gemma3ForCausalLM",
        "multimodal_forward": "Gemma3ForConditionalGeneration",
    }
    assert dict(names["qwen3_5_moe"])["lce_forward_conditional_generation"] == "Qwen3_5MoeForConditionalGeneration"
    assert not forwards.classes_of("pixtral") and not forwards.classes_of("nothing")


def test_bound_to_a_class_and_patched_then(of_llama):
    expected = trained(llama())
    transformers.LlamaForCausalLM.forward = of_llama.lce_forward
    torch.testing.assert_close(trained(llama()), expected, rtol=1e-4, atol=1e-5)
    with apply_liger_kernel_to_llama() as report:
        torch.testing.assert_close(trained(llama()), expected, rtol=1e-4, atol=1e-5)
    assert any(row.state == "already patched" for row in report.rows)
    assert transformers.LlamaForCausalLM.forward is of_llama.lce_forward


def test_made_of_a_patched_class_it_is_the_family_s_own(of_llama):
    own = transformers.LlamaForCausalLM.forward
    with apply_liger_kernel_to_llama():
        forward = module_of("llama").lce_forward
    assert inspect.unwrap(forward) is inspect.unwrap(own)
    model = copy.deepcopy(llama())
    model.forward = types.MethodType(forward, model)
    torch.testing.assert_close(trained(model), trained(llama()), rtol=1e-4, atol=1e-5)


def test_keywords(of_llama):
    model = copy.deepcopy(llama())
    model.forward = types.MethodType(of_llama.lce_forward, model)
    named = inspect.signature(of_llama.lce_forward).parameters
    assert {"labels", "use_cache", "logits_to_keep", "skip_logits", "kwargs"} <= set(named)
    asked = model(**INPUTS, return_token_accuracy=True, return_predicted_tokens=True)
    logits = llama()(**INPUTS).logits
    counted = LABELS[:, 1:] != -100
    right = logits.argmax(-1)[:, :-1] == LABELS[:, 1:]
    torch.testing.assert_close(asked.token_accuracy, right[counted].float().mean())
    found = asked.predicted_tokens.view(LABELS.shape)[:, :-1]
    assert torch.equal(found[counted], logits.argmax(-1)[:, :-1][counted])
    summed = trained(model, num_items_in_batch=torch.tensor(5))[0]
    torch.testing.assert_close(summed, trained(llama(), num_items_in_batch=torch.tensor(5))[0])
    loss, *_ = model(**INPUTS, return_dict=False)
    torch.testing.assert_close(loss, llama()(**INPUTS).loss)
    shifted = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(INPUTS["input_ids"], shift_labels=shifted).loss, loss)


def test_a_forward_put_in_the_module_is_its_class_s(of_llama):
    own, calls = transformers.LlamaForCausalLM.forward, []

    def forward(self, *args, **kwargs):
        calls.append(self)
        return lce_forward(self, *args, **kwargs)

    lce_forward, of_llama.lce_forward = of_llama.lce_forward, forward
    assert transformers.LlamaForCausalLM.forward is forward
    with apply_liger_kernel_to_llama():
        changed = trained(llama())
    assert calls
    of_llama.lce_forward = lce_forward
    assert transformers.LlamaForCausalLM.forward is own
    torch.testing.assert_close(changed, trained(llama()), rtol=1e-4, atol=1e-5)
    of_llama.another = 1
    assert transformers.LlamaForCausalLM.forward is own


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "modules_to_save"])
def test_a_forward_of_one_s_own_takes_the_head_s_loss(wrapped):
    output = forwards.LigerCausalLMOutputWithPast

    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels, **kwargs):
            hidden = self.model(input_ids)[0]
            width = self.config.hidden_size
            asked = forwards.lce_maybe_trainable_lm_head(self, hidden, width, labels, None, return_token_accuracy=True)
            loss = forwards.lce_maybe_trainable_lm_head(
                self, hidden_states=hidden, hidden_size=width, labels=labels, shift_labels=None, **kwargs
            )
            assert asked.predicted_tokens is None
            return output(loss=loss, token_accuracy=asked.token_accuracy)

    model = Own(llama().config)
    model.load_state_dict(llama().state_dict())
    if wrapped:
        other = pytest.importorskip("peft.utils.other")
        model.lm_head = other.ModulesToSaveWrapper(model.lm_head, "default")
    loss, _ = trained(model.train(), num_items_in_batch=4)
    torch.testing.assert_close(loss, trained(llama(), num_items_in_batch=torch.tensor(4))[0])
    assert model(**INPUTS).token_accuracy.shape == ()
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(64, 128))
    with pytest.raises(ValueError, match="this output head cannot be read; it is a Sequential"):
        model(**INPUTS)


def test_outputs_have_two_fields_more():
    output = forwards.LigerMoeCausalLMOutputWithPast
    assert issubclass(output, transformers.modeling_outputs.MoeCausalLMOutputWithPast)
    made = output(loss=torch.ones(()), token_accuracy=torch.tensor(0.5))
    assert list(made) == ["loss", "token_accuracy"] and made.predicted_tokens is None and made.aux_loss is None
    assert made.to_tuple() == (made.loss, made["token_accuracy"]) and type(pickle.loads(pickle.dumps(made))) is output
    gemma = forwards.LigerGemma3CausalLMOutputWithPast
    assert {"image_hidden_states", "image_outputs"} & inspect.signature(gemma).parameters.keys()  # from 5.24 the latter
    assert gemma is forwards.LigerGemma3CausalLMOutputWithPast
    for name in ("LigerNothingCausalLMOutputWithPast", "CausalLMOutputWithPast", "LigerLlamaCausalLMOutputWithPast"):
        assert not hasattr(forwards, name)


def test_a_loss_of_hidden_states_that_are_not_contiguous():
    hidden, weight = torch.randn(6, 2, 8), torch.randn(16, 8)
    loss = LigerForCausalLMLoss(hidden.transpose(0, 1), weight, LABELS, 8, cu_seq_lens_q=None)
    expected = LigerForCausalLMLoss(hidden.transpose(0, 1).contiguous(), weight, LABELS, 8)
    torch.testing.assert_close(loss, expected)


def test_liger_s_cross_entropy_in_the_place_of_torch_s(of_llama, monkeypatch):
    """As copies of Liger's patch functions do, for the whole process; a patched head stays fused."""
    expected = trained(llama())
    logits, target = torch.randn(4, 9), torch.tensor([3, -100, 0, 8])
    loss = torch.nn.functional.cross_entropy(logits, target)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", checked.liger_cross_entropy)
    torch.testing.assert_close(torch.nn.CrossEntropyLoss()(logits, target), loss)
    torch.testing.assert_close(trained(llama()), expected, rtol=1e-4, atol=1e-5)
    model = copy.deepcopy(llama())
    model.forward = types.MethodType(of_llama.lce_forward, model)
    torch.testing.assert_close(trained(model), expected, rtol=1e-4, atol=1e-5)
    assert type(model(**INPUTS)["logits"]) is not torch.Tensor, "deferred"
