"""What a patch is asked for: a live model inside its wrappers, a class, a family; and unloaded samples of classes."""

from __future__ import annotations

import difflib
import functools
import importlib
from types import ModuleType
from typing import Any, Iterable

from .spec import FamilySpec


def unknown_keyword(function: str, name: str, known: Iterable[str]) -> str:
    """The message for a keyword that a patch function does not have."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"its keywords are {', '.join(known)}"
    return f"{function}() got an unexpected keyword argument {name!r}; {hint}"


def modeling_module(spec: FamilySpec) -> ModuleType:
    """The family's module in transformers. Raises `ImportError` with what to do when it has none."""
    try:
        import transformers
    except ImportError:
        raise ImportError(f"{spec.function_name} patches transformers models: pip install transformers") from None
    try:
        return importlib.import_module(spec.modeling_module)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("transformers.models"):
            raise
        version = transformers.__version__
        raise ImportError(
            f"transformers {version} has no {spec.modeling_module}; install a version that has {spec.name}"
        ) from None


def checked_model(spec: FamilySpec, model: Any) -> Any:
    """The bare model to patch, or None for the classes. Raises `TypeError` for anything else, naming what to call."""
    import torch

    if model is None:
        return None
    bare = model if isinstance(model, type) else unwrapped(model)
    if not isinstance(bare, (type, torch.nn.Module)):
        raise TypeError(
            f"{spec.function_name}: model must be a loaded transformers model, one of its classes or None, got "
            f"{type(model).__name__}; load it first, for example with AutoModelForCausalLM.from_pretrained"
        )
    cls = bare if isinstance(bare, type) else type(bare)
    if not any(base.__module__ == spec.modeling_module for base in cls.__mro__):
        raise TypeError(f"{spec.function_name}: model is a {cls.__name__}, not a {spec.name} model; {_advice(cls)}")
    return None if isinstance(bare, type) else bare


def unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT, torch.compile, DDP or FSDP wrappers, or `model` when there is none."""
    import torch
    from transformers import PreTrainedModel

    bare = model
    while not isinstance(bare, PreTrainedModel):
        if hasattr(bare, "get_base_model"):
            inner = bare.get_base_model()
        else:
            inner = getattr(bare, "_orig_mod", None) or getattr(bare, "module", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        bare = inner
    return bare


def _advice(cls: type) -> str:
    from .models import specs

    for spec in specs().values():
        if any(base.__module__ == spec.modeling_module for base in cls.__mro__):
            return f"call {spec.function_name} for it"
    return "call liger_hw.patch(model), which needs no family"


# -- samples ---------------------------------------------------------------------------------------------------------


class NoSample(Exception):
    """The message says why no model of a class could be made."""


@functools.lru_cache(maxsize=64)
def sample(cls: type) -> Any:
    """A model of `cls` from its default configuration, or from a tiny one where that is not valid, without weights (on
    the meta device). Raises `NoSample`."""
    import torch

    from .tiny import tiny_config

    reasons = []
    state = torch.get_rng_state()
    try:
        for make in (cls.config_class, lambda: tiny_config(cls.config_class)):
            try:
                with torch.device("meta"):
                    return cls(make()).train()
            except Exception as error:  # a default configuration need not be valid
                reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:160])
    finally:
        torch.set_rng_state(state)
    raise NoSample(f"{cls.__name__} cannot be made from its default configuration ({reasons[-1]})")
