"""The one patch engine: finds what a model's parts compute (probing/) and puts the kernels in their place.

On classes it replaces `forward` of the norm, MLP and causal LM classes and the rotary functions in the family's
modeling module, so models made before and after are patched alike. On an instance it binds the same functions to that
model's modules only. Nothing else changes: no function of torch, none that families share, no parameter, no class of
a module. What is not recognised keeps its own code, and the report says why.
"""

from __future__ import annotations

import inspect
import logging
import re
import types
from typing import Any, Callable, Iterator

from ..recompute.dial import put_on
from ..runtime.operator import check_flags
from . import parts, probing
from .loss import causal_lm_forward, head_path
from .probing import Match, Refused, rotary
from .rebind import CannotRebind, private_name, rebind
from .report import ALREADY, MARK, PATCHED, NewModels, Patch, PatchReport, PatchRow, PickleNote

log = logging.getLogger("liger_hw")
LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_KEYWORD = {"fused_gate_up_swiglu": "swiglu"}
_MLPS = ("swiglu", "geglu", "relu_squared")
"""Keywords that mean MLPs: a family has one of them, which then covers whatever its MLPs compute."""


def apply(
    name: str, options: dict[str, Any], model: Any = None, classes: tuple[Any, tuple[type, ...]] | None = None
) -> PatchReport:
    """Patch a live `model`, or `classes`: (modeling module, samples), with the parts whose option is true and, if given,
    the option `activations`: what backward keeps (see `liger_hw.activations`).

    Returns the report; on an error everything done so far is undone. Raises `ValueError` for both losses at once, and
    for a second patch that asks for the other loss.
    """
    activations = options.pop("activations", None)
    check_flags(name, **options)
    if options.get("cross_entropy") and options.get("fused_linear_cross_entropy"):
        raise ValueError(
            f"{name}: cross_entropy and fused_linear_cross_entropy exclude each other; "
            "pass cross_entropy=True together with fused_linear_cross_entropy=False, or leave both at their defaults"
        )
    target = "classes" if model is None else f"one {type(model).__name__}"
    report = PatchReport(name, target)
    engine = _Classes(*classes, report) if model is None else _Instance(model, report)
    try:
        engine.patch(options)
        if activations is not None:
            put_on(report, activations, model, () if classes is None else classes[1])
    except BaseException:
        report.revert()
        raise
    log.info("liger_hw: patched %s", report.summary())
    return report


class _Engine:
    """One call of `apply`: what classes and instances have in common."""

    def __init__(self, report: PatchReport) -> None:
        self.report = report
        self.known: dict[tuple, Match | Refused | None] = {}

    def patch(self, options: dict[str, bool]) -> None:
        wanted = {part for part, on in options.items() if on}
        if "rope" in wanted:
            self.rope()
        if wanted - {"rope", *LOSSES}:
            self.modules(options)
        for part in LOSSES:
            if part in wanted:
                self.loss(part)

    def recognise(self, module: Any, forward: Callable) -> Match | Refused | None:
        """`probing.recognise`, once for all modules that cannot differ in what they compute."""
        guards = probing.guards_of(module, forward, frozenset())
        shapes = tuple((n, None if p is None else tuple(p.shape)) for n, p in module._parameters.items())
        key = (type(module), forward, shapes, tuple(module._modules), str(guards))
        if key not in self.known:
            self.known[key] = probing.recognise(module, forward)
        return self.known[key]

    def leave(self, part: str, where: str, kernel: str, state: str) -> None:
        self.report.rows.append(PatchRow(part, where, kernel, state))

    def change(self, part: str, where: str, kernel: str, patch: Patch, variant: str = "") -> None:
        self.report.change(PatchRow(part, where, kernel, PATCHED, variant), patch)


def keyword_of(kernel: str, options: dict[str, bool]) -> str | None:
    """The part that a kernel belongs to among those on offer, or None when there is none or it is not wanted."""
    part = _KEYWORD.get(kernel, kernel)
    if part not in options and part in _MLPS:
        part = next((name for name in _MLPS if name in options), part)
    return part if options.get(part) else None


# -- one live model --------------------------------------------------------------------------------------------------


