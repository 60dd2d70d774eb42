"""The backward of wide rows by a cooperative grid; how such grids are tested: see test_group_norm_teams.py."""

from __future__ import annotations

import pytest
import torch
from harness import make, team_sums, team_words, verify

from liger_hw import registry
from liger_hw.backends import LaunchConfig, known_target
from liger_hw.kernels.norms import fused_add_rms_norm, layer_norm, rms_norm
from liger_hw.kernels.norms.backward import _norm_cooperative_bwd_kernel, row_splits
from liger_hw.kernels.norms.forward import GEMMA
from liger_hw.kernels.rows.blocks import blocks_key

BWD = {op.__name__.split(".")[-1]: op.BACKWARD.bwd for op in (rms_norm, fused_add_rms_norm, layer_norm)}


def _config(block: int, warps: int = 2, ctas: int = 2) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": block, "ROWS": 1}, warps, 1, ctas, vendor={"launch_cooperative_grid": True})


def _published(first: torch.Tensor, second: torch.Tensor, block: int) -> torch.Tensor:
    """The words of all programs as `publish` leaves them, so that nobody waits; zeros behind the last of a team."""
    told = team_words(*(torch.stack([part.sum(-1) for part in t.split(block, 1)], 1) for t in (first, second)))
    words = torch.zeros(len(first), registry.next_power_of_2(told.shape[1]), dtype=torch.int64)
    words[:, : told.shape[1]] = told
    return words


