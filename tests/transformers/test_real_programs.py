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
from liger_hw.transformers import replacing
from liger_hw.transformers.report import PATCHED
from liger_hw.transformers.tiny import tiny_model


@pytest.fixture(autouse=True)
def small_inputs_count(monkeypatch):
    """The default for the last layer (`cheap`) is in force, although these inputs are far below what it asks for."""
    monkeypatch.setattr(replacing, "LEAST_BYTES", 0)


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

    base, mine = family.model(num_hidden_layers=1), family.model(cls=Mine, num_hidden_layers=1)
    expected = grads_of(base, base(**batch).loss)
    with family.apply(), family.apply(model=mine):
        outputs = mine(**batch)
        assert outputs.logits.is_deferred and calls["fused"] == 1
        assert_same_gradients(grads_of(mine, outputs.loss), expected)


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

    model = mistral.model(cls=Mine, num_hidden_layers=1)
    expected = grads_of(model, model(**batch).loss)
    liger_hw.patch(model)
    with caplog.at_level(logging.WARNING, "liger_hw"):
        assert_same_gradients(grads_of(model, model(**batch).loss), expected)
        model(**batch)
    assert calls["fused"] == 0
    assert caplog.text.count("Mine") == caplog.text.count("is not used for this output head") == 1


Pair = collections.namedtuple("Pair", ["loss", "logits"])


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    logits: object


RETURNS = {
    "bare loss": lambda o: o.loss,
    "list": lambda o: [o.loss, o.logits],
    "named tuple": lambda o: Pair(o.loss, o.logits),
    "dataclass": lambda o: Answer(o.loss, o.logits),
    "dict": lambda o: {"loss": o.loss, "logits": o.logits},
    "outputs in a dict": lambda o: {"loss": o.loss, "text": o},
    "outputs in a tuple": lambda o: (o.loss, (o, [o.logits])),
    "a dataclass in a dataclass": lambda o: Answer(o.loss, Answer(o.loss, {"logits": o.logits})),
}


def leaves(value):
    """What is inside tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", RETURNS)
def test_a_forward_that_returns_another_kind(mistral, batch, calls, kind, fused):
    class Mine(mistral.causal_lm):
        SCALE = 2.0

        def forward(self, input_ids, labels=None):
            self.seen = type(self).SCALE
            outputs = super().forward(input_ids=input_ids, labels=labels, use_cache=False)
            outputs.logits = outputs.logits * self.seen
            del self.seen
            return RETURNS[kind](outputs)

    model = mistral.model(cls=Mine, num_hidden_layers=1)
    expected = model(**batch)
    with liger_hw.patch(model, cross_entropy=not fused, fused_linear_cross_entropy=fused):
        found = model(**batch)
        assert calls == {"fused": fused, "plain": not fused} and type(found) is type(expected)
        for mine, theirs in zip(leaves(found), leaves(expected), strict=True):
            assert isinstance(mine, torch.Tensor)
            torch.testing.assert_close(mine + 0, theirs, rtol=1e-4, atol=1e-5)
        logits = [leaf for leaf in leaves(found) if leaf.ndim == 3]
        assert all(each is logits[0] for each in logits) and bool(logits) == (kind != "bare loss")


def test_a_loss_over_more_rows_than_labels(mistral, batch):
    """Next-token and second-next-token losses in one, and labels that the caller's are not."""

    class Mine(mistral.causal_lm):
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids)[0])
            rows = torch.cat([logits, logits]).view(-1, logits.size(-1))
            return {"loss": F.cross_entropy(rows, torch.cat([input_ids, input_ids.flip(0)]).view(-1))}

    model = mistral.model(cls=Mine, num_hidden_layers=1)
    labels = torch.full_like(batch["labels"], -100)
    labels[0, 5] = 7
    expected = model(batch["input_ids"], labels=labels)["loss"]
    with liger_hw.patch(model):
        torch.testing.assert_close(model(batch["input_ids"], labels=labels)["loss"], expected, rtol=1e-4, atol=1e-6)


def over_what_labels_ignore(logits, labels, vocab_size, **_):
    return F.cross_entropy(logits.float().view(-1, vocab_size), labels.masked_fill(labels == -100, 5).view(-1))


@pytest.mark.parametrize("way", ["a subclass", "transformers' table", "around the forward"])
def test_a_loss_over_rows_that_the_labels_ignore(mistral, batch, calls, monkeypatch, way):
    """The number of labels that count, which the patched forward takes beforehand, says nothing of such a loss."""
    table = importlib.import_module("transformers.loss.loss_utils").LOSS_MAPPING
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
    model = mistral.model(cls=cls, num_hidden_layers=1)
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
    assert not calls and wrapped and report.patches == []
    assert wrapped == {name for name, module in model.named_modules() if "_hf_hook" in vars(module)}
    if scope == "instance":
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        assert all(module.forward.__func__ is type(module).forward for module in model.modules())


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

