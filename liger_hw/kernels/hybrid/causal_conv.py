"""Depthwise causal convolution of up to four taps over [batch, tokens, channels], shared by the ops of this folder.

    y[t, c] = sum over i < taps of weight[c, taps - 1 - i] * x[t - i, c]

x is zero before the first token of the sequence, or of token t's document (seq_idx [batch, tokens]). A forward kernel
reads a tile of tokens once for each tap, from cache after the first time. A program of a backward kernel has BLOCK_R
runs of BLOCK_L tokens and advances in all of them token by token. The last four tokens of x and of dy stay in
registers: each token is read once, and dx of token t - 3 is complete after token t.
"""

from __future__ import annotations

from typing import Any

import torch

from ...registry import LaunchConfig, Tunable, tile_space
from ...runtime.operator import cdiv
from ...runtime.triton_import import tl, triton

MAX_TAPS = 4


@triton.jit
def tap(W_ptr, cols, col_mask, BACK: tl.constexpr, TAPS: tl.constexpr):
    """The weights for the token `BACK` steps back, [1, BLOCK_D]; zero if there is no such tap."""
    at = cols * TAPS + TAPS - 1 - BACK
    return tl.load(W_ptr + at, mask=col_mask & (BACK < TAPS), other=0.0).to(tl.float32)[None, :]


@triton.jit
def token_mask(Idx_ptr, row, t, n_tokens, BACK: tl.constexpr):
    """Whether token t - BACK exists and is in token t's document. row: the row of the sequence's first token."""
    mask = (t >= BACK) & (t < n_tokens)
    if Idx_ptr is not None:
        index = tl.load(Idx_ptr + row + t, mask=mask, other=0)
        mask &= index == tl.load(Idx_ptr + row + t - BACK, mask=mask, other=0)
    return mask


@triton.jit
def document(Idx_ptr, row, t, n_tokens):
    """The document index of each token t, [BLOCK_R, 1]."""
    index = tl.zeros_like(t)
    if Idx_ptr is not None:
        index = tl.load(Idx_ptr + row + t, mask=(t >= 0) & (t < n_tokens), other=-1)
    return index[:, None]


@triton.jit
def within(x, index, x_index, Idx_ptr, BACK: tl.constexpr, TAPS: tl.constexpr):
    """x if its document is `index` and the convolution has tap BACK, else zero (even if x is infinite)."""
    if BACK >= TAPS:
        x = tl.zeros_like(x)
    elif Idx_ptr is not None:
        x = tl.where(index == x_index, x, 0.0)
    return x


@triton.jit
def store_tap_sums(DW_ptr, cols, col_mask, dw, BACK: tl.constexpr, TAPS: tl.constexpr):
    """Store the gradient of the weights for the token BACK steps back, summed over the runs. dw: [BLOCK_R, BLOCK_D]."""
    at = cols * TAPS + TAPS - 1 - BACK
    tl.store(DW_ptr + at, tl.sum(dw, axis=0), mask=col_mask & (BACK < TAPS))


def conv_key(n_rows: int, width: int, itemsize: int) -> tuple[int, ...]:
    """width: columns of a tile. All n_rows above 4096 have the same key."""
    return width, min((n_rows - 1).bit_length() if n_rows > 1 else 0, 13), itemsize


def _fwd_heuristic(target: Any, key: Any) -> LaunchConfig:
    """Two loads of 16 bytes a thread for each tap."""
    tokens = max(1, min(32, 2048 // key[0], 1 << key[1]))
    return LaunchConfig({"BLOCK_T": tokens}, target.warps(tokens * key[0], 16, 8))


def _bwd_heuristic(target: Any, key: Any) -> LaunchConfig:
    """4 channels a thread: each takes about ten registers for sums and tokens."""
    runs = max(1, min(4, 512 // key[0]))
    length = max(4, min(64, (1 << key[1]) // runs))
    return LaunchConfig({"BLOCK_R": runs, "BLOCK_L": length}, target.warps(runs * key[0], 4, 8))


def _fwd_safe(target: Any, key: Any) -> LaunchConfig:
    return LaunchConfig({"BLOCK_T": 4}, target.warps(4 * key[0], 16, 8))


def _bwd_safe(target: Any, key: Any) -> LaunchConfig:
    return LaunchConfig({"BLOCK_R": 1, "BLOCK_L": 16}, target.warps(key[0], 8, 8))


def _fwd_space(target: Any, key: Any) -> list[LaunchConfig]:
    tiles = [{"BLOCK_T": tokens} for tokens in (8, 16, 32, 64, 128)]
    return tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 64), width=key[0])


def _bwd_space(target: Any, key: Any) -> list[LaunchConfig]:
    tiles = [{"BLOCK_R": runs} for runs in (2, 4, 8, 16, 32)]
    runs = tile_space(target, tiles, (1, 2, 4, 8), per_thread=(4, 16), width=key[0])
    lengths = (16, 32, 64, 128)
    return [LaunchConfig({**c.blocks, "BLOCK_L": length}, c.num_warps) for c in runs for length in lengths]


def conv_tunables(op: str, fwd: Any, bwd: Any, dims: tuple[str, ...], key: Any) -> tuple[Tunable, Tunable]:
    fwd_rules = {"heuristic": _fwd_heuristic, "safe": _fwd_safe, "space": _fwd_space}
    bwd_rules = {"heuristic": _bwd_heuristic, "safe": _bwd_safe, "space": _bwd_space}
    return (
        Tunable(op, "fwd", kernels=(fwd,), key=key, dims=dims, **fwd_rules),
        Tunable(op, "bwd", kernels=(bwd,), key=key, dims=dims, **bwd_rules),
    )


def blocks_of(plan: Any, n_tokens: int) -> int:
    """How many programs a sequence has for each tile of channels, with a forward or backward plan."""
    blocks = plan.config.blocks
    return cdiv(n_tokens, blocks["BLOCK_T"] if "BLOCK_T" in blocks else blocks["BLOCK_R"] * blocks["BLOCK_L"])


def _earlier(x: torch.Tensor, back: int, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """At each token t x[t - back], or zero if that is outside t's document."""
    x = torch.nn.functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
    if seq_idx is None or not back:
        return x
    same = seq_idx == torch.nn.functional.pad(seq_idx, (back, 0))[:, : x.shape[1]]
    return torch.where(same[..., None], x, 0.0)


def causal_conv_reference(x: torch.Tensor, weight: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """The convolution in x's dtype: x [batch, tokens, channels], weight [channels, taps]."""
    y, weight = torch.zeros_like(x), weight.to(x.dtype)
    for back, w in enumerate(weight.flip(-1).unbind(-1)):
        y = y + w * _earlier(x, back, seq_idx)
    return y


def taps_misfit(weight: torch.Tensor) -> str:
    """Why a weight [channels, taps] is invalid, or ""."""
    taps = weight.shape[-1]
    return "" if 1 <= taps <= MAX_TAPS else f"weight must have 1 to {MAX_TAPS} taps, got {taps}"
