"""What the targets add to a head's weight gradient, summed apart from its 16-bit running sum.

A 16-bit weight gradient that is summed over chunks (`linear_head.py`) is rounded once a chunk. The error is largest
where a row of dlogits has one large entry, p - 1 at the target, as in cross entropies and log-probability losses.
Without chunks, one GEMM rounds the sum of these entries once; here every chunk rounds it again. So in every chunk

- a rare target's entry is moved out of dlogits into an fp32 vector [n_rows]. At the end, entry * x is added to the
  target's row of the gradient, summed in fp32 in the order of the rows and rounded once (`sum_rows`);
- the gradient's row of a frequent target (one that occurs FREQUENT times or more) is accumulated in fp32 by a separate
  product, and replaces the running sum at the end. Its entries stay in dlogits: in a trained head the sum of their
  products nearly cancels the sum of the column's other products, so both must be added before either is rounded.

If a configuration fails, only that launch is repeated: a head that communicates between ranks must not run again.
Nothing waits for the device, and no order of summation depends on timing. The frequent targets take max_frequent *
hidden fp32 numbers, and max_frequent more columns of a chunk's logits; `plan_chunks` counts both.
benchmarks/rounding.py compares the errors with one GEMM's.
"""

from __future__ import annotations

from typing import Callable

import torch

from ...registry import Key, LaunchConfig, Target, Tunable
from ...runtime.operator import cdiv, launch, with_fallback
from ...runtime.triton_import import tl, triton
from ..embedding.row_sums import sum_rows
from ..embedding.stable_sort import sort_indices

FREQUENT = 16
"""A target that occurs this often or more is frequent."""


