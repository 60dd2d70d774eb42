"""The kernels as a repository of the `kernels` package, which transformers' `use_kernels` loads.

    config = liger_hw.kernel_config()
    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True, kernel_config=config)

`REPOSITORY` is the folder for `kernels.LocalLayerRepository`; `liger-hw hub` prints it. `LAYERS` has the layers that
may replace each name that transformers registers. As in a patch, a class or function is run to find which of these
layers computes the same (transformers/probing/).
"""

from __future__ import annotations

import functools
import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import KernelConfig

log = logging.getLogger("liger_hw")

REPOSITORY = Path(__file__).parent / "repository"

LAYERS = {
    "RMSNorm": ("RMSNorm", "RMSNormFp32Weight", "RMSNormZeroCentered"),
    "RMSNormZeroCentered": ("RMSNormZeroCentered",),
    "RMSNormGated": ("RMSNormGated", "RMSNormGatedFp32Weight"),
    "LayerNorm": ("LayerNorm",),
    "rotary_pos_emb": ("RotaryPosEmb",),
    "SwiGLUMLP": ("SwiGLUMLP",),
    "GeGLUMLP": ("GeGLUMLP",),
    "Experts": ("Experts",),
}
"""Name under which transformers registers a class or function -> the layers that may replace it."""

_UNREGISTERED = {"liger_hw_norm": "RMSNorm", "liger_hw_swiglu": "SwiGLUMLP", "liger_hw_geglu": "GeGLUMLP"}
"""Name under which `kernel_mapping` registers a class that transformers does not register -> its entry of `LAYERS`.
These names differ from transformers', so that transformers' mapping does not apply to these classes."""

DEVICES = ("cuda", "rocm", "xpu", "cpu")
_NORM = {"weight", "variance_epsilon"}
_MLP, _FUSED_MLP = {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}
_COMPUTES = (
    ("RMSNorm", "rms_norm", "llama", _NORM),
    ("RMSNormFp32Weight", "rms_norm", "gemma", _NORM),
    ("RMSNormZeroCentered", "rms_norm", "gemma, offset 1", {"weight", "eps"}),
    ("RMSNormGated", "gated_rms_norm", "{activation} after the norm, llama", _NORM),
    ("RMSNormGatedFp32Weight", "gated_rms_norm", "{activation} after the norm, gemma", _NORM),
    ("LayerNorm", "layer_norm", "", {"weight", "bias", "eps"}),
    ("LayerNorm", "layer_norm", "no bias", {"weight", "eps"}),
    ("RotaryPosEmb", "rope", "", set()),
    ("SwiGLUMLP", "swiglu", "silu", _MLP),
    ("SwiGLUMLP", "fused_gate_up_swiglu", "silu", _FUSED_MLP),
    *(("GeGLUMLP", "geglu", act, names) for act in ("gelu", "gelu_tanh") for names in (_MLP, _FUSED_MLP)),
)
"""(layer, and the `Match` that it computes: kernel, variant, names of the module's attributes that are used)."""


def kernel_config(model: nn.Module | None = None) -> KernelConfig:
    """transformers' `KernelConfig` with which a model's layers run on liger_hw's kernels.

    Pass it as `kernel_config` to `from_pretrained(..., use_kernels=True)`, or pass a loaded model to this function and
    the result to `model.set_use_kernels(True, config)`. Without a model, layers are chosen when transformers applies
    the configuration to one. `config.kernel_mapping` shows the choice. Unlike a plain `KernelConfig`, which holds for
    the model's current mode and device, it holds for training and inference, and on all devices.
    Raises `ImportError` when transformers or kernels is missing or too old, `TypeError` if model is not a loaded model,
    and `ValueError` if liger_hw has none of the model's layers.
    """
    config = _config_class()(use_local_kernel=True)
    if model is not None:
        config.sanitize_kernel_mapping(model)
    return config


