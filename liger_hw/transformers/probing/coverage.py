"""Branches that a probe took: what a module computes where none of its probes went is not known.

A module is recognised by runs on a few inputs. Its code may turn off the way on others: of another length or dtype, in
another mode. So every probe is watched, instruction by instruction. A condition that went one way only in all of them
is reported, unless it asks for what a guard holds (guards.py): attributes of the module alone.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import os
import sys
import sysconfig
import types
from typing import Any, NamedTuple

import torch

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OTHERS = tuple(os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), _HERE))
"""Folders of code that is known: torch and liger_hw. They end in a separator, so that torchvision's is another."""
_AUTOCAST = frozenset({"torch", "amp", "autocast", "is_autocast_enabled", "get_autocast_dtype", "nullcontext"})
_CONTEXTS = (torch, torch.amp, torch.autocast, contextlib, contextlib.nullcontext)
"""Names and objects of a function that does no more than choose how autocast is entered."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_LOOK_UPS = ("LOAD_ATTR", "LOAD_METHOD")
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_UNGUARDED = frozenset({"training"})
"""Attributes of a module that no guard holds."""
_SIZES = frozenset({"numel", "shape"})
"""What a tensor is asked for its size."""
_NO_BACKEND = "mps"
"""A kind of device on which no kernel of liger_hw runs, so that its modules always run their own forward there."""


class Coverage:
    """A context manager under which Python code is watched; it may be entered many times. `unexplored` has the answer.

    always: local variables of the first function that is called which cannot be otherwise when the kernel runs
    given: those which are not None when it runs, and may be anything else
    compared: attributes of the module with which its loop compares its numbers, such as how many experts there are
    """

    def __init__(
        self,
        function: Any,
        always: frozenset[str] = frozenset(),
        given: frozenset[str] = frozenset(),
        compared: frozenset[str] = frozenset(),
    ) -> None:
        self.compared = compared
        self.always = {getattr(function, "__code__", None): always}
        self.given = {getattr(function, "__code__", None): given}
        self.ways: dict[types.CodeType, set[tuple[int, int]]] = {}
        self.scopes: dict[types.CodeType, _Scope] = {}
        self._before: list[Any] = []

    def __enter__(self) -> "Coverage":
        self._before.append(sys.gettrace())
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before.pop())

    def _called(self, frame: types.FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if _is_known(code):
            return None
        if code.co_name in ("__getattr__", "__getattribute__"):  # a configuration's: guards hold what it answers
            return None
        if code.co_name == "__getitem__" and isinstance(
            frame.f_locals.get("self"), dict
        ):  # a table's: by the key alone
            return None
        if _enters_autocast_alone(frame):  # which does nothing where autocast is off and stays off
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        ways, last = self.ways.setdefault(code, set()), -1
        self.scopes.setdefault(code, _Scope(frame.f_globals, frame.f_locals.get("self")))

        def step(frame: types.FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "opcode":
                ways.add((last, frame.f_lasti))
                last = frame.f_lasti
            return step

        return step

    def unexplored(self, of: types.CodeType | None = None, lines: range | None = None) -> str:
        """A branch that went one way only, in words, or "" when there is none that matters.

        of: the one function whose branches matter; lines: those of its file that do; default all
        """
        for code, ways in self.ways.items():
            if of not in (None, code):
                continue
            steps = list(dis.get_instructions(code))
            for i, step in enumerate(steps):
                taken = {after for before, after in ways if before == step.offset}
                if "_IF_" not in step.opname or len(taken) != 1 or self._is_guarded(code, _condition(steps, i)):
                    continue
                if lines is not None and _line(steps, i) not in lines:
                    continue
                if _asks_for_none(steps, i) in self.given.get(code, ()):
                    continue
                if _is_settled(_condition(steps, i)) or self._is_compared(_condition(steps, i)):
                    continue
                if not _raises(steps, {step.argval, steps[i + 1].offset} - taken):
                    return f"line {_line(steps, i)} of {os.path.basename(code.co_filename)} may take another branch"
        return ""

    def _is_compared(self, condition: list[dis.Instruction]) -> bool:
        """Whether a condition compares a local variable with such an attribute of the module and asks nothing else, or
        asks whether a tensor is empty: where that can be, the probes of experts have been there."""
        steps = [step for step in condition if step.opname not in ("NOP", "CACHE", "PRECALL", "PUSH_NULL", "TO_BOOL")]
        attributes = {step.argval for step in steps if step.opname in _LOOK_UPS}
        constants = {step.argval for step in steps if step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))}
        compares = bool(steps) and steps[-1].opname == "COMPARE_OP"
        if not self.compared or not attributes or not compares:
            return False
        if attributes <= _SIZES and constants == {0}:
            return True
        return attributes <= self.compared and not any(step.opname.startswith("CALL") for step in steps)

    def _is_guarded(self, code: types.CodeType, condition: list[dis.Instruction]) -> bool:
        """Whether a condition reads attributes of the module alone, or constants; methods that it calls, too."""
        me = code.co_varnames[0] if code.co_argcount and code.co_varnames[0] == "self" else None
        known = {me, *self.always.get(code, ())}
        read: set[Any] = set()
        for step in condition:
            if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
                read.update(step.argval if isinstance(step.argval, tuple) else (step.argval,))
        calls = any(step.opname.startswith("CALL") for step in condition)
        alone = read <= known and (bool(read) or not calls)
        return alone and not _asks_elsewhere(condition, self.scopes[code], set())


def _is_known(code: types.CodeType) -> bool:
    """Whether a function is torch's, liger_hw's or Python's own."""
    file = code.co_filename
    return file.startswith((*_OTHERS, "<frozen")) or (file.startswith(_LIBRARY) and "-packages" not in file)


