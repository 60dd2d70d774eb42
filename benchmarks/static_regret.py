"""How good a choice without the device would have been, on the one device we have.

    python benchmarks/static_regret.py collect OUT.json --seconds 140      on the GPU: candidates timed and certified
    python benchmarks/static_regret.py report OUT.json -o REGRET.json      anywhere: the model's choices against them
    python benchmarks/static_regret.py modelled OUT.json -o REGRET.json    the same without a compiler, from TTIR alone
    python benchmarks/static_regret.py fit OUT.json                        the model's constants from them
    python benchmarks/static_regret.py page                                docs/vendors.md's table, from the results

`collect` takes every op at up to three workloads and, for each kernel it launches there, the heuristic, what ships for
this device and a spread of the rest of its space. Each is compiled, certified and timed as the tuner times it: graph
replays on inputs that exceed the L2 cache, interleaved. `report` needs no GPU; it never sees a time before it has
chosen.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROUNDS = 5
ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmarks" / "results" / "static-regret-h200.json"
PAGE, MARKS = ROOT / "docs" / "vendors.md", ("<!-- static_regret.py page -->", "<!-- end -->")


def opened(path: str, mode: str = "r") -> Any:
    """A text file, compressed where its name says so."""
    return gzip.open(path, mode + "t", encoding="utf-8") if path.endswith(".gz") else open(path, mode, encoding="utf-8")


# -- collect ---------------------------------------------------------------------------------------------------------


def workloads_of(op: Any, itemsize: int = 2, most: int = 3) -> list[tuple[str, tuple[int, ...]]]:
    """The first workload, then those whose keys differ most in width: the narrowest and the widest."""
    named = [(name, tuple(sizes)) for name, sizes in op.workloads.items()]
    width = {name: op.tunables[0].key(*sizes, itemsize)[0] for name, sizes in named}
    rest = sorted(named[1:], key=lambda item: width[item[0]])
    chosen = named[:1]
    for item in (*rest[:1], *rest[-1:]):
        if item not in chosen and len(chosen) < most:
            chosen.append(item)
    return chosen


def candidates_of(tunable: Any, target: Any, key: tuple[int, ...], shipped: Any, most: int) -> list[Any]:
    """The heuristic, the shipped entry, then half neighbours and half a spread of the space; cache hints left out
    but in these two, as no certificate can tell them apart."""
    from liger_hw.autotune import space

    legal, _ = space.legal(tunable, target, key)
    heuristic = legal[0]
    plain = list(dict.fromkeys([heuristic, *(replace(config, hint=heuristic.hint) for config in legal)]))
    first = [heuristic, *([shipped] if shipped is not None and shipped != heuristic else [])]
    return list(dict.fromkeys([*first, *space.shortlist(plain, heuristic, most, {}, f"{tunable.name}{key}")]))


def jobs_of(ops: list[Any], target: Any, shipped: dict, most: int) -> list[dict[str, Any]]:
    """What is timed: each kernel of an op's own at each key that its chosen workloads launch, with its candidates."""
    from liger_hw import registry
    from liger_hw.autotune.jobs import launched as launched_by

    jobs = {}
    for op in ops:
        for workload, sizes in workloads_of(op):
            try:
                launched = launched_by(op.name, sizes, "bfloat16", target)
            except Exception as error:
                print(f"{op.name} {sizes}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            for name, key in launched:
                tunable, (owner, variant) = registry.get_tunable(name), name.split(".")
                if owner != op.name or (name, key) in jobs:
                    continue  # another op's kernel is timed with that op
                configs = candidates_of(tunable, target, key, shipped.get((owner, variant, key)), most)
                head = {"op": owner, "variant": variant, "key": key, "sizes": sizes, "workload": workload}
                jobs[name, key] = {**head, "version": tunable.version, "configs": configs}
    return list(jobs.values())


def certify(job: tuple) -> list[dict[str, Any]]:
    """In a worker process: for each candidate, the certificates of every kernel whose launch depends on it."""
    from liger_hw.autotune import static
    from liger_hw.autotune.compile import certificate_from, compiled
    from liger_hw.autotune.jobs import Job
    from liger_hw.backends import LaunchConfig, Target

    op, variant, key, sizes, dtype, configs, target = job
    target = Target.from_json(target)
    one = Job(op, variant, tuple(key), tuple(sizes), dtype)
    traced = [static.launches_of(one, target, LaunchConfig.from_json(config)) for config in configs]
    return [
        {"config": config, "kernels": [certificate_from(one, compiled(one)).to_json() for one in launches]}
        for config, launches in zip(configs, static.launches_that_differ(one.name, traced))
    ]


def collect(arguments: argparse.Namespace) -> None:
    import torch

    from liger_hw import registry
    from liger_hw.autotune import measure, store
    from liger_hw.backends import target_of

    began = time.monotonic()
    device = torch.device("cuda", 0)
    target = target_of(device)
    stored = {name: store.answers(entries) for name, entries in store.read(target).items()}
    shipped = {name: entries[0].config for name, entries in stored.items() if entries}
    chosen = [op for op in registry.ops().values() if not arguments.ops or op.name in arguments.ops.split(",")]
    jobs = jobs_of(chosen, target, shipped, arguments.candidates)
    first = {op.name: next(iter(op.workloads.values())) for op in chosen}
    jobs.sort(
        key=lambda job: job["sizes"] != first[job["op"]]
    )  # every op once before any op twice: the time may run out
    print(
        f"{len(jobs)} launches, {sum(len(j['configs']) for j in jobs)} candidates, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(max(1, (os.cpu_count() or 2) - 1))
    for job in jobs:
        configs = [config.to_json() for config in job["configs"]]
        task = (job["op"], job["variant"], job["key"], job["sizes"], "bfloat16", configs, target.to_json())
        job["task"] = pool.apply_async(certify, (task,))
    records, place, bench = [], None, None
    with measure.Clock(device) as clock:
        copy_gbs = clock.copy_rate()
        registry.set_table(target, {})
        for number, job in enumerate(jobs):
            left = arguments.seconds - (time.monotonic() - began)
            if left < 3:
                print(f"out of time after {number} launches", flush=True)
                break
            try:
                certified = job["task"].get(timeout=left)
            except Exception as error:
                print(f"{job['op']}.{job['variant']} {job['sizes']}: {type(error).__name__}: {error}", flush=True)
                continue
            try:
                if place != (job["op"], job["sizes"]):
                    place, bench = (job["op"], job["sizes"]), None
                    torch.cuda.empty_cache()
                    bench = measure.Bench(registry.get_op(job["op"]), job["sizes"], torch.bfloat16, clock)
                tunable = registry.get_tunable(f"{job['op']}.{job['variant']}")
                stage = measure.Stage(bench, tunable, job["key"])
                times, rejected = timed(stage, job["configs"], measure.Rejected)
            except Exception as error:
                print(f"{job['op']}.{job['variant']} {job['sizes']}: {type(error).__name__}: {error}", flush=True)
                place = None
                continue
            head = {name: job[name] for name in ("op", "variant", "workload", "version")} | {
                "key": list(job["key"]),
                "sizes": list(job["sizes"]),
            }
            rows = []
            for config, certificate in zip(job["configs"], certified):
                rows.append({**certificate, "us": times.get(config, []), "rejected": rejected.get(config, "")})
            records.append(
                {
                    **head,
                    "heuristic": 0,
                    "shipped": job["configs"][1].to_json() == shipped_text(shipped, job),
                    "bytes": stage.bytes,
                    "candidates": rows,
                }
            )
            del stage
        pool.terminate()
    facts = {
        "device": target.name,
        "target": target.to_json(),
        "copy_gbs": round(copy_gbs, 1),
        "torch": torch.__version__,
    }
    facts |= {"triton": store.triton_version(), "date": store.today(), "seconds": round(time.monotonic() - began, 1)}
    with opened(arguments.file, "w") as file:
        file.write(json.dumps({"kind": "static-measurements", **facts})[:-1] + ', "launches": [\n')
        file.write(",\n".join(json.dumps(record) for record in records) + "\n]}\n")
    print(f"{len(records)} launches, {sum(len(r['candidates']) for r in records)} candidates in {facts['seconds']} s")


def shipped_text(shipped: dict, job: dict) -> Any:
    config = shipped.get((job["op"], job["variant"], job["key"]))
    return config.to_json() if config is not None else None


def timed(stage: Any, configs: list[Any], refusal: type) -> tuple[dict[Any, list[float]], dict[Any, str]]:
    """Microseconds of each configuration that runs, interleaved; why the others do not."""
    arms, rejected = {}, {}
    for config in configs:
        try:
            arms[config] = stage.prepare(config)
        except refusal as reason:
            rejected[config] = str(reason)
    samples = stage.time(list(arms.values()), ROUNDS)
    return {config: [round(us, 3) for us in one] for config, one in zip(arms, samples)}, rejected


# -- report ----------------------------------------------------------------------------------------------------------

BOUNDS = {
    **{"chain": (0.5, 7), "barrier": (10, 150), "barrier_per_warp": (0, 10)},
    **{"issue": (1, 2), "overlap": (1.3, 4), "latency": (300, 1000)},
}


def from_record(record: dict[str, Any], target: Any) -> Any:
    """A certificate from what `Certificate.to_json` gave."""
    from liger_hw.autotune.compile import Launch, certificate_from
    from liger_hw.backends import LaunchConfig

    launch = Launch(
        target=target,
        tunable=record["tunable"],
        key=tuple(record["key"]),
        layer=record["layer"],
        config=LaunchConfig.from_json(record["config"]),
        kernel=f"{record['tunable']}:{record['kernel']}",
        args=(),
        options=(),
        grid=tuple(record["grid"]),
        sizes=tuple(record["sizes"]),
    )
    return certificate_from(launch, record)


class Data:
    """The measurements: per launch, the certificates of each candidate's kernels and its median time."""

    def __init__(self, path: str) -> None:
        from liger_hw.autotune import static
        from liger_hw.backends import Target, backend

        with opened(path) as file:
            self.raw = json.load(file)
        self.target = Target.from_json(self.raw["target"])
        self.pace = backend(self.target.vendor).pace(self.target)
        self.launches, self.left_out = [], 0
        for launch in self.raw["launches"]:
            kernels, times, configs = [], [], []
            for candidate in launch["candidates"]:
                certificates = [from_record(kernel, self.target) for kernel in candidate["kernels"]]
                try:
                    modelled = bool(certificates) and static.time_of(certificates) > 0
                except ValueError:
                    modelled = False
                if modelled and candidate["us"]:
                    kernels.append(certificates)
                    times.append(statistics.median(candidate["us"]))
                    configs.append(candidate["config"])
                elif not kernels:
                    break  # the heuristic itself: nothing to compare with
                else:
                    self.left_out += 1
            if len(kernels) >= 3:
                names = {name: launch[name] for name in ("op", "variant", "workload", "key", "sizes")}
                self.launches.append({**names, "kernels": kernels, "us": times, "configs": configs})

    def predicted(self, launch: dict, rates: Any, latency: float) -> list[float]:
        from liger_hw.autotune import static

        pace = replace(self.pace, latency=latency)
        return [sum(static.microseconds(one, pace, rates) for one in kernels) for kernels in launch["kernels"]]


def outcome(times: list[float], predicted: list[float], level: str = "binary") -> dict[str, Any]:
    """What the choice costs over the best of the sample. The heuristic (first) stays unless it loses by the margin."""
    from liger_hw.autotune.static import MARGINS

    chosen = min(range(len(times)), key=predicted.__getitem__)
    if predicted[chosen] >= predicted[0] * (1 - MARGINS[level]):
        chosen = 0
    best = min(times)
    return {
        "candidates": len(times),
        "chosen": chosen,
        "regret": round(times[chosen] / best - 1, 4),
        "heuristic_regret": round(times[0] / best - 1, 4),
        "rank_correlation": round(correlation(predicted, times), 4),
    }


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    top = sum((i - mean) * (j - mean) for i, j in zip(x, y))
    bottom = math.sqrt(sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y))
    return top / bottom if bottom else 0.0


def loss(data: Data, launches: list[dict], rates: Any, latency: float) -> float:
    """Mean regret of a choice drawn near the predicted best, which is smooth, and a little of the error of the "
    "ratios."""
    total = 0.0
    for launch in launches:
        predicted = data.predicted(launch, rates, latency)
        least, best = min(predicted), min(launch["us"])
        weights = [math.exp(-25 * math.log(p / least)) for p in predicted]
        soft = sum(w * min(t / best - 1, 1.5) for w, t in zip(weights, launch["us"])) / sum(weights)
        total += soft + 0.15 * min(1.0, statistics.pstdev(math.log(p / t) for p, t in zip(predicted, launch["us"])))
    return total / len(launches)


def fit(data: Data, launches: list[dict], steps: int, seed: int = 0) -> tuple[Any, float]:
    """Rates (and the latency) that lower the loss on `launches`: a random walk within physical bounds from the "
    "middle."""
    from liger_hw.autotune import static

    chances = random.Random(seed)
    point = {name: math.sqrt(max(low, 0.1) * high) for name, (low, high) in BOUNDS.items()}

    def at(point: dict) -> tuple[Any, float]:
        return replace(static.RATES, **{k: v for k, v in point.items() if k != "latency"}), point["latency"]

    best = loss(data, launches, *at(point))
    for step in range(steps):
        trial = dict(point)
        for name in chances.sample(sorted(point), chances.randint(1, 3)):
            low, high = BOUNDS[name]
            trial[name] = min(high, max(low, trial[name] * math.exp(chances.gauss(0, 0.5 * 0.998**step))))
        if (found := loss(data, launches, *at(trial))) < best:
            best, point = found, trial
    return at(point)


def summary(rows: list[dict]) -> dict[str, Any]:
    regrets = sorted(row["regret"] for row in rows)
    heuristic = sorted(row["heuristic_regret"] for row in rows)

    def three(values: list[float]) -> dict[str, float]:
        p95 = values[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)]
        return {"mean": round(statistics.fmean(values), 4), "p95": p95, "worst": values[-1]}

    mean_rank = round(statistics.fmean(row["rank_correlation"] for row in rows), 4)
    return {
        "launches": len(rows),
        "regret": three(regrets),
        "heuristic_regret": three(heuristic),
        "rank_correlation": mean_rank,
    }


