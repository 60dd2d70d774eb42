"""What takes turns in a measurement: `burst(n)` returns milliseconds a call, n times; `cost_ms()` is what one costs.

Replay  a captured graph        Calls  single calls, where no graph can hold them        Chain  matrix products, a floor
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch

from .inputs import Work

if TYPE_CHECKING:
    from .timing import Meter

Product = tuple[int, int, int, str]
"""A matrix product [m, k] x [k, n] as (m, n, k, layout); a `t` in the layout says that operand is stored transposed."""


class Runner:
    """`calls`: how many calls one counted time is of; `why`: no graph holds the call."""

    method, why, calls, rounds, flushes = "graph", "", 1, 1, False

    def burst(self, times: int) -> list[float]:
        raise NotImplementedError

    def cost_ms(self) -> float:
        return self.burst(2)[-1] * self.calls


class Replay(Runner):
    """A captured graph; `burst(n)` replays it n times and returns milliseconds a call.

    Every arm finds the same in L2. Before a replay, an arm that overwrites its inputs has them written anew; another's
    are as its last replay left them. Both are in L2 where the sets fit with all that a call makes of them (taken as
    four times as much, in half of L2). Where not, L2 is flushed for every arm alike, or what was just written would be
    found there: Liger's rope of 32x1x40x8x128, which overwrites q and k, took 2.61 us on an H200 without a flush and
    3.25 us with one (of 32x1x16x16x64, which fits and is left warm for all, 2.14 and 2.61).
    """

    def __init__(self, meter: Meter, work: Work, graph: Any, rounds: int) -> None:
        self.meter, self.work, self.graph, self.rounds = meter, work, graph, rounds
        self.calls = rounds * len(work.sets)
        self.flushes = 8 * work.bytes > meter.l2

    def burst(self, times: int) -> list[float]:
        return [ms / self.calls for ms in self.meter.each(times, self.graph.replay, self._before)]

    def _before(self) -> None:
        self.work.restore()
        if self.flushes:
            self.meter.flush()


class Calls(Runner):
    """Single calls, for what no graph can hold."""

    def __init__(self, meter: Meter, work: Work, why: str) -> None:
        self.meter, self.work, self.why = meter, work, why
        self.method, self.turn = meter.method, 0

    def burst(self, times: int) -> list[float]:
        return self.meter.each(times, lambda: self.work.call(self._next()), self.work.restore)

    def _next(self) -> int:
        self.turn = (self.turn + 1) % len(self.work.sets)
        return self.turn


class Chain(Runner):
    """Matrix products one after the other, on random matrices; a shape's operand is drawn once."""

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

    def run(self) -> None:
        for a, b, out in self.products:
            torch.mm(a, b, out=out)

    def burst(self, times: int) -> list[float]:
        return self.meter.each(times, self.run)
