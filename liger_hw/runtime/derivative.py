"""The reference and the fake of a backward operator, from its forward's reference and the names in their schemas.

Names are as in `operator.OperatorFunction`. If `needs_params` is False, all results but the first are empty. `needed`
has a flag for each result; results that are not needed are empty, and so is the gradient of None. An operator without
results writes the gradients over the arguments that its schema marks as written.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..private import allows_saved_tensor_hooks, autograd_inside_operator


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside an operator, without a checkpoint's hooks on saved tensors, which would recompute them."""
    allows_hooks = allows_saved_tensor_hooks()  # if False, setting hooks raises
    hooks = saved_tensors_hooks(lambda t: t, lambda t: t) if allows_hooks else contextlib.nullcontext()
    with autograd_inside_operator(), torch.enable_grad(), hooks:
        yield


def differentiate(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """The gradient of each of `tensors`, in fp32 or wider. output_grads: of each of the function's results, or None"""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    with _autograd():
        leaves = [t.detach().to(wide, copy=True).requires_grad_() for t in tensors]
        outputs = function(*leaves)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        used, output_grads = zip(*[(y, dy.to(y.dtype)) for y, dy in zip(outputs, output_grads) if dy is not None])
        return torch.autograd.grad(used, leaves, output_grads, materialize_grads=True)


def backward_of(
    forward: Any, schema: Any, fake: Callable[..., Any] | None = None, run: Callable[..., Any] | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(reference, fake) of the backward operator with this schema.

    The reference differentiates the forward's by autograd in fp32 or wider and rounds each gradient once. fake: to use
    instead of one derived from the names. run: computes the forward's results from all arguments of the backward
    """
    names = [argument.name for argument in schema.arguments]
    inputs = [names.index(argument.name) for argument in forward.overload._schema.arguments]
    returned = [f"d{result.name}" for result in forward.overload._schema.returns]
    incoming = [names.index(name) if name in names else None for name in returned]
    args_of_results = [[names.index(name) for name in result.name[1:].split("_d")] for result in schema.returns]
    written = [[i] for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    flag, flags = (names.index(name) if name in names else None for name in ("needs_params", "needed"))

    def empty_gradients(*args: Any) -> Any:
        def gradient(places: list[int], is_needed: bool) -> torch.Tensor:
            tensors = [args[place] for place in places if args[place] is not None]
            if not tensors or not is_needed:
                return args[args_of_results[0][0]].new_empty(0)
            if len(places) == 1:
                return tensors[0].new_empty(tensors[0].shape)
            dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])
            return tensors[0].new_empty(sum(t.numel() for t in tensors), dtype=dtype)

        needed = args[flags] if flags else [True] + [flag is None or args[flag]] * len(args_of_results)
        gradients = [gradient(places, is_needed) for places, is_needed in zip(args_of_results, needed)]
        return None if not args_of_results else gradients[0] if len(args_of_results) == 1 else tuple(gradients)

    fake = fake or empty_gradients
    run = run or (lambda *args: forward.reference(*[args[place] for place in inputs]))

    def gradients(*args: Any) -> Any:
        results = fake(*args) if args_of_results else [args[place] for (place,) in written]
        filled = [results] if isinstance(results, torch.Tensor) else results
        leaves = [place for places in args_of_results or written for place in places if args[place] is not None]

        def outputs_of(*tensors: torch.Tensor) -> Any:
            changed = dict(zip(leaves, tensors))
            return run(*[changed.get(place, arg) for place, arg in enumerate(args)])

        output_grads = [None if place is None else args[place] for place in incoming]
        by_leaf = differentiate(outputs_of, [args[place] for place in leaves], output_grads)
        by_place = dict(zip(leaves, by_leaf))
        for result, places in zip(filled, args_of_results or written):
            if result.numel():
                parts = [by_place[place] for place in places if place in by_place]
                result.copy_(parts[0] if len(places) == 1 else torch.cat([part.flatten() for part in parts]))
        return results if args_of_results else None

    return gradients, fake
