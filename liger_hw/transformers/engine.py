"""The patch engine: finds out what a model's modules compute (probing/) and replaces their forwards by kernels.

A patch of classes replaces `forward` of a family's norm, MLP and causal LM classes, the rotary functions in its
modeling module, and `forward` of the decoder layer's class for levels of activations (recompute/dial.py). Existing
models run it too, except for experts, whose implementation a model's config chooses when the model is made. A patch of
a live model binds the same functions to the model's modules and sets the experts' implementation in its config.
Functions of torch or shared by families, parameters and modules' classes are not changed. A module that is not
recognised keeps its forward, and the report has the reason.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import types
from typing import Any, Callable, Iterator

from torch import nn

from .. import env
from ..distributed import owners
from ..recompute.dial import put_default, put_on
from ..runtime.operator import check_flags
from . import probing
from .choice import CHOICE, NAME, SLOT, Choice, chosen_by_default
from .experts import is_expert_parallel, previous_experts, register_experts
from .hybrids import slow_recurrence
from .loss import causal_lm_forward, head_path, why_not_fused
from .marks import mark, mark_of
from .packing import packing_note
from .probing import Match, Refused, rotary
from .rebind import CannotRebind, private_name, rebind
from .replacing import Guards, current_forward, guarded, guards_of, holds, if_class_unchanged, if_global_unchanged
from .report import ALREADY, PATCH_LOCK, PATCHED, NewModels, Patch, PatchReport, PatchRow, forward_slot
from .source import EVERYTHING, NoSource, reads

log = logging.getLogger("liger_hw")
_PLAIN_LOSS, _FUSED_LOSS = "cross_entropy", "fused_linear_cross_entropy"
_LOSSES = (_PLAIN_LOSS, _FUSED_LOSS)
_EXPERTS, MLPS = "experts", ("swiglu", "geglu", "relu_squared")
"""Keywords for MLPs. A family has one of them, for all its MLPs."""
_PARTS = {
    "fused_gate_up_swiglu": "swiglu",
    "fused_moe": _EXPERTS,
    "gated_rms_norm": "rms_norm",
    "gated_delta_inputs": "short_conv",
}
"""Kernel -> keyword of the patch function, if its name is not the kernel's."""


def patch_model(name: str, options: dict[str, bool], activations: Any, model: nn.Module) -> PatchReport:
    """Patch one live model. options: keyword -> whether that part is patched; activations: see `_apply`"""
    report = PatchReport(name, f"one {type(model).__name__}", packing=packing_note(model))
    _apply(_ModelPatcher(model, report), options, activations, model, ())
    if warning := slow_recurrence(model):
        log.warning(warning)
    return report


def patch_classes(
    name: str, options: dict[str, bool], activations: Any, modeling: types.ModuleType, samples: tuple[Any, ...]
) -> PatchReport:
    """Patch the classes of a family's modeling module that `samples`, models without weights, consist of."""
    report = PatchReport(name, "classes", module=modeling.__name__, packing=packing_note(samples[0], of_class=True))
    return _apply(_ClassPatcher(modeling, samples, report), options, activations, None, samples)


def _apply(
    patcher: "_Patcher", options: dict[str, bool], activations: Any, model: nn.Module | None, samples: tuple[Any, ...]
) -> PatchReport:
    """Patch, log the report and return it. After an error nothing stays patched.

    activations: the setting of `liger_hw.activations`; None: `put_default` if the patch has the fused loss.
    Raises `ValueError` for both losses at once, and if an earlier patch has the other loss.
    """
    report = patcher.report
    check_flags(report.family, **options)
    if options.get(_PLAIN_LOSS) and options.get(_FUSED_LOSS):
        raise ValueError(
            f"{report.family}: cross_entropy and fused_linear_cross_entropy exclude each other; "
            "pass cross_entropy=True together with fused_linear_cross_entropy=False, or leave both at their defaults"
        )
    if env.LIGER_HW_DISABLE:
        parts = (part for part, on in options.items() if on)
        report.rows += [PatchRow(part, "-", "-", "left alone: LIGER_HW_DISABLE is set") for part in parts]
        log.warning("liger_hw: %s is not patched: LIGER_HW_DISABLE is set", report.family)
        return report
    with PATCH_LOCK:
        try:
            register_experts()
            patcher.patch(options)
            if activations is not None:
                put_on(report, activations, model, samples)
            elif any(row.kernel == _FUSED_LOSS for row in report.patched):
                put_default(report, model, samples)
        except BaseException:
            report.revert()
            raise
        report.remember()
    log.info("liger_hw: patched %s", report.summary())
    return report


