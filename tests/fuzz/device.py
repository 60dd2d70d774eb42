"""Fuzz tests for a GPU: faults in a training loop, memory over time, every kernel under a memory checker.

    python -m tests.fuzz.device faults OUT.json
    python -m tests.fuzz.device tuner OUT.json
    python -m tests.fuzz.device soak OUT.json --seconds 480
    compute-sanitizer --tool memcheck python -m tests.fuzz.device sweep OUT.json --checked --part 0/4 --seconds 60
    compute-sanitizer --tool memcheck python -m tests.fuzz.device planted OUT.json --checked      must report an error

Each prints one line and writes JSON every few seconds; the exit status is 1 if a check failed. `--dry` is a few steps
on a CPU, with TRITON_INTERPRET=1 in the interpreter.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["LIGER_HW_CACHE_DIR"] = tempfile.mkdtemp(prefix="liger_hw-fuzz-")

import torch

from liger_hw import registry
from liger_hw.autotune import workers
from liger_hw.autotune.jobs import Job
from liger_hw.autotune.tuner import Effort, Tuner
from liger_hw.backends import LaunchConfig, target_of
from tests.fuzz.__main__ import ROOT, Report
from tests.fuzz.soak import soak
from tests.fuzz.sweep import planted, round_allocations, sweep

STEPS = 200
WIDE, VOCAB, TOKENS = 256, 32000, (2, 256)
Event = dict[str, Any]
Save = Callable[[dict[str, Any]], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("faults", "tuner", "soak", "sweep", "planted"))
    parser.add_argument("out", help="JSON file")
    parser.add_argument("--seconds", type=float, default=180.0, help="of the soak, at most of the sweep (default 180)")
    parser.add_argument("--part", default="0/1", help="of the sweep, as 0/4 (default 0/1)")
    parser.add_argument("--checked", action="store_true", help="allocate memory for a memory checker: sweep.py")
    parser.add_argument("--dry", action="store_true", help="a few steps on a CPU")
    arguments = parser.parse_args()
    if arguments.checked:
        round_allocations()
    report = Report(arguments.out)
    does = {"faults": faults, "tuner": tuner, "soak": soak, "sweep": sweep, "planted": planted}
    found = does[arguments.what](arguments, report.save)
    report.save(found, finished=True)
    print(arguments.what, {name: value for name, value in found.items() if not isinstance(value, (list, dict))})
    return 0 if found["held"] else 1


def device_of(arguments: argparse.Namespace) -> str:
    return "cpu" if arguments.dry else "cuda"


# -- faults ----------------------------------------------------------------------------------------------------------


def faults(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    """A training loop without faults and one with a fault every few steps have the same losses and weights. If not,
    a second loop without faults shows whether the loop is reproducible."""
    device, steps = device_of(arguments), 8 if arguments.dry else STEPS
    found: dict[str, Any] = {"held": False, "steps": steps, "log": []}
    plain, weights = train(device, steps, {}, [])
    save(found)
    faulty, same = train(device, steps, _faults(steps, device), found["log"], lambda: save(found))
    found["apart_with_faults"] = _apart(plain, faulty)
    found["weights_equal"] = all(torch.equal(a, b) for a, b in zip(weights, same))
    target = target_of(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    failed = len(registry.quarantined())
    registry.reset()  # as in a new process, which reads the notes of this one
    found["quarantined"] = {"in_this_process": failed, "read_by_the_next": len(registry.quarantined(target))}
    found["faults"] = len(found["log"])
    save(found)
    if found["apart_with_faults"]:
        found["apart_without_faults"] = _apart(plain, train(device, steps, {}, [])[0])
    kept = device == "cpu" or found["quarantined"]["read_by_the_next"] >= failed > 0
    everything = not found["apart_with_faults"] and found["weights_equal"] and kept
    return found | {"held": everything and all(event["held"] for event in found["log"])}


def _apart(one: list[float], other: list[float]) -> str:
    """Where two lists of losses differ, or ""."""
    places = [step for step, (a, b) in enumerate(zip(one, other)) if a != b]
    return f"{len(places)} of {len(one)} losses, first at step {places[0]}" if places else ""


def train(
    device: str,
    steps: int,
    at: dict[int, Callable[[Callable[[], Any]], Event]],
    log: list[Event],
    noted: Callable[[], Any] = lambda: None,
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final weights of a small Mistral. at: step -> event before it, a function of one that does a forward
    and backward and returns the model."""
    from transformers import MistralConfig, MistralForCausalLM

    from liger_hw.transformers import apply_liger_kernel_to_mistral

    registry.reset()
    torch.manual_seed(0)
    wide, vocab, tokens = (32, 100, (2, 8)) if device == "cpu" else (WIDE, VOCAB, TOKENS)
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
    applied = apply_liger_kernel_to_mistral(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses = []
    try:
        for step in range(steps):
            ids = torch.randint(vocab, tokens, generator=generator).to(device)

            def one(ids: torch.Tensor = ids) -> float:
                optimizer.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                return float(loss.detach())

            if step in at:
                log.append({"step": step, **at[step](lambda one=one: (one(), model)[1])})
                noted()
            losses.append(one())
            optimizer.step()
    finally:
        applied.revert()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def _faults(steps: int, device: str) -> dict[int, Callable[[Any], Event]]:
    """Step -> event before it: a configuration that fails, or memory that runs out in the loss."""
    kinds = [_failing(name, words, change) for name, words, change in _CONFIGURATIONS]
    if device != "cpu":
        kinds.append(_out_of_memory)
    apart = max(1, steps // (2 * len(kinds) + 1))
    return {(i + 1) * apart: kinds[i % len(kinds)] for i in range(2 * len(kinds)) if (i + 1) * apart < steps}


_TOO_MUCH = {"blocks": {"BLOCK_SIZE": 256, "ROWS": 32}, "num_warps": 8, "num_stages": 8}
"""460 KB of shared memory in rms_norm's backward of 256 columns in float32, which our rules cannot know."""
_HEAD = "fused_linear_cross_entropy.fwd"
_CONFIGURATIONS = (
    ("rms_norm.bwd", "too much shared memory", lambda c: replace(c, **_TOO_MUCH)),
    ("rms_norm.fwd", "cluster", lambda c: replace(c, vendor={"num_ctas": 16})),
    ("swiglu.fwd", "too many threads", lambda c: replace(c, num_warps=64)),
    ("swiglu.bwd", "compile error", lambda c: replace(c, blocks={name: 3 for name in c.blocks})),
    (_HEAD, "tensor too large", lambda c: replace(c, blocks={name: 2**21 for name in c.blocks})),
)


def _failing(name: str, words: str, change: Callable[[LaunchConfig], LaunchConfig]) -> Callable[[Any], Event]:
    def happen(step: Callable[[], Any]) -> Event:
        """Override with the configuration, which our rules are made to accept."""
        tunable = registry.get_tunable(name)
        known = tunable.illegal
        used = [plan for plan in registry.plans() if plan.tunable is tunable]
        if not used:
            return {"kind": words, "kernel": name, "held": False, "note": "never launched"}
        bad = change(used[0].config)
        refused = known(used[0].target, used[0].key, bad)
        tunable.illegal = lambda target, key, config: None if config == bad else known(target, key, config)
        before = set(registry.quarantined())
        began = time.monotonic()
        try:
            with registry.override(name, bad):
                step()
            error = ""
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        finally:
            del tunable.illegal
        new = [why for mark, why in registry.quarantined().items() if mark not in before]
        answer = {"quarantined": new[:1], "raised": error, "seconds": round(time.monotonic() - began, 2)}
        said_before = bad.to_text() in {mark[3] for mark in before if mark[1] == name}
        return {
            "kind": words,
            "kernel": name,
            "refused_by_our_rules": refused or "",
            **answer,
            "held": not error and bool(new or said_before),
        }

    def happen_on_a_cpu(step: Callable[[], Any]) -> Event:
        found = happen(step)
        return {**found, "held": not found.get("raised")}  # the reference launches nothing

    return happen if torch.cuda.is_available() else happen_on_a_cpu


def _out_of_memory(step: Callable[[], Any]) -> Event:
    """Memory runs out at one place after another of a step, until it suffices. Each time torch's error is raised and no
    weight changes."""
    model = step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    total = torch.cuda.get_device_properties(0).total_memory
    places: list[str] = []
    other: list[str] = []
    more = 0
    model.zero_grad(set_to_none=True)
    try:
        for more in range(0, 1024, 16):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (more << 20)) / total))
            try:
                step()
                break
            except torch.OutOfMemoryError as problem:
                places.append(_place(problem))
            except Exception as problem:
                other.append(f"{type(problem).__name__}: {problem}"[:200])
            model.zero_grad(set_to_none=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    inside = [place for place in places if place.startswith("liger_hw")]
    return {
        "kind": "out of memory",
        "times": len(places),
        "places": sorted(set(places)),
        "suffices_mib": more,
        "other_errors": other,
        "weights_equal": same,
        "held": bool(inside) and same and not other,
    }


def _place(problem: BaseException) -> str:
    """The innermost function outside torch that an error left, as `file:function`."""
    frames = traceback.extract_tb(problem.__traceback__)
    last = [frame for frame in frames if "/site-packages/torch/" not in frame.filename][-1]
    name = os.path.realpath(last.filename).split("/site-packages/")[-1].removeprefix(f"{ROOT}/")
    return f"{name}:{last.name}"


# -- a tuner's worker that hangs -------------------------------------------------------------------------------------


def tuner(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    """In the middle of a training loop a tuner searches. Its worker hangs in one candidate and loses the device in
    another: the search tries the others, and the loop has the losses of a loop without a search."""
    device, steps = device_of(arguments), 8 if arguments.dry else STEPS
    found: dict[str, Any] = {"held": False, "steps": steps, "log": []}
    plain, weights = train(device, steps, {}, [])
    save(found)
    at = {} if arguments.dry else {steps // 2: _search}
    searched, same = train(device, steps, at, found["log"])
    found["apart_with_search"] = _apart(plain, searched)
    found["weights_equal"] = all(torch.equal(a, b) for a, b in zip(weights, same))
    held = not found["apart_with_search"] and found["weights_equal"] and all(event["held"] for event in found["log"])
    return found | {"held": held}


def _search(step: Callable[[], Any]) -> Event:
    of, target = registry.get_tunable("rms_norm.fwd"), target_of(torch.device("cuda", 0))
    sizes = (TOKENS[0] * TOKENS[1], WIDE)
    key = of.key(*sizes, 4)
    baseline = of.heuristic(target, key)
    hang, lose, *others = [warps for warps in (8, 16, 4, 2, 1) if warps != baseline.num_warps]
    os.environ |= {"FUZZ_HANG": str(hang), "FUZZ_LOSE": str(lose)}
    workers.Worker.module = "tests.fuzz.misbehaving"
    space, of.space = (
        of.space,
        lambda target, key: [replace(baseline, num_warps=warps) for warps in (hang, lose, *others)],
    )
    workers.RemoteMeasurer.LIMITS["prepare"] = 10.0
    measurer, saved, began = workers.RemoteMeasurer("cuda:0"), {}, time.monotonic()
    try:
        search = Tuner(
            target,
            measurer,
            facts=measurer.facts(),
            save=lambda name, entry: saved.update({name: entry}) or True,
            effort=Effort(job_seconds=150.0),  # a worker that starts again takes long on a busy machine
        )
        (result,) = search.run([Job("rms_norm", "fwd", key, sizes, "float32")])
    finally:
        measurer.close()
        of.space = space
        workers.Worker.module = workers.__name__
    step()
    return {
        "kind": "worker hangs, worker loses the device",
        "warps": {"hang": hang, "lose": lose, "sound": [baseline.num_warps, *others]},
        "tried": result.tried,
        "failed": result.failed,
        "error": result.error,
        "winner": result.config,
        "seconds": round(time.monotonic() - began, 1),
        "held": not result.error and result.failed == 2 and result.tried >= 4,
    }


if __name__ == "__main__":
    sys.exit(main())
