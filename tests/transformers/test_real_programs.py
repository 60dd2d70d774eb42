"""Patched models under what real programs do: custom losses, copies, wrappers, odd forwards, Trainer, odd heads."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import importlib
import logging
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
import transformers
from families import counted
from small_models import SIZES, assert_same_gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import liger_hw
from liger_hw.transformers.auto_model import AutoLigerKernelForCausalLM
from liger_hw.transformers.report import PATCHED
from liger_hw.transformers.tiny import tiny_model

pytestmark = pytest.mark.cpu


def grads_of(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- deferred logits beyond torch's functions ------------------------------------------------------------------------


def test_an_error_that_is_not_of_deferred_logits_is_raised_at_once(mistral, batch):
    model, runs = mistral.model(num_hidden_layers=1), []

    def fails(**_):
        runs.append(1)
        raise RuntimeError("out of memory")

    model.loss_function = fails
    mistral.apply(model=model)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(**batch)
    assert len(runs) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_whole_model_in_a_checkpoint_keeps_the_gradient_of_its_logits(mistral, batch, reentrant):
    def gradients(model):
        def loss_and_logits(embeds):
            return model(inputs_embeds=embeds, labels=batch["labels"], return_dict=False, use_cache=False)[:2]

        embeds = model.get_input_embeddings()(batch["input_ids"])
        loss, logits = checkpoint(loss_and_logits, embeds, use_reentrant=reentrant)
        return grads_of(model, loss + logits.square().mean())

    model, reference = mistral.model(num_hidden_layers=1), mistral.model(num_hidden_layers=1)
    mistral.apply(model=model)
    assert_same_gradients(gradients(model), gradients(reference))


CHANGES = {
    "optimizer": lambda model, outputs: [p.mul_(1.1) for p in model.parameters()],
    "head's data": lambda model, outputs: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
    "hidden states": lambda model, outputs: outputs.hidden_states[-1].zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_logits_read_after_what_they_are_computed_from_has_changed(mistral, batch, change, grad):
    model = mistral.model(num_hidden_layers=1)
    mistral.apply(model=model)
    with torch.set_grad_enabled(grad):
        outputs = model(**batch, output_hidden_states=True)
        read = model(**batch, output_hidden_states=True)
    expected = read.logits + 0
    with torch.no_grad():
        CHANGES[change](model, outputs)
    with pytest.raises(RuntimeError, match="have changed since; read outputs.logits before that.*skip_logits=False"):
        outputs.logits.argmax(-1)
    torch.testing.assert_close(read.logits + 0, expected)


def _weight(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)


def _bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.ones(model.lm_head.out_features))


def _head(model):
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)


@pytest.mark.parametrize("called_with_others", [False, True])
@pytest.mark.parametrize("change", [_weight, _bias, _head])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_weights_that_the_model_was_called_with(
    mistral, batch, change, tied, called_with_others
):
    def results(model):
        weights = {name: p.detach().mul(1.1).requires_grad_() for name, p in model.named_parameters()}
        if called_with_others:
            outputs = torch.func.functional_call(model, weights, kwargs=batch)
        else:
            weights, outputs = dict(model.named_parameters()), model(**batch)
        change(model)
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        loss = outputs.loss + torch.nn.functional.cross_entropy(logits, labels) + logits.square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, list(weights.values()))]

    model, reference = (mistral.model(num_hidden_layers=1, tie_word_embeddings=tied) for _ in range(2))
    mistral.apply(model=model)
    for ours, theirs in zip(results(model), results(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6)


# -- models around models, odd forwards ------------------------------------------------------------------------------


def test_a_subclass_patched_as_class_and_as_instance(family, batch, calls):
    class Mine(family.causal_lm):
        def forward(self, input_ids, labels=None, **kwargs):
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    base = family.model(num_hidden_layers=1)
    mine = Mine(base.config).train()
    mine.load_state_dict(base.state_dict())
    expected = grads_of(base, base(**batch).loss)
    with family.apply(), family.apply(model=mine):
        outputs = mine(**batch)
        assert outputs.logits.is_deferred and calls["fused"] == 1
        assert_same_gradients(grads_of(mine, outputs.loss), expected)


@pytest.mark.parametrize("name", ["Blip2", "InstructBlip"])
def test_a_patched_t5_inside_a_vision_model(name):
    text = transformers.T5Config(
        vocab_size=61,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        qformer_config={**sizes, "encoder_hidden_size": 32, "vocab_size": 61},
        text_config=text.to_dict(),
        num_query_tokens=2,
        image_token_index=60,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().train()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)  # transformers 5.17 leaves a T5 in here with gradients of 1e18
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = torch.tensor([[60, 60, 5, 6, 7]])
    inputs = {"pixel_values": torch.randn(1, 3, 8, 8), "input_ids": ids, "labels": torch.tensor([[5, 6, 7]])}
    if name == "InstructBlip":
        inputs["qformer_input_ids"] = ids[:, 2:]
    torch.manual_seed(1)
    expected = model(**inputs).loss
    wanted = grads_of(model, expected)
    with counted() as calls, liger_hw.patch(model):
        torch.manual_seed(1)
        outputs = model(**inputs)
        loss = outputs.loss
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        assert outputs.language_model_outputs.logits is outputs.logits
        assert isinstance(outputs.logits, torch.Tensor) and outputs.logits.is_deferred
        assert_same_gradients(grads_of(model, loss), wanted, rtol=1e-3)
        assert calls["fused_linear_cross_entropy"] == 1


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    text: object


AROUND = {
    "dict": lambda outputs: {"loss": outputs.loss, "text": outputs},
    "tuple": lambda outputs: (outputs.loss, (outputs, [outputs.logits])),
    "dataclass": lambda outputs: Result(outputs.loss, Result(outputs.loss, {"logits": outputs.logits})),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", AROUND)
def test_logits_inside_outputs_inside_outputs_are_tensors(mistral, batch, kind, fused):
    class Around(mistral.causal_lm):
        def forward(self, input_ids=None, labels=None, **kwargs):
            return AROUND[kind](super().forward(input_ids=input_ids, labels=labels, **kwargs))

    base = mistral.model(num_hidden_layers=1)
    model = Around(base.config).train()
    model.load_state_dict(base.state_dict())
    expected = base(**batch).logits
    liger_hw.patch(model, cross_entropy=not fused, fused_linear_cross_entropy=fused)
    found = []

    def collect(value):
        for item in vars(value).values() if dataclasses.is_dataclass(value) and not isinstance(value, dict) else ():
            collect(item)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ():
            collect(item)
        if not isinstance(value, (dict, tuple, list, Result)) and getattr(value, "ndim", 0) == 3:
            found.append(value)

    collect(model(**batch))
    assert found and all(isinstance(logits, torch.Tensor) and logits is found[0] for logits in found)
    torch.testing.assert_close(found[0] + 0, expected, rtol=1e-4, atol=1e-5)


def masked_logits(self, hidden):
    logits = self.lm_head(hidden).clone()
    logits[..., 3] = -10.0  # as Chameleon's for its images
    return logits


def logits_elsewhere(self, hidden):
    return F.linear(hidden, self.lm_head.weight)  # as Reformer's chunks


@pytest.mark.parametrize("logits_of", [masked_logits, logits_elsewhere], ids=lambda f: f.__name__)
def test_a_forward_that_leaves_the_loss_no_hidden_states_says_so(mistral, batch, caplog, calls, logits_of):
    class Mine(mistral.causal_lm):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = logits_of(self, self.model(input_ids).last_hidden_state)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    model = Mine(mistral.model(num_hidden_layers=1).config).train()
    expected = grads_of(model, model(**batch).loss)
    liger_hw.patch(model)
    with caplog.at_level(logging.WARNING, "liger_hw"):
        assert_same_gradients(grads_of(model, model(**batch).loss), expected)
        model(**batch)
    assert calls["fused"] == 0
    assert caplog.text.count("Mine") == caplog.text.count("is not used for this output head") == 1


KOSMOS_TEXT = {
    "vocab_size": 61,
    "embed_dim": 32,
    "layers": 1,
    "ffn_dim": 48,
    "attention_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
}
KOSMOS_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def kosmos(name):
    """(model, inputs) of a tiny Kosmos, whose causal LM is called by the model around it."""
    torch.manual_seed(0)
    ids, mask = torch.randint(3, 60, (2, 9)), torch.zeros(2, 9, dtype=torch.int64)
    mask[:, 1:4] = 1
    inputs = {"input_ids": ids, "labels": ids.masked_fill(mask == 1, -100), "image_embeds_position_mask": mask}
    if name == "Kosmos2":
        vision = {**KOSMOS_VISION, "image_size": 8, "patch_size": 4}
        inputs["pixel_values"] = torch.randn(2, 3, 8, 8)
    else:
        vision = {**KOSMOS_VISION, "head_dim": 8, "patch_embed_hidden_size": 48, "dropout_rate": 0.0}
        inputs["flattened_patches"] = torch.randn(2, 8, 50)
        inputs["flattened_patches"][:, :, :2] = torch.arange(1, 9).view(1, 8, 1)  # of each patch its row and column
        inputs |= {"width": torch.tensor([4, 4]), "height": torch.tensor([2, 2])}
    config = getattr(transformers, f"{name}Config")(text_config=KOSMOS_TEXT, vision_config=vision, latent_query_num=3)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).train(), inputs


@pytest.mark.parametrize("part", ["whole", "text model"])
@pytest.mark.parametrize("name", ["Kosmos2", "Kosmos2_5"])
def test_a_patched_causal_lm_inside_kosmos(name, part):
    if not hasattr(transformers, f"{name}ForConditionalGeneration"):
        pytest.skip(f"this transformers has no {name}")
    model, inputs = kosmos(name)
    expected = model(**inputs).loss
    wanted = grads_of(model, expected)
    with counted() as calls, liger_hw.patch(model if part == "whole" else model.text_model):
        loss = model(**inputs).loss
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        assert_same_gradients(grads_of(model, loss), wanted, rtol=1e-3)
        assert calls["fused_linear_cross_entropy"] == 1
        assert model.eval()(**inputs).logits.shape == (2, 9, 61)


Pair = collections.namedtuple("Pair", ["loss", "logits"])


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


RETURNS = {
    "bare loss": (lambda o: o.loss, lambda r: r),
    "list": (lambda o: [o.loss, o.logits], lambda r: r[0]),
    "named tuple": (lambda o: Pair(o.loss, o.logits), lambda r: r.loss),
    "dataclass": (lambda o: Answer(o.loss, o.logits), lambda r: r.loss),
    "dict": (lambda o: {"loss": o.loss, "logits": o.logits}, lambda r: r["loss"]),
}


@pytest.mark.parametrize("kind", RETURNS)
def test_a_forward_that_returns_another_kind(mistral, batch, calls, kind):
    make, loss_of = RETURNS[kind]

    class Mine(mistral.causal_lm):
        SCALE = 2.0

        def forward(self, input_ids, labels=None):
            self.seen = type(self).SCALE
            outputs = super().forward(input_ids=input_ids, labels=labels)
            outputs.logits = outputs.logits * self.seen
            del self.seen
            return make(outputs)

    base = mistral.model(num_hidden_layers=1)
    model = Mine(base.config).train()
    model.load_state_dict(base.state_dict())
    expected = model(**batch)
    with liger_hw.patch(model):
        found = model(**batch)
        assert calls["fused"] == 1 and type(found) is type(expected)
        torch.testing.assert_close(loss_of(found), loss_of(expected), rtol=1e-4, atol=1e-6)
        logits = getattr(found, "logits", None) if kind in ("named tuple", "dataclass") else None
        if logits is not None:
            torch.testing.assert_close(logits + 0, expected.logits, rtol=1e-4, atol=1e-5)


def test_a_loss_over_more_rows_than_labels(mistral, batch):
    """Next-token and second-next-token losses in one, and labels that the caller's are not."""

    class Mine(mistral.causal_lm):
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids)[0])
            rows = torch.cat([logits, logits]).view(-1, logits.size(-1))
            return {"loss": F.cross_entropy(rows, torch.cat([input_ids, input_ids.flip(0)]).view(-1))}

    base = mistral.model(num_hidden_layers=1)
    model = Mine(base.config).train()
    model.load_state_dict(base.state_dict())
    labels = torch.full_like(batch["labels"], -100)
    labels[0, 5] = 7
    expected = model(batch["input_ids"], labels=labels)["loss"]
    with liger_hw.patch(model):
        torch.testing.assert_close(model(batch["input_ids"], labels=labels)["loss"], expected, rtol=1e-4, atol=1e-6)
    base.loss_function = lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
    expected = base(batch["input_ids"], labels=labels).loss
    with liger_hw.patch(base):
        torch.testing.assert_close(base(batch["input_ids"], labels=labels).loss, expected, rtol=1e-4, atol=1e-6)


