"""Op x size x arm -> rows: times, share of the floor, host time, peak memory, error against fp64.

    rows = bench(["rms_norm"], against=("torch", "liger"), sizes=["mistral_7b", "8192x8192"])

A row is a plain dict (see `_row`), one for each op, size, mode and arm, `liger_hw` included. `mode`: `fwd` is the
forward as training runs it, `full` forward and backward, `bwd` the difference of the two.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch

from .. import registry
from . import chunked, peers
from .cases import Case, cases  # noqa: F401  callers take both from here
from .inputs import Inputs, Work, sample_sets, tensors_in
from .timing import Budget, Calls, Meter, OutOfBudget, Product, Replay, Stats, first_line, interleave

MODES = ("fwd", "bwd", "full")
ROW_DIMS = frozenset({"n_rows", "n_tokens", "rows", "tokens", "batch", "seq", "seq_len", "n_seq", "bsz", "bt"})
"""Names of problem sizes (`Tunable.dims`) that may shrink without changing what is computed for one row."""


ARM_LIMIT = 60
"""Seconds in which an arm must have compiled, warmed up and been checked in one case."""


class DeviceLost(RuntimeError):
    """The device no longer answers after an arm failed: nothing further can be measured in this process."""


@dataclass
class Arm:
    """One implementation in one case, and everything seen of it."""

    name: str
    function: Callable[..., Any] | None = None
    status: str = "ok"
    note: str = ""
    works: dict[str, Work] = field(default_factory=dict)
    runners: dict[str, Replay | Calls] = field(default_factory=dict)
    times: dict[str, Stats] = field(default_factory=dict)
    eager: dict[str, Stats] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    peak_mib: float | None = None
    errors: tuple[float | None, float | None] = (None, None)

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
    """Measure every case and return its rows. `on_case` gets a case when it begins, `on_rows` its rows once it is done.

    Raises `OutOfBudget` when the budget ends before the last case and `DeviceLost` when a peer broke the device; what
    was done by then has gone through `on_rows`.
    """
    budget = budget or Budget()
    meter = meter or Meter(device)
    copy_rate = copy_rate or meter.copy_rate()
    rows: list[dict[str, Any]] = []
    for case in todo:
        budget.check()
        on_case(case)
        try:
            found = _bench_case(case, meter, copy_rate, (peers.OURS, *against), modes, repeats, budget)
        finally:
            meter.forget()
        if not rows:
            gc.freeze()  # what peers and compilers brought in: a collection after every case need not look at it again
        rows += found
        on_rows(found)
    return rows


def warm(
    todo: Iterable[Case],
    device: torch.device | str,
    against: Sequence[str] = peers.DEFAULT,
    on_case: Callable[[Case], None] = lambda case: None,
) -> None:
    """Call every arm that compiles once for every case and time nothing: afterwards the compilers' caches on disk have what
    a timed run of the same cases needs. Many processes may do this on one device at once, each with one compiling thread.
    """
    from torch._inductor import config

    config.compile_threads = 1
    config.autotune_local_cache = False  # what Inductor picks among noisy neighbours must not be kept
    meter = Meter(device)
    for case in todo:
        on_case(case)
        for name in (peers.OURS, *against):
            if name in ("torch", "aten"):
                continue
            with contextlib.suppress(Exception):  # a timed run will say what is wrong
                function = peers.arm(name, case.op)
                sizes = [case.sizes]
                if not case.quick and name != "compile":
                    sizes.append(with_few_rows(case, 16))
                for one in sizes:
                    Work(function, [make_inputs(case, one, meter.device, 0)], backward=True).call()
        meter.forget()


def _bench_case(
    case: Case,
    meter: Meter,
    copy_rate: float,
    names: Sequence[str],
    modes: Sequence[str],
    repeats: int,
    budget: Budget,
) -> list[dict[str, Any]]:
    started = time.perf_counter()
    arms = [Arm(name) for name in names]
    needed = tuple(mode for mode in ("full", "fwd") if mode in modes or "bwd" in modes)
    try:
        sets = sample_sets(lambda seed: make_inputs(case, case.sizes, meter.device, seed), meter.l2)
        floors, kind = _floors(case, sets[0], meter, copy_rate)
        check = None if case.quick else Accuracy(case, meter, sets[0])
    except Exception as error:
        _alive(meter, error)
        for arm in arms:
            arm.fail(error)
        return [_row(case, arm, mode, {}, "", [], meter, started) for arm in arms for mode in modes]
    for arm in arms:
        try:
            budget.check()
            with at_most(ARM_LIMIT, f"{arm.name} was not ready"):
                _prepare(arm, case, meter, sets, needed, floors, check)
        except Exception as error:
            arm.fail(error)
            _alive(meter, error)
    del check
    floors |= _measure(arms, case, meter, needed, repeats)
    rows = [_row(case, arm, mode, floors, kind, sets, meter, started) for arm in arms for mode in modes]
    for arm in arms:
        arm.works.clear()
        arm.runners.clear()
    return rows


@contextlib.contextmanager
def at_most(seconds: int, what: str) -> Iterator[None]:
    """Raise `TimeoutError` in a block that takes longer: a peer's compiling and tuning has no end of its own. In the main
    thread only, and between two lines of Python."""
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
        work.learn_overwrites()  # the first call: compiles
        for _ in range(2):
            work.call()
        work.restore()
        if arm.peak_mib is None and not case.quick:
            arm.peak_mib = meter.peak_mib(work)
        arm.works[mode] = work
        arm.runners[mode] = runner = meter.runner(work, floors[mode])
        if runner.why and meter.graphs:
            arm.note = runner.why
    if check and (arm.name != "compile" or check.sizes == case.sizes):  # another shape would compile again, for seconds
        arm.errors = check.of(arm.function)


def _measure(arms: list[Arm], case: Case, meter: Meter, needed: tuple, repeats: int) -> dict[str, float]:
    """Time the arms in turn, and with them the products of a GEMM-bound op: its floors by mode."""
    runners: dict[tuple[str, str], Any] = {}
    if case.op.name in PRODUCTS:
        chains = dict(zip(("fwd", "full"), PRODUCTS[case.op.name](*case.sizes)))
        runners = {("floor", mode): meter.chain(chains[mode], case.dtype) for mode in needed}
    runners |= {(arm.name, mode): arm.runners[mode] for arm in arms for mode in arm.runners}
    times, errors = interleave(runners, repeats, None, burst_ms=10.0 if case.quick else 30.0)
    floors = {mode: times["floor", mode].median for mode in needed if ("floor", mode) in times}
    if {"fwd", "full"} <= floors.keys():
        floors["bwd"] = floors["full"] - floors["fwd"]
    runners.clear()
    for arm in arms:
        for mode in arm.runners:
            if (arm.name, mode) in times:
                arm.times[mode] = times[arm.name, mode]
        if failed := [errors[arm.name, mode] for mode in arm.runners if (arm.name, mode) in errors]:
            arm.status, arm.note = "error", failed[0]
    _alive(meter, RuntimeError("timing"))
    if case.quick:
        return floors

    loops: dict[tuple[str, str], Callable[[], list[float]]] = {}
    samples: dict[tuple[str, str], list[list[float]]] = {}
    live = [arm for arm in arms if arm.status == "ok" and arm.times]
    for arm in live:
        for mode, work in arm.works.items():
            loops[arm.name, mode] = meter.eager(work)
            samples[arm.name, mode] = []
    for _ in range(repeats):
        for place, loop in loops.items():
            samples[place].append(loop())
    for arm in live:
        for mode in arm.works:
            arm.eager[mode] = Stats.of(samples[arm.name, mode])
    if case.op.name in PRODUCTS:  # on a few rows too it is the device that takes long: a product reads all of the weight
        return floors

    small = [make_inputs(case, with_few_rows(case, 16), meter.device, 7)]
    for arm in live:
        for mode, work in arm.works.items():
            try:
                if arm.name == "compile":  # small inputs would compile again
                    slow = arm.eager[mode].median > 5
                    arm.host[mode] = meter.host_us(work, calls=3 if slow else 5, blocks=3 if slow else 8)
                else:
                    arm.host[mode] = meter.host_us(Work(arm.function, small, work.backward))
            except Exception as error:
                arm.note = arm.note or f"host time: {first_line(error)}"
                _alive(meter, error)
    return floors


def _alive(meter: Meter, error: BaseException) -> None:
    try:
        meter.synchronize()
    except Exception as dead:
        raise DeviceLost(f"the device stopped answering ({first_line(dead)}) after: {first_line(error)}") from error


# -- inputs ----------------------------------------------------------------------------------------------------------


def make_inputs(case: Case, sizes: tuple[int, ...], device: torch.device, seed: int) -> Inputs:
    """One set of the op's own sample; keywords at their default are left out, since a peer may not know them."""
    generator = torch.Generator(device).manual_seed(seed)
    sample = case.op.sample(sizes, case.dtype, device, generator)
    known = inspect.signature(case.op.function).parameters
    kwargs = {name: value for name, value in sample.kwargs.items() if value is not known[name].default}
    return Inputs(sample.args, kwargs, seed=1000 + seed, moved=sample.moved)


