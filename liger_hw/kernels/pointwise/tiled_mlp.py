"""An MLP over a long sequence, one tile of rows at a time, so that its wide intermediates exist for one tile only.

Forward runs the MLP on each tile without an autograd graph, and saves only the MLP's input. Backward runs each tile
again, with a graph, and computes its gradients. Peak memory is the input, the output and one tile.

The gradient of the input is the same as without tiles. The gradient of a weight is summed over all tiles in fp32 (or
the weight's wider dtype) and rounded once. If weights are not plain parameters (DTensors, ZeRO-3's partitions, FSDP1's
views) or have hooks (`register_hook`), each tile is a torch checkpoint instead. The backward of the last tile then
returns the sum of each linear layer, so that hooks get sums, and while gathered weights are still gathered. Autograd
sums the gradients of DTensors, views and weights outside linear layers, and rounds in every tile.

Source: ALST, https://arxiv.org/abs/2506.13996 (section 3.1).
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ...private import graph_task
from ...recompute.recipes import run_tileable_by
from ...runtime.operator import check, check_tensors, first_order
from ..heads.linear_head import add_product

TILE_ROWS = 8192  # with fewer rows matrix products would be slower

Run = Callable[[Any, torch.Tensor], torch.Tensor]
"""An MLP as a function of (module, x [..., rows, hidden]); a row of its result depends only on the same row of x."""


# -- which MLPs run in tiles -----------------------------------------------------------------------------------------


class Tiles:
    """Context in which MLPs with a `tileable` forward run in tiles of TILE_ROWS rows, in this thread. May be nested."""

    def __enter__(self) -> "Tiles":
        self._outer = run_tileable_by(_in_tiles)
        return self

    def __exit__(self, *error: object) -> None:
        run_tileable_by(self._outer)


def _in_tiles(forward: Run, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if rows <= TILE_ROWS:
        return forward(module, x)
    y = _run_in_tiles(forward, module, x.reshape(rows, x.shape[-1]), -(-rows // TILE_ROWS))
    return y.view(*x.shape[:-1], y.shape[-1])


def apply_tiled_mlp(
    fn: Run,
    mlp_module: torch.nn.Module,
    x: torch.Tensor,
    num_shards: int | None = None,
    compute_params: Sequence[torch.nn.Parameter] | None = None,
) -> torch.Tensor:
    """fn(mlp_module, x), computed in `num_shards` tiles of the sequence, in forward and again in backward.

    fn: takes (module, a tile of x) and returns as many rows; only parameters of mlp_module may require gradients.
    x: [..., seq, hidden]. num_shards: default ceil(seq / hidden), at most seq.
    compute_params: Liger's argument for DeepSpeed, without effect.
    Backward repeats the random numbers of the forward. Under torch.compile the result is fn(mlp_module, x), untiled.
    Raises `ValueError` for an x without a sequence dimension or a num_shards below 1. Backward raises `RuntimeError`
    if parameters were replaced or changed since the forward, or if fn uses others that require gradients.
    """
    if torch.compiler.is_compiling():
        return fn(mlp_module, x)
    check_tensors("apply_tiled_mlp", x=x)
    check(x.dim() > 1, "apply_tiled_mlp", f"x must be [..., seq, hidden], got shape {tuple(x.shape)}")
    rows, hidden = x.shape[-2:]
    count = -(-rows // max(1, hidden)) if num_shards is None else num_shards
    valid = num_shards is None or isinstance(num_shards, int) and num_shards > 0
    check(valid, "apply_tiled_mlp", f"num_shards must be a positive integer, got {num_shards!r}")
    return _run_in_tiles(fn, mlp_module, x, max(1, min(count, rows)))


# -- the computation -------------------------------------------------------------------------------------------------


def _run_in_tiles(run: Run, module: torch.nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    weights = _trainable(module)
    if not torch.is_grad_enabled() or not (x.requires_grad or weights):
        return _joined(run, module, x, count)
    if not _are_plain(module, weights):
        sums, kind = {id(weight): _Sum(weight) for weight in weights}, x.device.type
        autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        options = {"use_reentrant": False, "context_fn": lambda: [_SummedLinears(sums, autocast, n) for n in (1, 0)]}
        return torch.cat(
            [checkpoint.checkpoint(run, module, tile, **options) for tile in x.tensor_split(count, -2)], -2
        )
    x = _SavedInput.apply(x)
    return _TiledMLP.apply(x, run, module, count, *weights)


def _joined(run: Run, module: torch.nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    """The results of all tiles in one tensor. Each is copied before the next is computed."""
    y, start = None, 0
    for tile in x.tensor_split(count, -2):
        y_tile = run(module, tile)
        shape = tuple(y_tile.shape) if isinstance(y_tile, torch.Tensor) else type(y_tile).__name__
        message = f"fn must return as many rows as it takes, got {shape} for a tile of {tuple(tile.shape)}"
        check(shape[:-1] == tile.shape[:-1], "apply_tiled_mlp", message)
        if y is None:
            y = y_tile.new_empty((*x.shape[:-1], y_tile.shape[-1]))
        y.narrow(-2, start, tile.shape[-2]).copy_(y_tile)
        start += tile.shape[-2]
    return y


def _trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _are_plain(module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors of the module that need gradients are unsharded parameters without gradient hooks."""
    views = (t for part in module.modules() for t in vars(part).values() if isinstance(t, torch.Tensor))
    return not any(t.requires_grad for t in views) and all(
        type(p) is torch.nn.Parameter and not hasattr(p, "ds_id") and not p._backward_hooks for p in weights
    )


