"""The one patch engine: applies a FamilySpec to a family's classes, or to one live model.

On classes it replaces `forward` of the norm, MLP and causal LM classes and the rotary function in the family's modeling
module, so models made before and after are patched alike. On an instance it binds the same functions to that model's
modules only. Nothing else changes: no function of torch, none that families share, no parameter, no module's class.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import types
from typing import Any, Callable, Iterator

from . import parts
from .loss import causal_lm_forward
from .rebind import PREFIX, CannotRebind, rebind
from .report import ALREADY, PATCHED, Patch, PatchReport, PatchRow
from .spec import FamilySpec

log = logging.getLogger("liger_hw")
_MARK = "_liger_hw_part"
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def patch_function(spec: FamilySpec) -> Callable[..., PatchReport]:
    """The public `apply_liger_kernel_to_<family>` of a spec, with its real signature, which it enforces."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=bool)
        for name, default in spec.parts
    ]
    parameters.append(inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None))
    signature = inspect.Signature(parameters, return_annotation=PatchReport)

    def function(*args: Any, **kwargs: Any) -> PatchReport:
        for name in kwargs:
            if name not in signature.parameters:
                raise TypeError(_unknown_keyword(spec, name, list(signature.parameters)))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{spec.function_name}(): {error}; its arguments are {signature}") from None
        bound.apply_defaults()
        options = dict(bound.arguments)
        return apply(spec, options.pop("model"), **options)

    function.__name__ = function.__qualname__ = spec.function_name
    function.__module__ = f"{__package__}.models.{spec.name}"
    function.__signature__ = signature
    function.__doc__ = f"""Run {spec.prefix} models on liger_hw's kernels.

    {", ".join(name for name, _ in spec.parts)}: which parts; `cross_entropy` keeps the logits and replaces the loss
    only, `fused_linear_cross_entropy` (not both) never computes them while training with labels.
    model: None patches the classes in transformers, for models made before or after this call; a live model (also
    wrapped by PEFT, DDP, FSDP or torch.compile) is patched alone; a class of the family means None.

    Returns a PatchReport: `revert()` undoes the call, as does leaving it as a `with` block; `str(report)` is a table.
    Raises `TypeError` for an unknown keyword or a model of another family, `ValueError` for both losses at once or for
    a second call that asks for the other loss, `ImportError` when transformers has no such family.
    """
    return function


def apply(spec: FamilySpec, model: Any = None, **options: bool) -> PatchReport:
    """Apply `spec` with the parts whose option is true; see `patch_function` for the arguments and what is raised."""
    if options.get("cross_entropy") and options.get("fused_linear_cross_entropy"):
        raise ValueError(
            f"{spec.function_name}: cross_entropy and fused_linear_cross_entropy exclude each other; "
            "pass cross_entropy=True together with fused_linear_cross_entropy=False, or leave both at their defaults"
        )
    modeling = _modeling_module(spec)
    model = _checked_model(spec, model)
    target = "classes" if model is None else f"one {type(model).__name__}"
    report = PatchReport(spec.name, target)
    engine = _Engine(spec, modeling, model, report)
    try:
        for part, wanted in options.items():
            if wanted:
                engine.patch(part)
    except BaseException:
        report.revert()
        raise
    log.info("liger_hw: patched %s", report.summary())
    return report


class _Engine:
    """One call of `apply`: `model` is None for the classes."""

    def __init__(self, spec: FamilySpec, modeling: Any, model: Any, report: PatchReport) -> None:
        self.spec, self.modeling, self.model, self.report = spec, modeling, model, report

    def patch(self, part: str) -> None:
        if part == "rope":
            self._rope()
        elif part == "rms_norm":
            spec = self.spec
            self._forwards(
                part, "rms_norm", "norms", lambda _: parts.rms_norm_forward(spec.casting_mode, spec.offset, spec.eps)
            )
        elif part == "swiglu":
            self._forwards(part, "swiglu", "mlps", parts.swiglu_forward, parts.why_not_swiglu)
        elif part in _LOSSES:
            fused = part == "fused_linear_cross_entropy"
            self._forwards(
                part, part, "causal_lms", lambda original: causal_lm_forward(original, self.spec.head, fused)
            )
        else:
            raise ValueError(f"spec {self.spec.name!r} names a part {part!r} that the engine does not know")

    def _forwards(
        self,
        part: str,
        kernel: str,
        kind: str,
        make: Callable[[Callable], Callable],
        why_not: Callable[[Any], str] = lambda _: "",
    ) -> None:
        """Replace `forward` of every class of a kind, or of the model's modules of those classes."""
        seen = False
        made: dict[Callable, Callable] = {}
        for owner, cls in self._owners(kind):
            seen = True
            slot = _slot(owner)
            where = f"{cls.__name__}.forward"
            current = getattr(owner, slot)
            mark = getattr(current, _MARK, None)
            state = _present_patch(part, mark, where)
            if not state and owner is not cls:
                reason = _foreign(owner, cls, current, kind) or why_not(owner)
                state = f"left alone: {reason}" if reason else ""
            if state:
                self._leave(part, where, kernel, state)
                continue
            original = getattr(current, "__func__", current)
            if original not in made:
                made[original] = _marked(make(original), part, "forward", original)
            replacement = made[original] if owner is cls else types.MethodType(made[original], owner)
            self.report.change(PatchRow(part, where, kernel, PATCHED), Patch(owner, slot, replacement))
        if not seen:
            names = " or ".join(self.spec.class_names(kind))
            absent = self.modeling.__name__ if self.model is None else f"this {type(self.model).__name__}"
            self._leave(part, names, kernel, f"left alone: {absent} has none")

    def _owners(self, kind: str) -> Iterator[tuple[Any, type]]:
        """(owner of the attribute, class) pairs: the class itself twice, or each module of the model with its class."""
        classes = [getattr(self.modeling, name) for name in self.spec.class_names(kind) if hasattr(self.modeling, name)]
        for cls in classes:
            if self.model is None:
                yield cls, cls
                continue
            for module in self.model.modules():
                if isinstance(module, cls):
                    yield module, cls

    def _rope(self) -> None:
        name = self.spec.rotary
        where = f"{self.modeling.__name__.rpartition('.')[2]}.{name}"
        current = getattr(self.modeling, name, None)
        if current is None:
            self._leave("rope", where, "rope", f"left alone: {self.modeling.__name__} has no {name}")
        elif getattr(current, _MARK, None) is not None:
            self._leave("rope", where, "rope", ALREADY)
        elif self.model is None:
            rotary = _marked(parts.rotary_function(current, self.spec.shared_halves), "rope", name, current)
            self.report.change(PatchRow("rope", where, "rope", PATCHED), Patch(self.modeling, name, rotary))
        else:
            private = PREFIX + name
            if not hasattr(self.modeling, private):  # harmless, shared by every patched instance, so never taken away
                setattr(self.modeling, private, _marked(parts.rotary_function(current, self.spec.shared_halves), "rope", name, current))
            try:
                self._forwards("rope", "rope", "attentions", lambda original: rebind(original, name))
            except CannotRebind as error:
                self._leave("rope", where, "rope", f"left alone: {error}; patch the classes instead (model=None)")

    def _leave(self, part: str, where: str, kernel: str, state: str) -> None:
        self.report.rows.append(PatchRow(part, where, kernel, state))