def with_few_rows(case: Case, most: int) -> tuple[int, ...]:
    """The case's sizes with every row-like one at most `most`; the columns, which kernels are compiled for, stay."""
    dims = case.op.tunables[0].dims
    rows = [name in ROW_DIMS for name in dims]
    if not any(rows):
        rows[0] = True
    return tuple(min(size, most) if row else size for size, row in zip(case.sizes, rows))


class Accuracy:
    """Error of an arm's outputs and gradients against the op's reference in fp64: ||arm - fp64|| / ||fp64||.

    On all rows where no argument (and no logits of a GEMM-bound op) has more than 2^26 (2^30) elements (2^20 and 16 rows
    on the CPU), else on as many as fit; on half as many while the reference runs out of memory.
    """

    def __init__(self, case: Case, meter: Meter, first: Inputs) -> None:
        on_cpu = meter.module is None
        self.sizes, self.inputs, self.meter = case.sizes, first, meter
        rows = max([size for name, size in zip(case.op.tunables[0].dims, case.sizes) if name in ROW_DIMS] or case.sizes)
        if on_cpu and case.op.name in PRODUCTS:
            rows = min(rows, 16)
            self._shrink(case, meter, rows)
        while rows > 16 and not self._fits(case, on_cpu):
            rows //= 2
            self._shrink(case, meter, rows)
        while not self._reference(case):
            if rows < 2:
                raise RuntimeError("the reference in fp64 does not fit into the device's memory")
            meter.forget()
            rows //= 2
            self._shrink(case, meter, rows)

    def _fits(self, case: Case, on_cpu: bool) -> bool:
        if case.op.name in PRODUCTS and not on_cpu:
            m, n, *_ = PRODUCTS[case.op.name](*self.sizes)[0][0]
            return m * n <= 1 << 30
        return max(tensor.numel() for tensor in self.inputs.given) <= 1 << (20 if on_cpu else 26)

    def _shrink(self, case: Case, meter: Meter, rows: int) -> None:
        sizes = with_few_rows(case, rows)
        if sizes != self.sizes:
            self.sizes, self.inputs = sizes, make_inputs(case, sizes, meter.device, 0)

    def _reference(self, case: Case) -> bool:
        """Compute what is exact. False where it does not fit into the device's memory."""
        try:
            given = self.inputs.clone()
            exact = given.clone(torch.float64)
            with torch.enable_grad():
                outputs = tensors_in(case.op.reference(*exact.args, **exact.kwargs))
                outputs = [output for output in outputs if output.is_floating_point()]
                flowing = [given.gradient_for(i, output.detach().to(case.dtype)) for i, output in enumerate(outputs)]
                pairs = [(output, flow.double()) for output, flow in zip(outputs, flowing) if output.requires_grad]
                grads = torch.autograd.grad(
                    [o for o, _ in pairs], exact.leaves, [g for _, g in pairs], allow_unused=True
                )
        except torch.OutOfMemoryError:
            return False
        self.inputs = given
        self.flowing = [flow.clone() for flow in flowing]
        self.outputs, self.grads = [output.detach() for output in outputs], grads
        return True

    def of(self, function: Callable[..., Any]) -> tuple[float | None, float | None]:
        """(largest error of an output, largest error of a gradient) of an arm."""
        mine = self.inputs.clone()
        outputs = [o for o in tensors_in(function(*mine.args, **mine.kwargs)) if o.is_floating_point()]
        wanted = [(output, flow) for output, flow in zip(outputs, self.flowing) if output.requires_grad]
        values = [output.detach().clone() for output in outputs]  # a backward may overwrite them
        flowing = [flow.to(output.dtype, copy=True) for output, flow in wanted]
        grads = torch.autograd.grad([output for output, _ in wanted], mine.leaves, flowing, allow_unused=True)
        return _worst(values, self.outputs), _worst(grads, self.grads)


