"""Recognises norms: RMSNorm with its offset, casting mode and epsilon, gated RMSNorm, and LayerNorm."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import nn

from ...distributed import owners
from ...kernels.norms import gated_rms_norm as gated
from ...kernels.norms.layer_norm import layer_norm_reference
from ...kernels.norms.rms_norm import CASTING_MODES, rms_norm_reference
from .. import replacing
from ..replacing import Match
from ..source import Facts, open_branch
from . import probe
from .probe import Refused

# -- which modules may be a norm -------------------------------------------------------------------------------------

_OTHER_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has no children, and its class or a base class has "norm" in its name."""
    if isinstance(module, _OTHER_NORMS) or module._modules:
        return False
    return any("norm" in base.__name__.lower() for base in type(module).__mro__ if base.__name__ != "PreTrainedModel")


def recognise(module: nn.Module, forward: Callable) -> Match | Refused:
    kind = "layer_norm" if "layernorm" in type(module).__name__.lower() else "rms_norm"
    inputs = probe.required_inputs(forward)
    named = [n for n, p in inspect.signature(forward).parameters.items() if p.kind is not p.VAR_KEYWORD][1:]
    gated_norm = kind == "rms_norm" and len(named) == 2 and named[1] == "gate"
    if not gated_norm and (len(inputs) != 1 or len(named) != 1):
        return Refused(f"it takes {' and '.join(named) or 'no input'}", kind)
    if module._buffers:
        return Refused(f"it keeps buffers ({', '.join(module._buffers)})", kind)
    if lost := probe.why_unknown_shapes(module):
        return Refused(lost, kind)
    shapes = {name: shape for name, shape in owners.parameter_shapes(module).items() if shape is not None}
    if len(shapes) > 2 or any(len(shape) != 1 or not shape[0] for shape in shapes.values()):
        return Refused(f"its parameters are {', '.join(f'{n} {list(s)}' for n, s in shapes.items())}", kind)
    if gated_norm and not shapes:
        return Refused("it has a gate and no weight", kind)
    if gated_norm:
        return _GatedProbe(module, forward, shapes).recognise("gated_rms_norm")
    return _Probe(module, forward, shapes).recognise(kind)


@dataclass(frozen=True)
class _Variant:
    kernel: str
    offset: float
    weight: str | None
    bias: str | None

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(CASTING_MODES) if self.kernel == "rms_norm" else ("",)

    def reference(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor | None], eps: float, mode: str
    ) -> torch.Tensor:
        weight = None if self.weight is None else weights[self.weight]
        if self.kernel == "rms_norm":
            return rms_norm_reference(x, weight, eps, self.offset, mode)
        weight = weight + self.offset if self.offset else weight
        return layer_norm_reference(x, weight, None if self.bias is None else weights[self.bias], eps)

    def match(self, eps: str | float, mode: str, one_dtype: bool, outside_autocast: bool) -> Match:
        if self.kernel == "rms_norm":
            words, replacement = mode, replacing.rms_norm_replacement(self.weight, eps, self.offset, mode)
        else:
            words = "" if self.bias or not self.weight else "no bias"
            replacement = replacing.layer_norm_replacement(self.weight, self.bias, eps, self.offset)
        words = words if self.weight else "no weight"
        words = ", ".join(filter(None, (words, f"offset {self.offset:g}" if self.offset else "")))
        used = frozenset(name for name in (self.weight, self.bias, eps) if isinstance(name, str))
        weights = tuple(name for name in (self.weight, self.bias) if name)
        ready = replacing.weights_fit_kernel(weights, eps, one_dtype, outside_autocast)
        return Match(self.kernel, words, replacement, used=used, ready=ready)


@dataclass(frozen=True)
class _Groups:
    """The groups of columns that are normalised together. name: the attribute with the number of columns in a group, or
    with `count` the number of groups; "": one group of all columns"""

    name: str = ""
    count: bool = False

    def columns(self, module: Any, width: int) -> int:
        if not self.name:
            return width
        number = getattr(module, self.name)
        return width // number if self.count else number


@dataclass(frozen=True)
class _GatedVariant:
    """A gated norm, a function of (x, gate), to compare with the module."""

    weight: str
    activation: str
    norm_before_gate: bool
    groups: _Groups
    module: nn.Module

    kernel = "gated_rms_norm"
    modes = gated.CASTING_MODES

    def reference(self, x, weights, eps, mode, gate) -> torch.Tensor:
        options = self.activation, mode, self.norm_before_gate, self.groups.columns(self.module, x.shape[-1])
        return gated.gated_rms_norm_reference(x, gate, weights[self.weight], eps, *options)

    def match(self, eps: str | float, mode: str, one_dtype: bool, outside_autocast: bool) -> Match:
        options = self.activation, mode, self.norm_before_gate, self.groups
        replacement = replacing.gated_rms_norm_replacement(self.weight, eps, *options)
        order = f"{self.activation} {'after' if self.norm_before_gate else 'before'} the norm"
        words = f"{order}, {mode}" + (", in groups" if self.groups.name else "")
        used = frozenset(name for name in (self.weight, eps, self.groups.name) if isinstance(name, str) and name)
        ready = replacing.weights_fit_kernel((self.weight,), eps, one_dtype, outside_autocast)
        return Match(self.kernel, words, replacement, used=used, inputs=2, ready=ready)


