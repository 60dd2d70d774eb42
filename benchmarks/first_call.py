"""The first call of an op with empty caches, forward and backward, each in a process of its own: how long is the pause?

    python benchmarks/first_call.py --out first-call-h200.json [--ops grpo jsd] [--against liger] [--together]

Before the first call the process has a device context and has multiplied matrices of the op's sizes, so what is left is
the package: its import (a peer's; liger_hw is what this script is made of), its kernels' compilation, tuning, its own
torch.compile. Triton's, Inductor's and liger_hw's caches are new folders. --together runs the processes at once, which
is fair to all and four times as fast, and a little slower for each. With --device cpu the script runs where there is no
GPU, and says nothing about any kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OPS = {
    "fused_linear_cross_entropy": "2048x4096x32768",
    "fused_linear_jsd": "2048x4096x32768",
    "grpo": "2x1024x4096x32768",
    "orpo": "2x1024x4096x32768",
    "dpo": "2x1024x4096x32768",
    "cross_entropy": "2048x32768",
    "fused_moe": "8192x2048x768x128x8",
}
"""Op -> problem sizes."""


def one(arm: str, name: str, size: str, device: str) -> dict[str, float]:
    """Seconds of the import, of the first call and of the second, in this process."""
    import sweep
    import torch

    from liger_hw import registry
    from liger_hw.bench import floors, ops, peers
    from liger_hw.bench.inputs import Work
    from liger_hw.bench.timing import Chain, Meter

    op = sweep.chunked_losses.OPS.get(name) or registry.get_op(name)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = ops.Case(op, size, tuple(map(int, size.split("x"))), dtype)
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    work = Work(lambda: None, [ops.make_inputs(case, case.sizes, torch.device(device), 0)], backward=True)
    warm = torch.ones(256, 256, device=device, requires_grad=True)
    # a gradient that is given, as here, is one for which torch imports sympy: seconds that are no op's
    torch.autograd.grad(warm @ warm, warm, torch.ones_like(warm))
    for products in floors.PRODUCTS[name](*case.sizes) if name in floors.PRODUCTS else ():
        Chain(Meter(device), products, case.dtype).burst(1)
    synchronize()
    began = time.perf_counter()
    work.function = peers.arm(arm, case.op)
    times = [time.perf_counter() - began]
    for _ in range(2):
        began = time.perf_counter()
        work.call()
        synchronize()
        times.append(time.perf_counter() - began)
    return dict(zip(("build_s", "first_s", "second_s"), times))


def started(arm: str, name: str, size: str, device: str, folder: str) -> subprocess.Popen:
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "LIGER_HW_CACHE_DIR": "liger_hw"}
    environment = {**os.environ, **{variable: f"{folder}/{place}" for variable, place in caches.items()}}
    command = [sys.executable, __file__, "--one", arm, name, size, "--device", device]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def collected(process: subprocess.Popen, until: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=max(until - time.perf_counter(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": "the time was spent"}
    if process.returncode:
        return {"error": (err.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(out.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the results here")
    parser.add_argument("--ops", nargs="*", default=list(OPS), choices=OPS, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--against", nargs="*", default=["liger"], help="peers of `liger-hw bench`")
    parser.add_argument("--together", action="store_true", help="all processes at once")
    parser.add_argument("--seconds", type=float, default=120.0, help="no process runs longer than this from the start")
    parser.add_argument("--sizes", help="instead of each op's own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", nargs=3, metavar=("ARM", "OP", "SIZES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one, options.device)))
        return 0
    import torch

    device = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    until = time.perf_counter() + options.seconds
    record: dict[str, Any] = {"device": device, "torch": torch.__version__, "together": options.together, "runs": []}
    todo = [(arm, name, options.sizes or OPS[name]) for name in options.ops for arm in ("liger_hw", *options.against)]
    for batch in [todo] if options.together else [[place] for place in todo]:
        with tempfile.TemporaryDirectory() as folder:
            running = [
                (place, started(*place, options.device, f"{folder}/{number}")) for number, place in enumerate(batch)
            ]
            for (arm, name, size), process in running:
                found = {"arm": arm, "op": name, "sizes": size, **collected(process, until)}
                record["runs"].append(found)
                print(
                    " ".join(f"{k}={v:.3f}" if isinstance(v, float) else str(v) for k, v in found.items()), flush=True
                )
                if options.out:
                    Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    return int(all("error" in run for run in record["runs"]))


if __name__ == "__main__":
    raise SystemExit(main())
