"""Experts that are modules of their own in a list, as transformers 4 has them: the loop over them runs as `fused_moe`.

A block with a child `experts`, a `ModuleList` of gated MLPs, loops over them in its forward, between its router and its
shared experts, or in a method `moe` of the tokens, the chosen experts and their weights. What is replaced is the loop
alone (`loops.py`) or that method. Router, shared experts and what else the block returns stay its own code.

A tiny twin of the block, with the real one's classes and attributes, runs both ways on random inputs: results and
gradients must agree, also where an expert has no token. The weights are stacked in every forward and again in backward,
so parameters stay where they are. The experts must then be plain: `why_not` says what is in the way, and is asked at
every call too.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import nn

from ...distributed import owners
from ...kernels.moe.fused_moe import fused_moe_reference
from ...runtime.checks import autocast_dtype
from ...text import first_line
from ..marks import is_our_method, original_of
from . import loops, mlps
from .coverage import Coverage
from .guards import Guards, guards_of, holds, reads
from .probe import Match, Refused, agrees, generator, normal, probe_copy, required_inputs

KERNEL = "fused_moe"
_LIST, _METHOD = "experts", "moe"
_HIDDEN, _INNER, _EXPERTS = 8, 12, 16
"""Sizes of the twins. Their experts are as many as a token may choose, where the samples of classes have but a few."""
_TOKENS = (13, 1)
"""Tokens of the probes; one token leaves experts without any."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has a list of experts that its forward, or its method `moe`, reads."""
    experts = module._modules.get(_LIST)
    return isinstance(experts, nn.ModuleList) and len(experts) > 0 and _slot(type(module)) is not None


def _slot(cls: type) -> str | None:
    """The method that loops over the experts."""
    for name in (_METHOD, "forward"):
        code = getattr(inspect.unwrap(getattr(cls, name, None)), "__code__", None)
        if code is not None and _LIST in code.co_names:
            return name
    return None


