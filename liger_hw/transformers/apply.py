"""The public patch functions: `patch` for any model, `apply_liger_kernel_to_<family>` for the families of models/.

They check the arguments and find the live model or classes to patch; engine.py patches these. Hugging Face's Trainer
and other frameworks use Liger's names `MODEL_TYPE_TO_APPLY_LIGER_FN`, `_apply_liger_kernel` and
`_apply_liger_kernel_to_instance`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import logging
import sys
import warnings
from types import ModuleType
from typing import Any, Callable, Collection, TypeVar, Union, cast

import torch

from ..distributed import owners
from ..recompute.levels import Levels
from ..text import first_line
from . import engine
from .models import FamilySpec, specs
from .report import PatchReport

log = logging.getLogger("liger_hw")

Model = Union[torch.nn.Module, "type[torch.nn.Module]"]
"""A live model, or a class of a transformers model."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"its keywords are {', '.join(known)}"


def _suggests_keywords(function: _F) -> _F:
    """Make the error about an unknown keyword of `function` suggest a known one."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                hint = _nearest(name, known)
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
        return function(*args, **kwargs)

    return cast(_F, checked)


@_suggests_keywords
def patch(
    model: Model,
    *,
    rope: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    swiglu: bool = True,
    geglu: bool = True,
    relu_squared: bool = True,
    experts: bool = True,
    short_conv: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    activations: Levels | None = None,
) -> PatchReport:
    """Run a model's modules on liger_hw's kernels wherever a kernel computes the same.

    model: a live `torch.nn.Module` (also wrapped by PEFT, DDP, FSDP or torch.compile): no other model is patched. Or a
    transformers model class: the classes of its family are patched, for models made before or after this call (experts:
    only after it)
    rope, rms_norm, layer_norm, swiglu, geglu, relu_squared, experts, short_conv: which parts may be patched. Each is
    recognised by running it and the kernels' references on small random inputs. A part that agrees with no kernel is
    not changed, and the report has the reason. short_conv: linear attention before its scan, and LFM2's convolution
    cross_entropy, fused_linear_cross_entropy (not both): the first replaces the loss, and logits are computed; with the
    second, training with labels does not compute logits. Both need a transformers causal LM.
    activations: the setting of `liger_hw.activations`: `keep`, `cheap`, `mlp`, `full`, `fit`, a size or levels by
    layer. None: `keep`, except that with the fused loss the last layer is at `cheap`

    Returns a PatchReport: `revert()` or the end of a `with` block undoes the call; `str(report)` is a table.
    Raises `TypeError` for anything but a module or a transformers model class. Raises `ValueError` for both losses, for
    a second call with the other loss, and for a class that cannot be made from its default configuration.
    """
    options = {
        "rope": rope,
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "swiglu": swiglu,
        "geglu": geglu,
        "relu_squared": relu_squared,
        "experts": experts,
        "short_conv": short_conv,
        "cross_entropy": cross_entropy,
        "fused_linear_cross_entropy": fused_linear_cross_entropy,
    }
    if isinstance(model, type) and hasattr(model, "config_class"):
        try:
            samples = (sample(model),)
        except NoSample as error:
            raise ValueError(f"patch: {error}; load a model and pass it instead of its class") from None
        return engine.patch_classes(model.__name__, options, activations, sys.modules[model.__module__], samples)
    if not isinstance(model, torch.nn.Module):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"patch: model must be a loaded model or a class of a transformers model, got {kind}; load it first, for "
            "example with AutoModelForCausalLM.from_pretrained"
        )
    bare = unwrapped(model)
    return engine.patch_model(type(bare).__name__, options, activations, bare)


# -- families --------------------------------------------------------------------------------------------------------


def _family_function(spec: FamilySpec) -> Callable[..., PatchReport]:
    """The public `apply_liger_kernel_to_<name>` of a spec, which checks its arguments."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=default) for name, default in spec.parameters]
    additions = ("experts", "activations")  # not in Liger
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in additions]
    if spec.also:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(parameters)
    known = [*(name for name, _ in spec.parameters), *spec.also, *additions]

    def function(*args: Any, **kwargs: Any) -> PatchReport:
        for name in [name for name in kwargs if name not in known]:
            hint = _nearest(name, known)
            message = f"{spec.function_name}() got an unexpected keyword argument {name!r}"
            if not spec.also:
                raise TypeError(f"{message}; {hint}")
            warnings.warn(f"{message}, which is ignored; {hint}", stacklevel=2)  # the default filter shows it once
            del kwargs[name]
        for value, parameter in zip(args, parameters):
            if parameter.name != "model" and isinstance(value, (type, torch.nn.Module)):
                raise TypeError(f"{spec.function_name}(): pass the model by name: {spec.function_name}(model=model)")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{spec.function_name}(): {error}; its arguments are {signature}") from None
        mlps_asked_off = any(bound.arguments.get(name) is False for name in engine.MLPS)
        bound.apply_defaults()
        options = dict(bound.arguments)
        if options["experts"] is None:
            options["experts"] = not mlps_asked_off
        options |= {name: True for name in spec.also} | {"short_conv": False} | options.pop("kwargs", {})
        if options.get("fused_linear_cross_entropy", False) is None:  # Liger has the plain loss by default
            options["fused_linear_cross_entropy"] = not options["cross_entropy"]
        return _patch_family(spec, options.pop("model"), options.pop("activations"), options)

    function.__name__ = function.__qualname__ = spec.function_name
    function.__module__ = __name__
    function.__signature__ = signature
    unknown = "is ignored with a warning" if spec.also else "raises `TypeError`"
    parts = ", ".join(name for name in known if name not in ("model", *additions))
    function.__doc__ = f"""Run {spec.name} models ({", ".join(spec.models)}) on liger_hw's kernels.

    {parts}: which parts; see `liger_hw.patch`
    model: None or a class of the family: the classes in transformers are patched, for models made before or after this
    call. A live model (also wrapped by PEFT, DDP, FSDP or torch.compile): no other model is patched.
    experts: whether mixtures of experts are patched; None: True, unless an MLP keyword is passed as False
    activations: see `liger_hw.patch`

    Returns a PatchReport: `revert()` or the end of a `with` block undoes the call; `str(report)` is a table.
    An unknown keyword {unknown}. Raises `TypeError` for a model of another family, `ValueError` for both losses or for
    a second call with the other loss, `ImportError` if transformers has no such family.
    """
    return function


