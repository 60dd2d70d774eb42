"""group_norm by programs that wait for one another: right, the same bits every time, and never launched where it could
hang.

The interpreter runs one program after another. There every word is written before the launch, so that nobody waits;
each program then writes its own again, which must be what it found.
"""

from __future__ import annotations

import pytest
import torch
from harness import make, team_sums, team_words, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.norms import group_norm
from liger_hw.kernels.norms import group_norm_kernels as kernels

EPS = 1e-6


def _config(block: int, channels: int, warps: int = 2, stages: int = 2, ctas: int = 2) -> LaunchConfig:
    blocks = {"BLOCK_SIZE": block, "CHANNELS": channels}
    return LaunchConfig(blocks, warps, stages, ctas, vendor={"launch_cooperative_grid": True})


def _tiles(x: torch.Tensor, block: int, channels: int) -> list[torch.Tensor]:
    """x [rows, channels of a group, spatial] -> the values of each tile, in the programs' order."""
    return [part for run in x.split(channels, 1) for part in run.split(block, 2)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("sizes, block, channels", [((2, 2, 37, 6), 16, 2), ((3, 1, 32, 4), 16, 2)], ids=str)
@pytest.mark.lanes("interpret")
def test_kernels_of_a_team(lane, sizes, block, channels, stages, dtype, seed):
    """Uneven tiles and even ones, more groups than teams."""
    batch, groups, spatial, num_channels = sizes
    op = registry.get_op("group_norm")
    sample = make(op, sizes, dtype, "cpu", seed)
    x, w, b = (t.detach() for t in sample.args[:3])
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rows, own = batch * groups, num_channels // groups
    y, stats = group_norm._fwd_reference(x, w, b, groups, EPS)
    dx, dw_db = group_norm._bwd_reference(dy, x, w, b, stats, groups, True)
    grouped, up = (group_norm._grouped(t, groups, torch.float32) for t in (x, dy))
    tiles = _tiles(grouped, block, channels)
    m = up * w.float().view(1, groups, own).expand(batch, -1, -1).reshape(rows, own, 1)
    mh = m * (grouped - stats[0].view(rows, 1, 1)) * stats[1].view(rows, 1, 1)
    lanes = registry.next_power_of_2(len(tiles))
    numbers = rows, groups, own, spatial, len(tiles)
    even = spatial % block == 0 and own % channels == 0
    grid = (2 * len(tiles),)

    def filled(first, second):
        words = torch.zeros(rows, lanes, dtype=torch.int64)
        words[:, : len(tiles)] = team_words(torch.stack(first, 1), torch.stack(second, 1))
        return words

    def check_words(words, before):
        torch.testing.assert_close(
            team_sums(words)[..., : len(tiles)], team_sums(before)[..., : len(tiles)], rtol=1e-5, atol=1e-4
        )
        assert not words[:, len(tiles) :].any()

    means = [t.mean((1, 2)) for t in tiles]
    before = filled(means, [(t - t.mean((1, 2), keepdim=True)).square().sum((1, 2)) for t in tiles])
    words, out, found = before.clone(), torch.full_like(x, torch.nan), torch.full_like(stats, torch.nan)
    kernels._group_norm_cooperative_fwd_kernel[grid](
        x, w, b, out, found, words, *numbers, EPS, even, lanes, block, channels, stages
    )
    check_words(words, before)
    torch.testing.assert_close(found, stats, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, y)

    before = filled(*([t.sum((1, 2)) for t in _tiles(of, block, channels)] for of in (m, mh)))
    parts = -(-spatial // block)
    words, out = before.clone(), torch.full_like(x, torch.nan)
    partial = torch.full((batch * parts, 2 * num_channels), torch.nan)
    kernels._group_norm_cooperative_bwd_kernel[grid](
        dy, x, w, stats, out, partial, words, *numbers, True, even, lanes, block, channels, stages
    )
    check_words(words, before)
    torch.testing.assert_close(out, dx, rtol=2e-3, atol=1e-3 if dtype is torch.float16 else 1e-5)
    torch.testing.assert_close(partial.sum(0).to(dtype), dw_db, rtol=2e-3, atol=1e-3)


@pytest.mark.cpu
def test_where_programs_may_wait():
    """Cooperative configurations are for NVIDIA's GPUs, each with the registers it has room for."""
    key = group_norm._key(32, 32, 4096, 512, 2)
    for arch in ("sm80", "sm90", "sm100", "gfx942", "gfx1100", "bmg", "cpu"):
        target = known_target(arch)
        for tunable in (group_norm.FWD, group_norm.BWD):
            config = tunable.heuristic(target, key)
            assert bool(config.vendor) == (target.vendor == "cuda"), arch
            if config.vendor:
                assert config.vendor["launch_cooperative_grid"] is True
                threads = 32 * config.num_warps * config.ctas_per_mp
                assert threads * config.vendor["maxnreg"] <= 65536 and threads <= 1536
            assert not tunable.safe(target, key).vendor
            reason = tunable.illegal(target, key, _config(4096, 1))
            assert (reason is None) if target.vendor == "cuda" else f"is unknown to {target.vendor}" in reason
    assert "512 programs would wait for one another" in group_norm.FWD.illegal(
        known_target("sm90"), key, _config(128, 1)
    )


@pytest.mark.cpu
@pytest.mark.parametrize(
    "sizes, teams, block, channels",
    [
        ((32, 32, 4096, 512), True, 4096, 1),
        ((16, 32, 1024, 1280), True, 1024, 2),
        ((3, 32, 197, 1280), True, 256, 4),
        ((64, 32, 49, 1280), False, 64, 16),
        ((1, 32, 49, 1280), False, 64, 64),
        ((64, 32, 64, 1280), False, 64, 64),
    ],
    ids=str,
)
def test_who_holds_a_group(sizes, teams, block, channels):
    """Of two bytes a value, on the H200: as they were measured."""
    for tunable in (group_norm.FWD, group_norm.BWD):
        config = tunable.heuristic(known_target("sm90"), group_norm._key(*sizes, 2))
        assert ("launch_cooperative_grid" in config.vendor) == teams
        assert config.blocks == {"BLOCK_SIZE": block, "CHANNELS": channels}
    for tunable in (group_norm.FWD, group_norm.BWD):
        assert not tunable.heuristic(known_target("sm90"), group_norm._key(2, 32, 262144, 128, 2)).vendor


@pytest.mark.interpret
def test_nobody_waits_in_the_interpreter():
    reason = group_norm.FWD.illegal(known_target("sm90"), group_norm._key(32, 32, 4096, 512, 2), _config(4096, 1))
    assert "would hang" in reason


def _held(device: torch.device, sizes: tuple[int, ...]) -> None:
    """Assert that teams take these sizes, forward and backward."""
    batch, groups, spatial, num_channels = sizes
    for tunable in (group_norm.FWD, group_norm.BWD):
        plan = tunable.plan(device, group_norm._key(*sizes, 2))
        assert group_norm._grid_of(plan, batch * groups, num_channels // groups, spatial).cooperative, plan


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "sizes, block, channels, ctas",
    [((7, 2, 320, 12), 64, 2, 1), ((3, 4, 197, 20), 64, 2, 1), ((2, 1, 12000, 3), 256, 1, 2)],
    ids=str,
)
@pytest.mark.lanes("gpu")
def test_groups_held_by_teams(lane, sizes, block, channels, ctas, stages, dtype, seed):
    """More groups than teams; uneven tiles; a team of 141."""
    op, config = registry.get_op("group_norm"), _config(block, channels, 4, stages, ctas)
    with registry.override("group_norm.fwd", config), registry.override("group_norm.bwd", config):
        sample = make(op, sizes, dtype, lane.device, seed)
        _held(sample.args[0].device, sizes)
        verify(op, sample, seed)


REAL = (32, 32, 4096, 512)


def _both(sample, dy) -> list[torch.Tensor]:
    y = registry.get_op("group_norm").function(*sample.args)
    return [y, *torch.autograd.grad(y, sample.args[:3], dy)]


@pytest.fixture
def real(lane, seed):
    """A sample large enough that every multiprocessor waits, dy, and the results."""
    sample = make(registry.get_op("group_norm"), REAL, torch.bfloat16, lane.device, seed)
    _held(sample.args[0].device, REAL)
    dy = torch.randn_like(sample.args[0])
    return sample, dy, [t.detach() for t in _both(sample, dy)]


@pytest.mark.lanes("gpu")
def test_teams_give_the_same_bits_every_time(lane, real):
    sample, dy, expected = real
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(_both(sample, dy), expected))


@pytest.mark.lanes("gpu")
def test_teams_in_a_graph(lane, real):
    """A captured launch is cooperative too, and its words are zeroed at every replay."""
    sample, dy, expected = real
    x = sample.args[0].detach()
    given = [(x.clone(), dy.clone()), (2 * x + 1, -dy)]  # words that a replay left would be wrong in the next
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _both(sample, dy)
    x.copy_(given[1][0])
    dy.copy_(given[1][1])
    wanted = [expected, [t.detach().clone() for t in _both(sample, dy)]]
    for number in range(50):
        x.copy_(given[number % 2][0])
        dy.copy_(given[number % 2][1])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, wanted[number % 2]))


@pytest.mark.lanes("gpu")
def test_teams_beside_others(lane, real):
    """On two streams at once, while a third keeps the device busy: each launch waits for room, none for ever."""
    sample, dy, expected = real
    busy = torch.randn(4096, 4096, device=lane.device, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                found.append(_both(sample, dy))
        with torch.cuda.stream(streams[2]):
            busy @ busy
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for results in found for a, b in zip(results, expected))


@pytest.mark.lanes("gpu")
def test_a_refused_team_is_set_aside(lane, real, clean_registry):
    """More programs than can be resident: the driver refuses, the next layer answers, nothing hangs."""
    sample, _, expected = real
    config = _config(4096, 1, 8, 1, 32)
    with registry.override("group_norm.fwd", config):
        y = registry.get_op("group_norm").function(*sample.args)
        (why,) = clean_registry.quarantined().values()
        assert "cooperative launch" in why
        plan = group_norm.FWD.plan(sample.args[0].device, group_norm._key(*REAL, 2))
        assert plan.layer == "heuristic"
    torch.testing.assert_close(y, expected[0])
    clean_registry.release(clean_registry.quarantined())
