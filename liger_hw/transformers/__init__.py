"""Hugging Face side: patch functions for model families, layers, and the kernels as functions (`functional`).

from liger_hw.transformers import apply_liger_kernel_to_mistral

apply_liger_kernel_to_mistral()                          # the classes, before a model is made or after
report = apply_liger_kernel_to_mistral(model=model)      # this model alone
print(report); report.revert()
"""

from __future__ import annotations

import importlib
from typing import Any

from ..kernels import EXPORTS
from ..lazy import lazy
from .models import specs

HOME = {
    **dict.fromkeys(("patch", *(spec.function_name for spec in specs().values())), "liger_hw.transformers.apply"),
    "revert": "liger_hw.transformers.report",
    "PatchReport": "liger_hw.transformers.report",
    "AutoLigerKernelForCausalLM": "liger_hw.transformers.auto_model",
    "register_experts": "liger_hw.transformers.experts",
    "apply_tiled_mlp": "liger_hw.kernels.pointwise.tiled_mlp",
    "packing_leaks": "liger_hw.transformers.packing",
    "functional": "liger_hw.transformers.functional",
    **{
        name: f"liger_hw.kernels.{module}"
        for module, names in EXPORTS.items()
        for name in names
        if name != f"liger_{module.rpartition('.')[2]}" and not name.endswith(("Output", "_tp"))
    },
    "MODEL_TYPE_TO_APPLY_LIGER_FN": "liger_hw.transformers.apply",
    "_apply_liger_kernel": "liger_hw.transformers.apply",
    "_apply_liger_kernel_to_instance": "liger_hw.transformers.apply",
}
"""Public name -> module that defines it. Modules are loaded on first use, so importing this package loads no torch."""

__all__, _find, __dir__ = lazy(__name__, HOME)


def __getattr__(name: str) -> Any:
    """A public name, or a function of `functional` or a layer of the shim, which Liger has in this module.

    Raises `ImportError` for a name of Liger's that has a replacement, since an import statement does not show the
    message of an `AttributeError`.
    """
    if name in HOME or not name.lower().startswith(("liger", "apply_liger", "autoliger")):
        return _find(name)
    for home in map(importlib.import_module, ("liger_hw.transformers.functional", "liger_hw.compat.modules")):
        if hasattr(home, name):
            return getattr(home, name)
    if instead := importlib.import_module("liger_hw.compat.replaced").replacement(f"transformers.{name}"):
        raise ImportError(f"{name} is not in {__name__}: {instead}")
    return _find(name)
