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
_CASES = tuple(itertools.product((13, 1), (True, False)))
"""Tokens of the probes, of which one leaves experts without any, and whether they run in training mode."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LINEAR_FORWARD = nn.Linear.forward


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

    cls, forward: their class, and its forward without patches; guards: what that reads beside the projections
    projections: names of gate, up and down; activation: that of `fused_moe`
    skips_unused: experts without a token get no gradient, as many a loop leaves them, and not zeros
    """

    cls: type
    forward: Callable
    guards: Guards
    projections: tuple[str, str, str]
    activation: str
    skips_unused: bool = False


def why_not(module: nn.Module, kind: Kind | None = None) -> str:
    """Why the experts' weights cannot be stacked as they are, or "": asked when a block is patched and at each call.

    Hooks, adapters, quantised weights, shards and offloading all work on the experts' own forwards, which a stack of
    their weights would leave out. kind: also whether they are such experts; else they need only have linear layers
    """
    if kind is not None and original_of(kind.cls.forward) is not kind.forward:
        return f"the forward of {kind.cls.__name__} was replaced by something else"
    if owners.hooks_on_every_module():
        return "hooks are on every module, so on its experts"
    if nn.Linear.forward is not _LINEAR_FORWARD:
        return "the forward of nn.Linear was replaced by something else"
    first: dict[str, torch.Tensor] = {}
    for expert in module._modules[_LIST]._modules.values():
        if kind is not None and (type(expert) is not kind.cls or not holds(expert, kind.guards)):
            return "its experts are not what they were"
        if expert is None:
            return "some of its experts are elsewhere"
        if _is_customised(expert):
            return "hooks or a forward of their own are on its experts"
        for name in kind.projections if kind is not None else _with_weights(expert):
            linear = expert._modules[name]
            if reason := _why_not_linear(linear):
                return reason
            weight = linear._parameters["weight"]
            alike = first.setdefault(name, weight)
            if weight.shape != alike.shape or weight.dtype is not alike.dtype or weight.device != alike.device:
                return "its experts' weights differ in shape, dtype or device"
    if len({(weight.dtype, weight.device) for weight in first.values()}) > 1:
        return "its experts' projections differ in dtype or device"
    return ""


def _with_weights(expert: nn.Module) -> list[str]:
    """Names of its children that are no activations."""
    return [name for name, child in expert._modules.items() if hasattr(child, "weight")]


def _why_not_linear(linear: Any) -> str:
    if type(linear) is not nn.Linear:
        return f"a projection of its experts is a {type(linear).__module__}.{type(linear).__qualname__}"
    if _is_customised(linear):
        return "hooks or a forward of their own are on its experts' projections"
    weight = linear._parameters.get("weight")
    if weight is None:
        return "its experts' weights are not there: FSDP1 or a parametrization holds them"
    if owners.is_dtensor(weight):
        return "its experts' weights are shards: patch the model before FSDP2 wraps it"
    if type(weight) is not nn.Parameter:
        return f"a weight of its experts is a {type(weight).__name__}"
    if hasattr(weight, "ds_shape"):
        return "ZeRO-3 shards its experts one by one"
    if linear._parameters.get("bias") is not None:
        return "its experts have biases"
    return "" if weight.dtype in _DTYPES else f"its experts' weights are {weight.dtype}"


