"""What every op file uses: operator registration, input checks, row layout, the reference as a backward.

An operator is declared once with `define` (torch.library: opaque to torch.compile, with a fake). On a GPU it runs the
launcher; on the CPU it runs the reference, or the launcher when kernels are interpreted. In plain eager code on a GPU
the dispatcher would only pass the call on (2 us on the main thread, twice that in a backward), so it is left out.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NoReturn

import torch
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import unwrap_if_dead as _unwrap_if_dead
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from .. import registry
from . import launch as _launch
from .launch import LaunchFailed, launch  # noqa: F401  op files take `launch` from here
from .replay import MISSED, NO_TENSORS, are_plain, replay
from .triton_import import INTERPRET

__all__ = [
    *(
        "Function",
        "define",
        "launch",
        "check",
        "check_tensors",
        "check_numbers",
        "check_floats",
        "check_flags",
        "check_ignore_index",
        "autocast_dtype",
        "cdiv",
        "dense",
        "empty_like",
        "no_weight",
        "remembered",
        "rows_of",
        "row_major",
    ),
    *("reference_grads", "is_interpreted"),
]

_library = torch.library.Library("liger_hw", "DEF")
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
launchers: dict[str, Callable[..., Any]] = {}
"""Operator name -> launcher, so that the ahead-of-time compiler can run it without the device."""


def define(
    schema: str,
    *,
    launcher: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any] | tuple[str, ...] | None = None,
    recorded: bool = True,
) -> Any:
    """Register an operator `liger_hw::<name>` and return what op files call: the operator, or in eager its launcher.

    schema: torch.library schema without the namespace, for example `"f(Tensor x, float eps) -> Tensor"`
    launcher: runs the Triton kernels, and does the same for all arguments of one layout (`replay.py`)
    reference: the same results in plain torch
    fake: empty results of the same shapes, for torch.compile. A tuple names, for each result, the argument whose shape and
    dtype it has (an argument that is None gives an empty tensor, which stands for no gradient); None derives it by calling
    the reference on fake tensors, which suits a reference that takes no gradient itself.
    recorded: False for a launcher that never only allocates and launches (`replay.repeated`)

    All three functions take the schema's arguments by position. None may return one of its inputs.
    """
    name = schema.split("(", 1)[0].strip()
    on_gpu = _with_fallback(launcher)
    is_compiling = torch.compiler.is_compiling
    launchers[name] = on_gpu
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CUDA", "XPU"):
        _library.impl(name, on_gpu, key)
    _library.impl(name, on_gpu if INTERPRET else reference, "CPU")
    if fake is None:
        fake = _fake_of(reference)
    elif isinstance(fake, tuple):
        fake = _fake_like(fake, getattr(torch.ops.liger_hw, name).default._schema)
    torch.library.register_fake(f"liger_hw::{name}", fake, lib=_library)
    overload = getattr(torch.ops.liger_hw, name).default

    def call(*args: Any) -> Any:
        if not (
            torch.is_grad_enabled()
            or is_compiling()
            or _len_torch_dispatch_stack()
            or _are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or _profiler_enabled()
            or _get_tracing_state() is not None
        ):  # nobody traces, profiles, transforms or differentiates: the dispatcher would only pass this on
            try:
                result = replay(name, launcher, args) if recorded else MISSED
                if result is not MISSED:
                    return result
                if are_plain(args):
                    return launcher(*args)  # `on_gpu`, without its frame where nothing fails
            except LaunchFailed as failure:
                _set_aside(failure)
                return on_gpu(*args)
        elif _is_transformed():
            _refuse_transforms(f"liger_hw::{name}")
        elif forward_ad._current_level >= 0:
            _refuse_tangents(name, args)
        return overload(*args)

    call.__name__ = name
    call.overload = overload
    return call


def _fake_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Empty results of the shapes and dtypes that the reference gives."""

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
    """An operator without a forward-mode derivative would drop a tangent in silence: a derivative of zero."""
    given = (t for arg in args for t in (arg if isinstance(arg, (tuple, list)) else (arg,)))
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in given):
        raise NotImplementedError(
            f"liger_hw::{name} has no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad); "
            "take the gradient backwards, or use the unpatched model for it"
        )


def _is_transformed() -> bool:
    return _are_functorch_transforms_active()


_is_transformed._dynamo_marked_constant = (
    True  # as torch.compiler.assume_constant_result, which would import torch._dynamo
)


def _refuse_transforms(what: str) -> NoReturn:
    """torch says that a Function has no `setup_context`; traced by torch.compile, it takes `forward` for a plain function and
    gives a gradient of zero (pytorch issue 193279). So it does of an operator that a loss calls without its Function, as where
    vmap's tensors do not say that a gradient is wanted outside it. Where none is, vmap's fallback crashed in torch 2.13: over
    torch.autograd.grad of a loss, by a segmentation fault under pytest."""
    raise RuntimeError(
        f"{what}: liger_hw's ops take no transform of torch.func (functorch: vmap, grad, jvp, jacrev, hessian); "
        "call backward() or torch.autograd.grad (is_grads_batched=True batches gradients), transform the op's "
        "`reference` (liger_hw.registry.get_op), or use the unpatched model for it"
    )


