"""The patch engine: finds what a model's parts compute (probing/) and replaces them by kernels.

On classes it replaces `forward` of the norm, MLP and causal LM classes and the rotary functions in the family's
modeling module, and `forward` of the decoder layer's class for what backward keeps (recompute/dial.py). So existing
models are patched too, except for their experts, which a model's config chooses when it is made. On one live model it
binds the same functions to that model's modules only, and its configuration names the experts.
No function of torch or shared by families, no parameter and no module's class is changed. Parts that are not recognised
keep their own code, and the report says why.
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
from .experts import as_before, is_spread, register_experts
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
"""Keywords for MLPs. A family has one of them, which covers all its MLPs."""
_PARTS = {
    "fused_gate_up_swiglu": "swiglu",
    "fused_moe": _EXPERTS,
    "gated_rms_norm": "rms_norm",
    "gated_delta_inputs": "short_conv",
}
"""Kernel -> its keyword, where that has another name."""


def patch_model(name: str, options: dict[str, bool], activations: Any, model: nn.Module) -> PatchReport:
    """Patch one live model with the parts whose option is true; see `_apply`."""
    report = PatchReport(name, f"one {type(model).__name__}", packing=packing_note(model))
    _apply(_ModelPatcher(model, report), options, activations, model, ())
    if misfits := slow_recurrence(model):
        log.warning(misfits)
    return report


def patch_classes(
    name: str, options: dict[str, bool], activations: Any, modeling: types.ModuleType, samples: tuple[Any, ...]
) -> PatchReport:
    """Patch the classes of a family's modeling module, found through samples: models without weights; see `_apply`."""
    report = PatchReport(name, "classes", module=modeling.__name__, packing=packing_note(samples[0], of_class=True))
    return _apply(_ClassPatcher(modeling, samples, report), options, activations, None, samples)


def _apply(
    patcher: "_Patcher", options: dict[str, bool], activations: Any, model: nn.Module | None, samples: tuple[Any, ...]
) -> PatchReport:
    """Patch, log the report once and return it. An error undoes what was done before it.

    activations: what backward keeps (see `liger_hw.activations`); None: `put_default` if the patch has the fused loss.
    Raises `ValueError` for both losses at once, and for a second patch that asks for the other loss.
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

    Subclasses have `patch_rope`, `patch_modules` and `causal_lms`, which yields (model or class to patch, the model or
    a sample) for each causal LM. why_no_loss: what the report says without one
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
                self.keep(part, where, part, state, owner)
                continue
            if _is_foreign(owner, current):
                self.keep(part, where, part, _REPLACED, owner)
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
            self.keep(part, "-", part, f"left alone: {self.why_no_loss}")

    def recognise(self, module: nn.Module, options: dict[str, bool]) -> Match | Refused | None:
        """`probing.recognise`, once for all modules that must compute the same."""
        if not options.get("short_conv") and probing.mixers.is_candidate(module):  # their probe takes longest
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
        """The match of a rotary function. A function without one is reported."""
        result = None if mark_of(function) else self.recognise_rotary(function)
        if isinstance(result, Match):
            return result
        self.keep("rope", where, "rope", f"left alone: {result.reason}" if result else ALREADY, module)
        return None

    def keep(self, part: str, where: str, kernel: str, state: str, module: Any = None) -> None:
        """Report a place that keeps its code; module: the live model's module, for its path."""
        self.report.rows.append(PatchRow(part, where, kernel, state, path=self.paths.get(module, "")))

    def change(self, part: str, where: str, kernel: str, patch: Patch, variant: str = "") -> None:
        self.report.change(PatchRow(part, where, kernel, PATCHED, variant), patch)


_REPLACED = "left alone: its forward was replaced by something else; patch the model before that"


def _is_foreign(owner: Any, forward: Callable) -> bool:
    """Whether a live module's forward is not a method of it but, say, a function set by pipeline parallelism."""
    return not isinstance(owner, type) and getattr(forward, "__self__", None) is not owner


def _wanted_part(kernel: str, options: dict[str, bool]) -> str | None:
    """The part to which a kernel belongs, or None if its option is absent or false."""
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
        self.forwards: dict[tuple, Callable] = {}  # modules that compute the same share one function

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
                self.keep(old_mark[0], where, old_mark[1], ALREADY, module)
            return
        result = self.recognise(module, options)
        part = _wanted_part(result.kernel, options) if result else None
        if part is None:
            return
        if isinstance(result, Match):
            its_own = getattr(current, "__self__", None) is module
            if not its_own and result.kernel == "fused_moe" and is_spread(module, current):
                self._patch_spread(module, where, part, result)
                return
            if not its_own or current.__func__ is not type(module).forward:
                result = Refused("its forward was replaced by something else", result.kernel)
        if isinstance(result, Refused):
            self.keep(part, where, result.kernel, f"left alone: {result.reason}", module)
            return
        forward = self._forward(module, part, result, current.__func__)
        self._bind(module, slot, forward, where, part, result)

    def _patch_spread(self, module: nn.Module, where: str, part: str, match: Match) -> None:
        """Patch SLOT, which the function named `liger_hw` calls: expert parallelism has replaced the forward."""
        if SLOT in vars(module):
            return
        original, switch = type(module).forward, [True]
        guards = probing.experts.while_named(guards_of(module, original, match.used))
        forward = mark(guarded(match, guards, as_before, switch), part, match.kernel, switch, original)
        self._bind(module, SLOT, forward, where, part, match)

    def _bind(self, module: nn.Module, slot: str, forward: Callable, where: str, part: str, match: Match) -> None:
        """Give the module this forward. The configuration of experts then names liger_hw."""
        config = vars(module).get("config")
        if match.kernel == "fused_moe" and getattr(config, CHOICE, NAME) != NAME:
            self.report.apply(Choice(config))
        self.change(part, where, match.kernel, Patch(module, slot, types.MethodType(forward, module)), match.variant)

    def _forward(self, module: nn.Module, part: str, match: Match, original: Callable) -> Callable:
        """The match's forward while the module is as it is now; if it changes, `original` runs."""
        guards = guards_of(module, original, match.used)
        guards = tuple(guard for guard in guards if guard[1] not in match.used)  # it was probed with its own weights
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
                    self.keep("rope", f"{type(module).__name__}.forward", "rope", _REPLACED, module)
                continue
            forward = current_forward(module, slot)
            where, unpatched = f"{type(module).__name__}.forward", forward
            if (mark_of(forward) or ("",))[0] == "rope":
                self.keep("rope", where, "rope", ALREADY)
                continue
            for name, function in rotary.functions_called(forward).items():
                match = self.rotary_match(function, f"{function.__module__.rpartition('.')[2]}.{name}", module)
                if match is None:
                    continue
                copied = copy_calling(forward, name, function, match)
                if isinstance(copied, str):
                    self.keep("rope", where, "rope", copied, module)
                    continue
                forward = copied  # may call a second rotary function
                method = bound_by_class(unpatched, forward) if unpatched is type(module).forward else forward
                bound = types.MethodType(mark(method, "rope", match.kernel), module)
                self.change("rope", where, match.kernel, Patch(module, slot, bound), match.variant)


