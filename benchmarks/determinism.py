"""Two differently tuned user caches: the same bits with deterministic=True, and not without.

python benchmarks/determinism.py [FILE.json] [--ops rms_norm,...] [--device cuda] [--budget 45]

For each op, at its first workload: one cache holds for every kernel that its sample launches the legal configuration of
the fewest warps and blocks, the other that of the most; the op is called with its backward under each, with and without
`registry.set_deterministic`. An entry is a tensor: outputs, then gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

import torch

from liger_hw import registry
from liger_hw.autotune import space, store
from liger_hw.backends import target_of, with_index
from liger_hw.bench import cases, report
from liger_hw.bench.inputs import Work
from liger_hw.bench.ops import make_inputs, with_few_rows
from liger_hw.registry import Entry

OPS = "rms_norm,cross_entropy,layer_norm,fused_add_rms_norm,rope,swiglu"


def extremes(tunable, target, key):
    """The legal configurations of the fewest and of the most warps, blocks and rows a program."""

    def size(config):
        return config.num_warps, config.ctas_per_mp, sorted(config.blocks.items()), config.num_stages

    legal = sorted(space.legal(tunable, target, key)[0], key=size)
    return legal[0], legal[-1]


def tuned(op, launched, target, which, folder):
    """A user cache that has one extreme for each of the (variant, key) in `launched`."""
    os.environ["LIGER_HW_CACHE_DIR"] = str(folder)
    registry.reload()
    named = {tunable.variant: tunable for tunable in op.tunables}
    for variant, key in launched:
        config = extremes(named[variant], target, key)[which]
        about = {
            "kind": "measured",
            "triton": store.triton_version(),
            "note": "an extreme, for benchmarks/determinism.py",
        }
        store.save(target, (op.name, variant, key), Entry(config, about, named[variant].version))
    registry.reload()


def called(op, inputs):
    """(outputs and gradients, layer of each kernel of the op)"""
    outputs, grads = Work(op.function, [inputs], backward=True).call()
    found = [t.detach().clone() for t in (*outputs, *grads) if t is not None]
    return found, {f"{p.tunable.variant} {p.key}": p.layer for p in registry.plans() if p.tunable.op == op.name}


def judge(op, device):
    target = target_of(device)
    case = cases.Case(op, *next(iter(op.workloads.items())), torch.bfloat16)
    sizes = with_few_rows(case, 8) if device.type == "cpu" else case.sizes
    inputs = make_inputs(case, sizes, device, 0)
    called(op, inputs)
    launched = [(p.tunable.variant, p.key) for p in registry.plans() if p.tunable.op == op.name]
    row = {"op": op.name, "sizes": list(sizes)}
    for deterministic in (False, True):
        results = []
        for which in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                tuned(op, launched, target, which, folder)
                registry.set_deterministic(deterministic)
                results.append(called(op, inputs))
        (one, layers), (other, _) = results
        row[f"deterministic={deterministic}"] = [bool(torch.equal(a, b)) for a, b in zip(one, other)]
        row["layers"] = layers
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--ops", default=OPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=45.0)
    arguments = parser.parse_args()
    began, device = time.monotonic(), with_index(arguments.device)
    os.environ["LIGER_HW_DISABLE_SHIPPED"] = "1"
    found = {"machine": report.machine(device, os.environ.get("LIGER_COMMIT")), "left_out": [], "rows": []}
    for name in arguments.ops.split(","):
        if time.monotonic() - began > arguments.budget:
            found["left_out"].append(name)
            continue
        found["rows"].append(judge(registry.get_op(name), device))
        print(json.dumps(found["rows"][-1]), flush=True)
        if arguments.file:
            report.save(arguments.file, found)
    same = all(all(row["deterministic=True"]) for row in found["rows"])
    apart = sum(not all(row["deterministic=False"]) for row in found["rows"])
    print(
        f"deterministic: {'bit-identical' if same else 'NOT identical'}; without, {apart} of {len(found['rows'])} "
        f"ops differ"
    )


if __name__ == "__main__":
    main()
