"""A worker process of the tuner: `python -m liger_hw.autotune.worker measure|compile`, driven over its pipes.

One JSON line in, one JSON line out: `{"call": name, "args": [...]}` -> `{"value": ...}` or `{"error": ..., "fatal": ...}`.
What libraries print goes to stderr. The worker ends when its parent does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, Callable


def main(argv: list[str]) -> int:
    kind, setting = argv[0], json.loads(argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # a library's print must not end up between the answers
    sys.stdout = sys.stderr
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    from . import notes

    notes.mute()
    handler = _measuring(setting) if kind == "measure" else _compiling(setting)
    answers.write('{"value": "ready"}\n')
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": handler(request["call"], request["args"])}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:2000]}", "fatal": _device_is_lost(kind, setting)}
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                answer["fatal"] = True
        answers.write(json.dumps(answer) + "\n")
        if answer.get("fatal"):
            os._exit(3)
    return 0


def _measuring(setting: dict[str, Any]) -> Callable[[str, list], Any]:
    from .local import LocalMeasurer

    measurer = LocalMeasurer(setting["device"])
    return lambda name, args: getattr(measurer, name)(*args)


def _compiling(setting: dict[str, Any]) -> Callable[[str, list], Any]:
    """Compiles what a candidate would launch, so that Triton's on-disk cache has it when the measuring worker asks."""
    from ..backends import LaunchConfig, Target, backend
    from . import compile as aot
    from . import plan

    target = Target(**{**setting["target"], "warp_sizes": tuple(setting["target"]["warp_sizes"])})
    usable = backend(target.vendor).triton_target(target) is not None
    known: dict[tuple, dict[str, Any]] = {}

    def compile_candidate(name: str, args: list) -> dict[str, Any]:
        if not usable:
            return {"unknown": f"the stock Triton has no compiler for {target.arch}"}
        op, sizes, dtype, variant, config = args
        forced = {f"{op}.{variant}": LaunchConfig.from_json(config)}
        try:
            launches = plan.trace(op, tuple(sizes), dtype, target, forced)
        except Exception as error:  # the op does not run on meta tensors: the measuring worker compiles for itself
            return {"unknown": f"{type(error).__name__}: {error}"}
        answer: dict[str, Any] = {"resources": {}}
        for launch in launches:
            if launch.same() not in known:
                try:
                    known[launch.same()] = aot._compile(json.loads(json.dumps(aot._job(launch))))["resources"]
                except Exception as error:
                    known[launch.same()] = {"error": f"{type(error).__name__}: {str(error).strip()[:200]}"}
            if launch.tunable == f"{op}.{variant}" and launch.layer == "explicit":
                if "error" in known[launch.same()]:
                    return known[launch.same()]
                answer["resources"] = known[launch.same()]
        return answer

    return compile_candidate


def _device_is_lost(kind: str, setting: dict[str, Any]) -> bool:
    """Whether the device answers nothing any more in this process, as after an illegal memory access."""
    if kind != "measure" or setting["device"] == "cpu":
        return False
    try:
        import torch

        device = torch.device(setting["device"])
        torch.get_device_module(device).synchronize()
        torch.zeros(1, device=device).item()
        return False
    except Exception:
        return True


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