def _marked(function: Callable, part: str, name: str, original: Callable) -> Callable:
    function.__name__ = name
    function.__qualname__ = getattr(original, "__qualname__", name)
    function.__module__ = getattr(original, "__module__", function.__module__)
    function.__doc__ = original.__doc__
    setattr(function, _MARK, part)
    return function


def _present_patch(part: str, mark: str | None, where: str) -> str:
    """What the mark of a present forward means for patching `part`: "" (none), ALREADY, or a ValueError."""
    if mark is None:
        return ""
    if mark != part:
        raise ValueError(f"{where} is already patched for {mark}; revert() that patch before asking for {part}")
    return ALREADY


def _foreign(module: Any, cls: type, forward: Callable, kind: str) -> str:
    """Why a module's forward is not ours to replace, or "". A causal LM's always is: it is wrapped, not replaced."""
    if kind != "causal_lms" and type(module).forward is not cls.forward:
        return f"{type(module).__name__} has its own forward"
    if getattr(forward, "__self__", None) is not module:
        return "its forward was replaced by something else"
    return ""


def _slot(owner: Any) -> str:
    """Attribute that holds a module's own forward; accelerate's hooks move it aside."""
    return "_old_forward" if hasattr(owner, "_hf_hook") and "_old_forward" in vars(owner) else "forward"


# -- arguments -------------------------------------------------------------------------------------------------------


def _unknown_keyword(spec: FamilySpec, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"its keywords are {', '.join(known)}"
    return f"{spec.function_name}() got an unexpected keyword argument {name!r}; {hint}"


def _modeling_module(spec: FamilySpec) -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError(f"{spec.function_name} patches transformers models: pip install transformers") from None
    try:
        return importlib.import_module(spec.modeling_module)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("transformers.models."):
            raise
        version = transformers.__version__
        raise ImportError(
            f"transformers {version} has no {spec.modeling_module}; install a version that has {spec.name}"
        ) from None


def _checked_model(spec: FamilySpec, model: Any) -> Any:
    """The bare model to patch, or None for the classes. Raises `TypeError` for anything else, naming what to call."""
    import torch

    if model is None:
        return None
    bare = model if isinstance(model, type) else _unwrapped(model)
    if not isinstance(bare, (type, torch.nn.Module)):
        raise TypeError(
            f"{spec.function_name}: model must be a loaded transformers model, one of its classes or None, got "
            f"{type(model).__name__}; load it first, for example with AutoModelForCausalLM.from_pretrained"
        )
    cls = bare if isinstance(bare, type) else type(bare)
    if not any(base.__module__ == spec.modeling_module for base in cls.__mro__):
        raise TypeError(f"{spec.function_name}: model is a {cls.__name__}, not a {spec.prefix} model; {_advice(cls)}")
    return None if isinstance(bare, type) else bare


def _unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT, torch.compile, DDP or FSDP wrappers."""
    import torch
    from transformers import PreTrainedModel

    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        else:
            inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            break
        model = inner
    return model


def _advice(cls: type) -> str:
    from .models import FAMILIES

    for base in cls.__mro__:
        package = base.__module__.split(".")
        if base.__module__.startswith("transformers.models.") and package[2] in FAMILIES:
            return f"call apply_liger_kernel_to_{package[2]} for it"
    return f"liger_hw has functions for {', '.join(sorted(FAMILIES))}"
