"""Operators and their derivatives: `define`, `Function`, and the `OperatorFunction` that follows from two operators.

`define` registers `torch.ops.liger_hw.<name>`, opaque to torch.compile, with a fake. On a GPU it runs the launcher; on
the CPU it runs the reference, or the launcher when kernels are interpreted. In plain eager code on a GPU the dispatcher
would only pass the call on, so the function that `define` returns goes to the replay cache and the launcher directly.

Op files import all that they use of `runtime` from here, including `launch` and the checks of `checks.py`.
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
    MISSED,
    UNSEEN,
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
"""Called with a Function and its arguments before they run; set during a model's first forward only
(`autotune/compile_ahead.py`)."""


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
    """Register an operator `liger_hw::<name>` and return what op files call: the operator, or in eager its launcher.

    schema: torch.library schema without the namespace, for example `"f(Tensor x, float eps) -> Tensor"`
    launcher: runs the Triton kernels, the same ones for all arguments of one layout (`recording.py`)
    reference: the same results in plain torch
    derivative_of: for a backward operator, its forward operator, from which the reference and, unless named, the fake
    are derived (`derivative.py`); a reference beside it gives the forward's results from the backward's arguments
    shapes: what the tensors must be, in the words of `checks.Shapes`; checked in every way that the operator is called
    misfit: an error for arguments that pass `shapes` but still do not fit, or ""
    fake: empty results of the same shapes, for torch.compile. A tuple names for each result the argument with its shape
    and dtype (if that is None the result is empty, which stands for no gradient); None derives the fake by calling the
    reference on fake tensors, for a reference that does not call autograd.
    numbers: a NamedTuple whose fields are appended to the schema. The functions, and the returned callable, take one
    such tuple instead.
    recorded: False for a launcher that also does other work (`recording.repeated`)

    All functions take the schema's arguments by position, with numbers as the schema says: an int for a float, a
    bool for an int, and 0, 1 or None for a bool are converted. No function may return one of its inputs.
    """
    name = schema.split("(", 1)[0].strip()
    call_numbers = None if numbers is None else _Numbers(numbers)
    if call_numbers is not None:
        arguments, _, results = schema.partition(") ->")
        schema, n_others = f"{arguments}, {call_numbers.schema}) ->{results}", arguments.count(",") + 1
        launcher, reference, fake, misfit = (
            call_numbers.taking_numbers(run, n_others) if callable(run) else run
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
        """The result of a recording of this layout, or MISSED or UNSEEN as in `replay`."""
        try:
            return replay(name, check_args, args, tensors_end, record) if recorded else UNSEEN
        except LaunchFailed as failure:
            _quarantine(failure)
            return MISSED

    def below_dispatcher(*args: Any) -> Any:
        result = replayed(args)
        if result is UNSEEN:
            check_args(args)
        elif result is not MISSED:
            return result
        return run_launcher(*args)

    for key in ("CUDA", "XPU"):
        _library.impl(name, below_dispatcher, key)
    _library.impl(name, checked(run_launcher if INTERPRET else _without_views(reference)), "CPU")
    if fake is None:
        fake = _fake_of(reference)
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
        ):  # without tracing, profiling, transforms and autograd the dispatcher would only pass the call on
            result = replayed(args)
            if result is not MISSED and result is not UNSEEN:
                return result
            if are_plain(args):
                if result is UNSEEN:
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
    return call if call_numbers is None else call_numbers.taking_call(call)


class _Numbers:
    """How a NamedTuple of numbers appears in an operator's schema: each of its fields is an argument.

    A field is an int, float, bool or str, a tuple[float, ...], or another such NamedTuple, which is flattened.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        fields = get_type_hints(kind)
        self.inner = tuple(_Numbers(of) if hasattr(of, "_fields") else None for of in fields.values())
        self.is_flat = not any(self.inner)
        self.schema = ", ".join(
            inner.schema if inner else f"{'float[]' if of == tuple[float, ...] else of.__name__} {name}"
            for (name, of), inner in zip(fields.items(), self.inner)
        )

    def numbers_of(self, call: Any) -> Iterable[Any]:
        """The NamedTuple `call` flattened, in the order of the schema."""
        if self.is_flat:
            return call
        numbers: list[Any] = []
        for value, inner in zip(call, self.inner):
            if inner is None:
                numbers.append(value)
            else:
                numbers.extend(inner.numbers_of(value))
        return numbers

    def call_of(self, numbers: Iterator[Any]) -> Any:
        """The NamedTuple with these numbers: the inverse of `numbers_of`."""
        if self.is_flat:
            return self.kind(*islice(numbers, len(self.inner)))
        return self.kind(*(next(numbers) if inner is None else inner.call_of(numbers) for inner in self.inner))

    def taking_call(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        """The operator, as a function whose last argument is the NamedTuple."""

        def with_call(*args: Any) -> Any:
            return operator(*args[:-1], *self.numbers_of(args[-1]))

        with_call.__name__, with_call.overload = operator.__name__, operator.overload
        with_call.numbers, with_call.reference = self.kind, operator.reference
        return with_call

    def taking_numbers(self, run: Callable[..., Any], n_others: int) -> Callable[..., Any]:
        """`run`, which takes `n_others` arguments and the NamedTuple, as a function of its flattened numbers."""

        def with_numbers(*args: Any) -> Any:
            return run(*args[:n_others], self.call_of(iter(args[n_others:])))

        return with_numbers


_NUMBERS = {"float": float, "int": int, "bool": bool}


def _without_views(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference, whose results are never views, so that a caller may change them in place."""

    def without_view(result: Any) -> Any:
        return no_view(result) if isinstance(result, torch.Tensor) and result._is_view() else result

    def run(*args: Any) -> Any:
        results = reference(*args)
        return tuple(map(without_view, results)) if isinstance(results, (tuple, list)) else without_view(results)

    return run


def _fake_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A fake that returns empty tensors with the shapes and dtypes of the reference's results."""

    def fake(*args: Any) -> Any:
        results = reference(*args)
        if isinstance(results, torch.Tensor):
            return results.new_empty(results.shape)
        return None if results is None else tuple(t.new_empty(t.shape) for t in results)

    return fake


def _fake_like(names: tuple[str, ...], schema: Any) -> Callable[..., Any]:
    """Empty results like the arguments of these names."""
    places = [[argument.name for argument in schema.arguments].index(name) for name in names]

    def fake(*args: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        results = [first.new_empty(0) if args[i] is None else args[i].new_empty(args[i].shape) for i in places]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    return fake


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Without this error, tangents of forward-mode autograd would be dropped in silence: a derivative of zero."""
    arguments = (t for arg in args for t in (arg if isinstance(arg, (tuple, list)) else (arg,)))
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in arguments):
        raise NotImplementedError(
            f"liger_hw::{name} has no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad); "
            "take the gradient backwards, or use the unpatched model for it"
        )


def is_transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return has_transforms()


# what torch.compiler.assume_constant_result does, without importing the compiler
is_transformed._dynamo_marked_constant = True


def _refuse_transforms(what: str) -> NoReturn:
    """In eager, torch complains about a missing `setup_context`; torch.compile traces `forward` as a plain function and
    gives a zero gradient (pytorch issue 193279). The same happens to an operator called without its Function, as under
    vmap, whose tensors hide an outer requires_grad. Without gradients, vmap's fallback crashed in torch 2.13 (a
    segmentation fault in torch.autograd.grad, under pytest)."""
    raise RuntimeError(
        f"{what}: liger_hw's ops take no transform of torch.func (functorch: vmap, grad, jvp, jacrev, hessian); "
        "call backward() or torch.autograd.grad (is_grads_batched=True batches gradients), transform the op's "
        "`reference` (liger_hw.registry.get_op), or use the unpatched model for it"
    )


def with_fallback(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher; when a configuration fails and is quarantined, it runs again with the next layer's."""

    def run(*args: Any) -> Any:
        while True:
            try:
                return launcher(*args)
            except LaunchFailed as failure:
                _quarantine(failure)

    return run


def _quarantine(failure: LaunchFailed) -> None:
    """Quarantine a configuration that failed; raises the cause if no other layer can answer."""
    if not registry.quarantine(failure.plan, failure.cause):
        raise failure.cause from None


_USUAL = NO_TENSORS | TENSORS


class Function(torch.autograd.Function):
    """An autograd Function with forward(ctx, ...), whose `apply` costs less than torch's own; refuses torch.func.

    torch's own is slow because it checks for every argument, numbers too, whether it is a tensor. A call with DTensors
    follows `sharding`, the Function's rule (sharding.py); without a rule the call is refused.

    It takes the arguments of an op's public function, which has checked the options; operators check the tensors.
    A Function checks nothing: under torch.compile an error raised in `forward` reaches the user as an internal error of
    torch. Code written for Liger calls other classes (`compat/functions.py`).
    """

    sharding: ClassVar[RowsRule | RotaryRule | LossRule | None] = None
    compiles_ahead: ClassVar[bool] = False
    """Whether the kernels of the first call are compiled in parallel."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        if has_transforms():
            _refuse_transforms(_called(cls.__name__))
        if kwargs:
            return super().apply(*args, **kwargs)
        unusual = [a for a in args if type(a) not in _USUAL]
        if unusual and any(isinstance(a, torch.Tensor) and is_dtensor(a) for a in unusual):
            return apply_sharded(cls, args)
        if before_apply is not None:
            before_apply(cls, args)
        elif cls.compiles_ahead:
            importlib.import_module(autotune.compiles_ahead).before_first_call(cls, args)
        plain = [a if type(a) in NO_TENSORS or not isinstance(a, torch.Tensor) else unwrap_if_dead(a) for a in args]
        return super(torch.autograd.Function, cls).apply(*plain)


def _called(name: str) -> str:
    """A Function's name in errors: code written for Liger knows `RMSNormFunction` as `LigerRMSNormFunction`."""
    return f"Liger{name}"


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a Function's backward that has no derivative of its own: create_graph=True raises, always.

    By itself, torch's `once_differentiable` raises only if the incoming gradient has a graph, and is silently wrong if
    not (`loss.sum()`).
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():
            return once(ctx, *grads)
        raise RuntimeError(
            f"{_called(backward.__qualname__.split('.')[0])}: liger_hw's ops have no second derivative; "
            "call backward without create_graph=True, or use the unpatched model for it"
        )

    return checked


# -- Functions that follow from their operators ------------------------------------------------------------------------


class OperatorFunction(Function):
    """An autograd Function that names its operators; `forward` and `backward` follow from the names in their schemas.

        fwd = define("f_fwd(Tensor X, Tensor? W, float eps, int mode) -> (Tensor Y, Tensor rstd)", ...)
        bwd = define("f_bwd(Tensor dY, Tensor X, Tensor? W, Tensor rstd, int mode, bool needs_params)"
                     " -> (Tensor dX, Tensor dW)", ...)

    The Function takes the forward operator's arguments and returns the results whose gradients backward takes (`dY`),
    which come first. Backward's other arguments have the names of arguments and results of forward, which are saved
    for it: tensors, then numbers. Each result of backward, `d<argument>`, is that argument's gradient; `dA_dB` is the
    gradients of A and B concatenated, or only A's without a B. Backward may also take `bool[] needed`, its first
    number: which of its results are needed; and `needs_params`, its last: whether an argument in `params` needs one.

    in_place: an operator like bwd that writes the gradients over the saved inputs and returns nothing. The Function
    then takes one more argument, `owned`: whether the caller made the inputs for this call and does not use them again.
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
    owners = [result.removeprefix("d").split("_d") for result in bwd.results]
    order = [name for of_result in owners for name in of_result]
    known = {*arguments, *fwd.results, "needed", "needs_params"}
    wrong = [name for name in order if name not in arguments]  # their gradients would be lost
    if wrong := wrong + [name for name in (*bwd.tensors[n_grads:], *bwd.numbers) if name not in known]:
        raise TypeError(f"{cls.__name__}: backward names {', '.join(wrong)}, which forward neither takes nor returns")
    by_argument = [order.index(name) if name in order else -1 for name in arguments]  # -1: no gradient
    of_results = [arguments.index(names[0]) for names in owners] if "needed" in bwd.numbers else None
    others = [[bwd.tensors.index(name) - n_grads for name in names[1:]] for names in owners]  # saved B of each dA_dB
    is_joined = len(order) > len(owners)

    def apart(result: torch.Tensor, others: list[int], saved: Any) -> tuple[torch.Tensor | None, ...]:
        if not others:
            return (result,)
        tensors = [saved[place] for place in others]
        if tensors[0] is None:
            return result, *[None] * len(tensors)
        sizes = [min(t.numel(), result.numel()) for t in tensors]  # 0 where no gradient is needed
        # torch's plain split would also record that the parts share memory, which takes host time
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
            numbers = ctx.numbers if of_results is None else ([needed[place] for place in of_results], *ctx.numbers)
            results = run(*grads, *saved, *numbers, *flags)
            results = (results,) if isinstance(results, torch.Tensor) else results
            if is_joined:
                results = [part for result, places in zip(results, others) for part in apart(result, places, saved)]
        results = (*results, None)
        return tuple([results[place] if need else None for place, need in zip(by_argument, needed)])

    return backward


def _may_overwrite(saved: tuple[torch.Tensor, ...]) -> bool:
    """Whether a backward may write over its saved tensors, which the caller owns, to save half the memory."""
    if graph_is_kept() or is_transformed():
        return False
    return all([type(t) is torch.Tensor and t.is_contiguous() for t in saved])


def graph_is_kept() -> bool:
    """Whether this backward may run again over the same saved tensors: with retain_graph, and while torch.compile
    traces.

    A captured graph keeps the flag of its capture: to replay a backward twice per forward, capture it with
    retain_graph.
    """
    return torch.compiler.is_compiling() or keeps_graph()
