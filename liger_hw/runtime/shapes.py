"""What an operator asks of its tensors' shapes, dtypes and devices: `Shapes`, read from the text in its declaration.

    T x, r [*, n]; w [n]; rstd of rows; int target [rows]; grad [] | [rows]

Entries are separated by `;` and name tensors of the operator's schema, in the order in which they are looked at. Each
dimension is a number, a name, or a multiple of a name (`2n`); a name has one size wherever it stands. `*` stands for
any number of dimensions, the same wherever it stands, and `rows` for their product; `.` for one dimension of any size.
`|` separates shapes of which one must fit. `of` counts elements, whatever the shape. A tensor without a shape may have
any, and a list of tensors is not looked into.

Tensors hold numbers that kernels compute with: fp32, fp16 or bf16, on the CPU fp64 too. `int` before the names asks for
int64 or int32, `float` for any floating-point dtype, and `any` for nothing. A capital letter is a dtype that its
tensors share. All are on one device.
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, NamedTuple, Sequence

import torch

from .checks import nested, swapped

_MOST = 4096  # layouts that never repeat must not be kept without end
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int64, torch.int32})
_ENTRY = re.compile(r"(?:(int|float|any|[A-Z]) )?(\w+(?:, ?\w+)*)(?: of (\w+)|( \[[^]]*\](?: \| \[[^]]*\])*))?")
_SIZE = re.compile(r"(\d*)([a-z_]*)|()(\.)")

Form = tuple[tuple[int, str], ...]
"""Dimensions, each (factor, name); a number has no name, and `*` is the name of any number of dimensions."""


class _Rule(NamedTuple):
    """A tensor that an operator takes: its place among the arguments, its name, and what it must be.

    kind: "int", "float", "any", or the name of the dtype that it shares ("" for one of its own)
    count: of elements, where that is all that is asked; forms: the shapes of which one must fit, empty for any
    """

    place: int
    name: str
    is_optional: bool
    is_list: bool
    kind: str
    count: tuple[int, str] | None
    forms: tuple[Form, ...]


class Shapes:
    """Raises for arguments that do not fit an operator's declaration.

    schema: the operator's; text: as above; misfit: of arguments that fit the text, returns
    what else is wrong with them, or ""
    """

    def __init__(self, schema: Any, text: str, misfit: Callable[..., str] | None = None) -> None:
        self.misfit = misfit
        self._passed: set[tuple] = set()
        name, self.is_backward = re.subn("_bwd_?$", "", schema.name.rpartition("::")[2])
        self.op = f"liger_{name.removesuffix('_fwd')}" + (" (backward)" if self.is_backward else "")
        arguments = {argument.name: (place, argument) for place, argument in enumerate(schema.arguments)}
        self.rules: list[_Rule] = []
        for entry in filter(None, text.split(";")):
            match = _ENTRY.fullmatch(entry.strip())
            if match is None:
                raise ValueError(f"{schema.name}: {entry.strip()!r} says nothing about shapes, see runtime/shapes.py")
            kind, names, count, shapes = match.groups()
            forms = tuple(_form(shape) for shape in re.findall(r"\[([^]]*)\]", shapes or ""))
            for name in re.split(", ?", names):
                place, argument = arguments.pop(name)
                flags = "Optional" in str(argument.type), "List" in str(argument.type)
                self.rules.append(_Rule(place, name, *flags, kind or "", count and _size(count), forms))
        left = [name for name, (_, argument) in arguments.items() if "Tensor" in str(argument.type)]
        if left:
            raise ValueError(f"{schema.name}: shapes says nothing about {', '.join(left)}")

    def check_types(self, args: tuple[Any, ...]) -> None:
        """Raise `TypeError` for an argument that is no tensor and should be one, `ValueError` for a nested tensor."""
        for rule in self.rules:
            for argument in args[rule.place] if rule.is_list else (args[rule.place],):
                if isinstance(argument, torch.Tensor):
                    if argument.is_nested:
                        raise ValueError(f"{self.op}: {nested(rule.name)}")
                elif argument is not None or not rule.is_optional:
                    raise TypeError(f"{self.op}: {rule.name} must be a tensor, got {type(argument).__name__}")

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise `TypeError` unless these are tensors, `ValueError` for a tensor of another dtype, device or shape.

        A layout that has passed once is not looked at again.
        """
        try:
            layout = _layout(args)
            if layout in self._passed:
                return
        except (TypeError, RuntimeError):  # symbolic sizes have no hash, and a nested tensor has no shape
            layout = None
        self._check(args)
        if layout is not None:
            if len(self._passed) >= _MOST:
                self._passed.clear()
            self._passed.add(layout)

    def _check(self, args: tuple[Any, ...]) -> None:
        self.check_types(args)
        first, sizes, dtypes = None, {}, {}
        for rule in self.rules:
            name, tensor = rule.name, args[rule.place]
            if tensor is None or rule.is_list:
                continue
            if why_invalid := self._dtype_misfit(rule, tensor, dtypes):
                raise ValueError(f"{self.op}: {why_invalid}")
            if first is None:
                first = name, tensor
            elif tensor.device != first[1].device:
                raise ValueError(
                    f"{self.op}: {name} is on {tensor.device} but {first[0]} is on {first[1].device}; "
                    "move them to one device"
                )
            attempt = _fits(rule, tensor, sizes)
            if attempt is None and self.is_backward and not tensor.numel() and not first[1].numel():
                continue  # nothing is read: the forward saves no statistics of rows without a column
            if attempt is None:
                hint = swapped(*first, name, tensor)
                raise ValueError(
                    f"{self.op}: {name} must {_in_words(rule, sizes, first[0])}, got {tuple(tensor.shape)}{hint}"
                )
            sizes = attempt
        if self.misfit is not None and (why_invalid := self.misfit(*args)):
            raise ValueError(f"{self.op}: {why_invalid}")

    def _dtype_misfit(self, rule: _Rule, tensor: torch.Tensor, dtypes: dict[str, tuple]) -> str:
        dtype = tensor.dtype
        if rule.kind == "any":
            return ""
        if rule.kind == "float":
            return "" if dtype.is_floating_point else f"{rule.name} must be of a floating-point dtype, got {dtype}"
        if rule.kind == "int":
            return "" if dtype in _INTEGERS else f"{rule.name} must be int32 or int64, got {dtype}"
        if dtype not in _FLOATS and not (dtype is torch.float64 and tensor.device.type == "cpu"):
            return f"{rule.name} must be float32, float16 or bfloat16, got {dtype}"
        if rule.kind:
            other, shared = dtypes.setdefault(rule.kind, (rule.name, dtype))
            if dtype is not shared:
                return f"{other} and {rule.name} must have one dtype, got {shared} and {dtype}"
        return ""


