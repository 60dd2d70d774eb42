"""Compile what every op launches on every architecture, for `ci/evidence.sh`: many processes, a journal, an end.

    python ci/certificates.py FOLDER                          the whole matrix, every workload and option set
    python ci/certificates.py FOLDER --seconds 240            as much of it as fits; the same command goes on from there
    python ci/certificates.py FOLDER --ops softmax,dyt --targets gfx942 --depth quick

FOLDER gets, for the Triton at hand: `certificates-VERSION.jsonl`, the journal, a line for each kernel as it is
compiled, known by what was compiled and by the kernel's source, so that a second run compiles only what is new; and
`compiled-VERSION.json`, which `python ci/support.py compiled` takes: every kernel of this run, and what was left of it.
Ends with 1 when a kernel does not compile or may not be launched, with 3 when some were left.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Iterator

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]
KEPT = ("registers", "spills", "scratch", "shared", "threads", "occupancy")
"""Of a kernel's resources."""


@functools.cache
def source_of_kernel(tunable: str) -> str:
    """Hash of a kernel's code."""
    from kernel_digests import digest

    from liger_hw import registry

    return digest(registry.get_tunable(tunable).kernels)


def plan(arch: str, ops: list[str], depth: str) -> list[dict[str, Any]]:
    """Each distinct kernel that the ops launch on an architecture: `id`, `about` it, and the compiler's `job`."""
    from liger_hw import registry
    from liger_hw.autotune import compile as aot
    from liger_hw.backends import known_target

    found: dict[str, dict[str, Any]] = {}
    for op in ops:
        for case, launch in aot.trace_cases(registry.get_op(op), known_target(arch), depth):
            source = source_of_kernel(launch.tunable)
            op_name = launch.tunable.split(".")[0]  # two ops that launch one kernel each have it proven
            what = op_name, arch, source, launch.kernel, launch.args, sorted(launch.options)
            about = {
                "op": op_name,
                "target": arch,
                "tunable": launch.tunable,
                "key": list(launch.key),
                "layer": launch.layer,
                "config": launch.config.to_json(),
                "kernel": launch.kernel.split(":")[1],
                "workload": case.workload,
                "dtype": case.dtype,
                "options": {name: str(value) for name, value in case.options.items()},
            }
            same = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
            found.setdefault(same, {"id": same, "about": about, "launch": launch})
    return list(found.values())


def plans(targets: list[str], ops: list[str], depth: str, processes: int) -> list[dict[str, Any]]:
    """`plan` for every architecture, in processes of their own; op by op, so that a run that ends early has whole "
    "ones."""
    if processes == 1:
        found = [plan(target, ops, depth) for target in targets]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(targets)), mp_context=context) as pool:
            found = list(pool.map(plan, targets, [ops] * len(targets), [depth] * len(targets)))
    kernels = [kernel for one in found for kernel in one]
    return sorted(kernels, key=lambda kernel: kernel["about"]["op"])


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """id -> answer. A last line that was cut off is none."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        found[answer.pop("id")] = answer
    return found


def judged(kernel: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an answer: resources, error, and why the target's rules refuse it."""
    from liger_hw.autotune.compile import certificate_from

    certificate = certificate_from(kernel["launch"], answer)
    resources = certificate.resources.to_json() if certificate.resources else None
    return {
        "error": certificate.error[:600],
        "illegal": certificate.illegal,
        "level": certificate.level,
        "seconds": round(certificate.seconds, 2),
        "resources": {name: resources[name] for name in KEPT} if resources else None,
    }