# -- which experts may be stacked ------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What experts must be for a match that was found on one list of them to hold.

    cls: their class; gate, up, down: names of their projections; guards: what their forward reads beside
    """

    cls: type
    gate: str
    up: str
    down: str
    guards: Guards

    @property
    def names(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down


def why_not(module: nn.Module, kind: Kind | None = None) -> str:
    """Why the experts' weights cannot be stacked as they are, or "": asked when a block is patched and at each call.

    Hooks, adapters, quantised weights, shards and offloading all work on the experts' own forwards, which a stack of
    their weights would leave out. kind: also whether they are such experts; else they need only have linear layers
    """
    first: torch.Tensor | None = None
    for expert in module._modules[_LIST]._modules.values():
        if kind is not None and (type(expert) is not kind.cls or not holds(expert, kind.guards)):
            return "its experts are not what they were"
        if is_customised(expert):
            return "hooks or a forward of their own are on its experts"
        names = kind.names if kind is not None else expert._modules
        for name in names:
            linear = expert._modules[name]
            if kind is None and not hasattr(linear, "weight"):
                continue  # an activation
            reason = _why_not_linear(linear, first)
            if reason:
                return reason
            first = linear._parameters["weight"] if first is None else first
    return ""


def _why_not_linear(linear: Any, first: torch.Tensor | None) -> str:
    if type(linear) is not nn.Linear:
        return f"a projection of its experts is a {type(linear).__module__}.{type(linear).__qualname__}"
    if is_customised(linear):
        return "hooks or a forward of their own are on its experts' projections"
    weight = linear._parameters.get("weight")
    if weight is None:
        return "its experts' weights are not there: FSDP1 or a parametrization holds them"
    if hasattr(weight, "ds_shape"):
        return "ZeRO-3 shards its experts one by one"
    if type(weight) is not nn.Parameter:
        return f"a weight of its experts is a {type(weight).__name__}"
    if linear._parameters.get("bias") is not None:
        return "its experts have biases"
    if weight.dtype not in _DTYPES:
        return f"its experts' weights are {weight.dtype}"
    if first is not None and (weight.dtype is not first.dtype or weight.device != first.device):
        return "its experts' weights differ in dtype or device"
    return ""


def is_customised(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class's forward, where that may be patched by liger_hw itself."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return "forward" in module.__dict__ and not is_our_method(module.__dict__["forward"])


# -- what takes the loop's place -------------------------------------------------------------------------------------


def _weights_of(module: nn.Module, kind: Kind) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """(gate and up of each expert, down of each expert)"""
    parts = [expert._modules for expert in module._modules[_LIST]._modules.values()]
    pairs = [(part[kind.gate]._parameters["weight"], part[kind.up]._parameters["weight"]) for part in parts]
    return pairs, [part[kind.down]._parameters["weight"] for part in parts]


def replacement(kind: Kind, activation: str) -> Callable[..., torch.Tensor]:
    """The experts of (module, x [tokens, hidden], top_k_index [tokens, k], top_k_weights [tokens, k])."""
    from ..functional import liger_fused_moe

    def experts(self: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        pairs, downs = _weights_of(self, kind)
        return liger_fused_moe(x, pairs, downs, top_k_index, top_k_weights, activation=activation)

    return experts


def _ready(kind: Kind) -> Callable[[Any, torch.Tensor], bool]:
    """Whether a block is to run its experts so on an input: they are plain, and have the input's dtype and device.

    Generation passes a few tokens and needs no gradient: the loop then reads the chosen experts' weights alone.
    """

    def ready(self: Any, x: torch.Tensor) -> bool:
        experts = self._modules[_LIST]
        if not torch.is_grad_enabled() and x.numel() < len(experts) * x.shape[-1]:
            return False
        if why_not(self, kind):
            return False
        weight = experts._modules["0"]._modules[kind.down]._parameters["weight"]
        same = weight.dtype is x.dtype or autocast_dtype(x.device.type) is not None
        return same and weight.device == x.device

    return ready


# -- recognising -----------------------------------------------------------------------------------------------------


def recognise(module: nn.Module, forward: Callable) -> Match | Refused:
    """`fused_moe` in the place of the loop, where a twin of the block computes the same with it."""
    if reason := why_not(module):
        return Refused(reason, KERNEL)
    experts = list(module._modules[_LIST])
    if len({type(expert) for expert in experts}) != 1:
        return Refused("its experts are of several classes", KERNEL)
    expert = experts[0]
    found = mlps.recognise(expert, original_of(type(expert).forward))
    if isinstance(found, Refused):
        return Refused(f"an expert: {found.reason}", KERNEL)
    kinds = list(_kinds(expert, found.used))
    if not kinds:
        return Refused("its experts are not MLPs of three projections", KERNEL)
    if any(not holds(other, kinds[0].guards) for other in experts):
        return Refused("its experts differ", KERNEL)
    slot = _slot(type(module))
    function = forward if slot == "forward" else getattr(type(module), slot)
    if slot == _METHOD and len(required_inputs(function)) != 3:
        return Refused(f"its method {_METHOD} does not take tokens, experts and weights", KERNEL)
    try:
        cuts = loops.cuts(function) if slot == "forward" else [None]
    except loops.CannotCut as error:
        return Refused(str(error), KERNEL)
    probe = _Probe(module, function, kinds[0])
    with torch.enable_grad():
        match = probe.match(kinds, cuts, found.variant)
    return replace(match, slot=slot) if isinstance(match, Match) else match


def _kinds(expert: nn.Module, used: frozenset[str]) -> Iterator[Kind]:
    """The ways to name an expert's projections that their shapes allow."""
    shapes = {name: owners.parameter_shapes(expert._modules[name])["weight"] for name in used & expert._modules.keys()}
    if len(used) != 3 or len(shapes) != 3:
        return
    guards = guards_of(expert, original_of(type(expert).forward), used)
    for gate, up, down in itertools.permutations(sorted(shapes)):
        if shapes[gate] == shapes[up] == shapes[down][::-1]:
            yield Kind(type(expert), gate, up, down, guards)


