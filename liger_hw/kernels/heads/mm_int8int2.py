"""Product of int8 activations and 2-bit weights (ternary or four-valued, as BitNet has them), exact in int32.

    c[m, n] = sum over k of a[m, k] * w[k, n]        a int8 [M, K], w in {-1, 0, 1, 2}, c int32 [M, N]

Packing, as in transformers: with K = 4 P, byte p of a column holds w[p] + 1, w[P + p] + 1, w[2 P + p] + 1 and
w[3 P + p] + 1 in two bits each, the lowest bits first. If K is no multiple of four, the last bits are zero, which
unpack to -1.

The weights are unpacked to int8 and multiplied by the vendor's integer GEMM where torch has one. There is no Triton
kernel and no gradient, so nothing is in the registry.

Source: Wang et al., "BitNet", https://arxiv.org/abs/2310.11453
"""

from __future__ import annotations

import torch

from ...private import has_integer_matmul, integer_matmul
from ...runtime.operator import cdiv, check

_PER_BYTE = 4
_EXACT_SUM_LENGTH = 1 << 15
"""How many products of magnitude at most 2^8 fp32 sums exactly."""


def pack_weights(intweights: torch.Tensor, bits: int = 2) -> torch.Tensor:
    """[K, ...] integers in {-1, 0, 1, 2} -> [ceil(K / 4), ...] uint8. Raises `ValueError` unless bits is 2."""
    check(bits == 2, "pack_weights", f"bits must be 2, got {bits}")
    check(intweights.dim() > 0, "pack_weights", "intweights must have at least one dimension")
    rows = cdiv(intweights.shape[0], _PER_BYTE)
    codes = torch.zeros((_PER_BYTE * rows, *intweights.shape[1:]), dtype=torch.uint8, device=intweights.device)
    codes[: intweights.shape[0]] = (intweights + 1).to(torch.uint8)
    first, second, third, fourth = codes.view(_PER_BYTE, rows, *intweights.shape[1:])
    return first | second << 2 | third << 4 | fourth << 6


def unpack_weights(packed: torch.Tensor, bits: int = 2) -> torch.Tensor:
    """[P, ...] uint8 -> [4 P, ...] int32 in {-1, 0, 1, 2}. Raises `ValueError` unless bits is 2."""
    check(bits == 2, "unpack_weights", f"bits must be 2, got {bits}")
    check(packed.dtype is torch.uint8, "unpack_weights", f"packed must be uint8, got {packed.dtype}")
    return _unpacked(packed).to(torch.int32)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    codes = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)])
    return codes.to(torch.int8) - 1


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] int8 times the weights packed in b [K / 4, N] uint8 -> [M, N] int32, exact. Raises `ValueError` for
    shapes, dtypes or devices that do not fit."""
    check(a.dtype is torch.int8 and a.dim() == 2, "matmul", f"a must be int8 [M, K], got {a.dtype} {tuple(a.shape)}")
    check(
        b.dtype is torch.uint8 and b.dim() == 2, "matmul", f"b must be uint8 [K / 4, N], got {b.dtype} {tuple(b.shape)}"
    )
    fits = a.shape[1] == _PER_BYTE * b.shape[0]
    check(fits, "matmul", f"a has K={a.shape[1]}, b holds weights for K={_PER_BYTE * b.shape[0]}")
    check(a.device == b.device, "matmul", f"b is on {b.device} but a is on {a.device}; move them to one device")
    weights = _unpacked(b)
    if a.device.type == "cpu":
        return a.to(torch.int32) @ weights.to(torch.int32)
    if has_integer_matmul(a.device.type) and min(a.shape[1], b.shape[1]) > 0:
        return _by_vendor(a, weights)
    parts = zip(a.split(_EXACT_SUM_LENGTH, 1), weights.split(_EXACT_SUM_LENGTH))
    return sum((x.float() @ w.float()).to(torch.int32) for x, w in parts)


def _by_vendor(a: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The vendor's GEMM, on operands padded with zeros: it needs more than 16 rows of a, and K and N multiples of 8."""
    rows, columns = a.shape[0], weights.shape[1]
    k = 8 * cdiv(a.shape[1], 8)
    a = torch.nn.functional.pad(a, (0, k - a.shape[1], 0, max(0, 32 - rows)))
    weights = torch.nn.functional.pad(weights, (0, 8 * cdiv(columns, 8) - columns, 0, k - weights.shape[0]))
    return integer_matmul(a, weights)[:rows, :columns]
