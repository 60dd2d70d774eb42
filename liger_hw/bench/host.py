"""Where the host time of an eager call goes: under small batches this, not the kernel, is the training speed.

`calls` compares forward and forward plus backward of each op with its peers in one process. `parts` splits a liger_hw
call: each part is measured on its own, through the very objects the call uses, with small inputs on the same device.

    registry   Tunable.plan on a hit                       launch     the fast path, kernel launch included
    alloc      one torch.empty                             ordinary   the same launch through Triton's own launcher
    launcher   allocate, resolve, launch: no dispatcher    operator   the launcher through torch.library
    forward    the public function, autograd included      full       forward and backward
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, Callable, Sequence

import torch

from .. import registry
from ..cli._values import table
from ..kernels import _launch, _op
from . import ops, peers
from .timing import Budget, Inputs, Meter, OutOfBudget, Work, first_line


def measure(
    names: Sequence[str],
    meter: Meter,
    dtype: torch.dtype = torch.bfloat16,
    against: Sequence[str] = ("liger", "torch"),
    budget: Budget | None = None,
) -> dict[str, Any]:
    """Host microseconds of each op's first workload with few rows. Raises `ValueError` for an unknown op."""
    budget = budget or Budget()
    table_ = [registry.get_op(name) for name in names] if names else list(registry.ops().values())
    rows, parts, ended = [], [], ""
    for op in table_:
        try:
            budget.check()
        except OutOfBudget as stop:
            ended = str(stop)
            break
        case = ops.Case(op, *next(iter(op.workloads.items())), dtype)
        inputs = ops.make_inputs(case, ops.with_few_rows(case, 16), meter.device, 0)
        for name in (peers.OURS, *against):
            row = {"op": op.name, "arm": name, "sizes": list(ops.with_few_rows(case, 16)), "status": "ok", "note": ""}
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


def breakdown(op: registry.Op, inputs: Inputs, meter: Meter) -> dict[str, Any]:
    """Microseconds of each part of one call; a part that this device does not go through is None."""
    seen = _watch(op, inputs)
    found: dict[str, Any] = dict.fromkeys(("registry", "alloc", "launch", "ordinary", "launcher", "operator"))
    found |= {"launches_fwd": len(seen.launches_fwd), "launches_full": len(seen.launches_full), "fast_launch": False}
    if seen.launches_fwd:
        arguments = seen.launches_fwd[0]
        plan, kernel, grid, args, flags = arguments
        device = args[0].device
        found["registry"] = _us(meter, lambda: plan.tunable.plan(device, plan.key), 1000)
        found["fast_launch"] = plan.compiled is not None
        found["launch"] = _us(meter, lambda: _launch.launch(*arguments))
        found["ordinary"] = _us(meter, lambda: _launch._launch_ordinary(*arguments))
    first = inputs.given[0]
    found["alloc"] = _us(meter, lambda: torch.empty(first.shape, dtype=first.dtype, device=first.device))
    if seen.operators:
        name, args = seen.operators[0]
        overload = getattr(torch.ops.liger_hw, name).default
        with torch.no_grad():
            found["operator"] = _us(meter, lambda: overload(*args))
            if seen.launches_fwd:
                found["launcher"] = _us(meter, lambda: _op.launchers[name](*args))
    found["forward"] = meter.host_us(Work(op.function, [inputs], backward=False))
    found["full"] = meter.host_us(Work(op.function, [inputs], backward=True))
    return found


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


class _Seen:
    def __init__(self) -> None:
        self.launches_fwd: list[tuple] = []
        self.launches_full: list[tuple] = []
        self.operators: list[tuple[str, tuple]] = []


def _watch(op: registry.Op, inputs: Inputs) -> _Seen:
    """One forward and one full call of an op, with every launch and operator it makes written down."""
    seen = _Seen()
    original = _launch.launch
    modules = [m for m in _kernel_modules() if m is not _launch and getattr(m, "launch", None) is original]
    launches: list[tuple] = []

    def launch(plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple = ()) -> None:
        launches.append((plan, kernel, grid, args, flags))
        original(plan, kernel, grid, args, flags)

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if function.namespace == "liger_hw":
                seen.operators.append((function._schema.name.split("::")[1], args))
            return function(*args, **(kwargs or {}))

    work = Work(op.function, [inputs], backward=True)
    work.call()
    with torch.no_grad(), Operators():
        op.function(*inputs.args, **inputs.kwargs)
    for module in modules:
        module.launch = launch
    try:
        work.forward(inputs)
        seen.launches_fwd = list(launches)
        launches.clear()
        work.call()
        seen.launches_full = list(launches)
    finally:
        for module in modules:
            module.launch = original
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
    columns = ("registry", "alloc", "launch", "ordinary", "launcher", "operator", "forward", "full", "launches_full")
    parts = [("op", *columns)]
    for row in found["parts"]:
        cells = [row.get(name) for name in columns]
        parts.append((row["op"], *("-" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in cells)))
    base = found["baseline"]
    notes = [f"{r['arm']} {r['op']}: {r['note']}" for r in found["calls"] if r["status"] == "error"]
    notes += [f"breakdown of {r['op']}: {r['note']}" for r in found["parts"] if r.get("note")]
    return "\n".join(
        [
            *(table(parts).splitlines()),
            f"an empty autograd.Function: {base['autograd_forward']:.1f} us forward, {base['autograd_full']:.1f} us full",
            "",
            *(table(lines).splitlines()),
            *sorted(set(notes)),
            *([f"stopped early: {found['ended']}"] if found["ended"] else []),
        ]
    )
