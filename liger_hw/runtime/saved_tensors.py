"""May a backward write its result over a tensor that the forward saved?

Doing so halves the memory of a gated activation's backward, and it is invisible only when nobody else can see the
tensor: no variable of the caller, no view, no other node's saved tensor, no second backward over the same graph.
`unpack` answers that by comparing reference counts (of the Python objects, the tensor and the storage) with those of a
tensor that is certainly ours. The expected counts are measured once per process on small graphs, together with graphs
in which somebody does hold the tensor; if the counts cannot tell the two apart in this version of Python and torch,
nothing is ever reused.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Callable

import torch

from ..recompute import recipes

Counts = tuple[str, int, int, int, int]
"""How the tensor came out of the graph (`recipes.KEPT`, `FRESH` or `SHARED`; "" without our hooks), then four counts.
"""


def unpack(ctx: Any) -> tuple[tuple[torch.Tensor, ...], bool]:
    """(saved tensors, whether all may be overwritten) of an autograd Function's context, inside its backward."""
    private = frozenset() if graph_is_kept() else _private_counts("torch._dynamo" in sys.modules)
    if not private or torch._C._functorch.peek_interpreter_stack() is not None:
        return ctx.saved_tensors, False
    saved, counts = _unpack_and_count(ctx, private)
    return saved, private.issuperset(counts) and all([type(t) is torch.Tensor for t in saved])


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def graph_is_kept() -> bool:
    """Whether this backward may run again over the same saved tensors: with retain_graph, while torch.compile traces,
    and where this version of torch cannot tell.

    A captured device graph counts by the call it recorded: replaying a backward twice after one forward is
    retain_graph.
    """
    return torch.compiler.is_compiling() or _keeps_graph is None or _keeps_graph()


_getrefcount = sys.getrefcount
_uses_of_storage = getattr(torch._C, "_storage_Use_Count", None)  # where torch has none, nothing is ever reused


def _unpack_and_count(
    ctx: Any, private: frozenset[Counts] = frozenset()
) -> tuple[tuple[torch.Tensor, ...], list[Counts | None]]:
    """(saved tensors, their counts), up to the first count that is not in `private`, where that is given."""
    saved, origins = recipes.watched(ctx)
    origins = iter(origins)
    counts: list[Counts | None] = []
    for t in saved:
        if t is None:
            counts.append(None)
            continue
        storage = t.untyped_storage()
        # the last of the counts tells held wrappers of the storage
        uses = _getrefcount(t), t._use_count(), _uses_of_storage(storage._cdata), _getrefcount(storage)
        del storage
        counts.append((next(origins, ""), *uses))
        if private and counts[-1] not in private:
            break
    return saved, counts


class _Probe(torch.autograd.Function):
    """Saves its inputs and reports the counts its backward sees."""

    @staticmethod
    def forward(ctx, a, b, seen):
        ctx.save_for_backward(a, b)
        ctx.seen = seen
        return a * b

    @staticmethod
    def backward(ctx, grad):
        (a, b), counts = _unpack_and_count(ctx)
        ctx.seen.append(counts[0])
        return grad * b, grad * a, None


class _Again(torch.autograd.Function):
    """A copy that activations may recompute."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        recipes.offer(ctx, y, torch.clone, (x,))
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


def _observe(build: Callable[[torch.Tensor, list], tuple]) -> Counts:
    """Counts of the first saved tensor in the backward of the graph that `build` makes; what it returns stays held."""
    seen: list[Counts] = []
    with torch.enable_grad(), torch.device("cpu"):
        weight = torch.ones(2, 2, requires_grad=True)
        loss, *_held = build(weight, seen)
        loss.backward()
    return seen[0]


@lru_cache(maxsize=2)
def _private_counts(with_checkpoint: bool) -> frozenset[Counts]:
    """Counts that prove a saved tensor is nobody else's; empty when they prove nothing.

    They are measured in a thread of their own: the present one may be inside somebody's saved-tensor hooks.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_measured_counts, with_checkpoint).result()


def _measured_counts(with_checkpoint: bool) -> frozenset[Counts]:
    """Checkpointing has counts of its own. Its first use imports torch._dynamo (2 s), so it is measured only in a
    process that has done so: any process that checkpointed.
    """
    if not hasattr(torch.Tensor, "_use_count") or _uses_of_storage is None:
        return frozenset()
    from torch.utils.checkpoint import checkpoint

    def direct(weight, seen):
        a, b = weight @ weight, weight @ weight
        out = _Probe.apply(a, b, seen).sum()
        return (out,)

    def checkpointed(weight, seen):
        def block(w):
            return _Probe.apply(w @ w, w @ w, seen)

        return (checkpoint(block, weight, use_reentrant=False, preserve_rng_state=False).sum(),)

    def held(weight, seen, hold):
        a, b = weight @ weight, weight @ weight
        out = _Probe.apply(a, b, seen).sum()
        kept = hold(a)
        del a
        return (out, kept)

    def held_in_checkpoint(weight, seen, hold):
        kept: list[torch.Tensor] = []

        def block(w):
            a = w @ w
            kept.append(hold(a))
            return _Probe.apply(a, w @ w, seen)

        return checkpoint(block, weight, use_reentrant=False, preserve_rng_state=False).sum(), kept

    def in_scope(build):
        def scoped(weight, seen):
            with recipes.Scope(recipes.CHEAP):
                return build(weight, seen)

        return scoped

    def recomputed(weight, seen):
        return (_Probe.apply(_Again.apply(weight @ weight), weight @ weight, seen).sum(),)

    def saved_elsewhere(weight, seen, operation):
        a, b = weight @ weight, weight @ weight
        other = operation(a)
        out = _Probe.apply(a, b, seen).sum() + other.sum()
        del a
        return out, other

    def saved_elsewhere_in_checkpoint(weight, seen, operation):
        def block(w):
            a = w @ w
            other = operation(a)  # before the probe, so that its backward comes after
            return _Probe.apply(a, w @ w, seen) + other

        return (checkpoint(block, weight, use_reentrant=False, preserve_rng_state=False).sum(),)

    holds = (
        lambda a: a,
        lambda a: a.untyped_storage(),
        lambda a: a.detach(),
        lambda a: a.view(4),
        lambda a: a.detach()[0],
    )
    operations = (lambda a: a * a, lambda a: a @ a, lambda a: torch.nn.functional.silu(a))
    mine = {_observe(direct)}
    ways = [lambda build: build]
    if recipes.supported():
        mine |= {_observe(in_scope(direct)), _observe(in_scope(recomputed))}
        ways.append(in_scope)
    others: set[Counts] = set()
    for build in (
        *(lambda w, s, h=h: held(w, s, h) for h in holds),
        *(lambda w, s, o=o: saved_elsewhere(w, s, o) for o in operations),
    ):
        others |= {_observe(way(build)) for way in ways}
    if with_checkpoint:
        mine |= {_observe(checkpointed)}
        others |= {_observe(lambda w, s, h=h: held_in_checkpoint(w, s, h)) for h in holds}
        others |= {_observe(lambda w, s, o=o: saved_elsewhere_in_checkpoint(w, s, o)) for o in operations}
    return frozenset(mine - others)
