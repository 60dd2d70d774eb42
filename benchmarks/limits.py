"""What each kernel of a memory-bound op reaches, at the sizes that have an aim: where the time beyond the floor goes.

python benchmarks/limits.py [FILE.json] [--device cuda] [--budget SECONDS] [--share DIR] [--ops rms_norm,...]

For each kernel that the op launches, with the configuration that is resolved: microseconds by graph replay, L2-cold;
the bytes its tensors have, once each (twice where it overwrites them); that over the measured copy rate and over its
time (`share`); registers, spills and shared memory of the compiled kernel, and the warps a multiprocessor holds with
them.
`--share`: one process a GPU, each with the same folder; FILE has everybody's rows.
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
from liger_hw.autotune import compile as aot
from liger_hw.autotune import jobs, measure
from liger_hw.backends import target_of, with_index
from liger_hw.bench import report

AIMS = {
    "rms_norm": {
        **{(16384, 4096): 0.88, (8192, 8192): 0.88, (16384, 1024): 0.80, (8192, 2048): 0.80},
        **{(65536, 128): 0.60, (2048, 65536): 0.80},
    },
    "fused_add_rms_norm": {(16384, 4096): 0.90, (8192, 8192): 0.90},
    "layer_norm": {
        (16384, 4096): 0.88,
        (8192, 5120): 0.88,
        (8192, 2560): 0.88,
        (36928, 1024): 0.88,
        (2048, 65536): 0.88,
    },
    "modulated_rms_norm": {
        (4, 16384, 3840): 0.80,
        (32, 8192, 2048): 0.80,
        (64, 16384, 1152): 0.80,
        (8, 8192, 2304): 0.80,
    },
    "poly_norm": {(16384, 4096): 0.80, (16384, 2048): 0.80},
    "dyt": {(16384, 4096): 0.85, (50432, 1024): 0.85, (16384, 1152): 0.85},
    "group_norm": {
        **{(32, 32, 4096, 512): 0.75, (16, 32, 1024, 1280): 0.75, (8, 32, 16384, 320): 0.75},
        **{(2, 32, 262144, 128): 0.75, (64, 32, 64, 1280): 0.75},
    },
    "swiglu": {(8192, 14336): 0.97},
    "geglu": {(8192, 14336): 0.97},
    "relu_squared": {(8192, 24576): 0.97},
    "fused_gate_up_swiglu": {(8192, 8192): 0.97},
    "rope": {
        **{(4, 4096, 32, 8, 128): 0.95, (4, 4096, 28, 4, 128): 0.95, (4, 4096, 8, 4, 256): 0.95},
        (4, 4096, 32, 8, 64): 0.95,
    },
    "qwen2vl_mrope": {(4, 4096, 28, 4, 128): 0.90, (4, 4096, 16, 2, 128): 0.90},
    "llama4_rope": {(16, 577, 16, 16, 88): 0.90},
    "vision_rope": {(16, 1024, 16, 16, 80): 0.90, (16, 1024, 16, 16, 72): 0.90},
    "softmax": {(16384, 4096): 0.95, (8192, 32768): 0.95},
    "embedding": {(16384, 128256, 4096): None},
    "qk_norm_rope": {(4, 4096, 32, 8, 128): None, (4, 4096, 8, 4, 256): None},
    "sparsemax": {(4096, 32768): None},
}
"""Share of the copy floor that forward and backward together are to reach; None where the aim is not one of these."""


def warps_held(resources, num_warps, properties):
    """Warps of this kernel on one multiprocessor, as its registers, shared memory and threads allow."""
    threads = 32 * num_warps
    limits = [getattr(properties, "max_threads_per_multi_processor", 2048) // threads]
    if resources.get("registers"):
        limits.append(getattr(properties, "regs_per_multiprocessor", 65536) // (resources["registers"] * threads))
    if resources.get("shared"):
        limits.append(getattr(properties, "shared_memory_per_multiprocessor", 233472) // (resources["shared"] + 1024))
    return min(limits) * num_warps


def resources_of(op, sizes, target, name, config):
    """Registers, spills and shared memory of a tunable's kernel."""
    launches = aot.trace(op.name, sizes, torch.bfloat16, target, configs={name: config}, shipped=False)
    compiled = aot.compiled(next(one for one in launches if one.tunable == name))
    return {field: getattr(compiled["resources"], field) for field in ("registers", "spills", "shared")}


def kernels_of(op, sizes, clock, gb_s):
    """One row for each tunable of `op` that is launched at `sizes`."""
    target = target_of(clock.device)
    named = {tunable.variant: tunable for tunable in op.tunables}
    bench = measure.Bench(op, sizes, torch.bfloat16, clock)
    properties = (
        None if clock.module is None else torch.get_device_module(clock.device).get_device_properties(clock.device)
    )
    for name, key in jobs.launched(op.name, sizes, "bfloat16", target):
        variant = name.removeprefix(f"{op.name}.")
        if variant not in named:  # a kernel that the op shares
            continue
        chosen = registry.explain_tunable(named[variant], target, key).chosen
        resources = resources_of(op, sizes, target, name, chosen.config)
        stage = measure.Stage(bench, named[variant], key)
        arm = stage.prepare(chosen.config)
        us = statistics.median(stage.time([arm], 20)[0])
        floor_us = stage.bytes / gb_s / 1e3
        yield {
            "variant": variant,
            "layer": chosen.layer,
            "config": chosen.config.to_json(),
            "us": us,
            "mib": stage.bytes / 2**20,
            "share": floor_us / us,
            **resources,
            "warps_held": warps_held(resources, chosen.config.num_warps, properties) if properties else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--share", type=Path)
    parser.add_argument("--ops", default=",".join(AIMS))
    arguments = parser.parse_args()
    began, device = time.monotonic(), with_index(arguments.device)
    folder = arguments.share or Path(tempfile.mkdtemp(prefix="limits-"))
    folder.mkdir(parents=True, exist_ok=True)
    todo = [(name, sizes, aim) for name in arguments.ops.split(",") for sizes, aim in AIMS[name].items()]
    machine = report.machine(device, os.environ.get("LIGER_COMMIT"))
    with measure.Clock(device) as clock:
        gb_s = machine["copy_gb_s"] = clock.copy_rate()
        for place in untaken(folder, len(todo)):
            if time.monotonic() - began > arguments.budget:
                break
            name, sizes, aim = todo[place]
            sizes = tuple(min(size, 32) for size in sizes) if clock.module is None else sizes
            row = {"op": name, "sizes": list(sizes), "aim": aim, "kernels": []}
            try:
                row["kernels"] = list(kernels_of(registry.get_op(name), sizes, clock, gb_s))
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            report.save(folder / f"{place:04d}.json", {"rows": [row]})
            print(json.dumps(row), flush=True)
    if arguments.file:
        report.save(arguments.file, {"machine": machine, "asked": len(todo), "rows": rows_in(folder)})


if __name__ == "__main__":
    main()
