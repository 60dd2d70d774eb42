"""Fused linear cross entropy's options on one GPU: chunk memory, fp32 gradient sums, ignored rows left out, few tokens.

    python benchmarks/head_options.py --out head-options-h200.json [--tokens 8192] [--hidden 4096] [--vocab 131072]

Forward and backward with the gradients of hidden states and weight, in eager, against the loss's three products on
whole tensors (`floor`), all in turn, each SETTLE_MS before a call counts, medians; peak is what a call allocates beyond
its inputs, gradients included. Errors are norm-wise against fp64, with --exact (the first 1024 tokens, 4096 words). The
variants with 60% of the rows ignored:
every row computed, rows counted early in the step (`CountedRows`), and counted when asked (waits for the device).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Callable

import torch
from head_sweep import settle_ms, work_of

from liger_hw import CountedRows, env
from liger_hw.bench.floors import floor_words
from liger_hw.bench.timing import Calls, Meter, interleave
from liger_hw.kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_hw.kernels.losses.cross_entropy import liger_cross_entropy


def with_budget(mib: int, call: Callable[[], Any]) -> Callable[[], Any]:
    """call under a memory budget of `mib`, set where the planner looks: reading the environment again costs plans."""

    def run() -> Any:
        before = env.LIGER_HW_LOSS_MEMORY_MIB
        env.LIGER_HW_LOSS_MEMORY_MIB = mib
        try:
            return call()
        finally:
            env.LIGER_HW_LOSS_MEMORY_MIB = before

    return run


class Head:
    def __init__(self, tokens: int, hidden: int, vocab: int, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

        self.x, self.weight = random(tokens, hidden).requires_grad_(), random(vocab, hidden, scale=hidden**-0.5)
        self.weight.requires_grad_()
        self.target = torch.randint(vocab, (tokens,), generator=generator, device=device)
        self.some = self.target.masked_fill(torch.rand(tokens, generator=generator, device=device) < 0.6, -100)

    def call(self, **options: Any) -> Callable[[], torch.Tensor]:
        """Forward and backward; target=..., and options of the loss. counted: rows are counted before the call."""
        target, counted = options.pop("target", self.target), options.pop("counted", False)

        def run() -> torch.Tensor:
            self.x.grad = self.weight.grad = None
            compact = {"compact": CountedRows(target)} if counted else {}
            loss = liger_fused_linear_cross_entropy(self.x, self.weight, target, **options, **compact)
            loss.backward()
            return loss.detach()

        return run

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return liger_fused_linear_cross_entropy(self.x, self.weight, self.target)

    def products(self, tokens: int, forward: bool = False) -> Callable[[], None]:
        x, weight = self.x.detach()[:tokens], self.weight.detach()[: floor_words(self.weight.shape[0])]
        logits = torch.empty(tokens, weight.shape[0], dtype=x.dtype, device=x.device)
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)

        def run() -> None:
            torch.mm(x, weight.t(), out=logits)
            if not forward:
                torch.mm(logits, weight, out=dx)
                torch.mm(logits.t(), x, out=dweight)

        return run


def peak_mib(call: Callable[[], Any], head: Head) -> float:
    head.x.grad = head.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def compare(
    arms: dict[str, tuple[Callable[[], Any], str]], head: Head, repeats: int, meter: Meter
) -> list[dict[str, Any]]:
    """arms: name -> (call, name of its floor, "" for a floor)."""
    on_gpu = head.x.is_cuda
    for call, _ in arms.values():
        call()
    peaks = {name: peak_mib(call, head) for name, (call, floor) in arms.items() if floor} if on_gpu else {}
    runners = {name: Calls(meter, work_of(call), why="eager") for name, (call, _) in arms.items()}
    times, failed = interleave(runners, repeats, settle_ms=settle_ms(meter))
    if failed:
        raise RuntimeError(str(failed))
    medians = {name: found.median for name, found in times.items()}
    rows = []
    for name, (_, floor) in arms.items():
        row: dict[str, Any] = {"arm": name, "ms": medians[name], "repeats": list(times[name].repeats)}
        if floor:
            row |= {"floor": floor, "floor_ms": medians[floor], "share": medians[floor] / medians[name]}
            row["peak_mib"] = peaks.get(name)
        rows.append(row)
        share = f", {row['share']:6.1%} of {floor} ({medians[floor]:.2f})" if floor else ""
        memory = f", {peaks[name]:6.0f} MiB" if name in peaks else ""
        print(f"{name:28} {medians[name]:8.3f} ms{share}{memory}", flush=True)
    return rows


def errors(device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Norm-wise errors of dx and dweight against fp64: our chunks of 1024, fp32 sums, and one chunk of products."""
    head = Head(8192 if device != "cpu" else 256, 1024 if device != "cpu" else 64, 4096, device, dtype)
    x, weight = head.x.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(x @ weight.t(), head.target).backward()
    plain = head.x.detach(), head.weight.detach()
    logits = torch.softmax((plain[0] @ plain[1].t()).double(), -1)
    logits.scatter_add_(1, head.target[:, None], -torch.ones_like(logits[:, :1]))
    logits = (logits / head.target.shape[0]).to(dtype)
    rows = [{"arm": "one chunk, torch.mm", "dx": logits @ plain[1], "dweight": logits.t() @ plain[0]}]
    for name, mib, options in (
        ("1 MiB, chunks of 1024", 1, {}),
        ("the same, fp32 sums", 1, {"accum_dtype": torch.float32}),
    ):
        with_budget(mib, head.call(**options))()
        rows.append({"arm": name, "dx": head.x.grad.clone(), "dweight": head.weight.grad.clone()})
    for row in rows:
        for name, exact in (("dx", x.grad), ("dweight", weight.grad)):
            row[name] = ((row[name].double() - exact).norm() / exact.norm()).item()
        print(f"{row['arm']:28} error of dx {row['dx']:.2e}, of dweight {row['dweight']:.2e}", flush=True)
    return rows


