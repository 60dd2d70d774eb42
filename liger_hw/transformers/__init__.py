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
from .models import specs

_HOME = {
    **{
        name: f"kernels.{module}"
        for module, names in EXPORTS.items()
        for name in names
        if name not in (f"liger_{module.rpartition('.')[2]}", "CrossEntropyOutput")
    },
    "PatchReport": "transformers.report",
    "revert": "transformers.report",
    "functional": "transformers.functional",
    "AutoLigerKernelForCausalLM": "transformers.auto_model",
    **dict.fromkeys(
        (
            "patch",
            "MODEL_TYPE_TO_APPLY_LIGER_FN",
            "_apply_liger_kernel",
            "_apply_liger_kernel_to_instance",
            *(spec.function_name for spec in specs().values()),
        ),
        "transformers.apply",
    ),
}
"""Public name -> module of liger_hw that defines it; loaded on first use, so importing this package loads no torch."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        import difflib

        near = difflib.get_close_matches(name, _HOME, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module = importlib.import_module(f"liger_hw.{_HOME[name]}")
    value = module if _HOME[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
