"""Mixtures of experts: what `fused_moe` takes over, on live models and on classes, and what it leaves alone."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import types
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import liger_hw
import liger_hw.transformers
from liger_hw.kernels.moe import fused_moe
from liger_hw.transformers import experts, probing
from liger_hw.transformers.tiny import tiny_config, tiny_model

interface = pytest.importorskip("transformers.integrations.moe", reason="transformers 4 has no batched experts")


TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 13, 16, 24, 4, 2
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER}


def patched(module):
    return liger_hw.patch(module, fused_linear_cross_entropy=False)


def of(family, name, implementation="grouped_mm", **sizes):
    """One experts module of a family, alone, with random weights."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    cls = getattr(modeling, name)
    short = name.removesuffix("Experts").removesuffix("Text")
    config_class = getattr(modeling, f"{short}TextConfig", None) or getattr(modeling, f"{short}Config")
    known = {k: v for k, v in {**SIZES, **sizes}.items() if k not in SIZES or hasattr(config_class(), k)}
    config = tiny_config(config_class, **known)
    config._experts_implementation_internal = implementation
    torch.manual_seed(0)
    module = cls(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def needs_a_choice_of_experts(module):
    """transformers 5.17 gives Aria's none."""
    if len(inspect.signature(module.forward).parameters) != 3:
        pytest.skip(f"this transformers' {type(module).__name__} is not given a choice of experts")


def inputs(module, seed=1, dtype=torch.float32, experts=EXPERTS):
    source = torch.Generator().manual_seed(seed)
    hidden = next(p for n, p in module.named_parameters() if "up_proj" in n)
    hidden = hidden.shape[1 if getattr(module, "is_transposed", False) else 2]
    x = torch.randn(TOKENS, hidden, generator=source).to(dtype).requires_grad_()
    index = torch.stack([torch.randperm(experts, generator=source)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K, generator=source).requires_grad_()
    return x, index, weights


def step(module, x, index, weights):
    """(result, gradients of x, the weights and every parameter)"""
    return step_of(module, module, x, index, weights)


def step_of(function, module, x, index, weights):
    """The same of a function that stands for a module."""
    leaves = [x, weights, *(p for p in module.parameters() if p.requires_grad)]
    result = function(x, index, weights)
    direction = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result).cos()
    return result, torch.autograd.grad((result.float() * direction).sum(), leaves)


def assert_same(found, expected, rtol=1e-4, atol=1e-5):
    for mine, theirs in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        scale = float(theirs.detach().abs().max()) or 1.0
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol * scale)


KINDS = {
    "mixtral": ("MixtralExperts", "silu"),
    "gpt_oss": ("GptOssExperts", "silu, alpha 1.702, limit 7, up_offset 1, interleaved, transposed, biases"),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterExperts",
        "silu, alpha 1.702, limit 7, up_offset 1, transposed, biases",
    ),
    "minimax_m3_vl": ("MiniMaxM3VLExperts", "silu, alpha 1.702, limit 7, up_offset 1"),
    "deepseek_v4": ("DeepseekV4Experts", "silu, limit 10"),
    "aria": ("AriaExperts", "silu, transposed"),
    "nemotron_h": ("NemotronHExperts", "relu2, no gate"),
    "gemma4": ("Gemma4TextExperts", "gelu_tanh"),
}
"""Every kind of experts that transformers has and the op computes: class, and the options that are found."""


def _linear_of_another(input, weight, bias=None):
    """In the place of torch's, as DeepSpeed's ZeRO-3 puts one of its own while it is in use."""
    y = input @ weight.mT
    return y if bias is None else y + bias


@pytest.mark.parametrize("linear", [torch.nn.functional.linear, _linear_of_another])
@pytest.mark.parametrize("family", KINDS)
def test_every_kind_of_experts_is_known_by_what_it_computes(family, linear, monkeypatch, moe_calls):
    name, words = KINDS[family]
    module = of(family, name)
    needs_a_choice_of_experts(module)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    arguments = inputs(module)
    expected = step(module, *arguments)
    report = patched(module)
    assert [(row.kernel, row.variant) for row in report.patched] == [("fused_moe", words)], str(report)
    assert_same(step(module, *arguments), expected)
    assert len(moe_calls) == 1
    report.revert()
    assert "forward" not in vars(module)
    step(module, *arguments)
    assert len(moe_calls) == 1


