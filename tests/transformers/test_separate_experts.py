"""Experts in a `ModuleList`, as in transformers 4: the loop over them runs as `fused_moe`, or stays with a reason."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

import liger_hw  # noqa: E402
from liger_hw.transformers import probing, verify  # noqa: E402
from liger_hw.transformers.tiny import tiny_model  # noqa: E402

pytestmark = pytest.mark.cpu

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 11, 16, 24, 5, 2


class ExpertMLP(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.one, self.two = nn.Linear(HIDDEN, INNER, bias=bias), nn.Linear(HIDDEN, INNER, bias=bias)
        self.out = nn.Linear(INNER, HIDDEN, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.out(self.act(self.two(x)) * self.one(x))


class Block(nn.Module):
    """A router, a loop over experts and a shared expert in one forward; returns the router's logits too."""

    def __init__(self, skips=True, **options):
        super().__init__()
        self.skips = skips
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([ExpertMLP(**options) for _ in range(EXPERTS)])
        self.shared = ExpertMLP()
        self.top_k, self.jitter = TOP_K, 0.1

    def forward(self, states):
        batch, length, width = states.shape
        rows = states.view(-1, width)
        if self.training:
            rows = rows * torch.empty_like(rows).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = self.router(rows)
        share, chosen = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        total = torch.zeros((batch * length, width), dtype=rows.dtype, device=rows.device)
        hits = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in range(len(self.experts)):
            choice, token = torch.where(hits[number])
            if self.skips and token.shape[0] == 0:
                continue
            own = self.experts[number](rows[None, token].reshape(-1, width)) * share[token, choice, None]
            total.index_add_(0, token, own.to(rows.dtype))
        return (total + self.shared(rows)).reshape(batch, length, width), logits


class Defaults(Block):
    """A forward with an argument whose default stands in its class, where its source is read again without it."""

    chosen = TOP_K

    def forward(self, states, top_k=chosen, *, scale=float(chosen)):
        rows = states.view(-1, states.shape[-1])
        share, chosen = torch.topk(self.router(rows).softmax(-1), top_k, dim=-1)
        share = share * scale
        total = torch.zeros_like(rows)
        hits = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in range(len(self.experts)):
            choice, token = torch.where(hits[number])
            own = self.experts[number](rows[None, token].reshape(-1, rows.shape[-1])) * share[token, choice, None]
            total.index_add_(0, token, own)
        return total.view_as(states)


class Method(nn.Module):
    """The loop in a method of tokens, experts and weights, into which the weights go squared if `power` is 2."""

    def __init__(self, power=1):
        super().__init__()
        self.experts = nn.ModuleList([ExpertMLP() for _ in range(EXPERTS)])
        self.power = power

    def moe(self, rows, chosen, share):
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            if token.numel() > 0:
                total.index_add_(0, token, expert(rows[token]) * share[token, choice, None] ** self.power)
        return total

    def forward(self, states):
        share, chosen = torch.topk(states[..., :EXPERTS].softmax(-1), TOP_K, dim=-1)
        return self.moe(states, chosen, share)


class Branching(Block):
    """A loop that does something else for many tokens, which no probe has."""

    def forward(self, states):
        rows = states.view(-1, states.shape[-1])
        share, chosen = torch.topk(self.router(rows).softmax(-1), self.top_k, dim=-1)
        total = torch.zeros_like(rows)
        hits = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in range(len(self.experts)):
            choice, token = torch.where(hits[number])
            if token.shape[0] > 1000:
                continue
            own = self.experts[number](rows[None, token].reshape(-1, rows.shape[-1])) * share[token, choice, None]
            total.index_add_(0, token, own)
        return total.view_as(states)


def block(cls=Block, **options):
    torch.manual_seed(0)
    return cls(**options)


def states(*leading):
    torch.manual_seed(1)
    return torch.randn(*(leading or (1, TOKENS)), HIDDEN)


def patched(module):
    return liger_hw.patch(module, fused_linear_cross_entropy=False)


def rows_of(report):
    return [row for row in report.rows if row.kernel == "fused_moe"]


