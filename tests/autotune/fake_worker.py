"""A worker process with faults, in place of `liger_hw.autotune.workers`.

One warp is the fastest; 2 warps crash it, 4 hang it, 16 lose the device, 32 raise. With FAKE_CALM set, nothing does.
FAKE_LOG names a file that gets a line for each candidate that is timed alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from liger_hw.autotune.record import Rejected
from liger_hw.autotune.workers import serve
from tests.autotune.fakes import FACTS, H200

CALM = "FAKE_CALM" in os.environ
job: list = []


def main() -> None:
    serve(lambda: answer)


def answer(name: str, args: tuple) -> Any:
    if name == "facts":
        return {**FACTS, "target": H200}
    if name == "open":
        from tests.autotune.fakes import tunable

        job[:] = [args[0].variant, *args[0].key]
        return tunable(args[0].name).heuristic(H200, args[0].key), 1_000_000
    if name == "prepare":
        warps = args[0].num_warps
        if not CALM:
            misbehave(warps)
        return None
    if name == "time":
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
        if len(args[0]) == 1 and (log := os.environ.get("FAKE_LOG")):
            with open(log, "a") as file:
                file.write(f"{json.dumps([*job, args[0][0].to_text()])}\n")
        return [[10.0 + (config.num_warps != 1)] * args[1] for config in args[0]]
    if name == "candidate":
        warps = args[-1].num_warps
        if warps == 2 and not CALM:
            os.abort()
        if warps == 4 and not CALM:
            time.sleep(1000)
        return {"resources": SimpleNamespace(shared=100 * warps, registers=32, threads=32 * warps)}
    return ""  # verify


def misbehave(warps: int) -> None:
    if warps == 2:
        print("Fatal: LLVM ERROR: cannot select", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if warps == 4:
        time.sleep(1000)
    if warps == 16:
        raise SystemExit("CUDA error: an illegal memory access")
    if warps == 32:
        raise Rejected("no")
