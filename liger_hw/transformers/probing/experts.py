"""Recognises experts whose weights are batched parameters, by a comparison of a tiny copy with `fused_moe`.

The copy has the module's attributes, and random weights of a few small experts in the same layout. It runs the class's
loop over experts (`eager` in transformers). Results and gradients decide, not flags such as `is_transposed`.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import nn

from ...distributed import owners
from ...kernels.moe.fused_moe import fused_moe_reference
from ...kernels.moe.reference import Gate
from ...runtime.checks import autocast_dtype
from .. import functional
from ..choice import CHOICE, NAME
from ..marks import is_ours
from ..replacing import Guards, Match, stands_for
from ..source import Facts, open_branch
from . import probe
from .probe import Refused

KERNEL = "fused_moe"
_BIASES = "_bias"
_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "relu")
_UP = ("gate_up_proj", "up_proj")
_DOWN = "down_proj"
_GATE = "_apply_gate"
"""The method that transformers' implementations call between the two products. The class's loop may not call it."""
_EXPERTS, _TOKENS, _TOP_K = 5, 7, 2
_HIDDEN, _INNER = 8, 12
_REPLACED = (None, "eager", "grouped_mm", "batched_mm", NAME)
"""Experts implementations that the op may replace. Any other one is left alone, as the user has chosen it."""
_DENSE = (
    "its routing weights are [tokens, experts], as in transformers 4; fused_moe takes [tokens, k], one for each chosen "
    "expert"
)
IN_A_LIST = (
    "its experts are modules in a list, as in transformers 4; fused_moe takes batched parameters, as in transformers 5"
)


class Formula(NamedTuple):
    """How `fused_moe` computes a module's experts.

    up, up_bias, down_bias: names of the module's parameters, "" for biases that it does not have; options: the op's
    """

    up: str
    up_bias: str
    down_bias: str
    options: tuple[tuple[str, Any], ...]

    def weights(self, module: Any) -> tuple[torch.Tensor | None, ...]:
        """(up, down, bias of up, bias of down) of a module. Each is read once, as PEFT computes it at every access."""
        names = (self.up, _DOWN, self.up_bias, self.down_bias)
        return tuple(getattr(module, name) if name else None for name in names)

    def __str__(self) -> str:
        options = dict(self.options)
        words = [options["activation"]]
        words += [f"{name} {options[name]:g}" for name in ("alpha", "limit", "up_offset") if name in options]
        words += ["no gate"] if "has_gate" in options else []
        words += ["interleaved"] if "is_concatenated" in options else []
        words += ["transposed"] if "is_transposed" in options else []
        return ", ".join(words + (["biases"] if self.up_bias else []))


def replacement(formula: Formula) -> Callable[..., torch.Tensor]:
    """The experts' forward by the op: of (module, x [tokens, hidden], top_k_index and top_k_weights [tokens, k])."""
    liger_fused_moe = functional.liger_fused_moe
    options = dict(formula.options)

    def experts(self: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        up, down, up_bias, down_bias = formula.weights(self)
        rows = x
        if x.dtype is not up.dtype and autocast_dtype(x.device.type) is None:  # else the op casts
            rows, down = x.to(up.dtype), down.to(up.dtype)
            up_bias, down_bias = (b if b is None else b.to(up.dtype) for b in (up_bias, down_bias))
        out = liger_fused_moe(
            rows, up, down, top_k_index, top_k_weights, gate_up_bias=up_bias, down_bias=down_bias, **options
        )
        return out.to(x.dtype)  # as in transformers

    return experts


# -- which modules ---------------------------------------------------------------------------------------------------


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has parameters with the names of two batched projections."""
    names = owners.parameter_shapes(module).keys()
    return _DOWN in names and any(name in names for name in _UP)


def is_list_of_modules(module: nn.Module) -> bool:
    """Whether a module's experts are modules in a list."""
    experts = module._modules.get("experts")
    return isinstance(experts, nn.ModuleList) and len(experts) > 0


def is_experts_by_name(module: nn.Module) -> bool:
    """Whether a module's class is named experts and has three inputs."""
    return type(module).__name__.endswith("Experts") and len(probe.required_inputs(type(module).forward)) == 3


def recognise(module: nn.Module, forward: Callable) -> Match | Refused:
    """The match with `fused_moe`, or why it does not compute the same."""
    chosen = getattr(vars(module).get("config"), "_experts_implementation", None)
    if chosen not in _REPLACED:
        return Refused(f"experts_implementation={chosen!r} was asked for", KERNEL)
    if has_own_gate(module):
        return Refused(f"its {_GATE} was replaced by something else", KERNEL)
    formula = _formula(module, inspect.unwrap(forward))
    if isinstance(formula, str):
        return Refused(formula, KERNEL)
    used = frozenset(owners.parameter_shapes(module)) | {"num_experts"}
    return Match(KERNEL, str(formula), replacement(formula), used=used, inputs=3, ready=_ready(type(module)))


def while_named(guards: Guards) -> Guards:
    """The guards, with liger_hw as the implementation that the experts' configuration, if any, must name."""
    return tuple((kind, name, NAME if name == CHOICE else value) for kind, name, value in guards)


def has_own_gate(module: Any) -> bool:
    """Whether a program has set another gate on this module."""
    return _GATE in module.__dict__ and not is_ours(module.__dict__[_GATE])


def _ready(cls: type) -> Callable[[Any, torch.Tensor], bool]:
    """A check that a module's gate is the recognised one. Guards compare only what the class's loop calls."""
    gate = getattr(cls, _GATE, None)

    def ready(self: Any, x: torch.Tensor) -> bool:
        return not has_own_gate(self) and stands_for(getattr(type(self), _GATE, None), gate)

    return ready


def _formula(module: nn.Module, forward: Callable) -> Formula | str:
    """The formula with which the op computes the same, or why it cannot."""
    if lost := probe.why_unknown_shapes(module):
        return lost
    shapes = {name: shape for name, shape in owners.parameter_shapes(module).items() if shape is not None}
    up = next((name for name in _UP if name in shapes), "")
    known = {up, _DOWN, up + _BIASES, _DOWN + _BIASES}
    if not up or _DOWN not in shapes:
        return "it lacks one of its two projections"
    if unknown := sorted(shapes.keys() - known):
        return f"it has {unknown[0]} besides its two projections"
    dtypes = [getattr(module, name).dtype for name in shapes]
    if odd := [dtype for dtype in dtypes if not dtype.is_floating_point or dtype.itemsize < 2]:
        return f"its weights are {odd[0]}"
    layouts = list(_layouts(shapes[up], shapes[_DOWN], up == "gate_up_proj"))
    if not layouts:
        return f"its projections have shapes {shapes[up]} and {shapes[_DOWN]}"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert"
    if trained := next((name for name, child in module.named_children() if any(True for _ in child.parameters())), ""):
        return f"its {trained} has parameters of its own"
    if len(_inputs(forward)) != 3:
        return f"it takes {' and '.join(_inputs(forward))}, not tokens, experts and weights"
    reasons = []
    for layout in layouts:
        formula = _Probe(module, forward, up, shapes.keys(), layout).formula()
        if isinstance(formula, Formula):
            return formula
        reasons.append(formula)
    return min(reasons, key=lambda reason: reason.startswith("it cannot be run"))


def _inputs(forward: Callable) -> list[str]:
    """Names of a forward's inputs. Two of gpt-oss's three have a default."""
    names = probe.required_inputs(forward)
    return names if len(names) == 3 else list(inspect.signature(forward).parameters)[1:]


class _Layout(NamedTuple):
    """Layout of the weights. inner: an expert's width in the probe; sizes: size in the module -> size in the probe"""

    is_transposed: bool
    has_gate: bool
    inner: int
    sizes: dict[int, int]


def _layouts(up: tuple[int, ...], down: tuple[int, ...], is_double: bool) -> Iterator[_Layout]:
    """The possible layouts of weights of these shapes; two if sizes are equal."""
    if len(up) != 3 or len(down) != 3 or up[0] != down[0]:
        return
    for is_transposed in (False, True):
        columns, hidden = (up[2], up[1]) if is_transposed else (up[1], up[2])
        out, inner = (down[2], down[1]) if is_transposed else (down[1], down[2])
        if out == hidden and columns == (2 if is_double else 1) * inner:
            tiny_inner = _HIDDEN if inner == hidden else _INNER
            sizes = {columns: tiny_inner * columns // inner, inner: tiny_inner, hidden: _HIDDEN, up[0]: _EXPERTS}
            yield _Layout(is_transposed, is_double, tiny_inner, sizes)


# -- running a copy --------------------------------------------------------------------------------------------------


class _Probe:
    """Runs copies of one experts module, in one layout, and compares them with the op's reference."""

    def __init__(self, module: nn.Module, forward: Callable, up: str, names: Any, layout: _Layout) -> None:
        self.module, self.forward, self.up, self.layout = module, forward, up, layout
        self.up_bias, self.down_bias = (name if name in names else "" for name in (up + _BIASES, _DOWN + _BIASES))
        hidden, inner, source = _HIDDEN, layout.inner, probe.generator()
        columns = 2 * inner if layout.has_gate else inner
        numbers = self._numbers()
        # so that pre-activations are below all limits, above limits in attributes, and above limits in code
        self.scales = 0.3, max([6.0, *numbers]), probe.LARGE

        def weight(rows: int, n: int) -> torch.Tensor:
            w = probe.normal(_EXPERTS, rows, n, source=source)
            return (w.mT.contiguous() if layout.is_transposed else w).requires_grad_()

        self.parameters = {up: weight(columns, hidden), _DOWN: weight(hidden, inner)}
        for name, size in ((self.up_bias, columns), (self.down_bias, hidden)):
            if name:
                self.parameters[name] = probe.normal(_EXPERTS, size, source=source).requires_grad_()
        self.x = probe.normal(_TOKENS, hidden, source=source).requires_grad_()
        experts = torch.stack([torch.randperm(_EXPERTS - 1, generator=source)[:_TOP_K] for _ in range(_TOKENS)])
        self.index = experts  # without the last expert, which gets no token
        self.weights = torch.rand(_TOKENS, _TOP_K, generator=source, dtype=torch.float32).requires_grad_()
        self.facts = Facts(present=frozenset(_inputs(forward)), compared=frozenset({"num_experts"}))

    def formula(self) -> Formula | str:
        """The formula whose results and gradients agree for all `scales`, or why none does."""
        with torch.enable_grad():
            expected = [self._original(scale) for scale in self.scales]
            in_eval, of_one = self._original(1.0, training=False), self._original(1.0, self.index[:1], self.weights[:1])
            for result in expected:
                if isinstance(result, str):
                    return _DENSE if self._takes_dense_weights() else result
            if not probe.agrees(in_eval, self._original(1.0), 1e-6):
                return "it computes something else in eval mode"
            if not probe.agrees(of_one, self._original(1.0)[:1], 2e-5):
                return "it computes something else for one token"
            for options in self._options():
                results = [self._reference(scale, options) for scale in self.scales]
                if all(probe.agrees(*pair, 2e-5) for pair in zip(results, expected)):
                    leaves = [self.x, self.weights, *self.parameters.values()]
                    if not all(probe.has_same_gradients(*pair, leaves, 2e-4) for pair in zip(results, expected)):
                        return f"its gradients are not {KERNEL}'s"
                    if not self._has_gate_of(options):
                        return f"its {_GATE} computes something else than its own loop"
                    if elsewhere := open_branch(self.forward, self.module, self.facts):
                        return elsewhere
                    return Formula(self.up, self.up_bias, self.down_bias, tuple(options.items()))
        return "its activation is not one of the kernel's"

    def _takes_dense_weights(self) -> bool:
        """Whether the original forward runs on routing weights [tokens, experts], before or after the index."""
        dense = torch.zeros(_TOKENS, _EXPERTS).scatter(1, self.index, self.weights)
        routings = (self.index, dense), (dense, self.index)
        return any(isinstance(self._original(1.0, *routing), torch.Tensor) for routing in routings)

    def _has_gate_of(self, options: dict[str, Any]) -> bool:
        """Whether the gate that transformers' implementations call, but maybe not the loop, has the same formula."""
        apply_gate = getattr(type(self.module), _GATE, None)
        if apply_gate is None or not self.layout.has_gate:
            return True
        gate = Gate(**{name: value for name, value in options.items() if name in Gate._fields})
        copied = probe.copy_of(self.module, self.parameters, {})
        z = probe.random(_TOKENS, 2 * self.layout.inner, source=probe.generator())
        return all(
            probe.agrees(probe.run(apply_gate, copied, scale * z), gate.apply(scale * z), 2e-5) for scale in self.scales
        )

    def _original(self, scale: float, *routing: torch.Tensor, training: bool = True) -> torch.Tensor | str:
        """The original forward's result on a copy of the module, for x * scale, or why it cannot be run.
        routing: arguments in place of index and weights, with a row for each of the first tokens"""
        copied = probe.copy_of(self.module, self.parameters, {}, training)
        for name, value in vars(copied).items():
            if type(value) is int and value in self.layout.sizes:
                copied.__dict__[name] = self.layout.sizes[value]
        if "num_experts" in vars(copied):
            copied.__dict__["num_experts"] = _EXPERTS  # expert parallelism has set it to a rank's share
        routing = routing or (self.index, self.weights)
        return probe.run(self.forward, copied, self.x[: len(routing[0])] * scale, *routing)

    def _reference(self, scale: float, options: dict[str, Any]) -> torch.Tensor:
        up_bias, down_bias = self.parameters.get(self.up_bias), self.parameters.get(self.down_bias)
        weights = self.parameters[self.up], self.parameters[_DOWN], self.index, self.weights
        return fused_moe_reference(self.x * scale, *weights, gate_up_bias=up_bias, down_bias=down_bias, **options)

    def _options(self) -> Iterator[dict[str, Any]]:
        """All sets of options that the numbers among the module's attributes allow, with fewest options first."""
        fixed: dict[str, Any] = {"is_transposed": True} if self.layout.is_transposed else {}
        if not self.layout.has_gate:
            fixed["has_gate"] = False
        numbers = dict.fromkeys(self._numbers())
        limits = [{}, *({"limit": number} for number in numbers)]
        halves = ({}, {"is_concatenated": False}) if self.layout.has_gate else ({},)
        for half, activation, limit in itertools.product(halves, _ACTIVATIONS, limits):
            yield {"activation": activation, **limit, **half, **fixed}
        if self.layout.has_gate:  # gpt-oss's
            for half, alpha, limit in itertools.product(halves, [1.0, *numbers], limits):
                yield {"activation": "silu", "alpha": alpha, **limit, "up_offset": 1.0, **half, **fixed}

    def _numbers(self) -> list[float]:
        """Positive finite numbers among the attributes that the forward reads, except sizes."""
        values = probe.numbers_read(self.module, self.forward, int, float).values()
        return [float(v) for v in values if 0 < v < float("inf") and v not in self.layout.sizes]
