"""AMD GPUs: CDNA (wavefronts of 64) and RDNA (wavefronts of 32).

Limits: AMD CDNA 3 / CDNA 4 and RDNA 3 / RDNA 4 instruction set architecture documents (LDS size, wavefront size, VGPRs)
and HIP's hardware table (1024 threads a block; LDS a block is 64 KiB, 160 KiB on gfx950).
torch reaches AMD through its "cuda" device type; the backend is told apart by `torch.version.hip`.

A multiprocessor is what HIP counts as one: a compute unit on CDNA, a work-group processor (two compute units, four SIMDs)
on RDNA in its default WGP mode (HIP documentation, "Hardware implementation"; ROCm/hip issues 2687 and 3767), so 48 on an
RX 7900 XTX of 96 compute units. Registers are counted for the same: 512 VGPRs x 64 lanes x 4 SIMDs on CDNA 2 to 4
(accumulation registers included), 1536 x 32 x 4 on gfx1100, gfx1151 and gfx1201 (LLVM AMDGPU user guide, "Processors";
RDNA 3 ISA, "VGPRs"). They are not read from the device: ROCm reported 65536 and, later, 131072 for the same gfx90a.
"""

from __future__ import annotations

from typing import Any

from ..base import Backend, LaunchConfig, Pace, Resources, Target

KIB, MIB = 1024, 1024 * 1024

# arch -> (representative device, multiprocessors of one torch device, wavefront, LDS a block, L2 or last-level cache, GB/s, family)
_ARCHS = {
    "gfx90a": ("AMD Instinct MI250X", 110, 64, 64 * KIB, 8 * MIB, 1638, "cdna2"),
    "gfx942": ("AMD Instinct MI300X", 304, 64, 64 * KIB, 4 * MIB, 5300, "cdna3"),
    "gfx950": ("AMD Instinct MI355X", 256, 64, 160 * KIB, 4 * MIB, 8000, "cdna4"),
    "gfx1100": ("AMD Radeon RX 7900 XTX", 48, 32, 64 * KIB, 6 * MIB, 960, "rdna3"),
    "gfx1151": ("AMD Radeon 8060S", 20, 32, 64 * KIB, 2 * MIB, 256, "rdna3.5"),
    "gfx1201": ("AMD Radeon RX 9070 XT", 32, 32, 64 * KIB, 8 * MIB, 640, "rdna4"),
}
_CLOCKS = {"gfx90a": 1.7, "gfx942": 2.1, "gfx950": 2.4, "gfx1100": 2.5, "gfx1151": 2.9, "gfx1201": 2.97}
"""GHz, the data sheets' engine clocks."""
_LATENCY = {64: 800.0, 32: 600.0}
"""Nanoseconds until memory answers, by wavefront; assumed, not measured by us: chiplets answer later."""


def _registers(wavefront: int) -> int:
    return 4 * (512 * 64 if wavefront == 64 else 1536 * 32)


def arch_of(gcn_arch_name: str) -> str:
    """`gfx942:sramecc+:xnack-` -> `gfx942`: feature flags do not change a launch."""
    return gcn_arch_name.split(":", 1)[0]


class RocmBackend(Backend):
    vendor = "rocm"
    device_type = "cuda"
    options = frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack"})

    def present(self) -> bool:
        import torch

        return torch.version.hip is not None

    def properties(self, index: int) -> Any:
        import torch

        return torch.cuda.get_device_properties(index)

    def target_from_properties(self, properties: Any) -> Target:
        arch = arch_of(properties.gcnArchName)
        reference = _ARCHS.get(arch)
        wavefront = properties.warp_size
        return Target(
            vendor=self.vendor,
            arch=arch,
            name=properties.name,
            multiprocessors=properties.multi_processor_count,
            warp_size=wavefront,
            warp_sizes=(wavefront,),
            max_threads=getattr(properties, "max_threads_per_block", 1024),
            shared_memory=reference[3] if reference else 64 * KIB,
            registers=_registers(wavefront),
            l2=getattr(properties, "L2_cache_size", reference[4] if reference else 4 * MIB),
            bandwidth=reference[5] if reference else 0,
            family=reference[6] if reference else f"wave{wavefront}",
            max_threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        )

    def known_archs(self) -> tuple[str, ...]:
        return tuple(_ARCHS)

    def known_target(self, arch: str) -> Target | None:
        arch = arch_of(arch)
        if arch not in _ARCHS:
            return None
        name, compute_units, wavefront, lds, l2, bandwidth, family = _ARCHS[arch]
        return Target(
            vendor=self.vendor,
            arch=arch,
            name=name,
            multiprocessors=compute_units,
            warp_size=wavefront,
            warp_sizes=(wavefront,),
            max_threads=1024,
            shared_memory=lds,
            registers=_registers(wavefront),
            l2=l2,
            bandwidth=bandwidth,
            family=family,
            max_threads_per_multiprocessor=2048,
        )

    def illegal_here(self, target: Target, config: LaunchConfig) -> str | None:
        # LLVM AMDGPU user guide, "amdgpu-waves-per-eu": an integer; a fraction aborts the process inside LLVM. A SIMD of
        # CDNA holds 8 wavefronts (ROCm Compute Profiler, "Compute unit"), one of RDNA 16 (RDNA 3 ISA, "Wave states").
        most = 8 if target.warp_size == 64 else 16
        waves = config.vendor.get("waves_per_eu")
        if waves is not None and (type(waves) is not int or not 0 <= waves <= most):
            return f"waves_per_eu={waves!r} is not an integer in 0..{most} ({target.arch} holds {most} waves a SIMD)"
        # Matrix instructions of 16x16 or 32x32 on CDNA (CDNA 3 ISA, "MFMA"), 16x16 only on RDNA (RDNA 3 ISA, "WMMA").
        sizes = (0, 16, 32) if target.warp_size == 64 else (0, 16)
        matrix = config.vendor.get("matrix_instr_nonkdim")
        if matrix is not None and (type(matrix) is not int or matrix not in sizes):
            return f"matrix_instr_nonkdim={matrix!r} is not one of {', '.join(map(str, sizes))} on {target.arch}"
        # Triton's AMD backend overwrites kpack with 1 on gfx950 (HIPOptions): 2 would name a kernel that is not launched.
        packs = (1,) if target.arch == "gfx950" else (1, 2)
        kpack = config.vendor.get("kpack")
        if kpack is not None and (type(kpack) is not int or kpack not in packs):
            return f"kpack={kpack!r} is not {' or '.join(map(str, packs))} on {target.arch}"
        return None

    def load_hint(self, hint: str) -> tuple[str, str]:
        return {"none": "", "stream": ".cg", "keep": ".ca"}[hint], ""

    def triton_target(self, target: Target) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", target.arch, target.warp_size)

    def pace(self, target: Target) -> Pace:
        """CDNA: four 16-wide SIMDs take four cycles for a wavefront of 64 each, one a cycle for the compute unit (ROCm
        Compute Profiler, "Pipeline descriptions"). RDNA: the four SIMDs of a work-group processor issue one each."""
        issue = 1.0 if target.warp_size == 64 else 4.0
        return Pace(_CLOCKS.get(target.arch, 2.1), issue, _LATENCY[target.warp_size], into_registers=True)

    def resources(self, target: Target, compiled: Any) -> Resources:
        from .binary import resources

        return resources(target, compiled)


BACKEND = RocmBackend()