def _is_customised(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class's forward, where that may be patched by liger_hw itself."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return "forward" in module.__dict__ and not is_our_method(module.__dict__["forward"])


# -- what takes the loop's place -------------------------------------------------------------------------------------


def _experts(kind: Kind, op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The experts of (module, x [tokens, hidden], top_k_index [tokens, k], top_k_weights [tokens, k])."""

    def experts(self: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        gates, ups, downs = (_weights(self, name) for name in kind.projections)
        options = {"activation": kind.activation, "skips_unused": kind.skips_unused}
        return op(x, list(zip(gates, ups)), downs, top_k_index, top_k_weights, **options)

    return experts


def _weights(module: nn.Module, projection: str) -> list[torch.Tensor]:
    experts = module._modules[_LIST]._modules.values()
    return [expert._modules[projection]._parameters["weight"] for expert in experts]


def _reference(x: torch.Tensor, pairs: list, downs: list, *routed: torch.Tensor, activation: str, **_: bool):
    gate_up = torch.stack([torch.cat(pair) for pair in pairs])
    return fused_moe_reference(x, gate_up, torch.stack(downs), *routed, activation=activation)


def _ready(kind: Kind) -> Callable[[Any, torch.Tensor], bool]:
    """Whether a block is to run its experts so on an input: they are plain, and have the input's dtype and device.

    In eval mode without gradients the loop stays: for few tokens, as in generation, it reads the chosen experts alone.
    """

    def ready(self: Any, x: torch.Tensor) -> bool:
        if not (self.training or torch.is_grad_enabled()) or why_not(self, kind):
            return False
        weight = self._modules[_LIST]._modules["0"]._modules[kind.projections[0]]._parameters["weight"]
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
    found = mlps.recognise(experts[0], original_of(type(experts[0]).forward))
    if not isinstance(found, Match):
        return Refused(f"an expert: {found.reason if found else 'it is no MLP'}", KERNEL)
    kinds = list(_kinds(experts[0], found))
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
    with torch.enable_grad():
        answer = _Probe(module, function, slot, kinds[0]).match(kinds, cuts)
    if isinstance(answer, str):
        return Refused(answer, KERNEL)
    return replace(answer, variant=f"{found.variant}, separate experts", slot=slot)


def _kinds(expert: nn.Module, found: Match) -> Iterator[Kind]:
    """The ways to name an expert's projections that their shapes allow."""
    names = found.used & expert._modules.keys()
    if len(names) != 3 or len(found.used) != 3:
        return
    shapes = {name: owners.parameter_shapes(expert._modules[name])["weight"] for name in sorted(names)}
    forward = original_of(type(expert).forward)
    guards = guards_of(expert, forward, found.used)
    for gate, up, down in itertools.permutations(shapes):
        if shapes[gate] == shapes[up] == shapes[down][::-1]:
            yield Kind(type(expert), forward, guards, (gate, up, down), found.variant)


class _Result(NamedTuple):
    """What a run gave, the gradients of what it was given, and whether an expert has none (None)."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]
    skips_unused: bool


class _Probe:
    """Runs tiny twins of a block, with its own loop and with the op's reference."""

    def __init__(self, module: nn.Module, function: Callable, slot: str, kind: Kind) -> None:
        self.module, self.function, self.takes_choice = module, function, slot == _METHOD
        experts = module._modules[_LIST]
        hidden, inner = owners.parameter_shapes(experts[0]._modules[kind.projections[-1]])["weight"]
        self.sizes = {hidden: _HIDDEN, inner: _HIDDEN if inner == hidden else _INNER}
        self.n_experts = self.sizes.setdefault(len(experts), _EXPERTS)
        self.widths = {hidden, inner}

    def match(self, kinds: list[Kind], cuts: list[loops.Cut | None]) -> Match | str:
        """The first of the given ways that computes what the block does, with its gradients; or why there is none."""
        from ..functional import liger_fused_moe

        coverage = Coverage(self.function)
        with coverage:
            own = [self._run(self.function, *case) for case in _CASES]
            if self.takes_choice:
                self._run(self.function, 0, True)  # no token at all, which some cannot do
        for result in own:
            if isinstance(result, str):
                return result
        for cut, kind in itertools.product(cuts, kinds):
            with_experts = cut.with_experts if cut else lambda experts: experts
            mine = with_experts(_experts(kind, _reference))
            if all(_agree(self._run(mine, *case), result) for case, result in zip(_CASES, own)):
                if elsewhere := coverage.unexplored(self.function.__code__, cut.lines if cut else None):
                    return elsewhere
                # Only what the cut dropped from the forward must be as it was; the rest still reads it.
                used = reads(type(self.module), self.function) - cut.reads if cut else frozenset()
                options = {"used": used | {_LIST}, "inputs": 1 if cut else 3, "ready": _ready(kind)}
                kind = kind._replace(skips_unused=any(result.skips_unused for result in own))
                return Match(KERNEL, "", with_experts(_experts(kind, liger_fused_moe)), **options)
        return f"it does not compute what {KERNEL} does"

    def _run(self, function: Callable, n_tokens: int, training: bool) -> _Result | str:
        source = generator()
        twin = self._twin(self.module, source, training)
        x = normal(n_tokens, _HIDDEN, source=source).requires_grad_()
        leaves = [x, *twin.parameters()]
        inputs: tuple[torch.Tensor, ...] = ((x * 1.0).unsqueeze(0),)  # no leaf: some multiply it in place
        if self.takes_choice:
            weights = torch.rand(n_tokens, min(2, self.n_experts), generator=source, dtype=torch.float32)
            index = torch.rand(n_tokens, self.n_experts, generator=source).topk(weights.shape[1]).indices
            leaves.append(weights.requires_grad_())
            inputs = x * 1.0, index, weights * 1.0
        torch.manual_seed(0)
        try:
            given = function(twin, *inputs)
        except Exception as error:  # whatever a foreign forward raises means: not recognised
            return f"it cannot be run alone ({first_line(error)})"
        found = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not all(isinstance(t, torch.Tensor) for t in found) or not found[0].requires_grad:
            return "it returns something else than tensors with gradients"
        total = sum(((t * t.detach().cos()).sum() for t in found if t.requires_grad), torch.zeros(()))
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        of_experts = {id(parameter) for parameter in twin._modules[_LIST].parameters()}
        skips = any(g is None and id(leaf) in of_experts for leaf, g in zip(leaves, gradients))
        return _Result(found, gradients, skips)

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


def _agree(found: _Result | str, wanted: _Result) -> bool:
    """Whether two runs gave the same. Where a loop leaves an expert without a gradient, the reference has zeros."""
    if isinstance(found, str) or len(found.outputs) != len(wanted.outputs):
        return False
    for mine, theirs in zip(found.gradients, wanted.gradients):
        if mine is not None and not agrees(mine, torch.zeros_like(mine) if theirs is None else theirs, 2e-4):
            return False
        if mine is None and theirs is not None:
            return False
    return all(agrees(mine, theirs, 2e-5) for mine, theirs in zip(found.outputs, wanted.outputs))