def over_what_labels_ignore(logits, labels, vocab_size, **_):
    return F.cross_entropy(logits.float().view(-1, vocab_size), labels.masked_fill(labels == -100, 5).view(-1))


@pytest.mark.parametrize("way", ["a subclass", "transformers' table", "around the forward"])
def test_a_loss_over_rows_that_the_labels_ignore(mistral, batch, calls, monkeypatch, way):
    """The number of labels that count, which the patched forward takes beforehand, says nothing of such a loss."""
    table = importlib.import_module("transformers.loss.loss_utils").LOSS_MAPPING
    base = mistral.model(num_hidden_layers=1)
    cls = mistral.causal_lm
    if way == "a subclass":
        cls = type("Mine", (cls,), {"loss_function": staticmethod(over_what_labels_ignore)})
    elif way == "transformers' table":
        monkeypatch.setitem(table, "ForCausalLM", over_what_labels_ignore)
    else:

        @functools.wraps(cls.forward)
        def filled(self, input_ids, labels=None, _original=cls.forward):
            return _original(self, input_ids, labels=labels.masked_fill(labels == -100, 5))

        cls = type("Mine", (cls,), {"forward": filled})
    model = cls(base.config).train()
    model.load_state_dict(base.state_dict())
    expected = model(**batch).loss
    wanted = grads_of(model, expected)
    with liger_hw.patch(model):
        loss = model(**batch).loss
        assert calls["fused"] == 1
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        assert_same_gradients(grads_of(model, loss), wanted)


