"""Error of a head's bf16 weight gradient summed over chunks, as a multiple of that of one GEMM over all rows.

    python benchmarks/rounding.py [--rows 8192] [--vocab 2048 8192] [--hidden 16] [--dense]        (CPU, minutes)

Errors are against fp64. Products accumulate in fp32, as a GPU's do; logits, their gradient and every partial sum are
rounded to bf16. Heads: `flat`, random weights; `zipf`, the same with targets as frequent as words; `trained`, targets
drawn from the head itself, whose logits follow word frequency through a component that all hidden states share (of the
given length, the others are N(0, 1)); `peaked`, the same without that component, logits with a spread of 3.

Of the targets' entries: `running` leaves them in the running sum; `out` takes all of them out and adds them at the end;
`apart` is what kernels/heads/head_targets.py does: rare ones out, the rows of frequent ones summed in fp32.
--dense: losses without targets instead, KL(teacher || student), JSD and TVD of two heads: `running` alone.
"""

from __future__ import annotations

import argparse

import torch

from liger_hw.kernels.heads.head_targets import FREQUENT
from liger_hw.kernels.losses.distill_rows import Distillation, distill_gradient
from liger_hw.kernels.losses.divergence_rows import JSD, KL, TVD

CHUNKS = (4, 6, 8)
PIECES = 24  # the least common multiple: partial products that any of CHUNKS is made of
HEADS = {
    "flat": (1.0, 0.0),
    "zipf": (1.0, 0.0),
    "trained": (0.5, 1.0),
    "trained, mean 4": (1.5, 4.0),
    "peaked": (3.0, 0.0),
}
"""Name -> (spread of the logits, length of the component that hidden states share)."""


def made(rows: int, vocab: int, hidden: int, head: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, weight, targets) of a head."""
    torch.manual_seed(0)
    spread, mean = HEADS[head]
    frequency = 1 / torch.arange(1, vocab + 1).float()
    x, weight = torch.randn(rows, hidden), torch.randn(vocab, hidden) * hidden**-0.5 * spread
    if mean:
        x[:, 0], weight[:, 0] = mean, frequency.log() / mean
    x, weight = x.bfloat16(), weight.bfloat16()
    if head == "flat":
        return x, weight, torch.randint(vocab, (rows,))
    if head == "zipf":
        return x, weight, torch.multinomial(frequency, rows, True)
    drawn = [torch.multinomial((part.float() @ weight.float().t()).softmax(-1), 1)[:, 0] for part in x.split(1024)]
    return x, weight, torch.cat(drawn)


def running(parts: list[torch.Tensor], chunks: int) -> torch.Tensor:
    """The bf16 sum of `chunks` products."""
    each = PIECES // chunks
    total = None
    for i in range(chunks):
        part = sum(parts[i * each : (i + 1) * each])
        total = part.bfloat16() if total is None else (total.float() + part).bfloat16()
    return total


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def with_targets(rows: int, vocab: int, hidden: int, head: str) -> str:
    x, weight, targets = made(rows, vocab, hidden, head)
    frequent = torch.bincount(targets, minlength=vocab) >= FREQUENT
    exact = torch.zeros(vocab, hidden, dtype=torch.double)
    every, bare, few = [], [], []
    all_out, rare_out = torch.zeros(vocab, hidden), torch.zeros(vocab, hidden)
    for part, target in zip(x.chunk(PIECES), targets.chunk(PIECES)):
        at, logits, part = torch.arange(len(part)), part.float() @ weight.float().t(), part.float()
        p = logits.double().softmax(-1)
        p[at, target] -= 1
        exact += (p / rows).t() @ part.double()
        p = logits.bfloat16().float().softmax(-1)
        p[at, target] -= 1
        p = (p / rows).bfloat16().float()
        product = p.t() @ part
        out = torch.zeros(vocab, hidden).index_add_(0, target, p[at, target, None] * part)
        rare = out.masked_fill(frequent[:, None], 0.0)
        all_out, rare_out = all_out + out, rare_out + rare
        every.append(product), bare.append(product - out), few.append(product - rare)
    whole = sum(every).bfloat16()
    base = error(whole, exact)
    lines = f"{head:16} {vocab:6}  one GEMM {base:.5f}"
    for chunks in CHUNKS:
        apart = (running(few, chunks).float() + rare_out).bfloat16()
        apart[frequent] = whole[frequent]
        out = (running(bare, chunks).float() + all_out).bfloat16()
        found = {"running": running(every, chunks), "out": out, "apart": apart}
        lines += f"   {chunks}: " + " ".join(f"{name} {error(g, exact) / base:.2f}" for name, g in found.items())
    return lines


def dense(rows: int, vocab: int, hidden: int, kind: int, near: float) -> str:
    """near: how much of the teacher's head is not the student's."""
    x, weight, _ = made(rows, vocab, hidden, "trained")
    teacher = (weight.float() + near * torch.randn(vocab, hidden) * hidden**-0.5).bfloat16()
    options, parts = Distillation(kind), []
    exact = torch.zeros(vocab, hidden, dtype=torch.double)
    for part in x.chunk(PIECES):
        wide, part = part.double(), part.float()
        logits = [wide @ w.double().t() for w in (weight, teacher)]
        given = logits[1].softmax(-1) if kind == KL else logits[1]
        exact += (distill_gradient(logits[0], given, None, options) / rows).t() @ wide
        student, given = (part @ weight.float().t()).bfloat16(), (part @ teacher.float().t()).bfloat16()
        given = given.float().softmax(-1) if kind == KL else given
        slope = (distill_gradient(student, given, None, options) / rows).bfloat16()
        parts.append(slope.float().t() @ part)
    base = error(sum(parts).bfloat16(), exact)
    name = {KL: "KL", JSD: "JSD", TVD: "TVD"}[kind]
    ratios = "  ".join(f"{chunks}: {error(running(parts, chunks), exact) / base:.2f}" for chunks in CHUNKS)
    return f"{name:4} teacher {near:g} away {vocab:6}  one GEMM {base:.5f}   {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--dense", action="store_true")
    asked = parser.parse_args()
    for vocab in asked.vocab:
        if asked.dense:
            for kind in (KL, JSD, TVD):
                for near in (0.1, 1.0):
                    print(dense(asked.rows, vocab, asked.hidden, kind, near), flush=True)
            continue
        for head in HEADS:
            print(with_targets(asked.rows, vocab, asked.hidden, head), flush=True)


if __name__ == "__main__":
    main()