class _Instance(_Engine):
    def __init__(self, model: Any, report: PatchReport) -> None:
        super().__init__(report)
        self.model = model
        self.made: dict[tuple, Callable] = {}

    def patch(self, options: dict[str, bool]) -> None:
        super().patch(options)
        if self.report.patches:
            note = PickleNote(self.model)
            note.apply()
            self.report.patches.insert(0, note)  # taken off last

    def modules(self, options: dict[str, bool]) -> None:
        for module in self.model.modules():
            for slot in (_slot(module), "_apply_gate"):
                self._module(module, slot, options)

    def _module(self, module: Any, slot: str, options: dict[str, bool]) -> None:
        current = getattr(module, slot, None)
        if current is None:
            return
        where = f"{type(module).__name__}.{slot.removeprefix('_old_')}"
        mark = getattr(current, MARK, None)
        if mark is not None:
            if options.get(mark[0]) and mark[0] not in ("rope", *LOSSES):
                self.leave(mark[0], where, mark[1], ALREADY)
            return
        found = self.recognise(module, type(module).forward)
        part = found and keyword_of(found.kernel, options)
        if not part or (slot == "_apply_gate") != (isinstance(found, Match) and found.slot == "_apply_gate"):
            return
        if isinstance(found, Match) and getattr(current, "__self__", None) is not module:
            found = Refused("its forward was replaced by something else", found.kernel)
        if isinstance(found, Match) and current.__func__ is not getattr(type(module), found.slot):
            found = Refused("its forward was replaced by something else", found.kernel)
        if isinstance(found, Refused):
            self.leave(part, where, found.kernel, f"left alone: {found.reason}")
            return
        key = (id(found), current.__func__)
        if key not in self.made:
            self.made[key] = _marked(
                parts.assembled(found.core, current.__func__), part, found.kernel, current.__func__
            )
            self.made[key].__name__ = found.slot  # pickle looks a bound method up by it; transformers' gate has another
        bound = types.MethodType(self.made[key], module)
        self.change(part, where, found.kernel, Patch(module, slot, bound), found.variant)

    def loss(self, part: str) -> None:
        found = False
        for module in self.model.modules():
            if not _is_causal_lm(type(module)):
                continue
            found = True
            slot = _slot(module)
            current = getattr(module, slot)
            where = f"{type(module).__name__}.forward"
            state = _loss_state(part, getattr(current, MARK, None), where)
            head = head_path(module)
            if not state and not head:
                state = "left alone: it has no output head of its own"
            if state:
                self.leave(part, where, part, state)
                continue
            original = getattr(current, "__func__", current)
            forward = causal_lm_forward(original, head, part == LOSSES[1])
            bound = types.MethodType(_marked(forward, part, part, original), module)
            self.change(part, where, part, Patch(module, slot, bound))
        if not found:
            self.leave(part, "-", part, f"left alone: this {type(self.model).__name__} has no causal LM in it")

    def rope(self) -> None:
        modules = list(self.model.modules())
        results: dict[Callable, Match | Refused] = {}
        copies: dict[tuple, Callable | str] = {}
        for module in modules:
            slot = _slot(module)
            forward = probing.current_forward(module, slot)
            where = f"{type(module).__name__}.forward"
            if getattr(forward, MARK, ("",))[0] == "rope":
                self.leave("rope", where, "rope", ALREADY)
                continue
            for name, function in rotary.functions_called(forward).items():
                if hasattr(function, MARK):
                    self.leave("rope", f"{_short(function)}.{name}", "rope", ALREADY)
                    continue
                if function not in results:
                    results[function] = rotary.recognise(function, rotary.halves_are_shared(modules, function))
                found = results[function]
                if isinstance(found, Refused):
                    self.leave("rope", f"{_short(function)}.{name}", "rope", f"left alone: {found.reason}")
                    continue
                key = (forward, name)
                if key not in copies:
                    copies[key] = self._copy_calling(forward, name, function, found)
                if isinstance(copies[key], str):
                    self.leave("rope", where, "rope", copies[key])
                    continue
                bound = types.MethodType(copies[key], module)
                self.change("rope", where, found.kernel, Patch(module, slot, bound), found.variant)
                forward = copies[key]  # a second rotary function of the same forward

    def _copy_calling(self, forward: Callable, name: str, function: Callable, found: Match) -> Callable | str:
        """A copy of an attention's forward that calls the kernel where it calls `name`, or why there is none."""
        scope = _scope_of(forward, name)
        private = private_name(name, found.variant)
        if private not in scope:  # harmless, shared by every patched instance, so never taken away
            scope[private] = _marked(found.core(function), "rope", found.kernel, function)
        try:
            copied = rebind(forward, name, private)
        except CannotRebind as error:
            return f"left alone: {error}; patch the classes instead (model=None)"
        setattr(copied, MARK, ("rope", found.kernel))
        return copied


