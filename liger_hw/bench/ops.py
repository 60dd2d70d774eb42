"""Runs cases: measures times, share of the floor, peak memory and the error against fp64 for each arm.

    rows = bench(cases(["rms_norm"], ["mistral_7b", "8192x8192"]), "cuda", against=("torch", "liger"))

Each op, size, mode and arm (`liger_hw` included) gives a row, a plain dict (see `_row`). Mode `fwd` is the forward as
training runs it, `full` forward and backward, `bwd` the difference of the two.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch

from .. import registry
from ..text import first_line
from . import peers
from .accuracy import Accuracy
from .cases import Case, cases, make_inputs, with_few_rows  # noqa: F401  callers take all four from here
from .floors import PRODUCTS, floors_of
from .inputs import Inputs, Work, sample_sets
from .timing import Budget, Chain, Meter, OutOfBudget, Runner, Stats, interleave

ARM_LIMIT, QUICK_ARM_LIMIT = 30, 20
"""Seconds that an arm may take to compile, warm up and be checked, and the same for `quick` cases."""
SETTLE_MS = 150.0
"""Milliseconds that GEMM-bound ops and their floors run before they are timed: after the device was idle or copying,
matrix products are 12% faster for 100 ms (H200)."""


class DeviceLost(RuntimeError):
    """The device stopped answering after an arm failed; this process cannot continue."""


@dataclass
class Arm:
    """An implementation in a case, with its results."""

    name: str
    function: Callable[..., Any] | None = None
    status: str = "ok"
    note: str = ""
    works: dict[str, Work] = field(default_factory=dict)
    runners: dict[str, Runner] = field(default_factory=dict)
    times: dict[str, Stats] = field(default_factory=dict)
    peak_mib: float | None = None
    kept_mib: float | None = None
    first_seconds: float | None = None
    errors: tuple[float | None, float | None] = (None, None)
    implementations: set[str] = field(default_factory=set)

    def fail(self, error: BaseException) -> None:
        kind = {peers.Absent: "absent", peers.Unsupported: "unsupported", OutOfBudget: "skipped"}
        self.status = kind.get(type(error), "error")
        self.note = str(error) if self.status != "error" else first_line(error)
        self.works.clear()
        self.runners.clear()


def bench(
    todo: Iterable[Case],
    device: torch.device | str,
    *,
    against: Sequence[str] = peers.DEFAULT,
    modes: Sequence[str] = ("full",),
    repeats: int = 3,
    budget: Budget | None = None,
    meter: Meter | None = None,
    copy_rate: float | None = None,
    on_case: Callable[[Case], None] = lambda case: None,
    on_rows: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Measure every case and return the rows. on_case: called with each case before it begins; on_rows: with its rows

    Raises `OutOfBudget` if the budget ends before the last case, and `DeviceLost`.
    """
    budget = budget or Budget()
    meter = meter or Meter(device)
    copy_rate = copy_rate or meter.copy_rate()
    rows: list[dict[str, Any]] = []
    for case in todo:
        budget.check()
        on_case(case)
        try:
            new = _bench_case(case, meter, copy_rate, (peers.OURS, *against), modes, repeats, budget)
        finally:
            meter.forget()
        if not rows:
            gc.freeze()  # later collections skip the objects of peers and compilers
        rows += new
        on_rows(new)
    return rows


def _bench_case(
    case: Case, meter: Meter, copy_rate: float, names: Sequence[str], modes: Sequence[str], repeats: int, budget: Budget
) -> list[dict[str, Any]]:
    started = time.perf_counter()
    arms = [Arm(name) for name in names]
    needed = tuple(mode for mode in ("full", "fwd") if mode in modes or "bwd" in modes)
    try:
        sets = sample_sets(lambda seed: make_inputs(case, case.sizes, meter.device, seed), meter.l2)
        floors, kind = floors_of(case, sets[0], meter, copy_rate)
        check = None if case.quick else Accuracy(case, meter, sets[0])
    except Exception as error:
        _alive(meter, error)
        for arm in arms:
            arm.fail(error)
        return [_row(case, arm, mode, {}, "", [], meter, started) for arm in arms for mode in modes]
    for arm in arms:
        try:
            budget.check()
            with at_most(case.limit or (QUICK_ARM_LIMIT if case.quick else ARM_LIMIT), f"{arm.name} was not ready"):
                _prepare(arm, case, meter, sets, needed, floors, check)
        except Exception as error:
            arm.fail(error)
            _alive(meter, error)
    del check
    floors |= _measure(arms, case, meter, needed, repeats)
    return [_row(case, arm, mode, floors, kind, sets, meter, started) for arm in arms for mode in modes]


