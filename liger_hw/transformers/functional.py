"""The kernels as functions, under the names and with the arguments of Liger 0.8.5.

Each one lives in `liger_hw/kernels/<op>.py`; importing this module loads none of them.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..kernels import EXPORTS

_HOME = {f"liger_{module.rpartition('.')[2]}": module for module, names in EXPORTS.items() if names}
_HOME["CrossEntropyOutput"] = _HOME["liger_cross_entropy"]
"""Name -> the file in `liger_hw/kernels` that defines it."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOME)}")
    value = getattr(importlib.import_module(f"liger_hw.kernels.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
