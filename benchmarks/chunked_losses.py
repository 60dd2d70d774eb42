"""Forward + backward of every chunked loss against its GEMM floor and liger-kernel, on one GPU.

    python benchmarks/chunked_losses.py --out chunked-losses-h200.json [--batch 8] [--length 1024] [--vocab 131072]

Floor: the cuBLAS products a loss cannot do without, on whole tensors, timed between our calls in the same process (three
a token; one more for a reference or teacher head). Forward and backward with the gradients of hidden states and weight:
`ms` is a replayed CUDA graph where the loss can be captured, `eager_ms` the same call from Python; peak is what a call
allocates beyond its inputs. liger-kernel runs in eager with its defaults (torch.compile included) after all of ours, until
--seconds are spent.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any, Callable

import torch

LOSSES = ("ORPO", "CPO", "SimPO", "KTO", "DPO", "GRPO", "GRPO-sequence", "JSD", "CosineSimilarity")


def inputs(batch: int, length: int, hidden: int, vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return values.mul_(scale)

    x, weight = random(batch, length, hidden), random(vocab, hidden, scale=hidden**-0.5)
    made = {"x": x, "weight": weight, "ref_x": random(batch, length, hidden)}
    made["ref_weight"] = weight + random(vocab, hidden, scale=0.1 * hidden**-0.5)
    made["ids"] = torch.randint(vocab, (batch, length), generator=generator, device="cuda")
    made["labels"] = torch.arange(batch, device="cuda") % 2 == 0
    made["advantages"] = torch.randn(batch, generator=generator, device="cuda")
    made["old"] = torch.randn(batch, length, generator=generator, device="cuda") * 0.1 - 12
    made["ref_logps"] = made["old"] + 0.1
    return made


def call_of(package: str, name: str, t: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Forward and backward of one loss; returns the loss."""
    kind, _, level = name.partition("-")
    module = getattr(importlib.import_module(f"{package}.chunked_loss"), f"LigerFusedLinear{kind}Loss")
    x, weight = t["x"].requires_grad_(), t["weight"].requires_grad_()
    flat, teacher, ids = (lambda v: v.view(-1, v.shape[-1])), t["ref_x"], t["ids"]
    options = {"GRPO": {"importance_sampling_level": level or "token"}, "KTO": {"average_log_prob": True}}.get(kind, {})
    loss = module(**options)
    calls = {
        "DPO": lambda: loss(weight, x, ids, None, t["ref_x"], t["ref_weight"]),
        "KTO": lambda: loss(x, weight, ids, None, t["labels"]),
        "GRPO": lambda: loss(
            x, weight, ids, torch.ones_like(ids), t["advantages"], None, t["ref_logps"], t["old"]
        ),
        "JSD": lambda: loss(flat(x), weight, flat(teacher), t["ref_weight"], ids.view(-1)),
    }  # fmt: skip
    calls["CosineSimilarity"] = calls["JSD"]
    forward = calls.get(kind, lambda: loss(weight, x, ids))

    def call() -> torch.Tensor:
        x.grad = weight.grad = None
        out = forward()
        value = out[0] if isinstance(out, tuple) else out
        value.backward()
        return value.detach()

    return call


def floor_of(name: str, t: dict[str, torch.Tensor]) -> Callable[[], None]:
    """The products alone, unchunked, into buffers that are there already."""
    x, weight, teacher = t["x"].detach().flatten(0, 1), t["weight"].detach(), t["ref_x"].flatten(0, 1)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    logits = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    more = name in ("DPO", "JSD", "CosineSimilarity")

    def call() -> None:
        if more:
            torch.mm(teacher, t["ref_weight"].t(), out=logits)
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), x, out=dweight)

    return call


def milliseconds(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Of each call, interleaved, after one unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            if round_:
                times[name].append(start.elapsed_time(stop))
    return times


def peak_mib(call: Callable[[], Any], t: dict[str, torch.Tensor]) -> float:
    """MiB at the highest beyond what was there, gradients included."""
    t["x"].grad = t["weight"].grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    return graph


def measure(package: str, name: str, t, repeats: int, floor: float | None) -> dict[str, Any]:
    call = call_of(package, name, t)
    began = time.perf_counter()
    value = call()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    peak = peak_mib(call, t)
    gradients = [t[n].grad.float().norm().item() for n in ("x", "weight")]
    arms: dict[str, Callable[[], Any]] = {} if floor is not None else {"floor": floor_of(name, t)}
    if package == "liger_hw":
        arms["graph"] = captured(call).replay
    arms["eager"] = call
    times = milliseconds(arms, repeats)
    medians = {arm: statistics.median(values) for arm, values in times.items()}
    own, floor = medians.get("graph", medians["eager"]), medians.get("floor", floor)
    record = {"package": package, "loss": name, "ms": own, "eager_ms": medians["eager"], "floor_ms": floor}
    record |= {"share": floor / own, "peak_mib": peak, "first_call_s": first, "value": value.item()}
    record |= {"gradient_norms": gradients, "samples": times}
    shown = (
        f"{package:12} {name:17} {own:8.2f} ms (eager {medians['eager']:.2f}), floor {floor:6.2f}, {floor / own:6.1%}"
    )
    shown += f", peak {peak:6.0f} MiB"
    print(f"{shown}, loss {value.item():.5f}, norms {gradients[0]:.4g} {gradients[1]:.4g}", flush=True)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("length", 1024), ("hidden", 4096), ("vocab", 131072), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--liger", nargs="*", default=["ORPO", "GRPO", "DPO", "KTO", "SimPO", "CPO"], choices=LOSSES)
    parser.add_argument("--seconds", type=float, default=60.0, help="no further liger-kernel loss is begun after this")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    began = time.perf_counter()
    t = inputs(options.batch, options.length, options.hidden, options.vocab)
    found: dict[str, Any] = {"options": vars(options), "torch": torch.__version__, "runs": []}
    found["device"] = torch.cuda.get_device_name()
    floors: dict[str, float] = {}

    def record(package: str, name: str, repeats: int) -> None:
        run = measure(package, name, t, repeats, floors.get(name))
        floors[name] = run["floor_ms"]
        found["runs"].append(run)
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")

    for name in options.losses:
        record("liger_hw", name, options.repeats)
    for name in options.liger:
        if time.perf_counter() - began > options.seconds:
            print(f"liger_kernel {name}: skipped, {options.seconds:g} s are spent")
            continue
        try:
            record("liger_kernel", name, 2 if name == "GRPO" else 3)
        except Exception as error:
            print(f"liger_kernel {name}: {type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
