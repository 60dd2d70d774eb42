"""The functions that a patch puts in the place of a forward, and the mark by which they are known."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import torch

from .. import env
from ..recompute.recipes import recomputing
from ..runtime.operator import is_transformed
from ..runtime.triton_import import INTERPRET
from . import probing
from .marks import mark, note_original, original_of
from .probing import Match

KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What kernels take; their references take float64 too."""


def keeps_own_code(x: Any) -> bool:
    """Whether a patched part runs its own code for this input: where torch.jit or torch.fx traces or torch.func
    transforms, for dtypes that kernels do not take, and on the CPU.

    On the CPU no kernel runs, and the references of kernels take longer. They run where kernels are interpreted,
    activations recomputed, or LIGER_HW_CPU_REFERENCE is set.
    """
    if is_traced() or isinstance(x, torch.fx.Proxy):
        return True
    if x.is_cpu:
        return not (INTERPRET or recomputing() or _references_wanted())
    return x.dtype not in KERNEL_DTYPES


def is_traced() -> bool:
    """Whether torch.jit traces or torch.func transforms: it does so with a family's own code, never with kernels."""
    return torch.jit.is_tracing() or is_transformed()


def _references_wanted() -> bool:
    return env.get("LIGER_HW_CPU_REFERENCE")


# what torch.compiler.assume_constant_result does, without importing the compiler
_references_wanted._dynamo_marked_constant = True


def where_kernels_run(replacement: Callable, original: Callable) -> Callable:
    """A rotary function: `replacement` where kernels run, else `original`."""

    def function(*args, **kwargs):
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return (original if keeps_own_code(first) or first.is_nested else replacement)(*args, **kwargs)

    function.__signature__ = inspect.signature(replacement)
    return function


def guarded(
    match: Match, guards: probing.Guards, original: Callable, switch: list[bool], of_one_module: bool = False
) -> Callable:
    """A method that computes `match.replacement` in `original`'s place, with its argument's name.

    of_one_module: it is bound to live modules, and stands for their class's forward, which was `original`. A module may
    be given another class, or its class another method, which then runs.

    `original` itself runs for modules that do not meet `guards`, where the match is not ready for the input, where
    `keeps_own_code` says so, for nested tensors, when more or fewer arguments are given than the match takes, and once
    `switch` is empty.
    """
    replacement, ready = match.replacement, match.ready
    names = list(inspect.signature(original).parameters)
    instead = _forward_of_its_class if of_one_module else original

    def applies(self: Any, x: Any) -> bool:
        if not switch or keeps_own_code(x) or x.is_nested or (guards and not probing.holds(self, guards)):
            return False
        if of_one_module and _is_another(type(self).forward, original):
            return False
        return ready is None or ready(self, x)

    if match.inputs > 1:

        def forward(self, *args, **kwargs):
            inputs = (*args, *(kwargs[name] for name in names[1 + len(args) :] if name in kwargs))
            fits = len(inputs) == len(args) + len(kwargs) == match.inputs and all(t is not None for t in inputs)
            if not fits or not applies(self, inputs[0]):
                return instead(self, *args, **kwargs)
            return replacement(self, *inputs)

    elif match.takes is not None:
        by_place = [
            p.name for p in inspect.signature(original).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]

        def forward(self, *args, **kwargs):
            options = {**kwargs, **dict(zip(by_place[1:], args))}
            fits = len(options) == len(args) + len(kwargs)  # none is one too many, or given twice
            x = options.pop(names[1], None)
            if not fits or x is None or not match.takes(options) or not applies(self, x):
                return instead(self, *args, **kwargs)
            return replacement(self, x, **options)

    elif len(names) > 2:

        def forward(self, x, *args, **kwargs):
            if args or kwargs or not applies(self, x):
                return instead(self, x, *args, **kwargs)
            return replacement(self, x)

    else:

        def forward(self, x):
            return replacement(self, x) if applies(self, x) else instead(self, x)

    code = forward.__code__
    if (
        match.inputs == 1
        and match.takes is None
        and len(names) > 1
        and names[1] not in (*code.co_varnames, *code.co_freevars)
    ):
        # for callers who pass the input by keyword
        forward.__code__ = code.replace(co_varnames=(code.co_varnames[0], names[1], *code.co_varnames[2:]))
    if len(names) > 2:
        forward.__signature__ = inspect.signature(original)
    return forward


def _forward_of_its_class(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _is_another(current: Callable, original: Callable) -> bool:
    """Whether a class's method is neither `original` nor what a patch of the class put in its place."""
    return current is not original and original_of(current) is not original


def while_its_class_has(original: Callable, forward: Callable) -> Callable:
    """A live module's `forward` while `original` is its class's; when the class, or its forward, is another, that."""

    @functools.wraps(forward)
    def bound(self, *args, **kwargs):
        current = self.__class__.forward
        return (current if _is_another(current, original) else forward)(self, *args, **kwargs)

    return bound


def while_its_module_has(module: Any, name: str, original: Callable, function: Callable) -> Callable:
    """A rotary function in a live model's copy of a forward: `function` while `name` in the forward's module is what it
    is now, `original` or what the kernels package has made of it; when a program has put another there, that."""
    there = getattr(module, name)

    def current(*args, **kwargs):
        value = getattr(module, name)
        return (value if value is not there and _is_another(value, original) else function)(*args, **kwargs)

    current.__signature__ = inspect.signature(function)
    return current


def marked(
    function: Callable, part: str, kernel: str, original: Callable, switch: list[bool] | None = None
) -> Callable:
    """`function` under the names of what it replaces, with the mark of a patch."""
    function.__name__ = getattr(original, "__name__", function.__name__)
    function.__qualname__ = getattr(original, "__qualname__", function.__name__)
    function.__module__ = getattr(original, "__module__", function.__module__)
    function.__doc__ = original.__doc__
    mark(function, part, kernel, switch)
    note_original(function, original)
    return function
