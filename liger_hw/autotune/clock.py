"""Timing on one device: by its events, on a CPU by the wall clock."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, Callable, Iterable, Sequence

import torch

MIB = 1 << 20
Arm = tuple[Callable[[], Any], Callable[[], Any]]
"""(untimed preparation, timed call)"""


def nothing() -> None:
    pass


class _WallEvent:
    """An event on a CPU, where a call returns when its work is done."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: "_WallEvent") -> float:
        return (later.at - self.at) * 1e3


class Clock:
    """Times work on a device.

    `with clock:` makes a side stream the current one if the device has graphs. Create everything to be measured inside
    it, since a capture fails on autograd nodes that were made on the default stream.
    module: torch's module for the device type, None for a CPU (tests pass another); graph: its class of graphs, or None
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module = module if device.type == "cpu" else torch.get_device_module(device)
        self.graph = getattr(self.module, "CUDAGraph", None) or getattr(self.module, "XPUGraph", None)
        self._before: Any = None

    def __enter__(self) -> "Clock":
        if self.device.type != "cpu":
            self.module.set_device(self.device)
        if self.graph is not None and self._before is None:
            self._before = self.module.current_stream()
            self._before.synchronize()
            self.module.set_stream(self.module.Stream())
        return self

    def __exit__(self, *error: Any) -> None:
        """Restore the stream that was current before."""
        if self._before is not None:
            self.module.set_stream(self._before)
            self._before = None

    def captured(self, run: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        """A function that replays a graph of `run`; `run` itself if the device has no graphs.

        options: of `capture_begin`. torch's context manager would collect garbage and empty the allocator's cache at
        every capture, which takes about 100 ms.
        """
        if self.graph is None:
            return run
        graph = self.graph()
        self.synchronize()
        graph.capture_begin(**options)
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # raised since the capture failed
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize(self.device)

    def event(self) -> Any:
        return _WallEvent() if self.module is None else self.module.Event(enable_timing=True)

    def mark(self) -> Any:
        """Record an event and return it. Does not wait for the device."""
        event = self.event()
        event.record()
        return event

    def ms(self, pairs: Iterable[tuple[Any, Any]]) -> list[float]:
        """Milliseconds between the events of each pair; waits for the device."""
        self.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def interleaved(self, arms: Sequence[Arm], rounds: int) -> list[list[float]]:
        """Milliseconds of `rounds` calls of each arm, interleaved in rotating order."""
        events: list[list[tuple[Any, Any]]] = [[] for _ in arms]
        for turn in range(rounds):
            for place in range(len(arms)):
                number = (place + turn) % len(arms)
                before, call = arms[number]
                start, end = self.event(), self.event()
                before()
                start.record()
                call()
                end.record()
                events[number].append((start, end))
        return [self.ms(pairs) for pairs in events]

    def each(self, times: int, call: Callable[[], Any], before: Callable[[], Any] = nothing) -> list[float]:
        """Milliseconds of each of `times` calls."""
        return self.interleaved([(before, call)], times)[0]

    def copy_rate(self) -> float:
        """GB/s of a large copy on the device, bytes read plus bytes written: the roofline of a memory-bound op."""
        size, times = (32 * MIB, 15) if self.module is None else (1024 * MIB, 60)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        samples = self.each(times + 2, lambda: target.copy_(source))[2:]
        return 2 * size / statistics.median(samples) / 1e6
