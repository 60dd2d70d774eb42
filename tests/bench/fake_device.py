"""A stand-in for torch's module of a device with graphs, over CPU tensors, that records what `Meter` asks of it."""

from __future__ import annotations

import torch

from liger_hw.autotune.clock import Clock


class Stream:
    def synchronize(self) -> None:
        pass


class FakeDevice:
    """`replayed` and `captured` count graphs; a `wait` inside a call is a host synchronisation."""

    Event = staticmethod(lambda enable_timing: Clock(torch.device("cpu")).event())
    Stream = Stream

    def __init__(self) -> None:
        self.current, self.debug, self.capturing = Stream(), 0, False
        self.captured = self.replayed = self.ended = 0
        self.allocated = self.peak = 100

        device = self

        class Graph:
            def capture_begin(self, pool: object = None) -> None:
                device.capturing = True

            def capture_end(self) -> None:
                device.capturing = False
                device.captured += 1

            def replay(self) -> None:
                device.replayed += 1

        self.CUDAGraph = Graph

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def synchronize(self, device: torch.device | None = None) -> None:
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def empty_cache(self) -> None:
        pass

    def get_sync_debug_mode(self) -> int:
        return self.debug

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.debug = {"error": 2}.get(mode, mode)

    def memory_allocated(self) -> int:
        return self.allocated

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def wait(self) -> None:
        """What `.item()` does on a GPU."""
        if self.debug == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.synchronize()


class Overwriting(torch.autograd.Function):
    """y = 2x, whose backward scribbles over its gradient and whose forward over its input, as some peers do."""

    @staticmethod
    def forward(ctx, x):
        y = 2 * x
        x.detach().zero_()
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy.mul_(2)
