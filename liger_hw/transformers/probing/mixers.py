"""Recognises token mixers of hybrids: gated delta nets (Qwen3-Next, Qwen3.5), and LFM2's short convolution.

A small copy of the mixer is compared with its replacement. The forward calls the convolution and the scan by global
names. In the probe these are functions in plain torch, so the comparison does not depend on installed packages. A patch
replaces what comes before the scan, never the scan.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any, Callable

import torch
from torch import nn

from ...text import first_line
from .. import functional
from ..replacing import Match
from . import probe
from .probe import Refused

DELTA, CONV = "gated_delta_inputs", "short_conv"
_SCAN, _MASK = "torch_chunk_gated_delta_rule", "apply_mask_to_padding_states"
_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "conv_dim", "hidden_size")
_HIDDEN, _HEADS, _K_DIM = 12, 2, 8
"""Sizes of the probe."""
_UNSUPPORTED = frozenset({"cache", "cache_params", "past_key_values", "seq_idx", "cu_seq_lens_q", "cp_context"})
"""Arguments with which the original forward runs: for generation with a cache, and documents packed into a row."""


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has all parts of a gated delta net, or exactly the parts of LFM2's short convolution."""
    children, attributes = module._modules.keys(), vars(module).keys()
    if {"A_log", "dt_bias"} <= module._parameters.keys():
        return {"conv1d", "norm", "out_proj"} <= children and {*_SIZES} <= attributes
    return children == {"conv", "in_proj", "out_proj"} and "conv_kernel_size" in attributes


def _takes(keywords: dict[str, Any]) -> bool:
    return all(keywords.get(name) is None for name in _UNSUPPORTED)


def _conv(module: Any) -> Any:
    return module._modules.get("conv1d") or module._modules.get("conv")


def _ready(self: Any, x: torch.Tensor) -> bool:
    """Whether the convolution's weight can be read without a call of it, in which accelerate's hooks would load it."""
    conv = _conv(self)
    return type(conv) is nn.Conv1d and conv.bias is None and "_hf_hook" not in conv.__dict__ and x.dim() == 3


# -- replacements ----------------------------------------------------------------------------------------------------


