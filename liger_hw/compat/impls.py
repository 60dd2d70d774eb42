"""Behind `liger_kernel.set_impl`, `ops.backends.registry` and the like: a choice among implementations of an op.

There is one implementation here, in Triton. A choice has no effect, but a program can read it back.
"""

from __future__ import annotations

from typing import Any

__all__ = ["available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl"]

IMPL_REGISTRY: dict[str, Any] = {}
"""Liger's table of implementations to be chosen by `LIGER_KERNEL_IMPL`: none here. Axolotl reads it."""

_chosen: list[str | None] = [None]


def set_impl(name: str | None) -> None:
    """Store a name for `get_impl`; None removes it."""
    _chosen[0] = name


def get_impl() -> str | None:
    """The name that was set, or None."""
    return _chosen[0]


def available_impls(op_name: str, device: Any = None) -> list[str]:
    """The implementations of every op on every device: Triton's."""
    return ["triton"]


set_backend, get_backend, available_backends = set_impl, get_impl, available_impls
