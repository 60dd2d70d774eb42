"""Changes to Triton's interpreter for the tests: maxima as on a device, and less Python around numpy's arithmetic.

`faster` replaces functions of Triton by name. It leaves a Triton older than 3.7 as it is.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy
import pytest
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter


def maxima_of_a_device(patch: pytest.MonkeyPatch) -> None:
    """`tl.maximum` and `tl.minimum` drop NaN, as on devices; the interpreter keeps it up to 3.7."""
    for name, drops in (("create_maxnumf", numpy.fmax), ("create_minnumf", numpy.fmin)):
        operation = functools.partialmethod(interpreter.InterpreterBuilder.binary_op, op=drops)
        patch.setattr(interpreter.InterpreterBuilder, name, operation)


def faster(patch: pytest.MonkeyPatch) -> None:
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    _replace_language_once(patch)
    _keep_types(patch)
    # the check computes each sum and product of int32 again in int64
    builder = interpreter.interpreter_builder
    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug))


def _replace_language_once(patch: pytest.MonkeyPatch) -> None:
    """A launch replaces the functions of `triton.language`, and so does every call of a device function inside it.

    Here such a call replaces only those that its launch and earlier calls have not. Triton restores those that a launch
    replaced, not those of a device function.
    """
    replace_language = interpreter._patch_lang
    by_launch: list[frozenset[str]] = []  # of the launch in progress: launches take turns
    by_functions: set[str] = set()

    class Scope:
        def __init__(self, scope) -> None:
            self.scope = scope

        def restore(self) -> None:
            by_launch.pop()
            self.scope.restore()

    @functools.cache
    def languages_in(function):
        return frozenset(v.__name__ for v in function.__globals__.values() if v is tl or v is tl.core)

    def replace(function):
        seen = languages_in(function)
        if not by_launch:
            scope = Scope(replace_language(function))
            by_launch.append(seen)
            return scope
        if not seen <= by_launch[-1] | by_functions:
            replace_language(function)
            by_functions.update(seen)
        return None

    patch.setattr(interpreter, "_patch_lang", replace)


def _keep_types(patch: pytest.MonkeyPatch) -> None:
    """The types of operands, their shapes as constexprs and the table of numpy's dtypes are made only once.

    Equal shapes are then one object, and operands with the same one need no broadcast.
    """
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast, find_dtype = semantic.TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
    types: dict[tuple, dict] = {}
    shapes: dict[tuple, tuple] = {}
    dtypes: dict[str, numpy.dtype] = {}

    def block_type(self, element_ty, shape):
        key = element_ty.name, *shape
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__ | {"sizes": tuple(self.shape)}
        self.__dict__ = types[key]

    def tensor(self, handle, type):
        sizes = type.sizes if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def broadcast_of_two(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def dtype_of(type):
        if type.name not in dtypes:
            dtypes[type.name] = find_dtype(type)
        return dtypes[type.name]

    patch.setattr(tl.block_type, "__init__", block_type)
    patch.setattr(tl.tensor, "__init__", tensor)
    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_of_two)
    patch.setattr(interpreter, "_get_np_dtype", dtype_of)
