"""Keeping a row in its own narrow dtype across a reduction."""

from __future__ import annotations

from ...runtime.triton_import import tl, triton


@triton.jit
def _after(x, value):
    """x itself, but only once `value` [rows, 1] is known: it is multiplied by a one that hangs on it.

    This keeps a row alive across a reduction in its own narrow dtype. The compiler would keep the fp32 copy instead,
    whose registers other programs could use, and which does not fit at all at 32768 columns. A NaN `value` makes the
    row NaN.
    """
    if x.dtype != tl.float32:
        x = x * tl.where(value == value, 1.0, 0.0).to(x.dtype)
    return x
