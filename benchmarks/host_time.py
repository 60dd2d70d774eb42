"""Where the host time of an eager call goes: under small batches this, not the kernel, is the training speed.

    python benchmarks/host_time.py [OP ...] [--json results/host-<device>.json]

`calls` compares each op with its peers in one process, the arms' blocks in turn, so that what slows the machine for a
while slows all of them:

    fwd     one forward
    full    one forward and its own backward: a backward wakes torch's engine thread and waits for it, once
    batch   one of 8 forwards that share one backward, as the layers of a model do

The arm `floor` is torch itself: an autograd.Function that takes and returns the same tensors, saves its inputs and
computes nothing. What it costs, no op in Python can save; `net` compares what is left.

`parts` splits a liger_hw call: each part is timed on its own, through the very objects the call uses, with small inputs
on the same device.

    registry      Tunable.plan on a hit                  launch        the fast path, the driver's launch included
    alloc         one torch.empty_like                   ordinary      the same launch through Triton's own launcher
    bare          that compiled kernel's launch alone    operator      the launcher through torch.library, under compile
    launcher      allocate, resolve and launch
    dispatch      operator minus launcher                autograd      forward minus launcher: checks and the Function
    bwd_launcher  the backward's launchers               engine        the rest of full: autograd's own backward

`least_full_us` of an op is the floor with the op's bare launches and allocations added, at what one costs on the main
thread: what a call with its backward would take if nothing else were done, neither checks nor look-ups. A part of
Liger's time, it says which share can be reached at all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from liger_hw import registry
from liger_hw.bench import ops, peers, report
from liger_hw.bench.inputs import Inputs, Work
from liger_hw.bench.timing import Budget, Meter, OutOfBudget
from liger_hw.cli.arguments import dtype_name, listed, seconds, torch_dtype, usable_device
from liger_hw.runtime import launch as _launch
from liger_hw.runtime.launch import Observer, observing
from liger_hw.text import first_line, table


def measure(
    names: Sequence[str],
    meter: Meter,
    dtype: torch.dtype = torch.bfloat16,
    against: Sequence[str] = ("liger", "torch"),
    budget: Budget | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Host microseconds of each op's first workload with few rows; `ended` says why not of all. Raises `ValueError`
    for an unknown op."""
    budget = budget or Budget()
    chosen = [registry.get_op(name) for name in names] if names else list(registry.ops().values())
    rows, parts, ended = [], [], ""
    try:
        for number, op in enumerate(chosen, 1):
            progress(f"[{number}/{len(chosen)}] {budget.spent:.0f} s  {op.name}")
            budget.check()
            found, part = _of_op(op, meter, dtype, against)
            rows, parts = [*rows, *found], [*parts, part]
            meter.forget()
    except OutOfBudget as stop:
        ended = str(stop)
    except KeyboardInterrupt:
        ended = "interrupted"
    return {"calls": rows, "parts": parts, "ended": ended}


