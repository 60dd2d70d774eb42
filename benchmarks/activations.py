"""Tokens/s and peak memory of one training step by activation level, against Hugging Face and liger-kernel.

    python benchmarks/activations.py --out activations-h200.json [--model mistral] [--layers 32] [--batch 4] [--seq
    4096]

One process a library, forked before any of them touches the device, and liger-kernel once more at the end to see the
drift. Within a process the arms take turns on one model and one AdamW, one unmeasured step after each change; peak
memory is the allocator's within a measured step. A budget such as 75GiB runs what the planner picks for it and, with
--rivals, the best by prediction of other pairs of levels, to see whether the planner should have picked that. Each arm
has what the planner predicts: bytes, and speed against `keep`. First the gradients of every level are compared bit for
bit with keep's on small models of several families.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, Iterator

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or asking for devices would spoil the fork

import torch
import training
import transformers  # noqa: F401  imported once, before the forks

from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.recompute.levels import in_words
from liger_hw.recompute.planner import Planner, of_module
from liger_hw.text import table

LEVELS = ("keep", "cheap", "mlp", "full")
GIB = 1 << 30
FAMILIES = ("mistral", "llama3", "qwen3", "gemma2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mistral", choices=training.MODELS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps an arm and round")
    parser.add_argument("--budgets", type=float, nargs="*", default=[60, 75, 90, 105], help="GiB for the planner")
    parser.add_argument("--rivals", type=int, default=0, help="other mixes to run for each budget")
    parser.add_argument("--no-window", action="store_true", help="no sliding window: plain causal (flash) attention")
    parser.add_argument("--libraries", nargs="*", default=["check", "liger", "liger_hw", "hf", "liger"])
    parser.add_argument("--hidden", type=int, help="smaller width, for a quick try")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {"options": vars(options), "runs": []}
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
    found["machine"] = report.machine(with_index(options.device))  # now that no fork comes
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    print(as_text(found["runs"]))
    return 0


def run(library: str, options: argparse.Namespace, part: str) -> int:
    """All arms of one library in this process; one JSON line each into `part`."""
    began = time.perf_counter()
    records = check() if library == "check" else arms(library, options)
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
        schedule = training.Schedule(model=name, layers=2, batch=2, seq=512, hidden=512)
        for dtype, autocast in (("bfloat16", False), ("float32", True)):
            model = training.build(training.Schedule(**{**asdict(schedule), "dtype": dtype}), torch.device("cuda"))
            getattr(patches, f"apply_liger_kernel_to_{schedule.shape.family}")(model=model)
            ids = torch.randint(schedule.shape.vocab, (2, 512), device="cuda")
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


# -- training --------------------------------------------------------------------------------------------------------


def arms(library: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trains one model, its arms taking turns; a record an arm as soon as it has had its last one."""
    schedule = training.Schedule(
        model=options.model, layers=options.layers, batch=options.batch, seq=options.seq, hidden=options.hidden
    )
    device = with_index(options.device)
    with training.patched(library, schedule.shape.family, device):
        model = training.build(schedule, device)
        if options.no_window:
            model.config.sliding_window = None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        torch.manual_seed(1)
        ids = torch.randint(schedule.shape.vocab, (8, schedule.batch, schedule.seq), device=device)
        settings: dict[str, Any] = {name: name for name in (LEVELS if library == "liger_hw" else ("keep", "full"))}
        planner = None
        if library == "liger_hw":
            planner = of_module(model, model.config, schedule.batch, schedule.seq)
            settings |= budgets(planner, options.budgets, options.rivals)
        seen: dict[str, list[tuple[float, float | None]]] = {name: [] for name in settings}
        notes: dict[str, dict[str, Any]] = {name: {} for name in settings}
        count = 0
        for turn in range(options.rounds):
            for name, setting in settings.items():
                again = turn and name not in LEVELS
                if not again and "error" not in notes[name]:
                    dial = None
                    try:
                        dial = _set(library, model, setting)
                        for step in range(1 + options.steps):
                            measured = train_step(model, optimizer, ids[count % len(ids)])
                            count += 1
                            if step:
                                seen[name].append(measured)
                    except (torch.OutOfMemoryError, NothingFits) as error:
                        notes[name] = {"error": str(error).splitlines()[0][:160]}
                        optimizer.zero_grad(set_to_none=True)
                        training.release(device)
                    if dial is not None:
                        notes[name] |= {"levels": in_words(dial.levels), **_predicted(planner, dial.levels)}
                        dial.revert()
                if turn == options.rounds - 1:
                    yield {"arm": name, **_summary(schedule, seen[name]), **notes[name]}


