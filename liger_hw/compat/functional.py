"""Behind `liger_kernel.functional`, whose names are those of `liger_hw.transformers.functional` without `liger_`."""

from __future__ import annotations

from typing import Any

from ..transformers import functional


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(functional, f"liger_{name}")
