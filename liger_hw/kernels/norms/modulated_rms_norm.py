"""Modulated RMSNorm, the norm of diffusion transformers: y = rms_norm(x, w) * (1 + scale) + shift.

scale is flattened to [n_mods, n_cols]; each row of it applies to n_rows / n_mods consecutive rows of x. Statistics,
products and sums are fp32. Casting modes and y's dtype are rms_norm's; y is rounded once, after the modulation.
Saved for backward: x, w, scale, shift (for its dtype), and rstd = 1 / sqrt(mean(x^2) + eps), one fp32 a row.
Backward, with m = dy * (offset + w) * (1 + scale) and h = x * rstd:  dx = rstd * (m - h * mean(m * h)). With q and
dshift the sums of dy * h and of dy over the rows of a modulation:  dscale = (offset + w) * q,
dw = sum over modulations of (1 + scale) * q.

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", https://arxiv.org/abs/2212.09748; the norm is
Zhang and Sennrich's, https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

import math

import torch

from ... import registry
from ...registry import Plan, Sample, next_power_of_2, normal, row_key
from ...runtime.operator import (
    OperatorFunction,
    cdiv,
    check_numbers,
    define,
    dense,
    empty_like,
    launch,
    no_weight,
    row_major,
    rows_of,
)
from ..pointwise.elementwise import evenly_spaced
from ..rows.blocks import blocks_key, row_blocks
from ..rows.reduce import column_sum, partial_sums
from .backward import MOST_ROWS_SUMMED, row_means, summed_columns
from .forward import out_dtype
from .modulated_rms_norm_kernels import BWD, BWD_ALL_SUMS, BWD_DOT, BWD_SUMS, DW, FWD
from .rms_norm import CASTING_MODES, LigerRMSNorm, casting_code, normed


def modulated_rms_norm_reference(X, W, scale, shift=None, eps=1e-6, offset=0.0, casting_mode="llama", in_place=True):
    return _fwd_reference(X, W, scale, shift, eps, offset, CASTING_MODES[casting_mode])[0]


def _fwd_reference(x, w, scale, shift, eps, offset, casting):
    y, rstd = normed(x, w, eps, offset, casting)
    n_cols = x.shape[-1]
    n_mods, n_rows = math.prod(scale.shape[:-1]), math.prod(x.shape[:-1])
    y = y.reshape(n_mods, n_rows // max(1, n_mods), n_cols) * (1.0 + scale.reshape(n_mods, 1, n_cols).to(y.dtype))
    if shift is not None:
        y = y + shift.reshape(n_mods, 1, n_cols).to(y.dtype)
    return y.reshape(x.shape).to(out_dtype(x, w, casting)).contiguous(), rstd


_MAX_PARTIAL_ROWS = 512  # rows of partial sums that one program adds up: 512 rows of 16 columns fit the registers
_SUM_IN_LAUNCH = 2048  # up to these elements a multiprocessor, reading x and dy twice is faster than a second launch


def _programs_a_group(programs: int, groups: int, n_tiles: int) -> int:
    """`programs` / groups; with many groups four times that, so that a partial last wave of programs costs little."""
    per_group = programs // groups if programs >= 4 * groups else cdiv(4 * programs, groups)
    return max(1, min(per_group, n_tiles))


def _fwd(x, w, scale, shift, eps, offset, casting):
    x, w = row_major(x), dense(w)
    n_rows, n_cols, stride = rows_of(x)
    y = empty_like(x, out_dtype(x, w, casting))
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if n_rows:
        rows_per_mod = n_rows * n_cols // scale.numel()
        scale, scale_stride = evenly_spaced(scale)
        shift, shift_stride = (None, 0) if shift is None else evenly_spaced(shift)
        plan = FWD.plan(x.device, blocks_key(n_rows, n_cols, x.itemsize))
        block, rows = plan.config.blocks["BLOCK_SIZE"], plan.config.blocks["ROWS"]
        whole, block_2 = row_blocks(n_cols, block)
        load_mods = 2 if whole and n_rows <= rows * plan.programs else int(whole and rows_per_mod >= 2 * rows)
        groups = n_rows // rows_per_mod if load_mods == 1 else 1
        n_tiles = cdiv(n_rows // groups, rows)
        chunks = _programs_a_group(plan.programs or n_rows, groups, n_tiles)
        strides = stride, scale_stride, shift_stride
        numbers = n_cols, rows_per_mod, n_rows // groups, n_tiles, chunks
        args = (x, w, scale, shift, y, rstd, *strides, *numbers, eps, offset)
        launch(plan, FWD.kernels[0], (groups * chunks,), args, (casting, load_mods, whole, block_2))
    return y, rstd


def _summed_rows(plan: Plan, n_mods: int, n_rows: int, n_cols: int) -> tuple[int, int]:
    """(SUM_MODS, SUM_ROWS) if additional programs of the launch sum over rows. (0, 0) for many rows, and for one row,
    which needs no sum."""
    mods, per_mod = next_power_of_2(n_mods), next_power_of_2(n_rows // n_mods)
    few = max(n_rows, mods * per_mod) <= min(MOST_ROWS_SUMMED, plan.target.multiprocessors)
    if n_rows == 1 or not few or mods * per_mod * n_cols > _SUM_IN_LAUNCH * plan.target.multiprocessors:
        return 0, 0
    return mods, per_mod


def _bwd(dy, x, w, scale, shift, rstd, eps, offset, casting, needs_params):
    dy, x, w = row_major(dy), row_major(x), dense(w)
    n_rows, n_cols, x_stride = rows_of(x)
    dx = empty_like(x, x.dtype)
    params = [t if needs_params else None for t in (w, scale, shift)]
    if not n_rows:
        return dx, *(no_weight(x) if t is None else torch.zeros_like(t) for t in params)
    dscale, dshift = (None if t is None else t.new_empty(t.shape) for t in params[1:])
    n_mods = scale.numel() // n_cols
    scale, scale_stride = evenly_spaced(scale)
    strides = rows_of(dy)[2], x_stride, scale_stride
    plan = BWD.plan(x.device, blocks_key(n_rows, n_cols, x.itemsize))
    block, rows = plan.config.blocks["BLOCK_SIZE"], plan.config.blocks["ROWS"]
    whole, block_2 = row_blocks(n_cols, block)
    col_tiles = 1 if whole else cdiv(n_cols, block)
    dot = None
    if col_tiles > 1:
        dot = row_means(BWD_DOT, dy, x, w, rstd, offset, False, scale, scale_stride, n_rows // n_mods)
    per_row = n_mods == n_rows
    groups = 1 if per_row else n_mods
    n_tiles = cdiv(n_rows // groups, rows)
    chunks = _programs_a_group(plan.programs // col_tiles, groups, n_tiles)
    has_shift = shift is not None and not per_row
    one_tile = whole and chunks == n_tiles
    sum_mods, sum_rows, sum_programs = 0 if one_tile else None, 0, 0
    if one_tile and needs_params:
        sum_mods, sum_rows = _summed_rows(plan, n_mods, n_rows, n_cols)
    if sum_mods:
        sum_programs = cdiv(n_cols, summed_columns(sum_mods * sum_rows))
    mods_stored = per_row or sum_programs > 0  # this launch stores dscale and dshift
    partial = None
    if needs_params and not mods_stored:
        partial = x.new_empty((groups * chunks, (1 + has_shift) * n_cols), dtype=torch.float32)
    elif needs_params and w is not None:
        partial = partial_sums(x, 1 if sum_programs else chunks, n_cols, w.dtype)
    dmods = (dscale, dshift) if mods_stored else (None, None)
    numbers = n_cols, n_rows // groups, n_mods, offset
    args = (dy, x, w, scale, rstd, dot, dx, *dmods, partial, *strides, *numbers)
    flags = casting, per_row, has_shift, block_2, sum_mods, sum_rows
    launch(plan, BWD.kernels[0], (groups * chunks + sum_programs, col_tiles), args, flags)
    if needs_params and not mods_stored:
        key = row_key(n_rows, n_cols, x.itemsize)
        partial = _sum_chunks(key, partial, w, scale, dscale, dshift, scale_stride, n_mods, n_cols, chunks, offset)
    dw = column_sum(DW, partial, w.dtype) if needs_params and w is not None else None
    return dx, *(no_weight(x) if t is None else t for t in (dw, dscale, dshift))


def _sum_chunks(key, partial, w, scale, dscale, dshift, scale_stride, n_mods, n_cols, chunks, offset):
    """Fill dscale and dshift (or None) from `partial` [n_mods * chunks, n_cols], twice as wide with a shift.

    Returns fp32 terms of dw [n_mods, n_cols], or None without a w. If a program can hold the partial sums of all
    modulations, it adds these terms as well and returns dw [1, n_cols].
    """
    mods, per_mod = next_power_of_2(n_mods), next_power_of_2(chunks)
    at_once = mods * per_mod <= _MAX_PARTIAL_ROWS
    plan = (BWD_ALL_SUMS if at_once else BWD_SUMS).plan(partial.device, key)
    col_tiles = cdiv(n_cols, plan.config.blocks["BLOCK_N"])
    dw = None
    if w is not None:
        dw = partial.new_empty((1 if at_once else n_mods, n_cols), dtype=w.dtype if at_once else torch.float32)
    tensors = partial, w, scale, dscale, dshift, dw
    if at_once:
        args = (*tensors, scale_stride, n_mods, n_cols, chunks, offset)
        launch(plan, BWD_ALL_SUMS.kernels[0], (col_tiles,), args, (mods, per_mod))
    else:
        args = (*tensors, scale_stride, n_cols, chunks, offset)
        launch(plan, BWD_SUMS.kernels[0], (n_mods, col_tiles), args)
    return dw


def _rows_divide(scale: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether each row of `scale` applies to equally many consecutive rows of `x`."""
    rows = math.prod(scale.shape[:-1])
    if rows == 1 or scale.shape == x.shape:
        return True
    if x.dim() <= 2:  # tokens of all examples in one dimension
        return rows > 0 and x.shape[0] % rows == 0
    return scale.shape[0] == x.shape[0] == rows


