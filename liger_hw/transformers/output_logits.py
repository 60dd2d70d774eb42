"""`OutputLogits`: the logits in a patched model's outputs, a `torch.Tensor` subclass that computes them when read.

Inside the model's forward the logits are `DeferredLogits` (deferred.py). In the outputs they are an `OutputLogits`,
which has their shape, dtype, device and autograd node, but no memory.

A call from Python (`__torch_function__`) is recorded if `DeferredLogits` records it; else it gets the plain tensor of
computed logits. C++ code (a collective, an `autograd.Function`, TorchScript) gets the OutputLogits, which is computed
when an operator reads it (`__torch_dispatch__`). The gradient is computed in a separate graph and passed on by
`OutputLogitsFunction`, so hooks on the hidden states and weights run once.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves, tree_map_only

from ..private import make_data_ptr_raise, without_torch_function
from ..runtime.operator import first_order
from .deferred import FUNCTIONS, DeferredLogits, GradientWouldBeLost, NotRecorded, inside_a_function, loss_arguments


class OutputLogitsFunction(torch.autograd.Function):
    """Makes an OutputLogits, and passes its gradient on to hidden states and weights."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, *inputs: torch.Tensor | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.logits = logits
        shape, dtype, device = logits.shape, logits.dtype, logits.device
        stand_in = torch.Tensor._make_wrapper_subclass(OutputLogits, shape, dtype=dtype, device=device)
        make_data_ptr_raise(stand_in)  # like FakeTensor: asking for its address must raise, not return 0
        stand_in._logits = logits
        return stand_in

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:-1]  # without `logits` and the last input, the parent
        grads: list[torch.Tensor | None] = [None] * len(needed)
        if grad is not None:
            computed = ctx.logits.materialise()
            places = [place for place, is_needed in enumerate(needed) if is_needed]
            leaves = [ctx.logits.leaves[place] for place in places]
            gradients = torch.autograd.grad(computed, leaves, grad, retain_graph=True, allow_unused=True)
            for place, gradient in zip(places, gradients):
                grads[place] = gradient
        return None, *grads, None


