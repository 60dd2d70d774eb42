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
from typing import Any, Callable, NamedTuple

_EXPERTS = "experts"
_CALL, _FACTORY = "_liger_hw_experts", "_liger_hw_factory"
_PURE = frozenset("len zeros zeros_like one_hot permute greater sum nonzero".split())
"""Calls that may be dropped where their result is not read: they neither draw random numbers nor store."""


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
    place = tree.body.index(loop)
    before, after = tree.body[:place], tree.body[place + 1 :]
    mask, index = _mask_of(before)
    total = _total_of(loop)
    picked = {n.value.id for n in ast.walk(loop) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)}
    inputs = sorted(picked - _names([loop], ast.Store) - {mask})
    if len(inputs) != 2:
        raise CannotCut("its loop over experts does not take rows of two tensors")
    # What the loop adds to is assigned by the call, so its first value is not read.
    kept, dropped = _needed(before, {*inputs, index} | (_names(after, ast.Load) - {total}))
    reads = frozenset(n.attr for s in (*dropped, loop) for n in ast.walk(s) if _is_of_self(n))
    found = []
    for hidden, weights in (inputs, inputs[::-1]):
        (call,) = ast.parse(f"{total} = {_CALL}(self, {hidden}, {index}, {weights})").body
        body = [*kept, ast.copy_location(call, loop), *after]
        found.append(Cut(_factory(function, tree, body), reads, range(loop.lineno, loop.end_lineno + 1)))
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


# -- finding the pieces ----------------------------------------------------------------------------------------------


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _uses_experts(statement: ast.AST) -> bool:
    return any(_is_of_self(n) and n.attr == _EXPERTS for n in ast.walk(statement))


def _picks_an_expert(statement: ast.AST) -> bool:
    return any(isinstance(n, ast.Subscript) and _uses_experts(n.value) for n in ast.walk(statement))


def _mask_of(statements: list[ast.stmt]) -> tuple[str, str]:
    """(the mask's name, the name of what it is one for each of) of `mask = one_hot(index, ...)`."""
    for statement in filter(_target, statements):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _called(node) == "one_hot" and node.args:
                if isinstance(node.args[0], ast.Name):
                    return _target(statement), node.args[0].id
    raise CannotCut("its loop over experts has no mask of the chosen ones")


def _total_of(loop: ast.For) -> str:
    """The name of what the loop adds every expert's rows to."""
    calls = [n.func for n in ast.walk(loop) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    added = [func.value for func in calls if func.attr == "index_add_"]
    if len(added) != 1 or not isinstance(added[0], ast.Name):
        raise CannotCut("its loop over experts adds up in a way that is not known")
    return added[0].id


def _needed(before: list[ast.stmt], read: set[str]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """(statements that something reads the result of, or that do more than assign; the others)

    read: names that are read after them
    """
    kept: list[ast.stmt] = []
    for statement in reversed(before):
        if not _is_pure(statement) or _target(statement) in read:
            kept.insert(0, statement)
            read = read | _names([statement], ast.Load)
    return kept, [s for s in before if s not in kept]


def _is_pure(statement: ast.stmt) -> bool:
    """Whether a statement does nothing but assign to one name."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return bool(_target(statement)) and all(_called(call) in _PURE for call in calls)


def _target(statement: ast.stmt) -> str:
    """The one name that a statement assigns to, or ""."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def _names(statements: list[ast.stmt], context: type) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _called(call: ast.Call) -> str:
    """The last name of what is called: `one_hot` of `torch.nn.functional.one_hot`."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


# -- making the forward ----------------------------------------------------------------------------------------------


def _factory(function: Callable, tree: ast.FunctionDef, body: list[ast.stmt]) -> Callable[[Callable], Callable]:
    """A function of the experts that gives the forward, with the original's globals, file and lines."""
    inner = copy.deepcopy(tree)
    inner.body, inner.returns = body, None
    for argument in ast.walk(inner.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    inner.args.defaults = [ast.Constant(None) for _ in inner.args.defaults]
    inner.args.kw_defaults = [default and ast.Constant(None) for default in inner.args.kw_defaults]
    outer = ast.parse(f"def {_FACTORY}({_CALL}):\n    pass\n    return {tree.name}")
    outer.body[0].body[0] = inner
    module = ast.fix_missing_locations(outer)
    made: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, made)

    def with_experts(experts: Callable) -> Callable:
        forward = made[_FACTORY](experts)
        # The expressions of defaults were worked out once, where the class stands.
        forward.__defaults__, forward.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return forward

    return with_experts