def _misfit(X, W, scale, shift, *numbers) -> str:
    n_cols = X.shape[-1]
    if not scale.dim() or scale.shape[-1] != n_cols or not _rows_divide(scale, X):
        expected = f"[{n_cols}], [batch, {n_cols}], [batch, 1, {n_cols}] or X's shape"
        return f"scale must be {expected}, got {tuple(scale.shape)} for X of {tuple(X.shape)}"
    if shift is not None and shift.shape != scale.shape:
        return f"shift must have scale's shape {tuple(scale.shape)}, got {tuple(shift.shape)}"
    return ""


class ModulatedRMSNormFunction(OperatorFunction):
    params = "W", "scale", "shift"
    fwd = define(
        "modulated_rms_norm_fwd(Tensor X, Tensor? W, Tensor scale, Tensor? shift, float eps, float offset, int casting)"
        " -> (Tensor Y, Tensor rstd)",
        shapes="X [*, n]; W [n]; scale; shift",
        misfit=_misfit,
        launcher=_fwd,
        reference=_fwd_reference,
    )
    bwd = define(
        "modulated_rms_norm_bwd(Tensor dY, Tensor X, Tensor? W, Tensor scale, Tensor? shift, Tensor rstd, float eps,"
        " float offset, int casting, bool needs_params) -> (Tensor dX, Tensor dW, Tensor dscale, Tensor dshift)",
        shapes="X, dY [*, n]; W [n]; scale; shift; rstd of rows",
        misfit=lambda dY, *args: _misfit(*args),
        launcher=_bwd,
        derivative_of=fwd,
    )


