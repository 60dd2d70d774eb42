"""Recognises modules by their results on small random inputs.

`recognise(module)` runs a copy of a norm, MLP, mixer or experts module and the kernels' references, on the CPU. It
returns the `Match` of the kernel that agrees, a `Refused` with the reason why none does, or None for a module of
another kind. `rotary.recognise(function)` does the same for a rotary function.

Weights are never read: a norm's copy gets random weights of the same shapes, and an MLP's projections are replaced by
objects that return random numbers. So sharded, quantised, adapted and not yet loaded (meta) models are probed in the
same way, and a 7B model in a few milliseconds. Results must agree in fp32, also for large numbers, and their rounding
in bf16; so must gradients.

probe.py runs the copies. norms.py, mlps.py, experts.py, mixers.py and rotary.py recognise one kind each.
../replacing.py decides when a module's match applies to another module.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

from torch import nn

from ...distributed import owners
from ..replacing import Match
from . import experts, mixers, mlps, norms
from .probe import Refused, quiet

_KINDS = (norms, experts, mlps, mixers)


def recognise(module: Any, forward: Callable | None = None) -> Match | Refused | None:
    """The match of a module. forward: the function to probe; None: its class's forward"""
    forward = forward or type(module).forward
    if experts.is_list_of_modules(module):
        return Refused(experts.IN_A_LIST, experts.KERNEL)
    for kind in _KINDS:
        if kind.is_candidate(module):
            with quiet():
                result = kind.recognise(module, forward)
            if result is not None:
                return result
            break
    if experts.is_experts_by_name(module):
        return Refused("its experts are not two batched parameters", experts.KERNEL)
    return None


def is_overlooked(module: Any) -> bool:
    """Whether a module looks like a norm or an MLP, but is not probed because of its name.

    It has one input, and either one or two vectors of one width, or two or three linear layers, and nothing else.
    """
    if type(module).__module__.startswith("torch.") or any(kind.is_candidate(module) for kind in _KINDS):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    shapes = [shape for shape in owners.parameter_shapes(module).values() if shape is not None]
    children = [child for child in module._modules.values() if child is not None]
    if not children:
        return not module._buffers and len(shapes) in (1, 2) and len(shapes[0]) == 1 and len(set(shapes)) == 1
    return not shapes and len(children) in (2, 3) and all(type(child) is nn.Linear for child in children)
