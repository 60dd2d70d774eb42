"""Rows added up by where they belong: dW[r] = the sum of dy[i] over the i that name r. embedding.py's backward.

In fp32, rounded once, in the order of i whatever the timing: a program sums a chunk of the sorted i, and a second kernel
joins the sums of rows that lie across chunks. So a row that occurs once and one that fills the batch cost alike, without
atomics. Rows that no token names are zeroed by later programs of the kernel that sums: sums wait for memory, zeros fill
it. Up to FEW tokens take one launch, in which every program looks at all of them.

H200, bf16, us (embedding-trial-h200.json): 1 token of a table of 32000 x 4096 58.6 (zeros alone at the rate of a copy 62.5,
torch's fill 78), 512 tokens 76; 16384 tokens of 128256 x 4096 322, where a copy of the bytes takes 283.
"""

from __future__ import annotations

import torch

from ...registry import Key, LaunchConfig, Target, Tunable, row_key
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton

FEW = 64

# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _zero_rows(DW_ptr, rows, wanted, n_cols, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Zeros to those of ROWS rows of dW that are wanted."""
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        out = DW_ptr + rows[:, None] * n_cols + cols[None, :]
        zeros = tl.zeros([ROWS, BLOCK_SIZE], dtype=DW_ptr.dtype.element_ty)
        tl.store(out, zeros, mask=wanted[:, None] & (cols < n_cols)[None, :])


