"""Programmatic dependent launch: a kernel starts before the previous one on the stream has drained.

On devices that support it (`Backend.dependent_launch`), a `Tunable` uses it for the keys that its `dependent_launch`
accepts. Before its kernels access memory, they call `wait_for_previous(DEPENDENT)`, which waits until the results of
earlier launches are visible. Only small launches are faster with it: in larger ones, early programs occupy resources
that running programs need. Those have DEPENDENT=False, for which `wait_for_previous` emits nothing.
"""

from __future__ import annotations

from ..ops import Key
from .triton_import import tl, triton

_SUPPORTED = hasattr(tl, "target_info")
"""Whether Triton supports it: in 3.4 its functions raise a TypeError."""


def is_small(elements: int) -> bool:
    """Whether a launch over `elements` (the product of a key's sizes) uses programmatic dependent launch."""
    return _SUPPORTED and elements <= 1 << 20


def is_small_launch(key: Key) -> bool:
    """`Tunable.dependent_launch` for keys that begin as `row_key` does."""
    return is_small(key[0] << key[1])


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait until all earlier launches have ended and their writes are visible, then allow the next launch to start.

    The next launch is allowed only then, because a kernel of other code may not wait before it reads their results.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
