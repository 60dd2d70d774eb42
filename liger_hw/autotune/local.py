"""The measurer that works in this process: what a measuring worker runs, and what tests drive on the CPU.

The tuner knows a measurer by these methods only; all data is plain JSON, so the same calls cross a pipe (`remote.py`).
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from .. import registry
from ..backends import LaunchConfig, target_of
from . import measure, store
from .clock import Clock


class LocalMeasurer:
    """Measures candidates of one op, shape and tunable at a time on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu" and self.device.index is None:
            self.device = torch.device(self.device.type, torch.get_device_module(self.device).current_device())
        self.target = target_of(self.device)
        registry.set_tables(self.target, [])  # the baseline is the heuristic, whatever is stored
        self.clock = Clock(self.device)
        self.clock.__enter__()
        self._bench: measure.Bench | None = None
        self._place: tuple | None = None
        self._reference: dict[tuple, str] = {}
        self._stage: measure.Stage | None = None
        self._arms: dict[int, measure.Arm] = {}
        self._next = 0

    def facts(self) -> dict[str, Any]:
        """What provenance says about this machine, and the bandwidth of a copy in GB/s."""
        return {
            "target": self.target.to_json(),
            "device": self.target.name,
            "driver": _driver(self.device),
            "torch": torch.__version__,
            "triton": store.triton_version(),
            "python": platform.python_version(),
            "copy_gbs": round(self.clock.copy_bandwidth(), 1),
        }

    def scan(self, op: str, sizes: list[int], dtype: str) -> list[list[Any]]:
        """[variant, key] of everything `op` launches at this shape, forward and backward."""
        return [[variant, list(key)] for variant, key in self._open_bench(op, sizes, dtype).tunables()]

    def open(
        self, op: str, sizes: list[int], dtype: str, variant: str, key: list[int], context: list
    ) -> dict[str, Any]:
        """Get ready for candidates of one tunable and key. `{baseline, bytes, copies}`, or `{error}`.

        context: [variant, key, configuration] of other tunables that were chosen before.
        """
        bench = self._open_bench(op, sizes, dtype)
        if self._place not in self._reference:
            self._reference[self._place] = bench.against_reference()
        if self._reference[self._place]:
            return {"error": f"the heuristic disagrees with the reference: {self._reference[self._place]}"}
        self._arms.clear()
        self._stage = None
        others = tuple((v, tuple(k), LaunchConfig.from_json(c)) for v, k, c in context)
        try:
            self._stage = bench.stage(variant, tuple(key), others)
        except measure.Rejected as reason:
            return {"error": str(reason)}
        return {"baseline": self._stage.baseline.to_json(), "bytes": self._stage.bytes, "copies": self._stage.copies}

    def prepare(self, config: dict[str, Any]) -> dict[str, Any]:
        """Check and capture a candidate: `{id, resources}` or `{rejected}`."""
        try:
            arm = self._stage.prepare(LaunchConfig.from_json(config))
        except measure.Rejected as reason:
            return {"rejected": str(reason)}
        except torch.OutOfMemoryError as error:
            self._free()
            return {"rejected": f"out of memory: {str(error).splitlines()[0]}"}
        self._next += 1
        self._arms[self._next] = arm
        return {"id": self._next, "resources": arm.resources}

    def time(self, ids: list[int], rounds: int) -> list[list[float]]:
        """Microseconds of one launch, `rounds` samples for each prepared candidate, interleaved."""
        return self._stage.time([self._arms[i] for i in ids], rounds)

    def drop(self, ids: list[int]) -> None:
        """Forget prepared candidates."""
        for i in ids:
            self._arms.pop(i, None)

    def verify(self, config: dict[str, Any]) -> str:
        """Why the whole op under `config` disagrees with its reference, or `""`."""
        return self._stage.verify(LaunchConfig.from_json(config))

    def close(self) -> None:
        self._arms.clear()
        self._stage = self._bench = self._place = None

    def _open_bench(self, op: str, sizes: list[int], dtype: str) -> measure.Bench:
        place = (op, tuple(sizes), dtype)
        if place != self._place:
            self.close()
            self._free()
            self._bench = measure.Bench(registry.get_op(op), tuple(sizes), getattr(torch, dtype), self.clock)
            self._place = place
        return self._bench

    def _free(self) -> None:
        """Give memory back only when it may run out: returning it costs more than a measurement."""
        if self.device.type == "cpu":
            return
        module = torch.get_device_module(self.device)
        free, total = module.mem_get_info(self.device)
        if free < total // 2:
            module.empty_cache()


def _driver(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    if torch.version.hip:
        return f"hip {torch.version.hip}"
    if device.type == "xpu":
        return str(getattr(torch.xpu.get_device_properties(device), "driver_version", ""))
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, StopIteration):
        return f"cuda {torch.version.cuda}"
