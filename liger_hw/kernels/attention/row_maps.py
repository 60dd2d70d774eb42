"""The kernels of softmax and sparsemax. Both map a row x to a row y of equal width; backward needs dy and y, but not x.

Backward is dx = w * (dy - shift). Softmax has w = y and shift = sum(y * dy). Sparsemax (SPARSE) has w = 1 where y > 0,
else 0, and shift is the mean of dy where y > 0.

Each direction has two kernels. One keeps a tile of whole rows in registers. The other reads wider rows in tiles of
columns: first for the sums and then again, from cache, for the result. For rows of odd width see rows/row.py. Program p
computes the tiles (or rows) p, p + programs, p + 2 * programs, ...

ONE_TILE: every program has one tile, so no loop over tiles is compiled (but sparsemax's forward always has the loop).
NARROW: an fp32 copy of the tile would take more than a quarter of the registers.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key, tile_space
from ...runtime.dependent_launch import wait_for_previous
from ...runtime.operator import cdiv, define, empty_like, launch, row_major, rows_of
from ...runtime.triton_import import tl, triton
from ..rows.blocks import keep_narrow
from ..rows.row import (
    align_down,
    body_start,
    body_width,
    edge_columns,
    load_row,
    row_head,
    row_pad,
    row_vector,
    store_row,
)
from ..rows.tuning import row_tunable, row_warps, rows_per_program

# -- softmax -----------------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x, anchor):
    """exp(x - anchor) in three instructions. tl.exp takes six, to be exact for results below 1e-38."""
    return tl.exp2((x - anchor) * 1.4426950408889634)


@triton.jit
def _exp_folded(x, anchor, log2_base):
    """`_exp` in two instructions: the compiler fuses the first product with the subtraction.

    Rounding anchor * log2_base multiplies all results of a row by one factor. The division by the row's sum cancels
    this factor, and `_log2_base` bounds it.
    """
    return tl.exp2(x * log2_base - anchor * log2_base)


@triton.jit
def _log2_base(top):
    """log2(e), or 1 for a row whose maximum has a magnitude of 2^30 or more.

    For these rows rounding in `_exp_folded` could multiply by 2^64 or more, but a product with 1 is exact. The base
    does not matter: two fp32 numbers of this magnitude are equal or differ by at least 64.
    """
    return tl.where(tl.abs(top) < 1073741824.0, 1.4426950408889634, 1.0)


@triton.jit
def _below_2_30(x, top):
    """A 16-bit row and its maximum; if its magnitude is 2^30 or more, scaled by a power of two to less than that.

    The softmax does not change: with or without the factor, numbers near the maximum are equal or differ by 64 or more.
    """
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    factor = tl.where(exponent < 157, 1.0, ((283 - exponent) << 23).to(tl.float32, bitcast=True))
    return x * factor.to(x.dtype), top * factor


@triton.jit
def _softmax(x, NARROW: tl.constexpr):
    """Softmax of whole rows [ROWS, columns]. With NARROW, rows are kept in their 16-bit dtype to save registers, and
    their exponentials are computed twice."""
    top = tl.max(x.to(tl.float32), axis=1)[:, None]
    if NARROW and x.dtype != tl.float32:
        x, top = _below_2_30(x, top)
        scale = 1.0 / tl.sum(_exp_folded(x.to(tl.float32), top, 1.4426950408889634), axis=1)[:, None]
        y = _exp_folded(keep_narrow(x, scale).to(tl.float32), top, 1.4426950408889634) * scale
    else:
        e = _exp_folded(x.to(tl.float32), top, _log2_base(top))
        y = e * (1.0 / tl.sum(e, axis=1))[:, None]
    return y


@triton.jit
def _add_exponentials(x, highest, total):
    """Each lane's running maximum and sum of exponentials, after adding the tile x [LANES, PER_LANE]."""
    higher = tl.maximum(highest, tl.max(x, axis=1))
    anchor = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: every term is 0
    return higher, total * _exp(highest, anchor) + tl.sum(_exp(x, anchor[:, None]), axis=1)


