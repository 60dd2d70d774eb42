"""Reads a forward's source code for the attributes that it reads and the branches that it may take.

A module is recognised by its results on a few inputs. On others (of another length, dtype or device) its code may take
other branches. So conditions in its source, and in functions that it calls, may depend only on attributes of the
module, which guards compare (replacing.py), and on `training`, both values of which are probed. `open_branch` names the
first other condition. A module whose source cannot be read is left alone.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import sys
import types
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from ..distributed.owners import closure_of
from .marks import original_of


class NoSource(Exception):
    """The source of a function cannot be read; the message names it."""


@functools.lru_cache(maxsize=4096)
def tree_of(code: types.CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The syntax tree of one function, with the line numbers of its file. Raises `NoSource`."""
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError):
        raise NoSource(f"the source of {code.co_name} cannot be found") from None
    try:
        tree = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text)
        functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        function = next(node for node in functions if node.name == code.co_name)
    except (SyntaxError, ValueError, StopIteration):  # e.g. a lambda, on whose lines there is other code
        raise NoSource(f"the source of {code.co_name} cannot be separated from other code on its lines") from None
    return ast.increment_lineno(function, code.co_firstlineno - function.lineno)


@functools.lru_cache(maxsize=4096)
def passes_self_on(code: types.CodeType) -> bool:
    """Whether a method uses self for more than reading its attributes, or has no source."""
    me = code.co_varnames[0] if code.co_argcount else None
    try:
        tree = tree_of(code)
    except NoSource:
        return True
    looked_up = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == me)
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.Lambda, ast.FunctionDef)) and n is not tree]
    inner = any(isinstance(n, ast.Name) and n.id == me for function in functions for n in ast.walk(function))
    return inner or any(id(node) not in looked_up for node in names)


# -- what a forward reads --------------------------------------------------------------------------------------------

EVERYTHING = "*"
"""Stands for all attributes in the result of `reads`."""
OF_CONFIG = "config."
"""Prefix of names of a config's attributes in the result of `reads`."""


def reads(cls: type, function: Callable) -> frozenset[str]:
    """Names of attributes of self that `function`, the methods that it names and the functions that it wraps may read.

    Names of attributes of self's config have the prefix `config.`. `EVERYTHING` is among the names if self is passed to
    other code, which may read any attribute.
    """
    seen: set[str] = set()
    waiting: list[Any] = [function]
    done: set[types.CodeType | None] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, property):
            item = item.fget
        while item is not None:
            code = getattr(item, "__code__", None)
            names = frozenset() if code is None or code in done else _names_in(code)
            done.add(code)
            seen |= names
            if "config" in names or (code is not None and "config" in code.co_varnames):
                seen |= {OF_CONFIG + name for name in names}
            if code is not None and not hasattr(item, "__wrapped__") and passes_self_on(code):
                seen.add(EVERYTHING)
            inherited = "super" in names or "__class__" in names
            for name in (names | {item.__name__}) if inherited else names:
                for base in cls.__mro__ if inherited else ():
                    method = vars(base).get(name)
                    if isinstance(method, types.FunctionType) and base is not nn.Module:
                        waiting.append(method)
                member = inspect.getattr_static(cls, name, None)
                if isinstance(member, (types.FunctionType, property)) and not hasattr(nn.Module, name):
                    waiting.append(member)
            item = getattr(item, "__wrapped__", None)
    return frozenset(seen)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)  # getattr(self, "name")
    return frozenset(names)


