"""`liger_hw.float8(model)`: what it replaces, that training works with all that a model is used with, and undo."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch

import liger_hw
from liger_hw.kernels.float8.float8_linear import liger_float8_linear
from liger_hw.recompute.recipes import owns_outputs
from liger_hw.transformers.float8_linears import Float8Linear

transformers = pytest.importorskip("transformers")
IDS = torch.arange(24).view(2, 12) * 5 % 64


def _llama(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, "num_hidden_layers": 2, "vocab_size": 64, **changes})
    return transformers.LlamaForCausalLM(config)


def _in_float8(*recipe):
    """(model, report)"""
    model = _llama()
    return model, liger_hw.float8(model, *recipe, smallest=16)


def _gradients(model, **inputs):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, **inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _shard(*modules):
    """FSDP2 over one rank, each module by itself."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for module in modules:
        fully_shard(module, mesh=mesh)


def _same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.daily(recipe="rowwise", patched=("before", "after"))
@pytest.mark.daily(recipe="tensorwise", patched="")
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("patched", ["", "before", "after"])
def test_trains_and_undo_is_exact(recipe, patched):
    model = _llama()
    parameters, expected = dict(model.named_parameters()), _gradients(model)
    state = copy.deepcopy(model.state_dict())
    patch = liger_hw.patch(model) if patched == "before" else None
    report = liger_hw.float8(model, recipe, smallest=16)
    patch = liger_hw.patch(model) if patched == "after" else patch
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert model.state_dict().keys() == state.keys()
    first, *gradients = _gradients(model)
    assert first != expected[0] and abs(first - expected[0]) < 0.02
    for result, exact in zip(gradients, expected[1:]):
        assert (result - exact).norm() < 0.15 * exact.norm()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(15):
        loss = _gradients(model)[0]
        optimizer.step()
    assert loss < first - 1
    model.load_state_dict(state)
    assert "mlp.up_proj" in str(report) and "Undone" not in str(report)
    assert report.undo() == 14 and report.undo() == 0
    assert str(report).endswith("\nUndone: none of this is in place any more.")
    if patch is not None:
        patch.revert()
    assert all(type(m) is not Float8Linear and not hasattr(m, "float8") for m in model.modules())
    assert _same(_gradients(model), expected)


def test_what_is_left_alone():
    model = _llama(intermediate_size=100)
    model.model.layers[0].self_attn.router = torch.nn.Linear(64, 64)
    model.model.layers[0].mlp.router = torch.nn.ModuleDict({"classifier": torch.nn.Linear(64, 64)})  # as LongCat-Flash
    model.codec_head = torch.nn.Linear(64, 64)  # as Qwen2.5-Omni's talker
    model.model.layers[1].self_attn.q_proj.forward = model.model.layers[1].self_attn.q_proj.forward
    report = liger_hw.float8(model, smallest=48, skip=("layers.0.self_attn.o",))
    assert set(report.linears) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.o_proj",
    }
    for path, why in {
        "lm_head": "the loss head",
        "model.layers.0.self_attn.router": "a router",
        "model.layers.0.mlp.router.classifier": "a router",
        "codec_head": "a head, by its name",
        "model.layers.0.self_attn.o_proj": "skipped",
        "model.layers.0.self_attn.k_proj": "64 -> 32, smaller than 48",
        "model.layers.0.mlp.up_proj": "64 -> 100, no multiples of 16",
        "model.layers.1.self_attn.q_proj": "its forward was replaced",
    }.items():
        assert report.left_alone[path] == why and why in str(report)
    assert report.unmatched == ()
    again = liger_hw.float8(_llama(), smallest=16, skip=None)
    with pytest.raises(ValueError, match="no linear of this model fits") as refused:
        liger_hw.float8(model, smallest=48, skip="")
    assert "Undone" not in str(refused.value)
    assert "in FP8, rowwise: 64 -> 96" in str(again)


