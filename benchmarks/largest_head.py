"""The largest loss head each implementation trains on one GPU: tokens at a fixed vocabulary, vocabulary at fixed
tokens.

    python benchmarks/largest_head.py --out largest-head-h200.json [--arms liger_hw liger torch] [--part 0/2] [--seconds
    100]

A size fits when forward and backward, with the gradients of hidden states and weight, run without an out-of-memory
error and the loss is finite. Each arm searches in a process of its own (an arm may crash): four times the size while it
fits, then halving the gap until it is known to 1/16. A search ends, marked `at least`, where the next size would take
longer than --call seconds a call by what the last one took, or where --seconds are spent. Hidden states, weight and
both gradients count: they bound everybody. Memory outside the allocator's reach is left alone (fraction 0.97 of the
device).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch
import torch.nn.functional as F

ARMS = ("liger_hw", "liger", "torch", "compile", "cce")
CASES = {"tokens": 131072, "vocab": 8192}
"""What is searched for -> the other size."""

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(arm: str) -> Loss:
    """(hidden states, weight, target) -> loss."""
    if arm == "liger_hw":
        from liger_hw.kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy
    if arm == "liger":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        return liger
    if arm == "cce":
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy

    def plain(x, weight, target):
        return F.cross_entropy(F.linear(x, weight).float(), target)

    return torch.compile(plain, dynamic=True) if arm == "compile" else plain


def attempt(loss: Loss, tokens: int, vocab: int, hidden: int, device: str, again: float) -> dict[str, Any] | None:
    """One size: its peak memory and the time of a call, or None where it does not fit.

    again: a first call of more seconds than this is repeated, since it may have compiled
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        x = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
        weight = torch.empty(vocab, hidden, device=device, dtype=dtype)
        weight.normal_(0.0, hidden**-0.5).requires_grad_()
        target = torch.randint(vocab, (tokens,), device=device)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            x.grad = weight.grad = None
            began = time.perf_counter()
            value = loss(x, weight, target)
            value.backward()
            finite = math.isfinite(value.item())
            if device != "cpu":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            if seconds <= again:
                break
        if not finite or x.grad is None or weight.grad is None:
            raise RuntimeError(f"loss {value.item()}")
        peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
        return {"tokens": tokens, "vocab": vocab, "seconds": seconds, "peak_gib": peak / 2**30}
    except torch.OutOfMemoryError:
        return None
    finally:
        x = weight = target = value = None
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def search(fits: Callable[[int], dict[str, Any] | None], start: int, most: float, until: float) -> dict[str, Any]:
    """The largest size found, as `fits` describes it, and whether it is the limit or where the search ended."""
    best, low, high, error = None, 0, None, None
    size = start
    while time.perf_counter() < until:
        if best is not None and best["seconds"] * size / low > most:
            break
        try:
            found = fits(size)
        except Exception as failed:  # what was found until then stands
            error = f"{size}: {type(failed).__name__}: {str(failed)[:300]}"
            break
        if found is None:
            high = size
        else:
            best, low = found, size
        if high is not None and (high - low) * 16 <= high:
            break
        size = 4 * low if high is None else (low + high) // 2 // 128 * 128
        if size in (low, 0):
            break
    exact = high is not None and (high - low) * 16 <= high
    return {"found": best, "exact": exact, "did_not_fit": high, **({"ended_by": error} if error else {})}


def one(options: argparse.Namespace) -> int:
    """The searches of one arm; a line of JSON after each."""
    until = time.perf_counter() + options.seconds
    loss, device = loss_of(options.one), options.device
    if device != "cpu":
        torch.cuda.set_per_process_memory_fraction(0.97)
    for index, (case, other) in enumerate(CASES.items()):
        other, start = options.other or other, options.start
        until_case = until if index else time.perf_counter() + options.seconds / 2

        def fits(size: int, case: str = case, other: int = other) -> dict[str, Any] | None:
            tokens, vocab = (size, other) if case == "tokens" else (other, size)
            return attempt(loss, tokens, vocab, options.hidden, device, options.call / 8)

        result = search(fits, start, options.call, until_case)
        print(json.dumps({"arm": options.one, "case": case, "other": other, **result}), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the results here")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--one", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--part", default="0/1", help="i/n: every n-th arm, for several processes with a GPU each")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--call", type=float, default=6.0)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--start", type=int, default=16384)
    parser.add_argument("--other", type=int, help="instead of 131072 words, 8192 tokens")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.one:
        return one(options)
    began, results = time.perf_counter(), []
    index, parts = map(int, options.part.split("/"))
    arms = options.arms[index::parts]
    for position, arm in enumerate(arms):
        left = options.seconds - (time.perf_counter() - began)
        command = [sys.executable, __file__, "--one", arm, "--seconds", str(left / (len(arms) - position))]
        for name in ("call", "hidden", "start", "device"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--other", str(options.other)] if options.other else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1.0))
            output, failed = done.stdout, done.stderr if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
            failed = "the time was spent"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if failed:
            lines.append({"arm": arm, "error": failed.strip().splitlines()[-1][:300]})
        results += lines
        for line in lines:
            print(shown(line), flush=True)
        if options.out:
            name = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
            record = {"device": name, "torch": torch.__version__, "hidden": options.hidden, "results": results}
            Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def shown(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"{line['arm']:9} {line.get('case', '')}: {line['error']}"
    found, why = line["found"], f" (ended by {line['ended_by']})" if "ended_by" in line else ""
    if found is None:
        return f"{line['arm']:9} {line['case']}: not even the first size fits{why}"
    least = "" if line["exact"] else "at least "
    size = f"{least}{found['tokens']} tokens x {found['vocab']} words"
    return f"{line['arm']:9} {size}, {found['peak_gib']:.1f} GiB, {found['seconds']:.2f} s a call{why}"


if __name__ == "__main__":
    raise SystemExit(main())