# -- branches --------------------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """Facts that hold in every call that runs a kernel, and the probes' coverage.

    present: arguments that are not None; absent: arguments that have their defaults
    compared: attributes that a loop over experts compares with numbers, such as the number of experts
    skipped: attributes whose code is not read, since probes replace it; in_autocast: probed also under autocast
    dims: numbers of dimensions of the probes' inputs; dtypes: whether the probes use every dtype of kernels
    """

    present: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    compared: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    in_autocast: bool = False
    dims: frozenset[int] = frozenset()
    dtypes: bool = False


def open_branch(function: Callable, module: nn.Module | None, facts: Facts) -> str:
    """Why a function, or method of `module`, may take a branch on other inputs that no probe took; "" if it cannot."""
    waiting: list[tuple[Any, Any, Facts]] = [(function, module, facts)]
    done: set[tuple[types.CodeType, int]] = set()
    while waiting:
        function, owner, known = waiting.pop()
        function = original_of(function)
        code = getattr(function, "__code__", None)
        if code is None or (code, id(owner)) in done or _is_known(function):
            continue
        done.add((code, id(owner)))
        try:
            reader, tree = _Reader(function, owner, known), tree_of(code)
            for node in tree.body:
                reader.visit(node)
        except NoSource as error:
            return str(error)
        if reader.reason:
            return reader.reason
        others = Facts(skipped=facts.skipped, in_autocast=facts.in_autocast)
        waiting += [(called, its_owner, others) for called, its_owner in reader.called]
    return ""


_KNOWN_MODULES = {"torch", "liger_hw", *sys.stdlib_module_names}
_KNOWN_FUNCTIONS = {
    ("transformers.utils.generic", "maybe_autocast"): "its branch depends on torch's autocast, which it enters",
    ("transformers.models.llama4.modeling_llama4", "reshape_for_broadcast"): "its branch depends on dimensions only",
}
"""Function -> why its branches need not be checked."""
_NO_BACKEND = "mps"
"""A device type without kernels, on which original forwards run."""
_DATA = (bool, int, float, complex, list, set, dict, torch.Tensor)
"""Types of global variables that a program may change after probing, and that no guard compares."""
_PURE = {isinstance, issubclass, hasattr, getattr, len, type, callable, bool, int, float, str}
"""Builtins whose results depend only on their arguments."""
_AUTOCAST = ("is_autocast_enabled", "get_autocast_dtype")


def _is_known(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in _KNOWN_MODULES or (module, function.__name__) in _KNOWN_FUNCTIONS


class _Reader(ast.NodeVisitor):
    """Reads one function. reason: why it may take another branch, or ""; called: (function, its self or None) for each
    function that its code names."""

    def __init__(self, function: Any, owner: Any, facts: Facts) -> None:
        self.function, self.owner, self.facts = function, owner, facts
        self.code = function.__code__
        self.names = {**vars(builtins), **function.__globals__, **closure_of(function)}
        self.me = self.code.co_varnames[0] if owner is not None and self.code.co_argcount else None
        parameters = inspect.signature(function, follow_wrapped=False).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        self.values = {name: defaults[name] for name in facts.absent & defaults.keys()}
        if self.me:
            self.values[self.me] = owner
        calls = [node for node in ast.walk(tree_of(self.code)) if isinstance(node, ast.Call) and node.args]
        self.called_with_self = {ast.unparse(call.func) for call in calls if self._is_self(call.args[0])}
        self.reason = ""
        self.called: list[tuple[Any, Any]] = []
        self.tables: set[int] = set()  # ids of nodes that name a dict of functions, such as ACT2FN

    def visit(self, node: ast.AST) -> None:
        if not self.reason:
            super().visit(node)

    # -- conditions --

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        branches = [branch if isinstance(branch, list) else [branch] for branch in (node.body, node.orelse)]
        decided = self._decided(node.test)
        if decided is not None:
            branches = [branches[not decided]]
        elif not self._is_settled(node.test):
            # a branch that only raises returns no other result
            branches = [lines for lines in branches if not lines or not all(isinstance(n, ast.Raise) for n in lines)]
            if len(branches) > 1:
                self._refuse(node.test)
        for branch in branches:
            for line in branch:
                self.visit(line)

    visit_IfExp = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for number, value in enumerate(node.values):
            self.visit(value)
            if number + 1 == len(node.values):
                return
            decided = self._decided(value)
            if decided is isinstance(node.op, ast.Or):  # Python does not evaluate the rest
                return
            if decided is None and not self._is_settled(value):
                self._refuse(value)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._refuse(test)
        self.generic_visit(node)

    def _refuse(self, node: Any) -> None:
        file = os.path.basename(self.code.co_filename)
        self.reason = self.reason or f"line {node.lineno} of {file} may take another branch"

    visit_While = visit_Try = visit_Match = _refuse

    def _decided(self, test: ast.expr) -> bool | None:
        """The value of a condition in all modules that meet the guards; None if it is unknown."""
        if isinstance(test, ast.BoolOp):
            answers = [self._decided(value) for value in test.values]
            decisive = isinstance(test.op, ast.Or)
            known = [answer for answer in answers if answer is not None]
            return decisive if decisive in known else None if len(known) < len(answers) else not decisive
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            answer = self._decided(test.operand)
            return None if answer is None else not answer
        is_comparison = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot))
        if is_comparison and isinstance(test.left, ast.Name) and test.left.id in self.facts.present:
            if isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None:
                return isinstance(test.ops[0], ast.IsNot)
        if not self._is_settled(test) or _tests_for_mode(test):
            return None
        try:
            return bool(self._value(test))
        except Exception:  # an attribute that is not there yet
            return None

    def _value(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), self.code.co_filename, "eval"), {**self.names, **self.values})

    def _is_settled(self, node: ast.expr) -> bool:
        """Whether an expression depends only on attributes of the module, `training`, constants and classes."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return node.id in self.values or isinstance(self._named(node), (type, torch.dtype))
        if isinstance(node, ast.Attribute):
            if isinstance(self._named(node), (type, torch.dtype)) or (self.facts.dtypes and node.attr == "dtype"):
                return True
            if not self._is_settled(node.value):
                return False
            return not isinstance(self._member(node), property)
        if isinstance(node, ast.Call):
            if self._named(node.func) is hasattr and isinstance(self._named(node.args[0]), types.ModuleType):
                return True
            if not all(map(self._is_settled, (*node.args, *(keyword.value for keyword in node.keywords)))):
                return False
            if isinstance(node.func, ast.Attribute):
                if node.func.attr in _AUTOCAST and isinstance(self._named(node.func.value), types.ModuleType):
                    return self.facts.in_autocast
                is_method = isinstance(node.func.value, ast.Name) and node.func.value.id == self.me
                return not is_method and self._is_settled(node.func.value)  # a method of an attribute, e.g. of a string
            return any(self._named(node.func) is builtin for builtin in _PURE)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            if self._compares_experts(node) or self._compares_dims(node) or _tests_for_no_backend(node):
                return True
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        kinds = ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Tuple, ast.List, ast.Set, ast.Subscript, ast.IfExp
        return isinstance(node, kinds) and all(map(self._is_settled, parts))

    def _compares_experts(self, node: ast.Compare) -> bool:
        """Whether a condition compares a number with an attribute of `compared`, or tests for an empty tensor: the
        experts' probes take both branches."""
        if not self.facts.compared:
            return False
        words, right = ast.unparse(node.left), node.comparators[0]
        if isinstance(right, ast.Constant) and right.value == 0:
            return words.endswith((".numel()", ".shape[0]", ".size(0)"))
        attributes = {n.attr for side in (node.left, right) for n in ast.walk(side) if isinstance(n, ast.Attribute)}
        calls = any(isinstance(n, ast.Call) for side in (node.left, right) for n in ast.walk(side))
        return bool(attributes) and attributes <= self.facts.compared and not calls

    def _compares_dims(self, node: ast.Compare) -> bool:
        """Whether a condition compares a tensor's number of dimensions with one that the probes' inputs have."""
        right, left = node.comparators[0], ast.unparse(node.left)
        assigned = [
            ast.unparse(line.value)
            for line in ast.walk(tree_of(self.code))
            if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == [left]
        ]
        counted = assigned[0] if len(assigned) == 1 else left
        is_dims = counted.endswith((".ndim", ".dim()")) or (counted.startswith("len(") and counted.endswith(".shape)"))
        return is_dims and isinstance(right, ast.Constant) and right.value in self.facts.dims

    # -- names and calls --

    def visit_Call(self, node: ast.Call) -> None:
        called, is_clear = node.func, isinstance(node.func, ast.Attribute)
        if isinstance(called, ast.Name):
            inner = {n.name for n in ast.walk(tree_of(self.code)) if isinstance(n, ast.FunctionDef)}
            is_clear = called.id in inner or (called.id in self.names and not self._is_local(called.id))
        elif isinstance(called, ast.Subscript):  # ACT2FN[self.activation](x)
            is_clear = isinstance(self._named(called.value), dict) and self._is_settled(called.slice)
            if is_clear:
                self._add(self._value(called), None)
                self.tables.add(id(called.value))
        if not is_clear:
            self.reason = self.reason or f"it calls {ast.unparse(called)}, which its source does not define"
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            value = self._named(node)
            if value is self.function.__globals__.get(node.id) and id(node) not in self.tables:
                self._refuse_data(node, value)
            self._add(value, self.owner if node.id in self.called_with_self else None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base = node.value
        if isinstance(base, ast.Name) and base.id == self.me:
            if node.attr in self.facts.skipped:
                return
            member = self._member(node)
            self._add(member.fget if isinstance(member, property) else member, self.owner)
            self._add(vars(self.owner).get(node.attr), self.owner)
            self._add(getattr(self.owner, "_modules", {}).get(node.attr), None)
        elif isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super":
            for cls in type(self.owner).__mro__:
                self._add(vars(cls).get(node.attr), self.owner)
        elif isinstance(module := self._named(base), types.ModuleType):
            if module.__name__.partition(".")[0] not in _KNOWN_MODULES:  # DeepSpeed replaces torch's F.linear
                self._refuse_data(node, self._named(node))
                self._add(self._named(node), None)
        self.generic_visit(node)

    def _refuse_data(self, node: ast.expr, value: Any) -> None:
        """Refuse a global variable. An attribute of the module would be compared by a guard."""
        if isinstance(value, _DATA):
            name = ast.unparse(node)
            reason = f"it reads the global variable {name}, which a program may change; keep it on the module"
            self.reason = self.reason or reason

    def _add(self, value: Any, owner: Any) -> None:
        """Add the Python functions that a call of `value` runs to `called`."""
        value = original_of(value)
        if isinstance(value, (staticmethod, classmethod)):
            value, owner = value.__func__, None
        if isinstance(value, functools.partial):
            value, owner = value.func, None
        if isinstance(value, types.MethodType):
            value, owner = value.__func__, value.__self__
        if isinstance(value, nn.Module):
            self.called += [(type(part).forward, part) for part in value.modules()]
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            self.called.append((value.forward, None))
        elif isinstance(value, types.FunctionType):
            self.called.append((value, owner))
        elif isinstance(call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
            self.called.append((call, value))

    def _named(self, node: ast.expr) -> Any:
        """The value of a name from outside the function, or of an attribute of a Python module; else None."""
        if isinstance(node, ast.Name):
            return None if self._is_local(node.id) else self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._named(node.value)
            return getattr(base, node.attr, None) if isinstance(base, types.ModuleType) else None
        return None

    def _is_self(self, argument: ast.expr) -> bool:
        """Whether an argument is self, or `*args` of a decorator's wrapper, which begins with self."""
        if isinstance(argument, ast.Starred) and not self.code.co_argcount:
            return True
        return isinstance(argument, ast.Name) and argument.id == self.me

    def _is_local(self, name: str) -> bool:
        return name in self.code.co_varnames or name in self.code.co_cellvars

    def _member(self, node: ast.Attribute) -> Any:
        """The class's attribute for an attribute of self; None for other attributes."""
        is_of_self = isinstance(node.value, ast.Name) and node.value.id == self.me
        return inspect.getattr_static(type(self.owner), node.attr, None) if is_of_self else None


def _tests_for_mode(test: ast.expr) -> bool:
    """Whether a condition reads `training` or autocast, for which both values are probed."""
    return any(isinstance(n, ast.Attribute) and n.attr in ("training", *_AUTOCAST) for n in ast.walk(test))


def _tests_for_no_backend(test: ast.Compare) -> bool:
    right = test.comparators[0]
    kind = isinstance(test.left, ast.Attribute) and ast.unparse(test.left).endswith(".device.type")
    return kind and isinstance(right, ast.Constant) and right.value == _NO_BACKEND
