"""Embedding: y[i] = weight[indices[i]], and the gradient of the table, exact and repeatable.

Shapes: weight [n_rows, n_cols], indices of any shape -> y [*indices.shape, n_cols] in weight's dtype (fp32, fp16, bf16).
padding_idx: that row is read as any other and gets no gradient. An index outside the table gives a row of NaN and no
gradient (on the CPU it raises): to raise, the host would have to wait for the device.
Saved for backward: indices.
Backward, dW[r] = sum of dy[i] over the i with indices[i] = r, in fp32, rounded once, in the order of i whatever the
timing: indices are sorted (stably: _stable_sort.py), a program sums a chunk of the sorted order, and a second kernel joins the sums of
rows that lie across chunks. So a row that occurs once and one that fills the batch cost alike, without atomics.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import registry
from ..registry import Key, LaunchConfig, Op, Sample, Target, Tunable, row_key
from ._op import Function, cdiv, check, check_tensors, define, first_order, launch
from ._stable_sort import MERGE, SORT, sort_indices
from ._triton import tl, triton

# -- reference -------------------------------------------------------------------------------------------------------


def embedding_reference(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The specification in plain torch; its backward sums in fp32, or in fp64 when `weight` is fp64."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return F.embedding(indices, weight.to(wide), padding_idx).to(weight.dtype)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_fwd_kernel(
    W_ptr,
    Index_ptr,
    Y_ptr,
    W_row_stride,
    n_tokens,
    n_rows,
    n_cols,
    BLOCK_T: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """BLOCK_T tokens x BLOCK_SIZE columns a program."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    there = tokens < n_tokens
    row = tl.load(Index_ptr + tokens, mask=there, other=0).to(tl.int64)
    known = ((row >= 0) & (row < n_rows))[:, None]
    mask = there[:, None] & (cols < n_cols)[None, :]
    y = tl.load(W_ptr + row[:, None] * W_row_stride + cols[None, :], mask=mask & known, other=float("nan"))
    tl.store(Y_ptr + tokens[:, None] * n_cols + cols[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_bwd_kernel(
    DY_ptr,
    Sorted_ptr,
    Order_ptr,
    Scale_ptr,
    DW_ptr,
    Earlier_ptr,
    Later_ptr,
    DY_row_stride,
    n_tokens,
    n_rows,
    n_cols,
    padding_idx,
    ACCUMULATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One chunk of the sorted tokens: rows that lie wholly in it go to dW, or with ACCUMULATE are added to it.

    A row that began in an earlier chunk leaves its sum in Earlier[chunk], one that goes on in a later chunk in
    Later[chunk] (both [n_chunks, n_cols] fp32); one that does both counts as the former.
    """
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    col_mask = cols < n_cols
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    before = tl.load(Sorted_ptr + start - 1, mask=start > 0, other=-1)
    began_here = (start == 0) | (before != tl.load(Sorted_ptr + start))
    for at in tl.range(0, CHUNK, num_stages=STAGES):
        place = start + at
        there = place < n_tokens
        row = tl.load(Sorted_ptr + place, mask=there, other=-1).to(tl.int64)
        following = tl.load(Sorted_ptr + place + 1, mask=place + 1 < n_tokens, other=-1).to(tl.int64)
        wanted = there & (row >= 0) & (row < n_rows) & (row != padding_idx)
        token = tl.load(Order_ptr + place, mask=wanted, other=0).to(tl.int64)
        if Scale_ptr is None:
            total += tl.load(DY_ptr + token * DY_row_stride + cols, mask=wanted & col_mask, other=0.0).to(tl.float32)
        else:
            scale = tl.load(Scale_ptr + token, mask=wanted, other=0.0)
            counts = wanted & (scale != 0.0)  # true for nan
            dy = tl.load(DY_ptr + token * DY_row_stride + cols, mask=counts & col_mask, other=0.0)
            total += dy.to(tl.float32) * scale
        ends = (following != row) | (place + 1 >= n_tokens)
        last = at == CHUNK - 1
        out = DW_ptr + row * n_cols + cols
        whole = wanted & ends & began_here & col_mask
        if ACCUMULATE:
            raised = total + tl.load(out, mask=whole, other=0.0).to(tl.float32)
            tl.store(out, raised.to(DW_ptr.dtype.element_ty), mask=whole)
        else:
            tl.store(out, total.to(DW_ptr.dtype.element_ty), mask=whole)
        earlier = wanted & (ends | last) & (began_here == 0)
        tl.store(Earlier_ptr + chunk * n_cols + cols, total, mask=earlier & col_mask)
        later = wanted & last & (ends == 0) & began_here
        tl.store(Later_ptr + chunk * n_cols + cols, total, mask=later & col_mask)
        total = tl.where(ends, 0.0, total)
        began_here = began_here | ends


@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_join_kernel(
    Sorted_ptr,
    DW_ptr,
    Earlier_ptr,
    Later_ptr,
    n_tokens,
    n_rows,
    n_cols,
    padding_idx,
    ACCUMULATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The row that begins in a chunk and goes on after it: its Later and the Earlier of the chunks that follow."""
    chunk = tl.program_id(0).to(tl.int64)
    end = (chunk + 1) * CHUNK
    row = tl.load(Sorted_ptr + end - 1, mask=end < n_tokens, other=-1).to(tl.int64)
    following = tl.load(Sorted_ptr + end, mask=end < n_tokens, other=-2).to(tl.int64)
    began = end - CHUNK
    before = tl.load(Sorted_ptr + began - 1, mask=began > 0, other=-1).to(tl.int64)
    began_here = (began == 0) | (before != row)  # or after the chunk's first place, which `before` differs from as well
    if (row == following) & began_here & (row >= 0) & (row < n_rows) & (row != padding_idx):
        cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < n_cols
        total = tl.load(Later_ptr + chunk * n_cols + cols, mask=col_mask, other=0.0)
        first = chunk + 1
        more = first >= 0  # true
        while more:
            chunks = first + tl.arange(0, BLOCK_M)
            starts = chunks * CHUNK
            same = tl.load(Sorted_ptr + starts, mask=starts < n_tokens, other=-1).to(tl.int64) == row
            ptrs = Earlier_ptr + chunks[:, None] * n_cols + cols[None, :]
            total += tl.sum(tl.load(ptrs, mask=same[:, None] & col_mask[None, :], other=0.0), axis=0)
            more = tl.sum(same.to(tl.int32), axis=0) == BLOCK_M
            first += BLOCK_M
        out = DW_ptr + row * n_cols + cols
        if ACCUMULATE:
            total += tl.load(out, mask=col_mask, other=0.0).to(tl.float32)
        tl.store(out, total.to(DW_ptr.dtype.element_ty), mask=col_mask)


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("n_tokens", "vocab", "n_cols")


def _key(n_tokens: int, vocab: int, n_cols: int, itemsize: int) -> Key:
    """As a row kernel over the tokens; how long the table is does not matter."""
    return row_key(n_tokens, n_cols, itemsize)


def _fwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """2048 elements a program: many programs, so that many rows are on their way."""
    block = min(key[0], 2048)
    tokens = max(1, 2048 // block)
    return LaunchConfig({"BLOCK_T": tokens, "BLOCK_SIZE": block}, target.warps(block * tokens, 16, 8))


def _fwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_T": tokens, "BLOCK_SIZE": block}, warps)
        for tokens in (1, 2, 4, 8)
        for block in sorted({min(key[0], n) for n in (512, 1024, 2048, 4096, 8192)})
        for warps in (1, 2, 4, 8)
        if 4 <= tokens * block // (warps * target.warp_size) <= 64
    ]


def _bwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Chunks of 16 tokens, 8 elements a thread: short enough to fill the device at 4096 tokens. From 16384 tokens on chunks
    of 32, with half as many sums of a frequent row to join: 73 us instead of 101 at 32768 x 1024 on an H200, half of the
    tokens from a few rows, and 102 instead of 117 at 16384 x 4096 (2026-11-22)."""
    many = key[1] >= 14
    block = min(key[0], 512 if many else 1024)
    chunk, stages = (32, 4) if many else (16, 2)
    return LaunchConfig({"CHUNK": chunk, "BLOCK_SIZE": block}, target.warps(block, 8, 8), stages)


def _bwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"CHUNK": chunk, "BLOCK_SIZE": block}, warps, stages)
        for chunk in (8, 16, 32, 64)
        for block in sorted({min(key[0], n) for n in (256, 512, 1024, 2048)})
        for warps in (1, 2, 4, 8)
        for stages in (1, 2, 3, 4)
        if 2 <= block // (warps * target.warp_size) <= 16
    ]


def _join_heuristic(target: Target, key: Key) -> LaunchConfig:
    block = min(key[0], 256)
    return LaunchConfig({"BLOCK_M": 8, "BLOCK_SIZE": block}, target.warps(8 * block, 16, 8))


def _join_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_M": rows, "BLOCK_SIZE": block}, warps)
        for rows in (4, 8, 16, 32)
        for block in sorted({min(key[0], n) for n in (128, 256, 512)})
        for warps in (1, 2, 4, 8)
        if 4 <= rows * block // (warps * target.warp_size) <= 64
    ]


def _tunable(variant: str, kernel, blocks: dict[str, int], heuristic, space) -> Tunable:
    """`blocks` are those of the safe configuration."""

    def safe(target: Target, key: Key) -> LaunchConfig:
        return LaunchConfig(blocks, 1, 1)

    def valid(config: LaunchConfig, key: Key) -> str | None:
        names = set(blocks)
        return None if set(config.blocks) == names else f"blocks must be {sorted(names)}, got {dict(config.blocks)}"

    return Tunable(
        "embedding",
        variant,
        kernels=(kernel,),
        key=_key,
        dims=_DIMS,
        heuristic=heuristic,
        safe=safe,
        space=space,
        valid=valid,
    )


FWD = _tunable("fwd", _embedding_fwd_kernel, {"BLOCK_T": 1, "BLOCK_SIZE": 128}, _fwd_heuristic, _fwd_space)
BWD = _tunable("bwd", _embedding_bwd_kernel, {"CHUNK": 8, "BLOCK_SIZE": 128}, _bwd_heuristic, _bwd_space)
JOIN = _tunable("join", _embedding_join_kernel, {"BLOCK_M": 4, "BLOCK_SIZE": 128}, _join_heuristic, _join_space)

# -- launchers -------------------------------------------------------------------------------------------------------


def _fwd(weight, indices):
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    indices = indices.contiguous()
    (n_rows, n_cols), n_tokens = weight.shape, indices.numel()
    y = weight.new_empty((*indices.shape, n_cols))
    if y.numel():
        plan = FWD.plan(weight.device, row_key(n_tokens, n_cols, weight.itemsize))
        blocks = plan.config.blocks
        grid = cdiv(n_tokens, blocks["BLOCK_T"]), cdiv(n_cols, blocks["BLOCK_SIZE"])
        args = (weight, indices, y, weight.stride(0), n_tokens, n_rows, n_cols)
        launch(plan, _embedding_fwd_kernel, grid, args)
    return y


def _bwd(dy, indices, n_rows, padding_idx):
    n_cols, n_tokens = dy.shape[-1], indices.numel()
    dw = dy.new_zeros((n_rows, n_cols))
    if dw.numel() and n_tokens:
        places, order = sort_indices(indices.flatten(), n_rows)
        sum_rows(dw, dy.reshape(n_tokens, n_cols), places, order, padding_idx=padding_idx)
    return dw


def sum_rows(
    dw: torch.Tensor,
    dy: torch.Tensor,
    places: torch.Tensor,
    order: torch.Tensor,
    *,
    padding_idx: int = -1,
    scale: torch.Tensor | None = None,
    accumulate: bool = False,
    scratch: torch.Tensor | None = None,
) -> None:
    """dw[places[i]] = the sum of dy[order[i]] over the i that have one value of places, or is raised by it (accumulate).

    places, order: from `sort_indices`; dw [n_rows, n_cols] contiguous: what no place names is left as it is
    scale: fp32, one factor for each row of dy; a row whose factor is 0 is not read
    scratch: fp32 memory that may be overwritten, used where it is large enough
    """
    (n_rows, n_cols), n_tokens = dw.shape, places.shape[0]
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    key = row_key(n_tokens, n_cols, dy.itemsize)
    plan, join = BWD.plan(dy.device, key), JOIN.plan(dy.device, key)
    chunk = plan.config.blocks["CHUNK"]
    n_chunks = cdiv(n_tokens, chunk)
    parts = 2 * n_chunks * n_cols
    if scratch is None or scratch.numel() < parts:
        scratch = dy.new_empty(parts, dtype=torch.float32)
    earlier, later = scratch[:parts].view(2, n_chunks, n_cols)
    args = (dy, places, order, scale, dw, earlier, later, dy.stride(0), n_tokens, n_rows, n_cols, padding_idx)
    grid = n_chunks, cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"])
    launch(plan, _embedding_bwd_kernel, grid, args, (accumulate,))
    if n_chunks > 1:
        args = (places, dw, earlier, later, n_tokens, n_rows, n_cols, padding_idx)
        grid = n_chunks - 1, cdiv(n_cols, join.config.blocks["BLOCK_SIZE"])
        launch(join, _embedding_join_kernel, grid, args, (accumulate, chunk))


# -- the operators ---------------------------------------------------------------------------------------------------


def _fwd_reference(weight, indices):
    return embedding_reference(weight, indices).contiguous()


def _bwd_reference(dy, indices, n_rows, padding_idx):
    wide = torch.promote_types(dy.dtype, torch.float32)
    dw = torch.zeros((n_rows, dy.shape[-1]), dtype=wide, device=dy.device)
    dw.index_add_(0, indices.flatten(), dy.to(wide).reshape(-1, dy.shape[-1]))
    if padding_idx >= 0:
        dw[padding_idx] = 0.0
    return dw.to(dy.dtype)


def _fwd_fake(weight, indices):
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _bwd_fake(dy, indices, n_rows, padding_idx):
    return dy.new_empty((n_rows, dy.shape[-1]))


embedding_fwd = define(
    "embedding_fwd(Tensor weight, Tensor indices) -> Tensor",
    launcher=_fwd,
    reference=_fwd_reference,
    fake=_fwd_fake,
)
embedding_bwd = define(
    "embedding_bwd(Tensor dy, Tensor indices, int n_rows, int padding_idx) -> Tensor",
    launcher=_bwd,
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class LigerEmbeddingFunction(Function):
    """Autograd for embedding: saves the indices."""

    @staticmethod
    def forward(ctx, embeddings, indices, padding_idx=None):
        ctx.n_rows = embeddings.shape[0]
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        ctx.save_for_backward(indices)
        return embedding_fwd(embeddings, indices)

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        return embedding_bwd(grad_output, *ctx.saved_tensors, ctx.n_rows, ctx.padding_idx), None, None


# -- public ----------------------------------------------------------------------------------------------------------


def liger_embedding(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Rows of `weight`, as `torch.nn.functional.embedding`.

    weight: [n_rows, n_cols] in fp32, fp16 or bf16; indices: int32 or int64 of any shape.
    padding_idx: row that gets no gradient, negative counts from the end.
    Returns [*indices.shape, n_cols]. On a GPU an index outside the table gives NaN.
    Raises `ValueError` for shapes, dtypes, devices or a padding_idx that do not fit.
    """
    check_tensors("liger_embedding", weight=weight)
    if reason := _misfit(weight, indices, padding_idx):
        check(False, "liger_embedding", reason)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return LigerEmbeddingFunction.apply(weight, indices, padding_idx)


def _misfit(weight, indices, padding_idx) -> str:
    if weight.dim() != 2:
        return f"weight must be [n_rows, n_cols], got {tuple(weight.shape)}"
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64):
        have = getattr(indices, "dtype", type(indices).__name__)
        return f"indices must be an int32 or int64 tensor, got {have}"
    if indices.device != weight.device:
        return f"indices is on {indices.device} but weight is on {weight.device}; move them to one device"
    rows = weight.shape[0]
    if padding_idx is not None and not (isinstance(padding_idx, int) and -rows <= padding_idx < rows):
        return f"padding_idx must lie in [{-rows}, {rows}), got {padding_idx!r}"
    return ""


class LigerEmbedding(torch.nn.Module):
    """Embedding layer: num_embeddings rows of embedding_dim, N(0, 1) at first; the row padding_idx is zero and stays."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        fits = padding_idx is None or -num_embeddings <= padding_idx < num_embeddings
        check(
            fits, "LigerEmbedding", f"padding_idx must lie in [{-num_embeddings}, {num_embeddings}), got {padding_idx}"
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = torch.nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx].zero_()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return liger_embedding(self.weight, indices, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOADS = {
    "llama3_8b": (16384, 128256, 4096),
    "qwen3_0_6b": (32768, 151936, 1024),
}
"""Problem sizes (n_tokens, vocab, n_cols) of real models."""


def _sample(sizes, dtype, device, generator) -> Sample:
    """Half of the tokens are drawn from a few rows, as text has it."""
    n_tokens, n_rows, n_cols = sizes
    weight = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    skewed = torch.rand(n_tokens, generator=generator, device=device) ** 8
    indices = (skewed * n_rows).long().clamp_(max=n_rows - 1)
    moved = 2 * n_tokens * n_cols + n_tokens * n_cols + n_rows * n_cols
    return Sample(
        args=(weight.requires_grad_(), indices),
        reduction=1,
        grad_reduction=n_tokens,
        moved=moved * dtype.itemsize,
    )


OP = registry.register(
    Op(
        name="embedding",
        function=liger_embedding,
        reference=embedding_reference,
        tunables=(FWD, SORT, MERGE, BWD, JOIN),
        workloads=WORKLOADS,
        sample=_sample,
        small=((37, 11, 33), (1, 3, 8), (70, 3, 16)),
    )
)