def kernel_mapping(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The mapping for `kernels.use_kernel_mapping` with which `kernels.kernelize(model, mode=...)` uses our layers.

    This call also registers gated MLPs and RMSNorms that transformers does not register, under liger_hw's names.
    Raises `ImportError` without the kernels package, and `ValueError` if liger_hw has none of the model's layers.
    """
    return _for_every_device(_chosen_layers(model))


@functools.cache
def _config_class() -> type[KernelConfig]:
    """A subclass of `KernelConfig` that chooses its layers when it is applied to a model."""
    from transformers import KernelConfig
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        versions = f">={import_utils.KERNELS_MIN_VERSION},<{getattr(import_utils, 'KERNELS_MAX_VERSION', '1')}"
        raise ImportError(f"transformers needs another version of the kernels package: pip install 'kernels{versions}'")

    class LigerKernelConfig(KernelConfig):
        def sanitize_kernel_mapping(self, model: nn.Module) -> None:
            self.kernel_mapping = {name: f"{REPOSITORY}:{layer}" for name, layer in _chosen_layers(model).items()}

        def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
            layers = {name: layer.rpartition(":")[2] for name, layer in self.kernel_mapping.items()}
            self.kernel_mapping = _for_every_device(layers)

    return LigerKernelConfig


def _for_every_device(layers: dict[str, str]) -> dict[str, dict[str, Any]]:
    from kernels import LocalLayerRepository

    repositories = {name: LocalLayerRepository(REPOSITORY, layer_name=layer) for name, layer in layers.items()}
    return {name: dict.fromkeys(DEVICES, repository) for name, repository in repositories.items()}


def _chosen_layers(model: nn.Module) -> dict[str, str]:
    """Registered name -> our layer that computes the same as the model's classes or functions of this name."""
    if isinstance(model, type) or not hasattr(model, "modules"):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(f"kernel_config: model must be a loaded model or None, got {kind}; load it first")
    from kernels import get_local_kernel, replace_kernel_forward_from_hub

    layers = get_local_kernel(REPOSITORY).layers
    layers_by_name: dict[str, set[str | None]] = {}
    module_of_class = {type(module): module for module in model.modules()}
    for module in model.modules():  # functions that kernels has wrapped as modules
        module_of_class |= {type(f): f for f in getattr(module, "_kernel_funcs", {}).values()}
    for module in module_of_class.values():
        name = getattr(type(module), "kernel_layer_name", None)
        if name is None or name in _UNREGISTERED:
            match = _unregistered_match(module, layers)
            if match is None:
                continue
            name, layer = match
            replace_kernel_forward_from_hub(type(module), name)
        elif name in LAYERS:
            layer = layer_of(module, name, layers)
        else:
            continue
        if layer is None:
            log.info("liger_hw: %s keeps its forward: no layer for %s computes the same", type(module).__name__, name)
        layers_by_name.setdefault(name, set()).add(layer)
    chosen = {}
    for name, (layer, *others) in layers_by_name.items():
        if others:
            log.warning("liger_hw: classes registered as %s keep their forwards: they need different layers", name)
        elif layer is not None:
            chosen[name] = layer
    if not chosen:
        raise ValueError(
            f"kernel_config: {type(model).__name__} has no layer that liger_hw's kernels can replace; "
            "liger_hw.patch(model) reports which parts it replaces, and why it leaves the others"
        )
    return chosen


def _unregistered_match(module: nn.Module, layers: Any) -> tuple[str, str] | None:
    """(name of `_UNREGISTERED`, layer) if the module seems an RMSNorm or gated MLP and a layer computes the same."""
    is_mlp, is_norm = "down_proj" in module._modules, "RMSNorm" in type(module).__name__
    for name, entry in _UNREGISTERED.items():
        if (is_norm if entry == "RMSNorm" else is_mlp) and (layer := layer_of(module, entry, layers)):
            return name, layer
    return None


def layer_of(module: nn.Module, name: str, layers: Any) -> str | None:
    """The layer in LAYERS[name] that computes the same as a module (or a wrapped function), or None."""
    from ..transformers.probing import Match, recognise, rotary

    if name == "Experts":  # this layer's forward examines the module
        return name
    function = rotary.plain_function(module)
    match = recognise(module) if function is None else rotary.recognise(function)
    if not isinstance(match, Match):
        return None
    for layer, kernel, variant, names in _COMPUTES:
        variant = variant.format(activation=getattr(module, "activation", ""))
        is_match = (kernel, variant, names) == (match.kernel, match.variant, match.used)
        if is_match and layer in LAYERS[name] and _n_arguments(getattr(layers, layer)) == _n_arguments(type(module)):
            return layer
    return None


def _n_arguments(cls: type) -> int:
    """How many arguments cls.forward takes. `kernels` requires that a layer's forward takes as many as the module's."""
    return len(inspect.signature(cls.forward).parameters)
