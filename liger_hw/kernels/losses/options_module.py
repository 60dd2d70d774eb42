"""Losses as modules whose options are the fields of a dataclass."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Sequence

import torch


class OptionsModule(torch.nn.Module):
    """A loss as a module. A subclass is a dataclass (eq=False, repr=False) whose fields are the loss's options.

    A loss with buffers is not a dataclass: it lists its options in `option_names` and calls `set_options`. Every call
    reads the options, so they may be changed after construction.
    """

    option_names: Sequence[str]
    without_effect: tuple[str, ...] = ()
    """Fields that are accepted and ignored."""

    def __post_init__(self) -> None:
        super().__init__()
        names = (field.name for field in fields(self))
        self.option_names = tuple(name for name in names if name not in self.without_effect)
        self.check()

    def set_options(self, *values: Any) -> None:
        """Set the options, in the order of `option_names`."""
        for name, value in zip(self.option_names, values):
            setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise for an invalid option."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.option_names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())