LEFT = {
    "muse_spark": ("MuseSparkExperts", "it has a norm after each expert"),
    "inkling2": ("Inkling2Experts", "its activation is not one of the kernel's"),
    "llama4": ("Llama4TextExperts", "it takes hidden_states, not tokens, experts and weights"),
    "longcat_flash": ("LongcatFlashExperts", "its projections have shapes"),
    "switch_transformers": ("SwitchTransformersExperts", "its experts are not two batched parameters"),
}


@pytest.mark.parametrize("family", LEFT)
def test_what_the_op_cannot_express_is_left_alone_with_a_reason(family, moe_calls):
    name, reason = LEFT[family]
    module = of(family, name)
    report = patched(module)
    (row,) = [row for row in report.rows if row.where.startswith(name)]
    assert reason in row.state + row.variant, str(report)
    assert "forward" not in vars(module) and not moe_calls


def test_a_clamp_after_the_activation_is_another_formula():
    """Step 3.7 clamps silu's result, DeepSeek V4 its input: they differ beyond the limit only."""
    module = of("step3p7", "Step3p7Experts", num_local_experts=EXPERTS)
    assert isinstance(probing.recognise(module), probing.Match)  # it has no limit of its own
    module.limit = 7.0
    assert isinstance(probing.recognise(module), probing.Refused)


def _all_experts(module, gated, x, index, weights):
    """The forward of experts that multiply every token by every expert."""
    rows = torch.einsum("th,eoh->teo", x, module.gate_up_proj)
    rows = torch.einsum("tei,ehi->teh", gated(rows), module.down_proj)
    return (rows * torch.zeros_like(rows[..., 0]).scatter_add(1, index, weights).unsqueeze(-1)).sum(1)


def _limited(by, limit):
    """Experts like Mixtral's whose gate has a limit that is no attribute of theirs."""

    class Limited(type(of("mixtral", "MixtralExperts"))):
        def gate(self, gate_up):
            gate, up = gate_up.chunk(2, -1)
            return self.act_fn(gate.clamp(max=limit)) * up

        def forward(self, hidden_states, top_k_index, top_k_weights):
            if by == "_apply_gate":
                return super().forward(hidden_states, top_k_index, top_k_weights)
            return _all_experts(self, self.gate, hidden_states, top_k_index, top_k_weights)

    Limited._apply_gate = Limited.gate
    module = of("mixtral", "MixtralExperts")
    module.__class__ = Limited
    return module


@pytest.mark.parametrize("limit", [20.0, 3000.0])
@pytest.mark.parametrize("by", ["_apply_gate", "loop"])
def test_a_limit_that_stands_in_the_code_is_met(by, limit):
    """The op has no such limit."""
    report = patched(_limited(by, limit))
    assert not report.patched, str(report)


