"""`liger-hw explain OP --shape 8192x4096 --dtype bf16 [--device gfx942]`: what `registry.explain` says.

Also of the kernels that the op shares with others (a loss's sums, the scaling of its gradients), where Triton is here
to say which it launches. Works for a device that is not in this machine: name it (h200) or its architecture (sm90).
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from . import UsageError
from ._values import dtype_name, shape, torch_dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", help="name of an op, for example rms_norm")
    parser.add_argument(
        "--shape", type=shape, metavar="AxB", help="problem sizes (default: each of the op's own workloads)"
    )
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="fp32, bf16 or fp16 (default bf16)")
    parser.add_argument(
        "--device",
        help="cuda:0, xpu, cpu, or what need not be here: a device such as h200, mi300x, max1550, an architecture such "
        "as sm90 (default: the one here)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from .. import registry

    try:
        op = registry.get_op(arguments.op)
        shapes = {"": arguments.shape} if arguments.shape else dict(op.workloads)
        found = {
            name: registry.explain(op.name, sizes, torch_dtype(arguments.dtype), arguments.device)
            + _shared(op, sizes, arguments)
            for name, sizes in shapes.items()
        }
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"explain: {error}") from None
    if arguments.json:
        items = [
            {"op": op.name, "workload": name or None, "shape": list(shapes[name]), **one.to_json()}
            for name, explanations in found.items()
            for one in explanations
        ]
        print(json.dumps(items, indent=2))
        return 0
    for name, explanations in found.items():
        if name:
            print(f"workload {name}: {'x'.join(map(str, shapes[name]))}")
        for one in explanations:
            print(one)
    return 0


def _shared(op: Any, sizes: tuple[int, ...], arguments: argparse.Namespace) -> list[Any]:
    """Explanations of the other ops' kernels that `op` launches at these sizes; none without Triton."""
    from .. import registry
    from ..autotune import plan
    from ..kernels import _triton

    if not _triton.AVAILABLE or registry.interpreting():
        return []
    target = registry._target_named(arguments.device)
    try:
        launched = plan.traced(target)(op.name, sizes, arguments.dtype)
    except Exception as error:  # the op's own kernels are explained all the same
        print(f"liger-hw: explain: which kernels it shares is unknown: {type(error).__name__}: {error}", file=sys.stderr)
        return []
    others = [(name, key) for name, key in launched if not name.startswith(f"{op.name}.")]
    return [registry.explain_tunable(registry._tunables[name], target, key) for name, key in others]
