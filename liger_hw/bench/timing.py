"""Times a call on a device.

Calls over several input sets are captured in a graph and replayed. All forwards run before the backwards, so that a
call does not find data in L2 that a large model would have evicted. Arms are interleaved. A call that waits for the
device cannot be captured in a graph and is timed between events (`method="events"`), as is every call on a device
without graphs. On a CPU, calls are timed by the wall clock (`method="wall"`).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch

from ..autotune.clock import MIB, Clock, nothing
from ..backends import target_of, with_index
from ..text import first_line
from .inputs import Work


class OutOfBudget(Exception):
    """The time of `--budget` is spent."""


class NotCapturable(RuntimeError):
    """A call cannot be captured in a graph."""


class Budget:
    """Seconds of wall time from now, or None for no limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self.started, self.seconds = time.perf_counter(), seconds

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started

    def check(self) -> None:
        """Raise `OutOfBudget` if no time is left."""
        if self.seconds is not None and self.spent >= self.seconds:
            raise OutOfBudget(f"the budget of {self.seconds:g} s is spent")


@dataclass(frozen=True)
class Stats:
    """Milliseconds per call, over all samples. repeats: the median of each repeat"""

    median: float
    p20: float
    p80: float
    repeats: tuple[float, ...]
    samples: int

    @classmethod
    def of(cls, repeats: Sequence[Sequence[float]]) -> "Stats":
        flat = sorted(value for repeat in repeats for value in repeat)
        return cls(
            median=statistics.median(flat),
            p20=flat[int(0.2 * (len(flat) - 1) + 0.5)],
            p80=flat[int(0.8 * (len(flat) - 1) + 0.5)],
            repeats=tuple(statistics.median(repeat) for repeat in repeats),
            samples=len(flat),
        )

    def minus(self, other: "Stats") -> "Stats":
        """Statistics of a difference, such as full - forward; p20 and p80 combine the extremes of both."""
        return Stats(
            median=self.median - other.median,
            p20=self.p20 - other.p80,
            p80=self.p80 - other.p20,
            repeats=tuple(a - b for a, b in zip(self.repeats, other.repeats)),
            samples=min(self.samples, other.samples),
        )


# -- the device ------------------------------------------------------------------------------------------------------


