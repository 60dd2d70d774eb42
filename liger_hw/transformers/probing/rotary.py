"""Recognising rotary functions, `apply_rotary_pos_emb(q, k, cos, sin, ...)` and alike, by what they compute."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import nn

from ...kernels.rotary.interleaved_rope import interleaved_rope_reference
from ...kernels.rotary.llama4_rope import llama4_rope_reference
from ...kernels.rotary.qwen2vl_mrope import qwen2vl_mrope_reference
from ...kernels.rotary.rope import rope_reference
from ...kernels.rotary.vision_rope import vision_rope_reference
from .. import rotations
from .twin import Match, Refused, agrees, current_forward, generator, normal, quiet, run, twin_of

_D, _T = 16, 5
_WIDTHS = {"unequal halves": _D, "equal halves": _D, "half width": _D // 2, "partial": _D // 4}
_EMBEDDING = re.compile("[Rr]ot|[Rr]ope|R[oO]PE")
"""Of which classes' names a rotary embedding's may be."""


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
    parameters = inspect.signature(function).parameters
    names = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    if "k" in parameters and parameters["k"].default is not inspect.Parameter.empty:
        return Refused("it may be called without k", "rope")
    forms = [form for form in _FORMS if form.takes(names)]
    if not forms:
        return Refused(f"it takes ({', '.join(names)}): no kernel does", "rope")
    with quiet():
        for form in forms:
            inputs = form.inputs(shared_halves)
            wanted = [_outcome(function, given, {}) for given in inputs]
            ran = [i for i, value in enumerate(wanted) if value is not None]
            for kernel in form.kernels(shared_halves) if ran else ():
                if all(_same(wanted[i], _outcome(kernel.reference, inputs[i], kernel.options)) for i in ran):
                    return Match(kernel.op, kernel.variant, kernel.make())
    return Refused("it turns other pairs, or in another order, than any kernel", "rope")


@dataclass(frozen=True)
class _Kernel:
    """A kernel that a rotary function may be. options: keywords of its reference beside the probe's inputs."""

    op: str
    variant: str
    reference: Callable
    make: Callable[[], Callable]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Form:
    """Rotary functions of like arguments: which, what to try them with, and the kernels that may be them."""

    takes: Callable[[list[str]], bool]
    inputs: Callable[[bool], list[dict[str, Any]]]
    kernels: Callable[[bool], list[_Kernel]]


