"""Recognises rotary functions such as `apply_rotary_pos_emb(q, k, cos, sin, ...)`."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, Callable, NamedTuple

import torch

from ...kernels.rotary.interleaved_rope import InterleavedRopeFunction, interleaved_rope_reference
from ...kernels.rotary.llama4_rope import llama4_rope_reference
from ...kernels.rotary.qwen2vl_mrope import qwen2vl_mrope_reference
from ...kernels.rotary.rope import RopeFunction, rope_reference
from ...kernels.rotary.rotary import HALVES, PAIRS, SHARED, Form
from ...kernels.rotary.vision_rope import vision_rope_reference
from ..replacing import Match, complex_angles, of_q_and_k, packed_patches, three_axes
from ..source import Facts, open_branch
from . import probe
from .probe import Refused

# -- which functions a forward calls ---------------------------------------------------------------------------------


def functions_called(forward: Callable) -> dict[str, Callable]:
    """Global name -> rotary function that an attention's forward calls by this name."""
    functions: dict[str, Callable] = {}
    item: Any = forward
    while item is not None:
        code, scope = getattr(item, "__code__", None), getattr(item, "__globals__", {})
        for name in code.co_names if code else ():
            function = plain_function(scope.get(name)) if "rot" in name.lower() else None
            if function is not None:
                functions[name] = function
        item = getattr(item, "__wrapped__", None)
    return functions


def plain_function(value: Any) -> types.FunctionType | None:
    """`value` if it is a function, or the function that Hugging Face's kernels package has wrapped in a module, as it
    does with rotary functions of transformers 5; else, or if that module's forward was replaced, None."""
    cls = type(value)
    if hasattr(cls, "kernel_layer_name") and "forward" not in vars(value):
        value = inspect.getclosurevars(cls.forward).nonlocals.get("func")
    return value if isinstance(value, types.FunctionType) else None


# -- comparing with kernels ------------------------------------------------------------------------------------------


class _Kernel(NamedTuple):
    """A kernel that may compute the same as a rotary function.

    make: function of the original that returns its replacement; options: further keywords of the reference
    """

    op: str
    variant: str
    reference: Callable
    make: Callable[[Callable], Callable]
    options: dict[str, Any] = {}


class _Form(NamedTuple):
    """Rotary functions with the same arguments. has_names: whether argument names are theirs; inputs: of each probe"""

    has_names: Callable[[list[str]], bool]
    inputs: list[dict[str, Any]]
    kernels: list[_Kernel]


def recognise(function: Callable) -> Match | Refused:
    parameters = inspect.signature(function).parameters
    names = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    if "k" in parameters and parameters["k"].default is not inspect.Parameter.empty:
        return Refused("it may be called without k", "rope")
    with probe.quiet():
        forms = [form for form in _forms() if form.has_names(names)]
        if not forms:
            return Refused(f"it takes ({', '.join(names)}): no kernel does", "rope")
        for form in forms:
            inputs = form.inputs
            expected = [_outcome(function, arguments, {}) for arguments in inputs]
            ran = [i for i, value in enumerate(expected) if value is not None]
            for kernel in form.kernels if ran else ():
                if all(_is_same(expected[i], _outcome(kernel.reference, inputs[i], kernel.options)) for i in ran):
                    absent = frozenset(names) - set(inputs[0])
                    if reason := open_branch(function, None, Facts(frozenset(inputs[0]), absent)):
                        return Refused(reason, "rope")
                    return Match(kernel.op, kernel.variant, kernel.make(function))
    return Refused("it turns other pairs, or in another order, than any kernel", "rope")


