"""What a patched model's first step is foreseen to launch is what it launches, and foreseeing changes nothing of it."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import noted

from liger_hw.autotune import compile_ahead
from liger_hw.runtime.observe import observing
from liger_hw.runtime.operator import LauncherMode
from liger_hw.transformers import rehearse
from liger_hw.transformers.loss import loss_of
from liger_hw.transformers.models import specs
from liger_hw.transformers.tiny import tiny_config

transformers = pytest.importorskip("transformers")
import liger_hw.transformers as patches  # noqa: E402

pytestmark = pytest.mark.cpu
BATCH, SEQ = 2, 32
# Norms that cast as Llama's, Gemma's and OLMo's do, over heads and over projections, and LayerNorm; gate and up in
# one product, GeGLU, relu squared; angles in fp32, of half the width, of part of it, and of neighbours; experts.
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "phi3", "glm4", "nemotron", "mixtral", "gpt_oss")

EXPERTS = ("mixtral", "gpt_oss")


def _foreseen(model, batch: int = BATCH, loss: bool = True, **arguments) -> dict:
    """Launches in their order. loss: the model's own loss is tried; arguments: of its loss function."""
    found: dict = {}
    own = loss_of(model, model.get_output_embeddings(), arguments) if loss else None
    jobs = rehearse.foresee(model, batch, SEQ, torch.bfloat16, torch.device("cpu"), own)
    compile_ahead.note_launches(jobs, noted(found))
    return found