def _scope_of(forward: Callable, name: str) -> dict[str, Any]:
    while name not in getattr(forward, "__globals__", {}) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward.__globals__


def _slot(owner: Any) -> str:
    """Attribute that holds a module's own forward; accelerate's hooks move it aside."""
    return "_old_forward" if hasattr(owner, "_hf_hook") and "_old_forward" in vars(owner) else "forward"


def _short(function: Callable) -> str:
    return function.__module__.rpartition(".")[2]


# -- classes ---------------------------------------------------------------------------------------------------------


class _Classes(_Engine):
    """modeling: the family's module, whose own classes alone are changed; samples: unloaded models of it."""

    def __init__(self, modeling: Any, samples: tuple[Any, ...], report: PatchReport) -> None:
        super().__init__(report)
        self.modeling, self.samples = modeling, samples

    def _by_class(self) -> Iterator[tuple[type, list[Any]]]:
        groups: dict[type, list[Any]] = {}
        for model in self.samples:
            for module in model.modules():
                groups.setdefault(type(module), []).append(module)
        yield from groups.items()

    def modules(self, options: dict[str, bool]) -> None:
        shared: dict[tuple[str, type], Match] = {}
        for cls, modules in self._by_class():
            mark = next(
                (m for s in ("forward", "_apply_gate") if (m := getattr(getattr(cls, s, None), MARK, None))), None
            )
            if mark is not None and mark[0] not in LOSSES:
                if options.get(mark[0]):
                    self.leave(mark[0], f"{cls.__name__}.forward", mark[1], ALREADY)
                continue
            forward = cls.forward
            found = [(module, self.recognise(module, forward)) for module in modules]
            kernel = next((f.kernel for _, f in found if f), None)
            part = keyword_of(kernel, options) if kernel else None
            if not part:
                continue
            if cls.__module__ == self.modeling.__name__:
                self._class(cls, part, found)
            elif match := next((f for _, f in found if isinstance(f, Match)), None):
                shared[part, cls] = match
            else:
                reason = next(f.reason for _, f in found if isinstance(f, Refused))
                self.leave(part, f"{cls.__name__}.forward", kernel, f"left alone: {reason}")
        if shared:
            self._new_models(options, shared)

    def _new_models(self, options: dict[str, bool], shared: dict[tuple[str, type], Match]) -> None:
        """Parts that the family takes from elsewhere (torch's LayerNorm, a CLIP tower, a Llama) belong to others too, so
        their classes stay; the family's models made from now on have them patched, each as it is finished."""
        rest = {part: on for part, on in options.items() if part not in LOSSES}
        patch = NewModels({type(model) for model in self.samples}, lambda model: _patch_new(model, rest))
        patch.apply()
        self.report.patches.append(patch)
        for (part, cls), match in shared.items():
            row = PatchRow(part, f"{cls.__name__}.forward of new models", match.kernel, PATCHED, match.variant)
            self.report.rows.append(row)

    def _class(self, cls: type, part: str, found: list[tuple[Any, Match | Refused | None]]) -> None:
        """One forward for all of a class's instances: each match under what its sample had that decides it."""
        matches: list[tuple[probing.Guards, Match]] = []
        slot = next((f.slot for _, f in found if isinstance(f, Match)), "forward")
        where, original = f"{cls.__name__}.{slot}", getattr(cls, slot)
        unknown = probing.EVERYTHING in probing.reads(cls, original)
        for module, result in found:
            if isinstance(result, Match) and not unknown:
                guards = probing.guards_of(module, original, result.used)
                if not any(g == guards and m is result for g, m in matches):
                    matches.append((guards, result))
        matches = [pair for pair in matches if not any(_contradicts(*pair, *sample) for sample in found)]
        refused = next((f for _, f in found if isinstance(f, Refused)), None)
        if not matches:
            reason = "it hands itself on" if unknown else "its instances differ in ways that cannot be told apart"
            reason = refused.reason if refused else f"{reason}; patch a live model"
            self.leave(part, where, refused.kernel if refused else part, f"left alone: {reason}")
            return
        forward = original
        for guards, match in matches:
            applies = (lambda module, g=guards: probing.holds(module, g)) if guards else None
            forward = parts.assembled(match.core, forward, applies)
        words, match = sorted({m.variant for _, m in matches}), matches[0][1]
        _marked(forward, part, match.kernel, original)
        self.change(part, where, match.kernel, Patch(cls, slot, forward), " or ".join(filter(None, words)))

    def loss(self, part: str) -> None:
        found = False
        for model in self.samples:
            cls = type(model)
            if not _is_causal_lm(cls):
                continue
            found = True
            where, current, head = f"{cls.__name__}.forward", cls.forward, head_path(model)
            state = _loss_state(part, getattr(current, MARK, None), where)
            if not state and not head:
                state = "left alone: it has no output head of its own"
            if state:
                self.leave(part, where, part, state)
                continue
            forward = _marked(causal_lm_forward(current, head, part == LOSSES[1]), part, part, current)
            self.change(part, where, part, Patch(cls, "forward", forward))
        if not found:
            self.leave(part, "-", part, f"left alone: {self.modeling.__name__} has no causal LM")

    def rope(self) -> None:
        modules = [module for model in self.samples for module in model.modules()]
        done: set[str] = set()
        for cls, _ in self._by_class():
            if cls.__module__ != self.modeling.__name__:
                continue
            for name, function in rotary.functions_called(cls.forward).items():
                where = f"{self.modeling.__name__.rpartition('.')[2]}.{name}"
                if name in done or getattr(self.modeling, name, None) is not function:
                    continue
                done.add(name)
                if hasattr(function, MARK):
                    self.leave("rope", where, "rope", ALREADY)
                    continue
                found = rotary.recognise(function, rotary.halves_are_shared(modules, function))
                if isinstance(found, Refused):
                    self.leave("rope", where, "rope", f"left alone: {found.reason}")
                    continue
                replacement = _marked(found.core(function), "rope", found.kernel, function)
                self.change("rope", where, found.kernel, Patch(self.modeling, name, replacement), found.variant)
        if not done:
            where = self.modeling.__name__.rpartition(".")[2]
            self.leave("rope", where, "rope", "left alone: no attention of its own calls a rotary function")