def _patch_family(spec: FamilySpec, model: Any, activations: Any, options: dict[str, bool]) -> PatchReport:
    modeling = _modeling_module(spec)
    model = _checked_model(spec, model)
    if model is not None:
        return engine.patch_model(spec.name, options, activations, model)
    samples, reason = [], "transformers has none of its classes"
    for name in spec.models:
        try:
            if hasattr(modeling, name):
                samples.append(sample(getattr(modeling, name)))
        except NoSample as error:
            reason = error
    if not samples:
        raise RuntimeError(f"{spec.function_name}: {reason}; pass a live model instead")
    return engine.patch_classes(spec.name, options, activations, modeling, tuple(samples))


def _modeling_module(spec: FamilySpec) -> ModuleType:
    """The family's module in transformers. Raises `ImportError` if it has no such module."""
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


def _checked_model(spec: FamilySpec, model: Any) -> Any:
    """The unwrapped model to patch, or None for the classes. Raises `TypeError` for a model of another family."""
    if model is None:
        return None
    bare = model if isinstance(model, type) else unwrapped(model)
    if not isinstance(bare, (type, torch.nn.Module)):
        raise TypeError(
            f"{spec.function_name}: model must be a loaded transformers model, one of its classes or None, got "
            f"{type(model).__name__}; load it first, for example with AutoModelForCausalLM.from_pretrained"
        )
    cls = bare if isinstance(bare, type) else type(bare)
    defined_in = {base.__module__ for base in cls.__mro__}
    if spec.modeling_module not in defined_in:
        others = (other.function_name for other in specs().values() if other.modeling_module in defined_in)
        other = next(others, None)
        advice = f"call {other} for it" if other else "call liger_hw.patch(model), which needs no family"
        raise TypeError(f"{spec.function_name}: model is a {cls.__name__}, not a {spec.name} model; {advice}")
    return None if isinstance(bare, type) else bare


# -- models and samples ----------------------------------------------------------------------------------------------


def unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT, torch.compile, DDP or FSDP wrappers, or `model` itself. Stores parameter
    shapes of FSDP1's wrappers, which the model inside lacks."""
    from transformers import PreTrainedModel

    if isinstance(model, torch.nn.Module):
        owners.store_flattened_shapes(model)
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


class NoSample(Exception):
    """No model of a class could be made. The message has the reason."""


def sample(cls: type) -> Any:
    """A model of `cls` without weights (on the meta device), from which a class patch finds the modules' classes.

    It is made from the default configuration, or from a tiny one if the default is not valid. In transformers 4, which
    makes a module of each expert, the tiny one is tried first. Raises `NoSample`.
    """
    from .tiny import IS_TRANSFORMERS_5, tiny_config

    makers, reason = [cls.config_class, lambda: tiny_config(cls.config_class)], ""
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        for make in makers if IS_TRANSFORMERS_5 else makers[::-1]:
            try:
                return cls(make()).train()
            except Exception as error:  # a default configuration need not be valid
                reason = first_line(error)
    raise NoSample(f"{cls.__name__} cannot be made from its default configuration ({reason})")


# -- names that frameworks use ---------------------------------------------------------------------------------------

_FUNCTIONS = {spec.function_name: _family_function(spec) for spec in specs().values()}
globals().update(_FUNCTIONS)

MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., PatchReport]] = {
    model_type: _FUNCTIONS[spec.function_name] for spec in specs().values() for model_type in spec.model_types
}
"""`config.model_type` -> the function that patches such models."""


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> PatchReport | None:
    """Patch the classes of a `config.model_type`: by its function, else by `patch` of its causal LM class.

    Keywords that the function does not have are logged and left out. Returns None, with a warning, for a type that has
    no causal LM in transformers.
    """
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is not None:
        return function(**_applicable(function, kwargs))
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    if model_type not in names:
        log.warning("liger_hw: transformers has no causal LM of type %r; nothing is patched", model_type)
        return None
    import transformers

    return patch(getattr(transformers, names[model_type]), **_applicable(patch, kwargs))


def patch_instance(model: Any, **kwargs: Any) -> PatchReport:
    """Patch one live model by the function of its `config.model_type`, or by `patch`; keywords as above."""
    config = getattr(unwrapped(model), "config", None)
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(getattr(config, "model_type", None), patch)
    return function(model=model, **_applicable(function, kwargs))


_apply_liger_kernel_to_instance = patch_instance  # as Hugging Face's Trainer and TRL call it


def _applicable(function: Callable, kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in parameters]
    if unknown:
        name = getattr(function, "__name__", repr(function))  # a partial function has no name
        log.info("liger_hw: %s has no keyword %s; left out", name, ", ".join(unknown))
    return {name: value for name, value in kwargs.items() if name not in unknown and name != "model"}
