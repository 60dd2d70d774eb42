"""RMSNorm with a gate, for linear attention and state space layers. The norm is applied before or after the gate.

    norm first   y = h(x) * w * act(gate)          h(u) = u / sqrt(mean(u^2) + eps)
    gate first   y = h(x * act(gate)) * w

Each group of group_size columns of a row is normalised separately; w is [n_cols], one weight a column. Statistics, sums
and act(gate) are fp32. Saved for backward: x, gate, w, and rstd = 1 / sqrt(mean(u^2) + eps), one fp32 a group.
Backward, with n = h * w and m = dn * w:  du = rstd * (m - h * mean(m * h)),  dw = sum over rows of dn * h.

Sources: gate first, Dao and Gu, "Transformers are SSMs", https://arxiv.org/abs/2405.21060; norm first, Yang et al.,
"Gated Linear Attention Transformers with Hardware-Efficient Training", https://arxiv.org/abs/2312.06635
"""

from __future__ import annotations

from typing import Any

import torch

from ... import registry
from ...registry import Key, LaunchConfig, Sample, Target, normal, row_key, tile_space
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.load_hint import load_with_hint
from ...runtime.operator import (
    OperatorFunction,
    cdiv,
    check,
    check_flags,
    check_integers,
    check_numbers,
    check_tensors,
    define,
    dense,
    launch,
    row_major,
    rows_of,
)
from ...runtime.triton_import import tl, triton
from ..pointwise.elementwise import activation
from ..rows.reduce import column_sum, column_sum_tunable, partial_sums
from ..rows.tuning import (
    persistent_misfit,
    row_sample,
    row_tiles,
    row_tunable,
    row_warps,
    rows_per_program,
    safe_whole_rows,
    whole_rows_misfit,
)

_NAME = "liger_gated_rms_norm"
ACTIVATIONS = ("silu", "sigmoid")  # the operators' flag `sigmoid` is an index into this
CASTING_MODES = ("llama", "gemma")


def gated_rms_norm_reference(
    X, gate, W, eps=1e-6, activation="silu", casting_mode="llama", norm_before_gate=True, group_size=None
):
    flags = activation == "sigmoid", casting_mode == "llama", norm_before_gate
    return _fwd_reference(X, gate, W, eps, *flags, group_size or X.shape[-1])[0]


