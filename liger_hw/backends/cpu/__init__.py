"""CPUs: ops run their `reference` in plain torch, or their kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

from ..base import KIB, MIB, Arch, Backend, Device, Target


class CpuBackend(Backend):
    vendor = "cpu"
    device_type = "cpu"
    archs = {"cpu": Arch("cpu", (32,), 64 * KIB, 65536, 2048, float8="fn")}
    devices = {"cpu": Device("cpu", "cpu", 2, 32 * MIB, 0)}  # two multiprocessors keep the interpreter's grids small

    def present(self) -> bool:
        return True

    def properties(self, index: int) -> Any:
        return None

    def target_from_properties(self, properties: Any) -> Target:
        return self.target("cpu", self.archs["cpu"], self.devices["cpu"])

    def known_devices(self) -> tuple[str, ...]:
        return ()


BACKEND = CpuBackend()