def test_a_linear_whose_class_was_given_another_forward(mistral, batch, monkeypatch):
    model, linear = mistral.model(num_hidden_layers=1), torch.nn.Linear.forward
    mistral.apply(model=model)
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: linear(self, x) * 1.5)
    outputs = model(**batch)
    expected = mistral.model(num_hidden_layers=1)(**batch).loss
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-4, atol=1e-6)


# -- copies ----------------------------------------------------------------------------------------------------------


def replica_of(model):
    """What nn.DataParallel makes of a model for another device, here with other weights."""
    modules = list(model.modules())
    index = {module: i for i, module in enumerate(modules)}
    replicas = [module._replicate_for_data_parallel() for module in modules]
    for module, replica in zip(modules, replicas):
        for name, child in module._modules.items():
            replica._modules[name] = replicas[index[child]]
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach() * 0.5)
    return replicas[0]


@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_replicas_run_on_their_own_weights(family, batch, calls, scope):
    model = family.model()
    expected = replica_of(model)(**batch).loss
    with family.apply(model=model if scope == "instance" else None):
        assert not torch.isclose(model(**batch).loss, expected)
        outputs = replica_of(model)(**batch)
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-4, atol=1e-6)
    assert calls["fused"] == 2 and outputs.logits is None, "gather() takes tensors and None"


