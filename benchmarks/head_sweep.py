"""Fused linear cross entropy over tokens x vocabulary, forward and backward: is there a size where it falls off?

    python benchmarks/head_sweep.py --out head-sweep-h200.json [--part 0/4] [--seconds 100]
    python benchmarks/head_sweep.py --plot docs/head-sweep.png head-sweep-h200.json [...]

Each point: our call and its three products on whole tensors (`torch.mm`, the floor; of `floor_words` words where the
vocabulary is odd), in turn, each SETTLE_MS before a call counts; medians. Calls below SLOW are captured as CUDA graphs
and replayed, others run as they are. Sizes include odd ones. --part i/n takes every n-th vocabulary, for several
processes with a GPU each; points that would begin after --seconds are left out and named. The last lines name the least
share of the floor, and the largest fall of it from one token count to the next. Where there are no graphs (--device
cpu) calls are timed as they are, to try the script.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Callable

import torch

from liger_hw.bench.floors import floor_words
from liger_hw.bench.inputs import Inputs, Work
from liger_hw.bench.ops import SETTLE_MS
from liger_hw.bench.timing import Calls, Meter, Replay, interleave
from liger_hw.cli.arguments import positive, seconds
from liger_hw.kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy

TOKENS = (1, 2, 7, 16, 64, 255, 256, 1000, 1024, 2048, 4095, 4096, 8192, 8193, 16384, 32768, 65536)
VOCABULARIES = (262144, 151936, 131072, 128256, 128001, 50257, 32768, 32000, 4093, 1000)
SLOW, BURST = 20.0, 30.0
"""ms: a call whose start from Python does not count; the calls that count after each SETTLE_MS, twice a point"""


def work_of(call: Callable[[], Any]) -> Work:
    """A call without arguments, as the bench times one."""
    return Work(call, [Inputs(())], backward=False)


def timed(meter: Meter, call: Callable[[], Any]) -> Replay | Calls:
    """A graph's replay where there are graphs and a call is short."""
    eager = Calls(meter, work := work_of(call), why="slow")
    return eager if not meter.graphs or eager.cost_ms() > SLOW else meter.capture(work)


def settle_ms(meter: Meter) -> float:
    return 0.0 if meter.module is None else SETTLE_MS


def point(tokens: int, weight: torch.Tensor, states: torch.Tensor, meter: Meter) -> dict[str, Any]:
    """Milliseconds of ours and of the floor at one size."""
    vocab = weight.shape[0]
    x = states[:tokens].detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    target = torch.randint(vocab, (tokens,), device=meter.device)

    def ours() -> None:
        x.grad = weight.grad = None
        liger_fused_linear_cross_entropy(x, weight, target).backward()

    plain, head = x.detach(), weight.detach()
    head = head[: floor_words(vocab)]
    logits = torch.empty(tokens, head.shape[0], dtype=x.dtype, device=meter.device)
    dx, dweight = torch.empty_like(plain), torch.empty_like(head)

    def products() -> None:
        torch.mm(plain, head.t(), out=logits)
        torch.mm(logits, head, out=dx)
        torch.mm(logits.t(), plain, out=dweight)

    arms = {"floor": timed(meter, products), "ours": timed(meter, ours)}
    times, errors = interleave(arms, 2, burst_ms=BURST, settle_ms=settle_ms(meter))
    if errors:
        raise RuntimeError(f"{tokens} x {vocab}: {errors}")
    ms, floor = times["ours"].median, times["floor"].median
    return {
        "tokens": tokens,
        "vocab": vocab,
        "ms": ms,
        "floor_ms": floor,
        "share": floor / ms,
        "samples": times["ours"].samples,
    }


