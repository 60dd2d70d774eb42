"""Each variant of a norm, MLP or rotary function is recognised by what it computes, and a near miss is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_hw.transformers import probing
from liger_hw.transformers.probing import Match, Refused, rotary
from liger_hw.transformers.source import EVERYTHING, reads

WIDTH = 24
OPEN = "may take another branch"


class _Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-6

    def normed(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def norm(body, bias=False, name="SomeRMSNorm"):
    """A norm module whose forward is `body(self, x)`."""
    module = type(name, (_Norm,), {"forward": body})()
    if bias:
        module.bias = nn.Parameter(torch.zeros(WIDTH))
    return module


def _llama(self, x):
    return self.weight * self.normed(x.float()).to(x.dtype)


def _gemma(self, x):
    return (self.normed(x.float()) * (1.0 + self.weight.float())).type_as(x)


def _olmo2(self, x):
    return (self.weight * self.normed(x.float())).to(x.dtype)


def _t5(self, x):
    x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in (torch.bfloat16, torch.float16) else x)


def _layer_norm(self, x):
    return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _layer_norm_1p(self, x):
    return F.layer_norm(x, self.weight.shape, self.weight + 1.0, self.bias, 1e-5)


def _settled(self, x):
    if x.device.type == "mps" or not hasattr(torch, "get_autocast_dtype"):
        return x
    return _llama(self, x)


def _without_autocast(x):
    if x.device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _autocast_when_long(x):
    return torch.autocast(x.device.type, enabled=x.shape[-2] < 9999) if len(x) else contextlib.nullcontext()


def _in_context(enter):
    def forward(self, x):
        with enter(x):
            return _llama(self, x)

    return forward


def _normalized(self, x):
    return self.weight * F.normalize(x, dim=-1) * self.weight.shape[0] ** 0.5


def _without_epsilon(self, x):
    return F.rms_norm(x, self.weight.shape, self.weight)


def _other_when_long(self, x):
    return x if x.shape[-2] > 9999 else _llama(self, x)


def _other_by_the_second_of_two(self, x):
    return x if self.eps > 1.0 or not len(x) else _llama(self, x)


NORMS = {
    "llama": (lambda: norm(_llama), "rms_norm", "llama"),
    "gemma": (lambda: norm(_gemma), "rms_norm", "gemma, offset 1"),
    "olmo2": (lambda: norm(_olmo2), "rms_norm", "gemma"),
    "nn.LayerNorm": (lambda: nn.LayerNorm(WIDTH), "layer_norm", ""),
    "nn.LayerNorm without bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "layer_norm", "no bias"),
    "nn.LayerNorm without weight": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "layer_norm", "no weight"),
    "layer norm by hand": (lambda: norm(_layer_norm, bias=True), "layer_norm", ""),
    "epsilon in the code": (lambda: norm(_layer_norm_1p, bias=True), "layer_norm", "offset 1"),
    "conditions that kernels never turn": (lambda: norm(_settled), "rms_norm", "llama"),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    make, kernel, variant = NORMS[name]
    module = make()
    found = probing.recognise(module)
    assert isinstance(found, Match), found
    assert (found.kernel, found.variant) == (kernel, variant)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    module = module.bfloat16()
    found = probing.recognise(module)
    torch.testing.assert_close(found.replacement(module, x), module(x), rtol=2**-7, atol=1e-3)


def test_a_norm_that_agrees_in_one_dtype_only_keeps_its_own_forward_in_others():
    """T5's rounds as llama where all is bf16, and not at all where the weight is kept in fp32."""
    from liger_hw.transformers import patch

    module = nn.Sequential(norm(_t5))
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad():
        module[0].weight.normal_(generator=torch.Generator().manual_seed(1))
    mixed = module(x)
    assert mixed.dtype == torch.float32
    with patch(module) as report:
        assert [(row.kernel, row.variant) for row in report.patched] == [("rms_norm", "llama")]
        assert torch.equal(module(x), mixed)
        module.bfloat16()
        found = module(x)
    torch.testing.assert_close(found, module(x), rtol=2**-7, atol=1e-3)


