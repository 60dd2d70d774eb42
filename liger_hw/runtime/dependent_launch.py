"""Programmatic dependent launch: a kernel is started before the one ahead of it on the stream has drained.

A very short launch spends much of its time waiting for the launch before it to drain. On devices that support it
(`Backend.dependent_launch`), the kernels of a `Tunable` are launched with the attribute for it, for the keys to which
its `dependent_launch` says yes. Such a kernel begins with `wait_for_previous(DEPENDENT)`, before it touches memory, and
waits there for the results of earlier launches.

It is faster for small launches only. In larger ones the early programs take room from programs that still run, and with
many programs even the wait costs time; so large launches are compiled with DEPENDENT=False, and `wait_for_previous`
emits nothing.
"""

from __future__ import annotations

from ..ops import Key
from .triton_import import tl, triton

_CAN = hasattr(tl, "target_info")
"""Whether Triton has it: the functions for it in 3.4 raise a TypeError."""


def is_small(elements: int) -> bool:
    """Whether a launch over `elements` (the product of a key's sizes) uses programmatic dependent launch."""
    return _CAN and elements <= 1 << 20


def is_small_launch(key: Key) -> bool:
    """`Tunable.dependent_launch` for keys that begin as `row_key` does."""
    return is_small(key[0] << key[1])


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait until all earlier launches have ended and their writes are visible, then allow the next launch to start.

    In this order, because a kernel of other code may read, before it waits, what this launch does not write.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
