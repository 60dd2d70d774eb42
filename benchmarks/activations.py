"""Tokens/s and peak memory of one training step by activation level, against Hugging Face and liger-kernel.

    python benchmarks/activations.py --out activations-h200.json [--model mistral] [--layers 32] [--batch 4] [--seq 4096]

One process a library, forked before any of them touches the device, and liger-kernel once more at the end to see the
drift. Within a process the arms take turns on one model and one AdamW, one unmeasured step after each change; peak
memory is the allocator's within a measured step. Budgets such as 75GiB run what the planner picks for them. First the
gradients of every level are compared bit for bit with keep's on small models of several families.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import timeit
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, Iterator

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or asking for devices would spoil the fork

import torch
import transformers  # noqa: F401  imported once, before the forks

from liger_hw.bench import e2e

LEVELS = ("keep", "cheap", "mlp", "full")
FAMILIES = ("mistral", "llama3", "qwen3", "gemma2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mistral", choices=e2e.MODELS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps an arm and round")
    parser.add_argument("--budgets", type=int, nargs="*", default=[60, 75, 90, 105], help="GiB for the planner")
    parser.add_argument("--no-window", action="store_true", help="no sliding window: plain causal (flash) attention")
    parser.add_argument("--libraries", nargs="*", default=["check", "liger", "liger_hw", "hf", "liger"])
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {"options": vars(options), "torch": torch.__version__, "runs": []}
    for library in options.libraries:
        part = f"{options.out}.part"
        Path(part).unlink(missing_ok=True)
        child = os.fork()
        if not child:
            code = 1
            try:
                code = run(library, options, part)
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.waitpid(child, 0)
        lines = Path(part).read_text().splitlines() if Path(part).exists() else []
        found["runs"] += [json.loads(line) for line in lines]
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
        Path(part).unlink(missing_ok=True)
    return 0


def run(library: str, options: argparse.Namespace, part: str) -> int:
    """All arms of one library in this process; one JSON line each into `part`."""
    began = time.perf_counter()
    records = {"check": check, "cost": cost}[library]() if library in ("check", "cost") else arms(library, options)
    with open(part, "a") as out:
        for record in records:
            record = {"library": library, **record}
            print(json.dumps({k: v for k, v in record.items() if k != "steps"}), flush=True)
            out.write(json.dumps(record) + "\n")
            out.flush()
    print(f"{library}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


# -- gradients -------------------------------------------------------------------------------------------------------


def check() -> Iterator[dict[str, Any]]:
    """Whether every level's gradients are keep's, bit for bit; deterministic algorithms, or two runs of keep differ."""
    import liger_hw
    from liger_hw import transformers as patches

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in FAMILIES:
        plan = e2e.Plan(model=name, layers=2, batch=2, seq=512, hidden=512)
        for dtype, autocast in (("bfloat16", False), ("float32", True)):
            model = e2e.build(e2e.Plan(**{**asdict(plan), "dtype": dtype}), torch.device("cuda"))
            getattr(patches, f"apply_liger_kernel_to_{plan.shape.family}")(model=model)
            ids = torch.randint(plan.shape.vocab, (2, 512), device="cuda")
            results = {}
            for level in ("keep", *LEVELS):
                model.zero_grad(set_to_none=True)
                before = torch.cuda.memory_allocated()
                with liger_hw.activations(level, model), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                kept = torch.cuda.memory_allocated() - before
                loss.backward()
                gradients = [p.grad.clone() for p in model.parameters()]
                if level not in results:
                    results[level] = gradients
                same = all(torch.equal(a, b) for a, b in zip(results["keep"], gradients))
                yield {"arm": level, "family": name, "autocast": autocast, "bit_identical": same, "kept_bytes": kept}


def cost() -> Iterator[dict[str, Any]]:
    """Host microseconds of packing and unpacking a tensor that has no recipe; and of torch's own cheapest hook."""
    from liger_hw.recompute import recipes

    weight = torch.randn(64, 64, requires_grad=True)
    for name, t in (("leaf", weight), ("intermediate", weight * 2), ("view", (weight * 2).view(4096))):
        with recipes.Scope(recipes.CHEAP), torch.no_grad():
            ours = _microseconds(lambda t=t: recipes.unpack(recipes.pack(t)))
            detach = _microseconds(t.detach)
        yield {"arm": f"pack and unpack, {name}", "us": round(ours, 3), "detach_us": round(detach, 3)}


def _microseconds(function: Any) -> float:
    """Of one call, in the best of many short windows."""
    return min(timeit.repeat(function, number=300, repeat=300)) / 300 * 1e6


# -- training --------------------------------------------------------------------------------------------------------


def arms(library: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trains one model, its arms taking turns."""
    plan = e2e.Plan(model=options.model, layers=options.layers, batch=options.batch, seq=options.seq)
    device = torch.device("cuda", 0)
    with e2e._patched("hf" if library == "hf" else library, plan.shape.family):
        model = e2e.build(plan, device)
        if options.no_window:
            model.config.sliding_window = None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        torch.manual_seed(1)
        ids = torch.randint(plan.shape.vocab, (8, plan.batch, plan.seq), device=device)
        names = [*LEVELS, *(f"{gib}GiB" for gib in options.budgets)] if library == "liger_hw" else ["keep", "full"]
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        notes: dict[str, dict[str, Any]] = {name: {} for name in names}
        count = 0
        for turn in range(options.rounds):
            for name in names:
                if notes[name].get("error") or (turn and name not in LEVELS):
                    continue
                setting = _set(library, model, name)
                try:
                    for step in range(1 + options.steps):
                        measured = _step(model, optimizer, ids[count % len(ids)])
                        count += 1
                        if step:
                            seen[name].append(measured)
                except torch.OutOfMemoryError as error:
                    notes[name] = {"error": str(error).splitlines()[0][:120]}
                    optimizer.zero_grad(set_to_none=True)
                    torch.cuda.empty_cache()
                if setting is not None:
                    notes[name] |= {"levels": list(setting.levels)}
                    setting.revert()
        for name in names:
            yield {"arm": name, **_summary(plan, seen[name]), **notes[name], **_predicted(options, plan, notes[name])}


def _set(library: str, model: Any, name: str) -> Any:
    if library == "liger_hw":
        import liger_hw

        return liger_hw.activations(name, model)
    if name == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    return None


def _step(model: Any, optimizer: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds and peak GiB of one training step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 2**30


def _summary(plan: e2e.Plan, seen: list[tuple[float, float]]) -> dict[str, Any]:
    if not seen:
        return {}
    seconds = statistics.median(s for s, _ in seen)
    return {
        "tokens_per_second": round(plan.batch * plan.seq / seconds, 1),
        "peak_gib": round(max(gib for _, gib in seen), 3),
        "steps": seen,
    }


def _predicted(options: argparse.Namespace, plan: e2e.Plan, note: dict[str, Any]) -> dict[str, Any]:
    if "levels" not in note:
        return {}
    from dataclasses import replace

    from liger_hw.autotune import models
    from liger_hw.recompute.planner import Planner

    known = {"mistral": "mistral-7b", "llama3": "llama-3-8b", "qwen3": "qwen3-8b", "gemma2": "gemma-2-2b"}
    shape = replace(models.find(known[options.model]), layers=plan.layers)
    predicted = Planner(shape, plan.batch, plan.seq).predict(note["levels"])
    return {"predicted_gib": round(predicted.peak / 2**30, 3), "predicted_speed": round(predicted.speed, 4)}


if __name__ == "__main__":
    sys.exit(main())