def test_a_shallow_copy_runs_its_class_s_code(mistral):
    model = mistral.model()
    report = mistral.apply(model=model)
    mlp = model.model.layers[0].mlp
    twin = copy.copy(mlp)
    twin._modules = dict(mlp._modules, act_fn=torch.nn.ReLU())
    x = torch.randn(3, 32)
    torch.testing.assert_close(twin(x), mlp.down_proj(F.relu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    deep = copy.deepcopy(model)
    assert all(module.forward.__self__ is module for module in deep.modules() if "forward" in vars(module))
    again = copy.copy(deep.model.norm)
    again._parameters = {"weight": torch.nn.Parameter(torch.zeros(32))}
    assert not again(x).any() and deep.model.norm(x).any()
    report.revert()
    assert not {"__getstate__", "_replicate_for_data_parallel"} & {n for m in model.modules() for n in vars(m)}


# -- parts that are odd ----------------------------------------------------------------------------------------------


def test_cohere_norms_over_heads_in_patched_classes(batch):
    model = tiny_model(transformers.CohereForCausalLM, use_qk_norm=True)
    expected = model(**batch).loss
    with liger_hw.patch(transformers.CohereForCausalLM) as report:
        assert any(row.kernel == "layer_norm" for row in report.patched)
        torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gated_t5_whose_output_projections_stay_in_fp32(batch, dtype):
    model = tiny_model(
        transformers.T5ForConditionalGeneration, feed_forward_proj="gated-gelu", decoder_start_token_id=0
    )
    model.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    expected = model(**batch).loss
    with liger_hw.patch(model) as report:
        assert any(row.kernel == "geglu" for row in report.patched)
        torch.testing.assert_close(model(**batch).loss, expected, rtol=2e-2, atol=0)


class Halves(torch.Tensor):
    """A weight kept as fp16, as torchao's are kept as integers: a tensor subclass that not every op takes."""

    @staticmethod
    def __new__(cls, kept):
        return torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32, requires_grad=False)

    def __init__(self, kept):
        self.kept = kept

    def __tensor_flatten__(self):
        return ["kept"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].kept)
        if function not in (torch.ops.aten.t.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            raise NotImplementedError(str(function))
        args = [a.kept.float() if isinstance(a, Halves) else a for a in args]
        return function(*args)


def test_a_quantised_head_computes_its_logits_and_the_report_says_so(mistral, batch, calls):
    model = mistral.model(num_hidden_layers=1)
    kept = model.lm_head.weight.detach().half()
    model.lm_head.weight = torch.nn.Parameter(kept.float(), requires_grad=False)
    expected = model(**batch).loss
    model.lm_head.weight = torch.nn.Parameter(Halves(kept), requires_grad=False)
    with mistral.apply(model=model) as report:
        row = next(row for row in report.rows if row.part == "fused_linear_cross_entropy")
        assert row.kernel == "cross_entropy" and row.state == PATCHED and "its weight is a Halves" in row.variant
        torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-6)
    assert calls == {"fused": 0, "plain": 1}


