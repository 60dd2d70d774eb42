"""What takes turns in a measurement: `burst(n)` calls n times and returns milliseconds a call, `cost_ms()` is one's.

Replay  a captured graph        Calls  single calls, where no graph can hold them        Chain  matrix products, a floor
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Sequence

import torch

from .inputs import Work

if TYPE_CHECKING:
    from .timing import Meter

Product = tuple[int, int, int, str]
"""A matrix product [m, k] x [k, n] as (m, n, k, layout); a `t` in the layout says that operand is stored transposed."""


class Replay:
    """A captured graph; `burst(n)` replays it n times and returns milliseconds a call."""

    method, why = "graph", ""

    def __init__(self, meter: Meter, work: Work, graph: Any, rounds: int) -> None:
        self.meter, self.work, self.graph, self.rounds = meter, work, graph, rounds
        self.calls = rounds * len(work.sets)

    def burst(self, times: int) -> list[float]:
        meter = self.meter
        meter.busy()
        marks = []
        for _ in range(times):
            self.work.restore()
            start, end = meter.event(), meter.event()
            start.record()
            self.graph.replay()
            end.record()
            marks.append((start, end))
        meter.synchronize()
        return [start.elapsed_time(end) / self.calls for start, end in marks]

    def cost_ms(self) -> float:
        return self.burst(2)[-1] * self.calls


class Calls:
    """Single calls between events, or on the CPU by the wall clock, for what no graph can hold."""

    def __init__(self, meter: Meter, work: Work, why: str) -> None:
        self.meter, self.work, self.why = meter, work, why
        self.method = meter.method
        self.rounds, self.calls, self.turn = 1, 1, 0

    def burst(self, times: int) -> list[float]:
        meter, work = self.meter, self.work
        if meter.module is None:
            samples = []
            for _ in range(times):
                work.restore()
                start = time.perf_counter()
                work.call(self._next())
                samples.append((time.perf_counter() - start) * 1e3)
            return samples
        meter.busy()
        marks = []
        for _ in range(times):
            work.restore()
            start, end = meter.event(), meter.event()
            start.record()
            work.call(self._next())
            end.record()
            marks.append((start, end))
        meter.synchronize()
        return [start.elapsed_time(end) for start, end in marks]

    def _next(self) -> int:
        self.turn = (self.turn + 1) % len(self.work.sets)
        return self.turn

    def cost_ms(self) -> float:
        return self.burst(2)[-1]


class Chain:
    """Matrix products one after the other, between events, on random matrices; a shape's operand is drawn once."""

    def __init__(self, meter: Meter, products: Sequence[Product], dtype: torch.dtype) -> None:
        drawn: dict[tuple[int, int], torch.Tensor] = {}

        def operand(rows: int, columns: int, transposed: bool) -> torch.Tensor:
            shape = (columns, rows) if transposed else (rows, columns)
            if shape not in drawn:
                drawn[shape] = torch.randn(shape, device=meter.device, dtype=dtype)
            return drawn[shape].t() if transposed else drawn[shape]

        self.meter, self.products = meter, []
        for m, n, k, layout in products:
            out = torch.empty(m, n, device=meter.device, dtype=dtype)
            self.products.append((operand(m, k, layout[0] == "t"), operand(k, n, layout[1] == "t"), out))

    def _run(self) -> None:
        for a, b, out in self.products:
            torch.mm(a, b, out=out)

    def burst(self, times: int) -> list[float]:
        meter = self.meter
        if meter.module is None:
            samples = []
            for _ in range(times):
                start = time.perf_counter()
                self._run()
                samples.append((time.perf_counter() - start) * 1e3)
            return samples
        meter.busy()
        marks = []
        for _ in range(times):
            start, end = meter.event(), meter.event()
            start.record()
            self._run()
            end.record()
            marks.append((start, end))
        meter.synchronize()
        return [start.elapsed_time(end) for start, end in marks]

    def cost_ms(self) -> float:
        return self.burst(2)[-1]
