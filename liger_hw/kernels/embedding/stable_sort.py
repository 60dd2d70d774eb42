"""Which token each place of the sorted tokens is, for keys that are rows of a table: a stable sort in two launches.

torch's takes about 50 us on an H200, for 16384 tokens or 32768; these two launches 22 and 39 (2026-11-22). Chunks of CHUNK
tokens are sorted each on its own: a token's rank is how many of its chunk come before it, all compared with all. Its rank
among all adds, for every other chunk, how many of that come before it, by bisection. One chunk, of up to LONE_CHUNK
tokens, takes one launch.
"""

from __future__ import annotations

import torch

from ...registry import Key, LaunchConfig, Target, Tunable
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton

CHUNK = 2048
LONE_CHUNK = 4096
"""Tokens of the only chunk at most."""
MOST_TOKENS = 2**15
"""Beyond it a token would be looked up in too many chunks, and torch's sort is the faster one."""


@triton.jit
def _words(Index_ptr, start, at, n_tokens, n_rows, CHUNK: tl.constexpr):
    """(row + 1) * CHUNK + place in the chunk: all unequal, and in the order of the sort; past the end more than any."""
    row = tl.load(Index_ptr + start + at, mask=start + at < n_tokens, other=0)
    row = tl.minimum(tl.maximum(row, -1), n_rows).to(tl.int32)  # outside the table stays outside
    return tl.where(start + at < n_tokens, (row + 1) * CHUNK + at, 2147483647)