def test_the_report_of_a_hooked_head_says_that_its_logits_are_computed(mistral):
    model = mistral.model(num_hidden_layers=1)
    model.lm_head.register_forward_hook(lambda *_: None)
    with mistral.apply(model=model) as report:
        assert "logits computed: hooks are registered on it" in str(report)
        assert "fused_linear_cross_entropy" not in {row.kernel for row in report.patched}


def half_of_linears(module, given, output):
    return output * 0.5 if isinstance(module, torch.nn.Linear) else None


def half_of_activations(module, given, output):
    return output * 0.5 if isinstance(module, type(transformers.activations.ACT2FN["silu"])) else None


def half_into_linears(module, given):
    return (given[0] * 0.5,) if isinstance(module, torch.nn.Linear) else None


def half_out_of_linears(module, of_inputs, _):
    return tuple(None if g is None else g * 0.5 for g in of_inputs) if isinstance(module, torch.nn.Linear) else None


@pytest.mark.parametrize(
    "register, hook",
    [
        ("register_module_forward_hook", half_of_linears),
        ("register_module_forward_hook", half_of_activations),
        ("register_module_forward_pre_hook", half_into_linears),
        ("register_module_full_backward_hook", half_out_of_linears),
    ],
)
def test_hooks_on_every_module_run_on_the_head_and_on_activations(mistral, batch, calls, same_step, register, hook):
    model, unpatched = (mistral.model(num_hidden_layers=1) for _ in range(2))
    with mistral.apply(model=model):
        handle = getattr(torch.nn.modules.module, register)(hook)
        try:
            same_step(model, unpatched, **batch)
        finally:
            handle.remove()
        assert calls["fused"] == 0
        same_step(model, unpatched, **batch)
        assert calls["fused"] == 1


def test_a_head_whose_weight_is_computed_is_computed_once_a_step(mistral, batch, same_step):
    """Spectral norm takes a step of its power iteration at every look at the weight."""
    model, unpatched = (mistral.model(num_hidden_layers=1) for _ in range(2))
    for each in (model, unpatched):
        torch.manual_seed(0)
        torch.nn.utils.parametrizations.spectral_norm(each.lm_head)
    with mistral.apply(model=model) as report:
        assert "its weight is computed by a parametrization" in str(report)
        same_step(model, unpatched, **batch)
        same_step(model, unpatched, **batch)


