"""Copies of one module whose methods were replaced: each runs on its own weights.

A replaced method lies in the module's dictionary, bound to that module. `copy.deepcopy` binds it to the copy. Replicas
of `nn.DataParallel` and `copy.copy` take the dictionary as it is, so what they hold would run on the original: replicas
get methods of their own, a shallow copy and a pickle go back to their class's. Both ask the module itself, which
`prepare` gives the two methods that answer.
"""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

from torch import nn

from .marks import is_ours

_HELPERS = ("_replicate_for_data_parallel", "__getstate__")


def prepare(module: nn.Module) -> None:
    """Make copies of `module` keep to themselves; `release` undoes it."""
    module.__dict__["_replicate_for_data_parallel"] = types.MethodType(_replica, module)
    module.__dict__["__getstate__"] = types.MethodType(_state, module)


def release(module: nn.Module) -> None:
    """Take back what `prepare` did, if it did."""
    for name in _HELPERS:
        module.__dict__.pop(name, None)


def _replica(module: nn.Module) -> nn.Module:
    replica = type(module)._replicate_for_data_parallel(module)
    for name, value in module.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            replica.__dict__[name] = types.MethodType(value.__func__, replica)
    return replica


def _state(module: nn.Module) -> Any:
    """What copies and pickles of `module` are made from."""
    its_own = getattr(type(module), "__getstate__", None)  # every class has one since Python 3.11
    state = module.__dict__ if its_own is None else its_own(module)
    if not isinstance(state, dict) or sys._getframe(1).f_code is copy.deepcopy.__code__:
        return state
    return {name: value for name, value in state.items() if name not in _HELPERS and not is_ours(value)}