def test_what_is_no_text_is_refused():
    for skip in (1, ("q_proj", 1)):
        with pytest.raises(TypeError, match="skip must be texts of paths, got int: 1"):
            liger_hw.float8(_llama(), smallest=16, skip=skip)


def test_a_text_of_skip_that_no_path_contains_is_reported():
    report = liger_hw.float8(_llama(), smallest=16, skip=("q_proj", "q_porj"))
    assert report.unmatched == ("q_porj",) and len(report.linears) == 12
    assert "q_porj" in str(report) and "no linear's path" in str(report)


def test_a_model_of_conv1d_is_refused_by_its_name():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    with pytest.raises(ValueError, match="c_fc +left alone: a Conv1D"):
        liger_hw.float8(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), smallest=16)


def test_other_recipes_are_refused():
    with pytest.raises(ValueError, match="recipe must be one of rowwise, tensorwise"):
        liger_hw.float8(_llama(), "mxfp8")


def test_a_device_without_float8_is_refused():
    with liger_hw.pretend(liger_hw.backends.known_target("a100")):
        with pytest.raises(ValueError, match="A100.*no matrix units for FP8"):
            liger_hw.float8(_llama(), smallest=16)


def test_linears_of_one_input_quantise_it_once(monkeypatch):
    from liger_hw.transformers import float8_linears

    model, calls = _llama(), []
    quantized = float8_linears.quantized
    monkeypatch.setattr(float8_linears, "quantized", lambda *args: calls.append(args[0].shape) or quantized(*args))
    liger_hw.float8(model, smallest=16)
    with torch.no_grad():
        model(input_ids=IDS)
    assert len(calls) == 2 * 6, "without a backward nothing keeps the copy, and each makes its own"
    calls.clear()
    _gradients(model)
    assert len(calls) == 2 * 3, "q, k, v; o; gate, up (down has no linear beside it of its inputs)"


def test_gradients_of_a_gate_are_still_written_over_its_inputs():
    model, _ = _in_float8()
    mlp = model.model.layers[0].mlp
    assert owns_outputs(mlp.gate_proj, mlp.up_proj)


def test_the_gate_writes_float8_itself(monkeypatch):
    """Its bytes are those of the gate's kernel and then a quantisation, so that nothing else changes."""
    from liger_hw.transformers import float8_linears

    model, calls = _llama(), []
    liger_hw.float8(model, smallest=16)
    liger_hw.patch(model, activations="keep")
    fused = float8_linears.gated_linear
    monkeypatch.setattr(float8_linears, "gated_linear", lambda *args: calls.append(args[1].shape) or fused(*args))
    result = _gradients(model)
    assert len(calls) == 2
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda *_: None)
    assert _same(_gradients(model), result) and len(calls) == 2, "a hook sees its input, which then exists"


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_an_input_that_changed_is_quantised_again(mode):
    block = torch.nn.ModuleDict({"a": torch.nn.Linear(32, 32), "b": torch.nn.Linear(32, 32)})
    liger_hw.float8(block, smallest=16)
    with mode():
        x = torch.randn(16, 32)
        first = block["a"](x)
        x.mul_(2)
        assert torch.equal(block["b"](x), liger_float8_linear(x, block["b"].weight, block["b"].bias))
    if mode is torch.inference_mode:
        assert block["a"].float8.shared.state is None
    else:
        assert first.grad_fn is not None