def _fwd_reference(x, gate, w, eps, sigmoid, llama, norm_first, group_size):
    wide = torch.promote_types(x.dtype, torch.float32)
    g = gate.to(wide)
    factor = torch.sigmoid(g) if sigmoid else torch.nn.functional.silu(g)
    u = x.to(wide) if norm_first else x.to(wide) * factor
    grouped = u.reshape(rows_of(x)[0], x.shape[-1] // group_size, group_size)
    rstd = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    h = (grouped * rstd).reshape(x.shape)
    y = w * h.to(x.dtype) if llama else w.to(wide) * h
    if norm_first:
        y = y.to(wide) * factor
    return y.to(_out_dtype(x, w, llama, norm_first)).contiguous(), rstd[..., 0].t().contiguous()


def _out_dtype(x: torch.Tensor, w: torch.Tensor, llama: bool, norm_first: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, w.dtype) if llama and not norm_first else x.dtype


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load(P_ptr, rows, row_stride, at, mask, LOAD_HINT: tl.constexpr):
    return load_with_hint(P_ptr + rows * row_stride + at, LOAD_HINT, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _gated_rms_norm_fwd_kernel(
    X_ptr,
    G_ptr,
    W_ptr,
    Y_ptr,
    RSTD_ptr,
    X_row_stride,
    G_row_stride,
    Y_row_stride,
    n_rows,
    n_cols,
    eps,
    KIND: tl.constexpr,
    LLAMA: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program takes ROWS rows of one group of n_cols columns; axis 1 of the grid is the group."""
    wait_for_previous(DEPENDENT)
    group = tl.program_id(1)
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    at = group * n_cols + cols
    x = _load(X_ptr, rows, X_row_stride, at, mask, LOAD_HINT)
    g = _load(G_ptr, rows, G_row_stride, at, mask, LOAD_HINT)
    w = tl.load(W_ptr + at, mask=cols < n_cols, other=0.0)
    factor, _ = activation(g, KIND)
    u = x if NORM_FIRST else x * factor
    rstd = tl.rsqrt(tl.sum(u * u, axis=1)[:, None] / n_cols + eps)
    h = u * rstd
    y = h * w.to(tl.float32)
    if LLAMA:
        h = h.to(X_ptr.dtype.element_ty).to(tl.float32)
        y = h * w.to(tl.float32)
        if X_ptr.dtype.element_ty == W_ptr.dtype.element_ty:
            y = y.to(X_ptr.dtype.element_ty).to(tl.float32)
    if NORM_FIRST:
        y = y * factor
    tl.store(Y_ptr + rows * Y_row_stride + at, y.to(Y_ptr.dtype.element_ty), mask=mask)
    tl.store(RSTD_ptr + group * n_rows.to(tl.int64) + rows, rstd, mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _gated_rms_norm_bwd_kernel(
    DY_ptr,
    X_ptr,
    G_ptr,
    W_ptr,
    RSTD_ptr,
    DX_ptr,
    DG_ptr,
    Partial_ptr,
    DY_row_stride,
    X_row_stride,
    G_row_stride,
    DX_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    KIND: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (p, g) takes row tiles p, p + programs, ... of group g. Partial_ptr [programs, groups * n_cols]: dw."""
    wait_for_previous(DEPENDENT)
    group = tl.program_id(1)
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    at = group * n_cols + cols
    w = tl.load(W_ptr + at, mask=cols < n_cols, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (rows < n_rows) & (cols < n_cols)
        dy = _load(DY_ptr, rows, DY_row_stride, at, mask, LOAD_HINT)
        x = _load(X_ptr, rows, X_row_stride, at, mask, LOAD_HINT)
        g = _load(G_ptr, rows, G_row_stride, at, mask, LOAD_HINT)
        rstd = tl.load(RSTD_ptr + group * n_rows.to(tl.int64) + rows, mask=rows < n_rows, other=0.0)
        factor, slope = activation(g, KIND)
        u = x if NORM_FIRST else x * factor
        dn = dy * factor if NORM_FIRST else dy
        h = u * rstd
        dw += dn * h
        m = dn * w
        du = rstd * (m - h * (tl.sum(m * h, axis=1)[:, None] / n_cols))
        dx = du if NORM_FIRST else du * factor
        dg = (dy * h * w if NORM_FIRST else du * x) * slope
        tl.store(DX_ptr + rows * DX_row_stride + at, dx.to(DX_ptr.dtype.element_ty), mask=mask)
        tl.store(DG_ptr + rows * DX_row_stride + at, dg.to(DG_ptr.dtype.element_ty), mask=mask)
    partial = Partial_ptr + tl.program_id(0) * (tl.num_programs(1) * n_cols) + group * n_cols + tl.arange(0, BLOCK_SIZE)
    total = tl.sum(dw, axis=0)
    tl.store(partial, total.to(Partial_ptr.dtype.element_ty), mask=tl.arange(0, BLOCK_SIZE) < n_cols)


# -- tunables --------------------------------------------------------------------------------------------------------
# A program holds rows of one group (an attention head or part of the columns). The key has the width of a group.


def _fwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """At least 2048 elements a program if there are enough rows."""
    rows = rows_per_program(target, key[1], max(1, min(32, 2048 // key[0])))
    few_rows = 1 << key[1] <= target.multiprocessors
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": rows}, row_warps(target, few_rows, key[0] * rows))


def _bwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Tiles of 2048 elements, on a persistent grid with 8192 elements a multiprocessor."""
    rows = rows_per_program(target, key[1], max(1, min(16, 2048 // key[0])))
    ctas = max(1, min(8, 8192 // (key[0] * rows)))
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": rows}, target.warps(key[0] * rows, 16, 16), 1, ctas)


def _space(target: Target, key: Key) -> list[LaunchConfig]:
    how = {"per_thread": (4, 64), "stages": (1, 2), "ctas": (2, 4, 8), "hints": ("none", "stream")}
    return tile_space(target, row_tiles({key[0]}), (1, 2, 4, 8, 16, 32), **how)


FWD = row_tunable(
    "gated_rms_norm",
    "fwd",
    _gated_rms_norm_fwd_kernel,
    heuristic=_fwd_heuristic,
    safe=safe_whole_rows,
    space=_space,
    valid=whole_rows_misfit,
)
BWD = row_tunable(
    "gated_rms_norm",
    "bwd",
    _gated_rms_norm_bwd_kernel,
    heuristic=_bwd_heuristic,
    safe=safe_whole_rows,
    space=_space,
    valid=lambda config, key: persistent_misfit(config, key) or whole_rows_misfit(config, key),
)
DW = column_sum_tunable("gated_rms_norm")

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(x, gate, w, eps, sigmoid, llama, norm_first, group_size):
    x, gate, w = row_major(x), row_major(gate), dense(w)
    n_rows, n_cols, stride = rows_of(x)
    n_groups = n_cols // group_size
    y = torch.empty(x.shape, dtype=_out_dtype(x, w, llama, norm_first), device=x.device)
    rstd = x.new_empty((n_groups, n_rows), dtype=torch.float32)
    if n_rows:
        plan = FWD.plan(x.device, row_key(n_rows, group_size, x.itemsize))
        args = (x, gate, w, y, rstd, stride, rows_of(gate)[2], n_cols, n_rows, group_size, eps)
        grid = cdiv(n_rows, plan.config.blocks["ROWS"]), n_groups
        launch(plan, _gated_rms_norm_fwd_kernel, grid, args, (ACTIVATIONS[sigmoid], llama, norm_first))
    return y, rstd


def _bwd(dy, x, gate, w, rstd, eps, sigmoid, llama, norm_first, group_size):
    dy, x, gate, w = row_major(dy), row_major(x), row_major(gate), dense(w)
    n_rows, n_cols, stride = rows_of(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if not n_rows:
        return dx, dgate, torch.zeros_like(w)
    plan = BWD.plan(x.device, row_key(n_rows, group_size, x.itemsize))
    n_tiles = cdiv(n_rows, plan.config.blocks["ROWS"])
    n_groups = n_cols // group_size
    programs = min(max(1, plan.programs // n_groups), n_tiles)
    partial = partial_sums(x, programs, n_cols, w.dtype)
    strides = rows_of(dy)[2], stride, rows_of(gate)[2], n_cols
    args = (dy, x, gate, w, rstd, dx, dgate, partial, *strides, n_rows, group_size, n_tiles)
    launch(plan, _gated_rms_norm_bwd_kernel, (programs, n_groups), args, (ACTIVATIONS[sigmoid], norm_first))
    return dx, dgate, column_sum(DW, partial, w.dtype)


def _misfit(n_cols, group_size) -> str:
    if not n_cols or group_size < 1 or n_cols % group_size:
        return f"group_size must be a divisor of n_cols = {n_cols}, got {group_size!r}"
    return ""


class GatedRMSNormFunction(OperatorFunction):
    fwd = define(
        "gated_rms_norm_fwd(Tensor X, Tensor gate, Tensor W, float eps, bool sigmoid, bool llama, bool norm_first, "
        "int group_size) -> (Tensor Y, Tensor rstd)",
        shapes="X, gate [*, n]; W [n]",
        misfit=lambda X, *args: _misfit(X.shape[-1], args[-1]),
        launcher=_fwd,
        reference=_fwd_reference,
    )
    bwd = define(
        "gated_rms_norm_bwd(Tensor dY, Tensor X, Tensor gate, Tensor W, Tensor rstd, float eps, bool sigmoid, "
        "bool llama, bool norm_first, int group_size) -> (Tensor dX, Tensor dgate, Tensor dW)",
        shapes="X, gate, dY [*, n]; W [n]; rstd [groups, rows]",
        misfit=lambda dY, X, *args: _misfit(X.shape[-1], args[-1]),
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_gated_rms_norm(
    X: torch.Tensor,
    gate: torch.Tensor,
    W: torch.Tensor,
    eps: float = 1e-6,
    activation: str = "silu",
    casting_mode: str = "llama",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> torch.Tensor:
    """RMSNorm of X over groups of columns, scaled by W and gated by activation(gate).

    norm_before_gate: h(X) * W * activation(gate), else h(X * activation(gate)) * W, with h(u) = u / sqrt(mean(u^2) +
    eps). X, gate: [..., n_cols]; W: [n_cols]; fp32, fp16 or bf16 (fp64 too on the CPU). activation: `silu` or
    `sigmoid`. casting_mode: `llama` rounds h to X's dtype and h * W to the promoted dtype of X and W; `gemma` rounds
    the result only. group_size: columns that are normalised together, a divisor of n_cols; None: all.
    Returns [..., n_cols] in X's dtype; with `llama` and norm_before_gate=False in the promoted dtype of X and W.
    Raises `ValueError` for shapes, dtypes, devices or options that do not fit.
    """
    check_numbers(_NAME, eps=eps)
    check_flags(_NAME, norm_before_gate=norm_before_gate)
    if activation not in ACTIVATIONS:
        check(False, _NAME, f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if casting_mode not in CASTING_MODES:
        check(False, _NAME, f"casting_mode must be one of {', '.join(CASTING_MODES)}, got {casting_mode!r}")
    if group_size is None:
        check_tensors(_NAME, X=X)
        group_size = X.shape[-1] if X.dim() else 1
    check_integers(_NAME, group_size=group_size)
    flags = activation == "sigmoid", casting_mode == "llama", bool(norm_before_gate)
    return GatedRMSNormFunction.apply(X, gate, W, eps, *flags, group_size)


class LigerGatedRMSNorm(torch.nn.Module):
    """Gated RMSNorm layer, with a weight that starts at one; the arguments are as for `liger_gated_rms_norm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        activation: str = "silu",
        casting_mode: str = "llama",
        norm_before_gate: bool = True,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon, self.activation, self.casting_mode = eps, activation, casting_mode
        self.norm_before_gate, self.group_size = norm_before_gate, group_size

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """hidden_states, gate: [..., hidden_size]; returns the same shape."""
        options = self.activation, self.casting_mode, self.norm_before_gate, self.group_size
        return liger_gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, *options)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}, activation={self.activation}"


WORKLOADS = {"qwen3_next_80b": (262144, 128), "kimi_linear_48b": (262144, 128), "bamba_9b": (8192, 8192)}
"""The first two have 8192 tokens of 32 heads."""


def sample(sizes, dtype, device, generator, *, groups=1, wide_weight=False, **options: Any) -> Sample:
    n_rows, n_cols = sizes
    n_cols *= groups
    drawn = normal(dtype, device, generator)
    x, gate = drawn(n_rows, n_cols), drawn(n_rows, n_cols)
    w = normal(torch.promote_types(dtype, torch.float32) if wide_weight else dtype, device, generator)(n_cols)
    if groups > 1:
        options["group_size"] = n_cols // groups
    return row_sample((n_rows, n_cols), dtype, (x, gate, w), moved=8, kwargs=options)


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD, DW),
    options=(
        {},
        {"activation": "sigmoid", "casting_mode": "gemma", "wide_weight": True},
        {"norm_before_gate": False, "groups": 3},
        {"norm_before_gate": False, "casting_mode": "gemma"},
    ),
)