def step(module, x):
    """(results, gradients by name) with the same random numbers every time."""
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    torch.manual_seed(2)
    results = module(x * 1.0)
    results = results if isinstance(results, tuple) else (results,)
    sum((t.float() * t.detach().float().cos()).sum() for t in results).backward()
    return results, {"x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def assert_same(found, expected, rtol=1e-4, atol=1e-5):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    for name, theirs in expected[1].items():
        mine = found[1][name]
        assert (mine is None) == (theirs is None), name
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol * float(theirs.abs().max()))


@pytest.mark.parametrize("cls", [Block, Defaults, Method])
def test_the_loop_alone_is_replaced(cls, moe_calls):
    module = block(cls)
    x = states()[0] if cls is Method else states()
    expected, before = step(module, x), verify.forwards(module)
    report = patched(module)
    (row,) = rows_of(report)
    assert (row.state, row.variant) == ("patched", "silu, separate experts"), str(report)
    assert_same(step(module, x), expected)
    assert len(moe_calls) == 1
    report.revert()
    assert verify.forwards(module) == before
    assert_same(step(module, x), expected, 0, 0)
    assert len(moe_calls) == 1


def test_in_eval_mode_and_for_another_batch(moe_calls):
    module = block().eval()
    x = states(3, 4)
    expected = step(module, x)
    patched(module)
    assert_same(step(module, x), expected)
    assert len(moe_calls) == 1


def test_a_call_leaves_the_parameters_where_they_are():
    module = block()
    before = {n: (p, p.data_ptr()) for n, p in module.named_parameters()}
    patched(module)
    step(module, states())
    assert {n: (p, p.data_ptr()) for n, p in module.named_parameters()} == before


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skips", [True, False])
def test_an_expert_without_a_token_has_the_gradient_that_its_loop_leaves(skips, moe_calls):
    """None where the loop skips it, which an optimizer skips too, and zeros where the loop runs it on no row."""
    module = block(skips=skips)
    with torch.no_grad():
        module.router.weight[3:] = -1e3 * module.router.weight[:1].sign()
        module.router.weight[:3] = 1e3 * module.router.weight[:1].sign()
    x = module.router.weight[:1].sign().detach().expand(1, TOKENS, HIDDEN) + 0.01 * states()
    expected = step(module, x)
    assert (expected[1]["experts.4.out.weight"] is None) == skips
    assert any(g is not None and g.any() for name, g in expected[1].items() if name.endswith("out.weight"))
    patched(module)
    assert_same(step(module, x), expected)
    assert len(moe_calls) == 1


@pytest.mark.parametrize("trained", ["none", "one expert", "down alone"])
def test_frozen_experts_get_no_gradient(trained, moe_calls):
    def wanted(name):
        return trained != "none" and name.startswith("1." if trained == "one expert" else ("0.out", "1.out"))

    module = block()
    for name, parameter in module.experts.named_parameters():
        parameter.requires_grad_(wanted(name))
    expected = step(module, states())
    patched(module)
    found = step(module, states())
    assert_same(found, expected)
    assert len(moe_calls) == 1
    for name, parameter in module.experts.named_parameters():
        assert (parameter.grad is not None) == wanted(name), name


def test_gradients_accumulate():
    module = block()
    expected = step(module, states())[1]
    patched(module)
    module.zero_grad(set_to_none=True)
    x = states()
    for _ in range(2):
        torch.manual_seed(2)
        results = module(x)
        sum((t * t.detach().cos()).sum() for t in results).backward()
    for name, parameter in module.named_parameters():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, 2 * expected[name], rtol=1e-4, atol=1e-5 * scale)
    module.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_have_the_same_gradients(reentrant, moe_calls):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant)

    module = Outer()
    expected = step(module, states())
    patched(module)
    assert_same(step(module, states()), expected)
    assert len(moe_calls) == 2


