"""Copies of modules that can be run on random inputs without touching the original, and what a forward depends on."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import nn

BATCH = (2, 3)
"""Leading dimensions of the probes' inputs."""


@dataclass(frozen=True)
class Match:
    """A kernel that computes what the module does.

    kernel: op name; variant: in words, for the report; slot: attribute of the module to replace
    core: function of (module, input) that takes the place of what `slot` holds, for modules where `guards` hold
    used: attributes of the module that `core` reads at every call, whose values may therefore differ
    """

    kernel: str
    variant: str
    core: Callable
    slot: str = "forward"
    used: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Refused:
    """Why a module keeps its own forward. kernel: the kind of op that it would have taken."""

    reason: str
    kernel: str


Guards = tuple[tuple[str, str, Any], ...]
"""(kind, attribute, value): what must hold of a module, beside its class, for a match found on another one to apply."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No change of random state, no autocast, no gradient, no default device for what runs inside."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_rng_state(state)


def generator() -> torch.Generator:
    """The probes' own random numbers, the same in every process."""
    return torch.Generator().manual_seed(20260101)


def normal(*shape: int, source: torch.Generator) -> torch.Tensor:
    """Normal numbers in fp32, whatever the default dtype: from_pretrained(dtype=...) makes models under another."""
    return torch.randn(*shape, generator=source, dtype=torch.float32)


def random(*shape: int, source: torch.Generator) -> torch.Tensor:
    """Normal numbers with a mean and a spread unlike 0 and 1, so that neither is mistaken for absent."""
    return normal(*shape, source=source) * 1.7 + 0.3


def current_forward(module: Any, slot: str = "forward") -> Callable:
    """The function behind a module's or class's attribute, unbound."""
    held = getattr(module, slot)
    return getattr(held, "__func__", held)


def twin_of(module: nn.Module, parameters: dict[str, torch.Tensor | None], children: dict[str, Any]) -> nn.Module:
    """A module of the same class and attributes with other parameters and children, in training mode and hookless."""
    twin = object.__new__(type(module))
    nn.Module.__init__(twin)
    own = {
        n: v
        for n, v in vars(module).items()
        if n not in vars(twin) and n not in ("forward", "_old_forward", "_hf_hook")
    }
    twin.__dict__.update(own)
    twin.__dict__["_parameters"] = dict(parameters)
    twin.__dict__["_modules"] = dict(children)
    twin.__dict__["_buffers"] = dict(module._buffers)
    twin.__dict__["training"] = True
    return twin


def required_inputs(forward: Callable) -> list[str]:
    """Names of the arguments after self that a call must give."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def run(function: Callable, *args: Any) -> torch.Tensor | str:
    """function(*args), or why it cannot be probed."""
    try:
        result = function(*args)
    except Exception as error:  # whatever a foreign forward raises means: not recognised
        first_line = (str(error).splitlines() or [""])[0]
        return f"it cannot be run alone ({type(error).__name__}: {first_line[:120]})"
    return result if isinstance(result, torch.Tensor) else f"it returns a {type(result).__name__}, not a tensor"


def agrees(found: Any, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two results have the same shape and dtype and differ by rounding only."""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    scale = wanted.abs().max().clamp(min=1e-3)
    return bool(((found - wanted).abs() <= tolerance * (wanted.abs() + scale)).all())


def widths(module: nn.Module) -> set[int]:
    """The sizes of a module's and its children's weights."""
    found: set[int] = set()
    for part in (module, *module.children()):
        for parameter in part._parameters.values():
            if parameter is not None:
                found |= set(parameter.shape)
        found |= {
            getattr(part, name)
            for name in ("in_features", "out_features")
            if isinstance(getattr(part, name, None), int)
        }
    return found


