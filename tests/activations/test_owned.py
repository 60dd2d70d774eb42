"""Gradients of a gated activation written over its inputs: where the caller owns them, and nowhere else."""

from __future__ import annotations

import contextlib

import pytest
import torch
from small_decoder import Decoder, gradients, identical, some_input
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

import liger_hw
from liger_hw.kernels.pointwise import swiglu
from liger_hw.kernels.pointwise.swiglu import LigerSwiGLUMLP, liger_swiglu
from liger_hw.transformers import replacing


@pytest.fixture
def in_place(monkeypatch):
    """The calls of the operator that writes over its inputs."""
    calls, operator = [], swiglu.SiLUMulFunction.in_place
    noted = staticmethod(lambda *args: calls.append(args) or operator(*args))
    monkeypatch.setattr(swiglu.SiLUMulFunction, "in_place", noted)
    return calls


@pytest.mark.parametrize("level", ["keep", "cheap", "mlp"])
def test_a_patched_mlp_owns_its_gate_and_up(level, in_place):
    model = Decoder(count=1)
    found = gradients(model, liger_hw.activations(level))
    assert len(in_place) == 1
    expected = gradients(Decoder(count=1), liger_hw.activations("keep"), x=some_input())
    assert identical(found, expected)


def hooked(mlp):
    outputs = []
    mlp.gate_proj.register_forward_hook(lambda m, args, out: outputs.append((out, out.detach().clone())))
    return lambda: all(torch.equal(now, before) for now, before in outputs)


def with_another_forward(mlp):
    outputs, forward = [], mlp.up_proj.forward

    def keeping(x):
        outputs.append(forward(x))
        return outputs[-1]

    mlp.up_proj.forward = keeping
    return lambda: bool(outputs)


def hooked_everywhere(mlp):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    return handle.remove


class TanhLinear(torch.nn.Linear):
    """Its last node saves what it returns."""

    def forward(self, x):
        return super().forward(x).tanh()


def of_another_class(mlp):
    gate = TanhLinear(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=False)
    gate.weight = mlp.gate_proj.weight
    mlp.gate_proj = gate


@pytest.mark.parametrize("change", [hooked, with_another_forward, hooked_everywhere, of_another_class])
def test_tensors_that_others_may_hold_are_not_written_over(change, in_place):
    model = Decoder(count=1)
    after = change(model.layers[0].mlp)
    found = gradients(model, contextlib.nullcontext())
    if after is not None:
        assert after() in (True, None)
    assert not in_place
    other = Decoder(count=1)
    after = change(other.layers[0].mlp)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda t: t):
        expected = gradients(other, contextlib.nullcontext(), x=some_input())
    assert identical(found, expected)
    if change is hooked_everywhere:
        after()


def mlp_and_input(dtype=torch.float64):
    torch.manual_seed(0)
    config = type("Config", (), {"hidden_size": 8, "intermediate_size": 12, "hidden_act": "silu"})
    return LigerSwiGLUMLP(config).to(dtype), torch.randn(5, 8, dtype=dtype, requires_grad=True)


def test_a_graph_that_is_kept_is_not_written_over(in_place):
    mlp, x = mlp_and_input()
    loss = mlp(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert not in_place
    (second,) = torch.autograd.grad(loss, x)
    assert len(in_place) == 1 and torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_mlp_owns_what_it_computes_again(reentrant, in_place):
    mlp, x = mlp_and_input()
    (expected,) = torch.autograd.grad(mlp(x).square().sum(), x, retain_graph=True)
    loss = checkpoint(mlp, x, use_reentrant=reentrant).square().sum()
    loss.backward()
    assert len(in_place) == 1 and torch.equal(x.grad, expected)


def test_saved_tensors_hooks_of_others_may_keep_what_is_saved(in_place):
    mlp, x = mlp_and_input()
    seen = []

    def keep(t):
        seen.append((t.detach(), t.detach().clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = mlp(x).square().sum()
    loss.backward()
    assert not in_place and all(torch.equal(now, before) for now, before in seen)


def test_adapters_are_projections_too(in_place):
    peft = pytest.importorskip("peft")
    mlp, x = mlp_and_input(torch.float32)
    model = peft.get_peft_model(mlp, peft.LoraConfig(r=2, target_modules=["gate_proj", "up_proj"]))
    model(x).square().sum().backward()
    assert len(in_place) == 1


def test_a_module_that_peft_trains_whole_may_keep_what_it_returns(in_place):
    peft = pytest.importorskip("peft")
    mlp, x = mlp_and_input(torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["down_proj"], modules_to_save=["gate_proj"])
    peft.get_peft_model(mlp, config)(x).square().sum().backward()
    assert not in_place


def test_the_function_overwrites_only_if_owned(in_place):
    a, b = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    before = [t.detach().clone() for t in (a, b)]
    liger_swiglu(a * 1.0, b * 1.0).sum().backward()
    assert not in_place
    mine = [t * 1.0 for t in (a, b)]
    liger_swiglu(*mine, owned=True).sum().backward()
    assert len(in_place) == 1 and not torch.equal(mine[0], before[0])
    assert torch.equal(a.detach(), before[0]) and torch.equal(b.detach(), before[1])


def test_batched_gradients_do_not_write_over(in_place):
    mlp, x = mlp_and_input()
    out = mlp(x)
    directions = torch.randn(3, *out.shape, dtype=out.dtype)
    expected = torch.stack([torch.autograd.grad(out, x, d, retain_graph=True)[0] for d in directions])
    assert not in_place and torch.isfinite(expected).all()


class _Peak(TorchDispatchMode):
    """The most bytes that are alive at a time, of all that operators return while this is open."""

    def __init__(self):
        super().__init__()
        self.storages, self.bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_iter(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = storage._weak_ref(), storage.nbytes()
        alive = (n for weak, n in self.storages.values() if not torch.UntypedStorage._expired(weak))
        self.bytes = max(self.bytes, sum(alive))
        return result


def peak_of(mlp, x):
    for _ in range(2):  # the first makes the gradients of the weights
        with _Peak() as peak:
            mlp(x).backward(torch.ones_like(x))
    return peak.bytes


def test_a_patched_mlp_in_training_takes_no_more_memory_than_before(monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokens, wide = 64, 256
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=wide, num_attention_heads=1)
    mlp = transformers.models.llama.modeling_llama.LlamaMLP(config)
    x = torch.randn(tokens, 8, requires_grad=True)
    unpatched = peak_of(mlp, x)
    with liger_hw.patch(mlp, fused_linear_cross_entropy=False):
        patched = peak_of(mlp, x)
        monkeypatch.setattr(replacing, "owns_outputs", lambda *projections: False)
        not_owned = peak_of(mlp, x)
    one = tokens * wide * x.itemsize  # gate and up are saved; down's input is freed before their gradients are there
    assert 4 * one <= patched < 4.75 * one
    assert patched + one * 0.9 <= not_owned <= unpatched