def _outcome(function: Callable, arguments: dict[str, Any], options: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """The rotated q and k, or None if the function does not take these inputs."""
    positional = [value for name, value in arguments.items() if name != "unsqueeze_dim"]
    named = {name: value for name, value in arguments.items() if name == "unsqueeze_dim"}
    try:
        return tuple(function(*positional, **named, **options))
    except Exception:  # it does not support this width or layout
        return None


def _is_same(expected: tuple[torch.Tensor, ...], result: tuple[torch.Tensor, ...] | None) -> bool:
    return result is not None and len(expected) == len(result) and all(map(probe.agrees, result, expected))


# -- forms -----------------------------------------------------------------------------------------------------------

_WIDTH, _TOKENS = 16, 5
_QK = ["q", "k", "cos", "sin"]


def _heads(source: torch.Generator, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q with 4 heads and k with 2. axis: the dimension of heads, 1 or 2"""
    shapes = [(2, heads, _TOKENS, _WIDTH) if axis == 1 else (2, _TOKENS, heads, _WIDTH) for heads in (4, 2)]
    return tuple(probe.normal(*shape, source=source) for shape in shapes)


def _angles(source: torch.Generator, *shape: int, equal: bool = False) -> tuple[torch.Tensor, ...]:
    """Random numbers in place of cos and sin. equal: whether both halves are the same"""
    tables = tuple(probe.normal(*shape, source=source) for _ in range(2))
    return tuple(torch.cat((t[..., : shape[-1] // 2],) * 2, -1) for t in tables) if equal else tables


def _q_and_k_form() -> _Form:
    """Functions of (q, k, cos, sin, [position_ids], unsqueeze_dim)."""

    def has_names(names: list[str]) -> bool:
        return (
            names[:4] == _QK and names[-1] == "unsqueeze_dim" and not set(names[4:]) - {"position_ids", "unsqueeze_dim"}
        )

    cases = []  # a function raises for widths of cos and sin that it does not support
    for width, equal in ((_WIDTH, False), (_WIDTH, True), (_WIDTH // 2, False), (_WIDTH // 4, True)):
        for axis in (1, 2):
            source = probe.generator()
            q, k = _heads(source, axis)
            cos, sin = _angles(source, 2, _TOKENS, width, equal=equal)
            cases.append({"q": q, "k": k, "cos": cos, "sin": sin, "unsqueeze_dim": axis})

    def halves(variant: str, form: Form, widths: int, **options: Any) -> _Kernel:
        kernel = functools.partial(of_q_and_k, RopeFunction, form, widths)
        return _Kernel("rope", variant, rope_reference, kernel, options)

    def pairs(variant: str, form: Form, **options: Any) -> _Kernel:
        kernel = functools.partial(of_q_and_k, InterleavedRopeFunction, form, 1)
        return _Kernel("interleaved_rope", variant, interleaved_rope_reference, kernel, options)

    apart = Form(True, False, SHARED)
    kernels = [
        halves("", Form(angles=HALVES), 1),
        halves("cos and sin of half the width", Form(angles=SHARED), 2, rotary_dim=_WIDTH),
        pairs("", Form(True, True, PAIRS)),
        pairs("one angle a pair", Form(True, True, SHARED), shared_halves=True),
        pairs("one angle a pair, taken apart", apart, shared_halves=True, to_halves=True),
    ]
    return _Form(has_names, cases, kernels)


def _patches_form() -> _Form:
    """Functions of (q, k, cos, sin) for packed patches."""
    cases = []
    for width in (_WIDTH, _WIDTH // 2):
        source = probe.generator()
        q, k = (probe.normal(_TOKENS, heads, _WIDTH, source=source) for heads in (4, 2))
        cos, sin = _angles(source, _TOKENS, width)
        cases.append({"q": q, "k": k, "cos": cos, "sin": sin})
    return _Form(lambda names: names == _QK, cases, [_Kernel("vision_rope", "", vision_rope_reference, packed_patches)])


def _three_axes_form() -> _Form:
    """Functions of (q, k, cos, sin, mrope_section, unsqueeze_dim)."""
    source = probe.generator()
    q, k = _heads(source, 1)
    cos, sin = _angles(source, 3, 2, _TOKENS, _WIDTH)
    cases = [{"q": q, "k": k, "cos": cos, "sin": sin, "mrope_section": [2, 3, 3]}]
    names = [*_QK, "mrope_section", "unsqueeze_dim"]
    kernels = [_Kernel("qwen2vl_mrope", "", qwen2vl_mrope_reference, three_axes)]
    return _Form(lambda others: others == names, cases, kernels)


def _complex_form(tokens_axis: int, tower: bool = False) -> _Form:
    """Functions of (q, k, angles); tower: angles are [T, 1, half]."""
    source = probe.generator()
    q, k = _heads(source, 3 - tokens_axis)
    rows = (_TOKENS, 1) if tower else (2, _TOKENS)
    angles = torch.complex(*(probe.normal(*rows, _WIDTH // 2, source=source) for _ in range(2)))

    def reference(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = angles.transpose(0, 1) if angles.shape[1] == 1 else angles
        if tokens_axis == 1:
            return llama4_rope_reference(q, k, angles)
        return tuple(t.transpose(1, 2) for t in llama4_rope_reference(q.transpose(1, 2), k.transpose(1, 2), angles))

    words = "" if tokens_axis == 1 else "heads first"
    kernel = _Kernel("llama4_rope", words, reference, functools.partial(complex_angles, tokens_axis))
    has_names = lambda names: len(names) == 3 and names[0] != "x"  # noqa: E731
    return _Form(has_names, [{"q": q, "k": k, "angles": angles}], [kernel])


def _forms() -> tuple[_Form, ...]:
    return (
        _q_and_k_form(),
        _patches_form(),
        _three_axes_form(),
        _complex_form(tokens_axis=1),
        _complex_form(tokens_axis=2),
        _complex_form(tokens_axis=1, tower=True),
    )
