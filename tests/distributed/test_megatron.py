"""Megatron-core's GPTModel with the kernels against itself without, on one rank and on two (needs megatron-core)."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist

from liger_hw.distributed import head_loss
from liger_hw.megatron import (
    LigerMegatronCrossEntropy,
    LigerMegatronRMSNorm,
    LigerMegatronSwiGLU,
    _layer_norm,
    _norm_builder,
    _replace,
    liger_fused_vocab_parallel_cross_entropy,
    liger_vocab_parallel_cross_entropy,
)
from liger_hw.megatron import apply_liger_kernel_to_megatron as apply
from liger_hw.runtime.launch import observing
from liger_hw.transformers.marks import is_ours
from liger_hw.transformers.report import ALREADY, PATCHED, PatchReport

needs_megatron = pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="needs megatron-core: pip install --no-deps megatron-core"
)
CONFIG = SimpleNamespace(normalization="RMSNorm", sequence_parallel=True, layernorm_zero_centered_gamma=True)


def build(device, fused, sequence_parallel=False, shared=False, hook=None):
    """(model, losses, gradients) of a small GPTModel, the same weights for every way to run it.

    shared: the embedding's weight is the output layer's; hook: a forward hook of the output layer
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=fused,
        cross_entropy_fusion_impl="native",
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=shared,
    ).to(device)
    if hook:
        model.output_layer.register_forward_hook(hook)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device), 1)
    positions = torch.arange(16, device=device)[None].expand(2, -1)
    losses = model(tokens, positions, mask, labels=tokens.flip(1))
    losses.mean().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grads[name] = parameter.grad
        if sequence_parallel and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)  # as megatron's finalize_model_grads does for tagged weights
    return model, losses.detach(), grads


def check_gpt_model(rank, device):
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.tensor_parallel import random

    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    if device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # where megatron-core makes its buffers
        random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # for dropout, of which there is none
    else:
        random.model_parallel_cuda_manual_seed(0)
    # Megatron's fused loss rounds the gradient to bf16, so both are compared with the unfused one
    _, losses, grads = build(device, False)
    ran = []
    with apply(rms_norm=True, cross_entropy=True, swiglu=True) as report:
        assert {row.kernel for row in report.patched} == {
            "rms_norm",
            "vocab_parallel_cross_entropy",
            "fused_gate_up_swiglu",
        }
        assert not apply(cross_entropy=True, swiglu=True).patched
        ours = fused_bias_swiglu.SwiGLUFunction.apply
        fused_bias_swiglu.SwiGLUFunction.apply = staticmethod(lambda *args: (ran.append(1), ours(*args))[1])
        for fused in (False, True):
            for sequence_parallel in (False, True)[:world]:
                model, found, found_grads = build(device, fused, sequence_parallel)
                norms = [m for m in model.modules() if isinstance(m, LigerMegatronRMSNorm)]
                assert len(norms) == 5 and ran, "a kernel did not run"
                ran.clear()
                torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
                for name, grad in grads.items():
                    torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert fused_bias_swiglu.SwiGLUFunction.__module__.startswith("megatron")
    check_linear_cross_entropy(device, world)
    parallel_state.destroy_model_parallel()


