"""`DeferredLogits`: returned by a patched causal LM's output head in training, in place of the logits.

The family's own forward runs on it unchanged. Scaling, tanh softcapping, adding a number to each column of the
vocabulary, casts to fp32, slices and reshapes of the leading dimensions are recorded.
`torch.nn.functional.cross_entropy` then takes hidden states and head weight, so the logits are never computed. Any
other operation computes them (`materialise`): it calls the head, replays the recorded operations, and continues with
plain tensors, as without the patch.

The object is not a tensor, so C++ code cannot take it. `torch.autograd.Function.apply` passes it to `forward`, but
gives it no gradient; so computing the logits there raises `GradientWouldBeLost`. In the model's outputs an
`OutputLogits` (output_logits.py), which is a tensor, takes its place.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from ..private import graph_task, has_forward_gradients, is_functorch_wrapped
from ..recompute import recipes
from ..runtime.checks import autocast_dtype


class GradientWouldBeLost(RuntimeError):
    """Deferred logits are computed inside an autograd.Function's forward, where autograd does not record it."""


class NotRecorded(Exception):
    """An operation cannot be recorded, and these logits may not be computed (`DeferredLogits._only_records`)."""


class Surroundings:
    """Grad mode, autocast and saved-tensor hooks of the head's call, under which the logits are computed later."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.grad = torch.is_grad_enabled()
        self.dtype = autocast_dtype(device_type)
        self.hooks = _hooks_in_force()
        self.tracked = self.grad and (torch.compiler.is_compiling() or has_forward_gradients())

    def restored(self) -> contextlib.ExitStack:
        """Context manager that restores the modes that have changed.

        Newer hooks, such as a non-reentrant checkpoint's around a loss, do not get the tensors that the head
        saves: the head runs only once, so the checkpoint's recomputation would lack these tensors.
        """
        stack = contextlib.ExitStack()
        if torch.is_grad_enabled() != self.grad:
            stack.enter_context(torch.set_grad_enabled(self.grad))
        if autocast_dtype(self.device_type) is not self.dtype:
            stack.enter_context(torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None))
        if _hooks_in_force() != self.hooks:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        return stack


def _state(t: torch.Tensor) -> tuple[torch.Tensor, int | None, int | None]:
    """(tensor, version or None in inference mode, address or None for a subclass). Assigning `.data` changes only the
    address."""
    has_memory = type(t) in (torch.Tensor, torch.nn.Parameter) and not is_functorch_wrapped(t)
    return t, None if t.is_inference() else t._version, t.data_ptr() if has_memory else None


def _hooks_in_force() -> Any:
    return None if torch.compiler.is_compiling() else recipes.innermost_hooks()


def inside_a_function() -> bool:
    """Whether this runs in an autograd.Function, whose results must be tensors to have a gradient."""
    if torch.compiler.is_compiling():
        return False
    if graph_task() != -1:  # in backward; without hooks it is the forward of a checkpoint with use_reentrant=True
        return recipes.innermost_hooks() is None
    # outside inference mode, only a Function's forward disables forward-mode gradients
    return not has_forward_gradients() and not torch.is_inference_mode_enabled()


class DeferredLogits:
    """`head(hidden)` and the operations recorded on it: `y = scale * head(hidden) + added`, or `cap * tanh(y)`.

    head: the OutputHead (loss.py) that runs the real head or the fused loss
    hidden: [..., hidden_size], sliced and reshaped like the logits
    head_input: the argument of the head's call; differs from `hidden` if it is a shard of it
    cap: None: no softcap; added: [vocab] without a gradient; None: zeros
    parent, replay: the DeferredLogits from which this one was derived, and the operation to do on its logits

    Fields have an underscore so that they hide no attribute of tensors. loss.py and output_logits.py read them.
    """

    def __init__(
        self,
        head: Any,
        hidden: torch.Tensor,
        surroundings: Surroundings,
        dtype: torch.dtype,
        *,
        scale: float = 1.0,
        cap: float | None = None,
        added: torch.Tensor | None = None,
        parent: "DeferredLogits | None" = None,
        replay: Callable[[torch.Tensor], torch.Tensor] | None = None,
        head_input: torch.Tensor | None = None,
    ) -> None:
        self._head, self._hidden, self._surroundings = head, hidden, surroundings
        self._head_input = hidden if head_input is None else head_input
        self._scale, self._cap, self._added = scale, cap, added
        self._parent, self._replay = parent, replay
        self._derived: list[Any] = []
        self._logits: torch.Tensor | None = None
        self._state_at_end: list[tuple] | None = None
        self._is_detached = self._only_records = False
        self._leaves: list[torch.Tensor] = []
        self._leading = hidden.shape[:-1]
        self.dtype = dtype
        self.device, self.is_cpu = hidden.device, hidden.is_cpu

    def _derive(
        self,
        replay: Callable[[torch.Tensor], torch.Tensor],
        of_hidden: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        **changed: Any,
    ) -> Any:
        """The deferred result of `replay` on these logits.

        of_hidden: the same operation on hidden states; changed: new dtype, scale, cap and added, if they change
        """
        if not self.is_deferred:
            return replay(self.materialise())
        formula, hidden = {**self._formula(), **changed}, of_hidden(self._hidden)
        derived = DeferredLogits(self._head, hidden, self._surroundings, **formula, parent=self, replay=replay)
        derived._is_detached = self._is_detached
        if not self._is_detached:  # an OutputLogits, whose logits are detached, has a list of its own
            self._derived.append((lambda: derived) if torch.compiler.is_compiling() else weakref.ref(derived))
        return derived

    def _formula(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "scale": self._scale, "cap": self._cap, "added": self._added}

    # -- computing ---------------------------------------------------------------------------------------------------

    @property
    def is_deferred(self) -> bool:
        """Whether neither these logits nor any from which they were derived have been computed."""
        return self._logits is None and (self._parent is None or self._parent.is_deferred)

    def materialise(self) -> torch.Tensor:
        """The logits as a plain tensor [..., vocab_size]; computed once.

        Raises `GradientWouldBeLost` inside an autograd.Function's forward, and `RuntimeError` if weights or hidden
        states have changed after `end_forward`.
        """
        if self._only_records:
            raise NotRecorded
        self._check_gradient()
        if self._surroundings.grad and torch.is_inference_mode_enabled():  # training may read the same tensor later
            with torch.inference_mode(False):
                return self.materialise()
        if self._logits is None:
            if self._parent is None:
                self.check_unchanged()
                if self._is_detached:
                    self._leaves = [t.detach() for t in self.computed_from()]
                    for leaf in self._leaves:  # also of a weight that a program has frozen since the forward
                        leaf.requires_grad = self._surroundings.grad and not leaf.is_inference()
                    self._head.computed = True
                    with self._surroundings.restored():
                        self._logits = F.linear(*self._leaves)
                else:
                    self._logits = self._head.logits(self._head_input, self._surroundings)
            else:
                source = self._parent.materialise()
                if self._logits is None:
                    with self._surroundings.restored():
                        self._logits = self._replay(source)
            # Derived logits are computed now, before a program can change these in place: as without the patch, such a
            # change must reach derived views but not derived copies.
            derived, self._derived = self._derived, []
            for reference in derived:
                if (logits := reference()) is not None:
                    logits.materialise()
        return self._logits

    def end_forward(self) -> None:
        """Note the inputs' state when the model's forward ends, after which a program may change them."""
        root = self._chain()[-1]
        if root._state_at_end is None:
            root._state_at_end = [_state(t) for t in self.computed_from()]

    def detached_copy(self) -> "DeferredLogits":
        """The same logits, computed separately from detached inputs, the `leaves`."""
        *steps, root = self._chain()
        copied = DeferredLogits(root._head, root._hidden, root._surroundings, root.dtype, head_input=root._head_input)
        copied._state_at_end, copied._is_detached = root._state_at_end, True
        for step in reversed(steps):
            copied = copied._derive(step._replay, lambda _, hidden=step._hidden: hidden, **step._formula())
        return copied._derive(lambda x: x if x.is_contiguous() else x.clone())

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Leaves of a computed copy's graph, in the order of `computed_from`."""
        return self._chain()[-1]._leaves

    def _chain(self) -> list["DeferredLogits"]:
        chain = [self]
        while chain[-1]._parent is not None:
            chain.append(chain[-1]._parent)
        return chain

    def computed_from(self) -> list[torch.Tensor]:
        """The head's argument and weights, for a fused head. For a detached copy they are the forward's weights, which
        the head may no longer have (`torch.func.functional_call`)."""
        root = self._chain()[-1]
        if root._is_detached and root._state_at_end is not None:
            return [t for t, *_ in root._state_at_end]
        return [root._head_input, *self._head.weights()]

    def has_same_weights(self) -> bool:
        return [id(t) for t in self.computed_from()[1:]] == [id(t) for t in self._head.weights()]

    def check_unchanged(self) -> None:
        before = self._chain()[-1]._state_at_end
        if before is None:
            return
        now = [_state(t) for t in self.computed_from()]
        if len(now) != len(before) or not all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(before, now)):
            raise RuntimeError(
                "liger_hw: the logits of this step cannot be computed any more: their weights or hidden states have "
                "changed since; read outputs.logits before that (before optimizer.step()), or call the model with "
                "skip_logits=False"
            )

    def _check_gradient(self) -> None:
        """Raise if the gradient of logits computed here would not reach hidden states and weights."""
        if self._is_detached:
            return  # OutputLogitsFunction passes the gradient on
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() or not self._surroundings.grad:
                return
        elif has_forward_gradients() or torch.is_inference_mode_enabled():  # as in `inside_a_function`
            return
        if self._surroundings.tracked and self._head.has_gradient(self._hidden):
            raise GradientWouldBeLost(
                "liger_hw: deferred logits reached an autograd.Function (or a checkpoint with use_reentrant=True), "
                "which cannot pass their gradient on; call the model with skip_logits=False, or patch it with "
                "fused_linear_cross_entropy=False"
            )

    def cross_entropy(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.nn.functional.cross_entropy` of these logits, by a kernel if it supports the arguments."""
        self._check_gradient()
        target, options, is_known = loss_arguments(*args, **kwargs)
        if is_known and self.is_rows_for(target):
            loss = self._head.fused_loss(self, target, options)
            return self._head.loss_of_computed(self, self.materialise(), target, options) if loss is None else loss
        return F.cross_entropy(self.materialise(), *args, **kwargs)

    def is_rows_for(self, target: Any) -> bool:
        """Whether these logits are [n, vocab] and `target` has class indices."""
        is_row = isinstance(target, torch.Tensor) and target.dim() == 1 and target.dtype == torch.int64
        return is_row and len(self._leading) == 1

    # -- recorded ----------------------------------------------------------------------------------------------------

    def tanh(self, **kwargs: Any) -> Any:
        if self._cap is not None or kwargs:
            return self.materialise().tanh(**kwargs)
        return self._derive(lambda x: x.tanh(), cap=1.0)

    def mul(self, other: Any, **kwargs: Any) -> Any:
        if not _is_number(other) or kwargs:
            return self.materialise().mul(_plain(other), **kwargs)
        return self._derive(lambda x: x * other, **self._scaled(float(other)))

    def div(self, other: Any, **kwargs: Any) -> Any:
        if not _is_number(other) or other == 0 or kwargs:
            return self.materialise().div(_plain(other), **kwargs)
        return self._derive(lambda x: x / other, **self._scaled(1.0 / float(other)))

    __mul__ = __rmul__ = multiply = mul
    __truediv__ = divide = true_divide = div

    def _scaled(self, factor: float) -> dict[str, Any]:
        if self._cap is not None:
            return {"cap": self._cap * factor}
        added = None if self._added is None else self._added * factor
        return {"scale": self._scale * factor, "added": added}

    def add(self, other: Any, **kwargs: Any) -> Any:
        """Recorded for a tensor [vocab] without a gradient, such as BART's `final_logits_bias`."""
        return self.materialise().add(_plain(other), **kwargs) if kwargs else self + other

    def __add__(self, other: Any) -> Any:
        if self._cap is not None or not self._is_row(other):
            return self.materialise() + _plain(other)
        other = other.detach().clone()  # a program may change it before the logits are read
        row = other.reshape(-1)
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self._derive(lambda x: x + other, dtype=dtype, added=row if self._added is None else self._added + row)

    __radd__ = __add__

    def _is_row(self, value: Any) -> bool:
        """Whether `value` is a tensor [..., vocab] that adds the same numbers at every position, without a gradient."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device != self.device:
            return False
        is_row = 0 < value.dim() <= self.dim() and value.numel() == value.shape[-1] == self._head.vocab_size
        return is_row and value.is_floating_point() and not (value.requires_grad and self._surroundings.grad)

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Recorded for fp32, the current dtype and the current device; else the logits are computed."""
        for target in (*args, *kwargs.values()):
            same_device = isinstance(target, (str, torch.device)) and torch.device(target) == self.device
            if not (same_device or target is torch.float32 or target is self.dtype or isinstance(target, bool)):
                return self.materialise().to(*args, **kwargs)
        dtype = torch.float32 if torch.float32 in (*args, *kwargs.values()) else self.dtype
        return self._derive(lambda x: x.to(*args, **kwargs), dtype=dtype)

    def contiguous(self, **kwargs: Any) -> Any:
        return self._derive(lambda x: x.contiguous(**kwargs))

    def reshape(self, *shape: Any) -> Any:
        """Recorded when the last dimension stays the vocabulary."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(sizes) < 1 or not isinstance(sizes[-1], int) or sizes[-1] != self.shape[-1]:
            return self.materialise().reshape(*shape)
        return self._derive(lambda x: x.reshape(*sizes), lambda x: x.reshape(*sizes[:-1], x.shape[-1]))

    def view(self, *shape: Any) -> Any:
        """As reshape; with a dtype in place of a shape the logits are computed."""
        if not all(isinstance(size, (int, tuple, list)) for size in shape):
            return self.materialise().view(*shape)
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = len(self._leading)
        if end_dim % (last + 1) == last and start_dim % (last + 1) != last:
            return self.materialise().flatten(start_dim, end_dim)
        return self._derive(lambda x: x.flatten(start_dim, end_dim), lambda x: x.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        """Recorded when the vocabulary dimension is taken whole."""
        items = index if isinstance(index, tuple) else (index,)
        if not _keeps_last_dimension(items, self.dim()):
            return self.materialise()[_plain(index)]
        return self._derive(lambda x: x[index], lambda x: x[index])

    # -- known without computing -------------------------------------------------------------------------------------

    @property
    def is_fused(self) -> bool:
        """Whether the loss can read the head's weight: a linear layer with an `Access` and a known width."""
        return self._head.access is not None and self._head.vocab_size is not None

    @property
    def shape(self) -> torch.Size:
        vocab = self._head.vocab_size
        return self.materialise().shape if vocab is None else torch.Size((*self._leading, vocab))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self._leading) + 1

    ndim = property(dim)

    # -- everything else ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialise(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], DeferredLogits):
            if func is F.cross_entropy:
                return args[0].cross_entropy(*args[1:], **kwargs)
            recorded = _RECORDED.get(func)
            if recorded is not None:
                return getattr(args[0], recorded)(*args[1:], **kwargs)
        if func is F.cross_entropy and isinstance(kwargs.get("input"), DeferredLogits):
            return kwargs.pop("input").cross_entropy(*args, **kwargs)
        return func(*_plain(args), **_plain(kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialise().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.materialise(), memo)

    def __repr__(self) -> str:
        state = "deferred" if self.is_deferred else "computed"
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype}, {state})"

    __hash__ = object.__hash__


FUNCTIONS = ("tanh", "mul", "multiply", "div", "divide", "true_divide", "reshape", "flatten")
"""Recorded operations that are functions of torch too. `add` is recorded only in the model's forward."""
_RECORDED = {getattr(torch, name): name for name in (*FUNCTIONS, "add")}


def _computing(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.materialise(), name)(*_plain(args))

    method.__name__ = name
    return method


for _name in (
    "__sub__ __rsub__ __rtruediv__ __floordiv__ __mod__ __pow__ __rpow__ __matmul__ __rmatmul__ "
    "__neg__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __len__ __iter__ __bool__ __int__ __float__ "
    "__contains__ __setitem__ __array__ __iadd__ __isub__ __imul__ __itruediv__"
).split():
    setattr(DeferredLogits, _name, _computing(_name))


def loss_arguments(
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, dict[str, Any], bool]:
    """(target, the options that our losses have, whether no other option is set), from the arguments of
    `torch.nn.functional.cross_entropy` after the logits."""
    options = dict(weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    return target, options, size_average is None and reduce is None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """`value` with each DeferredLogits in it, also in tuples, lists and dicts, replaced by the computed logits."""
    return tree_map_only(DeferredLogits, DeferredLogits.materialise, value)


def _keeps_last_dimension(items: tuple, ndim: int) -> bool:
    """Whether indexing with `items` keeps the last of `ndim` dimensions whole and last."""
    used = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            used += item.dim() if item.dtype == torch.bool else 1
        elif isinstance(item, (int, slice)) and not isinstance(item, bool):
            used += 1
        elif item is not None and item is not Ellipsis:
            return False
    last = items[-1] if items else None
    whole = isinstance(last, slice) and last.start is None and last.stop is None and last.step is None
    if any(item is Ellipsis for item in items):
        return last is Ellipsis and used < ndim or whole
    return used < ndim or whole
