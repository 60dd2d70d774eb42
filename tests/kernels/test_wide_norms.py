"""The backward of wide rows by a cooperative grid; how such grids are tested: see test_group_norm_teams.py."""

from __future__ import annotations

import pytest
import torch
from harness import make, team_sums, team_words, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.norms import fused_add_rms_norm, layer_norm, rms_norm
from liger_hw.kernels.norms.forward import GEMMA
from liger_hw.kernels.norms.wide_backward import norm_wide_bwd_kernel
from liger_hw.kernels.rows.blocks import blocks_key
from liger_hw.runtime.cooperative import COOPERATIVE

BWD = {op.__name__.split(".")[-1]: op.BACKWARD.bwd for op in (rms_norm, fused_add_rms_norm, layer_norm)}
WIDE = (1024, 32768)


def _config(block: int, warps: int = 2, ctas: int = 2) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, warps, 1, ctas, vendor={"launch_cooperative_grid": True})


def _published(first: torch.Tensor, second: torch.Tensor, block: int) -> torch.Tensor:
    """The words of all programs as `publish` leaves them, so that no program waits; zeros behind the last of a team."""
    sums = team_words(*(torch.stack([part.sum(-1) for part in t.split(block, 1)], 1) for t in (first, second)))
    words = torch.zeros(len(first), registry.next_power_of_2(sums.shape[1]), dtype=torch.int64)
    words[:, : sums.shape[1]] = sums
    return words


CASES = [  # casting, has a weight, subtracts the mean, has ds, gradients of parameters
    (0, True, False, False, 1),
    (1, True, False, True, 1),
    (2, False, False, True, 0),
    (GEMMA, True, True, False, 2),
    (GEMMA, True, True, False, 1),
    (GEMMA, False, True, False, 0),
]


