"""Programmatic dependent launch: a kernel starts before the previous one on the stream has drained.

On devices that support it (`Backend.dependent_launch`), a `Tunable` uses it for the keys that its `dependent_launch`
accepts. Its kernels begin with `wait_for_previous(DEPENDENT)`, before they touch memory, and wait there for the results
of earlier launches. Only small launches gain by it: in larger ones, early programs take room from programs that still
run. These are compiled with DEPENDENT=False, for which `wait_for_previous` emits nothing.
"""

from __future__ import annotations

from ..ops import Key
from .triton_import import tl, triton

_CAN = hasattr(tl, "target_info")
"""Whether Triton supports it: in 3.4 its functions raise a TypeError."""


def is_small(elements: int) -> bool:
    """Whether a launch over `elements` (the product of a key's sizes) uses programmatic dependent launch."""
    return _CAN and elements <= 1 << 20


def is_small_launch(key: Key) -> bool:
    """`Tunable.dependent_launch` for keys that begin as `row_key` does."""
    return is_small(key[0] << key[1])


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait until all earlier launches have ended and their writes are visible, then allow the next launch to start.

    In this order, because a kernel of other code may read memory that this launch does not write before it waits.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
