"""Gated delta nets and LFM2's short convolution: patched they compute as before, or they are left alone."""

from __future__ import annotations

import functools
import importlib
import inspect
import types

import pytest
import torch

import liger_hw
from liger_hw.autotune.fake import FakeTensor
from liger_hw.transformers import probing
from liger_hw.transformers.tiny import VOCAB, tiny_model

pytest.importorskip("transformers.models.qwen3_5", reason="transformers 4 has no Qwen3.5, and others' older mixers")

CLASSES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}
KERNELS = {"gated_delta_inputs", "short_conv"}


def _modeling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _model(family):
    cls = getattr(_modeling(family), CLASSES[family])
    layer_types = {"layer_types": ["conv", "full_attention"] * 2} if family == "lfm2" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny_model(cls, **layer_types).train()


def _mixer(model):
    return next(module for module in model.modules() if probing.mixers.is_candidate(module))


def _trained(model, **inputs):
    ids = torch.randint(4, VOCAB, (2, 70), generator=torch.Generator().manual_seed(1)).to(model.device)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    """An item for each call of an op of the family, the probes' among them; not for those without data that compile."""
    counts = []
    for kernel in KERNELS:
        run = importlib.import_module(f"liger_hw.kernels.hybrid.{kernel}")
        name = next(name for name in vars(run) if name.endswith("Function") and name != "OperatorFunction")
        function = getattr(run, name)

        def counted(x, *args, apply=function.apply):
            if not isinstance(x, FakeTensor):
                counts.append(1)
            return apply(x, *args)

        monkeypatch.setattr(function, "apply", counted)
    return counts


@pytest.mark.parametrize("family", CLASSES)
def test_a_mixer_trains_as_before(family, calls):
    _assert_trains_as_before(_model(family), calls)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CLASSES)
def test_a_mixer_trains_as_before_on_the_device(family, gpu, calls, monkeypatch):
    """With the scan in plain torch: flash-linear-attention's refuses some releases of Triton in backward."""
    modeling = _modeling(family)
    for name in {"torch_chunk_gated_delta_rule", "causal_conv1d_fn"} & vars(modeling).keys():
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    _assert_trains_as_before(_model(family).to(gpu), calls)


def _assert_trains_as_before(model, calls):
    mask = torch.ones(2, 70, dtype=torch.long, device=model.device)
    mask[1, 50:] = 0
    expected = [_trained(model), _trained(model, attention_mask=mask)]
    assert not calls
    with liger_hw.patch(model) as report:
        rows = [row for row in report.rows if row.kernel in KERNELS]
        assert rows and all(row.state == "patched" for row in rows), str(report)
        calls.clear()  # of the probes
        results = [_trained(model), _trained(model, attention_mask=mask)]
        assert len(calls) == 2 * len(rows)
    for (loss, grads), (expected_loss, expected_grads) in zip(results, expected):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            size = expected_grads[name].abs().max()
            assert (grad - expected_grads[name]).abs().max() <= 1e-3 * size + 1e-7, name


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_generation_with_a_cache_is_left_alone(family, calls):
    model = _model(family).eval()
    ids = torch.randint(4, VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
    with liger_hw.patch(model):
        calls.clear()
        assert (
            torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True), expected) and not calls
        )


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_packed_documents_run_the_forward_of_the_model(family, calls):
    mixer, x = _mixer(_model(family)), torch.randn(1, 12, _model(family).config.hidden_size)
    with liger_hw.patch(mixer):
        calls.clear()
        mixer(x)
        assert len(calls) == 1
        with pytest.raises(ValueError, match="packed"):  # transformers' own, where its packages are not installed
            mixer(x, seq_idx=torch.zeros(1, 12, dtype=torch.int32))
        assert len(calls) == 1


def test_it_can_be_left_out(calls):
    model = _model("qwen3_5")
    with liger_hw.patch(model, short_conv=False) as report:
        calls.clear()
        _trained(model)
        assert not calls and not KERNELS & {row.kernel for row in report.rows}


@pytest.mark.parametrize("change", ["bias", "taps", "activation", "gate", "partial", "copy", "mask", "norm", "sizes"])
def test_what_differs_or_cannot_be_probed_is_left_alone_with_a_reason(change, monkeypatch):
    mixer, modeling = _mixer(_model("qwen3_5")), _modeling("qwen3_5")
    cls, forward, n = type(mixer), type(mixer).forward, mixer.conv1d.in_channels
    if change == "bias":
        mixer.conv1d = torch.nn.Conv1d(n, n, 4, groups=n, padding=3)
    elif change == "taps":
        mixer.conv1d = torch.nn.Conv1d(n, n, 5, groups=n, padding=4, bias=False)
    elif change == "activation":
        mixer.activation = "relu"
    elif change == "gate":
        functional = types.SimpleNamespace(**{**vars(torch.nn.functional), "softplus": torch.nn.functional.relu})
        monkeypatch.setattr(modeling, "F", functional)
    elif change == "partial":
        monkeypatch.setattr(cls, "forward", functools.partialmethod(forward))
    elif change == "copy":
        copied = types.FunctionType(inspect.unwrap(forward).__code__, {**forward.__globals__, "__name__": "gone"})
        monkeypatch.setattr(cls, "forward", copied)
    elif change == "mask":
        monkeypatch.delattr(modeling, "apply_mask_to_padding_states")
    elif change == "norm":
        mixer.norm = None
    else:
        mixer.num_k_heads = 0
    report = liger_hw.patch(mixer)
    states = [row.state for row in report.rows if row.part == "short_conv"]
    assert len(states) == 1 and states[0].startswith("left alone: "), str(report)


def test_calls_that_the_forward_does_not_take_are_its_own_to_refuse():
    mixer = _mixer(_model("lfm2"))
    x = torch.randn(1, 12, mixer.in_proj.in_features)
    with liger_hw.patch(mixer) as report:
        assert report.patched
        for args, kwargs in (((), {}), ((x, None, None, x), {}), ((x,), {"hidden_states": x})):
            with pytest.raises(TypeError, match="argument"):
                mixer(*args, **kwargs)


def test_heads_repeated_before_the_scan_are_repeated_again(monkeypatch):
    """As transformers 5.17 does it, whose scan has as many heads of queries as of values."""
    modeling = _modeling("qwen3_5")
    mixer, scan, shapes = _mixer(_model("qwen3_5")), modeling.torch_chunk_gated_delta_rule, []

    def looked_at(query, *args, **kwargs):
        shapes.append(query.shape)
        return scan(query, *args, **kwargs)

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", looked_at)
    forward = probing.mixers._delta_replacement(modeling, repeats_heads=True)
    x = torch.randn(1, 12, mixer.hidden_size)
    torch.testing.assert_close(forward(mixer, x), mixer(x), rtol=1e-4, atol=1e-5)
    assert shapes[0][2] == mixer.num_v_heads and shapes[1][2] == mixer.num_k_heads
