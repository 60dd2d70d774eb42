"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * (offset + w), over the last dimension.

Statistics and sums are fp32. Saved for backward: x, w, and rstd = 1 / sqrt(mean(x^2) + eps), one fp32 a row. The
backward's formulas are in backward.py.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

from functools import partial
from typing import Iterable

import torch

from ... import registry
from ...registry import Sample, normal
from ...runtime.operator import OperatorFunction, check, check_numbers, define, warn_ignored
from ...runtime.sharding import RowsRule
from ..rows.tuning import row_sample
from .backward import backward_tunables, norm_backward
from .forward import GEMMA, LLAMA, NONE, norm_forward, norm_forward_tunable, out_dtype

CASTING_MODES = {"llama": LLAMA, "gemma": GEMMA, "none": NONE}


def rms_norm_reference(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return fwd_reference(X, W, eps, offset, CASTING_MODES[casting_mode])[0]


def fwd_reference(x, w, eps, offset, casting):
    y, rstd = normed(x, w, eps, offset, casting)
    return y.to(out_dtype(x, w, casting)).contiguous(), rstd


def normed(x, w, eps, offset, casting):
    """(unrounded y in fp32 or fp64, rstd [rows]) in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y * rstd
    if casting == LLAMA:
        y = y.to(x.dtype).to(wide)
    if w is not None:
        y = y * (w.to(wide) + offset)
    return y, rstd.flatten()


FWD = norm_forward_tunable("rms_norm")
BACKWARD = backward_tunables("rms_norm")


def rms_backward(tunables, dy, x, w, rstd, eps, offset, casting, needs_dw, ds=None):
    return norm_backward(tunables, dy, x, w, None, rstd, ds, offset, casting, False, needs_dw)


def casting_code(name: str, casting_mode: str, modes: Iterable[str] = CASTING_MODES) -> int:
    """The number of a casting mode (CASTING of the kernels). Raises `ValueError` for a mode that is not in `modes`."""
    if not isinstance(casting_mode, str) or casting_mode not in modes:
        check(False, name, f"casting_mode must be one of {', '.join(modes)}, got {casting_mode!r}")
    return CASTING_MODES[casting_mode]


class RMSNormFunction(OperatorFunction):
    sharding, params, is_cheap = RowsRule(inputs=("X",), weights=("W",)), ("W",), True
    fwd = define(
        "rms_norm_fwd(Tensor X, Tensor? W, float eps, float offset, int casting) -> (Tensor Y, Tensor rstd)",
        shapes="X [*, n]; W [n]",
        launcher=partial(norm_forward, FWD),
        reference=fwd_reference,
    )
    bwd = define(
        "rms_norm_bwd(Tensor dY, Tensor X, Tensor? W, Tensor rstd, float eps, float offset, int casting,"
        " bool needs_params) -> (Tensor dX, Tensor dW)",
        shapes="X, dY [*, n]; W [n]; rstd of rows",
        launcher=partial(rms_backward, BACKWARD),
        derivative_of=fwd,
    )


def liger_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    """RMSNorm over the last dimension: X / sqrt(mean(X^2) + eps) * (offset + W).

    X: [..., n_cols]; W: [n_cols] or None. fp32, fp16 or bf16 (fp64 too on the CPU). Returns [..., n_cols].
    casting_mode: `llama` rounds the normalised X to X's dtype before scaling; `gemma` computes in fp32 and rounds once,
    to X's dtype; `none` also rounds once, to the promoted dtype of X and W.
    in_place: accepted for compatibility; the gradient never overwrites a tensor the caller can see.
    Raises `ValueError` for shapes, dtypes, devices or a casting mode that do not fit.
    """
    check_numbers("liger_rms_norm", eps=eps, offset=offset)
    return RMSNormFunction.apply(X, W, eps, offset, casting_code("liger_rms_norm", casting_mode))


class LigerRMSNorm(torch.nn.Module):
    """RMSNorm layer: y = x / sqrt(mean(x^2) + eps) * (offset + weight).

    hidden_size: size of the last dimension; init_fn: `ones` or `zeros` for the weight; elementwise_affine=False: no
    weight. row_mode: ignored with a warning. The other arguments are as for `liger_rms_norm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check(init_fn in ("ones", "zeros"), name, f"init_fn must be ones or zeros, got {init_fn!r}")
        casting_code(name, casting_mode)
        warn_ignored(name, "the launch configuration decides how many rows a program has", row_mode=row_mode)
        self.hidden_size = hidden_size
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place
        self.row_mode, self.elementwise_affine = row_mode, elementwise_affine
        initial = getattr(torch, init_fn)(hidden_size) if elementwise_affine else None
        self.register_parameter("weight", None if initial is None else torch.nn.Parameter(initial))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [..., hidden_size]; returns the same shape."""
        return liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )

    def extra_repr(self) -> str:
        affine = self.weight is not None  # monkey_patch.py binds this to norms without elementwise_affine
        size = self.weight.shape[0] if affine else self.hidden_size
        return (
            f"{size}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode}, "
            f"elementwise_affine={affine}"
        )


WORKLOADS = {
    "mistral_7b": (16384, 4096),
    "llama3_8b": (8192, 4096),
    "llama3_70b": (8192, 8192),
    "qwen3_8b_qk": (65536, 128),
    "gemma2_2b": (8192, 2304),
    "llama3_2_1b": (8192, 2048),
}


def sample(sizes, dtype, device, generator, *, casting_mode="llama", offset=0.0, affine=True) -> Sample:
    n_rows, n_cols = sizes
    drawn = normal(dtype, device, generator)
    x, w = drawn(n_rows, n_cols), drawn(n_cols) if affine else None
    return row_sample(sizes, dtype, (x, w, 1e-6, offset, casting_mode))


OP = registry.register_file(
    __name__,
    tunables=(FWD, *BACKWARD),
    options=({}, {"casting_mode": "gemma", "offset": 1.0}, {"casting_mode": "none"}, {"affine": False}),
)
