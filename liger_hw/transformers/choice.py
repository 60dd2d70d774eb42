"""The implementation that runs a model's experts, which a configuration of transformers 5 names.

A patch writes `Chosen` there, which equals the name `liger_hw`. Patched experts run the kernel while their
configuration names it: if a program names another implementation after the patch, that one runs.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from .marks import mark

NAME = "liger_hw"
CHOICE = "_experts_implementation_internal"
"""Attribute of a configuration: transformers' property `_experts_implementation` reads it."""
SLOT = "_liger_hw_experts"
"""Method that a patch adds to experts whose forward transformers has replaced; it runs when `liger_hw` is chosen."""


class Chosen(str):
    """`liger_hw` in the configuration of a patched model. instead: what the configuration named before.

    A copy is the same object. Pickle stores `instead`, so that loading does not need liger_hw.
    """

    instead: str | None

    def __new__(cls, instead: str | None) -> "Chosen":
        self = super().__new__(cls, NAME)
        self.instead = instead
        return self

    def __deepcopy__(self, memo: dict) -> "Chosen":
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(self.instead), () if self.instead is None else (self.instead,)


class Choice:
    """Writes `Chosen` into the configuration of one live model, for a report to undo; see `report.Patch`."""

    def __init__(self, config: Any) -> None:
        self.config, self.chosen = config, Chosen(getattr(config, CHOICE))

    def apply(self) -> None:
        setattr(self.config, CHOICE, self.chosen)

    def revert(self) -> bool:
        if getattr(self.config, CHOICE) is self.chosen:  # not the choice of another patch, if models share it
            release(self.config)
        return True


def release(config: Any) -> None:
    """Restore the name that a configuration had before `Choice`, unless a program has chosen another since."""
    chosen = getattr(config, CHOICE, None)
    if type(chosen) is Chosen:
        setattr(config, CHOICE, chosen.instead)


def chosen_by_default(original: Callable) -> Callable:
    """`get_correct_experts_implementation` of a family's models: `liger_hw` if the program names none."""

    @functools.wraps(original)
    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> str:
        name = original(self, requested_experts)
        return Chosen(name) if requested_experts is None else name

    return mark(get_correct_experts_implementation, "experts", "")