@pytest.mark.parametrize("setting", ["cheap", "mlp", "full", "tiled"])
def test_the_memory_dial_gives_the_same_gradients(setting):
    model, _ = _in_float8()
    report = liger_hw.patch(model, activations="keep")
    expected = _gradients(model)
    report.revert()
    liger_hw.patch(model, activations=setting)
    assert _same(_gradients(model), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model, _ = _in_float8()
    expected = _gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert _same(_gradients(model), expected)


REFUSED_BY_TORCH = {
    "narrow": torch.ones(4, 20),
    "narrow, one token": torch.ones(20),
    "wide": torch.ones(4, 48),
    "a number": torch.ones(()),
    "integers": torch.ones(4, 32, dtype=torch.int64),
    "FP8": torch.ones(4, 32).to(torch.float8_e4m3fn),
}
LEFT_TO_TORCH = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(2, 32)], layout=torch.jagged),
    "sparse": lambda: torch.eye(32).to_sparse(),
}


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_inputs_that_do_not_fit_are_refused_as_without_float8(recipe, keep):
    """A narrow input is not padded up to the weight's width, as its FP8 is up to a multiple of 16."""
    block = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in "ab").requires_grad_(not keep)
    report = liger_hw.float8(block, recipe, smallest=16, keep_frozen=keep)
    for x in REFUSED_BY_TORCH.values():
        with pytest.raises(RuntimeError, match="linear|shapes|size mismatch|same dtype"):
            block[0](x)
    results = [block[0](x()) for x in LEFT_TO_TORCH.values()]
    report.undo()
    for result, x in zip(results, LEFT_TO_TORCH.values()):
        expected = block[0](x())
        assert result.layout is expected.layout and torch.equal(
            *(t.values() if t.is_nested else t.to_dense() for t in (result, expected))
        )


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_a_forward_replaced_since_is_called_and_survives_undo(keep, set_env):
    """As accelerate's hooks replace it, on devices of a `device_map`; they keep the method that they replace."""
    set_env("LIGER_HW_CPU_REFERENCE", 1)
    model, calls = _llama().requires_grad_(not keep), []
    report = liger_hw.float8(model, smallest=16, keep_frozen=keep)
    liger_hw.patch(model, activations="keep")
    expected = model(input_ids=IDS).logits
    linears = [model.get_submodule(path) for path in report.linears]
    for linear in linears:
        linear.forward = lambda x, plain=linear.forward: calls.append(x.shape) or plain(x)
    assert torch.equal(model(input_ids=IDS).logits, expected) and len(calls) == len(linears) == 14
    report.undo()
    result = model(input_ids=IDS).logits
    for linear in linears:
        del linear.forward
    assert len(calls) == 28 and torch.equal(model(input_ids=IDS).logits, result)


@pytest.mark.parametrize("patched", [False, True], ids=["", "patched"])
def test_autocast_in_fp16_with_a_scaler(patched):
    """A product of FP8's numbers is not summed in fp16, where it overflows."""
    model = _llama()
    if patched:
        liger_hw.patch(model)
    with torch.autocast("cpu", torch.float16):
        expected = model(input_ids=IDS, labels=IDS).loss
    liger_hw.float8(model, smallest=16)
    scaler, optimizer = torch.amp.GradScaler("cpu", 1024.0), torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            losses.append(model(input_ids=IDS, labels=IDS).loss)
        scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
    assert abs(losses[0] - expected) < 0.02 and losses[-1] < losses[0] - 0.5 and scaler.get_scale() == 1024


def test_copies_and_pickles():
    model, report = _in_float8()
    expected = _gradients(model)
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    report.undo()
    assert _same(_gradients(twin), expected) and _same(_gradients(stored), expected)


def _lora(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": "all-linear", **options})
    return peft.get_peft_model(_llama(), config)


@pytest.mark.parametrize("how", ["merge_adapter", "data.copy_", "mul_"])
def test_a_frozen_weight_that_changed_is_seen(how):
    model = _lora()
    report = liger_hw.float8(model, smallest=16)
    bases = [module for module in model.modules() if type(module) is Float8Linear]
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        if how == "merge_adapter":
            model.merge_adapter()
        for base in bases:
            if how == "data.copy_":
                base.weight.data.copy_(base.weight.data * 2)
            elif how == "mul_":
                base.weight.mul_(2)
        result = model(input_ids=IDS).logits
        report.undo()
        liger_hw.float8(model, smallest=16)
        assert torch.equal(result, model(input_ids=IDS).logits) and not torch.equal(result, before)


@pytest.mark.parametrize("made_inside", [False, True], ids=["", "weights too"])
@pytest.mark.parametrize("patched", [False, True], ids=["", "patched"])
def test_inference_mode(made_inside, patched):
    """Its tensors do not count their changes: each linear quantises them anew, with the same result."""
    with torch.inference_mode(made_inside):
        model = _llama().eval()
    report = liger_hw.float8(model, smallest=16)
    if patched:
        liger_hw.patch(model)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    with torch.inference_mode():
        assert torch.equal(model(input_ids=IDS).logits, expected)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, expected)
    assert len(report.linears) == 14
    if not made_inside:
        assert _gradients(model)[0].isfinite()


