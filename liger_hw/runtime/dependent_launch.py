"""Programmatic dependent launch: a kernel is started before the one ahead of it on the stream has drained.

Of a very short launch, a good part is waiting for the launch before it to drain. Where the device can
(`Backend.dependent_launch`), a `Tunable` whose `dependent_launch` says yes to a key has its kernels launched with the
attribute for it. Such a kernel begins with `wait_for_previous(DEPENDENT)`, before it touches memory, and waits there
for the results of earlier launches.

It pays for small launches only. Of larger ones the early programs take room from those that still run, and where
programs are many even the wait costs; so large launches are compiled with DEPENDENT=False, and `wait_for_previous`
emits nothing.
"""

from __future__ import annotations

from ..ops import Key
from .triton_import import tl, triton

_CAN = hasattr(tl, "target_info")
"""Triton from 3.5 on."""


def is_small(elements: int) -> bool:
    """Whether a launch over `elements` (the product of a key's sizes) uses programmatic dependent launch."""
    return _CAN and elements <= 1 << 20


def is_small_launch(key: Key) -> bool:
    """`Tunable.dependent_launch` for keys that begin as `row_key` does."""
    return is_small(key[0] << key[1])


if _CAN:

    @triton.jit
    def wait_for_previous(DEPENDENT: tl.constexpr):
        """Wait until all earlier launches have ended and their writes are visible, then allow the next launch to start.

        In this order: a later kernel of other code may read early what it knows this launch does not write.
        """
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

else:  # older releases have no such functions, and look for them even where DEPENDENT is False

    @triton.jit
    def wait_for_previous(DEPENDENT: tl.constexpr):
        """Nothing: no launch is DEPENDENT (see `is_small`)."""
        tl.static_assert(not DEPENDENT)