@pytest.mark.parametrize("class_name", ["MistralForCausalLM", "GptOssForCausalLM"])
def test_jit_trace_traces_the_family_s_own_code(class_name):
    model = tiny_model(getattr(transformers, class_name), num_hidden_layers=1).eval()
    ids = torch.arange(3, 11)[None]
    try:
        torch.jit.trace(model, (ids,), strict=False)
    except RuntimeError as error:  # Mistral's mask under transformers 4.57
        pytest.skip(f"torch.jit.trace fails on the unpatched model: {error}")
    with liger_hw.patch(model):
        traced = torch.jit.trace(model, (ids,), strict=False)
        assert "liger" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(ids)["logits"], model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_fx_traces_the_family_s_own_code(scope):
    """An MLP, as torch.fx traces no whole model of transformers."""
    model = tiny_model(transformers.MistralForCausalLM, num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 3, model.config.hidden_size)
    expected = mlp(x)
    with liger_hw.patch(model if scope == "instance" else type(model)):
        traced = torch.fx.symbolic_trace(mlp)
        assert "liger" not in str(traced.graph)
        torch.testing.assert_close(traced(x), expected)


# -- revert under accelerate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["classes", "instance"])
@pytest.mark.parametrize("way", ["report", "model"])
def test_revert_leaves_accelerate_s_wrappers_and_no_kernel(family, batch, scope, way):
    accelerate = pytest.importorskip("accelerate")
    model = family.model(num_hidden_layers=1)
    expected = model(**batch).loss
    with counted() as calls:
        report = family.apply(model=model if scope == "instance" else None)
        accelerate.cpu_offload(model, execution_device="cpu")
        assert torch.isclose(model(**batch).loss, expected, rtol=1e-4) and calls
        wrapped = {name for name, module in model.named_modules() if "_hf_hook" in vars(module)}
        if way == "model":
            liger_hw.revert(model)
            torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-6)
        report.revert()
        calls.clear()
        torch.testing.assert_close(model(**batch).loss, expected)
    assert not calls and wrapped
    assert wrapped == {name for name, module in model.named_modules() if "_hf_hook" in vars(module)}


# -- Trainer and loading ---------------------------------------------------------------------------------------------


def evaluated(model, tmp_path, **options):
    """Trainer's evaluation loss of a model that was patched as `use_liger_kernel=True` does."""
    pytest.importorskip("accelerate")
    rows = [{"input_ids": torch.arange(3 + i, 11 + i), "labels": torch.arange(3 + i, 11 + i)} for i in range(4)]
    settings = {"label_smoothing_factor": options.pop("label_smoothing_factor", 0.0)}
    args = transformers.TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, per_device_eval_batch_size=2, disable_tqdm=True, **settings
    )
    trainer = options.pop("trainer", transformers.Trainer)(model, args, eval_dataset=rows, **options)
    args.use_liger_kernel = True  # evaluation then asks to skip the logits; Trainer is given a patched model already
    return trainer.evaluate()["eval_loss"]


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        rows, target = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = F.cross_entropy(rows.reshape(-1, rows.size(-1)), target.reshape(-1), label_smoothing=0.2)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"trainer": OwnLoss},
        {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()},
    ],
    ids=["plain", "label smoothing", "compute_loss", "compute_loss_func"],
)
def test_trainer_evaluates(mistral, tmp_path, options):
    model = mistral.model(num_hidden_layers=1)
    expected = evaluated(model, tmp_path, **dict(options))
    with mistral.apply(model=model):
        assert evaluated(model, tmp_path, **dict(options)) == pytest.approx(expected, rel=1e-5)


def test_auto_model_from_config_and_with_loading_info(mistral, batch, tmp_path, calls):
    model = mistral.model(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    loaded, info = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, rope=False)
    assert not info["missing_keys"]
    torch.testing.assert_close(loaded.train()(**batch).loss, model(**batch).loss, rtol=1e-4, atol=1e-6)
    made = AutoLigerKernelForCausalLM.from_config(model.config, swiglu=False)
    assert "forward" not in vars(made.model.layers[0].mlp) and made.train()(**batch).loss.isfinite()
    assert calls["fused"] == 2


