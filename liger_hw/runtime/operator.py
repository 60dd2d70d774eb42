"""Operators and their derivatives: `define`, `Function`, and `OperatorFunction`, which is made from two operators.

`define` registers `torch.ops.liger_hw.<name>`, opaque to torch.compile, with a fake. On a GPU the operator runs its
launcher; on the CPU its reference, or the launcher if kernels are interpreted. In plain eager code on a GPU, the
function that `define` returns skips torch's dispatcher and uses the replay cache and the launcher directly.

Op files import `launch` and the checks of `checks.py` from here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from itertools import islice
from typing import Any, Callable, ClassVar, Iterable, Iterator, NamedTuple, NoReturn, get_type_hints

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from .. import autotune, env, registry
from ..private import has_transforms, is_profiling, keeps_graph, n_dispatch_modes, unwrap_if_dead
from ..recompute.recipes import offer, offer_all
from .checks import (  # noqa: F401  op files take these from here
    NO_TENSORS,
    TENSORS,
    Shapes,
    are_plain,
    autocast_dtype,
    cdiv,
    check,
    check_flags,
    check_floats,
    check_ignore_index,
    check_indices,
    check_integers,
    check_numbers,
    check_tensors,
    coerced,
    dense,
    empty_like,
    nested,
    no_view,
    no_weight,
    row_major,
    rows_of,
    to_flatten,
    warn_ignored,
)
from .derivative import backward_of
from .launch import (  # noqa: F401  as above
    NOT_CHECKED,
    NOT_REPLAYED,
    LaunchFailed,
    Routine,
    call_routine,
    launch,
    observed,
    observers,
    replay,
)
from .recording import recorder
from .sharding import LossRule, RotaryRule, RowsRule, apply_sharded, is_dtensor, refuse_dtensors
from .triton_import import INTERPRET

_library = torch.library.Library("liger_hw", "DEF")
launchers: dict[str, Callable[..., Any]] = {}
"""Operator name -> launcher, for fake tensors (autotune/fake.py)."""
declared: dict[str, Shapes] = {}
"""Operator name -> the check of its tensors."""
before_apply: Callable[[type["Function"], tuple], None] | None = None
"""Called with a Function and its arguments before it runs; set by autotune/compile_ahead.py in a first forward."""


def define(
    schema: str,
    *,
    launcher: Callable[..., Any],
    shapes: str,
    reference: Callable[..., Any] | None = None,
    derivative_of: Any = None,
    fake: Callable[..., Any] | tuple[str, ...] | None = None,
    numbers: type | None = None,
    misfit: Callable[..., str] | None = None,
    recorded: bool = True,
) -> Any:
    """Register the operator `liger_hw::<name>` and return the function by which op files call it.

    schema: torch.library schema without the namespace, for example `"f(Tensor x, float eps) -> Tensor"`
    launcher: runs the Triton kernels, the same ones for all arguments of one layout
    reference: the same results in plain torch
    derivative_of: for a backward operator, its forward operator. The backward's reference then differentiates the
    forward's (`derivative.py`), and `reference`, if given, computes the forward's results from the backward's arguments
    shapes: the tensors' shapes and dtypes, as `checks.Shapes` reads them; checked in every call
    misfit: returns an error about arguments that fit `shapes`, or ""
    fake: returns empty results for torch.compile. A tuple names, for each result, an argument of the same shape and
    dtype; for None as that argument, the result has no elements. By default the reference runs on fake tensors.
    numbers: a NamedTuple class whose fields are appended to the schema. All functions given here, and the returned
    function, take an instance as their last argument.
    recorded: False for a launcher that does more than allocate and launch (`recording.repeated`)

    Arguments are positional, numbers are converted to the schema's types. No function may return one of its inputs.
    """
    name = schema.split("(", 1)[0].strip()
    fields = None if numbers is None else _Numbers(numbers)
    if fields is not None:
        arguments, _, results = schema.partition(") ->")
        schema, n_others = f"{arguments}, {fields.schema}) ->{results}", arguments.count(",") + 1
        launcher, reference, fake, misfit = (
            fields.taking_numbers(run, n_others) if callable(run) else run
            for run in (launcher, reference, fake, misfit)
        )
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.liger_hw, name).default
    expected = declared[name] = Shapes(overload._schema, shapes, misfit)
    if derivative_of is not None:
        reference, fake = backward_of(derivative_of, overload._schema, fake, reference)
    check_args = expected.check

    def checked(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_checked(*args: Any) -> Any:
            check_args(args)
            return run(*args)

        return run_checked

    launchers[name] = checked(with_fallback(launcher))
    if env.LIGER_HW_DISABLE:
        launcher, recorded = reference, False
    run_launcher = with_fallback(launcher)
    is_compiling = torch.compiler.is_compiling
    kinds = [str(argument.real_type) for argument in overload._schema.arguments]
    places = tuple(place for place, kind in enumerate(kinds) if kind in _NUMBERS)
    coercions = places, tuple(_NUMBERS[kinds[place]] for place in places)
    tensors_end = 1 + max(place for place, kind in enumerate(kinds) if "Tensor" in kind)
    record = recorder(launcher, coercions)

    def replayed(args: tuple) -> Any:
        try:
            return replay(name, check_args, args, tensors_end, record) if recorded else NOT_CHECKED
        except LaunchFailed as failure:
            _quarantine(failure)
            return NOT_REPLAYED

    def below_dispatcher(*args: Any) -> Any:
        result = replayed(args)
        if result is NOT_CHECKED:
            check_args(args)
        elif result is not NOT_REPLAYED:
            return result
        return run_launcher(*args)

    for key in ("CUDA", "XPU"):
        _library.impl(name, below_dispatcher, key)
    _library.impl(name, checked(run_launcher if INTERPRET else _with_results(_without_view, reference)), "CPU")
    if fake is None:
        fake = _with_results(lambda t: t.new_empty(t.shape), reference)
    elif isinstance(fake, tuple):
        fake = _fake_like(fake, overload._schema)
    torch.library.register_fake(f"liger_hw::{name}", checked(fake), lib=_library)

    def call(*args: Any) -> Any:
        if not (
            torch.is_grad_enabled()
            or is_compiling()
            or n_dispatch_modes()
            or has_transforms()
            or forward_ad._current_level >= 0
            or is_profiling()
            or torch.jit.is_tracing()
        ):  # the dispatcher would do nothing but call the operator
            result = replayed(args)
            if result is not NOT_REPLAYED and result is not NOT_CHECKED:
                return result
            if are_plain(args):
                if result is NOT_CHECKED:
                    check_args(args)
                run, args = run_launcher, coerced(args, coercions)
            else:
                run = overload
                expected.check_types(args)
                refuse_dtensors(name, args)
            if observers:
                return observed("operator", lambda call, args: run(*args), call, args)
            return run(*args)
        elif is_transformed():
            _refuse_transforms(f"liger_hw::{name}")
        elif forward_ad._current_level >= 0:
            _refuse_tangents(name, args)
        if not is_compiling():
            refuse_dtensors(name, args)
        return overload(*args)

    call.__name__ = name
    call.overload, call.numbers, call.reference = overload, None, reference
    return call if fields is None else fields.taking_tuple(call)


class _Numbers:
    """Translates between a NamedTuple of numbers and the operator's arguments, one for each field.

    A field is an int, float, bool or str, a tuple[float, ...], or another such NamedTuple, which is flattened.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        types = get_type_hints(kind)
        self.inner = tuple(_Numbers(of) if hasattr(of, "_fields") else None for of in types.values())
        self.is_flat = not any(self.inner)
        self.schema = ", ".join(
            inner.schema if inner else f"{'float[]' if of == tuple[float, ...] else of.__name__} {name}"
            for (name, of), inner in zip(types.items(), self.inner)
        )

    def numbers_of(self, values: Any) -> Iterable[Any]:
        """The values of an instance of the NamedTuple, flattened."""
        if self.is_flat:
            return values
        numbers: list[Any] = []
        for value, inner in zip(values, self.inner):
            if inner is None:
                numbers.append(value)
            else:
                numbers.extend(inner.numbers_of(value))
        return numbers

    def tuple_of(self, numbers: Iterator[Any]) -> Any:
        """The instance of the NamedTuple with these numbers: the inverse of `numbers_of`."""
        if self.is_flat:
            return self.kind(*islice(numbers, len(self.inner)))
        return self.kind(*(next(numbers) if inner is None else inner.tuple_of(numbers) for inner in self.inner))

    def taking_tuple(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        def with_tuple(*args: Any) -> Any:
            return operator(*args[:-1], *self.numbers_of(args[-1]))

        with_tuple.__name__, with_tuple.overload = operator.__name__, operator.overload
        with_tuple.numbers, with_tuple.reference = self.kind, operator.reference
        return with_tuple

    def taking_numbers(self, run: Callable[..., Any], n_others: int) -> Callable[..., Any]:
        def with_numbers(*args: Any) -> Any:
            return run(*args[:n_others], self.tuple_of(iter(args[n_others:])))

        return with_numbers


_NUMBERS = {"float": float, "int": int, "bool": bool}


def _with_results(change: Callable[[torch.Tensor], torch.Tensor], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with `change` applied to each tensor that it returns."""

    def changed(*args: Any) -> Any:
        results = run(*args)
        if isinstance(results, torch.Tensor):
            return change(results)
        return None if results is None else tuple(map(change, results))

    return changed


def _without_view(t: torch.Tensor) -> torch.Tensor:
    """`t`, or an alias that is not marked as a view: autograd refuses in-place changes of a view."""
    return no_view(t) if t._is_view() else t


def _fake_like(names: tuple[str, ...], schema: Any) -> Callable[..., Any]:
    places = [[argument.name for argument in schema.arguments].index(name) for name in names]

    def fake(*args: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        results = [first.new_empty(0) if args[i] is None else args[i].new_empty(args[i].shape) for i in places]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    return fake


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Raise for a tensor with a tangent: forward-mode autograd would silently give a derivative of zero."""
    arguments = (t for arg in args for t in (arg if isinstance(arg, (tuple, list)) else (arg,)))
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in arguments):
        raise NotImplementedError(
            f"liger_hw::{name} has no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad); "
            "take the gradient backwards, or use the unpatched model for it"
        )


def is_transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return has_transforms()


# the same as decorating with torch.compiler.assume_constant_result, which would import the compiler
is_transformed._dynamo_marked_constant = True


def _refuse_transforms(what: str) -> NoReturn:
    """Raise: torch.compile, and vmap around an operator, would give a gradient of zero (pytorch issue 193279), and
    vmap's fallback without gradients crashes in torch 2.13."""
    raise RuntimeError(
        f"{what}: liger_hw's ops take no transform of torch.func (functorch: vmap, grad, jvp, jacrev, hessian); "
        "call backward() or torch.autograd.grad (is_grads_batched=True batches gradients), transform the op's "
        "`reference` (liger_hw.registry.get_op), or use the unpatched model for it"
    )


def with_fallback(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """`launcher`, repeated with the registry's next configuration each time that one fails."""

    def run(*args: Any) -> Any:
        while True:
            try:
                return launcher(*args)
            except LaunchFailed as failure:
                _quarantine(failure)

    return run


def _quarantine(failure: LaunchFailed) -> None:
    """Quarantine the configuration that failed; raise the cause if the registry has no other one."""
    if not registry.quarantine(failure.plan, failure.cause):
        raise failure.cause from None


_USUAL_TYPES = NO_TENSORS | TENSORS


class Function(torch.autograd.Function):
    """An autograd Function with forward(ctx, ...), whose `apply` is faster than torch's and refuses torch.func.

    `forward` must not check arguments: torch.compile turns an error raised there into an internal error. The op's
    public function checks options, and operators check tensors.
    """

    sharding: ClassVar[RowsRule | RotaryRule | LossRule | None] = None
    """The rule for DTensors, which are refused without one."""
    compiles_ahead: ClassVar[bool] = False
    """Whether the kernels of the first call are compiled in parallel."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        if has_transforms():
            _refuse_transforms(f"Liger{cls.__name__}")
        if kwargs:
            return super().apply(*args, **kwargs)
        unusual = [a for a in args if type(a) not in _USUAL_TYPES]
        if unusual and any(isinstance(a, torch.Tensor) and is_dtensor(a) for a in unusual):
            return apply_sharded(cls, args)
        if before_apply is not None:
            before_apply(cls, args)
        elif cls.compiles_ahead:
            importlib.import_module(autotune.compiles_ahead).before_first_call(cls, args)
        plain = [a if type(a) in NO_TENSORS or not isinstance(a, torch.Tensor) else unwrap_if_dead(a) for a in args]
        return super(torch.autograd.Function, cls).apply(*plain)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a Function's backward without a second derivative: create_graph=True raises.

    torch's `once_differentiable` alone is silently wrong if the incoming gradient has no graph, as for `loss.sum()`.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():
            return once(ctx, *grads)
        raise RuntimeError(
            f"Liger{backward.__qualname__.split('.')[0]}: liger_hw's ops have no second derivative; "
            "call backward without create_graph=True, or use the unpatched model for it"
        )

    return checked


# -- Functions made from two operators -------------------------------------------------------------------------------


class OperatorFunction(Function):
    """An autograd Function whose forward and backward are derived from the names in the schemas of two operators.

        fwd = define("f_fwd(Tensor X, Tensor? W, float eps, int mode) -> (Tensor Y, Tensor rstd)", ...)
        bwd = define("f_bwd(Tensor dY, Tensor X, Tensor? W, Tensor rstd, int mode, bool needs_params)"
                     " -> (Tensor dX, Tensor dW)", ...)

    The Function takes fwd's arguments and returns fwd's first results: each result Y for which bwd has an argument
    `dY`, its gradient. bwd's other arguments have the names of fwd's arguments and results, and are saved: tensors,
    then numbers. bwd's result `dA` is the gradient of argument A; `dA_dB` is the gradients of A and B, concatenated,
    or A's alone if B is None. bwd may have two more numbers: as its first, `bool[] needed`, which results are needed;
    as its last, `bool needs_params`, whether an argument in `params` needs a gradient.

    in_place: an operator like bwd that writes the gradients over the saved inputs and returns nothing. The Function
    then has a last argument `owned`: whether the inputs were made for this call and are not used again.
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
        if operator.numbers:
            numbers = [name for name in numbers if name == "needed"] + ["numbers"]
        return cls(tensors, numbers, [result.name for result in schema.returns])


def _forward(cls: type[OperatorFunction], fwd: _Names, bwd: _Names) -> Callable[..., Any]:
    run, in_place, is_cheap = cls.fwd, cls.in_place is not None, cls.is_cheap
    n_outputs, several = sum(f"d{result}" in bwd.tensors for result in fwd.results), len(fwd.results) > 1
    names = [*fwd.tensors, *fwd.numbers, *fwd.results]
    tensors = [names.index(name) for name in bwd.tensors[n_outputs:]]
    numbers = [names.index(name) for name in bwd.numbers if name not in ("needed", "needs_params")]

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
    args_of_results = [result.removeprefix("d").split("_d") for result in bwd.results]
    order = [name for of_result in args_of_results for name in of_result]
    known = {*arguments, *fwd.results, "needed", "needs_params"}
    wrong = [name for name in order if name not in arguments]
    if wrong := wrong + [name for name in (*bwd.tensors[n_grads:], *bwd.numbers) if name not in known]:
        raise TypeError(f"{cls.__name__}: backward names {', '.join(wrong)}, which forward neither takes nor returns")
    by_argument = [order.index(name) if name in order else -1 for name in arguments]  # -1: no gradient
    of_results = [arguments.index(names[0]) for names in args_of_results] if "needed" in bwd.numbers else None
    others = [[bwd.tensors.index(name) - n_grads for name in names[1:]] for names in args_of_results]  # B of dA_dB
    is_joined = len(order) > len(args_of_results)

    def split(result: torch.Tensor, others: list[int], saved: Any) -> tuple[torch.Tensor | None, ...]:
        if not others:
            return (result,)
        tensors = [saved[place] for place in others]
        if tensors[0] is None:
            return result, *[None] * len(tensors)
        sizes = [min(t.numel(), result.numel()) for t in tensors]  # 0 where no gradient is needed
        # torch's `split_with_sizes` would return views, which autograd tracks
        first, *parts = result.unsafe_split_with_sizes([result.numel() - sum(sizes), *sizes])
        return first, *[
            part.view(t.shape) if t.dim() != 1 and part.numel() else part for part, t in zip(parts, tensors)
        ]

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        if in_place and ctx.owned and _may_overwrite(saved):
            cls.in_place(*grads, *saved, *ctx.numbers)
            results: Any = [t.detach() for t in saved]
        else:
            flags = (any([needed[place] for place in params]),) if has_flag else ()
            # a tuple, since a call with a list is not plain and goes through torch's dispatcher
            numbers = ctx.numbers if of_results is None else (tuple([needed[i] for i in of_results]), *ctx.numbers)
            results = run(*grads, *saved, *numbers, *flags)
            results = (results,) if isinstance(results, torch.Tensor) else results
            if is_joined:
                results = [part for result, places in zip(results, others) for part in split(result, places, saved)]
        results = (*results, None)
        return tuple([results[place] if need else None for place, need in zip(by_argument, needed)])

    return backward


def _may_overwrite(saved: tuple[torch.Tensor, ...]) -> bool:
    """Whether a backward may write over its saved tensors, given that the Function owns them."""
    if graph_is_kept() or is_transformed():
        return False
    return all([type(t) is torch.Tensor and t.is_contiguous() for t in saved])


def graph_is_kept() -> bool:
    """Whether the running backward may run again on the same saved tensors: with retain_graph, or under torch.compile.

    A captured backward that is replayed several times for one forward must be captured with retain_graph.
    """
    return torch.compiler.is_compiling() or keeps_graph()