def check_linear_cross_entropy(device, world):
    """The output layer and the loss in one, also with a weight shared with the embedding; else Megatron's own path."""
    operator = "fused_linear_cross_entropy_tp_fwd" if world > 1 else "fused_linear_cross_entropy_fwd"
    seen = []
    for shared, sequence_parallel, hook in (
        (False, False, None),
        (True, False, None),
        (False, world > 1, None),
        (False, False, lambda layer, given, found: seen.append(type(found[0]))),
    ):
        _, losses, grads = build(device, False, shared=shared)
        calls = ranks.Calls()
        # torch's norm refuses sequence parallelism
        with apply(sequence_parallel, linear_cross_entropy=True) as report, observing(calls, every_thread=True):
            assert {row.part for row in report.patched} == {"linear_cross_entropy", *["rms_norm"] * sequence_parallel}
            assert not apply(sequence_parallel, linear_cross_entropy=True).patched
            model, found, found_grads = build(device, not hook, sequence_parallel, shared, hook)
            assert "forward" not in model.output_layer.__dict__
            with torch.no_grad():  # without labels it gives logits
                tokens = torch.zeros(1, 16, dtype=torch.long, device=device)
                mask = torch.zeros(1, 1, 16, 16, dtype=torch.bool, device=device)
                assert model(tokens, tokens, mask).shape == (1, 16, 64 // world)
        assert calls.names.count(operator) == (0 if hook else 1), calls.names
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert seen and set(seen) == {torch.Tensor}, "a hook of the output layer sees its logits"


@pytest.mark.cpu
@needs_megatron
@pytest.mark.parametrize("world", [1, 2])
def test_gpt_model(world):
    ranks.run(__file__, "check_gpt_model", world=world)


@pytest.mark.multigpu
@needs_megatron
def test_gpt_model_on_two_gpus():
    ranks.run(__file__, "check_gpt_model", ranks.accelerator())


def test_modules_without_megatron(lane):
    x = torch.randn(3, 2, 16, device=lane.device)
    norm = LigerMegatronRMSNorm(CONFIG, 16).to(lane.device)
    assert norm.weight.sequence_parallel and not norm.weight.any()
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-5))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(LigerMegatronSwiGLU()(x), torch.nn.functional.silu(gate) * up)
    target = torch.zeros(3, 2, dtype=torch.long, device=lane.device)
    expected = torch.nn.functional.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    torch.testing.assert_close(LigerMegatronCrossEntropy()(x, target), expected)


def _install(monkeypatch, contents: dict[str, dict]) -> dict[str, ModuleType]:
    """Modules of a megatron-core that has nothing else."""
    modules = {}
    for name, held in contents.items():
        module = modules[name] = ModuleType(f"megatron.core.{name}")
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return modules


def _theirs(*args, **kwargs):
    return "Megatron's"


@pytest.mark.cpu
@pytest.mark.parametrize("fused", [False, True])
def test_without_a_group_a_loss_takes_the_models(fused, monkeypatch):
    """Releases of Megatron-core call their losses without a group, and None would mean a whole vocabulary."""
    held = {"get_tensor_model_parallel_group": lambda check_initialized=True: "the model's group"}
    state = _install(monkeypatch, {"parallel_state": held})["parallel_state"]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(LigerMegatronCrossEntropy, "forward", lambda self, logits, target, tp_group=None: tp_group)
    losses = liger_vocab_parallel_cross_entropy, liger_fused_vocab_parallel_cross_entropy
    loss, logits, target = losses[fused], torch.zeros(2, 1, 4), torch.tensor([[1], [2]])
    assert loss(logits, target) == "the model's group"
    assert loss(logits, target, tp_group="its own") == "its own"
    del state.get_tensor_model_parallel_group
    with pytest.raises(ImportError, match="get_tensor_model_parallel_group"):
        loss(logits, target)


@pytest.fixture
def losses_of_megatron(monkeypatch):
    """Modules of a release that has only Megatron's two losses."""
    contents = {
        "fusions.fused_cross_entropy": {"fused_vocab_parallel_cross_entropy": _theirs},
        "tensor_parallel.cross_entropy": {"vocab_parallel_cross_entropy": _theirs},
        "parallel_state": {},
    }
    fused, unfused, _ = _install(monkeypatch, contents).values()
    return fused, unfused


@pytest.mark.cpu
def test_the_losses_of_a_release_that_has_only_these(losses_of_megatron):
    """The replacements have Liger's names; without parallel groups there is one rank."""
    fused, unfused = losses_of_megatron
    x, target = torch.randn(3, 2, 8), torch.randint(8, (3, 2))
    expected = torch.nn.functional.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    with apply(rms_norm=False, cross_entropy=True):
        for module, name in ((fused, "fused_vocab_parallel_cross_entropy"), (unfused, "vocab_parallel_cross_entropy")):
            function = getattr(module, name)
            assert function.__name__ == f"liger_{name}"
            torch.testing.assert_close(function(x, target), expected)
    assert fused.fused_vocab_parallel_cross_entropy(x, target) == "Megatron's"


@pytest.mark.cpu
def test_a_release_without_a_function_raises(losses_of_megatron):
    """With words that programs written for Liger match."""
    del losses_of_megatron[1].vocab_parallel_cross_entropy
    with pytest.raises(ImportError, match="symbol path may have changed"):
        apply(rms_norm=False, cross_entropy=True)
    with pytest.raises(ImportError, match="requires megatron-core"):
        apply(rms_norm=False, swiglu=True)


