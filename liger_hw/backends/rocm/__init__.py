"""AMD GPUs: CDNA (wavefronts of 64) and RDNA (wavefronts of 32).

Limits: AMD CDNA 3 / CDNA 4 and RDNA 3 / RDNA 4 instruction set architecture documents (LDS size, wavefront size, VGPRs)
and HIP's hardware table (1024 threads a block; LDS a block is 64 KiB, 160 KiB on gfx950). Devices: torch's device
properties from public logs, and vendor figures (tests/backends/recorded.py); the MI325X from AMD's data sheet.
torch's device type for AMD is "cuda"; the backend is present if `torch.version.hip` is set.

Multiprocessors are counted as HIP counts them: a compute unit on CDNA, a work-group processor (two compute units, four
SIMDs) on RDNA in its default WGP mode (HIP documentation, "Hardware implementation"; ROCm/hip issues 2687 and 3767).
An RX 7900 XTX of 96 compute units has 48. Registers of a multiprocessor: 512 VGPRs x 64 lanes x 4 SIMDs on CDNA
2 to 4 (accumulation registers included), 1536 x 32 x 4 on gfx1100, gfx1151 and gfx1201 (LLVM AMDGPU user guide,
"Processors"; RDNA 3 ISA, "VGPRs"). They are not read from the device, because ROCm releases report different numbers
for gfx90a.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base import KIB, MIB, Arch, Backend, Device, LaunchConfig, Pace, Target

_REGISTERS = {64: 512 * 64 * 4, 32: 1536 * 32 * 4}
_LATENCY = {64: 800.0, 32: 600.0}
"""Nanoseconds of an access to device memory, by wavefront size. Assumed; longer for CDNA because of its chiplets."""


def _arch(family: str, wavefront: int, lds: int = 64 * KIB, clock: float = 2.1, float8: str = "") -> Arch:
    return Arch(family, (wavefront,), lds, _REGISTERS[wavefront], 2048, clock, float8)


def arch_of(gcn_arch_name: str) -> str:
    """`gfx942:sramecc+:xnack-` -> `gfx942`; launches do not depend on the feature flags."""
    return gcn_arch_name.split(":", 1)[0]


class RocmBackend(Backend):
    vendor = "rocm"
    device_type = "cuda"
    torch_version = "hip"
    compiler = "amd"
    archs = {  # clocks are the data sheets' engine clocks
        "gfx90a": _arch("cdna2", 64, clock=1.7),
        "gfx942": _arch("cdna3", 64, clock=2.1, float8="fnuz"),
        "gfx950": _arch("cdna4", 64, lds=160 * KIB, clock=2.4, float8="fn"),
        "gfx1100": _arch("rdna3", 32, clock=2.5),
        "gfx1151": _arch("rdna3.5", 32, clock=2.9),
        "gfx1201": _arch("rdna4", 32, clock=2.97),
    }
    devices = {  # a row is one torch device, which is half of an MI250X; L2 is counted for one die, as by ROCm
        "MI250X": Device("AMD Instinct MI250X", "gfx90a", 110, 8 * MIB, 1638),
        "MI300X": Device("AMD Instinct MI300X", "gfx942", 304, 4 * MIB, 5300),
        "MI325X": Device("AMD Instinct MI325X", "gfx942", 304, 4 * MIB, 6000),
        "MI355X": Device("AMD Instinct MI355X", "gfx950", 256, 4 * MIB, 8000),
        "RX 7900 XTX": Device("AMD Radeon RX 7900 XTX", "gfx1100", 48, 6 * MIB, 960),
        "8060S": Device("AMD Radeon 8060S", "gfx1151", 20, 2 * MIB, 256),
        "RX 9070 XT": Device("AMD Radeon RX 9070 XT", "gfx1201", 32, 8 * MIB, 640),
    }
    options = frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack"})

    def driver(self, index: int) -> str:
        try:
            return Path("/sys/module/amdgpu/version").read_text().strip()
        except OSError:  # the module of the Linux kernel has no version file
            return ""

    def target_from_properties(self, properties: Any) -> Target:
        name, wavefront = arch_of(properties.gcnArchName), properties.warp_size
        device = self.device_named(properties.name) or self._known(name)
        return self.target(
            name,
            self.archs.get(name) or _arch(f"wave{wavefront}", wavefront),
            device,
            name=properties.name,
            multiprocessors=properties.multi_processor_count,
            max_threads=getattr(properties, "max_threads_per_block", 1024),
            l2=getattr(properties, "L2_cache_size", device.l2 if device else 4 * MIB),
            max_threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        )

    def _known(self, name: str) -> Device | None:
        return super()._known(arch_of(name))

    def illegal_here(self, target: Target, config: LaunchConfig) -> str | None:
        # Integers (LLVM AMDGPU user guide, "amdgpu-waves-per-eu"): a fraction aborts the process in LLVM. A SIMD holds
        # 8 wavefronts on CDNA (ROCm Compute Profiler, "Compute unit") and 16 on RDNA (RDNA 3 ISA, "Wave states").
        waves = range(9 if target.warp_size == 64 else 17)
        # Matrix instructions are 16x16 or 32x32 on CDNA (CDNA 3 ISA, "MFMA"), 16x16 on RDNA (RDNA 3 ISA, "WMMA").
        sizes = (0, 16, 32) if target.warp_size == 64 else (0, 16)
        # Triton's AMD backend replaces kpack by 1 on gfx950 (HIPOptions), so 2 would launch the same kernel.
        packs = (1,) if target.arch == "gfx950" else (1, 2)
        legal = {"waves_per_eu": waves, "matrix_instr_nonkdim": sizes, "kpack": packs}
        for option, values in legal.items():
            value = config.vendor.get(option)
            if value is not None and (type(value) is not int or value not in values):
                return f"{option}={value!r} is not one of {', '.join(map(str, values))} on {target.arch}"
        return None

    def load_hint(self, hint: str) -> tuple[str, str]:
        return {"none": "", "stream": ".cg", "keep": ".ca"}[hint], ""

    def triton_target(self, target: Target) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", target.arch, target.warp_size)

    def pace(self, target: Target) -> Pace:
        """CDNA: a compute unit issues one instruction a cycle, since its four SIMDs take four cycles each for 64
        lanes (ROCm Compute Profiler, "Pipeline descriptions"). RDNA: a work-group processor issues one on each SIMD."""
        arch = self.archs.get(target.arch, self.archs["gfx942"])
        issue = 1.0 if target.warp_size == 64 else 4.0
        return Pace(arch.clock, issue, _LATENCY[target.warp_size], into_registers=True)


BACKEND = RocmBackend()
