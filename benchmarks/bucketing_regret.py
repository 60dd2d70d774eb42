"""Regret of bucketed keys: at shapes between the tuned ones, what the stored tables answer against the best found.

python benchmarks/bucketing_regret.py [FILE.json] [--device cuda] [--budget SECONDS] [--candidates 12] [--shapes 30]
    [--share DIR]    take shapes from those that no other process with this folder has; FILE has everybody's

For each tunable that an op launches at a shape: the resolved configuration, the heuristic and a shortlist of the space
(what the table knows at other keys of the tunable among it) are compiled by worker processes, checked, captured and
timed interleaved and L2-cold, as the tuner does. The best few and the resolved one are timed again, the best of those
and the resolved one once more: regret = resolved / best - 1, at least 0. A shape's regret is that of its kernels' sums.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from share import rows_in, untaken

from liger_hw import registry
from liger_hw.autotune import jobs, measure, space, store
from liger_hw.autotune.workers import CompilePool
from liger_hw.backends import target_of
from liger_hw.bench.report import save

SHAPES = [
    *(("rms_norm", s) for s in ((700, 3072), (1500, 3584), (3000, 5120), (6000, 3072), (12000, 2560), (50000, 3072))),
    *(("fused_add_rms_norm", s) for s in ((700, 3584), (1500, 4096), (3000, 3072), (6000, 5120), (12000, 2560))),
    *(("swiglu", s) for s in ((700, 11008), (1500, 6144), (3000, 13824), (6000, 9728), (12000, 18944), (50000, 5632))),
    *(("rope", (1, *s)) for s in ((700, 32, 8, 128), (1500, 28, 4, 128), (3000, 40, 8, 128), (6000, 24, 8, 128))),
    *(("rope", (3, *s)) for s in ((4096, 40, 8, 128), (5000, 16, 4, 96))),
    *(("cross_entropy", s) for s in ((700, 32000), (1500, 100352), (3000, 32000), (3000, 202048), (6000, 50257))),
    *(("layer_norm", s) for s in ((1500, 5120), (12000, 3072))),
]


def candidates(tunable, target, key, stored, resolved, most):
    """The resolved configuration, the heuristic, and as many more as `most` allows."""
    everything, _ = space.legal(tunable, target, key)
    known = [e.config for (op, v, _), es in stored.items() if f"{op}.{v}" == tunable.name for e in store.answers(es)]
    scores = {config: 1.0 + 0.01 * place for place, config in enumerate(dict.fromkeys(known))}
    chosen = space.shortlist(everything, everything[0], most, scores, f"{tunable.name}{key}")
    return list(dict.fromkeys((resolved, everything[0], *chosen)))


def medians(stage, arms, rounds):
    return [statistics.median(samples) for samples in stage.time(arms, rounds)]


def regret_of(stage, arms, resolved):
    """(microseconds of the resolved configuration, of the best, the best) after three rounds of elimination."""
    for rounds, kept in ((4, 5), (15, 1), (25, 0)):
        times = medians(stage, arms, rounds)
        ranked = sorted(zip(times, range(len(arms))))
        if not kept or len(arms) == 1:
            break
        best = [arms[place] for _, place in ranked[:kept]]
        arms = [*best, *(arm for arm in arms if arm.config == resolved and arm not in best)]
    mine = next(t for t, arm in zip(times, arms) if arm.config == resolved)
    return mine, min(mine, ranked[0][0]), arms[ranked[0][1]].config


def planned_at(op, sizes, clock, target, stored, most, pool):
    """What is to be measured at this shape, for each tunable of the op; the workers begin to compile it."""
    bench = measure.Bench(op, sizes, torch.bfloat16, clock)
    named = {tunable.variant: tunable for tunable in op.tunables}
    todo = []
    for name, key in jobs.launched(op.name, sizes, "bfloat16", target):
        variant = name.removeprefix(f"{op.name}.")
        if variant not in named:  # a kernel that the op shares
            continue
        registry.set_table(target, stored)
        answer = registry.choose(named[variant], target, key)
        registry.set_table(target, {})
        configs = candidates(named[variant], target, key, stored, answer.config, most)
        todo.append((named[variant], key, answer, configs))
        for config in configs:
            recipe = f"{named[variant].name} {sizes} {config.to_text()}"
            pool.submit(recipe, "candidate", target, op.name, sizes, "bfloat16", named[variant].name, config)
    return bench, todo


def measured(bench, todo, pool):
    """One row for each tunable of what `planned_at` returned."""
    op, sizes = bench.op, bench.sizes
    for tunable, key, answer, configs in todo:
        stage = measure.Stage(bench, tunable, key)
        arms, refused = [], 0
        for config in configs:
            pool.wait(f"{tunable.name} {sizes} {config.to_text()}")
            try:
                arms.append(stage.prepare(config))
            except (measure.Rejected, torch.OutOfMemoryError):
                refused += 1
        if all(arm.config != answer.config for arm in arms):
            raise RuntimeError(f"{tunable.name} at {sizes}: the resolved {answer.config.to_text()} cannot be timed")
        mine, best_us, best = regret_of(stage, arms, answer.config)
        yield {
            "op": op.name,
            "variant": tunable.variant,
            "sizes": list(sizes),
            "key": list(key),
            "layer": answer.layer,
            "tuned_at": answer.provenance.get("sizes"),
            "resolved": answer.config.to_json(),
            "best": best.to_json(),
            "resolved_us": round(mine, 3),
            "best_us": round(best_us, 3),
            "regret": round(mine / best_us - 1, 5),
            "candidates": len(arms),
            "refused": refused,
        }


def summary(regrets):
    ordered = sorted(regrets)
    if not ordered:
        return {"count": 0}
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"count": len(ordered), "median": statistics.median(ordered), "p90": p90, "worst": ordered[-1]}


TARGET = {"median": 0.02, "worst": 0.08}


def verdict(rows, target_name, seconds, problems):
    """What FILE says: regret of shapes (their kernels' sums), of kernels, and of kernels that a stored entry
    answered."""
    shapes = dict.fromkeys((row["op"], tuple(row["sizes"])) for row in rows)
    sums = [[row for row in rows if (row["op"], tuple(row["sizes"])) == shape] for shape in shapes]
    per_shape = [sum(r["resolved_us"] for r in these) / sum(r["best_us"] for r in these) - 1 for these in sums]
    tuned = [row["regret"] for row in rows if row["layer"] not in ("heuristic", "safe")]
    found = summary(per_shape)
    return {
        "what": "regret of bucketed keys at shapes between the tuned ones: resolved time / best measured time - 1",
        "device": target_name,
        "torch": torch.__version__,
        "triton": store.triton_version(),
        "date": store.today(),
        "seconds": seconds,
        "target": TARGET,
        "met": bool(per_shape) and all(found[name] < most for name, most in TARGET.items()),
        "shapes_asked": len(SHAPES),
        "per_shape": found,
        "per_kernel": summary([row["regret"] for row in rows]),
        "per_kernel_tuned_entry": summary(tuned),
        "problems": problems,
        "rows": rows,
    }


def in_turns():
    """Numbers of SHAPES, the ops in turn."""
    seen = [(sum(name == before for before, _ in SHAPES[:n]), n) for n, (name, _) in enumerate(SHAPES)]
    return [number for _, number in sorted(seen)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--candidates", type=int, default=12)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only so many, the ops in turn")
    parser.add_argument("--share", type=Path)
    parser.add_argument("--workers", type=int, help="compiling processes (default: all cores but two)")
    arguments = parser.parse_args()
    began = time.monotonic()
    folder = arguments.share or Path(tempfile.mkdtemp(prefix="bucketing-regret-"))
    folder.mkdir(parents=True, exist_ok=True)
    problems = []
    todo = in_turns()[: arguments.shapes]
    with measure.Clock(
        torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    ) as clock:
        target = target_of(clock.device)
        stored = store.read(target)
        workers = 0 if clock.module is None else arguments.workers or max(2, (os.cpu_count() or 2) - 2)
        pool = CompilePool(workers, seconds=60.0)

        def keep():
            found = verdict(rows_in(folder), target.name, round(time.monotonic() - began, 1), problems)
            if arguments.file:
                save(arguments.file, found)
            return found

        def finish(place, plan):
            rows = []
            try:
                for row in measured(*plan, pool):
                    rows.append(row)
                    print(
                        f"{row['regret']:7.2%}  {row['layer']:<15} {row['op']}.{row['variant']} {row['sizes']}",
                        flush=True,
                    )
                save(folder / f"{place:04d}.json", {"rows": rows})
            except Exception as error:
                failed(plan[0].op.name, plan[0].sizes, error)
            keep()

        def failed(name, sizes, error):
            problems.append(f"{name} {sizes}: {type(error).__name__}: {error}")
            print(problems[-1], flush=True)

        ahead = None
        for place in untaken(folder, len(todo)):
            name, sizes = SHAPES[todo[place]]
            if time.monotonic() - began > arguments.budget:
                problems.append(f"{name} {sizes}: the budget was spent")
                break
            sizes = tuple(min(size, 32) for size in sizes) if clock.module is None else sizes
            try:
                plan = planned_at(registry.get_op(name), sizes, clock, target, stored, arguments.candidates, pool)
            except Exception as error:
                failed(name, sizes, error)
                continue
            if ahead:
                finish(*ahead)
            ahead = place, plan
        if ahead:
            finish(*ahead)
        pool.close()
    print(json.dumps({k: v for k, v in keep().items() if k != "rows"}, indent=1))


if __name__ == "__main__":
    main()
