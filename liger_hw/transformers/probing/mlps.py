"""Recognises MLPs, gated or with squared ReLU, with projections of any class.

In the probe a `_StandIn` replaces each projection: it stores its input and returns random numbers. Patched MLPs call
the projections in the original order, so that LoRA's dropout draws the same random numbers.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from ...kernels.pointwise.geglu import geglu_reference
from ...kernels.pointwise.relu_squared import relu_squared_reference
from ...kernels.pointwise.swiglu import swiglu_reference
from .. import functional
from ..replacing import Cast, Match, gated_replacement, halves_replacement, is_customised, one_projection_replacement
from ..source import Facts, open_branch
from . import probe
from .probe import Refused

# -- which modules may be an MLP -------------------------------------------------------------------------------------

_NAMES = ("mlp", "ffn", "feedforward", "experts")


def is_candidate(module: nn.Module) -> bool:
    """Whether a module consists of two or three projections and activations, or has the name of an MLP or experts."""
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.Linear)):
        return False
    if any(word in type(module).__name__.lower() for word in _NAMES):
        return True
    kinds = [_kind(child) for child in module._modules.values() if child is not None]
    return not module._parameters and kinds.count("projection") in (2, 3) and "other" not in kinds and "act" in kinds


def recognise(module: nn.Module, forward: Callable) -> Match | Refused | None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    projections = {name: child for name, child in children.items() if _kind(child) == "projection"}
    has_others = any(_kind(child) == "other" for child in children.values())
    if module._parameters:
        return Refused("its projections are its own parameters", "swiglu")
    if not projections or (has_others and len(projections) < 2):
        return None  # a container of MLPs, or a head; its children are probed separately
    inputs = probe.required_inputs(forward)
    if len(inputs) != 1:
        return Refused(f"it takes {' and '.join(inputs) or 'no input'}", "swiglu")
    if has_others or len(projections) not in (2, 3):
        classes = ", ".join(type(child).__name__ for child in children.values())
        return Refused(f"it is not two or three projections around an activation ({classes})", "swiglu")
    for name, child in children.items():  # a kernel does not call activation modules, so their hooks would not run
        if _kind(child) in ("act", "dropout") and is_customised(child):
            return Refused(f"{name} has hooks or a forward of its own, which the kernel would not run", "swiglu")
    return _Probe(module, forward, projections).recognise()


def _kind(module: nn.Module) -> str:
    """One of "projection", "act" (no parameters, no children), "dropout" and "other"."""
    if isinstance(module, nn.Dropout):
        return "dropout"
    if hasattr(module, "base_layer") or isinstance(getattr(module, "out_features", None), int):
        return "projection"
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2 and not module._modules and not isinstance(module, nn.Embedding):
        return "projection"
    if not module._parameters and not module._buffers and not module._modules:
        return "act"
    return "other"


# -- running copies --------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """One call of a projection: its name, its input, and its stand-in's output."""

    name: str
    input: torch.Tensor
    output: torch.Tensor


class _StandIn:
    """Replaces a projection: appends its calls to `calls` and returns random numbers."""

    def __init__(
        self, name: str, projection: nn.Module, calls: list[_Call], source: torch.Generator, case: "_Case"
    ) -> None:
        self.name, self.projection, self.calls = name, projection, calls
        self.output = probe.random(*case.leading, _out_features(projection), source=source) * case.scale
        if _has_weight(projection):
            self.weight = torch.empty(0, dtype=case.weight or case.dtype)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs:
            raise TypeError(f"{self.name} is called with more than one argument")
        output = self.output.to(x.dtype).requires_grad_(torch.is_grad_enabled())
        self.calls.append(_Call(self.name, x, output))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.projection, name)


def _has_weight(module: nn.Module) -> bool:
    """Whether `weight` is a tensor. It is not read, as that would compute a parametrization, or gather under ZeRO-3."""
    if module._parameters.get("weight") is not None or module._buffers.get("weight") is not None:
        return True
    return isinstance(inspect.getattr_static(module, "weight", None), (torch.Tensor, property))


def _out_features(module: nn.Module) -> int:
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)
    if isinstance(size, int):
        return size
    base = getattr(module, "base_layer", None)
    return _out_features(base) if base is not None else module.weight.shape[0]


