"""Common code of the chunked losses: argument checks, the base of their modules, and their functions."""

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
    """`number` as a tensor without gradient. A Python number is filled in on the device, because a copy from the host
    would synchronise, and fail in a graph capture."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


class LossFunction:
    """A loss under the name of Liger's autograd Function; it has only `apply`. Defining a subclass with another loss
    function, which Liger would call, raises `TypeError`, because `apply` would not call it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = ("preference_loss_fn", "ppo_loss_fn", "distillation_loss_fn", "forward", "backward")
        if overridden := [name for name in hooks if name in vars(cls)]:
            raise TypeError(
                f"{cls.__name__}: {', '.join(overridden)} would never be called: ready losses have their own formulas. "
                "For a loss of your own, subclass LigerFusedLinearPreferenceBase or another base of "
                "liger_hw.compat.loss_bases (liger_kernel.chunked_loss.fused_linear_preference and so on)"
            )


class LossModule(OptionsModule):
    """A chunked loss as a module. Liger's options compiled and chunk_size change nothing."""

    without_effect = ("compiled", "chunk_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = "kernels are always compiled, and the chunks follow from LIGER_HW_LOSS_MEMORY_MIB"
        changed = {f.name: getattr(self, f.name) != f.default for f in fields(self) if f.name in self.without_effect}
        warn_ignored(type(self).__name__, reason, **changed)


def function_of(module: type[LossModule], required: str, optional: str, **defaults: Any) -> Any:
    """A module's loss as Liger's autograd Function. `apply` takes the `required`, then the `optional` arguments.

    optional: their default is the module's, or None; defaults: the defaults that differ from the module's
    """
    name = module.__name__.removesuffix("Loss") + "Function"
    options = {field.name: field.default for field in fields(module)} | defaults
    with_default = {argument: options.get(argument) for argument in optional.split()}
    names, forward_names = [*required.split(), *with_default], {"weight": "lin_weight"}

    def apply(*args: Any, **kwargs: Any) -> Any:
        positional = dict(zip(names, args))
        arguments = {**with_default, **positional, **kwargs}
        if len(args) > len(names) or len(arguments) != len(names) or any(key in positional for key in kwargs):
            apply.__signature__.bind(*args, **kwargs)  # raises TypeError, which names the wrong argument
        tensors = {forward_names.get(key, key): value for key, value in arguments.items() if key not in options}
        used = {key: arguments[key] for key in options if key in arguments and key not in module.without_effect}
        return module(**used).forward(**tensors)

    kind = Parameter.POSITIONAL_OR_KEYWORD
    apply.__signature__ = Signature([Parameter(n, kind, default=with_default.get(n, Parameter.empty)) for n in names])
    body = {"__doc__": f"`{module.__name__}` as a function.", "__module__": module.__module__}
    return type(name, (LossFunction,), {**body, "apply": staticmethod(apply)})