class _SavedInput(torch.autograd.Function):
    """Saves x for `_TiledMLP` in a separate node. A checkpoint around both stops its recomputation after the last saved
    tensor, so that it does not run the MLP."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return dx


class _TiledMLP(torch.autograd.Function):
    """run(module, x) in tiles. The module's weights are arguments, so that backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Run, module: Any, count: int, *weights: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.module, ctx.count = run, module, count
        ctx.weights = [(id(weight), weight._version) for weight in weights]
        ctx.saved_input = x.grad_fn  # the node of _SavedInput, or None for an x that needs no gradient
        if ctx.saved_input is None:
            ctx.save_for_backward(x)
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.random = torch.get_rng_state(), *checkpoint.get_device_states(x)
        with _autocast(ctx.autocast):
            return _joined(run, module, x, count)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        (x,) = (ctx if ctx.saved_input is None else ctx.saved_input).saved_tensors
        weights = _trainable(ctx.module)
        if any(weight._backward_hooks for weight in weights):  # autograd.grad would run them for each tile
            raise RuntimeError("an MLP in tiles: register hooks of its parameters before the forward, not after it")
        if [(id(weight), weight._version) for weight in weights] != ctx.weights:
            raise RuntimeError("an MLP in tiles: its parameters were changed or replaced since the forward")
        sums = {id(weight): _Sum(weight) for weight in weights}
        needs_dx = ctx.needs_input_grad[0]
        dx = torch.zeros_like(x) if needs_dx else None
        dx_tiles = dx.tensor_split(ctx.count, -2) if needs_dx else [None] * ctx.count
        with _random_state(ctx.random, x.device.type):
            for tile, dx_tile, dy_tile in zip(x.tensor_split(ctx.count, -2), dx_tiles, dy.tensor_split(ctx.count, -2)):
                tile = tile.detach().requires_grad_(needs_dx)
                with torch.enable_grad(), _autocast(ctx.autocast), _SummedLinears(sums, ctx.autocast):
                    y = ctx.run(ctx.module, tile)
                if y.requires_grad:
                    _check_leaves(y, [tile, *weights])
                    gradients = torch.autograd.grad(y, [tile] * needs_dx + weights, dy_tile, allow_unused=True)
                else:  # y does not depend on x or a parameter
                    gradients = [None] * (needs_dx + len(weights))
                if needs_dx and gradients[0] is not None:
                    dx_tile.copy_(gradients[0])
                for weight, gradient in zip(weights, gradients[needs_dx:]):
                    if gradient is not None:
                        sums[id(weight)].add(gradient)
                del y, gradients
        return dx, None, None, None, *(sums.pop(id(weight)).rounded() for weight in weights)