def test_autocast_computes_in_its_dtype(moe_calls):
    module = block().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = step(module, states())
    patched(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(module, states())
    assert len(moe_calls) == 1
    assert all(g is None or g.dtype is torch.float32 for g in found[1].values())
    assert_same(found, expected, 0.06, 0.05)


def test_compiled_in_one_graph(moe_calls):
    torch._dynamo.reset()
    module = block().eval()
    expected = step(module, states())
    patched(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = compiled(states())
    torch.testing.assert_close(results, expected[0], rtol=1e-4, atol=1e-5)
    assert len(moe_calls) == 1  # while it was traced


# -- what is left alone ----------------------------------------------------------------------------------------------


class Adapted(nn.Linear):
    pass


def _hook(module):
    module.experts[2].register_forward_hook(lambda *_: None)


def _hook_on_a_projection(module):
    module.experts[2].out.register_forward_pre_hook(lambda *_: None)


def _adapter(module):
    module.experts[2].out = Adapted(INNER, HIDDEN, bias=False)


def _other_dtype(module):
    module.experts[2].out.bfloat16()


def _shard(module):
    module.experts[2].out.weight.ds_shape = (HIDDEN, INNER)


def _forward(module):
    module.experts[2].forward = lambda x: x


def _other_shape(module):
    for name, shape in (("one", (INNER + 1, HIDDEN)), ("two", (INNER + 1, HIDDEN)), ("out", (HIDDEN, INNER + 1))):
        setattr(module.experts[2], name, nn.Linear(*reversed(shape), bias=False))


def _parametrized(module):
    torch.nn.utils.parametrizations.orthogonal(module.experts[2].out)


IN_THE_WAY = {
    "hook": (_hook, "hooks or a forward of their own are on its experts"),
    "hook on a projection": (_hook_on_a_projection, "hooks or a forward of their own are on its experts' projections"),
    "adapter": (_adapter, "a projection of its experts is a test_separate_experts.Adapted"),
    "shape": (_other_shape, "its experts' weights differ in shape, dtype or device"),
    "dtype": (_other_dtype, "its experts' weights differ in shape, dtype or device"),
    "ZeRO-3": (_shard, "ZeRO-3 shards its experts one by one"),
    "forward": (_forward, "hooks or a forward of their own are on its experts"),
    "parametrization": (_parametrized, "ParametrizedLinear"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_experts_that_are_not_plain_keep_the_loop_with_a_reason(what, moe_calls):
    change, reason = IN_THE_WAY[what]
    module = block()
    change(module)
    (row,) = rows_of(patched(module))
    assert row.state.startswith("left alone: ") and reason in row.state
    if what != "dtype":
        step(module, states())
    assert not moe_calls


def test_hooks_on_every_module_run_in_the_loop(moe_calls):
    module, seen = block(), []
    (row,) = rows_of(patched(module))
    assert row.state == "patched"
    handle = nn.modules.module.register_module_forward_hook(lambda called, *_: seen.append(called))
    try:
        module(states())
        (row,) = rows_of(patched(block()))
    finally:
        handle.remove()
    assert row.state == "left alone: hooks are on every module, so on its experts"
    assert not moe_calls and any(called in seen for called in module.experts)
    module(states())
    assert len(moe_calls) == 1


def test_a_linear_layer_that_computes_something_else_runs_in_the_loop(moe_calls, monkeypatch):
    module = block().eval()
    patched(module)
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * original(self, x))
    torch.testing.assert_close(module(states()), block().eval()(states()))
    assert not moe_calls
    (row,) = rows_of(patched(block()))
    assert row.state == "left alone: the forward of nn.Linear was replaced by something else"


def test_shards_keep_the_loop():
    class DTensor(torch.Tensor):
        pass

    module = block()
    down = module.experts[2].out
    down.weight = nn.Parameter(down.weight.detach().as_subclass(DTensor))
    (row,) = rows_of(patched(module))
    assert row.state == "left alone: its experts' weights are shards: patch the model before FSDP2 wraps it"


def test_a_list_without_some_experts_keeps_the_loop():
    """Expert parallelism of some families leaves those of other ranks out."""
    module = block()
    module.experts[2] = None
    (row,) = rows_of(patched(module))
    assert row.state == "left alone: some of its experts are elsewhere"


@pytest.mark.parametrize("what", [what for what in IN_THE_WAY if what != "dtype"])
def test_experts_that_change_after_the_patch_run_in_the_loop_again(what, moe_calls):
    module = block().eval()
    (row,) = rows_of(patched(module))
    assert row.state == "patched"
    change, _ = IN_THE_WAY[what]
    change(module)
    other = block().eval()
    change(other)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(states()), other(states()), rtol=1e-4, atol=1e-5)
    assert not moe_calls


def test_experts_with_another_activation_than_they_had_run_in_the_loop(moe_calls):
    module = block().eval()
    patched(module)
    module.experts[2].act = nn.GELU()
    plain = block().eval()
    plain.experts[2].act = nn.GELU()
    torch.testing.assert_close(module(states()), plain(states()), rtol=1e-4, atol=1e-5)
    assert not moe_calls


def test_a_class_of_experts_that_changes_after_the_patch_runs_in_the_loop(moe_calls, monkeypatch):
    module = block().eval()
    expected = module(states())[0]
    patched(module)
    torch.testing.assert_close(module(states())[0], expected, rtol=1e-4, atol=1e-5)
    assert len(moe_calls) == 1
    for expert in module.experts:
        del expert.forward  # each is patched as a dense MLP, too
    monkeypatch.setattr(ExpertMLP, "forward", lambda self, x: self.out(self.two(x)))
    assert not torch.allclose(module(states())[0], expected)
    assert len(moe_calls) == 1


def test_experts_that_share_weights(moe_calls):
    module = block()
    module.experts[3].one = module.experts[1].one
    module.experts[4] = module.experts[0]
    expected = step(module, states())
    patched(module)
    assert_same(step(module, states()), expected)
    assert len(moe_calls) == 1


def test_another_formula_is_found_out():
    found = probing.recognise(block(Method, power=2))
    assert isinstance(found, probing.Refused) and "it does not compute what fused_moe does" in found.reason


def test_a_branch_in_the_loop_that_no_probe_takes_is_found_out():
    found = probing.recognise(block(Branching))
    assert isinstance(found, probing.Refused) and "may take another branch" in found.reason


def test_biases_and_odd_experts_are_left_alone():
    found = probing.recognise(block(bias=True))
    assert isinstance(found, probing.Refused) and found.reason == "its experts have biases"
    module = block()
    module.experts[1] = nn.Identity()
    found = probing.recognise(module)
    assert isinstance(found, probing.Refused) and "classes" in found.reason


def test_a_forward_without_source_is_left_alone():
    scope = {}
    exec("def forward(self, states):\n    return self.experts[0](states)", scope)
    cls = type("Made", (Block,), {"forward": scope["forward"]})
    found = probing.recognise(block(cls))
    assert isinstance(found, probing.Refused) and "source" in found.reason


def test_in_eval_mode_without_gradients_the_loop_runs(moe_calls):
    module = block().eval()
    with torch.no_grad():
        expected = module(states())
        patched(module)
        torch.testing.assert_close(module(states()), expected, rtol=0, atol=0)
        assert not moe_calls
        module.train()(states())  # as under reentrant checkpointing
    assert len(moe_calls) == 1


def test_another_input_dtype_runs_in_the_loop(moe_calls):
    module = block().bfloat16()
    patched(module)
    with pytest.raises(RuntimeError):  # as without a patch
        module(states())
    module(states().bfloat16())
    assert len(moe_calls) == 1


def test_copies_and_pickles(moe_calls):
    module = block().eval()
    expected = module(states())
    patched(module)
    for each, count in ((copy.deepcopy(module), 1), (pickle.loads(pickle.dumps(module)), 0)):
        moe_calls.clear()
        torch.testing.assert_close(each(states()), expected, rtol=1e-4, atol=1e-5)
        assert len(moe_calls) == count


def test_the_keyword_experts():
    assert not rows_of(liger_hw.patch(block(), experts=False, fused_linear_cross_entropy=False))


# -- transformers 4 --------------------------------------------------------------------------------------------------

FAMILIES = {
    "MixtralForCausalLM": 4,
    "MiniMaxForCausalLM": 4,
    "PhimoeForCausalLM": 4,
    "Qwen2MoeForCausalLM": 4,
    "Qwen3MoeForCausalLM": 4,
    "Qwen3NextForCausalLM": 4,
    "OlmoeForCausalLM": 4,
    "FlexOlmoForCausalLM": 4,
    "JambaForCausalLM": 2,
    "Ernie4_5_MoeForCausalLM": 3,
    "HunYuanMoEV1ForCausalLM": 4,
    "DeepseekV2ForCausalLM": 3,
    "DeepseekV3ForCausalLM": 3,
    "Dots1ForCausalLM": 3,
    "Glm4MoeForCausalLM": 3,
    "Glm4vMoeForConditionalGeneration": 3,
}
"""Class -> layers with experts in its tiny model."""
needs_4 = pytest.mark.skipif(
    not transformers.__version__.startswith("4."), reason="transformers 5 has batched experts; lane transformers4"
)


@needs_4
@pytest.mark.parametrize("scope", ["model", "class"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_transformers_4(name, scope):
    if name == "JambaForCausalLM":
        pytest.skip("its tiny model needs use_mamba_kernels=False: test_jamba")
    row = verify.check_step(name, name, classes=scope == "class")
    assert row.outcome == verify.VERIFIED, row.reason
    assert row.calls["fused_moe"] == FAMILIES[name], row.left


@needs_4
def test_jamba():
    model = tiny_model(transformers.JambaForCausalLM, use_mamba_kernels=False)
    ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))

    def loss():
        return model(input_ids=ids, labels=ids).loss

    expected, wanted = verify.step(model, loss, 0)
    with verify.counted() as counts, liger_hw.patch(model):
        found, gradients = verify.step(model, loss, 0)
    assert counts["fused_moe"] == FAMILIES["JambaForCausalLM"]
    torch.testing.assert_close(found, expected)
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4 * scale)


@needs_4
def test_the_experts_of_qwen3_omni():
    """Its tiny model cannot be built alone; its blocks can."""
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

    from liger_hw.transformers.tiny import tiny_config

    talker = {"shared_expert_intermediate_size": 32}
    for cls, config, own in (
        (omni.Qwen3OmniMoeThinkerTextSparseMoeBlock, omni.Qwen3OmniMoeTextConfig, {}),
        (omni.Qwen3OmniMoeTalkerTextSparseMoeBlock, omni.Qwen3OmniMoeTalkerTextConfig, talker),
    ):
        module = cls(tiny_config(config, **own))
        x = torch.randn(1, TOKENS, module.gate.in_features)
        expected = step(module, x)
        (row,) = rows_of(patched(module))
        assert row.state == "patched", row.state
        assert_same(step(module, x), expected)


@needs_4
def test_experts_without_weights_are_left_alone():
    row = verify.check_step("longcat_flash", "LongcatFlashForCausalLM")
    assert row.outcome == verify.VERIFIED and "fused_moe" not in row.calls
    assert any("several classes" in reason for reason in row.left)


@needs_4
def test_lora_on_the_experts_keeps_the_loop():
    peft = pytest.importorskip("peft")
    model = tiny_model(transformers.MixtralForCausalLM)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["w1", "w2"]))
    report = liger_hw.patch(wrapped)
    (row, *_) = rows_of(report)
    assert "a projection of its experts is a peft." in row.state
    ids = torch.tensor([[5, 6, 7, 8]])
    with verify.counted() as counts:
        wrapped(input_ids=ids, labels=ids).loss.backward()
    assert not counts["fused_moe"]


@needs_4
@pytest.mark.parametrize(
    ("name", "experts"),
    [("GptOssForCausalLM", "GptOssExperts"), ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextExperts")],
)
def test_routing_weights_of_every_expert_are_said_plainly(name, experts):
    """It said "Class values must be smaller than num_classes", from inside the model's own one_hot."""
    report = patched(tiny_model(getattr(transformers, name)))
    rows = [row for row in report.rows if row.where.startswith(experts) and row.kernel == "fused_moe"]
    assert rows
    for row in rows:
        assert "its routing weights are [tokens, experts], as transformers 4 has them" in row.state, str(report)