def _delta_replacement(modeling: Any, repeats_heads: bool) -> Callable[..., torch.Tensor]:
    """A forward without a cache. modeling: has the scan; repeats_heads: whether the scan takes q and k of every head"""
    liger_gated_delta_inputs = functional.liger_gated_delta_inputs

    def replacement(self: Any, x: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        x = getattr(modeling, _MASK)(x, attention_mask)
        if "in_proj_qkvz" in self._modules:
            *qkv, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
            qkv = torch.cat([part.flatten(2) for part in qkv], -1)
        else:
            qkv, z, b, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        weight, sizes = self.conv1d.weight.squeeze(1), (self.num_k_heads, self.head_k_dim)
        q, k, v, beta, g = liger_gated_delta_inputs(qkv, weight, b, a, self.A_log, self.dt_bias, *sizes)
        groups = self.num_v_heads // self.num_k_heads
        if repeats_heads and groups > 1:
            q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
        options = {name: value for name, value in kwargs.items() if name not in _UNSUPPORTED}
        start = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False}
        scan = getattr(modeling, _SCAN)
        y, _ = scan(q, k, v, g=g, beta=beta, cu_seqlens=None, **start, **options)
        y = self.norm(y.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(y.view(*x.shape[:2], -1))

    return replacement


def _conv_replacement(modeling: Any) -> Callable[..., torch.Tensor]:
    liger_short_conv = functional.liger_short_conv

    def replacement(self: Any, x: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        x = self.in_proj(getattr(modeling, _MASK)(x, attention_mask))
        return self.out_proj(liger_short_conv(x, self.conv.weight.squeeze(1)))

    return replacement


# -- the probe -------------------------------------------------------------------------------------------------------


def recognise(module: nn.Module, forward: Callable) -> Match | Refused:
    """The match of a gated delta net before its scan, or of a short convolution."""
    kernel = DELTA if "A_log" in module._parameters else CONV
    function, conv = inspect.unwrap(forward), _conv(module)
    scope = getattr(function, "__globals__", {})
    modeling = sys.modules.get(scope.get("__name__"))
    if getattr(modeling, "__dict__", None) is not scope:
        return Refused("its forward is not a function of an imported module", kernel)
    code = function.__code__
    calls = {"causal_conv1d_fn", _MASK} | ({_SCAN} if kernel == DELTA else set())
    if missing := sorted(calls - set(code.co_names) or calls - scope.keys()):
        return Refused(f"its forward does not call {missing[0]}", kernel)
    if type(conv) is not nn.Conv1d or conv.bias is not None or not conv.kernel_size[0] <= 4:
        return Refused("its convolution is not a plain one of up to four taps without a bias", kernel)
    stand_ins = {"causal_conv1d_fn": _conv_stand_in, _SCAN: _scan_stand_in, _MASK: scope[_MASK]}
    original = types.FunctionType(code, {**scope, **stand_ins}, None, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    replacement = _conv_replacement
    if kernel == DELTA:
        replacement = functools.partial(_delta_replacement, repeats_heads="repeat_interleave" in code.co_names)
    if reason := _difference(module, kernel, original, replacement(types.SimpleNamespace(**stand_ins))):
        return Refused(reason, kernel)
    used = {*module._modules, *module._parameters, *_SIZES, "layer_idx"}
    variant = "before the scan" if kernel == DELTA else ""
    return Match(kernel, variant, replacement(modeling), frozenset(used), ready=_ready, takes=_takes)


def _difference(module: nn.Module, kernel: str, original: Callable, replacement: Callable) -> str:
    """Why the replacement is not valid, by results of both forwards on a small copy of the module, or ""."""
    source = probe.generator()
    mask = torch.ones(2, 9)
    mask[1, 6:] = 0
    with torch.enable_grad():
        try:
            copied = _small_copy(module, kernel, source)
        except Exception as error:  # the module's parts differ from transformers'
            return f"no small copy of it can be made ({first_line(error)})"
        x = probe.normal(2, 9, _HIDDEN, source=source).requires_grad_()
        leaves = [x, *copied.parameters()]
        for scale, tokens, attention_mask in ((1.0, 9, None), (1.0, 9, mask), (1.0, 1, None), (1e2, 9, None)):
            forwards = (functools.partial(f, attention_mask=attention_mask) for f in (original, replacement))
            expected, result = (probe.run(forward, copied, scale * x[:, :tokens]) for forward in forwards)
            for each in (expected, result):
                if isinstance(each, str):
                    return each
            if not probe.agrees(result, expected, 2e-5):
                return f"it computes something else than {kernel}"
            if not probe.has_same_gradients(result, expected, leaves, 2e-4):
                return f"its gradients are not {kernel}'s"
    return ""


def _small_copy(module: Any, kernel: str, source: torch.Generator) -> nn.Module:
    """A copy with few and narrow heads and random weights."""

    def randomised(child: nn.Module) -> nn.Module:
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                child._parameters[name] = probe.normal(*parameter.shape, source=source).requires_grad_()
        return child

    def linear(n_in: int, n_out: int) -> nn.Module:
        return randomised(nn.Linear(n_in, n_out, bias=False, dtype=torch.float32))

    taps = _conv(module).kernel_size[0]

    def conv(n: int) -> nn.Module:
        return randomised(nn.Conv1d(n, n, taps, groups=n, bias=False, padding=taps - 1, dtype=torch.float32))

    if kernel == CONV:
        projections = {"in_proj": linear(_HIDDEN, 3 * _HIDDEN), "out_proj": linear(_HIDDEN, _HIDDEN)}
        return probe.copy_of(module, {}, {"conv": conv(_HIDDEN), **projections})
    groups, v_dim = module.num_v_heads // module.num_k_heads, _K_DIM * module.head_v_dim // module.head_k_dim
    n_v_heads, keys = _HEADS * groups, _HEADS * _K_DIM
    values = n_v_heads * v_dim
    widths = {"qkvz": 2 * keys + 2 * values, "ba": 2 * n_v_heads, "qkv": 2 * keys + values, "z": values}
    widths |= {"b": n_v_heads, "a": n_v_heads}
    children = {
        name: linear(_HIDDEN, widths[name.removeprefix("in_proj_")])
        for name in module._modules
        if name.removeprefix("in_proj_") in widths
    }
    weights = {name: probe.normal(v_dim, source=source).requires_grad_() for name in module.norm._parameters}
    children |= {"conv1d": conv(2 * keys + values), "norm": probe.copy_of(module.norm, weights, {})}
    children["out_proj"] = linear(values, _HIDDEN)
    parameters = {name: probe.normal(n_v_heads, source=source).requires_grad_() for name in module._parameters}
    copied = probe.copy_of(module, parameters, children)
    sizes = _HEADS, n_v_heads, _K_DIM, v_dim, keys, values, 2 * keys + values, _HIDDEN
    copied.__dict__.update(zip(_SIZES, sizes))
    return copied


def _conv_stand_in(x: torch.Tensor, weight: Any, bias: Any = None, activation: Any = None, **_: Any) -> torch.Tensor:
    """causal-conv1d's function in plain torch. x: [batch, channels, tokens]"""
    y = nn.functional.pad(x, (weight.shape[-1] - 1, 0))
    y = nn.functional.conv1d(y, weight.unsqueeze(1), bias, groups=x.shape[1])
    return y if activation is None else getattr(nn.functional, activation)(y)


def _scan_stand_in(
    query: Any, key: Any, value: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool = False, **_: Any
) -> tuple[torch.Tensor, None]:
    """Not the real scan, but a function whose result depends on all arguments, as a comparison needs."""
    if use_qk_l2norm_in_kernel:
        query, key = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (query, key))
    groups = value.shape[2] // query.shape[2]
    score = (query * key.cos() + key).sum(-1).repeat_interleave(groups, 2)
    factors = beta, g / (1.0 - g), score  # each times another roll of value, since the norm hides a common factor
    return sum(factor[..., None] * value.roll(shift, -1) for shift, factor in enumerate(factors)), None
