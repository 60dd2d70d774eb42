"""QK norm and rope in one: the models' attention layers, the module, programs without a partner."""

from __future__ import annotations

import importlib

import pytest
import torch
from harness import few_sizes, make, run, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig
from liger_hw.kernels.rotary.qk_norm_rope import LigerQKNormRope, liger_qk_norm_rope
from liger_hw.registry import get_op


def _parts(generator, dtype=torch.float64, heads=(4, 2), width=8, tokens=5):
    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = (drawn(2, tokens, n, width).requires_grad_() for n in heads)
    angles = drawn(2, tokens, width // 2)
    angles = torch.cat((angles, angles), -1)
    return q, k, drawn(width), drawn(width), angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.cpu
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_models(generator, family):
    """The norms and the rotary function of the model's code, called as its attention calls them."""
    pytest.importorskip("transformers")
    model = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    how = {} if family == "qwen3" else {"offset": 1.0, "casting_mode": "gemma"}
    q, k, wq, wk, cos, sin = _parts(generator)
    norms = []
    for w in (wq, wk):
        norm = getattr(model, f"{family.capitalize()}RMSNorm")(8, eps=1e-6).double()
        with torch.no_grad():
            norm.weight.copy_(w)
        norms.append(norm)
    theirs = model.apply_rotary_pos_emb(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)
    weights = [w.clone().requires_grad_() for w in (wq, wk)]
    ours = liger_qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), *weights, cos, sin, **how)
    grads = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in ours]
    expected = torch.autograd.grad(theirs, (q, k, norms[0].weight, norms[1].weight), grads)
    found = torch.autograd.grad(ours, (q, k, *weights), grads)
    for a, b in zip((*ours, *found), (*theirs, *expected)):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)  # the models norm in fp32


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("heads", [(1, 5), (6, 1), (3, 3)])
@pytest.mark.parametrize("ctas", [1, 2, 20])
def test_grids(lane, seed, heads, ctas):
    """More programs of q than of k, and the other way round, on grids smaller and larger than the work."""
    op = get_op("qk_norm_rope")
    config = LaunchConfig({"BLOCK_T": 2, "BLOCK_H": 2}, 1, 1, ctas)
    with registry.override("qk_norm_rope.bwd", config):
        verify(op, make(op, (1, 7, *heads, 6), torch.float32, lane.device, seed), seed)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("at_once, heads", [(1, 4), (2, 4), (2, 2), (4, 2)])
def test_walks(lane, seed, at_once, heads):
    """Programs of the forward with fewer heads than HEADS, and a token's heads over several programs."""
    op = get_op("qk_norm_rope")
    config = LaunchConfig({"BLOCK_T": 2, "BLOCK_H": at_once, "HEADS": heads}, 1)
    with registry.override("qk_norm_rope.fwd", config):
        for options in op.options:
            verify(op, make(op, (2, 3, 5, 3, 6), torch.float32, lane.device, seed, options), seed)


@pytest.mark.cpu
def test_one_result_unused(generator):
    q, k, wq, wk, cos, sin = _parts(generator)
    wq, wk = wq.requires_grad_(), wk.requires_grad_()
    out = liger_qk_norm_rope(q, k, wq, wk, cos, sin, unsqueeze_dim=2)[0]
    dq, dk, dwq, dwk = torch.autograd.grad(out.sum(), (q, k, wq, wk), allow_unused=True)
    assert dq.abs().sum() > 0 and dwq.abs().sum() > 0
    assert not dk.any() and not dwk.any()


@pytest.mark.cpu
def test_module(generator):
    module = LigerQKNormRope(8, eps=1e-5, offset=1.0, casting_mode="gemma", init_fn="zeros")
    q, k, wq, wk, cos, sin = _parts(generator, torch.float32)
    found = module(q, k, cos, sin, unsqueeze_dim=2)
    ones = torch.ones(8)
    expected = liger_qk_norm_rope(q, k, ones, ones, cos, sin, 1e-5, casting_mode="gemma", unsqueeze_dim=2)
    torch.testing.assert_close(found, expected)
    assert {name for name, _ in module.named_parameters()} == {"q_weight", "k_weight"}


@pytest.mark.cpu
def test_what_does_not_fit_is_refused(seed):
    op = get_op("qk_norm_rope")
    sample = make(op, few_sizes(op), torch.float32, "cpu", seed)
    q, k, wq, wk, *rest = sample.args
    for args, words in [
        ((q, k, wq[:-1], wk, *rest), "q_weight must have shape"),
        ((q, k, wq, wk.bfloat16(), *rest), "one dtype"),
        ((q, k.bfloat16(), wq, wk, *rest), "one dtype"),
        ((q, k, wq, wk, *rest[:-1], "none"), "llama, gemma"),
        ((q, k[:, :, :-1], wq, wk, *rest), "differ in heads only"),
    ]:
        with pytest.raises(ValueError, match=f"liger_qk_norm_rope.*{words}"):
            op.function(*args, **sample.kwargs)
    assert run(op.function, sample, seed).outputs[0].shape == q.shape