class _Patcher:
    """One call of a patch function, on a live model or on classes.

    Subclasses define `patch_rope`, `patch_modules` and `causal_lms`, which yields for each causal LM (model or class to
    patch, the model or a sample). why_no_loss: the report's reason without one
    """

    def __init__(self, report: PatchReport, why_no_loss: str) -> None:
        self.report, self.why_no_loss = report, why_no_loss
        self.recognised: dict[tuple, Match | Refused | None] = {}
        self.recognise_rotary = functools.cache(rotary.recognise)
        self.paths: dict[Any, str] = {}
        """Module of a live model -> its path."""

    def patch(self, options: dict[str, bool]) -> None:
        parts = {part for part, on in options.items() if on}
        if "rope" in parts:
            self.patch_rope()
        if parts - {"rope", *_LOSSES}:
            self.patch_modules(options)
        for part in _LOSSES:
            if part in parts:
                self.patch_loss(part)

    def patch_loss(self, part: str) -> None:
        has_model = False
        for owner, model in self.causal_lms():
            has_model = True
            slot = forward_slot(owner)
            current = getattr(owner, slot)
            where, old_mark = f"{type(model).__name__}.forward", mark_of(current)
            head = head_path(model)
            if old_mark is not None and old_mark[0] != part:
                raise ValueError(
                    f"{where} is already patched for {old_mark[0]}; revert() that patch before asking for {part}"
                )
            if old_mark is not None or not head:
                state = ALREADY if old_mark is not None else "left alone: it has no output head of its own"
                self.report_unchanged(part, where, part, state, owner)
                continue
            if _is_foreign(owner, current):
                self.report_unchanged(part, where, part, _REPLACED, owner)
                continue
            original, switch = getattr(current, "__func__", current), [True]
            forward = causal_lm_forward(original, head, part == _FUSED_LOSS, switch)
            if not isinstance(owner, type) and original is type(owner).forward:
                forward = if_class_unchanged(original, forward)
            mark(forward, part, part, switch, original)
            replacement = forward if isinstance(owner, type) else types.MethodType(forward, owner)
            kernel, words = part, ""
            if part == _FUSED_LOSS and owner is model and (reason := why_not_fused(model, head)):
                kernel, words = _PLAIN_LOSS, f"logits computed: {reason}"
            if owner is model:
                self.report.logits = getattr(model.get_submodule(head), "out_features", 0)
            self.change(part, where, kernel, Patch(owner, slot, replacement), words)
        if not has_model:
            self.report_unchanged(part, "-", part, f"left alone: {self.why_no_loss}")

    def recognise(self, module: nn.Module, options: dict[str, bool]) -> Match | Refused | None:
        """`probing.recognise`, called once for all modules that compute the same."""
        if not options.get("short_conv") and probing.mixers.is_candidate(module):  # the slowest probe
            return None
        forward = type(module).forward
        guards = guards_of(module, forward, frozenset())
        shapes = tuple(owners.parameter_shapes(module).items())
        own_gate = probing.experts.has_own_gate(module)
        children = tuple(module._modules)
        key = (type(module), forward, shapes, children, tuple(module._buffers), guards, own_gate)
        if key not in self.recognised:
            self.recognised[key] = probing.recognise(module, forward)
        return self.recognised[key]

    def rotary_match(self, function: Callable, where: str, module: Any = None) -> Match | None:
        """The match of a rotary function, or None, for which a row is added to the report."""
        result = None if mark_of(function) else self.recognise_rotary(function)
        if isinstance(result, Match):
            return result
        self.report_unchanged("rope", where, "rope", f"left alone: {result.reason}" if result else ALREADY, module)
        return None

    def report_unchanged(self, part: str, where: str, kernel: str, state: str, module: Any = None) -> None:
        """Add a row for code that this call does not change. module: a live model's module, for its path"""
        self.report.rows.append(PatchRow(part, where, kernel, state, path=self.paths.get(module, "")))

    def change(self, part: str, where: str, kernel: str, patch: Patch, variant: str = "") -> None:
        self.report.change(PatchRow(part, where, kernel, PATCHED, variant), patch)


