"""What only a GPU can show: failing configurations in a training loop, memory over time, every kernel under a checker.

    python -m tests.fuzz.device faults OUT.json
    python -m tests.fuzz.device soak OUT.json --seconds 180
    compute-sanitizer --tool memcheck python -m tests.fuzz.device sweep OUT.json --part 0/4

Each prints one line and writes JSON; the exit status is 1 where something did not hold. `--dry` is a few steps on a
CPU, with TRITON_INTERPRET=1 those of the kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["LIGER_HW_CACHE_DIR"] = tempfile.mkdtemp(prefix="liger_hw-fuzz-")

import torch
from harness import few_sizes, make, run, wide_sizes

from liger_hw import registry
from liger_hw.backends import LaunchConfig
from tests.fuzz.__main__ import versions

STEPS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("faults", "soak", "sweep"))
    parser.add_argument("out", help="JSON file")
    parser.add_argument("--seconds", type=float, default=180.0, help="of the soak (default 180)")
    parser.add_argument("--part", default="0/1", help="of the sweep, as 0/4 (default 0/1)")
    parser.add_argument("--dry", action="store_true", help="a few steps on a CPU")
    arguments = parser.parse_args()
    device = "cpu" if arguments.dry else "cuda"
    found = {"faults": faults, "soak": soak, "sweep": sweep}[arguments.what](arguments, device)
    Path(arguments.out).write_text(json.dumps({**versions(), **found}, indent=1) + "\n")
    print(arguments.what, {name: value for name, value in found.items() if not isinstance(value, (list, dict))})
    return 0 if found["held"] else 1


# -- faults ----------------------------------------------------------------------------------------------------------


def faults(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """A training loop without faults, then one with a fault every few steps: losses and weights are the same."""
    steps = 8 if arguments.dry else STEPS
    plain, weights, _ = _train(device, steps, {})
    again, same, log = _train(device, steps, _faults(steps, device))
    apart = [i for i, (a, b) in enumerate(zip(plain, again)) if a != b]
    equal = all(torch.equal(a, b) for a, b in zip(weights, same))
    first = f"first at step {apart[0]}" if apart else ""
    held = not apart and equal and all(event["held"] for event in log)
    return {"held": held, "steps": steps, "losses_apart": len(apart), "first_apart": first, "weights_equal": equal} | {
        "faults": len(log),
        "log": log,
    }


def _train(device: str, steps: int, at: dict[int, Callable[[Any], dict]]) -> tuple[list[float], list, list[dict]]:
    from transformers import MistralConfig, MistralForCausalLM

    from liger_hw.transformers import apply_liger_kernel_to_mistral

    registry.reset()
    torch.manual_seed(0)
    wide, vocab = (32, 100) if device == "cpu" else (256, 4000)
    config = MistralConfig(
        vocab_size=vocab,
        hidden_size=wide,
        intermediate_size=2 * wide,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",  # the same bits in every run
    )
    model = MistralForCausalLM(config).to(device).train()
    report = apply_liger_kernel_to_mistral(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses, log = [], []
    try:
        for step in range(steps):
            ids = torch.randint(vocab, (2, 8 if device == "cpu" else 64), generator=generator).to(device)

            def one(ids=ids) -> float:
                optimizer.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                return float(loss.detach())

            if step in at:
                log.append({"step": step, **at[step](lambda one=one: (one(), model)[1])})
            losses.append(one())
            optimizer.step()
    finally:
        report.revert()
    return losses, [parameter.detach().clone() for parameter in model.parameters()], log


def _faults(steps: int, device: str) -> dict[int, Callable[[Any], dict]]:
    """Step -> what happens before it: a configuration that fails, or memory that runs out in the loss."""
    kinds = [_failing(name, words, change) for name, words, change in _CONFIGURATIONS]
    if device != "cpu":
        kinds.append(_out_of_memory)
    apart = max(1, steps // (2 * len(kinds) + 1))
    return {(i + 1) * apart: kinds[i % len(kinds)] for i in range(2 * len(kinds)) if (i + 1) * apart < steps}


_CONFIGURATIONS = (
    ("rms_norm.bwd", "shared memory", lambda c: replace(c, blocks={"BLOCK_SIZE": 256, "ROWS": 256}, num_stages=8)),
    ("rms_norm.fwd", "cluster", lambda c: replace(c, vendor={"num_ctas": 16})),
    ("swiglu.fwd", "threads", lambda c: replace(c, num_warps=64)),
    ("swiglu.bwd", "compile error", lambda c: replace(c, blocks={name: 3 for name in c.blocks})),
    ("cross_entropy.stats", "tensor too large", lambda c: replace(c, blocks={name: 2**21 for name in c.blocks})),
    ("rms_norm.fwd", "registers", lambda c: replace(c, vendor={"maxnreg": 1})),
)


def _failing(name: str, words: str, change: Callable[[LaunchConfig], LaunchConfig]) -> Callable[[Any], dict]:
    def happen(step: Callable[[], Any]) -> dict:
        """The configuration answers as an explicit one would, and our own rules are told to let it pass."""
        tunable = registry.get_tunable(name)
        known = tunable.illegal
        configs = {plan.key: change(plan.config) for plan in registry.plans() if plan.tunable is tunable}
        bad = next(iter(configs.values()), None)
        if bad is None:
            return {"kind": words, "kernel": name, "held": device_is_cpu(), "note": "never launched"}
        refused = known(next(p.target for p in registry.plans() if p.tunable is tunable), next(iter(configs)), bad)
        tunable.illegal = lambda target, key, config: None if config == bad else known(target, key, config)
        before = set(registry.quarantined())
        try:
            with registry.override(name, bad):
                step()
            error = ""
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        finally:
            del tunable.illegal
        new = [why for mark, why in registry.quarantined().items() if mark not in before]
        return {
            "kind": words,
            "kernel": name,
            "refused_by_our_rules": refused or "",
            "quarantined": new[:1],
            "raised": error,
            "held": not error,
        }

    return happen


def device_is_cpu() -> bool:
    return not torch.cuda.is_available()


def _out_of_memory(step: Callable[[], Any]) -> dict:
    """Memory runs out inside forward, loss or backward: torch's own error, no weight touched, and the loop goes on."""
    model = step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    held = []
    error = ""
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (2 << 20)) / total))
    try:
        step()
    except torch.OutOfMemoryError as problem:
        error = str(problem).splitlines()[0][:120]
    except Exception as problem:
        held.append(f"{type(problem).__name__}: {problem}"[:200])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    return {"kind": "out of memory", "raised": error, "other": held, "held": bool(error) and same and not held}


