"""What an op's autograd Function does with DTensors: the rule that it names as `sharding`, and who applies it.

A rule says which placements the arguments need and which the results have. `distributed/dtensor.py` applies it. That
file is in a higher layer and needs torch.distributed.tensor, so the package's root sets its name here, and it is
imported for the first DTensor. A Function without a rule refuses DTensors.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, NoReturn

handler: str | None = None
"""Full name of the module that applies rules: `apply(function, args)` and `refuse(name, args)`."""


class RowsRule(NamedTuple):
    """An op on rows: the tensors `inputs` have one shape and are placed alike.

    weights: tensors that all rows share; gathered: dimensions of the inputs that must be whole on each rank
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    gathered: tuple[int, ...] = (-1,)


class RotaryRule(NamedTuple):
    """A rotation of q and k by cos and sin, which follow the batch and the tokens; weights: as of `RowsRule`."""

    weights: tuple[str, ...] = ()


class LossRule(NamedTuple):
    """A loss over a vocabulary, which may be sharded: `cross_entropy`, `linear_cross_entropy` or `linear_log_probs`."""

    kind: str


def is_dtensor(arg: Any) -> bool:
    """Whether it is a DTensor. Goes by the class's name, so that torch.distributed.tensor is not imported for it."""
    return type(arg).__name__ == "DTensor" and type(arg).__module__.startswith("torch.distributed")


def apply_sharded(function: Any, args: tuple[Any, ...]) -> Any:
    """The result of `function.apply(*args)` where some args are DTensors; raises `ShardingError`."""
    return importlib.import_module(handler).apply(function, args)


def refuse_dtensors(name: str, args: tuple[Any, ...]) -> NoReturn | None:
    """Raise `ShardingError` where args hold a DTensor: an operator takes plain tensors only."""
    if any(is_dtensor(arg) for arg in args):
        importlib.import_module(handler).refuse(name, args)