@triton.jit(do_not_specialize=["row_start", "n_rows"])
def _head_target_kernel(D_ptr, Y_ptr, Taken_ptr, D_row_stride, row_start, n_rows, n_cols, BLOCK_SIZE: tl.constexpr):
    """Moves D[row, Y[row_start + row]] to Taken[row_start + row] and leaves zero; where Y is no column, Taken is 0."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = rows < n_rows
    y = tl.load(Y_ptr + row_start + rows, mask=mask, other=-1).to(tl.int64)
    inside = mask & (y >= 0) & (y < n_cols)
    entry_ptr = D_ptr + rows * D_row_stride + y
    entry = tl.load(entry_ptr, mask=inside, other=0.0)
    tl.store(Taken_ptr + row_start + rows, entry.to(tl.float32), mask=mask)
    tl.store(entry_ptr, tl.zeros_like(entry), mask=inside)


def _key(n_rows: int, hidden: int, vocab: int, itemsize: int) -> Key:
    return (itemsize,)


def _heuristic(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 128}, target.warps(128, 1, 4))


def _space(target: Target, key: Key) -> list[LaunchConfig]:
    return [LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 1, 8)) for block in (32, 64, 128, 256)]


TAKE = Tunable(
    "fused_linear_cross_entropy",
    "take",
    kernels=(_head_target_kernel,),
    key=_key,
    dims=("n_rows", "hidden", "vocab"),
    heuristic=_heuristic,
    safe=lambda target, key: LaunchConfig({"BLOCK_SIZE": 128}, 1),
    space=_space,
)


def max_frequent(n_rows: int, vocab: int) -> int:
    """The largest possible number of frequent targets."""
    return min(n_rows // FREQUENT, vocab)


class TargetEntries:
    """The targets' part of a weight gradient [vocab, hidden]: `extract` it from every chunk, then `restore` it.

    targets: [n_rows], in the order of the chunks; those outside the vocabulary are skipped
    plain: computed in torch, without Triton kernels
    """

    def __init__(self, targets: torch.Tensor, vocab: int, hidden: int, plain: bool) -> None:
        n_rows, device = targets.shape[0], targets.device
        self.plain = plain
        self.sorted, self.rows = with_fallback(sort_indices)(targets, vocab, plain)
        self.entries = torch.empty(n_rows, dtype=torch.float32, device=device)
        slots = max_frequent(n_rows, vocab)
        self.frequent = self.sums = None
        self.rare = targets.contiguous()
        if slots:
            self.frequent, self.slot = _frequent(self.sorted, vocab, slots)
            self.sums = torch.empty((slots, hidden), dtype=torch.float32, device=device)
            is_frequent = torch.zeros(vocab, dtype=torch.bool, device=device).index_fill_(0, self.frequent, True)
            self.rare = self.rare.masked_fill(is_frequent[targets.clamp(0, vocab - 1).long()], -1)

    def extract(self, dlogits: torch.Tensor, x: torch.Tensor, start: int, add_product: Callable[..., None]) -> None:
        """Move rare targets' entries out of dlogits, and add the frequent targets' products.

        dlogits, x: of rows `start`.. of the sweep; add_product: `linear_head.add_product`
        """
        n_rows, vocab = dlogits.shape
        if self.plain:
            rows = slice(start, start + n_rows)
            y = self.rare[rows].long()
            inside, column = (y >= 0) & (y < vocab), y.clamp(0, vocab - 1)[:, None]
            entry = dlogits.gather(1, column)[:, 0]
            self.entries[rows] = torch.where(inside, entry, 0.0)
            dlogits.scatter_(1, column, entry.masked_fill(inside, 0.0)[:, None])
        else:
            with_fallback(_take)(dlogits, self.rare, self.entries, start)
        if self.frequent is not None:
            add_product(self.sums, dlogits.index_select(1, self.frequent).t(), x, start == 0)

    def restore(
        self, dweight: torch.Tensor, x: torch.Tensor, order: torch.Tensor | None, scratch: torch.Tensor | None
    ) -> None:
        """Add what was extracted to dweight. x: all rows [n, hidden]; order: the chunks' rows in x, None: all; scratch:
        fp32 memory that may be overwritten."""
        if self.frequent is not None:
            n = self.sums.numel()
            fits = scratch is not None and scratch.numel() >= n
            halves = (scratch if fits else torch.empty_like(self.sums).view(-1))[:n].view(dweight.dtype)
            rounded, frequent_rows = halves.view(2, *self.sums.shape)
            torch.index_select(rounded.copy_(self.sums), 0, self.slot, out=frequent_rows)
            dweight.index_copy_(0, self.frequent, frequent_rows)
        entries, rows = self.entries, self.rows
        if order is not None:
            entries, rows = entries.new_zeros(x.shape[0]).index_copy_(0, order, entries), order[rows]
        if self.plain:
            vocab = dweight.shape[0]
            inside = (self.sorted >= 0) & (self.sorted < vocab)
            columns, index = self.sorted[inside].long().unique_consecutive(return_inverse=True)
            products = entries[rows[inside], None] * x[rows[inside]].float()
            total = torch.zeros((len(columns), x.shape[1])).index_add_(0, index, products)
            dweight.index_copy_(0, columns, (dweight[columns].float() + total).to(dweight.dtype))
        else:
            sum_rows(dweight, x, self.sorted, rows, scale=entries, accumulate=True, scratch=scratch)


def _take(dlogits: torch.Tensor, targets: torch.Tensor, entries: torch.Tensor, start: int) -> None:
    n_rows, vocab = dlogits.shape
    plan = TAKE.plan(dlogits.device, _key(0, 0, 0, dlogits.itemsize))
    grid = (cdiv(n_rows, plan.config.blocks["BLOCK_SIZE"]),)
    launch(plan, _head_target_kernel, grid, (dlogits, targets, entries, dlogits.stride(0), start, n_rows, vocab))


def _frequent(sorted_targets: torch.Tensor, vocab: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([slots] the frequent targets' columns, [slots] where each column's sum is). Unused slots repeat the
    first slot (column 0 if all are unused)."""
    n = sorted_targets.shape[0] - FREQUENT + 1
    first = sorted_targets[:n]
    begins = (first == sorted_targets[FREQUENT - 1 :]) & (first >= 0) & (first < vocab)
    begins[1:] &= first[1:] != first[:-1]
    at = torch.where(begins, begins.cumsum(0) - 1, slots)
    columns = first.new_zeros(slots + 1).scatter_(0, at, first)[:slots].long()
    slot = torch.arange(slots, device=sorted_targets.device)
    used = slot < begins.sum()
    return torch.where(used, columns, torch.where(used[0], columns[0], 0)), torch.where(used, slot, 0)
