"""What each vendor's rules refuse, with the reason, and what they let pass. The documents are cited in the backends."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from liger_hw import registry
from liger_hw.backends import LaunchConfig, backend, known_target
from liger_hw.backends.base import Resources

KIB = 1024


def _refusal(arch: str, config: LaunchConfig, shared: int | None = None, warp_size: int | None = None) -> str | None:
    target = known_target(arch)
    if warp_size:
        target = replace(target, warp_size=warp_size)
    rules = backend(target.vendor)
    if shared is None:
        return rules.illegal(target, config)
    resources = Resources(registers=16, spills=0, scratch=0, shared=shared, threads=128, occupancy=1.0)
    return rules.illegal(target, config) or rules.illegal_resources(target, resources)


def _config(warps: int = 4, stages: int = 1, ctas: int = 0, **vendor) -> LaunchConfig:
    return LaunchConfig({"BLOCK_SIZE": 1024}, warps, stages, ctas, "none", vendor)


BAD = [
    ("sm90", _config(64), {}, "64 warps of 32 are 2048 threads; sm90 allows 1024"),
    ("gfx942", _config(32), {}, "32 warps of 64 are 2048 threads; gfx942 allows 1024"),
    ("sm90", _config(3), {}, "not a power of two"),
    ("sm90", _config(stages=0), {}, "outside 1..8"),
    ("sm90", _config(ctas=64), {}, "outside 0..32"),
    ("gfx942", _config(), {"shared": 96 * KIB}, "98304 bytes of shared memory; gfx942 has 65536"),
    ("sm90", _config(), {"shared": 228 * KIB}, "sm90 has 232448"),
    ("sm90", _config(num_ctas=2), {}, "does not compile for row reductions"),
    ("sm90", _config(maxnreg=100), {}, "multiple of 8"),
    ("sm90", _config(maxnreg=264), {}, "multiple of 8 in 16..255"),
    ("sm90", _config(waves_per_eu=2), {}, "'waves_per_eu' is unknown to cuda"),
    ("gfx942", _config(maxnreg=128), {}, "'maxnreg' is unknown to rocm"),
    ("gfx942", _config(waves_per_eu=0.5), {}, "0.5 is not one of 0, 1"),
    ("gfx942", _config(waves_per_eu=10), {}, "6, 7, 8 on gfx942"),
    ("gfx1100", _config(waves_per_eu=17), {}, "15, 16 on gfx1100"),
    ("gfx942", _config(matrix_instr_nonkdim=8), {}, "not one of 0, 16, 32"),
    ("gfx1100", _config(matrix_instr_nonkdim=32), {}, "not one of 0, 16 on gfx1100"),
    ("gfx942", _config(kpack=3), {}, "not one of 1, 2"),
    ("gfx950", _config(kpack=2), {}, "not one of 1 on gfx950"),
    ("pvc", _config(64, grf_mode="256"), {"warp_size": 16}, "needs num_warps <= 32, got 64"),
    ("pvc", _config(grf_mode="512"), {}, "'512' is not one of default, 128, 256, auto"),
    ("lnl", _config(waves_per_eu=2), {}, "'waves_per_eu' is unknown to xpu"),
]
GOOD = [
    ("sm90", _config(32), {"shared": 227 * KIB}),
    ("sm80", _config(maxnreg=128, num_ctas=1), {"shared": 163 * KIB}),
    ("gfx942", _config(16, waves_per_eu=4, matrix_instr_nonkdim=16, kpack=2), {"shared": 64 * KIB}),
    ("gfx950", _config(16, kpack=1, matrix_instr_nonkdim=32), {"shared": 96 * KIB}),
    ("gfx1100", _config(32, waves_per_eu=16, matrix_instr_nonkdim=16), {"shared": 64 * KIB}),
    ("pvc", _config(32, grf_mode="256"), {"shared": 128 * KIB}),
    ("pvc", _config(64, grf_mode="128"), {"warp_size": 16}),
]


@pytest.mark.parametrize(("arch", "config", "more", "reason"), BAD)
def test_refused_with_the_reason(arch, config, more, reason):
    assert reason in (_refusal(arch, config, **more) or "it passed")


@pytest.mark.parametrize(("arch", "config", "more"), GOOD)
def test_passes(arch, config, more):
    assert _refusal(arch, config, **more) is None


def test_no_kernel_writes_both_on_one_access():
    """The plan's hint is one of the two, and goes through `load_with_hint`."""
    wrong = []
    for path in sorted((Path(registry.__file__).parent / "kernels").rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if {"cache_modifier", "eviction_policy"} <= {keyword.arg for keyword in call.keywords}:
                wrong.append(f"{path.name}:{call.lineno}")
    assert not wrong, "\n".join(wrong)


def test_which_kernels_multiply_matrices():
    """Intel asks for tensor descriptors where a kernel multiplies matrices; docs/vendors.md says why there are none."""
    for path in sorted((Path(registry.__file__).parent / "kernels").rglob("*.py")):
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        if path.name not in ("products.py", "fused_neighborhood_attention.py", "mhc_coeffs.py"):
            assert not calls & {"tl.dot", "tl.dot_scaled"}, f"{path.name}: load its operands by tensor descriptors"


def test_what_was_compiled_must_fit_a_multiprocessor():
    """A block that needs more registers than a multiprocessor has cannot be launched."""
    sm90, gfx942 = known_target("sm90"), known_target("gfx942")
    greedy = Resources(registers=128, spills=0, scratch=0, shared=0, threads=1024, occupancy=0.0)
    assert "131072; sm90 has 65536" in backend("cuda").illegal_resources(sm90, greedy)
    assert backend("rocm").illegal_resources(gfx942, greedy) is None, "a compute unit has twice the registers"
    assert "98304 bytes" in backend("rocm").illegal_resources(gfx942, replace(greedy, shared=96 * KIB))


@pytest.mark.parametrize(
    "blocks", [{"BLOCK_SIZE": 2**20}, {"BLOCK_SIZE": 2**62, "ROWS": 1}, {"ROWS": 64, "BLOCK_SIZE": 4096}]
)
def test_a_tile_that_no_program_can_hold_is_refused(blocks):
    """The compiler would take minutes to hours; no other rule refuses it."""
    for arch in ("sm90", "gfx942", "pvc"):
        assert "elements for" in _refusal(arch, LaunchConfig(blocks, 4))


def test_the_large_register_file_is_taken_for_large_tiles():
    """Intel's rule: 64 values a work-item in the small mode; a tile of more than 16 elements a work-item takes the
    large."""
    xpu = backend("xpu")
    few, many = LaunchConfig({"BLOCK_SIZE": 4096}, 8), LaunchConfig({"BLOCK_SIZE": 8192, "ROWS": 1}, 8)
    assert "grf_mode" not in xpu.lower(few) and xpu.lower(many)["grf_mode"] == "256"
    assert xpu.lower(replace(many, vendor={"grf_mode": "128"}))["grf_mode"] == "128"
    assert "grf_mode" not in xpu.lower(replace(many, num_warps=64, blocks={"BLOCK_SIZE": 65536}))