# -- running copies --------------------------------------------------------------------------------------------------

_LOW, _HIGH = torch.bfloat16, torch.float32
_PROBE_EPS = 0.25
"""Replaces the module's epsilon. It is so large, relative to the variance, that a wrong epsilon cannot agree."""
_SMALL_SCALE = 2e-3
"""Scale of the inputs if epsilon is a constant in the code: their variance is then small relative to it."""
_MISMATCHES = 0.02
"""Share of low-precision results that may differ by one rounding, since references sum in another order."""
_WIDTH = 64
"""Width of inputs for a module that has neither a weight nor an attribute of its width."""
_OTHER_BATCHES = ((1, 1), (1, 67), (5,))
"""Leading dimensions of further inputs, for which the results must agree too."""


class _Probe:
    """Compares copies of one module, with random weights and a large epsilon, with the kernels' references."""

    facts = Facts(in_autocast=True, dims=frozenset({2, 3}))

    def __init__(self, module: nn.Module, forward: Callable, shapes: dict[str, tuple[int, ...]]) -> None:
        self.module, self.forward = module, forward
        source = probe.generator()
        self.weights = {name: probe.random(*shape, source=source) for name, shape in shapes.items()}
        width = next(iter(shapes.values()))[0] if shapes else _width_of(module)
        self.x = probe.random(*probe.BATCH, width, source=source)
        self.others = [probe.random(*leading, width, source=source) for leading in _OTHER_BATCHES]
        self.gates = self._gates_for(self.x)
        self.training = True
        self.eps: str | float = ""

    def recognise(self, kind: str) -> Match | Refused:
        """The match of the first epsilon and variant that agree in fp32, or why none agrees in everything."""
        epsilons = self._epsilons()
        reason = "" if epsilons else "it has no epsilon of its own; make it with one (eps=1e-6)"
        for eps in epsilons:
            self.eps = eps
            expected = self._original(_HIGH, _HIGH)
            if isinstance(expected, str):
                reason = reason or expected
                continue
            for variant in self._variants():
                if probe.agrees(self._reference(variant, "llama", _HIGH, _HIGH), expected):
                    return self._with_casting_mode(variant)
        return Refused(reason or "it computes neither an RMSNorm nor a LayerNorm", kind)

    def _gates_for(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The norm's inputs after x: none, or one gate."""
        return ()

    def _epsilons(self) -> list[str | float]:
        """Candidates for epsilon: names of attributes that the forward reads, and small numbers in its code."""
        attributes = probe.numbers_read(self.module, self.forward, float)
        code = getattr(self.forward, "__code__", None)
        constants = code.co_consts if code is not None else ()
        return [*attributes, *(c for c in constants if type(c) is float and 0.0 < c < 1e-2)]

    def _variants(self) -> Iterator[_Variant]:
        names = list(self.weights)
        pairs = [(n, next((m for m in names if m != n), None)) for n in names] or [(None, None)]
        for weight, bias in pairs:
            for offset in (0.0, 1.0) if weight else (0.0,):
                if not bias:
                    yield _Variant("rms_norm", offset, weight, None)
                yield _Variant("layer_norm", offset, weight, bias)

    def _with_casting_mode(self, variant: _Variant) -> Match | Refused:
        """The match of a variant that agrees in fp32, with a casting mode that rounds as the module does in bf16.

        A mode that also agrees for fp32 weights with bf16 inputs is preferred. Without one, the match takes only
        inputs in the weight's dtype.
        """
        kernel = variant.kernel
        modes = [mode for mode in variant.modes if self._rounds_alike(variant, mode, _LOW)]
        if not modes:
            return Refused(f"it rounds in bf16 unlike {kernel} in any casting mode", kernel)
        if not self._has_same_gradients(variant):
            return Refused(f"its gradients are not {kernel}'s", kernel)
        mixed = [mode for mode in modes if not self.weights or self._rounds_alike(variant, mode, _HIGH)]
        mode = (mixed or modes)[0]
        reason = self._why_not_general(variant, mode)
        with probe.autocast():
            in_autocast = self._original(_HIGH, _HIGH)
        reason = reason or open_branch(self.forward, self.module, self.facts)
        if reason:
            return Refused(reason, kernel)
        outside = isinstance(in_autocast, str) or not probe.agrees(
            self._reference(variant, mode, _HIGH, _HIGH), in_autocast
        )
        return variant.match(self.eps, mode, one_dtype=not mixed, outside_autocast=outside)

    def _why_not_general(self, variant: _Variant, mode: str) -> str:
        """The first case (another shape, large numbers, eval mode, fp16) in which the variant differs, or ""."""
        first, large = self.x, probe.LARGE if isinstance(self.eps, str) else probe.LARGE / _SMALL_SCALE
        cases = [*((x, 1.0, "") for x in (first, *self.others)), (first, large, f" of about {probe.LARGE:g}")]
        for training in (True, False):
            self.training, when = training, "training" if training else "eval mode"
            for x, scale, words in cases:
                self.x, self.gates = x * scale, tuple(t * scale for t in self._gates_for(x))
                expected = self._original(_HIGH, _HIGH)
                result = self._reference(variant, mode, _HIGH, _HIGH)
                if isinstance(expected, torch.Tensor) and not probe.agrees(result, expected):
                    return f"of {list(x.shape)}{words} in {when} it is no {variant.kernel}"
            self.x, self.gates = first, self._gates_for(first)
            for dtype in (_LOW, torch.float16):
                if not self._rounds_alike(variant, mode, dtype, dtype):
                    return f"in {dtype} in {when} it is no {variant.kernel}"
        return ""

    def _rounds_alike(self, variant: _Variant, mode: str, w_dtype: torch.dtype, x_dtype: torch.dtype = _LOW) -> bool:
        """Whether module and reference differ in few elements, and these by one rounding at most, in these dtypes."""
        expected = self._original(x_dtype, w_dtype)
        if isinstance(expected, str):  # a module may refuse mixed dtypes, as torch's norms do
            return w_dtype is not x_dtype
        result = self._reference(variant, mode, x_dtype, w_dtype)
        if isinstance(result, str) or result.dtype != expected.dtype or result.shape != expected.shape:
            return False
        low = result.dtype is x_dtype
        difference = (result.float() - expected.float()).abs()
        step = torch.finfo(x_dtype).eps if low else 1e-5
        if not bool((difference <= step * expected.float().abs() + 1e-5).all()):
            return False
        return not low or float((difference > 0).float().mean()) <= _MISMATCHES

    def _has_same_gradients(self, variant: _Variant) -> bool:
        with torch.enable_grad():
            weights = {n: None if w is None else w.clone().requires_grad_() for n, w in self._cast(_HIGH).items()}
            x, *more = (t.clone().requires_grad_() for t in (self._input(), *self.gates))
            expected = self.forward(self._copy(weights), x, *more)
            result = variant.reference(x, weights, self._epsilon(), "llama", *more)
        leaves = [x, *more, *(w for w in weights.values() if w is not None)]
        return probe.has_same_gradients(result, expected, leaves, 1e-4)

    # -- one run -----------------------------------------------------------------------------------------------------

    def _original(self, x_dtype: torch.dtype, w_dtype: torch.dtype) -> torch.Tensor | str:
        inputs = (t.to(x_dtype) for t in (self._input(), *self.gates))
        return probe.run(self.forward, self._copy(self._cast(w_dtype)), *inputs)

    def _reference(
        self, variant: _Variant, mode: str, x_dtype: torch.dtype, w_dtype: torch.dtype
    ) -> torch.Tensor | str:
        x, *more = (t.to(x_dtype) for t in (self._input(), *self.gates))
        return probe.run(variant.reference, x, self._cast(w_dtype), self._epsilon(), mode, *more)

    def _copy(self, weights: dict[str, torch.Tensor | None]) -> nn.Module:
        copied = probe.copy_of(self.module, weights, {}, self.training)
        if isinstance(self.eps, str):
            copied.__dict__[self.eps] = _PROBE_EPS
        return copied

    def _cast(self, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
        absent = dict.fromkeys(owners.parameter_shapes(self.module))
        return absent | {name: w.to(dtype) for name, w in self.weights.items()}

    def _input(self) -> torch.Tensor:
        return self.x if isinstance(self.eps, str) else self.x * _SMALL_SCALE

    def _epsilon(self) -> float:
        return _PROBE_EPS if isinstance(self.eps, str) else self.eps


class _GatedProbe(_Probe):
    """`_Probe` for a norm that takes a gate. Calls without a gate run the original forward."""

    facts = _Probe.facts._replace(present=frozenset({"gate"}))

    def _gates_for(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (probe.random(*x.shape, source=probe.generator().manual_seed(1)),)

    def _variants(self) -> Iterator[_GatedVariant]:
        width = self.x.shape[-1]
        integers = [(name, value) for name, value in vars(self.module).items() if type(value) is int]
        numbers = [name for name, value in integers if 1 < value < width and not width % value]
        groups = [_Groups(), *(_Groups(name, count) for name in numbers for count in (False, True))]
        for weight in self.weights:
            for activation in gated.ACTIVATIONS:
                for norm_before_gate in (True, False):
                    for group in groups:
                        yield _GatedVariant(weight, activation, norm_before_gate, group, self.module)


def _width_of(module: nn.Module) -> int:
    for name in ("normalized_shape", "hidden_size", "dim"):
        size = getattr(module, name, None)
        size = size[-1] if isinstance(size, (tuple, list)) and size else size
        if isinstance(size, int) and size > 0:
            return size
    return _WIDTH