NOT_NORMS = {
    "rstd rounded": (lambda self, x: x * self.normed_rstd(x), "rounds in bf16 unlike"),
    "epsilon unused": (_normalized, "no epsilon of its own"),
    "epsilon outside the root": (
        lambda self, x: self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)),
        "neither an RMSNorm nor a LayerNorm",
    ),
    "another axis": (
        lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.eps),
        "neither",
    ),
    "scale detached": (lambda self, x: self.weight * self.normed(x.float()).detach().to(x.dtype), "gradients are not"),
    "a gate": (lambda self, x, gate=None: _llama(self, x), "neither"),
    "twice the result": (lambda self, x: 2 * _llama(self, x), "neither"),
    "a limit of its inputs": (lambda self, x: _llama(self, x.clamp(-1000, 1000)), "of [2, 3, 24] of about 10000"),
    "a limit of its inputs and epsilon in the code": (
        lambda self, x: F.rms_norm(x.clamp(-1000, 1000), self.weight.shape, self.weight, 1e-5),
        "of [2, 3, 24] of about 10000",
    ),
    "another length": (_other_when_long, OPEN),
    "autocast by length": (_in_context(_autocast_when_long), OPEN),
    "a function of its own that turns autocast off": (_in_context(_without_autocast), OPEN),
    "a second condition": (_other_by_the_second_of_two, OPEN),
    "epsilon of None": (_without_epsilon, "make it with one (eps=1e-6)"),
    "raises": (lambda self, x: x.no_such_thing + self.eps, "cannot be run alone"),
}


@pytest.mark.parametrize("name", NOT_NORMS)
def test_near_misses_of_norms(name):
    body, reason = NOT_NORMS[name]
    module = norm(body)
    type(module).normed_rstd = lambda self, x: torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(
        x.dtype
    )
    if name == "rstd rounded":
        module._parameters.clear()
    found = probing.recognise(module)
    assert isinstance(found, Refused) and reason in found.reason, found


_DOUBLED_WHEN_ASKED = """
import torch
from torch import nn

DOUBLED = False


def asked(module):
    return torch.is_inference_mode_enabled()


class OddRMSNorm(nn.Module):
    twice = False

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(24)), 1e-6

    @property
    def as_property(self):
        return torch.is_inference_mode_enabled()

    def as_method(self):
        return torch.is_inference_mode_enabled()

    def by_another(self):
        return self.twice or self.as_method()

    def forward(self, x):
        y = 2 * x if {condition} else x
        y = y.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
"""


def _norm_of(condition, folder, name="odd"):
    """A norm of y, twice x where `condition` holds, of a module of this name."""
    return _made_by(_DOUBLED_WHEN_ASKED.replace("{condition}", condition), folder, name)


def _made_by(text, folder, name="odd"):
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OddRMSNorm()


CONDITIONS = {
    **dict.fromkeys(["asked(self)", "self.as_property", "self.as_method()", "self.by_another()"], OPEN),
    "DOUBLED": "reads the global variable DOUBLED",
    # Guards hold attributes, and where an attribute decides, the rest is not asked for.
    **dict.fromkeys(["self.twice", "self.twice or isinstance(self.eps, int)"]),
    **dict.fromkeys(["self.twice and len(x) > 99", "not (self.twice is False or len(x) > 99)"]),
}
"""Conditions and why a norm with one is refused, if it is."""


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_held_by_guards_or_no_match(condition, tmp_path):
    result, reason = probing.recognise(_norm_of(condition, tmp_path)), CONDITIONS[condition]
    assert isinstance(result, Match) if reason is None else reason in result.reason, result


@pytest.mark.parametrize("name", ["torchtune", "torchvision", "liger_hw_models"])
def test_code_of_packages_whose_names_begin_like_torch_s_is_read(name, tmp_path):
    assert OPEN in probing.recognise(_norm_of("x.shape[-2] > 9999", tmp_path, name)).reason


def test_code_without_source_is_left_alone():
    names = {"__name__": "odd"}
    exec(_DOUBLED_WHEN_ASKED.replace("{condition}", "self.twice"), names)
    result = probing.recognise(names["OddRMSNorm"]())
    assert isinstance(result, Refused) and result.reason == "the source of forward cannot be found", result


OPEN_BRANCHES = {
    "while": "while x.shape[0] > 99:\n            x = x[1:]",
    "try": "try:\n            x = x * 1\n        except ValueError:\n            x = x * 2",
    "comprehension": "x = sum(part for part in [x] if len(part) < 99)",
    "or": "x = len(x) < 99 and x",
    "local function": "x = (torch.sin if len(x) > 99 else torch.clone)(x)",
}


@pytest.mark.parametrize("name", OPEN_BRANCHES)
def test_every_form_of_a_branch_is_read(name, tmp_path):
    text = _DOUBLED_WHEN_ASKED.replace("y = 2 * x if {condition} else x", OPEN_BRANCHES[name] + "\n        y = x")
    result = probing.recognise(_made_by(text, tmp_path))
    assert isinstance(result, Refused), result
    assert OPEN in result.reason or "which its source does not define" in result.reason


