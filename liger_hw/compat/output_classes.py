"""Behind `liger_kernel.transformers.model.output_classes`: outputs of a causal LM with two more fields.

`Liger<X>CausalLMOutputWithPast` is `<X>CausalLMOutputWithPast` of transformers, with `token_accuracy` and
`predicted_tokens`, which are None unless given. Classes of families that this transformers does not have are missing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import torch
from transformers import modeling_outputs

from ..transformers.models import specs

_SUFFIX = "CausalLMOutputWithPast"


@functools.lru_cache(maxsize=None)
def _with_fields(base: type) -> type:
    fields = [("token_accuracy", torch.Tensor | None, None), ("predicted_tokens", torch.Tensor | None, None)]
    return dataclasses.make_dataclass(
        f"Liger{base.__name__}", fields, bases=(base,), namespace={"__module__": __name__}
    )


def _base(name: str) -> type | None:
    """The class of transformers called `name`, among its common outputs or a family's own."""
    if hasattr(modeling_outputs, name):
        return getattr(modeling_outputs, name)
    model = name.removesuffix(_SUFFIX) + "ForConditionalGeneration"
    for spec in specs().values():
        if model in spec.models:
            try:
                return getattr(importlib.import_module(spec.modeling_module), name, None)
            except ModuleNotFoundError:
                return None
    return None


def __getattr__(name: str) -> Any:
    base = _base(name.removeprefix("Liger")) if name.startswith("Liger") and name.endswith(_SUFFIX) else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _with_fields(base)
