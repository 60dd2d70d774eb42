"""Copies a function with one global name replaced, to patch the rotary function of a single model.

An attention's forward calls a rotary function by its global name in the modeling module, which all models of the family
share. For one model the forward is copied, and the copy's code has a private name (`private_name`), which the caller
adds to the modeling module. The copy has the same globals, so later patches of other names take effect in it, and
Dynamo can trace it as any function.
"""

from __future__ import annotations

import ast
import types
from typing import Callable

from ..distributed.owners import closure_of
from .source import tree_of

PREFIX = "_liger_hw_"


def private_name(name: str, variant: str) -> str:
    """The global name for the replacement of function `name`. variant: `Match.variant`"""
    return PREFIX + "".join(c if c.isalnum() else "_" for c in f"{variant} {name}".strip())


class CannotRebind(Exception):
    """A function cannot be copied. The message has the reason."""


def rebind(function: Callable, name: str, private: str) -> Callable:
    """A copy of `function` that reads the global `private` in place of `name`.

    Its decorators that use functools.wraps are copied too. The caller defines the new global. Raises `CannotRebind` if
    the function does not read `name`, or uses that name also for an attribute or a variable.
    """
    if not isinstance(function, types.FunctionType):
        raise CannotRebind(f"{function!r} is not a Python function")
    code = function.__code__
    if name in code.co_names:
        _check_only_global(function, name)
        names = tuple(private if n == name else n for n in code.co_names)
        return _copy(function, code.replace(co_names=names), function.__closure__)
    inner = getattr(function, "__wrapped__", None)
    if inner is None or function.__closure__ is None:
        raise CannotRebind(f"{function.__qualname__} does not call {name}")
    variables = [variable for variable, value in closure_of(function).items() if value is inner]
    if not variables:
        raise CannotRebind(f"a decorator of {function.__qualname__} hides the function that calls {name}")
    copied = rebind(inner, name, private)
    cells = zip(code.co_freevars, function.__closure__)
    closure = tuple(types.CellType(copied) if variable in variables else cell for variable, cell in cells)
    outer = _copy(function, code, closure)
    outer.__wrapped__ = copied
    return outer


def _copy(function: types.FunctionType, code: types.CodeType, closure: tuple | None) -> types.FunctionType:
    copied = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    copied.__doc__ = function.__doc__
    copied.__dict__.update(function.__dict__)
    return copied


def _check_only_global(function: types.FunctionType, name: str) -> None:
    for node in ast.walk(tree_of(function.__code__)):
        is_stored = isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        if is_stored or (isinstance(node, ast.Attribute) and node.attr == name):
            raise CannotRebind(f"{function.__qualname__} uses {name} as more than a global")