class _Probe:
    """Runs copies of one MLP and finds its formula from its projections' inputs and outputs.

    multipliers: attributes that may be factors in the formula -> their values in the probe
    """

    def __init__(self, module: nn.Module, forward: Callable, projections: dict[str, nn.Module]) -> None:
        self.module, self.forward, self.projections = module, forward, projections
        self.numbers = probe.numbers_read(module, forward, float)
        self.multipliers: dict[str, float] = {}
        others = frozenset(list(inspect.signature(forward).parameters)[2:])  # a call with one runs the original
        self.facts = Facts(absent=others, skipped=frozenset(projections), dims=frozenset({2, 3}), dtypes=True)

    def recognise(self) -> Match | Refused:
        """The match or the reason. At first each float that the forward reads gets a distinct value, and may be a
        multiplier in the formula. If nothing matches, the probe runs again without multipliers."""
        self.multipliers = {name: 1.25 + 0.5 * i for i, name in enumerate(self.numbers)}
        result = self._recognise() if self.multipliers else None
        if not isinstance(result, Match):
            self.multipliers = {}
            result = self._recognise()
        rates = [child.p for child in self.module._modules.values() if isinstance(child, nn.Dropout)]
        rates += [value for name, value in self.numbers.items() if "drop" in name]
        dropped = next((rate for rate in rates if rate > 0), None)
        if dropped is not None and isinstance(result, Refused):
            return Refused(f"it drops out (p={dropped})", result.kernel)
        return result

    def _recognise(self) -> Match | Refused:
        y, x, calls = self._run(_Case())
        if isinstance(y, str):
            return Refused(y, "swiglu")
        with torch.enable_grad():
            result = self._formula(x, y, calls)
        if isinstance(result, Refused):
            return result
        match, formula = result
        reason = self._why_not_general(formula) or open_branch(self.forward, self.module, self.facts)
        return Refused(reason, match.kernel) if reason else match

    def _run(self, case: "_Case") -> tuple[torch.Tensor | str, torch.Tensor, list[_Call]]:
        """(the module's result or why it cannot be run, its input, the calls of its projections)"""
        source = probe.generator()
        calls: list[_Call] = []
        stand_ins = {name: _StandIn(name, child, calls, source, case) for name, child in self.projections.items()}
        first = next(iter(self.projections.values()))
        x = probe.random(*case.leading, getattr(first, "in_features", None) or 8, source=source).to(case.dtype)
        with torch.enable_grad():
            copied = probe.copy_of(self.module, {}, stand_ins, case.training)
            copied.__dict__.update(self.multipliers)
            return probe.run(self.forward, copied, x), x, calls

    def _why_not_general(self, formula: "_Formula") -> str:
        """The first case (eval mode, another shape or dtype, large numbers) in which the formula fails, or ""."""
        for case in _CASES:
            y, _, calls = self._run(case)
            if isinstance(y, str):
                continue  # the module itself cannot run this case
            outputs = {call.name: call.output for call in calls}
            activated = next((call.input for call in calls if call.name == formula.down), None)
            tolerance = 1e-5 if case.dtype is torch.float32 else 4 * torch.finfo(case.dtype).eps
            if activated is None or not probe.agrees(activated, formula.down_input(outputs), tolerance):
                return f"it computes something else {case}"
            if not probe.agrees(y, outputs[formula.down] * formula.scale, tolerance):
                return f"it computes something else {case}"
        return ""

    def _cast(self, down: str) -> Cast:
        """The dtypes of down's weight to which its input is cast."""
        dtypes = set()
        for dtype in _WEIGHTS:
            case = _Case(dtype=torch.bfloat16 if dtype is torch.float32 else torch.float32, weight=dtype)
            calls = self._run(case)[2]
            activated = next((call.input for call in calls if call.name == down), None)
            if activated is not None and activated.dtype is dtype:
                dtypes.add(dtype)
        return frozenset(dtypes)

    # -- finding the formula ------------------------------------------------------------------------------------------

    def _formula(self, x: torch.Tensor, y: torch.Tensor, calls: list[_Call]) -> "tuple[Match, _Formula] | Refused":
        """The match and formula. The last projection is `down`; the others must take x."""
        names = [call.name for call in calls]
        if sorted(names) != sorted(set(names)) or set(names) != set(self.projections):
            return Refused(f"it calls its projections as {', '.join(names) or 'nothing'}", "swiglu")
        *inputs, down = calls
        for call in inputs:
            if not probe.is_equal(call.input, x):
                return Refused(f"{call.name} does not take the module's own input", "swiglu")
        scale = next((n for n, v in {"": 1.0, **self.multipliers}.items() if probe.agrees(y, down.output * v)), None)
        if scale is None:
            return Refused(f"it computes more after {down.name}", "swiglu")
        result = self._two_inputs(inputs, down, scale) if len(inputs) == 2 else self._one_input(*inputs, down, scale)
        if isinstance(result, Refused):
            return result
        match, down_input = result
        outputs = {call.name: call.output for call in calls}
        if not probe.has_same_gradients(down_input(outputs), down.input, [call.output for call in inputs], 1e-4):
            return Refused(f"its gradients are not {match.kernel}'s", match.kernel)
        return match, _Formula(down_input, down.name, self.multipliers.get(scale, 1.0))

    def _two_inputs(self, inputs: list[_Call], down: _Call, scale: str) -> "tuple[Match, _DownInput] | Refused":
        for gate, up in (inputs, inputs[::-1]):
            if gated := _gated_activation(down.input, gate.output, up.output, {"": 1.0, **self.multipliers}):
                break
        else:
            return Refused(_why_not(down.input, *(call.output for call in inputs)), "swiglu")
        names = {"gate": gate.name, "up": up.name, "down": down.name}
        scales = {"gate_scale": gated.gate_scale, "out_scale": scale}
        options = {"up_first": up is inputs[0], "cast": self._cast(down.name)}
        replacement = gated_replacement(gated.act, **names, **scales, **options)
        used = frozenset((*names.values(), *scales.values())) - {""}
        match = Match("swiglu" if gated.act == "silu" else "geglu", gated.act, replacement, used=used)
        return match, lambda outputs: gated.reference(outputs[gate.name], outputs[up.name])

    def _one_input(self, up: _Call, down: _Call, scale: str) -> "tuple[Match, _DownInput] | Refused":
        """act(gate) * up of the two halves of one projection, or max(up(x), 0)^2."""
        if up.output.shape[-1] == 2 * down.input.shape[-1]:
            for order in (1, -1):
                if gated := _gated_activation(down.input, *up.output.chunk(2, -1)[::order], {"": 1.0}):
                    break
            else:
                return Refused(_why_not(down.input, *up.output.chunk(2, -1)), "swiglu")
            activation = halves_replacement(gated.act, gate_first=order == 1)
            kernel = "geglu" if gated.act != "silu" else "fused_gate_up_swiglu" if order == 1 else "swiglu"
            words = gated.act if order == 1 else f"{gated.act}, up first"
            down_input = lambda outputs: gated.reference(*outputs[up.name].chunk(2, -1)[::order])  # noqa: E731
        elif probe.agrees(relu_squared_reference(up.output), down.input):
            kernel, words, squared = "relu_squared", "", functional.liger_relu_squared
            activation = lambda self, x, owned=False: squared(x)  # noqa: E731
            down_input = lambda outputs: relu_squared_reference(outputs[up.name])  # noqa: E731
        else:
            plain = next((name for name, act in _ONE_LAUNCH.items() if probe.agrees(act(up.output), down.input)), None)
            why = f": torch's {plain} is one launch already" if plain else ", and no kernel"
            return Refused(f"its activation has no gate{why}", "swiglu")
        replacement = one_projection_replacement(activation, up.name, down.name, scale, self._cast(down.name))
        used = frozenset((up.name, down.name, scale)) - {""}
        return Match(kernel, words, replacement, used=used), down_input


