"""Intel GPUs, through torch.xpu.

Limits: Intel oneAPI GPU Optimization Guide (sub-group sizes, general register file modes, shared local memory of a
work-group); device numbers are read from torch.xpu's device properties.
"""

from __future__ import annotations

from typing import Any

from ..base import Backend, LaunchConfig, Target

KIB, MIB = 1024, 1024 * 1024
GRF_MODES = ("default", "128", "256", "512", "auto")

# arch -> (representative device, Xe-cores of one torch device, sub-group sizes, work-group size, SLM, cache, GB/s, threads)
_ARCHS = {
    "pvc": ("Intel(R) Data Center GPU Max 1550", 64, (16, 32), 1024, 128 * KIB, 204 * MIB, 1638, 8 * 8 * 16),
    "acm": ("Intel(R) Arc(TM) A770 Graphics", 32, (8, 16, 32), 1024, 64 * KIB, 16 * MIB, 560, 16 * 8 * 8),
    "bmg": ("Intel(R) Arc(TM) B580 Graphics", 20, (16, 32), 1024, 128 * KIB, 18 * MIB, 456, 8 * 8 * 16),
    "lnl": ("Intel(R) Arc(TM) Graphics (Lunar Lake)", 8, (16, 32), 1024, 128 * KIB, 8 * MIB, 136, 8 * 8 * 16),
}
_NAMES = (("Max", "pvc"), ("A770", "acm"), ("A750", "acm"), ("B580", "bmg"), ("B570", "bmg"), ("B60", "bmg"), ("B50", "bmg"))
_SUB_GROUP = 32


def arch_of(properties: Any) -> str:
    """Architecture from the device's name, or from its sub-group sizes when the name is a generic one."""
    for word, arch in _NAMES:
        if word in properties.name:
            return arch
    if 8 in getattr(properties, "sub_group_sizes", ()):
        return "acm"
    return "lnl" if getattr(properties, "gpu_subslice_count", 0) <= 8 else "bmg"


class XpuBackend(Backend):
    vendor = "xpu"
    device_type = "xpu"
    options = frozenset({"grf_mode"})

    def present(self) -> bool:
        import torch

        return getattr(torch.version, "xpu", None) is not None

    def properties(self, index: int) -> Any:
        import torch

        return torch.xpu.get_device_properties(index)

    def target_from_properties(self, properties: Any) -> Target:
        arch = arch_of(properties)
        reference = _ARCHS[arch]
        sizes = tuple(sorted(getattr(properties, "sub_group_sizes", reference[2])))
        return Target(
            vendor=self.vendor,
            arch=arch,
            name=properties.name,
            multiprocessors=properties.gpu_subslice_count,
            warp_size=_SUB_GROUP if _SUB_GROUP in sizes else sizes[-1],
            warp_sizes=sizes,
            max_threads=min(getattr(properties, "max_work_group_size", reference[3]), 1024),
            shared_memory=getattr(properties, "local_mem_size", reference[4]),
            registers=65536,
            l2=getattr(properties, "last_level_cache_size", reference[5]),
            bandwidth=reference[6],
            family="xe" if arch == "acm" else "xe2" if arch in ("bmg", "lnl") else "xe-hpc",
            max_threads_per_multiprocessor=reference[7],
        )

    def known_archs(self) -> tuple[str, ...]:
        return tuple(_ARCHS)

    def known_target(self, arch: str) -> Target | None:
        if arch not in _ARCHS:
            return None
        name, cores, sizes, work_group, slm, cache, bandwidth, threads = _ARCHS[arch]
        return Target(
            vendor=self.vendor,
            arch=arch,
            name=name,
            multiprocessors=cores,
            warp_size=_SUB_GROUP,
            warp_sizes=sizes,
            max_threads=work_group,
            shared_memory=slm,
            registers=65536,
            l2=cache,
            bandwidth=bandwidth,
            family="xe" if arch == "acm" else "xe2" if arch in ("bmg", "lnl") else "xe-hpc",
            max_threads_per_multiprocessor=threads,
        )

    def illegal_here(self, target: Target, config: LaunchConfig) -> str | None:
        mode = config.vendor.get("grf_mode", "default")
        if str(mode) not in GRF_MODES:
            return f"grf_mode={mode!r} is not one of {', '.join(GRF_MODES)}"
        if str(mode) in ("256", "512") and config.num_warps > 32:
            return f"grf_mode={mode} needs num_warps <= 32, got {config.num_warps}"
        return None

    def load_hint(self, hint: str) -> tuple[str, str]:
        return "", {"none": "", "stream": "evict_first", "keep": "evict_last"}[hint]


BACKEND = XpuBackend()