# -- MLPs ------------------------------------------------------------------------------------------------------------


class SomeMLP(nn.Module):
    def __init__(self, act, fused=False, gate=True):
        super().__init__()
        self.up_proj = nn.Linear(8, 32 if fused else 16)
        if gate and not fused:
            self.gate_proj = nn.Linear(8, 16)
        self.down_proj = nn.Linear(16, 8)
        self.act_fn = act
        self.gate_scale, self.out_scale, self.limit, self.residual_dropout = 1.0, 1.0, 0.7, 0.0


def mlp(body, act=None, **options):
    return type("OneMLP", (SomeMLP,), {"forward": body})(act or nn.SiLU(), **options)


def _gated(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _scaled(self, x):
    y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_scale)
    return self.down_proj(y) * self.out_scale


def _halves(self, x):
    gate, up = self.up_proj(x).chunk(2, -1)
    return self.down_proj(up * self.act_fn(gate))


def _halves_up_first(self, x):
    up, gate = self.up_proj(x).chunk(2, -1)
    return self.down_proj(up * self.act_fn(gate))


def _plain(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)))


def _setting(self, x):
    self.limit = float(str(self.limit))
    return _gated(self, x)


class _Squared(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


MLPS = {
    "silu": (lambda: mlp(_gated), "swiglu", "silu"),
    "gelu": (lambda: mlp(_gated, nn.GELU()), "geglu", "gelu"),
    "tanh gelu": (lambda: mlp(_gated, nn.GELU(approximate="tanh")), "geglu", "gelu_tanh"),
    "scaled": (lambda: mlp(_scaled), "swiglu", "silu"),
    "halves": (lambda: mlp(_halves, fused=True), "fused_gate_up_swiglu", "silu"),
    "up first": (lambda: mlp(_halves_up_first, fused=True), "swiglu", "silu, up first"),
    "halves, gelu": (lambda: mlp(_halves, nn.GELU(), fused=True), "geglu", "gelu"),
    "squared relu": (lambda: mlp(_plain, _Squared(), gate=False), "relu_squared", ""),
    "dropout that is off": (lambda: _with_dropout(0.0), "swiglu", "silu"),
    "sets what is there already": (lambda: mlp(_setting), "swiglu", "silu"),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps(name):
    make, kernel, variant = MLPS[name]
    torch.manual_seed(0)
    module = make()
    module.gate_scale, module.out_scale = 0.5, 3.0
    found = probing.recognise(module)
    assert isinstance(found, Match), found
    assert (found.kernel, found.variant) == (kernel, variant)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found.replacement(module, x), module(x), rtol=1e-5, atol=1e-6)


NOT_MLPS = {
    "relu gate": (lambda: mlp(_gated, nn.ReLU()), "gated by relu"),
    "no gate": (lambda: mlp(_plain, nn.GELU(), gate=False), "has no gate"),
    "clamped": (
        lambda: mlp(lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)).clamp(max=s.limit) * s.up_proj(x))),
        "not silu",
    ),
    "a limit in the activation": (lambda: mlp(_gated, _Clipped()), "of about 10000"),
    "pairs": (lambda: mlp(_pairs, fused=True), "in pairs"),
    "detached": (lambda: mlp(lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)) * s.up_proj(x).detach())), "gradients"),
    "goes on": (lambda: mlp(lambda s, x: _gated(s, x) + x), "computes more after down_proj"),
    "twice": (
        lambda: mlp(lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)) * s.gate_proj(x))),
        "calls its projections as",
    ),
    "other input": (lambda: mlp(lambda s, x: s.down_proj(s.act_fn(s.gate_proj(2 * x)) * s.up_proj(x))), "own input"),
    "dropout": (lambda: _with_dropout(0.25), "drops out (p=0.25)"),
    "a dropout module, in eval mode": (lambda: _with_dropout_module(0.5).eval(), "drops out (p=0.5)"),
}


class _Clipped(nn.Module):
    """As ClippedGELUActivation of transformers."""

    def forward(self, x):
        return F.gelu(x).clamp(-10, 10)


def _pairs(self, x):
    y = self.up_proj(x)
    return self.down_proj(self.act_fn(y[..., ::2]) * y[..., 1::2])


