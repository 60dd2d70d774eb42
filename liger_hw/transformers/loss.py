"""The loss of every causal LM: the family's own forward runs with an output head that defers the logits.

`causal_lm_forward` wraps a family's forward. With labels the forward runs on a `ModelView`, in which an `OutputHead`
takes the head's place and returns a `DeferredLogits` (deferred.py). Nothing is written to the model, so this works in
threads, under gradient checkpointing and inside `torch.compile(fullgraph=True)`.

`distributed/owners.py` decides how the head's weight may be read: at any time, only inside the head's own forward
(FSDP, ZeRO-3, accelerate's placement), or as this rank's slice of the vocabulary (tensor parallelism). Other heads
(LoRA, quantised, offloaded, hooked) compute their logits; one warning has the reason and the remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import weakref
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn

from ..autotune import compile_ahead
from ..distributed import agreement
from ..distributed.owners import Access, find_access, head_width, hooks_of
from ..kernels.heads.linear_head import CountedRows
from ..runtime.checks import autocast_dtype
from ..text import first_line
from . import functional
from .deferred import DeferredLogits, GradientWouldBeLost, Surroundings, inside_a_function
from .output_logits import output_logits
from .replacing import KERNEL_DTYPES, is_traced, should_use_original
from .report import patched_parts

log = logging.getLogger("liger_hw")
_UNUSED = "liger_hw: the fused linear cross-entropy is not used for this output head: %s"
_SLICED = (
    "its weight is split over ranks, and the loss has class weights or a bias is added to the logits; its logits are "
    "computed in full, which is right but takes their memory"
)


class ModelView:
    """A module with `value` in place of its attribute `name`. Other attributes are read from and written to the module.

    A call runs the module's forward with the view as self. For a nested head (BERT's cls.predictions.decoder) `value`
    is a view too.
    """

    def __new__(cls, module: nn.Module, name: str, value: Any) -> "ModelView":
        return object.__new__(cls if torch.compiler.is_compiling() else _view_class(type(module)))

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        object.__setattr__(self, "_viewed", module)
        object.__setattr__(self, name, value)

    @property
    def __class__(self) -> type:  # isinstance() and super() inside the family's forward
        viewed = self.__dict__.get("_viewed")
        return ModelView if viewed is None else type(viewed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        viewed = self._viewed
        forward = getattr(viewed.forward, "__func__", None)
        if forward is None or hooks_of(viewed):  # hooks must get the real module
            return viewed(*args, **kwargs)
        return forward(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_viewed":
            raise AttributeError(name)
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._viewed, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._viewed, name)


class _ViewType(type):
    """Type of view classes: they have the viewed class's attributes, for `type(self).CONSTANT` in its forward."""

    def __getattr__(cls, name: str) -> Any:
        if name == "viewed_type":
            raise AttributeError(name)
        return getattr(cls.viewed_type, name)


@functools.lru_cache(maxsize=256)
def _view_class(viewed_type: type) -> type:
    return _ViewType(viewed_type.__name__, (ModelView,), {"viewed_type": viewed_type})


def viewed_with(model: nn.Module, path: str, head: "OutputHead") -> ModelView:
    """`model` with `head` in place of the module at a dotted path."""
    first, _, rest = path.partition(".")
    return ModelView(model, first, viewed_with(getattr(model, first), rest, head) if rest else head)


