"""Embedding: y[i] = weight[indices[i]], with a deterministic gradient of the table.

Saved for backward: indices. Backward: dW[r] = the sum of dy[i] over the i with indices[i] = r, in fp32, in the order of
i, rounded once. stable_sort.py sorts the indices, row_sums.py sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ... import registry
from ...registry import Key, LaunchConfig, Sample, Target, row_key, tile_space
from ...runtime.operator import Function, cdiv, check, check_tensors, define, first_order, launch
from ...runtime.triton_import import tl, triton
from ..rows.tuning import column_tiles
from .row_sums import BWD, JOIN, MAX_UNSORTED_TOKENS, UNSORTED, embedding_tunable, sum_rows, sum_unsorted
from .stable_sort import MERGE, SORT, sort_indices


def embedding_reference(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The specification in plain torch; its backward sums in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return F.embedding(indices, weight.to(wide), padding_idx).to(weight.dtype)


@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_fwd_kernel(
    W_ptr, Index_ptr, Y_ptr, W_row_stride, n_tokens, n_rows, n_cols, BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Each program copies BLOCK_T tokens x BLOCK_SIZE columns."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    exist = tokens < n_tokens
    row = tl.load(Index_ptr + tokens, mask=exist, other=0).to(tl.int64)
    inside = ((row >= 0) & (row < n_rows))[:, None]
    mask = exist[:, None] & (cols < n_cols)[None, :]
    y = tl.load(W_ptr + row[:, None] * W_row_stride + cols[None, :], mask=mask & inside, other=float("nan"))
    tl.store(Y_ptr + tokens[:, None] * n_cols + cols[None, :], y, mask=mask)


def _fwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """2048 elements a program: many programs keep many loads in flight."""
    block = min(key[0], 2048)
    tokens = max(1, 2048 // block)
    return LaunchConfig({"BLOCK_T": tokens, "BLOCK_SIZE": block}, target.warps(block * tokens, 16, 8))


def _fwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = [{"BLOCK_T": tokens, **columns} for tokens in (1, 2, 4, 8) for columns in column_tiles(key, 512, 8192)]
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 64))


FWD = embedding_tunable("fwd", _embedding_fwd_kernel, {"BLOCK_T": 1, "BLOCK_SIZE": 128}, _fwd_heuristic, _fwd_space)


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
    if not (n_tokens and n_rows and n_cols):
        return dy.new_zeros((n_rows, n_cols))
    dw, dy, indices = dy.new_empty((n_rows, n_cols)), dy.reshape(n_tokens, n_cols), indices.flatten().contiguous()
    if n_tokens <= MAX_UNSORTED_TOKENS:
        sum_unsorted(dw, dy, indices, padding_idx)
    else:
        sum_rows(dw, dy, *sort_indices(indices, n_rows), padding_idx=padding_idx)
    return dw


def _bwd_reference(dy, indices, n_rows, padding_idx):
    wide = torch.promote_types(dy.dtype, torch.float32)
    dw = torch.zeros((n_rows, dy.shape[-1]), dtype=wide, device=dy.device)
    dw.index_add_(0, indices.flatten(), dy.to(wide).reshape(indices.numel(), dy.shape[-1]))
    if padding_idx >= 0:
        dw[padding_idx] = 0.0
    return dw.to(dy.dtype)


def _misfit(weight, indices) -> str:
    if not weight.shape[0] and indices.numel():
        return f"weight {tuple(weight.shape)} has no rows that indices {tuple(indices.shape)} could take"
    return ""


embedding_fwd = define(
    "embedding_fwd(Tensor weight, Tensor indices) -> Tensor",
    shapes="weight [n_rows, n_cols]; int indices",
    misfit=_misfit,
    launcher=_fwd,
    reference=lambda weight, indices: embedding_reference(weight, indices).contiguous(),
)
embedding_bwd = define(
    "embedding_bwd(Tensor dy, Tensor indices, int n_rows, int padding_idx) -> Tensor",
    shapes="int indices [*]; dy [*, n_cols]",
    launcher=_bwd,
    reference=_bwd_reference,
)


class EmbeddingFunction(Function):
    @staticmethod
    def forward(ctx, embeddings, indices, padding_idx):
        y = embedding_fwd(embeddings, indices)
        ctx.n_rows = embeddings.shape[0]
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        ctx.save_for_backward(indices)
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_output):
        return embedding_bwd(grad_output, *ctx.saved_tensors, ctx.n_rows, ctx.padding_idx), None, None


def liger_embedding(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Rows of `weight`, as `torch.nn.functional.embedding`.

    weight: [n_rows, n_cols] in fp32, fp16 or bf16; indices: int32 or int64 of any shape; padding_idx: a row that gets
    no gradient, negative counts from the end. Returns [*indices.shape, n_cols].
    An index outside the table raises on the CPU. On a GPU it gives NaN and no gradient, because an error would need a
    synchronisation. Raises `ValueError` for shapes, dtypes, devices or a padding_idx that do not fit.
    """
    if padding_idx is not None:
        check_tensors("liger_embedding", weight=weight)
        rows = weight.shape[0] if weight.dim() else 0
        if isinstance(padding_idx, bool) or not (isinstance(padding_idx, int) and -rows <= padding_idx < rows):
            check(False, "liger_embedding", f"padding_idx must lie in [{-rows}, {rows}), got {padding_idx!r}")
        padding_idx = padding_idx + rows if padding_idx < 0 else padding_idx
    return EmbeddingFunction.apply(weight, indices, padding_idx)


class LigerEmbedding(torch.nn.Embedding):
    """`torch.nn.Embedding` on `liger_embedding`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        fits = padding_idx is None or -num_embeddings <= padding_idx < num_embeddings
        expected = f"[{-num_embeddings}, {num_embeddings})"
        check(fits, "LigerEmbedding", f"padding_idx must lie in {expected}, got {padding_idx}")
        super().__init__(num_embeddings, embedding_dim, padding_idx)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices: int64 or int32 of any shape; returns [*indices.shape, embedding_dim]."""
        return liger_embedding(self.weight, indices, self.padding_idx)


WORKLOADS = {"llama3_8b": (16384, 128256, 4096), "qwen3_0_6b": (32768, 151936, 1024)}


def sample(sizes, dtype, device, generator) -> Sample:
    """Half of the tokens index 0.4% of the rows, as in text."""
    n_tokens, n_rows, n_cols = sizes
    weight = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float32, device=device).to(dtype)
    skewed = torch.rand(n_tokens, generator=generator, device=device) ** 8
    indices = (skewed * n_rows).long().clamp_(max=n_rows - 1)
    moved = 2 * n_tokens * n_cols + n_tokens * n_cols + n_rows * n_cols
    return Sample(
        args=(weight.requires_grad_(), indices), reduction=1, grad_reduction=n_tokens, moved=moved * dtype.itemsize
    )


OP = registry.register_file(
    __name__, tunables=(FWD, UNSORTED, SORT, MERGE, BWD, JOIN), small=((37, 11, 33), (1, 3, 8), (70, 3, 16))
)
