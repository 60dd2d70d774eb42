"""NVIDIA GPUs.

Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability" (threads a block, 255
registers a thread, registers and shared memory a multiprocessor); shared memory a block is read from the device.
Devices: device properties that torch printed in public logs (tests/backends/recorded.py), GB/s from the data sheets.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base import KIB, MIB, Arch, Backend, Device, LaunchConfig, Pace, Target

_LATENCY = 600.0
"""Nanoseconds of an access to device memory: fitted on sm90 (benchmarks/static_regret.py), assumed for others."""


class CudaBackend(Backend):
    vendor = "cuda"
    device_type = "cuda"
    torch_version = "cuda"
    compiler = "nvidia"
    archs = {  # largest opt-in shared memory of a block; boost clock of the data sheets, for sm90 the clock under load
        "sm80": Arch("ampere", (32,), 163 * KIB, 65536, 2048, clock=1.41),
        "sm86": Arch("ampere", (32,), 99 * KIB, 65536, 1536, clock=1.80),
        "sm89": Arch("ada", (32,), 99 * KIB, 65536, 1536, clock=2.52, float8="fn"),
        "sm90": Arch("hopper", (32,), 227 * KIB, 65536, 2048, clock=1.755, float8="fn"),
        "sm100": Arch("blackwell", (32,), 227 * KIB, 65536, 2048, clock=1.85, float8="fn"),
        "sm120": Arch("blackwell-consumer", (32,), 99 * KIB, 65536, 1536, clock=2.41, float8="fn"),
    }
    devices = {
        "A100": Device("NVIDIA A100-SXM4-80GB", "sm80", 108, 40 * MIB, 2039),
        "RTX A6000": Device("NVIDIA RTX A6000", "sm86", 84, 6 * MIB, 768),
        "RTX 4090": Device("NVIDIA GeForce RTX 4090", "sm89", 128, 72 * MIB, 1008),
        "H100": Device("NVIDIA H100 80GB HBM3", "sm90", 132, 50 * MIB, 3350),
        "H200": Device("NVIDIA H200", "sm90", 132, 60 * MIB, 4800),
        "B200": Device("NVIDIA B200", "sm100", 148, 126 * MIB, 8000),
        "RTX 5090": Device("NVIDIA GeForce RTX 5090", "sm120", 170, 96 * MIB, 1792),
    }
    options = frozenset({"launch_cooperative_grid", "maxnreg", "num_ctas"})
    cooperative = True
    fast_launch = True
    convolves_channels_last = True
    gemm_alignment = 16  # cuBLAS's fast GEMMs load 16 bytes at a time
    fast_log2 = True  # one instruction, less accurate near 1; tl.log2 is a polynomial

    def driver(self, index: int) -> str:
        try:
            words = Path("/proc/driver/nvidia/version").read_text().split()
        except OSError:
            return ""
        return next((word for word in words if word[:1].isdigit() and "." in word), "")

    def target_from_properties(self, properties: Any) -> Target:
        major, name = properties.major, f"sm{properties.major}{properties.minor}"
        known_arch = next(arch for arch in (name, f"sm{major}0", "sm80") if arch in self.archs)
        arch, device = self.archs[known_arch], self.device_named(properties.name)
        if known_arch[2:-1] != str(major):
            arch = replace(arch, family=f"sm{major}x")
        return self.target(
            name,
            arch,
            device,
            name=properties.name,
            multiprocessors=properties.multi_processor_count,
            max_threads=getattr(properties, "max_threads_per_block", 1024),
            shared_memory=getattr(properties, "shared_memory_per_block_optin", None) or arch.shared_memory,
            registers=getattr(properties, "regs_per_multiprocessor", arch.registers),
            l2=getattr(properties, "L2_cache_size", (device or self._known(known_arch)).l2),
            max_threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        )

    def illegal_here(self, target: Target, config: LaunchConfig) -> str | None:
        if config.vendor.get("num_ctas", 1) != 1:
            return "num_ctas > 1 does not compile for row reductions (Triton 3.6 fails in TritonGPUPlanCTA)"
        maxnreg = config.vendor.get("maxnreg")
        if maxnreg is not None and (type(maxnreg) is not int or not 16 <= maxnreg <= 255 or maxnreg % 8):
            return f"maxnreg={maxnreg!r} is not a multiple of 8 in 16..255"
        return None

    def load_hint(self, hint: str) -> tuple[str, str]:
        return "", {"none": "", "stream": "evict_first", "keep": "evict_last"}[hint]

    def dependent_launch(self, target: Target) -> dict[str, Any]:
        return {"launch_pdl": True} if int(target.arch[2:]) >= 90 else {}

    def multiplies_from_shared(self, target: Target) -> bool:
        return 90 <= int(target.arch[2:]) < 120  # wgmma and tcgen05; sm120 has neither

    def has_grouped_gemm(self, target: Target) -> bool:
        import torch

        return target.arch in ("sm90", "sm100") and _has_grouped_mm(torch.__version__)

    def triton_target(self, target: Target) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(target.arch[2:]), 32)

    def pace(self, target: Target) -> Pace:
        """Four schedulers of an SM issue one instruction a cycle each (CUDA C++ Programming Guide, "Compute
        Capabilities")."""
        arch = self.archs.get(target.arch, self.archs["sm90"])
        return Pace(arch.clock, 4.0, _LATENCY, virtual=True)


@functools.cache
def _has_grouped_mm(torch_version: Any) -> bool:
    """Whether `_grouped_mm` of this torch accepts groups of any number of rows, also on sm100."""
    return torch_version >= (2, 9)


BACKEND = CudaBackend()
