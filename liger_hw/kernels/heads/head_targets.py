"""The targets' entries of a head's weight gradient, accumulated separately from its 16-bit running sum.

A 16-bit weight gradient that is summed over chunks (`linear_head.py`) is rounded once a chunk. That costs most where a
row of dlogits has one large entry, as cross entropies and log-probability losses have at the target. One GEMM over all
rows would round this entry, p - 1, once; with chunks each rounds the sum again. Therefore in every chunk

- a rare target's entry is moved out of dlogits into an fp32 vector [n_rows]. After the last chunk entry * x is added to
  the target's row of the gradient, summed in fp32 in the order of the rows and rounded once (the embedding's kernels);
- the row of a frequent target (FREQUENT times or more among the targets) is accumulated in fp32 by a separate product,
  and replaces the running sum at the end. Its entries stay in dlogits: in a trained head the sum of p * x over all rows
  nearly cancels the sum of the target's entries, so neither may be rounded alone.

If a configuration fails, only that launch is repeated: a head that communicates between ranks must not run again.
Nothing waits for the device, and no order of summation depends on timing. The frequent targets take `most_frequent` x
hidden fp32 numbers, and for a chunk as much as `most_frequent` more columns of logits; `plan_chunks` counts both.
benchmarks/rounding.py has the errors against one GEMM's.
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


@triton.jit(do_not_specialize=["row_start", "n_rows"])
def _head_target_kernel(D_ptr, Y_ptr, Taken_ptr, D_row_stride, row_start, n_rows, n_cols, BLOCK_SIZE: tl.constexpr):
    """Moves D[row, Y[row_start + row]] to Taken[row_start + row] and leaves a zero. Skips Y outside the columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = rows < n_rows
    y = tl.load(Y_ptr + row_start + rows, mask=mask, other=-1).to(tl.int64)
    inside = mask & (y >= 0) & (y < n_cols)
    entry_ptr = D_ptr + rows * D_row_stride + y
    entry = tl.load(entry_ptr, mask=inside, other=0.0)
    tl.store(Taken_ptr + row_start + rows, entry.to(tl.float32), mask=mask)
    tl.store(entry_ptr, tl.zeros_like(entry), mask=inside)


def _key(n_rows: int, hidden: int, vocab: int, itemsize: int) -> Key:
    """Only the bytes of an element, since every head moves one entry a row."""
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


def most_frequent(n_rows: int, vocab: int) -> int:
    """The largest possible number of frequent targets."""
    return min(n_rows // FREQUENT, vocab)


class TargetEntries:
    """The targets' share of a weight gradient [vocab, hidden]: `extract` from every chunk, then `restore`.

    targets: [n_rows], in the order of the sweep; one outside the vocabulary has no entry
    plain: in torch, without kernels
    """

    def __init__(self, targets: torch.Tensor, vocab: int, hidden: int, plain: bool) -> None:
        n_rows, device = targets.shape[0], targets.device
        self.plain = plain
        self.sorted, self.rows = with_fallback(sort_indices)(targets, vocab, plain)
        self.entries = torch.empty(n_rows, dtype=torch.float32, device=device)
        slots = most_frequent(n_rows, vocab)
        self.frequent = self.sums = None
        self.rare = targets.contiguous()
        if slots:
            self.frequent, self.slot = _frequent(self.sorted, vocab, slots)
            self.sums = torch.empty((slots, hidden), dtype=torch.float32, device=device)
            is_frequent = torch.zeros(vocab, dtype=torch.bool, device=device).index_fill_(0, self.frequent, True)
            self.rare = self.rare.masked_fill(is_frequent[targets.clamp(0, vocab - 1).long()], -1)

    def extract(self, dlogits: torch.Tensor, x: torch.Tensor, start: int, add_product: Callable[..., None]) -> None:
        """Move the targets' entries out of dlogits, the gradients of x's logits, rows `start`.. of the sweep.

        add_product(out, a, b, first): out = a @ b if first, else out += a @ b
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
        """Complete the gradient. x: all rows [n, hidden]; order: the rows that the sweep took, None: all; scratch: fp32
        memory that may be overwritten."""
        if self.frequent is not None:
            n = self.sums.numel()
            fits = scratch is not None and scratch.numel() >= n
            halves = (scratch if fits else torch.empty_like(self.sums).view(-1))[:n].view(dweight.dtype)
            rounded, of_column = halves.view(2, *self.sums.shape)
            torch.index_select(rounded.copy_(self.sums), 0, self.slot, out=of_column)
            dweight.index_copy_(0, self.frequent, of_column)
        entries, rows = self.entries, self.rows
        if order is not None:
            entries, rows = entries.new_zeros(x.shape[0]).index_copy_(0, order, entries), order[rows]
        if self.plain:
            vocab = dweight.shape[0]
            inside = (self.sorted >= 0) & (self.sorted < vocab)
            columns, index = self.sorted[inside].long().unique_consecutive(return_inverse=True)
            share = entries[rows[inside], None] * x[rows[inside]].float()
            total = torch.zeros((len(columns), x.shape[1])).index_add_(0, index, share)
            dweight.index_copy_(0, columns, (dweight[columns].float() + total).to(dweight.dtype))
        else:
            sum_rows(dweight, x, self.sorted, rows, scale=entries, accumulate=True, scratch=scratch)


def _take(dlogits: torch.Tensor, targets: torch.Tensor, entries: torch.Tensor, start: int) -> None:
    n_rows, vocab = dlogits.shape
    plan = TAKE.plan(dlogits.device, _key(0, 0, 0, dlogits.itemsize))
    grid = (cdiv(n_rows, plan.config.blocks["BLOCK_SIZE"]),)
    launch(plan, _head_target_kernel, grid, (dlogits, targets, entries, dlogits.stride(0), start, n_rows, vocab))


def _frequent(ordered: torch.Tensor, vocab: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([slots] columns that occur FREQUENT times in the sorted targets, [slots] the slot of each one's sum). Unused
    slots repeat the first one (column 0 if all are unused)."""
    n = ordered.shape[0] - FREQUENT + 1
    first = ordered[:n]
    begins = (first == ordered[FREQUENT - 1 :]) & (first >= 0) & (first < vocab)
    begins[1:] &= first[1:] != first[:-1]
    at = torch.where(begins, begins.cumsum(0) - 1, slots)
    columns = first.new_zeros(slots + 1).scatter_(0, at, first)[:slots].long()
    slot = torch.arange(slots, device=ordered.device)
    used = slot < begins.sum()
    return torch.where(used, columns, torch.where(used[0], columns[0], 0)), torch.where(used, slot, 0)
