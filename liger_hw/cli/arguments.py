"""Argument types for the sub-commands. Their errors say what is expected."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ..autotune.models import KNOWN
from ..backends import backends, target_of, with_index
from . import UsageError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

SEQS = [512, 1024, 2048, 4096, 8192, 16384]
"""Default sequence lengths of a model."""
A_MODEL = f"a known name ({', '.join(model.name for model in KNOWN.values())}), a config.json, or a Hugging Face id"
"""Help of --model."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(text: str) -> str:
    """argparse type: `bf16`, `float16`, ... -> torch's name of the dtype, without importing torch."""
    word = text.strip().lower().removeprefix("torch.")
    name = DTYPES.get(word, word)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"unknown dtype {text!r}; expected fp32, bf16 or fp16")
    return name


def torch_dtype(name: str) -> "torch.dtype":
    import torch

    return getattr(torch, name)


def shape(text: str) -> tuple[int, ...]:
    """argparse type: `8192x4096` -> (8192, 4096)."""
    if not re.fullmatch(r"\d+([x,]\d+)*", text.strip().lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write sizes joined by x, as in 8192x4096")
    sizes = tuple(int(part) for part in re.split("[x,]", text.strip().lower()))
    if 0 in sizes:
        raise argparse.ArgumentTypeError(f"{text!r} has a size of 0; sizes are positive")
    return sizes


def _number(convert: Callable[[str], T], minimum: float, maximum: float, expected: str) -> Callable[[str], T]:
    """An argparse type: `convert(text)` between `minimum` and `maximum`."""

    def parse(text: str) -> T:
        try:
            value = convert(text.strip())
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return parse


def _tokens(text: str) -> int:
    return 1024 * int(text[:-1]) if text.lower().endswith("k") else int(text)


LARGEST = 2**31 - 1
positive = _number(int, 1, LARGEST, "a positive integer")
tokens = _number(_tokens, 1, LARGEST, "a number of tokens; write positive integers such as 65536, or 64k for 64 * 1024")
seconds = _number(float, 1e-9, 3.2e8, "a positive number of seconds")
share = _number(float, 1e-9, 1.0, "a share; write a number above 0, at most 1")


def listed(kind: Callable[[str], T], what: str = "") -> Callable[[str], list[T]]:
    """An argparse type: values of type `kind` joined by commas. what: the values in words, for the error"""

    def parse(text: str) -> list[T]:
        values = [kind(word.strip()) for word in text.split(",") if word.strip()]
        if not values:
            raise argparse.ArgumentTypeError(f"{text!r} is empty; write {what} joined by commas")
        return values

    return parse


def add_model_sizes(parser: Any, ops: str) -> None:
    """Add --ops, --model, --batch and --seq. ops: help of --ops"""
    parser.add_argument("--ops", type=listed(str, "names such as rope,swiglu"), metavar="A,B", help=ops)
    parser.add_argument("--model", nargs="+", default=[], metavar="M", help=f"models: {A_MODEL}")
    parser.add_argument(
        "--batch", type=listed(positive, "numbers"), metavar="B,..", help="batch sizes for --model (default 1)"
    )
    parser.add_argument(
        "--seq",
        type=listed(tokens, "numbers"),
        metavar="S,..",
        help="sequence lengths for --model, as 4096 or 4k (default powers of two, 512 to 16384)",
    )


def usable_device(name: str | None) -> "torch.device":
    """The device of this name; by default the accelerator, else the CPU. Raises `UsageError`."""
    import torch

    try:
        if name is None:
            here = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
            name = here if here in {backend.device_type for backend in backends()} else "cpu"
        device = with_index(name)
        target_of(device)
    except (RuntimeError, ValueError, AssertionError) as error:
        hint = "; torch calls an AMD GPU cuda" if str(name).startswith(("rocm", "hip")) else ""
        raise UsageError(f"cannot use --device {name}: {str(error).splitlines()[0]}{hint}") from None
    return device
