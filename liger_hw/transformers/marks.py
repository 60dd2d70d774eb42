"""Marks by which a function that a patch installed is recognised."""

from __future__ import annotations

from typing import Any, Callable

PATCH_MARK = "_liger_hw_part"
"""Attribute of every function that a patch installs: (part, kernel). A functools.wraps wrapper of one has it too."""

SWITCH = "_liger_hw_switch"
"""Attribute of such a function: a list. When it is empty, the function runs the original."""

_ORIGINAL, _ITSELF = "_liger_hw_original", "_liger_hw_itself"


def mark(function: Callable, part: str, kernel: str, switch: list[bool] | None = None) -> None:
    """Mark `function` as installed by a patch.

    switch: a list that a revert empties, since other code may still hold `function`, which then runs the original
    """
    setattr(function, PATCH_MARK, (part, kernel))
    setattr(function, _ITSELF, function)
    if switch is not None:
        setattr(function, SWITCH, switch)


def marked(
    function: Callable, part: str, kernel: str, original: Callable, switch: list[bool] | None = None
) -> Callable:
    """`function` with the mark of a patch, under the names of `original`, which it replaces."""
    function.__name__ = getattr(original, "__name__", function.__name__)
    function.__qualname__ = getattr(original, "__qualname__", function.__name__)
    function.__module__ = getattr(original, "__module__", function.__module__)
    function.__doc__ = original.__doc__
    mark(function, part, kernel, switch)
    setattr(function, _ORIGINAL, original)
    return function


def original_of(function: Callable) -> Callable:
    """The function that a patch replaced by `function`; any other function itself."""
    while (original := getattr(function, _ORIGINAL, None)) is not None:
        function = original
    return function


def is_ours(value: Any) -> bool:
    """Whether a patch installed this function, bound method or class; false for a wrapper around it and for a class
    derived from it. torch.compile can trace this."""
    function = getattr(value, "__func__", value)
    return function is not None and getattr(function, _ITSELF, None) is function
