"""The logits in the outputs of a patched model that has not computed them: a `torch.Tensor` for whatever takes tensors.

Inside the model's forward the logits are `DeferredLogits` (deferred.py). What leaves it is an `OutputLogits`: of the
shape, strides, dtype and device that the logits will have, but without memory. Autograd sees an ordinary tensor, the
output of `OutputLogitsFunction`, and records what is done to it, hooks, views and changes in place included.

Below autograd, `__torch_dispatch__` answers a view, a copy or a product with a number by another such tensor. Any other
operator computes the logits, with everything derived from them so far, and runs on the values. The values have a graph
of their own, in which `OutputLogitsFunction` finds the gradients of hidden states and weights.

`torch.nn.functional.cross_entropy` of them is fused as the model's own loss is, where nothing but such operators lies
between and no hook waits for their gradient. Both losses have the logits beside them in the graph (`_BesideLogits`).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from .deferred import DeferredLogits, FusedLoss, Record, ValuesNeeded

aten = torch.ops.aten
_native = torch._C.DisableTorchFunctionSubclass


class Origin:
    """What the logits in a model's outputs are computed from, and every tensor that is derived from them.

    logits: as the model's forward left them
    members: weak references to the tensors that stand for them and for what was derived from them, in that order: all
    of them are computed at once, before a program can change one in place. Some of them share memory and some do not.
    """

    def __init__(self, logits: DeferredLogits) -> None:
        self.logits = logits
        self.members: list[weakref.ref[OutputLogits]] = []
        self.leaves: list[torch.Tensor] = []
        self.values: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        """The logits [..., vocab] with a graph that begins at `leaves`, computed once."""
        if self.values is None:
            with torch.inference_mode(False):
                self.leaves, self.values = self._computed_on(torch.Tensor.detach)
                for member in self.members:
                    logits = member()
                    if logits is not None:
                        logits.compute()
        return self.values

    def computed_again(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(where their graph begins, logits). While backward itself is recorded they lead on to the hidden states."""
        # A view lets a backward stop before the hooks of what is viewed.
        return self._computed_on((lambda t: t.view_as(t)) if torch.is_grad_enabled() else torch.Tensor.detach)

    def _computed_on(self, copied: Callable) -> tuple[list[torch.Tensor], torch.Tensor]:
        self.logits.check_unchanged()
        leaves = [copied(t).requires_grad_(t.requires_grad) for t in self.logits.computed_from()]
        return leaves, self.logits.computed_on(leaves)

    def gradients(self, grad: torch.Tensor, needed: tuple[bool, ...]) -> list[torch.Tensor | None]:
        """Those of `computed_from`, where needed, for a gradient of the logits."""
        is_recorded = torch.is_grad_enabled()
        leaves, values = self.computed_again() if is_recorded else (None, self.compute())
        inputs = [leaf for leaf, is_needed in zip(leaves or self.leaves, needed) if is_needed]
        options = {"retain_graph": True, "create_graph": is_recorded, "allow_unused": True}
        gradients = iter(torch.autograd.grad(values, inputs, grad, **options))
        return [next(gradients) if is_needed else None for is_needed in needed]


