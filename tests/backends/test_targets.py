"""Targets from the properties torch reports (recorded.py): every fact a launch depends on."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from recorded import CUDA, DEVICES, KIB, MIB, ROCM, XPU

from liger_hw.backends import VENDORS, Target, backend, known_target, target_of
from liger_hw.backends.base import HINTS

# vendor, device -> arch, family, multiprocessors, warp sizes, warp, threads a block, of a multiprocessor,
#                   shared memory a block, registers, L2 (bytes), GB/s
FACTS = {
    ("cuda", "A100"): ("sm80", "ampere", 108, (32,), 32, 1024, 2048, 163 * KIB, 65536, 40 * MIB, 2039),
    ("cuda", "H100"): ("sm90", "hopper", 132, (32,), 32, 1024, 2048, 227 * KIB, 65536, 50 * MIB, 3350),
    ("cuda", "H200"): ("sm90", "hopper", 132, (32,), 32, 1024, 2048, 227 * KIB, 65536, 60 * MIB, 4800),
    ("cuda", "B200"): ("sm100", "blackwell", 148, (32,), 32, 1024, 2048, 227 * KIB, 65536, 126 * MIB, 8000),
    ("cuda", "RTX 4090"): ("sm89", "ada", 128, (32,), 32, 1024, 1536, 99 * KIB, 65536, 72 * MIB, 1008),
    ("cuda", "RTX 5090"): ("sm120", "blackwell-consumer", 170, (32,), 32, 1024, 1536, 99 * KIB, 65536, 96 * MIB, 1792),
    ("rocm", "MI250X"): ("gfx90a", "cdna2", 110, (64,), 64, 1024, 2048, 64 * KIB, 131072, 8 * MIB, 1638),
    ("rocm", "MI300X"): ("gfx942", "cdna3", 304, (64,), 64, 1024, 2048, 64 * KIB, 131072, 4 * MIB, 5300),
    ("rocm", "MI355X"): ("gfx950", "cdna4", 256, (64,), 64, 1024, 2048, 160 * KIB, 131072, 4 * MIB, 8000),
    ("rocm", "RX 7900 XTX"): ("gfx1100", "rdna3", 48, (32,), 32, 1024, 2048, 64 * KIB, 196608, 6 * MIB, 960),
    ("rocm", "RX 9070 XT"): ("gfx1201", "rdna4", 32, (32,), 32, 1024, 2048, 64 * KIB, 196608, 8 * MIB, 640),
    ("xpu", "Max 1550"): ("pvc", "xe-hpc", 64, (16, 32), 32, 1024, 2048, 128 * KIB, 131072, 192 * MIB, 1638),
    ("xpu", "Arc B580"): ("bmg", "xe2", 20, (16, 32), 32, 1024, 2048, 128 * KIB, 131072, 18 * MIB, 456),
    ("xpu", "Arc A770"): ("acm", "xe", 32, (8, 16, 32), 32, 1024, 4096, 64 * KIB, 131072, 16 * MIB, 560),
    ("xpu", "Lunar Lake"): ("lnl", "xe2", 8, (16, 32), 32, 1024, 2048, 128 * KIB, 131072, 8 * MIB, 136),
}
ALL = [(vendor, name) for vendor, devices in DEVICES.items() for name in devices]


def _target(vendor: str, name: str) -> Target:
    return backend(vendor).target_from_properties(DEVICES[vendor][name])


def test_every_recorded_device_has_its_facts():
    assert set(FACTS) == set(ALL)


@pytest.mark.parametrize(("vendor", "name"), ALL)
def test_facts(vendor, name):
    target = _target(vendor, name)
    found = (
        *(target.arch, target.family, target.multiprocessors, target.warp_sizes, target.warp_size, target.max_threads),
        *(target.max_threads_per_multiprocessor, target.shared_memory, target.registers, target.l2, target.bandwidth),
    )
    assert found == FACTS[vendor, name]
    assert target.vendor == vendor and target.name == DEVICES[vendor][name].name
    assert target.max_warps == target.max_threads // target.warp_size
    assert type(target).from_json(json.loads(json.dumps(target.to_json()))) == target


@pytest.mark.parametrize(("vendor", "name"), [pair for pair in ALL if pair[0] != "xpu"])
def test_an_older_torch_leaves_fields_out(vendor, name):
    """Optional fields of newer torch releases fall back on the architecture's figures."""
    full = DEVICES[vendor][name]
    optional = {"L2_cache_size", "regs_per_multiprocessor", "max_threads_per_block"}
    optional |= {field for field in vars(full) if field.startswith("shared_memory")}
    old = SimpleNamespace(**{k: v for k, v in vars(full).items() if k not in optional})
    target, real = backend(vendor).target_from_properties(old), _target(vendor, name)
    for fact in ("arch", "multiprocessors", "warp_size", "max_threads", "shared_memory", "registers", "family"):
        assert getattr(target, fact) == getattr(real, fact), fact


@pytest.mark.parametrize(("vendor", "name"), ALL)
def test_a_device_is_known_by_its_name(vendor, name):
    """The Target is that of torch's properties. For NVIDIA the name, which finds the shipped table, is the same too."""
    real, known = _target(vendor, name), known_target(name.removeprefix("Arc "))
    same = known if vendor == "cuda" else replace(known, name=real.name)
    assert same == real
    typed = name.removeprefix("Arc ").lower().replace(" ", "")
    assert known_target(typed) == known and typed in backend(vendor).known_devices()


