"""Patched models inside what training code wraps around them: PEFT, autocast, FSDP2, DDP, accelerate, hooks."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parametrize

import liger_hw
from liger_hw.transformers import loss as loss_module
from liger_hw.transformers.tiny import tiny_model


def with_lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped.train()


@pytest.mark.parametrize("patch_after", [False, True])
def test_lora_on_attention_keeps_the_fused_loss(family, batch, calls, same_step, patch_after):
    model = family.model()
    if not patch_after:
        family.apply(model=model)
    wrapped = with_lora(model, target_modules=["q_proj", "gate_proj"])
    reference = with_lora(family.model(), target_modules=["q_proj", "gate_proj"])
    if patch_after:
        assert len(family.apply(model=wrapped).patched) == 10
    same_step(wrapped, reference, **batch)
    assert calls["fused"] == 1


@pytest.mark.parametrize("patch_after", [False, True])
def test_lora_on_the_head_trains_it_and_says_so(family, batch, calls, same_step, caplog, patch_after):
    model = family.model()
    if not patch_after:
        family.apply(model=model)
    wrapped = with_lora(model, target_modules=["q_proj", "lm_head"])
    reference = with_lora(family.model(), target_modules=["q_proj", "lm_head"])
    if patch_after:
        family.apply(model=wrapped)
    with caplog.at_level(logging.WARNING, "liger_hw"):
        outputs = same_step(wrapped, reference, **batch)
        wrapped(**batch)
    trained = {name for name, p in wrapped.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("lm_head.lora_A" in name for name in trained) and any("lm_head.lora_B" in name for name in trained)
    assert calls["fused"] == 0 and type(outputs.logits) is torch.Tensor
    assert caplog.text.count("it has an adapter") == 1 and "modules_to_save=['lm_head']" in caplog.text


def test_the_head_in_modules_to_save_is_trained_by_the_fused_loss(family, batch, calls, same_step):
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    wrapped, reference = with_lora(family.model(), **options), with_lora(family.model(), **options)
    family.apply(model=wrapped)
    head = wrapped.get_base_model().lm_head
    with torch.no_grad():
        for each in (head, reference.get_base_model().lm_head):
            each.modules_to_save["default"].weight.mul_(1.5)
    same_step(wrapped, reference, **batch)
    assert calls["fused"] == 1
    assert head.modules_to_save["default"].weight.grad.any() and head.original_module.weight.grad is None
    with wrapped.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(wrapped(**batch).loss, reference(**batch).loss, rtol=1e-4, atol=1e-6)


class _Counted(torch.nn.Module):
    """Counts how often the weight of its name is computed."""

    def __init__(self, name, computed):
        super().__init__()
        self.name, self.computed = name, computed

    def forward(self, weight):
        self.computed.append(self.name)
        return weight


@pytest.mark.parametrize("name", ["Llama", "Phi3", "Nemotron", "Qwen3Moe", "T5Gemma"])
def test_patching_computes_no_weight_that_a_parametrization_makes(name):
    """Spectral norm in training mode takes a step of its iteration at each computation."""
    kind, version = ("ForConditionalGeneration", "5") if name == "T5Gemma" else ("ForCausalLM", "4")  # 4's is not small
    transformers = pytest.importorskip("transformers", minversion=version)
    model, computed = tiny_model(getattr(transformers, name + kind)), []
    for path, module in list(model.named_modules()):
        for parameter in [n for n, p in module._parameters.items() if p is not None]:
            parametrize.register_parametrization(module, parameter, _Counted(f"{path}.{parameter}", computed))
    computed.clear()
    report = liger_hw.patch(model)
    assert len(report.patched) > 4 and not computed


@pytest.mark.parametrize("patch_after", [False, True])
def test_a_program_s_accelerate_hook_runs_on_every_part(mistral, batch, patch_after):
    """accelerate puts it in the place of the forward, as it does those that move weights."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Larger(hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 1.1 if isinstance(output, torch.Tensor) else output

    for path, _ in mistral.model(num_hidden_layers=1).named_modules():
        losses = []
        for is_patched in (False, True):
            model = mistral.model(num_hidden_layers=1)
            if is_patched and not patch_after:
                mistral.apply(model=model)
            hooks.add_hook_to_module(model.get_submodule(path), Larger())
            if is_patched and patch_after:
                mistral.apply(model=model)
            losses.append(model(**batch).loss)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