def report(arguments: argparse.Namespace) -> None:
    from liger_hw.autotune import static
    from liger_hw.autotune.static import MARGINS

    data = Data(arguments.file)
    rows = []
    for launch in data.launches:
        predicted = data.predicted(launch, static.RATES, data.pace.latency)
        names = {name: launch[name] for name in ("op", "variant", "workload", "key", "sizes")}
        found = outcome(launch["us"], predicted)
        times = {
            "chosen_us": launch["us"][found["chosen"]],
            "best_us": min(launch["us"]),
            "heuristic_us": launch["us"][0],
        }
        rows.append({**names, **found, **times, "predicted_us": round(predicted[found["chosen"]], 2)})
    facts = {name: data.raw[name] for name in ("device", "copy_gbs", "torch", "triton", "date")}
    result = {
        "kind": "static-regret",
        **facts,
        "margins": MARGINS,
        "candidates": sum(len(x["us"]) for x in data.launches),
    }
    result["not_modelled"] = data.left_out
    result["as_shipped"] = summary(rows)
    print("as shipped", json.dumps(result["as_shipped"]), flush=True)
    if arguments.steps:
        result |= leave_out(data, arguments.steps)
    result["by_launch"] = rows
    if arguments.output:
        write_report(arguments.output, result)


def leave_out(data: Data, steps: int) -> dict[str, Any]:
    """The constants fitted again without an op, and judged on that op alone: how the model does on what it never "
    "saw."""
    rows = []
    for op in sorted({launch["op"] for launch in data.launches}):
        rates, latency = fit(data, [launch for launch in data.launches if launch["op"] != op], steps)
        mine = [launch for launch in data.launches if launch["op"] == op]
        found = [outcome(launch["us"], data.predicted(launch, rates, latency)) for launch in mine]
        rows += found
        print(f"without {op}:", json.dumps(summary(found)["regret"]), flush=True)
    print("leave one op out", json.dumps(summary(rows)))
    return {"leave_one_op_out": summary(rows), "fit_steps": steps}


