"""The shipped tables of GPUs that are not here: choices made by compiling, kept current as kernels change.

    python benchmarks/static_tables.py [ARCH ...]             judge kernels that are new or have changed since
    python benchmarks/static_tables.py --likely [ARCH ...]    of these, first those with an entry in another's table
    python benchmarks/static_tables.py --recheck [ARCH ...]   only hold entries of changed kernels against the heuristic
    python benchmarks/static_tables.py --check [ARCH ...]     compile nothing, count what is out of date; 1 if any is

A job is one kernel at the key of its op's first workload. What became of each is kept in results/static-tables.json,
with the version of the kernel and the heuristic it was held against, so that a second run does only what has changed,
and a run that is ended (or out of --seconds) loses one job. Measured entries stay; a key that was measured on the
architecture's family gets none. A search takes minutes an architecture on two cores; --recheck compiles the entry and
the heuristic alone, a few seconds an entry, and leaves jobs without an entry to the heuristic until the next search.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Iterable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from liger_hw import files, registry
from liger_hw.autotune import jobs as planning
from liger_hw.autotune import store, tables
from liger_hw.autotune.jobs import Job
from liger_hw.autotune.static import StaticTuner
from liger_hw.autotune.workers import CompilePool
from liger_hw.backends import Target, backend, known_target
from liger_hw.registry import Entry

JUDGED = ROOT / "benchmarks" / "results" / "static-tables.json"
DTYPE = "bfloat16"


def archs() -> list[str]:
    """Every architecture without a device of its own among the measured ones."""
    known = (arch for vendor in ("rocm", "cuda", "xpu") for arch in backend(vendor).known_archs())
    measured = {path.stem.split("-")[0] for path in store.shipped_folder("cuda").glob("*-*.json")}
    return [arch for arch in known if arch not in measured]


def table_of(target: Target) -> Path:
    return store.shipped_folder(target.vendor) / f"{target.arch}.json"


def read(target: Target) -> dict[tables.Name, Entry]:
    path = table_of(target)
    return dict(tables.load(path)[1]) if path.exists() else {}


def write(target: Target, entries: dict[tables.Name, Entry]) -> None:
    """A table without entries says that the heuristic stays everywhere."""
    files.write_text(table_of(target), tables.render(store.header(target), entries.items()))


def read_judged() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(JUDGED.read_text())["archs"] if JUDGED.exists() else {}


def write_judged(judged: dict[str, dict[str, dict[str, Any]]]) -> None:
    """One line a job."""
    parts = []
    for arch, jobs in sorted(judged.items()):
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in sorted(jobs.items())
        )
        parts.append(f"{json.dumps(arch)}: {{\n{lines}\n}}")
    head = '{"kind": "static-tables", "archs": {\n'
    files.write_text(JUDGED, head + ",\n".join(parts) + "\n}}\n")


def label(job: Job) -> str:
    return f"{job.name} {','.join(map(str, job.key))}"


def stamp(target: Target, job: Job) -> dict[str, Any]:
    """What a judgement of the job rests on, beside the model: another stamp makes it out of date."""
    tunable = registry.get_tunable(job.name)
    heuristic = json.dumps(tunable.heuristic(target, job.key).to_json(), sort_keys=True)
    return {"version": tunable.version, "heuristic": hashlib.sha256(heuristic.encode()).hexdigest()[:12]}


def planned(target: Target, ops: Iterable[str]) -> list[Job]:
    """A job for each kernel that the ops launch at their first workload."""
    wanted = list({op: (op, sizes) for op, sizes in reversed(planning.shapes(ops, [], [], [], []))}.values())[::-1]
    found, problems = planning.from_shapes(wanted, DTYPE, target)
    for problem in problems:
        print(f"{target.arch}: not planned: {problem}", file=sys.stderr)
    return found


def of_entry(target: Target, name: tables.Name, entry: Entry) -> Job | None:
    """The job of a stored entry; None when nothing launches this key at its sizes any more."""
    sizes, dtype = tuple(entry.provenance["sizes"]), entry.provenance["dtype"]
    op, variant, key = name
    if f"{op}.{variant}" not in registry.tunables():
        return None
    launched = planning.launched(op, sizes, dtype, target)
    return Job(op, variant, key, sizes, dtype) if (f"{op}.{variant}", key) in launched else None


def likely(target: Target) -> set[tables.Name]:
    """What the tables of other architectures with its width of warp have entries for: most other jobs stay at the "
    "heuristic."""
    others = (known_target(arch) for arch in archs() if arch != target.arch)
    return {name for other in others if other.warp_size == target.warp_size for name in read(other)}


def is_guess(entry: Entry) -> bool:
    return entry.provenance["kind"] in ("static", "modelled")


def is_stale(name: tables.Name, entry: Entry) -> bool:
    tunable = registry.tunables().get(f"{name[0]}.{name[1]}")
    return tunable is None or entry.version != tunable.version


