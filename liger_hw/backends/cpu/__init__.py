"""A machine without a GPU: ops run their `reference` in plain torch, or their kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

from ..base import Backend, Target


class CpuBackend(Backend):
    vendor = "cpu"
    device_type = "cpu"

    def present(self) -> bool:
        return True

    def properties(self, index: int) -> Any:
        return None

    def target_from_properties(self, properties: Any) -> Target:
        target = self.known_target("cpu")
        assert target is not None
        return target

    def known_archs(self) -> tuple[str, ...]:
        return ("cpu",)

    def known_target(self, arch: str) -> Target | None:
        """Two multiprocessors keep the interpreter's persistent grids small (1 to 2 ms a program)."""
        if arch != "cpu":
            return None
        return Target(
            vendor=self.vendor,
            arch="cpu",
            name="cpu",
            multiprocessors=2,
            warp_size=32,
            warp_sizes=(32,),
            max_threads=1024,
            shared_memory=64 * 1024,
            registers=65536,
            l2=32 * 1024 * 1024,
            family="cpu",
        )


BACKEND = CpuBackend()
