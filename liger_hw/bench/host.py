"""Where the host time of an eager call goes: under small batches this, not the kernel, is the training speed.

`calls` compares forward and forward plus backward of each op with its peers in one process. `parts` splits a liger_hw
call: each part is timed on its own, through the very objects the call uses, with small inputs on the same device.

    registry      Tunable.plan on a hit                  launch        the fast path, the driver's launch included
    alloc         one torch.empty                        ordinary      the same launch through Triton's own launcher
    launcher      allocate, resolve and launch           operator      the same through torch.library
    dispatch      operator minus launcher                autograd      forward minus operator: checks and the Function
    bwd_operator  the backward's operators               engine        the rest of full: autograd's own backward
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Sequence

import torch

from .. import registry
from ..cli._values import table
from ..kernels import _launch, _op
from . import ops, peers
from .inputs import Inputs, Work
from .timing import Budget, Meter, OutOfBudget, first_line


def measure(
    names: Sequence[str],
    meter: Meter,
    dtype: torch.dtype = torch.bfloat16,
    against: Sequence[str] = ("liger", "torch"),
    budget: Budget | None = None,
) -> dict[str, Any]:
    """Host microseconds of each op's first workload with few rows. Raises `ValueError` for an unknown op."""
    budget = budget or Budget()
    chosen = [registry.get_op(name) for name in names] if names else list(registry.ops().values())
    rows, parts, ended = [], [], ""
    for op in chosen:
        try:
            budget.check()
        except OutOfBudget as stop:
            ended = str(stop)
            break
        case = ops.Case(op, *next(iter(op.workloads.items())), dtype)
        sizes = ops.with_few_rows(case, 16)
        if meter.module is None:  # there the arithmetic is the host's too
            sizes = tuple(min(size, 64) for size in sizes)
        inputs = ops.make_inputs(case, sizes, meter.device, 0)
        for name in (peers.OURS, *against):
            row = {"op": op.name, "arm": name, "sizes": list(sizes), "status": "ok", "note": ""}
            try:
                function = peers.arm(name, op)
                row["fwd_us"] = meter.host_us(Work(function, [inputs], backward=False))
                row["full_us"] = meter.host_us(Work(function, [inputs], backward=True))
            except Exception as error:
                row.update(status="absent" if isinstance(error, peers.Absent) else "error", note=first_line(error))
            rows.append(row)
        try:
            parts.append({"op": op.name, **breakdown(op, inputs, meter)})
        except Exception as error:
            parts.append({"op": op.name, "note": first_line(error)})
        meter.forget()
    return {"calls": rows, "parts": parts, "baseline": baseline(meter), "ended": ended}


PARTS = ("registry", "alloc", "launch", "ordinary", "launcher", "dispatch", "operator", "autograd", "forward")
PARTS += ("bwd_operator", "engine", "full")


def breakdown(op: registry.Op, inputs: Inputs, meter: Meter, calls: int = 20, blocks: int = 12) -> dict[str, Any]:
    """Microseconds of each part of one call; a part that this device does not go through is None."""

    def us(call: Callable[[], Any], calls: int = calls) -> float:
        with torch.no_grad():
            return _us(meter, call, calls, blocks)

    seen = _watch(op, inputs)
    found: dict[str, Any] = dict.fromkeys(PARTS)
    found |= {"launches_fwd": len(seen.launches), "launches_full": len(seen.launches) + len(seen.bwd_launches)}
    if seen.launches:
        arguments = seen.launches[0]
        plan = arguments[0]
        device = arguments[3][0].device
        found["fast_launch"] = plan.compiled is not None
        found["registry"] = us(lambda: plan.tunable.plan(device, plan.key), 1000)
        found["launch"] = us(lambda: _launch.launch(*arguments))
        found["ordinary"] = us(lambda: _launch._launch_ordinary(*arguments))
    first = inputs.given[0]
    found["alloc"] = us(lambda: torch.empty(first.shape, dtype=first.dtype, device=first.device))
    found["operator"] = sum(us(partial(call, *args)) for call, args in seen.operators)
    found["bwd_operator"] = sum(us(partial(call, *args)) for call, args in seen.bwd_operators)
    if seen.launches:
        found["launcher"] = sum(us(partial(_launcher(call), *args)) for call, args in seen.operators)
        found["dispatch"] = found["operator"] - found["launcher"]
    found["forward"] = meter.host_us(Work(op.function, [inputs], backward=False), calls, blocks)
    found["full"] = meter.host_us(Work(op.function, [inputs], backward=True), calls, blocks)
    found["autograd"] = found["forward"] - found["operator"]
    found["engine"] = found["full"] - found["forward"] - found["bwd_operator"]
    return found