def test_autocast(family, batch, calls, same_step):
    model, reference = family.model(), family.model()
    family.apply(model=model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = same_step(model, reference, **batch, rtol=0.05, atol=0.02)
    assert outputs.loss.dtype == torch.float32 and calls["fused"] == 1
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_bfloat16_weights(family, batch, calls, same_step):
    model, reference = family.model().bfloat16(), family.model().bfloat16()
    family.apply(model=model)
    outputs = same_step(model, reference, **batch, rtol=0.06, atol=0.03)
    assert outputs.loss.dtype == torch.float32 and calls["fused"] == 1


def test_distributed_data_parallel(family, batch, calls, same_step, one_rank):
    model, reference = family.model(), family.model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert len(family.apply(model=wrapped).patched) == 10
    same_step(wrapped, torch.nn.parallel.DistributedDataParallel(reference), **batch)
    assert calls["fused"] == 1


@pytest.mark.parametrize("head_alone", [False, True])
@pytest.mark.parametrize("patch_after", [False, True])
def test_fsdp2(family, batch, calls, one_rank, head_alone, patch_after):
    from torch.distributed.fsdp import fully_shard

    reference = family.model()
    expected = reference(**batch)
    expected.loss.backward()
    model = copy.deepcopy(reference)
    model.zero_grad()
    if not patch_after:
        family.apply(model=model)
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head_alone:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if patch_after:
        family.apply(model=model)
    for _ in range(2):
        model.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-4, atol=1e-6)
    assert calls["fused"] == 2
    assert outputs.logits is None if head_alone else outputs.logits.is_deferred, "no rank gathers a weight alone"
    for found, wanted in zip(model.parameters(), reference.parameters()):
        assert type(found).__name__ == "DTensor"
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=2e-4, atol=2e-6)


def test_fsdp2_around_its_hooks_raises_with_what_to_do(family, one_rank):
    from torch.distributed.fsdp import fully_shard

    model = family.model()
    family.apply(model=model, rope=False, rms_norm=False, swiglu=False)
    fully_shard(model.lm_head, mesh=dist.init_device_mesh("cpu", (1,)))
    stand_in = loss_module.OutputHead(model.lm_head, True)
    model.lm_head._forward_hooks.clear(), model.lm_head._forward_pre_hooks.clear()
    rows = stand_in(torch.randn(4, 32)).view(-1, model.config.vocab_size)
    with pytest.raises(RuntimeError, match=r"is a shard \(DTensor .*Call the wrapped model itself"):
        torch.nn.functional.cross_entropy(rows, torch.tensor([1, 2, 3, 4]))


@pytest.mark.parametrize("patch_after", [False, True])
def test_accelerate_placement_hooks(family, batch, calls, same_step, patch_after):
    hooks = pytest.importorskip("accelerate.hooks")
    model = family.model()
    if not patch_after:
        family.apply(model=model)
    for module in model.modules():
        if not list(module.children()):
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    if patch_after:
        assert len(family.apply(model=model).patched) == 10
    same_step(model, family.model(), **batch)
    assert calls["fused"] == 1
    hooks.remove_hook_from_module(model, recurse=True)
    same_step(model, family.model(), **batch)
    assert calls["fused"] == 2


def test_a_hook_on_the_head_sees_its_logits(family, batch, calls, same_step, caplog):
    model, reference = family.model(), family.model()
    family.apply(model=model)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits) or logits * 0.5)
    reference.lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5)
    with caplog.at_level(logging.WARNING, "liger_hw"):
        same_step(model, reference, **batch)
    assert len(seen) == 1 and type(seen[0]) is torch.Tensor
    assert calls == {"fused": 0, "plain": 1} and "its hooks need its logits" in caplog.text


def test_a_head_that_is_no_linear(family, batch, calls, same_step, caplog):
    class Scaled(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x) * 0.5

    model, reference = family.model(), family.model()
    for each in (model, reference):
        each.lm_head = Scaled(each.lm_head)
    family.apply(model=model)
    with caplog.at_level(logging.WARNING, "liger_hw"):
        same_step(model, reference, **batch)
    assert calls["fused"] == 0 and "it is a Scaled, not an nn.Linear" in caplog.text


def test_a_forward_replaced_by_a_function_is_left_alone(family, batch):
    """As transformers' pipeline parallelism does: `model.forward` is no method of the model."""
    model = family.model()
    expected = model(**batch).loss
    for module in (model, model.model.layers[0].self_attn):
        own = module.forward
        module.forward = lambda *args, own=own, **kwargs: own(*args, **kwargs)
    with family.apply(model=model) as report:
        torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-6)
    kept = {(row.part, row.where) for row in report.rows if "forward was replaced by something else" in row.state}
    attention = type(model.model.layers[0].self_attn).__name__
    assert kept == {("fused_linear_cross_entropy", f"{type(model).__name__}.forward"), ("rope", f"{attention}.forward")}
    assert sum(row.part == "rope" for row in report.patched) == 1, "the other layer's attention"


def test_logits_that_a_pipeline_sends_on_are_there(family, batch):
    model = family.model()
    family.apply(model=model)
    model._pp_forward_wrapped = True  # set by transformers when it cuts a model into stages
    assert model(**batch).logits is not None


def test_a_shard_of_a_norm_is_left_alone(mistral):
    """FSDP1 has flattened its weight, and the wrapper that knows its shape was not given."""
    model = mistral.model()
    for parameter in model.model.norm.parameters():
        parameter.data, parameter._fsdp_flattened = parameter.data[:3], True
    report = mistral.apply(model=model)
    assert any("FSDP1 holds its weight" in row.state for row in report.rows)
    report.revert()
