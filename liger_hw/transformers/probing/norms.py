"""Recognising norms: RMSNorm with its offset, casting mode and epsilon, and LayerNorm with or without scale and shift."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Callable, Iterator

import torch
from torch import nn

from ...kernels.norms.layer_norm import layer_norm_reference
from ...kernels.norms.rms_norm import CASTING_MODES, rms_norm_reference
from .. import parts
from .twin import (
    BATCH,
    EVERYTHING,
    Match,
    Refused,
    agrees,
    generator,
    random,
    reads,
    required_inputs,
    run,
    twin_of,
)

_PROBE_EPS = 0.25
"""Set in place of the module's own epsilon: large beside the variance, so that a wrong one cannot agree."""
_SMALL = 2e-3
"""The size of the inputs where epsilon is a number in the code, for the same reason."""
_LOW, _HIGH = torch.bfloat16, torch.float32
_MISMATCHES = 0.02
"""Share of low-precision results that may differ by one rounding: the references' sums run in another order."""
_OTHER_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
_WIDTH = 64


def is_candidate(module: nn.Module) -> bool:
    """A module without children whose class, or one it derives from, is named a norm."""
    if isinstance(module, _OTHER_NORMS) or module._modules:
        return False
    return any("norm" in base.__name__.lower() for base in type(module).__mro__ if base.__name__ != "PreTrainedModel")


def recognise(module: nn.Module, forward: Callable) -> Match | Refused:
    """The norm kernel that computes `forward(module, x)`."""
    kind = "layer_norm" if "layernorm" in type(module).__name__.lower() else "rms_norm"
    inputs = required_inputs(forward)
    named = [n for n, p in inspect.signature(forward).parameters.items() if p.kind is not p.VAR_KEYWORD][1:]
    if len(inputs) != 1 or len(named) != 1:
        return Refused(f"it takes {' and '.join(named) or 'no input'}", kind)
    if module._buffers:
        return Refused(f"it keeps buffers ({', '.join(module._buffers)})", kind)
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    if len(shapes) > 2 or any(len(shape) != 1 or not shape[0] for shape in shapes.values()):
        return Refused(f"its parameters are {', '.join(f'{n} {list(s)}' for n, s in shapes.items())}", kind)
    return _Probe(module, forward, shapes, kind).answer()


@dataclass(frozen=True)
class _Candidate:
    kernel: str
    offset: float
    weight: str | None
    bias: str | None

    def reference(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor | None], eps: str | float, mode: str
    ) -> torch.Tensor:
        value = _PROBE_EPS if isinstance(eps, str) else eps
        weight = None if self.weight is None else weights[self.weight]
        if self.kernel == "rms_norm":
            return rms_norm_reference(x, weight, value, self.offset, mode)
        weight = weight + self.offset if self.offset else weight
        return layer_norm_reference(x, weight, None if self.bias is None else weights[self.bias], value)

    def core(self, eps: str | float, mode: str) -> Callable:
        if self.kernel == "rms_norm":
            return parts.rms_norm(self.weight, eps, self.offset, mode)
        return parts.layer_norm(self.weight, self.bias, eps, self.offset)

    def words(self, mode: str) -> str:
        scale = mode if self.kernel == "rms_norm" else "" if self.bias or not self.weight else "no bias"
        scale = scale if self.weight else "no weight"
        return ", ".join(filter(None, (scale, f"offset {self.offset:g}" if self.offset else "")))


