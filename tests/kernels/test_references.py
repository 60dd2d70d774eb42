"""The references, which every other test trusts, against torch's own functions and the models' code, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import tensors

from liger_hw.kernels.heads.fused_linear_cross_entropy import fused_linear_cross_entropy_reference
from liger_hw.kernels.losses.cross_entropy import cross_entropy_reference
from liger_hw.kernels.norms.fused_add_rms_norm import fused_add_rms_norm_reference
from liger_hw.kernels.norms.rms_norm import rms_norm_reference
from liger_hw.kernels.pointwise.swiglu import swiglu_reference
from liger_hw.kernels.rotary.rope import rope_reference


def _random(generator, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
def test_rms_norm(generator, mode):
    x, w = _random(generator, 5, 7), _random(generator, 7)
    torch.testing.assert_close(rms_norm_reference(x, w, 1e-5, 0.0, mode), F.rms_norm(x, (7,), w, 1e-5))
    torch.testing.assert_close(rms_norm_reference(x, w, 1e-5, 1.0, mode), F.rms_norm(x, (7,), w + 1, 1e-5))
    torch.testing.assert_close(rms_norm_reference(x, None, 1e-5, 0.0, mode), F.rms_norm(x, (7,), None, 1e-5))


def test_rms_norm_casts_as_the_models_do(generator):
    """bf16: Llama rounds before the weight, Gemma after it; bit for bit what transformers computes."""
    pytest.importorskip("transformers")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = _random(generator, 64, 96, dtype=torch.bfloat16)
    for module, offset, mode in ((LlamaRMSNorm(96, 1e-6), 0.0, "llama"), (GemmaRMSNorm(96, 1e-6), 1.0, "gemma")):
        with torch.no_grad():
            module.weight.copy_(_random(generator, 96))
        module = module.to(torch.bfloat16)
        assert torch.equal(rms_norm_reference(x, module.weight, 1e-6, offset, mode), module(x)), mode


def test_fused_add_rms_norm(generator):
    x, r, w = _random(generator, 5, 7), _random(generator, 5, 7), _random(generator, 7)
    y, s = tensors(fused_add_rms_norm_reference(x, r, w, 1e-5))
    torch.testing.assert_close(s, x + r)
    torch.testing.assert_close(y, F.rms_norm(x + r, (7,), w, 1e-5))


def test_swiglu(generator):
    a, b = _random(generator, 5, 7), _random(generator, 5, 7)
    torch.testing.assert_close(swiglu_reference(a, b), F.silu(a) * b)
    torch.testing.assert_close(swiglu_reference(a, b, 0.5, 3.0), F.silu(0.5 * a) * b * 3.0)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rope(generator, unsqueeze_dim):
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def states(heads):
        return _random(generator, *((2, heads, 5, 8) if unsqueeze_dim == 1 else (2, 5, heads, 8)))

    q, k = states(4), states(2)
    angles = _random(generator, 2, 5, 4)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    torch.testing.assert_close(rope_reference(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim), expected)


LOSSES = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.3, "reduction": "none"},
    {"ignore_index": 3},
]


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(generator, options, weighted):
    x, target = _random(generator, 9, 11), torch.randint(11, (9,), generator=generator)
    target[2] = options.get("ignore_index", -100)
    weight = torch.rand(11, generator=generator, dtype=torch.float64) if weighted else None
    expected = F.cross_entropy(x, target, weight, **options)
    torch.testing.assert_close(cross_entropy_reference(x, target, weight, **options), expected)
    h, w = _random(generator, 9, 5), _random(generator, 11, 5)
    b = _random(generator, 11)
    expected = F.cross_entropy(F.linear(h, w, b), target, weight, **options)
    torch.testing.assert_close(fused_linear_cross_entropy_reference(h, w, target, b, weight, **options), expected)


def test_cross_entropy_softcap_and_z_loss(generator):
    x, target = _random(generator, 9, 11), torch.randint(11, (9,), generator=generator)
    target[4] = -100
    capped = 5 * torch.tanh(x / 5)
    results = cross_entropy_reference(x, target, softcap=5.0, lse_square_scale=0.1, return_z_loss=True)
    z_loss = 0.1 * torch.logsumexp(capped, -1)[target != -100].square().mean()
    torch.testing.assert_close(results.z_loss, z_loss)
    torch.testing.assert_close(results.loss, F.cross_entropy(capped, target) + z_loss)
