"""SwiGLU to FP8 and an FP8 linear of the result: y = (silu(a) * b) W^T + bias.

silu(a) * b is rounded as in ../pointwise/swiglu.py and quantised with a scale for each row.
Saved for backward: a, b, silu(a) * b in FP8, W. Backward: as in float8_linear.py, then swiglu.py.
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.operator import check_flags, check_tensors
from ..pointwise.swiglu import SiLUMulFunction, swiglu_reference
from .formats import why_no_float8
from .gated_rows import Gate, gated_linear, gated_rows, gated_tunable
from .whole_rows import SMALL, linears_reference

FWD = gated_tunable("swiglu_float8")
GATE = Gate(gated_rows(FWD, "silu", swiglu_reference), SiLUMulFunction.backward, (1.0, 1.0))


def swiglu_float8_reference(a, b, weight, bias=None, owned=False, rounds=None):
    return linears_reference(swiglu_reference, (a, b), (weight,), (bias,), rounds)[0]


def liger_swiglu_float8(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, owned: bool = False
) -> torch.Tensor:
    """(silu(a) * b) weight^T + bias; silu(a) * b is written and read in FP8, with a scale for each row.

    a (gate), b (up): [..., n_cols], n_cols at most 65536; weight: [n_out, n_cols]; bias: [n_out] or None. fp32, fp16 or
    bf16, all of one dtype. owned: the backward may overwrite a and b, as in `liger_swiglu`. Returns [..., n_out].
    Raises `ValueError` for shapes and dtypes that do not fit, and where the device has no FP8.
    """
    check_tensors("liger_swiglu_float8", optional=("bias",), a=a, b=b, weight=weight, bias=bias)
    check_flags("liger_swiglu_float8", owned=owned)
    return gated_linear(GATE, a, b, weight, bias, owned, "liger_swiglu_float8")


WORKLOADS = {"llama3_8b": (8192, 14336, 4096), "qwen3_8b": (8192, 12288, 4096), "llama3_70b": (4096, 28672, 8192)}


def sample(sizes, dtype, device, generator, *, bias=False) -> Sample:
    """a, b, weight and bias of (n_rows, n_cols, n_out)."""
    n_rows, n_cols, n_out = sizes
    drawn = normal(dtype, device, generator)
    a, b, weight = drawn(n_rows, n_cols), drawn(n_rows, n_cols), drawn(n_out, n_cols)
    return Sample(
        args=(a, b, weight, drawn(n_out) if bias else None),
        reduction=n_cols,
        grad_reduction=max(n_rows, n_out),
        moved=(7 * dtype.itemsize + 4) * n_rows * n_cols + 5 * n_rows * n_out + 6 * n_cols * n_out,
        exact={"rounds": dtype},
        float8=True,
    )


OP = registry.register_file(__name__, tunables=(FWD,), options=({}, {"bias": True}), small=SMALL, why_not=why_no_float8)