class OutputLogitsFunction(torch.autograd.Function):
    """Makes the tensor that stands for the logits, and passes its gradient to what the logits are computed from."""

    @staticmethod
    def forward(ctx: Any, origin: Origin, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.origin = origin
        like = torch.empty(origin.logits.shape, dtype=origin.logits.dtype, device="meta")
        return _stand_in(origin, like, origin.logits.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        gradients = [None] * len(needed) if grad is None else ctx.origin.gradients(grad, needed)
        return None, *gradients


class _BesideLogits(torch.autograd.Function):
    """A loss that was computed from hidden states and weight, with the tensor that stands for its logits beside it.

    In backward, the gradient of the fused loss goes to the logits where somebody waits for theirs; else nothing does.

    The hidden states are saved with it: they live as long as autograd keeps the graph.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, logits: "OutputLogits", fused: list[FusedLoss]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.logits, ctx.fused = loss, logits, fused
        ctx.save_for_backward(logits._origin.logits.computed_from()[0])
        logits._origin.logits.saved_in.append(weakref.ref(ctx))
        return loss.data  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        through_logits = grad is not None and ctx.logits.is_watched()
        gradient = None
        if through_logits:
            ctx.logits.compute()  # before their hidden states are let go
        for fused in ctx.fused:
            fused.is_silent[0] = through_logits
            if through_logits:
                part = _gradient_of_logits(ctx.loss, ctx.logits, fused, grad)
                gradient = part if gradient is None or part is None else gradient + part
        return grad, gradient, None


def _gradient_of_logits(
    loss: torch.Tensor, logits: "OutputLogits", fused: FusedLoss, grad: torch.Tensor
) -> torch.Tensor | None:
    """The share that a fused loss has in the gradient of logits, where `loss` is made of it and has gradient `grad`."""
    options = {"retain_graph": True, "create_graph": torch.is_grad_enabled()}
    if fused.loss is not loss:
        (grad,) = torch.autograd.grad(loss, fused.loss, grad, allow_unused=True, **options)
        if grad is None:
            return None
    with torch.enable_grad():
        values = logits.computed_again()
        again = fused.of_logits(values)
    (gradient,) = torch.autograd.grad(again, values, grad.to(again.dtype), **options)
    return gradient


def beside_logits(loss: torch.Tensor, logits: "OutputLogits", fused: list[FusedLoss]) -> torch.Tensor:
    """`loss`, which is made of fused losses of these logits."""
    return _BesideLogits.apply(loss, logits, fused) if loss.requires_grad and logits.requires_grad else loss


def _stand_in(origin: Origin, like: torch.Tensor, device: torch.device, step: "Step | None" = None) -> "OutputLogits":
    """A tensor of the sizes, strides and dtype of `like`."""
    layout = {"strides": like.stride(), "storage_offset": like.storage_offset()}
    made = torch.Tensor._make_wrapper_subclass(OutputLogits, like.shape, **layout, dtype=like.dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # as FakeTensor: who asks for its memory must not get address 0
    made._origin, made._step = origin, step
    origin.members.append(weakref.ref(made))
    return made


def output_logits(logits: DeferredLogits) -> Any:
    """The tensor that stands for deferred logits outside the model's forward.

    Where hidden states or weights are no plain tensors (DTensors) it is the deferred logits themselves, and of a head
    that is not fused the computed ones.
    """
    if not logits.is_fused:
        return logits.materialise()
    logits.leave()
    computed_from = logits.computed_from()
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in computed_from):
        return logits
    made = OutputLogitsFunction.apply(Origin(logits), *computed_from)
    made._made_by = made.grad_fn
    return made


class Step(NamedTuple):
    """How one `OutputLogits` is derived from another: `func(source, *args, **kwargs)`."""

    source: "OutputLogits"
    func: Callable
    args: tuple
    kwargs: dict


class OutputLogits(torch.Tensor):
    """Logits [..., vocab] that are computed when they are read, or what is derived from them; see the module."""

    _origin: Origin
    _step: Step | None
    _made_by: Any = None
    _is_watched = False
    _values: torch.Tensor | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether they have not been computed yet."""
        return self._origin.values is None

    @torch.compiler.disable
    def materialise(self) -> torch.Tensor:
        """The logits as a plain tensor, a view of this one with its gradient; the values are computed once.

        Raises `RuntimeError` once backward has released what they would be computed from, or when that has changed.
        """
        with _native():
            return aten.alias.default(self)

    def compute(self) -> torch.Tensor:
        """The values without a gradient, for an operator below autograd."""
        if self._values is None:
            root = self._origin.compute()
            if self._values is None:  # else they were computed with the others
                self._values = root.detach() if self._step is None else self._carried_out(self._step.source.compute())
        return self._values

    def _carried_out(self, source: torch.Tensor) -> torch.Tensor:
        return self._step.func(source, *self._step.args, **self._step.kwargs)

    def computed_again(self) -> torch.Tensor:
        """The values as they were before any change in place, with a graph of their own."""
        if self._step is not None:
            return self._carried_out(self._step.source.computed_again())
        values = self._origin.computed_again()[1]
        return values if values.requires_grad else values.requires_grad_()

    def is_watched(self) -> bool:
        """Whether somebody waits for the gradient of these logits, or of those that they are derived from."""
        return self._is_watched or (self._step is not None and self._step.source.is_watched())

    def _derive(self, func: Callable, args: tuple, kwargs: dict) -> "OutputLogits | None":
        """What an operator of `_STEPS` makes of them, deferred like them, or None where only the values tell."""
        on_meta = args
        if func is aten.index.Tensor:
            indices = [None if index is None else index.clone() for index in _without_masks(args[0])]
            args, on_meta = (indices,), ([None if index is None else index.to("meta") for index in indices],)
        elif any(isinstance(value, torch.Tensor) for value in args):
            return None
        device = kwargs.get("device") or self.device
        named = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        like = func(_on_meta(self), *on_meta, **named)
        return _stand_in(self._origin, like, device, Step(self, func, args, kwargs))

    # -- the fused loss ----------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def cross_entropy(
        self,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """`torch.nn.functional.cross_entropy` of these logits, arguments as there."""
        options = {
            "weight": weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        if self.is_deferred and size_average is None and reduce is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
                record = self._record()
                if record is not None and record.is_rows_for(target):
                    self._origin.logits.check_unchanged()
                    fused = record._head.fused_loss(record, target, options)
                    if fused is not None:
                        return beside_logits(fused.loss, self, [fused])
        return F.cross_entropy(self.materialise(), target, size_average=size_average, reduce=reduce, **options)

    def _record(self) -> Record | None:
        """What the fused loss takes: hidden states as these logits are sliced, and what is done to the product.

        None where something lies between that it cannot take along, an autograd.Function say, or a hook.
        """
        with _native():
            if self._is_watched or self.grad_fn is not self._made_by or self.requires_grad is not bool(self._made_by):
                return None
        if self._step is None:
            return self._origin.logits.record()
        record = self._step.source._record()
        try:
            return None if record is None else _STEPS[self._step.func](record, *self._step.args, **self._step.kwargs)
        except ValuesNeeded:
            return None

    # -- what torch calls --------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if not self.is_deferred:
            return repr(self.materialise())
        return f"OutputLogits({tuple(self.shape)}, {self.dtype}, deferred)"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if func is F.cross_entropy and isinstance(first, OutputLogits):
            rest, named = _computed(args[1:]), {k: _computed(v) for k, v in kwargs.items() if v is not first}
            return first.cross_entropy(*rest, **named)
        if func == _ASSIGN_DATA and isinstance(first, OutputLogits):
            first.compute()
            first._values = _computed(args[1]).detach()
            return None
        if func in _OF_GRAPH:
            _note_watched(func, args, kwargs)
            with _native():
                return func(*args, **kwargs)
        if func in _RECORDED and isinstance(first, OutputLogits) and not torch.compiler.is_compiling():
            rest, named = _computed(args[1:]), _computed({k: v for k, v in kwargs.items() if v is not first})
            with _native():
                result = func(first, *rest, **named)
            if isinstance(result, OutputLogits) and result is not first:
                result._made_by = result.grad_fn
            return result
        return func(*_computed(args), **_computed(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _STEPS and isinstance(first, OutputLogits) and first.is_deferred:
            derived = first._derive(func, args[1:], kwargs)
            if derived is not None:
                return derived
        with torch.overrides.enable_reentrant_dispatch():
            values, named = tree_map_only(OutputLogits, OutputLogits.compute, (args, kwargs))
        result = func(*values, **named)
        return first if isinstance(first, OutputLogits) and result is values[0] else result

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """For torch.compile: the tensor that this one is made of."""
        self.compute()
        return ["_values"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> "OutputLogits":
        values = parts["_values"]
        origin = Origin.__new__(Origin)
        origin.members, origin.values = [], values
        made = _stand_in(origin, values, values.device)
        made._values = values
        return made


def _computed(value: Any) -> Any:
    """`value` with every logits inside tuples, lists and dicts computed."""
    return tree_map_only((OutputLogits, DeferredLogits), lambda logits: logits.materialise(), value)


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same layout, that does not need the values."""
    size = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) + 1
    like = torch.empty(max(size, 1), dtype=t.dtype, device="meta")
    return like.as_strided(t.shape, t.stride(), t.storage_offset())


def _without_masks(indices: list) -> Iterator[torch.Tensor | None]:
    """Indices with every mask replaced by the numbers of the elements that it takes."""
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            yield from index.nonzero(as_tuple=True)
        else:
            yield index


def _note_watched(func: Callable, args: tuple, kwargs: dict) -> None:
    """Note which logits somebody waits for the gradient of: by a hook, as `.grad`, or as an input of a backward."""
    if func is torch.Tensor.retain_grad or (func is torch.Tensor.register_hook and not _is_of_engine(args[1])):
        args[0]._is_watched = True
    inputs = args[1] if func is torch.autograd.grad and len(args) > 1 else kwargs.get("inputs")
    for t in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        if isinstance(t, OutputLogits):
            t._is_watched = True


def _is_of_engine(hook: Any) -> bool:
    """Whether a hook is one that FSDP or DeepSpeed puts on every output, to know that backward begins."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(("torch.distributed.", "deepspeed."))


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names}


_ASSIGN_DATA = torch.Tensor.data.__set__
_OF_GRAPH = {
    *_getters("dtype", "device", "shape", "ndim", "layout", "itemsize", "nbytes"),
    *_getters("is_cpu", "is_cuda", "is_xpu", "is_meta", "is_mkldnn", "is_mps", "is_nested", "is_quantized"),
    *_getters("is_sparse", "is_sparse_csr", "_version", "_base"),
    *_methods("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__", "__hash__"),
    *_methods("is_floating_point", "is_complex", "is_inference", "stride", "storage_offset", "is_contiguous"),
    *_methods("_is_view"),
    *_getters("requires_grad", "grad_fn", "is_leaf", "output_nr", "grad", "retains_grad", "_backward_hooks"),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *_methods("requires_grad_", "detach_", "backward", "register_hook", "retain_grad"),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.autograd.grad, torch.autograd.backward),
}
"""What concerns the tensor itself, as autograd knows it, and not the values."""

_RECORDED = {
    *_methods("float", "to", "type", "half", "bfloat16", "double", "contiguous", "view", "view_as", "reshape"),
    *_methods("flatten", "__getitem__", "__mul__", "__rmul__", "__truediv__", "clone", "detach"),
    *_methods("tanh", "mul", "multiply", "div", "divide", "true_divide", "narrow", "select"),
    *(torch.tanh, torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide, torch.reshape, torch.flatten),
    *(torch.clone, torch.detach, torch.narrow, torch.select),
}
"""Functions that torch carries out by the operators of `_STEPS`."""


def _sliced(record: Record, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return record[(slice(None),) * (dim % record.dim()) + (slice(start, end, step),)]


def _cast(record: Record, **kwargs: Any) -> Any:
    changed = {name: value for name, value in kwargs.items() if value is not None and name != "non_blocking"}
    return record.to(**changed)


_STEPS: dict[Any, Callable[..., Record]] = {
    aten.view.default: lambda record, size: record.reshape(*size),
    aten._unsafe_view.default: lambda record, size: record.reshape(*size),
    aten.slice.Tensor: _sliced,
    aten.select.int: lambda record, dim, index: record[(slice(None),) * (dim % record.dim()) + (index,)],
    aten.index.Tensor: lambda record, indices: record[tuple(slice(None) if i is None else i for i in indices)],
    aten._to_copy.default: _cast,
    aten.clone.default: lambda record, **kwargs: record,
    aten.detach.default: lambda record: record,
    aten.mul.Tensor: lambda record, other: record * other,
    aten.div.Tensor: lambda record, other: record / other,
    aten.tanh.default: lambda record: record.tanh(),
}
"""Operators that are carried out once the logits are computed -> what the fused loss makes of them, which raises
`ValuesNeeded` where it takes no such logits."""
