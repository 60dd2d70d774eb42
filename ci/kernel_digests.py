"""Digests of the code of every kernel, recorded in tests/kernel_digests.json: has a kernel changed since its version?

    python ci/kernel_digests.py            record the digest and the version of every kernel as they are now

A stored launch configuration is valid for one `version` of its Tunable. Whoever changes a kernel decides whether
what was measured for it still holds, and raises the version where it does not. A test compares the recorded digests
with the code, so that a kernel cannot change without that decision.

A digest covers the kernel and every function and constant that it reaches, found by following the names in its source.
It does not depend on how the code is written: local and function names, comments, docstrings, layout, type annotations
and the module a helper lives in are normalised away.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import json
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, Iterable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from liger_hw import registry
from liger_hw.registry import Tunable
from liger_hw.runtime.triton_import import Placeholder

RECORD = ROOT / "tests" / "kernel_digests.json"
COMMAND = "python ci/kernel_digests.py"
_BUILTINS = frozenset(dir(builtins))
_OUR_CODE = "liger_hw."


def recorded() -> dict[str, dict[str, Any]]:
    """Name of a tunable -> its version and its digest when they were last recorded."""
    return json.loads(RECORD.read_text())


def current(tunables: Iterable[Tunable]) -> dict[str, dict[str, Any]]:
    """Name of a tunable -> its version and its digest in this checkout."""
    return {one.name: {"version": one.version, "digest": digest(one.kernels)} for one in tunables}


def changed(record: dict[str, dict[str, Any]], tunables: Iterable[Tunable]) -> list[str]:
    """The tunables whose code has another digest than recorded, though they still have the recorded version."""
    return [
        name
        for name, now in current(tunables).items()
        if name in record and now["version"] == record[name]["version"] and now["digest"] != record[name]["digest"]
    ]


def main() -> int:
    now = current(registry.tunables().values())
    lines = [f"{json.dumps(name)}: {json.dumps(now[name])}" for name in sorted(now)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{RECORD.relative_to(ROOT)}: {len(now)} kernels")
    return 0


def digest(kernels: Iterable[Any]) -> str:
    """16 hexadecimal digits for the call closure of some jit functions.

    Raises `OSError` where the source of a function cannot be read.
    """
    known: dict[Any, int] = {}
    texts: list[str] = []
    for kernel in kernels:
        _visit(getattr(kernel, "fn", kernel), known, texts)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _function(value: Any) -> types.FunctionType | None:
    """The Python function behind a jit function of ours, or None for anything else."""
    function = getattr(value, "fn", value)
    ours = isinstance(function, types.FunctionType) and f"{function.__module__}.".startswith(_OUR_CODE)
    return function if ours or (function is not value and isinstance(function, types.FunctionType)) else None


def _visit(function: types.FunctionType, known: dict[Any, int], texts: list[str]) -> int:
    """Add the normalised source of `function`, and of what it calls, to `texts`; returns its number."""
    if function in known:
        return known[function]
    number = known[function] = len(known)
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    tree = _Normalise(scope, known, texts).visit(definition)
    tree.name, tree.decorator_list, tree.returns = "function", [], None
    texts.append(f"{number}: {ast.unparse(ast.fix_missing_locations(tree))}")
    return number


class _Normalise(ast.NodeTransformer):
    """Gives locals the names v0, v1, ... in order of appearance, functions their numbers, constants their values."""

    def __init__(self, scope: dict[str, Any], known: dict[Any, int], texts: list[str]) -> None:
        self.scope, self.known, self.texts = scope, known, texts
        self.locals: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        annotation = ast.unparse(node.annotation) if node.annotation else ""
        constant = "constexpr" in annotation
        return ast.arg(self._local(node.arg), ast.Name("constexpr", ast.Load()) if constant else None)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if "constexpr" in ast.unparse(node.annotation) or node.value is None:
            return self.generic_visit(node)
        return self.visit(ast.Assign([node.target], node.value))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.locals or isinstance(node.ctx, ast.Store) or node.id not in self.scope:
            return ast.Name(self._local(node.id) if node.id not in _BUILTINS else node.id, node.ctx)
        value = self.scope[node.id]
        function = _function(value)
        if function is not None:
            return ast.Name(f"function{_visit(function, self.known, self.texts)}", node.ctx)
        if isinstance(value, (types.ModuleType, Placeholder)):
            return ast.Name(value.__name__, node.ctx)
        value = getattr(value, "value", value)  # a tl.constexpr
        return ast.Constant(value) if isinstance(value, (bool, int, float, str, type(None))) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = _function(self.scope.get(node.func.id)) if isinstance(node.func, ast.Name) else None
        if function is not None:  # arguments given by name, by their place
            by_name = {keyword.arg: keyword for keyword in node.keywords}
            for name in list(inspect.signature(function).parameters)[len(node.args) :]:
                if name not in by_name:
                    break
                node.keywords.remove(by_name[name])
                node.args.append(by_name[name].value)
        return self.generic_visit(node)

    def _local(self, name: str) -> str:
        return self.locals.setdefault(name, f"v{len(self.locals)}")


if __name__ == "__main__":
    sys.exit(main())
