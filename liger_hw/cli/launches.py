"""`explain` and `compile`: the kernels that an op launches at a shape, on a device, which need not be here."""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

from .. import __version__, registry
from ..autotune import compile as aot
from ..autotune import store
from ..autotune.compile import DEPTHS
from ..autotune.workers import CompilePool
from ..backends import VENDORS, backend, known_target
from ..text import StatusLine, first_line, fold, json_text, printable, table
from . import UsageError, needs, user_errors
from .arguments import dtype_name, listed, positive, shape, torch_dtype


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", help="name of an op, for example rms_norm")
    add("--shape", type=shape, metavar="AxB", help="problem sizes (default: each of the op's own workloads)")
    add("--dtype", type=dtype_name, default="bfloat16", help="fp32, bf16 or fp16 (default bf16)")
    names = "cuda:0, xpu or cpu; or, even if not in this machine, a device such as h200, mi300x or max1550, or an "
    add("--device", help=names + "architecture such as sm90 (default: this machine's device)")
    add("--json", action="store_true", help="print JSON")


def run_explain(arguments: argparse.Namespace) -> int:
    """`liger-hw explain OP --shape 8192x4096 --dtype bf16 [--device h200]`: why an op launches as it does.

    With Triton installed it lists the kernels that one forward and backward with default options launches. Some belong
    to other ops, such as a loss's sums. The device need not be in this machine: name it (h200) or its architecture
    (sm90).
    """
    with user_errors((ValueError, RuntimeError)):
        op = registry.get_op(arguments.op)
        target = registry.target_named(arguments.device)
        shapes = {"": arguments.shape} if arguments.shape else dict(op.workloads)
        explained = {name: _explained(op, sizes, arguments.dtype, target) for name, sizes in shapes.items()}
    if arguments.json:
        items = []
        for name, explanations in explained.items():
            head = {"op": op.name, "workload": name or None, "shape": list(shapes[name])}
            items += [{**head, **one.to_json(), "launched": launched} for one, launched in explanations]
        print(json_text(items, indent=2))
        return 0
    runs_reference = target.vendor == "cpu" and not registry.interpreting()
    for name, explanations in explained.items():
        if name:
            print(f"workload {name}: {'x'.join(map(str, shapes[name]))}")
        for one, launched in explanations:
            head, *answers = str(one).splitlines()
            if launched == [] or runs_reference:  # no launch uses this configuration
                answers = [line.replace(": taken", ": would be taken") for line in answers]
            if launched is not None:
                head = f"{head}: {_in_words(launched)}"
            print(fold("\n".join([head, *answers]), " " * 4))
        if explanations[0][1] is None:
            why = _why_unknown(target) or "which of them are launched is unknown: the launchers failed, see stderr"
            print(fold(f"These are the op's own kernels; {why}."))
    return 0


def _in_words(launched: list[dict[str, Any]]) -> str:
    """`_rms_norm_fwd_kernel of 8192 programs`; for several launches, with their number and the largest grid."""
    grids: dict[str, list[int]] = {}
    for one in launched:
        grids.setdefault(one["kernel"], []).append(math.prod(one["grid"]))
    words = []
    for kernel, sizes in grids.items():
        times, up_to = f"{len(sizes)} times " * (len(sizes) > 1), "up to " * (len(set(sizes)) > 1)
        words.append(f"{times}{kernel} of {up_to}{max(sizes)} programs")
    return " and ".join(words) or "not launched at this size"


def _why_unknown(target: Any) -> str:
    """Why the launched kernels are not known, or ""."""
    from ..runtime import triton_import as _triton

    if registry.interpreting():
        return "not every one is launched at every size; which ones are is unknown while kernels are interpreted"
    if target.vendor == "cpu":
        return "the cpu runs the op's reference in torch, and launches no kernel"
    if not _triton.AVAILABLE:
        return "not every one is launched at every size; install Triton to see which ones are"
    return ""


def _explained(op: Any, sizes: tuple[int, ...], dtype: str, target: Any) -> list[tuple[Any, list | None]]:
    """(explanation, launches) of the op's kernels, and of other ops' kernels that it launches."""
    explanations = registry.explain(op.name, sizes, torch_dtype(dtype), target)
    launched = _launched(op, sizes, dtype, target)
    if launched is None:
        return [(one, None) for one in explanations]
    known = {(one.tunable, one.key) for one in explanations}
    for name, key in launched:
        if (name, key) not in known:
            explanations.append(registry.explain_tunable(registry.get_tunable(name), target, key))
    return [(one, launched.get((one.tunable, one.key), [])) for one in explanations]


