"""Launches that do not wait for what runs ahead of them to drain (programmatic dependent launch).

Of a launch of 1 us a good part is waiting for the launch before it to drain. Where `Backend.ahead` says that a device can, a
Tunable whose `ahead` says yes to a key has its kernels launched early; they begin with `begin(AHEAD)`, before they touch
memory, and wait there. On an H200 (2026-11-22) a forward and a backward of few elements take 0.2 to 1.3 us less so: 2.6 -> 1.6
us of one token, 4.1 -> 2.8 of swiglu's 128 x 512, 3.2 -> 2.5 of rms_norm's. Of 2^20 elements they take 0.5 us less of 6 or 7
(softmax, swiglu) to 0.1 of 9 (norms), of more they lose: softmax of 2048 x 1024 8.8 us for 8.3, swiglu of 512 x 8192 20.7 for
17.8. Where programs are many even the wait costs, launched early or not: rope of 16384 tokens took 316 us for 166 (we do not
know why), so that those begin without a word of it. An embedding's gradient, of few tokens but a whole table, took 32 us for
20; the sums behind a norm's backward, 0.1 to 0.2 us slower of 47 if they alone are early and with the rest 0.2 to 0.9 of 9 to
11, are not early. `benchmarks/results/early-launch-h200.json`.
"""

from __future__ import annotations

from ..registry import Key
from .triton_import import tl, triton

_CAN = hasattr(tl, "target_info")
"""Triton from 3.5 on."""


def few(elements: int) -> bool:
    """Whether a launch over so many elements, of sizes rounded up as in keys, is to be early."""
    return _CAN and elements <= 1 << 20


def few_elements(key: Key) -> bool:
    """`Tunable.ahead` of keys that begin as `row_key` does."""
    return few(key[0] << key[1])


@triton.jit
def begin(AHEAD: tl.constexpr):
    """Wait until all earlier launches have ended and what they wrote is seen, then let the next one come; AHEAD or nothing.

    In this order, since others' kernels may read early what they know the launch before them does not write.
    """
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