@pytest.mark.cpu
@pytest.mark.parametrize("held", [lambda: None, dict], ids=["function", "class"])
def test_a_place_is_replaced_once(held):
    """A function or a class; a second call finds the first replacement."""
    place = ModuleType("place")
    place.name = held
    for replacement in (_norm_builder(held), _layer_norm(held)):
        report = PatchReport("megatron", "megatron-core")
        for state in (PATCHED, ALREADY):
            _replace(report, "part", "kernel", place, "name", replacement)
            assert place.name is replacement and report.rows[-1].state == state
        report.revert()
        assert place.name is held


class ColumnParallelLinear(torch.nn.Module):
    """The attributes of Megatron-core's layer that are read, on one rank."""

    __module__ = "megatron.core.tensor_parallel.layers"

    def __init__(self, **changed):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12, 8))
        self.config = SimpleNamespace(defer_embedding_wgrad_compute=False)
        self.tp_group, self.bias, self.sequence_parallel = None, None, False
        self.gather_output = self.disable_grad_reduce = self.is_expert = False
        for name, value in changed.items():
            setattr(self, name, value)

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_ @ (self.weight if weight is None else weight).T, None


@pytest.fixture
def gpt_model(monkeypatch):
    """A GPTModel with the methods that are replaced, in a release with a linear cross entropy."""

    class LanguageModule(torch.nn.Module):
        def compute_language_model_loss(self, labels, logits):
            rows, target = logits.flatten(0, 1), labels.transpose(0, 1).flatten()
            losses = torch.nn.functional.cross_entropy(rows, target, reduction="none")
            return losses.view(logits.shape[:2]).transpose(0, 1).contiguous()

    class GPTModel(LanguageModule):
        post_process = True

        def __init__(self, read=lambda logits: logits, **changed):
            super().__init__()
            self.output_layer, self.read = ColumnParallelLinear(**changed), read

        def _postprocess(self, hidden_states, labels=None):
            logits, _ = self.output_layer(hidden_states, weight=None, runtime_gather_output=None)
            logits = self.read(logits)
            return logits if labels is None else self.compute_language_model_loss(labels, logits)

    contents = {
        "models.common.language_module.language_module": {"LanguageModule": LanguageModule},
        "models.gpt.gpt_model": {"GPTModel": GPTModel},
        "fusions.fused_linear_cross_entropy": {"linear_cross_entropy": _theirs},
    }
    _install(monkeypatch, contents)
    return GPTModel


@pytest.mark.cpu
@pytest.mark.parametrize(
    "read, changed, fused",
    [
        (lambda logits: logits, {}, 1),
        (lambda logits: logits * 2.0, {}, 0),  # as a release may scale them: they are computed
        (lambda logits: logits.clone(), {}, 0),
        (lambda logits: logits, {"gather_output": True}, 0),
        (lambda logits: logits, {"config": SimpleNamespace(defer_embedding_wgrad_compute=True)}, 0),
    ],
)
def test_logits_that_are_read_are_computed(gpt_model, read, changed, fused):
    model, hidden = gpt_model(read, **changed), torch.randn(5, 2, 8, requires_grad=True)
    labels = torch.randint(12, (2, 5))

    def step():
        loss = model._postprocess(hidden_states=hidden, labels=labels)
        return loss, *torch.autograd.grad(loss.sum(), (hidden, model.output_layer.weight))

    expected, calls = step(), ranks.Calls()
    with apply(rms_norm=False, linear_cross_entropy=True), observing(calls, every_thread=True):
        found, logits = step(), model._postprocess(hidden)
    assert calls.names.count("fused_linear_cross_entropy_fwd") == fused
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits, read(hidden @ model.output_layer.weight.T))
    assert not is_ours(gpt_model._postprocess) and "forward" not in model.output_layer.__dict__


@pytest.mark.cpu
def test_a_linear_cross_entropy_of_megatrons_own_is_replaced(gpt_model):
    fusion = sys.modules["megatron.core.fusions.fused_linear_cross_entropy"]
    x, w, y = torch.randn(2, 3, 8), torch.randn(12, 8), torch.tensor([[0, 5, -100], [11, 2, 3]])
    with apply(rms_norm=False, linear_cross_entropy=True):
        for reduction in ("none", "sum", "mean"):
            found = fusion.linear_cross_entropy(x, w, y, None, reduction=reduction)
            rows = (x @ w.T).flatten(0, 1)
            torch.testing.assert_close(found, torch.nn.functional.cross_entropy(rows, y.flatten(), reduction=reduction))
    assert fusion.linear_cross_entropy(x, w, y) == "Megatron's"
    del gpt_model._postprocess
    with pytest.raises(ImportError, match="needs megatron-core 0.13"):
        apply(rms_norm=False, linear_cross_entropy=True)