def test_which_device_is_meant():
    cuda, rocm = backend("cuda"), backend("rocm")
    h100, h200 = known_target("h100"), known_target("h200")
    assert h100 == known_target("sm90") != h200 and h100.arch == h200.arch
    assert cuda.is_called(h200, "H200") and cuda.is_called(h200, "SM90") and not cuda.is_called(h200, "h100")
    assert cuda.device_named("NVIDIA H100 PCIe").name == h100.name  # which is told by its multiprocessors
    assert cuda.device_named("NVIDIA GH200 480GB") is None is cuda.device_named("NVIDIA GeForce RTX 4080")
    mi300x, mi325x = known_target("gfx942"), known_target("mi325x")
    assert replace(mi300x, name=mi325x.name, bandwidth=6000) == mi325x
    newer = SimpleNamespace(**{**vars(ROCM["MI300X"]), "name": "AMD Instinct MI325X"})
    assert rocm.target_from_properties(newer) == mi325x


def test_amd_feature_flags_are_cut():
    assert _target("rocm", "MI300X").arch == "gfx942" and known_target("gfx942:sramecc+:xnack-").arch == "gfx942"


def test_amd_registers_do_not_depend_on_the_driver():
    """ROCm releases report different numbers for one device, and a Target decides which table answers."""
    older = SimpleNamespace(**vars(ROCM["MI250X"]))
    newer = SimpleNamespace(**{**vars(older), "regs_per_multiprocessor": 131072})
    assert backend("rocm").target_from_properties(older) == backend("rocm").target_from_properties(newer)


def test_unknown_devices_get_their_neighbours_limits():
    cuda, rocm, xpu = backend("cuda"), backend("rocm"), backend("xpu")
    gb10 = SimpleNamespace(**{**vars(CUDA["RTX 5090"]), "name": "NVIDIA GB10", "minor": 1, "multi_processor_count": 48})
    assert cuda.target_from_properties(gb10).arch == "sm121"
    assert cuda.target_from_properties(gb10).family == "blackwell-consumer"
    rdna2 = SimpleNamespace(**{**vars(ROCM["RX 7900 XTX"]), "name": "AMD Radeon RX 6900 XT", "gcnArchName": "gfx1030"})
    target = rocm.target_from_properties(rdna2)
    assert (target.arch, target.family, target.shared_memory) == ("gfx1030", "wave32", 64 * KIB)
    older_driver = SimpleNamespace(**{**vars(XPU["Arc A770"]), "name": "Intel(R) Graphics [0x56a0]"})
    assert xpu.target_from_properties(older_driver).arch == "acm"
    ponte_vecchio = SimpleNamespace(**{**vars(XPU["Max 1550"]), "name": "Intel(R) Graphics [0x0bd5]"})
    assert xpu.target_from_properties(ponte_vecchio).arch == "pvc"


def test_families_never_cross_warp_sizes():
    sizes: dict[str, set[int]] = {}
    for vendor in VENDORS:
        for arch in backend(vendor).known_archs():
            target = known_target(arch)
            sizes.setdefault(target.family, set()).add(target.warp_size)
    assert all(len(found) == 1 for found in sizes.values()), sizes


def test_warps():
    """About `per_thread` elements a thread, within the device's block, `most` counted in warps of 32."""
    sm90, gfx942 = known_target("sm90"), known_target("gfx942")
    assert sm90.warps(4096, 16) == 8 and gfx942.warps(4096, 16) == 4
    assert sm90.warps(1 << 20, 1) == 32 and gfx942.warps(1 << 20, 1) == 16
    assert sm90.warps(1 << 20, 1, 8) == 8 and gfx942.warps(1 << 20, 1, 8) == 4
    assert sm90.warps(3, 16) == 1


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="gfx942.*pvc.*h200.*mi300x.*max1550"):
        known_target("gfx9000")
    with pytest.raises(ValueError, match="cuda, rocm, xpu, cpu"):
        backend("metal")


def test_devices_without_a_backend_are_refused():
    import torch

    with pytest.raises(ValueError, match="no backend for device 'meta'"):
        target_of(torch.device("meta"))


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_load_hint_is_never_a_cache_modifier_and_an_eviction_policy(vendor):
    for hint in HINTS:
        cache, evict = backend(vendor).load_hint(hint)
        assert not (cache and evict), "PTXAS refuses both on one load"
        assert cache in ("", ".ca", ".cg"), "load_with_hint takes any other hint for an eviction policy"
    assert backend(vendor).load_hint("none") == ("", "")


@pytest.mark.gpu
def test_the_device_here(gpu):
    """The real device's Target is complete and agrees with its architecture's limits."""
    import torch

    target = target_of(torch.device(gpu))
    known = known_target(target.arch)
    assert target.warp_size in target.warp_sizes and target.multiprocessors > 0 and target.l2 > 0
    assert target.shared_memory == known.shared_memory and target.max_threads == known.max_threads
    assert target.registers == known.registers, target
