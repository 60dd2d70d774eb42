"""FP8 formats: the dtypes of a device, and the scale of a row.

A number x is stored as q = round(x / scale). The scale is the smallest power of two with amax / scale <= the largest
number of the format, so that x / scale is exact and only the rounding to the format has an error. The scale is at least
2^-100, also for rows of zeros; the scale of a row with an infinity or NaN is NaN. Quantising cannot overflow, but a
product of numbers above about 1e30 can.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...backends import target_of
from ...registry import Target, pretended
from ...runtime.triton_import import INTERPRET

E4M3, E5M2 = 0, 1
"""The numbers of the formats in operators' schemas."""
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
DTYPES = {"fn": (torch.float8_e4m3fn, torch.float8_e5m2), "fnuz": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)}
"""`Target.float8` -> the dtype of each format."""
MIN_SCALE_EXPONENT = -100


def aligned(n: int) -> int:
    """`n` rounded up to a multiple of 16, as FP8 matrix products need."""
    return -(-n // 16) * 16


class Float8Rows(NamedTuple):
    """A matrix [n_rows, n_cols] in FP8, approximately data * scale[:, None].

    data: [n_rows, n_cols rounded up to 16], padded with zeros; scale: powers of two in fp32, [n_rows], or [1] for all
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
    if INTERPRET:  # Triton's interpreter has no fnuz dtypes
        return DTYPES["fn"][format]
    target = pretended() or target_of(device)
    if not target.float8:
        raise ValueError(f"float8: {why_no_float8(target)}")
    return DTYPES[target.float8][format]


def largest_bits(dtype: torch.dtype) -> int:
    """The bits of a dtype's largest number, as fp32."""
    mantissa, exponent = math.frexp(torch.finfo(dtype).max)
    return (exponent + 126) << 23 | int((2 * mantissa - 1) * (1 << 23))


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale for numbers up to `amax` (fp32 or fp64, not negative) in `dtype`."""
    max_mantissa, max_exponent = math.frexp(torch.finfo(dtype).max)
    mantissa, exponent = torch.frexp(amax)
    power = exponent - max_exponent + (mantissa > max_mantissa)
    power = torch.where(amax > 0, power, MIN_SCALE_EXPONENT).clamp_min(MIN_SCALE_EXPONENT)
    return torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), power), math.nan)
