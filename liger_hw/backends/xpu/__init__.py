"""Intel GPUs, through torch.xpu.

Limits: Intel oneAPI GPU Optimization Guide (sub-group sizes, modes of the general register file (GRF), shared local
memory of a work-group; "Intel Xe GPU Architecture": vector engines of an Xe-core, eight hardware threads each, one
sub-group a thread). Numbers of a device are read from torch.xpu's device properties. One torch device is one tile
(stack) of a Max 1550. PCI device ids: Linux, include/drm/intel/pciids.h. They give the architecture if the name does
not, as in "Intel(R) Graphics [0x64a0]", which is Lunar Lake.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ..base import KIB, MIB, Arch, Backend, Device, LaunchConfig, Pace, Target

GRF_MODES = ("default", "128", "256", "auto")
_SUB_GROUP = 32
_THREADS_AN_ENGINE = 8
_REGISTERS = 512 * KIB // 4  # of a Xe-core: 64 threads x 128 of 64 bytes, on Arc A-series 128 threads x 128 of 32 bytes
_LARGE_GRF_SUB_GROUPS = 32
"""Most sub-groups of a work-group in the large register mode: 8 vector engines of 4 threads."""
_SMALL_GRF_TILE = 16
"""Most elements of a tile for each work-item in the small register mode."""
_NAMES = {"pvc": ("Max",), "acm": ("A770", "A750"), "bmg": ("B580", "B570", "B60", "B50")}
_DEVICE_IDS = {0x0B: "pvc", 0x56: "acm", 0xE2: "bmg", 0x64: "lnl"}


def _arch(family: str, engines: int, sub_groups: tuple[int, ...], slm: int, clock: float) -> Arch:
    """A row of `archs`. engines: vector engines of a Xe-core; slm: bytes of shared local memory."""
    return Arch(family, sub_groups, slm, _REGISTERS, engines * _THREADS_AN_ENGINE * _SUB_GROUP, clock)


def arch_of(properties: Any) -> str:
    """The architecture by the device's name or PCI id or, if neither is known, its sub-group sizes and Xe-cores."""
    for arch, words in _NAMES.items():
        if any(word in properties.name for word in words):
            return arch
    id_in_name = re.search(r"\[0x([0-9a-f]+)\]", properties.name.lower())
    device_id = getattr(properties, "device_id", None) or (int(id_in_name[1], 16) if id_in_name else 0)
    if device_id >> 8 in _DEVICE_IDS:
        return _DEVICE_IDS[device_id >> 8]
    if 8 in getattr(properties, "sub_group_sizes", ()):
        return "acm"
    return "lnl" if getattr(properties, "gpu_subslice_count", 0) <= 8 else "bmg"


class XpuBackend(Backend):
    vendor = "xpu"
    device_type = "xpu"
    torch_version = "xpu"
    compiler = "intel"
    archs = {  # clocks are the highest graphics clocks of the data sheets
        "pvc": _arch("xe-hpc", 8, (16, 32), 128 * KIB, clock=1.6),
        "acm": _arch("xe", 16, (8, 16, 32), 64 * KIB, clock=2.4),
        "bmg": _arch("xe2", 8, (16, 32), 128 * KIB, clock=2.85),
        "lnl": _arch("xe2", 8, (16, 32), 128 * KIB, clock=2.05),
    }
    devices = {  # a row is one torch device
        "Max 1550": Device("Intel(R) Data Center GPU Max 1550", "pvc", 64, 192 * MIB, 1638),
        "A770": Device("Intel(R) Arc(TM) A770 Graphics", "acm", 32, 16 * MIB, 560),
        "B580": Device("Intel(R) Arc(TM) B580 Graphics", "bmg", 20, 18 * MIB, 456),
        "Lunar Lake": Device("Intel(R) Arc(TM) Graphics (Lunar Lake)", "lnl", 8, 8 * MIB, 136),
    }
    options = frozenset({"grf_mode"})

    def target_from_properties(self, properties: Any) -> Target:
        name = arch_of(properties)
        arch, device = self.archs[name], self._known(name)
        sizes = tuple(sorted(getattr(properties, "sub_group_sizes", arch.warp_sizes)))
        sub_group = _SUB_GROUP if _SUB_GROUP in sizes else sizes[-1]
        cores = properties.gpu_subslice_count
        threads = getattr(properties, "gpu_eu_count", 0) // cores * _THREADS_AN_ENGINE * sub_group
        return self.target(
            name,
            arch,
            device,
            name=properties.name,
            multiprocessors=cores,
            warp_size=sub_group,
            warp_sizes=sizes,
            max_threads=min(getattr(properties, "max_work_group_size", 1024), 1024),
            shared_memory=getattr(properties, "local_mem_size", arch.shared_memory),
            l2=getattr(properties, "last_level_cache_size", device.l2),
            max_threads_per_multiprocessor=threads or arch.max_threads,
        )

    def illegal_here(self, target: Target, config: LaunchConfig) -> str | None:
        mode = str(config.vendor.get("grf_mode", "default"))
        if mode not in GRF_MODES:
            return f"grf_mode={mode!r} is not one of {', '.join(GRF_MODES)}"
        if mode == "256" and config.num_warps > _LARGE_GRF_SUB_GROUPS:
            return f"grf_mode=256 needs num_warps <= {_LARGE_GRF_SUB_GROUPS}, got {config.num_warps}"
        return None

    def lower(self, config: LaunchConfig) -> dict[str, Any]:
        """The large register mode is used for tiles that do not fit the small one, unless `config` has a grf_mode.

        A vector engine has 128 registers of 64 bytes for each of 8 threads, or 256 for each of 4: a work-item of a
        sub-group of 32 holds 64 or 128 values (oneAPI GPU Optimization Guide, "Small Register Mode vs. Large Register
        Mode"). A row kernel needs registers for two to three fp32 tiles and for addresses.
        """
        options = super().lower(config)
        tile = math.prod(config.blocks.values())
        needs_large = tile > _SMALL_GRF_TILE * config.num_warps * _SUB_GROUP
        if "grf_mode" not in options and needs_large and config.num_warps <= _LARGE_GRF_SUB_GROUPS:
            options["grf_mode"] = "256"
        return options

    def pace(self, target: Target) -> Pace:
        """An Xe-core computes 128 fp32 lanes a cycle, in engines of 16 (of 8 on Arc A-series), so that it issues four
        instructions of sub-groups of 32 a cycle ("Intel Xe GPU Architecture"). The latency is assumed."""
        return Pace(self.archs[target.arch].clock, 4.0, 700.0, virtual=True)

    def load_hint(self, hint: str) -> tuple[str, str]:
        return "", {"none": "", "stream": "evict_first", "keep": "evict_last"}[hint]


BACKEND = XpuBackend()