def _class_of(kind):
    cls = getattr(transformers, specs()[kind].models[0], None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return cls


def _made(cls):
    return cls(tiny_config(cls.config_class)).train().to(torch.bfloat16)


def _launched(cls, prepare=lambda model: model, batch: int = BATCH, **arguments) -> dict:
    """By a whole training step, in their order."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(), LauncherMode(), observing(compile_ahead.Foreseen(noted(found))):
            model = prepare(cls(tiny_config(cls.config_class)).train())
            ids = torch.zeros(batch, SEQ, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False, **arguments).loss.backward()
    finally:
        torch.set_default_dtype(before)
    return found


def _differ(launched: dict, foreseen: dict) -> str:
    one_way, other = launched.keys() - foreseen.keys(), foreseen.keys() - launched.keys()
    missed, in_vain = (sorted(name for name, *_ in found) for found in (one_way, other))
    return f"missed {missed}, in vain {in_vain}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_launches_what_was_foreseen(kind, on_sm90):
    """No more, which would compile in vain, and no less."""
    if kind in EXPERTS and transformers.__version__.startswith("4."):
        pytest.skip("the model of transformers 4 asks for numbers of tokens, which fake tensors do not have")
    cls = _class_of(kind)
    with getattr(patches, f"apply_liger_kernel_to_{kind}")(activations="keep"):
        foreseen, launched = _foreseen(_made(cls)), _launched(cls)
    assert len(launched) >= 9
    assert foreseen == launched, _differ(launched, foreseen)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "olmo2", "gemma2"])
def test_one_sequence_is_foreseen_in_the_order_of_need(kind, on_sm90):
    """Its shifted labels are a view that begins 8 bytes into an allocation: Triton compiles other kernels for them."""
    cls = _class_of(kind)
    with getattr(patches, f"apply_liger_kernel_to_{kind}")(activations="keep"):
        foreseen, launched = _foreseen(_made(cls), batch=1), _launched(cls, batch=1)
    assert foreseen == launched, _differ(launched, foreseen)
    first_scaled = [name for name, *_ in launched].index("cross_entropy.bwd")  # backward begins with it
    assert list(foreseen)[: first_scaled + 1] == list(launched)[: first_scaled + 1]


@pytest.mark.parametrize("arguments", [{"num_items_in_batch": 40}, {"num_items_in_batch": torch.tensor(40)}], ids=str)
def test_a_loss_that_the_trainer_divides_is_foreseen(arguments, on_sm90):
    """It is the sum over the rows: other kernels than the mean's."""
    cls = _class_of("llama")
    with patches.apply_liger_kernel_to_llama():
        given = {n: 40 if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
        foreseen, launched = _foreseen(_made(cls), **arguments), _launched(cls, **given)
        assert foreseen == launched, _differ(launched, foreseen)
        assert foreseen != _foreseen(_made(cls))


def test_a_head_that_is_not_trained_has_no_gradient(on_sm90):

    def freeze(model):
        model.lm_head.weight.requires_grad_(False)
        return model

    with patches.apply_liger_kernel_to_llama():
        cls = _class_of("llama")
        foreseen, launched = _foreseen(freeze(_made(cls))), _launched(cls, freeze)
        assert foreseen == launched, _differ(launched, foreseen)


def test_a_loss_function_of_the_user_is_left_alone(on_sm90, monkeypatch):
    """It may do anything, and a rehearsal would have it done twice."""
    given = []
    monkeypatch.setattr(rehearse, "at_first_forward", lambda model, args, kwargs, loss=None: given.append(loss))
    with patches.apply_liger_kernel_to_llama():
        model = _made(_class_of("llama"))
        ids = torch.zeros(1, 4, dtype=torch.long)
        model(input_ids=ids, labels=ids)
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().logsumexp(-1).mean()
        model(input_ids=ids, labels=ids)
    assert [loss is not None for loss in given] == [hasattr(type(model), "loss_function"), False]


def test_a_loss_that_may_not_be_tried_is_foreseen_by_its_sizes(on_sm90):
    with patches.apply_liger_kernel_to_llama():
        model = _made(_class_of("llama"))
        assert _foreseen(model, loss=False) == _foreseen(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2", "glm4"])
def test_what_backward_computes_again_is_foreseen(kind, on_sm90):
    """After a QK norm also q and k rotated alone; k in vain where attention repeats its heads and keeps the copy."""
    cls = _class_of(kind)
    with getattr(patches, f"apply_liger_kernel_to_{kind}")(activations="cheap"):
        foreseen, launched = _foreseen(_made(cls)), _launched(cls)
    with getattr(patches, f"apply_liger_kernel_to_{kind}")(activations="keep"):
        kept = _foreseen(_made(cls))
    assert launched.keys() <= foreseen.keys() and kept.keys() <= foreseen.keys(), _differ(launched, foreseen)
    assert {name for name, *_ in foreseen.keys() - kept.keys()} == (
        {"rope.fwd"} if kind in ("qwen3", "olmo2") else set()
    )


def test_a_live_model_is_foreseen_like_its_class(on_sm90):
    cls = _class_of("olmo2")
    model = _made(cls)
    with patches.apply_liger_kernel_to_olmo2(model=model):
        found = _foreseen(model)
    with patches.apply_liger_kernel_to_olmo2():
        assert found and _foreseen(_made(cls)) == found


def test_norms_that_are_not_trained_have_no_gradient(on_sm90):
    """As beside an adapter: another kernel, without the gradient of the weight."""

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name)
        return model

    with patches.apply_liger_kernel_to_llama():
        cls = _class_of("llama")
        foreseen, launched = _foreseen(freeze(_made(cls))), _launched(cls, freeze)
        assert foreseen == launched, _differ(launched, foreseen)
        assert foreseen != _foreseen(_made(cls))


def test_nothing_of_the_model_changes(on_sm90):
    with patches.apply_liger_kernel_to_mixtral():
        model = _made(_class_of("mixtral"))
        before = {name: (id(t), copy.deepcopy(t.detach())) for name, t in model.named_parameters()}
        attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
        state = torch.get_rng_state()
        assert _foreseen(model)
        assert torch.equal(state, torch.get_rng_state())
        for name, parameter in model.named_parameters():
            number, value = before[name]
            assert id(parameter) == number and torch.equal(parameter, value) and parameter.grad is None, name
        for name, module in model.named_modules():
            assert vars(module).keys() == attributes[name].keys(), name
            assert all(value is attributes[name][key] for key, value in vars(module).items()), name


def test_a_part_that_does_more_than_its_class_is_left_out(on_sm90):
    """A hook may do anything, here raise; who runs a copy without it would foresee another module."""
    with patches.apply_liger_kernel_to_llama():
        model = _made(_class_of("llama"))
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
        found = {name for name, *_ in _foreseen(model)}
    assert "rms_norm.fwd" in found and not any(name.startswith("swiglu") for name in found)


def test_parameters_that_zero_3_took_away_are_foreseen_as_they_are_when_gathered(on_sm90):
    with patches.apply_liger_kernel_to_olmo2():
        model = _made(_class_of("olmo2"))
        whole = _foreseen(model)
        for parameter in model.parameters():
            parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0, dtype=torch.bfloat16)
        assert whole and _foreseen(model) == whole


def test_no_model_is_looked_at_where_nothing_compiles():
    class Model:
        config = object()

        def parameters(self):
            raise AssertionError("asked for although the CPU compiles nothing")

    assert rehearse.at_first_forward(Model(), (torch.zeros(1, 8, dtype=torch.long),), {}) is None


def test_a_model_of_other_fields_is_no_failure(monkeypatch):
    class Config:
        def to_dict(self):
            return {}

    class Model(torch.nn.Linear):
        config = Config()

    monkeypatch.setattr(compile_ahead, "is_wanted", lambda device: True)
    monkeypatch.setattr(compile_ahead, "start", lambda *_: pytest.fail("there is nothing to start"))
    assert rehearse.at_first_forward(Model(2, 2), (torch.zeros(1, 8, dtype=torch.long),), {}) is None
