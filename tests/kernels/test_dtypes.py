"""One table: the dtypes that go into each public function, and the dtypes that come out.

They are Liger 0.8.5's and torch's. Where those two differ torch's is kept, since a patched model must compute what it
did: rms_norm, fused_add_rms_norm and modulated_rms_norm with a wider weight return the promoted dtype (Liger: the
input's), kl_div and tvd of two half-precision tensors return that dtype (Liger: fp32), and SwiGLU and GEGLU refuse a
mixture (Liger returns the gate's dtype, torch the promoted one).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import mapped

from liger_hw import chunked_loss, registry

DTYPES = {"h": torch.bfloat16, "f": torch.float32}
REFUSED = ""

TABLE: dict[str, dict[str, str]] = {
    "attn_res": {"hhh": "h", "hff": "h", "fhh": "f", "fff": "f"},
    "cross_entropy": {"h": "h", "f": "f"},
    "dyt": {"hhhh": "h", "hfff": "h", "fhhh": "f", "ffff": "f"},
    "embedding": {"h": "h", "f": "f"},
    "float8_linear": {"hh": "h", "ff": "f", "hf": REFUSED},
    "fused_add_rms_norm_float8": {"hhhh": "hh", "ffff": "ff", "hhfh": REFUSED, "hfhh": REFUSED},
    "fused_add_rms_norm": {"hhh": "hh", "hhf": "fh", "ffh": "ff", "fff": "ff", "hfh": REFUSED},
    "fused_ce_tvd": {"hh": "ff", "hf": "ff", "fh": "ff", "ff": "ff"},
    "fused_gate_up_swiglu": {"h": "h", "f": "f"},
    "fused_linear_cross_entropy": {"hh": "f", "ff": "f", "hf": REFUSED},
    "fused_linear_jsd": {"hhhh": "f", "hhff": "f", "ffhh": "f", "ffff": "f", "hfhh": REFUSED},
    "fused_linear_kl_div": {"hhh": "f", "hhf": "f", "ffh": "f", "fff": "f", "hfh": REFUSED},
    "fused_linear_log_probs": {"hh": "f", "ff": "f", "hf": REFUSED},
    "fused_moe": {"hhhh": "h", "hhhf": "h", "fffh": "f", "ffff": "f", "hfhh": REFUSED},
    "fused_neighborhood_attention": {"hhh": "h", "fff": "f", "hff": REFUSED},
    "gated_delta_inputs": {"hhhhhh": "hhhhf", "hfhhff": "hhhhf", "hhffff": "hhhff", "ffffff": "fffff"},
    "gated_rms_norm": {"hhh": "h", "hhf": "h", "hfh": "h", "ffh": "f", "fff": "f"},
    "geglu": {"hh": "h", "ff": "f", "hf": REFUSED},
    "geglu_float8": {"hhh": "h", "fff": "f", "hff": REFUSED},
    "group_norm": {"hhh": "h", "hff": "h", "fhh": "f", "fff": "f"},
    "interleaved_rope": {"hhhh": "hh", "hhff": "hh", "ffhh": "ff", "ffff": "ff", "hfff": "hf"},
    "jsd": {"hh": "h", "hf": "h", "fh": "f", "ff": "f"},
    "kl_div": {"hh": "h", "hf": "f", "fh": "f", "ff": "f"},
    "layer_norm": {"hhh": "h", "hff": "h", "fhh": "f", "fff": "f"},
    "layer_norm_float8": {"hhhh": "h", "hffh": "h", "ffff": "f", "hhhf": REFUSED},
    "llama4_rope": {"hh": "hh", "ff": "ff", "hf": "hf"},
    "log_probs": {"h": "f", "f": "f"},
    "mhc_coeffs": {"hhhhhh": "fff", "hfffff": "fff", "ffffff": "fff"},
    "mhc_post_res": {"hhhh": "h", "hfff": "h", "ffff": "f"},
    "mhc_pre": {"hh": "h", "hf": "h", "ff": "f"},
    "modulated_rms_norm": {"hhhh": "h", "hfhh": "f", "hhff": "h", "fhhh": "f", "ffff": "f"},
    "multi_token_attention": {"hhh": "h", "fff": "f", "hff": REFUSED},
    "poly_norm": {"hhh": "h", "hff": "h", "fhh": "f", "fff": "f"},
    "qk_norm_rope": {"hhhhhh": "hh", "hhhhff": "hh", "ffffff": "ff", "hfffff": REFUSED},
    "qwen2vl_mrope": {"hhhh": "hh", "hhff": "hh", "ffff": "ff"},
    "relu_squared": {"h": "h", "f": "f"},
    "rms_norm_float8": {"hhh": "h", "hff": "f", "fff": "f", "hfh": REFUSED},
    "rms_norm": {"hh": "h", "hf": "f", "fh": "f", "ff": "f"},
    "rope": {"hhhh": "hh", "hhff": "hh", "ffhh": "ff", "ffff": "ff", "hfff": "hf"},
    "short_conv": {"hh": "h", "hf": "h", "fh": "f", "ff": "f"},
    "softmax": {"h": "h", "f": "f"},
    "sparsemax": {"h": "h", "f": "f"},
    "swiglu": {"hh": "h", "ff": "f", "hf": REFUSED},
    "swiglu_float8": {"hhh": "h", "fff": "f", "hff": REFUSED},
    "tvd": {"hh": "h", "hf": "f", "fh": "f", "ff": "f"},
    "vision_rope": {"hhhh": "hh", "hhff": "hh", "ffff": "ff"},
    "vocab_parallel_cross_entropy": {"h": "f", "f": "f"},
}
"""Op -> dtypes of its sample's floating tensors -> dtypes of its floating results; h is bf16, f is fp32."""