def sweep(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    index, parts = map(int, options.part.split("/"))
    meter = Meter(options.device)
    device, on_gpu = meter.device, meter.module is not None
    dtype = torch.bfloat16 if on_gpu else torch.float32
    run: dict[str, Any] = {"hidden": options.hidden, "dtype": str(dtype), "torch": torch.__version__}
    run |= {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "points": [], "left_out": []}
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(max(options.tokens), options.hidden, generator=generator, device=device, dtype=dtype)
    for vocab in options.vocabularies[index::parts]:
        weight = (
            torch.randn(vocab, options.hidden, generator=generator, device=device, dtype=dtype) * options.hidden**-0.5
        )
        for tokens in options.tokens:
            if time.perf_counter() - began > options.seconds:
                run["left_out"].append([tokens, vocab])
                continue
            run["points"].append(point(tokens, weight, states, meter))
            meter.forget()
        row = " ".join(f"{p['tokens']}:{p['share']:.0%}" for p in run["points"] if p["vocab"] == vocab)
        print(f"{vocab:7} words, share of the floor by tokens: {row}", flush=True)
        Path(options.out).write_text(json.dumps(run, indent=1) + "\n")
    summary(run["points"])
    if run["left_out"]:
        print(f"left out after {options.seconds:g} s (tokens, vocabulary): {run['left_out']}")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def summary(points: list[dict[str, Any]]) -> None:
    """The least share, and where it falls most between neighbouring token counts."""
    if not points:
        return
    least = min(points, key=lambda p: p["share"])
    print(f"least share: {least['share']:.1%} at {least['tokens']} x {least['vocab']} ({least['ms']:.3f} ms)")
    falls = [
        (b["share"] / a["share"], a, b)
        for vocab in sorted({p["vocab"] for p in points})
        for a, b in zip(*(lambda row: (row, row[1:]))([p for p in points if p["vocab"] == vocab]))
    ]
    if falls:
        ratio, a, b = min(falls, key=lambda fall: fall[0])
        print(
            f"largest fall: {a['share']:.1%} -> {b['share']:.1%} from {a['tokens']} to {b['tokens']} x {b['vocab']} "
            f"({ratio:.2f})"
        )


def plot(target: str, files: list[str]) -> int:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [json.loads(Path(name).read_text()) for name in files]
    points = [p for run in runs for p in run["points"]]
    figure, (times, shares) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for vocab in sorted({p["vocab"] for p in points}):
        row = sorted((p["tokens"], p["ms"], p["share"]) for p in points if p["vocab"] == vocab)
        tokens, ms, share = zip(*row)
        times.plot(tokens, ms, marker=".", label=str(vocab))
        shares.plot(tokens, [100 * value for value in share], marker=".")
    times.set_yscale("log")
    times.set_ylabel("ms, forward and backward")
    times.legend(title="vocabulary", fontsize=7)
    shares.set_ylabel("% of its three matrix products")
    shares.set_ylim(0, 110)
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    figure.suptitle(f"Fused linear cross entropy, hidden size {runs[0]['hidden']}, {runs[0]['device']}", fontsize=10)
    figure.savefig(target, dpi=100)
    summary(sorted(points, key=lambda p: (p["vocab"], p["tokens"])))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the points here")
    parser.add_argument("--plot", metavar="PNG", help="draw the files given instead of measuring")
    parser.add_argument("files", nargs="*", help="for --plot: what --out wrote")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th vocabulary from the I-th on (all)")
    parser.add_argument(
        "--seconds", type=seconds, default=100.0, help="no further point is begun after this (default 100)"
    )
    parser.add_argument("--hidden", type=positive, default=4096, help="(default 4096)")
    parser.add_argument("--tokens", type=positive, nargs="+", default=list(TOKENS), help="(default 1 to 65536)")
    parser.add_argument(
        "--vocabularies", type=positive, nargs="+", default=list(VOCABULARIES), help="(default 1000 to 262144)"
    )
    parser.add_argument("--device", default="cuda", help="(default cuda)")
    options = parser.parse_args()
    if bool(options.plot) != bool(options.files) or bool(options.plot) == bool(options.out):
        parser.error("--out FILE, or --plot PNG FILE...")
    return plot(options.plot, options.files) if options.plot else sweep(options)


if __name__ == "__main__":
    raise SystemExit(main())