# -- soak ------------------------------------------------------------------------------------------------------------


def soak(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Ops at ever new shapes until the time is up: the memory of host and device after a warm-up and at the end."""
    import random

    chance, names = random.Random(0), ("rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy", "rope")
    shapes = {"rms_norm": (0, 1024), "swiglu": (0, 2816), "cross_entropy": (0, 4000)}
    shapes |= {"fused_linear_cross_entropy": (0, 256, 4000), "rope": (1, 0, 8, 2, 64)}
    started, calls, rows_seen, points = time.monotonic(), 0, set(), []
    seconds = 5.0 if arguments.dry else arguments.seconds
    next_point = 0.3 * seconds
    while (elapsed := time.monotonic() - started) < seconds:
        name = chance.choice(names)
        op, rows = registry.get_op(name), chance.randint(1, 64 if arguments.dry else 3000)
        sizes = tuple(rows if size == 0 else size for size in shapes[name])
        dtype = torch.float32 if arguments.dry else torch.bfloat16
        run(op.function, make(op, sizes, dtype, device, calls))
        calls += 1
        rows_seen.add((name, rows))
        if elapsed > next_point:
            points.append({"second": round(elapsed), "calls": calls, "shapes": len(rows_seen), **_memory(device)})
            next_point += 0.1 * seconds
    points.append({"second": round(time.monotonic() - started), "calls": calls, "shapes": len(rows_seen)})
    points[-1] |= _memory(device)
    host = points[-1]["host_mib"] - points[0]["host_mib"]
    allocated = points[-1].get("allocated_mib", 0) - points[0].get("allocated_mib", 0)
    held = host < 64 and allocated < 1
    return {"held": held, "seconds": round(seconds), "calls": calls, "shapes": len(rows_seen)} | {
        "host_growth_mib": round(host, 1),
        "device_growth_mib": round(allocated, 2),
        "replays": len(registry.replay_cache),
        "points": points,
    }


def _memory(device: str) -> dict[str, float]:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize() / 2**20
    if device == "cpu":
        return {"host_mib": resident}
    torch.cuda.synchronize()
    return {
        "host_mib": resident,
        "allocated_mib": torch.cuda.memory_allocated() / 2**20,
        "reserved_mib": torch.cuda.memory_reserved() / 2**20,
    }


# -- sweep -----------------------------------------------------------------------------------------------------------


def sweep(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Every op at odd sizes, forward and backward: for compute-sanitizer, which says by its exit status what it saw."""
    part, parts = map(int, arguments.part.split("/"))
    done, failed = [], []
    for op in list(registry.ops().values())[part::parts][: 2 if arguments.dry else None]:
        for dtype in (torch.float32,) if arguments.dry else (torch.bfloat16, torch.float32):
            for sizes in (few_sizes(op), wide_sizes(op)):
                try:
                    run(op.function, make(op, sizes, dtype, device, 0))
                except Exception as error:
                    failed.append(f"{op.name} {sizes} {dtype}: {type(error).__name__}: {error}"[:200])
                done.append(f"{op.name} {sizes} {dtype}")
                print(done[-1], file=sys.stderr, flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return {"held": not failed, "cases": len(done), "failed": failed, "done": done}


if __name__ == "__main__":
    sys.exit(main())
