"""Rows held by teams of programs (rows/team.py): right, and launched only where programs may wait for one another.

The interpreter runs one program after another. There every word is written before the launch, so that no program waits;
each then writes its own again, which must be what it read (as in test_cooperative.py).
"""

from __future__ import annotations

import pytest
import torch
from harness import make, team_sums, team_words, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.heads import fused_linear_cross_entropy as head
from liger_hw.kernels.losses import cross_entropy
from liger_hw.kernels.losses import cross_entropy_rows as rows
from liger_hw.kernels.losses.cross_entropy_reference import Options
from liger_hw.kernels.losses.log_prob_rows import columns_key
from liger_hw.kernels.rows.row import row_vector
from liger_hw.registry import row_key

ARCHS = ("sm80", "sm90", "sm100", "gfx942", "gfx1100", "bmg", "cpu")
FWD = cross_entropy.FWD, head.FWD
OPTIONS = [
    {},
    {"softcap": 5.0, "lse_square_scale": 1e-2, "return_z_loss": True},
    {"use_token_scaling": True, "reduction": "sum"},
    {"reduction": "none"},
]


def _words(s: torch.Tensor, splits: int, vector: int) -> torch.Tensor:
    """What the programs of every row publish for scores s: by columns of the body, the edges in the last part's."""
    n_rows, n_cols = s.shape
    width = -(-(n_cols // vector * vector) // (splits * 64)) * 64
    words = torch.zeros(n_rows, registry.next_power_of_2(splits), dtype=torch.int64)
    for row in range(n_rows):
        head = -row * n_cols % vector
        n_body = max(n_cols - head, 0) // vector * vector
        stops = [head + min((i + 1) * width, n_body) for i in range(splits)]
        parts = [s[row, start:stop] for start, stop in zip((head, *stops), stops)]
        parts[-1] = torch.cat([parts[-1], s[row, :head], s[row, head + n_body :]])
        tops = torch.stack([part.max() if part.numel() else torch.tensor(-torch.inf) for part in parts])
        sums = [(part - top.clamp_min(-1e30)).exp().sum() for part, top in zip(parts, tops)]
        words[row, :splits] = team_words(tops, torch.stack(sums))
    return words


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "n_rows, n_cols, block, teams, biased",
    [(5, 256, 128, 2, False), (9, 331, 128, 2, True), (3, 100, 128, 3, False), (9, 6, 128, 1, True)],
)
@pytest.mark.lanes("interpret")
def test_kernel_of_cross_entropy(lane, n_rows, n_cols, block, teams, biased, options, dtype, seed):
    """Uneven parts and edges of every width, more rows than teams, ignored rows, a target in each edge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=generator).mul(3).to(dtype)
    bias = torch.randn(n_cols, generator=generator).to(dtype) if biased else None
    weight = torch.rand(n_cols, generator=generator) + 0.5
    y = torch.randint(n_cols, (n_rows,), generator=generator)
    y[0], y[1], y[-1] = 0, -100, n_cols - 1
    options = Options(**options)
    go = torch.rand(n_rows, generator=generator) if options.reduction == "none" else None
    scores = x.float() if bias is None else x.float() + bias.float()
    want = cross_entropy.reference_losses(scores.double(), y, weight.double(), options)
    want_dx = cross_entropy.reference_gradient(scores.double(), y, weight.double(), options, go)
    vector = row_vector(x, x)
    splits = max(1, -(-(n_cols // vector * vector) // block))
    s = scores if not options.softcap else options.softcap * torch.tanh(scores / options.softcap)
    before = _words(s, splits, vector)
    stats = rows.launch_stats("test", y, weight, n_cols, options, x.device)
    words, dx, out = before.clone(), torch.full_like(x, torch.nan), torch.full((2, n_rows), torch.nan)
    rows._cross_entropy_team_kernel[(teams * splits,)](
        *(x, y, weight, bias, stats, go, out[0], out[1], dx, words, n_cols, n_cols, n_rows, n_cols, -100, splits),
        *(False, options.lse_square_scale != 0, options.softcap != 0, options.use_token_scaling),
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