class Meter(Clock):
    """A `Clock` that captures calls, flushes L2 and measures memory. graphs: whether the device can capture calls

    With graphs, a side stream is the current one from construction to the end of a `with` block.
    """

    def __init__(self, device: torch.device | str, module: Any = None) -> None:
        super().__init__(with_index(device), module)
        self.l2 = target_of(self.device).l2
        self._pool: Any = None
        self._filler: tuple[torch.Tensor, torch.Tensor] | None = None
        self.__enter__()

    @property
    def graphs(self) -> bool:
        return self.graph is not None and hasattr(self.module, "graph_pool_handle")

    @property
    def method(self) -> str:
        """How a call is timed without a graph."""
        return "wall" if self.module is None else "events"

    def forget(self) -> None:
        """Free the memory of finished cases, so that the next case's peak does not include it."""
        gc.collect()
        self._pool = None
        if self.module is not None:
            self.synchronize()
            self.module.empty_cache()

    # -- capture

    def waits(self, work: Work) -> str:
        """Why a warm call waits for the device, or "". Tested first, since a failed capture breaks the RNG state."""
        if not hasattr(self.module, "set_sync_debug_mode"):
            return ""
        self.synchronize()
        before = self.module.get_sync_debug_mode()
        self.module.set_sync_debug_mode("error")
        try:
            work.call()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return "syncs"
        finally:
            self.module.set_sync_debug_mode(before)
            work.restore()
            self.synchronize()
        return ""

    def capture(self, work: Work, rounds: int = 1) -> Replay:
        """Capture `rounds` sweeps over all input sets in one graph; calls must be warm. Raises `NotCapturable`."""
        if not self.graphs:
            raise NotCapturable("no graphs")
        if why := self.waits(work):
            raise NotCapturable(why)
        if self._pool is None:
            self._pool = self.module.graph_pool_handle()  # shared: arms do not run at the same time
        options = {"capture_error_mode": "thread_local"} if self.device.type == "cuda" else {}

        def sweeps() -> None:
            for _ in range(rounds):
                work.sweep()

        try:
            replay = self.captured(sweeps, pool=self._pool, **options)
        except Exception as error:
            raise NotCapturable(f"capture failed: {first_line(error)}") from error
        self.synchronize()
        work.restore()
        return Replay(self, work, replay, rounds)

    def runner(self, work: Work, floor_ms: float) -> Runner:
        """A `Replay` of a warm call, or `Calls` if it cannot be captured.

        At the floor's speed the graph runs for about 2 ms, so that its launch is negligible. It has a single sweep if
        calls overwrite their inputs, or there are more than 16 sets, which a second sweep would find in L2.
        """
        sweep_ms = max(floor_ms, 1e-3) * len(work.sets)
        rounds = 1 if work.overwrites_inputs else int(max(1, min(16, 32 // len(work.sets), 2.0 / sweep_ms)))
        try:
            return self.capture(work, rounds)
        except NotCapturable as error:
            return Calls(self, work, why=str(error))

    # -- other measures

    def busy(self) -> None:
        """Occupy the device for about a millisecond, so that the host is ahead when timing starts. Flushes L2 too."""
        for _ in range(8):
            self._fill(1 << 62)

    def flush(self) -> None:
        """Evict L2 by reading and writing four times its size."""
        self._fill(2 * self.l2)

    def _fill(self, n_bytes: int) -> None:
        if self.module is None:
            return
        if self._filler is None:
            size = max(4 * self.l2, 256 * MIB)
            self._filler = tuple(torch.ones(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        target, source = self._filler
        target[:n_bytes].copy_(source[:n_bytes])

    def each(self, times: int, call: Callable[[], Any], before: Callable[[], Any] = nothing) -> list[float]:
        self.busy()
        return super().each(times, call, before)

    def host_us(self, call: Callable[[], Any], calls: int = 20, blocks: int = 12) -> float:
        """Microseconds that the host takes to enqueue one call: the median over blocks.

        The call must be small, so that the launch queue does not fill.
        """
        for _ in range(3):
            call()
        samples = []
        for _ in range(blocks):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append((time.perf_counter() - start) * 1e6 / calls)
        self.synchronize()
        return statistics.median(samples)

    def peak_mib(self, work: Work) -> float | None:
        """Peak MiB that a call allocates, including its results. None on the CPU."""
        if self.module is None:
            return None
        work.call()
        work.restore()
        self.synchronize()
        before = self.module.memory_allocated()
        self.module.reset_peak_memory_stats()
        result = work.call()
        self.synchronize()
        peak = self.module.max_memory_allocated() - before
        del result
        work.restore()
        return peak / MIB

    def kept_mib(self, work: Work) -> float | None:
        """MiB that are still allocated after a forward, including its outputs. None on the CPU."""
        if self.module is None:
            return None
        self.synchronize()
        before = self.module.memory_allocated()
        outputs = work.forward(work.sets[0])
        kept = self.module.memory_allocated() - before
        del outputs
        work.restore()
        return kept / MIB


# -- the arms of a comparison ----------------------------------------------------------------------------------------

Product = tuple[int, int, int, str]
"""A matrix product [m, k] x [k, n]: (m, n, k, layout), with a `t` in the layout for an operand stored transposed."""


class Runner:
    """How one arm is run. calls: in each timed sample; why: why the call is not captured in a graph, or ""

    flushes: whether L2 is flushed before each sample
    """

    method, why, calls, flushes = "graph", "", 1, False

    def burst(self, times: int) -> list[float]:
        """`times` samples, in milliseconds per call."""
        raise NotImplementedError

    def cost_ms(self) -> float:
        return self.burst(2)[-1] * self.calls


class Replay(Runner):
    """A captured graph.

    L2 must be in the same state for every arm, but restoring overwritten inputs loads these into L2. So L2 is flushed
    before each replay, unless all inputs and what the calls allocate (together about four times the inputs) fit half
    of L2 and stay there from the last replay.
    """

    def __init__(self, meter: Meter, work: Work, replay: Callable[[], None], rounds: int) -> None:
        self.meter, self.work, self.replay = meter, work, replay
        self.calls = rounds * len(work.sets)
        self.flushes = 8 * work.bytes > meter.l2

    def burst(self, times: int) -> list[float]:
        return [ms / self.calls for ms in self.meter.each(times, self.replay, self._before)]

    def _before(self) -> None:
        self.work.restore()
        if self.flushes:
            self.meter.flush()


class Calls(Runner):
    """Single calls, which were not captured."""

    def __init__(self, meter: Meter, work: Work, why: str) -> None:
        self.meter, self.work, self.why = meter, work, why
        self.method, self.turn = meter.method, 0

    def burst(self, times: int) -> list[float]:
        return self.meter.each(times, lambda: self.work.call(self._next()), self.work.restore)

    def _next(self) -> int:
        self.turn = (self.turn + 1) % len(self.work.sets)
        return self.turn


class Chain(Runner):
    """Consecutive matrix products, as a floor. Operands of one shape share a random matrix."""

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


# -- turns ------------------------------------------------------------------------------------------------------------


def interleave(
    runners: dict[Any, Runner], repeats: int = 3, burst_ms: float = 30.0, settle_ms: float = 0.0
) -> tuple[dict[Any, Stats], dict[Any, str]]:
    """Time the runners in turn, `repeats` times; returns (statistics, errors) by name. Failed arms do not run again.

    settle_ms: untimed time at the start of each burst, in which the clock frequency adapts to the arm
    """
    samples: dict[Any, list[list[float]]] = {name: [] for name in runners}
    errors: dict[Any, str] = {}
    times: dict[Any, tuple[int, int]] = {}
    for name, runner in runners.items():
        try:
            cost = max(runner.cost_ms(), 1e-3)
            times[name] = math.ceil(settle_ms / cost), int(max(3, min(50, burst_ms / cost)))
        except Exception as error:  # a peer's failure is a row of the table
            errors[name] = first_line(error)
    for _ in range(max(1, repeats)):
        for name, runner in runners.items():
            if name in errors:
                continue
            try:
                settling, counted = times[name]
                samples[name].append(runner.burst(settling + counted)[settling:])
            except Exception as error:
                errors[name] = first_line(error)
    return {name: Stats.of(bursts) for name, bursts in samples.items() if bursts and name not in errors}, errors