class _Probe:
    """Runs tiny twins of a block, with its own loop and with the op's reference."""

    def __init__(self, module: nn.Module, function: Callable, kind: Kind) -> None:
        self.module, self.function = module, function
        experts = module._modules[_LIST]
        expert = experts[0]
        hidden, inner = owners.parameter_shapes(expert._modules[kind.down])["weight"]
        self.sizes = {hidden: _HIDDEN, inner: _HIDDEN if inner == hidden else _INNER}
        self.n_experts = self.sizes.setdefault(len(experts), _EXPERTS)
        self.widths = {hidden, inner}

    def match(self, kinds: list[Kind], cuts: list[loops.Cut | None], activation: str) -> Match | Refused:
        """The first of the given ways that computes what the block does, with its gradients."""
        coverage = Coverage(self.function)
        own = {}
        for case in itertools.product(_TOKENS, (True, False)):
            with coverage:
                own[case] = self._run(self.function, *case)
        if failed := next((result for result in own.values() if isinstance(result, str)), None):
            return Refused(failed, KERNEL)
        if self.takes_inputs:
            with coverage:
                self._run(self.function, 0, True)  # no token at all, which some cannot do
        for cut, kind in itertools.product(cuts, kinds):
            function = self._with_reference(kind, cut, activation)
            if all(_agree(self._run(function, *case), result) for case, result in own.items()):
                if elsewhere := coverage.unexplored(self.function.__code__, cut.lines if cut else None):
                    return Refused(elsewhere, KERNEL)
                return self._found(kind, cut, activation)
        return Refused(f"it does not compute what {KERNEL} does", KERNEL)

    @property
    def takes_inputs(self) -> bool:
        """Whether the function is the method of tokens, experts and weights."""
        return self.function.__name__ == _METHOD

    def _found(self, kind: Kind, cut: loops.Cut | None, activation: str) -> Match:
        experts, names = replacement(kind, activation), reads(type(self.module), self.function)
        words, ready = f"{activation}, separate experts", _ready(kind)
        if cut is None:
            return Match(KERNEL, words, experts, used=frozenset({_LIST}), inputs=3, ready=ready)
        return Match(KERNEL, words, cut.with_experts(experts), used=(names - cut.reads) | {_LIST}, ready=ready)

    def _with_reference(self, kind: Kind, cut: loops.Cut | None, activation: str) -> Callable:
        def experts(self: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
            pairs, downs = _weights_of(self, kind)
            gate_up = torch.stack([torch.cat(pair) for pair in pairs])
            routed = top_k_index, top_k_weights
            return fused_moe_reference(x, gate_up, torch.stack(downs), *routed, activation=activation)

        return experts if cut is None else cut.with_experts(experts)

    def _run(self, function: Callable, n_tokens: int, training: bool) -> "_Result | str":
        source = generator()
        twin = self._twin(self.module, source, training)
        x = normal(n_tokens, _HIDDEN, source=source).requires_grad_()
        leaves = [x, *twin.parameters()]
        inputs: tuple[torch.Tensor, ...] = ((x * 1.0).unsqueeze(0),)  # no leaf: some multiply it in place
        if self.takes_inputs:
            top_k = min(2, self.n_experts)
            chosen = [torch.randperm(self.n_experts, generator=source)[:top_k] for _ in range(n_tokens)]
            index = torch.stack(chosen) if chosen else torch.zeros(0, top_k, dtype=torch.long)
            weights = torch.rand(n_tokens, top_k, generator=source, dtype=torch.float32).requires_grad_()
            leaves.append(weights)
            inputs = x * 1.0, index, weights * 1.0
        torch.manual_seed(0)
        return _result(function, (twin, *inputs), leaves)

    def _twin(self, module: nn.Module, source: torch.Generator, training: bool) -> nn.Module:
        """A copy of a module and its children with random weights, where the experts' sizes are small ones."""
        parameters = {}
        for name, shape in owners.parameter_shapes(module).items():
            small = None if shape is None else normal(*(self.sizes.get(n, n) for n in shape), source=source)
            parameters[name] = small if small is None else nn.Parameter(small * 0.5)
        items = list(module._modules.items())
        if module is self.module._modules[_LIST]:
            items = [(str(n), items[n % len(items)][1]) for n in range(self.n_experts)]
        children = {name: child and self._twin(child, source, training) for name, child in items}
        copied = probe_copy(module, parameters, children, training)
        copied.__dict__["_modules"] = children
        copied.__dict__["_buffers"] = {
            name: None if b is None else torch.zeros([self.sizes.get(n, n) for n in b.shape], dtype=b.dtype)
            for name, b in module._buffers.items()
        }
        for name, value in vars(copied).items():
            counts = "experts" in name and "_per_" not in name  # how many there are, not how many a token has
            if type(value) is int and value in self.sizes and (counts or value in self.widths):
                copied.__dict__[name] = self.sizes[value]
        return copied


class _Result(NamedTuple):
    """The floating results of a run, and the gradients of what it was given; None for a leaf without one."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]


def _result(function: Callable, arguments: tuple, leaves: list[torch.Tensor]) -> "_Result | str":
    try:
        given = function(*arguments)
    except Exception as error:  # whatever a foreign forward raises means: not recognised
        return f"it cannot be run alone ({first_line(error)})"
    found = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not all(isinstance(t, torch.Tensor) for t in found) or not found[0].requires_grad:
        return "it returns something else than tensors with gradients"
    total = sum(((t * t.detach().cos()).sum() for t in found if t.requires_grad), torch.zeros(()))
    return _Result(found, torch.autograd.grad(total, leaves, allow_unused=True))


def _agree(found: "_Result | str", wanted: _Result) -> bool:
    """Whether two runs gave the same. An expert without a token has no gradient in a loop, and zeros in the op."""
    if isinstance(found, str) or len(found.outputs) != len(wanted.outputs):
        return False
    if not all(agrees(a, b, 2e-5) for a, b in zip(found.outputs, wanted.outputs)):
        return False
    for mine, theirs in zip(found.gradients, wanted.gradients):
        if mine is None and theirs is None:
            continue
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        if mine is None or not agrees(mine, theirs, 2e-4):
            return False
    return True
