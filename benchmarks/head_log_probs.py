"""fused_linear_log_probs and log_probs on one GPU: time, memory, error and batch invariance.

    python benchmarks/head_log_probs.py --out head-log-probs-h200.json [--tokens 8192] [--hidden 4096] [--vocab 151936]
    python benchmarks/head_log_probs.py --out trl-head-h200.json --trl      TRL's own head, and ours in its place

Forward and backward through log-probabilities and entropy, against the head's three products; log-probabilities and
entropy of given logits, against a copy of half of them, which moves as many bytes as one read. Everything in turn, as
in head_options.py. `errors` are norm-wise against fp64 on the first 64 rows. `differ` counts rows whose bits are not
those of the whole batch, for parts of it, with batch_invariant (must be 0) and without.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Callable

import torch
from head_options import Head, compare

from liger_hw.backends import with_index
from liger_hw.bench import report
from liger_hw.bench.timing import Meter
from liger_hw.transformers.functional import liger_fused_linear_log_probs, liger_log_probs

BOTH = {"return_entropy": True}


def steps(head: Head, **options: Any) -> Callable[[], None]:
    """Forward and backward, with another gradient for each row."""
    slopes = [torch.randn(len(head.target), device=head.x.device) for _ in range(2)]

    def run() -> None:
        head.x.grad = head.weight.grad = None
        found = liger_fused_linear_log_probs(head.x, head.weight, head.target, **BOTH, **options)
        torch.autograd.backward(found[:2], slopes)

    return run


def trl_arms(head: Head) -> dict[str, tuple[Callable[[], Any], str]]:
    """TRL's function of the head and ours, with the arguments of its trainers, for what they ask."""
    import trl
    from trl.kernels import ChunkedLogProbFunction

    from liger_hw.trl import log_probs

    words = 32768  # at a time, as trl.trainer.utils has it, which is not imported for its needs
    heads = {f"TRL {trl.__version__}": ChunkedLogProbFunction.apply, "liger_hw": log_probs}

    def arm(function: Callable[..., Any], outputs: tuple[str, ...], temperature: float) -> Callable[[], None]:
        slopes = torch.randn(len(head.target), device=head.x.device)

        def run() -> None:
            head.x.grad = head.weight.grad = None
            results = function(head.x, head.weight, None, head.target, temperature, words, None, 1.0, outputs)
            used = [result for result in results[:2] if result is not None]
            torch.autograd.backward(used, [slopes] * len(used))

        return run

    two = ("log_probs", "entropy")
    cases = {"log_probs": (two[:1], 1.0), "log_probs, entropy": (two, 1.0), "log_probs, entropy, T=0.7": (two, 0.7)}
    cases["DPO's four"] = (*two, "mean_logits", "is_top1"), 1.0
    cases["all five"] = (*two, "log_sum_sq_probs", "mean_logits", "is_top1"), 1.0
    arms: dict[str, tuple[Callable[[], Any], str]] = {"three products": (head.products(len(head.target)), "")}
    for case, (outputs, temperature) in cases.items():
        for name, function in heads.items():
            arms[f"{name}: {case}"] = arm(function, outputs, temperature), "three products"
    return arms


def scored(head: Head, **options: Any) -> Callable[[], Any]:
    """The forward of a reference model."""

    def run() -> Any:
        with torch.no_grad():
            return liger_fused_linear_log_probs(head.x, head.weight, head.target, **BOTH, **options)

    return run


def rows_that_differ(head: Head, invariant: bool) -> list[int]:
    """For a row alone, some, half and the reverse, with gradients and without: rows unlike those of the whole batch."""
    n, counts = len(head.target), []
    call = {**BOTH, "batch_invariant": invariant}
    whole = liger_fused_linear_log_probs(head.x, head.weight, head.target, **call)
    for rows in (range(1), range(7, 8), range(3, n // 9), range(n // 2, n), range(n - 1, -1, -1)):
        which = torch.tensor(list(rows), device=head.x.device)
        for training in (True, False):
            with torch.set_grad_enabled(training):
                part = liger_fused_linear_log_probs(head.x[which], head.weight, head.target[which], **call)
            unlike = (part.log_probs != whole.log_probs[which]) | (part.entropy != whole.entropy[which])
            counts.append(int(unlike.sum()))
    return counts


def errors(head: Head) -> dict[str, float]:
    x, target = head.x.detach()[:64], head.target[:64]
    found = liger_fused_linear_log_probs(x, head.weight.detach(), target, **BOTH)
    exact = torch.log_softmax(x.double() @ head.weight.detach().double().t(), -1)
    wanted = exact.gather(1, target[:, None])[:, 0], -(exact.exp() * exact).sum(-1)
    pairs = zip(("log_probs", "entropy"), found[:2], wanted)
    return {name: ((a.double() - b).norm() / b.norm()).item() for name, a, b in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("hidden", 4096), ("vocab", 151936), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trl", action="store_true", help="only TRL's head and liger_hw.trl's")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    meter = Meter(options.device)
    head = Head(options.tokens, options.hidden, options.vocab, options.device, dtype)
    found: dict[str, Any] = {"options": vars(options), "machine": report.machine(with_index(options.device))}
    if options.trl:
        found["runs"] = compare(trl_arms(head), head, options.repeats, meter)
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
        return 0
    logits = torch.randn(options.tokens, options.vocab, device=options.device).to(dtype)
    floor, forward, copy = "three products", "one product", "copy of half the logits"
    arms: dict[str, tuple[Callable[[], Any], str]] = {
        floor: (head.products(options.tokens), ""),
        forward: (head.products(options.tokens, forward=True), ""),
        copy: (lambda: logits[: options.tokens // 2].clone(), ""),
        "log-probabilities and entropy": (steps(head), floor),
        "with accuracy": (steps(head, return_top1=True), floor),
        "with softcap": (steps(head, softcap=30.0), floor),
        "batch invariant": (steps(head, batch_invariant=True), floor),
        "forward": (scored(head), forward),
        "forward, batch invariant": (scored(head, batch_invariant=True), forward),
        "of logits": (lambda: liger_log_probs(logits, head.target), copy),
        "of logits, with entropy": (lambda: liger_log_probs(logits, head.target, **BOTH), copy),
    }
    found["runs"] = compare(arms, head, options.repeats, meter)
    found["differ"] = {str(invariant): rows_that_differ(head, invariant) for invariant in (True, False)}
    found["errors"] = errors(head)
    print(f"rows that differ: {found['differ']}; errors: {found['errors']}")
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
