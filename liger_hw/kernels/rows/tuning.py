"""Launch configurations of kernels over rows: key dimensions, heuristics, candidates and checks of several ops.

The constants of heuristics are numbers of elements, all powers of two.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

from ...registry import Key, LaunchConfig, Sample, Target, Tunable, row_key, tile_space
from ...runtime.dependent_launch import is_small_launch
from .blocks import max_columns

DIMS = ("n_rows", "n_cols")
WIDEST_BLOCK, WIDEST_TWO_GRADIENTS = 16384, 8192
"""The most columns that a program keeps in registers, by default and with the gradients of two parameters. With more,
fp32 weight gradients spill on every vendor."""


def row_sample(sizes: tuple[int, int], dtype: Any, args: tuple, moved: int = 5, **more: Any) -> Sample:
    """The Sample of an op on rows: results sum over columns, parameter gradients over rows. moved: in sizes of x."""
    n_rows, n_cols = sizes
    grad_reduction = more.pop("grad_reduction", max(sizes))
    moved *= n_rows * n_cols * dtype.itemsize
    return Sample(args, reduction=n_cols, grad_reduction=grad_reduction, moved=moved, **more)


def rows_per_program(target: Target, rows_bucket: int, most: int) -> int:
    """The largest power of two up to `most` with which each multiprocessor has a program. rows_bucket: log2(n_rows)."""
    return max(1, min(most, 1 << max(0, rows_bucket - target.multiprocessors.bit_length())))


def latency_warps(target: Target, elements: int, per_thread: int) -> int:
    """Warps of a program if too few rows fill the device, so that only latency counts: 128 threads; more if a thread
    would read more than `per_thread` elements, fewer if less than 4. A thread's loads overlap, but a sum over more
    warps takes longer."""
    return max(target.warps(elements, 4, 4), target.warps(elements, per_thread, 16))


def row_warps(target: Target, few: bool, elements: int) -> int:
    """Warps of a program that reads `elements` once: two loads of 16 bytes a thread, four from 8192 elements on.
    few: whether there are too few rows to fill the device; then `latency_warps`."""
    per_thread = 16 if elements < 8192 else 32
    if few:
        return latency_warps(target, elements, per_thread)
    return target.warps(elements, per_thread, 16 if elements <= 16384 else 32)


def fwd_heuristic(target: Target, key: Key, widest: int = WIDEST_BLOCK) -> LaunchConfig:
    """Whole rows, at least 2048 elements a program if there are enough rows; column tiles for rows too wide to hold.

    widest: the most columns that the kernel holds in a 16-bit dtype
    """
    if key[0] > (widest if key[2] <= 2 else WIDEST_BLOCK):
        return LaunchConfig({"BLOCK_SIZE": WIDEST_BLOCK, "ROWS": 1}, target.warps(WIDEST_BLOCK, 16))
    rows = rows_per_program(target, key[1], max(1, min(16, 2048 // key[0])))
    few = 1 << key[1] <= target.multiprocessors
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": rows}, row_warps(target, few, key[0] * rows))


def row_tiles(widths: Iterable[int]) -> list[dict[str, int]]:
    """Tiles of these widths for `tile_space`, with up to 32 rows. Tiles of several rows have at most 8192 elements."""
    return [
        {"BLOCK_SIZE": block, "ROWS": rows}
        for block in sorted(widths)
        for rows in (1, 2, 4, 8, 16, 32)
        if rows * block <= max(block, 8192)
    ]


def fwd_space(target: Target, key: Key) -> list[LaunchConfig]:
    tiles = row_tiles({min(key[0], widest) for widest in (8192, 16384, 65536)})
    return tile_space(target, tiles, (1, 2, 4, 8, 16, 32), per_thread=(4, 64), hints=("none", "stream"))


def bwd_heuristic(target: Target, key: Key, streams: int = 2, grads: int = 0) -> LaunchConfig:
    """A persistent grid of 8192 elements a multiprocessor, in tiles of 4096 elements, with two more in flight if a
    program has several tiles; column tiles of 4096 for rows too wide to hold. key: of `blocks_key`.

    streams: tensors of x's size that the loop reads; each keeps `stages - 1` tiles in shared memory
    grads: rows of parameter gradients in a program's registers, for an op that holds rows in two blocks
    """
    block = key[0] if key[0] <= (WIDEST_TWO_GRADIENTS if grads > 1 else WIDEST_BLOCK) else 4096
    rows = rows_per_program(target, key[1], max(1, min(32, 4096 // block)))
    ctas = max(1, min(4, 8192 // (block * rows)))
    max_stages = 3
    many_rows = 1 << key[1] > 32 * target.multiprocessors
    block_bytes = streams * max_columns(block) * key[2]
    if grads and block == 2048:
        rows, ctas, max_stages = 1, 2, 4
    elif block == 1024 and (many_rows if grads > 1 and streams > 2 else grads and key[3:] == (1,)):
        rows, ctas, max_stages = 1, 4, 4  # with two blocks or a modulation, the gradients of four rows spill
    elif block == 4096 and grads > 1 and streams == 2 and key[3:] and 3 * block_bytes <= target.shared_memory:
        rows, ctas, max_stages = 1, 1, 4
    elif block == 4096 and grads == 1 and key[3:] and (key[3] == 0 or streams > 2):
        rows, ctas = 1, 1  # with masked vectors (rows of odd width) or a third stream, registers hold only one row
    elif block == 4096 and many_rows and grads == 1 and 4 * block_bytes <= target.shared_memory:
        rows, ctas = 2, 1
    tile, both_blocks = block * rows, (max_columns(block) if grads else block) * rows
    stages = 1 + target.shared_memory // (streams * both_blocks * key[2])  # as many as fit
    no_registers = grads and tile > 8192 and not key[3:]  # for tiles in flight
    if 1 << key[1] <= rows * ctas * target.multiprocessors or stages < 3 and both_blocks == tile or no_registers:
        stages = 1
    wide_threads = key[3:] == (1,) and streams + grads == 4  # two blocks and either three streams or two gradients
    warps = target.warps(tile, 32 if rows > 3 or tile > 4096 and (rows > 1 or wide_threads) else 16, 16)
    if 1 << key[1] <= target.multiprocessors:
        # with two blocks or masked vectors, a program holds up to half as many elements more
        warps = latency_warps(target, tile, 16 if key[3:] else 32) if grads else target.warps(tile, 8, 16)
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": rows}, warps, min(max_stages, stages), ctas)


def bwd_space(target: Target, key: Key, streams: int = 2, grads: int = 0) -> list[LaunchConfig]:
    widest = {min(key[0], WIDEST_BLOCK)} if grads < 2 else set()
    tiles = row_tiles({key[0]} if key[0] <= WIDEST_TWO_GRADIENTS else {2048, 4096} | widest)
    ranges = {"per_thread": (8, 64), "stages": (1, 2, 3, 4), "ctas": (1, 2, 3, 4, 6), "hints": ("none", "stream")}
    size = streams * key[2]

    def fits(config: LaunchConfig) -> bool:
        columns, rows = max_columns(config.blocks["BLOCK_SIZE"]), config.blocks["ROWS"]
        return size * (config.num_stages - 1) * rows * columns <= target.shared_memory

    return [config for config in tile_space(target, tiles, (2, 4, 8, 16), **ranges, staged_bytes=size) if fits(config)]


def safe(target: Target, key: Key) -> LaunchConfig:
    """One row a program in blocks of at most 4096 columns: valid on every device."""
    block = min(key[0], 4096)
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, target.warps(block, 32), 1, 1)


def safe_whole_rows(target: Target, key: Key) -> LaunchConfig:
    """`safe` for kernels that hold whole rows."""
    return LaunchConfig({"BLOCK_SIZE": key[0], "ROWS": 1}, target.warps(key[0], 32), 1, 1)


def whole_rows_misfit(config: LaunchConfig, key: Key) -> str | None:
    """The reason why a configuration does not fit a kernel that holds whole rows, or None if it fits."""
    block = config.blocks["BLOCK_SIZE"]
    return None if block >= key[0] else f"BLOCK_SIZE={block} cannot hold a row of {key[0]} columns"


def tile_rule(widest: int, per_thread: int, most_warps: int, hint: str = "none") -> Callable[..., LaunchConfig]:
    """A heuristic for kernels that loop over the tiles of a row: tiles as wide as the row, at most `widest` columns.

    per_thread: columns of a tile per thread; most_warps: counted in warps of 32 threads
    """

    def rule(target: Target, key: Key) -> LaunchConfig:
        block = min(key[0], widest)
        return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, per_thread, most_warps), hint=hint)

    return rule


def column_tiles(key: Key, narrowest: int, widest: int) -> list[dict[str, int]]:
    """Tiles for `tile_space`: powers of two from `narrowest` to `widest`, none wider than the row."""
    sizes = {min(key[0], 1 << power) for power in range(narrowest.bit_length() - 1, widest.bit_length())}
    return [{"BLOCK_SIZE": size} for size in sorted(sizes)]


def persistent_misfit(config: LaunchConfig, key: Key) -> str | None:
    """The reason why a configuration does not fit a persistent kernel, or None if it fits."""
    return None if config.ctas_per_mp else "ctas_per_mp must be at least 1"


def row_tunable(op: str, variant: str, *kernels: Any, **replaced: Any) -> Tunable:
    """A tunable whose kernels work on row tiles. replaced: arguments of `Tunable` in place of these rules."""
    rules = {"key": row_key, "dims": DIMS, "dependent_launch": is_small_launch}
    rules |= {"heuristic": fwd_heuristic, "safe": safe, "space": fwd_space}
    return Tunable(op, variant, kernels=kernels, **(rules | replaced))
