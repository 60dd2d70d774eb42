"""What is compiled to prove an op on a target: which workloads, dtypes and option sets, three depths of it.

    quick   the first workload in bf16                                          CI, every architecture
    deep    that, with every option set, and in fp32                            CI, one architecture for each kind of compiler
    full    every workload with every option set in bf16, and each in fp32      `liger-hw compile`, by hand and before a release

The kernels of further workloads differ from the first one's in block sizes only, and most are compiled alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

from ..backends import Target
from ..registry import Op
from . import compile as aot

DEPTHS = ("quick", "deep", "full")


@dataclass(frozen=True)
class Case:
    """One forward and backward: `workload` names `sizes`."""

    workload: str
    sizes: tuple[int, ...]
    dtype: str
    options: Mapping[str, Any]


def cases(op: Op, depth: str, dtypes: Sequence[str] | None = None) -> Iterator[Case]:
    """The cases of an op at a depth; `dtypes` replaces what the depth says."""
    if depth not in DEPTHS:
        raise ValueError(f"depth must be one of {', '.join(DEPTHS)}, got {depth!r}")
    workloads = list(op.workloads.items())
    for name, sizes in workloads if depth == "full" else workloads[:1]:
        for dtype in dtypes or (("bfloat16",) if depth == "quick" else ("bfloat16", "float32")):
            every = depth == "full" or (depth == "deep" and dtype == "bfloat16")
            for options in op.options if every else op.options[:1]:
                yield Case(name, tuple(sizes), dtype, options)


def launches(
    op: Op, target: Target, depth: str, dtypes: Sequence[str] | None = None, shipped: bool = True
) -> Iterator[tuple[Case, aot.Launch]]:
    """What the op launches in each case, with the case."""
    import torch

    for case in cases(op, depth, dtypes):
        for launch in aot.trace(op.name, case.sizes, getattr(torch, case.dtype), target, case.options, shipped=shipped):
            yield case, launch
