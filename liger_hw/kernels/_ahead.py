"""Kernels that are launched before what runs ahead of them has ended (programmatic dependent launch).

A launch of 1 us is in good part waiting for the launch before it to drain. Where `Backend.ahead` says that a device can, a
Tunable with `ahead=EARLY` is launched early; its kernels begin with `begin()`, before they touch memory.
"""

from __future__ import annotations

from ._triton import tl, triton

EARLY = hasattr(tl, "target_info")
"""Triton from 3.5 on."""

if EARLY:

    @triton.jit
    def begin():
        """Wait until all earlier launches have ended and what they wrote is seen, then let the next one come.

        In this order, since others' kernels may read early what they know the launch before them does not write.
        Nothing on devices without; in a kernel that was launched in the ordinary way it waits for nothing.
        """
        if tl.target_info.cuda_capability_geq(9):
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

else:

    @triton.jit
    def begin():
        pass
