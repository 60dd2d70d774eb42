"""What sub-commands share: argument types that explain themselves."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from ..autotune.models import KNOWN

if TYPE_CHECKING:
    import torch

SEQS = [512, 1024, 2048, 4096, 8192, 16384]
"""Sequence lengths of a model where none are given."""

A_MODEL = f"a known name ({', '.join(model.name for model in KNOWN.values())}), a config.json, or a Hugging Face id"
"""What --model takes, for its help."""

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}


def dtype_name(text: str) -> str:
    """argparse type: `bf16`, `float16`, ... -> torch's attribute name, without importing torch."""
    try:
        return DTYPES[text.strip().lower().removeprefix("torch.")]
    except KeyError:
        raise argparse.ArgumentTypeError(f"unknown dtype {text!r}; expected fp32, bf16 or fp16") from None


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


def _number(convert, text: str, fits, expected: str):
    """convert(text), where that works and fits; else argparse's error, which says what was expected."""
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def positive(text: str) -> int:
    """argparse type: an integer from 1 to 2**31 - 1."""
    return _number(int, text, lambda value: 1 <= value < 2**31, "a positive integer")


_TOKENS = "write positive integers such as 65536, or 64k for 64 * 1024"


def _tokens(text: str) -> int:
    number = text.strip().lower()
    return 1024 * int(number[:-1]) if number.endswith("k") else int(number)


def tokens(text: str) -> int:
    """argparse type: `65536` or `64k` -> 65536."""
    return _number(_tokens, text, lambda value: 1 <= value < 2**31, f"a number of tokens; {_TOKENS}")


def token_list(text: str) -> list[int]:
    """argparse type: `512,64k` -> [512, 65536]."""
    return _number(
        lambda joined: [_tokens(part) for part in joined.split(",") if part],
        text,
        lambda values: values and min(values) >= 1 and max(values) < 2**31,
        f"a list of numbers of tokens; {_TOKENS}, joined by commas",
    )


def seed(text: str) -> int:
    """argparse type: an integer that torch takes as a seed, from 0 to 2**64 - 1."""
    return _number(int, text, lambda value: 0 <= value < 2**64, "a seed; write an integer from 0 to 2**64 - 1")


def seconds(text: str) -> float:
    """argparse type: a time of more than 0 seconds and at most ten years."""
    return _number(float, text, lambda value: 0.0 < value < 3.2e8, "a positive number of seconds")


def numbers(text: str) -> list[int]:
    """argparse type: `512,1024` -> [512, 1024], positive integers."""
    return _number(
        lambda joined: [int(part) for part in joined.split(",") if part],
        text,
        lambda values: values and min(values) >= 1 and max(values) < 2**31,
        "a list of positive integers, as in 512,1024",
    )


def shapes(text: str) -> list[tuple[int, ...]]:
    """argparse type: shapes joined by commas, as in 8192x4096,1x512."""
    return [shape(part.strip()) for part in text.split(",") if part.strip()]


def name_list(text: str) -> list[str]:
    """argparse type: names joined by commas, at least one."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} holds no name; write names joined by commas, as in rope,swiglu")
    return found


def usable_device(command: str, name: str | None) -> "torch.device":
    """The device of that name, or without one the accelerator here, else the CPU. Raises `UsageError` that says why
    not.
    """
    import torch

    from ..backends import backends, target_of, with_index
    from . import UsageError

    try:
        if name is None:
            found = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
            name = found if found in {backend.device_type for backend in backends()} else "cpu"
        device = with_index(name)
        target_of(device)
    except (RuntimeError, ValueError, AssertionError) as error:
        hint = "; torch calls an AMD GPU cuda" if str(name).startswith(("rocm", "hip")) else ""
        raise UsageError(f"{command}: cannot use --device {name}: {str(error).splitlines()[0]}{hint}") from None
    return device


def share(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    return _number(float, text, lambda value: 0.0 <= value <= 1.0, "a share; write a number from 0 to 1")