class _WithGradientTo(torch.autograd.Function):
    """`value`, with the gradient going to `target`. The nodes of `others` run in backward too, with None gradients."""

    @staticmethod
    def forward(target: torch.Tensor, value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return value.detach()  # a new object, not the argument

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:  # separate, as torch.func.jvp needs
        ctx.n_others = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, *[None] * ctx.n_others


def output_logits(logits: DeferredLogits, parent: "OutputLogits | None" = None) -> Any:
    """The OutputLogits of deferred logits, for code outside the model's forward.

    parent: the operand of a recorded operation, whose node then runs in backward too, with a None gradient

    Returns the deferred logits themselves if hidden states or weights are not plain tensors (DTensors), and the
    computed logits if the head is not fused.
    """
    if not logits.is_fused:
        return logits.materialise()
    computed_from = logits.computed_from()
    if not all(type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ for t in computed_from):
        logits.end_forward()
        return logits
    if parent is None:
        logits = logits.detached_copy()
    logits.end_forward()
    result = OutputLogitsFunction.apply(logits, *computed_from, parent)
    with without_torch_function():
        result._made_by, result._parent, result._derived = result.grad_fn, parent, []
        result._losses = logits._head.loss_nodes if parent is None else []
    if parent is not None:
        parent._derived.append(weakref.ref(result))
    return result


class OutputLogits(torch.Tensor):
    """Logits [..., vocab] that are computed when they are read; made by `output_logits`.

    When a parent's logits are computed, derived ones are computed from the same plain tensor. A later change in
    place then changes exactly the tensors that share its memory.
    """

    _logits: DeferredLogits
    _parent: "OutputLogits | None" = None
    _derived: "list[weakref.ref[OutputLogits]]"
    _made_by: Any = None
    _losses: "list[weakref.ref[Any]]"
    _has_hook = False
    _read_from: Any = None
    _plain: torch.Tensor | None = None
    _plain_made_by: Any = None

    @property
    def is_deferred(self) -> bool:
        return self._plain is None and self._logits.is_deferred and (self._parent is None or self._parent.is_deferred)

    @torch.compiler.disable
    def materialise(self) -> torch.Tensor:
        """The logits as a plain tensor, computed once; raises as `DeferredLogits.materialise` does."""
        if torch.is_inference_mode_enabled():  # training may use the computed logits later
            with torch.inference_mode(False):
                return self.materialise()
        needs_grad, is_as_made = self._place()
        is_moved = self._plain is not None and self._read_from is not self._graph_node()
        if self._is_changed() and (is_moved or inside_a_function()):
            raise GradientWouldBeLost(_CHANGED)
        if self._plain is None:
            if self._parent is not None and is_as_made:
                source = self._parent.materialise()
                with self._logits._surroundings.restored(), torch.set_grad_enabled(needs_grad):
                    self._plain = self._logits._replay(source)
                self._read_from, self._plain_made_by = self._graph_node(), self._plain.grad_fn
            else:
                computed = self._logits.materialise().detach()
                self._read(computed, needs_grad)
            for reference in self._derived:
                derived = reference()
                if derived is not None:
                    derived.materialise()
        elif is_moved:
            self._read(self._plain.detach(), needs_grad)  # an autograd.Function changed or returned it since
        return self._plain

    def _read(self, computed: torch.Tensor, needs_grad: bool) -> None:
        self._read_from = self._graph_node()
        with without_torch_function(), torch.set_grad_enabled(needs_grad):
            self._plain = _WithGradientTo.apply(self, computed)
        self._plain_made_by = self._plain.grad_fn

    def _graph_node(self) -> Any:
        with without_torch_function():
            return self.grad_fn

    @torch.compiler.disable
    def cross_entropy(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.nn.functional.cross_entropy` of these logits, from the hidden states if the fused loss supports the
        arguments and no hook needs the logits' gradient."""
        target, options, is_known = loss_arguments(*args, **kwargs)
        chain = self._chain()
        is_watched = any(logits._has_hook for logits in chain)
        made_by = chain[-1]._made_by
        needed = None if made_by is None else made_by.needs_input_grad[1:-1]
        # inside PEFT's `disable_adapter` heads are frozen: a fused loss would omit their gradients
        is_as_made = needed in (None, tuple(t.requires_grad for t in self._logits.computed_from()))
        is_as_made = is_as_made and self._logits.has_same_weights()
        head, is_known = self._logits._head, is_known and self._logits.is_rows_for(target)
        if is_known and self.is_deferred and is_as_made and not is_watched:
            needs_grad, _ = self._place()
            with torch.set_grad_enabled(torch.is_grad_enabled() and needs_grad):
                self._logits.check_unchanged()
                loss = head.fused_loss(self._logits, target, options)
                if loss is not None:
                    for logits in chain[:-1] if loss.requires_grad else ():
                        logits._losses.append(head.loss_nodes[-1])
                    is_moved = not all(logits._place()[1] for logits in chain)
                    return _WithGradientTo.apply(loss, loss, self) if is_moved else loss
        if is_known and head.extras:
            return head.loss_of_computed(self._logits, self.materialise(), target, options)
        return F.cross_entropy(self.materialise(), *args, **kwargs)

    def _chain(self) -> "list[OutputLogits]":
        return [self] if self._parent is None else [self, *self._parent._chain()]

    def _place(self) -> tuple[bool, bool]:
        """(whether the tensor requires a gradient, whether its autograd node is the original one)

        A Function that returns the logits, as DDP's does, gives them another node.
        """
        with without_torch_function():
            return self.requires_grad, self.grad_fn is self._made_by

    def _watch(self, hook: Any = None) -> None:
        """Prepare for a hook or `retain_grad`: backward of a fused loss, which would not run the hook, raises."""
        self._has_hook = True
        if self._parent is not None:
            self.materialise()
        if not (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith(_ENGINES):
            for node in self._fused_losses():
                node.register_prehook(_refuse_hooked)

    def _fused_losses(self) -> set[Any]:
        """The autograd nodes of fused losses, whose gradient does not pass through these logits."""
        return {node for reference in self._losses if (node := reference()) is not None}

    def _is_changed(self) -> bool:
        """Whether the plain tensor, or one that shares its memory, was changed in place outside of a Function."""
        return self._plain is not None and self._plain.grad_fn is not self._plain_made_by

    def _shares_memory(self) -> bool:
        """Whether the plain tensor shares its memory with a parent's or with derived logits."""
        others = [*self._chain()[1:], *(reference() for reference in self._derived)]
        storages = [t._plain.untyped_storage()._cdata for t in others if t is not None and t._plain is not None]
        return self._plain.untyped_storage()._cdata in storages

    def _in_graph(self) -> torch.Tensor:
        """The tensor with the logits' autograd node: the plain one if it was changed in place or is computed from a
        parent's, else this one."""
        if self._plain is None or (self._parent is not None and not self._place()[1]):
            return self
        return self if self._parent is None and not self._is_changed() else self._plain

    @torch.compiler.disable
    def _recorded(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of an operation on deferred logits; None if it is not recorded."""
        if func in _CLONES:
            result, parent = self._logits, None
        else:
            name, signature = _RECORDED[func]
            self._logits._only_records = True
            try:
                signature.bind(self._logits, *args, **kwargs)
                result, parent = getattr(self._logits, name)(*args, **kwargs), self
            except (TypeError, NotRecorded):  # TypeError: an argument that the recording method does not have
                return None
            finally:
                self._logits._only_records = False
        return output_logits(result, parent)

    def __repr__(self) -> str:
        return repr(self._logits)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if func in _KNOWN:
            if first._plain is not None and func is not torch.Tensor.__hash__:  # unsqueeze_ may have changed its shape
                return func(*_computed(args), **_computed(kwargs))
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _OF_GRAPH:
            if func in _WATCHING:
                first._watch(*args[1:], **kwargs)
            if func is torch.autograd.grad:
                outputs, inputs = inspect.signature(func).bind(*args, **kwargs).args[:2]
                tree_map_only(OutputLogits, lambda logits: _refuse_fused(logits, outputs), inputs)
            if func is torch.Tensor.retain_grad and first.requires_grad:
                first.materialise().retain_grad()  # the plain tensor keeps it when it is changed in place
            args, kwargs = tree_map_only(OutputLogits, OutputLogits._in_graph, (args, kwargs))
            with without_torch_function():
                result = func(*args, **kwargs)
            if func == _GRAD and not first._has_hook and first._fused_losses():
                if result is not None:  # from backward(inputs=[logits])
                    raise RuntimeError(_MISSED + _SKIP)
                warnings.warn(_MISSED + _SKIP, stacklevel=2)
            return result
        if isinstance(first, OutputLogits):
            rest, named = _computed(args[1:]), {k: _computed(v) for k, v in kwargs.items() if v is not first}
            if func is F.cross_entropy:
                return first.cross_entropy(*rest, **named)
            # a clone without a gradient is computed separately: changes in place must not reach the other
            is_clone = func in _CLONES and not named and not torch.is_grad_enabled()
            if first.is_deferred and (func in _RECORDED or is_clone):
                result = first._recorded(func, rest, named)
                if result is not None:
                    return result
        plain = first.materialise() if isinstance(first, OutputLogits) else None
        version = None if plain is None or plain.is_inference() else plain._version
        result = func(*_computed(args), **_computed(kwargs))
        if version is not None and plain._version != version and inside_a_function() and first._shares_memory():
            raise GradientWouldBeLost(_SHARED)
        return first if plain is not None and result is plain and inside_a_function() else result

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def values(stand_in: OutputLogits) -> torch.Tensor:
            with torch.overrides.enable_reentrant_dispatch():
                if torch.is_grad_enabled() and stand_in._is_changed():
                    raise GradientWouldBeLost(_CHANGED)
                plain = stand_in._logits.materialise() if stand_in._plain is None else stand_in._plain
                return plain.detach()  # this runs below autograd

        args, kwargs = tree_map_only(OutputLogits, values, (args, kwargs or {}))
        return func(*args, **kwargs)


_ENGINES = ("torch.distributed.", "deepspeed.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
"""Packages whose hooks on outputs only detect the start of backward. They hook the loss too."""

_MISSED = "liger_hw: a loss of these logits came from the hidden states; its gradient does not pass through the logits"
_SKIP = "; call the model with skip_logits=False, or, before a loss of your own, retain_grad() on the logits"

_CLONE = "; call the model with skip_logits=False, or give it a clone"
_SHARED = "liger_hw: an autograd.Function changes logits in place that share memory with other views" + _CLONE
_CHANGED = "liger_hw: an autograd.Function, or other C++ code, takes logits that were changed in place" + _CLONE


def _refuse_hooked(gradients: Any) -> None:
    raise RuntimeError(f"{_MISSED}, and a hook or retain_grad() on them needs it{_SKIP}")


def _refuse_fused(logits: OutputLogits, outputs: Any) -> None:
    """Before `torch.autograd.grad` with respect to logits: raise if a fused loss is in the graph of `outputs`."""
    losses, visited = logits._fused_losses(), set()
    roots = tree_leaves(outputs, is_leaf=lambda t: isinstance(t, GradientEdge))
    nodes = [t.node if isinstance(t, GradientEdge) else t.grad_fn for t in roots]
    while losses and nodes:
        node = nodes.pop()
        if node in losses:
            raise RuntimeError(_MISSED + _SKIP)
        if node is not None and node not in visited:
            visited.add(node)
            nodes += [following for following, _ in node.next_functions]


def _computed(value: Any) -> Any:
    """`value` with the computed logits in place of these classes, also inside tuples, lists and dicts."""
    return tree_map_only((OutputLogits, DeferredLogits), lambda logits: logits.materialise(), value)


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names}


_KNOWN = {
    *_getters("dtype", "device", "shape", "ndim", "layout", "itemsize", "nbytes"),
    *_getters("is_cpu", "is_cuda", "is_xpu", "is_meta", "is_mkldnn", "is_mps", "is_nested", "is_quantized"),
    *_getters("is_sparse", "is_sparse_csr", "_version", "_base"),
    *_methods("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__", "__hash__"),
    *_methods("is_floating_point", "is_complex", "is_inference"),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
"""Attributes and functions whose results are known without the logits."""

_GRAD = torch.Tensor.grad.__get__
_WATCHING = _methods("register_hook", "retain_grad")
_OF_GRAPH = {
    *_WATCHING,
    *_getters("requires_grad", "grad_fn", "is_leaf", "output_nr", "grad", "retains_grad", "_backward_hooks"),
    *(torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward),
}
"""Attributes and functions of the autograd graph, which need only the OutputLogits' node."""

_CLONES = {torch.Tensor.clone, torch.clone}
"""Recorded only under no_grad: DDP's Function clones every output."""
_METHODS = ("float", "to", "contiguous", "view", "__getitem__", "__mul__", "__rmul__", "__truediv__")
_RECORDED = {
    getattr(owner, name): (name, inspect.signature(getattr(DeferredLogits, name)))
    for owner, names in ((torch.Tensor, _METHODS + FUNCTIONS), (torch, FUNCTIONS))
    for name in names
}
"""torch's function -> (method of `DeferredLogits` that records it, the method's signature)"""