def _with_fallback(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """When a configuration fails to compile or launch, set it aside and let the next layer answer."""

    def run(*args: Any) -> Any:
        while True:
            try:
                return launcher(*args)
            except LaunchFailed as failure:
                _set_aside(failure)

    return run


def _set_aside(failure: LaunchFailed) -> None:
    """Set a failed configuration aside; raises its cause where no other layer can answer."""
    if not registry.quarantine(failure.plan, failure.cause):
        raise failure.cause from None


class Function(torch.autograd.Function):
    """An autograd Function with forward(ctx, ...), whose `apply` costs less than torch's own; refuses torch.func.

    torch asks every argument whether it is a tensor, which for a number or a name takes long.
    """

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        if _are_functorch_transforms_active():
            _refuse_transforms(cls.__name__)
        if kwargs:
            return super().apply(*args, **kwargs)
        args = [a if type(a) in NO_TENSORS or not isinstance(a, torch.Tensor) else _unwrap_if_dead(a) for a in args]
        return super(torch.autograd.Function, cls).apply(*args)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a Function's backward that has no derivative of its own: create_graph=True raises, always.

    torch's `once_differentiable` alone raises only where the incoming gradient has a graph, and is silently wrong where
    it has none (`loss.sum()`).
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():
            return once(ctx, *grads)
        raise RuntimeError(
            f"{backward.__qualname__.split('.')[0]}: liger_hw's ops have no second derivative; "
            "call backward without create_graph=True, or use the unpatched model for it"
        )

    return checked


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter in this process."""
    return _launch.INTERPRET


def check(condition: bool, op: str, message: str) -> None:
    """Raise `ValueError` that starts with the op's name unless `condition` holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def check_tensors(op: str, optional: tuple[str, ...] = (), **tensors: torch.Tensor | None) -> None:
    """Raise unless the given tensors (None only where `optional` names it) are floating, on one device, and of a dtype its kernels take.

    `TypeError` for something that is no tensor, `ValueError` otherwise.
    """
    first = shared = None
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
        dtype, device = tensor.dtype, tensor.device
        if dtype not in _DTYPES and not (dtype is torch.float64 and device.type == "cpu"):
            raise ValueError(f"{op}: {name} must be float32, float16 or bfloat16, got {dtype}")
        if first is None:
            first, shared = name, device
        elif device != shared:
            raise ValueError(f"{op}: {name} is on {device} but {first} is on {shared}; move them to one device")


def check_numbers(op: str, **values: float) -> None:
    """Raise `TypeError` unless every value is an int or a float."""
    for name, value in values.items():
        if type(value) is not float and not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def check_floats(op: str, **values: Any) -> None:
    """Raise `TypeError` unless every value is a number to `float()`, a tensor of one element too; text is none."""
    for name, value in values.items():
        if type(value) is not float and (isinstance(value, (str, bytes)) or not hasattr(value, "__float__")):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def check_flags(op: str, **values: Any) -> None:
    """Raise `TypeError` unless every value is True or False (1, 0 and None do as well; text would count as True)."""
    for name, value in values.items():
        if value is not None and not isinstance(value, int):
            raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def check_ignore_index(op: str, ignore_index: Any) -> None:
    """Raise `ValueError` unless it is an int; a number that is no label stands for none."""
    if type(ignore_index) is not int:
        check(False, op, f"ignore_index must be an int, got {ignore_index!r}")


def remembered(misfit: Callable[..., str]) -> Callable[..., str]:
    """`misfit`, a function of shapes and options that says what is wrong with them, or "": in eager code its answers are
    kept. It must not look at tensors."""
    known = functools.lru_cache(maxsize=1024, typed=True)(misfit)

    def ask(*told: Any) -> str:
        if torch.compiler.is_compiling():
            return misfit(*told)
        try:
            return known(*told)
        except TypeError:  # what cannot be hashed, as symbolic sizes
            return misfit(*told)

    return ask


def row_major(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when its rows are evenly spaced with contiguous elements, else a contiguous copy."""
    if x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]):
        return x
    return x.contiguous()


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype autocast asks for on a device type, or None where it is off (or, for "meta", unknown)."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def dense(t: torch.Tensor | None) -> torch.Tensor | None:
    """A contiguous `t`, for weights and other small inputs; None stays None."""
    return t if t is None or t.is_contiguous() else t.contiguous()


def rows_of(x: torch.Tensor) -> tuple[int, int, int]:
    """(n_rows, n_cols, elements from one row to the next) of a `row_major` tensor; n_cols is the last dimension."""
    shape = x.shape
    n_cols = shape[-1]
    if len(shape) == 2:
        return shape[0] if n_cols else 0, n_cols, x.stride(0)
    return x.numel() // n_cols if n_cols else 0, n_cols, n_cols


def empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous uninitialised tensor of x's shape; the cheapest call that makes one (1.6 us against 4 us)."""
    if x.dtype is dtype and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def no_weight(x: torch.Tensor) -> torch.Tensor:
    """Stands for the gradient of an absent weight: an operator may not return None."""
    return x.new_empty(0)


def reference_grads(
    function: Callable[..., Any], inputs: tuple[torch.Tensor | None, ...], grads: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `function(*inputs)` with respect to each input, by autograd: a backward for the CPU path.

    `function` returns one tensor or a tuple, matched with `grads` (None for an output without gradient).
    """
    with torch.enable_grad():
        leaves = tuple(None if t is None else t.detach().requires_grad_() for t in inputs)
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None]
        wanted = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return tuple(None if t is None else next(found) for t in leaves)