def _of_op(
    op: registry.Op, meter: Meter, dtype: torch.dtype, against: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row for each arm, what our own call consists of)."""
    case = ops.Case(op, *next(iter(op.workloads.items())), dtype)
    sizes = ops.with_few_rows(case, 16)
    if meter.module is None:  # there the arithmetic is the host's too
        sizes = tuple(min(size, 64) for size in sizes)
    sets = [ops.make_inputs(case, sizes, meter.device, seed) for seed in range(BATCH)]
    arms = {row["arm"]: row for row in compare(op, (peers.OURS, *against, FLOOR), sets, meter)}
    rows = [{**row, "sizes": list(sizes)} for row in arms.values()]
    try:
        part, floor = breakdown(op, sets[0], meter), arms[FLOOR].get("full_us")
        if None not in (floor, part["bare"], part["allocs_full"]):
            part["least_full_us"] = floor + part["launches_full"] * part["bare"] + part["allocs_full"] * part["alloc"]
    except Exception as error:
        part = {"note": first_line(error)}
    return rows, {"op": op.name, **part}


def compare(
    op: registry.Op, arms: Sequence[str], sets: list[Inputs], meter: Meter, calls: int = 20, rounds: int = 12
) -> list[dict[str, Any]]:
    """Rows with `fwd_us`, `full_us` and `batch_us` of each arm, medians of rounds in which every arm has its turn."""
    rows, timed = [], {}
    for name in arms:
        row = {"op": op.name, "arm": name, "status": "ok", "note": ""}
        rows.append(row)
        try:
            function = _floor(op, sets[0]) if name == FLOOR else peers.arm(name, op)
            ways = {
                "fwd_us": (Work(function, sets[:1], backward=False).call, calls, 1),
                "full_us": (Work(function, sets[:1], backward=True).call, calls, 1),
                "batch_us": (_batch(function, sets), max(1, calls // len(sets)), len(sets)),
            }
            for call, _, _ in ways.values():
                for _ in range(3):
                    call()
            timed[name] = ways
        except Exception as error:
            row.update(status="absent" if isinstance(error, peers.Absent) else "error", note=first_line(error))
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, ways in timed.items():
            for way, (call, times, share) in ways.items():
                meter.synchronize()
                start = time.perf_counter()
                for _ in range(times):
                    call()
                spent = (time.perf_counter() - start) * 1e6
                samples.setdefault((name, way), []).append(spent / times / share)
    meter.synchronize()
    for row in rows:
        row.update({way: statistics.median(samples[row["arm"], way]) for way in timed.get(row["arm"], ())})
    return rows


def _batch(function: Callable[..., Any], sets: list[Inputs]) -> Callable[[], Any]:
    """A forward on every set of inputs, then one backward through all of them."""
    work = Work(function, sets, backward=True)
    leaves = [leaf for inputs in sets for leaf in inputs.leaves]
    flowing = [inputs.gradient_for(i, o) for inputs in sets for i, o in enumerate(work.forward(inputs))]

    def call() -> Any:
        outputs = [output for inputs in sets for output in work.forward(inputs)]
        return torch.autograd.grad(outputs, leaves, flowing, allow_unused=True)

    return call


def _floor(op: registry.Op, inputs: Inputs) -> Callable[..., Any]:
    """An autograd.Function of the op's differentiable inputs, with as many outputs; it computes nothing."""
    results = Work(op.function, [inputs], backward=False).forward(inputs)
    n_outputs = min(len(results), len(inputs.leaves))

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *leaves: torch.Tensor) -> Any:
            ctx.save_for_backward(*leaves)
            outputs = tuple([leaf.detach() for leaf in leaves[:n_outputs]])
            return outputs if n_outputs > 1 else outputs[0]

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return ctx.saved_tensors

    def call(*args: Any, **kwargs: Any) -> Any:
        return Nothing.apply(*[arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad])

    return call


FLOOR = "floor"
ALLOCATED = "allocation.all.allocated"
BATCH = 8
PARTS = ("registry", "alloc", "bare", "launch", "ordinary", "launcher", "dispatch", "operator", "autograd", "forward")
PARTS += ("bwd_launcher", "engine", "full")


def breakdown(op: registry.Op, inputs: Inputs, meter: Meter, calls: int = 20, blocks: int = 12) -> dict[str, Any]:
    """Microseconds of each part of one call; a part that this device does not go through is None."""

    def us(call: Callable[[], Any], calls: int = calls) -> float:
        with torch.no_grad():
            return meter.host_us(call, calls, blocks)

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
        found["ordinary"] = us(lambda: _launch.launch_ordinary(*arguments))
        found["bare"] = _bare(us, *arguments)
    found["allocs_full"] = _allocations(op, inputs, meter)
    first = inputs.tensors[0]
    found["alloc"] = us(lambda: torch.empty_like(first))
    found["operator"] = sum(us(partial(call.overload, *args)) for call, args in seen.operators)
    found["launcher"] = sum(us(partial(call, *args)) for call, args in seen.operators)
    found["bwd_launcher"] = sum(us(partial(call, *args)) for call, args in seen.bwd_operators)
    if seen.launches:
        found["dispatch"] = found["operator"] - found["launcher"]
    found["forward"] = meter.host_us(Work(op.function, [inputs], backward=False).call, calls, blocks)
    found["full"] = meter.host_us(Work(op.function, [inputs], backward=True).call, calls, blocks)
    found["autograd"] = found["forward"] - found["launcher"]
    found["engine"] = found["full"] - found["forward"] - found["bwd_launcher"]
    return found


def _bare(
    us: Callable[..., float], plan: registry.Plan, kernel: Any, grid: tuple, args: tuple, flags: tuple
) -> float | None:
    """The launch of a compiled kernel, arguments ready; None where Triton launches."""
    launchers = (plan.compiled or {}).values() if _launch.CAN_BE_FAST else ()
    run, head, constants = next((one for one in launchers if one[2][: len(flags)] == flags), (None, (), ()))
    if run is None:
        return None
    passed = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    index = args[0].get_device()
    given = (*(*grid, 1, 1)[:3], _launch.current_stream(index), *head, *passed, *constants)
    return us(lambda: run(*given))


def _allocations(op: registry.Op, inputs: Inputs, meter: Meter) -> int | None:
    """Tensors that one call with its backward asks the device's allocator for; None where it does not count."""
    work = Work(op.function, [inputs], backward=True)
    work.call()
    stats = getattr(meter.module, "memory_stats", None)
    before = stats() if stats else {}
    if ALLOCATED not in before:
        return None
    result = work.call()
    made = stats()[ALLOCATED] - before[ALLOCATED]
    del result
    return made


