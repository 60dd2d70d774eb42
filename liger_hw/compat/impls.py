"""For `liger_kernel.set_impl` and `ops.backends.registry`: choosing an implementation, which has no effect."""

from __future__ import annotations

from typing import Any

__all__ = ["available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl"]

IMPL_REGISTRY: dict[str, Any] = {}
"""Always empty; Axolotl reads it."""

_chosen: list[str | None] = [None]


def set_impl(name: str | None) -> None:
    """Store a name for `get_impl`."""
    _chosen[0] = name


def get_impl() -> str | None:
    """The stored name, or None."""
    return _chosen[0]


def available_impls(op_name: str, device: Any = None) -> list[str]:
    """`["triton"]`, for every op and device."""
    return ["triton"]


set_backend, get_backend, available_backends = set_impl, get_impl, available_impls
