"""Code that the chunked losses share: argument checks, modules with options, and the same losses as functions."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

import torch

from ..kernels.losses.options_module import OptionsModule
from ..runtime.operator import warn_ignored

HEAD = ("_input", "lin_weight", "bias")
SEQUENCES = "batch, length"


def on_device(number: torch.Tensor | float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`number` as a tensor without gradient. A Python number is filled in on the device: a copy from the host would
    wait for the device, and fail in a graph capture."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


class LossFunction:
    """A loss under the name of Liger's autograd Function, of which `apply` is there. A subclass with another loss
    function, which Liger would call, raises `TypeError`: nothing here would call it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = ("preference_loss_fn", "ppo_loss_fn", "distillation_loss_fn", "forward", "backward")
        if stated := [name for name in hooks if name in vars(cls)]:
            raise TypeError(
                f"{cls.__name__}: {', '.join(stated)} would never be called: ready losses have their own formulas. "
                "For a loss of your own, subclass LigerFusedLinearPreferenceBase or another base of "
                "liger_hw.compat.loss_bases (liger_kernel.chunked_loss.fused_linear_preference and so on)"
            )


class LossModule(OptionsModule):
    """A chunked loss as a module. Liger's options compiled and chunk_size change nothing."""

    without_effect = ("compiled", "chunk_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "kernels are always compiled, and the chunks follow from LIGER_HW_LOSS_MEMORY_MIB"
        changed = {f.name: getattr(self, f.name) != f.default for f in fields(self) if f.name in self.without_effect}
        warn_ignored(type(self).__name__, why, **changed)


def function_of(module: type[LossModule], required: str, optional: str, **defaults: Any) -> Any:
    """A module's loss as Liger's autograd Function, whose `apply` takes Liger's arguments in this order.

    optional: arguments with a default, the module's or None; defaults: those that differ from the module's
    """
    name = module.__name__.removesuffix("Loss") + "Function"
    options = {field.name: field.default for field in fields(module)} | defaults
    known = {argument: options.get(argument) for argument in optional.split()}
    names, of_forward = [*required.split(), *known], {"weight": "lin_weight"}

    def apply(*args: Any, **kwargs: Any) -> Any:
        by_place = dict(zip(names, args))
        arguments = {**known, **by_place, **kwargs}
        if len(args) > len(names) or len(arguments) != len(names) or any(key in by_place for key in kwargs):
            apply.__signature__.bind(*args, **kwargs)  # raises TypeError, which names the wrong argument
        tensors = {of_forward.get(key, key): value for key, value in arguments.items() if key not in options}
        used = {key: arguments[key] for key in options if key in arguments and key not in module.without_effect}
        return module(**used).forward(**tensors)

    kind = Parameter.POSITIONAL_OR_KEYWORD
    apply.__signature__ = Signature([Parameter(n, kind, default=known.get(n, Parameter.empty)) for n in names])
    body = {"__doc__": f"`{module.__name__}` as a function.", "__module__": module.__module__}
    return type(name, (LossFunction,), {**body, "apply": staticmethod(apply)})
