"""A forward without its loop over experts: the same source, in which one call stands where the loop was.

transformers 4 has router, shared experts and a loop over the experts in one forward. Only the loop is to be replaced:

    expert_mask = one_hot(selected_experts, ...)                 dropped, since nothing else reads it
    final = zeros(...)                                           dropped likewise
    for expert in ...:                                           final = experts(self, hidden, selected, weights)
        ... self.experts[expert](hidden[...]) * weights[...]
        final.index_add_(...)

The source is only where the pieces are found. Whether the result computes the same is for a probe to say.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from typing import Any, Callable, Iterator, NamedTuple

_EXPERTS = "experts"
_CALL, _FACTORY = "_liger_hw_experts", "_liger_hw_factory"
_PURE = frozenset("len zeros zeros_like one_hot permute greater sum nonzero torch nn functional F".split())
"""Names in a call that may be dropped where its result is not read: they neither draw random numbers nor store."""


class CannotCut(Exception):
    """The message says why."""


class Cut(NamedTuple):
    """A forward whose loop is a call.

    with_experts: the forward, for a function of (self, hidden states, indices, weights); reads: attributes of self that
    the dropped statements read; lines: where the loop stood in the function's file
    """

    with_experts: Callable[[Callable], Callable]
    reads: frozenset[str]
    lines: range


def cuts(function: Callable) -> list[Cut]:
    """The forward in which a call stands for the loop over `self.experts`; one for each order of two of its inputs.

    Raises `CannotCut` where no such loop is found.
    """
    tree = _source(function)
    loops = [s for s in tree.body if isinstance(s, ast.For) and _uses_experts(s)]
    if len(loops) != 1 or any(_picks_an_expert(s) for s in tree.body if s not in loops):
        raise CannotCut("it has no single loop over its experts")
    (loop,) = loops
    position = tree.body.index(loop)
    mask, index = _mask_of(tree.body[:position])
    total = _total_of(loop)
    stored = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    picked = [n.value.id for n in ast.walk(loop) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)]
    inputs = sorted(set(picked) - stored - {mask})
    if len(inputs) != 2:
        raise CannotCut("its loop over experts does not take rows of two tensors")
    dropped, before = _without_unread(tree.body[:position], loop, tree.body[position + 1 :])
    reads = {n.attr for s in (*dropped, loop) for n in ast.walk(s) if _is_of_self(n)}
    lines = range(loop.lineno, loop.end_lineno + 1)
    found = []
    for hidden, weights in (inputs, inputs[::-1]):
        call = ast.parse(f"{total} = {_CALL}(self, {hidden}, {index}, {weights})").body
        body = [*before, *(ast.copy_location(s, loop) for s in call), *tree.body[position + 1 :]]
        found.append(Cut(_factory(function, tree, body), frozenset(reads), lines))
    return found


def _source(function: Callable) -> ast.FunctionDef:
    if inspect.unwrap(function) is not function or getattr(function, "__closure__", None):
        raise CannotCut("its forward is decorated")
    try:
        lines, first = inspect.getsourcelines(function)
        (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise CannotCut("the source of its forward is not there") from error
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        raise CannotCut("its forward is decorated")
    return ast.increment_lineno(tree, first - 1)


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _uses_experts(statement: ast.AST) -> bool:
    return any(_is_of_self(n) and n.attr == _EXPERTS for n in ast.walk(statement))


def _picks_an_expert(statement: ast.AST) -> bool:
    return any(isinstance(n, ast.Subscript) and _uses_experts(n.value) for n in ast.walk(statement))


def _mask_of(statements: list[ast.stmt]) -> tuple[str, str]:
    """(the mask's name, the name of what it is one for each of) of `mask = one_hot(index, ...)`."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and "one_hot" in _path(node) and node.args and _target(statement):
                if isinstance(node.args[0], ast.Name):
                    return _target(statement), node.args[0].id
    raise CannotCut("its loop over experts has no mask of the chosen ones")


def _total_of(loop: ast.For) -> str:
    """The name of what the loop adds every expert's rows to."""
    added = [
        n.value.id
        for n in ast.walk(loop)
        if isinstance(n, ast.Attribute) and n.attr == "index_add_" and isinstance(n.value, ast.Name)
    ]
    if len(added) != 1:
        raise CannotCut("its loop over experts adds up in a way that is not known")
    return added[0]


def _target(statement: ast.stmt) -> str:
    """The one name that a statement assigns to, or ""."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def _loaded(statements: list[ast.stmt]) -> set[str]:
    nodes = (n for s in statements for n in ast.walk(s))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _without_unread(
    before: list[ast.stmt], loop: ast.For, after: list[ast.stmt]
) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """(statements that only the loop needed, the others), among those before it.

    What the loop adds to is assigned by the call, so its first value is not read.
    """
    dropped: list[ast.stmt] = []
    wanted = _loaded([loop])
    total = _total_of(loop)
    for statement in reversed(before):
        others = [s for s in before if s is not statement and s not in dropped]
        target = _target(statement)
        read = _loaded(others) | (_loaded(after) - {total})
        if target in wanted and target not in read and _is_pure(statement):
            dropped.append(statement)
            wanted |= _loaded([statement])
    return dropped, [s for s in before if s not in dropped]


def _is_pure(statement: ast.Assign) -> bool:
    calls = [node for node in ast.walk(statement.value) if isinstance(node, ast.Call)]
    return all(name in _PURE for call in calls for name in _path(call))


def _path(call: ast.Call) -> Iterator[str]:
    """The names of a called function, as torch, nn, functional and one_hot; those on the result of another call."""
    node: Any = call.func
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    if isinstance(node, ast.Name) and node is call.func:
        yield node.id


def _factory(function: Callable, tree: ast.FunctionDef, body: list[ast.stmt]) -> Callable[[Callable], Callable]:
    """A function of the experts that gives the forward, with the original's globals, file and lines."""
    inner = copy.deepcopy(tree)
    inner.body, inner.returns = body, None
    for argument in ast.walk(inner.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    outer = ast.parse(f"def {_FACTORY}({_CALL}):\n    pass\n    return {tree.name}")
    outer.body[0].body[0] = inner
    module = ast.fix_missing_locations(outer)
    made: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, made)
    return made[_FACTORY]
