"""For `liger_kernel.transformers.model.<family>`: forwards that programs bind to a class or a model.

    LlamaForCausalLM.forward = lce_forward  # of liger_kernel.transformers.model.llama

A family's `lce_forward` is the forward of its class in transformers, with a patch's fused loss (transformers/loss.py).
It works for any model with an `lm_head` and the other attributes that the forward reads.

`Liger<X>CausalLMOutputWithPast` of `liger_kernel.transformers.model.output_classes` is `<X>CausalLMOutputWithPast` of
transformers with two more fields, `token_accuracy` and `predicted_tokens`, None by default.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from types import ModuleType
from typing import Any, Callable

import torch

from ..distributed.owners import head_loss
from ..kernels.losses.cross_entropy import CrossEntropyOutput
from ..transformers.loss import causal_lm_forward
from ..transformers.marks import is_ours, mark, original_of
from ..transformers.models import specs
from .loss_utils import LigerForCausalLMLoss

_NAMES = {
    "gemma3": ("causal_forward", "multimodal_forward"),
    "gemma4": ("causal_forward", "multimodal_forward"),
    "qwen3_5": ("lce_forward", "lce_forward_for_multimodal"),
    "qwen3_5_moe": ("lce_forward", "lce_forward_conditional_generation"),
}
"""Family -> names of its causal LM's forward and its multimodal model's. Other families have one, `lce_forward`."""
_FAMILIES = {"hunyuan_v1": "hunyuan_v1_dense"}
"""Liger's name of a family -> transformers' name, if they differ."""
_PART = "fused_linear_cross_entropy"
_OUTPUT = "CausalLMOutputWithPast"


def classes_of(family: str) -> dict[str, str]:
    """Name of each forward in `liger_kernel.transformers.model.<family>` -> its class; empty for an unknown family."""
    spec = specs().get(_FAMILIES.get(family, family))
    models = () if spec is None else spec.models
    classes = [
        name for suffix in ("ForCausalLM", "ForConditionalGeneration") for name in models if name.endswith(suffix)
    ]
    return dict(zip(_NAMES.get(family, ("lce_forward",)), classes))


class FamilyModule(ModuleType):
    """`liger_kernel.transformers.model.<family>`. Assigning a forward to it also assigns the forward to its class."""

    def fill(self, family: str) -> None:
        modeling = importlib.import_module(specs()[_FAMILIES.get(family, family)].modeling_module)
        classes = {name: getattr(modeling, cls) for name, cls in classes_of(family).items()}
        forwards = {name: _forward(self.__name__, name, cls) for name, cls in classes.items()}
        self.__dict__.update(forwards, _classes=classes)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_classes", ()):
            self._classes[name].forward = original_of(value) if is_ours(value) else value


def _forward(module: str, name: str, cls: type) -> Callable[..., Any]:
    original, switch = original_of(cls.forward), [True]
    forward = mark(causal_lm_forward(original, "lm_head", True, switch), _PART, _PART, switch, original)
    forward.__module__, forward.__name__, forward.__qualname__ = module, name, name
    return forward


def lce_maybe_trainable_lm_head(
    self: Any,
    hidden_states: torch.Tensor,
    hidden_size: int,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    **loss_kwargs: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """`LigerForCausalLMLoss` of a model's `lm_head`, for calls inside the model's forward.

    Raises `ValueError` for a head whose logits depend on more than its weight and bias, such as one with LoRA.
    """
    losses = []

    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        options = {"shift_labels": shift_labels, "bias": bias, **loss_kwargs}
        losses.append(LigerForCausalLMLoss(hidden, weight, labels, hidden_size, **options))
        return losses[0].loss if isinstance(losses[0], CrossEntropyOutput) else losses[0]

    total = head_loss(self.lm_head, hidden_states, loss)
    return dataclasses.replace(losses[0], loss=total) if isinstance(losses[0], CrossEntropyOutput) else total


# -- outputs ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _with_fields(base: type) -> type:
    fields = [("token_accuracy", torch.Tensor | None, None), ("predicted_tokens", torch.Tensor | None, None)]
    return dataclasses.make_dataclass(
        f"Liger{base.__name__}", fields, bases=(base,), namespace={"__module__": __name__}
    )


def _output(name: str) -> type | None:
    """The output class `name` of transformers, from the module of its multimodal model or from modeling_outputs."""
    import transformers

    model = getattr(transformers, name.removesuffix(_OUTPUT) + "ForConditionalGeneration", None)
    module = transformers.modeling_outputs if model is None else sys.modules[model.__module__]
    return getattr(module, name, None)


def __getattr__(name: str) -> Any:
    base = _output(name.removeprefix("Liger")) if name.startswith("Liger") and name.endswith(_OUTPUT) else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _with_fields(base)