def _launcher(overload: Any) -> Callable[..., Any]:
    return _op.launchers[overload._schema.name.split("::")[1]]


def baseline(meter: Meter) -> dict[str, float]:
    """What torch itself takes: an autograd.Function that returns a saved-for-nothing clone of its input, both ways."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy

    inputs = Inputs((torch.randn(16, 16, device=meter.device, requires_grad=True),))
    return {
        "autograd_forward": meter.host_us(Work(Nothing.apply, [inputs], backward=False)),
        "autograd_full": meter.host_us(Work(Nothing.apply, [inputs], backward=True)),
    }


@dataclass
class _Seen:
    """Arguments of every launch and operator of one call, forward and backward apart."""

    launches: list[tuple] = field(default_factory=list)
    operators: list[tuple[Any, tuple]] = field(default_factory=list)
    bwd_launches: list[tuple] = field(default_factory=list)
    bwd_operators: list[tuple[Any, tuple]] = field(default_factory=list)


def _watch(op: registry.Op, inputs: Inputs) -> _Seen:
    """Run one call with every launch and operator of the kernel files written down, then put them back."""
    work = Work(op.function, [inputs], backward=True)
    work.call()
    launches: list[tuple] = []
    operators: list[tuple[Any, tuple]] = []
    original = _launch.launch

    def launch(plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple = ()) -> None:
        launches.append((plan, kernel, grid, args, flags))
        original(plan, kernel, grid, args, flags)

    def noted(overload: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            operators.append((overload, args))
            return overload(*args)

        return call

    replaced = []
    for module in _kernel_modules():
        for name, value in list(vars(module).items()):
            if value is original and module is not _launch:
                replaced.append((module, name, value, launch))
            elif isinstance(value, torch._ops.OpOverload) and value.namespace == "liger_hw":
                replaced.append((module, name, value, noted(value)))
    try:
        for module, name, _, instead in replaced:
            setattr(module, name, instead)
        outputs = work.forward(inputs)
        seen = _Seen(list(launches), list(operators))
        launches.clear()
        operators.clear()
        if outputs:
            work.gradients(inputs, outputs)
        seen.bwd_launches, seen.bwd_operators = launches, operators
    finally:
        for module, name, value, _ in replaced:
            setattr(module, name, value)
    return seen


def _kernel_modules() -> list[Any]:
    package = _launch.__name__.rsplit(".", 1)[0]
    return [module for name, module in list(sys.modules.items()) if name.startswith(package + ".") and module]


def _us(meter: Meter, call: Callable[[], Any], calls: int = 20, blocks: int = 12) -> float:
    for _ in range(3):
        call()
    samples = []
    for _ in range(blocks):
        meter.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    meter.synchronize()
    return statistics.median(samples)


def as_text(found: dict[str, Any]) -> str:
    arms = list(dict.fromkeys(row["arm"] for row in found["calls"]))
    lines = [("op", *(f"{arm} fwd / full us" for arm in arms), "of liger")]
    for op in dict.fromkeys(row["op"] for row in found["calls"]):
        rows = {row["arm"]: row for row in found["calls"] if row["op"] == op}
        cells = [f"{r['fwd_us']:.1f} / {r['full_us']:.1f}" if "full_us" in r else r["status"] for r in rows.values()]
        ours, theirs = rows[peers.OURS], rows.get("liger", {})
        ratio = "-"
        if "full_us" in ours and "full_us" in theirs:
            ratio = f"{ours['fwd_us'] / theirs['fwd_us']:.2f} / {ours['full_us'] / theirs['full_us']:.2f}"
        lines.append((op, *cells, ratio))
    parts = [("op", *PARTS, "launches")]
    for row in found["parts"]:
        cells = ["-" if row.get(name) is None else f"{row[name]:.2f}" for name in PARTS]
        parts.append((row["op"], *cells, str(row.get("launches_full", "-"))))
    base = found["baseline"]
    notes = [f"{r['arm']} {r['op']}: {r['note']}" for r in found["calls"] if r["status"] == "error"]
    notes += [f"breakdown of {r['op']}: {r['note']}" for r in found["parts"] if r.get("note")]
    return "\n".join(
        [
            *(table(parts).splitlines()),
            f"an empty autograd.Function: {base['autograd_forward']:.1f} us, full {base['autograd_full']:.1f} us",
            "",
            *(table(lines).splitlines()),
            *sorted(set(notes)),
            *([f"stopped early: {found['ended']}"] if found["ended"] else []),
        ]
    )