class _Wrapper(torch.nn.Module):
    def __init__(self, *models):
        super().__init__()
        self.models = torch.nn.ModuleList(models)


class _Headless(torch.nn.Module):
    def get_output_embeddings(self):
        raise NotImplementedError


def test_the_loss_heads_of_wrapped_models_are_left_alone():
    wrapped = _Wrapper(_llama(), _Wrapper(_llama()), _Headless())
    report = liger_hw.float8(wrapped, smallest=16)
    heads = {path: why for path, why in report.left_alone.items() if "head" in path}
    assert heads == dict.fromkeys(("models.0.lm_head", "models.1.models.0.lm_head"), "the loss head")
    assert len(report.linears) == 2 * 14


def test_a_head_of_the_embedding_s_weight_is_left_alone():
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(96, 32), "up": torch.nn.Linear(32, 96)})
    model["to_words"] = torch.nn.Linear(32, 96, bias=False)
    model["to_words"].weight = model["words"].weight
    assert liger_hw.float8(model, smallest=16).left_alone == {"to_words": "the loss head"}


def test_the_loss_head_inside_peft_is_left_alone():
    for options in ({"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}):
        report = liger_hw.float8(_lora(**options), smallest=16)
        assert report.linears and not any("head" in path for path in report.linears)


def test_a_weight_of_tensor_parallelism_is_refused(one_rank):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    layer = torch.nn.Sequential(torch.nn.Linear(32, 32))
    mesh = init_device_mesh("cpu", (1,))
    liger_hw.float8(layer, smallest=16)
    layer[0].weight = torch.nn.Parameter(DTensor.from_local(layer[0].weight.detach(), mesh, [Replicate()]))
    with pytest.raises(ValueError, match="tensor parallelism"):
        layer(torch.randn(16, 32))


def test_fsdp2(one_rank):
    model, _ = _in_float8()
    expected = _gradients(model)
    _shard(*model.model.layers, model)
    result = _gradients(model)
    assert _same([result[0], *(g.full_tensor() for g in result[1:])], expected)


def test_an_input_written_through_data_is_quantised_again():
    """A loop that keeps its last loss, and with it the graph, and fills one buffer: nothing counts such a write."""
    block = torch.nn.ModuleDict({"a": torch.nn.Linear(32, 32), "b": torch.nn.Linear(32, 32)})
    liger_hw.float8(block, smallest=16)
    x, graphs = torch.randn(16, 32), []
    for _ in range(2):
        graphs.append([block[name](x) for name in "ab"])
        for name, y in zip("ab", graphs[-1]):
            assert torch.equal(y, liger_float8_linear(x, block[name].weight, block[name].bias))
        x.data.mul_(-2)


def test_overflow_names_the_linears_and_what_was_not_finite():
    model, report = _in_float8()
    assert report.overflow() == {}, "nothing ran"
    _gradients(model)
    assert report.overflow() == {}
    layer = "model.layers.1.mlp.down_proj"
    spoilt = lambda _, grads: (grads[0].index_fill(1, IDS[0, :1], torch.inf),)  # noqa: E731
    hook = model.get_submodule(layer).register_full_backward_pre_hook(spoilt)
    _gradients(model)
    hook.remove()
    overflow = report.overflow()
    assert overflow[layer] == "gradient" and overflow["model.layers.0.self_attn.q_proj"] == "gradient"
    assert copy.deepcopy(model).get_submodule(layer).float8.scales.gradient is None
    with torch.no_grad():
        model.get_submodule(layer).weight[3, 5] = torch.nan
        model(input_ids=IDS)
    assert report.overflow()[layer] == "weight, gradient", "the gradient is of the backward before"
    report.undo()
    assert report.overflow() == {}


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("patched", [False, True], ids=["", "patched"])
def test_frozen_weights_are_kept_in_float8(recipe, patched):
    """The forward is that of weights which are quantised each time, bit for bit."""
    model = _lora()
    if patched:
        liger_hw.patch(model)
    report = liger_hw.float8(model, recipe, smallest=16)
    first, *expected = _gradients(model)
    report.undo()
    weights = {path: model.get_submodule(path).weight.detach().clone() for path in report.linears}
    report = liger_hw.float8(model, recipe, smallest=16, keep_frozen=True)
    for path, weight in weights.items():
        module = model.get_submodule(path)
        assert module.weight_fp8.dtype.itemsize == 1 and not module.weight_fp8.requires_grad
        assert module.weight_scale.numel() == (len(weight) if recipe == "rowwise" else 1)
    result, *gradients = _gradients(model)
    assert torch.equal(result, first)
    for a, b in zip(gradients, expected):
        assert (a - b).norm() <= 0.05 * b.norm(), "a weight's small rows may underflow in one of the two"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report.undo()
    rounding = 2**-4 if recipe == "rowwise" else 2**-3
    plain = model.state_dict()
    assert state.keys() == plain.keys() and all(torch.equal(state[name], plain[name]) for name in plain)
    for path, weight in weights.items():
        result = model.get_submodule(path).weight
        assert result.dtype is weight.dtype and (result - weight).abs().max() <= rounding * weight.abs().max()
    liger_hw.float8(model, recipe, smallest=16, keep_frozen=True)
    exact = state | {f"{path}.weight": weight for path, weight in weights.items()}
    for stored in (state, exact):  # what was rounded is rounded to itself
        for path in weights:
            model.get_submodule(path).weight_fp8.data.zero_()
        model.load_state_dict(stored)
        assert torch.equal(_gradients(model)[0], first)


def _writes():
    """What a program may do to a weight, by name."""
    init, add = torch.nn.init.normal_, torch.add
    ones = torch.ones(32, 32)
    return {
        "data +=": lambda layer: layer.weight.data.__iadd__(ones),
        "data =": lambda layer: setattr(layer.weight, "data", ones),
        "mul_": lambda layer: layer.weight.mul_(2),
        "torch.ops": lambda layer: torch.ops.aten.mul_.Scalar(layer.weight, 2),
        "_foreach_mul_": lambda layer: torch._foreach_mul_([ones, layer.weight], 2.0),
        "a row": lambda layer: layer.weight.__setitem__(0, 1.0),
        "a view": lambda layer: layer.weight.view(-1)[3:].zero_(),
        "out": lambda layer: add(ones, ones, out=layer.weight),
        "init": lambda layer: init(layer.weight),
        "reset_parameters": lambda layer: layer.reset_parameters(),
        "another tensor": lambda layer: setattr(layer, "weight", ones),
        "another parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(ones)),
        "requires_grad_": lambda layer: layer.weight.requires_grad_(),
        "requires_grad": lambda layer: setattr(layer.weight, "requires_grad", True),
    }


@pytest.mark.parametrize("how", _writes())
def test_a_kept_weight_is_read_in_its_dtype_and_not_written(how):
    layer = torch.nn.Linear(32, 32).bfloat16().requires_grad_(False)
    block = torch.nn.Sequential(layer)
    report = liger_hw.float8(block, smallest=16, keep_frozen=True)
    before, weight = block.state_dict()["0.weight"].clone(), layer.weight
    assert isinstance(weight, torch.nn.Parameter) and torch.equal(weight, before)
    assert weight.dtype is torch.bfloat16 and type(weight @ weight) is type(copy.deepcopy(weight)) is torch.Tensor
    assert f"{weight[0, 0]:.2f}" == f"{before[0, 0]:.2f}"
    weight.requires_grad, layer.weight = False, weight  # as PEFT does, and nothing changes
    with pytest.raises(ValueError, match="cannot be changed, trained, or have an adapter merged into it; call report"):
        _writes()[how](layer)
    assert torch.equal(block.state_dict()["0.weight"], before)
    report.undo()
    assert torch.equal(layer.weight, before) and [n for n, _ in layer.named_parameters()] == ["weight", "bias"]


def test_a_kept_weight_is_not_cast_merged_or_trained():
    model = _lora()
    for layer in model.base_model.model.model.layers:
        layer.mlp.up_proj.base_layer.weight.data[3] *= 1e-8  # whose scale fp16 does not hold
    report = liger_hw.float8(model, smallest=16, keep_frozen=True)
    assert all(text.endswith(", kept") for text in report.linears.values())
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="an adapter merged into it; call report.undo"):
            merge()
    weight = model.get_submodule(next(iter(report.linears))).weight_fp8.requires_grad_()
    with pytest.raises(ValueError, match="cannot be changed, trained.*; call report.undo"):
        model(input_ids=IDS)
    weight.requires_grad_(False)
    expected = {name: value.clone() for name, value in model.state_dict().items() if "base_layer" in name}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        with pytest.raises(ValueError, match=f"kept in FP8 was cast to {dtype}"):
            model.to(dtype)
    report.undo()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


OF_ADAPTERS = {
    "ADALORA": {"total_step": 10, "init_r": 4},
    "BOFT": {"boft_block_size": 16},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 16},
    "IA3": {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "OFT": {"oft_block_size": 16, "r": 0},
    "VBLORA": {"num_vectors": 16, "vector_length": 16, "topk": 2},
    "WAVEFT": {"n_frequency": 32},
}
NOT_OF_A_LINEAR = {"ADAPTION_PROMPT", "POLY", "SHADOW", "TRAINABLE_TOKENS"}
"""Of the adapters with `target_modules`: of attention, of a task's number, of a whole model, of an embedding."""


def _adapters():
    """The names of all of PEFT's adapters that take linears."""
    try:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as configs
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING as tuners
    except ImportError:
        return []
    takes_linears = {kind.value for kind in tuners if "target_modules" in configs[kind].__dataclass_fields__}
    return sorted(takes_linears - NOT_OF_A_LINEAR)


def _adapted(model, kind):
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    options = {"target_modules": ["q_proj", "gate_proj"], **OF_ADAPTERS.get(kind, {})}
    try:
        model = peft.get_peft_model(model, PEFT_TYPE_TO_CONFIG_MAPPING[kind](**options))
    except ImportError as error:
        pytest.skip(str(error))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.mark.daily(kind=("HRA", "LORA", "OFT"))
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", _adapters())
def test_every_adapter_around_kept_weights(kind, order):
    """As around the same weights that are not kept, bit for bit in the forward; many read the weight itself."""
    if (kind, order) in (("GLORA", "after"), ("LN_TUNING", "after")):
        pytest.skip("PEFT takes plain linears alone, or copies and trains them")
    results = []
    for keep in (False, True):
        model = _llama(intermediate_size=128, num_key_value_heads=4, num_hidden_layers=1).requires_grad_(False)
        liger_hw.float8(model, smallest=16, keep_frozen=True).undo()  # rounds the weights
        model = _adapted(model, kind) if order == "before" else model
        report = liger_hw.float8(model, smallest=16, keep_frozen=keep)
        model = _adapted(model, kind) if order == "after" else model
        with torch.no_grad(), model.disable_adapter():
            disabled = model(input_ids=IDS).logits
        results.append([model(input_ids=IDS).logits.detach(), disabled, *_gradients(model.eval())])
    assert all("kept" in text for path, text in report.linears.items() if "base_layer" in path)
    (logits, *exact), (kept_logits, *kept) = results
    assert torch.equal(logits, kept_logits) and torch.equal(exact[0], kept[0]) and torch.equal(exact[1], kept[1])
    for a, b in zip(kept[2:], exact[2:], strict=True):
        assert (a - b).norm() <= 0.05 * b.norm(), "a weight's small rows may underflow in one of the two"
    assert torch.equal(model.unload()(input_ids=IDS).logits, disabled)


def test_torch_compile_of_an_adapter_that_reads_a_kept_weight():
    model = _lora(use_dora=True)
    liger_hw.float8(model, smallest=16, keep_frozen=True)
    expected = _gradients(model)
    for layer in model.base_model.model.model.layers:
        layer.mlp.compile(backend="aot_eager")
    torch.testing.assert_close(_gradients(model), expected)


def test_a_checkpoint_without_a_kept_weight_leaves_it_and_says_so():
    model = _lora()
    liger_hw.float8(model, smallest=16, keep_frozen=True)
    expected, state = _gradients(model), model.state_dict()
    name = next(name for name in state if "base_layer" in name)
    del state[name]
    assert model.load_state_dict(state, strict=False).missing_keys == [name]
    assert _same(_gradients(model), expected)


def test_a_weight_that_linears_share_is_not_kept():
    """One FP8 copy for each would be two weights."""
    block = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3)).requires_grad_(False)
    block[1].weight = block[0].weight
    block.append(block[2])
    report = liger_hw.float8(block, smallest=16, keep_frozen=True)
    assert [text.endswith(", kept") for text in report.linears.values()] == [False, False, True]
    assert block[1].weight is block[0].weight and report.undo() == 3