class NothingFits(Exception):
    """The planner knows no mix for a budget."""


def budgets(planner: Planner, sizes: list[float], rivals: int) -> dict[str, Any]:
    """Name -> what to set: the planner's mix for each size, and the best of `rivals` other pairs of levels."""
    found: dict[str, Any] = {}
    count = planner.model.layers
    pairs = [(low, high) for i, high in enumerate(LEVELS) for low in LEVELS[i + 1 :]]
    for size in sizes:
        name = f"{size:g}GiB"
        try:
            chosen = planner.best(int(size * GIB))
        except ValueError as error:
            found[name] = NothingFits(str(error))
            continue
        found[name] = name
        others = []
        if set(chosen.levels) == {"keep"}:  # everything fits, and nothing is faster
            continue
        for low, high in pairs:
            mixes = [planner.predict((low,) * n + (high,) * (count - n)) for n in range(count + 1)]
            fitting = [mix for mix in mixes if mix.peak <= size * GIB and not set(mix.levels) <= set(chosen.levels)]
            others += [max(fitting, key=lambda mix: mix.speed)] if fitting else []
        others = list({mix.levels: mix for mix in sorted(others, key=lambda mix: -mix.speed)})
        for number, levels in enumerate(others[:rivals], 1):
            found[f"{name}, rival {number}"] = levels
    return found


def _set(library: str, model: Any, setting: Any) -> Any:
    if isinstance(setting, NothingFits):
        raise setting
    if library == "liger_hw":
        import liger_hw

        return liger_hw.activations(setting, model)
    if setting == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    return None


def train_step(model: Any, optimizer: Any, ids: torch.Tensor) -> tuple[float, float | None]:
    """Seconds and peak GiB (None on a CPU) of one training step."""
    module = None if ids.device.type == "cpu" else torch.get_device_module(ids.device)
    if module is not None:
        module.synchronize()
        module.reset_peak_memory_stats()
    began = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if module is not None:
        module.synchronize()
    return time.perf_counter() - began, None if module is None else module.max_memory_allocated() / GIB


def _summary(schedule: training.Schedule, seen: list[tuple[float, float | None]]) -> dict[str, Any]:
    if not seen:
        return {}
    seconds = statistics.median(s for s, _ in seen)
    peaks = [gib for _, gib in seen if gib is not None]
    return {
        "tokens_per_second": round(schedule.batch * schedule.seq / seconds, 1),
        "peak_gib": round(max(peaks), 3) if peaks else None,
        "steps": seen,
    }


def _predicted(planner: Planner, levels: tuple[str, ...]) -> dict[str, Any]:
    found = planner.predict(levels)
    return {"predicted_gib": round(found.peak / GIB, 3), "predicted_speed": round(found.speed, 4)}


def as_text(runs: list[dict[str, Any]]) -> str:
    """A row an arm. The measured speed is against the first level that ran, taken to be as fast as predicted."""
    ours = [run for run in runs if run["library"] == "liger_hw" and run.get("tokens_per_second")]
    unit = ours[0]["predicted_speed"] / ours[0]["tokens_per_second"] if ours else 0.0
    lines = [("library", "arm", "tokens/s", "peak GiB", "predicted", "speed", "predicted", "levels")]
    for run in runs:
        if run["library"] == "check":
            continue
        speed, peak, gib = run.get("tokens_per_second"), run.get("peak_gib"), run.get("predicted_gib")
        lines.append(
            (
                run["library"],
                run["arm"],
                f"{speed:.0f}" if speed else "-",
                f"{peak:.1f}" if peak else "-",
                "" if gib is None else f"{gib:.1f}" + (f" ({100 * (gib / peak - 1):+.1f}%)" if peak else ""),
                f"{100 * speed * unit:.1f}%" if speed else "",
                f"{100 * run['predicted_speed']:.1f}%" if "predicted_speed" in run else "",
                "; ".join(run[key] for key in ("levels", "error") if key in run),
            )
        )
    return table(lines)


if __name__ == "__main__":
    sys.exit(main())
