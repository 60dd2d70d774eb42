"""Tiled MLPs: the same results and gradients as without tiles, weight gradients summed in fp32, less memory kept."""

from __future__ import annotations

import types

import pytest
import torch

from liger_hw.compat import functions
from liger_hw.kernels.pointwise import tiled_mlp
from liger_hw.kernels.pointwise.geglu import LigerGEGLUMLP, LigerTiledGEGLUMLP
from liger_hw.kernels.pointwise.swiglu import LigerSwiGLUMLP, LigerTiledSwiGLUMLP
from liger_hw.kernels.pointwise.tiled_mlp import Tiles, apply_tiled_mlp

pytestmark = [pytest.mark.lanes("cpu")]
HIDDEN, WIDE = 16, 40
LAYERS = {
    "swiglu": (LigerSwiGLUMLP, LigerTiledSwiGLUMLP, "silu"),
    "geglu": (LigerGEGLUMLP, LigerTiledGEGLUMLP, "gelu_pytorch_tanh"),
}


def config(act="silu", **more):
    return types.SimpleNamespace(hidden_size=HIDDEN, intermediate_size=WIDE, hidden_act=act, **more)


def pair(name, dtype=torch.float64, **more):
    """A layer and the tiled one with its weights."""
    plain, tiled, act = LAYERS[name]
    torch.manual_seed(0)
    one = plain(config(act, **more)).to(dtype)
    other = tiled(config(act, **more)).to(dtype)
    other.load_state_dict(one.state_dict())
    return one, other


def some_x(*shape, dtype=torch.float64):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def run(module, x, dy=None, call=None):
    """The result and the gradients of x and of every parameter that trains."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = (call or module)(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach(), x.grad, *(p.grad for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(37,), (2, 37), (1, 5), (3, 2, 20)])
@pytest.mark.parametrize("shards", [None, 1, 3, 100])
def test_the_same_as_without_tiles(name, shape, shards):
    plain, tiled = pair(name)
    tiled.num_shards = shards
    x = some_x(*shape)
    torch.testing.assert_close(run(tiled, x), run(plain, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_gradients_are_sums_in_fp32(bias, hooks):
    """In bf16 each weight's gradient is the fp64 sum over all rows rounded once: no error grows with the tiles."""
    plain, tiled = pair("swiglu", torch.bfloat16, mlp_bias=bias)
    for parameter in tiled.parameters() if hooks else ():
        parameter.register_hook(lambda gradient: gradient)  # as engines that gather weights: a checkpoint a tile
    tiled.num_shards = 64
    x = some_x(2048, dtype=torch.bfloat16)
    many = run(tiled, x)
    tiled.num_shards = 1
    for a, b in zip(many, run(tiled, x), strict=True):
        assert torch.equal(a, b) or (a - b).abs().max() <= b.abs().max() * 2**-7
        assert ((a.double() - b.double()).norm() / b.double().norm()) < 2**-10  # a rare last bit of bf16
    assert all(t.dtype is torch.bfloat16 for t in many)


def test_a_backward_after_an_interrupted_one():
    """A backward that an error ends between tiles leaves nothing to the next one of the same graph."""
    plain, tiled = pair("swiglu")
    for parameter in tiled.parameters():
        parameter.register_hook(lambda gradient: gradient)
    tiled.num_shards, calls = 4, []

    def interrupt(gradient):
        calls.append(gradient)
        if len(calls) == 2:
            raise KeyboardInterrupt

    tiled.down_proj.register_forward_hook(
        lambda module, args, y: y.requires_grad and y.register_hook(interrupt) and None
    )
    x = some_x(37).requires_grad_()
    y = tiled(x)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward(retain_graph=True)
    tiled.zero_grad()
    x.grad = None
    y.sum().backward()
    assert len(calls) > 4
    torch.testing.assert_close(
        (x.grad, *(p.grad for p in tiled.parameters())), run(plain, x)[1:], rtol=1e-12, atol=1e-12
    )


def test_autocast_and_its_cache():
    """Under autocast the products are bf16's, gradients fp32; a later forward with gradients is not cut off."""
    plain, tiled = pair("swiglu", torch.float32)
    tiled.num_shards = 4
    x = some_x(64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run(tiled, x), run(plain, x)
        tiled.zero_grad(set_to_none=True)
        tiled.gate_proj(x).sum().backward()
        assert tiled.gate_proj.weight.grad.abs().sum() > 0
    assert ours[0].dtype is torch.bfloat16 and torch.equal(ours[0], theirs[0])
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())