def _heads(source: torch.Generator, axis: int, queries: int = 4, keys: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [(2, heads, _T, _D) if axis == 1 else (2, _T, heads, _D) for heads in (queries, keys)]
    return tuple(normal(*shape, source=source) for shape in shapes)


def _angles(source: torch.Generator, *shape: int, equal: bool) -> tuple[torch.Tensor, ...]:
    """cos and sin, or what stands for them; equal: of two equal halves."""
    tables = tuple(normal(*shape, source=source) for _ in range(2))
    return tuple(torch.cat((t[..., : shape[-1] // 2],) * 2, -1) for t in tables) if equal else tables


def _q_and_k(shared_halves: bool) -> list[dict[str, Any]]:
    """cos and sin of several widths and kinds; a function that does not take one says so by raising."""
    found = []
    for kind, width in _WIDTHS.items():
        if kind == "unequal halves" and shared_halves:
            continue
        for axis in (1, 2):
            source = generator()
            q, k = _heads(source, axis)
            cos, sin = _angles(source, 2, _T, width, equal=kind in ("equal halves", "partial"))
            found.append({"q": q, "k": k, "cos": cos, "sin": sin, "unsqueeze_dim": axis})
    return found


def _words(shared_halves: bool) -> str:
    return "halves shared" if shared_halves else ""


def _q_and_k_kernels(shared_halves: bool) -> list[_Kernel]:
    pairs = {"shared_halves": True, "to_halves": True}
    return [
        _Kernel("rope", _words(shared_halves), rope_reference, lambda: rotations.half_split(shared_halves)),
        _Kernel("rope", "cos and sin of half the width", rope_reference, rotations.half_width, {"rotary_dim": _D}),
        _Kernel("interleaved_rope", "", interleaved_rope_reference, lambda: rotations.interleaved(False, False)),
        _Kernel(
            "interleaved_rope",
            "one angle a pair",
            interleaved_rope_reference,
            lambda: rotations.interleaved(True, False),
            {"shared_halves": True},
        ),
        _Kernel(
            "interleaved_rope",
            "one angle a pair, taken apart",
            interleaved_rope_reference,
            lambda: rotations.interleaved(True, True),
            pairs,
        ),
    ]


def _patches(shared_halves: bool) -> list[dict[str, Any]]:
    found = []
    for width in (_D, _D // 2):
        source = generator()
        q, k = (normal(_T, heads, _D, source=source) for heads in (4, 2))
        cos, sin = _angles(source, _T, width, equal=shared_halves)
        found.append({"q": q, "k": k, "cos": cos, "sin": sin})
    return found


def _three_axes(shared_halves: bool) -> list[dict[str, Any]]:
    source = generator()
    q, k = _heads(source, 1)
    cos, sin = _angles(source, 3, 2, _T, _D, equal=shared_halves)
    return [{"q": q, "k": k, "cos": cos, "sin": sin, "mrope_section": [2, 3, 3]}]


def _complex(tokens_axis: int, tower: bool = False) -> Callable[[bool], list[dict[str, Any]]]:
    def inputs(shared_halves: bool) -> list[dict[str, Any]]:
        source = generator()
        q, k = _heads(source, 3 - tokens_axis)
        rows = (_T, 1) if tower else (2, _T)
        angles = torch.complex(*(normal(*rows, _D // 2, source=source) for _ in range(2)))
        return [{"q": q, "k": k, "angles": angles}]

    return inputs


def _complex_kernel(tokens_axis: int) -> Callable[[bool], list[_Kernel]]:
    def reference(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = angles.transpose(0, 1) if angles.shape[1] == 1 else angles
        if tokens_axis == 1:
            return llama4_rope_reference(q, k, angles)
        return tuple(t.transpose(1, 2) for t in llama4_rope_reference(q.transpose(1, 2), k.transpose(1, 2), angles))

    words = "" if tokens_axis == 1 else "heads first"
    return lambda _: [_Kernel("llama4_rope", words, reference, lambda: rotations.complex_angles(tokens_axis))]


def _is_q_and_k(names: list[str]) -> bool:
    return names[:4] == _QK and names[-1] == "unsqueeze_dim" and not set(names[4:]) - {"position_ids", "unsqueeze_dim"}


_QK = ["q", "k", "cos", "sin"]
_FORMS = (
    _Form(_is_q_and_k, _q_and_k, _q_and_k_kernels),
    _Form(
        lambda names: names == _QK,
        _patches,
        lambda shared: [
            _Kernel("vision_rope", _words(shared), vision_rope_reference, lambda: rotations.vision(shared))
        ],
    ),
    _Form(
        lambda names: names == [*_QK, "mrope_section", "unsqueeze_dim"],
        _three_axes,
        lambda shared: [
            _Kernel("qwen2vl_mrope", _words(shared), qwen2vl_mrope_reference, lambda: rotations.three_axes(shared))
        ],
    ),
    _Form(lambda names: len(names) == 3 and names[0] != "x", _complex(1), _complex_kernel(1)),
    _Form(lambda names: len(names) == 3 and names[0] != "x", _complex(2), _complex_kernel(2)),
    _Form(lambda names: len(names) == 3 and names[0] != "x", _complex(1, tower=True), _complex_kernel(1)),
)


def _outcome(function: Callable, given: dict[str, Any], options: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """q and k rotated; None when the function does not take such inputs."""
    positional = [value for name, value in given.items() if name != "unsqueeze_dim"]
    named = {name: value for name, value in given.items() if name == "unsqueeze_dim"}
    try:
        return tuple(function(*positional, **named, **options))
    except Exception:  # a width or layout it was not written for
        return None


def _same(wanted: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...] | None) -> bool:
    return found is not None and len(wanted) == len(found) and all(agrees(f, w) for f, w in zip(found, wanted))


def halves_are_shared(modules: list[nn.Module], function: Callable) -> bool:
    """Whether both halves of every cos and sin that `function` is given are known to be equal, found by running copies of
    the rotary embeddings among `modules`.

    Every caller must be inside a module that holds an embedding of equal halves and has callers of rotary functions in no
    second child, a tower say, that may be fed otherwise. No other embedding may feed the function either: one that gives
    frequencies (those of towers in transformers 4) feeds what is called inside its holder, any other may feed all.
    """
    look = functools.cache(functions_called)
    calls = {module: look(current_forward(module)).values() for module in modules}
    known: set[nn.Module] = set()
    with quiet():
        for holder in modules:
            gives = {_gives(embedding) for embedding in _held(holder)}
            if not gives:
                continue
            parts = [[holder], *(list(child.modules()) for child in holder.children())]
            called = [found for part in parts if (found := {f for module in part for f in calls[module]})]
            feeds = any(function in found for found in called)
            if gives == {"equal halves"}:
                known.update(holder.modules() if len(called) == 1 else ())
            elif gives != {"frequencies"} or feeds or not called:
                return False
    callers = {module for module in modules if function in calls[module]}
    return bool(callers) and callers <= known


def _held(holder: nn.Module) -> list[nn.Module]:
    """The rotary embeddings, by their class's name, that a module holds, also in a list or dictionary."""
    children = list(holder.children())
    children += [m for c in children if isinstance(c, (nn.ModuleList, nn.ModuleDict)) for m in c.children()]
    return [m for m in children if _EMBEDDING.search(type(m).__name__)]


def _gives(module: nn.Module) -> str:
    """What a rotary embedding gives: "equal halves" of cos and sin, "frequencies" of so many positions, or "unknown"."""
    if not module._buffers:  # its frequencies are elsewhere, and cannot be replaced by random ones
        return "unknown"
    if module._forward_hooks or ("forward" in vars(module) and not hasattr(module, "_hf_hook")):
        return "unknown"  # what this one gives is not what its class's forward does
    source = generator()
    twin = twin_of(module, {}, {})
    for name, buffer in module._buffers.items():
        if buffer is not None:
            make = functools.partial(torch.rand, generator=source) if buffer.numel() > 1 else torch.ones
            twin._buffers[name] = make(buffer.shape, dtype=torch.float32)
    x = normal(1, _T, 8, source=source)
    positions = torch.arange(3, 3 + _T)[None]
    layer_types = getattr(module, "layer_types", None) or ()
    extra = [(t,) for t in dict.fromkeys(layer_types)] or [()]
    shapes = (positions, positions + 7 * torch.arange(3)[:, None, None])
    forward = type(module).forward
    if all({_equal(forward, twin, x, shape, more) for shape in shapes} - {None} == {True} for more in extra):
        return "equal halves"
    table = run(forward, twin, _T)
    known = isinstance(table, torch.Tensor) and table.is_floating_point() and table.dim() == 2 and len(table) == _T
    return "frequencies" if known else "unknown"


def _equal(forward: Callable, twin: nn.Module, x: torch.Tensor, positions: torch.Tensor, more: tuple) -> bool | None:
    """Whether both halves of cos and sin are equal; None when the embedding does not take such positions."""
    try:
        cos, sin = forward(twin, x, positions, *more)
        return all(t.shape[-1] % 2 == 0 and torch.equal(*t.chunk(2, -1)) for t in (cos, sin))
    except Exception:  # positions, or a kind of embedding, that it was not written for
        return None