@triton.jit(do_not_specialize=["n_tokens"])
def _embedding_few_kernel(
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
    """At most MOST tokens, unsorted. First programs of BLOCK_SIZE columns of a token, which sum its row if no earlier
    token has it; then programs of ROWS rows, which write zeros to those that no token has."""
    blocks = tl.cdiv(n_cols, BLOCK_SIZE)
    program = tl.program_id(0)
    at = tl.arange(0, MOST)
    named = tl.load(Index_ptr + at, mask=at < n_tokens, other=-1).to(tl.int64)
    if program < n_tokens * blocks:
        token = program // blocks
        cols = program % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        col_mask = cols < n_cols
        row = tl.load(Index_ptr + token).to(tl.int64)
        first = tl.min(tl.where(named == row, at, MOST), axis=0)
        if (first == token) & (row >= 0) & (row < n_rows) & (row != padding_idx):
            total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
            ptrs = DY_ptr + token.to(tl.int64) * DY_row_stride + cols
            for other in range(token, n_tokens):
                same = tl.load(Index_ptr + other).to(tl.int64) == row
                total += tl.load(ptrs, mask=same & col_mask, other=0.0).to(tl.float32)
                ptrs += DY_row_stride
            tl.store(DW_ptr + row * n_cols + cols, total.to(DW_ptr.dtype.element_ty), mask=col_mask)
    else:
        rows = (program - n_tokens * blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        same = tl.max((rows[:, None] == named[None, :]).to(tl.int32), axis=1) > 0
        _zero_rows(DW_ptr, rows, (rows < n_rows) & ((same == 0) | (rows == padding_idx)), n_cols, ROWS, BLOCK_SIZE)


@triton.jit
def _zero_unnamed(
    Sorted_ptr,
    DW_ptr,
    first,
    n_tokens,
    top,
    n_rows,
    n_cols,
    padding_idx,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Zeros to those of ROWS rows of dW that no token names, found by bisecting the sorted tokens.

    top: the largest power of two that is at most n_tokens
    """
    rows = first.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    below = tl.zeros([ROWS], dtype=tl.int32)  # how many tokens are of smaller rows
    step = top
    while step > 0:
        probe = tl.load(Sorted_ptr + below + (step - 1), mask=below + step <= n_tokens, other=0).to(tl.int64)
        below += tl.where((below + step <= n_tokens) & (probe < rows), step, 0)
        step //= 2
    named = tl.load(Sorted_ptr + below, mask=below < n_tokens, other=-1).to(tl.int64) == rows
    wanted = (rows < n_rows) & ((named == 0) | (rows == padding_idx))
    _zero_rows(DW_ptr, rows, wanted, n_cols, ROWS, BLOCK_SIZE)


@triton.jit
def _sum_chunk(
    DY_ptr,
    Sorted_ptr,
    Order_ptr,
    Scale_ptr,
    DW_ptr,
    Earlier_ptr,
    Later_ptr,
    DY_row_stride,
    part,
    n_tokens,
    n_rows,
    n_cols,
    padding_idx,
    ACCUMULATE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """BLOCK_SIZE columns of one chunk of the sorted tokens, GROUP of them read at a time.

    Rows that lie wholly in it go to dW, or with ACCUMULATE are added to it. A row that began in an earlier chunk leaves
    its sum in Earlier[chunk], one that goes on in a later chunk in Later[chunk] (both [n_chunks, n_cols] fp32); one that
    does both counts as the former.
    """
    blocks = tl.cdiv(n_cols, BLOCK_SIZE)
    chunk = (part // blocks).to(tl.int64)
    cols = part % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    col_mask = cols < n_cols
    start = chunk * CHUNK
    group = tl.arange(0, GROUP)
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    row = tl.load(Sorted_ptr + start).to(tl.int64)
    before = tl.load(Sorted_ptr + start - 1, mask=start > 0, other=-1).to(tl.int64)
    began_here = (start == 0) | (before != row)
    for at in range(0, CHUNK, GROUP):
        places = start + at + group
        rows = tl.load(Sorted_ptr + places, mask=places < n_tokens, other=-1).to(tl.int64)
        counts = (rows >= 0) & (rows < n_rows) & (rows != padding_idx)
        tokens = tl.load(Order_ptr + places, mask=counts, other=0).to(tl.int64)
        if Scale_ptr is not None:
            scale = tl.load(Scale_ptr + tokens, mask=counts, other=0.0)
            counts = counts & (scale != 0.0)  # true for nan
        ptrs = DY_ptr + tokens[:, None] * DY_row_stride + cols[None, :]
        dy = tl.load(ptrs, mask=counts[:, None] & col_mask[None, :], other=0.0).to(tl.float32)
        if Scale_ptr is not None:
            dy = dy * scale[:, None]
        for i in tl.static_range(GROUP):
            place = start + at + i
            following = tl.load(Sorted_ptr + place + 1, mask=place + 1 < n_tokens, other=-1).to(tl.int64)
            wanted = (row >= 0) & (row < n_rows) & (row != padding_idx)
            total += tl.sum(tl.where((group == i)[:, None], dy, 0.0), axis=0)
            ends = following != row
            last = at + i == CHUNK - 1
            out = DW_ptr + row * n_cols + cols
            whole = wanted & ends & began_here & col_mask
            if ACCUMULATE:
                raised = total + tl.load(out, mask=whole, other=0.0).to(tl.float32)
                tl.store(out, raised.to(DW_ptr.dtype.element_ty), mask=whole)
            else:
                tl.store(out, total.to(DW_ptr.dtype.element_ty), mask=whole)
            if wanted & (ends | last) & ((ends & began_here) == 0):  # rare: it spares the others a change of layout
                tl.store(Earlier_ptr + chunk * n_cols + cols, total, mask=col_mask & (began_here == 0))
                tl.store(Later_ptr + chunk * n_cols + cols, total, mask=col_mask & began_here)
            total = tl.where(ends, 0.0, total)
            began_here = began_here | ends
            row = following


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
    """The first n_sums programs sum, the others write zeros: the longest waits begin first."""
    program = tl.program_id(0)
    if program < n_sums:
        _sum_chunk(
            DY_ptr,
            Sorted_ptr,
            Order_ptr,
            Scale_ptr,
            DW_ptr,
            Earlier_ptr,
            Later_ptr,
            DY_row_stride,
            program,
            n_tokens,
            n_rows,
            n_cols,
            padding_idx,
            ACCUMULATE,
            CHUNK,
            GROUP,
            BLOCK_SIZE,
        )
    else:
        first = program - n_sums
        _zero_unnamed(Sorted_ptr, DW_ptr, first, n_tokens, top, n_rows, n_cols, padding_idx, ROWS, BLOCK_SIZE)


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


def tunable(variant: str, kernels: tuple, blocks: dict[str, int], heuristic, space) -> Tunable:
    """`blocks` are those of the safe configuration."""

    def safe(target: Target, key: Key) -> LaunchConfig:
        return LaunchConfig(blocks, 1, 1)

    def valid(config: LaunchConfig, key: Key) -> str | None:
        if set(config.blocks) != set(blocks):
            return f"blocks must be {sorted(blocks)}, got {dict(config.blocks)}"
        group, chunk = config.blocks.get("GROUP", 1), config.blocks.get("CHUNK", 1)
        return None if chunk % group == 0 else f"GROUP must divide CHUNK, got {group} and {chunk}"

    return Tunable(
        "embedding",
        variant,
        kernels=kernels,
        key=_key,
        dims=_DIMS,
        heuristic=heuristic,
        safe=safe,
        space=space,
        valid=valid,
    )


def _few_heuristic(target: Target, key: Key) -> LaunchConfig:
    """2048 elements a program, or one row: many short programs write zeros faster than few long ones."""
    block = min(key[0], 512)
    return LaunchConfig({"ROWS": max(1, 2048 // key[0]), "BLOCK_SIZE": block}, target.warps(block, 8, 8))


def _few_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"ROWS": max(1, size // key[0]), "BLOCK_SIZE": block}, warps)
        for size in (2048, 4096, 16384)
        for block in sorted({min(key[0], n) for n in (512, 1024, 2048)})
        for warps in (1, 2, 4, 8)
        if 4 <= block // (warps * target.warp_size) <= 16
    ]


def _bwd_heuristic(target: Target, key: Key) -> LaunchConfig:
    """Chunks of 16 tokens, 8 elements a thread: short enough to fill the device at 4096 tokens. Of more than 8192 chunks
    of 64, with a quarter of the sums of a frequent row to join.

    16384 elements of zeros a program, of at most 8 rows where they are long: each row takes registers of its own.
    """
    chunk, group, block = (64, 8, 512) if key[1] >= 14 else (16, 4, 1024)
    rows = max(1, min(16384 // key[0], max(8, 4096 // key[0]), 64))
    block = min(key[0], block)
    blocks = {"CHUNK": chunk, "GROUP": group, "ROWS": rows, "BLOCK_SIZE": block}
    return LaunchConfig(blocks, target.warps(block, 8, 8))


def _bwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"CHUNK": chunk, "GROUP": group, "ROWS": max(1, size // key[0]), "BLOCK_SIZE": block}, warps)
        for chunk in (16, 32, 64)
        for group in (4, 8)
        for size in (8192, 16384)
        for block in sorted({min(key[0], n) for n in (256, 512, 1024)})
        for warps in (1, 2, 4, 8)
        if 4 <= block // (warps * target.warp_size) <= 16
    ]


def _join_heuristic(target: Target, key: Key) -> LaunchConfig:
    """As many sums at once as 4096 tokens of one row leave in a few rounds: a round waits for memory."""
    block = min(key[0], 256)
    return LaunchConfig({"BLOCK_M": 32, "BLOCK_SIZE": block}, target.warps(32 * block, 32, 8))


def _join_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_M": rows, "BLOCK_SIZE": block}, warps)
        for rows in (8, 16, 32)
        for block in sorted({min(key[0], n) for n in (128, 256, 512)})
        for warps in (1, 2, 4, 8)
        if 4 <= rows * block // (warps * target.warp_size) <= 64
    ]


FEW_BWD = tunable(
    "few", (_embedding_few_kernel, _zero_rows), {"ROWS": 1, "BLOCK_SIZE": 128}, _few_heuristic, _few_space
)
BWD = tunable(
    "bwd",
    (_embedding_bwd_kernel, _sum_chunk, _zero_unnamed, _zero_rows),
    {"CHUNK": 8, "GROUP": 1, "ROWS": 1, "BLOCK_SIZE": 128},
    _bwd_heuristic,
    _bwd_space,
)
JOIN = tunable("join", (_embedding_join_kernel,), {"BLOCK_M": 4, "BLOCK_SIZE": 128}, _join_heuristic, _join_space)

# -- launchers -------------------------------------------------------------------------------------------------------


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
    """dw[places[i]] = the sum of dy[order[i]] over the i that have one value of places, the other rows 0; or with
    accumulate, dw[places[i]] is raised by it and the other rows stay as they are.

    places, order: from `sort_indices`; dw [n_rows, n_cols] contiguous
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
    top = 1 << (n_tokens.bit_length() - 1)
    n_sums = n_chunks * cdiv(n_cols, plan.config.blocks["BLOCK_SIZE"])
    n_programs = n_sums + (0 if accumulate else cdiv(n_rows, plan.config.blocks["ROWS"]))
    numbers = dy.stride(0), n_tokens, top, n_sums, n_rows, n_cols, padding_idx
    args = (dy, places, order, scale, dw, earlier, later, *numbers)
    launch(plan, _embedding_bwd_kernel, (n_programs,), args, (accumulate,))
    if n_chunks > 1:
        args = (places, dw, earlier, later, n_tokens, n_rows, n_cols, padding_idx)
        grid = n_chunks - 1, cdiv(n_cols, join.config.blocks["BLOCK_SIZE"])
        launch(join, _embedding_join_kernel, grid, args, (accumulate, chunk))


def sum_few(dw: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> None:
    """As `sum_rows`, of at most FEW tokens as they come; indices contiguous."""
    (n_rows, n_cols), n_tokens = dw.shape, dy.shape[0]
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    plan = FEW_BWD.plan(dy.device, row_key(n_tokens, n_cols, dy.itemsize))
    blocks = plan.config.blocks
    programs = n_tokens * cdiv(n_cols, blocks["BLOCK_SIZE"]) + cdiv(n_rows, blocks["ROWS"])
    args = (dy, indices, dw, dy.stride(0), n_tokens, n_rows, n_cols, padding_idx)
    launch(plan, _embedding_few_kernel, (programs,), args, (FEW,))