class _Probe:
    def __init__(self, module: nn.Module, forward: Callable, shapes: dict[str, tuple[int, ...]], kind: str) -> None:
        self.module, self.forward, self.kind = module, forward, kind
        source = generator()
        self.weights = {name: random(*shape, source=source) for name, shape in shapes.items()}
        self.x = random(*BATCH, next(iter(shapes.values()))[0] if shapes else _width_of(module), source=source)
        own, named = vars(module), reads(type(module), forward)
        attributes = [name for name in own if type(own[name]) is float and (name in named or EVERYTHING in named)]
        numbers = [c for c in _constants(forward) if 0.0 < c < 1e-2]
        self.epsilons: list[str | float] = [*attributes, *numbers]

    def answer(self) -> Match | Refused:
        reason = "" if self.epsilons else "it has no epsilon of its own"
        for eps in self.epsilons:
            wanted = self._original(eps, _HIGH, _HIGH)
            if isinstance(wanted, str):
                reason = reason or wanted
                continue
            for candidate in self._candidates():
                if agrees(run(candidate.reference, self._input(eps), self._cast(_HIGH), eps, "llama"), wanted):
                    return self._settled(eps, candidate)
        return Refused(reason or "it computes neither an RMSNorm nor a LayerNorm", self.kind)

    def _candidates(self) -> Iterator[_Candidate]:
        names = list(self.weights)
        pairs = [(n, next((m for m in names if m != n), None)) for n in names] or [(None, None)]
        for weight, bias in pairs:
            for offset in (0.0, 1.0) if weight else (0.0,):
                if not bias:
                    yield _Candidate("rms_norm", offset, weight, None)
                yield _Candidate("layer_norm", offset, weight, bias)

    def _settled(self, eps: str | float, candidate: _Candidate) -> Match | Refused:
        """The candidate that agrees in fp32, with the casting mode that agrees in bf16."""
        kernel = candidate.kernel
        modes = tuple(CASTING_MODES) if kernel == "rms_norm" else ("",)
        good = [mode for mode in modes if self._rounds_alike(eps, candidate, mode, _LOW)]
        if not good:
            return Refused(f"it rounds in bf16 unlike {kernel} in any casting mode", kernel)
        if not self._same_gradients(eps, candidate):
            return Refused(f"its gradients are not those of {kernel}", kernel)
        mixed = [mode for mode in good if not self.weights or self._rounds_alike(eps, candidate, mode, _HIGH)]
        mode = (mixed or good)[0]
        core = candidate.core(eps, mode)
        if not mixed:  # weights kept in fp32 beside bf16 activations round another way
            core = parts.for_one_dtype(core, candidate.weight)
        used = frozenset(n for n in (candidate.weight, candidate.bias, eps) if isinstance(n, str))
        return Match(kernel, candidate.words(mode), core, used=used)

    # -- running -------------------------------------------------------------------------------------------------------

    def _cast(self, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
        absent = {name: None for name in self.module._parameters}
        return absent | {name: w.to(dtype) for name, w in self.weights.items()}

    def _original(self, eps: str | float, x_dtype: torch.dtype, w_dtype: torch.dtype) -> torch.Tensor | str:
        return run(self.forward, self._twin(eps, self._cast(w_dtype)), self._input(eps).to(x_dtype))

    def _twin(self, eps: str | float, weights: dict[str, torch.Tensor | None]) -> nn.Module:
        twin = twin_of(self.module, weights, {})
        if isinstance(eps, str):
            twin.__dict__[eps] = _PROBE_EPS
        return twin

    def _input(self, eps: str | float) -> torch.Tensor:
        return self.x if isinstance(eps, str) else self.x * _SMALL

    def _rounds_alike(self, eps: str | float, candidate: _Candidate, mode: str, w_dtype: torch.dtype) -> bool:
        wanted = self._original(eps, _LOW, w_dtype)
        if isinstance(wanted, str):  # torch's own norms refuse mixed dtypes, and then so may ours
            return w_dtype is not _LOW
        found = run(candidate.reference, self._input(eps).to(_LOW), self._cast(w_dtype), eps, mode)
        if isinstance(found, str) or found.dtype != wanted.dtype or found.shape != wanted.shape:
            return False
        low = found.dtype is _LOW
        difference = (found.float() - wanted.float()).abs()
        step = 2.0**-7 if low else 1e-5
        return bool((difference <= step * wanted.float().abs() + 1e-5).all()) and (
            not low or float((difference > 0).float().mean()) <= _MISMATCHES
        )

    def _same_gradients(self, eps: str | float, candidate: _Candidate) -> bool:
        results = []
        for ours in (False, True):
            with torch.enable_grad():
                weights = {n: None if w is None else w.clone().requires_grad_() for n, w in self._cast(_HIGH).items()}
                x = self._input(eps).clone().requires_grad_()
                y = candidate.reference(x, weights, eps, "llama") if ours else self.forward(self._twin(eps, weights), x)
                leaves = [x, *(w for w in weights.values() if w is not None)]
                if not y.requires_grad:
                    return False
                results.append(torch.autograd.grad((y * self.x.cos()).sum(), leaves, allow_unused=True))
        return all((a is None) == (b is None) and (a is None or agrees(a, b, 1e-4)) for a, b in zip(*results))


def _constants(function: Callable) -> list[float]:
    """Numbers written in a function's code."""
    return [c for c in getattr(function, "__code__", _NO_CODE).co_consts if type(c) is float]


_NO_CODE = (lambda: None).__code__


def _width_of(module: nn.Module) -> int:
    """The width of a norm without weights, from its attributes."""
    for name in ("normalized_shape", "hidden_size", "dim"):
        size = getattr(module, name, None)
        size = size[-1] if isinstance(size, (tuple, list)) and size else size
        if isinstance(size, int) and size > 0:
            return size
    return _WIDTH
