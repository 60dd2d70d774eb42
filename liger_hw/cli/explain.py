"""`liger-hw explain OP --shape 8192x4096 --dtype bf16 [--device h200]`: what `registry.explain` says.

If Triton is installed, also which kernels one forward and backward with default options launches, including kernels of
other ops (a loss's sums, the scaling of its gradients). Works for a device that is not in this machine too: name it
(h200) or its architecture (sm90).
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from ..text import first_line, fold, json_text, printable
from . import user_errors
from .arguments import dtype_name, shape, torch_dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", help="name of an op, for example rms_norm")
    add("--shape", type=shape, metavar="AxB", help="problem sizes (default: each of the op's own workloads)")
    add("--dtype", type=dtype_name, default="bfloat16", help="fp32, bf16 or fp16 (default bf16)")
    names = "cuda:0, xpu, cpu, or what need not be here: a device such as h200, mi300x, max1550, an architecture such "
    add("--device", help=names + "as sm90 (default: the one here)")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from .. import registry

    with user_errors("explain", (ValueError, RuntimeError)):
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
            if launched == [] or runs_reference:  # nothing takes its configuration
                answers = [line.replace(": taken", ": would be taken") for line in answers]
            if launched is not None:
                head = f"{head}: {_in_words(launched)}"
            print(fold("\n".join([head, *answers]), " " * 4))
        if explanations[0][1] is None:
            why = _unasked(target) or "which of them this size launches is unknown: its launchers failed, see stderr"
            print(fold(f"These are the op's own kernels; {why}."))
    return 0


def _in_words(launched: list[dict[str, Any]]) -> str:
    """`_rms_norm_fwd_kernel of 8192 programs`; for several launches of a kernel their number and the largest grid."""
    grids: dict[str, list[int]] = {}
    for one in launched:
        grids.setdefault(one["kernel"], []).append(math.prod(one["grid"]))
    words = []
    for kernel, sizes in grids.items():
        times, most = f"{len(sizes)} times " * (len(sizes) > 1), "up to " * (len(set(sizes)) > 1)
        words.append(f"{times}{kernel} of {most}{max(sizes)} programs")
    return " and ".join(words) or "not launched at this size"


def _unasked(target: Any) -> str:
    """Why it is not known which kernels are launched, or ""."""
    from .. import registry
    from ..runtime import triton_import as _triton

    if registry.interpreting():
        return "not all are launched at every size, which is not told where kernels are interpreted"
    if target.vendor == "cpu":
        return "on the cpu its reference in torch runs, and none is launched"
    if not _triton.AVAILABLE:
        return "not all are launched at every size, which is only told where Triton is installed"
    return ""


def _explained(op: Any, sizes: tuple[int, ...], dtype: str, target: Any) -> list[tuple[Any, list | None]]:
    """(explanation, launches) of the op's kernels and of other ops' kernels that one forward and backward launches."""
    from .. import registry

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
    """(tunable, key) -> kernel and grid of each of its launches, in one forward and backward with default options; None
    if they are not known."""
    from ..autotune import compile as aot

    if _unasked(target):
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
