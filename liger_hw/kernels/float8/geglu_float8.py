"""GEGLU to FP8 and an FP8 linear of the result: y = (gelu(a) * b) W^T + bias.

gelu(a) * b is rounded as in ../pointwise/geglu.py and quantised with a scale for each row.
Saved for backward: a, b, W; gelu(a) * b in FP8. Backward: as in float8_linear.py, then geglu.py.
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import Sample
from ...runtime.operator import check, check_flags, check_tensors
from ..pointwise.geglu import APPROXIMATIONS, GELUMulFunction, geglu_reference
from .formats import why_no_float8
from .gated_rows import Gate, gated_linear, gated_rows, gated_tunable
from .swiglu_float8 import sample as gated_sample
from .whole_rows import SMALL, linears_reference

FWD = gated_tunable("geglu_float8")
TANH = Gate(gated_rows(FWD, "gelu_tanh", geglu_reference), GELUMulFunction.backward, (True,))
EXACT = Gate(
    gated_rows(FWD, "gelu", lambda a, b: geglu_reference(a, b, "none"), "exact_"), GELUMulFunction.backward, (False,)
)


def geglu_float8_reference(a, b, weight, bias=None, approximate="tanh", owned=False, rounds=None):
    return linears_reference(geglu_reference, (a, b, approximate), (weight,), (bias,), rounds)[0]


def liger_geglu_float8(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: str = "tanh",
    owned: bool = False,
) -> torch.Tensor:
    """(gelu(a) * b) weight^T + bias; gelu(a) * b is written and read in FP8, with a scale for each row.

    approximate: `tanh` or `none` (exact). The other arguments, the result and the errors are as for
    `liger_swiglu_float8`.
    """
    name = "liger_geglu_float8"
    check_tensors(name, optional=("bias",), a=a, b=b, weight=weight, bias=bias)
    check_flags(name, owned=owned)
    check(approximate in APPROXIMATIONS, name, f"approximate must be one of {', '.join(APPROXIMATIONS)}")
    return gated_linear(TANH if approximate == "tanh" else EXACT, a, b, weight, bias, owned, name)


WORKLOADS = {"gemma2_2b": (8192, 9216, 2304), "gemma3_12b": (8192, 15360, 3840)}


def sample(sizes, dtype, device, generator, *, approximate="tanh") -> Sample:
    gated = gated_sample(sizes, dtype, device, generator)
    gated.args = *gated.args, approximate
    return gated


OP = registry.register_file(
    __name__, tunables=(FWD,), options=({}, {"approximate": "none"}), small=SMALL, why_not=why_no_float8
)
