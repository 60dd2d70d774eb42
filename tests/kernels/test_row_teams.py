"""Rows held by teams of programs (rows/team.py): right, and launched only where programs may wait for one another.

The interpreter runs one program after another. There every word is written before the launch, so that no program waits;
each then writes its own again, which must be what it read (as in test_cooperative.py).
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from harness import make, team_sums, team_words, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.attention import softmax
from liger_hw.kernels.heads import fused_linear_cross_entropy as head
from liger_hw.kernels.losses import cross_entropy
from liger_hw.kernels.losses import cross_entropy_rows as rows
from liger_hw.kernels.losses.cross_entropy_reference import Options
from liger_hw.kernels.losses.log_prob_rows import columns_key
from liger_hw.kernels.rows.row import row_vector
from liger_hw.registry import row_key
from liger_hw.runtime.cooperative import COOPERATIVE

ARCHS = ("sm80", "sm90", "sm100", "gfx942", "gfx1100", "bmg", "cpu")
OPTIONS = [
    {},
    {"lse_square_scale": 1e-2, "return_z_loss": True},
    {"use_token_scaling": True, "reduction": "sum"},
    {"reduction": "none"},
]


def _words(s: torch.Tensor, splits: int, vector: int) -> torch.Tensor:
    """What the programs of every row publish: by columns of the body, the edges in the last part's.

    Of scores [n_rows, n_cols] their maximum and sum of exponentials; of two such tensors, [2, n_rows, n_cols], both
    sums.
    """
    n_rows, n_cols = s.shape[-2:]
    width = -(-(n_cols // vector * vector) // (splits * 64)) * 64
    words = torch.zeros(n_rows, registry.next_power_of_2(splits), dtype=torch.int64)
    for row in range(n_rows):
        head = -row * n_cols % vector
        n_body = max(n_cols - head, 0) // vector * vector
        stops = [head + min((i + 1) * width, n_body) for i in range(splits)]
        spans = [slice(start, stop) for start, stop in zip((head, *stops), stops)]
        parts = [s[..., row, span] for span in spans]
        parts[-1] = torch.cat([parts[-1], s[..., row, :head], s[..., row, head + n_body :]], -1)
        if s.dim() == 3:
            words[row, :splits] = team_words(*torch.stack([part.sum(-1) for part in parts], -1))
        else:
            tops = torch.stack([part.max() if part.numel() else torch.tensor(-torch.inf) for part in parts])
            sums = [(part - top.clamp_min(-1e30)).exp().sum() for part, top in zip(parts, tops)]
            words[row, :splits] = team_words(tops, torch.stack(sums))
    return words


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "n_rows, n_cols, block, teams",
    [(5, 256, 128, 2), (9, 331, 128, 2), (3, 100, 128, 3), (9, 6, 128, 1)],
)
@pytest.mark.lanes("interpret")
def test_kernel_of_cross_entropy(lane, n_rows, n_cols, block, teams, options, dtype, seed):
    """Uneven parts and edges of every width, more rows than teams, ignored rows, a target in each edge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=generator).mul(3).to(dtype)
    weight = torch.rand(n_cols, generator=generator) + 0.5
    y = torch.randint(n_cols, (n_rows,), generator=generator)
    y[0], y[1], y[-1] = 0, -100, n_cols - 1
    options = Options(**options)
    go = torch.rand(n_rows, generator=generator) if options.reduction == "none" else None
    want = cross_entropy.reference_losses(x.double(), y, weight.double(), options)
    want_dx = cross_entropy.reference_gradient(x.double(), y, weight.double(), options, go)
    vector = row_vector(x, x)
    splits = max(1, -(-(n_cols // vector * vector) // block))
    before = _words(x.float(), splits, vector)
    stats = rows.launch_stats("test", y, weight, n_cols, options, x.device)
    words, dx, out = before.clone(), torch.full_like(x, torch.nan), torch.full((2, n_rows), torch.nan)
    rows._cross_entropy_team_kernel[(teams * splits,)](
        *(x, y, weight, stats, go, out[0], out[1], dx, words, n_cols, n_cols, n_rows, n_cols, -100, splits),
        *(False, options.lse_square_scale != 0, options.use_token_scaling),
        *(vector, before.shape[1], block),
    )
    counted = y != -100
    published, expected = (team_sums(w[counted, :splits]) for w in (words, before))
    torch.testing.assert_close(published, expected, rtol=1e-5, atol=1e-5)
    assert not words[:, splits:].any()
    assert (dx[~counted] == 0).all() and (out[:, ~counted] == 0).all()
    torch.testing.assert_close(dx.double(), want_dx, rtol=2e-3, atol=1e-3 if dtype is torch.float16 else 1e-5)
    loss, z_loss = out.double() if options.reduction == "none" else out.double().sum(1)
    torch.testing.assert_close(loss, want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(z_loss, want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_rows, n_cols, block, teams", [(5, 256, 128, 2), (9, 331, 128, 2), (9, 6, 128, 1)])
@pytest.mark.lanes("interpret")
def test_kernels_of_softmax(lane, n_rows, n_cols, block, teams, dtype, seed):
    """Forward and backward, as the cross entropy's."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(n_rows, n_cols, generator=generator).to(dtype) for _ in range(2))
    close = {"rtol": 2e-3, "atol": 1e-3 if dtype is torch.float16 else 1e-5}
    vector = row_vector(x, dy)
    splits = max(1, -(-(n_cols // vector * vector) // block))
    grid, shape = (teams * splits,), (n_cols, n_rows, n_cols, splits)
    words, y = _words(x.float(), splits, vector), torch.full_like(x, torch.nan)
    lanes = words.shape[1]
    softmax._softmax_fwd_team_kernel[grid](x, y, words, *shape, vector, lanes, block, False)
    torch.testing.assert_close(y.double(), x.double().softmax(-1), **close)
    y = x.float().softmax(-1).to(dtype)
    dots = y.float() * dy.float()
    words, dx = _words(torch.stack([dots, dots]), splits, vector), torch.full_like(x, torch.nan)
    softmax._softmax_bwd_team_kernel[grid](dy, y, dx, words, *shape, vector, lanes, block, False)
    torch.testing.assert_close(dx, softmax._bwd_reference(dy, y).to(dtype), **close)


@pytest.mark.cpu
@pytest.mark.parametrize("columns", [32768, 65536, 131072, 1 << 22])
def test_which_rows_are_shared(columns):
    """On NVIDIA's GPUs, rows of more than 32768 columns, but those that more than 256 programs would have to hold."""
    tunables = [(t, row_key(64, columns, 2)) for t in (cross_entropy.FWD, softmax.FWD, softmax.BWD)]
    tunables.append((head.FWD, columns_key(64, 64, columns, 2)))
    for arch in ARCHS:
        target = known_target(arch)
        for tunable, key in tunables:
            config = tunable.heuristic(target, key)
            assert bool(config.vendor) == (target.cooperative and 32768 < columns < 1 << 22), (arch, tunable)
            assert not tunable.safe(target, key).vendor
            if config.vendor:
                assert tunable.illegal(target, key, config) is None
                threads = 32 * config.num_warps * config.ctas_per_mp
                assert threads * config.vendor["maxnreg"] <= target.registers and threads <= 1536


@pytest.mark.cpu
def test_what_a_team_does_not_compute():
    """A loss alone, label smoothing, a softcap, a bias and the largest logit are for sweeps."""
    target, key = known_target("sm90"), row_key(8192, 131072, 2)
    for options in ({"label_smoothing": 0.1}, {"return_token_accuracy": True}, {"softcap": 30.0}, None):
        how = rows.how_rows(Options(**options or {}), options is not None)
        swept = (*key, *how)
        assert not cross_entropy.FWD.heuristic(target, swept).vendor
        assert "a team" in cross_entropy.FWD.illegal(target, swept, cross_entropy.FWD.heuristic(target, key))
    assert rows.how_rows(Options(), True, torch.zeros(1)) == (rows.SWEPT,)
    assert rows.how_rows(Options(lse_square_scale=1e-4, use_token_scaling=True), True) == ()


@pytest.mark.interpret
def test_no_team_in_the_interpreter():
    target, key = known_target("sm90"), row_key(8192, 131072, 2)
    assert "would hang" in cross_entropy.FWD.illegal(target, key, cross_entropy.FWD.heuristic(target, key))


SHARED = {
    "cross_entropy": ("fwd",),
    "fused_linear_cross_entropy": ("fwd",),
    "softmax": ("fwd", "bwd"),
}


@pytest.mark.parametrize("op", SHARED)
@pytest.mark.parametrize(
    "n_rows, n_cols, block, ctas", [(1001, 4096, 512, 1), (300, 3001, 256, 2), (5, 16403, 128, 1), (40, 131, 128, 1)]
)
@pytest.mark.lanes("gpu")
def test_rows_shared_by_teams(lane, op, n_rows, n_cols, block, ctas, dtype, seed):
    """More rows than teams and fewer; uneven parts and edges; a team of 129."""
    op = registry.get_op(op)
    blocks = {"BLOCK_SIZE": block, "ROWS": 1} if op.name == "softmax" else {"BLOCK_SIZE": block}
    config = LaunchConfig(blocks, 4, 1, ctas, vendor={COOPERATIVE: True})
    head = op.name == "fused_linear_cross_entropy"
    with ExitStack() as stack:
        for variant in SHARED[op.name]:
            stack.enter_context(registry.override(f"{op.name}.{variant}", config))
        for options in op.options if len(op.options[0]) == 0 and n_rows < 1000 else ({},):
            sample = make(op, (n_rows, 64, n_cols) if head else (n_rows, n_cols), dtype, lane.device, seed, options)
            verify(op, sample, seed)