class Swish(torch.nn.Module):
    """silu, while its number is 1; which is trained."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.slope * x)


def test_an_activation_with_a_parameter_keeps_its_gradient(moe_calls):
    module = of("mixtral", "MixtralExperts")
    module.act_fn = Swish()
    arguments = inputs(module)
    expected = step(module, *arguments)
    (row,) = patched(module).rows
    assert row.state == "left alone: its act_fn has parameters of its own"
    assert_same(step(module, *arguments), expected)
    assert not moe_calls


class Branching(torch.nn.Module):
    """Experts that compute something else in eval mode, for many tokens or for one, as `where` says."""

    def __init__(self, where=""):
        super().__init__()
        self.where, self.num_experts = where, EXPERTS
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.3)
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.3)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert].T).chunk(2, -1)
            rows = (torch.nn.functional.silu(gate) * up) @ self.down_proj[expert].T
            total.index_add_(0, token, rows * top_k_weights[token, choice, None])
        if self.where == "eval" and not self.training:
            return total * 2
        if self.where == "one":
            if len(hidden_states) == 1:
                return total * 2
        if self.where == "many":
            if len(hidden_states) > 100:
                return total * 2
        return total


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("", ""),
        ("eval", "it computes something else in eval mode"),
        ("one", "it computes something else for one token"),
        ("many", "may take another branch"),
    ],
)
def test_experts_that_branch_where_no_probe_goes_are_left_alone(where, reason, moe_calls):
    torch.manual_seed(0)
    module = Branching(where)
    (row,) = patched(module).rows
    assert row.state.endswith(reason) and (row.state == "patched") == (not where), row.state
    for n_tokens, training in ((5, False), (1, True), (101, True)):
        x, index, weights = torch.randn(n_tokens, HIDDEN), torch.zeros(n_tokens, 1).long(), torch.rand(n_tokens, 1)
        found = module.train(training)(x, index, weights)
        torch.testing.assert_close(found, Branching.forward(module, x, index, weights), rtol=1e-4, atol=1e-5)
    assert len(moe_calls) == (0 if where else 3)


def _tanh_gate(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate.tanh() * up


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["module", "class", "subclass"])
@pytest.mark.parametrize("scope", ["patch", "name"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_another_gate_runs(family, scope, where, when, monkeypatch, moe_calls):
    """transformers' products call `_apply_gate`, which Qwen's own loop, whose names are guarded, does not."""
    module = of(family, {"qwen3_moe": "Qwen3MoeExperts", "gpt_oss": "GptOssExperts"}[family])
    holder, arguments, cls = torch.nn.ModuleList([module]), inputs(module), type(module)

    def replace_gate():
        if where == "module":
            module._apply_gate = types.MethodType(_tanh_gate, module)
        elif where == "class":
            monkeypatch.setattr(cls, "_apply_gate", _tanh_gate)
        else:
            module.__class__ = type("Own", (cls,), {"_apply_gate": _tanh_gate})

    if when == "before":
        replace_gate()
    if scope == "patch":
        patched(holder)
    else:
        liger_hw.transformers.register_experts()
        module.config._experts_implementation_internal = "liger_hw"
    module(*arguments)
    assert bool(moe_calls) == (when == "after")
    moe_calls.clear()
    replace_gate()
    found = step(module, *arguments)
    module.config._experts_implementation_internal = "batched_mm"
    assert_same(found, step(module, *arguments))
    assert not moe_calls


def test_a_gate_of_one_module_s_own_is_its_own():
    """The others of its class are patched, and the report says why it is not."""
    modules = torch.nn.ModuleList([of("qwen3_moe", "Qwen3MoeExperts") for _ in range(3)])
    modules[1]._apply_gate = types.MethodType(_tanh_gate, modules[1])
    states = [row.state for row in patched(modules).rows if row.kernel == "fused_moe"]
    assert states == ["patched", "left alone: its _apply_gate was replaced by something else", "patched"]


def test_a_subclass_with_a_gate_of_its_own_under_a_class_patch(moe_calls):
    with liger_hw.transformers.apply_liger_kernel_to_qwen3_moe(rope=False, rms_norm=False):
        module = of("qwen3_moe", "Qwen3MoeExperts", "liger_hw")
        arguments = inputs(module)
        module(*arguments)
        assert len(moe_calls) == 1
        module.__class__ = type("Own", (type(module),), {"_apply_gate": _tanh_gate})
        found = step(module, *arguments)
    assert_same(found, step(module, *arguments))
    assert len(moe_calls) == 1


# -- live models and classes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["model", "class", "name"])
def test_a_model_s_step(scope, moe_calls):
    model = tiny_model(transformers.Qwen3MoeForCausalLM)
    expected = model(IDS, labels=IDS, output_router_logits=True)
    expected.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    if scope == "name":
        assert liger_hw.transformers.register_experts()
        model.set_experts_implementation("liger_hw")
    else:
        own = {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}
        target = model if scope == "model" else None
        report = liger_hw.transformers.apply_liger_kernel_to_qwen3_moe(model=target, **own)
        if scope == "class":  # which chooses for models that are made after it
            weights = model.state_dict()
            model = tiny_model(transformers.Qwen3MoeForCausalLM)
            model.load_state_dict(weights)
    try:
        found = model(IDS, labels=IDS, output_router_logits=True)
        found.loss.backward()
    finally:
        if scope != "name":
            report.revert()
    assert len(moe_calls) == model.config.num_hidden_layers
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    for name, parameter in model.named_parameters():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4 * scale)
    made = len(moe_calls)
    model.set_experts_implementation("grouped_mm")
    model(IDS)
    assert len(moe_calls) == made


def test_experts_follow_the_keyword_of_mlps_by_default():
    apply = liger_hw.transformers.apply_liger_kernel_to_mixtral
    others = {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}
    for options, wanted in (
        ({}, ["experts"]),
        ({"swiglu": False}, []),
        ({"swiglu": False, "experts": True}, ["experts"]),
        ({"experts": False}, []),
    ):
        with apply(**others, **options) as report:
            assert [row.part for row in report.patched] == wanted, options
    with liger_hw.transformers.apply_liger_kernel_to_gpt_oss(**others) as report:  # Liger's default there: swiglu=False
        assert [row.part for row in report.patched] == ["experts"]


def test_a_class_patch_holds_for_models_of_any_dtype(moe_calls):
    """transformers notes the dtype in the configuration, and experts name `dtype`, of their tensors."""
    with liger_hw.transformers.apply_liger_kernel_to_qwen3_moe(rope=False, rms_norm=False):
        model = tiny_model(transformers.Qwen3MoeForCausalLM, num_hidden_layers=1)
        model.config.dtype = torch.float32
        model(torch.tensor([[5, 6, 7]]))
    assert len(moe_calls) == 1


def test_a_custom_experts_implementation_stays():
    found = probing.recognise(of("mixtral", "MixtralExperts", "sonicmoe"))
    assert isinstance(found, probing.Refused) and "experts_implementation='sonicmoe' was asked for" in found.reason


def test_a_revert_leaves_the_choice_of_a_later_patch():
    config = tiny_config(transformers.MixtralConfig)
    first, second = (transformers.MixtralForCausalLM(config) for _ in range(2))
    report = liger_hw.patch(first)
    second.set_experts_implementation("eager")
    later = liger_hw.patch(second)
    report.revert()
    assert config._experts_implementation == "liger_hw"
    later.revert()
    assert config._experts_implementation == "eager"


def test_copies_and_pickles(moe_calls):
    model = tiny_model(transformers.MixtralForCausalLM).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids, labels=ids).loss
    report = liger_hw.patch(model)
    assert "liger_hw" not in str(model.config.to_dict())
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(loaded.config._experts_implementation) is str and loaded.config._experts_implementation == "grouped_mm"
    for each, kernels in ((model, 4), (copied, 4), (loaded, 0)):
        moe_calls.clear()
        torch.testing.assert_close(each(ids, labels=ids).loss, expected)
        assert len(moe_calls) == kernels
    assert {row.part for row in liger_hw.patch(loaded).patched} == {row.part for row in report.patched}
    liger_hw.transformers.revert(copied)
    moe_calls.clear()
    copied(ids)
    assert not moe_calls and copied.config._experts_implementation == "grouped_mm"


def test_by_name_what_the_op_cannot_express_runs_as_transformers_has_it(moe_calls, caplog):
    experts._log_once.cache_clear()
    liger_hw.transformers.register_experts()
    module = of("inkling2", "Inkling2Experts")
    arguments = inputs(module)
    expected = step(module, *arguments)
    module.config._experts_implementation_internal = "liger_hw"
    with caplog.at_level(logging.WARNING, "liger_hw"):
        assert_same(step(module, *arguments), expected, 0, 0)
        module(*arguments)
    assert not moe_calls and caplog.text.count("Inkling2Experts runs by grouped_mm: its activation is not one") == 1


# -- what training code does with experts ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_autocast_computes_in_its_dtype(family, monkeypatch):
    """The Function under the public function gets x, both projections and the biases, if any, in autocast's dtype."""
    taken, original = [], fused_moe.FusedMoEFunction.apply
    monkeypatch.setattr(fused_moe.FusedMoEFunction, "apply", lambda *args: taken.append(args) or original(*args))
    module = of(family, KINDS[family][0])
    x, index, weights = inputs(module)
    expected = step(module, x, index, weights)
    patched(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(module, x, index, weights)
    ((x_taken, up, down, _, routing_weights, *biases),) = (args[:7] for args in taken)
    assert {t.dtype for t in (x_taken, up, down, *biases) if t is not None} == {torch.bfloat16}
    assert routing_weights.dtype is torch.float32
    assert found[0].dtype == x.dtype and all(g.dtype == torch.float32 for g in found[1])
    assert_same(found, expected, 0.06, 0.03)


def test_other_inputs_than_the_weights_are_cast_as_transformers_casts(moe_calls):
    module = of("mixtral", "MixtralExperts")
    x, index, weights = inputs(module, dtype=torch.bfloat16)
    expected = module(x, index, weights)
    patched(module)
    found = module(x, index, weights)
    assert len(moe_calls) == 1 and found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


def test_frozen_experts_get_no_gradient(moe_calls):
    module = of("gpt_oss", "GptOssExperts")
    x, index, weights = inputs(module)
    module.requires_grad_(False)
    expected = step(module, x, index, weights)
    patched(module)
    assert_same(step(module, x, index, weights), expected)
    module(x, index, weights).sum().backward()
    assert len(moe_calls) == 2 and all(p.grad is None for p in module.parameters())


def test_lora_on_expert_parameters(moe_calls):
    """PEFT gives the module a class of its own while it runs, whose parameters are computed."""
    peft = pytest.importorskip("peft")

    def adapted(patch_first):
        model = tiny_model(transformers.MixtralForCausalLM)
        if patch_first:
            liger_hw.patch(model, fused_linear_cross_entropy=False)
        torch.manual_seed(3)
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=parameters))
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        return wrapped

    def stepped(model):
        loss = model(input_ids=IDS, labels=IDS).loss
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        return loss, dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))

    liger_hw.transformers.register_experts()
    reference, before, after, named = adapted(False), adapted(True), adapted(False), adapted(False)
    liger_hw.patch(after)
    named.get_base_model().set_experts_implementation("liger_hw")
    loss, gradients = stepped(reference)
    assert not moe_calls and len(gradients) == 16
    for model in (before, after, named):
        moe_calls.clear()
        for _ in range(2):  # each forward has a class of its own
            found, mine = stepped(model)
        assert len(moe_calls) == 8
        torch.testing.assert_close(found, loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_sentinels_and_the_one_row_of_an_empty_rank(moe_calls):
    """Expert parallelism gives a rank its share of the experts, and marks the others' tokens."""
    module = of("qwen3_moe", "Qwen3MoeExperts")
    x, index, weights = inputs(module, experts=EXPERTS)
    half = EXPERTS // 2
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(parameter[:half].detach().clone()))
    module.num_experts, module._is_expert_parallel = half, True
    away = index >= half
    local, masked = torch.where(away, half, index), weights.masked_fill(away, 0.0)
    expected = step(module, x, local, weights), module(x[:1], local[:1, :1] * 0, torch.ones(1, 1))[:0]
    masked_expected = module(x, local, masked)
    patched(module)
    assert_same(step(module, x, local, weights), expected[0])
    torch.testing.assert_close(module(x, local, masked), masked_expected)
    empty = module(x[:0].sum(dim=0, keepdim=True), index.new_zeros(1, 1), weights.new_ones(1, 1))[:0]
    assert empty.shape == expected[1].shape and empty.grad_fn is not None
    (gradient,) = torch.autograd.grad(empty.sum(), module.gate_up_proj)
    assert not gradient.any() and len(moe_calls) == 3