def _layout(args: Sequence[Any]) -> tuple[Any, ...]:
    """All of an operator's arguments that its declaration speaks of."""
    return tuple(
        [
            (arg.dtype, arg.shape, arg.device)
            if isinstance(arg, torch.Tensor)
            else _layout(arg)
            if isinstance(arg, list)
            else arg
            for arg in args
        ]
    )


def _size(text: str) -> tuple[int, str]:
    if text == "*":
        return 1, "*"
    match = _SIZE.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"{text!r} is no size: a number, a name, or a number before a name")
    return int(match[1] or 1), match[2] or match[4] or ""


def _form(text: str) -> Form:
    return tuple(_size(size) for size in re.split(", ?", text)) if text else ()


def _fits(rule: _Rule, tensor: torch.Tensor, sizes: dict[str, Any]) -> dict[str, Any] | None:
    """The sizes so far and of a tensor that has the shape it should have, else None."""
    if rule.count is None and not rule.forms:
        return sizes
    for form in rule.forms or (None,):
        attempt = dict(sizes)
        if _is_size(rule.count, tensor.numel(), attempt) if form is None else _is_form(form, tensor.shape, attempt):
            return attempt
    return None


def _is_form(form: Form, shape: torch.Size, sizes: dict[str, Any]) -> bool:
    if (1, "*") in form:
        begin = form.index((1, "*"))
        end = begin + len(shape) - len(form) + 1
        if end < begin:
            return False
        several, shape, form = shape[begin:end], shape[:begin] + shape[end:], form[:begin] + form[begin + 1 :]
        if "*" not in sizes:
            sizes["*"], sizes["rows"] = several, math.prod(several)
        elif sizes["*"] != several:
            return False
    return len(form) == len(shape) and all(_is_size(size, n, sizes) for size, n in zip(form, shape))


def _is_size(size: tuple[int, str], n: int, sizes: dict[str, Any]) -> bool:
    factor, name = size
    if not name:
        return n == factor
    if name == ".":
        return True
    if name in sizes:
        return n == factor * sizes[name]
    if factor > 1 and n % factor:
        return False
    sizes[name] = n // factor
    return True


def _in_words(rule: _Rule, sizes: dict[str, Any], first: str) -> str:
    """What a tensor's shape should have been: sizes that are known as numbers, others by their names."""

    def size(factor: int, name: str) -> str:
        if not name:
            return str(factor)
        if name == "*":
            return ", ".join(map(str, sizes["*"])) if "*" in sizes else "..."
        return str(factor * sizes[name]) if name in sizes else f"{factor if factor > 1 else ''}{name}"

    match_words = "" if rule.name == first else f" to match {first}"
    if rule.count is not None:
        count = size(*rule.count)
        return f"have {count} element{'' if count == '1' else 's'}{match_words}"
    forms = [", ".join(filter(None, (size(*one) for one in form))) for form in rule.forms]
    if len(forms) == 1 and all(part.strip().isdigit() for part in forms[0].split(",") if part):
        return f"have shape ({forms[0]}{',' if forms[0] and ',' not in forms[0] else ''}){match_words}"
    return f"be {' or '.join(f'[{form}]' for form in forms)}{match_words}"
