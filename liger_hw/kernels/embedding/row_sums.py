"""Sums of rows by index: dW[r] = the sum of dy[i] over the i whose index is r. The gradient of an embedding's table.

Sums are added in fp32 in the order of i, without atomics (deterministic), and rounded once. One kernel sums chunks of
the sorted indices, a second joins the sums of rows that span chunks, so the cost does not depend on how often an index
occurs. The last programs of the first kernel write zeros to the rows without an index.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key, tile_space
from ...runtime.operator import cdiv, launch, with_fallback
from ...runtime.triton_import import tl, triton
from ..rows.tuning import column_tiles

MAX_UNSORTED_TOKENS = 64
"""Up to this number of tokens, one launch without a sort is used, in which every program reads all indices."""

# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _zero_rows(DW_ptr, rows, is_zero, n_cols, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Write zeros to the rows of dW that `is_zero` marks; rows, is_zero: [ROWS]."""
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        out = DW_ptr + rows[:, None] * n_cols + cols[None, :]
        zeros = tl.zeros([ROWS, BLOCK_SIZE], dtype=DW_ptr.dtype.element_ty)
        tl.store(out, zeros, mask=is_zero[:, None] & (cols < n_cols)[None, :])


@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_unsorted_kernel(
    DY_ptr,
    Index_ptr,
    DW_ptr,
    DY_row_stride,
    n_tokens,
    n_rows,
    n_cols,
    padding_idx,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """At most MOST tokens in any order.

    Each of the first programs takes BLOCK_SIZE columns of a token, and sums the token's row if it is the row's first
    token. Each other program takes ROWS rows of dW, and writes zeros to the rows without a token.
    """
    blocks = tl.cdiv(n_cols, BLOCK_SIZE)
    program = tl.program_id(0)
    tokens = tl.arange(0, MOST)
    token_rows = tl.load(Index_ptr + tokens, mask=tokens < n_tokens, other=-1).to(tl.int64)
    if program < n_tokens * blocks:
        token = program // blocks
        cols = program % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < n_cols
        row = tl.load(Index_ptr + token).to(tl.int64)
        first = tl.min(tl.where(token_rows == row, tokens, MOST), axis=0)
        if (first == token) & (row >= 0) & (row < n_rows) & (row != padding_idx):
            total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
            ptrs = DY_ptr + token.to(tl.int64) * DY_row_stride + cols
            for other in range(token, n_tokens):
                matches = tl.load(Index_ptr + other).to(tl.int64) == row
                total += tl.load(ptrs, mask=matches & col_mask, other=0.0).to(tl.float32)
                ptrs += DY_row_stride
            tl.store(DW_ptr + row * n_cols + cols, total.to(DW_ptr.dtype.element_ty), mask=col_mask)
    else:
        rows = (program - n_tokens * blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        matches = tl.max((rows[:, None] == token_rows[None, :]).to(tl.int32), axis=1) > 0
        _zero_rows(DW_ptr, rows, (rows < n_rows) & ((matches == 0) | (rows == padding_idx)), n_cols, ROWS, BLOCK_SIZE)


@triton.jit(do_not_specialize=["n_tokens", "top", "n_sums"])
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
    top,
    n_sums,
    n_rows,
    n_cols,
    padding_idx,
    ACCUMULATE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The first n_sums programs sum, the others write zeros: the slowest programs start first.

    A summing program takes BLOCK_SIZE columns of one chunk of the sorted tokens, and reads GROUP tokens at a time. The
    sum of a row of dW whose tokens all lie in the chunk is stored in dW, or with ACCUMULATE added to it. The sum of a
    row that began in an earlier chunk goes to Earlier[chunk], even if the row continues in the next chunk. The sum of a
    row that begins in this chunk and continues goes to Later[chunk]. Both are [n_chunks, n_cols] fp32.

    Each other program takes ROWS rows of dW and writes zeros to the rows without a token, which it finds by bisecting
    the sorted tokens. top: the largest power of two up to n_tokens
    """
    program = tl.program_id(0)
    if program < n_sums:
        blocks = tl.cdiv(n_cols, BLOCK_SIZE)
        chunk = (program // blocks).to(tl.int64)
        cols = program % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < n_cols
        start = chunk * CHUNK
        group = tl.arange(0, GROUP)
        total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        row = tl.load(Sorted_ptr + start).to(tl.int64)
        previous = tl.load(Sorted_ptr + start - 1, mask=start > 0, other=-1).to(tl.int64)
        began_here = (start == 0) | (previous != row)
        for offset in range(0, CHUNK, GROUP):
            positions = start + offset + group
            rows = tl.load(Sorted_ptr + positions, mask=positions < n_tokens, other=-1).to(tl.int64)
            counts = (rows >= 0) & (rows < n_rows) & (rows != padding_idx)
            tokens = tl.load(Order_ptr + positions, mask=counts, other=0).to(tl.int64)
            if Scale_ptr is not None:
                scale = tl.load(Scale_ptr + tokens, mask=counts, other=0.0)
                counts = counts & (scale != 0.0)  # true for nan
            ptrs = DY_ptr + tokens[:, None] * DY_row_stride + cols[None, :]
            dy = tl.load(ptrs, mask=counts[:, None] & col_mask[None, :], other=0.0).to(tl.float32)
            if Scale_ptr is not None:
                dy = dy * scale[:, None]
            for i in tl.static_range(GROUP):
                position = start + offset + i
                following = tl.load(Sorted_ptr + position + 1, mask=position + 1 < n_tokens, other=-1).to(tl.int64)
                has_gradient = (row >= 0) & (row < n_rows) & (row != padding_idx)
                total += tl.sum(tl.where((group == i)[:, None], dy, 0.0), axis=0)
                ends = following != row
                is_chunk_end = offset + i == CHUNK - 1
                out = DW_ptr + row * n_cols + cols
                whole = has_gradient & ends & began_here & col_mask
                if ACCUMULATE:
                    new_dw = total + tl.load(out, mask=whole, other=0.0).to(tl.float32)
                    tl.store(out, new_dw.to(DW_ptr.dtype.element_ty), mask=whole)
                else:
                    tl.store(out, total.to(DW_ptr.dtype.element_ty), mask=whole)
                # A branch, because this is rare: masked stores would convert the layout of every token's sum.
                if has_gradient & (ends | is_chunk_end) & ((ends & began_here) == 0):
                    tl.store(Earlier_ptr + chunk * n_cols + cols, total, mask=col_mask & (began_here == 0))
                    tl.store(Later_ptr + chunk * n_cols + cols, total, mask=col_mask & began_here)
                total = tl.where(ends, 0.0, total)
                began_here = began_here | ends
                row = following
    else:
        rows = (program - n_sums).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        below = tl.zeros([ROWS], dtype=tl.int32)  # number of tokens of smaller rows
        step = top
        while step > 0:
            probe = tl.load(Sorted_ptr + below + (step - 1), mask=below + step <= n_tokens, other=0).to(tl.int64)
            below += tl.where((below + step <= n_tokens) & (probe < rows), step, 0)
            step //= 2
        has_token = tl.load(Sorted_ptr + below, mask=below < n_tokens, other=-1).to(tl.int64) == rows
        is_zero = (rows < n_rows) & ((has_token == 0) | (rows == padding_idx))
        _zero_rows(DW_ptr, rows, is_zero, n_cols, ROWS, BLOCK_SIZE)


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
    """The sum of a row that begins in a chunk and continues after it: Later[chunk] plus Earlier of the next chunks."""
    chunk = tl.program_id(0).to(tl.int64)
    end = (chunk + 1) * CHUNK
    row = tl.load(Sorted_ptr + end - 1, mask=end < n_tokens, other=-1).to(tl.int64)
    following = tl.load(Sorted_ptr + end, mask=end < n_tokens, other=-2).to(tl.int64)
    start = end - CHUNK
    previous = tl.load(Sorted_ptr + start - 1, mask=start > 0, other=-1).to(tl.int64)
    began_here = (start == 0) | (previous != row)  # true for a row that begins inside the chunk, as tokens are sorted
    if (row == following) & began_here & (row >= 0) & (row < n_rows) & (row != padding_idx):
        cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < n_cols
        total = tl.load(Later_ptr + chunk * n_cols + cols, mask=col_mask, other=0.0)
        first_chunk = chunk + 1
        continues = first_chunk >= 0  # true, as a tensor
        while continues:
            chunks = first_chunk + tl.arange(0, BLOCK_M)
            starts = chunks * CHUNK
            same = tl.load(Sorted_ptr + starts, mask=starts < n_tokens, other=-1).to(tl.int64) == row
            ptrs = Earlier_ptr + chunks[:, None] * n_cols + cols[None, :]
            total += tl.sum(tl.load(ptrs, mask=same[:, None] & col_mask[None, :], other=0.0), axis=0)
            continues = tl.sum(same.to(tl.int32), axis=0) == BLOCK_M
            first_chunk += BLOCK_M
        out = DW_ptr + row * n_cols + cols
        if ACCUMULATE:
            total += tl.load(out, mask=col_mask, other=0.0).to(tl.float32)
        tl.store(out, total.to(DW_ptr.dtype.element_ty), mask=col_mask)


# -- tunables --------------------------------------------------------------------------------------------------------

_DIMS = ("n_tokens", "vocab", "n_cols")


def _key(n_tokens: int, vocab: int, n_cols: int, itemsize: int) -> Key:
    return row_key(n_tokens, n_cols, itemsize)


def embedding_tunable(variant: str, kernel, blocks: dict[str, int], heuristic, space) -> Tunable:
    """The tunable `embedding.<variant>`. blocks: of its safe configuration."""

    def safe(target: Target, key: Key) -> LaunchConfig:
        return LaunchConfig(blocks, 1, 1)

    def valid(config: LaunchConfig, key: Key) -> str | None:
        group, chunk = config.blocks.get("GROUP", 1), config.blocks.get("CHUNK", 1)
        return None if chunk % group == 0 else f"GROUP must divide CHUNK, got {group} and {chunk}"

    rules = {"heuristic": heuristic, "safe": safe, "space": space, "valid": valid}
    return Tunable("embedding", variant, kernels=(kernel,), key=_key, dims=_DIMS, **rules)


def _unsorted_heuristic(target: Target, key: Key) -> LaunchConfig:
    """2048 elements a program, or one row: many short programs write zeros faster than few long ones."""
    block = min(key[0], 512)
    return LaunchConfig({"ROWS": max(1, 2048 // key[0]), "BLOCK_SIZE": block}, target.warps(block, 8, 8))


def _bwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Chunks of 16 tokens, so that a small batch fills the device; above 8192 tokens chunks of 64, so that fewer sums
    are joined. 8 elements a thread. A program zeros 16384 elements, but at most 8 long rows: each takes registers."""
    chunk, group, block = (64, 8, 512) if key[1] >= 14 else (16, 4, 1024)
    rows = max(1, min(16384 // key[0], max(8, 4096 // key[0]), 64))
    block = min(key[0], block)
    blocks = {"CHUNK": chunk, "GROUP": group, "ROWS": rows, "BLOCK_SIZE": block}
    return LaunchConfig(blocks, target.warps(block, 8, 8))


def _bwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    rows = sorted({max(1, size // key[0]) for size in (8192, 16384)})
    configs = tile_space(target, column_tiles(key, 256, 1024), (1, 2, 4, 8), per_thread=(4, 16))
    choices = itertools.product((16, 32, 64), (4, 8), rows, configs)
    return [replace(c, blocks={"CHUNK": chunk, "GROUP": g, "ROWS": n, **c.blocks}) for chunk, g, n, c in choices]


def _join_heuristic(target: Target, key: Key) -> LaunchConfig:
    """32 chunk sums at once, because each iteration waits for memory."""
    block = min(key[0], 256)
    return LaunchConfig({"BLOCK_M": 32, "BLOCK_SIZE": block}, target.warps(32 * block, 32, 8))


def _join_space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = [{"BLOCK_M": rows, **columns} for rows in (8, 16, 32) for columns in column_tiles(key, 128, 512)]
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 64))


_FEW_SAFE = {"ROWS": 1, "BLOCK_SIZE": 128}
UNSORTED = embedding_tunable(
    "few", _embedding_unsorted_kernel, _FEW_SAFE, _unsorted_heuristic, space=lambda target, key: []
)
_BWD_SAFE = {"CHUNK": 8, "GROUP": 1, "ROWS": 1, "BLOCK_SIZE": 128}
BWD = embedding_tunable("bwd", _embedding_bwd_kernel, _BWD_SAFE, _bwd_heuristic, _bwd_space)
_JOIN_SAFE = {"BLOCK_M": 4, "BLOCK_SIZE": 128}
JOIN = embedding_tunable("join", _embedding_join_kernel, _JOIN_SAFE, _join_heuristic, _join_space)

# -- launchers -------------------------------------------------------------------------------------------------------


def sum_rows(
    dw: torch.Tensor,
    dy: torch.Tensor,
    rows: torch.Tensor,
    order: torch.Tensor,
    *,
    padding_idx: int = -1,
    scale: torch.Tensor | None = None,
    accumulate: bool = False,
    scratch: torch.Tensor | None = None,
) -> None:
    """dw[r] = the sum of dy[order[i]] over the i with rows[i] = r, 0 if there are none.

    rows, order: from `sort_indices`; dw: [n_rows, n_cols], contiguous; accumulate: add the sums to dw instead
    scale: fp32, a factor for each row of dy; a row whose factor is 0 is not read
    scratch: fp32 memory that may be overwritten, used if it is large enough
    """
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    (n_rows, n_cols), n_tokens = dw.shape, rows.shape[0]
    key = row_key(n_tokens, n_cols, dy.itemsize)

    # Each launch has a fallback, so that a failure of the second does not repeat the first, which may accumulate.

    def sum_chunks() -> tuple[int, torch.Tensor]:
        """(tokens per chunk, sums [2, n_chunks, n_cols] of rows that span chunks)."""
        plan = BWD.plan(dy.device, key)
        chunk = plan.config.blocks["CHUNK"]
        n_chunks = cdiv(n_tokens, chunk)
        size = 2 * n_chunks * n_cols
        is_large = scratch is not None and scratch.numel() >= size
        memory = scratch[:size] if is_large else dy.new_empty(size, dtype=torch.float32)
        parts = memory.view(2, n_chunks, n_cols)
        top = 1 << (n_tokens.bit_length() - 1)
        n_sums = n_chunks * cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"])
        n_programs = n_sums + (0 if accumulate else cdiv(n_rows, plan.config.blocks["ROWS"]))
        numbers = dy.stride(0), n_tokens, top, n_sums, n_rows, n_cols, padding_idx
        args = (dy, rows, order, scale, dw, *parts, *numbers)
        launch(plan, _embedding_bwd_kernel, (n_programs,), args, (accumulate,))
        return chunk, parts

    def join_chunks() -> None:
        plan = JOIN.plan(dy.device, key)
        args = (rows, dw, *parts, n_tokens, n_rows, n_cols, padding_idx)
        grid = parts.shape[1] - 1, cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"])
        launch(plan, _embedding_join_kernel, grid, args, (accumulate, chunk))

    chunk, parts = with_fallback(sum_chunks)()
    if parts.shape[1] > 1:
        with_fallback(join_chunks)()


def sum_unsorted(dw: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> None:
    """`sum_rows` for at most MAX_UNSORTED_TOKENS unsorted tokens. indices: contiguous."""
    (n_rows, n_cols), n_tokens = dw.shape, dy.shape[0]
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    plan = UNSORTED.plan(dy.device, row_key(n_tokens, n_cols, dy.itemsize))
    blocks = plan.config.blocks
    programs = n_tokens * cdiv(n_cols, blocks["BLOCK_SIZE"]) + cdiv(n_rows, blocks["ROWS"])
    args = (dy, indices, dw, dy.stride(0), n_tokens, n_rows, n_cols, padding_idx)
    launch(plan, _embedding_unsorted_kernel, (programs,), args, (MAX_UNSORTED_TOKENS,))
