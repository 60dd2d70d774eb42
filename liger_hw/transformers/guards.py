"""When a match found on one module applies to another, or to the same one later: what its forward reads must be alike.

A match is found by running one module. A class patch then serves every instance of the class, and a module may change
after it was patched, so the replacement checks its guards at every call and runs the original forward where one fails.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from ..distributed import owners
from .marks import original_of
from .source import hands_itself_on

Guards = tuple[tuple[str, str, Any], ...]
"""(kind, attribute, value): each says what an attribute of the module must be. `holds` has the kinds."""

EVERYTHING = "*"
"""Among what a function reads when it passes `self` on to something that may read any attribute."""

_OF_CONFIG = "config."
"""Prefix of a name that a function may look up on a configuration."""

INSTANCE_FORWARDS = ("forward", "_old_forward", "_hf_hook")
"""Attributes by which accelerate's hooks, or anybody else, replace the forward of one module."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, tuple)
"""Kinds of values that are compared with ==."""


def guards_of(module: nn.Module, function: Callable, used: frozenset[str]) -> Guards:
    """What another module of the class must have in common with `module` for `function` to compute the same on it.

    Every attribute that `function` reads counts, except those `used` by the kernel itself and the sizes of the weights.
    """
    names = reads(type(module), function)
    if EVERYTHING in names:
        names = names | vars(module).keys() | module._modules.keys() | module._parameters.keys()
    sizes = _weight_sizes(module)
    guards: list[tuple[str, str, Any]] = []
    flattened = owners.parameter_shapes(module).keys() - module._parameters.keys()
    for name in sorted(names - used - flattened):
        if name in module._modules:
            child = module._modules[name]
            guards.append(("child", name, None if child is None else _state(child)))
        elif name in module._parameters:
            guards.append(("none", name, module._parameters[name] is None))
        elif name in vars(module) and name not in (*_MODULE_ATTRIBUTES, *INSTANCE_FORWARDS, "config"):
            guards += _value_guard(name, module, sizes)
        elif name not in INSTANCE_FORWARDS and not hasattr(nn.Module, name):
            member = inspect.getattr_static(type(module), name, None)
            if isinstance(member, types.FunctionType):
                guards.append(("method", name, member))
    for name in sorted(used & module._parameters.keys()):
        shape = owners.parameter_shapes(module)[name]
        guards.append(("dims", name, None if shape is None else len(shape)))
    config = vars(module).get("config")
    if config is not None and "config" in names:
        if EVERYTHING not in names:
            names = {name.removeprefix(_OF_CONFIG) for name in names if name.startswith(_OF_CONFIG)}
        if "_experts_implementation" in names:  # a property, of an attribute of this name
            names = names | {"_experts_implementation_internal"}
        for name in sorted(names & set(vars(config))):
            value = vars(config)[name]
            if isinstance(value, (bool, int, float, str, type(None))) and value not in sizes:
                guards.append(("config", name, value))
    return tuple(guards)


def holds(module: nn.Module, guards: Guards) -> bool:
    """Whether a match found under `guards` applies to `module` as it is now."""
    for kind, name, value in guards:
        if kind == "config":
            if vars(module.config).get(name) != value:
                return False
            continue
        if kind == "child":
            child = module._modules.get(name)
            agree = child is None if value is None else _has_state(child, value)
        elif kind == "dims":
            agree = _dims_now(module, name) in (value, _UNKNOWN)
        elif kind == "none":  # a parameter that PEFT computes is not looked up, which would compute it once more
            agree = (module._parameters.get(name, module) is None) == value
        elif kind == "method":  # the class's, which no function of the module's own hides
            agree = name not in module.__dict__ and is_method_of(type(module), name, value)
        elif kind == "same":
            agree = getattr(module, name, None) == value
        else:
            current = getattr(module, name, None)
            agree = current is value.value or _comparable(current, module) == value.comparable
        if not agree:
            return False
    return True


def is_method_of(cls: type, name: str, function: Callable | None) -> bool:
    """Whether a class has `function` by this name, or what a patch put in its place."""
    current = getattr(cls, name, None)
    return current is function or original_of(current) is original_of(function)


_UNKNOWN = -1


def _dims_now(module: nn.Module, name: str) -> int | None:
    """How many dimensions a weight has: a kernel that takes one of width elements takes none of heads x width.

    A parameter that PEFT computes is not looked up, which would compute it once more.
    """
    # FSDP1 and replicas keep a weight as an attribute
    weight = (module._parameters if name in module._parameters else module.__dict__).get(name, module)
    return None if weight is None else weight.dim() if isinstance(weight, torch.Tensor) else _UNKNOWN


