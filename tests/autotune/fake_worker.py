"""A worker process that misbehaves on request: it stands for `liger_hw.autotune.workers`.

One warp is the fastest; 2 warps crash it, 4 hang it, 16 lose the device, 32 raise. With FAKE_CALM set, nothing does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from tests.autotune.fakes import FACTS, H200


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write('{"value": "ready"}\n')
    from liger_hw.backends import LaunchConfig
    from tests.autotune.fakes import tunable

    ids: dict[int, int] = {}
    calm = "FAKE_CALM" in os.environ
    for line in sys.stdin:
        request = json.loads(line)
        name, args = request["call"], request["args"]
        value = None
        if name == "facts":
            value = {**FACTS, "target": H200.to_json()}
        elif name == "open":
            of = tunable(f"{args[0]}.{args[3]}")
            value = {"baseline": of.heuristic(H200, tuple(args[4])).to_json(), "bytes": 1_000_000, "copies": 1}
        elif name == "prepare":
            warps = LaunchConfig.from_json(args[0]).num_warps
            if calm:
                pass
            elif warps == 2:
                print("Fatal: LLVM ERROR: cannot select", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            elif warps == 4:
                time.sleep(1000)
            elif warps == 16:
                answers.write(json.dumps({"error": "CUDA error: an illegal memory access", "fatal": True}) + "\n")
                continue
            elif warps == 32:
                answers.write(json.dumps({"error": "ValueError: no"}) + "\n")
                continue
            ids[len(ids) + 1] = warps
            value = {"id": len(ids), "resources": {}}
        elif name == "time":
            time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
            value = [[10.0 + (ids[i] != 1)] * args[1] for i in args[0]]
        elif name == "verify":
            value = ""
        elif name == "candidate":
            warps = args[0]["config"]["num_warps"]
            if warps == 2 and not calm:
                os.abort()
            if warps == 4 and not calm:
                time.sleep(1000)
            value = {"resources": {"shared": 100 * warps}}
        answers.write(json.dumps({"value": value}) + "\n")
