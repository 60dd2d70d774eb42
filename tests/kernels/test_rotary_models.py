"""The rotary ops against the functions of transformers' models, forward and backward, in fp64."""

from __future__ import annotations

import importlib

import pytest
import torch
from harness import run

from liger_hw.registry import Sample, get_op

pytest.importorskip("transformers")


def _model(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _states(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _angles(generator, *shape):
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 6


def _same(ours, sample: Sample, theirs) -> None:
    """ours: a function or the name of an op. Tolerances are of fp32, in which theirs may compute."""
    ours = run(get_op(ours).function if isinstance(ours, str) else ours, sample, 3)
    expected = run(theirs, sample, grads=ours.incoming)
    for found, wanted in zip(ours.bits(), expected.bits()):
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["glm", "glm4", "ernie4_5", "helium"])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_halves_of_cos_shared_by_interleaved_pairs(generator, name, unsqueeze_dim):
    """GLM rotates half the width."""
    theirs = _model(name).apply_rotary_pos_emb
    shape = (2, 4, 5, 8) if unsqueeze_dim == 1 else (2, 5, 4, 8)
    q, k = _states(generator, *shape), _states(generator, *shape)
    angles = _angles(generator, 2, 5, 2 if name.startswith("glm") else 4)
    angles = torch.cat((angles, angles), -1)
    kwargs = {"unsqueeze_dim": unsqueeze_dim, "shared_halves": True}
    _same("interleaved_rope", Sample((q, k, angles.cos(), angles.sin()), kwargs), _without(theirs))


def _without(function):
    """`function` of transformers, without the keywords that only we have."""

    def call(q, k, cos, sin, shared_halves=None, to_halves=None, **more):
        return function(q, k, cos, sin, **more)

    return call


@pytest.mark.parametrize("name", ["cohere", "cohere2"])
def test_cohere(generator, name):
    q, k = _states(generator, 2, 4, 5, 8), _states(generator, 2, 2, 5, 8)
    angles = _angles(generator, 1, 5, 4).repeat_interleave(2, -1)
    _same("interleaved_rope", Sample((q, k, angles.cos(), angles.sin())), _model(name).apply_rotary_pos_emb)


def test_gpt_j(generator):
    """One angle a pair; the model rotates the first dimensions of q and of k, [B, T, heads, D]."""
    turn = _model("gptj").apply_rotary_pos_emb
    q, k = _states(generator, 2, 5, 4, 8), _states(generator, 2, 5, 4, 8)
    angles = _angles(generator, 2, 5, 3)

    def theirs(q, k, cos, sin, **_):
        return tuple(torch.cat((turn(x[..., :6], sin, cos), x[..., 6:]), -1) for x in (q, k))

    sample = Sample((q, k, angles.cos(), angles.sin()), {"unsqueeze_dim": 2, "rotary_dim": 6})
    _same("interleaved_rope", sample, theirs)


def test_deepseek_v3(generator):
    """Interleaved in, halves out; one head of k."""
    q, k = _states(generator, 2, 4, 5, 8), _states(generator, 2, 1, 5, 8)
    angles = _angles(generator, 2, 5, 4)
    angles = torch.cat((angles, angles), -1)
    sample = Sample((q, k, angles.cos(), angles.sin()), {"shared_halves": True, "to_halves": True})
    _same("interleaved_rope", sample, _without(_model("deepseek_v3").apply_rotary_pos_emb_interleave))


def test_gpt_neox_is_rope_over_part_of_the_width(generator):
    q, k = _states(generator, 2, 4, 5, 8), _states(generator, 2, 4, 5, 8)
    angles = _angles(generator, 1, 5, 2)
    angles = torch.cat((angles, angles), -1)
    _same("rope", Sample((q, k, angles.cos(), angles.sin())), _model("gpt_neox").apply_rotary_pos_emb)


@pytest.mark.parametrize("batch", [1, 2])
def test_llama4_text(generator, batch):
    q, k = _states(generator, 2, 5, 4, 8), _states(generator, 2, 5, 1, 8)
    angles = _angles(generator, batch, 5, 4)
    freqs = torch.polar(torch.full_like(angles, 1.3), angles)  # a scale, as attention_scaling gives it
    _same("llama4_rope", Sample((q, k, freqs)), _model("llama4").apply_rotary_emb)


def test_llama4_vision(generator):
    from liger_hw.kernels.rotary.llama4_rope import liger_llama4_vision_rotary_pos_emb as ours

    q, k = _states(generator, 2, 5, 4, 8), _states(generator, 2, 5, 4, 8)
    angles = _angles(generator, 5, 1, 4)
    sample = Sample((q, k, torch.polar(torch.ones_like(angles), angles)))
    _same(ours, sample, _model("llama4").vision_apply_rotary_emb)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_vision_towers(generator, name):
    q, k = _states(generator, 5, 4, 8), _states(generator, 5, 4, 8)
    angles = _angles(generator, 5, 4)
    angles = torch.cat((angles, angles), -1)
    _same("vision_rope", Sample((q, k, angles.cos(), angles.sin())), _model(name).apply_rotary_pos_emb_vision)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_multimodal(generator, unsqueeze_dim):
    """Transformers 4 takes three planes of angles; 5 merges them beforehand."""
    sections = [1, 2, 1]
    shape = (2, 4, 5, 8) if unsqueeze_dim == 1 else (2, 5, 4, 8)
    q, k = _states(generator, *shape), _states(generator, *shape)
    cos, sin = _angles(generator, 3, 2, 5, 8).cos(), _angles(generator, 3, 2, 5, 8).sin()  # no pair of angles alike
    model = _model("qwen2_vl")

    def theirs(q, k, cos, sin, mrope_section, unsqueeze_dim):
        if hasattr(model, "apply_multimodal_rotary_pos_emb"):
            return model.apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim)
        parts = ([t[i % 3] for i, t in enumerate(x.split(mrope_section * 2, -1))] for x in (cos, sin))
        return model.apply_rotary_pos_emb(q, k, *(torch.cat(p, -1) for p in parts), unsqueeze_dim)

    _same("qwen2vl_mrope", Sample((q, k, cos, sin, sections, unsqueeze_dim)), theirs)


