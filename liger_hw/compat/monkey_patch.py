"""For `liger_kernel.transformers.monkey_patch`: helpers with which programs patch single modules.

Unlike `liger_hw.patch(model)`, they do not test whether the kernel computes the same as the module.
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
    module.__dict__[method_name] = new_method.__get__(module, type(module))


def _patch_rms_norm_module(
    module: torch.nn.Module,
    offset: float = 0.0,
    eps: float = 1e-6,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> None:
    """Run one norm as `LigerRMSNorm`. eps: used if the norm has none."""
    _become(module, LigerRMSNorm, eps, offset=offset, casting_mode=casting_mode, in_place=in_place, row_mode=row_mode)


def _patch_layer_norm_module(module: torch.nn.Module, eps: float = 1e-6) -> None:
    """Run one norm as `LigerLayerNorm`. eps: used if the norm has none."""
    _become(module, LigerLayerNorm, eps)


def _patch_swiglu_module(module: torch.nn.Module, liger_module: type[torch.nn.Module]) -> None:
    """Run one gated MLP with the forward of `liger_module`."""
    _bind_method_to_module(module, "forward", liger_module.forward)
    _bind_method_to_module(module, "_get_name", lambda self: liger_module.__name__)


def _patch_geglu_module(module: torch.nn.Module) -> None:
    """Run one gated MLP as `LigerGEGLUMLP`, whose GELU is the tanh approximation."""
    module.approximate = "tanh"  # type: ignore[assignment]
    _patch_swiglu_module(module, LigerGEGLUMLP)


def _become(module: Any, liger_class: type[torch.nn.Module], default_eps: float, **options: Any) -> None:
    """Give one norm, or all copies of it in PEFT's `ModulesToSaveWrapper`, the forward of `liger_class`."""
    wrapped = type(module).__name__ == "ModulesToSaveWrapper"
    for norm in [module.original_module, *module.modules_to_save.values()] if wrapped else [module]:
        values = {
            "variance_epsilon": _first(norm, "variance_epsilon", "eps") or default_eps,
            "hidden_size": _first(norm, "hidden_size", "normalized_shape") or tuple(norm.weight.shape),
            "elementwise_affine": getattr(norm, "elementwise_affine", True),
            **{"impl": None, "mode": None, **options},
        }
        for name, value in values.items():
            setattr(norm, name, value)
        for method in ("forward", "extra_repr"):
            _bind_method_to_module(norm, method, getattr(liger_class, method))
        _bind_method_to_module(norm, "_get_name", lambda self: liger_class.__name__)


def _first(module: torch.nn.Module, *names: str) -> Any:
    return next((value for name in names if (value := getattr(module, name, None))), None)
