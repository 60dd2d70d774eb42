"""Rules for DTensors as arguments of an op's autograd Function (`Function.sharding`). Without a rule, they are refused.

A rule gives the placements that the arguments need and that the results have. `distributed/dtensor.py` applies it. It
is in a higher layer and needs torch.distributed.tensor, so `handler` names it, and the first DTensor imports it.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, NoReturn

handler: str | None = None
"""Full name of the module with `apply(function, args)` and `refuse(name, args)`."""


class RowsRule(NamedTuple):
    """An op on rows: the tensors `inputs` have one shape and get the same placements.

    weights: tensors that all rows share; gathered: dimensions of the inputs that must not be sharded
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    gathered: tuple[int, ...] = (-1,)


class RotaryRule(NamedTuple):
    """A rotation of q and k by cos and sin, whose batch and tokens are sharded like q's; weights: as in RowsRule."""

    weights: tuple[str, ...] = ()


class LossRule(NamedTuple):
    """A loss over a vocabulary, sharded or not; kind: cross_entropy, linear_cross_entropy or linear_log_probs."""

    kind: str


def is_dtensor(arg: Any) -> bool:
    """Whether it is a DTensor, without importing torch.distributed.tensor."""
    return type(arg).__name__ == "DTensor" and type(arg).__module__.startswith("torch.distributed")


def apply_sharded(function: Any, args: tuple[Any, ...]) -> Any:
    """The result of `function.apply(*args)` where some args are DTensors; raises `ShardingError`."""
    return importlib.import_module(handler).apply(function, args)


def refuse_dtensors(name: str, args: tuple[Any, ...]) -> NoReturn | None:
    """Raise `ShardingError` if an argument is a DTensor: operators take plain tensors."""
    if any(is_dtensor(arg) for arg in args):
        importlib.import_module(handler).refuse(name, args)
