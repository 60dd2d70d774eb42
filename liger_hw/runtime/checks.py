"""Checks of the arguments of ops and operators, and small tensor functions for op files."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any, Callable, NamedTuple, Sequence

import torch

from ..private import is_batched

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype})
PLAIN_NUMBERS = NO_TENSORS | {tuple}
_PLAIN = PLAIN_NUMBERS | TENSORS
_MAX_LAYOUTS = 4096  # of `Shapes._passed`, for layouts that never repeat
_INTEGERS = frozenset({torch.int64, torch.int32})
_ENTRY = re.compile(r"(?:(int|float|any|[A-Z]) )?(\w+(?:, ?\w+)*)(?: of (\w+)|( \[[^]]*\](?: \| \[[^]]*\])*))?")
_SIZE = re.compile(r"(\d*)([a-z_]*)|()(\.)")


def check(condition: bool, op: str, message: str) -> None:
    """Raise `ValueError` that starts with the op's name unless `condition` holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def to_flatten(**tensors: torch.Tensor) -> str:
    """`; flatten ...` for an error if one of these tensors has more than two dimensions, else ""."""
    if all(tensor.dim() <= 2 for tensor in tensors.values()):
        return ""
    return f"; flatten the leading dimensions: {', '.join(f'{name}.flatten(0, -2)' for name in tensors)}"


def swapped(x_name: str, x: torch.Tensor, name: str, weight: torch.Tensor) -> str:
    """`; X and W are swapped` for an error if the shapes suggest it, else ""."""
    suggests_it = x.dim() == 1 and weight.dim() > 1 and weight.shape[-1] == x.shape[0]
    return f"; {x_name} and {name} are swapped" if suggests_it else ""


_warned: set[tuple[str, str]] = set()


def warn_ignored(op: str, why: str, **arguments: bool) -> None:
    """Warn once for each of these arguments that is true. why: the reason why it has no effect"""
    for name, is_used in arguments.items():
        if is_used and (op, name) not in _warned:
            _warned.add((op, name))
            warnings.warn(f"{op}: {name} is accepted and changes nothing: {why}", stacklevel=3)


def check_tensors(op: str, optional: tuple[str, ...] = (), **tensors: torch.Tensor | None) -> None:
    """Raise `TypeError` unless these are tensors (or None, if named in `optional`), and `ValueError` for a nested
    tensor, a dtype that kernels do not take, or tensors on several devices."""
    first = first_device = None
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
        dtype, device = tensor.dtype, tensor.device
        if dtype not in _DTYPES and not (dtype is torch.float64 and device.type == "cpu"):
            raise ValueError(f"{op}: {name} must be float32, float16 or bfloat16, got {dtype}")
        if tensor.is_nested:
            check(False, op, nested(name))
        if first is None:
            first, first_device = name, device
        elif device != first_device:
            raise ValueError(f"{op}: {name} is on {device} but {first} is on {first_device}; move them to one device")


def nested(name: str) -> str:
    return f"{name} is a nested tensor, which kernels do not support; pad or concatenate its parts"


def check_numbers(op: str, **values: float) -> None:
    """Raise `TypeError` unless every value is an int or a float. A bool is refused as a probably misplaced flag."""
    for name, value in values.items():
        if type(value) is float:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def check_integers(op: str, **values: int) -> None:
    """Raise `TypeError` unless every value is an int; a bool is refused."""
    for name, value in values.items():
        if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (int, torch.SymInt))):
            raise TypeError(f"{op}: {name} must be an integer, got {value!r}")


def check_floats(op: str, **values: Any) -> None:
    """Raise `TypeError` unless `float()` accepts every value; text and bools are refused."""
    for name, value in values.items():
        if type(value) is float:
            continue
        if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
        if value.numel() != 1 if isinstance(value, torch.Tensor) else getattr(value, "shape", ()):
            raise TypeError(
                f"{op}: {name} must be one number, got {type(value).__name__} of shape {tuple(value.shape)}"
            )


def check_flags(op: str, **values: Any) -> None:
    """Raise `TypeError` unless every value is a bool, an int or None: "False" as text would be true."""
    for name, value in values.items():
        if value is not None and not isinstance(value, int):
            raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def check_ignore_index(op: str, ignore_index: Any) -> None:
    """Raise `ValueError` unless it is an int."""
    if type(ignore_index) is not int:
        check(False, op, f"ignore_index must be an int, got {ignore_index!r}")