def rows_alone(head: Head, repeats: int, meter: Meter) -> list[dict[str, Any]]:
    """cross_entropy without gradients against a copy: bytes read a second over bytes moved a second."""
    logits = torch.randn(head.x.shape[0], head.weight.shape[0], device=head.x.device, dtype=head.x.dtype)
    out = torch.empty_like(logits)
    arms: dict[str, tuple[Callable[[], Any], str]] = {
        "copy (read and write)": (lambda: out.copy_(logits), ""),
        "cross_entropy, forward only": (lambda: liger_cross_entropy(logits, head.target), "copy (read and write)"),
    }
    found = compare(arms, head, repeats, meter)
    share = found[1]["share"] / 2
    print(f"  forward only reads at {share:.1%} of the copy's rate")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("hidden", 4096), ("vocab", 131072), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--exact", action="store_true", help="errors against fp64 too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    began = time.perf_counter()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    meter = Meter(options.device)
    head = Head(options.tokens, options.hidden, options.vocab, options.device, dtype)
    few = Head(min(1024, options.tokens), options.hidden, options.vocab, options.device, dtype)
    floor, forward = "three products", "one product"
    arms: dict[str, tuple[Callable[[], Any], str]] = {
        floor: (head.products(options.tokens), ""),
        forward: (head.products(options.tokens, forward=True), ""),
        "1 GiB (default)": (head.call(), floor),
        "1.45 GiB": (with_budget(1485, head.call()), floor),
        "2 GiB": (with_budget(2048, head.call()), floor),
        "4 GiB": (with_budget(4096, head.call()), floor),
        "fp32 sums": (head.call(accum_dtype=torch.float32), floor),
        "forward only": (head.forward, forward),
        "60% ignored, all computed": (head.call(target=head.some), floor),
        "60% ignored, counted early": (head.call(target=head.some, counted=True), floor),
        "60% ignored, counted late": (head.call(target=head.some, compact=True), floor),
    }
    found: dict[str, Any] = {"options": vars(options), "torch": torch.__version__}
    found["device"] = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    found["runs"] = compare(arms, head, options.repeats, meter)
    of_few = f"three products, {few.x.shape[0]} tokens"
    found["few"] = compare(
        {of_few: (few.products(few.x.shape[0]), ""), f"{few.x.shape[0]} tokens": (few.call(), of_few)},
        few,
        options.repeats,
        meter,
    )
    found["rows"] = rows_alone(head, options.repeats, meter)
    if options.exact:
        found["errors"] = errors(options.device, dtype)
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
