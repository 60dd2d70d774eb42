"""The one loss path of every causal LM: its own forward, run with an output head that defers the logits.

`causal_lm_forward` wraps a family's forward. While labels are given, the forward runs on a `ModelView`: the model,
except that its output head is an `OutputHead`, whose result is a `DeferredLogits` (deferred.py). Nothing is written to
the model, so this works in threads, under gradient checkpointing and inside `torch.compile(fullgraph=True)` alike.

The head's weight is read outside its forward only where nothing can hang on that forward: a plain `nn.Linear` (or the
active copy of a PEFT `modules_to_save`) without hooks. A head that FSDP2 shards on its own, or that accelerate placed
on a device, is called through its hooks with the loss in place of the product. Every other head (LoRA, quantised,
tensor parallel, offloaded, hooked) computes its logits itself, and one warning says why and what to do.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any, Callable

import torch
from torch import nn

from ..autotune import compile_ahead
from ..kernels.heads.counted_rows import CountedRows
from ..runtime.checks import autocast_dtype
from .deferred import DeferredLogits, Surroundings

log = logging.getLogger("liger_hw")
_warned: set[str] = set()


class ModelView:
    """A module whose attribute `name` is `value`; every other attribute is the module's own, writes included.

    Called, it runs the module's own forward on itself, so a head inside a head (BERT's cls.predictions.decoder) is seen
    through a view of a view.
    """

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
        if forward is None or _hooked_by(viewed):  # hooks must see the real module
            return viewed(*args, **kwargs)
        return forward(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_viewed":
            raise AttributeError(name)
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._viewed, name, value)


def viewed_with(model: nn.Module, path: str, head: "OutputHead") -> ModelView:
    """`model` with `head` in place of the module at a dotted path."""
    first, _, rest = path.partition(".")
    return ModelView(model, first, viewed_with(getattr(model, first), rest, head) if rest else head)


class OutputHead:
    """Takes the place of a causal LM's output head during one forward. Calling it with hidden states defers the logits.

    module: the real head
    fused: the loss consumes hidden states and weight; else it consumes logits, and only the loss is ours
    wants: what else to compute: `token_accuracy`, the share of rows whose largest logit is the target, and
    `predicted_tokens`, the index of each row's largest logit; `found` has them after the loss
    counted: the number of labels that are not ignored, being copied to the host: ignored rows are then left out of the
    products
    """

    def __init__(
        self, module: nn.Module, fused: bool, wants: tuple[str, ...] = (), counted: CountedRows | None = None
    ) -> None:
        self.module, self.fused, self.wants, self.counted = module, fused, wants, counted
        self.linear, self.slot = None, ""
        self.found: dict[str, torch.Tensor] = {}

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(hidden, torch.Tensor):
            return self.module(hidden, *args, **kwargs)
        if self.fused:
            self.linear, self.slot, reason = find_linear(self.module)
            if self.linear is None:
                _warn(reason)
        surroundings = Surroundings(hidden.device.type)
        return DeferredLogits(self, hidden, surroundings, surroundings.dtype or hidden.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def vocab_size(self) -> int | None:
        """Length of the logits' last dimension, or None when only computing them tells."""
        return getattr(self.module, "out_features", None)

    def logits(self, hidden: torch.Tensor, surroundings: Surroundings) -> torch.Tensor:
        """The real head's answer."""
        with surroundings.restored():
            return self.module(hidden)

    def cross_entropy(self, logits: DeferredLogits, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Loss of `logits` [n, vocab] for `target` int64 [n]; options: torch's weight, ignore_index, ..."""
        if self._can_fuse(logits):
            if not self.slot:
                return self._fused(logits, logits._hidden, target, options)
            return _in_place_of(
                self.linear, self.slot, lambda x: self._fused(logits, x, target, options), logits._hidden
            )
        from .functional import liger_cross_entropy

        result = liger_cross_entropy(logits.materialise(), target, **self._more(), **options)
        return self._loss_of(result)

    def _more(self) -> dict[str, bool]:
        return {f"return_{name}": True for name in self.wants}

    def _can_fuse(self, logits: DeferredLogits) -> bool:
        if self.linear is None or not logits.is_deferred or (logits._cap is not None and logits._cap <= 0):
            return False
        if self.slot and torch.compiler.is_compiling():  # swapping a forward cannot be traced
            return False
        return logits._surroundings.grad or not torch.is_grad_enabled()

    def _fused(
        self, logits: DeferredLogits, hidden: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        from .functional import liger_fused_linear_cross_entropy

        weight, bias = self.linear.weight, self.linear.bias
        _refuse_shard(weight)
        target = target.to(hidden.device)
        cast = logits._surroundings.dtype
        if cast is not None:  # autocast: what F.linear would have done
            hidden, weight, bias = hidden.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
        softcap, scale = logits._cap, logits._scale
        if softcap is not None:  # cap * tanh(scale * x) is a softcap of x * scale * cap
            scale *= softcap
        if abs(scale - 1.0) > 1e-9:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        with torch.autocast(hidden.device.type, enabled=False):
            result = liger_fused_linear_cross_entropy(
                hidden,
                weight,
                target,
                bias=bias,
                ce_weight=options["weight"],
                ignore_index=options["ignore_index"],
                label_smoothing=options["label_smoothing"],
                reduction=options["reduction"],
                softcap=softcap,
                compact=self.counted or False,
                **self._more(),
            )
        loss = self._loss_of(result)
        if autocast_dtype(hidden.device.type) is not None:  # torch's cross_entropy is fp32 there whatever the logits
            return loss
        return loss.to(logits.dtype)

    def _loss_of(self, result: Any) -> torch.Tensor:
        if not self.wants:
            return result
        self.found = {name: getattr(result, name) for name in self.wants}
        return result.loss


# -- which heads may be read directly --------------------------------------------------------------------------------


def find_linear(head: nn.Module) -> tuple[nn.Linear | None, str, str]:
    """(linear, slot, reason) for an output head.

    linear: the `nn.Linear` whose weight the loss may use, or None, and then `reason` says why and what to do
    slot: empty when the weight may be read at any time; else the attribute of `linear` that holds its own forward, and
    the weight is whole, and beside the hidden states, only while that runs inside a call of the module
    """
    hooked = _hooked_by(head)
    if type(head).__name__ == "ModulesToSaveWrapper":
        adapters = head.active_adapters
        active = head.original_module if head.disable_adapters or not adapters else head.modules_to_save[adapters[0]]
        return (None, "", _HOOKS) if hooked else find_linear(active)
    if hasattr(head, "base_layer"):
        return None, "", _ADAPTER
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None, "", f"it is a {type(head).__name__}, not an nn.Linear; {_CORRECT}"
    if hooked == "other":
        return None, "", _HOOKS
    if "forward" in head.__dict__ and getattr(head.forward, "__func__", None) is not nn.Linear.forward:
        hook, own = getattr(head, "_hf_hook", None), getattr(head, "_old_forward", None)
        placed = type(hook).__name__ == "AlignDevicesHook" and not hook.offload
        if placed and getattr(own, "__func__", None) is nn.Linear.forward:
            return head, "_old_forward", ""
        return None, "", f"its forward was replaced (offloading or another patch); {_CORRECT}"
    return head, "forward" if hooked else "", ""


_CORRECT = "its logits are computed in full, which is right but takes their memory"
_HOOKS = f"hooks are registered on it (a user's, tensor parallel or ZeRO-3) that must see its logits; {_CORRECT}"
_ADAPTER = (
    f"it carries an adapter (LoRA or alike), whose share the fused loss would leave out; {_CORRECT}. To fuse it, train "
    "the head whole with modules_to_save=['lm_head'] or leave it out of target_modules"
)


def _hooked_by(module: nn.Module) -> str:
    """An empty string for no hooks, "fsdp2" when all of them are FSDP2's own, else "other"."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return ""
    if module._backward_hooks or module._backward_pre_hooks:
        return "other"
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        owner = type(getattr(hook, "__self__", hook))
        if not owner.__module__.startswith("torch.distributed.fsdp._fully_shard"):
            return "other"
    return "fsdp2"


def _in_place_of(module: nn.Module, slot: str, function: Callable, hidden: torch.Tensor) -> torch.Tensor:
    """`module(hidden)` with `function(hidden)` run where the module's own forward would, all hooks around it."""
    before = module.__dict__.get(slot)
    setattr(module, slot, function)
    try:
        return module(hidden)
    finally:
        delattr(module, slot)
        if before is not None:
            setattr(module, slot, before)


def _refuse_shard(weight: torch.Tensor) -> None:
    if type(weight).__name__ == "DTensor":
        raise RuntimeError(
            "liger_hw: the output head's weight is a shard (DTensor) when the loss needs it whole. With FSDP2 call the "
            "model itself (model(...), not model.forward(...)), so that its hooks gather the weight, or fully_shard "
            "the head on its own; otherwise apply the patch with fused_linear_cross_entropy=False."
        )


def _warn(reason: str) -> None:
    if not torch.compiler.is_compiling() and reason not in _warned:
        _warned.add(reason)
        log.warning("liger_hw: the fused linear cross-entropy is not used for this output head: %s", reason)


# -- the wrapper -----------------------------------------------------------------------------------------------------


def head_path(model: nn.Module) -> str:
    """Dotted path of a causal LM's output head, or "" when it has none that is one module of its own."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return ""
    if not isinstance(head, nn.Module) or isinstance(head, nn.ModuleList):
        return ""
    return next((name for name, module in model.named_modules(remove_duplicate=False) if module is head), "")


def causal_lm_forward(original: Callable, head_at: str, fused: bool) -> Callable:
    """A forward for a causal LM class or instance, around its own.

    original: the family's forward, taking the model first; head_at: dotted path of the output head
    fused: hidden states go straight into the loss and `logits` is None while training with labels; otherwise the logits
    are computed as always and only the loss is ours

    The result takes three keywords more: `skip_logits` (None: while training with labels; True or False decides),
    `return_token_accuracy` and `return_predicted_tokens` (set `outputs.token_accuracy` and `outputs.predicted_tokens`,
    one a position, meaning nothing where the label is ignored); `shift_labels` alone gives a loss too.
    Raises `ValueError` for `skip_logits=True` without labels.
    """
    from .functional import liger_cross_entropy, liger_fused_linear_cross_entropy  # noqa: F401  loaded before a step

    signature = inspect.signature(original)
    names = list(signature.parameters)
    labels_at = names.index("labels") - 1 if "labels" in names else len(names)

    @functools.wraps(original)
    def forward(self, *args, skip_logits=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs):
        labels = kwargs.get("labels") if len(args) <= labels_at else args[labels_at]
        if labels is None and len(args) <= labels_at and kwargs.get("shift_labels") is not None:
            labels = kwargs["labels"] = kwargs["shift_labels"]
        if labels is None:
            if skip_logits:
                raise ValueError("skip_logits=True needs labels or shift_labels: there is nothing else to return")
            return original(self, *args, **kwargs)
        skip = fused and (self.training if skip_logits is None else bool(skip_logits))
        wants = ("token_accuracy",) * bool(return_token_accuracy) + ("predicted_tokens",) * bool(
            return_predicted_tokens
        )
        if fused and not skip and not wants:
            return original(self, *args, **kwargs)
        counted = None
        if skip and not torch.compiler.is_compiling():
            compile_ahead.at_first_forward(self, args, kwargs)
            # before the model runs, so that the copy to the host has arrived when the loss asks for it
            counted = CountedRows(labels if kwargs.get("shift_labels") is None else kwargs["shift_labels"])
        head = OutputHead(_at(self, head_at), fused and skip, wants, counted)
        outputs = original(viewed_with(self, head_at, head), *args, **kwargs)
        return _finish(outputs, head, skip)

    forward.__signature__ = _with_keywords(signature, *_KEYWORDS)
    return forward


_KEYWORDS = ("skip_logits", "return_token_accuracy", "return_predicted_tokens")


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _with_keywords(signature: inspect.Signature, *names: str) -> inspect.Signature:
    parameters = [p for p in signature.parameters.values() if p.name not in names]
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    at = len(parameters) - bool(parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*parameters[:at], *extra, *parameters[at:]])


def _finish(outputs: Any, head: OutputHead, skip: bool) -> Any:
    """`outputs` with the deferred logits left out (None) or computed."""
    if isinstance(outputs, tuple):
        return tuple(_settle(value, skip) for value in outputs)
    outputs = type(outputs)(**{name: _settle(value, skip) for name, value in outputs.items()})
    for name, value in head.found.items():
        outputs[name] = value
    return outputs


def _settle(value: Any, skip: bool) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    return None if skip else value.materialise()
