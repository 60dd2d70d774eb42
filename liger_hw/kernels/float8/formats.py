"""FP8 formats: which dtypes a device multiplies, and the scale of a row.

A number x is stored as q = round(x / scale). The scale is the smallest power of two with amax / scale <= the largest
number of the format, so that x / scale is exact and q errs by the format's rounding alone. It is at least 2^-100: rows
of zeros have that, and smaller numbers underflow. The scale of a row with an infinity or NaN is NaN, and then so is all
that is computed with it, as without FP8. Finite numbers do not overflow when quantised, but a product of numbers above
about 1e30 may.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...backends import target_of
from ...registry import Target, pretended
from ...runtime.triton_import import INTERPRET

E4M3, E5M2 = 0, 1
"""Formats by their number in an operator's schema: three bits of mantissa, or two and a wider range."""
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
DTYPES = {"fn": (torch.float8_e4m3fn, torch.float8_e5m2), "fnuz": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)}
"""`Target.float8` -> the dtype of each format."""
LEAST_POWER = -100


def aligned(n: int) -> int:
    """`n` rounded up to a multiple of 16, as FP8 products want their dimensions."""
    return -(-n // 16) * 16


class Float8Rows(NamedTuple):
    """A matrix x [n_rows, n_cols] in FP8: x is nearly data * scale, with scale as a column.

    data: [n_rows, n_cols rounded up to 16], with zeros behind; scale: fp32 [n_rows], or [1] where all rows share one;
    powers of two
    """

    data: torch.Tensor
    scale: torch.Tensor


def why_no_float8(target: Target) -> str:
    """Why a device cannot compute in FP8, or ""."""
    if target.float8:
        return ""
    return f"{target.name} ({target.arch}) has no matrix units for FP8; train in bfloat16 there"


def float8_dtype(device: torch.device, format: int) -> torch.dtype:
    """The dtype of a format on a device. Raises `ValueError` where the device has none."""
    if INTERPRET:  # Triton's interpreter has no other
        return DTYPES["fn"][format]
    target = pretended() or target_of(device)
    if not target.float8:
        raise ValueError(f"float8: {why_no_float8(target)}")
    return DTYPES[target.float8][format]


def largest_bits(dtype: torch.dtype) -> int:
    """The largest number of a dtype, as the bits of an fp32."""
    mantissa, exponent = math.frexp(torch.finfo(dtype).max)
    return (exponent + 126) << 23 | int((2 * mantissa - 1) * (1 << 23))


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale for numbers up to `amax` (fp32 or fp64, not negative) in `dtype`."""
    most, most_exponent = math.frexp(torch.finfo(dtype).max)
    mantissa, exponent = torch.frexp(amax)
    power = exponent - most_exponent + (mantissa > most)
    power = torch.where(amax > 0, power, LEAST_POWER).clamp_min(LEAST_POWER)
    return torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), power), math.nan)