def test_the_dtype_of_a_model_stays():
    """transformers reads it of a model's first parameter, and programs cast pixels to it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Siglip2VisionConfig(**sizes, patch_size=4, num_patches=16)
    model = transformers.Siglip2VisionModel(config).bfloat16().requires_grad_(False)
    report = liger_hw.float8(model, smallest=16, keep_frozen=True)
    assert model.dtype is torch.bfloat16 and sum("kept" in text for text in report.linears.values()) > 5
    assert [path for path, text in report.linears.items() if "kept" not in text][0].endswith("patch_embedding")


def test_a_linear_whose_input_is_cast_to_the_dtype_of_its_weight():
    """As T5 does before `wo`."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval().requires_grad_(False)
    liger_hw.float8(model, smallest=16, keep_frozen=True).undo()  # rounds the weights
    report = liger_hw.float8(model, smallest=16)
    expected = model(input_ids=IDS, labels=IDS).logits
    report.undo()
    liger_hw.float8(model, smallest=16, keep_frozen=True)
    assert torch.equal(model(input_ids=IDS, labels=IDS).logits, expected)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_what_is_not_multiplied_in_float8_takes_a_kept_weight_in_its_dtype(recipe):
    """No rows, fp64, traces and transforms: as `undo` leaves the linear, which trains an adapter before it."""
    block = torch.nn.Sequential(torch.nn.Linear(32, 48)).requires_grad_(False)
    x = torch.randn(5, 32, requires_grad=True)

    def results():
        (dx,) = torch.autograd.grad(block(x[:0]).sum(), x)
        with torch.autocast("cpu", torch.bfloat16):
            empty = block(x[:0])
        transformed = torch.func.jvp(block, (x,), (torch.ones_like(x),))
        traced = torch.jit.trace(block, (x,), check_trace=False)(x), torch.fx.symbolic_trace(block)(x)
        return [dx, block(x[:0]), empty, *traced, *transformed]

    report = liger_hw.float8(block, recipe, smallest=16, keep_frozen=True)
    kept = results()
    report.undo()
    assert _same(kept, results()) and kept[2].dtype is torch.bfloat16
    x, expected = x.double(), block.double()(x.double())
    liger_hw.float8(block, recipe, smallest=16, keep_frozen=True)
    assert torch.equal(block(x), expected), "fp64 is not rounded, and not kept"


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_a_gated_mlp_takes_an_empty_batch(keep):
    model = _lora()
    liger_hw.patch(model)
    liger_hw.float8(model, smallest=16, keep_frozen=keep)
    mlp = model.base_model.model.model.layers[0].mlp
    x = torch.zeros(0, 64, requires_grad=True)
    mlp(x).sum().backward()
    assert x.grad.shape == x.shape


