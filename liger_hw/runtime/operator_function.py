"""Autograd Functions that follow from their operators: the names in two schemas say what is saved and whose gradient is
whose. An op whose forward and backward are one operator each needs no code of its own for them."""

from __future__ import annotations

import inspect
from typing import Any, Callable, ClassVar, NamedTuple

import torch

from ..recompute.recipes import offer, offer_all
from .operator import Function, first_order
from .saved_tensors import may_overwrite


class OperatorFunction(Function):
    """An autograd Function that names its operators; `forward` and `backward` follow from the names in their schemas.

        fwd = define("f_fwd(Tensor X, Tensor? W, float eps, int mode) -> (Tensor Y, Tensor rstd)", ...)
        bwd = define("f_bwd(Tensor dY, Tensor X, Tensor? W, Tensor rstd, int mode, bool needs_params)"
                     " -> (Tensor dX, Tensor dW)", ...)

    The Function takes the forward operator's arguments and returns the results whose gradients backward takes (`dY`),
    which come first. Backward takes these gradients, then what is saved of the forward's arguments and results by the
    names that they have there: tensors, then numbers. `needs_params` stands last, where it is: whether an argument in
    `params` needs a gradient. Each result of backward, `d<argument>`, is that argument's gradient; `dA_dB` holds the
    gradients of A and of B behind one another, or A's alone without a B.

    in_place: an operator like bwd that writes the gradients over the saved inputs and returns nothing. The Function
    then takes one more argument, `owned`: whether the caller made the inputs for this call and looks at them no more.
    is_cheap: the outputs are offered for recomputation (`recompute/recipes.py`)
    """

    fwd: ClassVar[Callable[..., Any]]
    bwd: ClassVar[Callable[..., Any]]
    in_place: ClassVar[Callable[..., Any] | None] = None
    params: ClassVar[tuple[str, ...]] = ()
    is_cheap: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fwd, bwd = _Names.of(cls.fwd), _Names.of(cls.bwd)
        arguments = [*fwd.tensors, *fwd.numbers, *(["owned"] if cls.in_place else [])]
        backward, forward = _backward(cls, arguments, fwd, bwd), _forward(cls, fwd, bwd)
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("ctx", *arguments)]
        forward.__signature__ = inspect.Signature(parameters)  # for torch.compile, and for sharding rules
        backward.__qualname__ = f"{cls.__qualname__}.backward"
        cls.forward, cls.backward = staticmethod(forward), staticmethod(first_order(backward))


class _Names(NamedTuple):
    """The names in an operator's schema; a NamedTuple of numbers is one argument, `numbers`."""

    tensors: list[str]
    numbers: list[str]
    results: list[str]

    @classmethod
    def of(cls, operator: Any) -> "_Names":
        schema = operator.overload._schema
        tensors = [argument.name for argument in schema.arguments if "Tensor" in str(argument.real_type)]
        numbers = [argument.name for argument in schema.arguments if argument.name not in tensors]
        return cls(tensors, ["numbers"] if operator.numbers else numbers, [result.name for result in schema.returns])


def _forward(cls: type[OperatorFunction], fwd: _Names, bwd: _Names) -> Callable[..., Any]:
    run, in_place, is_cheap = cls.fwd, cls.in_place is not None, cls.is_cheap
    n_outputs, several = sum(f"d{result}" in bwd.tensors for result in fwd.results), len(fwd.results) > 1
    names = [*fwd.tensors, *fwd.numbers, *fwd.results]
    tensors = [names.index(name) for name in bwd.tensors[n_outputs:]]
    numbers = [names.index(name) for name in bwd.numbers if name != "needs_params"]

    def forward(ctx: Any, *args: Any) -> Any:
        if in_place:
            *args, ctx.owned = args
        results = run(*args)
        values = (*args, *results) if several else (*args, results)
        ctx.save_for_backward(*[values[place] for place in tensors])
        ctx.numbers = [values[place] for place in numbers]
        if n_outputs > 1:
            outputs = results[:n_outputs]
            if is_cheap:
                offer_all(ctx, outputs, run, tuple(args))
            return outputs
        output = results[0] if several else results
        if is_cheap:
            offer(ctx, output, run, tuple(args), 0 if several else None)
        return output

    return forward


def _backward(cls: type[OperatorFunction], arguments: list[str], fwd: _Names, bwd: _Names) -> Callable[..., Any]:
    run, in_place = cls.bwd, cls.in_place is not None
    n_grads = sum(f"d{result}" in bwd.tensors for result in fwd.results)
    has_flag, params = "needs_params" in bwd.numbers, [arguments.index(name) for name in cls.params]
    owners = [result.removeprefix("d").split("_d") for result in bwd.results]
    order = [name for of_result in owners for name in of_result]
    known = {*arguments, *fwd.results, "needs_params"}
    wrong = [name for name in order if name not in arguments]  # whose gradient would be lost
    if wrong := wrong + [name for name in (*bwd.tensors[n_grads:], *bwd.numbers) if name not in known]:
        raise TypeError(f"{cls.__name__}: backward names {', '.join(wrong)}, which forward neither takes nor returns")
    by_argument = [order.index(name) if name in order else -1 for name in arguments]  # -1: no gradient
    pairs = [bwd.tensors.index(names[1]) - n_grads if len(names) > 1 else None for names in owners]  # where B is saved
    has_pairs = len(order) > len(owners)

    def apart(result: torch.Tensor, pair: int | None, saved: Any) -> tuple[torch.Tensor | None, ...]:
        if pair is None:
            return (result,)
        # torch's plain chunk would also record that both share memory, which takes host time
        return (result, None) if saved[pair] is None else result.unsafe_chunk(2)

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        if in_place and may_overwrite(ctx, saved) and all([t.is_contiguous() for t in saved]):
            cls.in_place(*grads, *saved, *ctx.numbers)
            results: Any = [t.detach() for t in saved]
        else:
            flags = (any([needed[place] for place in params]),) if has_flag else ()
            results = run(*grads, *saved, *ctx.numbers, *flags)
            results = (results,) if isinstance(results, torch.Tensor) else results
            if has_pairs:
                results = [part for result, pair in zip(results, pairs) for part in apart(result, pair, saved)]
        results = (*results, None)
        return tuple([results[place] if need else None for place, need in zip(by_argument, needed)])

    return backward
