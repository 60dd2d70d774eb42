"""What one column of a row has of a head's weight gradient, kept out of the roundings of its running sum.

A weight gradient in 16 bits that is summed over chunks (_linear_head.py) is rounded once a chunk. That costs most where
one row of logits has one large entry, as cross entropies and log-probability losses have at the target: p - 1 is nearly
exact, so the one GEMM of all rows rounds once, and every chunk more is an error of its own. So, of every chunk:

- a rare target's entry is taken out of dlogits, [n_rows] fp32 in all, and after the last chunk entry * x is added to the
  target's row of the gradient: summed in fp32 in the order of the rows, one rounding (embedding.py's kernels);
- the row of a frequent target (FREQUENT times among the targets) is summed in fp32, a product of its own, and put in its
  place at the end. Its entries must not be taken out: in a trained head the sum of p * x of all rows nearly cancels that
  of the target's entries, and either alone, rounded, has an error as large as itself over their difference.

Ratios of the error to one GEMM's: benchmarks/rounding.py. Nothing waits for the device; no order depends on timing. The
sums of frequent targets, `most_frequent` of them, take so many x hidden fp32, 8 MiB at 8192 x 4096, and their columns of a
chunk as much of its memory as so many words more: `plan_chunks` counts both.
"""

from __future__ import annotations

import torch

from ...registry import Key, LaunchConfig, Target, Tunable
from ...runtime.operator import cdiv, launch
from ...runtime.triton_import import tl, triton
from ..embedding.row_sums import sum_rows
from ..embedding.stable_sort import sort_indices

FREQUENT = 16


