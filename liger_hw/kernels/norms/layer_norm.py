"""LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b, over the last dimension.

Statistics, products and sums are fp32; y is rounded once. var is the mean squared deviation. Saved for backward: x, w,
and mean and rstd = 1 / sqrt(var + eps), two fp32 a row. The backward's formulas are in backward.py.

Source: Ba, Kiros and Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450; running statistics of rows read
in tiles: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ... import registry
from ...registry import Key, LaunchConfig, Sample, Target, normal
from ...runtime.cooperative import resident_options
from ...runtime.operator import OperatorFunction, check, check_numbers, define
from ...runtime.sharding import RowsRule
from ..rows.blocks import max_columns
from ..rows.tuning import fwd_heuristic, fwd_space, row_sample
from .backward import backward_tunables, norm_backward
from .forward import GEMMA, norm_forward, norm_forward_tunable


def layer_norm_reference(X: torch.Tensor, W: torch.Tensor | None, B: torch.Tensor | None, eps: float) -> torch.Tensor:
    return fwd_reference(X, W, B, eps)[0]


def fwd_reference(x, w, b, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    mean = x.to(wide).mean(-1, keepdim=True)
    centred = x.to(wide) - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred * rstd
    if w is not None:
        y = y * w.to(wide)
    if b is not None:
        y = y + b.to(wide)
    return y.to(x.dtype).contiguous(), torch.stack([mean.flatten(), rstd.flatten()])


def _fwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """As for rms_norm, with two exceptions: many rows of 4096 columns, if aligned, take half the warps, and many rows
    in two blocks or of 16384 columns take a persistent kernel, if its registers hold a row, W and B."""
    config = fwd_heuristic(target, key, 32768)
    warps = target.warps(key[0], 32)
    if key[0] == 4096 and key[3:] != (0,) and 1 << key[1] > 16 * target.multiprocessors:
        config = replace(config, num_warps=warps)
    many = 1 << key[1] > 32 * target.multiprocessors
    fits = 1024 <= key[0] <= 4096 if key[3:] == (1,) else key[0] == 16384 and not key[3:]
    if fits and key[2] <= 2 and many:
        return _persistent(target, key, warps, 3, max(1, 12288 // key[0])) or config
    return config


def _persistent(target: Target, key: Key, warps: int, stages: int, ctas: int) -> LaunchConfig | None:
    """A persistent grid whose registers are limited so that all programs are resident. None if the compiler cannot
    limit registers, or if the rows in flight do not fit shared memory."""
    if not target.cooperative or ctas * (stages - 1) * max_columns(key[0]) * key[2] > target.shared_memory:
        return None
    registers = {"maxnreg": resident_options(target, warps, ctas)["maxnreg"]}
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": 1}, warps, stages, ctas, vendor=registers)


def _fwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    """As for rms_norm, and persistent kernels that keep W and B in registers."""
    persistent = (
        _persistent(target, key, warps, stages, resident_warps // warps)
        for warps in (1, 2, 4, 8, 16)
        for resident_warps in (12, 16)
        for stages in (3, 4)
        if resident_warps >= warps and 1024 <= key[0] <= 16384 and 16 <= key[0] // (warps * target.warp_size) <= 32
    )
    return [*fwd_space(target, key), *(config for config in persistent if config is not None)]


FWD = norm_forward_tunable("layer_norm", _fwd_heuristic, _fwd_space)
BACKWARD = backward_tunables("layer_norm", means="bwd_means", grads=2)


def misfit(X, W, B, eps) -> str:
    return "B needs W; for a shift alone pass ones as W" if W is None and B is not None else ""


class LayerNormFunction(OperatorFunction):
    sharding, params, is_cheap = RowsRule(inputs=("X",), weights=("W", "B")), ("W", "B"), True
    fwd = define(
        "layer_norm_fwd(Tensor X, Tensor? W, Tensor? B, float eps) -> (Tensor Y, Tensor stats)",
        shapes="X [*, n]; W [n]; B [n]",
        misfit=misfit,
        launcher=lambda x, w, b, eps: norm_forward(FWD, x, w, eps, None, GEMMA, b=b, subtract_mean=True),
        reference=fwd_reference,
    )
    bwd = define(
        "layer_norm_bwd(Tensor dY, Tensor X, Tensor? W, Tensor? B, Tensor stats, float eps, bool needs_params)"
        " -> (Tensor dX, Tensor dW_dB)",
        shapes="X, dY [*, n]; W [n]; B [n]; stats [2, rows]",
        launcher=lambda dy, x, w, b, stats, eps, needs_params: norm_backward(
            BACKWARD, dy, x, w, b, stats, None, None, GEMMA, True, needs_params
        ),
        derivative_of=fwd,
    )


def liger_layer_norm(X: torch.Tensor, W: torch.Tensor | None, B: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension: (X - mean) / sqrt(var + eps) * W + B.

    X: [..., n_cols]; W, B: [n_cols] or None; B needs W. fp32, fp16 or bf16 (fp64 too on the CPU).
    Returns [..., n_cols] in X's dtype.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_numbers("liger_layer_norm", eps=eps)
    return LayerNormFunction.apply(X, W, B, eps)


class LigerLayerNorm(torch.nn.Module):
    """LayerNorm layer: y = (x - mean) / sqrt(var + eps) * weight + bias.

    hidden_size: size of the last dimension; init_fn: `ones` or `zeros` for the weight.
    bias: with True and with False there is a bias, which starts at zero, as in Liger's state dicts; None: no bias.
    impl, mode, backend: choose an implementation in Liger; here they are attributes without effect.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool | None = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check(init_fn in ("ones", "zeros"), "LigerLayerNorm", f"init_fn must be ones or zeros, got {init_fn!r}")
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.impl = self.backend = backend if impl is None else impl
        self.mode = mode
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))
        self.register_parameter("bias", None if bias is None else torch.nn.Parameter(torch.zeros(hidden_size)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [..., hidden_size]; returns the same shape."""
        return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}, bias={self.bias is not None}"


WORKLOADS = {
    "command_r_35b": (8192, 8192),
    "stablelm_12b": (8192, 5120),
    "gpt_neox_20b": (8192, 6144),
    "phi_2": (8192, 2560),
    "falcon_11b": (16384, 4096),
    "clip_vit_l": (36928, 1024),
}


def sample(sizes, dtype, device, generator, *, bias=True, affine=True) -> Sample:
    n_rows, n_cols = sizes
    drawn = normal(dtype, device, generator)
    x, w, b = drawn(n_rows, n_cols), drawn(n_cols) if affine else None, drawn(n_cols) if bias and affine else None
    return row_sample(sizes, dtype, (x, w, b, 1e-6))


OP = registry.register_file(__name__, tunables=(FWD, *BACKWARD), options=({}, {"bias": False}, {"affine": False}))
