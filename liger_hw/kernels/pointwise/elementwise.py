"""Shared by the activations: one forward and one backward kernel over elements, their tunables, launches and operators.

A gated activation (swiglu, fused_gate_up_swiglu, geglu) computes c = f(a) * b, an ungated one (relu_squared) y = f(x).
The kernels take the name of f as a constexpr.

Tensors without gaps between rows are treated as one row. Other views are read row by row, several narrow rows at once.
If 16 does not divide the columns, tiles inside a row have code of their own without masks, with 16-byte accesses.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Mapping

import torch

from ...registry import Key, LaunchConfig, Sample, Target, Tunable, next_power_of_2, row_key, tile_space
from ...runtime.dependent_launch import is_small_launch, wait_for_previous
from ...runtime.load_hint import load_with_hint
from ...runtime.operator import cdiv, define, empty_like, launch
from ...runtime.triton_import import tl, triton

# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def activation(x, KIND: tl.constexpr):
    """(f(x), f'(x)) in fp32; the compiler drops an unused one. f' of relu_squared is valid for x > 0 only."""
    if KIND == "silu":
        factor = tl.sigmoid(x)
        value = x * factor
        slope = factor + value * (1.0 - factor)
    elif KIND == "sigmoid":
        value = tl.sigmoid(x)
        slope = value * (1.0 - value)
    elif KIND == "relu_squared":
        value = tl.where(x <= 0.0, 0.0, x * x)
        slope = 2.0 * x
    else:
        if KIND == "gelu_tanh":  # 1.59577 = 2 sqrt(2 / pi), 0.0713548 = 0.044715 * 1.59577
            factor = tl.sigmoid(x * (1.5957691216057308 + 0.07135481282052533 * x * x))
            factor_slope = factor * (1.0 - factor) * (1.5957691216057308 + 0.21406443846157598 * x * x)
        else:
            factor = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
            factor_slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        value = x * factor
        slope = factor + x * factor_slope
    return value, slope


@triton.jit
def _elements(n_rows, n_cols, TILES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(row, columns, mask, whether all elements of the mask are true) of this program.

    TILES: tiles of a row (a constexpr, because it is a divisor), or 0 if all rows are treated as one
    WIDTH: columns of a tile; a program takes BLOCK_SIZE // WIDTH rows
    """
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_SIZE)
    if TILES == 0:
        start = pid.to(tl.int64) * BLOCK_SIZE
        size = n_rows.to(tl.int64) * n_cols
        return pid * 0, start + lanes, start + lanes < size, start + BLOCK_SIZE <= size
    elif WIDTH < BLOCK_SIZE:
        row = pid.to(tl.int64) * (BLOCK_SIZE // WIDTH) + lanes // WIDTH
        cols = lanes % WIDTH
        return row, cols, (row < n_rows) & (cols < n_cols), pid < 0
    else:
        start = (pid % TILES).to(tl.int64) * BLOCK_SIZE
        return (pid // TILES).to(tl.int64), start + lanes, start + lanes < n_cols, start + BLOCK_SIZE <= n_cols


@triton.jit
def _pointers(A_ptr, B_ptr, row, a_stride, b_stride, cols, b_offset):
    """Pointers to a and b. Without B_ptr, b begins b_offset elements after a; without b_offset there is no b."""
    a = A_ptr + row * a_stride + cols
    if B_ptr is not None:
        b = B_ptr + row * b_stride + cols
    else:
        b = a if b_offset is None else a + b_offset
    return a, b


@triton.jit
def _fwd_tile(
    a_ptrs,
    b_ptrs,
    c_ptrs,
    mask,
    gate_multiplier,
    down_multiplier,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LOAD_HINT: tl.constexpr,
):
    a = load_with_hint(a_ptrs, LOAD_HINT, mask=mask)
    if IS_GATED:
        b = load_with_hint(b_ptrs, LOAD_HINT, mask=mask)
    gate = a.to(tl.float32)
    if IS_SCALED:
        gate = (gate * gate_multiplier).to(a.dtype).to(tl.float32)
    c, _ = activation(gate, KIND)
    if IS_GATED:
        c = c.to(a.dtype)
        if IS_SCALED:
            c = (c.to(tl.float32) * b.to(tl.float32) * down_multiplier).to(a.dtype)
        else:
            c = c * b  # has the rounding of an fp32 product that is rounded to this dtype
    tl.store(c_ptrs, c.to(c_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _activation_fwd_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    A_row_stride,
    B_row_stride,
    n_rows,
    n_cols,
    b_offset,
    gate_multiplier,
    down_multiplier,
    KIND: tl.constexpr,
    IS_SCALED: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """c = f(gate_multiplier * a) * b * down_multiplier, or f(a) if b_offset, B_ptr and the multipliers are None.

    Without B_ptr, b begins b_offset elements after a. IS_SCALED: a multiplier is not 1. SPLIT: see `_launch`.
    """
    wait_for_previous(DEPENDENT)
    IS_GATED: tl.constexpr = b_offset is not None
    row, cols, mask, whole = _elements(n_rows, n_cols, TILES, WIDTH, BLOCK_SIZE)
    a, b = _pointers(A_ptr, B_ptr, row, A_row_stride, B_row_stride, cols, b_offset)
    c = C_ptr + row * n_cols + cols
    gate, down = gate_multiplier, down_multiplier
    unmasked = whole if SPLIT else False
    if unmasked:
        _fwd_tile(a, b, c, None, gate, down, KIND, IS_GATED, IS_SCALED, LOAD_HINT)
    else:
        _fwd_tile(a, b, c, mask, gate, down, KIND, IS_GATED, IS_SCALED, LOAD_HINT)


@triton.jit
def _bwd_tile(
    dc_ptrs,
    a_ptrs,
    b_ptrs,
    da_ptrs,
    db_ptrs,
    mask,
    gate_multiplier,
    down_multiplier,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LOAD_HINT: tl.constexpr,
):
    if IS_GATED:
        a = load_with_hint(a_ptrs, LOAD_HINT, mask=mask)
        b = load_with_hint(b_ptrs, LOAD_HINT, mask=mask)
        dc = load_with_hint(dc_ptrs, LOAD_HINT, mask=mask)
        gate, d = a.to(tl.float32), dc.to(tl.float32)
        if IS_SCALED:
            gate, d = (gate * gate_multiplier).to(a.dtype).to(tl.float32), d * down_multiplier
        value, slope = activation(gate, KIND)
        da = d * b.to(tl.float32)
        if IS_SCALED:
            da = da * gate_multiplier * slope
            db = (d * value.to(a.dtype).to(tl.float32)).to(a.dtype)
        else:
            da = da * slope
            db = dc * value.to(a.dtype)
        tl.store(da_ptrs, da.to(a.dtype), mask=mask)
        tl.store(db_ptrs, db, mask=mask)
    else:
        d = load_with_hint(dc_ptrs, LOAD_HINT, mask=mask).to(tl.float32)
        x = load_with_hint(a_ptrs, LOAD_HINT, mask=mask).to(tl.float32)
        is_inactive = x <= 0.0
        _, slope = activation(x, KIND)
        dx = slope * d
        if KIND == "relu_squared":
            dx = tl.where(is_inactive, 0.0, dx)  # 0 even where dy is not finite, as in torch
        tl.store(da_ptrs, dx.to(da_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _activation_bwd_kernel(
    DC_ptr,
    A_ptr,
    B_ptr,
    DA_ptr,
    DB_ptr,
    DC_row_stride,
    A_row_stride,
    B_row_stride,
    D_row_stride,
    n_rows,
    n_cols,
    b_offset,
    gate_multiplier,
    down_multiplier,
    KIND: tl.constexpr,
    IS_SCALED: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """da and db; arguments as in the forward kernel. D_row_stride: row stride of DA and DB, or None for n_cols."""
    wait_for_previous(DEPENDENT)
    IS_GATED: tl.constexpr = b_offset is not None
    row, cols, mask, whole = _elements(n_rows, n_cols, TILES, WIDTH, BLOCK_SIZE)
    dc = DC_ptr + row * DC_row_stride + cols
    a, b = _pointers(A_ptr, B_ptr, row, A_row_stride, B_row_stride, cols, b_offset)
    d_stride = n_cols if D_row_stride is None else D_row_stride
    da, db = _pointers(DA_ptr, DB_ptr, row, d_stride, d_stride, cols, b_offset)
    gate, down = gate_multiplier, down_multiplier
    unmasked = whole if SPLIT else False
    if unmasked:
        _bwd_tile(dc, a, b, da, db, None, gate, down, KIND, IS_GATED, IS_SCALED, LOAD_HINT)
    else:
        _bwd_tile(dc, a, b, da, db, mask, gate, down, KIND, IS_GATED, IS_SCALED, LOAD_HINT)


# -- tunables --------------------------------------------------------------------------------------------------------

_MIN_KEY_WIDTH = 1024


def _key(n_rows: int, n_cols: int, itemsize: int) -> Key:
    if n_cols < _MIN_KEY_WIDTH:  # the key of as many elements in fewer rows
        n_rows, n_cols = cdiv(n_rows * n_cols, _MIN_KEY_WIDTH), _MIN_KEY_WIDTH
    return row_key(n_rows, n_cols, itemsize)


def _heuristic(
    target: Target, key: Key, load_bytes: int = 16, small_launch: int = 8192, small_block: int = 512, waves: int = 1
) -> LaunchConfig:
    """1024 elements a program; a thread makes one load of `load_bytes` from each tensor.

    Launches of at most `small_launch` elements a multiprocessor take loads of 8 bytes and `small_block` elements a
    program, the smallest loads of 4 bytes. waves=2: launches of one to two waves of programs take two loads a thread.
    """
    elements = key[0] << key[1]
    if elements <= 128 * target.multiprocessors:
        return LaunchConfig({"BLOCK_SIZE": 256}, target.warps(256, max(1, 4 // key[2]), 8))
    if elements <= small_launch * target.multiprocessors:
        return LaunchConfig({"BLOCK_SIZE": small_block}, target.warps(small_block, 8 // key[2], 8))
    wave_elements = target.multiprocessors * target.max_threads_per_multiprocessor * load_bytes // key[2]
    block = 2048 if wave_elements < elements <= waves * wave_elements else 1024
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(1024, load_bytes // key[2], 8))


def flat_safe(target: Target, key: Key) -> LaunchConfig:
    """`Tunable.safe` of a kernel whose only block is BLOCK_SIZE."""
    return LaunchConfig({"BLOCK_SIZE": 256}, target.warps(256, 8))


def flat_space(target: Target, key: Key) -> list[LaunchConfig]:
    """`Tunable.space` of a kernel whose only block is BLOCK_SIZE."""
    tiles = [{"BLOCK_SIZE": block} for block in (256, 512, 1024, 2048, 4096, 8192)]
    return tile_space(target, tiles, (1, 2, 4, 8, 16), per_thread=(4, 32), hints=("none", "stream"))


def activation_tunables(op: str, bwd: Mapping[str, int] = {}, **both: int) -> tuple[Tunable, Tunable]:
    """The tunables `<op>.fwd` and `<op>.bwd`. both: arguments of `_heuristic`; bwd: further ones for the backward."""
    return tuple(
        Tunable(
            op,
            variant,
            kernels=(kernel,),
            key=_key,
            dims=("n_rows", "n_cols"),
            heuristic=partial(_heuristic, **both, **further),
            safe=flat_safe,
            space=flat_space,
            neutral=frozenset({"num_stages", "hint", "num_warps", "BLOCK_SIZE"}),
            dependent_launch=is_small_launch,
        )
        for variant, kernel, further in (("fwd", _activation_fwd_kernel, {}), ("bwd", _activation_bwd_kernel, bwd))
    )


# -- launchers -------------------------------------------------------------------------------------------------------


def evenly_spaced(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(x, row stride); x is copied if no single stride leads from each row to the next."""
    if x.is_contiguous():
        return x, x.shape[-1]
    dims = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()) if size != 1]
    is_even = all([outer == size * inner for (_, outer), (size, inner) in zip(dims, dims[1:])])
    if dims and is_even and x.stride(-1) == 1:
        return x, dims[-1][1]
    return x.contiguous(), x.shape[-1]


def _launch(
    tunable: Tunable, dc: tuple, inputs: tuple, outputs: tuple, is_gated: bool, kind: str, *multipliers: float
) -> None:
    """Launch over inputs (a, b), (one tensor whose rows hold a and b,) or (ungated x,). dc: (dc,) in backward, else ().

    SPLIT: the kernel has unmasked code for tiles inside a row; if 16 divides the columns, masked code is as fast.
    """
    n_elements = (dc or outputs)[0].numel()
    if not n_elements:
        return
    with_strides = [evenly_spaced(t) for t in (*dc, *inputs)]
    tensors, strides = [t for t, _ in with_strides], [stride for _, stride in with_strides]
    n_cols = inputs[0].shape[-1]
    b_offset, d_stride = (0, n_cols) if is_gated else (None, None)
    if len(inputs) == 1:
        if is_gated:
            n_cols = b_offset = n_cols // 2
        tensors.append(None)
        strides.append(strides[-1] if is_gated else None)
        outputs = (*outputs, None) if dc else outputs
    if dc:
        strides.append(d_stride)
    n_rows = n_elements // n_cols
    plan = tunable.plan(tensors[0].device, _key(n_rows, n_cols, tensors[0].itemsize))
    width = block = plan.config.blocks["BLOCK_SIZE"]
    split, row_strides = n_cols & 15 != 0, [stride for stride in strides if stride is not None]
    if n_rows == 1 or all([stride == n_cols for stride in row_strides]):
        tiles, grid = 0, cdiv(n_elements, block)
    else:
        width = min(block, next_power_of_2(n_cols))
        tiles = cdiv(n_cols, width)
        grid = cdiv(n_rows, block // width) * tiles
        split = split and width == block and any([stride & 15 == 0 for stride in row_strides])
    scaled = any([m != 1.0 for m in multipliers])
    args = (*tensors, *outputs, *strides, n_rows, n_cols, b_offset, *(multipliers or (None, None)))
    launch(plan, tunable.kernels[0], (grid,), args, (kind, scaled, tiles, width, split))


def activation_operators(
    tunables: tuple[Tunable, Tunable],
    inputs: tuple[str, ...],
    arguments: str,
    kernel_options: Callable[..., tuple],
    reference: Callable[..., torch.Tensor],
    is_gated: bool = True,
) -> tuple[Any, ...]:
    """The operators of c = f(a) * b: `<op>_fwd(a, b, ...)`, `<op>_bwd(dc, a, b, ...)`; if gated, `<op>_bwd_` in place.

    inputs: the names of a and b, of one tensor whose rows hold both, or of an ungated x; arguments: the rest of the
    schema, or ""; kernel_options: these arguments -> (name of f, and if gated gate_multiplier, down_multiplier)
    """
    fwd_tunable, bwd_tunable = tunables
    op, n = fwd_tunable.op, len(inputs)
    holds_both = is_gated and n == 1

    def fwd(*args):
        a = args[0]
        c = a.new_empty((*a.shape[:-1], a.shape[-1] // 2)) if holds_both else empty_like(a, a.dtype)
        _launch(fwd_tunable, (), args[:n], (c,), is_gated, *kernel_options(*args[n:]))
        return c

    def bwd(dc, *args):
        gradients = tuple([empty_like(t, t.dtype) for t in args[:n]])
        _launch(bwd_tunable, (dc,), args[:n], gradients, is_gated, *kernel_options(*args[n:]))
        return gradients if n == 2 else gradients[0]

    def bwd_(dc, *args):
        _launch(bwd_tunable, (dc,), args[:n], args[:n], is_gated, *kernel_options(*args[n:]))

    tensors, outputs = (", ".join(f"Tensor {prefix}{name}" for name in inputs) for prefix in ("", "d"))
    overwritten = ", ".join(f"Tensor({alias}!) {name}" for alias, name in zip("ab", inputs))
    arguments = f", {arguments}" if arguments else ""
    shapes = "T a, b [*, n]" if n == 2 else f"{inputs[0]} [*, {'2n' if holds_both else 'n'}]"
    forward = define(
        f"{op}_fwd({tensors}{arguments}) -> Tensor c",
        shapes=shapes,
        launcher=fwd,
        reference=lambda *args: reference(*args).contiguous(),
    )
    gradients = {f"{op}_bwd(Tensor dc, {tensors}{arguments}) -> ({outputs})": bwd}
    if is_gated:
        gradients[f"{op}_bwd_(Tensor dc, {overwritten}{arguments}) -> ()"] = bwd_
    return forward, *(
        define(schema, shapes=f"{shapes}; dc [*, n]", launcher=run, derivative_of=forward)
        for schema, run in gradients.items()
    )


def gated_sample(sizes, dtype, device, generator, *options, strided=False) -> Sample:
    """a and b [n_rows, n_cols], then the op's options. strided: a and b are the halves of one tensor's rows."""
    n_rows, n_cols = sizes
    y = torch.randn(n_rows, 2 * n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    a, b = y.chunk(2, -1)
    if not strided:
        a, b = a.contiguous(), b.contiguous()
    return Sample(args=(a.requires_grad_(), b.requires_grad_(), *options), moved=8 * n_rows * n_cols * dtype.itemsize)