@dataclass
class _Seen:
    """Arguments of every launch and operator of one call, forward and backward apart."""

    launches: list[tuple]
    operators: list[tuple[Any, tuple]]
    bwd_launches: list[tuple]
    bwd_operators: list[tuple[Any, tuple]]


class _Watch(Observer):
    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.operators: list[tuple[Any, tuple]] = []

    def launch(self, proceed: Any, plan: Any, kernel: Any, grid: tuple, args: tuple, flags: tuple) -> None:
        self.launches.append((plan, kernel, grid, args, flags))
        proceed(plan, kernel, grid, args, flags)

    def operator(self, proceed: Any, call: Any, args: tuple) -> Any:
        self.operators.append((call, args))
        return proceed(call, args)


def _watch(op: registry.Op, inputs: Inputs) -> _Seen:
    """Every launch and operator of one call, and of its backward."""
    work = Work(op.function, [inputs], backward=True)
    work.call()
    with observing(_Watch(), every_thread=True) as forward:
        outputs = work.forward(inputs)
    with observing(_Watch(), every_thread=True) as backward:
        if outputs:
            work.gradients(inputs, outputs)
    return _Seen(forward.launches, forward.operators, backward.launches, backward.operators)


def as_text(found: dict[str, Any]) -> str:
    arms = list(dict.fromkeys(row["arm"] for row in found["calls"]))
    lines = [("op", *(f"{arm} fwd / full / batch us" for arm in arms), "of liger", "net")]
    for op in dict.fromkeys(row["op"] for row in found["calls"]):
        rows = {row["arm"]: row for row in found["calls"] if row["op"] == op}
        cells = [" / ".join(f"{r[way]:.1f}" for way in WAYS) if "full_us" in r else r["status"] for r in rows.values()]
        shares = _shares(rows)
        lines.append((op, *cells, *(" / ".join(f"{share:.2f}" for share in each) or "-" for each in shares)))
    parts = [("op", *PARTS, "launches", "allocations", "least full")]
    together = 6  # columns of parts in a table
    for row in found["parts"]:
        cells = ["-" if row.get(name) is None else f"{row[name]:.2f}" for name in PARTS]
        least = "-" if row.get("least_full_us") is None else f"{row['least_full_us']:.1f}"
        counts = [row.get(name) for name in ("launches_full", "allocs_full")]
        parts.append((row["op"], *cells, *("-" if count is None else str(count) for count in counts), least))
    notes = [f"{r['arm']} {r['op']}: {r['note']}" for r in found["calls"] if r["status"] == "error"]
    notes += [f"breakdown of {r['op']}: {r['note']}" for r in found["parts"] if r.get("note")]
    return "\n".join(
        [
            *(
                table([(row[0], *row[at : at + together]) for row in parts]) + "\n"
                for at in range(1, len(parts[0]), together)
            ),
            *(table(lines).splitlines()),
            *sorted(set(notes)),
            *([f"stopped early: {found['ended']}"] if found["ended"] else []),
        ]
    )


WAYS = ("fwd_us", "full_us", "batch_us")


def _shares(rows: dict[str, dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Our share of Liger's time, as measured and with the floor taken from both; empty without Liger."""
    ours, theirs, floor = rows[peers.OURS], rows.get("liger", {}), rows.get(FLOOR, {})
    if not all("full_us" in row for row in (ours, theirs, floor)):
        return [], []
    return [ours[w] / theirs[w] for w in WAYS], [(ours[w] - floor[w]) / (theirs[w] - floor[w]) for w in WAYS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops (default: all)")
    parser.add_argument("--device", help="torch device (default: the accelerator, else cpu)")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="bf16 (default), fp16 or fp32")
    parser.add_argument(
        "--against", type=listed(str, "peers"), default=["liger", "torch"], help="peers of `liger-hw bench`"
    )
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help="start no op after this long")
    parser.add_argument("--json", metavar="FILE", help="write every figure; - prints them instead of the tables")
    arguments = parser.parse_args()
    with Meter(usable_device(arguments.device)) as meter:
        dtype, budget = torch_dtype(arguments.dtype), Budget(arguments.budget)
        found = measure(arguments.ops, meter, dtype, arguments.against, budget, partial(print, file=sys.stderr))
        document = {"machine": report.machine(meter.device), **found}
    if arguments.json:
        report.save(arguments.json, document)
    if arguments.json != "-":
        print(as_text(found))
    return 130 if found["ended"] == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main())
