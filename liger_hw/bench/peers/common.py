"""What every peer's file uses: how it says that it has not what is asked."""

from __future__ import annotations

from typing import Any


class Absent(Exception):
    """The peer is not installed, or has no such op; the message says which."""


class Unsupported(Exception):
    """The peer has the op but not this option."""


def only(default: dict[str, Any], **given: Any) -> None:
    """Raise `Unsupported` for an option given otherwise than its default."""
    wrong = [f"{name}={value!r}" for name, value in given.items() if value != default.get(name)]
    if wrong:
        raise Unsupported(f"has no {', '.join(wrong)}")
