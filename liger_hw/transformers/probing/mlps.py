"""Recognising gated MLPs, squared-ReLU MLPs and the gate of MoE experts, whatever their projections are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

from ...kernels.pointwise.geglu import geglu_reference
from ...kernels.pointwise.relu_squared import relu_squared_reference
from ...kernels.pointwise.swiglu import swiglu_reference
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

_NAMED = ("mlp", "ffn", "feedforward", "experts")
_TWO_HALVES = "halves"


def is_candidate(module: nn.Module) -> bool:
    """A module of two or three projections with activations between them, or one named an MLP or experts."""
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.Linear)):
        return False
    if any(word in type(module).__name__.lower() for word in _NAMED):
        return True
    kinds = [_kind(child) for child in module._modules.values() if child is not None]
    return not module._parameters and kinds.count("linear") in (2, 3) and "other" not in kinds and "act" in kinds


def recognise(module: nn.Module, forward: Callable) -> Match | Refused | None:
    """The activation kernel that stands between `module`'s projections."""
    if callable(getattr(module, "_apply_gate", None)) and module._parameters:
        return _experts(module)
    linears = {name: child for name, child in module._modules.items() if child is not None and _kind(child) == "linear"}
    others = [child for child in module._modules.values() if child is not None and _kind(child) == "other"]
    if module._parameters:
        return Refused("its projections are its own parameters: it needs a fused MoE kernel", "swiglu")
    if not linears or (others and len(linears) < 2):
        return None  # a container of MLPs, or a head: its parts are looked at on their own
    inputs = required_inputs(forward)
    if len(inputs) != 1:
        return Refused(f"it takes {' and '.join(inputs) or 'no input'}", "swiglu")
    if others or len(linears) not in (2, 3):
        parts_of_it = ", ".join(type(c).__name__ for c in module._modules.values() if c is not None)
        return Refused(f"it is not two or three projections around an activation ({parts_of_it})", "swiglu")
    return _Probe(module, forward, linears).answer()


def _kind(module: nn.Module) -> str:
    """ "linear", "act" (no parameters, no children), "dropout" or "other"."""
    if isinstance(module, nn.Dropout):
        return "dropout"
    if hasattr(module, "base_layer") or isinstance(getattr(module, "out_features", None), int):
        return "linear"
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2 and not module._modules and not isinstance(module, nn.Embedding):
        return "linear"
    if not module._parameters and not module._buffers and not module._modules:
        return "act"
    return "other"


# -- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gated:
    """act(gate_multiplier * gate) * up * down_multiplier. act: silu, gelu_tanh or gelu."""

    act: str
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    @property
    def kernel(self) -> str:
        return "swiglu" if self.act == "silu" else "geglu"

    def reference(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.act == "silu":
            return swiglu_reference(gate, up, self.gate_multiplier, self.down_multiplier)
        return geglu_reference(gate, up, "tanh" if self.act == "gelu_tanh" else "none")


def _found_gate(wanted: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, scales: tuple[float, ...]) -> Gated | None:
    """The gated activation of (gate, up) that is `wanted`, in fp32."""
    for act in ("silu", "gelu_tanh", "gelu"):
        for scale in scales if act == "silu" else (1.0,):
            found = Gated(act, gate_multiplier=scale)
            if agrees(found.reference(gate, up), wanted):
                return found
    return None


# -- MLPs ------------------------------------------------------------------------------------------------------------


class _StandIn:
    """In a projection's place: notes what it is called with and answers with random numbers."""

    def __init__(self, name: str, projection: nn.Module, calls: list, source: torch.Generator) -> None:
        self.name, self.projection, self.calls = name, projection, calls
        self.answer = random(*BATCH, _out_features(projection), source=source)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs:
            raise TypeError(f"{self.name} is called with more than one argument")
        answer = self.answer.to(x.dtype).requires_grad_(torch.is_grad_enabled())
        self.calls.append((self.name, x, answer))
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.projection, name)