def _patch_new(model: Any, options: dict[str, bool]) -> None:
    _Instance(model, PatchReport(type(model).__name__, "a new model")).patch(options)


def _contradicts(guards: probing.Guards, match: Match, module: Any, result: Match | Refused | None) -> bool:
    """Whether `module`, of which `result` is known, would take `match` by its guards and must not."""
    same = isinstance(result, Match) and (result.kernel, result.variant) == (match.kernel, match.variant)
    return not same and probing.holds(module, guards)


# -- marks -----------------------------------------------------------------------------------------------------------


def _marked(function: Callable, part: str, kernel: str, original: Callable) -> Callable:
    function.__name__ = getattr(original, "__name__", function.__name__)
    function.__qualname__ = getattr(original, "__qualname__", function.__name__)
    function.__module__ = getattr(original, "__module__", function.__module__)
    function.__doc__ = original.__doc__
    setattr(function, MARK, (part, kernel))
    return function


def _loss_state(part: str, mark: tuple[str, str] | None, where: str) -> str:
    """What the mark of a present forward means for a loss: "" (none), ALREADY, or a ValueError."""
    if mark is None:
        return ""
    if mark[0] != part:
        raise ValueError(f"{where} is already patched for {mark[0]}; revert() that patch before asking for {part}")
    return ALREADY


def _is_causal_lm(cls: type) -> bool:
    """Whether models of a class answer with the logits of the next token, and take labels."""
    from transformers import PreTrainedModel

    if not issubclass(cls, PreTrainedModel) or "labels" not in inspect.signature(cls.forward).parameters:
        return False
    return any(_CAUSAL.search(base.__name__) for base in cls.__mro__)


_CAUSAL = re.compile("ForCausalLM|LMHead|ForConditionalGeneration|GenerationDecoder")
