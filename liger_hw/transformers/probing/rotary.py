"""Recognising rotary functions, `apply_rotary_pos_emb(q, k, cos, sin, ...)` and alike, by what they compute."""

from __future__ import annotations

import dis
import inspect
import types
from typing import Any, Callable

import torch
from torch import nn

from ...kernels.rope import rope_reference
from .. import parts
from .twin import Match, Refused, agrees, generator, quiet, twin_of

_D, _T = 16, 5
_WIDTHS = {"unequal halves": _D, "equal halves": _D, "half width": _D // 2, "partial": _D // 4}


def functions_called(forward: Callable) -> dict[str, Callable]:
    """Name -> rotary function that an attention's forward calls by that name, in its own module."""
    found: dict[str, Callable] = {}
    item: Any = forward
    while item is not None:
        code, scope = getattr(item, "__code__", None), getattr(item, "__globals__", {})
        for instruction in dis.get_instructions(code) if code else ():
            name = instruction.argval
            if instruction.opname == "LOAD_GLOBAL" and isinstance(name, str) and "rot" in name.lower():
                if isinstance(scope.get(name), types.FunctionType):
                    found[name] = scope[name]
        item = getattr(item, "__wrapped__", None)
    return found


def recognise(function: Callable, shared_halves: bool) -> Match | Refused:
    """The rotary kernel that computes `function`. shared_halves: both halves of cos and sin are known to be equal.

    The match's core is a maker: `core(function)` is the replacement.
    """
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if names[:4] != ["q", "k", "cos", "sin"] or set(names[4:]) - {"position_ids", "unsqueeze_dim"}:
        return Refused(f"it takes ({', '.join(names)}), not (q, k, cos, sin)", "rope")
    if inspect.signature(function).parameters["k"].default is not inspect.Parameter.empty:
        return Refused("it may be called without k", "rope")
    if "unsqueeze_dim" not in names:
        return Refused("it rotates [tokens, heads, width] at once (a vision rope)", "rope")
    with quiet():
        wanted = {case: _outcome(function, case) for case in _WIDTHS}
        ran = {case: value for case, value in wanted.items() if value is not None}
        if not ran:
            return Refused("it cannot be run alone", "rope")
        candidates = (
            ("halves shared" if shared_halves else "", {}, lambda f: parts.half_rotation(f, shared_halves)),
            ("cos and sin of half the width", {"rotary_dim": _D}, parts.half_width_rotation),
        )
        for variant, options, make in candidates:
            cases = [c for c in ran if not (shared_halves and c == "unequal halves")]
            if cases and all(_same(ran[c], _outcome(rope_reference, c, **options)) for c in cases):
                return Match("rope", variant, make)
    return Refused("it does not rotate one half of the width against the other (pairs, or another order)", "rope")


def _outcome(function: Callable, case: str, **options: Any) -> tuple[torch.Tensor, ...] | None:
    """q and k rotated, with both layouts; None when the function does not take such widths."""
    source = generator()
    width = _WIDTHS[case]
    cos, sin = (torch.randn(2, _T, width, generator=source) for _ in range(2))
    if case in ("equal halves", "partial"):
        cos, sin = (torch.cat((t[..., : width // 2],) * 2, -1) for t in (cos, sin))
    results: list[torch.Tensor] = []
    for axis in (1, 2):
        shapes = [(2, heads, _T, _D) if axis == 1 else (2, _T, heads, _D) for heads in (4, 2)]
        q, k = (torch.randn(*shape, generator=source) for shape in shapes)
        try:
            results += function(q, k, cos, sin, unsqueeze_dim=axis, **options)
        except Exception:  # a width it was not written for
            return None
    return tuple(results)


def _same(wanted: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...] | None) -> bool:
    return found is not None and len(wanted) == len(found) and all(agrees(f, w) for f, w in zip(found, wanted))


def halves_are_shared(modules: list[nn.Module]) -> bool:
    """Whether every rotary embedding among `modules` gives cos and sin of two equal halves, found by running copies."""
    embeddings = [m for m in modules if "rotary" in type(m).__name__.lower() and m._buffers]
    if not embeddings:
        return False
    seen: set[tuple] = set()
    with quiet():
        for module in embeddings:
            kind = (type(module), tuple(module._buffers), str(getattr(module, "rope_type", None)))
            if kind not in seen and not _gives_equal_halves(module):
                return False
            seen.add(kind)
    return True


def _gives_equal_halves(module: nn.Module) -> bool:
    source = generator()
    twin = twin_of(module, {}, {})
    for name, buffer in module._buffers.items():
        if buffer is not None:
            twin._buffers[name] = (
                torch.rand(buffer.shape, generator=source) if buffer.numel() > 1 else torch.ones(buffer.shape)
            )
    x = torch.randn(1, _T, 8, generator=source)
    positions = torch.arange(3, 3 + _T)[None]
    layer_types = getattr(module, "layer_types", None) or ()
    extra = [(t,) for t in dict.fromkeys(layer_types)] or [()]
    for more in extra:
        if not any(
            _equal(type(module).forward, twin, x, shape, more)
            for shape in (positions, positions[None].expand(3, 1, -1))
        ):
            return False
    return True


def _equal(forward: Callable, twin: nn.Module, x: torch.Tensor, positions: torch.Tensor, more: tuple) -> bool:
    try:
        cos, sin = forward(twin, x, positions, *more)
        return all(t.shape[-1] % 2 == 0 and torch.equal(*t.chunk(2, -1)) for t in (cos, sin))
    except Exception:  # another kind of embedding: nothing is known of it
        return False