class _Probe:
    def __init__(self, module: nn.Module, forward: Callable, linears: dict[str, nn.Module]) -> None:
        self.module, self.forward, self.linears = module, forward, linears
        own, named = vars(module), reads(type(module), forward)
        self.numbers = [name for name in own if type(own[name]) is float and (name in named or EVERYTHING in named)]
        self.scales: dict[str, float] = {}

    def answer(self) -> Match | Refused:
        """With every number it reads taken for a multiplier, of a value unlike all others; else with none."""
        self.scales = {name: 1.25 + 0.5 * i for i, name in enumerate(self.numbers)}
        found = self._answer() if self.scales else None
        if not isinstance(found, Match):
            self.scales = {}
            found = self._answer()
        drops = [c.p for c in self.module._modules.values() if isinstance(c, nn.Dropout) and c.p > 0]
        drops += [p for n in self.numbers if "drop" in n and (p := getattr(self.module, n)) > 0]
        return Refused(f"it drops out (p={drops[0]})", found.kernel) if drops and isinstance(found, Refused) else found

    def _answer(self) -> Match | Refused:
        source = generator()
        calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        stand_ins = {name: _StandIn(name, child, calls, source) for name, child in self.linears.items()}
        first = next(iter(self.linears.values()))
        x = random(*BATCH, getattr(first, "in_features", None) or 8, source=source)
        with torch.enable_grad():
            twin = twin_of(self.module, {}, {**self.module._modules, **stand_ins})
            twin.__dict__.update(self.scales)
            y = run(self.forward, twin, x)
            return Refused(y, "swiglu") if isinstance(y, str) else self._read(x, y, calls)

    def _read(self, x: torch.Tensor, y: torch.Tensor, calls: list) -> Match | Refused:
        """The answer, from what the projections were called with."""
        names = [name for name, _, _ in calls]
        if sorted(names) != sorted(set(names)) or set(names) != set(self.linears):
            return Refused(f"it calls its projections as {', '.join(names) or 'nothing'}", "swiglu")
        *ahead, (last, middle, out) = calls
        for name, seen, _ in ahead:
            if seen.shape != x.shape or not torch.equal(seen, x):
                return Refused(f"{name} does not take the module's own input", "swiglu")
        scale = self._output_scale(y, out)
        if scale is None:
            return Refused(f"it goes on after {last}", "swiglu")
        found = self._between([(name, answer) for name, _, answer in ahead], last, middle, scale)
        if isinstance(found, Refused):
            return found
        match, reference = found
        if not _same_gradients(middle, reference, [answer for _, _, answer in ahead]):
            return Refused(f"its gradients are not those of {match.kernel}", match.kernel)
        return match

    def _output_scale(self, y: torch.Tensor, out: torch.Tensor) -> str | None:
        """Attribute that multiplies the last projection's answer: "" for none, None when that is not all."""
        for name, value in {"": 1.0, **self.scales}.items():
            if agrees(y, out * value):
                return name
        return None

    def _between(
        self, ahead: list[tuple[str, torch.Tensor]], last: str, middle: torch.Tensor, scale: str
    ) -> tuple[Match, torch.Tensor] | Refused:
        """What makes `middle`, the last projection's input, of the answers ahead; with the reference's own result."""
        names, values = ("", *self.scales), (1.0, *self.scales.values())
        order = tuple(name for name, _ in ahead)
        used = frozenset(name for name in (*order, last, scale) if name)
        if len(ahead) == 2:
            for (gate_name, gate), (up_name, up) in (ahead, ahead[::-1]):
                found = _found_gate(middle, gate, up, values)
                if found:
                    factor = names[values.index(found.gate_multiplier)]
                    core = parts.gated_mlp(found.act, gate_name, up_name, last, order[0] == up_name, factor, scale)
                    match = Match(found.kernel, found.act, core, used=used | ({factor} - {""}))
                    return match, found.reference(gate, up)
            return Refused(_why_not(middle, *(answer for _, answer in ahead)), "swiglu")
        ((name, answer),) = ahead
        if answer.shape[-1] == 2 * middle.shape[-1]:
            for gate_first in (True, False):
                halves = answer.chunk(2, -1) if gate_first else answer.chunk(2, -1)[::-1]
                found = _found_gate(middle, *halves, (1.0,))
                if found:
                    kernel = "fused_gate_up_swiglu" if found.act == "silu" and gate_first else found.kernel
                    words = found.act if gate_first else f"{found.act}, up first"
                    core = parts.fused_mlp(found.act, gate_first, name, last, scale)
                    return Match(kernel, words, core, used=used), found.reference(*halves)
            return Refused(_why_not(middle, *answer.chunk(2, -1)), "swiglu")
        squared = relu_squared_reference(answer)
        if agrees(squared, middle):
            return Match("relu_squared", "", parts.squared_relu_mlp(name, last, scale), used=used), squared
        return Refused("its activation has no gate, and no kernel", "swiglu")