def test_a_model_without_storage_gives_shapes():
    model = _llama().to("meta")
    liger_hw.float8(model, smallest=16)
    assert model(input_ids=IDS.to("meta")).logits.shape == (*IDS.shape, 64)


def test_disabled(set_env):
    set_env("LIGER_HW_DISABLE", 1)
    model = _llama()
    report = liger_hw.float8(model, smallest=16, keep_frozen=True)
    assert not any(type(m) is Float8Linear for m in model.modules()) and report.undo() == 0
    assert "left alone: LIGER_HW_DISABLE is set" in str(report)


def test_undo_of_a_linear_that_was_parametrised_since_is_refused():
    block = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    report = liger_hw.float8(block, smallest=16)
    torch.nn.utils.parametrizations.weight_norm(block[1])
    with pytest.raises(ValueError, match="1 was parametrised since"):
        report.undo()
    torch.nn.utils.parametrize.remove_parametrizations(block[1], "weight")
    assert report.undo() == 2 and type(block[1]) is torch.nn.Linear


def test_undo_of_a_linear_that_was_sharded_by_itself_is_refused(one_rank):
    block, x = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)), torch.randn(4, 32)
    report = liger_hw.float8(block, smallest=16)
    expected = block(x)
    _shard(block[1])
    assert torch.equal(block(x), expected)
    with pytest.raises(ValueError, match="1 was .* sharded by itself, and is a FSDPFloat8Linear"):
        report.undo()
    assert type(block[0]) is Float8Linear


