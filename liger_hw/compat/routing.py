"""Behind `liger_kernel.ops.fused_moe.compute_routing_metadata`: which rows of a grouped product belong to which expert.

The experts of liger_hw do not use it (kernels/moe/routing.py does the same without a synchronisation).
"""

from __future__ import annotations

import torch


def compute_routing_metadata(
    topk_indices: torch.Tensor, E: int, block_m_token: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the slots of `topk_indices` [T, K], integers in 0..E-1, by expert. A slot is one (token, choice) pair.

    Returns seven int32 tensors: the rows of every expert [E]; where each expert's rows begin [E + 1]; each row's token
    [T * K]; each row's slot [T * K]; each slot's row [T * K]; and, for tiles of block_m_token rows of one expert, the
    first row and the expert of each tile. Synchronises: the number of tiles depends on the values.
    """
    n_slots, device = topk_indices.numel(), topk_indices.device
    expert = topk_indices.reshape(-1).long()
    order = torch.argsort(expert, stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(n_slots, device=device)
    counts = torch.bincount(expert, minlength=E)
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tiles = (counts + block_m_token - 1) // block_m_token
    tile_expert = torch.repeat_interleave(torch.arange(E, device=device), tiles)
    first_tile = tiles.cumsum(0) - tiles
    within = torch.arange(tile_expert.shape[0], device=device) - first_tile[tile_expert]
    tile_row_start = start[tile_expert] + within * block_m_token
    results = counts, start, order // topk_indices.shape[1], order, row, tile_row_start, tile_expert
    return tuple(t.to(torch.int32) for t in results)
