"""NVIDIA GPUs.

Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability" (threads a block, 255 registers
a thread, registers and shared memory a multiprocessor); shared memory a block is read from the device.
Devices: what torch prints of them in public logs (tests/backends/recorded.py; the H200 is ours), GB/s from the data sheets.
"""

from __future__ import annotations

from typing import Any

from ..base import Backend, Device, LaunchConfig, Pace, Resources, Target

KIB, MIB = 1024, 1024 * 1024

# compute capability -> (opt-in shared memory a block, threads an SM)
_ARCHS = {
    "sm80": (163 * KIB, 2048),
    "sm86": (99 * KIB, 1536),
    "sm89": (99 * KIB, 1536),
    "sm90": (227 * KIB, 2048),
    "sm100": (227 * KIB, 2048),
    "sm120": (99 * KIB, 1536),
}
_DEVICES = {
    "A100": Device("NVIDIA A100-SXM4-80GB", "sm80", 108, 40 * MIB, 2039),
    "RTX A6000": Device("NVIDIA RTX A6000", "sm86", 84, 6 * MIB, 768),
    "RTX 4090": Device("NVIDIA GeForce RTX 4090", "sm89", 128, 72 * MIB, 1008),
    "H100": Device("NVIDIA H100 80GB HBM3", "sm90", 132, 50 * MIB, 3350),
    "H200": Device("NVIDIA H200", "sm90", 132, 60 * MIB, 4800),
    "B200": Device("NVIDIA B200", "sm100", 148, 126 * MIB, 8000),
    "RTX 5090": Device("NVIDIA GeForce RTX 5090", "sm120", 170, 96 * MIB, 1792),
}
_CLOCKS = {"sm80": 1.41, "sm86": 1.80, "sm89": 2.52, "sm90": 1.755, "sm100": 1.85, "sm120": 2.41}
"""GHz under load, from the data sheets' boost clocks; the H200's (sm90) is what it held in our runs."""
_LATENCY = 600.0
"""Nanoseconds until memory answers: fitted on the H200 (autotune/model.py), assumed elsewhere."""
_FAMILIES = {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell-consumer"}


def _family(major: int, minor: int) -> str:
    return "ada" if (major, minor) == (8, 9) else _FAMILIES.get(major, f"sm{major}x")


class CudaBackend(Backend):
    vendor = "cuda"
    device_type = "cuda"
    devices = _DEVICES
    options = frozenset({"launch_cooperative_grid", "maxnreg", "num_ctas"})
    fast_launch = True
    convolves_channels_last = True
    gemm_alignment = 16  # cuBLAS: 16-byte loads only
    gemm_even_steps_above = 6  # cuBLAS: tall products in multiples of 512 rows
    fast_log2 = True  # one instruction (2^-22 near 1); tl.log2 is a polynomial of about 28

    def present(self) -> bool:
        import torch

        return torch.version.cuda is not None

    def properties(self, index: int) -> Any:
        import torch

        return torch.cuda.get_device_properties(index)

    def target_from_properties(self, properties: Any) -> Target:
        major, minor = properties.major, properties.minor
        arch = f"sm{major}{minor}"
        like = next(name for name in (arch, f"sm{major}0", "sm80") if name in _ARCHS)
        shared = getattr(properties, "shared_memory_per_block_optin", None) or _ARCHS[like][0]
        device = self.device_named(properties.name)
        return Target(
            vendor=self.vendor,
            arch=arch,
            name=properties.name,
            multiprocessors=properties.multi_processor_count,
            warp_size=properties.warp_size,
            warp_sizes=(properties.warp_size,),
            max_threads=getattr(properties, "max_threads_per_block", 1024),
            shared_memory=shared,
            registers=getattr(properties, "regs_per_multiprocessor", 65536),
            l2=getattr(properties, "L2_cache_size", (device or self._known(like)).l2),
            bandwidth=device.bandwidth if device else 0,
            family=_family(major, minor),
            max_threads_per_multiprocessor=properties.max_threads_per_multi_processor,
            cooperative=True,
        )

    def target_of_device(self, device: Device) -> Target:
        shared, threads = _ARCHS[device.arch]
        return Target(
            vendor=self.vendor,
            arch=device.arch,
            name=device.name,
            multiprocessors=device.multiprocessors,
            warp_size=32,
            warp_sizes=(32,),
            max_threads=1024,
            shared_memory=shared,
            registers=65536,
            l2=device.l2,
            bandwidth=device.bandwidth,
            family=_family(*divmod(int(device.arch[2:]), 10)),
            max_threads_per_multiprocessor=threads,
            cooperative=True,
        )

    def illegal_here(self, target: Target, config: LaunchConfig) -> str | None:
        if config.vendor.get("num_ctas", 1) != 1:
            return "num_ctas > 1 does not compile on a row reduction (TritonGPUPlanCTA fails, seen with Triton 3.6 on sm90)"
        maxnreg = config.vendor.get("maxnreg")
        if maxnreg is not None and (type(maxnreg) is not int or not 16 <= maxnreg <= 255 or maxnreg % 8):
            return f"maxnreg={maxnreg!r} is not a multiple of 8 in 16..255"
        return None

    def load_hint(self, hint: str) -> tuple[str, str]:
        return "", {"none": "", "stream": "evict_first", "keep": "evict_last"}[hint]

    def ahead(self, target: Target) -> dict[str, Any]:
        return {"launch_pdl": True} if int(target.arch[2:]) >= 90 else {}

    def triton_target(self, target: Target) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(target.arch[2:]), 32)

    def pace(self, target: Target) -> Pace:
        """Four schedulers of an SM issue one instruction a cycle each (CUDA C++ Programming Guide, "Compute Capabilities")."""
        return Pace(_CLOCKS.get(target.arch, 1.755), 4.0, _LATENCY, virtual=True)

    def resources(self, target: Target, compiled: Any) -> Resources:
        from .binary import resources

        return resources(target, compiled)


BACKEND = CudaBackend()