@triton.jit(do_not_specialize=["row_start", "n_rows"])
def _head_target_kernel(
    D_ptr,
    Y_ptr,
    Taken_ptr,
    D_row_stride,
    row_start,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    """Moves D[row, Y[row_start + row]] to Taken[row_start + row], and a zero into its place; Y outside: nothing there."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    there = rows < n_rows
    y = tl.load(Y_ptr + row_start + rows, mask=there, other=-1).to(tl.int64)
    inside = there & (y >= 0) & (y < n_cols)
    place = D_ptr + rows * D_row_stride + y
    entry = tl.load(place, mask=inside, other=0.0)
    tl.store(Taken_ptr + row_start + rows, entry.to(tl.float32), mask=there)
    tl.store(place, tl.zeros_like(entry), mask=inside)


def _key(n_rows: int, hidden: int, vocab: int, itemsize: int) -> Key:
    """Every head alike: a column of single entries."""
    return (itemsize,)


def _heuristic(target: Target, key: Key) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 128}, target.warps(128, 1, 4))


def _space(target: Target, key: Key) -> list[LaunchConfig]:
    return [LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 1, 8)) for block in (32, 64, 128, 256)]


def _valid(config: LaunchConfig, key: Key) -> str | None:
    return None if set(config.blocks) == {"BLOCK_SIZE"} else f"blocks must be BLOCK_SIZE, got {dict(config.blocks)}"


TAKE = Tunable(
    "fused_linear_cross_entropy",
    "take",
    kernels=(_head_target_kernel,),
    key=_key,
    dims=("n_rows", "hidden", "vocab"),
    heuristic=_heuristic,
    safe=lambda target, key: LaunchConfig({"BLOCK_SIZE": 128}, 1),
    space=_space,
    valid=_valid,
)


def most_frequent(n_rows: int, vocab: int) -> int:
    """How many words can be FREQUENT times among the targets."""
    return min(n_rows // FREQUENT, vocab)


class TargetEntries:
    """The targets' share of a weight gradient [vocab, hidden] that `add_product` sums: take every chunk, then restore.

    targets: [n_rows], in the order of the sweep; those outside the vocabulary have no entry. plain: torch, not kernels.
    """

    def __init__(self, targets: torch.Tensor, vocab: int, hidden: int, plain: bool) -> None:
        n_rows, device = targets.shape[0], targets.device
        self.plain = plain
        self.places, self.order = sort_indices(targets, vocab, plain)
        self.taken = torch.empty(n_rows, dtype=torch.float32, device=device)
        slots = most_frequent(n_rows, vocab)
        self.frequent = self.sums = None
        self.rare = targets.contiguous()
        if slots:
            self.frequent, self.slot = _frequent(self.places, vocab, slots)
            self.sums = torch.empty((slots, hidden), dtype=torch.float32, device=device)
            known = torch.zeros(vocab, dtype=torch.bool, device=device).index_fill_(0, self.frequent, True)
            self.rare = self.rare.masked_fill(known[targets.clamp(0, vocab - 1).long()], -1)

    def take(self, dlogits: torch.Tensor, x: torch.Tensor, start: int, add_product) -> None:
        """Take in the gradient of the logits of x, the rows `start`.. of the sweep; add_product sums dlogits afterwards."""
        n_rows, vocab = dlogits.shape
        if self.plain:
            rows = slice(start, start + n_rows)
            y = self.rare[rows].long()
            inside, at = (y >= 0) & (y < vocab), y.clamp(0, vocab - 1)[:, None]
            entry = dlogits.gather(1, at)[:, 0]
            self.taken[rows] = torch.where(inside, entry, 0.0)
            dlogits.scatter_(1, at, entry.masked_fill(inside, 0.0)[:, None])
        else:
            plan = TAKE.plan(dlogits.device, _key(0, 0, 0, dlogits.itemsize))
            numbers = dlogits.stride(0), start, n_rows, vocab
            grid = (cdiv(n_rows, plan.config.blocks["BLOCK_SIZE"]),)
            launch(plan, _head_target_kernel, grid, (dlogits, self.rare, self.taken, *numbers))
        if self.frequent is not None:
            add_product(self.sums, dlogits.index_select(1, self.frequent).t(), x, start == 0)

    def restore(
        self, dweight: torch.Tensor, x: torch.Tensor, order: torch.Tensor | None, scratch: torch.Tensor | None
    ) -> None:
        """Complete the gradient; x [n, hidden], of which the sweep took the rows `order` (None: all)."""
        if self.frequent is not None:
            n = self.sums.numel()
            fits = scratch is not None and scratch.numel() >= n
            halves = (scratch if fits else torch.empty_like(self.sums).view(-1))[:n].view(dweight.dtype)
            rounded, placed = halves.view(2, *self.sums.shape)
            torch.index_select(rounded.copy_(self.sums), 0, self.slot, out=placed)
            dweight.index_copy_(0, self.frequent, placed)
        taken, rows = self.taken, self.order
        if order is not None:
            taken, rows = taken.new_zeros(x.shape[0]).index_copy_(0, order, taken), order[rows]
        if self.plain:
            vocab = dweight.shape[0]
            inside = (self.places >= 0) & (self.places < vocab)
            named, index = self.places[inside].long().unique_consecutive(return_inverse=True)
            share = taken[rows[inside], None] * x[rows[inside]].float()
            total = torch.zeros((len(named), x.shape[1])).index_add_(0, index, share)
            dweight.index_copy_(0, named, (dweight[named].float() + total).to(dweight.dtype))
        else:
            sum_rows(dweight, x, self.places, rows, scale=taken, accumulate=True, scratch=scratch)


def _frequent(places: torch.Tensor, vocab: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([slots] the tokens that occur FREQUENT times in the sorted `places`, [slots] which slot's sum is whose).

    Slots to spare repeat the first one's token (0 where there is none), and its sum.
    """
    n = places.shape[0] - FREQUENT + 1
    first = places[:n]
    begins = (first == places[FREQUENT - 1 :]) & (first >= 0) & (first < vocab)
    begins[1:] &= first[1:] != first[:-1]
    at = torch.where(begins, begins.cumsum(0) - 1, slots)
    tokens = first.new_zeros(slots + 1).scatter_(0, at, first)[:slots].long()
    slot = torch.arange(slots, device=places.device)
    used = slot < begins.sum()
    return torch.where(used, tokens, torch.where(used[0], tokens[0], 0)), torch.where(used, slot, 0)