@pytest.mark.parametrize("scope", ["model", pytest.param("name", marks=pytest.mark.full)])
def test_compiled_in_one_graph(scope, moe_calls):
    torch._dynamo.reset()
    module = of("mixtral", "MixtralExperts")
    arguments = inputs(module)
    expected = step(module, *arguments)
    if scope == "model":
        patched(module)
    else:
        liger_hw.transformers.register_experts()
        module.config._experts_implementation_internal = "liger_hw"
        module(*arguments)  # recognises the experts
    moe_calls.clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    assert_same(step_of(compiled, module, *arguments), expected)
    assert counter.frame_count == 1 and len(moe_calls) == 1  # while it was traced


@pytest.mark.parametrize("level", ["cheap", "mlp", "full", "checkpointing"])
def test_recomputed_layers_have_the_same_gradients(level, moe_calls):
    model = tiny_model(transformers.MixtralForCausalLM)
    liger_hw.patch(model)

    def gradients():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    assert len(moe_calls) == 4
    if level == "checkpointing":
        model.gradient_checkpointing_enable()
        found = gradients()
    else:
        with liger_hw.activations(level, model):
            found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = {"full": 3, "checkpointing": 4}.get(level, 0)  # the dial keeps the last layer
    assert len(moe_calls) == 8 + again


