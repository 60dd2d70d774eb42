"""The compiled code of a few kernels: registers, widths of accesses, waits, residency."""

from __future__ import annotations

import pytest
import torch
import triton

from liger_hw.autotune import compile as aot
from liger_hw.autotune.workers import CompilePool
from liger_hw.backends import known_target
from liger_hw.kernels.norms import group_norm

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def workers():
    with CompilePool(1) as workers:
        yield workers


# -- kernels that are launched early ----------------------------------------------------------------------------------

ACCESSES = ("ld.global", "st.global", "cp.async.cg", "cp.async.ca", "atom.")


def _ptx(launch) -> str:
    return aot.build(launch.target, launch.kernel, launch.args, dict(launch.options)).asm["ptx"]


@pytest.mark.parametrize("few, sizes", [(True, (1, 512)), (False, (1024, 2048))], ids=["few", "many"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "dyt"])
def test_waits_where_it_is_early(op, few, sizes):
    for one in aot.trace(op, sizes, torch.bfloat16, known_target("sm90"), shipped=False):
        ptx, early = _ptx(one), dict(one.options).get("launch_pdl", False)
        assert early == (few), one.tunable
        if early:
            wait, come = (ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
            assert wait < come < min(place for place in map(ptx.find, ACCESSES) if place >= 0), one.tunable
        else:
            assert "griddepcontrol" not in ptx, one.tunable


# -- programs that wait for one another are resident ------------------------------------------------------------------

OTHERS = ((16, 32, 1024, 320), (32, 32, 256, 1280), (4, 32, 4096, 1280), (3, 32, 197, 1280), (4, 32, 121, 1920))
SPILLS = 16  # 11 x 11 places of 60 channels on sm86 with Triton 3.6: 96 registers for five programs a multiprocessor
ROWS = ((2048, 65536), (1024, 16384))


def _teams(op, sizes, dtype, target) -> set:
    launches = aot.trace(op, sizes, dtype, target, shipped=False)
    return {one for one in launches if "launch_cooperative_grid" in dict(one.options)}


# The dtype that models train in, for one architecture; the others are for LANES=full.
@pytest.mark.daily(dtype="bfloat16", arch="sm90")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "sm120"])
def test_a_team_is_resident(arch, dtype, workers):
    target, found = known_target(arch), {}
    for sizes in (*group_norm.WORKLOADS.values(), *OTHERS):
        found |= {one: sizes for one in _teams("group_norm", sizes, dtype, target)}
    for op in ("rms_norm", "fused_add_rms_norm", "layer_norm"):
        for sizes in ROWS:
            found |= {one: sizes for one in _teams(op, sizes, dtype, target)}
    names = {"group_norm.fwd", "group_norm.bwd", "rms_norm.bwd", "fused_add_rms_norm.bwd", "layer_norm.bwd"}
    assert {one.tunable for one in found} == names
    for certificate in aot.certify(found, workers):
        assert certificate.ok and certificate.resources.spills <= SPILLS, str(certificate)
        resources, config = certificate.resources, certificate.launch.config
        fit = round(resources.occupancy * target.max_threads_per_multiprocessor) // resources.threads
        assert fit >= config.ctas_per_mp, f"{found[certificate.launch]}: {fit} of {certificate}"


# -- losses of rows that begin anywhere are accessed 16 bytes at a time -----------------------------------------------

CASES = [
    ("cross_entropy", torch.bfloat16),
    ("kl_div", torch.float32),
    ("jsd", torch.bfloat16),
    ("fused_ce_tvd", torch.bfloat16),
    ("vocab_parallel_cross_entropy", torch.bfloat16),
]


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[op for op, _ in CASES])
def test_an_odd_width_is_accessed_as_wide(op, dtype, arch, workers):
    """49155 columns (Granite's vocabulary) and 49152 have as many wide instructions; only edges take narrow ones."""

    def rows(n_cols):
        launches = aot.trace(op, (4097, n_cols), dtype, known_target(arch), shipped=False)
        certified = list(aot.certify([one for one in launches if one.key and one.key[0] == 65536], workers))
        assert certified and all(one.ok for one in certified), certified
        return [one.resources for one in certified if one.launch.tunable.startswith(op)]

    for odd, even in zip(rows(49155), rows(49152), strict=True):
        assert odd.spills == 0
        assert (odd.loads.get(128), odd.stores.get(128)) == (even.loads.get(128), even.stores.get(128))
        narrow = [sum(taken.values()) - taken.get(128, 0) for taken in (odd.loads, odd.stores, even.loads, even.stores)]
        assert narrow[0] <= narrow[2] + 4 and narrow[1] <= narrow[3] + 4
        assert odd.registers <= even.registers + 32


# -- rows in two pieces -----------------------------------------------------------------------------------------------

SCRATCH = 128
"""Bytes for the partial sums that warps exchange: 4 a warp and sum, twice, and room."""


@pytest.mark.parametrize("n_cols", [2304, 2560, 5120])
@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm", "layer_norm"])
def test_a_narrow_second_piece_moves_nothing(op, n_cols, workers):
    """A program with one row keeps its statistics as numbers. As tensors they would have the second piece's layout, and
    the first piece would go through shared memory into that layout."""
    launches = aot.trace(op, (8192, n_cols), torch.bfloat16, known_target("sm90"), shipped=False)
    forward = [one for one in launches if one.tunable == f"{op}.fwd"]
    assert forward and all(one.config.blocks["ROWS"] == 1 for one in forward)
    for made in aot.certify(forward, workers):
        assert made.ok, made
        in_flight = 2 * n_cols * (made.launch.config.num_stages - 1)  # of a loop's loads
        assert made.resources.shared <= in_flight + SCRATCH, f"{made}: {made.resources.shared} bytes of shared memory"


# -- a row of softmax that is kept in 16 bits -------------------------------------------------------------------------

RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])


@pytest.mark.xfail(RELEASE >= (3, 8), reason="from Triton 3.8 on it takes 59 registers", strict=True)
def test_two_programs_fit_at_32768_columns(workers):
    """1024 threads of 32 registers are half a multiprocessor; with 64, only one program at a time fits."""
    target = known_target("sm90")
    launches = aot.trace("softmax", (8192, 32768), torch.bfloat16, target, shipped=False)
    (made,) = aot.certify([one for one in launches if one.tunable == "softmax.fwd"], workers)
    assert made.ok, made
    assert made.resources.occupancy == 1, made.resources
