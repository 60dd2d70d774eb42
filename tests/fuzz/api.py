"""Public functions with bad arguments: the reference's result, or an error with the op's name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from harness import few_sizes, forward, make, run

from liger_hw import registry

SECONDS = 30


def attempt(chance: random.Random, folder: Path) -> str:
    op = chance.choice(list(registry.ops().values()))
    sample = make(op, few_sizes(op), torch.float32, "cpu", 0, chance.choice(op.options))
    args = list(sample.args)
    place = chance.randrange(len(args))
    several = sum(isinstance(a, torch.Tensor) for a in args) > 1  # one tensor may be anywhere
    args[place], what = _changed(chance, args[place], several)
    sample.args = tuple(args)
    said = f"{op.name}, argument {place}: {what}"
    try:
        result = run(op.function, sample)
    except (TypeError, ValueError, IndexError) as error:
        assert f"liger_{op.name}" in str(error), f"{said}: {type(error).__name__}: {error}"
        return "refused"
    except Exception as error:
        return _as_torch(op, sample, error, said)
    try:
        expected = forward(op.reference, sample)
    except Exception as error:
        raise AssertionError(f"{said}: answered, the reference raises {type(error).__name__}: {error}") from error
    for got, exact in zip(result.outputs, expected):
        assert got.shape == exact.shape, f"{said}: {got.shape}, the reference {exact.shape}"
        close = torch.allclose(got.double(), exact.double(), rtol=1e-3, atol=1e-4, equal_nan=True)
        assert close, f"{said}: not what the reference gives"
    return "right"


def _as_torch(op: registry.Op, sample: Any, error: Exception, said: str) -> str:
    """The outcome if the reference raises the same error; else the error is a finding."""
    if isinstance(error, NotImplementedError):  # torch's, for nested and sparse tensors
        return "not implemented"
    try:
        forward(op.reference, sample)
    except Exception as other:
        if type(other) is type(error):
            return "as torch"
    raise AssertionError(f"{said}: {type(error).__name__}: {str(error)[:300]}") from error


def _changed(chance: random.Random, value: Any, several: bool) -> tuple[Any, str]:
    if not isinstance(value, torch.Tensor):
        other = chance.choice([None, "1", "", -1, 0, 1e30, float("nan"), [], {}, object(), True, 2**62, (1, 2), b"x"])
        return other, f"{value!r} -> {other!r}"
    changes = {
        "None": lambda t: None,
        "a list": lambda t: t.tolist(),
        "complex": lambda t: t.to(torch.complex64),
        "bool": lambda t: t.bool(),
        "int8": lambda t: t.to(torch.int8),
        "float64": lambda t: t.double(),
        "on another device": lambda t: t.to("meta") if several else t.detach(),
        "sparse": lambda t: t.detach().to_sparse(),
        "no rows": lambda t: t[:0] if t.dim() else t,
        "no columns": lambda t: t[..., :0] if t.dim() else t,
        "a dimension more": lambda t: t[None],
        "a dimension less": lambda t: t[0] if t.dim() else t,
        "a column more": lambda t: torch.cat((t, t[..., :1]), -1) if t.dim() else t,
        "transposed": lambda t: t.transpose(0, -1) if t.dim() else t,
        "a scalar": lambda t: t.flatten()[0] if t.numel() else t,
        "expanded": lambda t: t[:1].expand(t.shape) if t.dim() else t,
        "NaN": lambda t: t * float("nan") if t.is_floating_point() else t,
        "infinite": lambda t: t + float("inf") if t.is_floating_point() else t,
        "no grad": lambda t: t.detach(),
        "a parameter": lambda t: torch.nn.Parameter(t.detach()) if t.is_floating_point() else t,
    }
    what = chance.choice(sorted(changes))
    return changes[what](value), what