@pytest.mark.parametrize("casting, affine, subtract_mean, has_ds, parts", CASES)
@pytest.mark.parametrize("n_rows, n_cols, block, teams", [(7, 90, 32, 2), (2, 64, 16, 2), (3, 50, 64, 1)])
@pytest.mark.lanes("interpret")
def test_kernel_of_a_team(
    lane, n_rows, n_cols, block, teams, casting, affine, subtract_mean, has_ds, parts, dtype, seed
):
    """Against fp64: uneven tiles and even ones, a team of one, more rows than teams and as many."""
    generator = torch.Generator().manual_seed(seed)
    x, dy, ds = (torch.randn(n_rows, n_cols, generator=generator).to(dtype) for _ in range(3))
    w = torch.randn(n_cols, generator=generator).to(dtype) if affine else None
    offset = float(casting == 1 and not subtract_mean)
    g, wide_x = dy.double(), x.double()
    m = g if w is None else g * (w.double() + offset)
    mean = wide_x.mean(-1, keepdim=True) * subtract_mean
    rstd = ((wide_x - mean).square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    h = (wide_x - mean) * rstd
    dx = rstd * (m - m.mean(-1, keepdim=True) * subtract_mean - h * (m * h).mean(-1, keepdim=True))
    if has_ds:
        dx = dx + ds.double()
    rounded = (x.float() * rstd.float()).to(dtype).double() if casting == 0 else h
    words = _published(m if subtract_mean else m * h, m * h, block)
    before, splits = words.clone(), -(-n_cols // block)
    out = torch.full_like(x, torch.nan)
    partial = torch.full((teams, parts * n_cols), torch.nan) if parts else None
    stats = torch.stack([mean[:, 0], rstd[:, 0]]).float() if subtract_mean else rstd[:, 0].float()
    numbers = n_cols, n_cols, n_cols, n_rows, n_cols, splits, offset
    flags = casting, subtract_mean, parts == 2, words.shape[1], block, False
    norm_wide_bwd_kernel[(teams * splits,)](
        dy, x, w, stats, ds if has_ds else None, out, partial, words, *numbers, *flags
    )
    tolerance = 2e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), dx, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(team_sums(words), team_sums(before), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not words[:, splits:].any()
    if parts:
        sums = torch.cat([(g * rounded).sum(0), g.sum(0)][:parts])
        torch.testing.assert_close(partial.double().sum(0), sums, rtol=1e-4, atol=1e-4)


@pytest.mark.cpu
@pytest.mark.parametrize("op", BWD)
@pytest.mark.parametrize(
    "sizes, splits",
    [
        *(((2048, 1 << 20), 256), ((2048, 65536), 32), ((2048, 32768), 16), ((1024, 16384), 4)),
        *((sizes, 0) for sizes in ((2048, 1 << 21), (16, 65536), (8, 1 << 21), (8192, 8192))),
    ],
    ids=str,
)
def test_which_rows_are_shared(op, sizes, splits):
    """On NVIDIA's GPUs, many wide rows, by 256 programs a row at most; each has the registers it needs."""
    key = blocks_key(*sizes, 2)
    for arch in ("sm80", "sm90", "sm100", "gfx942", "gfx1100", "bmg", "cpu"):
        target = known_target(arch)
        config = BWD[op].heuristic(target, key)
        assert bool(config.vendor) == (target.cooperative and splits > 0), arch
        assert not BWD[op].safe(target, key).vendor
        if config.vendor:
            threads = 32 * config.num_warps * config.ctas_per_mp
            assert threads * config.vendor["maxnreg"] <= target.registers and threads <= 1536
            assert -(-sizes[1] // config.blocks["BLOCK_SIZE"]) == splits <= config.ctas_per_mp * target.multiprocessors
        reason = BWD[op].illegal(target, key, _config(16384, 8))
        assert (reason is None) if target.cooperative else f"is unknown to {target.vendor}" in reason


@pytest.mark.interpret
def test_no_team_in_the_interpreter():
    reason = rms_norm.BACKWARD.bwd.illegal(known_target("sm90"), blocks_key(2048, 65536, 2), _config(4096, 4))
    assert "would hang" in reason


@pytest.mark.parametrize("op", BWD)
@pytest.mark.parametrize(
    "sizes, block, ctas", [((1001, 4096), 512, 1), ((300, 3000), 256, 2), ((5, 16400), 128, 1)], ids=str
)
@pytest.mark.lanes("gpu")
def test_rows_shared_by_teams(lane, op, sizes, block, ctas, dtype, seed):
    """More rows than teams and fewer; uneven tiles; a team of 129."""
    with registry.override(f"{op}.bwd", _config(block, 4, ctas)):
        sample = make(registry.get_op(op), sizes, dtype, lane.device, seed)
        assert COOPERATIVE in BWD[op].plan(sample.args[0].device, blocks_key(*sizes, dtype.itemsize)).options
        verify(registry.get_op(op), sample, seed)


def _all(op: str, sample, dy) -> list[torch.Tensor]:
    y = registry.get_op(op).function(*sample.args)
    y = y if isinstance(y, tuple) else (y,)
    leaves = [t for t in sample.args if isinstance(t, torch.Tensor)]
    return [*y, *torch.autograd.grad(y, leaves, [dy] * len(y))]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("op", BWD)
@pytest.mark.lanes("gpu")
def test_the_same_bits_every_time(lane, op, seed):
    """In a row, and in a graph whose words are zeroed at each replay: words that a replay left would be wrong in the
    next."""
    sample = make(registry.get_op(op), WIDE, torch.bfloat16, lane.device, seed)
    x = sample.args[0].detach()
    dy = torch.randn_like(x)
    expected = [t.detach().clone() for t in _all(op, sample, dy)]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(_all(op, sample, dy), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _all(op, sample, dy)
    inputs = [(x.clone(), dy.clone()), (2 * x + 1, -dy)]
    x.copy_(inputs[1][0])
    dy.copy_(inputs[1][1])
    both = [expected, [t.detach().clone() for t in _all(op, sample, dy)]]
    for number in range(20):
        x.copy_(inputs[number % 2][0])
        dy.copy_(inputs[number % 2][1])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, both[number % 2]))


@pytest.mark.lanes("gpu")
def test_a_refused_team_is_quarantined(lane, clean_registry, seed):
    """More programs than can be resident: the driver refuses, the next layer answers, nothing hangs."""
    sample = make(registry.get_op("rms_norm"), WIDE, torch.bfloat16, lane.device, seed)
    dy = torch.randn_like(sample.args[0])
    expected = _all("rms_norm", sample, dy)
    with registry.override("rms_norm.bwd", _config(4096, 8, 32)):
        results = _all("rms_norm", sample, dy)
        (why,) = clean_registry.quarantined().values()
        assert "cooperative launch" in why
    for a, b in zip(results, expected):
        torch.testing.assert_close(a, b)
    clean_registry.release(clean_registry.quarantined())
