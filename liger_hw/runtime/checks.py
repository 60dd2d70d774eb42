"""What op files check of their arguments, and how they look at tensors as rows."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable

import torch

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def check(condition: bool, op: str, message: str) -> None:
    """Raise `ValueError` that starts with the op's name unless `condition` holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def to_flatten(**tensors: torch.Tensor) -> str:
    """What to do with tensors of which one has more than the two dimensions that it should: `; flatten ...`, or ""."""
    if all(tensor.dim() <= 2 for tensor in tensors.values()):
        return ""
    return f"; flatten the leading dimensions: {', '.join(f'{name}.flatten(0, -2)' for name in tensors)}"


def swapped(x_name: str, x: torch.Tensor, name: str, weight: torch.Tensor) -> str:
    """`; X and W are swapped` where the input looks like a norm's weight and the weight like its input, or ""."""
    looks = x.dim() == 1 and weight.dim() > 1 and weight.shape[-1] == x.shape[0]
    return f"; {x_name} and {name} are swapped" if looks else ""


_warned: set[tuple[str, str]] = set()


def warn_ignored(op: str, why: str, **arguments: bool) -> None:
    """Warn, once for each, of arguments that were given (true) and change nothing."""
    for name, is_used in arguments.items():
        if is_used and (op, name) not in _warned:
            _warned.add((op, name))
            warnings.warn(f"{op}: {name} is accepted and changes nothing: {why}", stacklevel=3)


def check_tensors(op: str, optional: tuple[str, ...] = (), **tensors: torch.Tensor | None) -> None:
    """Raise unless these are tensors (or None, where `optional` names them) of a dtype that kernels take, on one
    device.

    `TypeError` for something that is no tensor, `ValueError` otherwise.
    """
    first = shared = None
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
            first, shared = name, device
        elif device != shared:
            raise ValueError(f"{op}: {name} is on {device} but {first} is on {shared}; move them to one device")


def nested(name: str) -> str:
    """What is wrong with an argument of this name that is a nested tensor."""
    return f"{name} is a nested tensor, which no kernel takes; give it padded or concatenated"


def check_numbers(op: str, **values: float) -> None:
    """Raise `TypeError` unless every value is an int or a float."""
    for name, value in values.items():
        if type(value) is not float and not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def check_integers(op: str, **values: int) -> None:
    """Raise `TypeError` unless every value is an int; 4.0 is a float."""
    for name, value in values.items():
        if type(value) is not int and not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{op}: {name} must be an integer, got {value!r}")


def check_floats(op: str, **values: Any) -> None:
    """Raise `TypeError` unless every value is a number to `float()`, or a tensor of one element; text is refused."""
    for name, value in values.items():
        if type(value) is float:
            continue
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
        if value.numel() != 1 if isinstance(value, torch.Tensor) else getattr(value, "shape", ()):
            raise TypeError(
                f"{op}: {name} must be one number, got {type(value).__name__} of shape {tuple(value.shape)}"
            )


def check_flags(op: str, **values: Any) -> None:
    """Raise `TypeError` unless every value is True or False (1, 0 and None do as well; text would count as True)."""
    for name, value in values.items():
        if value is not None and not isinstance(value, int):
            raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def check_ignore_index(op: str, ignore_index: Any) -> None:
    """Raise `ValueError` unless it is an int; a number that is no label stands for none."""
    if type(ignore_index) is not int:
        check(False, op, f"ignore_index must be an int, got {ignore_index!r}")


def check_indices(op: str, name: str, indices: Any, rows: torch.Tensor, hint: Callable[[], str] = lambda: "") -> None:
    """Raise unless `indices` are int64 or int32, one for each row of rows [..., n_cols], and on its device.

    hint: what to add where the shape does not fit. `TypeError` for something that is no tensor, else `ValueError`.
    """
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


def remembered(misfit: Callable[..., str]) -> Callable[..., str]:
    """Keeps the answers of `misfit` in eager code: a function of shapes and options, never of tensors, that says what
    is wrong with them, or "".
    """
    known = functools.lru_cache(maxsize=1024, typed=True)(misfit)

    def ask(*arguments: Any) -> str:
        if torch.compiler.is_compiling():
            return misfit(*arguments)
        try:
            return known(*arguments)
        except TypeError:  # what cannot be hashed, as symbolic sizes
            return misfit(*arguments)

    return ask


def row_major(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when its rows are evenly spaced with contiguous elements, else a contiguous copy."""
    if x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]):
        return x
    return x.contiguous()


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype autocast asks for on a device type, or None where it is off (or, for "meta", unknown)."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def no_view(t: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """A result that is a view of a temporary, in `shape`, as a tensor that its user may change in place.

    autograd refuses such a change of a view that a Function returns. The memory may have no other holder, who would not
    notice a change.
    """
    return torch.ops.aten._unsafe_view(t, t.shape if shape is None else shape)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def dense(t: torch.Tensor | None) -> torch.Tensor | None:
    """A contiguous `t`, for weights and other small inputs; None stays None."""
    return t if t is None or t.is_contiguous() else t.contiguous()


def rows_of(x: torch.Tensor) -> tuple[int, int, int]:
    """(n_rows, n_cols, elements from one row to the next) of a `row_major` tensor; n_cols is the last dimension."""
    shape = x.shape
    n_cols = shape[-1]
    if len(shape) == 2:
        return shape[0] if n_cols else 0, n_cols, x.stride(0)
    return x.numel() // n_cols if n_cols else 0, n_cols, n_cols


def empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous uninitialised tensor of x's shape; the cheapest call that makes one."""
    if x.dtype is dtype and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def no_weight(x: torch.Tensor) -> torch.Tensor:
    """Stands for the gradient of an absent weight: an operator may not return None."""
    return x.new_empty(0)
