"""`liger-hw compile --target gfx942[,sm90,...]`: every kernel that an op would launch there, compiled.

    liger-hw compile --target gfx942 --ops rms_norm                     one op on one architecture
    liger-hw compile --target all --depth full --json > all.json        the whole matrix, as evidence: hours

Needs no GPU. If the installed Triton has no compiler for a target (the stock one has none for Intel), kernels are
lowered to TTIR and resources are estimated. One line for each distinct kernel, with the first case that launches it;
--json prints versions and every launch's certificate. Progress goes to stderr. Exit code 1 if a kernel does not compile
or may not be launched on the target.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..autotune.compile import DEPTHS
from ..text import StatusLine, json_text, table
from . import UsageError, needs
from .arguments import dtype_name, listed, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    targets = "architectures or devices, comma-separated, as sm90,mi300x; or all"
    add("--target", type=listed(str, "architectures"), required=True, help=targets)
    add("--ops", type=listed(str, "names"), help="names of ops, comma-separated (default: all)")
    add("--dtype", type=dtype_name, help="fp32, bf16 or fp16 (default: bf16 and, unless quick, fp32)")
    depths = "quick: first workload (default); deep: with every option set; full: every workload with every option set"
    add("--depth", choices=DEPTHS, default="quick", help=depths)
    add("--workers", type=positive, default=os.cpu_count() or 1, help="compiler processes (default: one a core)")
    add("--timeout", type=positive, default=300, metavar="SECONDS", help="a kernel may take (default 300)")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from .. import registry
    from ..autotune import compile as aot
    from ..autotune.workers import CompilePool

    needs("compile", "triton")
    dtypes = [arguments.dtype] if arguments.dtype else None
    screen = StatusLine()
    try:
        targets, ops = _targets(arguments.target), [registry.get_op(name) for name in arguments.ops or registry.ops()]
        launches, case_of = [], {}
        for target in targets:
            for op in ops:
                screen.update(f"{target.arch} {op.name}: what it launches")
                for case, launch in aot.trace_cases(op, target, arguments.depth, dtypes):
                    launches.append(launch)
                    case_of.setdefault(launch.same(), case)
    except (ValueError, ImportError, RuntimeError) as error:
        screen.end()
        raise UsageError(f"compile: {error}") from None
    certificates, seen, bad = [], set(), 0
    screen = StatusLine()  # its clock starts with the compiler
    with CompilePool(arguments.workers, arguments.timeout) as pool:
        for certificate in aot.certify(launches, pool):
            certificates.append(certificate)
            if certificate.launch.same() not in seen:
                seen.add(certificate.launch.same())
                bad += not certificate.ok
                screen.progress(len(seen) - 1, len(case_of), f"kernels, {bad} FAILED or ILLEGAL" if bad else "kernels")
    screen.end()
    if arguments.json:
        print(json_text(_evidence(arguments, targets, ops, certificates, case_of), indent=1))
    else:
        print(_text(certificates, case_of))
    return 1 if bad else 0


def _targets(names: list[str]) -> list[Any]:
    from ..backends import VENDORS, backend, known_target

    known = [arch for vendor in VENDORS if vendor != "cpu" for arch in backend(vendor).known_archs()]
    targets = [known_target(name) for name in (known if names == ["all"] else names)]
    if wrong := [target.arch for target in targets if target.vendor == "cpu"]:
        raise ValueError(f"{wrong[0]} compiles nothing; architectures: {', '.join(known)}")
    return targets


def _evidence(arguments: argparse.Namespace, targets: list, ops: list, certificates: list[Any], case_of: dict) -> dict:
    """What was compiled, versions, date, and one record for each launch; the `support` pages are generated from it."""
    from .. import __version__
    from ..autotune import store

    records = []
    for c in certificates:
        case = case_of[c.launch.same()]
        records.append(
            {"op": c.launch.tunable.split(".")[0], "workload": case.workload, "dtype": case.dtype, **c.to_json()}
        )
    return {
        "kind": "certificates",
        "date": store.today(),
        "liger_hw": __version__,
        "triton": store.triton_version(),
        "depth": arguments.depth,
        "targets": [target.arch for target in targets],
        "ops": [op.name for op in ops],
        "certificates": records,
    }


def _text(certificates: list[Any], case_of: dict) -> str:
    head = "target,kernel of,workload,layer,warps,regs,spills,shared,occ.,load,store,,for".split(",")
    first: dict[tuple, Any] = {}
    for c in certificates:
        first.setdefault(c.launch.same(), c)
    rows = []
    for same, c in first.items():
        case, r = case_of[same], c.resources
        what = " ".join([case.dtype, *(f"{name}={value}" for name, value in case.options.items())])
        used, state = ["-"] * 6, "FAILED"
        if r is not None:
            widths = [str(max(bits, default=0)) for bits in (r.loads, r.stores)]
            used = [str(r.registers), str(r.spills), str(r.shared), f"{r.occupancy:.0%}", *widths]
            state = "ILLEGAL" if c.illegal else "" if c.level == "binary" else c.level
        warps = str(c.launch.config.num_warps)
        rows.append([c.launch.target.arch, c.launch.tunable, case.workload, c.launch.layer, warps, *used, state, what])
    problems = [str(c) for c in first.values() if not c.ok]
    failed = f", {len(problems)} FAILED or ILLEGAL:" if problems else ""
    spilling = sum(c.resources is not None and c.resources.spills > 0 for c in first.values())
    return "\n".join([table([head, *sorted(rows)]), f"{len(rows)} kernels, {spilling} with spills{failed}", *problems])
