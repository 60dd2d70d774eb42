"""Marks by which a function that a patch installed is recognised."""

from __future__ import annotations

from typing import Any, Callable

PATCH_MARK = "_liger_hw_part"
"""Attribute of every function that a patch installs: (part, kernel). A functools.wraps wrapper of one has it too."""

SWITCH = "_liger_hw_switch"
"""Attribute of a patch's function: a list. The function runs the original while the list is empty."""

_ORIGINAL, _ITSELF = "_liger_hw_original", "_liger_hw_itself"


def mark(
    function: Callable, part: str, kernel: str, switch: list[bool] | None = None, original: Callable | None = None
) -> Callable:
    """Mark `function` as installed by a patch, and return it.

    switch: a list that `revert` empties; code that still holds `function` then gets the original's results
    original: the function that `function` replaces; its name and docstring are copied
    """
    setattr(function, PATCH_MARK, (part, kernel))
    setattr(function, _ITSELF, function)
    if switch is not None:
        setattr(function, SWITCH, switch)
    if original is not None:
        setattr(function, _ORIGINAL, original)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(function, name, getattr(original, name, getattr(function, name)))
    return function


def mark_of(function: Any) -> tuple[str, str] | None:
    """(part, kernel) of a function that a patch installed, else None."""
    return getattr(function, PATCH_MARK, None)


def original_of(function: Callable) -> Callable:
    """The function that a patch replaced by `function`; `function` itself if no patch installed it."""
    while (original := getattr(function, _ORIGINAL, None)) is not None:
        function = original
    return function


def is_ours(value: Any) -> bool:
    """Whether a patch installed this function, bound method or class. False for wrappers and subclasses of one, which
    inherit the mark. torch.compile can trace this."""
    function = getattr(value, "__func__", value)
    return function is not None and getattr(function, _ITSELF, None) is function