def _worst(found: Sequence[torch.Tensor | None], exact: Sequence[torch.Tensor | None]) -> float | None:
    errors = []
    for one, other in zip(found, exact):
        if one is None or other is None:
            continue
        scale = float(other.norm())
        errors.append(float((one.double().reshape(other.shape) - other).norm()) / (scale or 1.0))
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error) if errors else None


# -- floors ----------------------------------------------------------------------------------------------------------


def _linear_head(*sizes: int) -> tuple[list[Product], list[Product]]:
    """sizes: tokens (or batch and length), hidden, vocab"""
    *rows, hidden, vocab = sizes
    logits = (math.prod(rows), vocab, hidden, "nt")
    return [logits], [logits, (math.prod(rows), hidden, vocab, "nn"), (vocab, hidden, math.prod(rows), "tn")]


def _head_twice(*sizes: int) -> tuple[list[Product], list[Product]]:
    """A head whose backward computes its logits once more."""
    forward, both = _linear_head(*sizes)
    return forward, [*forward, *both]


def _two_heads(*sizes: int) -> tuple[list[Product], list[Product]]:
    """A head, and a teacher's or reference model's without gradient."""
    forward, both = _linear_head(*sizes)
    return 2 * forward, [*forward, *both]


PRODUCTS: dict[str, Callable[..., tuple[list[Product], list[Product]]]] = {
    "fused_linear_cross_entropy": _linear_head,
    "fused_linear_kl_div": _linear_head,
    "fused_linear_jsd": _two_heads,
    "fused_linear_scaled_cross_entropy": _head_twice,
    **{name: _two_heads if name in chunked.TWO_HEADS else _linear_head for name in chunked.OPS},
}
"""The matrix products of a GEMM-bound op, (forward, forward and backward), from its problem sizes."""


