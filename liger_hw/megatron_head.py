"""Megatron-core's output layer and loss in one: a GPTModel in training never computes its logits.

Megatron calls the output layer and hands its logits to `compute_language_model_loss`. While a model with labels is in
its `_postprocess`, `deferring` makes the output layer return a `DeferredLogits`, so that the layer's hooks run as
usual; `loss_of_deferred` uses the hidden states and the weight. If other code reads the logits, they are computed.
`distributed.owners.find_slice` decides which layers can defer; others compute their logits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from typing import Any, Callable, Iterator

import torch

from .distributed.owners import VocabSlice, find_slice, is_megatron
from .kernels.heads.fused_linear_cross_entropy import liger_fused_linear_cross_entropy
from .kernels.heads.fused_linear_cross_entropy_tp import liger_fused_linear_cross_entropy_tp
from .transformers.deferred import DeferredLogits, Surroundings
from .transformers.marks import is_ours

log = logging.getLogger("liger_hw")
_warn = functools.lru_cache(maxsize=64)(
    functools.partial(log.warning, "liger_hw: Megatron's linear cross-entropy is not used for this output layer: %s")
)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp_group: Any = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """The function of this name in `megatron.core.fusions.fused_linear_cross_entropy`, with its arguments.

    hidden: [..., hidden]; weight: [part, hidden], this rank's rows; labels: any shape, of all tokens. Returns the loss
    in fp32, [] or one number a token with reduction="none". The gradient of `hidden` is summed over the ranks.
    """
    rows, target = hidden.flatten(0, -2), labels.flatten()
    options = {"ignore_index": ignore_index, "reduction": reduction}
    if tp_group is None or tp_group.size() == 1:
        return liger_fused_linear_cross_entropy(rows, weight, target, **options)
    return liger_fused_linear_cross_entropy_tp(
        rows, weight, target, tp_group, sequence_parallel=sequence_parallel, **options
    )


class _Head:
    """The output head behind a `DeferredLogits`: one call of Megatron's output layer."""

    vocab_size = None  # known only when logits are computed

    def __init__(self, layer: torch.nn.Module, vocab_slice: VocabSlice, compute: Callable[[], torch.Tensor]) -> None:
        self.layer, self.slice, self._compute = layer, vocab_slice, compute

    def logits(self, hidden: torch.Tensor, surroundings: Surroundings) -> torch.Tensor:
        with surroundings.restored():
            return self._compute()

    def has_gradient(self, hidden: torch.Tensor | None) -> bool:
        return True

    def deferred(self, hidden: torch.Tensor) -> DeferredLogits:
        """hidden: [tokens, batch, hidden], or this rank's tokens under sequence parallelism"""
        surroundings = Surroundings(hidden.device.type)
        whole = hidden
        if self.slice.sequence_parallel:  # for the shape of the logits; its values are never read
            n_tokens = hidden.shape[0] * self.slice.group.size()
            whole = hidden.detach().new_zeros(1).expand(n_tokens, *hidden.shape[1:])
        return DeferredLogits(self, whole, surroundings, surroundings.dtype or hidden.dtype, head_input=hidden)


def deferring(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GPTModel._postprocess`, with an output layer that defers its logits if there are labels."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def postprocess(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, "output_layer", None)
        labels = signature.bind(self, *args, **kwargs).arguments.get("labels")
        takes = is_ours(type(self).compute_language_model_loss) and is_megatron(layer)
        if labels is None or not takes or not self.post_process or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        with _deferred(layer):
            return original(self, *args, **kwargs)

    return postprocess


@contextlib.contextmanager
def _deferred(layer: torch.nn.Module) -> Iterator[None]:
    """Inside the block, calling the layer returns deferred logits."""
    if "forward" in layer.__dict__:
        _warn("its forward was replaced (another patch)")
        yield
        return

    def forward(
        input_: torch.Tensor, weight: Any = None, runtime_gather_output: bool | None = None, **more: Any
    ) -> Any:
        def compute(**options: Any) -> Any:
            return type(layer).forward(layer, input_, weight, runtime_gather_output, **options)

        vocab_slice = find_slice(layer, weight)
        if runtime_gather_output or more:
            return compute(**more)
        if isinstance(vocab_slice, str):
            _warn(vocab_slice)
            return compute()
        return _Head(layer, vocab_slice, lambda: compute()[0]).deferred(input_), None

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def loss_of_deferred(original: Callable[..., Any]) -> Callable[..., Any]:
    """`LanguageModule.compute_language_model_loss`, which takes deferred logits as well."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: torch.Tensor, logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, DeferredLogits):
            return original(self, labels, logits, *args, **kwargs)
        if logits._parent is not None or not logits.is_deferred:
            return original(self, labels, logits.materialise(), *args, **kwargs)
        vocab_slice, hidden = logits._head.slice, logits._head_input
        by_token = labels.transpose(0, 1).contiguous()  # [batch, tokens] -> as the hidden states
        dtype = logits._surroundings.dtype
        weight = vocab_slice.weight if dtype is None else vocab_slice.weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            losses = linear_cross_entropy(
                hidden if dtype is None else hidden.to(dtype),
                weight,
                by_token,
                vocab_slice.group,
                reduction="none",
                sequence_parallel=vocab_slice.sequence_parallel,
            )
        return losses.view(by_token.shape).transpose(0, 1).contiguous()

    return compute_language_model_loss
