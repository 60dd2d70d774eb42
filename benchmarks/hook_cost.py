"""What a level costs the host for a saved tensor that is not ours: one that has no recipe, and is kept.

    python benchmarks/hook_cost.py [FILE.json]

First the two functions called alone, for a parameter, an intermediate result, a view of one and a tensor that a node
saves of its own output. Then in place: a chain of products, each of which saves two tensors, forward and backward on
one CPU thread, without hooks, with hooks that do nothing, with the least that torch's own guarantees need (a node must
not hold its own output, a tensor that was written to must be noticed), and with ours. Microseconds a tensor, best of
many short windows; `_more` is against no hooks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import timeit
from typing import Any, Callable

import torch

from liger_hw.recompute import recipes

CHAIN = 100


def best(function: Callable[[], Any], number: int, repeat: int) -> float:
    """Microseconds of one call."""
    return min(timeit.repeat(function, number=number, repeat=repeat)) / number * 1e6


def alone() -> dict[str, float]:
    leaf = torch.randn(64, 64, requires_grad=True)
    intermediate = leaf * 2
    view = (leaf * 2).view(4096)
    output = leaf.exp()  # the last node, so that it may be the one that saves
    found = {}
    with recipes.Scope(recipes.CHEAP), torch.no_grad():
        for name, t in (("parameter", leaf), ("intermediate", intermediate), ("view", view), ("own output", output)):
            found[name] = best(lambda t=t: recipes.unpack(recipes.pack(t)), 300, 300)
        found["detach alone"] = best(intermediate.detach, 300, 300)
        found["an empty pair"] = best(lambda: _same(_same(leaf)), 300, 300)
    return found


def _same(t: torch.Tensor) -> torch.Tensor:
    return t


def _least_pack(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (t if t.is_leaf else t.detach()), t._version


def _least_unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    t, version = packed
    if t._version != version:
        raise RuntimeError("written to")
    return t


def in_place() -> dict[str, float]:
    x, weight = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)

    def chain(hooks: Callable[[], Any]) -> None:
        with hooks():
            y = x
            for _ in range(CHAIN):
                y = y * weight
        torch.autograd.backward(y, y)

    pair = torch.autograd.graph.saved_tensors_hooks
    ways: dict[str, Callable[[], Any]] = {
        "none": contextlib.nullcontext,
        "empty": lambda: pair(_same, _same),
        "least": lambda: pair(_least_pack, _least_unpack),
        "ours": lambda: recipes.Scope(recipes.CHEAP),
    }
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(40):  # in turn, so that a slow moment of the machine is everybody's
        for name, hooks in ways.items():
            found[name] = min(found[name], best(lambda hooks=hooks: chain(hooks), 1, 5) / (2 * CHAIN))
    x.grad = weight.grad = None
    return found | {f"{name}_more": found[name] - found["none"] for name in ("empty", "least", "ours")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="write every figure here")
    told = parser.parse_args()
    torch.set_num_threads(1)
    found = {"torch": torch.__version__, "alone_us": alone(), "in_place_us": in_place()}
    text = json.dumps(found, indent=1, default=str)
    print(text)
    if told.file:
        with open(told.file, "w") as file:
            file.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