def _floors(case: Case, inputs: Inputs, meter: Meter, copy_rate: float) -> tuple[dict[str, float], str]:
    """Milliseconds by mode that the measured copy or the measured products need, and which of the two it is."""
    if case.op.name in PRODUCTS:
        forward, both = (meter.products_ms(products, case.dtype) for products in PRODUCTS[case.op.name](*case.sizes))
        return {"fwd": forward, "full": both, "bwd": both - forward}, "gemm"
    few = with_few_rows(case, 1)
    one = make_inputs(case, few, meter.device, 0)
    outputs = tensors_in(case.op.reference(*one.args, **one.kwargs))
    scale = math.prod(case.sizes) // math.prod(few)
    written = sum(out.numel() * out.element_size() for out in outputs if out.dim()) * scale
    read = sum(tensor.numel() * tensor.element_size() for tensor in inputs.given)
    ms = 1e-6 / copy_rate
    return {
        "fwd": (read + written) * ms,
        "full": inputs.moved * ms,
        "bwd": (inputs.moved - read - written) * ms,
    }, "copy"


# -- rows ------------------------------------------------------------------------------------------------------------


def _row(
    case: Case, arm: Arm, mode: str, floors: dict, kind: str, sets: list[Inputs], meter: Meter, started: float
) -> dict[str, Any]:
    """One line of the results. Times are ms a call, `share` is floor over time, errors are relative to fp64."""

    def difference(table: dict[str, Any]) -> Any:
        if mode != "bwd":
            return table.get(mode)
        if "full" not in table or "fwd" not in table:
            return None
        full, fwd = table["full"], table["fwd"]
        return full.minus(fwd) if isinstance(full, Stats) else full - fwd

    times, eager = difference(arm.times), difference(arm.eager)
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
        "status": arm.status,
        "note": arm.note,
        "ms": times.to_json() if times else None,
        "method": runner.method if runner else None,
        "calls_in_graph": runner.calls if runner else None,
        "input_sets": len(sets),
        "l2_cold": footprint >= 2 * meter.l2,
        "floor_ms": floor,
        "floor": kind,
        "share": floor / times.median if times and floor and times.median > 0 else None,
        "eager_ms": eager.to_json() if eager else None,
        "host_us": difference(arm.host),
        "peak_mib": arm.peak_mib,
        "error_out": arm.errors[0],
        "error_grad": arm.errors[1],
        "config": _config(case, meter) if arm.name == peers.OURS and arm.status == "ok" else None,
        "case_seconds": round(time.perf_counter() - started, 2),
    }


def _config(case: Case, meter: Meter) -> list[dict[str, Any]] | None:
    if case.op.name in chunked.OPS:  # their kernels are other ops'
        return None
    found = registry.explain(case.op.name, case.sizes, case.dtype, meter.device)
    return [
        {
            "tunable": one.tunable,
            "layer": one.chosen.layer,
            "provenance": dict(one.chosen.provenance),
            "config": one.chosen.config.to_json(),
        }
        for one in found
    ]