def _with_dropout(p):
    def forward(self, x):
        return F.dropout(_gated(self, x), p=self.residual_dropout, training=self.training)

    module = mlp(forward)
    module.residual_dropout = p
    return module


def _with_dropout_module(p):
    module = mlp(lambda self, x: self.dropout(_gated(self, x)))
    module.dropout = nn.Dropout(p)
    return module


@pytest.mark.parametrize("name", NOT_MLPS)
def test_near_misses_of_mlps(name):
    make, reason = NOT_MLPS[name]
    found = probing.recognise(make())
    assert isinstance(found, Refused) and reason in found.reason, found


def test_projections_are_black_boxes():
    """Whatever answers in a projection's place is called the same way: quantised, adapted, sharded, without weights."""

    class Packed(nn.Module):
        out_features, in_features = 16, 8

        def forward(self, x):
            return x.repeat(1, 1, 2).sin()

    module = mlp(_gated)
    module.gate_proj = Packed()
    with torch.device("meta"):
        module.up_proj = nn.Linear(8, 16)
    assert isinstance(probing.recognise(module), Match)


# -- what stays as it was --------------------------------------------------------------------------------------------


def _counting(self, x):
    self.calls += 1
    return _gated(self, x)


def _collecting(self, x):
    self.seen.append(x.detach())
    return _gated(self, x)


def _keeping(self, x):
    self.last = self.act_fn(self.gate_proj(x))
    return self.down_proj(self.last * self.up_proj(x))


def _adding_up(self, x):
    self.total.add_(1)
    return _gated(self, x)


class _Remembering(nn.Module):
    def forward(self, x):
        self.last = F.silu(x)
        return self.last


