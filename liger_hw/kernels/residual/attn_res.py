"""Attention residuals: softmax attention over the outputs of all earlier blocks, in place of the residual sum.

    h = sum over n of  alpha_n * v_n,    alpha = softmax over n of s,    s_n = w_query . (w_norm * v_n * rstd_n)

Here rstd_n = 1 / sqrt(mean(v_n^2) + eps).

All arithmetic is fp32; h is rounded once. Saved for backward: V, both weights, and in fp32 the scores and rstd
[n_blocks, n_rows] and the logarithm of the softmax's sum [n_rows].
Backward, with g = dh and q = w_query * w_norm:  ds_n = alpha_n * (g . v_n - sum over m of alpha_m * g . v_m),
dv_n = alpha_n * g + ds_n * rstd_n * (q - v_n * rstd_n * s_n / n_cols),
dq = sum over n and rows of ds_n * rstd_n * v_n,  dw_query = dq * w_norm,  dw_norm = dq * w_query.

The forward reads V once: the sum over blocks is rescaled when the largest score grows.

Source: Kimi Team, "Attention Residuals", https://arxiv.org/abs/2603.15031
"""

from __future__ import annotations

import torch

from ... import registry
from ...registry import LaunchConfig, Sample, Tunable, next_power_of_2, normal, row_key, tile_space
from ...runtime.operator import OperatorFunction, cdiv, check, check_numbers, check_tensors, define, dense, launch
from ...runtime.recording import repeated
from ...runtime.triton_import import tl, triton
from ..rows.reduce import column_sum, column_sum_tunable, partial_sums
from ..rows.tuning import persistent_misfit, rows_per_program, safe_whole_rows

MAX_COLS = 65536
"""A program holds all columns of a row."""