class Arch:
    """One architecture's table and what was judged of it."""

    def __init__(self, name: str, judged: dict[str, dict[str, dict[str, Any]]]) -> None:
        self.target = known_target(name)
        self.all_judged, self.judged = judged, judged.setdefault(name, {})
        self.entries = read(self.target)
        table = store.read(self.target)
        self.measured = {name for name, entries in table.items() if any(entry.kind == "measured" for entry in entries)}
        self.stale = [name for name, entry in self.entries.items() if is_guess(entry) and is_stale(name, entry)]

    def searches(self, ops: list[str]) -> list[Job]:
        """Jobs that were not judged as they are now. Entries of the ops that nothing launches any more go."""
        jobs = planned(self.target, ops)
        names = {(job.op, job.variant, job.key) for job in jobs}
        for name in [n for n in self.entries if n[0] in ops and n not in names and is_guess(self.entries[n])]:
            if is_stale(name, self.entries[name]):
                del self.entries[name]
        labels = {label(job) for job in jobs}
        for name in [n for n in self.judged if n.split(".")[0] in ops and n not in labels]:
            del self.judged[name]
        return [job for job in jobs if not self._is_judged(job)]

    def _is_judged(self, job: Job) -> bool:
        found = self.judged.get(label(job), {})
        return {k: found.get(k) for k in ("version", "heuristic")} == stamp(self.target, job)

    def rechecks(self, ops: list[str]) -> list[Job]:
        """Jobs of the stale entries; those that nothing launches any more go."""
        found = []
        for name in [n for n in self.stale if n[0] in ops]:
            job = of_entry(self.target, name, self.entries[name])
            if job is None:
                del self.entries[name]
            else:
                found.append(job)
        return found

    def judge(self, job: Job, tuner: StaticTuner, recheck: bool) -> str:
        """Choose for a job, and put the choice in the table in place of the earlier one."""
        name = (job.op, job.variant, job.key)
        before = self.entries.get(name)
        if name in self.measured:
            return "measured"
        saved: dict[tables.Name, Entry] = {}

        def save(name: tables.Name, entry: Entry) -> bool:
            if not entry.provenance["spills"]:  # what ships spills nothing (tests/aot), though the heuristic may
                saved[name] = entry
            return bool(saved)

        tuner.save = save
        result = tuner.choose(job, among=[before.config] if recheck else None)
        if result.error:
            self.entries.pop(name, None)
            return f"FAILED: {result.error.splitlines()[0]}"
        self.entries.pop(name, None)
        self.entries.update(saved)
        if not recheck:
            kept = "entry" if saved else "heuristic"
            self.judged[label(job)] = {
                **stamp(self.target, job),
                "answer": kept,
                "tried": result.tried,
                "date": store.today()[:10],
            }
        elif saved:  # the search itself is still that of the earlier kernel
            return f"stays, {result.gain:.0%}"
        if result.provenance and not saved:
            result.note = "the heuristic stays: the choice spills"
        gain = f"{result.gain:.0%} better: {tables.to_record(name, saved[name])['config']}" if saved else result.note
        return gain if saved or before is None else f"goes: {gain}"

    def write(self) -> None:
        write(self.target, self.entries)
        write_judged(self.all_judged)


def asked(arguments: argparse.Namespace) -> list[str]:
    """The ops asked for. All are loaded: an entry whose op is not would seem to be nobody's."""
    loaded = list(registry.ops())
    return arguments.ops.split(",") if arguments.ops else loaded


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    ops = asked(arguments)
    judged = read_judged()
    failed = late = 0
    with CompilePool(arguments.workers, seconds=120.0) as pool:
        for name in arguments.archs or archs():
            arch = Arch(name, judged)
            jobs = arch.rechecks(ops) if arguments.recheck else arch.searches(ops)
            if arguments.likely:
                promising = likely(arch.target)
                jobs = [job for job in jobs if (job.op, job.variant, job.key) in promising]
            started = time.monotonic()
            tuner = StaticTuner(arch.target, pool, candidates=arguments.candidates)
            for number, job in enumerate(jobs):
                if arguments.seconds and time.monotonic() - began > arguments.seconds:
                    late += len(jobs) - number
                    break
                said = arch.judge(job, tuner, arguments.recheck)
                failed += said.startswith("FAILED")
                print(f"{name} [{number + 1}/{len(jobs)}] {label(job)}: {said}", flush=True)
                arch.write()
            arch.write()
            print(
                f"{name}: {len(jobs)} jobs, {len(arch.entries)} entries, {time.monotonic() - started:.0f} s", flush=True
            )
    if late:
        print(f"{late} jobs were left when the time was over; the same command goes on from there")
    return 1 if failed or late else 0


def check(arguments: argparse.Namespace) -> int:
    ops = asked(arguments)
    judged, stale = read_judged(), 0
    for name in arguments.archs or archs():
        arch = Arch(name, judged)
        entries, jobs = len(arch.entries), planned(arch.target, ops)
        behind = sum(not arch._is_judged(job) for job in jobs)
        stale += len(arch.stale)
        print(
            f"{name}: {entries} entries, {len(arch.stale)} of them stale; {len(jobs)} jobs, {behind} not judged as "
            f"they are now"
        )
    return 1 if stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "archs", nargs="*", metavar="ARCH", help="default: every known architecture but those with a measured table"
    )
    parser.add_argument("--recheck", action="store_true", help="only entries of changed kernels, against the heuristic")
    parser.add_argument("--likely", action="store_true", help="only jobs that another architecture has an entry for")
    parser.add_argument("--check", action="store_true", help="say what is out of date")
    parser.add_argument("--ops", metavar="A,B", help="only these ops (default: all)")
    parser.add_argument("--candidates", type=int, default=7, help="most configurations of a job (default 7)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="compiler processes (default: cores)")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no job after this long (default: no end)")
    arguments = parser.parse_args()
    return check(arguments) if arguments.check else run(arguments)


if __name__ == "__main__":
    sys.exit(main())
