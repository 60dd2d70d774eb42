"""liger_hw: Triton kernels for training language models, the same on NVIDIA, AMD and Intel GPUs.

    from liger_hw.transformers import apply_liger_kernel_to_mistral

    apply_liger_kernel_to_mistral()

Importing this package imports neither triton nor transformers and touches no GPU; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "activations": "recompute.dial",
    "explain": "registry",
    "override": "registry",
    "pretend": "registry",
    "set_deterministic": "registry",
    "CountedRows": "kernels.heads.counted_rows",
    "patch": "transformers.apply",
    "revert": "transformers.report",
    "LaunchConfig": "backends.base",
    "Target": "backends.base",
}
"""Public name -> module that defines it."""

_SUBMODULES = (
    *("autotune", "backends", "bench", "chunked_loss", "distributed", "env", "kernels", "recompute", "registry"),
    "transformers",
)

__all__ = [*_HOME, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        import difflib

        near = difflib.get_close_matches(name, __all__, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
