"""Norms by a cooperative grid, whose programs wait for one another: right, the same bits every time, and never launched
where it could hang. Wide rows in the backward of row norms; groups in group_norm.

The interpreter runs one program after another. There every word is written before the launch, so that no program waits;
each then writes its own again, which must be what it read.
"""

from __future__ import annotations

import pytest
import torch
from harness import make, team_sums, team_words, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.norms import fused_add_rms_norm, group_norm, layer_norm, rms_norm
from liger_hw.kernels.norms import group_norm_kernels as kernels
from liger_hw.kernels.norms.forward import GEMMA
from liger_hw.kernels.norms.wide_backward import norm_wide_bwd_kernel
from liger_hw.kernels.rows.blocks import blocks_key
from liger_hw.runtime.cooperative import COOPERATIVE

BWD = {op.__name__.split(".")[-1]: op.BACKWARD.bwd for op in (rms_norm, fused_add_rms_norm, layer_norm)}
GROUPS = group_norm.FWD, group_norm.BWD
ARCHS = ("sm80", "sm90", "sm100", "gfx942", "gfx1100", "bmg", "cpu")
EPS = 1e-6


def _config(blocks: dict[str, int], warps: int = 2, stages: int = 1, ctas: int = 2) -> LaunchConfig:
    return LaunchConfig(blocks, warps, stages, ctas, vendor={"launch_cooperative_grid": True})


def _row(block: int, warps: int = 2, ctas: int = 2) -> LaunchConfig:
    return _config({"BLOCK_SIZE": block, "ROWS": 1}, warps, ctas=ctas)