def attn_res_reference(V, w_query, w_norm, eps=1e-6):
    return _fwd_reference(V, w_query, w_norm, eps)[0]


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _query(WQ_ptr, WN_ptr, cols, n_cols):
    """w_query * w_norm, [1, BLOCK_SIZE]."""
    w_query = tl.load(WQ_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    return w_query * tl.load(WN_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_blocks", "n_rows"])
def _attn_res_fwd_kernel(
    V_ptr,
    WQ_ptr,
    WN_ptr,
    H_ptr,
    Score_ptr,
    RSTD_ptr,
    LSE_ptr,
    n_blocks,
    n_rows,
    n_cols,
    eps,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program computes ROWS whole rows, one block (index n) at a time."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    row_mask = rows < n_rows
    mask = row_mask & (cols < n_cols)
    query = _query(WQ_ptr, WN_ptr, cols, n_cols)
    top = tl.full([ROWS, 1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS, 1], dtype=tl.float32)
    acc = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        row = rows + tl.cast(block, tl.int64) * n_rows
        v = tl.load(V_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(v * v, axis=1)[:, None] / n_cols + eps)
        score = tl.sum(v * query, axis=1)[:, None] * rstd
        tl.store(RSTD_ptr + row, rstd, mask=row_mask)
        tl.store(Score_ptr + row, score, mask=row_mask)
        higher = tl.maximum(top, score)
        before, weight = tl.exp(top - higher), tl.exp(score - higher)
        acc = acc * before + weight * v
        total = total * before + weight
        top = higher
    tl.store(H_ptr + rows * n_cols + cols, (acc / total).to(H_ptr.dtype.element_ty), mask=mask)
    tl.store(LSE_ptr + rows, top + tl.log(total), mask=row_mask)


@triton.jit(do_not_specialize=["n_blocks", "n_rows", "n_tiles"])
def _attn_res_bwd_kernel(
    DH_ptr,
    V_ptr,
    WQ_ptr,
    WN_ptr,
    Score_ptr,
    RSTD_ptr,
    LSE_ptr,
    DV_ptr,
    Partial_ptr,
    n_blocks,
    n_rows,
    n_cols,
    n_tiles,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p takes the row tiles p, p + programs, ... It reads V twice, the second time from cache, because the
    gradient of a block needs g . v of all blocks. BLOCKS: a power of two, at least n_blocks.

    Partial_ptr [programs, n_cols]: each program's partial sums of dq.
    """
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    blocks = tl.arange(0, BLOCKS)[None, :]
    query = _query(WQ_ptr, WN_ptr, cols, n_cols)
    dquery = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        row_mask = rows < n_rows
        mask = row_mask & (cols < n_cols)
        g = tl.load(DH_ptr + rows * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        dots = tl.zeros([ROWS, BLOCKS], dtype=tl.float32)
        for block in tl.range(0, n_blocks, num_stages=STAGES):
            row = rows + tl.cast(block, tl.int64) * n_rows
            v = tl.load(V_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
            dots = tl.where(blocks == block, tl.sum(g * v, axis=1)[:, None], dots)
        block_mask = row_mask & (blocks < n_blocks)
        scores = tl.load(Score_ptr + rows + blocks.to(tl.int64) * n_rows, mask=block_mask, other=-float("inf"))
        rstds = tl.load(RSTD_ptr + rows + blocks.to(tl.int64) * n_rows, mask=block_mask, other=0.0)
        alphas = tl.exp(scores - tl.load(LSE_ptr + rows, mask=row_mask, other=0.0))
        q_coefs = alphas * (dots - tl.sum(alphas * dots, axis=1)[:, None]) * rstds
        v_coefs = q_coefs * tl.where(block_mask, scores, 0.0) * rstds / n_cols
        for step in tl.range(0, n_blocks, num_stages=STAGES):
            block = n_blocks - 1 - step  # backwards: the last blocks are still in cache
            row = rows + tl.cast(block, tl.int64) * n_rows
            v = tl.load(V_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
            alpha = tl.sum(tl.where(blocks == block, alphas, 0.0), axis=1)[:, None]
            q_coef = tl.sum(tl.where(blocks == block, q_coefs, 0.0), axis=1)[:, None]
            v_coef = tl.sum(tl.where(blocks == block, v_coefs, 0.0), axis=1)[:, None]
            dquery += q_coef * v
            dv = alpha * g + q_coef * query - v_coef * v
            tl.store(DV_ptr + row * n_cols + cols, dv.to(DV_ptr.dtype.element_ty), mask=mask)
    dq = tl.sum(dquery, axis=0)[None, :]
    tl.store(Partial_ptr + tl.program_id(0) * n_cols + cols, dq.to(Partial_ptr.dtype.element_ty), mask=cols < n_cols)


# -- tunables --------------------------------------------------------------------------------------------------------

DIMS = ("n_rows", "n_blocks", "n_cols")


def _key(n_rows, n_blocks, n_cols, itemsize):
    return row_key(n_rows, n_cols, itemsize)


def _tile(target, key, per_thread, ctas):
    """Tiles of up to 2048 elements, or of one row, with up to three blocks prefetched."""
    rows = rows_per_program(target, key[1], max(1, 2048 // key[0]))
    elements = key[0] * rows
    stages = max(1, min(3, target.shared_memory // (2 * max(1, ctas) * elements * key[2])))
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": rows}, target.warps(elements, per_thread, 16), stages, ctas)


def _space(ctas):
    def space(target, key):
        tiles = [{"BLOCK_SIZE": key[0], "ROWS": rows} for rows in (1, 2, 4, 8) if rows == 1 or rows * key[0] <= 8192]
        warps, stages = (1, 2, 4, 8, 16), (1, 2, 3, 4)
        bounds = {"per_thread": (4, 64), "staged_bytes": key[2]}
        return tile_space(target, tiles, warps, stages=stages, ctas=ctas, **bounds)

    return space


RULES = {"key": _key, "dims": DIMS, "safe": safe_whole_rows}
FWD = Tunable(
    "attn_res",
    "fwd",
    kernels=(_attn_res_fwd_kernel,),
    heuristic=lambda target, key: _tile(target, key, 16, 0),
    space=_space((0,)),
    **RULES,
)
BWD = Tunable(
    "attn_res",
    "bwd",
    kernels=(_attn_res_bwd_kernel,),
    heuristic=lambda target, key: _tile(target, key, 32, 2),  # four fp32 values are live for each element of a tile
    space=_space((1, 2, 3, 4)),
    valid=persistent_misfit,
    **RULES,
)
DW = column_sum_tunable("attn_res", DIMS)

# -- launchers -------------------------------------------------------------------------------------------------------


def _sizes(v):
    n_blocks, n_cols = v.shape[0], v.shape[-1]
    return n_blocks, v.numel() // (n_blocks * n_cols) if n_cols else 0, n_cols


def _fwd(v, w_query, w_norm, eps):
    v, w_query, w_norm = dense(v), dense(w_query), dense(w_norm)
    n_blocks, n_rows, n_cols = _sizes(v)
    h = torch.empty(v.shape[1:], dtype=v.dtype, device=v.device)
    score = torch.empty((n_blocks, n_rows), dtype=torch.float32, device=v.device)
    rstd = torch.empty((n_blocks, n_rows), dtype=torch.float32, device=v.device)
    lse = torch.empty((n_rows,), dtype=torch.float32, device=v.device)
    if n_rows:
        plan = FWD.plan(v.device, _key(n_rows, n_blocks, n_cols, v.itemsize))
        args = (v, w_query, w_norm, h, score, rstd, lse, n_blocks, n_rows, n_cols, eps)
        launch(plan, _attn_res_fwd_kernel, (cdiv(n_rows, plan.config.blocks["ROWS"]),), args)
    return h, score, rstd, lse


def _bwd(dh, v, w_query, w_norm, score, rstd, lse, eps):
    dv, dq = _dv_dq(dense(dh), dense(v), dense(w_query), dense(w_norm), score, rstd, lse)
    return dv, (dq * w_norm).to(w_query.dtype), (dq * w_query).to(w_norm.dtype)


@repeated
def _dv_dq(dh, v, w_query, w_norm, score, rstd, lse):
    """The gradients of V and, in fp32, of q = w_query * w_norm."""
    n_blocks, n_rows, n_cols = _sizes(v)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not n_rows:
        return dv, v.new_zeros(n_cols, dtype=torch.float32)
    plan = BWD.plan(v.device, _key(n_rows, n_blocks, n_cols, v.itemsize))
    n_tiles = cdiv(n_rows, plan.config.blocks["ROWS"])
    programs = min(plan.programs, n_tiles)
    partial = partial_sums(v, programs, n_cols, torch.float32)
    args = (dh, v, w_query, w_norm, score, rstd, lse, dv, partial, n_blocks, n_rows, n_cols, n_tiles)
    launch(plan, _attn_res_bwd_kernel, (programs,), args, (next_power_of_2(n_blocks),))
    return dv, column_sum(DW, partial, torch.float32)


def _fwd_reference(v, w_query, w_norm, eps):
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    score = (wide * (w_query.to(wide.dtype) * w_norm.to(wide.dtype))).sum(-1) * rstd
    h = (score.softmax(0)[..., None] * wide).sum(0).to(v.dtype)
    score = score[:, None].flatten(1)
    return h, score, rstd[:, None].flatten(1), score.logsumexp(0)


def _misfit(v, *_rest):
    if not v.shape[0]:
        return "V must have at least one block, got none"
    return "" if v.shape[-1] <= MAX_COLS else f"V must have at most {MAX_COLS} columns, got {v.shape[-1]}"


class AttnResFunction(OperatorFunction):
    fwd = define(
        "attn_res_fwd(Tensor V, Tensor w_query, Tensor w_norm, float eps)"
        " -> (Tensor H, Tensor score, Tensor rstd, Tensor lse)",
        shapes="V [blocks, *, n]; w_query, w_norm [n]",
        misfit=_misfit,
        launcher=_fwd,
        reference=_fwd_reference,
    )
    bwd = define(
        "attn_res_bwd(Tensor dH, Tensor V, Tensor w_query, Tensor w_norm, Tensor score, Tensor rstd, Tensor lse,"
        " float eps) -> (Tensor dV, Tensor dw_query, Tensor dw_norm)",
        shapes="V [blocks, *, n]; dH [*, n]; w_query, w_norm [n]; score, rstd [blocks, rows]; lse [rows]",
        misfit=lambda dh, *args: _misfit(*args),
        launcher=_bwd,
        derivative_of=fwd,
        recorded=False,
    )


def liger_attn_res(
    V: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
    w_query: torch.Tensor,
    w_norm: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Softmax attention of one learned query over the blocks, with RMS-normalised keys: sum of alpha_n * V_n.

    V: [n_blocks, ..., n_cols], or a list of n_blocks tensors [..., n_cols], which are stacked; w_query, w_norm:
    [n_cols]; n_cols at most 65536. fp32, fp16 or bf16 (fp64 too on the CPU). Returns [..., n_cols] in V's dtype.
    Raises `ValueError` for shapes, dtypes or devices that do not fit. https://arxiv.org/abs/2603.15031
    """
    if isinstance(V, (list, tuple)):
        check(len(V) > 0, "liger_attn_res", "V must have a tensor for each block, got an empty list")
        check_tensors("liger_attn_res", **{f"V[{n}]": block for n, block in enumerate(V)})
        shapes = list(dict.fromkeys(tuple(block.shape) for block in V))
        check(len(shapes) == 1, "liger_attn_res", f"the blocks in V must have one shape, got {shapes}")
        V = torch.stack(tuple(V))
    check_numbers("liger_attn_res", eps=eps)
    return AttnResFunction.apply(V, w_query, w_norm, float(eps))


class LigerAttnRes(torch.nn.Module):
    """`liger_attn_res` with its weights. w_query starts at 0, so the result is the blocks' mean, and w_norm at 1.

    hidden_size: the last dimension of the blocks; eps: as for `liger_attn_res`.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.w_query = torch.nn.Parameter(torch.zeros(hidden_size))
        self.w_norm = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, V: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        """V: [n_blocks, ..., hidden_size] or a list of blocks; returns [..., hidden_size]."""
        return liger_attn_res(V, self.w_query, self.w_norm, self.eps)

    def extra_repr(self) -> str:
        return f"{self.w_query.shape[0]}, eps={self.eps}"


WORKLOADS = {
    "kimi_linear_48b": (8192, 8, 2304),
    "block_8": (8192, 8, 4096),
    "block_16": (4096, 16, 7168),
    "first_layers": (16384, 3, 2048),
}


def sample(sizes, dtype, device, generator) -> Sample:
    n_rows, n_blocks, n_cols = sizes
    drawn = normal(dtype, device, generator)
    v, w_norm = drawn(n_blocks, n_rows, n_cols), drawn(n_cols)
    w_query = (drawn(n_cols).detach() / n_cols**0.5).requires_grad_()
    return Sample(
        args=(v, w_query, w_norm),
        reduction=n_cols,
        grad_reduction=max(n_cols, n_blocks * n_rows),
        moved=(3 * n_blocks + 3) * n_rows * n_cols * dtype.itemsize,
    )


OP = registry.register_file(__name__, tunables=(FWD, BWD, DW))
