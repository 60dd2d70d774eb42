"""What one backward costs the host before any op does anything: torch wakes a thread, runs the nodes there, and waits.

    python benchmarks/engine_thread.py [FILE.json] [--device cuda]

A Function whose backward does nothing, some pure Python, some allocations or some products; microseconds from
autograd.grad to the backward (wake), inside it, and back to the caller; and per node of one backward through 32. With
and without `torch.autograd.set_multithreading_enabled`, and the same work on the main thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, Callable, Sequence

import torch

NODES = 32


class Timed(torch.autograd.Function):
    work, marks = staticmethod(lambda: None), []

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        began = time.perf_counter()
        _saved = ctx.saved_tensors  # as every op asks for them
        Timed.work()
        Timed.marks.append((began, time.perf_counter()))
        return grad, None


def python() -> None:
    numbers = {}
    for i in range(400):
        numbers[i] = i


def medians(rows: Sequence[Sequence[float]], *names: str) -> dict[str, float]:
    return {name: round(statistics.median(column) * 1e6, 1) for name, column in zip(names, zip(*rows))}


def one(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[float, float, float, float]:
    """Seconds of one backward: until it began on its thread, inside it, back to the caller, and all of it."""
    Timed.marks.clear()
    y = Timed.apply(x, w)
    start = time.perf_counter()
    torch.autograd.grad(y, (x,), dy)
    end = time.perf_counter()
    ((began, ended),) = Timed.marks
    return began - start, ended - began, end - ended, end - start


def many(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[float, float]:
    """Seconds a node of one backward through `NODES`, and inside one."""
    Timed.marks.clear()
    outputs = [Timed.apply(x, w) for _ in range(NODES)]
    start = time.perf_counter()
    torch.autograd.grad(outputs, (x,), [dy] * NODES)
    spent = time.perf_counter() - start
    return spent / NODES, statistics.median(ended - began for began, ended in Timed.marks)


def measure(device: str) -> dict[str, Any]:
    x = torch.randn(16, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    w, dy = torch.randn(4096, device=device, dtype=torch.bfloat16), torch.randn_like(x)
    works: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "python": python,
        "allocations": lambda: [torch.empty_like(x) for _ in range(4)],
        "products": lambda: dy * dy * dy,
    }
    found = {}
    for name, work in works.items():
        Timed.work = staticmethod(work)
        for threads in (True, False):
            with torch.autograd.set_multithreading_enabled(threads):
                rows = [one(x, w, dy) for _ in range(400)][50:]
                found[f"{name}, threads {threads}"] = {
                    **medians(rows, "wake", "inside", "back", "whole"),
                    **medians([many(x, w, dy) for _ in range(60)][10:], "node_of_32", "inside_of_32"),
                }
        on_main = []
        for _ in range(400):
            start = time.perf_counter()
            work()
            on_main.append((time.perf_counter() - start,))
        found[f"{name}, main thread"] = medians(on_main, "inside")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="write every figure here")
    parser.add_argument("--device", default="cuda")
    told = parser.parse_args()
    text = json.dumps(measure(told.device), indent=1)
    print(text)
    if told.file:
        with open(told.file, "w") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