@triton.jit
def _softmax_in_tiles(x_ptr, y_ptr, head, n_cols, VECTOR: tl.constexpr, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Softmax of a row wider than BLOCK_SIZE. A tile has LANES groups, each read by one vector load of a thread. Every
    group has its running maximum and sum, so threads exchange no data until the whole row is read."""
    block_cols = tl.arange(0, BLOCK_SIZE)
    y_type = y_ptr.dtype.element_ty
    n_body = body_width(n_cols, head, VECTOR)
    n_full = n_body // BLOCK_SIZE
    tail = n_full * BLOCK_SIZE + block_cols
    PER_LANE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = BLOCK_SIZE // PER_LANE
    highest = tl.full([LANES], -float("inf"), dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    for i in tl.range(0, n_full, num_stages=STAGES):
        x = tl.load(x_ptr + i * BLOCK_SIZE + block_cols, eviction_policy="evict_last").to(tl.float32)
        highest, total = _add_exponentials(tl.reshape(x, [LANES, PER_LANE]), highest, total)
    x = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf")).to(tl.float32)
    highest, total = _add_exponentials(tl.reshape(x, [LANES, PER_LANE]), highest, total)
    top = tl.max(highest)
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)
        x_edge = tl.load(x_ptr + edge, mask=edge < n_cols - head, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x_edge))
    anchor = tl.where(top == -float("inf"), 0.0, top)
    denominator = tl.sum(total * _exp(highest, anchor))
    if VECTOR > 1:
        denominator += tl.sum(_exp(x_edge, anchor))
    scale = tl.where(top == -float("inf"), float("nan"), 1.0 / denominator)
    if VECTOR > 1:
        tl.store(y_ptr + edge, (_exp(x_edge, anchor) * scale).to(y_type), mask=edge < n_cols - head)
    tl.store(y_ptr + tail, (_exp(x, anchor) * scale).to(y_type), mask=tail < n_body, eviction_policy="evict_first")
    for done in tl.range(0, n_full, num_stages=STAGES):
        at = (n_full - 1 - done) * BLOCK_SIZE + block_cols  # backwards: the last tiles are still in cache
        x = tl.load(x_ptr + at, eviction_policy="evict_first").to(tl.float32)
        tl.store(y_ptr + at, (_exp(x, anchor) * scale).to(y_type), eviction_policy="evict_first")


# -- sparsemax ---------------------------------------------------------------------------------------------------------


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite(top):
    """top, or NaN where it is not finite."""
    return tl.where(tl.abs(top) < float("inf"), top, float("nan"))


@triton.jit
def _above(z, tau):
    """max(z - tau, 0), or NaN where tau is NaN."""
    return tl.maximum(z - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sparsemax(x, exist):
    """Sparsemax of whole rows [ROWS, columns]: Newton's method for the threshold tau, with the rows in registers."""
    z = x.to(tl.float32)
    z = tl.where(exist, z - _finite(tl.reduce(z, 1, _larger)[:, None]), 0.0)  # rows past the end: any finite value
    tau = tl.full([z.shape[0], 1], -1.0, dtype=tl.float32)
    count = tl.full([z.shape[0], 1], float("inf"), dtype=tl.float32)
    shrinking = tl.program_id(0) >= 0  # true
    while shrinking:
        inside = z > tau
        support = tl.sum(inside.to(tl.float32), axis=1)[:, None]
        tau = tl.div_rn(tl.sum(tl.where(inside, z, 0.0), axis=1)[:, None] - 1.0, support)
        n_shrinking = tl.sum(tl.sum((support < count).to(tl.int32), axis=1), axis=0)
        count = support
        shrinking = n_shrinking > 0  # last: Triton 3.4 fails where a carried value follows the condition
    return _above(z, tau)


@triton.jit
def _lane_sums(x, LANES: tl.constexpr):
    """Sums [LANES], each over the elements of one vector load of a thread: accumulators then take few registers."""
    return tl.sum(tl.reshape(x, [LANES, x.shape[0] // LANES]), axis=1)


@triton.jit
def _add_support(x, top, tau, above, members):
    """Each lane's sum and number of values x - top above tau, after adding the tile x."""
    z = x.to(tl.float32) - top
    LANES: tl.constexpr = above.shape[0]
    return above + _lane_sums(tl.where(z > tau, z, 0.0), LANES), members + _lane_sums((z > tau).to(tl.float32), LANES)


@triton.jit
def _sparsemax_in_tiles(
    x_ptr, y_ptr, head, n_cols, VECTOR: tl.constexpr, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr
):
    """Sparsemax of a row wider than BLOCK_SIZE. Each step of Newton's method reads the row again, from cache."""
    block_cols = tl.arange(0, BLOCK_SIZE)
    y_type = y_ptr.dtype.element_ty
    n_body = body_width(n_cols, head, VECTOR)
    n_full = n_body // BLOCK_SIZE
    tail = n_full * BLOCK_SIZE + block_cols
    highest = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf")).to(tl.float32)
    for i in tl.range(0, n_full, num_stages=STAGES):
        highest = _larger(highest, tl.load(x_ptr + i * BLOCK_SIZE + block_cols).to(tl.float32))
    top = tl.reduce(highest, 0, _larger)
    if VECTOR > 1:
        edge = edge_columns(head, n_body, n_cols, VECTOR)
        x_edge = tl.load(x_ptr + edge, mask=edge < n_cols - head, other=-float("inf")).to(tl.float32)
        top = _larger(top, tl.reduce(x_edge, 0, _larger))
    top = _finite(top)
    tau = tl.cast(-1.0, tl.float32)
    count = tl.cast(float("inf"), tl.float32)
    shrinking = tl.program_id(0) >= 0  # true
    while shrinking:
        nothing = tl.zeros([BLOCK_SIZE * y_type.primitive_bitwidth // 128], dtype=tl.float32)
        x = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf"))
        above, members = _add_support(x, top, tau, nothing, nothing)
        for i in tl.range(0, n_full, num_stages=STAGES):
            x = tl.load(x_ptr + i * BLOCK_SIZE + block_cols)
            above, members = _add_support(x, top, tau, above, members)
        total = tl.sum(above)
        support = tl.sum(members)
        if VECTOR > 1:
            z_edge = x_edge - top
            total += tl.sum(tl.where(z_edge > tau, z_edge, 0.0))
            support += tl.sum((z_edge > tau).to(tl.float32))
        tau = tl.div_rn(total - 1.0, tl.maximum(support, 1.0))
        shrinking = support < count
        count = support
    if VECTOR > 1:
        tl.store(y_ptr + edge, _above(x_edge - top, tau).to(y_type), mask=edge < n_cols - head)
    x = tl.load(x_ptr + tail, mask=tail < n_body, other=-float("inf")).to(tl.float32)
    tl.store(y_ptr + tail, _above(x - top, tau).to(y_type), mask=tail < n_body)
    for i in tl.range(0, n_full, num_stages=STAGES):
        at = i * BLOCK_SIZE + block_cols
        tl.store(y_ptr + at, _above(tl.load(x_ptr + at).to(tl.float32) - top, tau).to(y_type))


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _row_map_fwd_kernel(
    X_ptr,
    Y_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    SPARSE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    NARROW: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of whole rows."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    first = tl.program_id(0)
    end, step = (first + 1, 1) if ONE_TILE and not SPARSE else (n_tiles, tl.num_programs(0))
    for tile in tl.range(first, end, step, num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        x_ptrs = X_ptr + align_down(rows * X_row_stride, VECTOR) + cols[None, :]
        x = load_row(x_ptrs, exist, pad, n_cols, -float("inf"), VECTOR, LOAD_HINT)
        if SPARSE:
            y = _sparsemax(x, exist)
        else:
            y = _softmax(x, NARROW)
        store_row(Y_ptr + align_down(rows * n_cols, VECTOR) + cols[None, :], y, exist, pad, n_cols, VECTOR)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _row_map_fwd_looped_kernel(
    X_ptr,
    Y_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    SPARSE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows wider than BLOCK_SIZE."""
    wait_for_previous(DEPENDENT)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        head = row_head(row * n_cols, VECTOR)
        x_ptr = X_ptr + body_start(row * X_row_stride, head, VECTOR)
        y_ptr = Y_ptr + body_start(row * n_cols, head, VECTOR)
        if SPARSE:
            _sparsemax_in_tiles(x_ptr, y_ptr, head, n_cols, VECTOR, BLOCK_SIZE, STAGES)
        else:
            _softmax_in_tiles(x_ptr, y_ptr, head, n_cols, VECTOR, BLOCK_SIZE, STAGES)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _row_map_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    SPARSE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    NARROW: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of whole rows; y is contiguous."""
    wait_for_previous(DEPENDENT)
    cols = tl.arange(0, BLOCK_SIZE)
    first = tl.program_id(0)
    end, step = (first + 1, 1) if ONE_TILE else (n_tiles, tl.num_programs(0))
    for tile in tl.range(first, end, step, num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        exist = rows < n_rows
        pad = row_pad(rows * n_cols, VECTOR)
        dense = align_down(rows * n_cols, VECTOR) + cols[None, :]
        dy_ptrs = DY_ptr + align_down(rows * DY_row_stride, VECTOR) + cols[None, :]
        y = load_row(Y_ptr + dense, exist, pad, n_cols, 0.0, VECTOR, LOAD_HINT)
        dy = load_row(dy_ptrs, exist, pad, n_cols, 0.0, VECTOR, LOAD_HINT)
        if SPARSE:
            inside = y > 0.0
            total = tl.sum(tl.where(inside, dy, 0.0).to(tl.float32), axis=1)
            shift = (total / tl.maximum(tl.sum(inside.to(tl.float32), axis=1), 1.0))[:, None]
            dx = tl.where(inside, keep_narrow(dy, shift).to(tl.float32) - shift, 0.0)
        else:
            shift = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)[:, None]
            if NARROW or not ONE_TILE:  # else there are enough registers for the fp32 values
                y, dy = keep_narrow(y, shift), keep_narrow(dy, shift)
            dx = y.to(tl.float32) * (dy.to(tl.float32) - shift)
        store_row(DX_ptr + dense, dx, exist, pad, n_cols, VECTOR)


@triton.jit
def _load_weighted(Y_ptr, DY_ptr, cols, mask, SPARSE: tl.constexpr, EVICT: tl.constexpr):
    """(w, dy) at these columns in fp32; mask None: unmasked. With SPARSE, dy is 0 where y is 0."""
    if mask is None:
        w = tl.load(Y_ptr + cols, eviction_policy=EVICT).to(tl.float32)
        dy = tl.load(DY_ptr + cols, eviction_policy=EVICT).to(tl.float32)
    else:
        w = tl.load(Y_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if SPARSE:
        dy = tl.where(w > 0.0, dy, 0.0)
        w = (w > 0.0).to(tl.float32)
    return w, dy


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _row_map_bwd_looped_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    SPARSE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows wider than BLOCK_SIZE; y is contiguous."""
    wait_for_previous(DEPENDENT)
    block_cols = tl.arange(0, BLOCK_SIZE)
    dx_type = DX_ptr.dtype.element_ty
    LANES: tl.constexpr = BLOCK_SIZE * dx_type.primitive_bitwidth // 128
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        head = row_head(row * n_cols, VECTOR)
        dense = body_start(row * n_cols, head, VECTOR)
        y_ptr, dx_ptr = Y_ptr + dense, DX_ptr + dense
        dy_ptr = DY_ptr + body_start(row * DY_row_stride, head, VECTOR)
        n_body = body_width(n_cols, head, VECTOR)
        n_full = n_body // BLOCK_SIZE
        tail = n_full * BLOCK_SIZE + block_cols
        w, dy = _load_weighted(y_ptr, dy_ptr, tail, tail < n_body, SPARSE, "")
        weights, products = _lane_sums(w, LANES), _lane_sums(w * dy, LANES)
        for i in tl.range(0, n_full, num_stages=STAGES):
            w, dy = _load_weighted(y_ptr, dy_ptr, i * BLOCK_SIZE + block_cols, None, SPARSE, "evict_last")
            products += _lane_sums(w * dy, LANES)
            weights += _lane_sums(w, LANES)
        shift = tl.sum(products)
        support = tl.sum(weights)
        if VECTOR > 1:
            edge = edge_columns(head, n_body, n_cols, VECTOR)
            w_edge, dy_edge = _load_weighted(y_ptr, dy_ptr, edge, edge < n_cols - head, SPARSE, "")
            shift += tl.sum(w_edge * dy_edge)
            support += tl.sum(w_edge)
        if SPARSE:
            shift = shift / tl.maximum(support, 1.0)
        if VECTOR > 1:
            tl.store(dx_ptr + edge, (w_edge * (dy_edge - shift)).to(dx_type), mask=edge < n_cols - head)
        w, dy = _load_weighted(y_ptr, dy_ptr, tail, tail < n_body, SPARSE, "")
        tl.store(dx_ptr + tail, (w * (dy - shift)).to(dx_type), mask=tail < n_body)
        for done in tl.range(0, n_full, num_stages=STAGES):
            at = (n_full - 1 - done) * BLOCK_SIZE + block_cols  # backwards: the last tiles are still in cache
            w, dy = _load_weighted(y_ptr, dy_ptr, at, None, SPARSE, "evict_first")
            tl.store(dx_ptr + at, (w * (dy - shift)).to(dx_type), eviction_policy="evict_first")


_MAX_WHOLE_ROW = 32768
"""Most columns of a row kept in registers: its fp32 copy takes half of a multiprocessor's registers."""


def _heuristic(target: Target, key: Key, tensors: int) -> LaunchConfig:
    """Whole rows, several a program; one a program if there are at most four rows a multiprocessor.

    Wide fp32 rows have one program a multiprocessor, which prefetches its next row. Rows whose fp32 copies would spill
    are read in tiles of at most 32 KiB, by many warps: the second read then still hits L2.
    """
    n_cols, rows_bucket, itemsize = key
    if n_cols <= 16384:
        resident = 1 << rows_bucket <= 4 * target.multiprocessors
        rows = 1 if resident else rows_per_program(target, rows_bucket, max(1, min(16, 2048 // n_cols)))
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": rows}, row_warps(target, resident, n_cols * rows))
    row_bytes = tensors * n_cols * itemsize
    if n_cols <= _MAX_WHOLE_ROW and (itemsize <= 2 or tensors == 1):
        pipelined = itemsize > 2 and row_bytes <= target.shared_memory
        stages, ctas = (2, 1) if pipelined else (1, 0)
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": 1}, target.warps(n_cols, 32), stages, ctas)
    block = 32768 // itemsize
    if tensors == 1:
        block = min(block, max(8192, n_cols // 8))
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, target.warps(block, 8, 32))


def _space(target: Target, key: Key, tensors: int) -> list[LaunchConfig]:
    n_cols, _, itemsize = key
    tiles = [
        {"BLOCK_SIZE": block, "ROWS": rows}
        for block in sorted({n_cols} | ({4096, 8192, 16384} if n_cols > 16384 else set()))
        for rows in (1, 2, 4, 8, 16, 32)
        if rows * block <= max(block, 8192) and (rows == 1 or block == n_cols) and block <= _MAX_WHOLE_ROW
    ]
    warps, how = (1, 2, 4, 8, 16, 32), {"per_thread": (4, 64), "hints": ("none", "stream")}
    persistent = {"stages": (2, 3), "ctas": (1, 2, 4), "staged_bytes": tensors * itemsize}
    return [*tile_space(target, tiles, warps, **how), *tile_space(target, tiles, warps, **how, **persistent)]


def _misfit(config: LaunchConfig, key: Key) -> str | None:
    wider = config.blocks["BLOCK_SIZE"] < key[0]
    return "ROWS must be 1 where a row is wider than BLOCK_SIZE" if wider and config.blocks["ROWS"] > 1 else None


def row_map(
    op: str, reference: Callable[..., Any], bwd_reference: Callable[..., Any], *, sparse: bool
) -> tuple[Tunable, Tunable, Any, Any]:
    """The tunables `<op>.fwd` and `<op>.bwd`, and the operators `<op>_fwd(x) -> y` and `<op>_bwd(dy, y) -> dx`.

    reference, bwd_reference: both operators in plain torch; sparse: whether the op is sparsemax
    """

    def tunable(variant: str, *kernels: Any, tensors: int) -> Tunable:
        return row_tunable(
            op,
            variant,
            *kernels,
            heuristic=lambda target, key: _heuristic(target, key, tensors),
            space=lambda target, key: _space(target, key, tensors),
            valid=_misfit,
        )

    fwd = tunable("fwd", _row_map_fwd_kernel, _row_map_fwd_looped_kernel, tensors=1)
    bwd = tunable("bwd", _row_map_bwd_kernel, _row_map_bwd_looped_kernel, tensors=2)

    def forward(x):
        x = row_major(x)
        y = empty_like(x, x.dtype)
        _launch(fwd, (x, y), sparse)
        return y

    def backward(dy, y):
        dy, y = row_major(dy), y.contiguous()
        dx = empty_like(y, y.dtype)
        _launch(bwd, (dy, y, dx), sparse)
        return dx

    forward_operator = define(
        f"{op}_fwd(Tensor x) -> Tensor y",
        shapes="x [*, n]",
        launcher=forward,
        reference=lambda x: reference(x).contiguous(),
        fake=("x",),
    )
    backward_operator = define(
        f"{op}_bwd(Tensor dy, Tensor y) -> Tensor dx",
        shapes="y, dy [*, n]",
        launcher=backward,
        reference=lambda dy, y: bwd_reference(dy, y).to(y.dtype).contiguous(),
        fake=("y",),
    )
    return fwd, bwd, forward_operator, backward_operator


def _launch(tunable: Tunable, tensors: tuple[torch.Tensor, ...], sparse: bool) -> None:
    """Launch over tiles of rows, on a persistent grid if the plan has one. Only tensors[0] may have strided rows."""
    n_rows, n_cols, stride = rows_of(tensors[0])
    if not n_rows:
        return
    plan = tunable.plan(tensors[0].device, row_key(n_rows, n_cols, tensors[0].itemsize))
    block, rows = plan.config.blocks["BLOCK_SIZE"], plan.config.blocks["ROWS"]
    n_tiles = cdiv(n_rows, rows)
    grid = (min(plan.programs or n_tiles, n_tiles),)
    args = (*tensors, stride, n_rows, n_cols, n_tiles)
    whole_rows_kernel, looped_kernel = tunable.kernels
    if block < n_cols:
        launch(plan, looped_kernel, grid, args, (sparse, row_vector(*tensors)))
        return
    one_tile = grid[0] == n_tiles <= 4 * plan.target.multiprocessors
    narrow = rows * block > plan.target.registers // 4
    launch(plan, whole_rows_kernel, grid, args, (sparse, one_tile, narrow, row_vector(*tensors, width=block)))
