"""A stable sort of tokens by their index, the row of a table, in two launches.

The first launch sorts chunks of CHUNK tokens: a token's rank in its chunk is the number of smaller keys, found by
comparing all pairs. The second launch adds the number of smaller keys in every other chunk, found by bisection, which
gives the rank among all tokens. Up to SINGLE_CHUNK tokens are one chunk and take one launch.
"""

from __future__ import annotations

import torch

from ...registry import Key, LaunchConfig, Target, Tunable
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton

CHUNK = 2048
SINGLE_CHUNK = 4096
MAX_TOKENS = 2**15
"""For more tokens torch's sort is faster: the second launch looks up each token in every chunk."""


@triton.jit
def _sort_keys(Index_ptr, start, positions, n_tokens, n_rows, CHUNK: tl.constexpr):
    """Sort keys (row + 1) * CHUNK + position in the chunk: unique, and in the order of the stable sort. Rows outside
    the table become -1 or n_rows; positions past the last token get the largest key."""
    row = tl.load(Index_ptr + start + positions, mask=start + positions < n_tokens, other=0)
    row = tl.minimum(tl.maximum(row, -1), n_rows).to(tl.int32)
    return tl.where(start + positions < n_tokens, (row + 1) * CHUNK + positions, 2147483647)


@triton.jit(do_not_specialize=["n_tokens", "n_rows"])
def _embedding_sort_kernel(
    Index_ptr, Sorted_ptr, Order_ptr, n_tokens, n_rows, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Each program stores the keys of BLOCK_T tokens at their rank in the chunk. With an Order_ptr, there is one chunk,
    and the program stores rows and token numbers instead of keys."""
    PARTS: tl.constexpr = CHUNK // BLOCK_T
    start = tl.program_id(0) // PARTS * CHUNK
    positions = tl.program_id(0) % PARTS * BLOCK_T + tl.arange(0, BLOCK_T)
    key = _sort_keys(Index_ptr, start, positions, n_tokens, n_rows, CHUNK)
    all_keys = _sort_keys(Index_ptr, start, tl.arange(0, CHUNK), n_tokens, n_rows, CHUNK)
    rank = tl.sum((all_keys[None, :] < key[:, None]).to(tl.int32), axis=1)
    mask = start + positions < n_tokens
    if Order_ptr is None:
        tl.store(Sorted_ptr + start + rank, key, mask=mask)
    else:
        tl.store(Sorted_ptr + rank, key // CHUNK - 1, mask=mask)
        tl.store(Order_ptr + rank, positions.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def _embedding_merge_kernel(
    Keys_ptr,
    Rows_ptr,
    Order_ptr,
    n_tokens,
    n_chunks,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Each program looks up BLOCK_T keys of a sorted chunk in CHUNKS chunks at a time. CHUNK is 2 ** STEPS. Equal rows
    are in the order of their chunks."""
    start = tl.program_id(0) * BLOCK_T
    token_chunk = start // CHUNK
    positions = start + tl.arange(0, BLOCK_T)
    key = tl.load(Keys_ptr + positions, mask=positions < n_tokens, other=0)
    row = key // CHUNK  # plus one, as in the key
    rank = positions - token_chunk * CHUNK
    token = token_chunk * CHUNK + key % CHUNK
    for first in range(0, n_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        limit = (row[:, None] + (chunk < token_chunk)[None, :].to(tl.int32)) * CHUNK
        size = tl.where(chunk == token_chunk, 0, n_tokens - chunk * CHUNK)[None, :]  # may exceed CHUNK
        keys = Keys_ptr + (chunk * CHUNK)[None, :]
        below = tl.zeros([BLOCK_T, CHUNKS], dtype=tl.int32)
        for step in tl.static_range(STEPS):
            last = below + ((CHUNK >> (step + 1)) - 1)
            probe = tl.load(keys + last, mask=last < size, other=2147483647)
            below += tl.where(probe < limit, CHUNK >> (step + 1), 0)
        # bisection leaves one key to compare
        probe = tl.load(keys + below, mask=below < size, other=2147483647)
        rank += tl.sum(below + (probe < limit).to(tl.int32), axis=1)
    tl.store(Rows_ptr + rank, row - 1, mask=positions < n_tokens)
    tl.store(Order_ptr + rank, token.to(tl.int64), mask=positions < n_tokens)


def _key(n_tokens: int, *others: int) -> Key:
    return ((n_tokens - 1).bit_length(),)


def _chunk(n_tokens: int) -> int:
    return SINGLE_CHUNK if CHUNK < n_tokens <= SINGLE_CHUNK else CHUNK


def _tunable(variant: str, kernel, names: tuple[str, ...], heuristic) -> Tunable:
    """A tunable without a search space: both launches take a few microseconds, less than the sums."""

    def valid(config: LaunchConfig, key: Key) -> str | None:
        return None if config.blocks["BLOCK_T"] <= CHUNK else f"BLOCK_T must be at most {CHUNK}"

    return Tunable(
        "embedding",
        variant,
        kernels=(kernel,),
        key=_key,
        dims=("n_tokens", "vocab", "n_cols"),
        heuristic=heuristic,
        safe=lambda target, key: LaunchConfig(
            dict.fromkeys(names, 16) | {"BLOCK_T": 16 * CHUNK // _chunk(1 << key[0])}, 1
        ),
        space=lambda target, key: [],
        neutral=frozenset({"num_warps", "BLOCK_T", "CHUNKS"}),
        valid=valid,
    )


def _sort_heuristic(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_T": 65536 // _chunk(1 << key[0])}, target.warps(65536, 256, 8))


def _merge_heuristic(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_T": 64, "CHUNKS": 16}, target.warps(1024, 8, 8))


SORT = _tunable("sort", _embedding_sort_kernel, ("BLOCK_T",), _sort_heuristic)
MERGE = _tunable("merge", _embedding_merge_kernel, ("BLOCK_T", "CHUNKS"), _merge_heuristic)


def sort_indices(indices: torch.Tensor, n_rows: int, plain: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sorted indices, the token number of each). Indices outside the table stay outside.

    indices: [n_tokens], int32 or int64; n_rows: of the table. The sorted indices are int32 unless rows need int64;
    token numbers are int64. torch sorts if `plain`, for more than MAX_TOKENS, and if a sort key would not fit 32 bits.
    """
    n_tokens, device = indices.shape[0], indices.device
    chunk = _chunk(n_tokens)
    if plain or not 0 < n_tokens <= MAX_TOKENS or (n_rows + 2) * chunk >= 2**31:
        if indices.dtype is not torch.int32 and n_rows < 2**31:  # 32 bits sort in half the passes
            indices = indices.clamp(-1, n_rows).to(torch.int32)
        return indices.sort(stable=True)
    indices, size_key = indices.contiguous(), _key(n_tokens)
    keys, rows = torch.empty((2, n_tokens), dtype=torch.int32, device=device)
    order = torch.empty(n_tokens, dtype=torch.int64, device=device)
    plan = SORT.plan(device, size_key)
    grid = (cdiv(n_tokens, plan.config.blocks["BLOCK_T"]),)
    if n_tokens <= chunk:
        launch(plan, _embedding_sort_kernel, grid, (indices, rows, order, n_tokens, n_rows), (chunk,))
        return rows, order
    launch(plan, _embedding_sort_kernel, grid, (indices, keys, None, n_tokens, n_rows), (CHUNK,))
    plan = MERGE.plan(device, size_key)
    grid = (cdiv(n_tokens, plan.config.blocks["BLOCK_T"]),)
    args = (keys, rows, order, n_tokens, cdiv(n_tokens, CHUNK))
    launch(plan, _embedding_merge_kernel, grid, args, (CHUNK, CHUNK.bit_length() - 1))
    return rows, order
