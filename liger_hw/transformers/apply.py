"""The public patch functions: `patch` for any model, `apply_liger_kernel_to_<family>` for the families of models/.

`MODEL_TYPE_TO_APPLY_LIGER_FN`, `_apply_liger_kernel` and `_apply_liger_kernel_to_instance` are what Hugging Face's
Trainer and other frameworks look for, under Liger's names.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any, Callable

from . import engine
from .models import specs
from .report import PatchReport
from .spec import FamilySpec
from .targets import NoSample, checked_model, modeling_module, sample, unknown_keyword, unwrapped

log = logging.getLogger("liger_hw")


def patch(
    model: Any,
    *,
    rope: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    swiglu: bool = True,
    geglu: bool = True,
    relu_squared: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    activations: Any = None,
) -> PatchReport:
    """Run any model on liger_hw's kernels, wherever they compute what its own modules compute.

    model: a live `torch.nn.Module` (also wrapped by PEFT, DDP, FSDP or torch.compile), which is patched alone; or a
    class of a transformers model, whose family's own classes are patched, for models made before or after this call
    rope, rms_norm, layer_norm, swiglu, geglu, relu_squared: which parts may be patched. Each is recognised by running
    it and the kernels' references on small random inputs; what agrees with no kernel is left alone, with the reason.
    cross_entropy keeps the logits and replaces the loss only; fused_linear_cross_entropy (not both) never computes the
    logits while training with labels. These two need a transformers causal LM.
    activations: `cheap`, `mlp`, `full`, `fit`, a size or levels by layer: what backward keeps (see liger_hw.activations)

    Returns a PatchReport: `revert()` undoes the call, as does leaving it as a `with` block; `str(report)` is a table.
    Raises `TypeError` for anything but a module or a transformers model class, `ValueError` for both losses at once,
    for a second call that asks for the other loss, or for a class that cannot be made from its default configuration.
    """
    import torch

    options = dict(locals())
    options.pop("torch"), options.pop("model")
    if isinstance(model, type) and hasattr(model, "config_class"):
        modeling = sys.modules[model.__module__]
        try:
            return engine.apply(model.__name__, options, classes=(modeling, (sample(model),)))
        except NoSample as error:
            raise ValueError(f"patch: {error}; load a model and pass it instead of its class") from None
    if not isinstance(model, torch.nn.Module):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"patch: model must be a loaded model or a class of a transformers model, got {kind}; load it first, for "
            "example with AutoModelForCausalLM.from_pretrained"
        )
    bare = unwrapped(model)
    return engine.apply(type(bare).__name__, options, model=bare)


def patch_function(spec: FamilySpec) -> Callable[..., PatchReport]:
    """The public `apply_liger_kernel_to_<name>` of a spec, with its real signature, which it enforces."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=default) for name, default in spec.parameters]
    parameters.append(inspect.Parameter("activations", inspect.Parameter.KEYWORD_ONLY, default=None))
    if spec.also:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(parameters)
    known = [*(name for name, _ in spec.parameters), *spec.also, "activations"]

    def function(*args: Any, **kwargs: Any) -> PatchReport:
        for name in kwargs:
            if name not in known:
                raise TypeError(unknown_keyword(spec.function_name, name, known))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{spec.function_name}(): {error}; its arguments are {signature}") from None
        bound.apply_defaults()
        options = dict(bound.arguments)
        options |= {name: True for name in spec.also} | options.pop("kwargs", {})
        return _apply_spec(spec, options.pop("model"), options)

    function.__name__ = function.__qualname__ = spec.function_name
    function.__module__ = __name__
    function.__signature__ = signature
    function.__doc__ = f"""Run {spec.name} models ({", ".join(spec.models)}) on liger_hw's kernels.

    {", ".join(name for name in known if name not in ("model", "activations"))}: which parts; `cross_entropy` keeps the logits and replaces
    the loss only, `fused_linear_cross_entropy` (not both) never computes them while training with labels.
    model: None patches the classes in transformers, for models made before or after this call; a live model (also
    wrapped by PEFT, DDP, FSDP or torch.compile) is patched alone; a class of the family means None.
    activations: `cheap`, `mlp`, `full`, `fit`, a size or levels by layer: what backward keeps (see liger_hw.activations)

    Returns a PatchReport: `revert()` undoes the call, as does leaving it as a `with` block; `str(report)` is a table.
    Raises `TypeError` for an unknown keyword or a model of another family, `ValueError` for both losses at once or for
    a second call that asks for the other loss, `ImportError` when transformers has no such family.
    """
    return function


def _apply_spec(spec: FamilySpec, model: Any, options: dict[str, Any]) -> PatchReport:
    modeling = modeling_module(spec)
    model = checked_model(spec, model)
    if model is not None:
        return engine.apply(spec.name, options, model=model)
    classes = [getattr(modeling, name) for name in spec.models if hasattr(modeling, name)]
    samples, reason = [], None
    for cls in classes:
        try:
            samples.append(sample(cls))
        except NoSample as error:
            reason = error
    if not samples:
        raise RuntimeError(f"{spec.function_name}: {reason or 'no class of it is left'}; pass a live model instead")
    return engine.apply(spec.name, options, classes=(modeling, tuple(samples)))


_FUNCTIONS = {spec.function_name: patch_function(spec) for spec in specs().values()}
globals().update(_FUNCTIONS)

MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., PatchReport]] = {
    model_type: _FUNCTIONS[spec.function_name] for spec in specs().values() for model_type in spec.model_types
}
"""`config.model_type` -> the function that patches such models."""


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> PatchReport | None:
    """Patch the classes of a `config.model_type`; keywords that its function does not have are left out, with a note.

    A type without a function of its own is patched through its causal LM class, by `patch`. Returns None, with a
    warning, for a type that transformers has no causal LM for.
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


def _apply_liger_kernel_to_instance(model: Any, **kwargs: Any) -> PatchReport:
    """Patch one live model by the function of its `config.model_type`, or by `patch`; keywords as above."""
    bare = unwrapped(model)
    model_type = getattr(getattr(bare, "config", None), "model_type", None)
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:
        return patch(model, **_applicable(patch, kwargs))
    return function(model=model, **_applicable(function, kwargs))


def _applicable(function: Callable, kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    left = [] if anything else [name for name in kwargs if name not in parameters]
    if left:
        log.info("liger_hw: %s has no keyword %s; left out", function.__name__, ", ".join(left))
    return {name: value for name, value in kwargs.items() if name not in left and name != "model"}