def test_dropout_draws_the_same_numbers_in_backward():
    linear = torch.nn.Sequential(torch.nn.Linear(HIDDEN, WIDE), torch.nn.Dropout(0.5), torch.nn.Linear(WIDE, HIDDEN))
    linear.double()
    x = some_x(30)
    torch.manual_seed(5)
    tiled = run(linear, x, call=lambda x: apply_tiled_mlp(lambda module, tile: module(tile), linear, x, 3))
    after = torch.rand(1)
    torch.manual_seed(5)
    expected = run(linear, x, call=lambda x: torch.cat([linear(tile) for tile in x.tensor_split(3, -2)], -2))
    torch.testing.assert_close(tiled, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(after, torch.rand(1))


def test_frozen_weights_and_inputs():
    """LoRA's case: the base is frozen, adapters train; and an input that needs no gradient."""
    plain, tiled = pair("swiglu")
    tiled.num_shards = 3
    for module in (plain, tiled):
        module.gate_proj.weight.requires_grad_(False)
        module.down_proj.weight.requires_grad_(False)
    x = some_x(2, 9)
    torch.testing.assert_close(run(tiled, x), run(plain, x), rtol=1e-12, atol=1e-12)
    tiled.zero_grad()
    tiled(x).sum().backward()
    assert tiled.up_proj.weight.grad is not None and tiled.gate_proj.weight.grad is None
    for p in tiled.parameters():
        p.requires_grad_(False)
    assert not tiled(x).requires_grad
    torch.testing.assert_close(tiled(x), plain(x), rtol=1e-12, atol=1e-12)


def test_lora():
    peft = pytest.importorskip("peft")
    layers = []
    for layer in pair("swiglu", torch.float32):
        holder = torch.nn.ModuleDict({"mlp": layer})
        torch.manual_seed(2)
        adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["gate_proj", "up_proj", "down_proj"])
        model = peft.get_peft_model(holder, adapters)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(3))
        layers.append(model.base_model.model["mlp"].double())
    plain, tiled = layers
    tiled.num_shards = 5
    x = some_x(40)
    torch.testing.assert_close(run(tiled, x), run(plain, x), rtol=1e-10, atol=1e-10)


def test_weights_that_are_no_parameters_of_the_module():
    """As FSDP1 sets views of its flat parameter: their gradients reach the flat one."""
    plain, tiled = pair("swiglu")
    tiled.num_shards = 3
    x = some_x(20)
    expected = run(plain, x)
    flat = torch.nn.Parameter(tiled.up_proj.weight.detach().reshape(-1).clone())
    del tiled.up_proj.weight
    tiled.up_proj.weight = flat.view(WIDE, HIDDEN)
    tiled(x).sum().backward()
    torch.testing.assert_close(flat.grad.view(WIDE, HIDDEN), expected[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gate_proj.weight", "down_proj.bias"])
def test_hooks_of_parameters_run_once_on_the_whole_gradient(name):
    """A tensor's hook may change the gradient; one after accumulation sees the changed sum, as without tiles."""
    seen = {}
    results = []
    for layer in pair("swiglu", mlp_bias=True):
        layer.num_shards = 4
        calls, parameter = seen.setdefault(layer, []), layer.get_parameter(name)
        handle = parameter.register_hook(lambda g, calls=calls: calls.append(g.clone()) or g * 0.5)
        parameter.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p.grad.clone()))
        results.append(run(layer, some_x(2, 9)))
        handle.remove()
        results.append(run(layer, some_x(2, 9)))  # the hook after accumulation alone
    for plain, tiled in (results[::2], results[1::2], seen.values()):
        torch.testing.assert_close(tiled, plain, rtol=1e-12, atol=1e-12)
    assert [len(calls) for calls in seen.values()] == [3, 3]


def test_a_hook_of_a_parameter_after_the_forward_is_refused():
    _, tiled = pair("swiglu")
    tiled.num_shards = 3
    y = tiled(some_x(9))
    tiled.up_proj.weight.register_hook(lambda g: g * 0.5)
    with pytest.raises(RuntimeError, match="before the forward"):
        y.sum().backward()


@pytest.mark.parametrize("needs_dx", [False, True])
def test_nothing_that_trains_is_used(needs_dx):
    """The module has a parameter that trains, which fn does not use: backward goes through and gives it nothing."""
    _, tiled = pair("swiglu")
    for p in tiled.parameters():
        p.requires_grad_(False)
    tiled.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    x = some_x(2, 9).requires_grad_(needs_dx)
    y = apply_tiled_mlp(lambda module, tile: LigerSwiGLUMLP.forward(module, tile.detach()), tiled, x, 3)
    (y.sum() + tiled.unused.sum()).backward()
    assert torch.equal(tiled.unused.grad, torch.ones(3, dtype=torch.float64))
    assert x.grad is None if not needs_dx else not x.grad.any()