@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_by_their_name_are_recognised_in_a_checkpointed_forward(reentrant, moe_calls):
    """Checkpointing counts what a forward saves; what the probes save there is not computed again."""
    model = tiny_model(transformers.MixtralForCausalLM, num_hidden_layers=1)
    model(IDS, labels=IDS).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    liger_hw.transformers.register_experts()
    model.set_experts_implementation("liger_hw")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(IDS, labels=IDS).loss.backward()
    assert len(moe_calls) == 2
    for name, parameter in model.named_parameters():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("family", KINDS)
def test_in_bfloat16_on_the_device(family, gpu, moe_calls):
    """As far from fp64 as transformers' own products in bf16, which round more often, or nearer."""
    module = of(family, KINDS[family][0], hidden_size=64, intermediate_size=96, moe_intermediate_size=96)
    needs_a_choice_of_experts(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter * 0.5).bfloat16())
    source = torch.Generator().manual_seed(2)
    x = torch.randn(200, 64, generator=source).bfloat16()
    index = torch.stack([torch.randperm(EXPERTS - 1, generator=source)[:TOP_K] for _ in x])  # the last has no token
    weights = torch.rand(200, TOP_K, generator=source).bfloat16()

    def run(there, dtype):
        device = next(there.parameters()).device
        leaves = (x.to(device, dtype).requires_grad_(), index.to(device), weights.to(device, dtype).requires_grad_())
        result, gradients = step(there, *leaves)
        return [t.detach().cpu().double() for t in (result, *gradients)]

    exact = copy.deepcopy(module).double()
    exact.config._experts_implementation_internal = "eager"
    expected = run(exact, torch.float64)
    theirs = run(copy.deepcopy(module).to(gpu, torch.bfloat16), torch.bfloat16)
    ours = copy.deepcopy(module).to(gpu, torch.bfloat16)
    patched(ours)
    mine = run(ours, torch.bfloat16)
    assert len(moe_calls) == 1
    for number, (found, other, wanted) in enumerate(zip(mine, theirs, expected, strict=True)):
        error, allowed = (found - wanted).norm(), (other - wanted).norm()
        assert error <= 1.2 * allowed + 1e-3 * wanted.norm(), f"tensor {number}: {error} against {allowed}"


# -- experts whose forward is another's ------------------------------------------------------------------------------


def test_experts_whose_forward_is_expert_parallelism_s_are_patched_by_their_choice(moe_calls):
    module = of("mixtral", "MixtralExperts")
    x, index, weights = inputs(module)
    expected = step(module, x, index, weights)
    own, module._is_expert_parallel = module.forward, True
    module.forward = lambda *args: own(*args)  # as transformers' install_forward
    holder = torch.nn.ModuleList([module])
    report = patched(holder)
    assert [row.kernel for row in report.patched] == ["fused_moe"], str(report)
    assert_same(step(module, x, index, weights), expected)
    assert len(moe_calls) == 1
    assert [row.state for row in patched(holder).rows] == ["already patched"]
    assert liger_hw.transformers.revert(copy.deepcopy(holder)) == 1
    report.revert()
    module(x, index, weights)
    assert len(moe_calls) == 1 and module.config._experts_implementation == "grouped_mm"


def test_a_replaced_forward_of_experts_is_left_alone():
    module = of("mixtral", "MixtralExperts")
    module.forward = lambda *args: SimpleNamespace()
    (row,) = patched(module).rows
    assert row.state == "left alone: its forward was replaced by something else"