def check_indices(op: str, name: str, indices: Any, rows: torch.Tensor, hint: Callable[[], str] = lambda: "") -> None:
    """Raise `TypeError` unless `indices` is a tensor, and `ValueError` unless it is int64 or int32, has an element for
    each row of rows [..., n_cols], and is on their device. hint: returns more text for the error about the shape"""
    if not isinstance(indices, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(indices).__name__}")
    if indices.dtype not in (torch.int64, torch.int32):
        check(False, op, f"{name} must hold indices (int64 or int32), got {indices.dtype}")
    if indices.is_nested:
        check(False, op, nested(name))
    if indices.shape != rows.shape[:-1]:
        expected, got = tuple(rows.shape[:-1]), tuple(indices.shape)
        check(False, op, f"{name} must have shape {expected} to match the rows, got {got}{hint()}")
    if indices.device != rows.device:
        check(False, op, f"{name} is on {indices.device} but the rows are on {rows.device}; move them to one device")


def row_major(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when its rows are evenly spaced with contiguous elements, else a contiguous copy."""
    if x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]):
        return x
    return x.contiguous()


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on a device type, or None if autocast is off (or the type is "meta")."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def no_view(t: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """`t` in `shape`, not marked as a view: autograd refuses in-place changes of a view that a Function returns.

    No other tensor may use the memory.
    """
    return torch.ops.aten._unsafe_view(t, t.shape if shape is None else shape)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def dense(t: torch.Tensor | None) -> torch.Tensor | None:
    """`t`, or a contiguous copy if it is not contiguous; for weights and other small inputs. None stays None."""
    return t if t is None or t.is_contiguous() else t.contiguous()


def rows_of(x: torch.Tensor) -> tuple[int, int, int]:
    """(n_rows, n_cols, elements from one row to the next) of a `row_major` tensor; n_cols is the last dimension."""
    shape = x.shape
    n_cols = shape[-1]
    if len(shape) == 2:
        return shape[0] if n_cols else 0, n_cols, x.stride(0)
    return x.numel() // n_cols if n_cols else 0, n_cols, n_cols


def empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous uninitialised tensor of x's shape."""
    if x.dtype is dtype and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def no_weight(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor as the gradient of an absent weight, since an operator may not return None."""
    return x.new_empty(0)


# -- an operator's arguments, in eager code ----------------------------------------------------------------------------

NumberTypes = tuple[tuple[int, ...], tuple[type, ...]]
"""(positions, types in the schema) of an operator's arguments that are numbers."""


def are_plain(args: tuple) -> bool:
    """Whether all are plain tensors, numbers or tuples of numbers, and the first is a tensor on a GPU.

    Not plain: a subclass of Tensor, which may handle the call, and a batched gradient, which has no memory.
    """
    if not _PLAIN.issuperset(map(type, args)) or type(args[0]) not in TENSORS or args[0].get_device() < 0:
        return False
    for arg in args:
        kind = type(arg)
        if kind in NO_TENSORS:
            continue
        if is_batched(arg) if kind in TENSORS else not NO_TENSORS.issuperset(map(type, arg)):
            return False
    return True


def coerced(args: tuple, numbers: NumberTypes) -> tuple:
    """The arguments with numbers converted to the schema's types, as the dispatcher does (not from float to int)."""
    places, kinds = numbers
    if tuple(map(type, map(args.__getitem__, places))) == kinds:
        return args
    arguments = list(args)
    for place, kind in zip(places, kinds):
        number = args[place]
        if type(number) is not kind and (kind is not int or type(number) is bool):
            arguments[place] = kind(number)
    return tuple(arguments)


# -- declarations of an operator's tensors ----------------------------------------------------------------------------

Form = tuple[tuple[int, str], ...]
"""A shape: (factor, name) for each dimension, with an empty name for a number; `*` is any number of dimensions."""


class _Rule(NamedTuple):
    """An operator's requirements of its argument at position `place`.

    kind: "int", "float", "any", or the letter of a shared dtype ("" for none)
    count: the number of elements, or None; forms: alternative shapes, empty for any shape
    """

    place: int
    name: str
    is_optional: bool
    is_list: bool
    kind: str
    count: tuple[int, str] | None
    forms: tuple[Form, ...]


class Shapes:
    """Checks an operator's arguments against `text`, its declaration of shapes and dtypes:

        T x, r [*, n]; w [n]; rstd of rows; int target [rows]; grad [] | [rows]

    Entries are separated by `;` and checked in this order. Each names tensors of the schema and then their shape. A
    dimension is a number, a name, or a multiple of a name (`2n`). A name has the same size in all entries. `*` is any
    number of dimensions, the same ones in all entries, and `rows` is their product. `.` is one dimension of any size.
    `|` separates alternative shapes. `of` gives the number of elements instead of a shape. A tensor without shape and
    `of` may have any shape. Elements of lists of tensors are not checked.

    Tensors are fp32, fp16 or bf16, on the CPU fp64 too. Before the names, `int` means int64 or int32, `float` any
    floating-point dtype, `any` any dtype, and a capital letter one dtype for all tensors with that letter. All tensors
    are on one device.

    misfit: returns an error about arguments that fit `text`, or ""
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
                raise ValueError(f"{schema.name}: cannot parse the shapes {entry.strip()!r}, see runtime/checks.py")
            kind, names, count, shapes = match.groups()
            forms = tuple(_form(shape) for shape in re.findall(r"\[([^]]*)\]", shapes or ""))
            for name in re.split(", ?", names):
                place, argument = arguments.pop(name)
                flags = "Optional" in str(argument.type), "List" in str(argument.type)
                self.rules.append(_Rule(place, name, *flags, kind or "", count and _size(count), forms))
        unnamed = [name for name, (_, argument) in arguments.items() if "Tensor" in str(argument.type)]
        if unnamed:
            raise ValueError(f"{schema.name}: shapes does not name {', '.join(unnamed)}")

    def check_types(self, args: tuple[Any, ...]) -> None:
        """Raise `TypeError` for an argument that must be a tensor and is not, and `ValueError` for a nested tensor."""
        for rule in self.rules:
            for argument in args[rule.place] if rule.is_list else (args[rule.place],):
                if isinstance(argument, torch.Tensor):
                    if argument.is_nested:
                        raise ValueError(f"{self.op}: {nested(rule.name)}")
                elif argument is not None or not rule.is_optional:
                    raise TypeError(f"{self.op}: {rule.name} must be a tensor, got {type(argument).__name__}")

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise `TypeError` or `ValueError` unless the arguments' types, dtypes, devices and shapes fit.

        A layout that has passed once is not checked again.
        """
        try:
            layout = _layout(args)
            if layout in self._passed:
                return
        except (TypeError, RuntimeError):  # symbolic sizes have no hash, and a nested tensor has no shape
            layout = None
        self._check(args)
        if layout is not None:
            if len(self._passed) >= _MAX_LAYOUTS:
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
            sizes_with_it = _fits(rule, tensor, sizes)
            if sizes_with_it is None and self.is_backward and not tensor.numel() and not first[1].numel():
                continue  # the forward saves no statistics for rows without columns
            if sizes_with_it is None:
                hint = swapped(*first, name, tensor)
                raise ValueError(
                    f"{self.op}: {name} must {_in_words(rule, sizes, first[0])}, got {tuple(tensor.shape)}{hint}"
                )
            sizes = sizes_with_it
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
        if dtype not in _DTYPES and not (dtype is torch.float64 and tensor.device.type == "cpu"):
            return f"{rule.name} must be float32, float16 or bfloat16, got {dtype}"
        if rule.kind:
            other, shared = dtypes.setdefault(rule.kind, (rule.name, dtype))
            if dtype is not shared:
                return f"{other} and {rule.name} must have one dtype, got {shared} and {dtype}"
        return ""


def _layout(args: Sequence[Any]) -> tuple[Any, ...]:
    """The properties of the arguments on which their check depends."""
    parts: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            parts.append((arg.dtype, arg.shape, arg.device))
        else:
            parts.append(_layout(arg) if isinstance(arg, list) else arg)
    return tuple(parts)


def _size(text: str) -> tuple[int, str]:
    if text == "*":
        return 1, "*"
    match = _SIZE.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"{text!r} is not a size: a number, a name, or a number before a name")
    return int(match[1] or 1), match[2] or match[4] or ""


def _form(text: str) -> Form:
    return tuple(_size(size) for size in re.split(", ?", text)) if text else ()


def _fits(rule: _Rule, tensor: torch.Tensor, sizes: dict[str, Any]) -> dict[str, Any] | None:
    """`sizes` with the sizes of this tensor added, or None if its shape does not fit."""
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
    """The expected shape for an error: known sizes as numbers, others by name."""

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