def _copy_calling(forward: Callable, name: str, function: Callable, match: Match) -> Callable | str:
    """A copy of an attention's forward that calls the kernel where it calls `name`, or why it cannot be copied."""
    scope = forward
    while name not in getattr(scope, "__globals__", {}) and hasattr(scope, "__wrapped__"):
        scope = scope.__wrapped__
    private = private_name(name, match.variant)
    if private not in scope.__globals__:  # harmless, and shared by all patched instances, so never removed
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
    """modeling: the family's module; only classes defined there are changed; samples: its models without weights."""

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
        borrowed: dict[tuple[str, type], Match] = {}
        for cls, modules in self.instances.items():
            old_mark = mark_of(cls.forward)
            if old_mark is not None and old_mark[0] not in _LOSSES:
                if options.get(old_mark[0]):
                    self.keep(old_mark[0], f"{cls.__name__}.forward", old_mark[1], ALREADY)
                continue
            results = [(module, self.recognise(module, options)) for module in modules]
            kernel = next((result.kernel for _, result in results if result), None)
            part = _wanted_part(kernel, options) if kernel else None
            if not part:
                continue
            if cls.__module__ == self.modeling.__name__:
                self._patch_class(cls, part, results)
            elif match := next((result for _, result in results if isinstance(result, Match)), None):
                borrowed[part, cls] = match
            else:
                reason = next(result.reason for _, result in results if isinstance(result, Refused))
                self.keep(part, f"{cls.__name__}.forward", kernel, f"left alone: {reason}")
        if borrowed:
            self._patch_new_models(options, borrowed)

    def _patch_class(self, cls: type, part: str, results: list[tuple[Any, Match | Refused | None]]) -> None:
        """One forward for all instances of a class: each match, under the guards of the sample it came from."""
        where, original = f"{cls.__name__}.forward", cls.forward
        unknown = EVERYTHING in reads(cls, original)
        known = [] if unknown else [(module, result) for module, result in results if isinstance(result, Match)]
        pairs = dict.fromkeys((guards_of(module, original, match.used), match) for module, match in known)
        matches = [pair for pair in pairs if not any(_contradicts(*pair, *sample) for sample in results)]
        if not matches:
            refused = next((result for _, result in results if isinstance(result, Refused)), None)
            reason = "it passes self on" if unknown else "its instances differ in ways that cannot be told apart"
            reason = refused.reason if refused else f"{reason}; patch a live model"
            self.keep(part, where, refused.kernel if refused else part, f"left alone: {reason}")
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
        """Make the configurations of later models name liger_hw, if the program names no implementation of experts. An
        existing model's configuration names one, but not whether the program chose it."""
        slot = "get_correct_experts_implementation"
        for sample in self.samples:
            own_classes = (cls for cls in type(sample).__mro__ if cls.__module__ == self.modeling.__name__)
            bases = [cls for cls in own_classes if hasattr(cls, slot)]
            if bases and not mark_of(getattr(bases[-1], slot)):
                self.report.apply(Patch(bases[-1], slot, chosen_by_default(getattr(bases[-1], slot))))

    def _patch_new_models(self, options: dict[str, bool], borrowed: dict[tuple[str, type], Match]) -> None:
        """Patch modules of other families' classes (torch's LayerNorm, a CLIP tower, a Llama) in new models.

        These classes are shared, so they are not changed; each new model of the family is patched when it is complete.
        """
        parts = {part: on for part, on in options.items() if part not in _LOSSES}

        def prepare(model: nn.Module) -> None:
            _ModelPatcher(model, PatchReport(type(model).__name__, "a new model")).patch(parts)

        self.report.apply(NewModels({type(sample) for sample in self.samples}, prepare))
        for (part, cls), match in borrowed.items():
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
            self.keep("rope", short, "rope", "left alone: no attention of its own calls a rotary function")


def _contradicts(guards: Guards, match: Match, module: Any, result: Match | Refused | None) -> bool:
    """Whether the guards would give `module` this `match`, although its own `result` differs."""
    same = isinstance(result, Match) and (result.kernel, result.variant) == (match.kernel, match.variant)
    return not same and holds(module, guards)