class OutputHead:
    """Takes the place of a causal LM's output head during one forward. Calling it with hidden states defers the logits.

    module: the real head
    fused: the loss takes hidden states and weight; else it takes logits, and only the loss is replaced
    extras: further results: `token_accuracy`, the share of rows whose largest logit is the target's, and
    `predicted_tokens`, the index of each row's largest logit; `results` has them after the loss
    counted: the number of labels that are not ignored, on its way to the host. With it a loss of at most `rows` rows,
    the number of labels, leaves ignored rows out of its products.
    as_tensor: other code than transformers' takes the logits. A call then returns an `OutputLogits`, which is a tensor,
    if the head is fused and its weight whole.
    called, computed, loss_called: whether the head was called, its logits computed, a loss called that may be fused
    loss_nodes: autograd nodes of the fused losses
    """

    def __init__(
        self,
        module: nn.Module,
        fused: bool,
        extras: tuple[str, ...] = (),
        counted: CountedRows | None = None,
        rows: int = 0,
        as_tensor: bool = False,
    ) -> None:
        self.module, self.fused, self.extras, self.counted, self.rows = module, fused, extras, counted, rows
        self.as_tensor = as_tensor
        self.loss_nodes: list[weakref.ref] = []
        self.access: Access | None = None
        self.results: dict[str, torch.Tensor] = {}
        self.called = self.computed = self.loss_called = False

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if args or kwargs or not isinstance(hidden, torch.Tensor):
            return self.module(hidden, *args, **kwargs)
        head_input = hidden
        if self.fused and (hidden.is_cpu or hidden.dtype in KERNEL_DTYPES):
            access = find_access(self.module)
            if isinstance(access, str):
                _warn(access)
            else:
                self.access, hidden = access, access.all_rows(hidden)
        surroundings = Surroundings(hidden.device.type)
        dtype = surroundings.dtype or hidden.dtype
        deferred = DeferredLogits(self, hidden, surroundings, dtype, head_input=head_input)
        return output_logits(deferred) if self.as_tensor and self.access is not None and self.is_whole() else deferred

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def vocab_size(self) -> int | None:
        """Length of the logits' last dimension; None if it is unknown before they are computed."""
        linear = self.module if self.access is None else self.access.linear
        if self.access is not None or type(linear) is nn.Linear:
            return head_width(linear)
        return getattr(linear, "out_features", None)

    def is_whole(self) -> bool:
        """Whether this rank has the whole weight also after the forward, and can compute logits without the others."""
        return self.access is None or (self.access.caller is None and self.access.mesh is None)

    def why_not_fused(self, model: str) -> str:
        """After the forward, why the model called no loss that could be fused. "" if it called one, if the logits are
        still deferred, or if `find_access` has given the reason."""
        if not self.called:
            return f"{model} computes its logits without it, in full, which is right but takes their memory"
        if self.loss_called or not self.computed or self.access is None:
            return ""
        return (
            f"{model}, or its loss function, uses an operation on the logits that the fused loss does not have; they "
            "are computed in full, which is right but takes their memory"
        )

    def has_gradient(self, hidden: torch.Tensor) -> bool:
        return hidden.requires_grad or any(p.requires_grad for p in self.module.parameters())

    def logits(self, hidden: torch.Tensor, surroundings: Surroundings) -> torch.Tensor:
        self.computed = True
        with surroundings.restored():
            return self.module(hidden)

    def weights(self) -> list[nn.Parameter]:
        """Weight and bias of a fused head's linear layer."""
        return [t for t in (self.access.linear.weight, self.access.linear.bias) if t is not None]

    def loss_of_computed(
        self, logits: DeferredLogits, computed: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Loss of `logits` [n, vocab], whose values are `computed`. target: int64 [n]; options: as `loss_arguments`
        returns them"""
        if self._is_left_to_torch(logits):
            return torch.nn.functional.cross_entropy(computed, target, **options)
        return self._loss_of(functional.liger_cross_entropy(computed, target, **self._return_flags(), **options))

    def fused_loss(self, logits: DeferredLogits, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
        """The same loss from hidden states and weight, or None if it cannot be fused."""
        self.loss_called = True
        if self._is_left_to_torch(logits) or not self._can_fuse(logits, options):
            return None
        return self.access.run(lambda x, *weights: self._fused(logits, x, *weights, target, options), logits._hidden)

    def _is_left_to_torch(self, logits: DeferredLogits) -> bool:
        whole = self.access is None or self.access.mesh is None
        return whole and not self.extras and should_use_original(logits)

    def _return_flags(self) -> dict[str, bool]:
        return {f"return_{name}": True for name in self.extras}

    def _can_fuse(self, logits: DeferredLogits, options: dict[str, Any]) -> bool:
        cap = logits._cap
        if self.access is None or not logits.is_deferred or not (cap is None or 0 < cap < math.inf):
            return False
        if self.access.caller is not None and torch.compiler.is_compiling():  # replacing a forward cannot be traced
            _warn_compiled()
            return False
        if self.access.mesh is not None and (options["weight"] is not None or logits._added is not None):
            _warn(_SLICED)
            return False
        return logits._surroundings.grad or not torch.is_grad_enabled()

    def _fused(
        self,
        logits: DeferredLogits,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        target = target.to(hidden.device)
        cast = logits._surroundings.dtype
        if cast is not None:  # as F.linear under autocast
            hidden, weight, bias = hidden.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
        softcap, scale, added = logits._cap, logits._scale, logits._added
        if softcap is not None:  # cap * tanh(y), where the loss's softcap is cap * tanh(logits / cap): logits = cap * y
            scale, added = scale * softcap, None if added is None else added * softcap
        if not abs(scale - 1.0) <= 1e-9:  # true for NaN
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        if added is not None:
            bias = (added if bias is None else bias + added).to(weight.dtype)
        with contextlib.nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False):
            compact = self.counted if self.counted is not None and target.numel() <= self.rows else False
            settings = {**options, "bias": bias, "softcap": softcap, "compact": compact, **self._return_flags()}
            ce_weight = settings.pop("weight")
            if self.access.mesh is None:
                head = functional.liger_fused_linear_cross_entropy
                result = head(hidden, weight, target, ce_weight=ce_weight, **settings)
            else:
                head = functional.liger_fused_linear_cross_entropy_tp
                result = head(hidden, weight, target, self.access.group, **settings)
        loss = self._loss_of(result)
        if loss.requires_grad and not torch.compiler.is_compiling():
            self.loss_nodes.append(weakref.ref(loss.grad_fn))
        if autocast_dtype(hidden.device.type) is not None:  # torch's cross_entropy is fp32 under autocast
            return loss
        return loss.to(logits.dtype)

    def _loss_of(self, result: Any) -> torch.Tensor:
        if not self.extras:
            return result
        self.results = {name: getattr(result, name) for name in self.extras}
        return result.loss


@torch.compiler.assume_constant_result
def _warn_compiled() -> None:
    warn_once(
        "it is compiled while its weight is gathered by hooks; its logits are computed in full, which is right but "
        "takes their memory. To fuse it, compile the layers instead of the whole model"
    )


# -- the wrapper -----------------------------------------------------------------------------------------------------


warn_once = functools.lru_cache(maxsize=256)(functools.partial(log.warning, _UNUSED))


def _warn(reason: str) -> None:
    if not torch.compiler.is_compiling():
        warn_once(reason)


def head_path(model: nn.Module) -> str:
    """Dotted path of a causal LM's output head, or "" if the model has no module for it."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return ""
    if not isinstance(head, nn.Module) or isinstance(head, nn.ModuleList):
        return ""
    return next((name for name, module in model.named_modules(remove_duplicate=False) if module is head), "")


def why_not_fused(model: nn.Module, head_at: str) -> str:
    """Why the loss of a live model cannot be fused, or ""."""
    access = find_access(_at(model, head_at))
    return access if isinstance(access, str) else ""


def causal_lm_forward(original: Callable, head_at: str, fused: bool, switch: list[bool]) -> Callable:
    """A forward for a causal LM class or instance that wraps `original`.

    original: the family's forward, an unbound function; head_at: dotted path of the output head
    fused: in training with labels the loss takes hidden states, and logits are not computed; else they are computed as
    usual and only the loss is replaced
    switch: a list; if it is empty, `original` runs

    The result has three more keywords: `skip_logits` (whether logits are deferred in a call with labels; None: in
    training), `return_token_accuracy` and `return_predicted_tokens` (set `outputs.token_accuracy` and
    `outputs.predicted_tokens`, one for each position, undefined at ignored labels; else these attributes are None).
    `shift_labels` without `labels` gives a loss too. Skipped logits are computed when a program reads them before
    backward. They are None inside torch.compile, in replicas of `nn.DataParallel`, and if the head's weight is sharded,
    since all ranks would have to read them.
    """
    functional.liger_cross_entropy, functional.liger_fused_linear_cross_entropy  # noqa: B018  loaded before a step
    signature = inspect.signature(original)
    names = list(signature.parameters)
    labels_at = names.index("labels") - 1 if "labels" in names else len(names)
    of_transformers = _is_of_transformers(original)
    cannot_defer: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def path_of_head(self) -> str:
        """`head_at`, or the head's path in a model of a patched class with another structure; "" without a head."""
        try:
            _at(self, head_at)
        except AttributeError:
            return "" if torch.compiler.is_compiling() else head_path(self)
        return head_at

    @functools.wraps(original)
    def forward(self, *args, skip_logits=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs):
        if not switch or is_traced():
            return original(self, *args, **kwargs)
        return _with_attributes(run(self, args, kwargs, skip_logits, return_token_accuracy, return_predicted_tokens))

    def run(self, args, kwargs, skip_logits, return_token_accuracy, return_predicted_tokens):
        alone = not (dist.is_available() and dist.is_initialized())
        if not alone and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            agreement.at_first_step(self, patched_parts)
        labels = kwargs.get("labels") if len(args) <= labels_at else args[labels_at]
        only_shifted = labels is None and len(args) <= labels_at and kwargs.get("shift_labels") is not None
        path = "" if labels is None and not only_shifted else path_of_head(self)
        module = _at(self, path) if path else None
        # an OutputHead: the caller is the patched forward of a subclass or of an outer model
        if module is None or type(module) is OutputHead:
            return original(self, *args, **kwargs)
        if only_shifted:
            labels = kwargs["labels"] = kwargs["shift_labels"]
        # transformers' pipeline parallelism takes the last stage's logits and sends them to every rank
        trains = self.training and not getattr(self, "_pp_forward_wrapped", False)
        skip = fused and (trains and not inside_a_function() if skip_logits is None else bool(skip_logits))
        flags = return_token_accuracy, return_predicted_tokens
        extras = tuple(name for name, is_set in zip(_ATTRIBUTES, flags) if is_set)
        if fused and not skip and not extras:
            return original(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            head = OutputHead(module, fused and skip, extras)
            return _finish(original(viewed_with(self, path, head), *args, **kwargs), head, skip, keep=False)
        if self in cannot_defer:
            return original(self, *args, **kwargs)
        counted, rows, is_replica = None, labels.numel(), getattr(self, "_is_replica", False)
        known_loss = of_transformers and _loss_is_of_transformers(self)
        if skip and known_loss:  # another loss may use rows that the labels ignore
            # counted before the model runs, so that the number is on the host when the loss needs it
            shifted = kwargs.get("shift_labels")  # the forward of some families ignores it, and uses `labels`
            counted = CountedRows(labels if shifted is None else (labels, shifted))
        head = OutputHead(module, fused and skip, extras, counted, rows, not known_loss and not is_replica)
        try:
            begins = skip and id(self.config) not in compile_ahead.begun
            with compile_ahead.during_first_forward(self.config, labels.device) if begins else contextlib.nullcontext():
                outputs = original(viewed_with(self, path, head), *args, **kwargs)
            if skip and (reason := head.why_not_fused(type(self).__name__)):
                _warn(reason)
            if extras and not head.results:
                _warn(f"{type(self).__name__} calls no cross entropy, so {' and '.join(extras)} are not computed")
            return _finish(outputs, head, skip, keep=head.is_whole() and not is_replica)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            if extras or not _may_be_of_deferred_logits(error):
                raise
            reason = first_line(error)
        outputs = original(self, *args, **kwargs)  # raises again if the error had another cause
        cannot_defer.add(self)
        _warn(
            f"its {type(self).__name__} does not run on deferred logits ({reason}); this and later calls compute the "
            "logits in full"
        )
        return outputs

    ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _KEYWORDS]
    parameters = [p for p in signature.parameters.values() if p.name not in _KEYWORDS]
    at = len(parameters) - bool(parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[*parameters[:at], *ours, *parameters[at:]])
    return forward


def _may_be_of_deferred_logits(error: Exception) -> bool:
    """Whether a forward may have raised this because its logits were deferred. A RuntimeError mostly has another cause,
    such as lack of memory; those that name DeferredLogits are raised by functions scripted by torch.jit."""
    other_cause = isinstance(error, RuntimeError) and not isinstance(error, (GradientWouldBeLost, NotImplementedError))
    return not other_cause or DeferredLogits.__name__ in str(error)


def _is_of_transformers(function: Any) -> bool:
    """Whether a function and all functions that it wraps (functools.wraps) are transformers' code."""
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _loss_is_of_transformers(model: nn.Module) -> bool:
    """Whether a model's loss function is transformers' code. A program may set another one on the model, its class or
    in transformers' LOSS_MAPPING."""
    function = getattr(model, "loss_function", None)
    return function is None or _is_of_transformers(function)


_ATTRIBUTES = ("token_accuracy", "predicted_tokens")
"""Attributes that a patched forward adds to the outputs."""
_KEYWORDS = ("skip_logits", "return_token_accuracy", "return_predicted_tokens")
"""Keywords that a patched forward adds."""


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _finish(outputs: Any, head: OutputHead, skip: bool, keep: bool) -> Any:
    """The outputs of a forward, without DeferredLogits: these are computed, or replaced if they are to be skipped.

    keep: skipped logits are replaced by an `OutputLogits`, which can be read later; else by None
    """
    head.counted = None  # later losses may have other labels
    tensors: dict[int, Any] = {}  # logits that are in the outputs twice get one tensor

    def replacement(logits: DeferredLogits) -> Any:
        if not skip or (keep and not logits.is_deferred):
            return logits.materialise()
        if not keep:
            return None
        if id(logits) not in tensors:
            tensors[id(logits)] = output_logits(logits)
        return tensors[id(logits)]

    outputs = _replaced(outputs, replacement)
    for name, value in head.results.items():
        if isinstance(outputs, dict):
            outputs[name] = value
        elif hasattr(outputs, "__dict__") and not isinstance(outputs, torch.Tensor):
            setattr(outputs, name, value)
    return outputs


def _with_attributes(outputs: Any) -> Any:
    """`outputs`; a `ModelOutput` gets None for each of `_ATTRIBUTES` that it lacks, which adds no items."""
    if isinstance(outputs, dict) and hasattr(outputs, "__dict__"):
        for name in _ATTRIBUTES:
            if not hasattr(outputs, name):
                setattr(outputs, name, None)
    return outputs


def _replaced(value: Any, replacement: Callable[[DeferredLogits], Any], is_output: bool = True) -> Any:
    """A model's outputs with deferred logits replaced, also inside tuples, lists, dicts and dataclasses: a model around
    a language model may return the inner model's outputs. Without deferred logits it is `value` itself.

    is_output: whether `value` is the outputs, whose attributes are searched; else only dataclasses are searched
    """
    if isinstance(value, DeferredLogits):
        return replacement(value)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        items = {name: (item, _replaced(item, replacement, False)) for name, item in value.items()}
        changed = {name: new for name, (item, new) in items.items() if new is not item}
        if any(new is None for new in changed.values()):  # ModelOutput.__init__ drops items that are None
            return type(value)(**{name: new for name, (_, new) in items.items()})
        for name, new in changed.items():  # making a new ModelOutput takes 50 us
            value[name] = new
        return value
    if isinstance(value, (tuple, list)):
        items = [_replaced(item, replacement, False) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return items if isinstance(value, list) else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if is_output or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if (new := _replaced(item, replacement, False)) is not item:
                object.__setattr__(value, name, new)
    return value
