"""Errors for ops and options that a peer does not have."""

from __future__ import annotations

from typing import Any


class Absent(Exception):
    """The peer is not installed or has no such op."""


class Unsupported(Exception):
    """The peer has the op but not this option."""


def only(default: dict[str, Any], **options: Any) -> None:
    """Raise `Unsupported` for an option that differs from its default."""
    wrong = [f"{name}={value!r}" for name, value in options.items() if value != default.get(name)]
    if wrong:
        raise Unsupported(f"has no {', '.join(wrong)}")