@pytest.mark.cpu
def test_a_loss_of_ones_own_on_the_output_layer():
    layer, x = ColumnParallelLinear(), torch.randn(3, 8)
    assert head_loss(layer, x, lambda x, weight, bias: (x @ weight.T).sum()).requires_grad
    layer.tp_group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match="split over ranks.*scaled_cross_entropy_tp"):
        head_loss(layer, x, lambda x, weight, bias: x.sum())
    layer.bias = torch.zeros(12)
    with pytest.raises(ValueError, match="cannot be read; it has a bias"):
        head_loss(layer, x, lambda x, weight, bias: x.sum())


@pytest.fixture
def megatron(monkeypatch):
    """The modules of megatron-core in which norms and SwiGLU are replaced."""

    class Norm:
        """Torch's norm is recognised as an object, not by its name."""

        def __init__(self, config, hidden_size, eps=1e-5):
            self.config = config

    class Provider:
        def layer_norm(self, rms_norm=False, for_qk=False):
            return Norm

    contents = {
        "models.backends": {"LocalSpecProvider": Provider},
        "transformer.torch_norm": {"WrappedTorchNorm": Norm},
        "transformer.transformer_block": {"LayerNormImpl": Norm},
        "fusions.fused_bias_swiglu": {"SwiGLUFunction": type("SwiGLUFunction", (), {})},
    }
    _, _, block, fused = _install(monkeypatch, contents).values()
    return SimpleNamespace(norm=Norm, block=block, fused=fused)


@pytest.mark.cpu
def test_replacements_name_the_original(megatron):
    """As functools.wraps does, for inspect and other patches."""
    original = megatron.fused.SwiGLUFunction
    for _ in range(2):  # the second call changes nothing
        report = apply(swiglu=True)
        assert megatron.block.LayerNormImpl.__wrapped__ is megatron.norm
        assert megatron.fused.SwiGLUFunction.__wrapped__ is original
    rms = SimpleNamespace(normalization="RMSNorm")
    assert isinstance(megatron.block.LayerNormImpl(config=rms, hidden_size=8), LigerMegatronRMSNorm)
    other = SimpleNamespace(normalization="LayerNorm")
    assert isinstance(megatron.block.LayerNormImpl(config=other, hidden_size=8), megatron.norm)
    assert not report.patched


@pytest.mark.cpu
def test_a_norm_that_is_not_torch_s_stays(megatron, monkeypatch):
    class WrappedTorchNorm:
        """Apex's or Transformer Engine's, whatever its name."""

    monkeypatch.setattr(megatron.block, "LayerNormImpl", WrappedTorchNorm)
    apply()
    assert megatron.block.LayerNormImpl is WrappedTorchNorm
    monkeypatch.delitem(sys.modules, "megatron.core.transformer.torch_norm")
    apply()
    assert megatron.block.LayerNormImpl is WrappedTorchNorm


@pytest.mark.cpu
def test_a_fallback_is_logged_once_a_reason(caplog):
    called = []
    swiglu = LigerMegatronSwiGLU(lambda x, *options: called.append(options) or x)
    x, bias = torch.zeros(2, 8), torch.zeros(8)
    for options in ((bias,), (None, True), (None, False, True), (bias, True)) * 2:
        assert swiglu(x, *options) is x
    assert called == [(bias, False, False), (None, True, False), (None, False, True), (bias, True, False)] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(" with ")[2] for line in lines] == ["a bias", "an fp8 store", "offloading"], lines
    swiglu(x)
    assert len(called) == 8


@pytest.mark.cpu
def test_what_is_refused():
    with pytest.raises(ValueError, match="normalization must be RMSNorm"):
        LigerMegatronRMSNorm(SimpleNamespace(normalization="LayerNorm"), 16)
    with pytest.raises(NotImplementedError, match="fallback_impl.*apply_liger_kernel_to_megatron"):
        LigerMegatronSwiGLU()(torch.zeros(2, 8), torch.zeros(8))