def modelled(arguments: argparse.Namespace) -> None:
    """The same judgement where kernels go no further than TTIR, as they do for targets without a compiler."""
    from liger_hw.autotune import compile as aot
    from liger_hw.autotune import static
    from liger_hw.autotune.jobs import Job
    from liger_hw.backends import LaunchConfig, backend

    data = Data(arguments.file)
    backend(data.target.vendor).triton_target = lambda target: None
    rows, compiled = [], {}
    for launch in data.launches:
        job = Job(launch["op"], launch["variant"], tuple(launch["key"]), tuple(launch["sizes"]), "bfloat16")
        configs = [LaunchConfig.from_json(config) for config in launch["configs"]]
        try:
            traced = [static.launches_of(job, data.target, config) for config in configs]
            traced = static.launches_that_differ(job.name, traced)
            predicted = []
            for launches in traced:
                for one in launches:
                    if one.compile_key() not in compiled:
                        compiled[one.compile_key()] = aot.certificate_from(one, aot.compiled(one))
                predicted.append(static.time_of(replace(compiled[one.compile_key()], launch=one) for one in launches))
        except Exception as error:  # the kernel has changed since it was measured
            print(f"{job.name} {job.sizes}: {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(outcome(launch["us"], predicted, "ttir"))
    print(json.dumps(summary(rows)))
    if arguments.output:
        with open(arguments.output) as file:
            found = json.load(file)
        found["modelled"] = summary(rows)
        write_report(arguments.output, found)


def write_report(path: str, result: dict[str, Any]) -> None:
    rows = result["by_launch"]
    with open(path, "w") as file:
        file.write(json.dumps({k: v for k, v in result.items() if k != "by_launch"})[:-1] + ', "by_launch": [\n')
        file.write(",\n".join(json.dumps(row) for row in rows) + "\n]}\n")


def table(found: dict[str, Any]) -> str:
    """What docs/vendors.md says of a report."""

    def row(name: str, part: dict[str, float], rank: float | str = "") -> str:
        return f"| {name} | {part['mean']:.1%} | {part['p95']:.1%} | {part['worst']:.0%} | {rank} |"

    rows = [row("the heuristic", found["as_shipped"]["heuristic_regret"])]
    arms = {
        "as_shipped": "`static`: the model, from certificates",
        "leave_one_op_out": "the same, each op left out of the fit",
        "modelled": "`modelled`: the model, from TTIR alone",
    }
    for arm, name in arms.items():
        if part := found.get(arm):
            rows.append(row(name, part["regret"], f"{part['rank_correlation']:.2f}"))
    ops = len({launch["op"] for launch in found["by_launch"]})
    most = max(launch["candidates"] for launch in found["by_launch"])
    where = f"{found['device']}, torch {found['torch']}, Triton {found['triton']}, {found['date'][:10]}"
    return "\n".join(
        [
            f"{found['as_shipped']['launches']} launches of {ops} ops, {found['candidates']} candidates, at most "
            f"{most} of a launch ({where}):",
            "",
            "| choice | mean regret | 95th percentile | worst | rank correlation |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
    )


def page(arguments: argparse.Namespace) -> None:
    text = PAGE.read_text()
    head, rest = text.split(MARKS[0])
    _, tail = rest.split(MARKS[1])
    PAGE.write_text(f"{head}{MARKS[0]}\n{table(json.loads(PUBLISHED.read_text()))}\n{MARKS[1]}{tail}")


def fitted(arguments: argparse.Namespace) -> None:
    data = Data(arguments.file)
    rates, latency = fit(data, data.launches, arguments.steps)
    print(f"latency {latency:.0f}\n{rates}")
    print(json.dumps(summary([outcome(x["us"], data.predicted(x, rates, latency)) for x in data.launches])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("collect")
    one.add_argument("file")
    one.add_argument("--seconds", type=float, default=140)
    one.add_argument("--candidates", type=int, default=16)
    one.add_argument("--ops")
    one.set_defaults(run=collect)
    two = commands.add_parser("report")
    two.add_argument("file")
    two.add_argument("-o", "--output")
    two.add_argument("--steps", type=int, default=0, help="of each fit without one op; 0 leaves that out (default)")
    two.set_defaults(run=report)
    four = commands.add_parser("modelled")
    four.add_argument("file")
    four.add_argument("-o", "--output", help="a report to add this to")
    four.set_defaults(run=modelled)
    three = commands.add_parser("fit")
    three.add_argument("file")
    three.add_argument("--steps", type=int, default=600)
    three.set_defaults(run=fitted)
    commands.add_parser("page").set_defaults(run=page)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
