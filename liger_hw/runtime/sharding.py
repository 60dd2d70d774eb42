"""Rules for an op's autograd Function on DTensors, which it names as `sharding`; without a rule it refuses them.

A rule says which placements the arguments need and which the results have. `distributed/dtensor.py` applies it. It is
in a higher layer and needs torch.distributed.tensor, so it is imported for the first DTensor, by the name `handler`.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, NoReturn

handler: str | None = None
"""Full name of the module with `apply(function, args)` and `refuse(name, args)`."""


class RowsRule(NamedTuple):
    """An op on rows: the tensors `inputs` have one shape and are placed alike.

    weights: tensors that all rows share; gathered: dimensions of the inputs that must be whole on each rank
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    gathered: tuple[int, ...] = (-1,)


class RotaryRule(NamedTuple):
    """A rotation of q and k by cos and sin, which are sharded like batch and tokens; weights: as in RowsRule."""

    weights: tuple[str, ...] = ()


class LossRule(NamedTuple):
    """A loss over a vocabulary, which may be sharded: `cross_entropy`, `linear_cross_entropy` or `linear_log_probs`."""

    kind: str


def is_dtensor(arg: Any) -> bool:
    """Whether it is a DTensor, without importing torch.distributed.tensor."""
    return type(arg).__name__ == "DTensor" and type(arg).__module__.startswith("torch.distributed")


def apply_sharded(function: Any, args: tuple[Any, ...]) -> Any:
    """The result of `function.apply(*args)` where some args are DTensors; raises `ShardingError`."""
    return importlib.import_module(handler).apply(function, args)


def refuse_dtensors(name: str, args: tuple[Any, ...]) -> NoReturn | None:
    """Raise `ShardingError` if there is a DTensor in args: operators take plain tensors."""
    if any(is_dtensor(arg) for arg in args):
        importlib.import_module(handler).refuse(name, args)
