"""Loads with the cache hint of a launch's configuration."""

from __future__ import annotations

from .triton_import import tl, triton


@triton.jit
def load_with_hint(ptrs, LOAD_HINT: tl.constexpr, mask=None, other=None):
    """`tl.load`. LOAD_HINT: a cache modifier or an eviction policy, or "" (PTX takes one of them, never both)."""
    if LOAD_HINT == ".ca" or LOAD_HINT == ".cg":
        x = tl.load(ptrs, mask=mask, other=other, cache_modifier=LOAD_HINT)
    else:
        x = tl.load(ptrs, mask=mask, other=other, eviction_policy=LOAD_HINT)
    return x
