"""What the chunked losses share outside the kernels: argument checks, modules that store their options, and the same
losses as functions."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

import torch

from ..kernels.heads.linear_head import checked_head
from ..kernels.losses.options_module import OptionsModule
from ..runtime.operator import check, warn_ignored

HEAD = ("_input", "lin_weight", "bias")
REFERENCE = ("ref_input", "ref_weight", "ref_bias")
SEQUENCES = "batch, length"


def checked_reference(
    op: str, x: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, policy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The reference model's head over the same tokens as the policy's hidden states; nothing of it gets a gradient."""
    if x is None or weight is None:
        missing = " and ".join(n for n, t in (("ref_input", x), ("ref_weight", weight)) if t is None)
        check(False, op, f"use_ref_model=True needs {missing}; give them, or use_ref_model=False")
    with torch.no_grad():
        x, weight, bias = checked_head(op, x, weight, bias, REFERENCE, SEQUENCES)
    if x.shape[:-1] != policy.shape[:-1]:
        expected, got = tuple(policy.shape[:-1]), tuple(x.shape[:-1])
        check(False, op, f"ref_input must have the batch and length of _input, {expected}, got {got}")
    if x.device != policy.device:
        check(False, op, f"ref_input is on {x.device} but _input is on {policy.device}; move them to one device")
    return x, weight, bias


def on_device(number: torch.Tensor | float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`number` as a tensor without gradient. A Python number is filled in by a kernel: a copy from the host would wait
    for the device, and fail while a graph is captured."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


class LossFunction:
    """A ready loss under the name of Liger's autograd Function. `apply` computes its formula. A subclass with a loss
    function of its own, which Liger would call, raises here, because nothing would call it."""

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
    """A chunked loss as a module.

    compiled and chunk_size are Liger's and change nothing: kernels are always compiled, and the chunks follow from the
    memory budget.
    """

    without_effect = ("compiled", "chunk_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "kernels are always compiled, and the chunks follow from LIGER_HW_LOSS_MEMORY_MIB"
        changed = {f.name: getattr(self, f.name) != f.default for f in fields(self) if f.name in self.without_effect}
        warn_ignored(type(self).__name__, why, **changed)


def function_of(module: type[LossModule], required: str, optional: str, **defaults: Any) -> Any:
    """A module's loss under the name of Liger's autograd Function, whose `apply` takes Liger's arguments in this order.

    optional: arguments with a default: the module's, or None where they are no options of it
    defaults: those in which Liger's function differs from its module
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