def test_unused_results_cost_no_gradient(generator):
    """Only q's result is used: k's gradient is None, and q's is right."""
    q, k = _states(generator, 1, 3, 2, 6), _states(generator, 1, 3, 1, 6)
    freqs = torch.polar(torch.ones(1, 3, 3, dtype=torch.float64), _angles(generator, 1, 3, 3))
    op = get_op("llama4_rope")
    out = op.function(q, k, freqs)[0]
    grad = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    dq, dk = torch.autograd.grad(out, (q, k), grad, allow_unused=True)
    expected = op.function(grad, k, freqs.conj())[0]  # the transposed rotation
    assert dk is None
    torch.testing.assert_close(dq, expected)


WRONG = {
    "interleaved_rope": [
        (lambda a: (*a[:2], a[2][..., :5], a[3][..., :5]), {}, "even"),
        (lambda a: (a[0], a[1], a[2], a[3]), {"unsqueeze_dim": 3}, "unsqueeze_dim"),
        (lambda a: (a[0], a[1], a[2][0], a[3][0]), {}, "to match q"),
    ],
    "llama4_rope": [
        (lambda a: (*a[:2], a[2].real), {}, "complex"),
        (lambda a: (*a[:2], a[2][:, :2]), {}, "to match xq"),
        (lambda a: (a[0], a[1][:, :2], a[2]), {}, "differ in heads only"),
    ],
    "qwen2vl_mrope": [
        (lambda a: (*a[:4], [1, 2]), {}, "three positive integers"),
        (lambda a: (*a[:4], None), {}, "three positive integers"),
        (lambda a: (*a[:4], [8, 8, 8]), {}, "head width 8, got 48"),
        (lambda a: (*a[:2], a[2][:1], a[3][:1], a[4]), {}, "to match q"),
    ],
    "vision_rope": [
        (lambda a: (a[0][None], *a[1:]), {}, r"\[T, heads, D\]"),
        (lambda a: (*a[:2], a[2][:-1], a[3][:-1]), {}, r"\[10, width\]"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name, generator):
    op = get_op(name)
    sample = op.sample((2, 5, 3, 1, 8), torch.float32, torch.device("cpu"), generator)
    for change, kwargs, words in WRONG[name]:
        with pytest.raises(ValueError, match=f"liger_{name}.*{words}"):
            op.function(*change(sample.args), **{**sample.kwargs, **kwargs})
    with pytest.raises(ValueError, match="gradient"):
        angles = sample.args[2].clone().requires_grad_()
        op.function(*sample.args[:2], angles, *sample.args[3:], **sample.kwargs)