@triton.jit(do_not_specialize=["n_tokens", "n_rows"])
def _embedding_sort_kernel(
    Index_ptr,
    Sorted_ptr,
    Order_ptr,
    n_tokens,
    n_rows,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T tokens of a chunk a program: their words to where they belong in it; with an Order, of the only chunk, their
    rows and their numbers."""
    PARTS: tl.constexpr = CHUNK // BLOCK_T
    start = tl.program_id(0) // PARTS * CHUNK
    own = tl.program_id(0) % PARTS * BLOCK_T + tl.arange(0, BLOCK_T)
    word = _words(Index_ptr, start, own, n_tokens, n_rows, CHUNK)
    all_words = _words(Index_ptr, start, tl.arange(0, CHUNK), n_tokens, n_rows, CHUNK)
    rank = tl.sum((all_words[None, :] < word[:, None]).to(tl.int32), axis=1)
    there = start + own < n_tokens
    if Order_ptr is None:
        tl.store(Sorted_ptr + start + rank, word, mask=there)
    else:
        tl.store(Sorted_ptr + rank, word // CHUNK - 1, mask=there)
        tl.store(Order_ptr + rank, own.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def _embedding_merge_kernel(
    Words_ptr,
    Places_ptr,
    Order_ptr,
    n_tokens,
    n_chunks,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """BLOCK_T words of a sorted chunk a program, looked up in CHUNKS others at a time; CHUNK is 2 ** STEPS.

    Of an earlier chunk those of the same row come before a token as well, of a later one only those of smaller rows.
    """
    start = tl.program_id(0) * BLOCK_T
    own = start // CHUNK
    at = start + tl.arange(0, BLOCK_T)
    word = tl.load(Words_ptr + at, mask=at < n_tokens, other=0)
    row = word // CHUNK  # one more than it is
    rank = at - own * CHUNK
    token = own * CHUNK + word % CHUNK
    for first in range(0, n_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        limit = (row[:, None] + (chunk < own)[None, :].to(tl.int32)) * CHUNK
        size = tl.where(chunk == own, 0, n_tokens - chunk * CHUNK)[None, :]  # of the chunk; CHUNK where it is more
        words = Words_ptr + (chunk * CHUNK)[None, :]
        below = tl.zeros([BLOCK_T, CHUNKS], dtype=tl.int32)
        for step in tl.static_range(STEPS):
            last = below + ((CHUNK >> (step + 1)) - 1)
            probe = tl.load(words + last, mask=last < size, other=2147483647)
            below += tl.where(probe < limit, CHUNK >> (step + 1), 0)
        probe = tl.load(words + below, mask=below < size, other=2147483647)  # the last, should all before be below
        rank += tl.sum(below + (probe < limit).to(tl.int32), axis=1)
    tl.store(Places_ptr + rank, row - 1, mask=at < n_tokens)
    tl.store(Order_ptr + rank, token.to(tl.int64), mask=at < n_tokens)


# -- tunables --------------------------------------------------------------------------------------------------------


def _key(n_tokens: int, *others: int) -> Key:
    return ((n_tokens - 1).bit_length(),)


def _chunk(n_tokens: int) -> int:
    return LONE_CHUNK if CHUNK < n_tokens <= LONE_CHUNK else CHUNK


def _tunable(variant: str, kernels: tuple, names: tuple[str, ...], heuristic, space) -> Tunable:
    def valid(config: LaunchConfig, key: Key) -> str | None:
        if set(config.blocks) != set(names):
            return f"blocks must be {sorted(names)}, got {dict(config.blocks)}"
        return None if config.blocks["BLOCK_T"] <= CHUNK else f"BLOCK_T must be at most {CHUNK}"

    return Tunable(
        "embedding",
        variant,
        kernels=kernels,
        key=_key,
        dims=("n_tokens", "vocab", "n_cols"),
        heuristic=heuristic,
        safe=lambda target, key: LaunchConfig(
            dict.fromkeys(names, 16) | {"BLOCK_T": 16 * CHUNK // _chunk(1 << key[0])}, 1
        ),
        space=space,
        neutral=frozenset({"num_warps", "BLOCK_T", "CHUNKS"}),
        valid=valid,
    )


def _sort_heuristic(target: Target, key: Key) -> LaunchConfig:
    """65536 comparisons a program, 256 a thread: embedding of 4096 tokens x 768 columns takes 43.4 us, forward and backward, on
    the H200, with twice as many a program 47.0 (2026-11-22)."""
    return LaunchConfig({"BLOCK_T": 65536 // _chunk(1 << key[0])}, target.warps(65536, 256, 8))


def _sort_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_T": tokens}, warps)
        for tokens in (16, 32, 64)
        for warps in (2, 4, 8, 16)
        if tokens * _chunk(1 << key[0]) <= 2048 * warps * target.warp_size
    ]


def _merge_heuristic(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_T": 64, "CHUNKS": 16}, target.warps(1024, 8, 8))


def _merge_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [
        LaunchConfig({"BLOCK_T": tokens, "CHUNKS": chunks}, warps)
        for tokens in (16, 32, 64, 128)
        for chunks in (8, 16, 32)
        for warps in (1, 2, 4, 8)
        if 4 <= tokens * chunks // (warps * target.warp_size) <= 32
    ]


SORT = _tunable("sort", (_embedding_sort_kernel, _words), ("BLOCK_T",), _sort_heuristic, _sort_space)
MERGE = _tunable("merge", (_embedding_merge_kernel,), ("BLOCK_T", "CHUNKS"), _merge_heuristic, _merge_space)

# -- launcher --------------------------------------------------------------------------------------------------------


def sort_indices(indices: torch.Tensor, n_rows: int, plain: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(the indices sorted, which token each place is of), stably; those outside the table stay outside.

    indices: [n_tokens], int32 or int64; n_rows: of the table. The first is int32 where every row's number is, the second
    int64. torch sorts where `plain`, where tokens are too many, and where a word (`_words`) would not fit 32 bits.
    """
    n_tokens, device = indices.shape[0], indices.device
    chunk = _chunk(n_tokens)
    if plain or not 0 < n_tokens <= MOST_TOKENS or (n_rows + 2) * chunk >= 2**31:
        return _narrow(indices, n_rows).sort(stable=True)
    indices, key = indices.contiguous(), _key(n_tokens)
    words, places = torch.empty((2, n_tokens), dtype=torch.int32, device=device)
    order = torch.empty(n_tokens, dtype=torch.int64, device=device)
    plan = SORT.plan(device, key)
    grid = (cdiv(n_tokens, plan.config.blocks["BLOCK_T"]),)
    if n_tokens <= chunk:
        launch(plan, _embedding_sort_kernel, grid, (indices, places, order, n_tokens, n_rows), (chunk,))
        return places, order
    launch(plan, _embedding_sort_kernel, grid, (indices, words, None, n_tokens, n_rows), (CHUNK,))
    plan = MERGE.plan(device, key)
    grid = (cdiv(n_tokens, plan.config.blocks["BLOCK_T"]),)
    args = (words, places, order, n_tokens, cdiv(n_tokens, CHUNK))
    launch(plan, _embedding_merge_kernel, grid, args, (CHUNK, CHUNK.bit_length() - 1))
    return places, order


def _narrow(indices: torch.Tensor, n_rows: int) -> torch.Tensor:
    """The indices in 32 bits, which sort in half the passes; one outside the table stays outside."""
    if indices.dtype is torch.int32 or n_rows >= 2**31:
        return indices
    return indices.clamp(-1, n_rows).to(torch.int32)