class _Scope(NamedTuple):
    """Where the names of a function are looked up: its globals, and what `self` is in it."""

    names: dict[str, Any]
    me: Any


def _asks_elsewhere(steps: list[dis.Instruction], scope: _Scope, done: set[types.CodeType]) -> bool:
    """Whether instructions ask for what no guard holds: the mode, a global's value, or what code that is known answers.

    Methods and properties of self and functions are followed. Classes, dtypes and builtins do not change.
    """
    steps = [step for step in steps if step.opname != "EXTENDED_ARG"]
    for i, step in enumerate(steps):
        code, where = None, scope
        if step.opname == "IMPORT_NAME" or (step.argval in _UNGUARDED and step.opname != "LOAD_CONST"):
            return True
        if isinstance(step.argval, types.CodeType):  # a generator or lambda
            code = step.argval
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if step.argval not in scope.names and hasattr(builtins, step.argval):
                continue
            value = scope.names.get(step.argval)
            for after in steps[i + 1 :]:
                if not isinstance(value, types.ModuleType) or after.opname not in _LOOK_UPS:
                    break
                value = getattr(value, after.argval, None)
            if isinstance(value, (type, torch.dtype)):
                continue
            if not isinstance(value, types.FunctionType):
                return True
            code, where = value.__code__, _Scope(value.__globals__, None)
        elif step.opname in _LOOK_UPS and i and _names(steps[i - 1])[-1] == "self":
            member = inspect.getattr_static(scope.me, step.argval, None)
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not isinstance(member, types.FunctionType):
                continue
            code, where = member.__code__, _Scope(member.__globals__, scope.me)
        if code is None or code in done:
            continue
        done.add(code)
        if _is_known(code) or _asks_elsewhere(list(dis.get_instructions(code)), where, done):
            return True
    return False


def _enters_autocast_alone(frame: types.FrameType) -> bool:
    """Whether a function can do no more than choose one of torch's autocast contexts, or none.

    It is given no tensor, and all that it names is torch's autocast, `nullcontext`, flags and exceptions.
    """
    names = frame.f_code.co_names
    if "autocast" not in names or any(isinstance(value, torch.Tensor) for value in frame.f_locals.values()):
        return False
    for name in names:
        known = frame.f_globals.get(name, getattr(builtins, name, None))
        if known is None:  # an attribute, or imported here
            harmless = name in _AUTOCAST
        else:
            is_exception = isinstance(known, type) and issubclass(known, Exception)
            harmless = is_exception or isinstance(known, bool) or any(known is one for one in _CONTEXTS)
        if not harmless:
            return False
    return True


def _asks_for_none(steps: list[dis.Instruction], jump: int) -> str | None:
    """The local variable of which a conditional jump asks only whether it is None; nothing where it is assigned to."""
    condition = [step for step in _condition(steps, jump) if not step.opname.startswith(("NOP", "CACHE"))]
    load, *rest = condition or [steps[jump]]
    by_jump = not rest and steps[jump].opname.endswith(("_IF_NONE", "_IF_NOT_NONE"))
    by_value = [step.opname for step in rest] == ["LOAD_CONST", "IS_OP"] and rest[0].argval is None
    if not load.opname.startswith("LOAD_FAST") or not (by_jump or by_value):
        return None
    stored = any(step.opname.startswith("STORE_FAST") and load.argval in _names(step) for step in steps)
    return None if stored else load.argval


def _is_settled(condition: list[dis.Instruction]) -> bool:
    """Whether a condition has the same answer wherever kernels run.

    It compares a device's kind with the one that has no backend, or asks what torch has: `hasattr(torch, "...")`.
    """
    steps = [step for step in condition if step.opname not in ("NOP", "CACHE", "PRECALL", "PUSH_NULL", "TO_BOOL")]
    named = [step.argval for step in steps]
    if len(steps) == 5 and steps[-1].opname == "COMPARE_OP":
        return named[1:4] == ["device", "type", _NO_BACKEND]
    return len(steps) == 4 and named[:2] == ["hasattr", "torch"] and steps[2].opname == "LOAD_CONST"


def _names(step: dis.Instruction) -> tuple[Any, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _raises(steps: list[dis.Instruction], other: set[int]) -> bool:
    """Whether the way that was not taken does nothing but raise."""
    for step in steps:
        if other and step.offset >= min(other):
            if step.opname == "RAISE_VARARGS":
                return True
            if step.opname.startswith(("RETURN", "STORE", "FOR", "JUMP")) or "_IF_" in step.opname:
                return False
    return False


def _condition(steps: list[dis.Instruction], jump: int) -> list[dis.Instruction]:
    """The instructions that compute what a conditional jump asks; before Python 3.11, those of its line.

    In `a or not b` the compiler gives the jump of b the position of a. Where a jump's position ends before the jump,
    what comes after the jump before it is taken.
    """
    at = getattr(steps[jump], "positions", None)
    if at is None or at.lineno is None:
        start = jump
        while start and not steps[start].starts_line:
            start -= 1
        return steps[start:jump]
    first, last = (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)
    inside = []
    for step in steps[:jump]:
        where = step.positions
        if where is not None and where.lineno is not None:
            if first <= (where.lineno, where.col_offset) and (where.end_lineno, where.end_col_offset) <= last:
                inside.append(step)
    if inside and inside[-1] is not steps[jump - 1]:
        before = [i for i in range(jump) if steps[i].opcode in _JUMPS]
        return steps[before[-1] + 1 : jump] if before else steps[:jump]
    return inside


def _line(steps: list[dis.Instruction], index: int) -> int | None:
    lines = [step.starts_line for step in steps[: index + 1] if step.starts_line]
    at = getattr(steps[index], "positions", None)
    return at.lineno if at is not None else lines[-1] if lines else None
