"""Behind `liger_kernel.transformers.monkey_patch`, after the patch functions: the transformers that they run on, and
the helpers by which programs patch single modules of models of their own.

The helpers ask nothing: a module computes Liger's layer from then on. `liger_hw.patch(model)` compares first.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import transformers
from packaging import version

from ..transformers import LigerGEGLUMLP, LigerLayerNorm, LigerRMSNorm

transformer_version = version.parse(transformers.__version__)
IS_TRANSFORMERS_V5_OR_LATER = transformer_version.major >= 5


def _bind_method_to_module(module: torch.nn.Module, method_name: str, new_method: Callable) -> None:
    """Make a function the method of one module."""
    module.__dict__[method_name] = new_method.__get__(module, type(module))


def _patch_rms_norm_module(
    module: torch.nn.Module,
    offset: float = 0.0,
    eps: float = 1e-6,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> None:
    """Run one norm, and the copies that PEFT's modules_to_save made of it, as `LigerRMSNorm`; eps where it has none."""
    options = {"offset": offset, "casting_mode": casting_mode, "in_place": in_place, "row_mode": row_mode}
    for part in _copies(module):
        _become(part, LigerRMSNorm, eps, options)


def _patch_layer_norm_module(module: torch.nn.Module, eps: float = 1e-6) -> None:
    """Run one norm, and the copies that PEFT's modules_to_save made of it, as `LigerLayerNorm`; eps where it has
    none."""
    for part in _copies(module):
        _become(part, LigerLayerNorm, eps, {})


def _patch_swiglu_module(module: torch.nn.Module, liger_module: type[torch.nn.Module]) -> None:
    """Run one gated MLP with the forward of a class of Liger's."""
    _bind_method_to_module(module, "forward", liger_module.forward)
    _bind_method_to_module(module, "_get_name", lambda self: liger_module.__name__)


def _patch_geglu_module(module: torch.nn.Module) -> None:
    """Run one gated MLP as `LigerGEGLUMLP`, whose GELU is the tanh approximation."""
    module.approximate = "tanh"  # type: ignore[assignment]
    _patch_swiglu_module(module, LigerGEGLUMLP)


def _copies(module: Any) -> list[torch.nn.Module]:
    if type(module).__name__ != "ModulesToSaveWrapper":
        return [module]
    return [module.original_module, *module.modules_to_save.values()]


def _become(norm: torch.nn.Module, liger_class: type[torch.nn.Module], eps: float, options: dict[str, Any]) -> None:
    values = (getattr(norm, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((value for value in values if value), eps)
    sizes = (getattr(norm, name, None) for name in ("hidden_size", "normalized_shape"))
    size = next((value for value in sizes if value), tuple(norm.weight.shape))
    affine = {"elementwise_affine": getattr(norm, "elementwise_affine", True)}
    for name, value in {"variance_epsilon": eps, "hidden_size": size, "impl": None, "mode": None, **affine}.items():
        setattr(norm, name, value)
    for name, value in options.items():
        setattr(norm, name, value)
    _bind_method_to_module(norm, "forward", liger_class.forward)
    _bind_method_to_module(norm, "extra_repr", liger_class.extra_repr)
    _bind_method_to_module(norm, "_get_name", lambda self: liger_class.__name__)
