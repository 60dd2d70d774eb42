"""Warns of missing packages with kernels for a hybrid model's recurrence, without which plain torch computes it."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from torch import nn

from ..text import first_line
from .probing.mixers import CONV, DELTA
from .report import patched_parts

PACKAGES = {
    "causal_conv1d_fn": ("causal_conv1d", "causal-conv1d"),
    "torch_chunk_gated_delta_rule": ("fla", "flash-linear-attention"),
    "chunk_kimi_delta_attention": ("fla", "flash-linear-attention"),
    "mamba2_chunk_scan": ("mamba_ssm", "mamba-ssm"),
    "mamba_selective_scan": ("mamba_ssm", "mamba-ssm"),
    "mamba_chunk_scan_combined": ("mamba_ssm", "mamba-ssm"),  # this and the next two of transformers 4
    "selective_scan_fn": ("mamba_ssm", "mamba-ssm"),
    "selective_state_update": ("mamba_ssm", "mamba-ssm"),
}
"""Name in transformers' modeling modules -> (package, distribution) with a kernel for this function."""


def slow_recurrence(model: nn.Module) -> str:
    """A warning about missing packages that this model's modules would use, or ""."""
    modules = {type(module).__module__ for module in model.modules()}
    modeling = [sys.modules[name] for name in sorted(modules) if name.startswith("transformers.models.")]
    patched = {CONV, DELTA} & patched_parts(model).keys()
    names = [name for name in PACKAGES if not (patched and name == "causal_conv1d_fn")]
    needed = {PACKAGES[name] for name in names if any(hasattr(module, name) for module in modeling)}
    missing = [f"{distribution} {why}" for package, distribution in sorted(needed) if (why := _why_unusable(package))]
    if not missing:
        return ""
    return (
        f"liger_hw: the recurrence or short convolution of {type(model).__name__} runs in plain torch, many times "
        f"slower than with kernels: {'; '.join(missing)}"
    )


def _why_unusable(package: str) -> str:
    if package in sys.modules:
        return ""
    if importlib.util.find_spec(package) is None:
        return "is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # fla refuses some releases of Triton with errors of several kinds
        return f"cannot be imported ({first_line(error)})"
    return ""