def test_only_the_input_is_kept(monkeypatch):
    """What autograd saves of a tiled MLP is its input, and a checkpoint around it stops before the MLP."""
    plain, tiled = pair("swiglu", torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        tiled(some_x(64, dtype=torch.float32).requires_grad_())
    assert [tuple(t.shape) for t in saved] == [(64, HIDDEN)]
    calls = []
    monkeypatch.setattr(tiled_mlp, "TILE_ROWS", 16)
    plain.up_proj.register_forward_hook(lambda *_: calls.append(1))
    x = some_x(64, dtype=torch.float32).requires_grad_()
    options = {"use_reentrant": False, "context_fn": lambda: (Tiles(), Tiles())}
    torch.utils.checkpoint.checkpoint(plain, x, **options).sum().backward()
    assert len(calls) == 2 * 4  # four tiles in forward, four in backward


def test_a_scope_tiles_what_is_longer_than_a_tile(monkeypatch):
    monkeypatch.setattr(tiled_mlp, "TILE_ROWS", 8)
    plain, _ = pair("geglu")
    calls = []
    plain.up_proj.register_forward_hook(lambda module, args, y: calls.append(len(args[0])))
    x = some_x(2, 10)
    expected = run(plain, x)
    del calls[:]
    with Tiles():
        results = run(plain, x)
        with torch.no_grad():
            torch.testing.assert_close(plain(x), expected[0], rtol=1e-12, atol=1e-12)
        plain(x[0, :8])
    assert calls == [7, 7, 6] * 3 + [8]
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)


def test_parameters_changed_or_replaced_since_the_forward_are_refused():
    """Backward computes the MLP again: of other weights its gradients would be wrong in silence."""
    _, tiled = pair("swiglu")
    y = tiled(some_x(20)).sum()
    with torch.no_grad():
        tiled.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed or replaced since"):
        y.backward()
    twice = {name: torch.nn.Parameter(2 * weight.detach()) for name, weight in tiled.named_parameters()}
    y = torch.func.functional_call(tiled, twice, (some_x(20),)).sum()
    with pytest.raises(RuntimeError, match="changed or replaced since"):
        y.backward()


def test_what_trains_outside_of_the_module_is_refused():
    """It would have no gradient, in silence: a leaf, or what was computed from one before."""
    layer, outside = (
        torch.nn.Linear(HIDDEN, HIDDEN).double(),
        torch.ones(HIDDEN, dtype=torch.float64, requires_grad=True),
    )
    for factor in (outside, 2 * outside):
        y = apply_tiled_mlp(lambda module, tile, factor=factor: module(tile) * factor, layer, some_x(20), 3)
        with pytest.raises(RuntimeError, match="fn uses a tensor of shape .16,. that requires a gradient"):
            y.sum().backward()
    x = some_x(20).requires_grad_()
    apply_tiled_mlp(lambda module, tile: tile, layer, x, 3).sum().backward()  # the input itself
    assert torch.equal(x.grad, torch.ones_like(x))


def test_what_is_refused():
    _, tiled = pair("swiglu")
    for call, words in (
        (lambda: apply_tiled_mlp(LigerSwiGLUMLP.forward, tiled, torch.zeros(HIDDEN)), "x must be"),
        (lambda: apply_tiled_mlp(LigerSwiGLUMLP.forward, tiled, some_x(4), 0), "a positive integer, got 0"),
        (lambda: apply_tiled_mlp(LigerSwiGLUMLP.forward, tiled, some_x(4), 2.5), "a positive integer, got 2.5"),
        (lambda: apply_tiled_mlp(lambda module, x: x[:1], tiled, some_x(4), 2), "as many rows as it takes"),
        (lambda: apply_tiled_mlp(lambda module, x: (x,), tiled, some_x(4), 2), "as many rows as it takes, got tuple"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_an_mlp_of_three_weights():
    """Liger's LigerMLPFunction, with Falcon H1's multipliers, and its LigerTiledMLPFunction."""
    plain, _ = pair("swiglu")
    x = some_x(3, 7)
    weights = [plain.gate_proj.weight, plain.up_proj.weight, plain.down_proj.weight]
    torch.testing.assert_close(functions.LigerMLPFunction.apply(x, *weights), plain(x))
    scaled = functions.LigerMLPFunction.apply(x, *weights, 0.5, 2.0)
    gate, up = x @ weights[0].t() * 0.5, x @ weights[1].t()
    torch.testing.assert_close(scaled, (torch.nn.functional.silu(gate) * up) @ weights[2].t() * 2.0)
    tiled = functions.LigerTiledMLPFunction.apply(LigerSwiGLUMLP.forward, plain, x, 3, None)
    torch.testing.assert_close(tiled, plain(x))