LOSSES = tuple(name for name in TABLE if name.endswith(("cross_entropy", "jsd", "kl_div", "tvd")))

TORCH = {
    "cross_entropy": F.cross_entropy,
    "kl_div": F.kl_div,
    "softmax": lambda x: F.softmax(x, -1),
    "tvd": lambda p, q: (p - q).abs().mean(),
}
"""torch's own function with the sample's arguments, where it takes every mixture of dtypes."""


def _call(name: str, dtypes: str, generator, function=None):
    """(the sample's floating tensors, the results of the op with them in these dtypes)"""
    op = registry.get_op(name)
    sizes = op.small[0] if op.small else tuple(min(size, 17) for size in next(iter(op.workloads.values())))
    sample = op.sample(sizes, torch.float32, torch.device("cpu"), generator)
    letters, given = iter(dtypes), []

    def cast(t):
        if t.is_floating_point():
            t = t.detach().to(DTYPES[next(letters)]).requires_grad_(t.requires_grad)
            given.append(t)
        return t

    args = mapped(sample.args, cast)
    assert next(letters, None) is None, f"{name}'s sample has {len(given)} floating tensors"
    results = (function or op.function)(*args, **sample.kwargs)
    return given, results if isinstance(results, tuple) else (results,)


def _letters(tensors) -> str:
    names = {dtype: letter for letter, dtype in DTYPES.items()}
    return "".join(names[t.dtype] for t in tensors)


@pytest.mark.cpu
def test_every_op_is_in_the_table():
    assert set(TABLE) == set(registry.ops())


@pytest.mark.cpu
@pytest.mark.parametrize("name,given", [(name, given) for name, rows in TABLE.items() for given in rows])
def test_the_dtypes_of_results(name, given, generator):
    expected = TABLE[name][given]
    if expected == REFUSED:
        with pytest.raises(ValueError, match="dtype|must be torch"):
            _call(name, given, generator)
        return
    inputs, results = _call(name, given, generator)
    assert _letters(results) == expected
    if name in TORCH:
        assert results[0].dtype == _call(name, given, generator, TORCH[name])[1][0].dtype
    leaves = [t for t in inputs if t.requires_grad]
    for leaf, grad in zip(leaves, torch.autograd.grad(sum(r.float().sum() for r in results), leaves)):
        assert grad.dtype == leaf.dtype


@pytest.mark.cpu
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", ["h", "f"])
def test_losses_under_autocast_are_fp32(name, dtype, generator):
    """As torch's are: cross_entropy and kl_div run in fp32 under autocast."""
    given = dtype * len(next(iter(TABLE[name])))
    with torch.autocast("cpu", torch.bfloat16):
        assert set(_letters(_call(name, given, generator)[1])) == {"f"}


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("name", ["kl_div", "tvd"])
@pytest.mark.lanes("cpu", "interpret", "gpu")
def test_a_target_of_another_dtype(lane, name, reduction, generator):
    """An fp32 target keeps its digits: the loss is that of fp64 on the same numbers, to fp32's accuracy."""
    x = torch.randn(5, 70, generator=generator).log_softmax(-1).to(lane.device, torch.float16)
    y = torch.randn(5, 70, generator=generator).softmax(-1).to(lane.device)
    if name == "tvd":
        x = x.float().exp().half()
    op, exact = registry.get_op(name), x.cpu().double().requires_grad_()
    expected = op.reference(exact, y.cpu().double(), reduction=reduction)
    loss = op.function(x.requires_grad_(), y, reduction=reduction)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-7)
    loss.backward(torch.ones_like(loss))
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(x.grad.cpu().double(), exact.grad, rtol=2**-10, atol=2**-24)


@pytest.mark.cpu
@pytest.mark.parametrize("name", [n for n in dir(chunked_loss) if n.startswith("Liger") and n.endswith("Loss")])
@pytest.mark.parametrize("autocast", [False, True])
def test_chunked_losses_are_fp32(name, autocast, generator):
    x, w = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((2, 3, 8), (11, 8)))
    y, ones = torch.arange(6).view(2, 3), torch.ones(2, 3)
    heads = (x.flatten(0, 1), w) * 2
    calls = {
        "LigerFusedLinearJSDLoss": lambda loss: loss(*heads, y.flatten()),
        "LigerFusedLinearCosineSimilarityLoss": lambda loss: loss(*heads, y.flatten()),
        "LigerFusedLinearGRPOLoss": lambda loss: loss(x, w, y, ones, ones[:, 0], ref_input=x, ref_weight=w)[0],
        "LigerFusedLinearKTOLoss": lambda loss: loss(x, w, y, None, torch.tensor([True, False]))[0],
        "LigerFusedLinearDPOLoss": lambda loss: loss(w, x, y, None, x, w)[0],
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        call = calls.get(name, lambda loss: loss(w, x, y)[0])
        assert call(getattr(chunked_loss, name)()).dtype == torch.float32