_ONE_LAUNCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": nn.functional.gelu,
    "tanh gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
    "relu": nn.functional.relu,
}
"""Activations without a gate, for which torch's kernel reads and writes each element only once as well."""

_DownInput = Callable[[dict[str, torch.Tensor]], torch.Tensor]
"""Function of {projection: output} that returns the input of the last projection."""


class _Formula(NamedTuple):
    """The formula of an MLP: `down_input` returns the input of projection `down`; the result is its output * scale."""

    down_input: _DownInput
    down: str
    scale: float


class _Case(NamedTuple):
    """One run. leading: dimensions of x before the last; dtype: of x; weight: dtype of the projections' weights (None:
    of x); scale: factor of their outputs"""

    leading: tuple[int, ...] = probe.BATCH
    dtype: torch.dtype = torch.float32
    training: bool = True
    weight: torch.dtype | None = None
    scale: float = 1.0

    def __str__(self) -> str:
        size = "" if self.scale == 1.0 else f" of about {self.scale:g}"
        mode = "training" if self.training else "eval mode"
        return f"for {list(self.leading)} rows of {self.dtype}{size} in {mode}"


_CASES = tuple(
    _Case(leading, dtype, training, scale=scale)
    for training in (True, False)
    for leading, dtype, scale in (
        ((1, 1), torch.float32, 1.0),
        ((1, 67), torch.float32, 1.0),
        ((5,), torch.float32, 1.0),
        (probe.BATCH, torch.float32, probe.LARGE),
        (probe.BATCH, torch.bfloat16, 1.0),
        (probe.BATCH, torch.float16, 1.0),
    )
)
"""Cases in which the formula must hold too."""
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8)


class _Gated(NamedTuple):
    """act(gate_scale * gate) * up. act: silu, gelu_tanh or gelu; gate_scale: the multiplier's name, or ""

    reference: function of (gate, up) that computes it, with the multiplier's value in the probe
    """

    act: str
    gate_scale: str
    reference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _gated_activation(
    expected: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, multipliers: dict[str, float]
) -> _Gated | None:
    """The gated activation that gives `expected` for (gate, up). Only silu's kernel has a multiplier."""
    kinds = [("silu", name, functools.partial(swiglu_reference, gate_multiplier=n)) for name, n in multipliers.items()]
    kinds += [("gelu_tanh", "", functools.partial(geglu_reference, approximate="tanh"))]
    kinds += [("gelu", "", functools.partial(geglu_reference, approximate="none"))]
    for act, name, reference in kinds:
        if probe.agrees(reference(gate, up), expected):
            return _Gated(act, name, reference)
    return None


def _why_not(expected: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> str:
    for gate, up in ((first, second), (second, first)):
        for name, activation in (("relu", torch.relu), ("sigmoid", torch.sigmoid)):
            if expected.shape == up.shape and probe.agrees(activation(gate) * up, expected):
                return f"it is gated by {name}: no kernel"
    return "its activation is not silu, tanh gelu or gelu times the other half (it is clamped, limited or in pairs)"