def _group(block: int, channels: int, warps: int = 2, stages: int = 1, ctas: int = 2) -> LaunchConfig:
    return _config({"BLOCK_SIZE": block, "CHANNELS": channels}, warps, stages, ctas)


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
def test_kernel_of_a_row(
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


def _tiles(x: torch.Tensor, block: int, channels: int) -> list[torch.Tensor]:
    """x [rows, channels of a group, spatial] -> the values of each tile, in the programs' order."""
    return [part for run in x.split(channels, 1) for part in run.split(block, 2)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("sizes, block, channels", [((2, 2, 37, 6), 16, 2), ((3, 1, 32, 4), 16, 2)], ids=str)
@pytest.mark.lanes("interpret")
def test_kernels_of_a_group(lane, sizes, block, channels, stages, dtype, seed):
    """Uneven tiles and even ones, more groups than teams."""
    batch, groups, spatial, num_channels = sizes
    op = registry.get_op("group_norm")
    sample = make(op, sizes, dtype, "cpu", seed)
    x, w, b = (t.detach() for t in sample.args[:3])
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rows, per_group = batch * groups, num_channels // groups
    y, stats = group_norm._fwd_reference(x, w, b, groups, EPS)
    dx, dw_db = group_norm.GroupNormFunction.bwd.reference(dy, x, w, b, stats, groups, EPS, True)
    grouped, up = (t.float().reshape(rows, per_group, spatial) for t in (x, dy))
    tiles = _tiles(grouped, block, channels)
    m = up * w.float().view(1, groups, per_group).expand(batch, -1, -1).reshape(rows, per_group, 1)
    mh = m * (grouped - stats[0].view(rows, 1, 1)) * stats[1].view(rows, 1, 1)
    lanes = registry.next_power_of_2(len(tiles))
    numbers = rows, groups, per_group, spatial, len(tiles)
    even = spatial % block == 0 and per_group % channels == 0
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
    words, out, out_stats = before.clone(), torch.full_like(x, torch.nan), torch.full_like(stats, torch.nan)
    kernels._group_norm_cooperative_fwd_kernel[grid](
        x, w, b, out, out_stats, words, *numbers, EPS, even, lanes, block, channels, stages
    )
    check_words(words, before)
    torch.testing.assert_close(out_stats, stats, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, y)

    before = filled(*([t.sum((1, 2)) for t in _tiles(of, block, channels)] for of in (m, mh)))
    parts = -(-spatial // block)
    words, out = before.clone(), torch.full_like(x, torch.nan)
    partial = torch.full((batch * parts, 2 * num_channels), torch.nan)
    kernels._group_norm_cooperative_bwd_kernel[grid](
        dy, x, w, stats, out, partial, words, *numbers, True, even, lanes, block, channels
    )
    check_words(words, before)
    torch.testing.assert_close(out, dx, rtol=2e-3, atol=1e-3 if dtype is torch.float16 else 1e-5)
    torch.testing.assert_close(partial.sum(0).to(dtype), dw_db, rtol=2e-3, atol=1e-3)


@pytest.mark.cpu
@pytest.mark.parametrize("op", BWD)
@pytest.mark.parametrize(
    "sizes, splits",
    [
        *(((2048, 1 << 19), 256), ((2048, 65536), 32), ((2048, 32768), 16), ((1024, 16384), 8)),
        *((sizes, 0) for sizes in ((2048, 1 << 20), (16, 65536), (8, 1 << 21), (8192, 8192))),
    ],
    ids=str,
)
def test_which_rows_are_shared(op, sizes, splits):
    """On NVIDIA's GPUs, many wide rows, by 256 programs a row at most; each has the registers it needs. A program holds
    16384 columns with one gradient."""
    key = blocks_key(*sizes, 2)
    if sizes[1] == 16384 and op != "layer_norm":
        splits = 0
    for arch in ARCHS:
        target = known_target(arch)
        config = BWD[op].heuristic(target, key)
        assert bool(config.vendor) == (target.cooperative and splits > 0), arch
        assert not BWD[op].safe(target, key).vendor
        if config.vendor:
            threads = 32 * config.num_warps * config.ctas_per_mp
            assert threads * config.vendor["maxnreg"] <= target.registers and threads <= 1536
            assert -(-sizes[1] // config.blocks["BLOCK_SIZE"]) == splits <= config.ctas_per_mp * target.multiprocessors
        reason = BWD[op].illegal(target, key, _row(16384, 8))
        assert (reason is None) if target.cooperative else f"is unknown to {target.vendor}" in reason


@pytest.mark.cpu
def test_where_programs_may_wait():
    """Cooperative configurations are for NVIDIA's GPUs, each with the registers it has room for."""
    key = group_norm._key(32, 32, 4096, 512, 2)
    for arch in ARCHS:
        target = known_target(arch)
        for tunable in GROUPS:
            config = tunable.heuristic(target, key)
            assert bool(config.vendor) == (target.vendor == "cuda"), arch
            if config.vendor:
                assert config.vendor["launch_cooperative_grid"] is True
                threads = 32 * config.num_warps * config.ctas_per_mp
                assert threads * config.vendor["maxnreg"] <= 65536 and threads <= 1536
            assert not tunable.safe(target, key).vendor
            assert not tunable.heuristic(target, group_norm._key(2, 32, 262144, 128, 2)).vendor, "too large"
            reason = tunable.illegal(target, key, _group(4096, 1))
            assert (reason is None) if target.vendor == "cuda" else f"is unknown to {target.vendor}" in reason
    reason = group_norm.FWD.illegal(known_target("sm90"), key, _group(128, 1))
    assert "512 programs would wait for one another" in reason
    assert "num_stages is at most 1" in group_norm.BWD.illegal(known_target("sm90"), key, _group(4096, 1, stages=2))


@pytest.mark.interpret
def test_no_team_in_the_interpreter():
    target = known_target("sm90")
    for reason in (
        rms_norm.BACKWARD.bwd.illegal(target, blocks_key(2048, 65536, 2), _row(4096, 4)),
        group_norm.FWD.illegal(target, group_norm._key(32, 32, 4096, 512, 2), _group(4096, 1)),
    ):
        assert "would hang" in reason


@pytest.mark.parametrize("op", BWD)
@pytest.mark.parametrize(
    "sizes, block, ctas", [((1001, 4096), 512, 1), ((300, 3000), 256, 2), ((5, 16400), 128, 1)], ids=str
)
@pytest.mark.lanes("gpu")
def test_rows_shared_by_teams(lane, op, sizes, block, ctas, dtype, seed):
    """More rows than teams and fewer; uneven tiles; a team of 129."""
    with registry.override(f"{op}.bwd", _row(block, 4, ctas)):
        sample = make(registry.get_op(op), sizes, dtype, lane.device, seed)
        assert COOPERATIVE in BWD[op].plan(sample.args[0].device, blocks_key(*sizes, dtype.itemsize)).options
        verify(registry.get_op(op), sample, seed)


def _assert_cooperative(device: torch.device, sizes: tuple[int, ...]) -> None:
    """Assert that teams take these sizes, forward and backward."""
    batch, groups, spatial, num_channels = sizes
    for tunable in GROUPS:
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
    op, fwd, bwd = registry.get_op("group_norm"), *(_group(block, channels, 4, n, ctas) for n in (stages, 1))
    with registry.override("group_norm.fwd", fwd), registry.override("group_norm.bwd", bwd):
        sample = make(op, sizes, dtype, lane.device, seed)
        _assert_cooperative(sample.args[0].device, sizes)
        verify(op, sample, seed)


REAL = {**dict.fromkeys(BWD, (1024, 32768)), "group_norm": (32, 32, 4096, 512)}
"""Samples large enough that every multiprocessor waits."""


def _all(op: str, sample, dy) -> list[torch.Tensor]:
    y = registry.get_op(op).function(*sample.args)
    y = y if isinstance(y, tuple) else (y,)
    leaves = [t for t in sample.args if isinstance(t, torch.Tensor)]
    return [*y, *torch.autograd.grad(y, leaves, [dy] * len(y))]


@pytest.fixture(params=REAL)
def real(request, lane, seed):
    """Name of an op, a sample, dy, and the results."""
    op = request.param
    sample = make(registry.get_op(op), REAL[op], torch.bfloat16, lane.device, seed)
    if op == "group_norm":
        _assert_cooperative(sample.args[0].device, REAL[op])
    dy = torch.randn_like(sample.args[0])
    return op, sample, dy, [t.detach().clone() for t in _all(op, sample, dy)]


@pytest.mark.timeout(120)
@pytest.mark.lanes("gpu")
def test_the_same_bits_every_time(lane, real):
    """In a row, and in a graph whose words are zeroed at each replay: words that a replay left would be wrong in the
    next."""
    op, sample, dy, expected = real
    x = sample.args[0].detach()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(_all(op, sample, dy), expected))
    inputs = [(x.clone(), dy.clone()), (2 * x + 1, -dy)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _all(op, sample, dy)
    x.copy_(inputs[1][0])
    dy.copy_(inputs[1][1])
    both = [expected, [t.detach().clone() for t in _all(op, sample, dy)]]
    for number in range(50):
        x.copy_(inputs[number % 2][0])
        dy.copy_(inputs[number % 2][1])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, both[number % 2]))


@pytest.mark.lanes("gpu")
def test_teams_beside_others(lane, real):
    """On two streams at once, while a third keeps the device busy: each launch waits for room, none for ever."""
    op, sample, dy, expected = real
    busy = torch.randn(4096, 4096, device=lane.device, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    runs = []
    for _ in range(10):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                runs.append(_all(op, sample, dy))
        with torch.cuda.stream(streams[2]):
            busy @ busy
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for results in runs for a, b in zip(results, expected))


TOO_MANY = {op: (f"{op}.bwd", _row(4096, 8, 32)) for op in BWD}
TOO_MANY["group_norm"] = "group_norm.fwd", _group(4096, 1, 8, ctas=32)


@pytest.mark.lanes("gpu")
def test_a_refused_team_is_quarantined(lane, real, clean_registry):
    """More programs than can be resident: the driver refuses, the next layer answers, nothing hangs."""
    op, sample, dy, expected = real
    name, config = TOO_MANY[op]
    with registry.override(name, config):
        results = _all(op, sample, dy)
        (why,) = clean_registry.quarantined().values()
        assert "cooperative launch" in why
    torch.testing.assert_close(results, expected)
