"""Timing replays of recorded launches: events around a captured graph, plain launches where there are no graphs."""

from __future__ import annotations

import time
from typing import Any, Callable, Sequence

import torch


class Clock:
    """Times callables on one device. All work goes to one side stream, where graphs can be captured.

    `with clock:` makes that stream current; everything measured must be created inside.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cpu = device.type == "cpu"
        self._module = None if self.on_cpu else torch.get_device_module(device)
        self._stream = None if self.on_cpu else self._module.Stream(device)
        self._graph_type = getattr(self._module, "CUDAGraph", None) or getattr(self._module, "XPUGraph", None)
        self._context: Any = None

    def __enter__(self) -> "Clock":
        if not self.on_cpu:
            self._module.set_device(self.device)
            self._context = self._module.stream(self._stream)
            self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)

    def synchronize(self) -> None:
        if not self.on_cpu:
            self._module.synchronize(self.device)

    def graph(self, launch: Callable[[], None]) -> Callable[[], None]:
        """`launch` captured into a graph, as a replay; `launch` itself where the device cannot capture.

        torch's own context manager collects garbage and empties the allocator's cache on every capture, about 100 ms.
        """
        if self._graph_type is None:
            return launch
        graph = self._graph_type()
        self.synchronize()
        graph.capture_begin()
        try:
            launch()
        finally:
            graph.capture_end()
        return graph.replay

    def interleaved(
        self, arms: Sequence[tuple[Callable[[], None], Callable[[], None]]], rounds: int
    ) -> list[list[float]]:
        """Microseconds of each (restore, replay) arm, `rounds` times in turn; `restore` is outside the clock."""
        if self.on_cpu:
            return self._on_cpu(arms, rounds)
        events: list[list[tuple[Any, Any]]] = [[] for _ in arms]
        for turn in range(rounds):
            for number in _turned(len(arms), turn):
                restore, replay = arms[number]
                start, end = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
                restore()
                start.record()
                replay()
                end.record()
                events[number].append((start, end))
        self.synchronize()
        return [[start.elapsed_time(end) * 1000.0 for start, end in pairs] for pairs in events]

    def _on_cpu(self, arms: Sequence[tuple[Callable[[], None], Callable[[], None]]], rounds: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in arms]
        for turn in range(rounds):
            for number in _turned(len(arms), turn):
                restore, replay = arms[number]
                restore()
                start = time.perf_counter()
                replay()
                times[number].append((time.perf_counter() - start) * 1e6)
        return times

    def copy_bandwidth(self, size: int = 1 << 30) -> float:
        """GB/s of a device-to-device copy, reads plus writes: the floor kernels are compared with."""
        size = 1 << 24 if self.on_cpu else size
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = self.interleaved([(lambda: None, lambda: target.copy_(source))], 8)[0]
        return 2 * size / sorted(times)[len(times) // 2] / 1000.0


def _turned(count: int, turn: int) -> list[int]:
    """0..count-1, starting elsewhere each turn, so that no arm always follows the same one."""
    return [(i + turn) % count for i in range(count)]