# -- what a forward reads --------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def reads(cls: type, function: Callable) -> frozenset[str]:
    """Names that `function` may look up on self: its own, those of the methods it names, and of what it decorates.

    `EVERYTHING` is among them when it hands itself on, to a function that may read anything.
    """
    seen: set[str] = set()
    waiting: list[Any] = [function]
    done: set[types.CodeType] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, property):
            item = item.fget
        while item is not None:
            code = getattr(item, "__code__", None)
            names = _names(code, done)
            seen |= names
            if code is not None and not hasattr(item, "__wrapped__") and _hands_itself_on(code):
                seen.add(EVERYTHING)
            inherited = "super" in names or "__class__" in names
            for name in (names | {item.__name__}) if inherited else names:
                for base in cls.__mro__ if inherited else ():
                    held = vars(base).get(name)
                    if isinstance(held, types.FunctionType) and base is not nn.Module:
                        waiting.append(held)
                member = inspect.getattr_static(cls, name, None)
                if isinstance(member, (types.FunctionType, property)) and not hasattr(nn.Module, name):
                    waiting.append(member)
            item = getattr(item, "__wrapped__", None)
    return frozenset(seen)


EVERYTHING = "*"


def _hands_itself_on(code: types.CodeType) -> bool:
    """Whether a method uses self other than to look something up on it."""
    me = code.co_varnames[0] if code.co_argcount else None
    steps = [
        i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "COPY_FREE_VARS", "MAKE_CELL", "RESUME")
    ]
    for step, after in zip(steps, [*steps[1:], None]):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) or me not in loaded:
            continue
        looks_up = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR")
        if me in loaded[:-1] or not looks_up:
            return True
    return any(isinstance(constant, types.CodeType) and me in constant.co_freevars for constant in code.co_consts)


def _names(code: types.CodeType | None, done: set[types.CodeType]) -> set[str]:
    if code is None or code in done:
        return set()
    done.add(code)
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant, done)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)  # getattr(self, "name")
    return found


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def guards_of(module: nn.Module, function: Callable, used: frozenset[str]) -> Guards:
    """What another module of the class must have in common with `module` for `function` to compute the same on it.

    Every attribute that `function` reads counts, except those `used` by the kernel itself and the sizes of the weights.
    """
    names = reads(type(module), function)
    if EVERYTHING in names:
        names = names | vars(module).keys() | module._modules.keys() | module._parameters.keys()
    own_widths = widths(module)
    found: list[tuple[str, str, Any]] = []
    for name in sorted(names - used):
        if name in module._modules:
            child = module._modules[name]
            found.append(("type", name, type(child)))
            if isinstance(child, nn.Dropout):
                found.append(("dropout", name, child.p))
        elif name in module._parameters:
            found.append(("none", name, module._parameters[name] is None))
        elif name in vars(module) and name not in _MODULE_ATTRIBUTES and name != "config":
            found += _guard(name, vars(module)[name], own_widths)
    for name in sorted(used & module._parameters.keys()):
        found.append(("none", name, module._parameters[name] is None))
    config = vars(module).get("config")
    if config is not None and "config" in names:
        for name in sorted(names & set(vars(config))):
            value = vars(config)[name]
            if isinstance(value, (bool, int, float, str, type(None))) and value not in own_widths:
                found.append(("config", name, value))
    return tuple(found)


def _guard(name: str, value: Any, own_widths: set[int]) -> list[tuple[str, str, Any]]:
    if isinstance(value, int) and not isinstance(value, bool) and value in own_widths:
        return []
    if isinstance(value, (tuple, list, torch.Size)) and all(isinstance(v, int) and v in own_widths for v in value):
        return []
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, tuple)):
        return [("same", name, value)]
    return [("is", name, value)]


def holds(module: nn.Module, guards: Guards) -> bool:
    """Whether a match found under `guards` applies to `module`."""
    for kind, name, value in guards:
        if kind == "config":
            if vars(module.config).get(name) != value:
                return False
            continue
        held = getattr(module, name, None)
        if kind == "same":
            agree = held == value
        elif kind == "type":
            agree = type(held) is value
        elif kind == "none":
            agree = (held is None) == value
        elif kind == "dropout":
            agree = held.p == value
        else:
            agree = held is value
        if not agree:
            return False
    return True