def _value_guard(name: str, module: nn.Module, sizes: set[int]) -> Guards:
    value = vars(module)[name]
    if isinstance(value, int) and not isinstance(value, bool) and value in sizes:
        return ()
    if isinstance(value, (tuple, list, torch.Size)) and all(isinstance(v, int) and v in sizes for v in value):
        return ()
    return (("same", name, value),) if isinstance(value, _PLAIN) else (("alike", name, _Value(value, module)),)


class _Value:
    """An attribute's value. Two are equal where both compute alike, so that guards can be compared and hashed."""

    def __init__(self, value: Any, owner: nn.Module) -> None:
        self.value, self.comparable = value, _comparable(value, owner)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Value) and self.comparable == other.comparable

    def __hash__(self) -> int:
        return hash(self.comparable)


def _comparable(value: Any, owner: nn.Module) -> Any:
    """What equals another value's where both compute alike.

    A partial function is compared by its parts, a method of `owner` by its function (each activation module has its
    own), anything else that is not plain by identity.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return tuple(value.keywords), tuple(_comparable(part, owner) for part in parts)
    if isinstance(value, types.MethodType):
        return id(value.__func__), None if value.__self__ is owner else id(value.__self__)
    return id(value)


# -- children: what an activation computes depends on its class, its attributes and its hooks ------------------------


class _State(NamedTuple):
    """A child's class; of one that kernels replace also its class's forward, whether it is customised, its attributes.

    Those are children without weights or children of their own.
    """

    cls: type
    forward: Callable | None = None
    customised: bool = False
    attributes: tuple[tuple[str, _Value], ...] = ()


def _state(child: nn.Module) -> _State:
    if child._parameters or child._modules or child._buffers:
        return _State(type(child))
    names = [name for name in vars(child) if name not in _MODULE_ATTRIBUTES and name not in INSTANCE_FORWARDS]
    attributes = tuple((name, _Value(vars(child)[name], child)) for name in names)
    return _State(type(child), type(child).forward, is_customised(child), attributes)


def _has_state(child: Any, state: _State) -> bool:
    cls, forward, customised, attributes = state
    if type(child) is not cls:
        return False
    if forward is not None and (cls.forward is not forward or is_customised(child) != customised):
        return False
    for name, value in attributes:
        current = child.__dict__.get(name)
        if current is not value.value and _comparable(current, child) != value.comparable:
            return False
    return True


def current_forward(module: Any, slot: str = "forward") -> Callable:
    """The function behind a module's or class's attribute, unbound."""
    function = getattr(module, slot)
    return getattr(function, "__func__", function)


def is_customised(module: nn.Module) -> bool:
    """Whether calling a module does more than its class's forward: it has hooks, or another forward of its own.

    Hooks of FSDP2 and ZeRO-3 gather weights, and accelerate's placement hooks replace a forward by one that computes
    the same, so they do not count.
    """
    if owners.hooks_of(module) - {owners.FSDP2, owners.ZERO3}:
        return True
    return "_hf_hook" not in module.__dict__ and current_forward(module) is not type(module).forward


def _weight_sizes(module: nn.Module) -> set[int]:
    """The sizes of a module's and its children's weights."""
    sizes: set[int] = set()
    for part in (module, *module.children()):
        for shape in owners.parameter_shapes(part).values():
            sizes |= set(shape or ())
        for name in ("in_features", "out_features"):
            if isinstance(getattr(part, name, None), int):
                sizes.add(getattr(part, name))
    return sizes


# -- what a forward reads, from its code -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def reads(cls: type, function: Callable) -> frozenset[str]:
    """Names that `function`, the methods it names and the function it decorates may look up on self.

    A name that it may look up on self's configuration is there with `config.` before it too.
    `EVERYTHING` is among them when it passes self on to a function that may read anything.
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
            if "config" in names or (code is not None and "config" in code.co_varnames):
                seen |= {_OF_CONFIG + name for name in names}
            if code is not None and not hasattr(item, "__wrapped__") and hands_itself_on(code):
                seen.add(EVERYTHING)
            inherited = "super" in names or "__class__" in names
            for name in (names | {item.__name__}) if inherited else names:
                for base in cls.__mro__ if inherited else ():
                    method = vars(base).get(name)
                    if isinstance(method, types.FunctionType) and base is not nn.Module:
                        waiting.append(method)
                member = inspect.getattr_static(cls, name, None)
                if isinstance(member, (types.FunctionType, property)) and not hasattr(nn.Module, name):
                    waiting.append(member)
            item = getattr(item, "__wrapped__", None)
    return frozenset(seen)


def _names(code: types.CodeType | None, done: set[types.CodeType]) -> set[str]:
    if code is None or code in done:
        return set()
    done.add(code)
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant, done)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)  # getattr(self, "name")
    return names