@contextlib.contextmanager
def at_most(seconds: int, what: str) -> Iterator[None]:
    """Raise `TimeoutError` in a block that takes longer (peers may tune). No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"{what} after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _prepare(
    arm: Arm, case: Case, meter: Meter, sets: list[Inputs], needed: tuple, floors: dict, check: "Accuracy | None"
) -> None:
    arm.function = peers.arm(arm.name, case.op)
    for mode in needed:
        work = Work(arm.function, sets, backward=mode == "full")
        began = time.perf_counter()
        peer = peers.PEERS.get(arm.name)
        with peer.chosen() if peer else contextlib.nullcontext(set()) as chosen:
            work.learn_overwrites()  # the first call: compiles
        arm.implementations |= chosen
        meter.synchronize()
        arm.first_seconds = arm.first_seconds or time.perf_counter() - began
        for _ in range(2):
            work.call()
        work.restore()
        if arm.peak_mib is None and not case.quick:
            arm.peak_mib, arm.kept_mib = meter.peak_mib(work), meter.kept_mib(work)
        arm.works[mode] = work
        arm.runners[mode] = runner = meter.runner(work, floors[mode])
        if runner.why and meter.graphs:
            arm.note = runner.why
    if check and (arm.name != "compile" or check.sizes == case.sizes):  # compiling for other sizes takes seconds
        arm.errors = check.of(arm.function)


def _measure(arms: list[Arm], case: Case, meter: Meter, needed: tuple, repeats: int) -> dict[str, float]:
    """Time the arms in turn, together with a GEMM-bound op's matrix products. Returns the op's floors by mode."""
    runners: dict[tuple[str, str], Runner] = {}
    if case.op.name in PRODUCTS:
        chains = dict(zip(("fwd", "full"), PRODUCTS[case.op.name](*case.sizes)))
        runners = {("floor", mode): Chain(meter, chains[mode], case.dtype) for mode in needed}
    runners |= {(arm.name, mode): arm.runners[mode] for arm in arms for mode in arm.runners}
    settle_ms = SETTLE_MS if case.op.name in PRODUCTS else 0.0
    times, errors = interleave(runners, repeats, burst_ms=10.0 if case.quick else 30.0, settle_ms=settle_ms)
    floors = {mode: times["floor", mode].median for mode in needed if ("floor", mode) in times}
    if {"fwd", "full"} <= floors.keys():
        floors["bwd"] = floors["full"] - floors["fwd"]
    for arm in arms:
        for mode in arm.runners:
            if (arm.name, mode) in times:
                arm.times[mode] = times[arm.name, mode]
        if failed := [errors[arm.name, mode] for mode in arm.runners if (arm.name, mode) in errors]:
            arm.status, arm.note = "error", failed[0]
    _alive(meter, RuntimeError("timing"))
    return floors


def _alive(meter: Meter, error: BaseException) -> None:
    try:
        meter.synchronize()
    except Exception as lost:
        raise DeviceLost(f"the device stopped answering ({first_line(lost)}) after: {first_line(error)}") from error


# -- rows ------------------------------------------------------------------------------------------------------------


def _row(
    case: Case, arm: Arm, mode: str, floors: dict, kind: str, sets: list[Inputs], meter: Meter, started: float
) -> dict[str, Any]:
    """Times are milliseconds per call; share: floor divided by time; errors are relative to fp64."""
    times = arm.times.get(mode)
    if mode == "bwd" and {"full", "fwd"} <= arm.times.keys():
        times = arm.times["full"].minus(arm.times["fwd"])
    runner = arm.runners.get("full" if mode == "bwd" else mode)
    floor = floors.get(mode)
    peer = peers.PEERS.get(arm.name)
    footprint = sum(inputs.bytes for inputs in sets)
    return {
        "op": case.op.name,
        "workload": case.label,
        "sizes": list(case.sizes),
        "dtype": str(case.dtype).removeprefix("torch."),
        "mode": mode,
        "arm": arm.name,
        "version": peer.version() if peer else None,
        "implementation": ", ".join(sorted(arm.implementations)) or None,
        "status": arm.status,
        "note": arm.note,
        "ms": asdict(times) if times else None,
        "method": runner.method if runner else None,
        "calls_in_graph": runner.calls if runner else None,
        "input_sets": len(sets),
        "l2_cold": footprint >= 2 * meter.l2 or bool(runner and runner.flushes),
        "floor_ms": floor,
        "floor": kind,
        "share": floor / times.median if times and floor and times.median > 0 else None,
        "peak_mib": arm.peak_mib,
        "kept_mib": arm.kept_mib,
        "first_seconds": arm.first_seconds,
        "error_out": arm.errors[0],
        "error_grad": arm.errors[1],
        "config": _config(case, meter) if arm.name == peers.OURS and arm.status == "ok" else None,
        "case_seconds": round(time.perf_counter() - started, 2),
    }


def _config(case: Case, meter: Meter) -> list[dict[str, Any]] | None:
    if case.op.name not in registry.ops():  # an op that a benchmark defines from other ops
        return None
    explanations = registry.explain(case.op.name, case.sizes, case.dtype, meter.device)
    return [
        {
            "tunable": one.tunable,
            "layer": one.chosen.layer,
            "provenance": dict(one.chosen.provenance),
            "config": one.chosen.config.to_json(),
        }
        for one in explanations
    ]
