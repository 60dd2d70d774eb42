"""mean(m * h) of rows too wide to hold, by a program a row; names as in `rms_backward.py`."""

from __future__ import annotations

from ...registry import Key, LaunchConfig, Target
from ...runtime.dependent_launch import begin
from ...runtime.triton_import import tl, triton


@triton.jit
def _rms_norm_bwd_dot_kernel(
    DY_ptr,
    X_ptr,
    W_ptr,
    RSTD_ptr,
    DOT_ptr,
    DY_row_stride,
    X_row_stride,
    n_cols,
    offset,
    BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """mean(m * h) of one row: the backward kernel then works on column tiles."""
    begin(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        mask = start + cols < n_cols
        x = tl.load(X_ptr + row * X_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(DY_ptr + row * DY_row_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        if W_ptr is not None:
            m = m * (tl.load(W_ptr + start + cols, mask=mask, other=0.0).to(tl.float32) + offset)
        total += m * x
    tl.store(DOT_ptr + row, tl.sum(total, axis=0) * tl.load(RSTD_ptr + row) / n_cols)


def dot_heuristic(target: Target, key: Key) -> LaunchConfig:
    """By 16 warps; a single row's one program by 32: 1 x 1 x 12289 takes modulated_rms_norm 8.12 us backward, 8.47 by 16
    (H200, 2026-11-22)."""
    block = min(key[0], 8192)
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 16, 16) if key[1] else target.warps(block, 8))


def dot_space(target: Target, key: Key) -> list[LaunchConfig]:
    return [LaunchConfig({"BLOCK_SIZE": block}, warps) for block in (2048, 4096, 8192, 16384) for warps in (4, 8, 16)]


def dot_safe(target: Target, key: Key) -> LaunchConfig:
    block = min(key[0], 4096)
    return LaunchConfig({"BLOCK_SIZE": block}, target.warps(block, 32))