# -- modes of torch --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(version("transformers").startswith("4."), reason="its rotary embeddings autocast on any device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_on_the_meta_device(mistral, dtype):
    """As programs take one that count memory or products before they load a model; in float64, which kernels do not
    take off the CPU, the model's own code runs."""
    with torch.device("meta"):
        model = mistral.causal_lm(mistral.config_class(**SIZES)).train().to(dtype)
        ids = torch.zeros(2, 5, dtype=torch.long)
    mistral.apply(model=model)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.is_meta and model.lm_head.weight.grad.is_meta


@pytest.mark.parametrize("scope", ["classes", "instance"])
def test_torch_func_transforms_the_family_s_own_code(mistral, batch, scope):
    """Gradients of each sequence alone, as for differential privacy or influence functions."""
    model = mistral.model(num_hidden_layers=2, attn_implementation="eager")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights, ids, labels):
        inputs = {"input_ids": ids[None], "labels": labels[None], "use_cache": False}
        return torch.func.functional_call(model, weights, kwargs=inputs).loss

    def gradients():
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        tangents = {name: torch.ones_like(weight) for name, weight in weights.items()}
        forward = torch.func.jvp(lambda w: loss(w, batch["input_ids"][0], batch["labels"][0]), (weights,), (tangents,))
        return [*each(weights, batch["input_ids"], batch["labels"]).values(), *forward]

    expected = gradients()
    with mistral.apply(model=model if scope == "instance" else None):
        torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


def test_a_nested_tensor_runs_the_module_s_own_code():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    expected = model(x)
    with liger_hw.patch(model) as report:
        assert report.patched and torch.equal(model(x).values(), expected.values())


@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode])
def test_a_model_is_recognised_whatever_mode_it_is_patched_under(mistral, mode):
    with mode():
        model = mistral.causal_lm(mistral.config_class(**SIZES))
        with liger_hw.patch(model) as report:
            assert {row.kernel for row in report.patched} == {
                "rope",
                "rms_norm",
                "swiglu",
                "fused_linear_cross_entropy",
            }


# -- models that put others together ---------------------------------------------------------------------------------

TEXT = {"vocab_size": 61, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}


def seen_and_told(decoder):
    """A tiny VisionEncoderDecoderModel and inputs for it."""
    vision = transformers.ViTConfig(**{**TEXT, "image_size": 8, "patch_size": 4, "vocab_size": None})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.VisionEncoderDecoderModel(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


def vision_gpt2():
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return seen_and_told(transformers.GPT2Config(**sizes, **drops, add_cross_attention=True, is_decoder=True))


def vision_bert():
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return seen_and_told(transformers.BertConfig(**TEXT, **drops, add_cross_attention=True, is_decoder=True))


def marian():
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "vocab_size": 61, "pad_token_id": 0}
    model = transformers.MarianMTModel(transformers.MarianConfig(**sizes, dropout=0.0, decoder_start_token_id=0))
    torch.nn.init.normal_(model.final_logits_bias)
    return model, {"input_ids": torch.randint(3, 60, (2, 6))}


def blip2_bert():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Blip2Config(
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        qformer_config={**TEXT, "encoder_hidden_size": 16},
        text_config={**TEXT, "model_type": "bert", "is_decoder": True},
        num_query_tokens=2,
        image_token_index=60,
    )
    model = transformers.Blip2ForConditionalGeneration(config)
    return model, {"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": torch.tensor([[60, 60, 5, 6, 7]] * 2)}


SCOPES_OF = {vision_gpt2: ["live"], vision_bert: ["live"], marian: ["class", "live"], blip2_bert: ["class", "live"]}


@pytest.mark.parametrize("made, scope", [(made, scope) for made in SCOPES_OF for scope in SCOPES_OF[made]])
def test_a_head_is_found_wherever_the_model_inside_has_it(made, scope, calls):
    """A class is patched by its default models; one of it may hold another language model, with its head elsewhere."""
    torch.manual_seed(0)
    model, inputs = made()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    reference = copy.deepcopy(model.train())
    inputs["labels"] = inputs.get("input_ids", torch.tensor([[5, 6, 7], [7, 8, 9]])).clone()
    inputs["labels"][0, 0] = -100
    torch.manual_seed(1)
    expected = reference(**inputs).loss
    expected.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    with liger_hw.patch(type(model) if scope == "class" else model):
        torch.manual_seed(1)
        found = model(**inputs).loss
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert_same_gradients(grads_of(model, found), wanted, rtol=1e-3, atol=1e-5)
    assert calls["fused"] == 1
