"""What is patched in for each part of a model: functions of (module, input) that take the place of a family's own.

Each maker returns a plain function that calls one kernel; probing (the package next door) finds which, with which
names, and `assembled` makes it a forward. They are used on classes and, bound, on instances; the parameters stay the
family's own, so state dicts do not change. Projections are called in the family's own order: LoRA's dropout draws the
same random numbers.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, Callable

import torch

from ..recompute.recipes import project

Core = Callable[[Any, torch.Tensor], torch.Tensor]

# -- norms -----------------------------------------------------------------------------------------------------------


def rms_norm(weight: str | None, eps: str | float, offset: float, casting_mode: str) -> Core:
    """RMSNorm with the module's attributes of these names; no weight: no scaling; eps may be a number itself."""
    from .functional import liger_rms_norm

    if not isinstance(eps, str):
        return lambda self, x: liger_rms_norm(x, weight and getattr(self, weight), eps, offset, casting_mode)
    if weight is None:
        return lambda self, x: liger_rms_norm(x, None, getattr(self, eps), 0.0, casting_mode)
    return lambda self, x: liger_rms_norm(x, getattr(self, weight), getattr(self, eps), offset, casting_mode)


def layer_norm(weight: str | None, bias: str | None, eps: str | float, offset: float) -> Core:
    """LayerNorm likewise; `offset` is added to the weight."""
    from .functional import liger_layer_norm

    def core(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = None if weight is None else getattr(self, weight)
        shift = None if bias is None else getattr(self, bias)
        if x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
            x = x.float()  # autocast runs torch's own in fp32
        value = getattr(self, eps) if isinstance(eps, str) else eps
        return liger_layer_norm(x, scale + offset if offset else scale, shift, value)

    return core


def for_one_dtype(core: Core, weight: str) -> "ForOneDtype":
    """`core`, for inputs of the weight's dtype only; `assembled` gives the others to the original."""
    return ForOneDtype(core, weight)


class ForOneDtype:
    """See `for_one_dtype`."""

    def __init__(self, core: Core, weight: str) -> None:
        self.core, self.weight = core, weight


# -- MLPs ------------------------------------------------------------------------------------------------------------


def _gate(act: str) -> Callable[..., torch.Tensor]:
    """The kernel of act(gate) * up."""
    from .functional import liger_geglu, liger_swiglu

    if act == "silu":
        return liger_swiglu
    approximate = "tanh" if act == "gelu_tanh" else "none"
    return lambda gate, up: liger_geglu(gate, up, approximate)


def gated_mlp(act: str, gate: str, up: str, down: str, up_first: bool, gate_scale: str, out_scale: str) -> Core:
    """down(act(gate(x)) * up(x)); the scales are attributes that multiply the gate and the result, or empty."""
    kernel = _gate(act)

    def core(self: Any, x: torch.Tensor) -> torch.Tensor:
        if up_first:
            u = project(getattr(self, up), x)
            g = project(getattr(self, gate), x)
        else:
            g = project(getattr(self, gate), x)
            u = project(getattr(self, up), x)
        y = kernel(g, u, getattr(self, gate_scale)) if gate_scale else kernel(g, u)
        y = getattr(self, down)(y)
        return y * getattr(self, out_scale) if out_scale else y

    return core


def gate_of_halves(act: str, gate_first: bool) -> Core:
    """act(gate) * up of the two halves of one tensor."""
    from .functional import liger_fused_gate_up_swiglu

    if act == "silu" and gate_first:
        return lambda self, gate_up: liger_fused_gate_up_swiglu(gate_up)
    kernel = _gate(act)

    def core(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        one, other = gate_up.chunk(2, -1)
        return kernel(one, other) if gate_first else kernel(other, one)

    return core


def fused_mlp(act: str, gate_first: bool, gate_up: str, down: str, out_scale: str) -> Core:
    """down(act(gate) * up), gate and up the halves of gate_up(x)."""
    halves = gate_of_halves(act, gate_first)

    def core(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = getattr(self, down)(halves(self, project(getattr(self, gate_up), x)))
        return y * getattr(self, out_scale) if out_scale else y

    return core


def squared_relu_mlp(up: str, down: str, out_scale: str) -> Core:
    """down(max(up(x), 0)^2)."""
    from .functional import liger_relu_squared

    def core(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = getattr(self, down)(liger_relu_squared(project(getattr(self, up), x)))
        return y * getattr(self, out_scale) if out_scale else y

    return core


# -- making a forward of it ------------------------------------------------------------------------------------------


def assembled(core: Core | ForOneDtype, original: Callable, applies: Callable[[Any], bool] | None = None) -> Callable:
    """A method that runs `core` in `original`'s place, with its argument's name.

    `original` itself runs for modules where `applies` is false, for inputs of another dtype than a `ForOneDtype` asks,
    and when more arguments are given than the input.
    """
    names = list(inspect.signature(original).parameters)
    more = len(names) > 2
    weight = ""
    if isinstance(core, ForOneDtype):
        core, weight = core.core, core.weight

    def fits(self: Any, x: torch.Tensor) -> bool:
        return (applies is None or applies(self)) and (not weight or x.dtype is getattr(self, weight).dtype)

    if more:

        def forward(self, x, *args, **kwargs):
            if args or kwargs or not fits(self, x):
                return original(self, x, *args, **kwargs)
            return core(self, x)

    elif applies is not None or weight:

        def forward(self, x):
            return core(self, x) if fits(self, x) else original(self, x)

    else:

        def forward(self, x):
            return core(self, x)

    if len(names) > 1:
        forward = _renamed(forward, names[1])
    if more:
        forward.__signature__ = inspect.signature(original)
    return forward


def _renamed(function: types.FunctionType, name: str) -> types.FunctionType:
    """`function` with its second argument called `name`, for callers who pass it by keyword."""
    code = function.__code__
    if name in code.co_varnames or name in code.co_freevars:
        return function
    names = (code.co_varnames[0], name, *code.co_varnames[2:])
    function.__code__ = code.replace(co_varnames=names)
    return function