SIDE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT, VISION = {**SIDE, "vocab_size": 61}, {**SIDE, "image_size": 8, "patch_size": 4}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "model_type": "t5"}
KOSMOS = {"vocab_size": 61, "embed_dim": 16, "layers": 1, "ffn_dim": 24, "attention_heads": 2, "layerdrop": 0.0}


def seen_and_told(decoder):
    """A tiny VisionEncoderDecoderModel and inputs for it."""
    vision = transformers.ViTConfig(**VISION)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([[5, 6, 7], [7, 8, 9]])}
    return transformers.VisionEncoderDecoderModel(config), inputs


def vision_gpt2():
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return seen_and_told(transformers.GPT2Config(**sizes, add_cross_attention=True, is_decoder=True))


def vision_bert():
    return seen_and_told(transformers.BertConfig(**TEXT, add_cross_attention=True, is_decoder=True))


def marian(cls=transformers.MarianMTModel):
    """Its `final_logits_bias` is added to what its head returns."""
    return tiny_model(cls, decoder_start_token_id=0), {"input_ids": torch.randint(3, 60, (2, 6))}


def bart():
    return marian(transformers.BartForConditionalGeneration)


def mbart():
    return marian(transformers.MBartForConditionalGeneration)


def pegasus():
    return marian(transformers.PegasusForConditionalGeneration)


def blip2(name="Blip2", **text):
    options = {"text_config": text, "num_query_tokens": 2, "image_token_index": 60}
    config = getattr(transformers, f"{name}Config")(
        vision_config=VISION, qformer_config={**TEXT, "encoder_hidden_size": 16}, **options
    )
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": torch.tensor([[60, 60, 5, 6, 7]] * 2)}
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), inputs


def blip2_bert():
    return blip2(**TEXT, model_type="bert", is_decoder=True)


def blip2_t5(name="Blip2"):
    model, inputs = blip2(name, **T5, decoder_start_token_id=0)
    return model, {**inputs, "labels": inputs["input_ids"][:, 2:].clone()}


def instruct_blip_t5():
    model, inputs = blip2_t5("InstructBlip")
    return model, {**inputs, "qformer_input_ids": inputs["input_ids"][:, 2:]}


def kosmos(name, vision, **inputs):
    """A tiny Kosmos, whose causal LM is called by the model around it."""
    if not hasattr(transformers, f"{name}ForConditionalGeneration"):
        pytest.skip(f"this transformers has no {name}")
    mask = torch.zeros(2, 9, dtype=torch.int64).index_fill(1, torch.arange(1, 4), 1)
    config = getattr(transformers, f"{name}Config")(text_config=KOSMOS, vision_config=vision, latent_query_num=3)
    inputs |= {"input_ids": torch.randint(3, 60, (2, 9)), "image_embeds_position_mask": mask}
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), inputs


def kosmos2():
    return kosmos("Kosmos2", VISION, pixel_values=torch.randn(2, 3, 8, 8))


def kosmos2_5():
    patches = torch.randn(2, 8, 50)
    patches[:, :, :2] = torch.arange(1, 9).view(1, 8, 1)  # of each patch its row and column
    sizes = {"width": torch.tensor([4, 4]), "height": torch.tensor([2, 2])}
    return kosmos(
        "Kosmos2_5", {**SIDE, "head_dim": 8, "patch_embed_hidden_size": 48}, flattened_patches=patches, **sizes
    )


SCOPES_OF = {
    **dict.fromkeys((vision_gpt2, vision_bert, blip2_t5, instruct_blip_t5, bart, mbart, pegasus), ["live"]),
    **dict.fromkeys((marian, blip2_bert), ["class", "live"]),
    **dict.fromkeys((kosmos2, kosmos2_5), ["live", "text model"]),
}


@pytest.mark.parametrize("made, scope", [(made, scope) for made in SCOPES_OF for scope in SCOPES_OF[made]])
def test_a_head_is_found_wherever_the_model_inside_has_it(made, scope, calls):
    """A class is patched by its default models; one of it may hold another language model, with its head elsewhere."""
    torch.manual_seed(0)
    model, inputs = made()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("final_logits_bias"):
                buffer.normal_()
    reference = copy.deepcopy(model.train())
    if "labels" not in inputs:
        inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][0, 0] = -100
    torch.manual_seed(1)
    expected = reference(**inputs)
    wanted = grads_of(reference, expected.loss)
    target = {"class": type(model), "live": model, "text model": getattr(model, "text_model", None)}[scope]
    with liger_hw.patch(target):
        torch.manual_seed(1)
        found = model(**inputs)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-6)
        assert isinstance(found.logits, torch.Tensor) and found.logits.is_deferred
        inside = "language_model_outputs"
        if inside in expected and expected[inside].logits is expected.logits:
            assert found[inside].logits is found.logits
        assert_same_gradients(grads_of(model, found.loss), wanted, rtol=1e-3)
        torch.testing.assert_close(found.logits + 0, expected.logits, rtol=1e-4, atol=1e-5)
    assert calls["fused"] == 1