def _launched(op: Any, sizes: tuple[int, ...], dtype: str, target: Any) -> dict[tuple, list[dict[str, Any]]] | None:
    """(tunable, key) -> kernel and grid of each launch of a forward and backward; None if they are not known."""
    if _why_unknown(target):
        return None
    launches: dict[tuple, list[dict[str, Any]]] = {}
    try:
        for launch in aot.trace(op.name, sizes, torch_dtype(dtype), target, user=True):
            one = {"kernel": launch.kernel.split(":")[1], "grid": list(launch.grid)}
            launches.setdefault((launch.tunable, launch.key), []).append(one)
    except Exception as error:  # the op's own kernels are still explained
        print(f"liger-hw: explain: what is launched is unknown: {printable(first_line(error))}", file=sys.stderr)
        return None
    return launches


# -- compile -----------------------------------------------------------------------------------------------------------


def compile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    targets = "architectures or devices, comma-separated, as sm90,mi300x; or all"
    add("--target", type=listed(str, "architectures"), required=True, help=targets)
    add("--ops", type=listed(str, "names"), help="names of ops, comma-separated (default: all)")
    add("--dtype", type=dtype_name, help="fp32, bf16 or fp16 (default: bf16 and, unless quick, fp32)")
    depths = "quick: first workload (default); deep: with every option set; full: every workload with every option set"
    add("--depth", choices=DEPTHS, default="quick", help=depths)
    add("--workers", type=positive, default=os.cpu_count() or 1, help="compiler processes (default: one a core)")
    add("--timeout", type=positive, default=300, metavar="SECONDS", help="limit for compiling a kernel (default 300)")
    add("--json", action="store_true", help="print JSON")


def run_compile(arguments: argparse.Namespace) -> int:
    """`liger-hw compile --target gfx942[,sm90,...]`: compile every kernel that an op would launch there.

        liger-hw compile --target gfx942 --ops rms_norm                     one op on one architecture
        liger-hw compile --target all --depth full --json > all.json        all ops on all architectures: hours

    Needs no GPU. If the installed Triton has no compiler for a target (the stock one has none for Intel), kernels are
    lowered to TTIR and resources are estimated. Prints a line for each distinct kernel, with the first case that
    launches it; --json prints versions and every launch's certificate. Exit code 1 if a kernel does not compile or must
    not be launched on the target.
    """
    needs("triton")
    dtypes = [arguments.dtype] if arguments.dtype else None
    screen = StatusLine()
    try:
        targets, ops = _targets(arguments.target), [registry.get_op(name) for name in arguments.ops or registry.ops()]
        launches, case_of = [], {}
        for target in targets:
            for op in ops:
                screen.update(f"{target.arch} {op.name}: tracing its launches")
                for case, launch in aot.trace_cases(op, target, arguments.depth, dtypes):
                    launches.append(launch)
                    case_of.setdefault(launch.compile_key(), case)
    except (ValueError, ImportError, RuntimeError) as error:
        screen.end()
        raise UsageError(str(error)) from None
    certificates, seen, bad = [], set(), 0
    screen = StatusLine()  # its clock starts with compilation
    with CompilePool(arguments.workers, arguments.timeout) as pool:
        for certificate in aot.certify(launches, pool):
            certificates.append(certificate)
            if certificate.launch.compile_key() not in seen:
                seen.add(certificate.launch.compile_key())
                bad += not certificate.ok
                screen.progress(len(seen) - 1, len(case_of), f"kernels, {bad} FAILED or ILLEGAL" if bad else "kernels")
    screen.end()
    if arguments.json:
        print(json_text(_evidence(arguments, targets, ops, certificates, case_of), indent=1))
    else:
        print(_text(certificates, case_of))
    return 1 if bad else 0


def _targets(names: list[str]) -> list[Any]:
    known = [arch for vendor in VENDORS if vendor != "cpu" for arch in backend(vendor).known_archs()]
    targets = [known_target(name) for name in (known if names == ["all"] else names)]
    if wrong := [target.arch for target in targets if target.vendor == "cpu"]:
        raise ValueError(f"{wrong[0]} compiles nothing; architectures: {', '.join(known)}")
    return targets


def _evidence(arguments: argparse.Namespace, targets: list, ops: list, certificates: list[Any], case_of: dict) -> dict:
    """Versions, date and a record of each launch; the support pages are made from it."""
    records = []
    for c in certificates:
        case = case_of[c.launch.compile_key()]
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
        first.setdefault(c.launch.compile_key(), c)
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
