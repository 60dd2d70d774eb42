"""Softmax over the last dimension: y = exp(x - max(x)) / sum(exp(x - max(x))).

Shapes: x [..., n_cols] -> y like x. Dtypes: fp32, fp16 or bf16; arithmetic in fp32, y rounded once to x's dtype.
A row of -inf gives NaN, as in torch. Saved for backward: y. Backward:  dx = y * (dy - sum(y * dy)).

Source: Bridle, "Training Stochastic Model Recognition Algorithms as Networks" (1989); the running maximum and sum of
rows too wide to hold are those of Milakov and Gimelshein, "Online normalizer calculation", https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import torch

from .. import registry
from ..registry import Key, LaunchConfig, Op, Sample, Target, Tunable, row_key
from ._op import check, check_tensors, define, empty_like, first_order, launch, row_major, rows_of
from ._rms_backward import DIMS, safe, tiles_rows
from ._triton import tl, triton

# -- reference -------------------------------------------------------------------------------------------------------


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """The specification in plain torch: it sums in fp32 (fp64 for fp64) and, as here, its backward sees the rounded y."""
    return torch.softmax(x, -1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _softmax_fwd_kernel(
    X_ptr,
    Y_ptr,
    X_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ... Rows wider than BLOCK_SIZE are read twice, then from cache."""
    cols = tl.arange(0, BLOCK_SIZE)
    if WHOLE_ROW:
        for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            mask = (rows < n_rows) & (cols < n_cols)[None, :]
            x_ptrs = X_ptr + rows * X_row_stride + cols[None, :]
            x = tl.load(x_ptrs, mask=mask, other=-float("inf"), cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            x = x.to(tl.float32)
            e = tl.exp(x - tl.max(x, axis=1)[:, None])
            y = e * (1.0 / tl.sum(e, axis=1))[:, None]
            tl.store(Y_ptr + rows * n_cols + cols[None, :], y.to(Y_ptr.dtype.element_ty), mask=mask)
    else:
        col_tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            x_ptrs = X_ptr + rows * X_row_stride + cols[None, :]
            y_ptrs = Y_ptr + rows * n_cols + cols[None, :]
            top = tl.full([ROWS, 1], -float("inf"), dtype=tl.float32)
            total = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = col_tile * BLOCK_SIZE
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                x = tl.load(x_ptrs + start, mask=mask, other=-float("inf")).to(tl.float32)
                higher = tl.maximum(top, tl.max(x, axis=1)[:, None])
                anchor = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: every term is 0
                total = total * tl.exp(top - anchor) + tl.exp(x - anchor)
                top = higher
            anchor = tl.where(top == -float("inf"), 0.0, top)
            scale = (1.0 / tl.sum(total, axis=1))[:, None]
            dead = top == -float("inf")
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = (col_tiles - 1 - col_tile) * BLOCK_SIZE  # backwards: what was read last is nearest
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                x = tl.load(x_ptrs + start, mask=mask, other=-float("inf")).to(tl.float32)
                y = tl.where(dead, float("nan"), tl.exp(x - anchor) * scale)
                tl.store(y_ptrs + start, y.to(Y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _softmax_bwd_kernel(
    DY_ptr,
    Y_ptr,
    DX_ptr,
    DY_row_stride,
    n_rows,
    n_cols,
    n_tiles,
    WHOLE_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
):
    """As the forward, with y (always contiguous) and dy read instead of x."""
    cols = tl.arange(0, BLOCK_SIZE)
    if WHOLE_ROW:
        for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            mask = (rows < n_rows) & (cols < n_cols)[None, :]
            dense = rows * n_cols + cols[None, :]
            dy_ptrs = DY_ptr + rows * DY_row_stride + cols[None, :]
            y = tl.load(Y_ptr + dense, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            dy = tl.load(dy_ptrs, mask=mask, other=0.0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT)
            shift = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)[:, None]
            # A one that hangs on the sum: it keeps the narrow y and dy alive across it instead of their fp32 copies,
            # which do not fit the registers at 32768 columns (64 a thread; 96 bytes spilled on sm90).
            one = tl.where(shift == shift, 1.0, 0.0).to(y.dtype)
            dx = (y * one).to(tl.float32) * ((dy * one).to(tl.float32) - shift)
            tl.store(DX_ptr + dense, dx.to(DX_ptr.dtype.element_ty), mask=mask)
    else:
        col_tiles = tl.cdiv(n_cols, BLOCK_SIZE)
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            dense = rows * n_cols + cols[None, :]
            dy_ptrs = DY_ptr + rows * DY_row_stride + cols[None, :]
            dot = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = col_tile * BLOCK_SIZE
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                y = tl.load(Y_ptr + dense + start, mask=mask, other=0.0).to(tl.float32)
                dot += y * tl.load(dy_ptrs + start, mask=mask, other=0.0).to(tl.float32)
            shift = tl.sum(dot, axis=1)[:, None]
            for col_tile in tl.range(0, col_tiles, num_stages=STAGES):
                start = (col_tiles - 1 - col_tile) * BLOCK_SIZE  # backwards: what was read last is nearest
                mask = (rows < n_rows) & (start + cols < n_cols)[None, :]
                y = tl.load(Y_ptr + dense + start, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_ptrs + start, mask=mask, other=0.0).to(tl.float32)
                tl.store(DX_ptr + dense + start, (y * (dy - shift)).to(DX_ptr.dtype.element_ty), mask=mask)


# -- tunables --------------------------------------------------------------------------------------------------------

_WIDEST_TILE = 32768
"""Columns a program holds at most: one fp32 copy of the row is half the registers of a multiprocessor."""


def _heuristic(target: Target, key: Key, tensors: int) -> LaunchConfig:
    """Whole rows: one program a row while several fit a multiprocessor, above that one that has its next row in flight.

    Rows whose fp32 copies would spill go in tiles of 8192, on a grid so small that the second sweep finds them in L2.
    """
    n_cols, _, itemsize = key
    if n_cols <= 16384:
        rows = max(1, min(16, 2048 // n_cols))
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": rows}, target.warps(n_cols * rows, 16, 16))
    row_bytes = tensors * n_cols * itemsize
    if n_cols <= _WIDEST_TILE and tensors * itemsize <= 4:
        stages, ctas, per_thread = (2, 1, 32 * tensors) if row_bytes <= target.shared_memory else (1, 0, 32)
        return LaunchConfig({"BLOCK_SIZE": n_cols, "ROWS": 1}, target.warps(n_cols, per_thread), stages, ctas)
    ctas = max(1, min(4, target.l2 // (2 * target.multiprocessors * row_bytes)))
    return LaunchConfig({"BLOCK_SIZE": 8192, "ROWS": 1}, target.warps(8192, 16, 16), 2, ctas)


def _space(target: Target, key: Key, tensors: int) -> list[LaunchConfig]:
    n_cols, _, itemsize = key
    return [
        LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, warps, stages, ctas, hint)
        for block in sorted({n_cols} | ({4096, 8192, 16384} if n_cols > 16384 else set()))
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16, 32)
        for stages, ctas in ((1, 0), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4))
        for hint in ("none", "stream")
        if rows * block <= max(block, 8192)
        and block <= _WIDEST_TILE
        and 4 <= rows * block // (warps * target.warp_size) <= 64
        and tensors * (stages - 1) * rows * block * itemsize * max(1, ctas) <= target.shared_memory
    ]


def row_tunable(op: str, variant: str, kernel, tensors: int) -> Tunable:
    """`tensors`: how many the kernel reads. Shared with sparsemax."""
    return Tunable(
        op,
        variant,
        kernels=(kernel,),
        key=row_key,
        dims=DIMS,
        heuristic=lambda target, key: _heuristic(target, key, tensors),
        safe=safe,
        space=lambda target, key: _space(target, key, tensors),
        valid=tiles_rows,
    )


FWD = row_tunable("softmax", "fwd", _softmax_fwd_kernel, 1)
BWD = row_tunable("softmax", "bwd", _softmax_bwd_kernel, 2)

# -- launchers -------------------------------------------------------------------------------------------------------


def launch_row_tiles(tunable: Tunable, kernel, tensors: tuple, stride: int, n_rows: int, n_cols: int) -> None:
    """Launch over row tiles, on the plan's persistent grid if it has one. Shared with sparsemax."""
    plan = tunable.plan(tensors[0].device, row_key(n_rows, n_cols, tensors[0].itemsize))
    blocks = plan.config.blocks
    n_tiles = -(-n_rows // blocks["ROWS"])
    programs = min(plan.programs or n_tiles, n_tiles)
    launch(plan, kernel, (programs,), (*tensors, stride, n_rows, n_cols, n_tiles), (blocks["BLOCK_SIZE"] >= n_cols,))


def _fwd(x):
    x = row_major(x)
    n_rows, n_cols, stride = rows_of(x)
    y = empty_like(x, x.dtype)
    if n_rows:
        launch_row_tiles(FWD, _softmax_fwd_kernel, (x, y), stride, n_rows, n_cols)
    return y


def _bwd(dy, y):
    dy, y = row_major(dy), y.contiguous()
    n_rows, n_cols, _ = rows_of(y)
    dx = empty_like(y, y.dtype)
    if n_rows:
        launch_row_tiles(BWD, _softmax_bwd_kernel, (dy, y, dx), rows_of(dy)[2], n_rows, n_cols)
    return dx


# -- the operators ---------------------------------------------------------------------------------------------------


def _fwd_reference(x):
    return softmax_reference(x).contiguous()


def _bwd_reference(dy, y):
    wide = torch.promote_types(y.dtype, torch.float32)
    p, g = y.to(wide), dy.to(wide)
    return (p * (g - (p * g).sum(-1, keepdim=True))).to(y.dtype).contiguous()


def _fwd_fake(x):
    return x.new_empty(x.shape)


def _bwd_fake(dy, y):
    return y.new_empty(y.shape)


softmax_fwd = define(
    "softmax_fwd(Tensor x) -> Tensor",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
softmax_bwd = define(
    "softmax_bwd(Tensor dy, Tensor y) -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class LigerSoftmaxFunction(torch.autograd.Function):
    """Autograd for softmax: saves y."""

    @staticmethod
    def forward(ctx, input_):
        y = softmax_fwd(input_)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        return softmax_bwd(grad_output, *ctx.saved_tensors)


# -- public ----------------------------------------------------------------------------------------------------------


def liger_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension.

    x: [..., n_cols] in fp32, fp16 or bf16 (fp64 too on the CPU). Returns a contiguous tensor like x.
    Raises `ValueError` for a dtype that does not fit or a tensor without dimensions.
    """
    check_tensors("liger_softmax", x=x)
    check(x.dim() > 0, "liger_softmax", "x must have at least one dimension")
    return LigerSoftmaxFunction.apply(x)


class LigerSoftmax(torch.nn.Module):
    """Softmax over the last dimension as a module without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_softmax(x)


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "attention_4k": (16384, 4096),
    "attention_1k": (65536, 1024),
    "mistral_7b_vocabulary": (8192, 32768),
    "llama3_8b_vocabulary": (4096, 128256),
    "qwen3_moe_router": (65536, 128),
}
"""Problem sizes (n_rows, n_cols): attention scores, output distributions, expert routers."""


def _sample(sizes, dtype, device, generator) -> Sample:
    n_rows, n_cols = sizes
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return Sample(
        args=(x.requires_grad_(),),
        reduction=n_cols,
        grad_reduction=n_cols,
        moved=5 * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="softmax",
        function=liger_softmax,
        reference=softmax_reference,
        tunables=(FWD, BWD),
        workloads=WORKLOADS,
        sample=_sample,
    )
)
