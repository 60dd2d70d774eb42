"""The experts implementation that a configuration of transformers 5 names.

A patch writes a `Chosen` into the configuration, which equals the name `liger_hw`. Patched experts run the kernel while
it is there. If a program writes another name after the patch, that implementation runs.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from .marks import mark

NAME = "liger_hw"
CHOICE = "_experts_implementation_internal"
"""Attribute of a configuration that has the name; transformers' property `_experts_implementation` reads it."""
SLOT = "_liger_hw_experts"
"""Method that a patch adds to experts whose forward transformers has replaced; `experts_forward` calls it."""


class Chosen(str):
    """`liger_hw` in the configuration of a patched model. previous: the name that was there before

    A copy is the same object. Pickle stores `previous`, so that loading does not need liger_hw.
    """

    previous: str | None

    def __new__(cls, previous: str | None) -> "Chosen":
        self = super().__new__(cls, NAME)
        self.previous = previous
        return self

    def __deepcopy__(self, memo: dict) -> "Chosen":
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(self.previous), () if self.previous is None else (self.previous,)


class Choice:
    """The patch that writes a `Chosen` into a live model's configuration; used as a `report.Patch`."""

    def __init__(self, config: Any) -> None:
        self.config, self.chosen = config, Chosen(getattr(config, CHOICE))

    def apply(self) -> None:
        setattr(self.config, CHOICE, self.chosen)

    def revert(self) -> bool:
        if getattr(self.config, CHOICE) is self.chosen:  # not the choice of another patch, if models share it
            release(self.config)
        return True


def release(config: Any) -> None:
    """Restore the name from before `Choice`, unless a program has written another one since."""
    chosen = getattr(config, CHOICE, None)
    if type(chosen) is Chosen:
        setattr(config, CHOICE, chosen.previous)


def chosen_by_default(original: Callable) -> Callable:
    """A family's `get_correct_experts_implementation`, with `liger_hw` as the default."""

    @functools.wraps(original)
    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> str:
        name = original(self, requested_experts)
        return Chosen(name) if requested_experts is None else name

    return mark(get_correct_experts_implementation, "experts", "")