_REPLACED = "left alone: its forward was replaced by something else; patch the model before that"


def _is_foreign(owner: Any, forward: Callable) -> bool:
    """Whether a live module's forward is not its method, but a function that, say, pipeline parallelism has set."""
    return not isinstance(owner, type) and getattr(forward, "__self__", None) is not owner


def _enabled_part(kernel: str, options: dict[str, bool]) -> str | None:
    """The keyword to which a kernel belongs, or None if its option is absent or false."""
    part = _PARTS.get(kernel, kernel)
    if part not in options and part in MLPS:
        part = next((name for name in MLPS if name in options), part)
    return part if options.get(part) else None


def _is_causal_lm(cls: type) -> bool:
    from transformers import PreTrainedModel

    if not issubclass(cls, PreTrainedModel) or "labels" not in inspect.signature(cls.forward).parameters:
        return False
    return any(_CAUSAL.search(base.__name__) for base in cls.__mro__)


_CAUSAL = re.compile(
    "ForCausalLM|LMHead|ForConditionalGeneration|GenerationDecoder|MTModel|EncoderDecoderModel|ToText$"
)


# -- one live model --------------------------------------------------------------------------------------------------


class _ModelPatcher(_Patcher):
    def __init__(self, model: nn.Module, report: PatchReport) -> None:
        why_no_loss = (
            f"this {type(model).__name__} has no causal LM of transformers in it; "
            "in your own loss, call liger_fused_linear_cross_entropy"
        )
        super().__init__(report, why_no_loss)
        self.model = model
        self.paths = {module: name for name, module in model.named_modules()}
        self.forwards: dict[tuple, Callable] = {}  # (match, original, guards) -> the function of all these modules

    def causal_lms(self) -> Iterator[tuple[Any, Any]]:
        for module in self.model.modules():
            if _is_causal_lm(type(module)):
                yield module, module

    def patch_modules(self, options: dict[str, bool]) -> None:
        for module in self.model.modules():
            if probing.is_overlooked(module):
                self.report.unnamed.append(type(module).__name__)
            self._patch_module(module, options)

    def _patch_module(self, module: nn.Module, options: dict[str, bool]) -> None:
        slot = forward_slot(module)
        current, where = getattr(module, slot), f"{type(module).__name__}.forward"
        if old_mark := mark_of(current) or mark_of(getattr(module, SLOT, None)):
            if options.get(old_mark[0]) and old_mark[0] not in ("rope", *_LOSSES):
                self.report_unchanged(old_mark[0], where, old_mark[1], ALREADY, module)
            return
        result = self.recognise(module, options)
        part = _enabled_part(result.kernel, options) if result else None
        if part is None:
            return
        if isinstance(result, Match):
            is_method = getattr(current, "__self__", None) is module
            if not is_method and result.kernel == "fused_moe" and is_expert_parallel(module, current):
                self._patch_expert_parallel(module, where, part, result)
                return
            if not is_method or current.__func__ is not type(module).forward:
                result = Refused("its forward was replaced by something else", result.kernel)
        if isinstance(result, Refused):
            self.report_unchanged(part, where, result.kernel, f"left alone: {result.reason}", module)
            return
        forward = self._forward(module, part, result, current.__func__)
        self._bind(module, slot, forward, where, part, result)

    def _patch_expert_parallel(self, module: nn.Module, where: str, part: str, match: Match) -> None:
        """Set SLOT, which the experts' implementation `liger_hw` calls: expert parallelism has replaced `forward`."""
        if SLOT in vars(module):
            return
        original, switch = type(module).forward, [True]
        guards = probing.experts.while_named(guards_of(module, original, match.used))
        forward = mark(guarded(match, guards, previous_experts, switch), part, match.kernel, switch, original)
        self._bind(module, SLOT, forward, where, part, match)

    def _bind(self, module: nn.Module, slot: str, forward: Callable, where: str, part: str, match: Match) -> None:
        """Set the module's forward. For experts, set the implementation in the config to liger_hw too."""
        config = vars(module).get("config")
        if match.kernel == "fused_moe" and getattr(config, CHOICE, NAME) != NAME:
            self.report.apply(Choice(config))
        self.change(part, where, match.kernel, Patch(module, slot, types.MethodType(forward, module)), match.variant)

    def _forward(self, module: nn.Module, part: str, match: Match, original: Callable) -> Callable:
        """A method that runs the match while the module is as it is now, and `original` if it has changed."""
        guards = guards_of(module, original, match.used)
        guards = tuple(guard for guard in guards if guard[1] not in match.used)  # probed with the module's own weights
        if match.kernel == "fused_moe":
            guards = probing.experts.while_named(guards)
        key = (id(match), original, guards)
        if key not in self.forwards:
            switch = [True]
            forward = if_class_unchanged(original, guarded(match, guards, original, switch))
            self.forwards[key] = mark(forward, part, match.kernel, switch, original)
        return self.forwards[key]

    def patch_rope(self) -> None:
        copy_calling, bound_by_class = functools.cache(_copy_calling), functools.cache(if_class_unchanged)
        for module in self.model.modules():
            slot = forward_slot(module)
            if _is_foreign(module, getattr(module, slot)):
                if rotary.functions_called(type(module).forward):
                    self.report_unchanged("rope", f"{type(module).__name__}.forward", "rope", _REPLACED, module)
                continue
            forward = current_forward(module, slot)
            where, unpatched = f"{type(module).__name__}.forward", forward
            if (mark_of(forward) or ("",))[0] == "rope":
                self.report_unchanged("rope", where, "rope", ALREADY)
                continue
            for name, function in rotary.functions_called(forward).items():
                match = self.rotary_match(function, f"{function.__module__.rpartition('.')[2]}.{name}", module)
                if match is None:
                    continue
                copied = copy_calling(forward, name, function, match)
                if isinstance(copied, str):
                    self.report_unchanged("rope", where, "rope", copied, module)
                    continue
                forward = copied  # in which a second rotary function may be replaced next
                method = bound_by_class(unpatched, forward) if unpatched is type(module).forward else forward
                bound = types.MethodType(mark(method, "rope", match.kernel), module)
                self.change("rope", where, match.kernel, Patch(module, slot, bound), match.variant)


