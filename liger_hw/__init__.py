"""Triton kernels for training language models: measured on NVIDIA, compiled and interpreted for AMD and Intel GPUs.

    import liger_hw

    report = liger_hw.patch(model)                 # a live model, or a class of transformers
    print(report)                                  # what runs on which kernel, what is left alone and why
    report.revert()                                # or liger_hw.revert(model)

`liger_hw.transformers` has one function a model family (`apply_liger_kernel_to_mistral`, ...), the layers and the
kernels as functions; `liger_hw.chunked_loss` the post-training losses. `liger_hw.activations` says what backward keeps,
`liger_hw.explain` why an op launches as it does. `LIGER_HW_DISABLE=1` makes every patch do nothing.

Importing this package imports neither triton nor transformers and touches no GPU; its names load on first use.
"""

from __future__ import annotations

from . import autotune
from .lazy import lazy
from .runtime import sharding

__version__ = "0.1.0"

sharding.handler = "liger_hw.distributed.dtensor"  # imported for the first DTensor
autotune.compiles_ahead = "liger_hw.autotune.compile_ahead"  # imported for the first call of an op with many kernels

_SUBMODULES = "transformers chunked_loss distributed recompute registry kernels backends autotune bench env hub trl"
HOME = {
    "patch": "liger_hw.transformers.apply",
    "revert": "liger_hw.transformers.report",
    "activations": "liger_hw.recompute.dial",
    "float8": "liger_hw.transformers.float8_linears",
    "kernel_config": "liger_hw.hub",
    "explain": "liger_hw.registry",
    "override": "liger_hw.registry",
    "pretend": "liger_hw.registry",
    "set_deterministic": "liger_hw.registry",
    "CountedRows": "liger_hw.kernels.heads.linear_head",
    "LaunchConfig": "liger_hw.backends.base",
    "Target": "liger_hw.backends.base",
    **{name: f"liger_hw.{name}" for name in _SUBMODULES.split()},
}
"""Public name -> module that defines it."""

__all__, __getattr__, __dir__ = lazy(__name__, HOME)