STATEFUL = {
    "counts": (lambda: mlp(_counting), "its calls"),
    "collects": (lambda: mlp(_collecting), "its seen"),
    "keeps": (lambda: mlp(_keeping), "its last"),
    "adds up": (lambda: mlp(_adding_up), "its total"),
    "activation": (lambda: mlp(_gated, _Remembering()), "its act_fn.last"),
    "norm": (lambda: norm(lambda self, x: setattr(self, "last", x) or _llama(self, x)), "its last"),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_forward_that_leaves_something_on_its_module_is_left_alone(name):
    make, what = STATEFUL[name]
    module = make()
    module.calls, module.seen = 0, []
    if name == "adds up":
        module.register_buffer("total", torch.zeros(()))
    found = probing.recognise(module)
    assert isinstance(found, Refused) and f"its forward changes {what}" in found.reason, found
    assert module.calls == 0 and not module.seen and not hasattr(module, "last")
    assert not module._buffers or module.total == 0


def test_probing_leaves_no_trace():
    module = mlp(_with_dropout(0.5).forward.__func__)
    before, state = dict(vars(module)), torch.get_rng_state()
    probing.recognise(module), probing.recognise(norm(_llama))
    assert torch.equal(torch.get_rng_state(), state) and vars(module) == before


def test_a_default_device_does_not_matter():
    with torch.device("meta"):
        assert isinstance(probing.recognise(norm(_llama)), Match)


def test_a_default_dtype_does_not_matter():
    """from_pretrained(dtype=torch.bfloat16) makes, and a patched class's new models are probed, under that default."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [probing.recognise(norm(_llama)), probing.recognise(mlp(_gated)), rotary.recognise(_llama_rope)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(isinstance(match, Match) for match in found), found


def _called_by_another(self, x):
    return _gated(self, x)


def _inside_another(self, x):
    return (lambda: self.down_proj(x))()


@pytest.mark.parametrize(
    "forward, everything",
    [
        (_gated, False),
        (_called_by_another, True),
        (_inside_another, True),
        (lambda self, x: self.down_proj(x), True),  # its source is not told from what is beside it
    ],
)
def test_a_forward_that_hands_itself_on_may_read_everything(forward, everything):
    assert (EVERYTHING in reads(SomeMLP, forward)) is everything


def test_a_7b_model_is_patched_by_little_work():
    """Half a second on an idle core; counted, since seconds depend on what else the machine does."""
    transformers = pytest.importorskip("transformers")
    from liger_hw.transformers import patch

    with torch.device("meta"):
        model = transformers.MistralForCausalLM(transformers.MistralConfig())
    patch(transformers.MistralForCausalLM(transformers.MistralConfig(num_hidden_layers=1, hidden_size=64))).revert()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        report = patch(model)
    finally:
        sys.setprofile(profiler)
    assert calls < 400_000  # 251,000 with transformers 5.23, 349,000 with 4.57
    assert len(report.patched) == 32 * 4 + 2


# -- rotary ----------------------------------------------------------------------------------------------------------


def _rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _llama_rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _partial_rope(q, k, cos, sin, unsqueeze_dim=1):
    n = cos.shape[-1]
    turned = _llama_rope(q[..., :n], k[..., :n], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((t, x[..., n:]), -1) for t, x in zip(turned, (q, k)))


def _cohere_rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_pairs(q) * sin, k * cos + _rotate_pairs(k) * sin


def _glm_rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return _cohere_rope(q, k, cos, sin, unsqueeze_dim)


def _vision_rope(q, k, cos, sin):
    return _llama_rope(q, k, cos, sin, -2)


def _three_axes_rope(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    cos, sin = (torch.cat([t[i % 3] for i, t in enumerate(x.split(mrope_section * 2, -1))], -1) for x in (cos, sin))
    return _llama_rope(q, k, cos, sin, unsqueeze_dim)


def _complex_rope(xq, xk, freqs_cis):
    parts = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (xq, xk))
    return tuple(torch.view_as_real(x * freqs_cis[:, :, None, :]).flatten(3) for x in parts)


ROTARY = {
    "llama": (_llama_rope, "rope", ""),
    "partial": (_partial_rope, "rope", ""),
    "cohere": (_cohere_rope, "interleaved_rope", ""),
    "glm": (_glm_rope, "interleaved_rope", "one angle a pair"),
    "llama4": (_complex_rope, "llama4_rope", ""),
    "vision": (_vision_rope, "vision_rope", ""),
    "three axes": (_three_axes_rope, "qwen2vl_mrope", ""),
}


def _turned_by(function):
    """q, k, the angles and what else the function takes; the halves of cos and sin differ where both are read."""
    if function is _complex_rope:
        return torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.polar(torch.ones(1, 5, 4), torch.randn(1, 5, 4))
    leading = () if function is _vision_rope else (3, 2) if function is _three_axes_rope else (2,)
    q, k = (torch.randn(5, n, 8) if function is _vision_rope else torch.randn(2, n, 5, 8) for n in (4, 2))
    turned = 4 if function is _partial_rope else 8
    return q, k, *torch.randn(2, *leading, 5, turned), *([[1, 2, 1]] if function is _three_axes_rope else [])


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_functions(name):
    function, kernel, variant = ROTARY[name]
    found, given = rotary.recognise(function), _turned_by(function)
    assert isinstance(found, Match), found
    assert (found.kernel, found.variant) == (kernel, variant)
    torch.testing.assert_close(found.replacement(*given), function(*given))


def test_keywords_in_any_order():
    """As apply_rotary_emb of Llama 4 may be called: q and k of other sizes must not change places."""
    q, k, angles = _turned_by(_complex_rope)
    replacement = rotary.recognise(_complex_rope).replacement
    found = replacement(freqs_cis=angles, xk=k, xq=q)
    torch.testing.assert_close(found, _complex_rope(q, k, angles))
    with pytest.raises(TypeError, match="freqs_cis"):
        replacement(q, k)


def test_real_angles_run_the_familys_own_code():
    """`model.to(torch.bfloat16)` makes Llama 4's vision angles real: the family's product with them is defined."""
    q, k, angles = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 4)
    found = rotary.recognise(_complex_rope).replacement(q, k, angles)
    torch.testing.assert_close(found, _complex_rope(q, k, angles), rtol=0, atol=0)


def test_other_rotary_functions_are_refused():
    def backwards(q, k, cos, sin, unsqueeze_dim=1):
        return _llama_rope(q, k, cos, -sin, unsqueeze_dim)

    def of_one(x, cos, sin, unsqueeze_dim=1):
        return x

    assert "turns other pairs" in rotary.recognise(backwards).reason
    assert "it takes (x, cos, sin, unsqueeze_dim)" in rotary.recognise(of_one).reason


def test_a_call_without_a_form_runs_the_original():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    cos = torch.randn(1, 5, 8, requires_grad=True)
    replacement = rotary.recognise(_llama_rope).replacement
    for given in ((q, q, cos, cos.detach()), (q[0], q[0], cos.detach()[0], cos.detach()[0])):
        axis = 1 if given[0].dim() == 4 else 0
        found, wanted = replacement(*given, unsqueeze_dim=axis), _llama_rope(*given, unsqueeze_dim=axis)
        torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError):  # as the original does
        replacement(q, k, cos, cos)