@pytest.mark.parametrize(
    "casting, affine, ds, sums", [(0, True, False, True), (1, True, True, True), (2, False, True, False)]
)
@pytest.mark.parametrize("n_rows, n_cols, block, teams", [(7, 90, 32, 2), (2, 64, 16, 2), (3, 50, 64, 1)])
@pytest.mark.lanes("interpret")
def test_kernel_of_a_team(lane, n_rows, n_cols, block, teams, casting, affine, ds, sums, dtype, seed):
    """Against fp64: uneven tiles and even ones, a team of one, more rows than teams and as many."""
    generator = torch.Generator().manual_seed(seed)
    x, dy, more = (torch.randn(n_rows, n_cols, generator=generator).to(dtype) for _ in range(3))
    w = torch.randn(n_cols, generator=generator).to(dtype) if affine else None
    more, offset = more if ds else None, float(casting == 1)
    exact = [None if t is None else t.double() for t in (dy, x, w)]
    rstd = (exact[1].square().mean(-1) + 1e-6).rsqrt()
    dx, _ = rms_norm.bwd_reference(*exact, rstd, offset, 2, False)
    if ds:
        dx = dx + more.double()
    h = exact[1] * rstd[:, None]
    seen = (x.float() * rstd.float()[:, None]).to(dtype).double() if casting == 0 else h
    m = exact[0] if w is None else exact[0] * (exact[2] + offset)
    words = _published(m * h, m * h, block)
    before, splits = words.clone(), -(-n_cols // block)
    out = torch.full_like(x, torch.nan)
    partial = torch.full((teams, n_cols), torch.nan) if sums else None
    numbers = n_cols, n_cols, n_cols, n_rows, n_cols, splits, offset
    args = dy, x, w, rstd.float(), more, out, partial, words, *numbers, casting, False, False, words.shape[1], block
    _norm_cooperative_bwd_kernel[(teams * splits,)](*args, False)
    tolerance = 2e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), dx, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(team_sums(words), team_sums(before), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not words[:, splits:].any()
    if sums:
        torch.testing.assert_close(partial.double().sum(0), (exact[0] * seen).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("affine, parts", [(True, 2), (True, 1), (False, 0)])
@pytest.mark.parametrize("n_rows, n_cols, block, teams", [(7, 90, 32, 2), (2, 64, 16, 2), (3, 50, 64, 1)])
@pytest.mark.lanes("interpret")
def test_kernel_of_a_layer_norm_team(lane, n_rows, n_cols, block, teams, affine, parts, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(n_rows, n_cols, generator=generator).to(dtype) for _ in range(2))
    w = torch.randn(n_cols, generator=generator).to(dtype) if affine else None
    exact = [None if t is None else t.double() for t in (dy, x, w)]
    mean = exact[1].mean(-1)
    stats = torch.stack([mean, (exact[1].var(-1, correction=0) + 1e-6).rsqrt()])
    dx, dw_db = layer_norm.bwd_reference(*exact, exact[2] if parts == 2 else None, stats, parts > 0)
    m = exact[0] if w is None else exact[0] * exact[2]
    words = _published(m, m * (exact[1] - mean[:, None]) * stats[1][:, None], block)
    before, splits = words.clone(), -(-n_cols // block)
    out = torch.full_like(x, torch.nan)
    partial = torch.full((teams, parts * n_cols), torch.nan) if parts else None
    numbers = n_cols, n_cols, 0, n_rows, n_cols, splits, None
    args = dy, x, w, stats.float(), None, out, partial, words, *numbers, GEMMA, True, parts == 2, words.shape[1], block
    _norm_cooperative_bwd_kernel[(teams * splits,)](*args, False)
    tolerance = 2e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), dx, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(team_sums(words), team_sums(before), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not words[:, splits:].any()
    if parts:
        torch.testing.assert_close(partial.double().sum(0), dw_db, rtol=1e-4, atol=1e-4)


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
def test_who_holds_a_row(op, sizes, splits):
    """On NVIDIA's GPUs, for many wide rows that begin at 16 bytes, 256 programs a row at most; each has the registers
    it needs."""
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


@pytest.mark.cpu
@pytest.mark.parametrize("op", BWD)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_tuner_tries_teams(op, itemsize):
    """What the heuristic takes is among them, others too, and all can be launched; none where it takes none."""
    target, tunable = known_target("sm90"), BWD[op]
    for sizes in ((2048, 65536), (2048, 32768), (1024, 16384), (16, 65536), (8192, 8192)):
        key = blocks_key(*sizes, itemsize)
        teams = [c for c in tunable.space(target, key) if c.vendor]
        first = tunable.heuristic(target, key)
        assert (first in teams and len(set(teams)) > 4) if first.vendor else not teams
        assert not any(tunable.illegal(target, key, c) for c in teams)
    assert not any(c.vendor for c in tunable.space(known_target("gfx942"), blocks_key(2048, 65536, itemsize)))


@pytest.mark.interpret
def test_nobody_waits_in_the_interpreter():
    reason = rms_norm.BACKWARD.bwd.illegal(known_target("sm90"), blocks_key(2048, 65536, 2), _config(4096, 4))
    assert "would hang" in reason


def _held(op: str, sizes: tuple[int, int], device: torch.device, itemsize: int = 2) -> bool:
    plan = BWD[op].plan(device, blocks_key(*sizes, itemsize))
    return row_splits(plan, *sizes)[0] > 0


@pytest.mark.parametrize("op", BWD)
@pytest.mark.parametrize(
    "sizes, block, ctas", [((1001, 4096), 512, 1), ((300, 3000), 256, 2), ((5, 16400), 128, 1)], ids=str
)
@pytest.mark.lanes("gpu")
def test_rows_held_by_teams(lane, op, sizes, block, ctas, dtype, seed):
    """More rows than teams and fewer; uneven tiles; a team of 129."""
    with registry.override(f"{op}.bwd", _config(block, 4, ctas)):
        sample = make(registry.get_op(op), sizes, dtype, lane.device, seed)
        assert _held(op, sizes, sample.args[0].device, dtype.itemsize)
        verify(registry.get_op(op), sample, seed)


WIDE = (1024, 32768)


def _all(op: str, sample, dy) -> list[torch.Tensor]:
    y = registry.get_op(op).function(*sample.args)
    y = y if isinstance(y, tuple) else (y,)
    leaves = [t for t in sample.args if isinstance(t, torch.Tensor)]
    return [*y, *torch.autograd.grad(y, leaves, [dy] * len(y))]


@pytest.mark.parametrize("op", BWD)
@pytest.mark.lanes("gpu")
def test_the_same_bits_every_time(lane, op, seed):
    """In a row, in a graph whose words are zeroed at each replay, and on two streams at once."""
    sample = make(registry.get_op(op), WIDE, torch.bfloat16, lane.device, seed)
    x = sample.args[0].detach()
    assert _held(op, WIDE, x.device)
    dy = torch.randn_like(x)
    expected = [t.detach().clone() for t in _all(op, sample, dy)]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(_all(op, sample, dy), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _all(op, sample, dy)
    given = [(x.clone(), dy.clone()), (2 * x + 1, -dy)]  # words that a replay left would be wrong in the next
    x.copy_(given[1][0])
    dy.copy_(given[1][1])
    wanted = [expected, [t.detach().clone() for t in _all(op, sample, dy)]]
    for number in range(20):
        x.copy_(given[number % 2][0])
        dy.copy_(given[number % 2][1])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, wanted[number % 2]))
    x.copy_(given[0][0])
    dy.copy_(given[0][1])
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for number in range(20):
        with torch.cuda.stream(streams[number % 2]):
            found.append(_all(op, sample, dy))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for results in found for a, b in zip(results, expected))


@pytest.mark.lanes("gpu")
def test_a_refused_team_is_set_aside(lane, clean_registry, seed):
    """More programs than can be resident: the driver refuses, the next layer answers, nothing hangs."""
    sample = make(registry.get_op("rms_norm"), WIDE, torch.bfloat16, lane.device, seed)
    dy = torch.randn_like(sample.args[0])
    expected = _all("rms_norm", sample, dy)
    with registry.override("rms_norm.bwd", _config(4096, 8, 32)):
        found = _all("rms_norm", sample, dy)
        (why,) = clean_registry.quarantined().values()
        assert "cooperative launch" in why
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    clean_registry.release(clean_registry.quarantined())
