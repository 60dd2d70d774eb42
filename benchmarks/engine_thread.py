"""What one backward costs the host before any op does anything: torch wakes a thread, runs the nodes there, and waits.

python benchmarks/engine_thread.py [FILE.json]

A Function whose backward does nothing, some pure Python, some allocations or some products; microseconds from
autograd.grad to the backward (wake), inside it, and back to the caller; and per node of one backward through 32. With
and without `torch.autograd.set_multithreading_enabled`, and the same work on the main thread.
"""

import json
import statistics
import sys
import time

import torch

NODES = 32
x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w, dy = torch.randn(4096, device="cuda", dtype=torch.bfloat16), torch.randn_like(x)


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


def python():
    numbers = {}
    for i in range(400):
        numbers[i] = i


WORK = {
    "nothing": lambda: None,
    "python": python,
    "allocations": lambda: [torch.empty_like(x) for _ in range(4)],
    "products": lambda: dy * dy * dy,
}


def medians(rows, *names):
    return {name: round(statistics.median(column) * 1e6, 1) for name, column in zip(names, zip(*rows))}


def one():
    Timed.marks.clear()
    y = Timed.apply(x, w)
    start = time.perf_counter()
    torch.autograd.grad(y, (x,), dy)
    end = time.perf_counter()
    ((began, ended),) = Timed.marks
    return began - start, ended - began, end - ended, end - start


def many():
    Timed.marks.clear()
    outputs = [Timed.apply(x, w) for _ in range(NODES)]
    start = time.perf_counter()
    torch.autograd.grad(outputs, (x,), [dy] * NODES)
    spent = time.perf_counter() - start
    return spent / NODES, statistics.median(ended - began for began, ended in Timed.marks)


found = {}
for name, work in WORK.items():
    Timed.work = staticmethod(work)
    for threads in (True, False):
        with torch.autograd.set_multithreading_enabled(threads):
            rows = [one() for _ in range(400)][50:]
            found[f"{name}, threads {threads}"] = {
                **medians(rows, "wake", "inside", "back", "whole"),
                **medians([many() for _ in range(60)][10:], "node_of_32", "inside_of_32"),
            }
    on_main = []
    for _ in range(400):
        start = time.perf_counter()
        work()
        on_main.append((time.perf_counter() - start,))
    found[f"{name}, main thread"] = medians(on_main, "inside")
text = json.dumps(found, indent=1)
print(text)
if len(sys.argv) > 1:
    with open(sys.argv[1], "w") as file:
        file.write(text)