def _check_leaves(y: torch.Tensor, known: Sequence[torch.Tensor]) -> None:
    """Raise `RuntimeError` if y depends on a leaf that is not in `known`, which would get no gradient."""
    nodes, seen, ids = [y.grad_fn], {None}, {id(leaf) for leaf in known}
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", known[0])
        if id(leaf) not in ids:
            message = f"fn uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is no parameter"
            raise RuntimeError(f"an MLP in tiles: {message} of its module; give apply_tiled_mlp a module that has it")
        nodes += (next_node for next_node, _ in node.next_functions)


def _autocast(state: tuple) -> torch.autocast:
    """The forward's autocast state, without its cache of cast weights, whose entries have no graph."""
    kind, dtype, enabled = state
    return torch.autocast(kind, dtype, enabled, cache_enabled=False)


@contextlib.contextmanager
def _random_state(state: tuple, kind: str) -> Iterator[None]:
    """A context with the random state of the forward."""
    cpu, devices, states = state
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.set_rng_state(cpu)
        if devices:
            checkpoint.set_device_states(devices, states, device_type=kind)
        yield


# -- gradients of weights --------------------------------------------------------------------------------------------


class _Sum:
    """A weight's gradient over all tiles, in fp32 or wider.

    uses: the number of the weight's calls in the forward, or 0 in `_TiledMLP`; left: calls whose backward has not run
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.total = weight, None
        self.uses = self.left = 0
        self.backward = -1  # `graph_task` of the backward for which `total` and `left` are valid
        self.dtype = torch.promote_types(weight.dtype, torch.float32)

    def _begin(self) -> None:
        """Discard the sum of an earlier backward that was interrupted between tiles."""
        if self.uses and self.backward != graph_task():
            self.backward, self.total, self.left = graph_task(), None, self.uses

    def add(self, gradient: torch.Tensor) -> None:
        self._begin()
        if self.total is None:
            self.total = gradient.to(self.dtype, copy=True)
        else:
            self.total += gradient

    def add_product(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Add dy^T @ x: dy [rows, out], x [rows, in]."""
        self._begin()
        first = self.total is None
        if first:
            self.total = dy.new_empty((dy.shape[1], x.shape[1]), dtype=self.dtype)
        add_product(self.total, dy.t(), x, first)

    def when_complete(self) -> torch.Tensor | None:
        """The sum if this was the backward of the last call, else None."""
        self.left -= 1
        if self.left:
            return None
        gradient, self.total, self.left = self.rounded(), None, self.uses
        return gradient

    def rounded(self) -> torch.Tensor | None:
        return None if self.total is None else self.total.to(self.weight.dtype)


class _SummedLinears(TorchFunctionMode):
    """Mode in which the backward of linear layers adds the gradients of weights to `sums`: id of a weight -> `_Sum`.

    uses: 1 if calls are counted in `_Sum.uses`, else 0
    """

    def __init__(self, sums: dict[int, _Sum], autocast: tuple, uses: int = 0) -> None:
        super().__init__()
        self.sums, self.autocast, self.uses = sums, autocast, uses

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        run = self._linear if func is torch.nn.functional.linear else func
        return run(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        kind, dtype, enabled = self.autocast
        total = self.sums.get(id(weight))
        if total is None or type(input) is not torch.Tensor or not (enabled or input.dtype is weight.dtype):
            return torch.nn.functional.linear(input, weight, bias)
        if enabled and input.dtype is not torch.float64:
            input = input.to(dtype)
        sums = total, self.sums.get(id(bias))
        for weight_sum in sums:
            if weight_sum is not None:
                weight_sum.uses, weight_sum.left = weight_sum.uses + self.uses, weight_sum.left + self.uses
        with torch.autocast(kind, enabled=False):
            return _Linear.apply(input, weight, bias, *sums)


class _Linear(torch.autograd.Function):
    """A linear layer whose backward adds the gradients of weight and bias to their sums and returns complete sums."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *sums: _Sum | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        weight_sum, bias_sum = ctx.sums
        rows = dy.reshape(-1, dy.shape[-1])
        weight_sum.add_product(rows, x.reshape(-1, x.shape[-1]))
        if bias_sum is not None:
            bias_sum.add(rows.sum(0, dtype=bias_sum.dtype))
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, weight_sum.when_complete(), None if bias_sum is None else bias_sum.when_complete(), None, None