def compiled(
    kernels: list[dict[str, Any]], workers: int, timeout: float, deadline: float
) -> Iterator[tuple[dict, dict]]:
    """(kernel, what is kept of its answer) as they come, until the deadline."""
    from liger_hw.autotune.workers import CompilePool

    with CompilePool(workers, timeout) as pool:
        for kernel in kernels:
            pool.submit(kernel["id"], "compile", kernel["launch"])
        for kernel in kernels:
            yield kernel, judged(kernel, pool.wait(kernel["id"]))
            if time.monotonic() > deadline:
                return


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    deadline = began + arguments.seconds if arguments.seconds else float("inf")
    from support import source_of

    from liger_hw import __version__, files, registry
    from liger_hw.autotune import store
    from liger_hw.cli.launches import _targets

    try:
        targets, ops = (
            [t.arch for t in _targets(arguments.targets)],
            [registry.get_op(name).name for name in arguments.ops or registry.ops()],
        )
    except ValueError as error:
        print(f"certificates: {error}", file=sys.stderr)
        return 2
    folder, version = Path(arguments.folder), store.triton_version()
    folder.mkdir(parents=True, exist_ok=True)
    kernels = plans(targets, ops, arguments.depth, arguments.workers)
    journal = folder / f"certificates-{version}.jsonl"
    known = read_journal(journal)
    missing = [kernel for kernel in kernels if kernel["id"] not in known]
    planned = time.monotonic() - began
    print(f"{len(kernels)} kernels, {len(missing)} to compile; planned in {planned:.0f} s", file=sys.stderr, flush=True)
    said = time.monotonic()
    with journal.open("a") as lines:
        lines.write("\n" if lines.tell() else "")  # after a line that was cut off
        for number, (kernel, answer) in enumerate(compiled(missing, arguments.workers, arguments.timeout, deadline), 1):
            known[kernel["id"]] = answer
            lines.write(json.dumps({"id": kernel["id"], **answer}) + "\n")
            lines.flush()
            if time.monotonic() - said > 15:
                said = time.monotonic()
                print(f"{number}/{len(missing)} after {said - began:.0f} s", file=sys.stderr, flush=True)
    records = [{"id": k["id"], **k["about"], **known[k["id"]]} for k in kernels if k["id"] in known]
    left = Counter((k["about"]["op"], k["about"]["target"]) for k in kernels if k["id"] not in known)
    head = {
        "kind": "certificates",
        "date": store.today(),
        "liger_hw": __version__,
        "triton": version,
        "depth": arguments.depth,
        "targets": targets,
        "ops": ops,
        "sources": {op: source_of(op) for op in ops},
        "left": [[op, target, count] for (op, target), count in sorted(left.items())],
    }
    files.write_text(folder / f"compiled-{version}.json", _document(head, records))
    bad = [record for record in records if record["error"] or record["illegal"]]
    for record in bad:
        names = "target", "tunable", "key", "layer", "workload", "options"
        where = " ".join(str(record[name]) for name in names)
        print(f"{where}: {record['error'] or record['illegal']}")
    built = [record["resources"] for record in records if record["resources"] and record["level"] == "binary"]
    spilling = sum(resources["spills"] > 0 for resources in built)  # counted in TTIR they are an estimate
    print(
        f"Triton {version}, depth {arguments.depth}: {len(records)} kernels of {len(ops)} ops for {len(targets)} "
        f"architectures, "
        f"{len(bad)} failed or illegal, {spilling} with spills; {sum(left.values())} left; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if bad else 3 if left else 0


def _document(head: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """One line a kernel."""
    lines = ",\n".join(json.dumps(record) for record in records)
    return f'{json.dumps(head)[:-1]}, "certificates": [\n{lines}\n]}}\n'


def main(arguments: list[str] | None = None) -> int:
    from liger_hw.autotune.compile import DEPTHS
    from liger_hw.cli.arguments import listed

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where journal and result are kept")
    names = listed(str, "names")
    parser.add_argument("--targets", type=names, default=["all"], help="architectures, comma-separated (default: all)")
    parser.add_argument("--ops", type=names, help="names of ops, comma-separated (default: all)")
    parser.add_argument("--depth", choices=DEPTHS, default="full", help="as of `liger-hw compile` (default full)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="compiler processes (default: cores)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one kernel (default 300)")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no kernel after this long (default: no end)")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