def liger_modulated_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    """X / sqrt(mean(X^2) + eps) * (offset + W) * (1 + scale) + shift, over the last dimension.

    X: [..., n_cols]; W: [n_cols] or None; fp32, fp16 or bf16 (fp64 too on the CPU). Returns [..., n_cols].
    scale: [n_cols], [batch, n_cols], [batch, 1, n_cols] or X's shape; each row applies to equally many consecutive rows
    of X. shift: like scale, or None. casting_mode: `llama`, `gemma` or `none`, as for `liger_rms_norm`.
    in_place: accepted for compatibility; the gradient never overwrites a tensor the caller can see.
    Raises `ValueError` for shapes, dtypes, devices or a casting mode that do not fit.
    """
    check_numbers("liger_modulated_rms_norm", eps=eps, offset=offset)
    casting = casting_code("liger_modulated_rms_norm", casting_mode)
    return ModulatedRMSNormFunction.apply(X, W, scale, shift, eps, offset, casting)


class LigerModulatedRMSNorm(LigerRMSNorm):
    """RMSNorm layer with the arguments of `LigerRMSNorm`, whose forward also takes a scale and a shift."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, None, elementwise_affine)

    def forward(
        self, hidden_states: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden_states: [..., hidden_size]; scale, shift: see `liger_modulated_rms_norm`. Returns the same shape."""
        options = self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        return liger_modulated_rms_norm(hidden_states, self.weight, scale, shift, *options)


WORKLOADS = {
    "dit_xl": (64, 16384, 1152),
    "lumina_next_2b": (8, 8192, 2304),
    "z_image_6b": (4, 16384, 3840),
    "rdt_1b": (32, 8192, 2048),
}


def sample(
    sizes, dtype, device, generator, *, shift=True, affine=True, per_row=False, casting_mode="llama", offset=0.0
) -> Sample:
    n_mods, n_rows, n_cols = sizes
    if per_row or n_mods == 0 or n_rows % n_mods:
        n_mods = n_rows or 1
    drawn = normal(dtype, device, generator)
    x, w = drawn(n_rows, n_cols), drawn(n_cols) if affine else None
    scale, shifts = drawn(n_mods, n_cols), drawn(n_mods, n_cols) if shift else None
    rows_moved = 5 * n_rows + (2 if shifts is None else 3) * n_mods
    return Sample(
        args=(x, w, scale, shifts, 1e-6, offset, casting_mode),
        reduction=n_cols,
        grad_reduction=max(n_rows, n_cols),
        moved=rows_moved * n_cols * dtype.itemsize,
    )


OP = registry.register_file(
    __name__,
    tunables=(FWD, BWD, BWD_DOT, BWD_SUMS, BWD_ALL_SUMS, DW),
    options=(
        {},
        {"casting_mode": "gemma", "offset": 1.0},
        {"casting_mode": "none", "shift": False},
        {"affine": False},
        {"per_row": True},
        {"per_row": True, "affine": False, "shift": False},
    ),
    small=((1, 17, 33), (3, 12, 69), (2, 24, 64)),
)