def test_adapters_merge_after_undo(tmp_path):
    model = _lora()
    report = liger_hw.float8(model, smallest=16, keep_frozen=True)
    torch.save(model, tmp_path / "model")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        assert _same(_gradients(twin), _gradients(model))
    report.undo()
    expected = model(input_ids=IDS).logits
    model.merge_adapter()
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    model.unmerge_adapter()


def test_nothing_to_keep_is_refused():
    model = _llama()
    with pytest.raises(ValueError, match="call it after get_peft_model"):
        liger_hw.float8(model, smallest=16, keep_frozen=True)
    assert not any(type(m) is Float8Linear for m in model.modules())


def test_a_weight_that_is_quantised_already_is_left_alone():
    block = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))).requires_grad_(False)
    for layer, dtype in zip(block, (torch.float8_e4m3fn, torch.int8)):
        layer.weight = torch.nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    report = liger_hw.float8(block, smallest=16, keep_frozen=True)
    assert list(report.linears) == ["2"] and "its weight is quantised" in report.left_alone["1"]


def test_weights_that_are_not_here_are_not_kept_and_nothing_changes(one_rank):
    """On the meta device, and sharded before; one sharded since is not given back, which FSDP would not see."""
    for change in (lambda block: block.to("meta"), _shard):
        block = torch.nn.Sequential(torch.nn.Linear(32, 32)).requires_grad_(False)
        change(block)
        with pytest.raises(ValueError, match="0.weight is sharded or has no data yet"):
            liger_hw.float8(block, smallest=16, keep_frozen=True)
        assert type(block[0]) is torch.nn.Linear
    block = torch.nn.Sequential(torch.nn.Linear(32, 32)).requires_grad_(False)
    report = liger_hw.float8(block, smallest=16, keep_frozen=True)
    _shard(block)
    with pytest.raises(ValueError, match="sharded since"):
        report.undo()
    assert block(torch.ones(2, 32)).isfinite().all()


@pytest.mark.daily(recipe="rowwise")
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_torch_compile(recipe):
    """The whole layer in one graph, forward and backward."""
    model, _ = _in_float8(recipe)
    expected = _gradients(model)
    for layer in model.model.layers:
        layer.mlp.compile(fullgraph=True, backend="aot_eager")
    assert _same(_gradients(model), expected)
