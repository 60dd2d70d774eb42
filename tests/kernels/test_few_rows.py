"""Norms of few rows: the launches they take, their threads, and gradients by grids as large as a GPU's."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from harness import make, verify

from liger_hw import registry
from liger_hw.autotune import compile as aot
from liger_hw.backends import known_target

_ROWS = ((2, 37), (19, 131))
FEW = {
    **dict.fromkeys(("rms_norm", "fused_add_rms_norm", "layer_norm", "dyt", "softmax"), _ROWS),
    "modulated_rms_norm": ((1, 5, 37), (3, 21, 40), (7, 7, 37), (2, 4, 1290)),
}


@pytest.mark.cpu
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_launches(arch):
    """A launch that sums parameter gradients is only there where several programs leave partial sums."""
    target = known_target(arch)

    def launches(name: str, *sizes: int) -> list[str]:
        traced = aot.trace(name, sizes, torch.bfloat16, target, shipped=False)
        return [launch.tunable.removeprefix(f"{name}.") for launch in traced]

    for name in ("rms_norm", "fused_add_rms_norm", "layer_norm"):
        for rows in (1, 2, 16, 128):
            assert launches(name, rows, 4096) == ["fwd", "bwd"], (name, rows)
        assert launches(name, 7, 4097) == ["fwd", "bwd"]
        assert launches(name, 1000, 4096) == ["fwd", "bwd", "dw"], name
    for mods, rows in ((1, 1), (1, 16), (8, 16), (32, 128), (128, 128)):
        assert launches("modulated_rms_norm", mods, rows, 1152) == ["fwd", "bwd"], (mods, rows)
    if arch == "sm90":  # another device may have more programs, whose sums do not fit one tile
        assert launches("modulated_rms_norm", 10, 1000, 1152) == ["fwd", "bwd", "bwd_all_sums"]
        assert launches("modulated_rms_norm", 32, 128, 4096) == ["fwd", "bwd", "bwd_all_sums"]
    assert launches("modulated_rms_norm", 600, 6000, 1152) == ["fwd", "bwd", "bwd_sums", "dw"]
    assert launches("dyt", 1, 512) == ["fwd", "bwd"] and launches("dyt", 16, 4096) == ["fwd", "bwd", "dw"]


@pytest.mark.cpu
@pytest.mark.parametrize("arch", ["sm90", "sm120", "gfx942", "gfx1100", "bmg"])
def test_threads(arch):
    """What the H200's times say of threads holds for threads, however many make a warp; and for few rows only."""
    target = known_target(arch)

    def tiles(name: str, rows: int, columns: int) -> list[tuple[int, int]]:
        """(rows, threads) of a program, forward and backward."""
        traced = aot.trace(name, (rows, columns), torch.bfloat16, target, shipped=False)[:2]
        return [(one.config.blocks["ROWS"], one.config.num_warps * target.warp_size) for one in traced]

    for name in ("rms_norm", "fused_add_rms_norm", "layer_norm"):
        assert tiles(name, 1, 512) == [(1, 128), (1, 128)], name
        assert tiles(name, 16, 4096) == [(1, 256), (1, 128)], name
        assert tiles(name, 16, 5120) == [(1, 256), (1, 256)], name
    few = 2 * target.multiprocessors + 1
    assert tiles("softmax", few, 777) == [(1, 128), (1, 128)]
    assert tiles("softmax", 16, 4096) == [(1, 256), (1, 256)]
    assert tiles("softmax", max(64 * few, 8193), 777)[0][0] == 2
    if arch == "sm90":
        assert tiles("dyt", 128, 14336) == [(1, 128), (128, 256)] and tiles("dyt", 512, 2048)[0] == (4, 32)


@pytest.mark.parametrize(("name", "sizes"), [(name, sizes) for name in FEW for sizes in FEW[name]])
@pytest.mark.lanes("interpret", "gpu")
def test_few_rows(lane, name, sizes, dtype, seed, clean_registry):
    """A GPU's own grids, where they differ most from those of the interpreter's two multiprocessors."""
    op = registry.get_op(name)
    with nullcontext() if lane.name == "gpu" else registry.pretend(known_target("sm90")):
        for options in op.options or ({},):
            verify(op, make(op, sizes, dtype, lane.device, seed, options), seed)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "modulated_rms_norm"])
@pytest.mark.lanes("interpret", "gpu")
def test_frozen_parameters(lane, name, seed, clean_registry):
    """The gradient of x alone, to the same bits."""
    op, target = registry.get_op(name), known_target("sm90")
    sizes = (3, 21, 131) if name == "modulated_rms_norm" else (19, 131)

    def dx(frozen: bool) -> torch.Tensor:
        args = make(op, sizes, torch.float32, lane.device, seed).args
        args = [a.detach() if frozen and i and isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]
        with nullcontext() if lane.name == "gpu" else registry.pretend(target):
            y = op.function(*args)
            return torch.autograd.grad(y, args[0], torch.ones_like(y))[0]

    assert torch.equal(dx(False), dx(True))