def _copy_calling(forward: Callable, name: str, function: Callable, match: Match) -> Callable | str:
    """A copy of an attention's forward that calls the kernel in place of `name`, or why it cannot be copied."""
    scope = forward
    while name not in getattr(scope, "__globals__", {}) and hasattr(scope, "__wrapped__"):
        scope = scope.__wrapped__
    private = private_name(name, match.variant)
    if private not in scope.__globals__:  # never removed: other patched instances may call it
        replacement = match.replacement
        module = sys.modules.get(scope.__globals__["__name__"])
        if module is not None:
            replacement = if_global_unchanged(module, name, function, replacement)
        scope.__globals__[private] = mark(replacement, "rope", match.kernel, original=function)
    try:
        return rebind(forward, name, private)
    except (CannotRebind, NoSource) as error:
        return f"left alone: {error}; patch the classes instead (model=None)"


# -- classes ---------------------------------------------------------------------------------------------------------


class _ClassPatcher(_Patcher):
    """modeling: the family's module, of whose classes only are changed; samples: its models, without weights."""

    def __init__(self, modeling: Any, samples: tuple[Any, ...], report: PatchReport) -> None:
        super().__init__(report, f"{modeling.__name__} has no causal LM")
        self.modeling, self.samples = modeling, samples
        self.instances: dict[type, list[Any]] = {}
        for sample in samples:
            for module in sample.modules():
                self.instances.setdefault(type(module), []).append(module)

    def causal_lms(self) -> Iterator[tuple[Any, Any]]:
        for sample in self.samples:
            if _is_causal_lm(type(sample)):
                yield type(sample), sample

    def patch_modules(self, options: dict[str, bool]) -> None:
        foreign: dict[tuple[str, type], Match] = {}  # (part, class defined elsewhere) -> match
        for cls, modules in self.instances.items():
            old_mark = mark_of(cls.forward)
            if old_mark is not None and old_mark[0] not in _LOSSES:
                if options.get(old_mark[0]):
                    self.report_unchanged(old_mark[0], f"{cls.__name__}.forward", old_mark[1], ALREADY)
                continue
            results = [(module, self.recognise(module, options)) for module in modules]
            kernel = next((result.kernel for _, result in results if result), None)
            part = _enabled_part(kernel, options) if kernel else None
            if not part:
                continue
            if cls.__module__ == self.modeling.__name__:
                self._patch_class(cls, part, results)
            elif match := next((result for _, result in results if isinstance(result, Match)), None):
                foreign[part, cls] = match
            else:
                reason = next(result.reason for _, result in results if isinstance(result, Refused))
                self.report_unchanged(part, f"{cls.__name__}.forward", kernel, f"left alone: {reason}")
        if foreign:
            self._patch_new_models(options, foreign)

    def _patch_class(self, cls: type, part: str, results: list[tuple[Any, Match | Refused | None]]) -> None:
        """Give a class one forward for all instances, which runs each match under the guards of its sample's module."""
        where, original = f"{cls.__name__}.forward", cls.forward
        unknown = EVERYTHING in reads(cls, original)
        known = [] if unknown else [(module, result) for module, result in results if isinstance(result, Match)]
        pairs = dict.fromkeys((guards_of(module, original, match.used), match) for module, match in known)
        matches = [pair for pair in pairs if not any(_contradicts(*pair, *sample) for sample in results)]
        if not matches:
            refused = next((result for _, result in results if isinstance(result, Refused)), None)
            reason = "it passes self on" if unknown else "its instances differ in a way that no guard compares"
            reason = refused.reason if refused else f"{reason}; patch a live model"
            self.report_unchanged(part, where, refused.kernel if refused else part, f"left alone: {reason}")
            return
        if any(name == CHOICE for guards, _ in matches for _, name, _ in guards):
            self._choose_by_default()
            matches = [(probing.experts.while_named(guards), match) for guards, match in matches]
            where += " of new models"
        forward, switch = original, [True]
        for guards, match in matches:
            forward = guarded(match, guards, forward, switch)
        words, match = sorted({m.variant for _, m in matches}), matches[0][1]
        mark(forward, part, match.kernel, switch, original)
        self.change(part, where, match.kernel, Patch(cls, "forward", forward), " or ".join(filter(None, words)))

    def _choose_by_default(self) -> None:
        """Make liger_hw the default implementation of experts in new models. Existing models are not changed, as the
        program may have chosen the implementation in their config."""
        slot = "get_correct_experts_implementation"
        for sample in self.samples:
            own_classes = (cls for cls in type(sample).__mro__ if cls.__module__ == self.modeling.__name__)
            bases = [cls for cls in own_classes if hasattr(cls, slot)]
            if bases and not mark_of(getattr(bases[-1], slot)):
                self.report.apply(Patch(bases[-1], slot, chosen_by_default(getattr(bases[-1], slot))))

    def _patch_new_models(self, options: dict[str, bool], foreign: dict[tuple[str, type], Match]) -> None:
        """Patch modules whose classes are defined elsewhere (torch's LayerNorm, a CLIP tower, a Llama) in new models.

        Other families use these classes too, so instances are patched, when a new model of the family is complete.
        """
        parts = {part: on for part, on in options.items() if part not in _LOSSES}

        def prepare(model: nn.Module) -> None:
            _ModelPatcher(model, PatchReport(type(model).__name__, "a new model")).patch(parts)

        self.report.apply(NewModels({type(sample) for sample in self.samples}, prepare))
        for (part, cls), match in foreign.items():
            row = PatchRow(part, f"{cls.__name__}.forward of new models", match.kernel, PATCHED, match.variant)
            self.report.rows.append(row)

    def patch_rope(self) -> None:
        short = self.modeling.__name__.rpartition(".")[2]
        done: set[str] = set()
        for cls in self.instances:
            if cls.__module__ != self.modeling.__name__:
                continue
            for name, function in rotary.functions_called(cls.forward).items():
                if name in done or rotary.plain_function(getattr(self.modeling, name, None)) is not function:
                    continue
                done.add(name)
                where = f"{short}.{name}"
                if match := self.rotary_match(function, where):
                    replacement = mark(match.replacement, "rope", match.kernel, original=function)
                    self.change("rope", where, match.kernel, Patch(self.modeling, name, replacement), match.variant)
        if not done:
            self.report_unchanged("rope", short, "rope", "left alone: no attention of its own calls a rotary function")


def _contradicts(guards: Guards, match: Match, module: Any, result: Match | Refused | None) -> bool:
    """Whether `module` meets the guards, although its own `result` is not this `match`."""
    same = isinstance(result, Match) and (result.kernel, result.variant) == (match.kernel, match.variant)
    return not same and holds(module, guards)