def _same_gradients(original: torch.Tensor, reference: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Whether both results pass the same gradients on: no part of the original is detached."""
    if not original.requires_grad:
        return False
    weights = original.detach().cos()
    with torch.enable_grad():
        wanted = torch.autograd.grad((original * weights).sum(), leaves, allow_unused=True)
        found = torch.autograd.grad((reference * weights).sum(), leaves, allow_unused=True)
    return all(a is not None and b is not None and agrees(b, a, 1e-4) for a, b in zip(wanted, found))


def _why_not(middle: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> str:
    for gate, up in ((one, other), (other, one)):
        if middle.shape == up.shape and agrees(torch.relu(gate) * up, middle):
            return "it is gated by relu: no kernel"
        if middle.shape == up.shape and agrees(torch.sigmoid(gate) * up, middle):
            return "it is gated by sigmoid: no kernel"
    return "its activation is none of silu, tanh gelu and gelu times the other half (clamped, limited or in pairs)"


def _out_features(module: nn.Module) -> int:
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)
    if isinstance(size, int):
        return size
    base = getattr(module, "base_layer", None)
    return _out_features(base) if base is not None else module.weight.shape[0]


# -- experts ---------------------------------------------------------------------------------------------------------


def _experts(module: nn.Module) -> Match | Refused:
    """The gate that every batched experts implementation of transformers calls between its two products."""
    kernel = "fused_gate_up_swiglu"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation == "eager":
        return Refused(
            "its experts run one by one; model.set_experts_implementation('grouped_mm') batches them", kernel
        )
    down = module._parameters.get("down_proj")
    if getattr(module, "has_gate", True) is False:
        up = random(*BATCH, 16, source=generator())
        y = run(type(module)._apply_gate, twin_of(module, {}, dict(module._modules)), up)
        return Refused("its experts have no gate" if not isinstance(y, str) else y, kernel)
    if down is None or down.dim() != 3:
        return Refused("its experts are not kept as two batched projections", kernel)
    width = 2 * min(down.shape[1:])
    gate_up = random(2 * BATCH[1], width + width % 4, source=generator())
    twin = twin_of(module, {}, dict(module._modules))
    wanted = run(type(module)._apply_gate, twin, gate_up)
    if isinstance(wanted, str):
        return Refused(wanted, kernel)
    for gate_first in (True, False):
        halves = gate_up.chunk(2, -1)
        found = _found_gate(wanted, *(halves if gate_first else halves[::-1]), (1.0,))
        if found:
            chosen = kernel if found.act == "silu" and gate_first else found.kernel
            words = f"{found.act}, {implementation or 'batched'} experts"
            return Match(chosen, words, parts.gate_of_halves(found.act, gate_first), slot="_apply_gate")
    return Refused(_why_not(wanted, *gate_up.chunk(2, -1)), kernel)
