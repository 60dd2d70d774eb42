"""`liger-hw autotune --device cuda`: measure launch configurations on this machine and keep the winners.

    liger-hw autotune --device cuda                                      every op at its own workloads
    liger-hw autotune --device cuda --model mistral-7b --seq 2048,4096   the shapes of a model
    liger-hw autotune --device cuda --from-misses                        keys without an entry in earlier runs
    liger-hw autotune --device gfx942                                    for a device that is not here, by compiling
    liger-hw autotune --device xpu                                       the same for every known Intel architecture

Winners go to the user cache (docs/registry.md). `liger-hw cache export` writes a table that can be shipped. You can
interrupt it: every measurement is stored, and `--resume` continues.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from typing import Any, Callable

from .. import env, registry
from ..autotune import models, space, store
from ..autotune.jobs import OUT_OF_BUDGET, Job, Result, at_keys, from_shapes, shapes
from ..autotune.workers import CompilePool, RemoteMeasurer, WorkerDied, WorkerError
from ..backends import VENDORS, Target, backend, backends, known_target, target_of
from ..text import StatusLine, fold, json_text, table, time_left
from . import UsageError, needs, user_errors
from .arguments import SEQS, add_model_sizes, dtype_name, listed, positive, seconds, shape


def autotune_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to tune")
    add = what.add_argument
    add("--device", help="cuda, rocm, xpu, cuda:0, a device or an architecture (default: the GPU here)")
    add_model_sizes(what, "only these ops, or kernels such as rms_norm.fwd")
    sizes = "problem sizes, for ops that take as many (default: each op's own workloads, see `liger-hw explain`)"
    add("--shapes", type=listed(shape, "shapes such as 8192x4096"), default=[], metavar="AxB,..", help=sizes)
    add("--from-misses", action="store_true", help="keys without an entry in earlier runs on this kind of device")
    add("--dtype", type=dtype_name, default="bfloat16", help="fp32, bf16 or fp16 (default bf16)")
    add = parser.add_argument_group("how").add_argument
    limit = "stop after about this time, and try fewer candidates if it is short (default: no limit)"
    add("--budget", type=seconds, metavar="SECONDS", help=limit)
    add("--workers", type=positive, help="compile processes (default: one less than the cores, at most 16)")
    limit = "maximum number of candidates at a kernel's first shape (default 96; 24 for all architectures of a vendor)"
    add("--candidates", type=positive, help=limit)
    add("--resume", action="store_true", help="continue an interrupted run, with its measurements")
    add("--dry-run", action="store_true", help="print what would be tuned, for any architecture without the device too")
    add("--json", action="store_true", help="print results as JSON (progress goes to stderr)")


def run_autotune(arguments: argparse.Namespace) -> int:
    if env.launcher_number("RANK", 0) != 0:
        print("liger-hw autotune: only rank 0 measures and writes", file=sys.stderr)
        return 0
    device, absent_targets = _device(arguments.device)
    chosen = arguments.model or arguments.shapes or arguments.from_misses
    arguments.first = len(absent_targets) > 1 and not chosen  # all workloads of all architectures would take a day
    arguments.candidates = arguments.candidates or (24 if len(absent_targets) > 1 else 96)
    if arguments.dry_run:
        return _dry_run(arguments, device, absent_targets)
    if why_not := store.unwritable():
        raise UsageError(why_not)
    return _choose_without_device(arguments, absent_targets) if absent_targets else _measure(arguments, device)


# -- what to tune ----------------------------------------------------------------------------------------------------


def _device(name: str | None) -> tuple[str, list[Target]]:
    """(torch device to measure on, []), or ("", Targets of the name, for a device or vendor not in this machine).

    Raises `UsageError`.
    """
    import torch

    gpus = {b: getattr(torch, b.device_type).device_count() for b in backends() if b.device_type != "cpu"}
    here = ", ".join(f"{b.vendor} x{count}" for b, count in gpus.items() if count) or "none"
    kind, _, index = (name or "").partition(":")
    if kind == "cpu":
        if not registry.interpreting():
            raise UsageError(
                "the cpu runs each op's reference, which has nothing to tune (LIGER_HW_INTERPRET=1 tries the tuner out)"
            )
        return "cpu", []
    for one, count in gpus.items():
        is_there = (not index or index.isdigit()) and int(index or 0) < count
        if is_there and (kind in ("", one.vendor) or one.is_called(target_of(torch.device(one.device_type, 0)), kind)):
            return f"{one.device_type}:{index or 0}", []
    if name is None:
        raise UsageError(
            "no GPU here, so nothing can be measured. `--device rocm` (cuda, xpu, h200 ...) chooses for "
            "a GPU that is not here, by compiling and a model of the time"
        )
    if name in VENDORS:
        return "", [known_target(arch) for arch in backend(name).known_archs()]
    where = f"(GPUs here: {here}; torch {torch.__version__})"
    if kind in VENDORS:
        raise UsageError(f"{name!r} is not in this machine {where}")
    try:
        return "", [known_target(name)]
    except ValueError as error:
        raise UsageError(f"{error} {where}") from None


def _jobs(arguments: argparse.Namespace, target: Target) -> tuple[list[Job], list[str]]:
    """(jobs, errors of ops and kernels without a job)"""
    if (arguments.batch or arguments.seq) and not arguments.model:
        raise UsageError("--batch and --seq go with --model")
    if arguments.from_misses and (arguments.model or arguments.shapes):
        raise UsageError("--from-misses says what to tune: --model and --shapes do not go with it")
    names = arguments.ops or list(registry.ops())
    with user_errors():
        kernels = {name: registry.get_tunable(name) for name in names if "." in name}
        ops = list(dict.fromkeys(registry.get_op(name.partition(".")[0]).name for name in names))
        chosen = [models.find(name) for name in arguments.model]
    if arguments.from_misses:
        chosen_jobs, problems = at_keys(name for name in store.misses(target) if name[0] in ops)
    else:
        pairs = shapes(ops, chosen, arguments.batch or [1], arguments.seq or SEQS, arguments.shapes)
        if arguments.first:
            pairs = list({op: (op, sizes) for op, sizes in reversed(pairs)}.values())[::-1]
        if not pairs:
            counts = ", ".join(f"{name} ({len(registry.get_op(name).tunables[0].dims)})" for name in ops)
            raise UsageError(f"no op takes these shapes or is used by these models; sizes each op takes: {counts}")
        chosen_jobs, problems = from_shapes(pairs, arguments.dtype, target)
    partly_chosen = set(ops) - set(names)  # ops of which only some kernels are named
    chosen_jobs = [job for job in chosen_jobs if job.op not in partly_chosen or job.name in kernels]
    if arguments.from_misses and not chosen_jobs and not problems:
        raise UsageError(f"no misses are recorded for {target.name} that have no entry yet")
    return chosen_jobs, problems


def _dry_run(arguments: argparse.Namespace, device: str, absent_targets: list[Target]) -> int:
    import torch

    documents = []
    for target in absent_targets or [target_of(torch.device(device))]:
        jobs, problems = _jobs(arguments, target)
        rows = []
        for job in jobs:
            legal, refused = space.legal(registry.get_tunable(job.name), target, job.key)
            rows.append({**job.to_json(), "legal": len(legal), "refused": dict(refused)})
        documents.append({"target": target.to_json(), "jobs": rows, "problems": problems})
        if not arguments.json:
            lines = [("kernel", "key", "sizes", "legal", "refused")]
            for job, row in zip(jobs, rows):
                counts = str(row["legal"]), str(sum(row["refused"].values()))
                lines.append((job.name, str(job.key), "x".join(map(str, job.sizes)), *counts))
            print(f"{target.name} ({target.vendor} {target.arch}): {len(jobs)} to tune\n{table(lines)}")
            for problem in problems:
                print(f"not planned: {problem}")
    if arguments.json:
        print(json_text(documents[0] if len(documents) == 1 else documents, indent=2))
    return 0


# -- on the device ---------------------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, device: str) -> int:
    from ..autotune.tuner import Effort, Tuner

    with contextlib.ExitStack() as stack:
        measurer = stack.enter_context(contextlib.closing(RemoteMeasurer(device)))
        try:
            facts = measurer.facts()
        except (WorkerDied, WorkerError) as error:
            raise UsageError(f"the measuring process does not start on {device}: {error}") from None
        target, pool, progress = facts["target"], None, _Progress(arguments)
        if not device.startswith("cpu"):
            workers = arguments.workers or max(1, min(16, (os.cpu_count() or 2) - 1))
            pool = stack.enter_context(CompilePool(workers, seconds=60.0))
        jobs, problems = progress.plan(target, f"copy {facts['copy_gbs']:.0f} GB/s")
        tuner = Tuner(
            target,
            measurer,
            facts=facts,
            pool=pool,
            save=lambda name, entry: store.add(target, [(name, entry)]),
            known=store.lines_of(target) if arguments.resume else (),
            effort=Effort(first=arguments.candidates, later=min(36, arguments.candidates)),
            progress=progress.update,
        )
        results = progress.run(tuner, jobs, arguments.budget)
    if arguments.json:
        data = {"facts": {**facts, "target": target.to_json()}, "results": [r.to_json() for r in results]}
        print(json_text({**data, "problems": problems, "interrupted": progress.interrupted}, indent=2))
    failed = bool(results) and all(r.error for r in results)
    stored = f"; {sum(r.stored for r in results)} stored"
    return progress.conclude(stored, "continue with the same command and --resume", failed)


# -- for a device that is not here -----------------------------------------------------------------------------------


def _choose_without_device(arguments: argparse.Namespace, targets: list[Target]) -> int:
    """Choose a configuration for every job of every target, store it and print it."""
    from ..autotune.static import MARGINS, StaticTuner

    needs("triton")
    progress = _Progress(arguments)
    progress.line(
        f"{arguments.device} is not in this machine: kernels are compiled for it as far as Triton can, and ranked by a "
        "model. Nothing is measured; entries that were measured stay."
    )
    if arguments.first:
        progress.line("Each op at the first of its workloads; --model M tunes for a model's shapes.")
    documents, rows, exports = [], [], []
    deadline = time.monotonic() + (arguments.budget or math.inf)
    with CompilePool(arguments.workers or os.cpu_count() or 1, seconds=120.0) as pool:
        for number, target in enumerate(targets):
            how, kind, margin = "compiled", "static", MARGINS["binary"]
            if backend(target.vendor).triton_target(target) is None:
                how, kind, margin = "lowered to TTIR (no compiler for it here)", "modelled", MARGINS["ttir"]
            rule = f"choices with a predicted gain of more than {margin:.0%} are stored as `{kind}`"
            jobs, problems = progress.plan(target, f"{how}; {rule}")
            tuner = StaticTuner(target, pool, candidates=arguments.candidates, save=_unless_measured(target))
            results = progress.run(tuner, jobs, (deadline - time.monotonic()) / (len(targets) - number))
            facts = {"target": target.to_json(), "triton": store.triton_version(), "date": store.today()}
            facts |= {"margin": margin, "results": [r.to_json() for r in results], "problems": problems}
            documents.append({"kind": "static", **facts, "interrupted": progress.interrupted})
            rows += results
            if any(result.stored for result in results):
                exports.append(target.arch if len(targets) > 1 else arguments.device)
            if progress.interrupted:
                break
    failed, stored = sum(bool(row.error) for row in rows), sum(row.stored for row in rows)
    if arguments.json:
        print(json_text(documents[0] if len(targets) == 1 else documents, indent=1))
    elif exports:
        print(f"The choices are in {store.root()}. On the machine with the GPU:", file=sys.stderr)
        for name in exports:
            export = f"liger-hw cache export --device {name} -o {name}.json"
            print(f"  {export}    # here; copy it; there: liger-hw cache import {name}.json", file=sys.stderr)
        print("  then: liger-hw autotune    # measures there, and replaces slower entries", file=sys.stderr)
    elif not progress.interrupted and not progress.left_out:
        print("nothing is predicted to beat the heuristics by enough, so there is nothing to ship", file=sys.stderr)
    counts = f": of {progress.count} kernels and keys {stored} stored, {failed} failed"
    return progress.conclude(counts, "the same command continues; Triton has cached the compiled kernels", failed > 0)


def _unless_measured(target: Target) -> Callable[[tuple, Any], bool]:
    """A function that stores a choice unless its key has a measurement."""
    measured = {name for name, entries in store.read(target).items() if any(e.kind == "measured" for e in entries)}
    return lambda name, entry: name not in measured and store.add(target, [(name, entry)])


# -- progress --------------------------------------------------------------------------------------------------------


class _Progress:
    """A status line, and a plain line for each finished job.

    interrupted: whether Ctrl-C ended the run; left_out: number of jobs that the budget left out
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.budget = arguments, arguments.budget
        self.stream = sys.stderr if arguments.json else sys.stdout
        self.status, self.left_out, self.interrupted = StatusLine(), 0, False
        self.count = self.total = 0

    def plan(self, target: Target, how: str) -> tuple[list[Job], list[str]]:
        """Print and return `_jobs` of a target."""
        self.status.update(f"{target.arch}: tracing the launches")
        jobs, problems = _jobs(self.arguments, target)
        self.total += len(jobs)
        self.line(f"{target.name} ({target.vendor} {target.arch}), {len(jobs)} kernels and keys, {how}")
        self.line(f"winners go to {store.file_of(target)}")
        for problem in problems:
            self.line(f"not planned: {problem}")
        return jobs, problems

    def run(self, tuner: Any, jobs: list[Job], budget: float | None) -> list[Result]:
        """The results of a tuner's run; fewer if it is interrupted."""
        results: list[Result] = []
        try:
            for result in tuner.run(jobs, budget):
                results.append(result)
                if result.note == OUT_OF_BUDGET:
                    self.left_out += 1
                else:
                    self.count += 1
                    self.line(f"[{self.count}/{self.total}] {_job_text(result.job)}: {_outcome(result)}{self._eta()}")
        except KeyboardInterrupt:
            self.interrupted = True
        return results

    def conclude(self, counts: str, again: str, failed: bool) -> int:
        """Print the last line, and how to continue if jobs were left out; returns the exit code."""
        self.line(f"{'interrupted' if self.interrupted else 'done'} after {self.elapsed():.0f} s{counts}")
        if self.left_out:
            spent = f"the budget of {self.budget:.0f} s is spent"
            self.line(f"{self.left_out} of {self.total} were not begun: {spent}; {again}")
        if self.interrupted:
            self.line(again)
            return 130
        return 1 if failed else 0

    def elapsed(self) -> float:
        return time.monotonic() - self.status.began

    def line(self, text: str) -> None:
        self.status.end()
        print(fold(text, "    "), file=self.stream, flush=True)

    def update(self, job: Job, text: str) -> None:
        self.status.update(f"[{self.count + 1}/{self.total}] {_job_text(job)}: {text}{self._eta()}")

    def _eta(self) -> str:
        limit = math.inf if self.budget is None else self.budget - self.elapsed()
        return time_left(self.elapsed(), self.count, self.total, limit)


def _job_text(job: Job) -> str:
    return f"{job.name} {'x'.join(map(str, job.sizes))}"


def _outcome(result: Result) -> str:
    if result.error:
        return f"failed: {result.error.splitlines()[0]}"
    if not result.heuristic_us:
        return result.note
    tried = f", {result.tried} tried" + f" ({result.failed} of them dropped)" * bool(result.failed)
    if result.evidence and not result.gain:
        return f"{result.note}, {result.heuristic_us:.1f} us by the model{tried}"
    details = "by the model" if result.evidence else f"noise {result.noise:.1%}"
    details += f"; {result.floor_share:.0%} of the floor" if result.floor_share else ""
    times = f"{result.heuristic_us:.2f} -> {result.winner_us:.2f} us, gain {result.gain:.1%} ({details}){tried}"
    note = ", ".join(filter(None, ["stored" * result.stored, result.note]))
    return f"{times}, {result.seconds:.1f} s" + f", {note}" * bool(note)
